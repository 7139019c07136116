"""A program run under fake tensors, and what PyTorch's allocator would have counted."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autofit.costmodel.memory import allocator
from autofit.costmodel.tracing import layers as layering
from autofit.costmodel.tracing import source
from autofit.costmodel.tracing.emulation.cuda import like_cuda
from autofit.costmodel.tracing.emulation.cuda_kernels import kernel_stand_ins
from autofit.costmodel.tracing.longer_tape import lengthen
from autofit.costmodel.tracing.recorder import Recorder
from autofit.costmodel.tracing.timeline import Tape, UnlikeError
from autofit.costmodel.tracing.trace_store import kernels_of

WORKSPACE_BYTES = 2 * 1024 * 4096 + 8 * 1024 * 16
"""cuBLAS' workspace before Hopper, one for each pair of handle and stream; the threads of the forward and the backward
pass have a handle each, so there are two. Source: ``aten/src/ATen/cuda/CublasHandlePool.cpp``
(``parseChosenWorkspaceSize``, ``getCUDABlasLtWorkspace``); Hopper: 32 MiB."""
HANDLES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """What a run needs, as PyTorch counts it.

    Attributes:
        allocated_bytes: ``torch.cuda.max_memory_allocated``.
        reserved_bytes: ``torch.cuda.max_memory_reserved``, without ``empty_cache``.
        segment: Where in the run the peak of the tensors is.
    """

    allocated_bytes: int
    reserved_bytes: int
    segment: str


class Watch:
    """Tells a recorder where layers begin and end; what ``layering.watch_layers`` wants."""

    def __init__(self, recorder: Recorder, model: nn.Module, layers: layering.Layers | None) -> None:
        self.recorder = recorder
        self.model, self.layers = model, layers
        self.backward = False
        self.step = 0

    def in_layers(self, name: str, visit: Callable[[nn.Module], object]) -> None:
        """Visit the periods of the repeated layers, each in a segment that is copied like them; then the model."""
        if self.layers is not None:
            kept = list(self.model.get_submodule(self.layers.path))
            for period in range(layering.PERIODS):
                self.recorder.mark(f"{name}:F{period}")
                first = self.layers.before + period * self.layers.period
                for layer in kept[first : first + self.layers.period]:
                    visit(layer)
        self.recorder.mark(f"{name}:rest")
        visit(self.model)

    def mark(self, name: str) -> None:
        """A segment of the current micro-step begins."""
        self.recorder.mark(f"{self.step}:{name}")


Steps = Callable[[Any, Watch], None]


def run(
    build: Callable[[], nn.Module], steps: Steps, *, shorten: bool = True, capability: tuple[int, int] = (8, 0)
) -> Tape:
    """The tape of a run.

    Args:
        build: The model, on the meta device.
        steps: Trains it.
        shorten: Whether repeated layers may be left out and put back in afterwards.
        capability: Of the card, whose kernels are followed.
    """
    with _no_garbage(), torch.device("meta"):
        model = build()
    layers = layering.find_layers(model) if shorten else None
    if layers is None:
        return _traced(model, steps, None, capability)
    layering.shorten(model, layers)
    try:
        return lengthen(_traced(model, steps, layers, capability), layers.copies)
    except UnlikeError:
        return run(build, steps, shorten=False, capability=capability)


def _traced(model: nn.Module, steps: Steps, layers: layering.Layers | None, capability: tuple[int, int]) -> Tape:
    recorder = Recorder(stand_ins=kernel_stand_ins(kernels_of(capability)))
    with _no_garbage(), FakeTensorMode(allow_non_fake_inputs=True):
        source.make_fake(model)  # not followed: weights are written down layer by layer
        with recorder, like_cuda(kernels_of(capability)):
            watch = Watch(recorder, model, layers)
            watch.in_layers("weights", lambda part: recorder.call([*part.parameters(), *part.buffers()], "weights"))
            if layers is not None:
                layering.watch_layers(model, layers, watch)  # type: ignore[arg-type]
            steps(model, watch)
            return recorder.tape()


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """Objects die when nobody holds them, and at no other time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def peak_of(tape: Tape, *, workspace_bytes: int = WORKSPACE_BYTES * HANDLES) -> Peak:
    """What PyTorch's counters would say."""
    sizes = tape.bytes_at(0)
    events, sizes = _with(tape.events, sizes, workspace_bytes // HANDLES, HANDLES)
    replayed = allocator.replay(events, sizes)
    live = tape.live(0)
    return Peak(
        allocated_bytes=replayed.peak_allocated_bytes,
        reserved_bytes=replayed.peak_reserved_bytes,
        segment=tape.segment_at(int(np.argmax(live))),
    )


def _with(events: Any, sizes: Any, each: int, count: int) -> tuple[Any, Any]:
    """The same events, behind some blocks that stay."""
    first = len(sizes)
    return (
        np.concatenate([np.arange(first, first + count), events]),
        np.concatenate([sizes, np.full(count, float(each))]),
    )


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Lightning's ``_DtypeContextManager``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
