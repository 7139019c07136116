"""The traces' word in the search: what is never run, where a family begins, and how measurements correct it."""

import math

import numpy as np
import pytest

from autofit import space, tuning
from autofit.errors import MachineError, NothingFits
from autofit.forecast import Beside, Forecast
from autofit.plan import Trial
from autofit.sampler import AutofitSampler, Seen, corrected, excluded
from autofit.search import open_searcher
from autofit.surrogate import correct, encode
from autofit.units import GIB, MIB

from .synthetic import Landscape, cpu_facts

FACTS = cpu_facts(limit_bytes=8 * GIB)
SPACE = space.build(FACTS)
BESIDE = Beside(offset_bytes=40 * MIB, offset_std=30 * MIB, slope=1.1, slope_std=0.1, residual=0.05)
LAND = Landscape(facts=FACTS, overhead_seconds=0.4, row_seconds=0.4, row_bytes=0.4 * GIB)


def truth(plan):
    """What the made-up device holds for a plan, whatever the ceiling."""
    outcome = Landscape(
        facts=cpu_facts(limit_bytes=1 << 50), overhead_seconds=0.4, row_seconds=0.4, row_bytes=0.4 * GIB
    ).outcome(plan, 0)
    return outcome.peak_bytes


def cast(scale=1.0, *, untraced=()):
    tensors = np.array([(truth(plan) - 50 * MIB) / 1.15 * scale for plan in SPACE.plans])
    tensors[list(untraced)] = np.nan
    return Forecast(tensor_bytes=tensors, seconds=np.full(len(tensors), np.nan), beside=BESIDE)


def test_without_measurements_the_beliefs_stand():
    line = correct(cast(), seen=np.array([], dtype=np.int64), peaks=np.array([]))
    assert line.mean == pytest.approx([BESIDE.offset_bytes, BESIDE.slope])
    assert line.count == 0
    mean, std = line.at(np.array([GIB, np.nan]))
    assert math.exp(mean[0]) == pytest.approx(BESIDE.offset_bytes + BESIDE.slope * GIB)
    assert 0.05 < std[0] < 0.3
    assert np.isnan(mean[1])


def test_two_measurements_make_the_line():
    known = cast()
    places = np.argsort(known.tensor_bytes)[[0, len(SPACE.plans) // 2]]
    peaks = 100 * MIB + 1.3 * known.tensor_bytes[places]
    line = correct(known, seen=places, peaks=peaks)
    mean, std = line.at(known.tensor_bytes)
    expected = 100 * MIB + 1.3 * known.tensor_bytes
    assert np.exp(mean) == pytest.approx(expected, rel=0.12)
    before, std_before = correct(known, seen=places[:0], peaks=peaks[:0]).at(known.tensor_bytes)
    assert np.abs(mean - np.log(expected)).mean() < np.abs(before - np.log(expected)).mean()
    assert (std < std_before).all()


def test_scatter_widens_what_is_believed_of_the_others():
    known = cast()
    places = np.arange(8)
    calm = correct(known, seen=places, peaks=1.1 * known.tensor_bytes[places] + 40 * MIB)
    wild = correct(known, seen=places, peaks=known.tensor_bytes[places] * np.where(places % 2, 1.4, 0.8))
    assert wild.residual > 2 * calm.residual


def test_what_surely_does_not_fit_is_never_run():
    known = cast()
    encoded = encode(SPACE, known)
    limit = FACTS.workload.limit_bytes
    out = excluded(encoded, [], limit)
    assert out.any()
    assert not out.all()
    assert all(truth(plan) > limit for plan, gone in zip(SPACE.plans, out, strict=True) if gone)
    assert not excluded(encode(SPACE), [], limit).any()


def test_a_plan_without_a_trace_is_not_excluded():
    known = cast(untraced=range(len(SPACE.plans)))
    assert not excluded(encode(SPACE, known), [], MIB).any()


def test_the_first_trial_is_the_largest_micro_batch_that_surely_fits():
    sampler = AutofitSampler(SPACE, limit_bytes=FACTS.workload.limit_bytes, forecast=cast())
    first = SPACE.plans[sampler.advise([]).place]
    assert truth(first) <= FACTS.workload.limit_bytes
    assert first["micro_batch"] > 1
    blind = AutofitSampler(SPACE, limit_bytes=FACTS.workload.limit_bytes)
    assert SPACE.plans[blind.advise([]).place]["micro_batch"] <= first["micro_batch"]


@pytest.mark.parametrize("limit_gib", [6, 8, 12, 16])
def test_few_trials_run_out_of_memory(tmp_path, limit_gib):
    facts = cpu_facts(limit_bytes=limit_gib * GIB)
    land = Landscape(facts=facts, overhead_seconds=0.4, row_seconds=0.4, row_bytes=0.4 * GIB)
    searcher = open_searcher(tmp_path, SPACE, facts, forecast=cast())
    trials = []
    while (plan := searcher.ask()) is not None and len(trials) < 40:
        number = len(trials)
        trials.append(Trial(number=number, plan=plan, outcome=land.outcome(plan, number), wall_seconds=1.0))
        searcher.tell(trials[-1])
    broke = sum(trial.outcome.kind == "out_of_memory" for trial in trials)
    assert broke <= 1 + len(trials) // 10
    fitting = [land.outcome(plan, 0) for plan in SPACE.plans]
    best = max(one.samples_per_second for one in fitting if one.kind == "measured")
    found = max(t.outcome.samples_per_second for t in trials if t.outcome.kind == "measured")
    assert found >= 0.95 * best
    assert searcher.correction().count == len(trials) - broke


def test_the_correction_uses_what_was_needed_not_what_was_kept():
    seen = [Seen(place=place, verdict="measured", seconds=1.0, peak_bytes=9e9, needed_bytes=1e9) for place in range(3)]
    seen.append(Seen(place=4, verdict="out_of_memory", peak_bytes=8e9))
    line = corrected(cast(), seen)
    assert line.count == 3
    assert float(line.mean[1]) < BESIDE.slope * 2


def test_nothing_fits_is_said_before_anything_is_run(tmp_path):
    facts = cpu_facts(limit_bytes=200 * MIB)
    searcher = open_searcher(tmp_path, SPACE, facts, forecast=cast())
    assert searcher.ask() is None
    assert "by its trace" in searcher.stopped
    tune = tuning._Tune(tmp_path, None, None, None, None)
    refusal = tune._nothing(facts, SPACE, cast())
    assert isinstance(refusal, NothingFits)
    assert "smallest needs about" in refusal.message
    assert "--memory-limit" in refusal.message


def test_a_tune_goes_on_without_a_forecast(tmp_path, monkeypatch):
    said = []

    class Events:
        note = staticmethod(said.append)

    def fail(*_, **__):
        raise MachineError("the disk is full")

    monkeypatch.setattr(tuning, "forecast", fail)
    config = tmp_path / "model"
    config.mkdir()
    (config / "config.json").write_text("{}")
    tune = tuning._Tune(tmp_path, None, None, Events(), None)
    assert tune._forecast(SPACE, FACTS, config, None) is None
    assert "the disk is full" in said[0]


def test_each_trial_knows_what_was_predicted():
    told = tuning.predicted(SPACE, cast(untraced=[0]))
    assert SPACE.plans[0] not in told
    assert told[SPACE.plans[1]] == round(float(cast().device_bytes[1]))
    assert tuning.predicted(SPACE, None) == {}
