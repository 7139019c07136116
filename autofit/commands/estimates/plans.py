"""The plans of an estimate: the largest micro-batch of each kind that fits, ranked by predicted speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from autofit import space
from autofit.contract.facts import Facts
from autofit.contract.plan import Plan
from autofit.costmodel.families import families_of, fused_share
from autofit.costmodel.forecast import (
    MARGIN,
    Forecast,
    context_bytes,
    untraced_bytes,
    workspace_bytes,
    workspaces,
)
from autofit.costmodel.memory import allocator, pools
from autofit.costmodel.memory.parts import MicroPart, OptimizerPart
from autofit.costmodel.memory.peak import Need
from autofit.costmodel.memory.requests import requests
from autofit.costmodel.seconds.collectives import nccl_bytes
from autofit.costmodel.seconds.roofline import SLOW_HOST_SECONDS_PER_OPERATOR
from autofit.costmodel.tracing.timeline import Floats
from autofit.costmodel.tracing.trace_store import Traces, evaluated_rows
from autofit.output.exports.carried import needs_yaml
from autofit.registry import changes, loaded_rows, recipe_of, techniques
from autofit.search.decision import changed_values
from autofit.system import units
from autofit.system.parallel import on_every_core
from autofit.system.units import MIB

Verdict = Literal["fits", "tight", "too large"]
MOST_KINDS = 12
_MANY_KINDS = 50
AS_FAST = 0.03
"""Plans whose predicted speeds are no further apart count as equally fast: the simplest of them is recommended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """One plan, predicted.

    Attributes:
        need: Of its tensors, by category.
        device_bytes: The smallest card on which it runs: allocator, workspaces and context included.
        outside_bytes: Of these, what lies outside the allocator.
        verdict: ``fits`` with the margin, ``tight`` without it, or ``too large``.
        samples_per_second: By the laws of :mod:`autofit.costmodel.seconds.step_time`, or by roofline where they lack a
            figure of the card; ``None`` on a card that is not in the catalogue.
        slow_host: How many times as long a step takes beside a host of :data:`SLOW_HOST_SECONDS_PER_OPERATOR`; 1 where
            the device sets the pace there, too.
        changes: What the plan changes in the training.
        evaluated_rows: That a Trainer evaluates at once, where that is more than usual; else 0.
        training_args: Fields of ``TrainingArguments`` that carry it.
        by_yaml: Its values that only Accelerate's YAML carries, such as ``parallel=fsdp``.
        script: What no argument can carry, and a script must do, a sentence each.
    """

    plan: Plan
    need: Need
    device_bytes: int
    outside_bytes: int
    verdict: Verdict
    samples_per_second: float | None
    slow_host: float
    changes: tuple[str, ...]
    evaluated_rows: int = 0
    training_args: Mapping[str, Any]
    by_yaml: tuple[str, ...]
    script: tuple[str, ...]


def estimated_plans(  # noqa: PLR0917 - of the story above
    plans: space.Space,
    cast: Forecast,
    traces: Traces,
    facts: Facts,
    most: int | None,
    say: Callable[[str], None],
) -> tuple[list[Estimated], int, Plan | None]:
    """For each family the plan with the largest micro-batch that fits, or the smallest plan.

    The first look is at the tensors alone; for ``most`` of the families the allocator is then replayed.

    Returns:
        Them, of how many families, and which is recommended.
    """
    limit = facts.workload.limit_bytes
    need = cast.predicted_bytes * (1 + MARGIN)
    # on a card that is not known the order of speed is all that can be had
    pace_of = cast.seconds if cast.known_card else cast.work @ cast.nominal
    candidates = []
    for members in families_of(plans).values():
        traced = sorted(
            (place for place in members if not np.isnan(need[place])),
            key=lambda place: -int(plans.plans[place]["micro_batch"]),
        )
        fitting = [place for place in traced if need[place] <= limit]
        if traced:
            candidates.append((not fitting, fitting or [min(traced, key=lambda place: float(need[place]))]))

    def rank(candidate: tuple[bool, list[int]]) -> tuple[float, ...]:
        beyond, places = candidate
        first = places[0]
        pace = float(need[first]) if beyond else float(pace_of[first])
        return (
            beyond,
            np.inf if np.isnan(pace) else pace,
            -int(plans.plans[first]["micro_batch"]),
            float(need[first]),
        )

    ranked = [places for _, places in sorted(candidates, key=rank)]
    chosen = ranked if most is None else _apart(ranked, plans, need, pace_of)[:most]
    if len(chosen) > _MANY_KINDS:
        say(f"replaying {len(chosen)} kinds of plan through the allocator")

    def judge(places: list[int]) -> tuple[Estimated, float]:
        for place in places[:-1]:  # from the largest micro-batch down, until it fits
            one = estimated_plan(place, plans, cast, traces, facts, at_most=fitting_bytes(facts))
            if one is not None:
                return one, float(pace_of[place])
        one = estimated_plan(places[-1], plans, cast, traces, facts)
        assert one is not None
        return one, float(pace_of[places[-1]])

    found = on_every_core(judge, chosen)
    order = {"fits": 0, "tight": 1, "too large": 2}
    # a smaller micro-batch than the first look hoped for may be a slower one
    found.sort(key=lambda one: (order[one[0].verdict], one[1] if one[0].verdict == "fits" else 0.0))
    fast = [(one.plan, pace) for one, pace in found if one.verdict == "fits"]
    alike = [plan for plan, pace in fast if not pace > fast[0][1] * (1 + AS_FAST)]
    return [one for one, _ in found], len(candidates), min(alike, key=changed_values, default=None)


def _apart(ranked: list[list[int]], plans: space.Space, need: Floats, pace_of: Floats) -> list[list[int]]:
    """Of the kinds that need and give the same, by three digits, the simplest, in the place of the first."""
    alike: dict[tuple[str, str], list[int]] = {}
    for places in ranked:
        key = f"{need[places[0]]:.3g}", f"{pace_of[places[0]]:.3g}"
        if key not in alike or changed_values(plans.plans[places[0]]) < changed_values(plans.plans[alike[key][0]]):
            alike[key] = places  # a key keeps its place
    return list(alike.values())


def fitting_bytes(facts: Facts) -> int:
    """The most that a plan may need which fits with the margin."""
    return int(facts.workload.limit_bytes / (1 + MARGIN))


def estimated_plan(
    place: int, plans: space.Space, cast: Forecast, traces: Traces, facts: Facts, *, at_most: int | None = None
) -> Estimated | None:
    """One plan of a space, its allocations replayed through the allocator; ``None`` where it needs too much.

    Args:
        place: Its index in the space.
        plans: The space.
        cast: The forecast of the space.
        traces: Hold the traces of its parts.
        facts: Model, card and sizes.
        at_most: Bytes of the largest card that is of use; any by default.
    """
    plan, seconds = plans.plans[place], float(cast.seconds[place])
    roomy = 0 if cast.evaluable_rows is None else int(cast.evaluable_rows[place])
    emission = recipe_of(plan, facts.evaluating(roomy)).emission
    found = traces.need(plan)
    parts = traces.parts(plan)
    assert found is not None
    assert parts is not None
    # on a CPU it is what processes were seen to hold for such tensors
    on_cpu, untraced = facts.hardware.device == "cpu", untraced_bytes(plan, facts)
    outside = 0 if on_cpu else context_bytes(facts.hardware.capability) + nccl_bytes(plan, facts.workload)
    if on_cpu:
        device = round(float(cast.device_bytes[place]))
    else:
        alike = traces.alike(plan, facts)
        if alike not in traces.capacities:
            inside = None if at_most is None else at_most - untraced - outside
            capacity = _smallest_capacity(found, parts, plan, facts, inside)
            if capacity is None:
                return None
            traces.capacities[alike] = capacity
        device = traces.capacities[alike] + untraced + outside
    if at_most is not None and device > at_most:
        return None
    limit = facts.workload.limit_bytes
    verdict: Verdict = "fits" if device <= fitting_bytes(facts) else "tight" if device <= limit else "too large"
    return Estimated(
        plan=plan,
        need=_with_temporaries(found, untraced) if untraced else found,
        device_bytes=device,
        outside_bytes=outside,
        verdict=verdict,
        samples_per_second=None if np.isnan(seconds) else 1 / seconds,
        slow_host=_slow_host(place, plan, cast, facts),
        changes=tuple(changes(plan, facts)),
        evaluated_rows=roomy,
        training_args=dict(emission.training_args),
        by_yaml=tuple(
            f"{one.name}={plan[one.name]}" for one in techniques() if needs_yaml(one.emit(plan[one.name], plan, facts))
        ),
        script=emission.script,
    )


def _slow_host(place: int, plan: Plan, cast: Forecast, facts: Facts) -> float:
    """See :class:`Estimated`. A plan of which a trace does not hold what is run has no such figure."""
    if facts.hardware.device == "cpu" or facts.rates or fused_share(plan, facts) or not cast.seconds[place] > 0:
        return 1.0
    return max(1.0, cast.host_share(place, SLOW_HOST_SECONDS_PER_OPERATOR))


def _with_temporaries(need: Need, more: int) -> Need:
    held = need.by_category.get("temporaries", 0) + more
    return replace(need, peak_bytes=need.peak_bytes + more, by_category={**need.by_category, "temporaries": held})


def replayed_bytes(one: Estimated, facts: Facts) -> int:
    """What the replay of a plan's allocations gave: bytes of the smallest allocator that it runs in."""
    return one.device_bytes - one.outside_bytes - untraced_bytes(one.plan, facts)


def _smallest_capacity(
    found: Need, parts: tuple[MicroPart, OptimizerPart], plan: Plan, facts: Facts, at_most: int | None
) -> int | None:
    """What the allocator needs for a plan, its allocations replayed; ``None`` where that is more than ``at_most``."""
    rows, accumulation = loaded_rows(plan, facts), int(plan["accumulation"])
    asked = requests(
        *parts,
        rows=rows,
        accumulation=accumulation,
        evaluated_rows=evaluated_rows(plan, facts),
        workspaces=workspaces(facts.hardware.capability),
    )
    resolution = max(2 * MIB, found.peak_bytes // 400)
    if asked.sizes.sum(dtype=np.float64) > pools.MOST_BYTES:  # no card of this world
        return found.peak_bytes + workspace_bytes(facts.hardware.capability)
    return allocator.smallest_capacity(*asked, resolution_bytes=resolution, at_most_bytes=at_most)


def cause(one: Estimated, *, of_script: bool = False) -> str:
    """What makes the peak, in words, and what would help where that is known; a script's loss is its own."""
    need = one.need
    logits = need.by_category.get("logits", 0)
    where = {"load": "while loading", "forward": "in the forward pass", "backward": "in the backward pass"}
    if need.segment == "evaluation":  # a script's own is not traced
        where[need.phase] = "while it generates" if of_script else "in an evaluation"
    words = f"{where.get(need.phase, 'in the optimizer step')}, at {need.operator}"
    if need.segment in {"head", "loss", "headB"} and logits > 0.05 * need.peak_bytes:
        said = f"{words}: logits and loss take {units.size(logits)}"
        saves = [(one.name, *one.saves["logits"]) for one in techniques() if "logits" in one.saves]
        return (
            f"{said}, most of which "
            + " or ".join(f"{what} ({name}={value}) would save" for name, value, what in saves)
            if saves and not of_script
            else said
        )
    largest = max(need.by_category, key=lambda name: need.by_category[name])
    return f"{words}; the largest part is {largest} ({units.size(need.by_category[largest])})"


def why_recommended(fastest: bool) -> str:
    """Why a plan of an estimate is recommended."""
    return "the fastest that fits" if fastest else f"simpler than the fastest, and within {100 * AS_FAST:.0f} % of it"
