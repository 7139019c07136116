"""The caching allocator's pools of free blocks; the rules are told in :mod:`autofit.costmodel.memory.allocator`."""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from importlib.metadata import version
from typing import TYPE_CHECKING, Self

from packaging.version import Version

from autofit.system.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# all below counts units of 512 bytes, kMinBlockSize
UNIT = 512
SMALL_SIZE = MIB // UNIT  # kSmallSize: the largest request of the small pool
_SMALL_SEGMENT = 2 * MIB // UNIT  # kSmallBuffer
_OWN_SEGMENT = 10 * MIB // UNIT  # kMinLargeAlloc: from here on a request gets a segment of its size
LARGE_SEGMENT = 20 * MIB // UNIT  # large_segment_size
GRAIN = 2 * MIB // UNIT  # kRoundLarge; every segment and every page is a multiple of it

_COARSE = 32 * MIB // UNIT  # where the driver lets a segment of 20 MiB or more begin; a smaller one: GRAIN
_SHIFT = 48  # a free block is one number, size << _SHIFT | start, so that order is by size, then by address
_START = (1 << _SHIFT) - 1
MOST_BYTES = (1 << (_SHIFT - 7)) * UNIT
"""Of all requests together; beyond it the addresses would not do. That is 1 PiB."""
_TOP = 1 << (_SHIFT - 2)
RANGE = LARGE_SEGMENT << 26  # addresses of one expandable pool: 1.25 PiB, a multiple of both page sizes


def round_up(count: int, step: int) -> int:
    """The next multiple of ``step``."""
    return -(-count // step) * step


def _segment(need: int) -> int:
    """What is asked of the driver for a request, ``get_allocation_size``."""
    if need <= SMALL_SIZE:
        return _SMALL_SEGMENT
    if need < _OWN_SEGMENT:
        return LARGE_SEGMENT
    return round_up(need, GRAIN)


class Pools(ABC):
    """The pools of free blocks, and the counters.

    A pool is a number: twice that of its stream, and one more for the large pool.

    There is no list of neighbours: a free block is found by its start and by its end, and segments never touch, so
    that blocks of two segments do not join.

    Attributes:
        pool_of: The pool of each block.
        spare: The free blocks of each pool, sorted.
        live: Size and start by block, as one number; see :meth:`places`.
        keeps: Of each pool: a rest is split off where it is larger than this.
        granted: The replay would have gone the same way on every capacity from this one up to its own ...
        refused: ... and from its own up to, but without, this one.
    """

    large_rest: int  # a rest in a large pool is split off where it is larger than this
    chooses = False  # whether the first free block that is large enough is not always the one

    def __init__(self, needs: Sequence[int], pool_of: Sequence[int], capacity: int | None) -> None:
        self.needs = needs
        self.pool_of = pool_of
        self.capacity = sys.maxsize if capacity is None else capacity
        self.spare: list[list[int]] = [[] for _ in range((max(pool_of, default=0) | 1) + 1)]
        self.keeps = [0, self.large_rest] * (len(self.spare) // 2)
        self.size_at: dict[int, int] = {}
        self.start_before: dict[int, int] = {}
        self.live: dict[int, int] = {}
        self.allocated = self.peak_allocated = 0
        self.reserved = self.peak_reserved = 0
        self.retries = self.mallocs = 0
        self.granted = 0
        self.refused = sys.maxsize

    def copied(self, capacity: int | None) -> Self:
        """The same pools, for another capacity, on which they would have come this far the same way."""
        other = copy.copy(self)
        other.capacity = sys.maxsize if capacity is None else capacity
        other.spare = [list(one) for one in self.spare]
        other.size_at, other.start_before, other.live = dict(self.size_at), dict(self.start_before), dict(self.live)
        return other

    def places(self) -> dict[int, tuple[int, int]]:
        """Start and size of each live block."""
        return {block: (key & _START, key >> _SHIFT) for block, key in self.live.items()}

    def follow(self, events: Sequence[int]) -> int | None:
        """Allocate and free; where there is no room, the index of the event that finds none.

        Args:
            events: As for :func:`autofit.costmodel.memory.allocator.replay`, of blocks that have bytes.
        """
        # a hundred thousand events a replay: what _take and _join do is written out (a tenth), read from local names
        needs, pool_of, spare_of, keeps, chooses = self.needs, self.pool_of, self.spare, self.keeps, self.chooses
        sizes, starts, live = self.size_at, self.start_before, self.live
        allocated, peak, failed = self.allocated, self.peak_allocated, None
        for index, event in enumerate(events):
            if event < 0:
                key = live.pop(~event)
                start, size = key & _START, key >> _SHIFT
                allocated -= size
                spare, end = spare_of[pool_of[~event]], start + size
                before = starts.pop(start, None)
                if before is not None:  # it joins its free neighbours
                    start = before
                    del spare[bisect_left(spare, sizes[start] << _SHIFT | start)]
                after = sizes.pop(end, None)
                if after is not None:
                    del spare[bisect_left(spare, after << _SHIFT | end)]
                    end += after
                insort(spare, (end - start) << _SHIFT | start)
                sizes[start] = end - start
                starts[end] = start
                continue
            need, pool = needs[event], pool_of[event]
            spare = spare_of[pool]
            place = bisect_left(spare, need << _SHIFT)
            if place == len(spare):
                if not self._granted(_segment(need)):
                    failed = index
                    break
                start, size = self._grow(pool, need)
            else:
                key = spare.pop(self._choose(pool, place) if chooses else place)
                start, size = key & _START, key >> _SHIFT
                del sizes[start], starts[start + size]
            if size - need > keeps[pool]:
                self._put(pool, start + need, size - need)
                size = need
            live[event] = size << _SHIFT | start
            allocated += size
            if allocated > peak:  # noqa: PLR1730 - two million times
                peak = allocated
        self.allocated, self.peak_allocated = allocated, peak
        return failed

    def _granted(self, segment: int) -> bool:
        """Whether a segment may be had, if need be after giving back what is free."""
        for last in (False, True):
            wanted = self.reserved + segment
            if wanted <= self.capacity:
                self.granted = max(self.granted, wanted)
                return True
            self.refused = min(self.refused, wanted)
            if not last:
                self._give_back()
                self.retries += 1
        return False

    def _reserve(self, size: int) -> None:
        self.mallocs += 1
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _put(self, pool: int, start: int, size: int) -> None:
        insort(self.spare[pool], size << _SHIFT | start)
        self.size_at[start] = size
        self.start_before[start + size] = start

    def _take(self, pool: int, start: int) -> int:
        size = self.size_at.pop(start)
        del self.start_before[start + size]
        spare = self.spare[pool]
        del spare[bisect_left(spare, size << _SHIFT | start)]
        return size

    def _join(self, pool: int, start: int, size: int) -> None:
        sizes, starts, spare = self.size_at, self.start_before, self.spare[pool]
        end = start + size
        before = starts.pop(start, None)
        if before is not None:
            start = before
            del spare[bisect_left(spare, sizes[start] << _SHIFT | start)]
        after = sizes.pop(end, None)
        if after is not None:
            del spare[bisect_left(spare, after << _SHIFT | end)]
            end += after
        insort(spare, (end - start) << _SHIFT | start)
        sizes[start] = end - start
        starts[end] = start

    def _choose(self, pool: int, index: int) -> int:
        """Which free block to use, from the first one on that is large enough: ``index``."""
        return index

    @abstractmethod
    def _grow(self, pool: int, need: int) -> tuple[int, int]:
        """Start and size of a new block that is in no pool."""

    @abstractmethod
    def _give_back(self) -> None:
        """Return to the driver all that is free as a whole, ``release_cached_blocks``."""


class Segments(Pools):
    """Segments from ``cudaMalloc``."""

    large_rest = SMALL_SIZE
    by_address = Version(version("torch")).release < (2, 12)  # else the oldest segment's is the first of equals

    def __init__(self, needs: Sequence[int], pool_of: Sequence[int], capacity: int | None) -> None:
        super().__init__(needs, pool_of, capacity)
        self.segments: dict[int, int] = {}
        self.gaps = [(0, _TOP)]  # between segments, from the lowest on
        self._next = 0

    def copied(self, capacity: int | None) -> Self:
        """With segments of its own."""
        other = super().copied(capacity)
        other.segments, other.gaps = dict(self.segments), list(self.gaps)
        return other

    def _grow(self, pool: int, need: int) -> tuple[int, int]:
        size = _segment(need)
        if self.by_address:
            start = 2 * self._place(size)  # twice: never touches the next one
        else:
            start = self._next
            self._next += size + 1
        self.segments[start] = size
        self._reserve(size)
        return start, size

    def _place(self, size: int) -> int:
        """The highest place that is free, as the driver does it."""
        step = _COARSE if size >= LARGE_SEGMENT else GRAIN
        for index in range(len(self.gaps) - 1, -1, -1):
            low, high = self.gaps[index]
            start = (high - size) // step * step
            if start >= low:
                rests = (low, start), (start + size, high)
                self.gaps[index : index + 1] = [rest for rest in rests if rest[0] < rest[1]]
                return start
        raise AssertionError("the lowest gap holds all that MOST_BYTES allows")

    def _give_back(self) -> None:
        for pool, spare in enumerate(self.spare):
            for key in list(spare):
                start, size = key & _START, key >> _SHIFT
                if self.segments.get(start) == size:
                    self._take(pool, start)
                    del self.segments[start]
                    self.reserved -= size
                    if self.by_address:
                        self._vacate(start // 2, start // 2 + size)

    def _vacate(self, low: int, high: int) -> None:
        gaps = self.gaps
        index = bisect_left(gaps, (low, high))
        if index < len(gaps) and gaps[index][0] == high:
            high = gaps.pop(index)[1]
        if index and gaps[index - 1][1] == low:
            index -= 1
            low = gaps.pop(index)[0]
        gaps.insert(index, (low, high))


class Expandable(Pools):
    """One range of addresses for each pool, mapped page by page."""

    large_rest = 0
    chooses = True

    def __init__(self, needs: Sequence[int], pool_of: Sequence[int], capacity: int | None) -> None:
        super().__init__(needs, pool_of, capacity)
        # what is not mapped, by start; sorted, and the last one never ends
        self.holes: list[dict[int, int]] = [{pool * RANGE: RANGE} for pool in range(len(self.spare))]

    def copied(self, capacity: int | None) -> Self:
        """With holes of its own."""
        other = super().copied(capacity)
        other.holes = [dict(one) for one in self.holes]
        return other

    def _choose(self, pool: int, index: int) -> int:
        holes, spare = self.holes[pool], self.spare[pool]
        room = self._room(spare[index], holes)
        while index + 1 < len(spare):
            further = self._room(spare[index + 1], holes)
            if further >= room:
                break
            index, room = index + 1, further
        return index

    @staticmethod
    def _room(key: int, holes: dict[int, int]) -> int:
        size = key >> _SHIFT
        return size + holes.get((key & _START) + size, 0)

    def _grow(self, pool: int, need: int) -> tuple[int, int]:
        start = next(start for start in self._starts(pool) if self._reach(pool, start, need) >= need)
        holes, page = self.holes[pool], _page(pool)
        while (size := self.size_at.get(start, 0)) < need:
            at = start + size
            hole = holes.pop(at)
            mapped = round_up(min(need - size, hole), page)
            if mapped < hole:
                holes[at + mapped] = hole - mapped
            self._reserve(mapped)
            self._join(pool, at, mapped)
        return start, self._take(pool, start)

    def _starts(self, pool: int) -> Iterator[int]:
        """Where free addresses begin that contain a hole, the lowest first, ``find_expandable_block``."""
        for hole in sorted(self.holes[pool]):
            yield self.start_before.get(hole, hole)

    def _reach(self, pool: int, start: int, need: int) -> int:
        """How many addresses from ``start`` on are free or not mapped; counted up to ``need``."""
        holes, reach = self.holes[pool], 0
        while reach < need:
            at = start + reach
            step = self.size_at.get(at, 0) or holes.get(at, 0)
            if step == 0:
                break
            reach += step
        return reach

    def _give_back(self) -> None:
        for pool, spare in enumerate(self.spare):
            holes, page = self.holes[pool], _page(pool)
            for key in list(spare):
                start, size = key & _START, key >> _SHIFT
                first, last = round_up(start, page), (start + size) // page * page
                if first < last:
                    self._unmap(pool, start, first, last)
                    holes[first] = last - first
            _merge(holes)

    def _unmap(self, pool: int, start: int, first: int, last: int) -> None:
        end = start + self._take(pool, start)
        if start < first:
            self._put(pool, start, first - start)
        if last < end:
            self._put(pool, last, end - last)
        self.reserved -= last - first


def _page(pool: int) -> int:
    """What an expandable pool grows by."""
    return LARGE_SEGMENT if pool % 2 else _SMALL_SEGMENT


def _merge(holes: dict[int, int]) -> None:
    """Join holes that touch."""
    joined: dict[int, int] = {}
    end = begin = -1
    for start in sorted(holes):
        if start != end:
            begin = start
        end = start + holes[start]
        joined[begin] = end - begin
    holes.clear()
    holes.update(joined)
