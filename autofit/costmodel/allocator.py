"""What PyTorch's CUDA caching allocator does with a sequence of allocations and frees, without a device.

Tensors alone do not say which card a step runs on. The allocator takes memory from the driver in segments, cuts blocks
out of them, keeps what is freed, and gives whole free segments back only when the driver refuses: *reserved* memory
lies above *allocated* memory by a share that depends on history, and the smallest card on which a step still runs lies
in between. :func:`replay` follows the allocator's rules, :func:`smallest_capacity` looks for that card.

Source: ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` (torch 2.13), default settings:

* A request is rounded up to 512 bytes. Up to 1 MiB it is *small* and cut from segments of 2 MiB; below 10 MiB from
  segments of 20 MiB; above, its segment is its size rounded up to 2 MiB.
* The smallest free block that is large enough is taken, of equals the one at the lowest address. What is left over
  becomes a free block: in the small pool always, in the large pool where more than 1 MiB is left. So a large block may
  be up to 1 MiB larger than what was asked for, and ``torch.cuda.max_memory_allocated`` counts it whole.
* A freed block joins its free neighbours in the same segment.
* Each stream has pools of its own: what was allocated on one is never used again on another, until its segment has
  gone back to the driver.
* No free block: a new segment. Over the capacity: every segment of all pools that is free as a whole goes back to
  the driver, and the request for a segment is made once more (a *retry*); then it is out of memory.

With ``expandable``, each pool is one range of addresses that grows by pages of 2 MiB (small) or 20 MiB (large); any
rest becomes a free block; a free block at the edge of what is mapped counts as large as it can grow; holes and the end
are mapped from the lowest address on; and what goes back to the driver is every page that is free as a whole.

``capacity_bytes`` acts like ``torch.cuda.set_per_process_memory_fraction``: reserved bytes plus the segment asked for
must not exceed it. With ``expandable`` that is checked before a request is rounded up to pages, there as here, so
reserved memory may end up to 18 MiB above the capacity.

Not covered: ``record_stream``, which delays frees; CUDA graphs' and other private pools; settings other than the
defaults (``max_split_size_mb``, ``garbage_collection_threshold``, ``roundup_power2_divisions``,
``large_segment_size_mb``); ``empty_cache()``; memory outside the allocator (context, cuBLAS' own, NCCL). Simplified:
the driver's addresses are not known, so a newer segment lies above an older one, which matters only between free
blocks of equal size; and an expandable range never ends (there: at 9/8 of the card, then a second range begins).
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autofit.system.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import ArrayLike

# all below counts units of 512 bytes, kMinBlockSize
_UNIT = 512
_SMALL_SIZE = MIB // _UNIT  # kSmallSize: the largest request of the small pool
_SMALL_SEGMENT = 2 * MIB // _UNIT  # kSmallBuffer
_OWN_SEGMENT = 10 * MIB // _UNIT  # kMinLargeAlloc: from here on a request gets a segment of its size
_LARGE_SEGMENT = 20 * MIB // _UNIT  # large_segment_size
_GRAIN = 2 * MIB // _UNIT  # kRoundLarge; every segment and every page is a multiple of it

_SHIFT = 48  # a free block is one number, size << _SHIFT | start, so that order is by size, then by address
_START = (1 << _SHIFT) - 1
MOST_BYTES = (1 << (_SHIFT - 7)) * _UNIT
"""Of all requests together; beyond it the addresses would not do. That is 1 PiB."""
_RANGE = _LARGE_SEGMENT << 26  # addresses of one expandable pool: 1.25 PiB, a multiple of both page sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How a sequence of allocations and frees went. Peaks are those up to the failure where it does not fit.

    Attributes:
        fits: Whether every allocation was served.
        failed_at: Index of the event that ran out of memory.
        rounded_bytes: Peak of the live requests, each rounded up to 512 bytes: what no allocator gets below.
        peak_allocated_bytes: Peak of the live blocks, ``torch.cuda.max_memory_allocated``.
        peak_reserved_bytes: Peak of the segments, ``torch.cuda.max_memory_reserved``.
        allocated_bytes: Live blocks at the end.
        reserved_bytes: Segments at the end.
        retries: How often cached segments had to be given back first, ``num_alloc_retries``. Each one waits for the
            device, and what was given back is asked for again: many of them and the step is slow.
        mallocs: Segments asked for, or ranges of pages mapped, ``num_device_alloc``.
    """

    fits: bool
    failed_at: int | None
    rounded_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    retries: int
    mallocs: int


def replay(
    events: ArrayLike,
    sizes: ArrayLike,
    streams: ArrayLike | None = None,
    *,
    capacity_bytes: int | None = None,
    expandable: bool = False,
) -> Replay:
    """Follow the allocator through a sequence of events.

    Args:
        events: ``k`` allocates block ``k``, ``~k`` (that is ``-k - 1``) frees it. A block that was freed may be
            allocated again, so a training step is repeated by repeating its events.
        sizes: Bytes that block ``k`` asks for. Nothing is allocated for a block of no bytes, as in torch.
        streams: Number of the stream, from 0, that block ``k`` is allocated on; by default there is one stream.
        capacity_bytes: What the allocator may reserve; no limit by default.
        expandable: ``expandable_segments:True``.

    Raises:
        ValueError: A live block is allocated, one that is not live is freed, or there is no such block.
    """
    sequence = _Sequence(events, sizes, streams)
    pools, failed_at = sequence.run(None if capacity_bytes is None else capacity_bytes // _UNIT, expandable=expandable)
    return Replay(
        fits=failed_at is None,
        failed_at=failed_at,
        rounded_bytes=sequence.peak(failed_at) * _UNIT,
        peak_allocated_bytes=pools.peak_allocated * _UNIT,
        peak_reserved_bytes=pools.peak_reserved * _UNIT,
        allocated_bytes=pools.allocated * _UNIT,
        reserved_bytes=pools.reserved * _UNIT,
        retries=pools.retries,
        mallocs=pools.mallocs,
    )


def smallest_capacity(
    events: ArrayLike,
    sizes: ArrayLike,
    streams: ArrayLike | None = None,
    *,
    expandable: bool = False,
    resolution_bytes: int = 2 * MIB,
) -> int:
    """The smallest ``capacity_bytes`` on which the sequence runs.

    A bisection between the live requests and what is reserved without a limit. Each replay also tells between which
    capacities it would have gone the same way, and the search skips to their ends. With a resolution of up to 2 MiB
    the answer is exact: it runs there, and not on one byte less.

    Fitting is not strictly monotone: less room means earlier retries, and what they merge or scatter changes where
    later blocks go. So a smaller capacity, below one that fails, may run again, and a larger one may fail. The answer
    is one edge from failing to running, not a proof that it is the only one: 8 of 60 random sequences had a second
    edge, up to 26 MiB below or 14 MiB above an answer of about 140 MiB; of 6 that look like training steps none had.

    Args:
        events: As for :func:`replay`.
        sizes: As for :func:`replay`.
        streams: As for :func:`replay`.
        expandable: As for :func:`replay`.
        resolution_bytes: How far above the edge the answer may lie; coarser is faster.

    Raises:
        ValueError: See :func:`replay`.
    """
    sequence = _Sequence(events, sizes, streams)
    pools, _ = sequence.run(None, expandable=expandable)
    fits = pools.granted
    fails = _round_up(sequence.peak(), _GRAIN) - 1
    if expandable:  # pages may go beyond the capacity, by less than one page
        fails = max(fails - _LARGE_SEGMENT, -1)
    while fits - fails > max(resolution_bytes // _UNIT, 1):
        middle = (fits + fails) // 2
        pools, failed_at = sequence.run(middle, expandable=expandable)
        if failed_at is None:
            fits = pools.granted
        else:
            fails = pools.refused - 1
    return fits * _UNIT


class _Sequence:
    """Events that were checked, and what each block needs, as lists: they are read faster than arrays."""

    def __init__(self, events: ArrayLike, sizes: ArrayLike, streams: ArrayLike | None = None) -> None:
        steps = np.asarray(events, dtype=np.int64)
        asked = np.asarray(sizes, dtype=np.int64)
        blocks = np.where(steps < 0, ~steps, steps)
        if asked.size and asked.min() < 0:
            raise ValueError(f"block {int(asked.argmin())} asks for {int(asked.min())} bytes")
        if blocks.size and blocks.max() >= asked.size:
            raise ValueError(f"event {int(blocks.argmax())} names block {int(blocks.max())} of {asked.size}")
        _check_turns(steps, blocks)
        on = np.zeros(asked.size, dtype=np.int64) if streams is None else np.asarray(streams, dtype=np.int64)
        if on.shape != asked.shape or (on.size and on.min() < 0):
            raise ValueError(f"streams of shape {on.shape} from {on.min(initial=0)} on, for {asked.size} blocks")
        needs = -(-asked // _UNIT)
        self.events: list[int] = steps.tolist()
        self.needs: list[int] = needs.tolist()
        self.pools: list[int] = (2 * on + (needs > _SMALL_SIZE)).tolist()
        self._live = np.cumsum(np.where(steps < 0, -needs[blocks], needs[blocks]))

    def peak(self, until: int | None = None) -> int:
        """Peak of the live requests before event ``until``."""
        return int(self._live[:until].max(initial=0))

    def run(self, capacity: int | None, *, expandable: bool) -> tuple[_Pools, int | None]:
        """Replay, and the index of the event that failed."""
        pools = (_Expandable if expandable else _Segments)(self.needs, self.pools, capacity)
        allocate, free = pools.allocate, pools.free
        for index, event in enumerate(self.events):
            if event < 0:
                free(~event)
            elif not allocate(event):
                return pools, index
        return pools, None


def _check_turns(steps: np.ndarray, blocks: np.ndarray) -> None:
    """Each block is allocated first, and allocated and freed in turn."""
    order = np.argsort(blocks, kind="stable")
    frees, owners = steps[order] < 0, blocks[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = owners[1:] != owners[:-1]
    was_live = np.zeros(len(order), dtype=bool)
    was_live[1:] = ~frees[:-1] & ~first[1:]
    wrong = order[frees != was_live]
    if wrong.size:
        index = int(wrong.min())
        what = "frees a block that is not live" if steps[index] < 0 else "allocates a block that is live"
        raise ValueError(f"event {index} {what}: block {int(blocks[index])}")


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step


def _segment(need: int) -> int:
    """What is asked of the driver for a request, ``get_allocation_size``."""
    if need <= _SMALL_SIZE:
        return _SMALL_SEGMENT
    if need < _OWN_SEGMENT:
        return _LARGE_SEGMENT
    return _round_up(need, _GRAIN)


class _Pools(ABC):
    """The pools of free blocks, and the counters.

    A pool is a number: twice that of its stream, and one more for the large pool.

    There is no list of neighbours: a free block is found by its start and by its end, and segments never touch, so
    that blocks of two segments do not join.

    Attributes:
        pool_of: The pool of each block.
        spare: The free blocks of each pool, sorted.
        live: Start and size by block.
        granted: The replay would have gone the same way on every capacity from this one up to its own ...
        refused: ... and from its own up to, but without, this one.
    """

    large_rest: int  # a rest in a large pool is split off where it is larger than this

    def __init__(self, needs: Sequence[int], pool_of: Sequence[int], capacity: int | None) -> None:
        self.needs = needs
        self.pool_of = pool_of
        self.capacity = sys.maxsize if capacity is None else capacity
        self.spare: list[list[int]] = [[] for _ in range((max(pool_of, default=0) | 1) + 1)]
        self.size_at: dict[int, int] = {}
        self.start_before: dict[int, int] = {}
        self.live: dict[int, tuple[int, int]] = {}
        self.allocated = self.peak_allocated = 0
        self.reserved = self.peak_reserved = 0
        self.retries = self.mallocs = 0
        self.granted = 0
        self.refused = sys.maxsize

    def allocate(self, block: int) -> bool:
        """Whether there was room."""
        need = self.needs[block]
        if need == 0:
            return True
        pool = self.pool_of[block]
        spare, keep = self.spare[pool], self.large_rest if pool % 2 else 0
        index = bisect_left(spare, need << _SHIFT)
        if index == len(spare):
            if not self._granted(_segment(need)):
                return False
            start, size = self._grow(pool, need)
        else:
            key = spare.pop(self._choose(pool, index))
            start, size = key & _START, key >> _SHIFT
            del self.size_at[start], self.start_before[start + size]
        if size - need > keep:
            self._put(pool, start + need, size - need)
            size = need
        self.live[block] = start, size
        self.allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return True

    def free(self, block: int) -> None:
        """Back into its pool, joined with its free neighbours."""
        if self.needs[block] == 0:
            return
        start, size = self.live.pop(block)
        self.allocated -= size
        self._join(self.pool_of[block], start, size)

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
        end = start + size
        if start in self.start_before:
            start = self.start_before[start]
            self._take(pool, start)
        if end in self.size_at:
            end += self._take(pool, end)
        self._put(pool, start, end - start)

    @abstractmethod
    def _choose(self, pool: int, index: int) -> int:
        """Which free block to use, from the first one on that is large enough."""

    @abstractmethod
    def _grow(self, pool: int, need: int) -> tuple[int, int]:
        """Start and size of a new block that is in no pool."""

    @abstractmethod
    def _give_back(self) -> None:
        """Return to the driver all that is free as a whole, ``release_cached_blocks``."""


class _Segments(_Pools):
    """Segments from ``cudaMalloc``."""

    large_rest = _SMALL_SIZE

    def __init__(self, needs: Sequence[int], pool_of: Sequence[int], capacity: int | None) -> None:
        super().__init__(needs, pool_of, capacity)
        self.segments: dict[int, int] = {}
        self._next = 0

    def _choose(self, pool: int, index: int) -> int:
        return index

    def _grow(self, pool: int, need: int) -> tuple[int, int]:
        start, size = self._next, _segment(need)
        self.segments[start] = size
        self._next += size + 1  # never touches the next one
        self._reserve(size)
        return start, size

    def _give_back(self) -> None:
        for pool, spare in enumerate(self.spare):
            for key in list(spare):
                start, size = key & _START, key >> _SHIFT
                if self.segments.get(start) == size:
                    self._take(pool, start)
                    del self.segments[start]
                    self.reserved -= size


class _Expandable(_Pools):
    """One range of addresses for each pool, mapped page by page."""

    large_rest = 0

    def __init__(self, needs: Sequence[int], pool_of: Sequence[int], capacity: int | None) -> None:
        super().__init__(needs, pool_of, capacity)
        # what is not mapped, by start; sorted, and the last one never ends
        self._holes: list[dict[int, int]] = [{pool * _RANGE: _RANGE} for pool in range(len(self.spare))]

    def _choose(self, pool: int, index: int) -> int:
        holes, spare = self._holes[pool], self.spare[pool]
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
        holes, page = self._holes[pool], _page(pool)
        while (size := self.size_at.get(start, 0)) < need:
            at = start + size
            hole = holes.pop(at)
            mapped = _round_up(min(need - size, hole), page)
            if mapped < hole:
                holes[at + mapped] = hole - mapped
            self._reserve(mapped)
            self._join(pool, at, mapped)
        return start, self._take(pool, start)

    def _starts(self, pool: int) -> Iterator[int]:
        """Where free addresses begin that contain a hole, the lowest first, ``find_expandable_block``."""
        for hole in sorted(self._holes[pool]):
            yield self.start_before.get(hole, hole)

    def _reach(self, pool: int, start: int, need: int) -> int:
        """How many addresses from ``start`` on are free or not mapped; counted up to ``need``."""
        holes, reach = self._holes[pool], 0
        while reach < need:
            at = start + reach
            step = self.size_at.get(at, 0) or holes.get(at, 0)
            if step == 0:
                break
            reach += step
        return reach

    def _give_back(self) -> None:
        for pool, spare in enumerate(self.spare):
            holes, page = self._holes[pool], _page(pool)
            for key in list(spare):
                start, size = key & _START, key >> _SHIFT
                first, last = _round_up(start, page), (start + size) // page * page
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
    return _LARGE_SEGMENT if pool % 2 else _SMALL_SEGMENT


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
