"""The two parts of a plan's run, as traced: its micro-steps and its optimizer's step; and how they are kept."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autofit.contract.trace import Ints
from autofit.costmodel.seconds.operator_time import Operators
from autofit.costmodel.seconds.roofline import Totals
from autofit.costmodel.tracing.timeline import CATEGORIES, Category, Floats, Tape, blocks_of

_STATE, _BATCH, _GRADIENTS = (CATEGORIES.index(name) for name in ("state", "batch", "gradients"))
_ALONE = "alone_"
_EVALUATION = "evaluation_"
TRACED_MICRO_STEPS = 2


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
        """The tape whose first micro-step begins an accumulation of so many; of a single one, it alone."""
        if accumulation > 1:
            return self.tape
        return self._first if self.alone is None else self.alone

    @functools.cached_property
    def _first(self) -> Tape:
        return first_alone(self.tape)

    def peaks(self, rows: Floats, *, adding: bool) -> tuple[Floats, Ints]:
        """Peak bytes beside the weights and the state at each of ``rows``, and the events that make them."""
        return (self._highest_adding if adding else self._highest_fresh).at(rows)

    @functools.cached_property
    def _highest_fresh(self) -> _Highest:
        return _Highest.of(self.tape_of(1), "0:step")

    @functools.cached_property
    def _highest_adding(self) -> _Highest:
        return _Highest.of(self.tape, "1:step")

    def evaluation_peaks(self, rows: Floats) -> tuple[Floats, Ints]:
        """Peak bytes of evaluating so many ``rows``, beside the weights and the state, and the events; 0 if none is."""
        if self.evaluation is None:
            return np.zeros(len(rows)), np.zeros(len(rows), dtype=np.int64)
        return self._highest_evaluating.at(rows)

    @functools.cached_property
    def _highest_evaluating(self) -> _Highest:
        assert self.evaluation is not None
        return _Highest.of(self.evaluation)

    def without(self, *names: Category) -> MicroPart:
        """The same where blocks of some categories are not on the device."""
        alone = None if self.alone is None else self.alone.without(*names)
        return dataclasses.replace(self, tape=self.tape.without(*names), alone=alone)

    def batch_bytes_per_row(self) -> float:
        """What one row of a batch holds on the device."""
        batch = self.tape.categories == _BATCH
        return float(self.tape.per_row[batch].sum()) / TRACED_MICRO_STEPS

    def activation_bytes_per_row(self) -> float:
        """What one row of a batch makes the device hold at once, at most, without what has stopped growing."""
        return float(self.tape.lines(np.inf)[1].max())

    def work(self, rows: Floats) -> Totals:
        """The work of one micro-step that finds gradients, at each of ``rows``."""
        mine = np.array([name.startswith("1:") for name in self.tape.segments])
        zero, slope = self.tape.work[mine].sum(axis=0), self.tape.work_per_row[mine].sum(axis=0)
        return _totals(zero[None] + slope[None] * rows[:, None, None])

    def operators(self, rows: float) -> Operators:
        """The operators of one micro-step that finds gradients, each shape once."""
        return _operators(self.tape, _of(self.tape, "1:"), rows)

    def exchanges(self, accumulation: int, rows: float = 1.0) -> Operators:
        """The operators of all micro-steps of an optimizer step, of which the last alone may send gradients.

        Their sizes are those of one row where none are given: for what does not grow with the rows, as FSDP's.
        """
        if accumulation == 1:
            return self._called("1:" if self.alone is None else "0:", rows, alone=self.alone)
        first, last = (self._called(name, rows) for name in ("0:", "1:"))
        return Operators.joined([dataclasses.replace(first, calls=first.calls * (accumulation - 1)), last])

    def _called(self, micro_step: str, rows: float, *, alone: Tape | None = None) -> Operators:
        """The operators of one of the micro-steps; kept, since plans of each accumulation share them."""
        key = (micro_step, rows, alone is not None)
        if key not in self._kept:
            tape = alone or self.tape
            self._kept[key] = _operators(tape, _of(tape, micro_step), rows)
        return self._kept[key]

    @functools.cached_property
    def _kept(self) -> dict[tuple[str, float, bool], Operators]:
        return {}


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
        return float(self.tape.sizes[self.tape.categories == _GRADIENTS].sum()) / 2

    def work(self) -> Totals:
        """The work of one step."""
        mine = [place for place, name in enumerate(self.tape.segments) if name.endswith(":step")]
        return _totals(self.tape.work[mine[-1]])

    def operators(self) -> Operators:
        """The operators of one step, each shape once."""
        mine = [place for place, name in enumerate(self.tape.segments) if name.endswith(":step")]
        return _operators(self.tape, mine[-1:], 0.0)


def first_alone(tape: Tape) -> Tape:
    """The first micro-step as the only one of its optimizer step, without what the loader has brought for the second.

    Where gradients are sent, each micro-step of ``tape`` sends them.
    """
    past = tape.segments.index("0:step")
    end = int(tape.starts[past])
    blocks = blocks_of(tape.events)
    batches = np.flatnonzero(tape.categories == _BATCH)
    # what a loader brings is there from the beginning, the second one's behind the first one's; the rest as it is used
    brought = int(np.sum(batches <= blocks[:end].max())) - len(batches) // TRACED_MICRO_STEPS
    mine = ~np.isin(blocks, batches[brought : 2 * brought])
    mine[end:] = False
    kept = np.isin(np.arange(len(tape.sizes)), blocks[mine])
    number = (np.cumsum(kept) - 1)[blocks]
    columns = ("sizes", "per_row", "most", "categories", "ops", "streams")
    return dataclasses.replace(
        tape,
        events=np.where(tape.events >= 0, number, ~number)[mine],
        segments=tape.segments[: past + 1],
        starts=np.concatenate([[0], np.cumsum(mine)])[tape.starts[: past + 1]],
        work=tape.work[: past + 1],
        work_per_row=tape.work_per_row[: past + 1],
        calls=tape.calls[tape.calls[:, 0] < past],
        **{name: getattr(tape, name)[kept] for name in columns},
    )


def _of(tape: Tape, micro_step: str) -> list[int]:
    return [at for at, name in enumerate(tape.segments) if name.startswith(micro_step)]


def _operators(tape: Tape, segments: list[int], rows: float) -> Operators:
    mine = tape.calls[np.isin(tape.calls[:, 0], segments)]
    counts = np.zeros(len(tape.operators))
    np.add.at(counts, mine[:, 1].astype(np.int64), mine[:, 2] + mine[:, 3] * rows)
    called = counts > 0
    return Operators.from_rows(tape.operators[called] + tape.operators_per_row[called] * rows, counts[called])


def _totals(work: Floats) -> Totals:
    return Totals(flops=work[..., 0], moved_bytes=work[..., 1], operators=np.asarray(work[..., 2].sum(axis=-1)))


@dataclass(frozen=True, slots=True)
class _Highest:
    """The moments of a tape that are the peak at some number of rows.

    Attributes:
        ends: See :meth:`Tape.ends`.
        lines: Below the first of them, between each two and above the last: bytes at no rows, those that a row adds,
            and the events, of each moment.
    """

    ends: Floats
    lines: tuple[tuple[Floats, Floats, Ints], ...]

    @classmethod
    def of(cls, tape: Tape, stop: str | None = None) -> _Highest:
        """Of all moments before a segment, or of all."""
        end = None if stop is None else int(tape.starts[tape.segments.index(stop)])
        ends, found = tape.ends(), []
        for rows in (*ends, np.inf):
            zero, slope = (line[:end] for line in tape.lines(rows))
            moments = _hull(zero, slope)
            found.append((zero[moments], slope[moments], moments))
        return cls(ends, tuple(found))

    def at(self, rows: Floats) -> tuple[Floats, Ints]:
        """The peak at each of ``rows``, and the event that makes it."""
        peaks, events = np.zeros(len(rows)), np.zeros(len(rows), dtype=np.int64)
        places = np.searchsorted(self.ends, rows)
        for place in set(places.tolist()):
            zero, slope, moments = self.lines[place]
            at = zero[None, :] + slope[None, :] * rows[places == place][:, None]
            best = at.argmax(axis=1)
            peaks[places == place], events[places == place] = at[np.arange(len(at)), best], moments[best]
        return peaks, events


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
