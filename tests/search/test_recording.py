"""What is recorded of a space, and the machine that is played from it."""

import dataclasses
import gzip
import json

import numpy as np
import pytest

import autofit
from autofit import space
from autofit.contract.outcome import Crashed, Measured, OutOfMemory, Trial, Unsupported
from autofit.contract.plan import Plan
from autofit.costmodel.forecast import Forecast, peak_prior
from autofit.costmodel.seconds.roofline import WORK
from autofit.machine.packages import installed
from autofit.search.recordings import landscape, writer
from autofit.search.recordings.landscape import Landscape
from autofit.search.recordings.replay import Replay
from autofit.search.recordings.writer import Writer
from autofit.system.errors import InputError
from autofit.training.timing import Effort
from tests.support.replay import Recorded
from tests.support.synthetic import GIB, cpu_facts, measured
from tests.support.synthetic import Landscape as Synthetic
from tests.support.tiny import LANDSCAPES

LIMIT = 30 * GIB


@pytest.fixture(scope="module")
def facts():
    return cpu_facts(limit_bytes=LIMIT)


@pytest.fixture(scope="module")
def plans(facts):
    return space.build(facts)


@pytest.fixture
def recorded(tmp_path, facts, plans):
    """A landscape of three rounds in a file."""
    return record(tmp_path / "land.jsonl", facts, plans)


def record(path, facts, plans, rounds=3, **shape):
    truth = Synthetic(facts=facts, **{"noise": 0.03, "row_bytes": 0.3 * GIB, **shape})
    prior = peak_prior(facts.hardware)
    tensors = np.array([(truth.peak_bytes(plan) - prior.offset_bytes) / prior.slope for plan in plans.plans])
    nothing = np.full(len(tensors), np.nan)
    work = np.full((len(tensors), len(WORK)), np.nan)
    nominal = np.ones(len(WORK))
    cast = Forecast(
        tensor_bytes=tensors,
        seconds=nothing,
        work=work,
        nominal=nominal,
        known_card=False,
        timed=False,
        approximate=np.zeros(len(tensors), dtype=bool),
        peak_prior=prior,
        kernel_overhead_bytes=np.zeros(len(tensors)),
        activation_bytes=np.arange(len(tensors), dtype=float),
    )
    writer = Writer(path, facts, plans, cast, {"machine": "none"})
    for turn in range(rounds):
        for number, plan in enumerate(plans.plans):
            trial = truth.trial(plan, turn * len(plans.plans) + number)
            writer.add(dataclasses.replace(trial, wall_seconds=2 + trial.outcome.training_seconds))
    return path


def test_what_is_written_is_read(recorded, facts, plans):
    found = Landscape.read(recorded)
    assert found.facts == facts
    assert found.provenance == {"machine": "none"}
    assert set(found.runs) == set(plans.plans)
    assert {len(runs) for runs in found.runs.values()} == {3}
    assert found.space.domains == plans.domains
    assert found.space.plans == plans.plans
    assert found.space.priors == plans.priors
    one = found.runs[plans.plans[0]][0]
    assert one.predicted_bytes == pytest.approx(found.forecast.device_bytes[0], abs=2)
    np.testing.assert_allclose(found.forecast.tensor_bytes, [r[0].traced_bytes for r in map(found.of, plans.plans)])
    np.testing.assert_allclose(found.forecast.activation_bytes, np.arange(len(plans.plans)))
    assert 0.005 < found.noise < 0.03


@pytest.mark.parametrize("rounds", [2, 3, pytest.param(6, marks=pytest.mark.slow)])
def test_noise_does_not_depend_on_how_often_a_plan_was_measured(tmp_path, facts, plans, rounds):
    found = Landscape.read(record(tmp_path / "land.jsonl", facts, plans, rounds))
    quiet = Synthetic(facts=facts, noise=0.0, row_bytes=0.3 * GIB)
    apart = [
        abs(run.outcome.step_seconds / quiet.outcome(plan, 0).step_seconds - 1)
        for plan, runs in found.runs.items()
        for run in runs
        if run.outcome.kind == "measured"
    ]
    assert found.noise == pytest.approx(np.median(apart), rel=0.15)


def test_one_measurement_of_each_plan_tells_no_noise(tmp_path, facts, plans):
    assert Landscape.read(record(tmp_path / "land.jsonl", facts, plans, 1)).noise == 0


def test_a_packed_one_says_the_same(recorded, tmp_path):
    writer.pack(recorded, tmp_path / "land.jsonl.gz")
    assert (tmp_path / "land.jsonl.gz").stat().st_size < recorded.stat().st_size / 5
    one, other = Landscape.read(recorded), Landscape.read(tmp_path / "land.jsonl.gz")
    assert (one.runs, one.facts, one.provenance) == (other.runs, other.facts, other.provenance)


def test_a_gzipped_file_is_appended_to(tmp_path, facts, plans):
    path = tmp_path / "land.jsonl.gz"
    for _ in range(2):
        record(path, facts, dataclasses.replace(plans, plans=plans.plans[:3]), rounds=1)
    assert {len(runs) for runs in Landscape.read(path).runs.values()} == {2}
    assert len(gzip.decompress(path.read_bytes()).splitlines()) == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no measurement"),
        ("nonsense\n", "is no landscape"),
        ("[1]\n", "is no landscape"),
        ('{"facts": {}}\n', "is no landscape"),
        ('{"plan": {}, "wall_seconds": 1}\n', "is no landscape"),
    ],
)
def test_what_is_no_landscape_is_refused(tmp_path, text, words):
    path = tmp_path / "land.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        Landscape.read(path)


@pytest.mark.parametrize("place", ["line", "facts", "model", "run", "outcome"])
def test_a_key_that_is_not_known_is_refused(recorded, place):
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    {
        "line": lines[0],
        "facts": lines[0]["facts"],
        "model": lines[0]["facts"]["model"],
        "run": lines[1],
        "outcome": lines[1]["outcome"],
    }[place]["fetched_bytes"] = 1
    recorded.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InputError, match="fetched_bytes is not a known key"):
        Landscape.read(recorded)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="is no landscape"):
        Landscape.read(tmp_path / "none.jsonl.gz")


def test_two_questions_in_one_file_are_refused(recorded, plans):
    record(recorded, cpu_facts(limit_bytes=LIMIT, seq_len=64), plans, rounds=1)
    with pytest.raises(InputError, match="another model, device or workload"):
        Landscape.read(recorded)


def test_a_ceiling_cuts_what_needs_more(recorded):
    found = Landscape.read(recorded)
    plan = max(found.runs, key=lambda plan: landscape.needed(found.of(plan)[0].outcome))
    need = landscape.needed(found.of(plan)[0].outcome)
    for limit, kind in ((need, Measured), (need - 1, OutOfMemory)):
        replay = Replay(found, limit)
        trial = replay.run(0, plan, Effort(), purpose="search", limit_seconds=9)
        assert isinstance(trial.outcome, kind)
        assert trial.outcome.limit_bytes == limit
        assert trial.outcome.peak_bytes <= limit
        assert found.fits(plan, limit) == (kind is Measured)
    cheap = Replay(found, need - 1)
    cheap.run(0, plan, Effort(), purpose="search", limit_seconds=9)
    assert 0 < cheap.seconds <= replay.seconds


def test_what_the_allocator_only_kept_is_given_back(tmp_path, facts, plans):
    plan = plans.plans[0]
    outcome = measured(
        [1.0, 1.1, 0.9], 9 * GIB, facts, allocated_bytes=4 * GIB, reserved_bytes=8 * GIB, outside_bytes=GIB
    )
    path = tmp_path / "land.jsonl"
    Writer(path, facts, plans).add(Trial(number=0, plan=plan, outcome=outcome, wall_seconds=4.0))
    found = Landscape.read(path)
    assert found.forecast is None
    assert found.fits(plan, 5 * GIB)
    assert not found.fits(plan, 5 * GIB - 1)
    replayed = Replay(found, 6 * GIB).run(0, plan, Effort(), purpose="search", limit_seconds=9).outcome
    assert replayed.peak_bytes == 6 * GIB


def test_trials_draw_from_what_was_measured(recorded):
    found = Landscape.read(recorded)
    plan = found.best(LIMIT)
    replay = Replay(found, seed=3)
    trials = [replay.run(n, plan, Effort(), purpose="search", limit_seconds=9) for n in range(30)]
    seen = {trial.outcome.steps for trial in trials}
    assert seen == {run.outcome.steps for run in found.of(plan)}
    assert replay.seconds == pytest.approx(sum(trial.wall_seconds for trial in trials))
    again = Replay(found, seed=3)
    assert [again.run(n, plan, Effort(), purpose="search", limit_seconds=9) for n in range(30)] == trials
    assert found.seconds(plan) == sorted(run.outcome.step_seconds for run in found.of(plan))[1]


def test_a_hopeless_trial_is_cut_off(recorded):
    found = Landscape.read(recorded)
    plan = found.best(LIMIT)
    whole, cut = (Replay(found).run(0, plan, effort, purpose="search", limit_seconds=9)
                  for effort in (Effort(), Effort(hopeless_seconds=1e-6)))  # fmt: skip
    assert cut.outcome.steps == whole.outcome.steps[:2]
    assert cut.wall_seconds < whole.wall_seconds


def test_failures_are_played_back(tmp_path, facts, plans):
    path = tmp_path / "land.jsonl"
    writer, plan = Writer(path, facts, plans), plans.plans[0]
    writer.add(Trial(number=0, plan=plan, outcome=Crashed(reason="no"), wall_seconds=4.0))
    found = Landscape.read(path)
    trial = Replay(found).run(0, plan, Effort(), purpose="search", limit_seconds=9)
    assert trial.outcome == Crashed(reason="no")
    assert found.best(LIMIT) is None
    assert not found.fits(plan, LIMIT)
    other = Replay(found).run(0, plans.plans[1], Effort(), purpose="search", limit_seconds=9)
    assert isinstance(other.outcome, Unsupported)


def test_knobs_that_were_not_known_count_where_they_are_plain(tmp_path, facts, plans):
    plan = plans.plans[0]
    less = Plan({name: value for name, value in plan.items() if name != "offload"})
    path = tmp_path / "land.jsonl"
    Writer(path, facts, plans).add(
        Trial(number=0, plan=less, outcome=measured([1.0, 1.0], GIB, facts), wall_seconds=4.0)
    )
    found = Landscape.read(path)
    assert found.of(plan) == found.of(less) != ()
    assert found.of(plan.replaced(offload="optimizer")) == ()
    assert "offload" not in found.space.domains


def test_a_recording_that_is_gone_on_with_knows_the_plans_of_before(tmp_path, facts, plans):
    plan = plans.plans[0]
    less = Plan({name: value for name, value in plan.items() if name != "offload"})
    path = tmp_path / "land.jsonl"
    for one in (less, plan, plan.replaced(offload="optimizer")):
        trial = Trial(number=0, plan=one, outcome=measured([1.0, 1.0], GIB, facts), wall_seconds=4.0)
        Writer(path, facts, plans).add(trial)
    found = Landscape.read(path)
    assert len(found.runs) == 2
    assert [run.plan for run in found.of(plan)] == [plan, plan]


@pytest.mark.slow
def test_a_tune_cannot_tell_the_difference(server, recorded, tmp_path):
    found = Landscape.read(recorded)
    peaks = sorted(landscape.needed(runs[0].outcome) for runs in found.runs.values())
    limit = peaks[len(peaks) // 2]
    replay = Replay(found, limit)
    result = autofit.tune("demo", output=tmp_path / "out", backend=Recorded(server, replay))
    assert result.document.hardware == found.facts.hardware
    assert result.promise.limit_bytes == limit
    assert found.fits(result.plan, limit)
    assert found.seconds(result.plan) <= 1.05 * found.seconds(found.best(limit))
    assert any(trial.predicted_bytes for trial in result.document.trials)
    assert json.loads((tmp_path / "out" / "autofit.json").read_text())["plan"] == dict(result.plan)


RECORDED = sorted(LANDSCAPES.glob("*.jsonl.gz"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.partition(".")[0])
def test_a_recorded_landscape_is_whole(path):
    found = Landscape.read(path)
    assert len(found.runs) >= 500
    assert all(len(runs) >= 3 for runs in found.runs.values())
    assert {"recorded", "machine", "command", "config"} <= set(found.provenance)
    assert found.noise < 0.1
    assert not np.isnan(found.forecast.work).any()
    assert not np.isnan(found.forecast.tensor_bytes).any()
    whole = max(landscape.needed(run.outcome) for runs in found.runs.values() for run in runs if measurable(run))
    assert found.best(whole) is not None


def measurable(run):
    return isinstance(run.outcome, Measured)


def test_a_tune_finds_the_best_of_a_recorded_landscape(server, tmp_path):
    found = Landscape.read(next(path for path in RECORDED if path.name.startswith("llama")))
    here = dataclasses.replace(found.facts, packages=installed())  # what is written is for these
    found = dataclasses.replace(found, facts=here)
    limit = found.facts.workload.limit_bytes
    result = autofit.tune(
        "demo", output=tmp_path / "out", backend=Recorded(server, Replay(found, limit)), allow="exact,numeric,method"
    )
    assert found.seconds(result.plan) <= 1.1 * found.seconds(found.best(limit))
    assert len({trial.plan for trial in result.document.trials}) <= 25
    assert any(", and 10.6 MiB for the kernels of bf16, give or take" in note for note in result.document.notes)
