"""A tape: every allocation and free of a traced run, in order, and what can be read off it.

A run is traced with few rows and few layers. Two things continue it to the real size, without running it again:

- **More layers.** The tape is cut into segments by the boundaries of the repeated layers; the middle one of three
  periods is copied as often as layers are missing, and what one layer hands to the next is handed on from copy to copy
  (:mod:`autofit.costmodel.tracing.longer_tape`).
- **More rows.** The micro-batch of a trace is a prime number that divides no other size: what it divides grows with the
  rows, and each block's size is a line ``at_zero + per_row x rows``. Every moment of the run is so continued by itself,
  and the peak is taken afterwards: which moment is the peak changes with the size.

Segments of a micro-step, in order (``F``: forward, ``B``: backward, 0 to 2: the periods)::

    pre | F0 | F1 | F2 | rest | head || loss | headB | restB | B2 | B1 | B0 | preB

No torch in here: tapes are arrays, and travel between processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from autofit.contract.trace import Ints
from autofit.system.errors import AutofitError
from autofit.system.units import MIB

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

Category = Literal[
    "weights", "copies", "gradients", "state", "activations", "logits", "batch", "temporaries", "communication",
    "elsewhere",
]  # fmt: skip
CATEGORIES: tuple[Category, ...] = (
    "weights", "copies", "gradients", "state", "activations", "logits", "batch", "temporaries", "communication",
    "elsewhere",
)  # fmt: skip
"""``copies`` are the 16-bit copies of weights that autocast makes; ``logits`` the head's output, its loss and what
their backward pass needs; ``temporaries`` die in the phase that made them; ``communication`` is gathered parameters and
the buffers of collectives; ``elsewhere`` is not on the device: on the
host, or in memory that the driver moves."""
ELSEWHERE = CATEGORIES.index("elsewhere")

AFTER_EVALUATION = "all-gather after an evaluation"
"""Name of the operator whose blocks only the first micro-step after an evaluation has."""

_FEW_ROWS = 16
_LARGE = 16 * MIB
_FLOATS = ("sizes", "per_row", "most", "work", "work_per_row", "operators", "operators_per_row", "calls")


class UnlikeError(AutofitError):
    """Two tapes that should be alike are not; the caller traces the real size instead."""

    exit_code = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class Tape:
    """Allocations and frees in order.

    Attributes:
        events: ``k >= 0`` allocates block ``k``, ``~k`` frees it.
        sizes: Bytes of each block; with ``per_row``, those of no rows at all, where it is there then.
        per_row: Bytes of each block that a row of the micro-batch adds.
        most: Bytes that a block has at most, of any rows; infinite for most blocks.
        categories: Index into :data:`CATEGORIES` of each block.
        ops: Index into ``names`` of the operator that made each block.
        streams: Number of the stream that each block was allocated on; 0 is the one that computes.
        names: Names of operators.
        segments: Name of each segment, in order.
        starts: Index into ``events`` at which each segment begins, in order.
        work: For each segment: operators by kind, see :attr:`kinds`; columns are FLOPs, bytes moved and calls.
        work_per_row: The same for each row of the micro-batch.
        kinds: What the rows of ``work`` are.
        operators: Each operator that differs from the others in kind or shape, of shape ``(operators, columns)``;
            columns are those of :data:`autofit.costmodel.seconds.operator_time.COLUMNS`.
        operators_per_row: What a row of the micro-batch adds to them.
        calls: Index of the segment, index of the operator, calls there, calls for each row; of shape ``(calls, 4)``.
    """

    events: Ints
    sizes: Floats
    per_row: Floats
    most: Floats
    categories: Ints
    ops: Ints
    streams: Ints
    names: tuple[str, ...]
    segments: tuple[str, ...]
    starts: Ints
    work: Floats
    work_per_row: Floats
    kinds: tuple[str, ...]
    operators: Floats
    operators_per_row: Floats
    calls: Floats

    def without(self, *names: Category) -> Tape:
        """The same where blocks of some categories have no bytes: they are not on the device, or counted apart."""
        return self._emptied(np.isin(self.categories, [CATEGORIES.index(name) for name in names]))

    def after_a_step(self) -> Tape:
        """The same where no evaluation came before."""
        return self._emptied(np.isin(self.ops, [at for at, name in enumerate(self.names) if name == AFTER_EVALUATION]))

    def _emptied(self, gone: Bools) -> Tape:
        sizes, per_row = (np.where(gone, 0.0, line) for line in (self.sizes, self.per_row))
        return dataclasses.replace(self, sizes=sizes, per_row=per_row)

    def bounds(self, place: int) -> tuple[int, int]:
        """Where the segment at ``place`` begins and ends in ``events``."""
        end = self.starts[place + 1] if place + 1 < len(self.starts) else len(self.events)
        return int(self.starts[place]), int(end)

    def bytes_at(self, rows: float) -> Floats:
        """Bytes of each block at a micro-batch."""
        return np.clip(self.sizes + self.per_row * rows, 0.0, self.most)

    def live(self, rows: float) -> Floats:
        """Live bytes on the device after each event."""
        return self._cumulated(self.bytes_at(rows) * (self.categories != ELSEWHERE))

    def live_elsewhere(self, rows: float) -> Floats:
        """Live bytes that are not on the device after each event."""
        return self._cumulated(self.bytes_at(rows) * (self.categories == ELSEWHERE))

    def ends(self) -> Floats:
        """The rows at which large blocks begin or stop to grow: from one to the next, the run is straight lines."""
        large = np.isfinite(self.most) & (self.most > _LARGE) & (self.per_row > 0)
        levels = np.stack([np.maximum(0.0, -self.sizes), self.most - self.sizes])[:, large]
        ends = np.unique(np.round(levels / self.per_row[large], 3))
        return ends[ends > 0]

    def lines(self, rows: float = 0.0) -> tuple[Floats, Floats]:
        """Live bytes on the device after each event, as ``at_zero`` and ``per_row``, around so many rows.

        A small block that stops growing within few rows is taken as large as it gets.
        """
        here = self.categories != ELSEWHERE
        zero, slope = self._straight(rows)
        return self._cumulated(zero * here), self._cumulated(slope * here)

    def _straight(self, rows: float) -> tuple[Floats, Floats]:
        """``sizes`` and ``per_row`` between those of :meth:`ends` that are around so many rows."""
        bounds = np.concatenate([[0.0], ends := self.ends(), 2 * ends[-1:]])
        middle = float(bounds[np.searchsorted(ends, rows) :][:2].mean())
        few = np.where(self.most > _LARGE, middle, max(middle, _FEW_ROWS))
        there = self.sizes + self.per_row * few
        flat = (there < 0) | (there > self.most)
        return np.where(flat, np.clip(there, 0.0, self.most), self.sizes), np.where(flat, 0.0, self.per_row)

    def _cumulated(self, sizes: Floats) -> Floats:
        allocates = self.events >= 0
        block = np.where(allocates, self.events, ~self.events)
        return np.cumsum(np.where(allocates, sizes[block], -sizes[block]))

    def alive(self, moment: int) -> npt.NDArray[np.bool_]:
        """Which blocks live after the event at ``moment``."""
        alive = np.zeros(len(self.sizes), dtype=bool)
        past = self.events[: moment + 1]
        alive[past[past >= 0]] = True
        alive[~past[past < 0]] = False
        return alive

    def segment_at(self, moment: int) -> str:
        """Name of the segment that an event belongs to."""
        return self.segments[int(np.searchsorted(self.starts, moment, side="right")) - 1]

    def by_category(self, moment: int, rows: float = 0.0) -> Floats:
        """Live bytes of so many rows after the event at ``moment`` for each category."""
        alive = self.alive(moment)
        zero, slope = self._straight(rows)
        held = (zero + slope * rows)[alive]
        return np.asarray(np.bincount(self.categories[alive], held, len(CATEGORIES)), dtype=np.float64)

    def part(self, names: Sequence[str]) -> tuple[int, int]:
        """First and past-the-last event of the segments of these names, which stand next to one another."""
        places = [place for place, name in enumerate(self.segments) if name in names]
        if not places:
            return 0, 0
        return self.bounds(places[0])[0], self.bounds(places[-1])[1]

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Everything as arrays, for :func:`numpy.savez`."""
        return {
            "events": self.events.astype(np.int32),
            "sizes": self.sizes,
            "per_row": self.per_row,
            "most": self.most,
            "categories": self.categories.astype(np.int8),
            "ops": self.ops.astype(np.int16),
            "streams": self.streams.astype(np.int8),
            "names": np.array(self.names, dtype=np.str_),
            "segments": np.array(self.segments, dtype=np.str_),
            "starts": self.starts,
            "work": self.work,
            "work_per_row": self.work_per_row,
            "kinds": np.array(self.kinds, dtype=np.str_),
            "operators": self.operators,
            "operators_per_row": self.operators_per_row,
            "calls": self.calls,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[np.generic]]) -> Tape:
        """What :meth:`arrays` gave."""
        words = {name: tuple(str(word) for word in arrays[name]) for name in ("names", "segments", "kinds")}
        ints = {name: arrays[name].astype(np.int64) for name in ("events", "categories", "ops", "streams", "starts")}
        floats = {name: arrays[name].astype(np.float64) for name in _FLOATS}
        return cls(**words, **ints, **floats)  # type: ignore[arg-type]


def ordered(events: Ints, starts: Ints) -> Ints:
    """Frees that follow one another, by block: a cache lets go of what it holds in any order."""
    run = np.cumsum((events >= 0) | np.isin(np.arange(len(events)), starts))
    key = np.where(events >= 0, -1, ~events)
    return events[np.lexsort((key, run))]


def blocks_of(events: Ints) -> Ints:
    """The block of each event."""
    blocks: Ints = np.where(events >= 0, events, ~events)
    return blocks


def live_before(events: Ints) -> Bools:
    """Whether the block of each event is live just before it: its event before that one is an allocation."""
    blocks = blocks_of(events)
    order = np.argsort(blocks, kind="stable")
    allocates, owners = events[order] >= 0, blocks[order]
    live = np.zeros(len(order), dtype=bool)
    live[order[1:]] = allocates[:-1] & (owners[1:] == owners[:-1])
    return live
