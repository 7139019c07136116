import dataclasses
import importlib.util
import random
import statistics

import numpy as np
import optuna
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from autofit import space
from autofit.contract.outcome import Crashed, OutOfMemory, TimedOut, Trial, Unsupported
from autofit.contract.plan import Plan
from autofit.contract.script import Script
from autofit.contract.technique import Kind
from autofit.registry import techniques
from autofit.search.decision import decide
from autofit.search.journal import JOURNAL_FILE
from autofit.search.sampler import MIN_TRIALS, AutofitSampler
from autofit.search.searcher import Searcher, open_searcher
from autofit.search.study import REJECTED, distributions, quiet_optuna
from autofit.search.surrogate.features import features_of
from autofit.search.surrogate.gp import FixedFeatures, Kernel, expected_improvement, normal_cdf
from autofit.search.surrogate.observation import Observation, observations
from autofit.search.surrogate.peak_model import constrain_within_families
from autofit.search.surrogate.posterior import posterior, surrogate
from autofit.system.errors import InputError
from tests.support.synthetic import GIB, Landscape, cpu_facts, cuda_facts, measured, out_of_memory

CPU = cpu_facts(limit_bytes=16 * GIB)
CPU_SPACE = space.build(CPU)
CPU_SHAPE = {"overhead_seconds": 0.4, "row_seconds": 0.4, "row_bytes": 0.4 * GIB}
CUDA = cuda_facts()
CUDA_SPACE = space.build(CUDA)
LAND = Landscape(facts=CPU, **CPU_SHAPE)


def in_memory(facts, plans, seed=0):
    sampler = AutofitSampler(plans, limit_bytes=facts.workload.limit_bytes, seed=seed)
    with quiet_optuna():
        study = optuna.create_study(direction="maximize", sampler=sampler)
    return Searcher(plans, study, sampler="autofit", limit_bytes=facts.workload.limit_bytes, seed=seed)


def play(searcher, outcome_of, limit=40):
    """Ask, measure, tell; the trials in order."""
    trials = []
    while len(trials) < limit and (plan := searcher.ask()) is not None:
        number = len(trials)
        trials.append(Trial(number=number, plan=plan, outcome=outcome_of(plan, number), wall_seconds=1.0))
        searcher.tell(trials[-1])
    return trials


def impossible(trials):
    """Plans that were run though a smaller micro-batch had run out of memory, and plans that were run twice."""
    bad, seen, broke = [], set(), []
    for trial in trials:
        rest = {name: value for name, value in trial.plan.items() if name not in {"micro_batch", "accumulation"}}
        known = any(rest == other and trial.plan["micro_batch"] >= rows for other, rows in broke)
        if known or trial.plan in seen:
            bad.append(trial.plan)
        seen.add(trial.plan)
        if trial.outcome.kind == "out_of_memory":
            broke.append((rest, trial.plan["micro_batch"]))
    return bad


@pytest.mark.slow
@pytest.mark.parametrize(
    ("facts", "shape"),
    [
        (CPU, CPU_SHAPE),
        (CUDA, {}),
        (cuda_facts(global_batch=36), {"overhead_seconds": 0.3, "row_seconds": 0.02, "row_bytes": 0.3 * GIB}),
    ],
    ids=["cpu", "cuda", "launch-bound"],
)
def test_it_finds_the_best_soon_and_seldom_runs_out_of_memory(facts, shape):
    plans = space.build(facts)
    found, broke, ran = [], 0, 0
    for seed in range(20):
        land = Landscape(facts=facts, seed=seed, **shape)
        best = land.best_seconds(plans)
        trials = play(in_memory(facts, plans), land.outcome, limit=20)
        near = [
            trial.number + 1
            for trial in trials
            if trial.outcome.kind == "measured" and land.step_seconds(trial.plan) <= 1.02 * best
        ]
        found.append(min(near, default=99))
        broke += sum(trial.outcome.kind == "out_of_memory" for trial in trials)
        ran += len(trials)
    assert statistics.median(found) <= 14, found  # of 120 to 1566 plans
    assert broke <= 0.12 * ran, f"{broke} of {ran}"  # where no trace says what fits


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    share=st.floats(0.02, 3.0),
    failing=st.floats(0.0, 0.4),
)
@example(seed=12, share=2.3, failing=0.35)
@pytest.mark.slow
def test_whatever_the_landscape(seed, share, failing):
    """Memory grows with the rows, all else is arbitrary: what is run was possible, and the winner is the best."""
    rng = random.Random(seed)
    limit = CUDA.workload.limit_bytes
    fixed, slope, pace = {}, {}, {}

    def outcome(plan, _):
        family = plan.replaced(micro_batch=0, accumulation=0)
        fixed.setdefault(family, limit * share * rng.uniform(0.1, 1.0))
        slope.setdefault(family, limit * share * rng.uniform(0.0, 0.2))
        pace.setdefault(family, rng.lognormvariate(0, 1))
        if rng.random() < failing:
            return rng.choice([Crashed(reason="x"), Unsupported(reason="y"), TimedOut(limit_seconds=9, phase="z")])
        peak = fixed[family] + slope[family] * plan["micro_batch"]
        if peak > limit:
            return out_of_memory(CUDA)
        seconds = pace[family] * rng.uniform(0.5, 2.0)
        return measured([seconds * rng.uniform(0.98, 1.02) for _ in range(5)], peak, CUDA)

    searcher = in_memory(CUDA, CUDA_SPACE)
    trials = play(searcher, outcome, limit=30)
    assert trials
    assert impossible(trials) == []
    assert len(trials) == 30 or searcher.stopped
    fitting = [trial for trial in trials if trial.outcome.kind == "measured"]
    decision = decide(trials, limit)
    assert (decision is None) == (not fitting)
    if decision is None:
        ran_out = any(trial.outcome.kind == "out_of_memory" for trial in trials)
        assert not ran_out or CUDA_SPACE.smallest() in {trial.plan for trial in trials}
        return
    assert decision.plan in {trial.plan for trial in fitting}
    for trial in fitting:
        noise = np.hypot(trial.outcome.step_seconds_spread, decision.measured.step_seconds_spread)
        assert decision.measured.step_seconds - trial.outcome.step_seconds <= noise


def test_the_first_plan_is_fast_small_and_keeps_the_method(tmp_path):
    plans = space.build(CUDA, frozenset(Kind))
    plan = open_searcher(tmp_path, plans, CUDA).ask()
    assert dict(plan) == {
        "parallel": "none",
        "sync_each_batch": "off",
        "micro_batch": 1,
        "accumulation": 32,
        "precision": "bf16",
        "attention": "default",
        "kernels": "none",
        "checkpointing": "off",
        "adapter": "none",
        "quantization": "none",
        "optimizer": "adamw",
        "offload": "none",
        "compile": "off",
        "batching": "pad",
        "loader": "default",
    }


def test_what_a_script_does_by_itself_is_tried_before_the_first_plan(tmp_path):
    said = {"path": "train.py", "sha256": "", "trainer": "Trainer", "micro_batch": 4, "accumulation": 8}
    own = {"bf16": True, "activation_checkpointing": True}
    work = dataclasses.replace(CUDA.workload, script=Script(**said, own=own))
    facts = dataclasses.replace(CUDA, workload=work)
    searcher = open_searcher(tmp_path, space.build(facts), facts)
    first, second, *_ = [trial.plan for trial in play(searcher, Landscape(facts=facts, **CPU_SHAPE).outcome, limit=3)]
    changed = {"micro_batch": 4, "accumulation": 8, "precision": "bf16", "checkpointing": "full"}
    assert dict(first) == {one.name: changed.get(one.name, one.baseline) for one in techniques()}
    assert second["micro_batch"] == 1
    assert second["precision"] == "bf16"


def test_it_stops_by_itself_and_says_why():
    searcher = in_memory(CPU, CPU_SPACE)
    trials = play(searcher, LAND.outcome)
    assert MIN_TRIALS <= len(trials) < len(CPU_SPACE.plans)
    assert "expected to be 1% faster" in searcher.stopped
    assert searcher.expected_gain < 0.01
    assert searcher.ask() is None


def test_it_says_what_it_expects():
    searcher = in_memory(CPU, CPU_SPACE)
    searcher.ask()
    assert searcher.expected_gain is None
    searcher = in_memory(CPU, CPU_SPACE)
    play(searcher, LAND.outcome, limit=2)
    assert searcher.expected_gain > 0.01
    assert "likely to fit" in searcher.reason


def test_nothing_fits_needs_the_smallest_plan_and_few_trials():
    searcher = in_memory(CUDA, CUDA_SPACE)
    trials = play(searcher, lambda *_: out_of_memory(CUDA))
    plans = [trial.plan for trial in trials]
    assert CUDA_SPACE.smallest() in plans
    assert len(plans) <= 8
    assert "nothing fits" in searcher.stopped
    families = {plan.replaced(micro_batch=0, accumulation=0) for plan in plans}
    assert len(families) == len(plans)


def test_only_the_smallest_fits():
    small = CUDA_SPACE.smallest()

    def outcome(plan, _):
        return measured((1.0, 1.0, 1.01), GIB, CUDA) if plan == small else out_of_memory(CUDA)

    trials = play(in_memory(CUDA, CUDA_SPACE), outcome)
    assert decide(trials, CUDA.workload.limit_bytes).plan == small


def test_nothing_runs_ends_too():
    searcher = in_memory(CUDA, CUDA_SPACE)
    trials = play(searcher, lambda *_: Crashed(reason="no driver"))
    assert len(trials) <= 12
    assert "ran" in searcher.stopped


def test_a_value_that_never_works_is_left_alone():
    def outcome(plan, number):
        return Unsupported(reason="ignored") if plan["optimizer"] != "adamw" else LAND.outcome(plan, number)

    trials = play(in_memory(CPU, CPU_SPACE), outcome)
    assert sum(trial.outcome.kind == "unsupported" for trial in trials) <= 3


def test_a_small_space_is_exhausted():
    plans = space.build(CPU, given={
        "micro_batch": (1, 2), "precision": ("bf16",), "optimizer": ("adamw",), "checkpointing": ("off", "full"),
        "attention": ("default",),
    })  # fmt: skip
    searcher = in_memory(CPU, plans)
    trials = play(searcher, LAND.outcome)
    assert len(trials) == len(plans.plans) == 4
    assert searcher.stopped == "every plan was tried or is known not to fit"


def test_the_host_running_out_is_no_news_of_the_device():
    searcher = in_memory(CUDA, CUDA_SPACE)
    plan = searcher.ask()
    host = OutOfMemory(where="host", phase="optimizer", limit_bytes=GIB, peak_bytes=GIB)
    searcher.tell(Trial(number=0, plan=plan, outcome=host, wall_seconds=1.0))
    again = searcher.ask()
    rest = {"micro_batch": 0, "accumulation": 0}
    assert again.replaced(**rest) != plan.replaced(**rest)


@pytest.mark.parametrize("name", ["tpe", pytest.param("random", marks=pytest.mark.slow), "grid"])
@pytest.mark.parametrize("facts", [CPU, cuda_facts(limit_bytes=10 * GIB)], ids=["cpu", "cuda"])
def test_optunas_samplers_never_repeat_nor_run_the_impossible(tmp_path, name, facts):
    plans = space.build(facts)
    land = Landscape(facts=facts)
    searcher = open_searcher(tmp_path, plans, facts, sampler=name, seed=3)
    trials = play(searcher, land.outcome, limit=15)
    assert len(trials) == 15
    assert impossible(trials) == []
    assert all(trial.plan["micro_batch"] * trial.plan["accumulation"] == 32 for trial in trials)
    again = play(open_searcher(tmp_path / "again", plans, facts, sampler=name, seed=3), land.outcome, limit=15)
    assert [trial.plan for trial in again] == [trial.plan for trial in trials]


@pytest.mark.parametrize("name", [pytest.param("tpe", marks=pytest.mark.slow), "random", "grid"])
def test_optunas_samplers_end_with_the_space(tmp_path, name):
    plans = space.build(CPU, given={"micro_batch": (1, 2), "precision": ("bf16",)})
    searcher = open_searcher(tmp_path, plans, CPU, sampler=name)
    trials = play(searcher, LAND.outcome)
    assert {trial.plan for trial in trials} == set(plans.plans)
    assert searcher.stopped


def test_grid_goes_in_order(tmp_path):
    searcher = open_searcher(tmp_path, CPU_SPACE, CPU, sampler="grid")
    trials = play(searcher, lambda *_: measured((1.0, 1.0), GIB, CPU), limit=5)
    assert [trial.plan for trial in trials] == list(CPU_SPACE.plans[:5])


def test_tpe_learns_from_what_does_not_fit(tmp_path):
    searcher = open_searcher(tmp_path, CPU_SPACE, CPU, sampler="tpe")
    plan = searcher.ask()
    searcher.tell(Trial(number=0, plan=plan, outcome=out_of_memory(CPU), wall_seconds=1.0))
    from optuna.samplers._tpe.sampler import _get_infeasible_trial_score

    (told,) = searcher.study.trials
    assert told.state == optuna.trial.TrialState.PRUNED
    assert _get_infeasible_trial_score(told) > 0


def test_a_proposal_that_is_no_plan_is_told_as_infeasible(tmp_path):
    plans = space.build(cuda_facts(limit_bytes=10 * GIB))
    searcher = open_searcher(tmp_path, plans, CUDA, sampler="random")
    play(searcher, Landscape(facts=CUDA).outcome, limit=20)
    rejected = [trial for trial in searcher.study.trials if trial.user_attrs["kind"] == REJECTED]
    conflicting = [trial for trial in rejected if trial.state == optuna.trial.TrialState.PRUNED]
    assert conflicting
    assert all(trial.constraints["memory"] > 0 for trial in conflicting)


@pytest.mark.skipif(importlib.util.find_spec("scipy") is not None, reason="scipy is installed")
def test_gp_says_what_to_install(tmp_path):
    with pytest.raises(InputError, match="scipy") as caught:
        open_searcher(tmp_path, CPU_SPACE, CPU, sampler="gp")
    assert "pip install scipy" in caught.value.hint


@pytest.mark.skipif(importlib.util.find_spec("scipy") is None, reason="needs scipy")
def test_gp_runs(tmp_path):
    trials = play(open_searcher(tmp_path, CPU_SPACE, CPU, sampler="gp"), LAND.outcome, limit=12)
    assert impossible(trials) == []


def test_an_unknown_sampler_is_refused(tmp_path):
    with pytest.raises(InputError, match="autofitt") as caught:
        open_searcher(tmp_path, CPU_SPACE, CPU, sampler="autofitt")
    assert caught.value.hint == "did you mean autofit?"


@pytest.mark.parametrize("name", ["autofit", "tpe"])
@pytest.mark.parametrize("kept", [True, False], ids=["journal", "rebuilt"])
def test_a_search_resumes(tmp_path, name, kept):
    begun = play(open_searcher(tmp_path, CPU_SPACE, CPU, sampler=name), LAND.outcome, limit=4)
    if not kept:
        (tmp_path / JOURNAL_FILE).unlink()
    resumed = open_searcher(tmp_path, CPU_SPACE, CPU, sampler=name, trials=begun)
    going_on = play(resumed, LAND.outcome, limit=4)
    assert not {trial.plan for trial in begun} & {trial.plan for trial in going_on}
    if name == "autofit":
        uninterrupted = play(in_memory(CPU, CPU_SPACE), LAND.outcome, limit=5)
        assert going_on[0].plan == uninterrupted[4].plan


def test_an_interrupted_plan_is_asked_again(tmp_path):
    plan = open_searcher(tmp_path, CPU_SPACE, CPU).ask()
    assert open_searcher(tmp_path, CPU_SPACE, CPU).ask() == plan


def test_a_plan_that_was_not_asked_can_be_told(tmp_path):
    searcher = open_searcher(tmp_path, CPU_SPACE, CPU)
    plan = CPU_SPACE.plans[5]
    searcher.tell(LAND.trial(plan, 0))
    searcher.tell(LAND.trial(plan, 1, purpose="final"))
    assert len(searcher.study.trials) == 1
    assert plan not in [trial.plan for trial in play(searcher, LAND.outcome)]


def test_a_plan_that_is_running_is_not_asked_again():
    searcher = in_memory(CPU, CPU_SPACE)
    assert searcher.ask() != searcher.ask()


def test_any_optuna_user_can_use_the_sampler():
    sampler = AutofitSampler(CPU_SPACE, limit_bytes=CPU.workload.limit_bytes)
    with quiet_optuna():
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for _ in range(8):
            trial = study.ask(dict(distributions(CPU_SPACE)))
            other = trial.suggest_float("learning_rate", 0.0, 1.0)
            plan = Plan({name: value for name, value in trial.params.items() if name in CPU_SPACE.domains})
            assert plan in set(CPU_SPACE.plans)
            assert 0.0 <= other <= 1.0
            trial.set_constraint("memory", LAND.peak_bytes(plan) / CPU.workload.limit_bytes - 1)
            if LAND.fits(plan):
                study.tell(trial, CPU.workload.global_batch / LAND.step_seconds(plan))
            else:
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    assert study.best_value > CPU.workload.global_batch / LAND.best_seconds(CPU_SPACE) * 0.8


def test_two_micro_batches_make_a_line_of_memory():
    features = features_of(CPU_SPACE)
    kin = [place for place, plan in enumerate(CPU_SPACE.plans) if features.family[place] == features.family[0]]
    peaks = {place: (3 + 0.5 * features.rows[place]) * GIB for place in kin if features.rows[place] in {2, 16}}
    mean, std = constrain_within_families(
        features, np.zeros(len(features.rows)), np.full(len(features.rows), 1.0), peaks
    )
    assert np.exp(mean[kin]) / GIB == pytest.approx(3 + 0.5 * features.rows[kin])
    within = [place for place in kin if 2 <= features.rows[place] <= 16]
    assert std[within].max() <= 0.02
    others = np.setdiff1d(np.arange(len(features.rows)), kin)
    assert (std[others] == 1.0).all()


def test_one_micro_batch_bounds_the_others():
    features = features_of(CPU_SPACE)
    kin = np.flatnonzero(features.family == features.family[0])
    place = next(place for place in kin if features.rows[place] == 4)
    for believed in (0.0, 100.0):
        mean, _ = constrain_within_families(
            features, np.full(len(features.rows), believed), np.full(len(features.rows), 1.0), {place: GIB}
        )
        times = np.exp(mean[kin]) / GIB
        rows = features.rows[kin] / 4
        assert (times >= np.minimum(rows, 1) * 0.999).all()
        assert (times <= np.maximum(rows, 1) * 1.001).all()


def test_running_out_of_memory_raises_what_is_expected_of_kin():
    model = surrogate(CUDA_SPACE)
    features = model.features
    limit = CUDA.workload.limit_bytes
    first = [place for place in np.flatnonzero(features.family == 0) if features.rows[place] in {1, 2, 4}]
    small, kin, broken = sorted(first, key=lambda place: features.rows[place])
    measured_one = Observation(plan=small, result="measured", seconds=1.0, peak_bytes=0.5 * limit)
    before = posterior(model, [measured_one], limit)
    after = posterior(model, [measured_one, Observation(plan=broken, result="out_of_memory", peak_bytes=limit)], limit)
    assert after.peak[broken] > np.log(limit)
    assert after.peak[kin] > before.peak[kin]
    on_host = Observation(plan=broken, result="out_of_memory", peak_bytes=limit, on_device=False)
    assert (posterior(model, [measured_one, on_host], limit).peak == before.peak).all()


def test_expected_gain_is_that_of_a_log_normal():
    rng = np.random.default_rng(0)
    for mean, std, best in [(0.0, 0.3, 0.1), (0.5, 0.2, 0.0), (-0.2, 0.01, 0.0)]:
        drawn = np.maximum(np.exp(best - rng.normal(mean, std, 400_000)) - 1, 0).mean()
        assert expected_improvement(np.array([mean]), np.array([std]), best)[0] == pytest.approx(
            drawn, rel=0.03, abs=1e-5
        )


def test_the_normal_distribution_function():
    import math

    z = np.linspace(-8, 8, 201)
    exact = [0.5 * math.erfc(-value / math.sqrt(2)) for value in z]
    assert np.abs(normal_cdf(z) - exact).max() < 1e-7


def test_columns_that_stay_count_like_the_others():
    rng = np.random.default_rng(0)
    columns, family, rows = rng.normal(size=(6, 5)), np.array([0, 0, 1, 1, 2, 2]), np.array([1.0, 2, 1, 4, 2, 8])
    stds = {"family_std": 0.3, "curve_std": 0.2}
    whole = Kernel(features=columns, family=family, rows=rows, **stds)
    split = Kernel(features=columns[:, :2], fixed=FixedFeatures.of(columns[:, 2:]), family=family, rows=rows, **stds)
    every, some, weights = np.arange(6), np.array([4, 1]), rng.normal(size=6)
    covariance = whole.covariance(every)
    assert whole.prior_variance() == pytest.approx(
        np.diag(covariance)
    )  # a plan's variance is its covariance with itself
    assert split.prior_variance() == pytest.approx(np.diag(covariance))
    assert split.covariance(every) == pytest.approx(covariance)
    assert split.covariance(some) == pytest.approx(covariance[some])
    assert split.feature_weights(weights) == pytest.approx(columns.T @ weights)
    assert split.fixed.subset(some).squared_norms == pytest.approx((columns[some, 2:] ** 2).sum(axis=1))


def test_what_others_disturbed_counts_less():
    searcher = in_memory(CPU, CPU_SPACE)
    quiet = measured((1.0, 1.0, 1.0), GIB, CPU)
    plans = [searcher.ask(), None]
    searcher.tell(Trial(number=0, plan=plans[0], outcome=quiet, wall_seconds=1.0))
    plans[1] = searcher.ask()
    busy = dataclasses.replace(quiet, disturbance=0.4)
    searcher.tell(Trial(number=1, plan=plans[1], outcome=busy, wall_seconds=1.0))
    features = searcher.study.sampler.model.features
    seen = observations(searcher.study.trials, features, CPU.workload.limit_bytes)
    assert [one.noise for one in seen] == [pytest.approx(0.005), pytest.approx(0.4, rel=0.01)]
