"""A plan's run as a sequence of allocations and frees."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autofit.costmodel.memory.parts import MicroPart, OptimizerPart
from autofit.costmodel.tracing.timeline import CATEGORIES, ELSEWHERE, Tape

_STATE, _GRADIENTS = (CATEGORIES.index(name) for name in ("state", "gradients"))
_BEFORE_EVALUATION = 2
"""Optimizer steps before the evaluation, as in a trial (:mod:`autofit.training.loops`)."""
_PRODUCT = re.compile(r"aten\.(_?(addmm|mm|bmm|baddbmm|linear|addmm_activation|grouped_mm))\.")


class Requests(NamedTuple):
    """Arguments of :func:`autofit.costmodel.memory.allocator.replay`."""

    events: list[int]
    sizes: list[float]
    streams: list[int]


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
    sizes: list[float] = [*loaded.tolist(), *([micro.buckets_bytes] if micro.buckets_bytes else [])]
    streams = [0] * (len(sizes) + len(workspaces))
    events = [*load_events.tolist(), *range(len(loaded), len(sizes))]
    kept = range(len(sizes), len(sizes) + len(workspaces))
    sizes += workspaces
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
    for turn in range(steps):
        base = len(sizes)
        follows = evaluation is not None and turn == _BEFORE_EVALUATION
        sizes += (tape.bytes_at(rows) if follows else usual).tolist()
        streams += tape.streams.tolist()
        done = 0
        for begin, workspace in zip(begins, kept, strict=True) if turn == 0 else ():
            events += [*_moved(tape, base, done, begin), workspace]
            done = begin
        events += _moved(tape, base, done, end)
        alive = np.flatnonzero(tape.alive(end - 1))
        begin, past = step_tape.bounds(places[min(turn, len(places) - 1)])
        offset = len(sizes)
        sizes += step_tape.sizes.tolist()
        streams += step_tape.streams.tolist()
        for event in step_tape.events[begin:past].tolist():
            block = event if event >= 0 else ~event
            if given[block] or elsewhere[block] or (state[block] and turn > 0):
                continue
            events.append(event + offset if event >= 0 else event - offset)
        events += [~int(block + base) for block in alive if not gradient[block]]
        events += [~int(block + base) for block in alive if gradient[block]]
        if evaluation is not None and turn == min(_BEFORE_EVALUATION, steps) - 1:
            base = len(sizes)
            sizes += evaluation.bytes_at(evaluated_rows).tolist()
            streams += evaluation.streams.tolist()
            past = len(evaluation.events)
            events += _moved(evaluation, base, 0, past)
            # weights that stay gathered, which the next step is traced to gather itself
            events += [~int(block + base) for block in np.flatnonzero(evaluation.alive(past - 1))]
    return Requests(_balanced(events), sizes, streams)


def _first_product(tape: Tape, segment: str) -> int:
    """The event after the first matrix product from the beginning of a segment on has its result."""
    start = int(tape.starts[tape.segments.index(segment)]) if segment in tape.segments else 0
    products = [place for place, name in enumerate(tape.names) if _PRODUCT.match(name)]
    made = tape.events[start:]
    found = np.flatnonzero((made >= 0) & np.isin(tape.ops[np.maximum(made, 0)], products))
    return start + int(found[0]) + 1 if found.size else start


def _moved(tape: Tape, base: int, begin: int, end: int) -> list[int]:
    """The events of a tape from ``begin`` to ``end``, of blocks on the device, numbered from ``base`` on."""
    mine = tape.events[begin:end]
    mine = mine[tape.categories[np.where(mine >= 0, mine, ~mine)] != ELSEWHERE]
    moved: list[int] = np.where(mine >= 0, mine + base, mine - base).tolist()
    return moved


def _balanced(events: list[int]) -> list[int]:
    """Leave out frees of what was not allocated, and second frees."""
    alive: set[int] = set()
    kept = []
    for event in events:
        if event >= 0:
            alive.add(event)
        elif ~event in alive:
            alive.discard(~event)
        else:
            continue
        kept.append(event)
    return kept
