"""The allocator's rules by hand, and what must hold for any sequence."""

import itertools
import random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.costmodel.memory import allocator
from autofit.costmodel.memory.allocator import _Sequence, replay, smallest_capacity
from autofit.costmodel.memory.pools import _TOP, RANGE, UNIT, Expandable, Segments
from autofit.system.units import GIB, KIB, MIB


def training(layers, hidden, tokens, steps, seed=0):
    """Events and sizes that look like training steps: weights, saved activations, temporaries, gradients, state.

    The number of tokens differs from step to step by up to a fifth, as that of rows of different length does.
    """
    rng = random.Random(seed)
    events, sizes = [], []

    def new(size):
        sizes.append(int(size))
        events.append(len(sizes) - 1)
        return len(sizes) - 1

    def drop(*blocks):
        events.extend(~block for block in blocks)

    shapes = [(hidden, hidden)] * 4 + [(hidden, 3 * hidden)] * 3 + [(hidden,)] * 2
    weights = [2 * w[0] * (w[1] if len(w) > 1 else 1) for _ in range(layers) for w in shapes]
    for size in weights:
        new(size)
    state = []
    for _ in range(steps):
        row = 2 * hidden * rng.randint(int(tokens * 0.8), tokens)
        saved = []
        for _ in range(layers):
            drop(new(row * 3), new(row))
            saved.append([new(row), new(row * 3), new(row), new(row // hidden * 2)])
        logits = new(row * 8)
        softmax = new(row * 16)
        drop(logits, new(row * 8))
        gradients = []
        passed = new(row)
        for layer in reversed(range(layers)):
            work = new(row * 3)
            gradients += [new(size) for size in weights[layer * len(shapes) : (layer + 1) * len(shapes)]]
            after = new(row)
            drop(work, passed, *saved[layer])
            passed = after
        drop(passed, softmax)
        state = state or [new(4 * size) for size in weights]
        for size in weights:
            drop(new(size * 2))
        drop(*gradients)
    return events, sizes


def both(test):
    return pytest.mark.parametrize("expandable", [False, True])(test)


def starts(pools):
    """Where in the range of its pool each live block begins, in bytes."""
    return {block: start % RANGE * UNIT for block, (start, _) in pools.places().items()}


# one block, asked for and freed: (bytes, expandable) -> allocated, reserved
ONE = [
    (0, False, 0, 0),
    (1, False, 512, 2 * MIB),
    (513, False, 1024, 2 * MIB),
    (MIB, False, MIB, 2 * MIB),
    (MIB + 1, False, MIB + 512, 20 * MIB),
    (10 * MIB - 512, False, 10 * MIB - 512, 20 * MIB),
    (10 * MIB - 511, False, 10 * MIB, 10 * MIB),
    (10 * MIB + 1, False, 10 * MIB + 512, 12 * MIB),
    (11 * MIB - 512, False, 11 * MIB - 512, 12 * MIB),  # more than 1 MiB is left, and split off
    (11 * MIB, False, 12 * MIB, 12 * MIB),  # no more than that is left: the block is the segment
    (1, True, 512, 2 * MIB),
    (MIB + 1, True, MIB + 512, 20 * MIB),
    (11 * MIB, True, 11 * MIB, 20 * MIB),
    (21 * MIB, True, 21 * MIB, 40 * MIB),
]


@pytest.mark.parametrize(("asked", "expandable", "allocated", "reserved"), ONE)
def test_one_block(asked, expandable, allocated, reserved):
    result = replay([0], [asked], expandable=expandable)
    assert (result.peak_allocated_bytes, result.peak_reserved_bytes) == (allocated, reserved)
    result = replay([0, ~0], [asked], expandable=expandable)
    assert (result.allocated_bytes, result.reserved_bytes, result.retries) == (0, reserved, 0)


def test_small_blocks_share_a_segment():
    assert replay(range(4), [512 * KIB] * 4).peak_reserved_bytes == 2 * MIB
    assert replay(range(5), [512 * KIB] * 5).peak_reserved_bytes == 4 * MIB
    assert replay(range(3), [MIB - 512] * 3).peak_reserved_bytes == 4 * MIB  # 1 KiB is left of the first segment


def test_blocks_below_10_mib_share_20_mib():
    assert replay(range(2), [9 * MIB] * 2).mallocs == 1
    assert replay(range(3), [9 * MIB] * 3).peak_reserved_bytes == 40 * MIB
    # of 20 MiB, 1 MiB is left behind two blocks of 9.5 MiB: the second block is 10.5 MiB
    assert replay(range(2), [19 * MIB // 2] * 2).peak_allocated_bytes == 20 * MIB


def test_pools_do_not_share():
    assert replay([0, ~0, 1], [20 * MIB, KIB]).peak_reserved_bytes == 22 * MIB


def test_best_fit_takes_the_smallest_that_is_large_enough():
    # free: 40 and 30; 24 goes into the 30, whose rest of 6 takes 5; then the 40 is still whole
    result = replay([0, 1, ~0, ~1, 2, 3, 4], [40 * MIB, 30 * MIB, 24 * MIB, 5 * MIB, 40 * MIB])
    assert result.peak_reserved_bytes == 70 * MIB


@pytest.mark.parametrize("by_address", [False, True])
def test_of_equals_that_of_the_oldest_segment_is_taken_or_the_one_at_the_lowest_address(monkeypatch, by_address):
    """The former from torch 2.12 on; the driver lays a newer segment below an older one."""
    monkeypatch.setattr(Segments, "by_address", by_address)
    pools = Segments([48 * KIB * 2] * 3, [1] * 3, None)
    for block in (0, 1):
        assert pools.follow([block]) is None
    where = pools.live[by_address]
    pools.follow([~1])
    pools.follow([~0])
    assert pools.follow([2]) is None
    assert pools.live[2] == where


def test_a_segment_lies_below_the_others_or_in_the_highest_gap_that_large_ones_left(monkeypatch):
    """From 20 MiB on they begin at multiples of 32 MiB, as far as could be told from what an H100 reserved."""
    monkeypatch.setattr(Segments, "by_address", True)
    sizes = [1, *(size * MIB // UNIT for size in (20, 500, 12, 10, 40, 22))]
    pools = Segments(sizes, [0] + [1] * 6, None)
    for block in range(len(sizes)):
        assert pools.follow([block]) is None
    assert [(_TOP - start // 2) * UNIT // MIB for start in pools.segments] == [2, 32, 544, 44, 12, 608, 640]
    pools.follow([~2])
    pools._give_back()
    assert pools.follow([2]) is None
    assert (_TOP - pools.places()[2][0] // 2) * UNIT // MIB == 544


def test_freed_neighbours_join():
    # three thirds of a 24 MiB block; whatever the order of frees, the whole is one again
    sizes = [24 * MIB, 8 * MIB, 8 * MIB, 8 * MIB, 24 * MIB]
    for order in itertools.permutations([~1, ~2, ~3]):
        result = replay([0, ~0, 1, 2, 3, *order, 4], sizes)
        assert (result.peak_reserved_bytes, result.mallocs) == (24 * MIB, 1)


def test_segments_do_not_join():
    assert replay([0, 1, ~0, ~1, 2], [20 * MIB, 20 * MIB, 40 * MIB]).peak_reserved_bytes == 80 * MIB


def test_cached_segments_are_given_back_before_it_fails():
    events, sizes = [0, 1, ~0, ~1, 2], [20 * MIB, 20 * MIB, 40 * MIB]
    result = replay(events, sizes, capacity_bytes=79 * MIB)
    assert result.fits
    assert (result.retries, result.peak_reserved_bytes, result.mallocs) == (1, 40 * MIB, 3)
    assert smallest_capacity(events, sizes) == 40 * MIB


def test_the_small_pool_is_given_back_too():
    assert replay([0, ~0, 1], [1, 20 * MIB], capacity_bytes=20 * MIB).fits


def test_split_segments_are_not_given_back():
    # 2 lives in the freed segment of 40 MiB, of which 20 MiB can't be used for 30
    events, sizes = [0, ~0, 1, 2], [40 * MIB, 20 * MIB, 30 * MIB]
    assert replay(events, sizes).peak_reserved_bytes == 70 * MIB
    result = replay(events, sizes, capacity_bytes=70 * MIB - 1)
    assert not result.fits
    assert (result.failed_at, result.retries, result.reserved_bytes) == (3, 1, 40 * MIB)
    assert smallest_capacity(events, sizes) == 70 * MIB
    # pages can: one range grows from 40 to 60 MiB
    assert replay(events, sizes, expandable=True).peak_reserved_bytes == 60 * MIB


def test_the_event_that_fails_is_counted_with_those_of_blocks_of_no_bytes():
    result = replay([0, 1, ~0, 2], [0, MIB, 40 * MIB], capacity_bytes=20 * MIB)
    assert (result.fits, result.failed_at, result.rounded_bytes) == (False, 3, MIB)


def test_a_range_grows_from_the_free_block_at_its_end():
    # 20 mapped, 12 live, 8 free; 18 needs one more page, not two
    result = replay([0, 1], [12 * MIB, 18 * MIB], expandable=True)
    assert (result.peak_reserved_bytes, result.mallocs) == (40 * MIB, 2)


def test_the_free_block_at_the_end_counts_as_what_it_can_grow_to():
    # free: 6 MiB between live blocks, 5 MiB at the end (of 40); 4 MiB goes to the 6, and the end keeps its 5
    sizes = [10 * MIB, 6 * MIB, 19 * MIB, 4 * MIB]
    pools = Expandable([size // UNIT for size in sizes], [1] * 4, None)
    for block in (0, 1, 2):
        assert pools.follow([block]) is None
    pools.follow([~1])
    assert pools.follow([3]) is None
    assert starts(pools)[3] == 10 * MIB


def test_whole_pages_are_unmapped_and_mapped_again_from_the_lowest_hole():
    # 0 at 0..30, 1 at 30..60; freed 0 gives back page 0..20, and 20..30 stays, in a page that 1 holds
    sizes = [30 * MIB, 30 * MIB, 40 * MIB, 25 * MIB]
    pools = Expandable([size // UNIT for size in sizes], [1] * 4, 80 * MIB // UNIT)
    for block in (0, 1):
        assert pools.follow([block]) is None
    pools.follow([~0])
    assert pools.follow([2]) is None  # 60 + 40 > 80: gives back 20, then maps behind 1
    assert pools.reserved * UNIT == 80 * MIB
    assert starts(pools)[2] == 60 * MIB
    pools.follow([~2])
    assert pools.follow([3]) is None  # fits into what 2 left: nothing is mapped
    assert starts(pools)[3] == 60 * MIB
    pools.follow([~3])
    pools._give_back()
    assert pools.reserved * UNIT == 40 * MIB
    assert pools.follow([3]) is None  # the hole at 0 and the rest behind it are 30 MiB
    assert starts(pools)[3] == 0


@both
def test_a_stream_does_not_use_what_another_has_freed(expandable):
    events, sizes = [0, ~0, 1, ~1], [40 * MIB, 40 * MIB]
    assert replay(events, sizes, [1, 1], expandable=expandable).peak_reserved_bytes == 40 * MIB
    apart = replay(events, sizes, [0, 1], expandable=expandable)
    assert apart.peak_reserved_bytes == 80 * MIB
    assert apart.peak_allocated_bytes == 40 * MIB
    short = replay(events, sizes, [0, 1], capacity_bytes=79 * MIB, expandable=expandable)
    assert (short.fits, short.retries, short.peak_reserved_bytes) == (True, 1, 40 * MIB)
    assert smallest_capacity(events, sizes, [0, 1], expandable=expandable) == 40 * MIB
    with pytest.raises(ValueError, match="streams of shape"):
        replay(events, sizes, [0])


def test_with_pages_the_ceiling_is_checked_before_rounding():
    result = replay([0], [21 * MIB], capacity_bytes=22 * MIB, expandable=True)
    assert result.fits
    assert result.peak_reserved_bytes == 40 * MIB
    assert smallest_capacity([0], [21 * MIB], expandable=True) == 22 * MIB


@both
def test_nothing_takes_nothing(expandable):
    assert replay([], [], expandable=expandable).peak_reserved_bytes == 0
    assert smallest_capacity([0, ~0], [0], expandable=expandable) == 0


@pytest.mark.parametrize(
    ("events", "sizes", "words"),
    [
        ([~0], [1], "event 0 frees a block that is not live: block 0"),
        ([0, ~0, ~0], [1], "event 2 frees a block that is not live: block 0"),
        ([0, 1, 0], [1, 1], "event 2 allocates a block that is live: block 0"),
        ([0, 1], [1], "event 1 names block 1 of 1"),
        ([0], [-1], "block 0 asks for -1 bytes"),
    ],
)
def test_a_sequence_that_no_program_makes_is_refused(events, sizes, words):
    with pytest.raises(ValueError, match=words):
        replay(events, sizes)


def test_repeated_steps_settle():
    """Equal steps need no new memory after the first two: the second is the first one that begins with a cache."""
    step = [0, 1, ~0, 2, 3, ~2, ~1, ~3]
    sizes = [7 * MIB, 3 * MIB, 25 * MIB, 300 * KIB]
    for expandable in (False, True):
        few = replay(step * 2, sizes, expandable=expandable)
        many = replay(step * 50, sizes, expandable=expandable)
        assert many.reserved_bytes == few.reserved_bytes
        assert many.mallocs == few.mallocs


@both
def test_steps_of_different_length_reserve_more_than_they_need(expandable):
    events, sizes = training(layers=8, hidden=1024, tokens=4096, steps=12)
    free = replay(events, sizes, expandable=expandable)
    least = smallest_capacity(events, sizes, expandable=expandable)
    assert free.rounded_bytes <= free.peak_allocated_bytes <= free.peak_reserved_bytes
    assert replay(events, sizes, capacity_bytes=least, expandable=expandable).fits
    assert not replay(events, sizes, capacity_bytes=least - 1, expandable=expandable).fits
    assert least > free.rounded_bytes
    if not expandable:  # with pages little is lost, and the ceiling asks for more room than is then mapped
        assert least < 0.97 * free.peak_reserved_bytes


def test_a_coarser_resolution_is_never_too_small():
    events, sizes = training(layers=4, hidden=1024, tokens=4096, steps=8)
    for resolution in (MIB // 2, 10 * MIB, 100 * MIB, GIB):
        least = smallest_capacity(events, sizes, resolution_bytes=resolution)
        assert replay(events, sizes, capacity_bytes=least).fits


SIZES = st.one_of(
    st.integers(0, 4 * KIB),
    st.integers(1, MIB + 1),
    st.integers(MIB, 12 * MIB),
    st.integers(9 * MIB, 90 * MIB),
    st.sampled_from([MIB, 2 * MIB, 10 * MIB, 11 * MIB, 20 * MIB, 40 * MIB]),
)


@st.composite
def sequences(draw):
    """Allocations and frees in any order, blocks coming again; at the end all is freed."""
    sizes = draw(st.lists(SIZES, min_size=1, max_size=30))
    live, events = set(), []
    for block in draw(st.lists(st.integers(0, len(sizes) - 1), max_size=120)):
        events.append(~block if block in live else block)
        live ^= {block}
    return events + [~block for block in sorted(live)], sizes


def check(pools, expandable):
    """What must hold after every event."""
    free = [(key & (1 << 48) - 1, key >> 48) for spare in pools.spare for key in spare]
    assert all(spare == sorted(spare) for spare in pools.spare)
    assert dict(free) == pools.size_at
    assert {start + size: start for start, size in free} == pools.start_before
    spans = sorted([*free, *pools.places().values()])
    for (start, size), (after, _) in itertools.pairwise(spans):
        assert start + size <= after, "blocks overlap"
    assert all(start + size not in pools.size_at for start, size in free), "free neighbours that did not join"
    assert sum(size for _, size in spans) == pools.reserved
    assert sum(size for _, size in pools.places().values()) == pools.allocated
    assert pools.allocated <= pools.reserved <= pools.peak_reserved
    if expandable:
        every = sorted(spans + [hole for holes in pools.holes for hole in holes.items()])
        assert all(start + size == after for (start, size), (after, _) in itertools.pairwise(every)), "addresses lost"
        assert pools.reserved < pools.capacity + 20 * MIB // UNIT
    else:
        assert sum(pools.segments.values()) == pools.reserved
        assert pools.reserved <= pools.capacity


@both
@given(sequences(), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_after_every_event(expandable, sequence, capacity):
    """No overlap, no byte lost, never above the capacity; and a block is as large as asked, or just above."""
    events, sizes = sequence
    checked = _Sequence(events, sizes, [index % 3 for index in range(len(sizes))])  # without blocks of no bytes
    needs = checked.needs
    pools = (Expandable if expandable else Segments)(needs, checked.pools, capacity * MIB // UNIT)
    for event in checked.events:
        if pools.follow([event]) is not None:
            assert pools.retries
            return
        if event >= 0:
            slack = pools.places()[event][1] - needs[event]
            assert 0 <= slack <= (MIB // UNIT if needs[event] > MIB // UNIT and not expandable else 0)
        check(pools, expandable)
    assert pools.allocated == 0


@pytest.mark.parametrize("by_address", [False, True])
@given(sequence=sequences())
@settings(max_examples=60, deadline=None)
def test_all_freed_is_all_cached_and_whole(by_address, sequence):
    with mock.patch.object(Segments, "by_address", by_address):
        all_freed(*_Sequence(*sequence).run(None, expandable=False))


def all_freed(pools, failed_at):
    assert failed_at is None
    assert pools.size_at == pools.segments
    pools._give_back()
    assert pools.reserved == 0
    assert pools.gaps == [(0, _TOP)]


@given(sequences())
@settings(max_examples=60, deadline=None)
def test_all_freed_pages_can_all_be_given_back(sequence):
    pools, _ = _Sequence(*sequence).run(None, expandable=True)
    pools._give_back()
    assert (pools.reserved, pools.size_at) == (0, {})
    assert [len(holes) for holes in pools.holes] == [1, 1]


@both
@given(sequences())
@settings(max_examples=60, deadline=None)
def test_the_smallest_capacity_is_an_edge(expandable, sequence):
    least = smallest_capacity(*sequence, expandable=expandable)
    free = replay(*sequence, expandable=expandable)
    on_it = replay(*sequence, capacity_bytes=least, expandable=expandable)
    assert on_it.fits
    if least:
        assert not replay(*sequence, capacity_bytes=least - 1, expandable=expandable).fits
    if not expandable:
        assert free.rounded_bytes <= on_it.peak_reserved_bytes == least <= free.peak_reserved_bytes


def outcome(sequence, units, expandable):
    pools, failed_at = sequence.run(units, expandable=expandable)
    return failed_at, pools.live, pools.peak_reserved, pools.peak_allocated, pools.retries, pools.mallocs


@both
@given(sequences(), st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_a_replay_knows_how_far_it_holds(expandable, sequence, capacity):
    """Between ``granted`` and ``refused`` every capacity gives the same replay."""
    units = capacity * MIB // UNIT
    pools, _ = _Sequence(*sequence).run(units, expandable=expandable)
    assert pools.granted <= units < pools.refused
    same = outcome(_Sequence(*sequence), units, expandable)
    assert outcome(_Sequence(*sequence), pools.granted, expandable) == same
    assert outcome(_Sequence(*sequence), pools.refused - 1, expandable) == same


@both
@given(sequences(), st.lists(st.integers(1, 300), min_size=2, max_size=5))
@settings(max_examples=60, deadline=None)
def test_a_replay_goes_on_where_another_went_the_same_way(expandable, sequence, capacities):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocator, "_KEPT_EVERY", 3)
        again = _Sequence(*sequence)
        for capacity in (None, *(capacity * MIB // UNIT for capacity in capacities)):
            assert outcome(again, capacity, expandable) == outcome(_Sequence(*sequence), capacity, expandable)


@both
@given(sequences(), st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_more_than_is_of_use_is_not_looked_for(expandable, sequence, most):
    least = smallest_capacity(*sequence, expandable=expandable, at_most_bytes=most * MIB)
    fits = replay(*sequence, expandable=expandable, capacity_bytes=most * MIB).fits
    assert (least is not None) == fits
    assert least is None or replay(*sequence, expandable=expandable, capacity_bytes=least).fits
