"""A program -> the operators of its micro-step and of its optimizer's step, kept on disk between runs."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autofit.costmodel.seconds.roofline import Numbers, Totals
from autofit.costmodel.tracing import layers as layering
from autofit.costmodel.tracing import source
from autofit.costmodel.tracing.emulation.cuda import like_cuda
from autofit.costmodel.tracing.emulation.cuda_kernels import kernel_stand_ins
from autofit.costmodel.tracing.longer_tape import MIDDLE
from autofit.costmodel.tracing.recorder import Recorder
from autofit.costmodel.tracing.timeline import Tape

from . import models
from .programs import Program

_PRIMES = (101, 103, 107, 109, 113)
_PARTS = ("forward", "backward", "step")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traced:
    """What was traced, for each of forward, backward and the optimizer's step (axis 0).

    Attributes:
        work, work_per_row: FLOPs, bytes and calls by kind, of shape ``(3, kinds, 3)``.
        operators, operators_per_row: As :class:`autofit.costmodel.tracing.timeline.Tape` has them.
        calls: Of each of the operators, of shape ``(3, operators)``.
    """

    work: Numbers
    work_per_row: Numbers
    operators: Numbers
    operators_per_row: Numbers
    calls: Numbers

    def totals(self, part: int, rows: float) -> Totals:
        """The work of a part by kind."""
        work = self.work[part] + rows * self.work_per_row[part]
        return Totals(flops=work[:, 0], moved_bytes=work[:, 1], operators=np.asarray(work[:, 2].sum()))


def cache_folder() -> Path:
    """Where traces of programs are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "autofit" / "bench-steps"


def traced(program: Program, folder: Path | None = None) -> Traced:
    """The trace of a program; made where it is not kept."""
    folder = folder or cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(f"{_ground()} {program!r}".encode()).hexdigest()[:32]
    path = folder / f"{key}.npz"
    if path.exists():
        with np.load(path) as arrays:
            return Traced(**{name: arrays[name] for name in Traced.__dataclass_fields__})
    found = _trace(program)
    aside = path.with_name(f".{key}-{os.getpid()}.npz")
    np.savez_compressed(aside, **{name: getattr(found, name) for name in Traced.__dataclass_fields__})
    aside.replace(path)
    return found


@functools.cache
def _ground() -> str:
    """All that a trace depends on but its program: how programs are built, how operators are recorded, versions."""
    own = [Path(__file__).with_name(name) for name in ("models.py", "tracing.py")]
    names = ("recorder.py", "operator_table.py", "work.py", "emulation/cuda.py", "layers.py")
    recording = [Path(layering.__file__).parent / name for name in names]
    texts = [path.read_text("utf-8") for path in (*own, *recording)]
    return " ".join((version("torch"), version("transformers"), *texts))


def _trace(program: Program) -> Traced:
    with _no_garbage(), torch.device("meta"):
        model = models.built(program)
    sizes = {size for one in (*model.parameters(), *model.buffers()) for size in one.shape}
    sizes |= {program.seq_len - 1, program.seq_len, program.seq_len + 1}
    rows = next(prime for prime in _PRIMES if all(size % prime or not size for size in sizes))
    layers = layering.find_layers(model)
    step = _run(program, model, None, None)
    if layers is not None:
        layering.shorten(model, layers)
    micro = _run(program, model, layers, rows)
    copies = layers.copies if layers is not None else 0
    return _together(micro, step, copies)


def _run(program: Program, model: nn.Module, layers: layering.Layers | None, rows: int | None) -> Tape:
    """The tape of one micro-step, or with no rows of the optimizer's step."""
    recorder = Recorder(stand_ins=kernel_stand_ins(), rows=rows)
    with _no_garbage(), FakeTensorMode(allow_non_fake_inputs=True):
        source.make_fake(model)
        with recorder, like_cuda():
            watch = _Watch(recorder)
            if layers is not None:
                layering.watch_layers(model, layers, watch)  # type: ignore[arg-type]
            if rows is None:
                with torch.no_grad():
                    step = models.optimizer_step(program, model)
                    recorder.mark("0:step")
                    if step is not None:
                        step()
                return recorder.tape(since=len(recorder.segments) - 1)
            if program.train:
                recorder.mark("0:pre")
                loss = models.forward(program, model, rows)
                watch.backward = True
                recorder.mark("0:headB")
                loss.backward()
            else:
                recorder.mark("0:pre")
                with torch.no_grad():
                    models.forward(program, model, rows)
            return recorder.tape(since=1)


class _Watch:
    """What ``layering.watch_layers`` wants: tells a recorder where layers begin and end."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.backward = False

    def mark(self, name: str) -> None:
        self.recorder.mark(f"0:{name}")


def _together(micro: Tape, step: Tape, copies: int) -> Traced:
    """Both tapes by part, with the middle layers as often as the whole model has them."""
    calls = np.zeros((len(_PARTS), len(micro.operators) + len(step.operators)))
    work, per_row = np.zeros((len(_PARTS), *micro.work.shape[1:])), np.zeros((len(_PARTS), *micro.work.shape[1:]))
    for place, name in enumerate(micro.segments):
        word = name.rpartition(":")[2]
        part = int(word.endswith("B") or (word[0] == "B" and word[1:].isdigit()))
        times = copies + 1 if word in MIDDLE else 1
        work[part] += times * micro.work[place]
        per_row[part] += times * micro.work_per_row[place]
        mine = micro.calls[micro.calls[:, 0] == place]
        np.add.at(calls[part], mine[:, 1].astype(np.int64), times * mine[:, 2])
    work[2] = step.work.sum(axis=0)
    np.add.at(calls[2], len(micro.operators) + step.calls[:, 1].astype(np.int64), step.calls[:, 2])
    return Traced(
        work=work,
        work_per_row=per_row,
        operators=np.concatenate([micro.operators, step.operators]),
        operators_per_row=np.concatenate([micro.operators_per_row, step.operators_per_row]),
        calls=calls,
    )


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
