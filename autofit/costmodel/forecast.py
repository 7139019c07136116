"""What the traces say of every plan of a space at once: peak bytes, and the order of speed on a known card.

What the traces don't see is added here, each with its source; nothing is fitted to a measurement of a training run.

- CUDA: the context and the kernels that are loaded into it lie outside of PyTorch's allocator; the workspaces of
  cuBLAS, one for the thread of the forward pass and one for autograd's, lie inside.
- CPU: the libraries' own buffers, and what malloc keeps: hardly known beforehand, learned from the first trials.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np
from packaging.version import Version

from autofit.contract.plan import Plan
from autofit.costmodel import peak, roofline
from autofit.costmodel.roofline import KINDS, WORK, Totals
from autofit.costmodel.timeline import Bools, Floats
from autofit.costmodel.trace_store import MANY, untraceable
from autofit.registry import recipe_of, technique
from autofit.system.units import MIB

if TYPE_CHECKING:
    from autofit.contract.facts import Facts, Hardware
    from autofit.contract.technique import HostOffload
    from autofit.costmodel.peak import MicroPart
    from autofit.costmodel.trace_store import Traces
    from autofit.machine.gpu_catalogue import Card
    from autofit.space import Space

_TRANSFER = WORK.index("transfer")
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
_ROUGHLY, _ROUGHLY_OWN = 0.25, 0.1
"""Of the need of a plan that can't be traced: how far what is said of its value may be off, and its own beside that."""
_FEW = 4
"""Kinds of plan up to which one row alone is traced too; in larger spaces it takes what many rows say."""
MARGIN = 0.05
"""Of the need, for what the traces see wrongly: they are within 0.2 % of what a CPU allocates, and within a few per
cent of published measurements on GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """How a peak on the device is believed to lie to the tensors', beforehand.

    ``offset + slope x tensors + heap_share x activations``.

    Attributes:
        offset_bytes, slope: Means.
        offset_std, slope_std: How well they are known.
        residual: Relative standard deviation of a plan's own around the line.
        scatter_bytes: The same of what does not grow with the tensors.
        value_bytes: Standard deviation of what a value adds by itself, such as the code and buffers of a library.
        value_share: The same of what it adds in proportion to the tensors.
        heap_share, heap_share_std: What the heap keeps of what was freed, as a share of the activations there would be
            without checkpointing: mean, and how well it is known.
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

    def own(self, tensor_bytes: Floats) -> Floats:
        """Standard deviation of a plan's own around the line, in bytes."""
        return np.hypot(self.residual * tensor_bytes, self.scatter_bytes)


_CPU = Beside(
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
"""Resident memory: malloc keeps part of what is freed, and oneDNN has buffers of its own. The holes in malloc's heap
are in proportion to the activations that a step makes, also where checkpointing keeps few of them at a time: on four
recorded landscapes, of tiny models, by 0.46 to 0.71 of them, beside 0.76 to 1.17 times the tensors and 3 to 38 MiB.
Corrected by the first trials."""


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: it remembers what it computed
class Forecast:
    """What the traces say of every plan of a space, in the space's order.

    Attributes:
        tensor_bytes: Peak of the tensors; NaN where a plan can't be traced.
        seconds: Of a sample, on a known card; NaN elsewhere.
        work: How much of each of :data:`~autofit.costmodel.roofline.WORK` a sample is, a row for each plan; NaN where
            that is not known. A value that can't be traced counts as its technique's plain one.
        nominal: Seconds for each unit of it, beforehand.
        known_card: Whether they are those of a card in the catalogue.
        timed: Whether they were timed on the device.
        rough: Plans that can't be traced, whose peak is what their plain twin needs less what is said to wait on the
            host.
        beside: What is believed of the peak on the device, given the tensors'.
        brought_bytes: What the kernels of a plan take beside that, as far as it was measured before.
        activation_bytes: What its micro-batch would keep for the backward pass without checkpointing.
    """

    tensor_bytes: Floats
    seconds: Floats
    work: Floats
    nominal: Floats
    known_card: bool
    timed: bool
    rough: Bools
    beside: Beside
    brought_bytes: Floats
    activation_bytes: Floats

    @functools.cached_property
    def own_bytes(self) -> Floats:
        """Standard deviation of a plan's own around the line that all have in common."""
        tensors = np.nan_to_num(self.tensor_bytes)
        return np.hypot(self.beside.own(tensors), _ROUGHLY_OWN * tensors * self.rough)

    @functools.cached_property
    def rough_bytes(self) -> Floats:
        """The same of a value that keeps a plan from being traced; 0 for a plan that was."""
        return _ROUGHLY * np.nan_to_num(self.tensor_bytes) * self.rough

    @property
    def device_bytes(self) -> Floats:
        """Expected need on the device, before anything was measured."""
        beside = self.beside
        line = beside.offset_bytes + beside.slope * self.tensor_bytes
        return line + beside.heap_share * self.activation_bytes + self.brought_bytes

    @property
    def predicted_bytes(self) -> Floats:
        """The same of the plans that were traced; NaN for the others."""
        return np.where(self.rough, np.nan, self.device_bytes)


def beside(hardware: Hardware) -> Beside:
    """What a plan needs beside its tensors, and how well that is known."""
    if hardware.device == "cpu":
        return _CPU
    return Beside(
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
    """Of cuBLAS, inside PyTorch's allocator; where they are not kept, what one product may hold."""
    each = _WORKSPACE_BYTES_HOPPER if capability and capability >= (9, 0) else _WORKSPACE_BYTES
    kept = Version(version("torch")) < _UNKEPT or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"
    return (_THREADS if kept else 1) * each


def forecast(
    space: Space, traces: Traces, facts: Facts, card: Card | None = None, say: Callable[[str], None] = lambda _: None
) -> Forecast:
    """Trace what the plans of a space need, and put it together for each of them.

    Raises:
        MachineError: No process can be started, or nothing can be written.
    """
    families = families_of(space)
    if len(families) <= _FEW:
        families = families_of(space, one_row_apart=True)
    believed = beside(facts.hardware)
    likest_of = {family: _traceable(family) for family in families}
    unchecked = map(without_checkpointing, likest_of.values()) if believed.heap_share else ()
    traces.prepare([*families, *likest_of.values(), *unchecked], say)
    count = len(space.plans)
    tensors, seconds = np.full(count, np.nan), np.full(count, np.nan)
    work, rough = np.full((count, len(WORK)), np.nan), np.zeros(count, dtype=bool)
    activations = np.zeros(count)
    waiting = facts.workload.launch_path == "trainer"
    for family, members in families.items():
        parts = traces.parts(family)
        likest = parts or traces.parts(likest_of[family])
        if likest is None:
            continue
        micro, optimizer = likest
        whole, _ = traces.parts(without_checkpointing(likest_of[family])) or likest
        rows = np.array([int(space.plans[place]["micro_batch"]) for place in members])
        accumulation = np.array([int(space.plans[place]["accumulation"]) for place in members])
        activations[members] = whole.activation_bytes_per_row() * rows
        micro_step = as_computed(micro.work(rows.astype(np.float64)), family, facts)
        amounts = roofline.amounts(micro_step=micro_step, optimizer_step=optimizer.work(), accumulation=accumulation)
        host_offload = None if parts else _host_offload(family, micro, facts)
        if host_offload is not None:
            amounts[:, _TRANSFER] += accumulation * host_offload.micro_step_bytes + host_offload.step_bytes
            tensors[members] = peak.host_offload_peaks(
                micro, host_offload.held_bytes, rows, accumulation, waiting=waiting
            )
            rough[members] = True
        work[members] = amounts / (rows * accumulation)[:, None]
        if parts is None:
            continue
        tensors[members] = peak.peaks(micro, optimizer, rows, accumulation, waiting=waiting)
        if card is not None:
            step = roofline.step_seconds(
                card, micro_step=micro_step, optimizer_step=optimizer.work(), accumulation=accumulation
            )
            seconds[members] = step / (rows * accumulation)
    return Forecast(
        tensor_bytes=tensors,
        seconds=seconds,
        work=work,
        nominal=nominal_of(facts, card),
        known_card=card is not None,
        timed=bool(facts.rates),
        rough=rough,
        beside=believed,
        brought_bytes=brought_bytes(facts, work),
        activation_bytes=activations,
    )


def nominal_of(facts: Facts, card: Card | None) -> Floats:
    """Seconds for each unit of :data:`~autofit.costmodel.roofline.WORK`, beforehand."""
    hardware = facts.hardware
    return roofline.nominal_seconds(card, on_cpu=hardware.device == "cpu", threads=hardware.threads, rates=facts.rates)


def brought_bytes(facts: Facts, work: Floats) -> Floats:
    """What the kernels of each plan take of the device's memory, by the kinds of work that the plan has."""
    brought = np.array([facts.brought_bytes.get(kind, 0) for kind in WORK], dtype=np.float64)
    return np.asarray((np.nan_to_num(work) > 0) @ brought)


def without_checkpointing(family: Plan) -> Plan:
    """The plan without checkpointing, of many rows: all that a micro-step makes is kept for its backward pass."""
    return family.replaced(checkpointing=technique("checkpointing").baseline, micro_batch=MANY)


def _traceable(family: Plan) -> Plan:
    """The plan with a plain value in the place of each that can't be traced."""
    return family.replaced(**{name: technique(name).baseline for name in untraceable(family)})


def _host_offload(family: Plan, micro: MicroPart, facts: Facts) -> HostOffload | None:
    """What the one value that can't be traced says of the plan; ``None`` where it says nothing, or there are more."""
    names = untraceable(family)
    if len(names) != 1:
        return None
    return technique(names[0]).host_offload(family[names[0]], family, facts, micro.weights)


def families_of(space: Space, *, one_row_apart: bool = False) -> dict[Plan, list[int]]:
    """Places of the plans that differ in the micro-batch alone, by the plan that is traced for them."""
    families: dict[Plan, list[int]] = {}
    for place, plan in enumerate(space.plans):
        rows = min(int(plan["micro_batch"]), MANY) if one_row_apart else MANY
        families.setdefault(plan.replaced(micro_batch=rows, accumulation=1), []).append(place)
    return families


def as_computed(totals: Totals, family: Plan, facts: Facts) -> Totals:
    """The work in the arithmetic of the plan: fp16 was traced as bf16, and TF32 as float32."""
    built = recipe_of(family, facts)
    flops, moved = totals.flops.copy(), totals.moved_bytes.copy()
    moves = [("matmul fp32", "matmul tf32")] if built.tf32 else []
    moves += [("matmul bf16", "matmul fp16")] if built.mixed_precision == "fp16" else []
    for before, after in moves:
        source, target = (KINDS.index(kind) for kind in (before, after))
        for column in (flops, moved):
            column[..., target] += column[..., source]
            column[..., source] = 0
    return Totals(flops=flops, moved_bytes=moved, operators=totals.operators)
