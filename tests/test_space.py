"""Which plans may be tried: the promise of the global batch, the classes that are allowed, the knobs that are held."""

import contextlib
import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autofit import space
from autofit.contract.emission import Emission
from autofit.contract.script import Script
from autofit.contract.technique import Choice, Kind, Technique, divisors
from autofit.registry import changes, technique, techniques
from autofit.system.errors import InputError
from tests.support.synthetic import cpu_facts, cuda_facts

CPU = cpu_facts()
CUDA = cuda_facts()
EVERY = frozenset(Kind)
NOT_METHOD = frozenset({Kind.EXACT, Kind.NUMERIC})


def test_a_package_that_is_missing_or_too_old_is_said():
    def lacks(**packages):
        return replace(CPU, packages={name: version for name, version in packages.items() if version})

    def says(facts):
        return technique("quantization").lacks(facts, "peft", "bitsandbytes")

    none, old, new = (lacks(bitsandbytes=version, peft="0.20") for version in (None, "0.49.2", "0.50.0"))
    assert says(none) == none.lacks("bitsandbytes") == "bitsandbytes is not installed: pip install bitsandbytes"
    assert says(old) == "bitsandbytes 0.49.2 is too old, 0.50 is needed: pip install -U bitsandbytes"
    assert says(new) is None
    for facts in (none, old):
        choices = {choice.value: choice for choice in technique("optimizer").choices(facts)}
        assert choices["adamw_8bit"].status == "withheld"
        assert choices["adamw_8bit"].reason == says(facts)


def knobs(*fix, among=(), facts=CPU):
    return space.parse_knobs(fix, among, facts)


def test_values_given_in_python_are_the_same_as_texts():
    texts = space.parse_knobs(["precision=fp32", "micro_batch=4"], ["optimizer=adamw,sgd"], CPU)
    values = space.parse_knobs({"precision": "fp32", "micro_batch": 4}, {"optimizer": ["adamw", "sgd"]}, CPU)
    assert values == texts
    assert space.parse_knobs({}, {"optimizer": "sgd"}, CPU) == {"optimizer": ("sgd",)}


def test_a_value_given_in_python_is_one_value_whatever_it_holds():
    with pytest.raises(InputError, match="optimizer has no value 'adamw,sgd'"):
        space.parse_knobs({}, {"optimizer": ["adamw,sgd"]}, CPU)
    with pytest.raises(InputError, match="no value is given"):
        space.parse_knobs({}, {"optimizer": []}, CPU)
    with pytest.raises(InputError, match="given twice"):
        space.parse_knobs({"optimizer": "sgd"}, {"optimizer": ["sgd"]}, CPU)


def refused(*fix, among=(), facts=CPU):
    with pytest.raises(InputError) as caught:
        knobs(*fix, among=among, facts=facts)
    return caught.value


def batches(facts, processes=1, global_batch=32):
    return replace(facts, workload=replace(facts.workload, processes=processes, global_batch=global_batch))


@settings(deadline=None)
@given(st.integers(1, 20_000))
def test_the_divisors_are_all_of_them_in_order(number):
    assert divisors(number) == [one for one in range(1, number + 1) if number % one == 0]


# --- the global batch is a promise ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 400), st.integers(1, 6))
def test_every_plan_keeps_the_global_batch_and_every_split_is_there(share, processes):
    facts = batches(CPU, processes, share * processes)
    plans = space.build(facts, EVERY).plans
    for plan in plans:
        assert plan["micro_batch"] * plan["accumulation"] * processes == share * processes
    assert {plan["micro_batch"] for plan in plans} == set(divisors(share))
    assert len(set(plans)) == len(plans)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 400), st.integers(2, 9))
def test_a_global_batch_that_cant_be_split_is_refused_with_ones_that_can(global_batch, processes):
    facts = batches(CPU, processes, global_batch)
    if global_batch % processes == 0:
        space.build(facts)
        return
    with pytest.raises(InputError, match=f"global batch of {global_batch} can't be split over {processes}") as caught:
        space.build(facts)
    named = [int(word) for word in caught.value.hint.split() if word.isdigit()]
    assert named
    for other in named:
        assert abs(other - global_batch) < processes
        assert space.build(batches(CPU, processes, other)).plans


def test_three_processes():
    with pytest.raises(InputError) as caught:
        space.build(batches(CPU, 3, 32))
    assert caught.value.hint == "30 or 33 can"


def test_a_micro_batch_that_cant_make_the_global_batch_is_refused_with_what_can():
    error = refused("micro_batch=5")
    assert "5 rows on 1 process(es) can't make a global batch of 32" in error.hint
    assert "they can make 30 or 35" in error.hint
    assert error.hint.endswith("32 can be made of 1, 2, 4, 8, 16, 32")
    assert (
        "they can make 16 or 32, and 17 can be made of 1, 17"
        in refused("micro_batch=16", facts=batches(CPU, 1, 17)).hint
    )
    assert "they can make 64, and 32" in refused("micro_batch=64").hint
    assert "has at least one row" in refused("micro_batch=0").hint
    assert "can be split into 1, 2, 4, 8, 16, 32" in refused("accumulation=3").hint


def test_knobs_that_contradict_each_other_leave_nothing():
    with pytest.raises(InputError, match="micro_batch 4 x accumulation 4 x 1 process") as caught:
        space.build(CPU, EVERY, knobs("micro_batch=4", "accumulation=4"))
    assert "16, not the global batch of 32" in caught.value.message
    assert caught.value.hint


# --- classes --------------------------------------------------------------------------------------------------------


def used(plans):
    return {name: {plan[name] for plan in plans.plans} for name in plans.domains}


@pytest.mark.parametrize("facts", [CPU, CUDA], ids=["cpu", "cuda"])
@pytest.mark.parametrize("allowed", ["exact", "exact,numeric", "exact,method", "exact,numeric,method"])
def test_only_what_is_allowed_and_what_is_plain(facts, allowed):
    values = used(space.build(facts, space.parse_allowed(allowed)))
    for one in techniques():
        offered = [choice for choice in one.choices(facts) if choice.status == "offered"]
        wanted = {
            choice.value for choice in offered if choice.kind in allowed.split(",") or choice.value == one.baseline
        }
        assert values[one.name] == wanted


def test_by_default_the_method_stays():
    values = used(space.build(CPU))
    assert values["optimizer"] == {"adamw", "adamw_8bit"}
    assert values["precision"] == {"fp32", "bf16"}
    assert "sgd" in used(space.build(CPU, EVERY))["optimizer"]


@pytest.mark.parametrize(
    ("allowed", "adapter", "heads", "there"),
    [
        ("exact,numeric", "lora:r=16", (), True),
        ("exact,numeric", "dora:r=16", (), True),
        ("exact,numeric", "none", (), False),
        ("exact,numeric", "lora:r=16", ("score",), False),
        ("exact", "lora:r=16", (), False),
        ("exact,method", "lora:r=16", (), False),
        ("exact,method", "lora:r=16", ("score",), True),
        ("exact,numeric,method", "none", (), True),
    ],
)
def test_16_bit_weights_are_another_method_only_where_they_are_trained(allowed, adapter, heads, there):
    """An adapter stays in float32; a head that is trained whole does not."""
    facts = replace(CUDA, model=replace(CUDA.model, new_modules=heads))
    plans = space.build(facts, space.parse_allowed(allowed), knobs(f"adapter={adapter}", facts=facts))
    assert ("bf16_weights" in plans.domains["precision"]) == there
    assert used(plans)["precision"] == set(plans.domains["precision"]) == set(plans.priors["precision"])


def test_beside_an_adapter_in_some_plans_weights_are_in_16_bits_in_those_alone():
    plans = space.build(CUDA, NOT_METHOD, knobs(among=["adapter=none,lora:r=16"], facts=CUDA)).plans
    assert {plan["adapter"] for plan in plans if plan["precision"] == "bf16_weights"} == {"lora:r=16"}
    assert {plan["adapter"] for plan in plans if plan["precision"] == "bf16"} == {"none", "lora:r=16"}


def test_what_is_fixed_is_allowed_whatever_its_class():
    plans = space.build(CPU, frozenset({Kind.EXACT}), knobs("optimizer=sgd", "precision=bf16_weights"))
    assert {(plan["optimizer"], plan["precision"]) for plan in plans.plans} == {("sgd", "bf16_weights")}


def test_a_knob_is_held_to_some_values():
    plans = space.build(CPU, NOT_METHOD, knobs(among=["micro_batch=2, 8,2", "optimizer=adafactor,adamw"]))
    assert used(plans)["micro_batch"] == {2, 8}
    assert used(plans)["accumulation"] == {16, 4}
    assert used(plans)["optimizer"] == {"adafactor", "adamw"}
    assert plans.domains["micro_batch"] == (2, 8)
    assert plans.domains["accumulation"] == (4, 16)


def test_values_that_no_plan_has_are_not_in_the_domains():
    for facts in (CPU, CUDA):
        plans = space.build(facts, EVERY, knobs("micro_batch=2", facts=facts))
        assert used(plans) == {name: set(values) for name, values in plans.domains.items()}


def test_every_combination_without_a_conflict_is_there():
    plans = space.build(CUDA, EVERY)
    everything = itertools.product(*plans.domains.values())
    wanted = set()
    for values in everything:
        plan = dict(zip(plans.domains, values, strict=True))
        if all(one.conflict(plan[one.name], plan, CUDA) is None for one in techniques()):
            wanted.add(tuple(plan.items()))
    assert {tuple(plan.items()) for plan in plans.plans} == wanted
    assert ("optimizer", "adamw_8bit") not in {
        (name, plan[name]) for plan in plans.plans if plan["offload"] == "parameters" for name in ("optimizer",)
    }


def test_the_smallest_is_the_one_that_is_expected_to_need_least():
    plans = space.build(CUDA, EVERY)
    smallest = plans.smallest()
    assert smallest["micro_batch"] == 1
    assert plans.expected(smallest)[1] == min(plans.expected(plan)[1] for plan in plans.plans)
    plain = plans.plans[0]
    assert dict(plain) == {one.name: one.baseline for one in techniques()} | {"accumulation": 32}
    assert plans.expected(plain) == (0.0, 0.0)


class Rare(Technique):
    """A technique with a value that is to be had on request alone."""

    name = "rare"
    baseline = "none"

    def choices(self, facts):
        return (
            Choice("none", Kind.EXACT, "offered", "as ever"),
            Choice("some", Kind.EXACT, "on_request", "it is seldom worth it"),
        )

    def emit(self, value, plan, facts):
        return Emission()

    def in_effect(self, value, seen, facts):
        return None


def test_what_is_to_be_had_on_request_is_not_searched_unasked(monkeypatch):
    everyone = (*techniques(), Rare())
    monkeypatch.setattr(space, "techniques", lambda: everyone)
    monkeypatch.setattr(space, "technique", lambda name: {one.name: one for one in everyone}[name])
    assert space.build(CPU, EVERY).domains["rare"] == ("none",)
    assert space.build(CPU, NOT_METHOD, knobs("rare=some")).domains["rare"] == ("some",)
    assert space.build(CPU, EVERY, knobs(among=["rare=none,some"])).domains["rare"] == ("none", "some")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("exact", {Kind.EXACT}),
        ("exact,numeric,method", EVERY),
        (" Method , exact", {Kind.EXACT, Kind.METHOD}),
        ("exact,exact", {Kind.EXACT}),
    ],
)
def test_classes_in_words(text, wanted):
    assert space.parse_allowed(text) == wanted


@pytest.mark.parametrize("text", ["numeric", "method", "numeric,method"])
def test_every_plan_needs_the_class_that_splits_the_batch(text):
    with pytest.raises(InputError, match="leaves exact out") as caught:
        space.parse_allowed(text)
    assert f"--allow exact,{text}" in caught.value.hint


@pytest.mark.parametrize("text", ["", "all", "exact,", "exact numeric", "exact;method"])
def test_another_class_is_refused_with_those_that_are(text):
    with pytest.raises(InputError, match="is not a class") as caught:
        space.parse_allowed(text)
    assert caught.value.hint == "known: exact, numeric, method"


# --- knobs in words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("micro_bach=2", "'micro_bach' is not a knob", "did you mean micro_batch?"),
        ("zzz=2", "'zzz' is not a knob", "known: parallel, micro_batch, accumulation, sync_each_batch, precision"),
        ("precision=bf61", "precision has no value 'bf61'", "did you mean bf16?"),
        ("precision=zzz", "precision has no value 'zzz'", "known: fp32, bf16"),
        ("micro_batch=two", "micro_batch=two: a whole number is wanted", None),
        ("micro_batch=-1", "a whole number is wanted", None),
        ("micro_batch=1.5", "a whole number is wanted", None),
        ("micro_batch=٢", "a whole number is wanted", None),
        ("micro_batch=" + "9" * 10, "a whole number is wanted", None),
        ("precision", "is not KNOB=VALUE", "precision=fp32"),
        ("precision=", "is not KNOB=VALUE", "precision=fp32"),
        ("=bf16", "is not KNOB=VALUE", "precision=fp32"),
        ("", "is not KNOB=VALUE", "precision=fp32"),
        ("precision=fp16", "can't be had here: a Trainer's fp16 on a CPU silently trains in fp32", None),
        ("offload=parameters", "can't be had here: the device's memory is the host's memory", None),
        ("optimizer=paged_adamw_8bit", "can't be had here: bitsandbytes falls back", None),
    ],
)
@pytest.mark.parametrize("option", ["--fix", "--among"])
def test_a_knob_that_is_none_is_refused_in_words(option, text, message, hint):
    error = refused(text) if option == "--fix" else refused(among=[text])
    assert message in error.message
    if hint:
        assert hint in error.hint
    if "KNOB=VALUE" in message:
        assert option in error.message


def test_spaces_around_a_knob_do_not_matter():
    assert knobs(" precision = bf16 ") == {"precision": ("bf16",)}
    assert knobs("micro_batch=08") == {"micro_batch": (8,)}


def test_a_knob_is_given_once():
    assert "given twice" in refused("precision=bf16", "precision=fp32").message
    assert "given twice" in refused("precision=bf16", among=["precision=fp32"]).message


def test_a_comma_belongs_to_the_value_of_fix():
    assert "no value 'fp32,bf16'" in refused("precision=fp32,bf16").message
    assert "a whole number is wanted" in refused(among=["micro_batch=1,"]).message


names = st.sampled_from([one.name for one in techniques()]) | st.text(max_size=12)
words = st.sampled_from(["fp32", "bf16", "off", "adamw", "1", "0", "32", "007", "5"]) | st.text(max_size=12)
texts = st.text(max_size=20) | st.tuples(names, st.lists(words, max_size=3).map(",".join)).map("=".join)


@settings(deadline=None, max_examples=300)
@example(["micro_batch=two"], [], batches(CPU, 3, 32))
@example([], ["accumulation=2"], batches(CPU, 3, 32))
@given(
    st.lists(texts, max_size=2),
    st.lists(texts, max_size=2),
    st.sampled_from([CPU, CUDA, batches(CPU, 3, 32), batches(CUDA, 4, 36)]),
)
def test_any_words_are_knobs_or_an_input_error(fix, among, facts):
    with contextlib.suppress(InputError):
        given_values = space.parse_knobs(fix, among, facts)
        assert all(given_values.values())
        for plan in space.build(facts, NOT_METHOD, given_values).plans:
            assert all(plan[name] in values for name, values in given_values.items())


def test_every_choice_is_told_with_its_reason():
    found = space.offers(CUDA)
    assert [name for name, _ in found] == [one.name for one in techniques() for _ in one.choices(CUDA)]
    assert all(choice.reason for _, choice in found)


def test_a_script_that_switches_tf32_on_trains_in_it_where_the_device_has_it():
    own = Script(path="train.py", sha256="", trainer="", micro_batch=4, accumulation=2, own={"tf32": True}, rows=64)
    for facts, value in ((CUDA, "tf32"), (CPU, "fp32")):
        scripted = replace(facts, workload=replace(facts.workload, script=own))
        assert technique("precision").own(scripted) == value


def test_what_a_script_does_itself_is_what_exact_leaves_alone():
    own = Script(
        path="train.py", sha256="", trainer="Trainer", micro_batch=4, accumulation=2, own={"bf16": True}, rows=64
    )
    scripted = replace(CUDA, workload=replace(CUDA.workload, script=own))
    assert space.build(CUDA, frozenset({Kind.EXACT})).domains["precision"] == ("fp32",)
    assert space.build(scripted, frozenset({Kind.EXACT})).domains["precision"] == ("bf16",)
    both = space.build(scripted)
    assert {"fp32", "bf16"} <= set(both.domains["precision"])
    plain = next(plan for plan in both.plans if plan["precision"] == "fp32")
    assert "precision is fp32, where the script's own is bf16." in changes(plain, scripted)
    assert not any("the script's own" in one for one in changes(plain.replaced(precision="bf16"), scripted))
