"""What a trace of DeepSpeed's ZeRO tells: its engine holds weights and state, and steps in its last backward pass.

Every layer is run, since its buffers are as large as the model's. Some whole optimizer steps come first, after which
the state is there, and the third stage knows in which order it gathers.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from autofit.costmodel.tracing.shard_layout import Held, Loading
from autofit.costmodel.tracing.timeline import CATEGORIES, Tape, blocks_of

if TYPE_CHECKING:
    from autofit.contract.recipe import Recipe
    from autofit.contract.trace import Ints
    from autofit.costmodel.tracing.layers import Marks
    from autofit.costmodel.tracing.shard_layout import Layout

STEPS = 3
"""Optimizer steps of a trace, of which the last one is kept."""
_STEPS_FROM = 2
"""Index of the segment with which the first step begins."""
_SPLITS_WEIGHTS = 3
"""The stage that does."""
_WEIGHTS, _STATE, _BATCH = (CATEGORIES.index(name) for name in ("weights", "state", "batch"))


def held(marks: Marks, layout: Layout, recipe: Recipe) -> Held:
    """What the engine has made before the first step, and how it came to it."""
    tape = marks.recorder.tape(until=_STEPS_FROM)
    loaded = tape.events[: tape.starts[1]]
    loaded = loaded[loaded >= 0]
    on_host = loaded[tape.categories[loaded] != _WEIGHTS]  # rows
    kept = np.setdiff1d(_left(tape), on_host)
    sizes = tape.bytes_at(marks.recorder.rows or 0)
    weights = tuple(int(size) for size in sizes[kept])
    if layout.zero == _SPLITS_WEIGHTS:  # one after the other comes to the device, and is split
        return Held(weights=weights)
    if recipe.mixed_precision != "no":  # copies of 16 bits come from there, and the weights themselves stay
        on_host = np.setdiff1d(loaded, kept)
    blocks = blocks_of(tape.events)
    mine = (tape.categories[blocks] != _BATCH) & ~np.isin(blocks, on_host)
    order = np.concatenate([kept, np.setdiff1d(np.arange(len(sizes)), kept)])
    number = np.argsort(order)[blocks]
    events = np.where(tape.events >= 0, number, ~number)[mine]
    return Held(weights=weights, loading=Loading(tuple(events.tolist()), tuple(int(size) for size in sizes[order])))


def state(marks: Marks) -> Tape:
    """What the first steps leave behind on the device, as a tape of two steps of which the first one makes it."""
    before, tape = marks.recorder.tape(until=_STEPS_FROM), marks.recorder.tape(until=marks.since)
    left = _left(tape)
    left = left[left >= len(before.sizes)]
    count = len(left)
    return dataclasses.replace(
        tape,
        events=np.arange(count),
        segments=("0:step", "1:step"),
        starts=np.array([0, count]),
        categories=np.full(count, _STATE),
        work=np.zeros_like(tape.work[:2]),
        work_per_row=np.zeros_like(tape.work_per_row[:2]),
        calls=tape.calls[:0],
        **{name: getattr(tape, name)[left] for name in ("sizes", "per_row", "most", "ops", "streams")},
    )


def _left(tape: Tape) -> Ints:
    """The blocks that live at the end of a tape, but for the batch."""
    return np.flatnonzero(tape.alive(len(tape.events) - 1) & (tape.categories != _BATCH))
