"""What a plan needs, out of its parts: against runs that are written out event by event."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.costmodel.memory.allocator import replay, smallest_capacity
from autofit.costmodel.memory.parts import MicroPart, OptimizerPart, _hull, pack, unpack
from autofit.costmodel.memory.peak import evaluable_rows, need, peaks, phase_of
from autofit.costmodel.memory.requests import requests
from autofit.costmodel.tracing.timeline import AFTER_EVALUATION, CATEGORIES
from autofit.system.units import MIB
from tests.support.layered import Layered, Writer
from tests.support.traced import CONFIGS, PLAIN, Lab

SIZES = st.integers(0, 1 << 30)
GRADIENTS = CATEGORIES.index("gradients")


@st.composite
def models(draw):
    """Sizes of a model's weights, and of what its optimizer makes of them."""
    pair = st.tuples(st.integers(0, 999), st.integers(0, 99))
    return {
        "layers": draw(st.integers(3, 5)),
        "micro": Layered(
            kept=tuple(draw(st.lists(pair, max_size=3))),
            passing=tuple(draw(st.lists(pair, max_size=2))),
            hidden=draw(pair),
            gradients=tuple(draw(st.lists(st.integers(1, 999), min_size=1, max_size=2))),
            copies=tuple(draw(st.lists(st.integers(1, 499), max_size=2))),
            batch=(0, draw(st.integers(0, 99))),
            logits=draw(pair),
        ),
        "state": draw(st.integers(0, 3)),
        "work": draw(st.integers(0, 9999)),
        "elsewhere": draw(st.integers(0, 999)),
    }


def parts_of(model):
    """The two parts, as a tracer would make them."""
    tape = model["micro"].tape(model["layers"])
    grads = list(model["micro"].gradients) * model["layers"]
    writer = Writer()
    writer.mark("begin")
    for turn in range(2):
        writer.mark("0:headB")
        given_ones = [writer.new(size, 0, "gradients") for size in grads]
        writer.mark("0:step")
        if turn == 0:
            writer.new(model["elsewhere"], 0, "elsewhere")
            for size in grads:
                writer.new(size * model["state"], 0, "state")
        writer.drop(writer.new(model["work"]))
        writer.drop(*given_ones)
    micro = MicroPart(tape=tape, weights=np.array(grads), notes=("assumed",))
    return micro, OptimizerPart(tape=writer.tape(), elsewhere_bytes=model["elsewhere"])


def written_out(model, rows, accumulation, *, waiting):
    """Peak of a whole run of three optimizer steps: one number is added to and taken from, in order."""
    micro, _ = parts_of(model)
    tape, grads = micro.tape, micro.weights
    live = peak = int(grads.sum())
    for turn in range(3):
        queue = (accumulation - 2) * rows * model["micro"].batch[1] if waiting and accumulation > 2 else 0
        live += queue
        for step in range(accumulation):
            sizes = tape.bytes_at(rows)
            which = "0:" if step == 0 else "1:"
            places = [place for place, name in enumerate(tape.segments) if name.startswith(which)]
            begin, end = tape.bounds(places[0])[0], tape.bounds(places[-1])[1]
            for event in tape.events[begin:end].tolist():
                live += sizes[event] if event >= 0 else -sizes[~event]
                peak = max(peak, live)
        if turn == 0:
            live += int(grads.sum()) * model["state"]
        peak = max(peak, live + model["work"])
        live -= int(grads.sum()) + queue
    return peak


@settings(deadline=None)
@given(models(), st.integers(1, 16), st.integers(1, 5), st.booleans())
def test_what_a_plan_needs_is_the_peak_of_the_whole_run(model, rows, accumulation, waiting):
    micro, optimizer = parts_of(model)
    found = need(micro, optimizer, rows=rows, accumulation=accumulation, waiting=waiting)
    assert found.peak_bytes == written_out(model, rows, accumulation, waiting=waiting)
    assert sum(found.by_category.values()) == pytest.approx(found.peak_bytes, abs=len(CATEGORIES))
    many = peaks(micro, optimizer, np.array([rows, 1]), np.array([accumulation, 1]), waiting=waiting)
    assert many[0] == pytest.approx(found.peak_bytes, abs=1)
    whole = sum(model["micro"].gradients) * model["layers"]
    assert found.bare_bytes == whole * (2 + model["state"])
    assert found.elsewhere_bytes == model["elsewhere"]
    assert "elsewhere" not in found.by_category


def test_the_peak_may_be_anywhere():
    model = {"layers": 3, "micro": Layered(), "state": 2, "work": 0, "elsewhere": 0}
    parts = parts_of(model)
    found = need(*parts, rows=100, accumulation=1, waiting=False)
    assert (found.phase, found.segment, found.operator) == ("backward", "headB", "back")
    parts = parts_of({**model, "work": 10**6})
    found = need(*parts, rows=1, accumulation=1, waiting=False)
    assert (found.phase, found.segment, found.operator) == ("optimizer", "step", "op")
    assert found.by_category["temporaries"] == 10**6


@settings(deadline=None)
@given(models(), st.integers(1, 16), st.integers(1, 5), st.integers(1, 8), SIZES, st.integers(0, 1 << 20))
def test_an_evaluation_step_may_be_the_peak(model, rows, accumulation, evaluated, zero, slope):
    micro, optimizer = parts_of(model)
    writer = Writer()
    writer.mark("evaluation")
    writer.mark("2:headB")
    writer.drop(writer.new(zero, slope))
    micro = dataclasses.replace(micro, evaluation=writer.tape())
    asked = {"waiting": True, "evaluated_rows": evaluated}
    found = need(micro, optimizer, rows=rows, accumulation=accumulation, **asked)
    beside = int(micro.weights.sum()) * (1 + model["state"])
    batches = rows * accumulation * model["micro"].batch[1]
    in_evaluation = beside + batches + zero + slope * evaluated
    trained = written_out(model, rows, accumulation, waiting=True)
    assert found.peak_bytes == max(trained, in_evaluation)
    assert (found.segment == "evaluation") == (in_evaluation > trained)
    assert sum(found.by_category.values()) == pytest.approx(found.peak_bytes, abs=len(CATEGORIES))
    many = [np.array([one]) for one in (rows, accumulation, evaluated)]
    alike = peaks(micro, optimizer, *many[:2], waiting=True, evaluated_rows=many[2])
    assert alike[0] == pytest.approx(found.peak_bytes, abs=1)
    kept = unpack(pack(micro, None))
    np.testing.assert_array_equal(kept.evaluation.live(evaluated), micro.evaluation.live(evaluated))


@pytest.mark.parametrize(
    ("segments", "phase"),
    [
        (("begin", "pre", "F0", "F1", "F2", "rest", "head", "evaluation"), "forward"),
        (("loss", "headB", "restB", "B2", "B1", "B0", "preB"), "backward"),
        (("step",), "optimizer"),
    ],
)
def test_phases(segments, phase):
    assert {phase_of(segment) for segment in segments} == {phase}


LINES = st.lists(st.tuples(SIZES, st.integers(0, 1 << 20)), min_size=1, max_size=40)


@given(LINES, st.lists(st.integers(0, 4096), min_size=1, max_size=8))
def test_only_the_hull_can_be_a_peak(lines, rows):
    writer = Writer()
    writer.mark("0:F0")
    for zero, slope in lines:
        writer.drop(writer.new(zero, slope))
    writer.mark("0:step")
    writer.mark("1:F0")
    writer.mark("1:step")
    part = MicroPart(tape=writer.tape(), weights=np.zeros(0, dtype=np.int64))
    wide = np.array(rows, dtype=np.float64)
    for adding in (False, True):
        found, moments = part.peaks(wide, adding=adding)
        for at, peak, moment in zip(rows, found, moments, strict=True):
            live = part.tape.live(at)
            assert peak == live.max() == live[moment]


ENDED = st.lists(st.tuples(SIZES, st.integers(1, MIB), st.integers(1, 200), st.booleans()), min_size=1, max_size=20)


@given(ENDED, st.lists(st.integers(0, 400), min_size=1, max_size=8))
def test_large_blocks_that_begin_or_stop_to_grow_are_a_peak_of_lines_between_these_rows(blocks, rows):
    writer, most = Writer(), []
    writer.mark("0:F0")
    for (zero, slope, end, steps), (_, alone, *_) in zip(blocks, reversed(blocks), strict=True):
        held = 32 * MIB
        # grows to its end; or is there from more rows than that on; beside one that grows without an end
        block = writer.new(-held * end, held) if steps else writer.new(zero, held / end)
        writer.drop(block, writer.new(0, alone) if slope % 2 else block)
        most += [held if steps else zero + held, *([np.inf] if slope % 2 else [])]
    writer.mark("0:step")
    writer.mark("1:F0")
    writer.mark("1:step")
    events = [event for place, event in enumerate(writer.events) if event not in writer.events[:place]]
    tape = dataclasses.replace(writer.tape(), events=np.array(events), most=np.array(most, dtype=np.float64))
    tape = dataclasses.replace(tape, starts=np.array([0, len(events), len(events), len(events)]))
    part = MicroPart(tape=tape, weights=np.zeros(0, dtype=np.int64))
    found, moments = part.peaks(np.array(rows, dtype=np.float64), adding=False)
    for at, peak, moment in zip(rows, found, moments, strict=True):
        assert peak == pytest.approx(tape.live(at).max(), rel=1e-4)
        assert tape.by_category(int(moment), at).sum() == pytest.approx(peak, rel=1e-4)


@given(LINES)
def test_a_hull_is_no_longer_than_it_must_be(lines):
    zero, slope = (np.array(values, dtype=np.float64) for values in zip(*lines, strict=True))
    hull = _hull(zero, slope)
    assert len(np.unique(slope[hull])) == len(hull)
    assert (np.diff(zero[hull]) < 0).all()
    assert (np.diff(slope[hull]) > 0).all()


def test_work_of_a_micro_step_that_finds_gradients():
    model = Layered(forward_flops=(1.0, 10.0), backward_flops=(2.0, 20.0))
    part = MicroPart(tape=model.tape(4), weights=np.zeros(0, dtype=np.int64))
    work = part.work(np.array([1.0, 3.0]))
    assert work.flops[:, 0].tolist() == [4 * 3 + 5 + (4 * 30 + 50) * rows for rows in (1, 3)]


# -- there and back -----------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=10)
@given(models())
def test_parts_travel_as_arrays(model):
    micro, optimizer = parts_of(model)
    again, other = unpack(pack(micro, None)), unpack(pack(None, optimizer))
    assert isinstance(again, MicroPart)
    assert isinstance(other, OptimizerPart)
    assert again.notes == micro.notes
    assert again.weights.tolist() == micro.weights.tolist()
    assert other.elsewhere_bytes == optimizer.elsewhere_bytes
    first = need(micro, optimizer, rows=3, accumulation=2, waiting=True)
    assert need(again, other, rows=3, accumulation=2, waiting=True) == first
    assert dataclasses.astuple(first)


# -- requests of an allocator -------------------------------------------------------------------------------------


def check_balance(events):
    """Nothing is made twice, and only what lives is freed."""
    alive = set()
    for event in events:
        if event >= 0:
            assert event not in alive
            alive.add(event)
        else:
            alive.remove(~event)
    return alive


@settings(deadline=None)
@given(models(), st.integers(1, 16), st.integers(1, 3), st.integers(1, 4))
def test_requests_are_the_run(model, rows, accumulation, steps):
    micro, optimizer = parts_of(model)
    events, sizes, _ = requests(micro, optimizer, rows=rows, accumulation=accumulation, steps=steps)
    left = check_balance(events)
    live = np.cumsum([sizes[event] if event >= 0 else -sizes[~event] for event in events])
    found = need(micro, optimizer, rows=rows, accumulation=accumulation, waiting=False)
    if steps > 1:
        # what a micro-step leaves is still there when the optimizer steps
        batches, copies = 2 * rows * model["micro"].batch[1], sum(model["micro"].copies) * model["layers"] * 2
        assert found.peak_bytes <= live.max() <= found.peak_bytes + batches + copies
    state = sum(model["micro"].gradients) * model["layers"] * model["state"]
    assert sum(sizes[block] for block in left) == micro.weights.sum() + state


def test_an_evaluation_comes_before_the_last_step_which_alone_has_what_follows_it():
    micro, optimizer = parts_of(
        {"layers": 3, "micro": Layered(logits=(1001, 0)), "state": 2, "work": 7, "elsewhere": 0}
    )
    names = [AFTER_EVALUATION if name == "logits" else name for name in micro.tape.names]
    writer = Writer()
    writer.mark("evaluation")
    writer.new(0, 1000)  # stays until the next step
    micro = dataclasses.replace(
        micro, tape=dataclasses.replace(micro.tape, names=tuple(names)), evaluation=writer.tape()
    )
    without, with_it = (requests(micro, optimizer, rows=3, accumulation=2, evaluated_rows=count) for count in (0, 7))
    left = [sorted(one.sizes[block] for block in check_balance(one.events)) for one in (without, with_it)]
    assert left[0] == left[1]
    before, made = ([one.sizes[event] for event in one.events if event >= 0] for one in (without, with_it))
    assert 1001 not in before
    evaluated = made.index(7000)
    assert 1001 not in made[:evaluated]
    assert made[evaluated:].count(1001) == 2
    assert made[:evaluated] == before[:evaluated]
    assert len(made) == len(before) + 1


BROAD = {**CONFIGS["llama"], "hidden_size": 256, "intermediate_size": 512, "vocab_size": 2000}
BROAD_GPT2 = {**CONFIGS["gpt2"], "n_embd": 256, "vocab_size": 2000}


@pytest.mark.parametrize("config", [BROAD, pytest.param(BROAD_GPT2, marks=pytest.mark.slow)], ids=["llama", "gpt2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_allocator_holds_what_the_plan_needs(tmp_path, config, precision):
    lab = Lab(tmp_path / "config", config, device="cuda", seq_len=128)
    for optimizer, rows, accumulation in (("adamw", 1, 1), ("adamw", 8, 2), ("adamw_8bit", 4, 1)):
        plan = PLAIN.replaced(precision=precision, optimizer=optimizer, micro_batch=rows, accumulation=accumulation)
        events, sizes, _ = requests(lab.micro(plan), lab.optimizer(plan), rows=rows, accumulation=accumulation)
        check_balance(events)
        rounded = replay(events, np.array(sizes)).rounded_bytes
        assert rounded == pytest.approx(lab.need(plan).peak_bytes, rel=0.01)


def test_an_allocator_also_holds_an_evaluation_step_and_the_workspaces(tmp_path):
    """Of more rows than are trained on."""
    lab = Lab(tmp_path / "config", {**BROAD, "vocab_size": 20000}, device="cuda", seq_len=128)
    plan = PLAIN.replaced(optimizer="sgd", checkpointing="full", micro_batch=16)
    parts = lab.micro(plan), lab.optimizer(plan)
    found = need(*parts, rows=16, accumulation=1, waiting=False, evaluated_rows=48)
    assert found.segment == "evaluation"
    without, with_all = (
        replay(*requests(*parts, rows=16, accumulation=1, **more))
        for more in ({}, {"evaluated_rows": 48, "workspaces": (4 * MIB, 4 * MIB)})
    )
    assert without.rounded_bytes < 0.9 * found.peak_bytes
    assert with_all.rounded_bytes == pytest.approx(found.peak_bytes + 8 * MIB, rel=0.01)
    events, _, _ = requests(*parts, rows=16, accumulation=1, evaluated_rows=48, workspaces=(4 * MIB, 4 * MIB))
    check_balance(events)


@pytest.mark.parametrize(
    "values",
    [{}, {"precision": "bf16"}, {"kernels": "chunked_ce", "checkpointing": "full"}, {"optimizer": "sgd"}],
    ids=str,
)
def test_as_many_rows_are_evaluated_as_stay_below_the_training(tmp_path, values):
    """Also where the allocator holds them: an evaluation asks for no larger card."""
    lab = Lab(tmp_path / "config", {**BROAD, "vocab_size": 4000}, device="cuda", seq_len=128)
    plan = PLAIN.replaced(micro_batch=4, **values)
    parts, most = (lab.micro(plan), lab.optimizer(plan)), 256
    rows, accumulation = np.array([4]), np.array([1])
    (found,) = evaluable_rows(*parts, rows, accumulation, waiting=True, most=most)
    assert found == 1 << int(found).bit_length() - 1
    assert 4 <= found < most
    asked = {"rows": 4, "accumulation": 1}
    alone, beside, more = (
        need(*parts, **asked, waiting=True, evaluated_rows=count) for count in (0, int(found), 4 * int(found))
    )
    assert beside == alone
    assert more.segment == "evaluation"
    assert more.peak_bytes > alone.peak_bytes
    without, with_it = (
        smallest_capacity(*replayed)
        for replayed in (
            (one.events, np.array(one.sizes, dtype=np.int64), one.streams)
            for one in (requests(*parts, **asked, evaluated_rows=count) for count in (0, int(found)))
        )
    )
    assert with_it <= without
    assert evaluable_rows(*parts, rows, accumulation, waiting=True, most=8) == [min(found, 8)]
    assert evaluable_rows(*parts, rows, accumulation, waiting=True, most=0) == [0]
    held = evaluable_rows(*parts, rows, accumulation, waiting=True, most=most, if_asked=alone.peak_bytes // 8)
    assert held < min(found, 8)
    unknown = dataclasses.replace(parts[0], evaluation=None)
    assert evaluable_rows(unknown, parts[1], rows, accumulation, waiting=True, most=most) == [0]
