"""Writes a tape: blocks as they begin and end, and the work of each segment. Who sees them is the recorder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autofit.contract.trace import Ints
from autofit.costmodel.seconds.roofline import KINDS
from autofit.costmodel.tracing.operator_table import OperatorTable
from autofit.costmodel.tracing.timeline import CATEGORIES, ELSEWHERE, Bools, Floats, Tape, blocks_of, ordered

_STATE, _ACTIVATIONS, _LOGITS, _TEMPORARIES = map(CATEGORIES.index, ("state", "activations", "logits", "temporaries"))
_HEAD = frozenset({"head", "loss", "headB"})
_Work = tuple[int, tuple[float, float, float, float], float]
"""Of one call: the kind's index, FLOPs and bytes of no rows and of each row, and how many operators it counts as."""


class TapeWriter:
    """Blocks and work, segment by segment.

    Args:
        rows: The micro-batch, if it is a prime that divides no other dimension: then what it divides grows with the
            rows, and the rest does not, and the tape holds for any number of them.
    """

    def __init__(self, rows: int | None) -> None:
        self.rows = rows
        self.events: list[int] = []
        self.sizes: list[int] = []
        self.ops: list[int] = []
        self.categories: list[int] = []
        self.streams: list[int] = []
        self.names: dict[str, int] = {}
        self.segments: list[str] = ["load"]
        self.starts: list[int] = [0]
        self._work: list[dict[_Work, int]] = [{}]
        self.operators = OperatorTable(rows)
        self.fixed: set[int] = set()  # blocks that don't grow with the rows, whatever divides them
        self.most: dict[int, float] = {}  # how large blocks get with the rows, where there is an end
        self.beside: dict[int, int] = {}  # bytes of a block that don't grow with the rows, beside those that do
        self.after: dict[int, int] = {}  # rows up to which a block is not there
        self._made_in: list[int] = []
        self._died_in: dict[int, int] = {}

    def mark(self, segment: str) -> None:
        """A segment begins."""
        self.segments.append(segment)
        self.starts.append(len(self.events))
        self._work.append({})

    def begin_block(self, size: int, operator: int, category: int, stream: int) -> int:
        """A block begins; ``operator`` is the number of its name."""
        block = len(self.sizes)
        self.sizes.append(size)
        self.ops.append(operator)
        self.categories.append(category)
        self.streams.append(stream)
        self._made_in.append(len(self.segments) - 1)
        self.events.append(block)
        return block

    def repeat_block(self, block: int, *, temporary: bool) -> int:
        """A block like one that was there before begins, as a temporary one or as what that one was."""
        here = temporary and self.categories[block] != ELSEWHERE
        category = _TEMPORARIES if here else self.categories[block]
        new = self.begin_block(self.sizes[block], self.ops[block], category, self.streams[block])
        if block in self.fixed:
            self.fixed.add(new)
        if block in self.most:
            self.most[new] = self.most[block]
        for told in (self.beside, self.after):
            if block in told:
                told[new] = told[block]
        return new

    def end_block(self, block: int) -> None:
        """A block ends."""
        self._died_in[block] = len(self.segments) - 1
        self.events.append(~block)

    def add_work(self, column: int, shares: tuple[float, float, float, float], calls: float = 1.0) -> None:
        """Add to the work of the segment: FLOPs and bytes of no rows, and of each row."""
        self._add(((column, shares, calls), 1))

    def repeat_work(self, segment: int) -> None:
        """Add the work of an earlier segment to that of the last."""
        self._add(*self._work[segment].items())
        self.operators.repeat(segment, len(self.segments) - 1)

    def _add(self, *done: tuple[_Work, int]) -> None:
        work = self._work[-1]
        for one, times in done:
            work[one] = work.get(one, 0) + times

    def tape(self, *, since: int = 0, until: int | None = None) -> Tape:
        """What was written in the segments with indices from ``since`` to below ``until``; call after the run.

        Blocks that lived before are left out, and so is what happens to them.
        """
        past = len(self.segments) if until is None else until
        begin, end = self.starts[since], [*self.starts, len(self.events)][past]
        events = np.array(self.events, dtype=np.int64)
        made = np.array(self._made_in, dtype=np.int64)
        kept = (made >= since) & (made < past)
        number = np.cumsum(kept) - 1
        blocks = blocks_of(events)
        place = np.arange(len(events))
        mine = kept[blocks] & (place >= begin) & (place < end)
        renamed = np.where(events >= 0, number[blocks], ~number[blocks])
        before = np.concatenate([[0], np.cumsum(mine)])
        starts = before[np.array(self.starts[since:past])]
        categories = np.array(categorized(self.categories, self.segments, self._made_in, self._died_in), dtype=np.int64)
        sizes = np.array(self.sizes, dtype=np.float64)[kept]
        per_row, most = np.zeros_like(sizes), np.full_like(sizes, np.inf)
        if self.rows is not None:
            fixed = np.isin(np.flatnonzero(kept), list(self.fixed))
            beside = np.array([self.beside.get(int(block), 0) for block in np.flatnonzero(kept)])
            grows = ((sizes - beside) % self.rows == 0) & ~fixed
            per_row = np.where(grows, (sizes - beside) / self.rows, 0.0)
            sizes = np.where(grows, beside, sizes)
            each = ~(grows | fixed) & self._made_for_each_row(events, kept)[kept]
            per_row, sizes = np.where(each, sizes / self.rows, per_row), np.where(each, 0.0, sizes)
            ends = np.array([self.most.get(int(block), np.inf) for block in np.flatnonzero(kept)])
            most = np.where(grows, ends, np.inf)
            for block, after in self.after.items():  # a line that climbs from nothing to all within a row
                if kept[block]:
                    at, size = number[block], self.sizes[block]
                    sizes[at], per_row[at], most[at] = -size * after, size, size
        operators, operators_per_row, calls = self.operators.arrays(since, past)
        work, work_per_row = self._work_of(since, past)
        return Tape(
            events=ordered(renamed[mine], starts),
            sizes=sizes,
            per_row=per_row,
            most=most,
            categories=categories[kept],
            ops=np.array(self.ops, dtype=np.int64)[kept],
            streams=np.array(self.streams, dtype=np.int64)[kept],
            names=tuple(self.names),
            segments=tuple(self.segments[since:past]),
            starts=starts,
            work=work,
            work_per_row=work_per_row,
            kinds=KINDS,
            operators=operators,
            operators_per_row=operators_per_row,
            calls=calls,
        )

    def _made_for_each_row(self, events: Ints, kept: Bools) -> Bools:
        """Which blocks are alike, made in one segment, as often as there are rows, and there together.

        A model that goes from image to image makes one for each. Those of which each is gone before the next is made
        take the bytes of one.
        """
        assert self.rows is not None
        sizes = np.array(self.sizes, dtype=np.int64)
        alike = (np.array(self._made_in) * len(self.names) + self.ops) * (sizes.max(initial=0) + 1) + sizes
        _, kind, times = np.unique(np.where(kept, alike, -1), return_inverse=True, return_counts=True)
        found = np.zeros(len(sizes), dtype=bool)
        blocks, changes = blocks_of(events), np.where(events >= 0, 1, -1)
        for one in np.flatnonzero(times % self.rows == 0):
            mine = kind == one
            found |= mine & (changes[mine[blocks]].cumsum().max() >= self.rows)
        return found

    def _work_of(self, since: int, past: int) -> tuple[Floats, Floats]:
        """The work of each segment by kind, and what a row adds; what is done once for each row grows with them."""
        work = np.zeros((past - since, len(KINDS), 3))
        per_row = np.zeros_like(work)
        for place, done in enumerate(self._work[since:past]):
            for (column, (flops, moved, *grows), calls), times in done.items():
                fixed = times * np.array([flops, moved, calls])
                if self.rows is not None and times % self.rows == 0 and not any(grows):
                    per_row[place, column] += fixed / self.rows
                else:
                    work[place, column] += fixed
                    per_row[place, column, :2] += times * np.array(grows)
        return work, per_row


def categorized(
    told: Sequence[int], segments: Sequence[str], made_in: Sequence[int], died_in: Mapping[int, int]
) -> list[int]:
    """Categories of blocks, with what was not told read off from when a block was made and freed.

    Args:
        told: Index of each block's category.
        segments: Names of the segments.
        made_in: Index of the segment that made each block.
        died_in: Index of the segment that freed a block, where one did.
    """
    names = [name.rpartition(":")[2] for name in segments]
    backward = [name.endswith("B") or (name[0] == "B" and name[1:].isdigit()) for name in names]
    found = list(told)
    for block, category in enumerate(found):
        if category != _TEMPORARIES:
            continue
        made, died = made_in[block], died_in.get(block, len(names))
        if names[made] in {"begin", "step"} and died == len(names):
            found[block] = _STATE
        elif names[made] in _HEAD:
            found[block] = _LOGITS
        elif not backward[made] and died < len(names) and backward[died] and names[made] != "step":
            found[block] = _ACTIVATIONS
    return found
