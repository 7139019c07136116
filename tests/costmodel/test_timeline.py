"""Tapes: what is read off them, and their continuation to more layers."""

import dataclasses
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.costmodel.tracing.longer_tape import lengthen
from autofit.costmodel.tracing.timeline import CATEGORIES, ELSEWHERE, Tape, UnlikeError, ordered
from tests.support.layered import Layered, Writer

SIZES = st.integers(0, 1 << 40)


@st.composite
def tapes(draw):
    """Any tape: blocks made and freed in any order, some never; and the same run as a list of sets of live blocks."""
    writer = Writer()
    alive, history = [], []
    writer.mark("0:pre")
    for _ in range(draw(st.integers(1, 40))):
        if draw(st.booleans()) or not alive:
            category = draw(st.sampled_from(CATEGORIES))
            alive.append(writer.new(draw(SIZES), draw(SIZES), category, draw(st.sampled_from("abc"))))
        else:
            writer.drop(alive.pop(draw(st.integers(0, len(alive) - 1))))
        if draw(st.integers(0, 4)) == 0:
            writer.mark(f"0:F{len(writer.segments)}")
        history.append(set(alive))
    tape = writer.tape()
    # as written, not with frees in order
    return dataclasses.replace(tape, events=np.array(writer.events)), history


@given(tapes(), st.integers(0, 64))
def test_what_lives_at_each_moment(both, rows):
    tape, history = both
    sizes = tape.bytes_at(rows)
    live = tape.live(rows)
    zero, per_row = tape.lines()
    np.testing.assert_array_equal(zero + per_row * rows, live)
    for moment, alive in enumerate(history):
        assert set(np.flatnonzero(tape.alive(moment))) == alive
        outside = {block for block in alive if tape.categories[block] == ELSEWHERE}
        assert live[moment] == sum(sizes[block] for block in alive - outside)
        assert tape.live_elsewhere(rows)[moment] == sum(sizes[block] for block in outside)
        held = tape.by_category(moment, rows)
        for index in range(len(CATEGORIES)):
            assert held[index] == sum(sizes[block] for block in alive if tape.categories[block] == index)


@given(tapes())
def test_each_event_is_in_the_segment_that_it_was_written_in(both):
    tape, _ = both
    for moment in range(len(tape.events)):
        place = max(place for place in range(len(tape.segments)) if tape.starts[place] <= moment)
        begin, end = tape.bounds(place)
        assert begin <= moment < end
        assert tape.segment_at(moment) == tape.segments[place]
    assert tape.bounds(len(tape.segments) - 1)[1] == len(tape.events)


def test_neighbouring_segments_are_one_part():
    tape = Layered().tape(3)
    first, last = tape.segments.index("0:F0"), tape.segments.index("0:F2")
    assert tape.part(["0:F0", "0:F1", "0:F2"]) == (tape.starts[first], tape.starts[last + 1])
    assert tape.part(["nothing"]) == (0, 0)


@given(tapes())
def test_arrays_there_and_back(both):
    tape, _ = both
    file = io.BytesIO()
    np.savez_compressed(file, **tape.arrays())
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        again = Tape.from_arrays(arrays)
    for field in dataclasses.fields(Tape):
        mine, other = getattr(tape, field.name), getattr(again, field.name)
        if isinstance(mine, tuple):
            assert mine == other
        else:
            np.testing.assert_array_equal(mine, other)
            assert mine.dtype == other.dtype


# -- layers -------------------------------------------------------------------------------------------------------


def same(long, whole):
    """The same events, sizes, kinds and work; only frees that follow one another may stand in another order."""
    assert long.segments == whole.segments
    np.testing.assert_array_equal(long.starts, whole.starts)
    np.testing.assert_array_equal(ordered(long.events, long.starts), ordered(whole.events, whole.starts))
    for name in ("sizes", "per_row", "categories", "work", "work_per_row"):
        np.testing.assert_array_equal(getattr(long, name), getattr(whole, name))
    assert [long.names[op] for op in long.ops] == [whole.names[op] for op in whole.ops]


PAIR = st.tuples(st.integers(0, 99), st.integers(0, 99))
MODELS = st.builds(
    Layered,
    kept=st.lists(PAIR, max_size=3).map(tuple),
    passing=st.lists(PAIR, max_size=3).map(tuple),
    hidden=PAIR,
    until=st.sampled_from(["next_forward", "next_backward", "own_backward", "head"]),
    copies=st.lists(st.integers(1, 99), max_size=2).map(tuple),
    gradients=st.lists(st.integers(1, 99), max_size=3).map(tuple),
    added=st.sampled_from(["in_place", "replaced"]),
    back=PAIR,
    shared=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.sampled_from(["F2", "B0"])), max_size=3).map(
        tuple
    ),
    rest=st.booleans(),
)


@settings(deadline=None)
@given(MODELS, st.integers(0, 9))
def test_a_lengthened_tape_is_that_of_the_longer_model(model, copies):
    long, whole = lengthen(model.tape(3), copies), model.tape(3 + copies)
    same(long, whole)
    for rows in (1, 7):
        ends = np.concatenate([np.flatnonzero(whole.events[1:] >= 0), [len(whole.events) - 1]])
        np.testing.assert_array_equal(long.live(rows)[ends], whole.live(rows)[ends])
        assert sorted(long.bytes_at(rows)) == sorted(whole.bytes_at(rows))


def test_no_copies_leave_the_tape_as_it_is():
    tape = Layered().tape(3)
    assert lengthen(tape, 0) is tape


def three_layers(*, first=4, first_row=3, first_op="hidden"):
    """Three layers that hand one block on; the first one's may be another."""
    writer = Writer()
    writer.mark("0:pre")
    handed = []
    for layer in range(3):
        writer.mark(f"0:F{layer}")
        handed.append(writer.new(4, 3, op="hidden") if layer else writer.new(first, first_row, op=first_op))
        if layer:
            writer.drop(handed[layer - 1])
    writer.mark("0:head")
    writer.drop(handed[-1])
    return writer.tape()


def test_layers_that_hand_on_the_same_are_lengthened():
    assert lengthen(three_layers(), 2).live(1).max() == 2 * (4 + 3)


@pytest.mark.parametrize(
    "unlike",
    [
        {"first": 5},
        {"first_op": "other"},
        {"first_row": 5},
    ],
)
def test_layers_that_hand_on_another_block_are_unlike(unlike):
    with pytest.raises(UnlikeError, match="do not do the same"):
        lengthen(three_layers(**unlike), 2)


def test_a_block_that_only_one_layer_made_has_no_twin():
    writer = Writer()
    writer.mark("0:F0")
    writer.drop(writer.new(1))
    extra = writer.new(1)
    writer.mark("0:F1")
    writer.drop(extra)
    writer.mark("0:F2")
    with pytest.raises(UnlikeError):
        lengthen(writer.tape(), 1)


def collecting(layers, until):
    """Each layer adds a block to a list, and one layer lets go of the whole list."""
    writer = Writer()
    listed = []
    for layer in range(layers):
        writer.mark(f"0:F{min(layer, 1) + (layer == layers - 1)}")
        listed.append(writer.new(4))
    writer.mark("0:head")
    if until == "head":
        writer.drop(*listed)
    for layer in reversed(range(layers)):
        writer.mark(f"0:B{min(layer, 1) + (layer == layers - 1)}")
        writer.drop(writer.new(1))
        if f"B{layer}" == until:
            writer.drop(*listed)
    writer.mark("0:step")
    return writer.tape()


def skipping(layers):
    """What a layer makes is freed by the next but one."""
    writer = Writer()
    made = []
    for layer in range(layers):
        writer.mark(f"0:F{min(layer, 1) + (layer == layers - 1)}")
        made.append(writer.new(4))
        if layer > 1:
            writer.drop(made[layer - 2])
    writer.mark("0:head")
    writer.drop(*made[-2:])
    return writer.tape()


def test_what_all_layers_leave_to_the_head_is_freed_there():
    same(lengthen(collecting(3, "head"), 3), collecting(6, "head"))


def test_what_all_layers_leave_to_one_layer_is_unlike():
    with pytest.raises(UnlikeError):
        lengthen(collecting(3, "B0"), 3)


def test_what_skips_a_layer_is_unlike():
    with pytest.raises(UnlikeError):
        lengthen(skipping(3), 3)
