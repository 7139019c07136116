"""The plans of an answer beside one another: the fastest first, and the winner beside a search over the batch size."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autofit.contract.outcome import (
    Measured,
    Trial,
)
from autofit.contract.plan import Plan
from autofit.output.document import Document
from autofit.output.plan_words import baseline_values, is_baseline, plan_words
from autofit.output.text import number, plural
from autofit.output.wording import KINDS, scattered
from autofit.registry import techniques
from autofit.search.decision import pool
from autofit.system.units import size


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One plan that ran inside the ceiling, all of its runs together.

    Attributes:
        samples_per_second: The promise's for the winner; else that of all its runs together, as the winner was chosen.
        peak_bytes: The promise's for the winner; else the most of its runs.
        runs: How many times it was measured.
        noise: The spread of its steps' seconds, as a share of them.
        doubt: That its runs differ too much for a comparison, in words; empty where they don't.
    """

    plan: Plan
    samples_per_second: float
    peak_bytes: int
    runs: int
    is_winner: bool
    is_baseline: bool
    noise: float = 0.0
    doubt: str = ""

    @property
    def doubted(self) -> str:
        """Its doubt, to stand behind a comparison with it."""
        return f" ({self.doubt})" if self.doubt else ""


def standings(document: Document) -> list[Standing]:
    """The plans that were measured: the winner, then the fastest first."""
    runs: dict[Plan, list[Measured]] = {document.plan: []}
    for trial in document.trials:
        if isinstance(trial.outcome, Measured):
            runs.setdefault(trial.plan, []).append(trial.outcome)
    baseline = baseline_values(document.facts)
    found = []
    for plan, seen in runs.items():
        wins = plan == document.plan
        shown = document.promise if wins else pool(seen)
        found.append(
            Standing(
                plan=plan,
                samples_per_second=shown.samples_per_second,
                peak_bytes=shown.peak_bytes,
                runs=len(seen),
                is_winner=wins,
                is_baseline=is_baseline(plan, baseline),
                noise=shown.step_seconds_spread / shown.step_seconds,
                doubt=scattered(shown, seen, "that plan") if seen else "",
            )
        )
    return sorted(found, key=lambda one: (not one.is_winner, -one.samples_per_second, one.peak_bytes))


def failures(document: Document) -> list[Trial]:
    """The trials that were not measured, the least expected kinds first."""
    order = list(KINDS)
    failed = [trial for trial in document.trials if not isinstance(trial.outcome, Measured)]
    return sorted(failed, key=lambda trial: (order.index(trial.outcome.kind), trial.number))


def against_baseline(document: Document) -> tuple[float | None, list[str]]:
    """How the winner compares with the plans of a search over the batch size alone.

    Returns:
        The winner's speed as a multiple of the fastest measured baseline plan's (``None`` where there is no other
        than the winner), and what is to be said, a sentence each.
    """
    if document.estimated is not None:
        return None, ["Nothing was measured: there is no plan to compare with."]
    ranked = standings(document)
    winner, alike = ranked[0], [one for one in ranked if one.is_baseline]
    values = " ".join(f"{name}={value}" for name, value in baseline_values(document.facts).items())
    meaning = f"A baseline plan is what a search over the batch size alone can find: {values}."
    if winner.is_baseline:
        return None, [
            "The winner is a baseline plan itself: nothing but the split of the batch was worth changing.",
            meaning,
        ]
    if not alike:
        failed = sum(is_baseline(trial.plan, baseline_values(document.facts)) for trial in document.trials)
        if failed:
            return None, [f"{plural(failed, 'baseline trial')}, and none was measured inside the ceiling.", meaning]
        return None, ["No baseline plan was tried, so there is none to compare with."]

    def beside(other: Standing) -> str:
        return (
            f"({plan_words(other.plan)}) makes {number(other.samples_per_second)} samples/s with a peak memory of "
            f"{size(other.peak_bytes)}; the winner makes {times(winner, other)} that with {size(winner.peak_bytes)}"
            f"{other.doubted}"
        )

    fastest, largest = alike[0], max(alike, key=lambda one: int(one.plan["micro_batch"]))
    said = [f"The fastest baseline plan {beside(fastest)}."]
    if largest.plan != fastest.plan:
        said.append(f"The baseline plan with the largest micro-batch that fits {beside(largest)}.")
    return winner.samples_per_second / fastest.samples_per_second, [*said, meaning]


def against_script(document: Document) -> tuple[float | None, str | None]:
    """How the winner compares with what the user's script does by itself.

    Returns:
        The winner's speed as a multiple of the script's own, and a sentence; ``None`` where that is the winner, was not
        measured, or no script was tuned.
    """
    if document.workload.script is None or document.estimated is not None:
        return None, None
    ranked = standings(document)
    found = _scripts_own(document, ranked)
    if found is None:
        return None, None
    if found.is_winner:
        return None, "The winner is what the script does by itself."
    said = (
        f"What the script does by itself ({plan_words(found.plan)}) makes {number(found.samples_per_second)} samples/s"
    )
    said += f" with a peak memory of {size(found.peak_bytes)}; the winner makes {times(ranked[0], found)} that"
    return ranked[0].samples_per_second / found.samples_per_second, f"{said}{found.doubted}."


def compared(document: Document) -> tuple[Standing | None, str]:
    """What the winner is compared with first, and in words how many times as fast it is; empty where nothing else is.

    That is what a script does by itself, or else the fastest baseline plan.
    """
    if document.estimated is not None:
        return None, ""
    ranked = standings(document)
    own = None if document.workload.script is None else _scripts_own(document, ranked)
    baseline = next((one for one in ranked if one.is_baseline), None)
    for other, what in ((own, "what the script does by itself"), (baseline, "the fastest baseline plan")):
        if other is not None and not other.is_winner:
            ratio = ranked[0].samples_per_second / other.samples_per_second
            close = abs(ratio - 1) <= math.hypot(ranked[0].noise, other.noise) and not other.doubt
            return other, f"{times(ranked[0], other)} {what}{' (within the noise)' if close else other.doubted}"
    return None, ""


def _scripts_own(document: Document, ranked: list[Standing]) -> Standing | None:
    """The plan that is what the user's script does by itself, where it was measured."""
    own = {one.name: one.own(document.facts) for one in techniques()}
    return next((one for one in ranked if all(own.get(name) == value for name, value in one.plan.items())), None)


def times(one: Standing, other: Standing) -> str:
    """``3.10 times``: the speed of one as a multiple of the other's."""
    return f"{one.samples_per_second / other.samples_per_second:.2f} times"
