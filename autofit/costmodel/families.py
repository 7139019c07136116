"""The families of a space, plans that differ in the micro-batch alone and share a trace, and what it says of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from autofit.contract.layout import PARALLEL, data_parallel
from autofit.contract.plan import Plan
from autofit.costmodel.memory import peak
from autofit.costmodel.seconds import roofline
from autofit.costmodel.seconds.collectives import Links, exposed_seconds
from autofit.costmodel.seconds.roofline import WORK
from autofit.costmodel.tracing.timeline import Bools, Floats
from autofit.costmodel.tracing.trace_store import MANY, untraceable
from autofit.registry import loaded_rows, recipe_of, technique, techniques
from autofit.system.parallel import on_every_core

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.contract.recipe import Recipe
    from autofit.contract.technique import HostOffload
    from autofit.contract.trace import Ints
    from autofit.costmodel.memory.parts import MicroPart, OptimizerPart
    from autofit.costmodel.seconds.step_time import StepClock
    from autofit.costmodel.tracing.trace_store import Traces
    from autofit.space import Space

_TRANSFER, _NETWORK = WORK.index("transfer"), WORK.index("network")
_FEW = 4
"""Families up to which one row is traced too; in larger spaces the trace of many rows stands for it."""
_MANY = 100
"""Families from which on forks of the process are worth their start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastInputs:
    """What the forecasts of all families of a space have in common.

    Attributes:
        space: The plans.
        traces: Of its families, made.
        facts: What it is for.
        clock: Of the card, where one is known.
        nominal: Seconds for each unit of :data:`~autofit.costmodel.seconds.roofline.WORK`.
        links: What the ranks talk over.
        most: Rows that an evaluation may take at most.
        evaluated: Rows of an evaluation step, by the micro-batch.
    """

    space: Space
    traces: Traces
    facts: Facts
    clock: StepClock | None
    nominal: Floats
    links: Links
    most: int
    evaluated: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyForecast:
    """What the traces say of some plans; arrays of shape ``(plans,)``, ``work`` of ``(plans, kinds)``.

    See :class:`~autofit.costmodel.forecast.Forecast`.
    """

    tensors: Floats
    seconds: Floats
    work: Floats
    approximate: Bools
    activations: Floats
    evaluable: Ints

    @classmethod
    def nothing(cls, count: int) -> FamilyForecast:
        """Of so many plans nothing is known."""
        return cls(
            tensors=np.full(count, np.nan),
            seconds=np.full(count, np.nan),
            work=np.full((count, len(WORK)), np.nan),
            approximate=np.zeros(count, dtype=bool),
            activations=np.zeros(count),
            evaluable=np.zeros(count, dtype=np.int64),
        )


Known = dict[tuple[Plan, ...], FamilyForecast | None]
"""What is said of a family's plans, by the plan that is traced for them and these; of one question and card."""


def families_to_trace(space: Space) -> dict[Plan, list[int]]:
    """The families of a space; of a small one those of a single row apart, whose trace is another one."""
    families = families_of(space)
    return families if len(families) > _FEW else families_of(space, one_row_apart=True)


def families_of(space: Space, *, one_row_apart: bool = False) -> dict[Plan, list[int]]:
    """Indices of the plans that differ in the micro-batch alone, by the plan that is traced for them."""
    families: dict[Plan, list[int]] = {}
    for place, plan in enumerate(space.plans):
        rows = min(int(plan["micro_batch"]), MANY) if one_row_apart else MANY
        families.setdefault(plan.replaced(micro_batch=rows, accumulation=1), []).append(place)
    return families


def without_checkpointing(family: Plan) -> Plan:
    """The plan without recomputation, of many rows: all that a micro-step makes is kept for its backward pass."""
    kept = {name: technique(name).baseline for name in family if technique(name).recomputes}
    return family.replaced(**kept, micro_batch=MANY)


def traceable(family: Plan, facts: Facts) -> Plan:
    """The nearest traceable plan: the baseline in the place of each value that can't be traced.

    One process splits nothing: an engine is there for what waits on the host, and goes with it.
    """
    names = untraceable(family)
    if names and facts.workload.processes == 1 and PARALLEL in family:
        names = [*names, PARALLEL]
    return family.replaced(**{name: technique(name).baseline for name in names})


def forecast_families(
    families: dict[Plan, list[int]], inputs: ForecastInputs, known: Known, *, forks: bool = False
) -> Iterator[tuple[list[int], FamilyForecast]]:
    """For each family that can be traced the indices of its plans, and what is said of them.

    Args:
        families: Indices of the plans, by the plan that is traced for them.
        inputs: What they have in common.
        known: What was said before of the same plans, and takes what is said now.
        forks: Whether many are divided among forks of this process.
    """
    plans = inputs.space.plans
    keys = {family: (family, *(plans[place] for place in members)) for family, members in families.items()}

    groups: dict[int, list[Plan]] = {}  # those that share a trace go to one process, which works it out once
    for family, key in keys.items():
        if key not in known:
            parts = traces_of(family, inputs)
            groups.setdefault(0 if parts is None else id(parts[0]), []).append(family)
    missing = [*itertools.chain.from_iterable(groups.values())]

    def forecast_group(group: list[Plan]) -> list[FamilyForecast | None]:
        return [_forecast_family(family, families[family], inputs) for family in group]

    found = (
        on_every_core(forecast_group, [*groups.values()])
        if forks and len(missing) >= _MANY
        else map(forecast_group, groups.values())
    )
    known.update(zip((keys[family] for family in missing), itertools.chain.from_iterable(found), strict=True))
    return ((members, said) for family, members in families.items() if (said := known[keys[family]]) is not None)


def traces_of(family: Plan, inputs: ForecastInputs) -> tuple[MicroPart, OptimizerPart] | None:
    """The traces of a family, or of the nearest plan that can be traced; ``None`` where there are none."""
    return inputs.traces.parts(family) or inputs.traces.parts(traceable(family, inputs.facts))


def _forecast_family(family: Plan, members: list[int], inputs: ForecastInputs) -> FamilyForecast | None:
    """What the traces say of the plans of a family; ``None`` where there are none."""
    nearest = traces_of(family, inputs)
    if nearest is None:
        return None
    facts, plans, (micro, optimizer) = inputs.facts, inputs.space.plans, nearest
    parts, waiting = inputs.traces.parts(family), facts.workload.launch_path == "trainer"
    whole, _ = inputs.traces.parts(without_checkpointing(traceable(family, facts))) or nearest
    given = np.array([int(plans[place]["micro_batch"]) for place in members])
    rows = np.array([loaded_rows(plans[place], facts) for place in members])
    accumulation = np.array([int(plans[place]["accumulation"]) for place in members])
    built = recipe_of(family, facts)
    clock, arithmetic = inputs.clock, arithmetic_of(built)
    micro_step = micro.work(rows.astype(np.float64)).computed_in(**arithmetic)
    amounts = roofline.amounts(micro_step=micro_step, optimizer_step=optimizer.work(), accumulation=accumulation)
    host_offload = _host_offload(family, micro, facts)
    copied = _copied_bytes(host_offload, accumulation)
    amounts[:, _TRANSFER] += copied
    samples = given * accumulation * data_parallel(family, facts.workload)
    fused = fused_share(family, facts)
    step = None if clock is None else _step_seconds(clock, nearest, arithmetic, rows, accumulation, fused=fused)
    amounts[:, _NETWORK] = sent = exposed_seconds(
        micro, family.get(PARALLEL, "none"), facts.workload, inputs.links,
        accumulation=accumulation, rows=rows, computed=amounts @ inputs.nominal if step is None else step,
        half=built.mixed_precision != "no",
    )  # fmt: skip
    said = FamilyForecast.nothing(len(members))
    said.activations[:] = whole.activation_bytes_per_row() * rows
    said.work[:] = amounts / samples[:, None]
    if parts is not None:
        together = np.array([inputs.evaluated[int(one)] for one in given])
        said.tensors[:] = peak.peaks(micro, optimizer, rows, accumulation, waiting=waiting, evaluated_rows=together)
        asked = sum(one.bytes_if_asked(family[one.name], family, facts) for one in techniques())
        roomy = peak.evaluable_rows(
            micro, optimizer, rows, accumulation, waiting=waiting, most=inputs.most, if_asked=asked
        )
        said.evaluable[:] = np.where(roomy > together, roomy, 0)
        if step is not None:
            said.seconds[:] = (step + sent + copied * inputs.nominal[_TRANSFER]) / samples  # as if no copy hid
    elif host_offload is not None:
        said.tensors[:] = peak.host_offload_peaks(micro, host_offload.held_bytes, rows, accumulation, waiting=waiting)
        said.approximate[:] = True
    return said


def _step_seconds(
    clock: StepClock,
    parts: tuple[MicroPart, OptimizerPart],
    arithmetic: Arithmetic,
    rows: Ints,
    accumulation: Ints,
    *,
    fused: float,
) -> Floats:
    """Seconds of an optimizer step of each plan, without collectives, by the laws or the plain roofline."""
    micro, optimizer = parts
    if clock.by_laws:
        return clock.step_seconds(micro, optimizer, rows, accumulation, fused=fused, **arithmetic)
    micro_step = micro.work(rows.astype(np.float64)).computed_in(**arithmetic)
    return roofline.step_seconds(
        clock.card, micro_step=micro_step, optimizer_step=optimizer.work(), accumulation=accumulation
    )


def fused_share(plan: Plan, facts: Facts) -> float:
    """The share of the model's element-wise operators that a compiler leaves out of the plan's trace."""
    return max(one.fused_share(plan[one.name], facts) for one in techniques())


def _host_offload(family: Plan, micro: MicroPart, facts: Facts) -> HostOffload | None:
    """What a technique says of a plan that waits on the host; ``None`` where none says anything, or several do."""
    found = _host_offloads(family, facts, np.append(micro.weights, micro.host_bytes))
    return found[0] if len(found) == 1 else None


def _host_offloads(plan: Plan, facts: Facts, weights: Ints) -> list[HostOffload]:
    """What techniques say of a plan that waits on the host; see :meth:`Technique.host_offload` for the weights."""
    every = (one.host_offload(plan[one.name], plan, facts, weights) for one in techniques())
    return [one for one in every if one is not None]


def steps_on_host(plan: Plan, facts: Facts) -> bool:
    """Whether an engine keeps what it trains on the host and steps there, as fast as a host that is not known."""
    return bool(_host_offloads(plan, facts, np.ones(1, dtype=np.int64)))


def speed_range(plan: Plan, facts: Facts, spread: float, slow_host: float = 1.0) -> tuple[float, float]:
    """The factors on the predicted speed of a plan that four trainings of five lie within.

    The first is 0 where the speed hangs on what is not known: the link between cards, or the host that steps.

    Args:
        plan: The plan.
        facts: What it is for.
        spread: Of one card, above 1.
        slow_host: How many times as long a step may take beside a slow host, where the host is not known.
    """
    unknown = facts.workload.processes > 1 or steps_on_host(plan, facts)
    return 0.0 if unknown else 1 / spread / slow_host, spread


def _copied_bytes(host_offload: HostOffload | None, accumulation: Ints) -> Floats:
    """What a step copies between host and device; a trace counts what waits on the host, but not this."""
    if host_offload is None:
        return np.zeros(len(accumulation))
    return np.asarray(accumulation * host_offload.micro_step_bytes + host_offload.step_bytes, dtype=np.float64)


class Arithmetic(TypedDict):
    """What a plan computes in otherwise than it was traced."""

    tf32: bool
    fp16: bool


def arithmetic_of(built: Recipe) -> Arithmetic:
    """The arithmetic of a plan's recipe: fp16 was traced as bf16, and TF32 as float32."""
    return {"tf32": built.tf32, "fp16": built.sixteen_bits == "fp16"}
