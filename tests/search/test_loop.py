"""What is not believed at once: accidents, memory that others took, spills, pauses; and what is, all the same."""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import time

import optuna
import pytest

from autofit import space
from autofit.contract.outcome import Crashed, Diverged, Evidence, Measured, OutOfMemory, TimedOut, Trial, Unsupported
from autofit.contract.script import Script
from autofit.machine import describe, meters
from autofit.search import loop, searcher
from autofit.search.decision import decide
from autofit.search.journal import JOURNAL_FILE
from autofit.search.loop import CREDIT, Campaign, doubt
from autofit.search.recordings.landscape import Landscape as Recording
from autofit.search.recordings.replay import Replay as Replayed
from autofit.search.risk import min_gain_if_infeasible
from autofit.search.samplers import make_sampler
from autofit.search.study import record
from autofit.search.surrogate.observation import Observation
from autofit.search.trial_log import TrialLog
from autofit.system.errors import MachineError
from autofit.training.runner import ProcessRunner, spilled
from tests.support.synthetic import GIB, Landscape, cpu_facts, cuda_facts, measured, out_of_memory
from tests.support.tiny import LANDSCAPES, REPOSITORY

FACTS = cpu_facts(limit_bytes=16 * GIB)
SPACE = space.build(FACTS)
LAND = Landscape(facts=FACTS, row_bytes=0.05 * GIB)
SQUEEZED = OutOfMemory(where="device", phase="forward", limit_bytes=16 * GIB, peak_bytes=GIB, external_pressure=True)
CRASH = Crashed(reason="killed by SIGKILL after step 1")
STILL = measured((0.1, 0.1, 9.0), GIB, FACTS)


def tried(outcome, number=0, plan=SPACE.plans[0], purpose="search"):
    return Trial(number=number, plan=plan, outcome=outcome, wall_seconds=1.0, purpose=purpose)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (CRASH, "trial 0 crashed (killed by SIGKILL after step 1)"),
        (Diverged(loss="nan", step=1), "the loss of trial 0 was not finite"),
        (TimedOut(limit_seconds=1.0, phase="step 3"), "trial 0 hung (step 3)"),
        (SQUEEZED, "trial 0 ran out of memory that other processes held"),
        (STILL, "trial 0 disturbed (the machine was paused during a step)"),
        (measured((0.1, 0.1), GIB, FACTS, disturbance=0.5), "trial 0 disturbed (other processes used 50% CPU)"),
        (out_of_memory(FACTS), None),
        (Unsupported(reason="no such kernel"), None),
        (measured((0.1, 0.1, 0.4), GIB, FACTS), None),
        (measured((0.1, 0.1, 9.0), GIB, FACTS, evidence=Evidence(recompiles=1)), None),
    ],
)
def test_what_is_doubted(outcome, words):
    assert doubt(tried(outcome)) == words


class Scripted:
    """A runner whose outcomes are given in order, and are good after them."""

    def __init__(self, *outcomes):
        self.outcomes, self.limits, self.asked = list(outcomes), [], []

    def run(self, number, plan, effort, *, purpose, limit_seconds):
        self.limits.append(limit_seconds)
        self.asked.append(plan)
        outcome = self.outcomes.pop(0) if self.outcomes else LAND.outcome(plan)
        return Trial(number=number, plan=plan, outcome=outcome, wall_seconds=2.0, purpose=purpose)


def held(*outcomes, plans=SPACE.plans[:8]):
    notes = []
    runner = Scripted(*outcomes)
    one = Campaign(facts=FACTS, space=SPACE, runner=runner, note=notes.append)
    for plan in plans:
        one.run(plan, loop.FINAL, "search")
    return one, runner, notes


def test_a_failure_is_looked_at_once_more_and_an_accident_is_forgiven():
    one, runner, notes = held(CRASH)
    assert runner.asked[:2] == [SPACE.plans[0]] * 2
    assert len(runner.asked) == 9
    assert notes == ["trial 0 crashed (killed by SIGKILL after step 1): re-measuring"]
    decision = decide(one.trials[:2], one.limit_bytes)
    assert decision.plan == SPACE.plans[0]
    assert one.credit == CREDIT


def test_an_accident_of_a_repeat_is_forgiven_too():
    one, runner, notes = held(STILL, CRASH, CRASH, plans=SPACE.plans[:1])
    assert runner.asked == [SPACE.plans[0]] * 3
    assert [note.split(" (")[0] for note in notes] == ["trial 0 disturbed", "trial 1 crashed"]
    one, runner, notes = held(STILL, CRASH, plans=SPACE.plans[:1])
    assert decide(one.trials, one.limit_bytes).plan == SPACE.plans[0]


def test_final_trials_that_differ_are_named_by_their_numbers():
    one, runner, notes = held(plans=SPACE.plans[:1])
    fast, slow = (measured((seconds,) * 3, GIB, FACTS) for seconds in (0.1, 0.5))
    runner.outcomes = [fast, slow]
    one.playoff()
    assert notes == ["trials 1 and 2 of one plan differ: other processes were running; re-measuring"]


def test_failures_that_come_again_are_not_repeated_for_ever():
    _, runner, notes = held(*[CRASH] * 99)
    assert len(notes) == CREDIT
    assert len(runner.asked) == 8 + CREDIT


def test_an_error_that_came_twice_of_one_plan_is_believed_of_the_next():
    error = Crashed(reason="RuntimeError: sizes differ")
    _, runner, notes = held(*[error] * 99)
    assert len(notes) == 1
    assert len(runner.asked) == 8 + 1


def test_credit_is_earned_again_by_trials_that_run():
    good = measured((0.1, 0.1), GIB, FACTS)
    _, runner, notes = held(*[CRASH] * 6, *[good] * 4, CRASH, good, plans=SPACE.plans[:9])
    assert len(notes) == CREDIT + 1
    assert runner.asked[6:10] == list(SPACE.plans[3:7])
    assert runner.asked[10:12] == [SPACE.plans[7]] * 2, "after four that ran an accident is forgiven again"


def test_a_quiet_moment_makes_no_winner():
    """Others take half of the machine but for one trial, and are gone when the playoff comes."""
    fastest = min(SPACE.plans, key=LAND.step_seconds)
    slower = [plan for plan in SPACE.plans if LAND.step_seconds(plan) > 1.1 * LAND.step_seconds(fastest)]
    lucky = min(slower, key=LAND.step_seconds)
    slowed = [
        measured([4 * LAND.step_seconds(plan)] * 3, GIB, FACTS, disturbance=0.5) for plan in (fastest, fastest, lucky)
    ]
    one, _, _ = held(*slowed, plans=(fastest, lucky))
    assert one.best().plan == lucky
    assert one.playoff().plan == fastest


def test_time_is_kept_for_finalists_that_run_all_of_a_script_where_other_trials_do_not():
    script = Script(path="train.py", sha256="", trainer="Trainer", micro_batch=4, accumulation=2, seconds=60.0)
    facts = dataclasses.replace(FACTS, workload=dataclasses.replace(FACTS.workload, script=script))
    quick = tried(measured((0.1, 0.1, 0.1), GIB, FACTS))
    given = {"space": SPACE, "runner": Scripted(quick.outcome), "seconds": 3600.0, "left": lambda: 200.0}
    assert not Campaign(facts=FACTS, trials=TrialLog([quick]), **given).is_spent()
    assert Campaign(facts=facts, trials=TrialLog([quick]), **given).is_spent()


def test_nothing_is_repeated_when_the_time_is_spent():
    runner = Scripted(TimedOut(limit_seconds=10.0, phase="step 2"))
    one = Campaign(facts=FACTS, space=SPACE, runner=runner, left=lambda: 1.5)
    one.run(SPACE.plans[0], loop.FINAL, "search")
    assert len(runner.asked) == 1


def test_a_plan_that_fails_twice_is_out():
    plan = SPACE.plans[0]
    good = measured((0.1, 0.1, 0.1), GIB, FACTS)
    assert decide([tried(CRASH), tried(good, 1)], 16 * GIB).plan == plan
    assert decide([tried(good), tried(CRASH, 1)], 16 * GIB) is None, "nothing was seen after it"
    assert decide([tried(CRASH), tried(good, 1), tried(CRASH, 2)], 16 * GIB) is None
    assert decide([tried(out_of_memory(FACTS)), tried(good, 1)], 16 * GIB) is None, "the ceiling was broken"
    assert decide([tried(SQUEEZED), tried(good, 1), tried(SQUEEZED, 2)], 16 * GIB).plan == plan


@pytest.mark.parametrize(
    ("facts", "share", "broken", "finals"),
    [
        (FACTS, 0.99, False, 4),
        (FACTS, 0.90, False, 2),
        (FACTS, 0.99, True, 3),
        (dataclasses.replace(cuda_facts(), workload=FACTS.workload), 0.99, False, 2),
    ],
)
def test_a_winner_near_to_the_ceiling_has_to_stand_it_for_longer(facts, share, broken, finals):
    """On a CPU, whose peaks scatter; the playoff goes on with the others where it does not."""
    tight = measured((0.1, 0.1, 0.1), int(share * 16 * GIB), facts)
    other = measured((0.2, 0.2, 0.2), GIB, facts)
    first, second = SPACE.plans[:2]

    class Near:
        def run(self, number, plan, effort, *, purpose, limit_seconds):
            again = sum(trial.plan == plan for trial in one.trials)
            outcome = tight if plan == first else other
            if broken and plan == first and again == 3:
                outcome = out_of_memory(facts)
            return Trial(number=number, plan=plan, outcome=outcome, wall_seconds=1.0, purpose=purpose)

    one = Campaign(facts=facts, space=SPACE, runner=Near())
    for plan in (first, second):
        one.run(plan, loop.FINAL, "search")
    decision = one.playoff()
    assert sum(trial.plan == first and trial.purpose == "final" for trial in one.trials) == finals
    assert decision.plan == (second if broken else first)
    assert [trial.purpose for trial in one.trials if trial.plan == second].count("final") == (2 if broken else 0)


def test_a_plan_that_may_not_fit_is_tried_where_much_is_at_stake():
    """Each out-of-memory beyond one in ten asks for twice the gain; four in a row are enough."""

    def worth(*results):
        return min_gain_if_infeasible([Observation(plan=0, result=result) for result in results])

    good, bad = "measured", "out_of_memory"
    assert worth(good, bad) == worth(good)
    assert worth(good, bad, good, bad, good, bad) == pytest.approx(2 * worth(good, bad, bad, *[good] * 3))
    assert 0 < worth(good, bad, bad, bad) < 0.2
    assert worth(good, bad, bad, bad, bad) == math.inf
    assert worth(good, bad, bad, bad, bad, good) < math.inf


@pytest.mark.parametrize("seed", [1, 8, 11])
def test_the_search_does_not_end_after_three_breaks(seed):
    """Three of the first four trials ran out of memory there; the best plan is twice as fast as the one that ran."""
    land = Recording.read(LANDSCAPES / "llama.jsonl.gz")
    limit = 31_717_038
    one = Campaign(facts=land.at(limit), space=land.space, runner=Replayed(land, limit, seed=seed))
    study = optuna.create_study(
        direction="maximize",
        sampler=make_sampler("autofit", land.space, land.at(limit), seed, land.forecast),
    )
    one.search(searcher.Searcher(land.space, study, sampler="autofit", limit_bytes=limit, forecast=land.forecast), 40)
    best = land.seconds(land.best(limit))
    assert land.seconds(one.playoff().plan) < 1.3 * best


def test_a_measurement_that_stood_still_does_not_count_where_there_is_another():
    whole = measured((0.2, 0.2, 0.2), GIB, FACTS)
    decision = decide([tried(STILL), tried(whole, 1)], 16 * GIB)
    assert decision.measured.step_seconds == pytest.approx(0.2)


def test_a_limit_follows_what_trials_take():
    _, runner, _ = held()
    assert runner.limits[0] == loop.LONGEST_TRIAL_SECONDS
    assert runner.limits[1:] == [loop.LEAST_LIMIT_SECONDS] * 7


@pytest.mark.slow
def test_memory_that_others_took_excludes_no_other_plan(tmp_path):
    found = searcher.open_searcher(tmp_path, SPACE, FACTS, sampler="grid", trials=[])
    plan = found.ask()
    found.tell(tried(SQUEEZED, plan=plan))
    family = [
        one
        for one in SPACE.plans
        if one.replaced(micro_batch=1, accumulation=1) == plan.replaced(micro_batch=1, accumulation=1)
    ]
    asked = {found.ask() for _ in range(len(SPACE.plans) - 1)}
    assert set(family) - {plan} <= asked
    assert record(tried(SQUEEZED), 16 * GIB).constraint is None


@pytest.mark.parametrize("harm", ["garbage", "deleted"])
def test_a_journal_that_is_harmed_meanwhile_is_mended(tmp_path, harm):
    known = []
    found = searcher.open_searcher(tmp_path, SPACE, FACTS, sampler="grid", trials=known)
    for number in range(2):
        plan = found.ask()
        if number == 1:
            path = tmp_path / JOURNAL_FILE
            if harm == "deleted":
                path.unlink()
            else:
                with path.open("ab") as file:
                    file.write(b"\x00 garbage\n{}\n")
        known.append(LAND.trial(plan, number))
        found.tell(known[-1])
    assert found.ask() not in {trial.plan for trial in known}
    lines = (tmp_path / JOURNAL_FILE).read_text().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines)


def test_a_folder_that_is_gone_is_not_made_again_by_the_search(tmp_path):
    folder = tmp_path / "out"
    found = searcher.open_searcher(folder, SPACE, FACTS, sampler="grid", trials=[])
    (folder / JOURNAL_FILE).unlink()
    (folder / f"{JOURNAL_FILE}.lock").unlink()
    folder.rmdir()
    with pytest.raises(MachineError, match=r"gone|can't be read"):
        found.ask()
    assert not folder.exists()


# --- memory ---------------------------------------------------------------------------------------------------------

GPU = cuda_facts()
FEW, MANY = (space.build(GPU).plans[0].replaced(micro_batch=rows, accumulation=32 // rows) for rows in (4, 16))


@pytest.mark.parametrize(
    ("peak", "seconds", "words"),
    [
        (25 * GIB, 1.0, "more than the 24.00 GiB that are there"),
        (23 * GIB, 5.0, "its steps are 5.0 times as long as with 4 rows"),
        (23 * GIB, 2.0, None),  # slower, but no cliff
        (12 * GIB, 5.0, None),  # a cliff, but room enough
    ],
)
def test_a_driver_that_spills_is_told(peak, seconds, words):
    known = [tried(measured((1.0, 1.0, 1.0), 8 * GIB, GPU), plan=FEW)]
    said = spilled(MANY, measured((seconds,) * 3, peak, GPU), known, GPU)
    assert (words in said) if words else said is None


def test_a_cliff_beside_a_busy_neighbour_is_no_spill():
    known = [tried(measured((1.0, 1.0, 1.0), 8 * GIB, GPU), plan=FEW)]
    assert spilled(MANY, measured((5.0,) * 3, 23 * GIB, GPU, disturbance=0.6), known, GPU) is None


@pytest.fixture
def on_gpu(tmp_path, monkeypatch):
    """A runner for a device whose use is played."""
    used = {"bytes": GPU.hardware.others_bytes}
    monkeypatch.setattr("autofit.training.runner.device_used_bytes", lambda _: used["bytes"])
    notes = []
    runner = ProcessRunner(tmp_path / "trials", GPU, tmp_path, None, note=notes.append)
    return runner, used, notes


def test_a_process_that_takes_the_device_is_reported_once(on_gpu):
    runner, used, notes = on_gpu
    runner.settle(0.0)
    assert notes == []
    used["bytes"] = 12 * GIB
    for _ in range(2):
        runner.settle(0.1)
    (note,) = notes
    assert "another process took memory of Synthetic GPU: 12.00 GiB are free, where 22.00 GiB were" in note


def test_memory_that_comes_back_is_waited_for_and_not_reported(on_gpu):
    runner, used, notes = on_gpu
    reads = iter([12 * GIB] * 3 + [0] * 9)
    runner.free_bytes = lambda: GPU.hardware.total_bytes - next(reads)
    began = time.monotonic()
    runner.settle(30.0)
    assert time.monotonic() - began < 10
    assert notes == []
    assert used


@pytest.mark.parametrize(
    ("used", "peak", "squeezed"),
    [
        (0, 21.9, False),  # the plan's own
        (0, 12.0, True),  # the driver refused below the ceiling: it was taken, and is back
        (12, 21.9, True),
        (12, 22.5, False),
    ],
)
def test_whose_memory_ran_out(on_gpu, used, peak, squeezed):
    runner, now, _ = on_gpu
    now["bytes"] = used * GIB
    outcome = out_of_memory(GPU, peak_bytes=peak * GIB)
    assert runner._external_pressure(FEW, outcome, killed=False).external_pressure is squeezed


def test_a_kill_for_memory_of_a_plan_that_needs_little_is_doubted(on_gpu):
    runner, _, _ = on_gpu
    killed = out_of_memory(GPU, peak_bytes=22 * GIB)
    assert not runner._external_pressure(FEW, killed, killed=True).external_pressure
    runner.predicted = {FEW: 2 * GIB}
    assert runner._external_pressure(FEW, killed, killed=True).external_pressure


def test_a_folder_that_is_another_is_not_written_into(on_gpu, tmp_path):
    runner, _, _ = on_gpu
    tmp_path.rename(tmp_path.with_name("moved"))
    tmp_path.mkdir()
    with pytest.raises(MachineError, match="was deleted or moved"):
        runner.run(0, FEW, loop.FINAL, purpose="search", limit_seconds=1.0)
    assert list(tmp_path.iterdir()) == []


def test_the_control_groups_of_a_process_are_its_own_and_those_around():
    groups = list(meters.control_groups())
    for inner, outer in itertools.pairwise(groups):
        assert outer == inner.parent or len(outer.parts) <= len(inner.parts)
    total, free = describe.host_memory()
    assert 0 < free <= total


def test_the_limit_of_a_control_group_is_seen():
    group = f"/sys/fs/cgroup/memory/autofit-test-{os.getpid()}"
    try:
        os.mkdir(group)  # noqa: PTH102
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    code = (
        f"from pathlib import Path; Path({group!r}, 'memory.limit_in_bytes').write_text(str(512 << 20)); "
        f"Path({group!r}, 'cgroup.procs').write_text('0')\n"
        "from autofit.machine.describe import host_memory; print(*host_memory())"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=120
        )
        total, free = map(int, done.stdout.split())
    finally:
        os.rmdir(group)  # noqa: PTH106
    assert total == 512 << 20
    assert 0 < free < total


def test_a_paused_measurement_survives_its_json():
    assert Measured(**{field.name: getattr(STILL, field.name) for field in dataclasses.fields(STILL)}).paused
