"""From tapes to what a plan needs: the peak, its phase, where it goes; and the work of a step.

A plan's run is put together from its parts (``m`` rows, ``a`` micro-steps to an optimizer step)::

    weights ──────────────────────────────────────────────────────────────────────────────
    state            ┌────────────────────────────────────────────────────────────────────
    gradients    ┌───┘ ┌──────────────────┐ ┌──────
    micro-steps  ▟█▙▟█▙ step  ▟█▙▟█▙▟█▙ step

so its peak is the largest of: load; a micro-step without gradients, or, where ``a`` is above one, one that finds them
there, both beside the state; the optimizer's step; a Trainer's evaluation step beside the state, which makes all logits
where the training makes a part of them at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autofit.contract.outcome import Phase
from autofit.contract.trace import Ints
from autofit.costmodel.seconds.operator_time import Operators
from autofit.costmodel.seconds.roofline import Totals
from autofit.costmodel.tracing.timeline import CATEGORIES, ELSEWHERE, Category, Floats, Tape

_WEIGHTS, _STATE, _BATCH, _COMMUNICATION = (
    CATEGORIES.index(name) for name in ("weights", "state", "batch", "communication")
)
_ALONE = "alone_"
_TRACED_MICRO_STEPS = 2
_EVALUATION = "evaluation_"
_PRODUCT = re.compile(r"aten\.(_?(addmm|mm|bmm|baddbmm|linear|addmm_activation|grouped_mm))\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a plan needs on the device, predicted.

    Attributes:
        peak_bytes: Of the tensors alone, as ``torch.cuda.max_memory_allocated`` counts them.
        phase: When the peak is.
        segment: Which part of the phase, see :mod:`autofit.costmodel.tracing.timeline`.
        operator: What was being computed.
        by_category: The bytes that make up the peak.
        elsewhere_bytes: What the plan puts on the host, or into memory that the driver moves, at most.
        bare_bytes: Weights, gradients and state: what no micro-batch gets below.
    """

    peak_bytes: int
    phase: Phase
    segment: str
    operator: str
    by_category: Mapping[Category, int]
    elsewhere_bytes: int
    bare_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: it remembers what it computed
class MicroPart:
    """Micro-steps of any number of rows, of the whole model.

    Attributes:
        tape: Lengthened; segments ``0:...`` and ``1:...``.
        evaluation: The tape of one evaluation step; ``None`` where none belongs to the training.
        weights: Bytes of each parameter and buffer.
        notes: What was assumed, in words.
        alone: The same of a micro-step that is the only one of its optimizer step, where that is no first one of
            several: a sharded one that is followed by another leaves whole gradients on every rank.
        buckets_bytes: What DDP's reducer holds as long as the weights.
        host_bytes: Of the weights that wait on the host.
        loading: How the weights get onto the device, as events and bytes of blocks, of which the first are they; empty
            where one comes after the other.
    """

    tape: Tape
    evaluation: Tape | None = None
    weights: Ints
    notes: tuple[str, ...] = ()
    alone: Tape | None = None
    buckets_bytes: int = 0
    host_bytes: int = 0
    loading: tuple[Ints, Ints] | None = None

    @property
    def held_bytes(self) -> float:
        """Bytes that are there from the first step to the last, without state: weights, and the reducer's buckets."""
        return float(self.weights.sum()) + self.buckets_bytes

    def tape_of(self, accumulation: int) -> Tape:
        """The tape whose first micro-step begins an accumulation of so many."""
        return self.alone if self.alone is not None and accumulation == 1 else self.tape

    def peaks(self, rows: Floats, *, adding: bool) -> tuple[Floats, Ints]:
        """Peak bytes beside the weights and the state at each of ``rows``, and the events that make them."""
        return _at(rows, *(self._highest_adding if adding else self._highest_fresh))

    @functools.cached_property
    def _highest_fresh(self) -> tuple[Floats, Floats, Ints]:
        return self._highest(self.tape_of(1), "0:step")

    @functools.cached_property
    def _highest_adding(self) -> tuple[Floats, Floats, Ints]:
        return self._highest(self.tape, "1:step")

    def evaluation_peaks(self, rows: Floats) -> tuple[Floats, Ints]:
        """Peak bytes of evaluating so many ``rows``, beside the weights and the state, and the events; 0 if none is."""
        if self.evaluation is None:
            return np.zeros(len(rows)), np.zeros(len(rows), dtype=np.int64)
        return _at(rows, *self._highest_evaluating)

    @functools.cached_property
    def _highest_evaluating(self) -> tuple[Floats, Floats, Ints]:
        assert self.evaluation is not None
        zero, slope = self.evaluation.lines()
        moments = _hull(zero, slope)
        return zero[moments], slope[moments], moments

    def _highest(self, tape: Tape, stop: str) -> tuple[Floats, Floats, Ints]:
        """Of all moments before a segment those that are the peak at some number of rows: lines, and events."""
        end = int(tape.starts[tape.segments.index(stop)])
        zero, slope = (line[:end] for line in tape.lines())
        moments = _hull(zero, slope)
        return zero[moments], slope[moments], moments

    def without(self, *names: Category) -> MicroPart:
        """The same where blocks of some categories are not on the device."""
        alone = None if self.alone is None else self.alone.without(*names)
        return dataclasses.replace(self, tape=self.tape.without(*names), alone=alone)

    def batch_bytes_per_row(self) -> float:
        """What one row of a batch holds on the device."""
        batch = self.tape.categories == _BATCH
        return float(self.tape.per_row[batch].sum()) / _TRACED_MICRO_STEPS

    def activation_bytes_per_row(self) -> float:
        """What one row of a batch makes the device hold at once, at most."""
        return float(self.tape.lines()[1].max())

    def work(self, rows: Floats) -> Totals:
        """The work of one micro-step that finds gradients, at each of ``rows``."""
        mine = np.array([name.startswith("1:") for name in self.tape.segments])
        zero, slope = self.tape.work[mine].sum(axis=0), self.tape.work_per_row[mine].sum(axis=0)
        return _totals(zero[None] + slope[None] * rows[:, None, None])

    def operators(self, rows: float) -> Operators:
        """The operators of one micro-step that finds gradients, each shape once."""
        return _operators(self.tape, _of(self.tape, "1:"), rows)

    def exchanges(self, accumulation: int) -> Operators:
        """The operators of all micro-steps of an optimizer step, of which the last alone may send gradients.

        Their sizes are those of one row: for what does not grow with the rows, as collectives.
        """
        if accumulation == 1:
            tape = self.tape_of(1)
            return _operators(tape, _of(tape, "0:" if tape is self.alone else "1:"), 1.0)
        first, last = (_operators(self.tape, _of(self.tape, name), 1.0) for name in ("0:", "1:"))
        times = first.calls * (accumulation - 1)
        return Operators(
            **{
                one.name: np.concatenate(
                    [times if one.name == "calls" else getattr(first, one.name), getattr(last, one.name)]
                )
                for one in dataclasses.fields(Operators)
            }
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerPart:
    """The optimizer's step, of the whole model.

    Attributes:
        tape: Two steps, with gradients given.
        elsewhere_bytes: State on the host or in managed memory.
    """

    tape: Tape
    elsewhere_bytes: int

    @functools.cached_property
    def peak_bytes(self) -> float:
        """Beside the weights."""
        return float(self.tape.live(0).max())

    @functools.cached_property
    def state_bytes(self) -> float:
        """Of the optimizer, on the device."""
        return float(self.tape.sizes[self.tape.categories == _STATE].sum())

    @functools.cached_property
    def gradient_bytes(self) -> float:
        """Of all trainable parameters."""
        return float(self.tape.sizes[self.tape.categories == CATEGORIES.index("gradients")].sum()) / 2

    def work(self) -> Totals:
        """The work of one step."""
        mine = [place for place, name in enumerate(self.tape.segments) if name.endswith(":step")]
        return _totals(self.tape.work[mine[-1]])

    def operators(self) -> Operators:
        """The operators of one step, each shape once."""
        mine = [place for place, name in enumerate(self.tape.segments) if name.endswith(":step")]
        return _operators(self.tape, mine[-1:], 0.0)


def _of(tape: Tape, micro_step: str) -> list[int]:
    return [at for at, name in enumerate(tape.segments) if name.startswith(micro_step)]


def _operators(tape: Tape, segments: list[int], rows: float) -> Operators:
    mine = tape.calls[np.isin(tape.calls[:, 0], segments)]
    counts = np.zeros(len(tape.operators))
    np.add.at(counts, mine[:, 1].astype(np.int64), mine[:, 2])
    called = counts > 0
    return Operators.from_rows(tape.operators[called] + tape.operators_per_row[called] * rows, counts[called])


def need(
    micro: MicroPart, optimizer: OptimizerPart, *, rows: int, accumulation: int, waiting: bool, evaluated_rows: int = 0
) -> Need:
    """What one plan needs.

    Args:
        micro: Its micro-steps.
        optimizer: Its optimizer.
        rows: The micro-batch.
        accumulation: Micro-steps to an optimizer step.
        waiting: Whether the batches of all of them lie on the device from the beginning, as a Trainer has it.
        evaluated_rows: Of an evaluation step.
    """
    weights, held, of_micro = float(micro.weights.sum()), micro.held_bytes, micro.tape_of(accumulation)
    state = optimizer.state_bytes
    queue = micro.batch_bytes_per_row() * rows * max(0, accumulation - _TRACED_MICRO_STEPS) if waiting else 0.0
    peaks, moments = micro.peaks(np.array([float(rows)]), adding=accumulation > 1)
    beside = {_WEIGHTS: weights, _STATE: state, _BATCH: queue, _COMMUNICATION: held - weights}
    step = optimizer.tape.live(0)
    at_step = int(step.argmax())
    in_micro = float(peaks[0]) + state + queue
    bare = weights + state + optimizer.gradient_bytes
    evaluated, events = micro.evaluation_peaks(np.array([float(evaluated_rows)]))
    done = _done_batches(micro, rows, accumulation) if waiting else 0.0
    in_evaluation = float(evaluated[0]) + state + done
    if micro.evaluation is not None and in_evaluation > max(in_micro, float(step[at_step]) + queue):
        tape, moment, total = micro.evaluation, int(events[0]), held + in_evaluation
        zero, slope = tape.by_category(moment)
        parts, beside[_BATCH] = zero + slope * evaluated_rows, done
    elif in_micro >= float(step[at_step]) + queue:
        tape, moment, total = of_micro, int(moments[0]), held + in_micro
        zero, slope = tape.by_category(moment)
        parts = zero + slope * rows
    else:
        tape, moment, total = optimizer.tape, at_step, held + float(step[at_step]) + queue
        parts, _ = tape.by_category(moment)
        beside[_STATE] = 0.0
    for category, bytes_beside in beside.items():
        parts[category] += bytes_beside
    segment = "evaluation" if tape is micro.evaluation else tape.segment_at(moment).rpartition(":")[2]
    return Need(
        peak_bytes=round(total),
        phase="optimizer" if tape is optimizer.tape else phase_of(segment),
        segment=segment,
        operator=operator_at(tape, moment),
        by_category={
            name: round(part) for name, part in zip(CATEGORIES, parts, strict=True) if part >= 1 and name != "elsewhere"
        },
        elsewhere_bytes=micro.host_bytes
        + optimizer.elsewhere_bytes
        + round(float(micro.tape.live_elsewhere(rows).max())),
        bare_bytes=round(bare),
    )


def peaks(
    micro: MicroPart,
    optimizer: OptimizerPart,
    rows: Ints,
    accumulation: Ints,
    *,
    waiting: bool,
    evaluated_rows: Ints | None = None,
) -> Floats:
    """:attr:`Need.peak_bytes` of many plans that share their parts."""
    in_micro = _micro_peaks(micro, rows, accumulation) + optimizer.state_bytes
    trained = _queue(micro, rows, accumulation, waiting=waiting) + np.maximum(in_micro, optimizer.peak_bytes)
    if micro.evaluation is not None and evaluated_rows is not None:
        evaluated, _ = micro.evaluation_peaks(evaluated_rows.astype(np.float64))
        done = _done_batches(micro, rows, accumulation) * waiting
        trained = np.maximum(trained, evaluated + optimizer.state_bytes + done)
    return micro.held_bytes + trained


def host_offload_peaks(micro: MicroPart, held_bytes: float, rows: Ints, accumulation: Ints, *, waiting: bool) -> Floats:
    """The same where weights, gradients and state wait on the host, but for ``held_bytes``; no more than about."""
    in_micro = _micro_peaks(micro.without("gradients", "copies"), rows, accumulation)
    return held_bytes + _queue(micro, rows, accumulation, waiting=waiting) + in_micro


def _micro_peaks(micro: MicroPart, rows: Ints, accumulation: Ints) -> Floats:
    wide = rows.astype(np.float64)
    fresh, _ = micro.peaks(wide, adding=False)
    adding, _ = micro.peaks(wide, adding=True)
    return np.where(accumulation > 1, adding, fresh)


def _done_batches(micro: MicroPart, rows: Any, accumulation: Any) -> Any:
    """Bytes of the batches of the optimizer step before an evaluation, which a Trainer holds until the next one."""
    return rows * accumulation * micro.batch_bytes_per_row()


def _queue(micro: MicroPart, rows: Ints, accumulation: Ints, *, waiting: bool) -> Floats:
    """Bytes of the batches that wait on the device."""
    waits = np.maximum(0, accumulation - _TRACED_MICRO_STEPS) * waiting
    waiting_rows: Floats = (rows * waits).astype(np.float64)
    return waiting_rows * micro.batch_bytes_per_row()


class Requests(NamedTuple):
    """Arguments of :func:`autofit.costmodel.allocator.replay`."""

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
    """A whole run as allocations and frees for :mod:`autofit.costmodel.allocator`.

    Load, some optimizer steps, an evaluation step. Two micro-steps stand for any number above one: what more of them
    ask for, the allocator has in store.

    Args:
        micro: Its micro-steps.
        optimizer: Its optimizer.
        rows: The micro-batch.
        accumulation: Micro-steps to an optimizer step.
        steps: How many of them. The first makes the state; the third finds other gaps between blocks than the second.
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
    micro_sizes = tape.bytes_at(rows)
    gradient = tape.categories == CATEGORIES.index("gradients")
    step_tape = optimizer.tape
    given = step_tape.categories == CATEGORIES.index("gradients")
    elsewhere = step_tape.categories == ELSEWHERE
    places = [place for place, name in enumerate(step_tape.segments) if name.endswith(":step")]
    begins = [_first_product(tape, segment) for segment in ("0:pre", "0:headB")[: len(workspaces)]]
    for turn in range(steps):
        base = len(sizes)
        sizes += micro_sizes.tolist()
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
    if micro.evaluation is not None and evaluated_rows:
        base = len(sizes)
        sizes += micro.evaluation.bytes_at(evaluated_rows).tolist()
        streams += micro.evaluation.streams.tolist()
        events += _moved(micro.evaluation, base, 0, len(micro.evaluation.events))
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


def phase_of(segment: str) -> Phase:
    """The phase of a step that a segment of a micro-step belongs to."""
    if segment in {"head", "pre", "rest", "begin", "evaluation"} or segment.startswith("F"):
        return "forward"
    return "optimizer" if segment == "step" else "backward"


def operator_at(tape: Tape, moment: int) -> str:
    """Name of the operator that made the block of an event, such as ``aten._log_softmax_backward_data``."""
    event = int(tape.events[moment])
    name: str = tape.names[int(tape.ops[event if event >= 0 else ~event])]
    return name.removesuffix(".default")


def _totals(work: Floats) -> Totals:
    return Totals(flops=work[..., 0], moved_bytes=work[..., 1], operators=np.asarray(work[..., 2].sum(axis=-1)))


def _at(rows: Floats, zero: Floats, slope: Floats, moments: Ints) -> tuple[Floats, Ints]:
    """The highest of some lines at each of ``rows``, and the event that it stands for."""
    at = zero[None, :] + slope[None, :] * rows[:, None]
    best = at.argmax(axis=1)
    return at[np.arange(len(rows)), best], moments[best]


def _hull(zero: Floats, slope: Floats) -> Ints:
    """Indices of the lines that are the highest somewhere at zero rows or more."""
    order = np.lexsort((zero, slope))
    at_zero = zero[order]
    steeper = np.maximum.accumulate(at_zero[::-1])[::-1]
    # what is no higher at zero than a line that climbs as fast is not above it anywhere
    order = order[np.append(at_zero[:-1] > steeper[1:], np.ones(len(order[-1:]), dtype=bool))]
    kept: list[int] = []
    for line in order.tolist():
        while len(kept) > 1 and _crossing(zero, slope, kept[-2], line) <= _crossing(zero, slope, kept[-2], kept[-1]):
            kept.pop()
        kept.append(line)
    return np.array(kept, dtype=np.int64)


def _crossing(zero: Floats, slope: Floats, first: int, second: int) -> float:
    climb = float(slope[second] - slope[first])
    return float(zero[first] - zero[second]) / climb if climb else np.inf


def pack(micro: MicroPart | None, optimizer: OptimizerPart | None) -> dict[str, Any]:
    """Arrays of one part, for :func:`numpy.savez`."""
    part = micro or optimizer
    assert part is not None
    arrays: dict[str, Any] = dict(part.tape.arrays())
    if micro is not None:
        arrays["weights"] = micro.weights
        if micro.loading is not None:
            arrays["load_events"], arrays["load_sizes"] = micro.loading
        arrays["notes"] = np.array(micro.notes, dtype=np.str_)
        arrays["buckets"] = np.array([micro.buckets_bytes, micro.host_bytes])
        if micro.alone is not None:
            arrays |= {f"{_ALONE}{name}": array for name, array in micro.alone.arrays().items()}
        if micro.evaluation is not None:
            arrays |= {f"{_EVALUATION}{name}": array for name, array in micro.evaluation.arrays().items()}
    else:
        assert optimizer is not None
        arrays["elsewhere"] = np.array(optimizer.elsewhere_bytes)
    return arrays


def _tape_in(arrays: Mapping[str, Any], prefix: str) -> Tape | None:
    mine = {name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}
    return Tape.from_arrays(mine) if mine else None


def unpack(arrays: Mapping[str, Any]) -> MicroPart | OptimizerPart:
    """What :func:`pack` packed."""
    tape = Tape.from_arrays(arrays)
    if "weights" in arrays:
        notes = tuple(str(note) for note in arrays["notes"])
        alone, evaluation = (_tape_in(arrays, prefix) for prefix in (_ALONE, _EVALUATION))
        return MicroPart(
            tape=tape,
            evaluation=evaluation,
            weights=arrays["weights"].astype(np.int64),
            notes=notes,
            alone=alone,
            buckets_bytes=int(arrays["buckets"][0]),
            host_bytes=int(arrays["buckets"][1]),
            loading=(arrays["load_events"], arrays["load_sizes"]) if "load_events" in arrays else None,
        )
    return OptimizerPart(tape=tape, elsewhere_bytes=int(arrays["elsewhere"]))
