"""Plans, outcomes and trials are frozen values that come back from JSON as they went in."""

import dataclasses
import json
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from autofit.contract.facts import FACTS
from autofit.contract.outcome import (
    OUTCOME,
    TRIAL,
    Crashed,
    Diverged,
    Evidence,
    Measured,
    OutOfMemory,
    Promise,
    TimedOut,
    Trial,
    Unsupported,
)
from autofit.contract.plan import Plan
from autofit.system.statistics import median, spread
from autofit.system.strict_json import dump_json
from tests.support.synthetic import cpu_facts

PLAN = TypeAdapter(Plan)
names = st.text(max_size=20)
counts = st.integers(0, 2**60)
seconds = st.floats(1e-6, 1e6)
values = st.integers(-(2**62), 2**62) | st.text(max_size=20)
plans = st.dictionaries(names, values, max_size=6).map(Plan)
phases = st.sampled_from(["load", "forward", "backward", "optimizer"])
json_values = st.recursive(
    st.none() | st.booleans() | counts | seconds | names,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=4,
)
evidences = st.builds(
    Evidence,
    seq_len=st.none() | counts,
    padding_mask=st.none() | st.booleans(),
    parameters=st.none() | counts,
    trainable_parameters=st.none() | counts,
    compiled_graphs=counts,
    recompiles=counts,
    techniques=st.dictionaries(names, st.dictionaries(names, json_values, max_size=2), max_size=2),
)
outcomes = st.one_of(
    st.builds(
        Measured,
        step_seconds=seconds,
        step_seconds_spread=seconds,
        samples_per_second=seconds,
        tokens_per_second=seconds,
        peak_bytes=counts,
        allocated_bytes=counts,
        reserved_bytes=counts,
        outside_bytes=counts,
        host_bytes=counts,
        limit_bytes=counts,
        fidelity=st.sampled_from(["parts", "whole"]),
        steps=st.lists(seconds, max_size=3).map(tuple),
        training_seconds=seconds,
        loss=seconds,
        mfu=st.none() | seconds,
        alloc_retries=counts,
        evidence=evidences,
        notes=st.lists(names, max_size=2).map(tuple),
    ),
    st.builds(
        OutOfMemory,
        where=st.sampled_from(["device", "host"]),
        phase=phases,
        limit_bytes=counts,
        peak_bytes=counts,
        requested_bytes=st.none() | counts,
        training_seconds=seconds,
    ),
    st.builds(TimedOut, limit_seconds=seconds, phase=names),
    st.builds(Diverged, loss=names, step=counts, training_seconds=seconds),
    st.builds(Unsupported, reason=names),
    st.builds(Crashed, reason=names, log_tail=names),
)
trials = st.builds(
    Trial,
    number=counts,
    plan=plans,
    outcome=outcomes,
    wall_seconds=seconds,
    purpose=st.sampled_from(["search", "final"]),
)


@settings(deadline=None)
@given(trials)
def test_a_trial_comes_back_from_json(trial):
    text = dump_json(TRIAL, trial)
    back = TRIAL.validate_json(text)
    assert back == trial
    assert type(back.outcome) is type(trial.outcome)
    assert type(back.plan) is Plan
    assert dump_json(TRIAL, back) == text


def test_keys_in_files_outlive_names_in_code():
    facts = dataclasses.replace(cpu_facts(), kernel_overhead_bytes={"matmul bf16": 5})
    written = json.loads(dump_json(FACTS, facts))
    assert written["brought_bytes"] == {"matmul bf16": 5}
    assert "kernel_overhead_bytes" not in written
    assert FACTS.validate_python(written).kernel_overhead_bytes == {"matmul bf16": 5}
    outcome = OutOfMemory(where="device", phase="load", limit_bytes=1, peak_bytes=1, external_pressure=True)
    written = json.loads(dump_json(OUTCOME, outcome))
    assert written["squeezed"] is True
    assert OUTCOME.validate_python(written) == outcome


@settings(deadline=None)
@given(plans)
def test_a_plan_comes_back_from_json_with_its_types_and_order(plan):
    back = PLAN.validate_json(dump_json(PLAN, plan))
    assert list(back.items()) == list(plan.items())
    assert [type(value) for value in back.values()] == [type(value) for value in plan.values()]
    assert (back, hash(back)) == (plan, hash(plan))


def test_the_kinds_of_outcomes_are_those_that_are_promised():
    kinds = [one.__dataclass_fields__["kind"].default for one in _outcome_classes()]
    assert kinds == ["measured", "out_of_memory", "timed_out", "diverged", "unsupported", "crashed"]


def _outcome_classes():
    return (Measured, OutOfMemory, TimedOut, Diverged, Unsupported, Crashed)


@pytest.mark.parametrize("one", [*_outcome_classes(), Trial, Promise, Evidence], ids=lambda one: one.__name__)
def test_values_are_frozen_slotted_and_keyword_only(one):
    fields = dataclasses.fields(one)
    assert all(field.kw_only for field in fields)
    assert "__slots__" in vars(one)
    assert one.__dataclass_params__.frozen


@pytest.mark.parametrize("value", [True, 1.5, None, [1], {"a": 1}])
def test_a_plan_holds_whole_numbers_and_words_alone(value):
    with pytest.raises(ValidationError):
        PLAN.validate_json(json.dumps({"knob": value}))


@pytest.mark.parametrize("raw", ["[]", "3", '"x"', "null", '{"kind": "won"}', '{"kind": "measured"}', "{}"])
def test_another_outcome_is_refused(raw):
    with pytest.raises(ValidationError):
        OUTCOME.validate_json(raw)


@pytest.mark.parametrize("change", [{"step_seconds": 0.0}, {"samples_per_second": -1.0}, {"fidelity": "half"}])
def test_a_measurement_that_cant_be_is_refused(change):
    good = {
        "kind": "measured", "step_seconds": 1.0, "step_seconds_spread": 0.1, "samples_per_second": 8.0,
        "tokens_per_second": 64.0, "peak_bytes": 1, "allocated_bytes": 1, "reserved_bytes": 1, "outside_bytes": 0,
        "host_bytes": 1, "limit_bytes": 2, "fidelity": "whole", "steps": [1.0], "training_seconds": 1.0, "loss": 2.0,
    }  # fmt: skip
    assert OUTCOME.validate_python(good).loss == 2.0
    with pytest.raises(ValidationError):
        OUTCOME.validate_python({**good, **change})


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_number_that_is_none_is_not_written(loss):
    trial = Trial(number=0, plan=Plan({}), outcome=TimedOut(limit_seconds=loss, phase="load"), wall_seconds=1.0)
    with pytest.raises(ValueError, match="JSON"):
        dump_json(TRIAL, trial)


def test_a_plan_is_a_value():
    values = {"micro_batch": 2, "precision": "bf16"}
    plan = Plan(values)
    values["micro_batch"] = 9
    assert plan["micro_batch"] == 2
    with pytest.raises(TypeError):
        plan["micro_batch"] = 3
    other = plan.replaced(micro_batch=4)
    assert (plan["micro_batch"], other["micro_batch"]) == (2, 4)
    assert plan.words() == "micro_batch=2 precision=bf16"
    assert repr(plan) == "Plan(micro_batch=2 precision=bf16)"
    assert len({plan, Plan({"precision": "bf16", "micro_batch": 2}), other}) == 2
    assert plan == {"precision": "bf16", "micro_batch": 2}
    assert plan != other
    assert plan != 3


samples = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30)


@settings(deadline=None)
@given(samples, st.randoms())
def test_the_median_is_the_median_in_any_order(numbers, random):
    wanted = statistics.median(numbers)
    random.shuffle(numbers)
    assert median(numbers) == median(tuple(numbers)) == pytest.approx(wanted)


@settings(deadline=None)
@given(samples, st.randoms(), st.floats(0.01, 100))
def test_the_spread_has_no_sign_no_order_and_the_unit_of_the_values(numbers, random, factor):
    wide = spread(numbers)
    assert wide >= 0
    assert spread([factor * number for number in numbers]) == pytest.approx(factor * wide, rel=1e-6, abs=1e-9)
    random.shuffle(numbers)
    assert spread(numbers) == pytest.approx(wide)


@settings(deadline=None)
@given(st.lists(st.floats(1, 2), min_size=2, max_size=20), st.floats(0, 100))
def test_the_spread_does_not_depend_on_where_the_values_are(numbers, shift):
    assert spread([number + shift for number in numbers]) == pytest.approx(spread(numbers), abs=1e-9)


@settings(deadline=None)
@given(st.floats(0.001, 100), st.integers(2, 20))
def test_equal_values_have_no_spread(value, count):
    assert spread([value] * count) == pytest.approx(0, abs=1e-12)


def test_one_value_says_little():
    assert spread([2.0]) == 0.5


@pytest.mark.parametrize("count", [2, 3, 5, 10, 17, 30])
def test_more_of_the_same_values_narrow_the_spread(count):
    pair = [0.9, 1.1]
    assert spread(pair * (count + 1)) < spread(pair * count)


def test_a_straggler_neither_rules_nor_vanishes():
    even = [1.0, 1.01, 0.99, 1.0, 1.01, 0.99, 1.0]
    straggling = [*even[:-1], 3.0]
    deviation = statistics.stdev(straggling)
    naive = 2.447 * 1.2533 * deviation / math.sqrt(7)
    assert spread(even) < spread(straggling) < 0.6 * naive


def test_the_interval_covers_the_median_as_often_as_it_says():
    import random

    rng = random.Random(0)
    for count in (3, 5, 9):
        covered = 0
        for _ in range(1000):
            numbers = [rng.gauss(10, 1) for _ in range(count)]
            covered += abs(median(numbers) - 10) <= spread(numbers)
        assert covered >= 900, f"{covered} of 1000 intervals of {count} values hold the median"
