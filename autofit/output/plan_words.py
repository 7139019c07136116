"""A plan and an outcome in words; the console, the tables and the report all say them the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from autofit.contract.facts import Facts
from autofit.contract.outcome import Crashed, Diverged, Measured, Outcome, OutOfMemory, TimedOut, Unsupported
from autofit.contract.plan import Value
from autofit.output.text import percent
from autofit.registry import techniques
from autofit.system.units import duration, size

SPLIT = ("micro_batch", "accumulation")
"""The two knobs that make up the global batch; every other one is a technique on top of them."""
SPLIT_WORDS = "micro-batch x accumulation x processes = global batch"


def outcome_words(outcome: Outcome) -> str:
    """What became of a trial, in words; for one that was measured, its peak."""
    match outcome:
        case Measured():
            return f"{size(outcome.peak_bytes)} ({percent(outcome.peak_bytes / outcome.limit_bytes)})"
        case OutOfMemory():
            wanted = f", {size(outcome.requested_bytes)} more wanted" if outcome.requested_bytes else ""
            held = f"{size(outcome.peak_bytes)} held of {size(outcome.limit_bytes)}"
            return f"out of memory on the {outcome.where} in {outcome.phase}: {held}{wanted}"
        case TimedOut():
            return f"timed out in {outcome.phase}, after {duration(outcome.limit_seconds)}"
        case Diverged():
            return f"diverged: the loss was {outcome.loss} at step {outcome.step}"
        case Unsupported():
            return f"unsupported: {outcome.reason}"
        case Crashed():
            return f"crashed: {outcome.reason}"
        case _:  # pragma: no cover - mypy holds it
            assert_never(outcome)


def baseline_values(facts: Facts) -> dict[str, Value]:
    """What each technique does when it is off; the split of the batch is left out."""
    return {one.name: one.baseline_for(facts) for one in techniques() if one.name not in SPLIT}


def is_baseline(plan: Mapping[str, Value], baseline: Mapping[str, Value]) -> bool:
    """Whether nothing but the split of the batch was chosen."""
    return all(baseline.get(name) == value for name, value in plan.items() if name not in SPLIT)


def chosen_words(plan: Mapping[str, Value]) -> str:
    """The values that are not the baseline, but the batch split, each in the technique's own words: ``bf16 sgd``."""
    known = {one.name: one for one in techniques()}
    chosen = ((name, value) for name, value in plan.items() if name not in SPLIT)
    words = (known[name].word(value) if name in known else f"{name}={value}" for name, value in chosen)
    return " ".join(word for word in words if word is not None)


def plan_words(plan: Mapping[str, Value]) -> str:
    """A plan in few words: the batch split, then the values that are not the baseline.

    >>> plan_words({"micro_batch": 4, "accumulation": 8, "precision": "bf16", "checkpointing": "off"})
    '4 x 8 bf16'
    """
    split = " x ".join(str(plan[name]) for name in SPLIT if name in plan)
    return f"{split} {chosen_words(plan)}".strip()
