"""What PyTorch's CUDA caching allocator does with a sequence of allocations and frees, without a device.

Tensors alone do not say which card a step runs on. The allocator takes memory from the driver in segments, cuts blocks
out of them, keeps what is freed, and gives whole free segments back only when the driver refuses: *reserved* memory
lies above *allocated* memory by a share that depends on history, and the smallest card on which a step still runs lies
in between. :func:`replay` follows the allocator's rules, :func:`smallest_capacity` looks for that card.

Source: ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` (torch 2.13), default settings:

* A request is rounded up to 512 bytes. Up to 1 MiB it is *small* and cut from segments of 2 MiB; below 10 MiB from
  segments of 20 MiB; above, its segment is its size rounded up to 2 MiB.
* The smallest free block that is large enough is taken; of equals the one in the oldest segment, and there at the
  lowest address (before torch 2.12: the one at the lowest address in any). What is left over becomes a free block: in
  the small pool always, in the large pool where more than 1 MiB is left. So a large block may be up to 1 MiB larger
  than what was asked for, and ``torch.cuda.max_memory_allocated`` counts it whole.
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
``large_segment_size_mb``); ``empty_cache()``; memory outside the allocator (context, cuBLAS' own, NCCL), whose
addresses may lie between. An expandable range never ends (there: at 9/8 of the card, then a second range begins).

Before torch 2.12 it matters where the driver puts a segment. Its rule is not published; it is taken to be the highest
free address, from 20 MiB on at a multiple of 32 MiB. Of some 30 rules this one told best what an H100 (driver 580.159)
reserved for 37 plans of three models. There and for 18 plans of three others it is off by at most 0.4 %, where
addresses that rise are off by up to 18 %.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autofit.costmodel.memory.pools import GRAIN, LARGE_SEGMENT, SMALL_SIZE, UNIT, Expandable, Pools, Segments, round_up
from autofit.costmodel.tracing.timeline import blocks_of, live_before
from autofit.system.units import MIB

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


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
    pools, failed_at = sequence.run(None if capacity_bytes is None else capacity_bytes // UNIT, expandable=expandable)
    return Replay(
        fits=failed_at is None,
        failed_at=None if failed_at is None else int(sequence.places[failed_at]),
        rounded_bytes=sequence.peak(failed_at) * UNIT,
        peak_allocated_bytes=pools.peak_allocated * UNIT,
        peak_reserved_bytes=pools.peak_reserved * UNIT,
        allocated_bytes=pools.allocated * UNIT,
        reserved_bytes=pools.reserved * UNIT,
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
    at_most_bytes: int | None = None,
) -> int | None:
    """The smallest ``capacity_bytes`` on which the sequence runs; ``None`` where it does not run on ``at_most_bytes``.

    A search between the live requests and what is reserved without a limit. Each replay also tells between which
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
        at_most_bytes: The most that is of use: one replay tells that more is needed, where the edge takes several.

    Raises:
        ValueError: See :func:`replay`.
    """
    sequence = _Sequence(events, sizes, streams)
    most = None if at_most_bytes is None else at_most_bytes // UNIT
    pools, failed_at = sequence.run(most, expandable=expandable)
    if failed_at is not None:
        return None
    fits = pools.granted
    fails = round_up(sequence.peak(), GRAIN) - 1
    if expandable:  # pages may go beyond the capacity, by less than one page
        fails = max(fails - LARGE_SEGMENT, -1)
    while fits - fails > max(resolution_bytes // UNIT, 1):
        between = fails + (fits - fails + 3) // 4  # what fails ends early, what fits is replayed to its end
        pools, failed_at = sequence.run(between, expandable=expandable)
        if failed_at is None:
            fits = pools.granted
        else:
            fails = pools.refused - 1
    return fits * UNIT


_KEPT_EVERY = 10_000
"""Events after which a replay's pools are kept, for other capacities to go on from."""


class _Sequence:
    """Events that were checked, and what each block needs, as lists: they are read faster than arrays."""

    def __init__(self, events: ArrayLike, sizes: ArrayLike, streams: ArrayLike | None = None) -> None:
        steps = np.asarray(events, dtype=np.int64)
        asked = np.asarray(sizes, dtype=np.int64)
        blocks = blocks_of(steps)
        if asked.size and asked.min() < 0:
            raise ValueError(f"block {int(asked.argmin())} asks for {int(asked.min())} bytes")
        if blocks.size and blocks.max() >= asked.size:
            raise ValueError(f"event {int(blocks.argmax())} names block {int(blocks.max())} of {asked.size}")
        _check_turns(steps, blocks)
        on = np.zeros(asked.size, dtype=np.int64) if streams is None else np.asarray(streams, dtype=np.int64)
        if on.shape != asked.shape or (on.size and on.min() < 0):
            raise ValueError(f"streams of shape {on.shape} from {on.min(initial=0)} on, for {asked.size} blocks")
        needs = -(-asked // UNIT)
        self.places = np.flatnonzero(needs[blocks])  # nothing is done for a block of no bytes
        steps, blocks = steps[self.places], blocks[self.places]
        self.events: list[int] = steps.tolist()
        self.needs: list[int] = needs.tolist()
        self.pools: list[int] = (2 * on + (needs > SMALL_SIZE)).tolist()
        self._live = np.cumsum(np.where(steps < 0, -needs[blocks], needs[blocks]))
        self._begun: list[tuple[int, Pools]] = []

    def peak(self, until: int | None = None) -> int:
        """Peak of the live requests before event ``until``."""
        return int(self._live[:until].max(initial=0))

    def run(self, capacity: int | None, *, expandable: bool) -> tuple[Pools, int | None]:
        """Replay, and the index of the event that failed.

        It goes on from where an earlier one has come by the events that go the same way on this capacity.
        """
        kind = Expandable if expandable else Segments
        room = sys.maxsize if capacity is None else capacity
        alike = [one for one in self._begun if type(one[1]) is kind and one[1].granted <= room < one[1].refused]
        begin, begun = max(alike, key=lambda one: one[0], default=(0, None))
        pools = kind(self.needs, self.pools, capacity) if begun is None else begun.copied(capacity)
        for start in range(begin, len(self.events), _KEPT_EVERY):
            failed = pools.follow(self.events[start : start + _KEPT_EVERY])
            if failed is not None:
                return pools, start + failed
            self._begun.append((start + _KEPT_EVERY, pools.copied(capacity)))
        return pools, None


def _check_turns(steps: np.ndarray, blocks: np.ndarray) -> None:
    """Each block is allocated first, and allocated and freed in turn."""
    wrong = np.flatnonzero((steps < 0) != live_before(steps))
    if wrong.size:
        index = int(wrong[0])
        what = "frees a block that is not live" if steps[index] < 0 else "allocates a block that is live"
        raise ValueError(f"event {index} {what}: block {int(blocks[index])}")
