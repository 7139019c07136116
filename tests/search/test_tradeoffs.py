"""What the trials say beyond the winner."""

import math
from dataclasses import replace

import pytest

from autofit import space
from autofit.contract.outcome import Trial
from autofit.contract.plan import Plan
from autofit.registry import techniques
from autofit.search import tradeoffs
from autofit.search.decision import decide
from autofit.search.tradeoffs import Expected
from tests.support.synthetic import GIB, cpu_facts, measured, out_of_memory

FACTS = cpu_facts(global_batch=16, limit_bytes=8 * GIB)
SPACE = space.build(FACTS)
PLAIN = Plan({one.name: one.baseline for one in techniques()}).replaced(accumulation=16)
BEST = PLAIN.replaced(micro_batch=8, accumulation=2, precision="bf16", checkpointing="full")


def trial(number, plan, seconds, gib):
    outcome = out_of_memory(FACTS) if seconds is None else measured([seconds] * 4, gib * GIB, FACTS)
    return Trial(number=number, plan=plan, outcome=outcome, wall_seconds=1.0)


def decided(*tried):
    trials = [trial(number, *one) for number, one in enumerate(tried)]
    return decide(trials, FACTS.workload.limit_bytes), trials


def test_the_front_is_what_smaller_ceilings_would_give():
    small, slow, middle = PLAIN, PLAIN.replaced(precision="bf16"), PLAIN.replaced(checkpointing="full")
    decision, _ = decided((BEST, 1.0, 6), (small, 4.0, 1), (slow, 5.0, 2), (middle, 2.0, 3))
    found = tradeoffs.front(decision)
    assert [(point.plan, point.peak_bytes // GIB) for point in found] == [(small, 1), (middle, 3), (BEST, 6)]
    assert found[-1].samples_per_second == pytest.approx(16.0)
    speeds = [point.samples_per_second for point in found]
    assert speeds == sorted(speeds)


def test_nothing_beside_the_smallest_winner():
    decision, _ = decided((BEST, 1.0, 1), (PLAIN, 2.0, 3))
    assert [point.plan for point in tradeoffs.front(decision)] == [BEST]


def test_a_plan_that_is_as_fast_within_noise_but_larger_is_not_on_the_front():
    other = BEST.replaced(checkpointing="off")
    trials = [trial(0, BEST, 1.0, 4), trial(1, other, 0.999, 7)]
    trials[0] = replace(trials[0], outcome=measured([0.95, 1.0, 1.05, 1.0], 4 * GIB, FACTS))
    decision = decide(trials, FACTS.workload.limit_bytes)
    assert decision.plan == BEST
    assert [point.plan for point in tradeoffs.front(decision)] == [BEST]


def test_what_each_value_is_good_for():
    without_bf16 = BEST.replaced(precision="fp32")
    without_checkpointing = BEST.replaced(checkpointing="off")
    decision, trials = decided((BEST, 1.0, 4), (without_bf16, 1.5, 5), (without_checkpointing, None, None))

    def believe(plan):
        assert plan == BEST.replaced(micro_batch=1, accumulation=16)
        return Expected(sample_seconds=3 / 16, spread=0.1, peak_bytes=2 * GIB, peak_spread=0.05)

    found = {one.technique: one for one in tradeoffs.contributions(decision, trials, SPACE, FACTS, believe)}
    assert list(found) == ["micro_batch", "precision", "checkpointing"]
    assert found["precision"].evidence == "measured"
    assert found["precision"].speed_ratio == pytest.approx(1.5)
    assert found["precision"].saved_bytes == GIB
    assert found["checkpointing"].evidence == "out_of_memory"
    assert found["checkpointing"].speed_ratio is None
    assert found["micro_batch"].evidence == "estimated"
    assert found["micro_batch"].speed_ratio == pytest.approx(3.0)
    assert found["micro_batch"].saved_bytes == -2 * GIB


@pytest.mark.parametrize(
    ("name", "value", "ratio", "spread", "told"),
    [
        ("precision", "bf16", 1.5, 0.1, True),
        ("precision", "bf16", 1.5, 0.25, False),  # less than two deviations: it may be slower
        ("checkpointing", "full", 0.7, 0.1, True),
        ("checkpointing", "full", 1.22, 0.05, False),  # to compute again what was computed makes no step shorter
        ("attention", "eager", 2.74, 0.05, False),
    ],
)
def test_an_estimate_is_told_where_it_leaves_no_doubt(name, value, ratio, spread, told):
    plan = PLAIN.replaced(**{name: value})
    decision, trials = decided((plan, 1.0, 4))
    expected = Expected(sample_seconds=ratio / 16, spread=spread, peak_bytes=6 * GIB, peak_spread=0.3)
    (found,) = tradeoffs.contributions(decision, trials, replace(SPACE, plans=(PLAIN,)), FACTS, lambda _: expected)
    assert found.saved_bytes is None, "a peak is held to the same rule"
    if told:
        assert (found.evidence, found.speed_ratio, found.spread) == ("estimated", pytest.approx(ratio), spread)
    else:
        assert (found.evidence, found.speed_ratio, found.spread) == ("none", None, None)


def test_of_what_a_busy_machine_timed_the_memory_alone_is_told():
    decision, trials = decided((BEST, 1.0, 4))
    busy = measured([2.7] * 4, 5 * GIB, FACTS, disturbance=0.5)
    trials.append(Trial(number=1, plan=BEST.replaced(checkpointing="off"), outcome=busy, wall_seconds=1.0))
    decision = decide(trials, FACTS.workload.limit_bytes)
    found = {one.technique: one for one in tradeoffs.contributions(decision, trials, SPACE, FACTS)}
    assert found["checkpointing"].evidence == "measured"
    assert found["checkpointing"].speed_ratio is None
    assert found["checkpointing"].saved_bytes == GIB


def test_what_can_not_be_known_is_said():
    decision, trials = decided((BEST, 1.0, 4))
    narrow = replace(SPACE, plans=(BEST,))
    found = tradeoffs.contributions(decision, trials, narrow, FACTS, lambda _: pytest.fail("it is no plan here"))
    assert {one.evidence for one in found} == {"none"}
    unknown = tradeoffs.contributions(decision, trials, SPACE, FACTS)
    assert {one.evidence for one in unknown} == {"none"}


def test_a_plain_winner_has_nothing_to_say():
    decision, trials = decided((PLAIN, 1.0, 4), (BEST, 2.0, 3))
    assert decision.plan == PLAIN
    assert tradeoffs.contributions(decision, trials, SPACE, FACTS) == ()


def test_put_back_keeps_the_global_batch():
    assert tradeoffs.put_back(BEST, "precision", "fp32", FACTS) == BEST.replaced(precision="fp32")
    back = tradeoffs.put_back(BEST, "micro_batch", 1, FACTS)
    assert (back["micro_batch"], back["accumulation"]) == (1, 16)
    assert math.prod((back["micro_batch"], back["accumulation"])) == FACTS.workload.global_batch
