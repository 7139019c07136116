"""The real command line, stopped in every way that it can be stopped, and gone on with."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from autofit.contract.outcome import Crashed, Measured
from autofit.output.document import read_document
from autofit.training.runner import finished
from tests.support.scripted import SCRIPTS, tiny_bert
from tests.support.tiny import REPOSITORY, alive, gone, offspring, wait_until, write_config

pytestmark = pytest.mark.slow
PATIENT = 240.0
TRIALS = 5
NAMES = ("config", "classify.py", "loop.py")


def of(*names, ci=()):
    """What is tuned: a model from its config; a script, whose trials are forked from one run; one that each runs."""
    every = [pytest.param(name, marks=() if name in ci else pytest.mark.by_hand) for name in names or NAMES]
    return pytest.mark.parametrize("target", every, indirect=True)


@pytest.fixture
def target(request, tmp_path):
    """What stands on the command line before and behind the options."""
    name = getattr(request, "param", "config")
    if name == "config":
        return [str(write_config(tmp_path / "tiny", vocab_size=1024)), "--global-batch", "4"], []
    return [str(SCRIPTS / name)], ["--", "--model", str(tiny_bert(tmp_path / "tiny")), "--accumulate", "1"]


@pytest.fixture
def start(target, tmp_path):
    """Starts `autofit tune` as a shell does; what is still there at the end of a test is killed."""
    started = []

    def run(output, *options):
        locks = tmp_path / "tmp"  # the device's lock lies there: two tests must not wait for one another
        locks.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "AUTOFIT_LOCKS": str(locks),
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",  # threads that wait for one another crawl where others compute too
        }
        what, arguments = target
        command = [
            sys.executable, "-m", "autofit.cli", "tune", *what, "--output", str(output), "--json",
            "--trials", str(TRIALS), *options, *arguments,
        ]  # fmt: skip
        name = f"{len(started)}-{output.name}"
        with (tmp_path / f"{name}.out").open("wb") as out, (tmp_path / f"{name}.err").open("wb") as err:
            process = subprocess.Popen(
                command,
                cwd=tmp_path,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        process.said = (tmp_path / f"{name}.err").read_text
        process.printed = (tmp_path / f"{name}.out").read_text
        started.append(process)
        return process

    yield run
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            for pid in offspring(process.pid):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


def running(process, output):
    """The number and the pid of the trial that runs now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for pid in offspring(process.pid):
            with contextlib.suppress(OSError):
                log = re.fullmatch(r"(.*)/trials/(\d+)/stdout\.log", str(Path(f"/proc/{pid}/fd/1").readlink()))
                if log and log[1] == str(output.resolve()):
                    return int(log[2]), pid
    return None


def in_the_middle(process, output, after=2):
    """Waits until a trial runs that is not one of the first ones; its number and pid, and those of all processes."""

    def found():
        assert process.poll() is None, process.said()
        trial = running(process, output)
        return trial if trial and trial[0] >= after else None

    number, pid = wait_until(found, PATIENT, "a running trial")
    return number, pid, offspring(process.pid)


def end(process):
    return process.wait(PATIENT)


def trials_of(output):
    return list(finished(output / "trials"))


def check_nothing_was_measured_twice(trials):
    """No plan twice in the search; but one that was measured beside a busy neighbour is, at once."""
    assert [trial.number for trial in trials] == list(range(len(trials)))
    seen = set()
    for before, trial in zip([None, *trials], trials, strict=False):
        if trial.purpose == "final":
            continue
        repeated = (
            before is not None
            and before.plan == trial.plan
            and isinstance(before.outcome, Measured)
            and before.outcome.disturbed
        )
        assert repeated or trial.plan not in seen, f"trial {trial.number} is one that was there before"
        seen.add(trial.plan)


def check_answer(output):
    document = read_document(output)
    for name in ("accelerate.yaml", "training_args.json", "report.html", "model/config.json"):
        assert (output / name).stat().st_size
    assert not (output / ".emitting").exists()
    assert document.plan in [trial.plan for trial in trials_of(output)]
    return document


def check_resume(start, output):
    """Goes on with what is there to the end; all of it is kept, and nothing is done again."""
    before = trials_of(output)
    files = {trial.number: output / "trials" / f"{trial.number:05d}" / "trial.json" for trial in before}
    bytes_before = {number: path.read_bytes() for number, path in files.items()}
    process = start(output, "--resume")
    assert end(process) == 0, process.said()
    after = trials_of(output)
    assert len(after) > len(before)
    assert {number: path.read_bytes() for number, path in files.items()} == bytes_before
    check_nothing_was_measured_twice(after)
    assert any(trial.purpose == "final" for trial in after)
    assert json.loads(process.printed()) == json.loads((output / "autofit.json").read_text())
    document = check_answer(output)
    assert document.trials == tuple(after)
    with (output / "journal.log").open() as lines:
        assert all(json.loads(line) for line in lines)


def no_words_of_a_bug(process):
    assert "Traceback" not in process.said(), process.said()


@of(ci={"config"})
def test_ctrl_c_in_the_middle_writes_the_best_so_far_and_resume_goes_on(start, tmp_path):
    output = tmp_path / "out"
    process = start(output)
    _, _, started = in_the_middle(process, output)
    os.killpg(process.pid, signal.SIGINT)
    assert end(process) == 130
    assert gone(*started)
    no_words_of_a_bug(process)
    assert "error: stopped by Ctrl-C" in process.said()
    assert f"hint: the best so far is in {output}; go on with --resume" in process.said()
    assert json.loads(process.printed()) == json.loads((output / "autofit.json").read_text())
    document = check_answer(output)
    assert "stopped before its end: this is the best of what was measured until then" in document.notes
    check_resume(start, output)


@of()
def test_sigterm_in_the_middle_writes_the_best_so_far(start, tmp_path):
    output = tmp_path / "out"
    process = start(output)
    _, _, started = in_the_middle(process, output)
    process.terminate()
    assert end(process) == 143
    assert gone(*started)
    no_words_of_a_bug(process)
    assert "error: stopped by SIGTERM" in process.said()
    check_answer(output)
    assert f"output: {output}" in (output / "tune.yaml").read_text("utf-8")  # the best so far can be repeated too


@of(ci={"config"})
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_stop_before_anything_was_measured_leaves_nothing(start, tmp_path, number, code):
    output = tmp_path / "out"
    process = start(output)
    started = wait_until(lambda: offspring(process.pid), what="the server")
    process.send_signal(number)
    assert end(process) == code
    assert gone(*started)
    no_words_of_a_bug(process)
    assert (
        process.said().splitlines()[-1]
        == {
            130: "interrupted",
            143: f"error: stopped by {number.name}",
        }[code]
    )
    assert not output.exists()


@of(ci={"classify.py"})
def test_kill_9_leaves_no_process_and_resume_goes_on(start, tmp_path):
    output = tmp_path / "out"
    process = start(output)
    _, running_trial, started = in_the_middle(process, output)
    process.kill()
    process.wait()
    assert gone(*started, running_trial, seconds=5)
    assert not (output / "autofit.json").exists()
    *whole, rest = (output / "journal.log").read_text().split("\n")
    assert all(isinstance(json.loads(line), dict) for line in whole)
    assert not rest or not rest.endswith("}")
    check_resume(start, output)


@pytest.mark.by_hand
def test_a_killed_trial_has_crashed_and_the_tune_goes_on(start, tmp_path):
    output = tmp_path / "out"
    process = start(output)
    number, pid, _ = in_the_middle(process, output, after=1)
    os.kill(pid, signal.SIGKILL)
    assert end(process) == 0, process.said()
    found = trials_of(output)
    assert isinstance(found[number].outcome, Crashed), found[number]
    assert found[number].outcome.reason.startswith("killed by SIGKILL after ")
    assert len(found) > number + 1
    assert [trial.number for trial in found if isinstance(trial.outcome, Crashed)] == [number]
    again = found[number + 1]  # what died may have been killed by accident: it is measured once more, and may win
    assert again.plan == found[number].plan
    assert isinstance(again.outcome, Measured)
    check_answer(output)
    assert f"trial   {number:3d}" in process.said()


@of("config", "classify.py")
def test_two_tunes_do_not_share_a_folder_or_a_device(start, tmp_path):
    output, other = tmp_path / "out", tmp_path / "other"
    first = start(output)
    in_the_middle(first, output, after=0)
    in_its_folder = start(output, "--resume")
    on_its_device = start(other)
    for process, words in (
        (in_its_folder, f"error: another tune is writing {output}: process {first.pid}"),
        (on_its_device, f"error: another tune is measuring on this device (cpu): process {first.pid}"),
    ):
        assert end(process) == 5
        lines = process.said().splitlines()
        assert lines[-3:-1] == [words, ""]
        assert lines[-1].startswith("hint: ")
        no_words_of_a_bug(process)
    assert not other.exists()
    assert first.poll() is None, "the first tune ended too early for this test"
    assert alive(first.pid)
