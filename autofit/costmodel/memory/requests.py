"""A plan's run as a sequence of allocations and frees."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autofit.contract.trace import Ints
from autofit.costmodel.memory.parts import MicroPart, OptimizerPart
from autofit.costmodel.tracing.timeline import CATEGORIES, ELSEWHERE, Floats, Tape, blocks_of, live_before

_STATE, _GRADIENTS = (CATEGORIES.index(name) for name in ("state", "gradients"))
_BEFORE_EVALUATION = 2
"""Optimizer steps before the evaluation, as in a trial (:mod:`autofit.training.loops`)."""
_PRODUCT = re.compile(r"aten\.(_?(addmm|mm|bmm|baddbmm|linear|addmm_activation|grouped_mm))\.")


class Requests(NamedTuple):
    """Arguments of :func:`autofit.costmodel.memory.allocator.replay`: events, and bytes and stream of each block."""

    events: Ints
    sizes: Ints
    streams: Ints


def requests(
    micro: MicroPart,
    optimizer: OptimizerPart,
    *,
    rows: int,
    accumulation: int,
    steps: int = 3,
    evaluated_rows: int = 0,
    workspaces: Sequence[int] = (),
) -> Requests:
    """A whole run as allocations and frees for :mod:`autofit.costmodel.memory.allocator`.

    Load, two optimizer steps, an evaluation step, and the other steps, in the order of a trial. Two micro-steps stand
    for any number above one: what more of them ask for, the allocator has in store.

    Args:
        micro: Its micro-steps.
        optimizer: Its optimizer.
        rows: The micro-batch.
        accumulation: Micro-steps to an optimizer step.
        steps: How many of them. The first makes the state; the third finds other gaps between blocks than the second,
            and those that an evaluation has left.
        evaluated_rows: Of the evaluation step; without any it is left out.
        workspaces: Bytes that cuBLAS keeps, from the first forward pass and from the first backward pass on.
    """
    load_events, loaded = micro.loading or (np.arange(len(micro.weights)), micro.weights)
    run = _Run()
    first = run.blocks(loaded)
    run.happen(load_events, first)
    if micro.buckets_bytes:
        run.make(run.blocks(np.array([micro.buckets_bytes])))
    kept = [run.blocks(np.array([workspace])) for workspace in workspaces]
    state = optimizer.tape.categories == _STATE
    stop = "1:step" if accumulation > 1 else "0:step"
    tape = micro.tape_of(accumulation)
    end = int(tape.starts[tape.segments.index(stop)])
    evaluation = micro.evaluation if evaluated_rows else None
    usual = tape.after_a_step().bytes_at(rows)
    gradient = tape.categories == _GRADIENTS
    step_tape = optimizer.tape
    given = step_tape.categories == _GRADIENTS
    elsewhere = step_tape.categories == ELSEWHERE
    places = [place for place, name in enumerate(step_tape.segments) if name.endswith(":step")]
    begins = [_first_product(tape, segment) for segment in ("0:pre", "0:headB")[: len(workspaces)]]
    alive = np.flatnonzero(tape.alive(end - 1))
    for turn in range(steps):
        follows = evaluation is not None and turn == _BEFORE_EVALUATION
        base = run.blocks(tape.bytes_at(rows) if follows else usual, tape.streams)
        done = 0
        for begin, workspace in zip(begins, kept, strict=True) if turn == 0 else ():
            run.happen(_on_device(tape, done, begin), base)
            run.make(workspace)
            done = begin
        run.happen(_on_device(tape, done, end), base)
        begin, past = step_tape.bounds(places[min(turn, len(places) - 1)])
        left_out = given | elsewhere | (state & (turn > 0))
        stepping = step_tape.events[begin:past]
        run.happen(stepping[~left_out[blocks_of(stepping)]], run.blocks(step_tape.sizes, step_tape.streams))
        run.happen(~alive[~gradient[alive]], base)
        run.happen(~alive[gradient[alive]], base)
        if evaluation is not None and turn == min(_BEFORE_EVALUATION, steps) - 1:
            base = run.blocks(evaluation.bytes_at(evaluated_rows), evaluation.streams)
            past = len(evaluation.events)
            run.happen(_on_device(evaluation, 0, past), base)
            # weights that stay gathered, which the next step is traced to gather itself
            run.happen(~np.flatnonzero(evaluation.alive(past - 1)), base)
    return run.requests()


class _Run:
    """Events of blocks, while they are put together."""

    def __init__(self) -> None:
        self.count = 0
        self.events: list[Ints] = []
        self.sizes: list[Floats | Ints] = []
        self.streams: list[Ints] = []

    def blocks(self, sizes: Floats | Ints, streams: Ints | None = None) -> int:
        """The number of the first of some more blocks, which lie on stream 0 where none is told."""
        first = self.count
        self.count += len(sizes)
        self.sizes.append(sizes)
        self.streams.append(np.zeros(len(sizes), dtype=np.int64) if streams is None else streams)
        return first

    def make(self, block: int) -> None:
        """One block is allocated."""
        self.events.append(np.array([block]))

    def happen(self, events: Ints, base: int) -> None:
        """Events of blocks whose numbers count from ``base`` on."""
        self.events.append(np.where(events >= 0, events + base, events - base))

    def requests(self) -> Requests:
        """All of it, sizes in whole bytes, without frees of what is not there."""
        sizes = np.rint(np.concatenate(self.sizes)).astype(np.int64)
        return Requests(_balanced(np.concatenate(self.events)), sizes, np.concatenate(self.streams))


def _first_product(tape: Tape, segment: str) -> int:
    """The event after the first matrix product from the beginning of a segment on has its result."""
    start = int(tape.starts[tape.segments.index(segment)]) if segment in tape.segments else 0
    products = [place for place, name in enumerate(tape.names) if _PRODUCT.match(name)]
    made = tape.events[start:]
    found = np.flatnonzero((made >= 0) & np.isin(tape.ops[np.maximum(made, 0)], products))
    return start + int(found[0]) + 1 if found.size else start


def _on_device(tape: Tape, begin: int, end: int) -> Ints:
    """The events of a tape from ``begin`` to ``end``, of blocks on the device."""
    events = tape.events[begin:end]
    mine: Ints = events[tape.categories[blocks_of(events)] != ELSEWHERE]
    return mine


def _balanced(events: Ints) -> Ints:
    """Leave out frees of what was not allocated, and second frees."""
    balanced: Ints = events[(events >= 0) | live_before(events)]
    return balanced
