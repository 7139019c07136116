"""What the trials say beyond the winner: what other ceilings would give, and what each of its values is good for.

Pure: trials in, findings out. What was not measured is taken from the search's own belief, and said to be; nothing is
said where that leaves a doubt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autofit.contract.facts import Facts
from autofit.contract.layout import data_parallel
from autofit.contract.outcome import Measured, OutOfMemory, Trial
from autofit.contract.plan import Plan
from autofit.registry import techniques
from autofit.search.decision import SAME_MEMORY, Contender, Decision
from autofit.space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A measured plan that no other one beats in both speed and memory."""

    plan: Plan
    samples_per_second: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What one value of the winner is good for, against the same plan with the technique's baseline value.

    Attributes:
        evidence: ``measured``: both were; ``estimated``: the other is what the search believes; ``out_of_memory``: the
            other breaks the ceiling; ``none``: nothing is known of it for sure.
        speed_ratio: The winner's speed as a multiple of the other's; ``None`` where an estimate leaves its sign in
            doubt, and where others disturbed the other whenever it was measured.
        spread: Relative standard deviation of an estimated ratio.
        saved_bytes: By how much the other's peak is higher, negative where it is lower; ``None`` in the same way.
    """

    technique: str
    value: int | str
    plain: int | str
    evidence: Literal["measured", "estimated", "out_of_memory", "none"]
    speed_ratio: float | None = None
    spread: float | None = None
    saved_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the search believes of a plan that was not measured.

    Attributes:
        sample_seconds: Seconds of a sample.
        spread: Relative standard deviation of it.
        peak_bytes: On the device.
        peak_spread: Relative standard deviation of it.
    """

    sample_seconds: float
    spread: float
    peak_bytes: float
    peak_spread: float


_SURE = 2.0
"""Standard deviations of an estimate's logarithm that put its sign beyond doubt."""


def front(decision: Decision) -> tuple[Point, ...]:
    """The measured plans that are not beaten in both speed and memory, the smallest first.

    The winner ends the front: a plan that is faster within the noise, but larger, is no better.
    """
    winner = Contender(plan=decision.plan, measured=decision.measured)
    most = winner.measured.peak_bytes / SAME_MEMORY
    smaller = [one for one in decision.runners_up if one.measured.peak_bytes < most]
    found: list[Contender] = []
    for one in [*sorted(smaller, key=lambda one: one.measured.peak_bytes), winner]:
        if not found or one is winner or one.measured.step_seconds < found[-1].measured.step_seconds:
            found.append(one)
    return tuple(
        Point(plan=one.plan, samples_per_second=one.measured.samples_per_second, peak_bytes=one.measured.peak_bytes)
        for one in found
        if one is found[-1] or one.measured.step_seconds > winner.measured.step_seconds
    )


def contributions(
    decision: Decision,
    trials: Sequence[Trial],
    space: Space,
    facts: Facts,
    believe: Callable[[Plan], Expected | None] = lambda _: None,
) -> tuple[Contribution, ...]:
    """What is lost when one value of the winner alone is put back to the baseline, for each that is not the baseline.

    Args:
        decision: The winner, and all that was measured.
        trials: All trials, those that broke the ceiling included.
        space: The plans that may be had.
        facts: The global batch.
        believe: What the search expects of a plan.
    """
    measured = {one.plan: one.measured for one in decision.runners_up}
    broke = {trial.plan for trial in trials if isinstance(trial.outcome, OutOfMemory)}
    known = set(space.plans)
    mine = decision.measured
    found = []
    for one in techniques():
        plain = one.baseline_for(facts)
        value = decision.plan.get(one.name, plain)
        if value == plain or one.name == "accumulation":
            continue
        without = put_back(decision.plan, one.name, plain, facts)
        about = Contribution(technique=one.name, value=value, plain=plain, evidence="none")
        if without in measured:
            other = measured[without]
            about = replace(
                about,
                evidence="measured",
                speed_ratio=None if other.disturbed else mine.samples_per_second / other.samples_per_second,
                saved_bytes=other.peak_bytes - mine.peak_bytes,
            )
        elif without in broke:
            about = replace(about, evidence="out_of_memory")
        elif without in known and (expected := believe(without)) is not None:
            may_be_faster = one.prior(value, facts).time[0] < one.prior(plain, facts).time[0]
            about = _estimated(about, mine, expected, may_be_faster=may_be_faster)
        found.append(about)
    return tuple(found)


def _estimated(about: Contribution, mine: Measured, expected: Expected, *, may_be_faster: bool) -> Contribution:
    """What an estimate says beyond doubt.

    Args:
        about: The value.
        mine: The winner.
        expected: The plan without the value.
        may_be_faster: Whether the value is known to make steps shorter. Of one that saves memory, or does nothing for
            the speed, an estimate that says so is an error of the estimate.
    """
    ratio = mine.samples_per_second * expected.sample_seconds
    own = mine.step_seconds_spread / (1.96 * mine.step_seconds)
    sure = abs(math.log(ratio)) > _SURE * math.hypot(expected.spread, own) and (may_be_faster or ratio < 1)
    sure_peak = abs(math.log(expected.peak_bytes / mine.peak_bytes)) > _SURE * expected.peak_spread
    return replace(
        about,
        evidence="estimated" if sure or sure_peak else "none",
        speed_ratio=ratio if sure else None,
        spread=expected.spread if sure else None,
        saved_bytes=round(expected.peak_bytes - mine.peak_bytes) if sure_peak else None,
    )


def put_back(plan: Plan, name: str, baseline: int | str, facts: Facts) -> Plan:
    """The plan with one value put back; the accumulation keeps the global batch."""
    without = plan.replaced(**{name: baseline})
    if name != "micro_batch":
        return without
    share = facts.workload.global_batch // data_parallel(plan, facts.workload)
    return without.replaced(accumulation=share // int(baseline))
