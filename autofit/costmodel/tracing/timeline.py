"""A tape: every allocation and free of a traced run, in order, and what can be read off it.

A run is traced with few rows and few layers. Two things continue it to the real size, without running it again:

- **More layers.** The tape is cut into segments by the boundaries of the repeated layers; the middle one of three
  periods is copied as often as layers are missing (:func:`lengthen`), and what one layer hands to the next is handed
  on from copy to copy.
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
MIDDLE = ("F1", "B1")
_PERIOD = {"F0": 0, "F1": 1, "F2": 2, "B0": 0, "B1": 1, "B2": 2}


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


def lengthen(tape: Tape, copies: int) -> Tape:
    """The tape of a model with ``copies`` periods more than the three that were traced.

    Raises:
        UnlikeError: The three periods are not alike where they would have to be.
    """
    if copies == 0:
        return tape
    return _Lengthened(tape, copies).tape()


class _Lengthened:
    """Writes the longer tape, event by event.

    A block is named by where it was made: by the period 1 in copy ``i`` of ``1 ... n`` (the layers from the bottom
    up, ``n = copies + 1``), or by any other segment. What copy ``i`` does to a block of a neighbouring period it does
    to the block that stands at the same place in the neighbouring copy.
    """

    def __init__(self, tape: Tape, copies: int) -> None:
        self.old = tape
        self.count = copies + 1
        blocks = len(tape.sizes)
        allocates = np.flatnonzero(tape.events >= 0)
        place_of_event = np.searchsorted(tape.starts, np.arange(len(tape.events)), side="right") - 1
        made_in, died_in = np.full(blocks, -1), np.full(blocks, -1)
        made_in[tape.events[allocates]] = place_of_event[allocates]
        frees = np.flatnonzero(tape.events < 0)
        died_in[~tape.events[frees]] = place_of_event[frees]
        self.made_in, self.died_in = made_in.tolist(), died_in.tolist()
        self.nth = np.zeros(blocks, dtype=np.int64)  # which allocation of its segment it is
        self.made_by: list[list[int]] = [[] for _ in tape.segments]
        for event in allocates:
            block = int(tape.events[event])
            place = int(place_of_event[event])
            self.nth[block] = len(self.made_by[place])
            self.made_by[place].append(block)
        self.names = [name.rpartition(":")[2] for name in tape.segments]
        self.micro = [name.rpartition(":")[0] for name in tape.segments]
        self.events: list[int] = []
        self.origin: list[int] = []
        self.copy_of: dict[tuple[int, int], int] = {}
        self.starts: list[int] = []
        self.segments: list[str] = []
        self.work: list[Floats] = []
        self.work_per_row: list[Floats] = []
        self.calls: list[Floats] = []

    def tape(self) -> Tape:
        """The longer tape."""
        old = self.old
        place = 0
        while place < len(old.segments):
            name = self.names[place]
            if name == "F1":
                for copy in range(1, self.count + 1):
                    self._segment(place, copy)
            elif name == "B1":
                for copy in range(self.count, 0, -1):
                    self._segment(place, copy)
            else:
                self._segment(place, 0)
            place += 1
        freed = set((~old.events[old.events < 0]).tolist())
        if any(block in freed for block, _ in self.copy_of):
            raise UnlikeError("the repeated layers do not free the same")
        origin = np.array(self.origin, dtype=np.int64)
        return Tape(
            events=np.array(self.events, dtype=np.int64),
            sizes=old.sizes[origin],
            per_row=old.per_row[origin],
            most=old.most[origin],
            categories=old.categories[origin],
            ops=old.ops[origin],
            streams=old.streams[origin],
            names=old.names,
            segments=tuple(self.segments),
            starts=np.array(self.starts, dtype=np.int64),
            work=np.array(self.work),
            work_per_row=np.array(self.work_per_row),
            kinds=old.kinds,
            operators=old.operators,
            operators_per_row=old.operators_per_row,
            calls=np.concatenate(self.calls),
        )

    def _segment(self, place: int, copy: int) -> None:
        old = self.old
        begin, end = old.bounds(place)
        self.starts.append(len(self.events))
        self.segments.append(old.segments[place])
        self.work.append(old.work[place])
        self.work_per_row.append(old.work_per_row[place])
        calls = old.calls[old.calls[:, 0] == place].copy()
        calls[:, 0] = len(self.segments) - 1
        self.calls.append(calls)
        for event in old.events[begin:end].tolist():
            if event >= 0:
                self._allocate(event, copy)
            else:
                self._free(~event, place, copy)

    def _allocate(self, block: int, copy: int) -> None:
        new = len(self.origin)
        self.origin.append(block)
        self.copy_of[block, copy] = new
        self.events.append(new)

    def _free(self, block: int, place: int, copy: int) -> None:
        made = self.made_in[block]
        born = _PERIOD.get(self.names[made])
        here = _PERIOD.get(self.names[place])
        if born is None or (born != 1 and here is None):
            last = 1 if self.names[place] == "B1" else self.count
            if here != 1 or copy == last:  # once, by the last one who uses it
                self._drop(block, 0)
        elif here is None:
            # what each layer takes over from the one below is left by the last one only
            for one in [one for one in range(1, self.count + 1) if (block, one) in self.copy_of] or [self.count]:
                self._drop(block, one)
        elif here != 1:
            if abs(here - born) == 2:
                self._check_alone(block, made, place)
            copies = {0: 1, 2: self.count}[here]
            self._drop(block, copies if born == 1 else 0)
        else:
            self._drop_neighbour(block, made, copy - (1 - born))

    def _drop_neighbour(self, block: int, made: int, target: int) -> None:
        """Free what stands for ``block`` in copy ``target``: 0 is period 0, ``count + 1`` is period 2."""
        if not 1 <= target <= self.count:
            target = 0
        elif self.names[made] not in MIDDLE:
            block = self._twin(block, self._place(self.micro[made], f"{self.names[made][0]}1"))
        self._drop(block, target)

    def _check_alone(self, block: int, made: int, place: int) -> None:
        """A block that goes from one end to the other is one for all layers: the middle has no such block.

        Otherwise each layer may hand one to the next but one, and which of the copies frees it can't be told.
        """
        middle = self.made_by[self._place(self.micro[made], f"{self.names[made][0]}1")]
        if self._alike(block, middle) and self.died_in[middle[int(self.nth[block])]] != place:
            raise UnlikeError("what a layer makes is freed two layers on")

    def _place(self, micro: str, name: str) -> int:
        for place, (group, one) in enumerate(zip(self.micro, self.names, strict=True)):
            if group == micro and one == name:
                return place
        raise UnlikeError(f"no segment {name}")

    def _twin(self, block: int, place: int) -> int:
        """The block that another period makes at the same place."""
        made = self.made_by[place]
        if not self._alike(block, made):
            raise UnlikeError("the repeated layers do not do the same")
        return made[int(self.nth[block])]

    def _alike(self, block: int, made: Sequence[int]) -> bool:
        """Whether, of the blocks that another segment makes, the one at the same place is alike."""
        nth = int(self.nth[block])
        old = self.old
        return nth < len(made) and all(
            values[made[nth]] == values[block] for values in (old.ops, old.sizes, old.per_row)
        )

    def _drop(self, block: int, copy: int) -> None:
        try:
            self.events.append(~self.copy_of.pop((block, copy)))
        except KeyError:
            raise UnlikeError("the repeated layers do not free the same") from None
