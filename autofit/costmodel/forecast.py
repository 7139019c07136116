"""The forecast of every plan of a space, from the traces: peak bytes, and the order of speed on a known card.

What the traces can't see is a prior (:class:`PeakPrior`), each term with its source; nothing is fitted to a measurement
of a training run.

- CUDA: the context and the kernels that are loaded into it lie outside PyTorch's allocator; the workspaces of
  cuBLAS, one for the thread of the forward pass and one for autograd's, lie inside.
- CPU: the libraries' buffers and heap fragmentation: hardly known in advance, learned from the first trials.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np
from packaging.version import Version

from autofit.contract.plan import Plan
from autofit.costmodel.evaluation import most_rows
from autofit.costmodel.families import (
    FamilyForecast,
    ForecastInputs,
    Known,
    families_to_trace,
    forecast_families,
    traceable,
    without_checkpointing,
)
from autofit.costmodel.seconds import roofline
from autofit.costmodel.seconds.collectives import links_of, nccl_bytes
from autofit.costmodel.seconds.roofline import WORK
from autofit.costmodel.seconds.step_time import EIGHTY, StepClock
from autofit.costmodel.tracing.timeline import Bools, Floats
from autofit.costmodel.tracing.trace_store import evaluated_rows
from autofit.registry import techniques
from autofit.system.units import MIB

if TYPE_CHECKING:
    from autofit.contract.facts import Facts, Hardware
    from autofit.contract.trace import Ints
    from autofit.costmodel.tracing.trace_store import Traces
    from autofit.machine.gpu_catalogue import Card
    from autofit.space import Space

_OPERATORS = WORK.index("operators")
_NEARLY, _HOST_LOG_STD = 0.9, 0.19
"""Of a step's seconds, from which on it waits for the host; the standard deviation of the natural logarithm of measured
over predicted seconds of 25 such plans beside an H200, whose host was timed before them."""
_HOPPER = (9, 0)
_CONTEXT_BYTES, _CONTEXT_BYTES_HOPPER = 512 * MIB, 768 * MIB
"""Context and kernels. On an H100 with CUDA 13.0 610 MiB with one kernel, 719 to 764 MiB in training, compiled or not.
On older cards, with lazy loading, the default since CUDA 12.2, 274 MiB before any kernel (pytorch/pytorch PR
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
        spread: Four trainings of five are at most so many times faster or slower than predicted, on a card whose links
            and host are known; ``None`` where there is no prediction.
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
    spread: float | None = None
    evaluable_rows: Ints | None = None

    def spread_of(self, place: int) -> float | None:
        """The spread of one plan: a step that waits for its host is told less well, however that was timed."""
        if self.spread is None:
            return None
        waits = self.host_share(place, float(self.nominal[_OPERATORS])) > _NEARLY
        return self.spread * (math.exp(EIGHTY * _HOST_LOG_STD) if waits else 1.0)

    def host_share(self, place: int, seconds_each: float) -> float:
        """How long a host that takes so many seconds for an operator issues those of a plan, over its forecast."""
        return float(self.work[place, _OPERATORS] * seconds_each / self.seconds[place])

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
        offset_bytes=context_bytes(hardware.capability) + workspace_bytes(hardware.capability),
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


def context_bytes(capability: tuple[int, int] | None) -> int:
    """Bytes of a process's context and kernels on the device, outside of PyTorch's allocator."""
    return _CONTEXT_BYTES_HOPPER if capability and capability >= _HOPPER else _CONTEXT_BYTES


def workspace_bytes(capability: tuple[int, int] | None) -> int:
    """Bytes of cuBLAS' workspaces inside PyTorch's allocator; where they are not cached, of one product's."""
    return sum(workspaces(capability))


def workspaces(capability: tuple[int, int] | None) -> tuple[int, ...]:
    """The same, one by one: of the thread that calls the model, and of autograd's."""
    each = _WORKSPACE_BYTES_HOPPER if capability and capability >= _HOPPER else _WORKSPACE_BYTES
    kept = Version(version("torch")) < _UNKEPT or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"
    return (each,) * (_THREADS if kept else 1)


def plans_to_trace(space: Space, facts: Facts) -> list[Plan]:
    """Those whose traces :func:`forecast` asks for, so that those of several spaces can be made side by side."""
    families = families_to_trace(space)
    nearest = [traceable(family, facts) for family in families]
    unchecked = map(without_checkpointing, nearest) if peak_prior(facts.hardware).heap_share else ()
    return [*families, *nearest, *unchecked]


def forecast(
    space: Space,
    traces: Traces,
    facts: Facts,
    card: Card | None = None,
    say: Callable[[str], None] = lambda _: None,
    *,
    known: Known | None = None,
) -> Forecast:
    """Trace the families of a space and compute the forecast of each plan.

    Args:
        space: The plans.
        traces: Make and hold their traces.
        facts: What they are for.
        card: Whose speed is forecast.
        say: Called with a line of text for each stage.
        known: What was forecast before of plans for the same facts and card, and takes what is forecast now.

    Raises:
        MachineError: No process can be started, or nothing can be written.
    """
    traces.prepare(plans_to_trace(space, facts), say)
    on_cuda = facts.hardware.device == "cuda"
    inputs = _inputs(space, traces, facts, card)
    found = FamilyForecast.nothing(len(space.plans))
    for members, said in forecast_families(families_to_trace(space), inputs, {} if known is None else known):
        for one in fields(said):
            getattr(found, one.name)[members] = getattr(said, one.name)
    nccl = np.array([float(nccl_bytes(plan, facts.workload)) for plan in space.plans]) * on_cuda
    untraced = np.array([float(untraced_bytes(plan, facts)) for plan in space.plans])
    return Forecast(
        tensor_bytes=found.tensors,
        seconds=found.seconds,
        work=found.work,
        nominal=inputs.nominal,
        known_card=card is not None,
        timed=bool(facts.rates),
        approximate=found.approximate,
        peak_prior=peak_prior(facts.hardware),
        kernel_overhead_bytes=kernel_overhead_bytes(facts, found.work) + nccl + untraced,
        activation_bytes=found.activations,
        spread=None if inputs.clock is None else inputs.clock.spread,
        evaluable_rows=found.evaluable,
    )


def foresee(
    spaces: Sequence[Space],
    traces: Traces,
    facts: Facts,
    card: Card | None = None,
    say: Callable[[str], None] = lambda _: None,
    *,
    traced: Callable[[], None] = lambda: None,
) -> Known:
    """What :func:`forecast` is to know of the plans of several spaces, of which it is then asked one by one.

    Their traces are made side by side, after which ``traced`` is called, and where there are many families, forks of
    this process share them. What they work out of the traces is lost with them, which is worse where other cards ask
    the same traces.

    Raises:
        MachineError: No process can be started, or nothing can be written.
    """
    traces.prepare([plan for one in spaces for plan in plans_to_trace(one, facts)], say)
    traced()
    known: Known = {}
    every = replace(spaces[0], plans=tuple(dict.fromkeys(plan for one in spaces for plan in one.plans)))
    forecast_families(families_to_trace(every), _inputs(every, traces, facts, card), known, forks=True)
    return known


def _inputs(space: Space, traces: Traces, facts: Facts, card: Card | None) -> ForecastInputs:
    """What the forecasts of the families of a space have in common."""
    on_cuda = facts.hardware.device == "cuda"
    plans = {int(plan["micro_batch"]): plan for plan in space.plans}
    return ForecastInputs(
        space=space,
        traces=traces,
        facts=facts,
        clock=StepClock(card, facts.rates.get("operators")) if card is not None else None,
        nominal=nominal_of(facts, card),
        links=links_of(card, processes=facts.workload.processes, nodes=facts.workload.nodes, on_cpu=not on_cuda),
        most=most_rows(facts),
        evaluated={rows: evaluated_rows(plan, facts) for rows, plan in plans.items()},
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
