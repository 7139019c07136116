"""The traces' word in the search: what is never run, where a family begins, and how measurements correct it."""

import dataclasses
import math

import numpy as np
import pytest

from autofit import space
from autofit.commands.shell.explanations import no_winner
from autofit.commands.tunes.backend import DeviceBackend, _told_once, predicted_bytes, predicted_speeds
from autofit.contract.outcome import Trial
from autofit.costmodel.forecast import Forecast, PeakPrior
from autofit.costmodel.seconds.roofline import WORK
from autofit.search.sampler import AutofitSampler
from autofit.search.searcher import open_searcher
from autofit.search.surrogate.gp import truncated_normal_update
from autofit.search.surrogate.observation import Observation
from autofit.search.surrogate.peak_model import traced_posterior
from autofit.search.surrogate.posterior import excluded, peak_posterior, posterior, surrogate
from autofit.system.errors import MachineError, NothingFits
from autofit.system.units import GIB, MIB
from tests.support.synthetic import Landscape, cpu_facts

FACTS = cpu_facts(limit_bytes=8 * GIB)
SPACE = space.build(FACTS)
PEAK_PRIOR = PeakPrior(
    offset_bytes=40 * MIB,
    offset_std=30 * MIB,
    slope=1.1,
    slope_std=0.1,
    residual=0.05,
    scatter_bytes=3 * MIB,
    value_bytes=8 * MIB,
    value_share=0.05,
    heap_share=0.0,
    heap_share_std=0.1,
)
ROW_BYTES = 0.4 * GIB
LAND = Landscape(facts=FACTS, overhead_seconds=0.4, row_seconds=0.4, row_bytes=ROW_BYTES)


def truth(plan):
    """What the made-up device holds for a plan, whatever the ceiling."""
    outcome = Landscape(
        facts=cpu_facts(limit_bytes=1 << 50), overhead_seconds=0.4, row_seconds=0.4, row_bytes=ROW_BYTES
    ).outcome(plan, 0)
    return outcome.peak_bytes


def cast(scale=1.0, *, untraced=()):
    tensors = np.array([(truth(plan) - 50 * MIB) / 1.15 * scale for plan in SPACE.plans])
    tensors[list(untraced)] = np.nan
    nothing = np.full(len(tensors), np.nan)
    return Forecast(
        tensor_bytes=tensors,
        seconds=nothing,
        work=np.full((len(tensors), len(WORK)), np.nan),
        nominal=np.ones(len(WORK)),
        known_card=False,
        timed=False,
        approximate=np.zeros(len(tensors), dtype=bool),
        peak_prior=PEAK_PRIOR,
        kernel_overhead_bytes=np.zeros(len(tensors)),
        activation_bytes=np.array([ROW_BYTES / 1.15 * scale * int(plan["micro_batch"]) for plan in SPACE.plans]),
    )


def learned(known, places=(), peaks=(), noise=0.4):
    seen = np.array(places, dtype=np.int64)
    kernel = surrogate(SPACE, known).peak_residual
    noises = np.full(len(seen), noise)
    return traced_posterior(known, kernel, observed=seen, peaks=np.array(peaks, dtype=float), noise=noises)


def test_without_measurements_the_beliefs_stand():
    known = cast(untraced=[3])
    found = learned(known)
    assert (found.offset_bytes, found.slope, found.count) == (PEAK_PRIOR.offset_bytes, PEAK_PRIOR.slope, 0)
    mean, std = found.log_moments()
    traced = np.delete(known.tensor_bytes, 3)
    assert np.exp(np.delete(mean, 3)) == pytest.approx(PEAK_PRIOR.offset_bytes + PEAK_PRIOR.slope * traced)
    assert (np.delete(std, 3) > 0.05).all()
    assert (np.delete(std, 3) < 0.5).all()
    assert np.isnan(mean[3])


def test_two_measurements_make_the_line():
    known = cast()
    places = np.argsort(known.tensor_bytes)[[0, len(SPACE.plans) // 2]]
    peaks = 100 * MIB + 1.3 * known.tensor_bytes[places]
    found = learned(known, places, peaks)
    expected = 100 * MIB + 1.3 * known.tensor_bytes
    assert found.mean == pytest.approx(expected, rel=0.15)
    before = learned(known)
    assert np.abs(found.mean - expected).mean() < np.abs(before.mean - expected).mean()
    assert (found.std < before.std).all()


def test_what_a_value_brings_along_is_learned():
    """A library's own megabytes, which no trace sees."""
    known, brings = cast(scale=0.02), 30 * MIB
    with_it = [place for place, plan in enumerate(SPACE.plans) if plan["optimizer"] == "adamw_8bit"]
    without = [place for place, plan in enumerate(SPACE.plans) if plan["optimizer"] == "adamw"]
    truth_of = PEAK_PRIOR.offset_bytes + PEAK_PRIOR.slope * known.tensor_bytes
    truth_of[with_it] += brings
    found = learned(known, without[:6] + with_it[:2], truth_of[without[:6] + with_it[:2]])
    error = found.mean - truth_of
    assert np.abs(error[with_it]).mean() < 0.5 * brings
    assert np.abs(error[without]).mean() < 0.3 * brings
    blind = learned(known, without[:6], truth_of[without[:6]])
    assert blind.std[with_it].mean() > blind.std[without].mean()


def test_what_the_heap_keeps_is_learned():
    """A heap with holes: each row costs more than its tensors, in every kind of plan."""
    known = cast()
    features = surrogate(SPACE, known).features
    truth_of = PEAK_PRIOR.offset_bytes + PEAK_PRIOR.slope * known.tensor_bytes + 0.2 * known.activation_bytes
    seen = np.flatnonzero(features.family == features.family[0])
    others = np.flatnonzero((features.family != features.family[0]) & (features.rows == features.rows.max()))
    found = {std: learned(dataclasses.replace(known, peak_prior=dataclasses.replace(PEAK_PRIOR, heap_share_std=std)),
                          seen, truth_of[seen]) for std in (0.0, 0.2)}  # fmt: skip
    error = {std: np.abs(one.mean - truth_of)[others].mean() for std, one in found.items()}
    assert error[0.2] < 0.5 * error[0.0]


def test_what_the_heap_is_expected_to_keep_counts():
    known = dataclasses.replace(cast(), peak_prior=dataclasses.replace(PEAK_PRIOR, heap_share=0.5))
    assert known.device_bytes == pytest.approx(cast().device_bytes + 0.5 * known.activation_bytes)
    assert learned(known).mean == pytest.approx(known.device_bytes)
    seen = [0, 5, 9]
    after = learned(known, seen, known.device_bytes[seen])
    assert after.mean == pytest.approx(known.device_bytes), "as it was expected: nothing is learned"
    assert after.scatter == pytest.approx(0.0, abs=1e-9)


def test_scatter_widens_what_is_believed_of_the_others():
    known = cast()
    places = np.arange(8)
    calm = learned(known, places, 1.1 * known.tensor_bytes[places] + 40 * MIB)
    wild = learned(known, places, known.tensor_bytes[places] * np.where(places % 2, 1.6, 0.6))
    assert wild.scatter > 2 * calm.scatter
    assert (wild.std[20:] > 1.5 * calm.std[20:]).all()


def test_a_broken_ceiling_tells_that_it_is_below_and_no_more():
    """A truncated normal, by drawing from it: what was believed far above the ceiling is told nothing."""
    draws = np.random.default_rng(0).normal(30.0, 5.0, 400_000)
    for limit in (20.0, 28.0, 33.0, 41.0):
        told, noise = truncated_normal_update(np.array([30.0]), np.array([5.0]), limit)
        precision = 1 / 5.0**2 + 1 / noise[0] ** 2
        beyond = draws[draws > limit]
        assert (30 / 5.0**2 + told[0] / noise[0] ** 2) / precision == pytest.approx(beyond.mean(), rel=0.01)
        assert precision**-0.5 == pytest.approx(beyond.std(), rel=0.05)
    told, noise = truncated_normal_update(np.array([100.0, 1.0]), np.array([5.0, 2.0]), 30.0)
    assert noise[0] > 1000
    assert told[1] == pytest.approx(30.0, rel=0.05)


def test_a_lucky_measurement_does_not_end_the_search():
    """Of two runs of plans that are alike, one was twice as fast: the belief lies between."""
    model, limit = surrogate(SPACE, cast()), FACTS.workload.limit_bytes
    places = [place for place in range(len(SPACE.plans)) if model.features.family[place] == model.features.family[0]][
        :3
    ]
    seen = [
        Observation(plan=place, result="measured", seconds=seconds, peak_bytes=GIB, needed_bytes=GIB, noise=0.3)
        for place, seconds in zip(places, (1.0, 0.5, 1.0), strict=True)
    ]
    assert np.exp(posterior(model, seen, limit).time[places[1]]) > 0.6


def test_what_surely_does_not_fit_is_never_run():
    known = cast()
    model = surrogate(SPACE, known)
    limit = FACTS.workload.limit_bytes
    out = excluded(model, [], limit)
    assert out.any()
    assert not out.all()
    assert all(truth(plan) > limit for plan, gone in zip(SPACE.plans, out, strict=True) if gone)
    assert not excluded(surrogate(SPACE), [], limit).any()


def test_a_plan_without_a_trace_is_not_excluded():
    known = cast(untraced=range(len(SPACE.plans)))
    assert not excluded(surrogate(SPACE, known), [], MIB).any()


def test_the_first_trial_is_the_largest_micro_batch_that_surely_fits():
    sampler = AutofitSampler(SPACE, limit_bytes=FACTS.workload.limit_bytes, forecast=cast())
    first = SPACE.plans[sampler.suggest([]).plan]
    assert truth(first) <= FACTS.workload.limit_bytes
    assert first["micro_batch"] > 1
    blind = AutofitSampler(SPACE, limit_bytes=FACTS.workload.limit_bytes)
    assert SPACE.plans[blind.suggest([]).plan]["micro_batch"] <= first["micro_batch"]


@pytest.mark.parametrize("limit_gib", [6, 8, 12, 16])
def test_few_trials_run_out_of_memory(tmp_path, limit_gib):
    facts = cpu_facts(limit_bytes=limit_gib * GIB)
    land = Landscape(facts=facts, overhead_seconds=0.4, row_seconds=0.4, row_bytes=ROW_BYTES)
    searcher = open_searcher(tmp_path, SPACE, facts, forecast=cast())
    trials = []
    while (plan := searcher.ask()) is not None and len(trials) < 40:
        number = len(trials)
        trials.append(Trial(number=number, plan=plan, outcome=land.outcome(plan, number), wall_seconds=1.0))
        searcher.tell(trials[-1])
    broke = sum(trial.outcome.kind == "out_of_memory" for trial in trials)
    assert broke <= 3 + len(trials) // 10
    fitting = [land.outcome(plan, 0) for plan in SPACE.plans]
    best = max(one.samples_per_second for one in fitting if one.kind == "measured")
    found = max(t.outcome.samples_per_second for t in trials if t.outcome.kind == "measured")
    assert found >= 0.95 * best
    assert searcher.peak_posterior().count == len(trials) - broke


def test_the_correction_uses_what_was_needed_not_what_was_kept():
    seen = [
        Observation(plan=place, result="measured", seconds=1.0, peak_bytes=9e9, needed_bytes=1e9) for place in range(3)
    ]
    seen.append(Observation(plan=4, result="out_of_memory", peak_bytes=8e9))
    found = peak_posterior(surrogate(SPACE, cast()), seen, 8 * GIB)
    assert found.count == 3
    assert found.slope < PEAK_PRIOR.slope * 2


def test_nothing_fits_is_said_before_anything_is_run(tmp_path):
    facts = cpu_facts(limit_bytes=200 * MIB)
    searcher = open_searcher(tmp_path, SPACE, facts, forecast=cast())
    assert searcher.ask() is None
    assert "by its trace" in searcher.stopped
    refusal = no_winner((), {}, facts, SPACE, forecast=cast(), trials_folder=tmp_path)
    assert isinstance(refusal, NothingFits)
    assert "smallest needs about" in refusal.message
    assert "--memory-limit" in refusal.message


def test_reasons_that_differ_in_numbers_are_told_once():
    reasons = ["the trace of 4 says 46,846 bytes", "the trace of 4 says 53,393 bytes", "another"]
    assert _told_once(reasons) == ["another", "the trace of 4 says 46,846 bytes (and 1 like it)"]


def test_a_tune_goes_on_without_a_forecast(tmp_path, monkeypatch):
    said = []

    def fail(*_, **__):
        raise MachineError("the disk is full")

    monkeypatch.setattr("autofit.commands.tunes.backend.forecast", fail)
    config = tmp_path / "model"
    config.mkdir()
    (config / "config.json").write_text("{}")
    found, _ = DeviceBackend().forecast(
        SPACE, FACTS, config, server=None, folder=tmp_path, note=said.append, say=said.append
    )
    assert found is None
    assert "the disk is full" in said[0]


def test_each_trial_knows_what_was_predicted():
    told = predicted_bytes(SPACE, cast(untraced=[0]))
    assert SPACE.plans[0] not in told
    assert told[SPACE.plans[1]] == round(float(cast().device_bytes[1]))
    assert predicted_bytes(SPACE, None) == {}
    found = dataclasses.replace(
        cast(), seconds=np.array([np.nan, *np.full(len(SPACE.plans) - 1, 0.25)]), spread=math.exp(0.128)
    )
    speeds = predicted_speeds(SPACE, FACTS, found)
    assert SPACE.plans[0] not in speeds
    one = speeds[SPACE.plans[1]]
    assert one.samples_per_second == 4.0
    assert one.low == pytest.approx(4 * math.exp(-0.128), rel=1e-3)
    assert one.high == pytest.approx(4 * math.exp(0.128), rel=1e-3)
    assert predicted_speeds(SPACE, FACTS, None) == {}
    issued = np.zeros((len(SPACE.plans), len(WORK)))
    issued[1, WORK.index("operators")], issued[2, WORK.index("operators")] = 0.24, 0.12  # seconds, at one each
    slow, quick = (
        predicted_speeds(SPACE, FACTS, dataclasses.replace(found, work=issued))[SPACE.plans[place]] for place in (1, 2)
    )
    assert (quick.low, quick.high) == (one.low, one.high)
    assert slow.low < quick.low / 1.2, "a step that waits for its host is told less well"
    assert slow.high > 1.2 * quick.high
    waits = SPACE.plans[1].replaced(parallel="fsdp", offload="parameters")
    alone = dataclasses.replace(found, seconds=found.seconds[1:2])
    on_host = predicted_speeds(dataclasses.replace(SPACE, plans=(waits,)), FACTS, alone)
    assert on_host[waits].low == 0, "how fast the host steps is not known"
