import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit import space
from autofit.contract.outcome import Crashed, Diverged, TimedOut, Trial
from autofit.contract.script import Script
from autofit.search.decision import decide, finalists, nearest_change
from tests.support.synthetic import GIB, cuda_facts, measured, out_of_memory

FACTS = cuda_facts()
LIMIT = FACTS.workload.limit_bytes
SPACE = space.build(FACTS)
PLAIN = SPACE.plans[0].replaced(micro_batch=4, accumulation=8)
BF16 = PLAIN.replaced(precision="bf16")
BF16_8BIT = BF16.replaced(optimizer="adamw_8bit")


def run(number, plan, seconds, peak=10 * GIB, purpose="search", **changes):
    steps = (seconds * 0.999, seconds, seconds, seconds * 1.001)
    outcome = measured(steps, peak, FACTS, **changes)
    return Trial(number=number, plan=plan, outcome=outcome, wall_seconds=1.0, purpose=purpose)


def failed(number, plan, outcome, purpose="search"):
    return Trial(number=number, plan=plan, outcome=outcome, wall_seconds=1.0, purpose=purpose)


def test_nothing_measured_is_no_decision():
    assert decide([], LIMIT) is None
    assert decide([failed(0, PLAIN, out_of_memory(FACTS))], LIMIT) is None
    assert finalists([], LIMIT) == []


def test_the_fastest_wins_with_numbers():
    decision = decide([run(0, PLAIN, 2.0), run(1, BF16, 1.0)], LIMIT)
    assert decision.plan == BF16
    assert "32 samples/s" in decision.reason
    assert "100.0% ahead of the next" in decision.reason
    assert [one.plan for one in decision.runners_up] == [PLAIN]


def test_what_is_within_the_noise_is_not_called_more_than_it():
    def wide(number, plan, seconds):
        outcome = measured((0.8 * seconds, seconds, seconds, 1.2 * seconds), 10 * GIB, FACTS)
        return Trial(number=number, plan=plan, outcome=outcome, wall_seconds=1.0)

    decision = decide([wide(0, BF16_8BIT, 1.0), wide(1, BF16, 1.05)], LIMIT)
    assert decision.plan == BF16_8BIT, "5 % of the speed is not given up on a doubt"
    assert "5.0% ahead of the next of them, which is within the noise of the two." in decision.reason
    sure = decide([run(0, BF16_8BIT, 1.0), run(1, BF16, 1.05)], LIMIT)
    assert "5.0% ahead of the next of them, which is more than the noise." in sure.reason


def test_a_tie_goes_to_less_memory():
    decision = decide([run(0, BF16, 1.0, 12 * GIB), run(1, BF16_8BIT, 1.0005, 10 * GIB)], LIMIT)
    assert decision.plan == BF16_8BIT
    assert "2.00 GiB less memory" in decision.reason


def test_a_tie_with_about_the_same_memory_goes_to_the_simpler():
    decision = decide([run(0, BF16_8BIT, 1.0, 10 * GIB), run(1, BF16, 1.0005, int(10.1 * GIB))], LIMIT)
    assert decision.plan == BF16
    assert "simpler" in decision.reason


def test_beyond_noise_memory_does_not_matter():
    decision = decide([run(0, BF16, 1.0, 20 * GIB), run(1, BF16_8BIT, 1.02, GIB)], LIMIT)
    assert decision.plan == BF16


def test_wide_noise_is_no_tie_with_a_much_slower_plan():
    noisy = failed(1, BF16_8BIT, measured((1.2, 1.9), GIB, FACTS))
    assert decide([run(0, BF16, 1.0), noisy], LIMIT).plan == BF16


def test_over_the_ceiling_once_is_out():
    trials = [run(0, BF16, 1.0), run(1, PLAIN, 2.0), run(2, BF16, 1.0, LIMIT + 1, "final")]
    decision = decide(trials, LIMIT)
    assert decision.plan == PLAIN
    assert "broke the ceiling" in decision.reason


@pytest.mark.parametrize(
    "outcome", [out_of_memory(FACTS), Crashed(reason="signal 9"), Diverged(loss="nan", step=3)], ids=lambda o: o.kind
)
def test_a_final_that_fails_is_out(outcome):
    trials = [run(0, BF16, 1.0), run(1, PLAIN, 2.0), failed(2, BF16, outcome, "final")]
    assert decide(trials, LIMIT).plan == PLAIN


def test_a_final_that_times_out_takes_nothing_back():
    trials = [run(0, BF16, 1.0), run(1, PLAIN, 2.0), failed(2, BF16, TimedOut(limit_seconds=1.0, phase="x"), "final")]
    assert decide(trials, LIMIT).plan == BF16


def test_whole_measurements_rule_over_parts():
    trials = [run(0, BF16, 0.5, 11 * GIB, fidelity="parts"), run(1, BF16, 1.0, 10 * GIB, "final")]
    decision = decide(trials, LIMIT)
    assert decision.measured.step_seconds == 1.0
    assert decision.measured.fidelity == "whole"
    assert decision.measured.peak_bytes == 11 * GIB
    assert decision.measured.samples_per_second == pytest.approx(32.0)


def test_finals_are_pooled():
    trials = [run(number, BF16, seconds, purpose="final") for number, seconds in enumerate((1.0, 1.1, 1.2))]
    pooled = decide(trials, LIMIT).measured
    assert len(pooled.steps) == 12
    assert pooled.step_seconds == pytest.approx(1.1)
    assert pooled.samples_per_second == pytest.approx(32 / 1.1)
    assert pooled.tokens_per_second == pytest.approx(32 * 1024 / 1.1)
    assert pooled.step_seconds_spread > 0.03


def test_the_spread_is_over_all_runs_of_the_plan():
    """Steps of one run are alike; that another run took twice as long is not to be seen in them."""
    trials = [run(number, BF16, seconds, purpose="final") for number, seconds in enumerate((1.0, 1.0, 1.0, 2.0))]
    assert decide(trials, LIMIT).measured.step_seconds_spread == pytest.approx(0.5, rel=0.05)
    busy = [*trials[:3], run(3, BF16, 2.0, purpose="final", disturbance=0.5)]
    pooled = decide(busy, LIMIT).measured
    assert pooled.step_seconds == pytest.approx(1.0)
    assert pooled.step_seconds_spread == pytest.approx(0.5, rel=0.05)


def test_where_finals_were_measured_a_finalist_wins():
    trials = [run(0, PLAIN, 0.9, fidelity="parts"), run(1, BF16, 0.95), run(2, BF16, 1.0, purpose="final")]
    assert decide(trials, LIMIT).plan == BF16


def test_utilisation_is_that_of_the_pooled_step():
    trials = [run(0, BF16, 1.0, purpose="final", mfu=0.6), run(1, BF16, 1.5, purpose="final", mfu=0.4)]
    pooled = decide(trials, LIMIT).measured
    assert pooled.mfu * pooled.step_seconds == pytest.approx(0.6)
    assert decide([run(0, BF16, 1.0)], LIMIT).measured.mfu is None


def test_who_was_disturbed_whenever_measured_is_measured_again_beside_one_that_was_not():
    lion, sgd = (BF16.replaced(optimizer=name) for name in ("lion", "sgd"))
    busy = {"disturbance": 0.5}
    trials = [
        run(0, BF16, 4.0, **busy),
        run(1, BF16_8BIT, 4.1, **busy),
        run(2, PLAIN, 8.0, **busy),
        run(3, lion, 5.0, **busy),
        run(4, lion, 1.0),
        run(5, sgd, 1.05),
    ]
    assert finalists(trials, LIMIT) == [lion, BF16, BF16_8BIT]
    assert finalists(trials, LIMIT, count=1) == [lion]
    assert finalists(trials[:4], LIMIT) == [BF16, BF16_8BIT], "all of them were"
    assert finalists(trials[4:], LIMIT) == [lion, sgd], "none of them was"
    assert finalists([*trials, run(6, BF16, 2.0), run(7, BF16_8BIT, 2.0)], LIMIT) == [lion, sgd, PLAIN]


def test_finalists_are_near_the_best():
    other = BF16.replaced(checkpointing="full")
    trials = [run(0, PLAIN, 2.0), run(1, BF16, 1.0), run(2, BF16_8BIT, 1.09), run(3, other, 1.12)]
    assert finalists(trials, LIMIT) == [BF16, BF16_8BIT]
    assert finalists(trials, LIMIT, count=1) == [BF16]


def test_a_trial_that_was_cut_off_is_no_finalist_for_its_noise():
    other = BF16.replaced(checkpointing="full")
    steps = {PLAIN: (7.0, 5.0), BF16: (1.0, 1.01, 0.99), BF16_8BIT: (1.1, 1.3, 1.2), other: (1.2, 1.21, 1.19)}
    trials = [
        Trial(number=n, plan=plan, outcome=measured(found, GIB, FACTS), wall_seconds=1.0, purpose="search")
        for n, (plan, found) in enumerate(steps.items())
    ]
    assert finalists(trials, LIMIT) == [BF16, BF16_8BIT]


OUTCOMES = st.one_of(
    st.tuples(st.floats(0.1, 10.0), st.floats(0.0, 0.1), st.integers(GIB, 2 * LIMIT)),
    st.sampled_from([out_of_memory(FACTS), Crashed(reason="x"), TimedOut(limit_seconds=1.0, phase="x")]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(SPACE.plans[:8]), OUTCOMES), max_size=20))
def test_the_winner_fits_and_none_is_better_beyond_noise(drawn):
    trials = []
    for number, (plan, what) in enumerate(drawn):
        outcome = what
        if isinstance(what, tuple):
            seconds, jitter, peak = what
            outcome = measured((seconds * (1 - jitter), seconds, seconds * (1 + jitter)), peak, FACTS)
        trials.append(failed(number, plan, outcome))
    decision = decide(trials, LIMIT)

    def stands(plan):
        outcomes = [trial.outcome for trial in trials if trial.plan == plan]
        kinds = [outcome.kind for outcome in outcomes if outcome.kind != "timed_out"]
        if kinds.count("crashed") == 1 and "measured" in kinds[kinds.index("crashed") :]:
            kinds.remove("crashed")  # an accident: it ran after it
        return set(kinds) == {"measured"} and all(one.peak_bytes <= LIMIT for one in outcomes if one.kind == "measured")

    clean = {trial.plan for trial in trials if stands(trial.plan)}
    if decision is None:
        assert not clean
        return
    assert decision.plan in clean
    assert {one.plan for one in decision.runners_up} == clean - {decision.plan}
    won = decision.measured
    assert won.peak_bytes <= LIMIT
    for one in decision.runners_up:
        noise = math.hypot(one.measured.step_seconds_spread, won.step_seconds_spread)
        assert won.step_seconds - one.measured.step_seconds <= noise
    assert decision.plan in finalists(trials, LIMIT, count=20)


def test_nearest_change_names_the_tightest_peak():
    tight = failed(0, BF16, out_of_memory(FACTS, peak_bytes=21 * GIB, requested_bytes=2 * GIB))
    wide = failed(1, PLAIN, out_of_memory(FACTS, peak_bytes=22 * GIB))
    words = nearest_change([wide, tight], SPACE, LIMIT)
    assert BF16.words() in words
    assert "21.00 GiB" in words
    assert "more than 23.00 GiB (--memory-limit)" in words
    assert "--seq-len" in words
    assert "--allow" not in words


def test_nearest_change_of_plans_that_were_stopped_early_goes_by_their_traces():
    early = replace(failed(0, PLAIN, out_of_memory(FACTS, peak_bytes=GIB)), predicted_bytes=60 * GIB)
    late = replace(failed(1, BF16, out_of_memory(FACTS, peak_bytes=21 * GIB)), predicted_bytes=25 * GIB)
    words = nearest_change([early, late], SPACE, LIMIT)
    assert BF16.words() in words
    assert "held 21.00 GiB" in words
    assert "by its trace it needs about 25.00 GiB" in words
    assert "more than 25.00 GiB (--memory-limit)" in words


def test_nearest_change_in_the_optimizer_step_does_not_blame_the_sequence():
    words = nearest_change([failed(0, BF16, out_of_memory(FACTS, phase="optimizer"))], SPACE, LIMIT, FACTS)
    assert "--seq-len" not in words
    assert "--allow exact,numeric,method" in words
    assert "precision=bf16_weights" in words
    assert "optimizer=sgd" in words


def test_nearest_change_of_a_plan_that_ran_over_the_ceiling():
    words = nearest_change([run(0, BF16, 1.0, 30 * GIB)], SPACE, LIMIT)
    assert "needs 30.00 GiB under a ceiling of 22.00 GiB" in words


def test_a_plan_that_fitted_once_is_told_by_what_it_needed_when_it_did_not():
    runs = [run(0, BF16, 1.0, 21 * GIB), failed(1, BF16, out_of_memory(FACTS, peak_bytes=22 * GIB))]
    assert "held 22.00 GiB" in nearest_change(runs, SPACE, LIMIT)
    assert "a ceiling of more than 22.06 GiB" in nearest_change(runs[::-1], SPACE, LIMIT)


def test_a_scripts_rows_are_shortened_by_its_own_arguments():
    script = Script(
        path="train.py", sha256="", trainer="Trainer", micro_batch=4, accumulation=1, weights_dtype="float32"
    )
    facts = replace(FACTS, workload=replace(FACTS.workload, script=script))
    words = nearest_change([run(0, BF16, 1.0, 30 * GIB)], SPACE, LIMIT, facts)
    assert "--seq-len" not in words
    assert "or shorter rows, by the script's own arguments" in words
    assert words.endswith("which adds precision=bf16_weights."), "its adapter and its optimizer are the script's"
    images = replace(facts, model=replace(facts.model, sample_tokens=0))
    assert "rows" not in nearest_change([run(0, BF16, 1.0, 30 * GIB)], SPACE, LIMIT, images)


def test_nearest_change_without_a_device_peak():
    assert "host's memory" in nearest_change([failed(0, BF16, out_of_memory(FACTS, where="host"))], SPACE, LIMIT)
    assert "No plan" in nearest_change([failed(0, BF16, Crashed(reason="x"))], SPACE, LIMIT)
