"""The forecast of every plan of a space, from the traces: peak bytes, and the order of speed on a known card.

What the traces can't see is a prior (:class:`PeakPrior`), each term with its source; nothing is fitted to a measurement
of a training run.

- CUDA: the context and the kernels that are loaded into it lie outside PyTorch's allocator; the workspaces of
  cuBLAS, one for the thread of the forward pass and one for autograd's, lie inside.
- CPU: the libraries' buffers and heap fragmentation: hardly known in advance, learned from the first trials.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, TypedDict

import numpy as np
from packaging.version import Version

from autofit.contract.layout import PARALLEL, data_parallel
from autofit.contract.plan import Plan
from autofit.costmodel.evaluation import most_rows
from autofit.costmodel.memory import peak
from autofit.costmodel.seconds import roofline
from autofit.costmodel.seconds.collectives import exposed_seconds, links_of, nccl_bytes
from autofit.costmodel.seconds.roofline import WORK
from autofit.costmodel.seconds.step_time import StepClock
from autofit.costmodel.tracing.timeline import Bools, Floats
from autofit.costmodel.tracing.trace_store import MANY, evaluated_rows, untraceable
from autofit.registry import loaded_rows, recipe_of, technique, techniques
from autofit.system.units import MIB

if TYPE_CHECKING:
    from autofit.contract.facts import Facts, Hardware
    from autofit.contract.technique import HostOffload
    from autofit.contract.trace import Ints
    from autofit.costmodel.memory.parts import MicroPart, OptimizerPart
    from autofit.costmodel.tracing.trace_store import Traces
    from autofit.machine.gpu_catalogue import Card
    from autofit.space import Space

_TRANSFER, _NETWORK = WORK.index("transfer"), WORK.index("network")
CONTEXT_BYTES = 512 * MIB
"""Context and kernels. With lazy loading, the default since CUDA 12.2, 274 MiB before any kernel (pytorch/pytorch PR
86509), and more with each library that is loaded; 1343 MiB on a V100 with CUDA 11.2. Measured on a real device."""
_CONTEXT_STD = 256 * MIB
_WORKSPACE_BYTES = 8_519_680
_WORKSPACE_BYTES_HOPPER = 32 * MIB
"""``getChosenWorkspaceSize`` of ATen/cuda/CublasHandlePool.cpp: 4096 x 1024 x 2 + 16 x 1024 x 8 bytes, 32 MiB from
compute capability 9.0 on; one for each handle and stream, and each thread has a handle of its own."""
_THREADS = 2
_UNKEPT = Version("2.15.dev0")
"""From this torch on a workspace lives as long as one product, unless ``TORCH_CUBLAS_WORKSPACE_CACHE=1``."""
_VALUE_SHARE_STD, _OWN_SHARE_STD = 0.25, 0.1
"""Of the peak of a plan that can't be traced: standard deviations of the error of its value, and of its own."""
_FEW = 4
"""Families up to which one row is traced too; in larger spaces the trace of many rows stands for it."""
MARGIN = 0.05
"""Of the peak, for the traces' errors: they are within 0.2 % of what a CPU allocates, and within a few per
cent of published measurements on GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPrior:
    """Prior of the device peak given tensor bytes: ``offset + slope x tensors + heap_share x activations``.

    Attributes:
        offset_bytes, offset_std: Mean and standard deviation of what does not depend on the plan.
        slope, slope_std: The same of the factor of the tensor bytes.
        residual: Standard deviation of a plan's distance from the line, as a share of its tensor bytes.
        scatter_bytes: Standard deviation of the part of it that does not grow with the tensors.
        value_bytes: Standard deviation of what a value adds by itself, such as the code and buffers of a library.
        value_share: Standard deviation of what a value adds, as a share of the tensor bytes.
        heap_share, heap_share_std: Mean and standard deviation of the heap's fragmentation, as a share of the
            activations that the step would have without checkpointing.
    """

    offset_bytes: float
    offset_std: float
    slope: float
    slope_std: float
    residual: float
    scatter_bytes: float
    value_bytes: float
    value_share: float
    heap_share: float
    heap_share_std: float

    def residual_std(self, tensor_bytes: Floats) -> Floats:
        """Standard deviation of a plan's distance from the line, in bytes."""
        return np.hypot(self.residual * tensor_bytes, self.scatter_bytes)


_CPU = PeakPrior(
    offset_bytes=10 * MIB,
    offset_std=12 * MIB,
    slope=1.0,
    slope_std=0.2,
    residual=0.1,
    scatter_bytes=3 * MIB,
    value_bytes=12 * MIB,
    value_share=0.15,
    heap_share=0.5,
    heap_share_std=0.25,
)
"""Resident memory: malloc keeps part of what is freed, and oneDNN has buffers of its own. Heap fragmentation grows with
the activations that a step makes, also where checkpointing keeps few of them at a time: on four recorded landscapes of
tiny models 0.46 to 0.71 of them, with 0.76 to 1.17 times the tensors and 3 to 38 MiB. Corrected by the first trials."""


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: cached properties
class Forecast:
    """What the traces say of every plan of a space; arrays of shape ``(plans,)`` in the space's order.

    Attributes:
        tensor_bytes: Peak of the tensors; NaN where a plan can't be traced.
        seconds: Of a sample, on a known card; NaN elsewhere.
        work: How much of each of :data:`~autofit.costmodel.seconds.roofline.WORK` a sample is, of shape
            ``(plans, kinds)``; NaN where that is not known. A value that can't be traced counts as its technique's
            baseline.
        nominal: Expected seconds for each unit of it.
        known_card: Whether they come from a card in the catalogue.
        timed: Whether they were timed on the device.
        approximate: Plans that can't be traced, whose peak is that of the nearest traceable plan less what their
            technique says it moves to the host.
        peak_prior: Of the device peak given tensor bytes.
        kernel_overhead_bytes: What the kernels of a plan take on top of that, where it was measured before the trials.
        activation_bytes: What its micro-batch would keep for the backward pass without checkpointing.
        seconds_log_std: Standard deviation of the natural logarithm of measured over predicted seconds, of a whole
            step; 0 where there is no prediction.
        evaluable_rows: That a Trainer may evaluate at once below the training's own peak; 0 where no more than usual.
    """

    tensor_bytes: Floats
    seconds: Floats
    work: Floats
    nominal: Floats
    known_card: bool
    timed: bool
    approximate: Bools
    peak_prior: PeakPrior
    kernel_overhead_bytes: Floats
    activation_bytes: Floats
    seconds_log_std: float = 0.0
    evaluable_rows: Ints | None = None

    @functools.cached_property
    def residual_std_bytes(self) -> Floats:
        """Standard deviation of a plan's distance from the line that all have in common."""
        tensors = np.nan_to_num(self.tensor_bytes)
        return np.hypot(self.peak_prior.residual_std(tensors), _OWN_SHARE_STD * tensors * self.approximate)

    @functools.cached_property
    def approximate_std_bytes(self) -> Floats:
        """Standard deviation of the error of the value that keeps a plan from being traced; 0 for a traced plan."""
        return _VALUE_SHARE_STD * np.nan_to_num(self.tensor_bytes) * self.approximate

    @property
    def device_bytes(self) -> Floats:
        """Expected peak on the device, before anything was measured."""
        prior = self.peak_prior
        line = prior.offset_bytes + prior.slope * self.tensor_bytes
        return line + prior.heap_share * self.activation_bytes + self.kernel_overhead_bytes

    @property
    def predicted_bytes(self) -> Floats:
        """The same of the plans that were traced; NaN for the others."""
        return np.where(self.approximate, np.nan, self.device_bytes)


def peak_prior(hardware: Hardware) -> PeakPrior:
    """The prior for a device: nothing of it was measured on this machine."""
    if hardware.device == "cpu":
        return _CPU
    return PeakPrior(
        offset_bytes=CONTEXT_BYTES + workspace_bytes(hardware.capability),
        offset_std=_CONTEXT_STD,
        slope=1.0,
        slope_std=0.03,
        residual=0.03,
        scatter_bytes=8 * MIB,
        value_bytes=16 * MIB,
        value_share=0.02,
        heap_share=0.0,
        heap_share_std=0.0,
    )


def workspace_bytes(capability: tuple[int, int] | None) -> int:
    """Bytes of cuBLAS' workspaces inside PyTorch's allocator; where they are not cached, of one product's."""
    return sum(workspaces(capability))


def workspaces(capability: tuple[int, int] | None) -> tuple[int, ...]:
    """The same, one by one: of the thread that calls the model, and of autograd's."""
    each = _WORKSPACE_BYTES_HOPPER if capability and capability >= (9, 0) else _WORKSPACE_BYTES
    kept = Version(version("torch")) < _UNKEPT or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"
    return (each,) * (_THREADS if kept else 1)


def plans_to_trace(space: Space, facts: Facts) -> list[Plan]:
    """Those whose traces :func:`forecast` asks for, so that those of several spaces can be made side by side."""
    families = _families(space)
    nearest = [_traceable(family, facts) for family in families]
    unchecked = map(without_checkpointing, nearest) if peak_prior(facts.hardware).heap_share else ()
    return [*families, *nearest, *unchecked]


def _families(space: Space) -> dict[Plan, list[int]]:
    families = families_of(space)
    return families if len(families) > _FEW else families_of(space, one_row_apart=True)


def forecast(
    space: Space, traces: Traces, facts: Facts, card: Card | None = None, say: Callable[[str], None] = lambda _: None
) -> Forecast:
    """Trace the families of a space and compute the forecast of each plan.

    Raises:
        MachineError: No process can be started, or nothing can be written.
    """
    families = _families(space)
    prior = peak_prior(facts.hardware)
    nearest_traceable = {family: _traceable(family, facts) for family in families}
    traces.prepare(plans_to_trace(space, facts), say)
    count = len(space.plans)
    tensors, seconds = np.full(count, np.nan), np.full(count, np.nan)
    work, approximate = np.full((count, len(WORK)), np.nan), np.zeros(count, dtype=bool)
    activations, evaluable, most = np.zeros(count), np.zeros(count, dtype=np.int64), most_rows(facts)
    waiting = facts.workload.launch_path == "trainer"
    clock = StepClock(card) if card is not None else None
    on_cuda = facts.hardware.device == "cuda"
    nominal = nominal_of(facts, card)
    links = links_of(card, processes=facts.workload.processes, nodes=facts.workload.nodes, on_cpu=not on_cuda)
    nccl = np.array([float(nccl_bytes(plan, facts.workload)) for plan in space.plans]) * on_cuda
    untraced = np.array([float(untraced_bytes(plan, facts)) for plan in space.plans])
    plans = {int(plan["micro_batch"]): plan for plan in space.plans}
    evaluated = {rows: evaluated_rows(plan, facts) for rows, plan in plans.items()}
    for family, members in families.items():
        parts = traces.parts(family)
        nearest = parts or traces.parts(nearest_traceable[family])
        if nearest is None:
            continue
        micro, optimizer = nearest
        whole, _ = traces.parts(without_checkpointing(nearest_traceable[family])) or nearest
        given = np.array([int(space.plans[place]["micro_batch"]) for place in members])
        rows = np.array([loaded_rows(space.plans[place], facts) for place in members])
        accumulation = np.array([int(space.plans[place]["accumulation"]) for place in members])
        activations[members] = whole.activation_bytes_per_row() * rows
        micro_step = micro.work(rows.astype(np.float64)).computed_in(**arithmetic_of(family, facts))
        amounts = roofline.amounts(micro_step=micro_step, optimizer_step=optimizer.work(), accumulation=accumulation)
        host_offload = _host_offload(family, micro, facts)
        copied = _copied_bytes(host_offload, accumulation)
        amounts[:, _TRANSFER] += copied
        if host_offload is not None and parts is None:
            tensors[members] = peak.host_offload_peaks(
                micro, host_offload.held_bytes, rows, accumulation, waiting=waiting
            )
            approximate[members] = True
        ranks = data_parallel(family, facts.workload)
        samples = given * accumulation * ranks
        step = None if clock is None else _step_seconds(clock, nearest, family, facts, rows, accumulation)
        amounts[:, _NETWORK] = sent = exposed_seconds(
            micro, family.get(PARALLEL, "none"), facts.workload, links,
            accumulation=accumulation, rows=rows, computed=amounts @ nominal if step is None else step,
            half=recipe_of(family, facts).mixed_precision != "no",
        )  # fmt: skip
        work[members] = amounts / samples[:, None]
        if parts is None:
            continue
        together = np.array([evaluated[int(one)] for one in given])
        tensors[members] = peak.peaks(micro, optimizer, rows, accumulation, waiting=waiting, evaluated_rows=together)
        roomy = peak.evaluable_rows(micro, optimizer, rows, accumulation, waiting=waiting, most=most)
        evaluable[members] = np.where(roomy > together, roomy, 0)
        if step is not None:
            seconds[members] = (step + sent + copied * nominal[_TRANSFER]) / samples  # as if no copy hid
    return Forecast(
        tensor_bytes=tensors,
        seconds=seconds,
        work=work,
        nominal=nominal,
        known_card=card is not None,
        timed=bool(facts.rates),
        approximate=approximate,
        peak_prior=prior,
        kernel_overhead_bytes=kernel_overhead_bytes(facts, work) + nccl + untraced,
        activation_bytes=activations,
        seconds_log_std=0.0 if clock is None else clock.log_std,
        evaluable_rows=evaluable,
    )


def _step_seconds(  # noqa: PLR0917 - of the loop above
    clock: StepClock, parts: tuple[MicroPart, OptimizerPart], family: Plan, facts: Facts, rows: Ints, accumulation: Ints
) -> Floats:
    """Seconds of an optimizer step of each plan, without collectives, by the laws or the plain roofline."""
    micro, optimizer = parts
    if clock.by_laws:
        return clock.step_seconds(micro, optimizer, rows, accumulation, **arithmetic_of(family, facts))
    micro_step = micro.work(rows.astype(np.float64)).computed_in(**arithmetic_of(family, facts))
    return roofline.step_seconds(
        clock.card, micro_step=micro_step, optimizer_step=optimizer.work(), accumulation=accumulation
    )


def nominal_of(facts: Facts, card: Card | None) -> Floats:
    """Seconds for each unit of :data:`~autofit.costmodel.seconds.roofline.WORK`, before any trial."""
    hardware = facts.hardware
    return roofline.nominal_seconds(card, on_cpu=hardware.device == "cpu", threads=hardware.threads, rates=facts.rates)


def kernel_overhead_bytes(facts: Facts, work: Floats) -> Floats:
    """Device memory that the kernels of each plan take, by the kinds of work that the plan has."""
    overhead = np.array([facts.kernel_overhead_bytes.get(kind, 0) for kind in WORK], dtype=np.float64)
    return np.asarray((np.nan_to_num(work) > 0) @ overhead)


def untraced_bytes(plan: Plan, facts: Facts) -> int:
    """Device memory that the plan takes beyond its trace, as its techniques say."""
    return sum(one.untraced_bytes(plan[one.name], plan, facts) for one in techniques())


def without_checkpointing(family: Plan) -> Plan:
    """The plan without recomputation, of many rows: all that a micro-step makes is kept for its backward pass."""
    kept = {name: technique(name).baseline for name in family if technique(name).recomputes}
    return family.replaced(**kept, micro_batch=MANY)


def _traceable(family: Plan, facts: Facts) -> Plan:
    """The nearest traceable plan: the baseline in the place of each value that can't be traced.

    One process splits nothing: an engine is there for what waits on the host, and goes with it.
    """
    names = untraceable(family)
    if names and facts.workload.processes == 1 and PARALLEL in family:
        names = [*names, PARALLEL]
    return family.replaced(**{name: technique(name).baseline for name in names})


def _host_offload(family: Plan, micro: MicroPart, facts: Facts) -> HostOffload | None:
    """What a technique says of a plan that waits on the host; ``None`` where none says anything, or several do."""
    weights = np.append(micro.weights, micro.host_bytes)
    every = (one.host_offload(family[one.name], family, facts, weights) for one in techniques())
    found = [one for one in every if one is not None]
    return found[0] if len(found) == 1 else None


def _copied_bytes(host_offload: HostOffload | None, accumulation: Ints) -> Floats:
    """What a step copies between host and device; a trace counts what waits on the host, but not this."""
    if host_offload is None:
        return np.zeros(len(accumulation))
    return np.asarray(accumulation * host_offload.micro_step_bytes + host_offload.step_bytes, dtype=np.float64)


def families_of(space: Space, *, one_row_apart: bool = False) -> dict[Plan, list[int]]:
    """Indices of the plans that differ in the micro-batch alone, by the plan that is traced for them."""
    families: dict[Plan, list[int]] = {}
    for place, plan in enumerate(space.plans):
        rows = min(int(plan["micro_batch"]), MANY) if one_row_apart else MANY
        families.setdefault(plan.replaced(micro_batch=rows, accumulation=1), []).append(place)
    return families


class Arithmetic(TypedDict):
    """What a plan computes in otherwise than it was traced."""

    tf32: bool
    fp16: bool


def arithmetic_of(family: Plan, facts: Facts) -> Arithmetic:
    """The arithmetic of the plan: fp16 was traced as bf16, and TF32 as float32."""
    built = recipe_of(family, facts)
    return {"tf32": built.tf32, "fp16": built.mixed_precision == "fp16"}
