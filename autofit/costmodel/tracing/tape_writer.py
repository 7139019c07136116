"""Writes a tape: blocks as they begin and end, and the work of each segment. Who sees them is the recorder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autofit.costmodel.seconds.roofline import KINDS
from autofit.costmodel.tracing.operator_table import OperatorTable
from autofit.costmodel.tracing.timeline import CATEGORIES, ELSEWHERE, Tape, ordered

_STATE, _ACTIVATIONS, _LOGITS, _TEMPORARIES = map(CATEGORIES.index, ("state", "activations", "logits", "temporaries"))
_HEAD = frozenset({"head", "loss", "headB"})


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
        self.work: list[list[list[float]]] = [_nothing()]
        self.work_per_row: list[list[list[float]]] = [_nothing()]
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
        self.work.append(_nothing())
        self.work_per_row.append(_nothing())

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
        fixed, grows = self.work[-1][column], self.work_per_row[-1][column]
        fixed[0] += shares[0]
        fixed[1] += shares[1]
        fixed[2] += calls
        grows[0] += shares[2]
        grows[1] += shares[3]

    def repeat_work(self, segment: int) -> None:
        """Add the work of an earlier segment to that of the last."""
        for column, (fixed, grows) in enumerate(zip(self.work[segment], self.work_per_row[segment], strict=True)):
            self.add_work(column, (*fixed[:2], *grows[:2]), fixed[2])  # type: ignore[arg-type]
        self.operators.repeat(segment, len(self.segments) - 1)

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
        blocks = np.where(events >= 0, events, ~events)
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
            ends = np.array([self.most.get(int(block), np.inf) for block in np.flatnonzero(kept)])
            most = np.where(grows, ends, np.inf)
            for block, after in self.after.items():  # a line that climbs from nothing to all within a row
                if kept[block]:
                    at, size = number[block], self.sizes[block]
                    sizes[at], per_row[at], most[at] = -size * after, size, size
        operators, operators_per_row, calls = self.operators.arrays(since, past)
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
            work=np.array(self.work[since:past]),
            work_per_row=np.array(self.work_per_row[since:past]),
            kinds=KINDS,
            operators=operators,
            operators_per_row=operators_per_row,
            calls=calls,
        )


def _nothing() -> list[list[float]]:
    return [[0.0, 0.0, 0.0] for _ in KINDS]


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
