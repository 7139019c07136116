import contextlib
import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading

import optuna
import pytest
from optuna.trial import TrialState

from autofit import space
from autofit.contract.outcome import Crashed, TimedOut, Trial
from autofit.contract.plan import Plan
from autofit.search.journal import JOURNAL_FILE, JournalLock, repair
from autofit.search.study import distributions, open_study, tell_trial
from autofit.system.errors import InputError, MachineError
from tests.support.synthetic import GIB, Landscape, cpu_facts, measured, out_of_memory

FACTS = cpu_facts(limit_bytes=16 * GIB)
SPACE = space.build(FACTS)
LAND = Landscape(facts=FACTS, overhead_seconds=0.4, row_seconds=0.4, row_bytes=0.4 * GIB)


def opened(folder, trials=(), storage=None, plans=SPACE, sampler=None):
    return open_study(
        folder,
        storage=storage,
        sampler=sampler or optuna.samplers.RandomSampler(seed=0),
        trials=trials,
        space=plans,
        limit_bytes=FACTS.workload.limit_bytes,
    )


def some_trials(count=3):
    return [LAND.trial(plan, number) for number, plan in enumerate(SPACE.plans[:count])]


def numbers(study):
    return [trial.user_attrs["number"] for trial in study.trials]


def test_trials_become_a_study_and_stay_one(tmp_path):
    trials = some_trials()
    final = Trial(number=9, plan=trials[0].plan, outcome=trials[0].outcome, wall_seconds=1.0, purpose="final")
    first = opened(tmp_path, [*trials, final])
    assert numbers(first) == [0, 1, 2]
    assert first.direction.name == "MAXIMIZE"
    again = opened(tmp_path, trials)
    assert [one.params for one in again.trials] == [dict(trial.plan) for trial in trials]
    assert again.trials[0].value == trials[0].outcome.samples_per_second
    assert again.trials[0].constraints["memory"] < 0


def test_a_missing_trial_is_added(tmp_path):
    trials = some_trials(4)
    opened(tmp_path, trials[:2])
    assert numbers(opened(tmp_path, trials)) == [0, 1, 2, 3]


def test_a_running_trial_is_told_to_have_failed(tmp_path):
    study = opened(tmp_path)
    study.ask(dict(distributions(SPACE)))
    again = opened(tmp_path)
    assert [trial.state for trial in again.trials] == [TrialState.FAIL]


@pytest.mark.parametrize(
    ("outcome", "state", "constraint"),
    [
        (measured((1.0, 1.0), 8 * GIB, FACTS), TrialState.COMPLETE, -0.5),
        (out_of_memory(FACTS, peak_bytes=15 * GIB), TrialState.PRUNED, 0.01),
        (out_of_memory(FACTS, peak_bytes=24 * GIB), TrialState.PRUNED, 0.5),
        (TimedOut(limit_seconds=1.0, phase="forward"), TrialState.PRUNED, None),
        (Crashed(reason="signal 11"), TrialState.FAIL, None),
    ],
)
def test_how_an_outcome_is_told(tmp_path, outcome, state, constraint):
    trial = Trial(number=0, plan=SPACE.plans[0], outcome=outcome, wall_seconds=1.0)
    added = opened(tmp_path / "added", [trial])
    asked_of = opened(tmp_path / "told")
    asked_of.enqueue_trial(dict(trial.plan))
    asked = asked_of.ask(dict(distributions(SPACE)))
    tell_trial(asked_of, asked, trial, FACTS.workload.limit_bytes)
    for study in (added, asked_of):
        (one,) = study.trials
        assert one.state == state
        assert one.constraints.get("memory") == constraint
        assert one.user_attrs["kind"] == outcome.kind
        assert one.user_attrs["plan"] == dict(trial.plan)


@pytest.mark.parametrize(
    "tail",
    [b'{"op_code": 4, "wor', b"\x00\x00\x00\x00", b"not json\n", b'[1, 2]\n{"op_code": 0}\n', b"\xff\xfe\n", b"\n"],
)
def test_what_is_no_whole_line_is_cut(tmp_path, tail):
    path = tmp_path / JOURNAL_FILE
    trials = some_trials()
    opened(tmp_path, trials)
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(tail)
    said = repair(path)
    assert said is not None
    assert f"{len(tail)} bytes" in said
    assert path.read_bytes() == whole
    assert repair(path) is None


def test_a_torn_line_does_not_stop_a_resume(tmp_path):
    path = tmp_path / JOURNAL_FILE
    trials = some_trials()
    opened(tmp_path, trials)
    for length in range(path.stat().st_size, 0, -97):
        os.truncate(path, length)
        assert numbers(opened(tmp_path, trials)) == [0, 1, 2]
    assert not list(tmp_path.glob("*.broken-*"))


def test_a_missing_journal_needs_no_repair(tmp_path):
    assert repair(tmp_path / JOURNAL_FILE) is None


@pytest.mark.parametrize("line", ['{"op_code": 99, "worker_id": "x"}', '{"other": 1}', '{"op_code": 4}'])
def test_a_journal_of_another_make_is_set_aside(tmp_path, line):
    path = tmp_path / JOURNAL_FILE
    for number in (1, 2):
        path.write_text(line + "\n")
        study = opened(tmp_path, some_trials())
        assert numbers(study) == [0, 1, 2]
        assert (tmp_path / f"{JOURNAL_FILE}.broken-{number}").read_text() == line + "\n"


def test_a_journal_that_tells_another_story_is_set_aside(tmp_path):
    opened(tmp_path, some_trials(3))
    other = Trial(number=1, plan=SPACE.plans[-1], outcome=LAND.outcome(SPACE.plans[-1]), wall_seconds=1.0)
    study = opened(tmp_path, [other])
    assert [trial.params for trial in study.trials] == [dict(other.plan)]
    assert (tmp_path / f"{JOURNAL_FILE}.broken-1").exists()


def test_another_space_begins_another_journal(tmp_path):
    trials = some_trials(3)
    opened(tmp_path, trials)
    narrow = space.build(FACTS, given={"micro_batch": (1, 2)})
    study = opened(tmp_path, trials, plans=narrow)
    fitting = [trial.number for trial in trials if trial.plan in set(narrow.plans)]
    assert numbers(study) == fitting
    assert (tmp_path / f"{JOURNAL_FILE}.broken-1").exists()


@pytest.mark.slow
def test_a_database_holds_a_study_per_folder(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    trials = some_trials()
    first = opened(tmp_path / "a", trials, url)
    second = opened(tmp_path / "b", trials[:1], url)
    assert first.study_name != second.study_name
    assert numbers(opened(tmp_path / "a", trials, url)) == [0, 1, 2]
    assert not (tmp_path / "a" / JOURNAL_FILE).exists()
    other = opened(tmp_path / "a", [], url)
    assert other.study_name == f"{first.study_name}-2"
    assert other.trials == []
    assert numbers(optuna.load_study(study_name=first.study_name, storage=url)) == [0, 1, 2]


@pytest.mark.parametrize("url", ["nonsense", "redis://localhost", "nosuch://x/y", "sqlite:////no/such/folder/x.db"])
def test_a_bad_storage_url_is_refused(tmp_path, url):
    with pytest.raises(InputError, match="--storage") as caught:
        opened(tmp_path, storage=url)
    assert caught.value.hint


def test_a_folder_that_cannot_be_made_is_the_machine(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="can't be read or written") as caught:
        opened(tmp_path / "file" / "out")
    assert "--resume" in caught.value.hint


def test_a_disk_that_takes_no_more_is_the_machine(tmp_path):
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, usual[1]))
    try:
        with pytest.raises(MachineError, match="File too large"):
            opened(tmp_path, some_trials())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert numbers(opened(tmp_path, some_trials())) == [0, 1, 2]


def test_optuna_is_quiet_and_its_settings_stay(tmp_path, caplog):
    logger = logging.getLogger("optuna")
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "optuna"):
        opened(tmp_path, some_trials())
        assert logger.level == logging.DEBUG
    assert [record for record in caplog.records if record.levelno < logging.WARNING] == []


HOLDER = """
import sys, time
from pathlib import Path
from autofit.search.journal import JournalLock
JournalLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_dies_with_its_process(tmp_path):
    path = tmp_path / "x.lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        waiter = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
        try:
            assert select.select([waiter.stdout], [], [], 2.0)[0] == []
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            assert waiter.stdout.readline() == "held\n"
        finally:
            waiter.kill()
            waiter.communicate()
    finally:
        holder.kill()
        holder.communicate()


def test_a_lock_that_is_left_over_does_not_matter(tmp_path):
    path = tmp_path / "x.lock"
    path.write_text("")
    lock = JournalLock(path)
    for _ in range(2):
        assert lock.acquire()
        lock.release()


def test_a_lock_excludes_its_own_threads_and_others(tmp_path):
    path = tmp_path / "counter"
    path.write_text("0")
    lock = JournalLock(tmp_path / "x.lock")
    other = JournalLock(tmp_path / "x.lock")

    def count(mine):
        for _ in range(50):
            mine.acquire()
            path.write_text(str(int(path.read_text()) + 1))
            mine.release()

    threads = [threading.Thread(target=count, args=(mine,)) for mine in (lock, lock, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() == "150"


def test_a_lock_in_a_missing_folder_lets_go(tmp_path):
    lock = JournalLock(tmp_path / "missing" / "x.lock")
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            lock.acquire()


def test_journal_lines_are_json_objects(tmp_path):
    opened(tmp_path, some_trials())
    lines = (tmp_path / JOURNAL_FILE).read_text().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines)


def test_a_plan_outside_the_space_is_left_out(tmp_path):
    strange = Trial(number=0, plan=Plan({"other": 1}), outcome=Crashed(reason="x"), wall_seconds=1.0)
    assert opened(tmp_path, [strange]).trials == []


def test_a_foreign_or_damaged_database_is_refused_in_a_line_and_left_as_it_is(tmp_path):
    import sqlite3

    foreign, damaged, whole = (tmp_path / name for name in ("foreign.db", "damaged.db", "whole.db"))
    with contextlib.closing(sqlite3.connect(foreign)) as base:
        base.execute("create table people (name text)")
    damaged.write_bytes(b"no database at all" * 100)
    opened(tmp_path, storage=f"sqlite:///{whole}")
    torn = whole.read_bytes()
    whole.write_bytes(torn[:4096] + b"\xff" * (len(torn) - 4096))
    for path, words in ((foreign, "holds the tables people"), (damaged, "not a database"), (whole, "can't be used")):
        before = path.read_bytes()
        with pytest.raises(InputError, match=words) as caught:
            opened(tmp_path, storage=f"sqlite:///{path}")
        assert len(caught.value.message.splitlines()) == 1
        assert caught.value.hint
        assert path.read_bytes() == before
