"""More layers than were traced: the middle one of three periods of a tape is copied as often as layers are missing.

A block is named by where it was made: by the period 1 in copy ``i`` of ``1 ... n`` (the layers from the bottom up,
``n = copies + 1``), or by any other segment, whose copy is 0. What copy ``i`` does to a block of a neighbouring period
it does to the block that stands at the same place in the neighbouring copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autofit.contract.trace import Ints
from autofit.costmodel.tracing.timeline import Floats, Tape, UnlikeError, live_before

MIDDLE = ("F1", "B1")
_PERIOD = {"F0": 0, "F1": 1, "F2": 2, "B0": 0, "B1": 1, "B2": 2}
_NO_PERIOD = -1
_NOTHING = np.iinfo(np.int64).min
"""In the place of an event that one copy leaves to another."""


def lengthen(tape: Tape, copies: int) -> Tape:
    """The tape of a model with ``copies`` periods more than the three that were traced.

    Raises:
        UnlikeError: The three periods are not alike where they would have to be.
    """
    return _Lengthened(tape, copies).tape() if copies else tape


class _Lengthened:
    """Writes the longer tape, segment by segment, all copies of one at once."""

    def __init__(self, tape: Tape, copies: int) -> None:
        self.old = tape
        self.count = copies + 1
        self.names = [name.rpartition(":")[2] for name in tape.segments]
        self.micro = [name.rpartition(":")[0] for name in tape.segments]
        self.made_in, self.nth, self.died_in = (np.full(len(tape.sizes), -1) for _ in range(3))
        self.made_by: list[Ints] = []
        for place in range(len(tape.segments)):
            begin, end = tape.bounds(place)
            events = tape.events[begin:end]
            made = events[events >= 0]
            self.made_by.append(made)
            self.made_in[made], self.nth[made] = place, np.arange(len(made))  # the nth allocation of its segment
            self.died_in[~events[events < 0]] = place
        period = np.array([_PERIOD.get(name, _NO_PERIOD) for name in self.names])
        self.born = np.where(self.made_in < 0, _NO_PERIOD, period[self.made_in])
        self.number = np.full((len(tape.sizes), self.count + 1), -1)  # of the block that a copy of an old one is
        self.alive = np.zeros(self.number.shape, dtype=bool)
        self.twins: dict[int, int] = {}
        self.made = 0
        self.events: list[Ints] = []
        self.origin: list[Ints] = []
        self.starts = [0]
        self.places: list[int] = []

    def tape(self) -> Tape:
        """The longer tape."""
        old = self.old
        for place in range(len(old.segments)):
            self._segment(place)
        freed = ~old.events[old.events < 0]
        if self.alive[freed].any():
            raise UnlikeError("the repeated layers do not free the same")
        events, origin, places = np.concatenate(self.events), np.concatenate(self.origin), np.array(self.places)
        if not live_before(events)[events < 0].all():  # freed twice, or before it is allocated
            raise UnlikeError("the repeated layers do not free the same")
        return Tape(
            events=events,
            sizes=old.sizes[origin],
            per_row=old.per_row[origin],
            most=old.most[origin],
            categories=old.categories[origin],
            ops=old.ops[origin],
            streams=old.streams[origin],
            names=old.names,
            segments=tuple(old.segments[place] for place in self.places),
            starts=np.array(self.starts[:-1], dtype=np.int64),
            work=old.work[places],
            work_per_row=old.work_per_row[places],
            kinds=old.kinds,
            operators=old.operators,
            operators_per_row=old.operators_per_row,
            calls=_calls_of(old, self.places),
        )

    def _segment(self, place: int) -> None:
        """Write a segment, where it is of the period 1 once for each copy: the layers from the bottom up, or down."""
        name, begin, end = self.names[place], *self.old.bounds(place)
        copies = np.arange(1, self.count + 1) if name in MIDDLE else np.zeros(1, dtype=np.int64)
        copies = copies[::-1] if name == "B1" else copies
        events, made = self.old.events[begin:end], self.made_by[place]
        numbers = self.made + np.arange(len(copies) * len(made)).reshape(len(copies), len(made))
        self.made += numbers.size
        self.number[made, copies[:, None]] = numbers
        self.alive[made, copies[:, None]] = True
        self.origin.append(np.tile(made, len(copies)))
        written = np.empty((len(copies), len(events)), dtype=np.int64)
        written[:, events >= 0] = numbers
        if len(frees := ~events[events < 0]):
            written[:, events < 0] = self._frees(frees, place, copies)
        for line in written:
            happened = line if name in _PERIOD else self._with_every_copy(line, events)
            happened = happened[happened != _NOTHING]
            self.events.append(happened)
            self.starts.append(self.starts[-1] + len(happened))
            self.places.append(place)

    def _frees(self, blocks: Ints, place: int, copies: Ints) -> Ints:
        """The events by which each copy of a segment frees what stands for some old blocks there."""
        born, here, last = self.born[blocks], _PERIOD.get(self.names[place]), copies[-1]
        stands, whose = np.tile(blocks, (len(copies), 1)), np.zeros((len(copies), len(blocks)), dtype=np.int64)
        mine = np.ones(whose.shape, dtype=bool)
        if here is None:
            mine[:, born == 1] = False  # see _with_every_copy
        elif here != 1:
            for block in blocks[(born != _NO_PERIOD) & (np.abs(born - here) == 2)].tolist():
                self._check_alone(block, place)
            whose[:, born == 1] = 1 if here == 0 else self.count
        else:
            mine[:, born == _NO_PERIOD] = (copies == last)[:, None]  # once, by the last one who uses it
            neighbour = copies[:, None] - 1 + born
            there = (born != _NO_PERIOD) & (neighbour >= 1) & (neighbour <= self.count)
            twins = [self._twin(block) if self.born[block] in {0, 2} else block for block in blocks.tolist()]
            stands, whose = np.where(there, twins, stands), np.where(there, neighbour, 0)
        found = self.number[stands, whose]
        if (found[mine] < 0).any():
            raise UnlikeError("the repeated layers do not free the same")
        self.alive[stands[mine], whose[mine]] = False
        return np.where(mine, ~found, _NOTHING)

    def _with_every_copy(self, line: Ints, events: Ints) -> Ints:
        """The events of a segment of no period, where what each layer takes over from the one below is freed at once.

        Of most such blocks the last copy's alone is left.
        """
        parts, done = [], 0
        for at, event in enumerate(events.tolist()):
            if event < 0 and self.born[~event] == 1:
                left = self.number[~event][self.alive[~event]]
                if not len(left):
                    raise UnlikeError("the repeated layers do not free the same")
                self.alive[~event] = False
                parts += [line[done:at], ~left]
                done = at + 1
        return np.concatenate([*parts, line[done:]])

    def _check_alone(self, block: int, place: int) -> None:
        """A block that goes from one end to the other is one for all layers: the middle has no such block.

        Otherwise each layer may hand one to the next but one, and which of the copies frees it can't be told.
        """
        middle = self._in_middle(block)
        if self._alike(block, middle) and self.died_in[middle[self.nth[block]]] != place:
            raise UnlikeError("what a layer makes is freed two layers on")

    def _twin(self, block: int) -> int:
        """The block that the middle period makes at the same place."""
        if block not in self.twins:
            middle = self._in_middle(block)
            if not self._alike(block, middle):
                raise UnlikeError("the repeated layers do not do the same")
            self.twins[block] = int(middle[self.nth[block]])
        return self.twins[block]

    def _in_middle(self, block: int) -> Ints:
        """The blocks that the middle period makes in the same pass of the same micro-step."""
        made = self.made_in[block]
        wanted = self.micro[made], f"{self.names[made][0]}1"
        for place, found in enumerate(zip(self.micro, self.names, strict=True)):
            if found == wanted:
                return self.made_by[place]
        raise UnlikeError(f"no segment {wanted[1]}")

    def _alike(self, block: int, made: Ints) -> bool:
        """Whether, of the blocks that another segment makes, the one at the same place is alike."""
        nth, old = self.nth[block], self.old
        return nth < len(made) and all(
            values[made[nth]] == values[block] for values in (old.ops, old.sizes, old.per_row)
        )


def _calls_of(old: Tape, places: Sequence[int]) -> Floats:
    """The calls of operators in segments that are copies of these of the old tape."""
    mine = [np.flatnonzero(old.calls[:, 0] == place) for place in range(len(old.segments))]
    calls: Floats = old.calls[np.concatenate([mine[place] for place in places])]
    calls[:, 0] = np.repeat(np.arange(len(places)), [len(mine[place]) for place in places])
    return calls
