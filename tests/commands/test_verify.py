"""``autofit.verify``: launches are held to the promise; no process is started here."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

import autofit
from autofit.commands import launching, verify
from autofit.contract.outcome import Crashed
from autofit.output.document import DOCUMENT, DOCUMENT_FILE, MODEL_FOLDER, config_sha256
from autofit.output.emit import ARGUMENTS, YAML
from autofit.registry import recipe_of
from autofit.system.errors import InputError, MachineError
from autofit.system.strict_json import dump_json
from tests.output.test_report import CPU
from tests.output.test_report import document as a_document


@pytest.fixture
def promised():
    return a_document(hardware=CPU)


@pytest.fixture
def folder(promised, tmp_path):
    """An output folder, with the files of its plan."""
    emission = recipe_of(promised.plan, promised.facts).emission
    (tmp_path / MODEL_FOLDER).mkdir()
    texts = {
        YAML: dict(emission.accelerate),
        ARGUMENTS: dict(emission.training_args),
        f"{MODEL_FOLDER}/config.json": {},
    }
    for name, said in texts.items():
        (tmp_path / name).write_text(json.dumps(said))
    (tmp_path / DOCUMENT_FILE).write_text(dump_json(DOCUMENT, promised))
    return tmp_path


@pytest.fixture
def launches(monkeypatch, promised):
    """Launches that end as a list says, each a share of the promised speed with the CPU share of others."""
    made = []

    def play(*outcomes):
        waiting = iter(outcomes)

        def launch(_folder, steps, _document, _environment):
            made.append(steps)
            found = next(waiting)
            if isinstance(found, tuple):
                share, disturbance = found
                run = next(trial.outcome for trial in promised.trials if trial.plan == promised.plan)
                rate = promised.promise.samples_per_second * share
                found = replace(
                    run,
                    samples_per_second=rate,
                    peak_bytes=promised.promise.peak_bytes,
                    disturbance=disturbance,
                )
            return ("accelerate", "launch"), found

        monkeypatch.setattr(launching, "launch_here", launch)
        return made

    return play


def test_a_launch_within_the_tolerance_keeps_the_promise(folder, launches):
    made = launches((0.95, 0.0))
    found = autofit.verify(folder, steps=7)
    assert found.broken == ()
    assert found.speed_ratio == pytest.approx(0.95)
    assert (found.launches, made) == (1, [7])
    assert repr(found).startswith("Verification(kept: ")
    assert "95% of the promised speed" in repr(found)


def test_a_slow_launch_on_a_cpu_is_repeated_and_the_fastest_counts(folder, launches):
    said = []
    launches((0.5, 0.0), (0.6, 0.0))
    found = autofit.verify(os.fspath(folder), say=said.append)
    assert found.speed_ratio == pytest.approx(0.6)
    assert len(found.broken) == 1
    assert "40% below the promised" in found.broken[0]
    assert len(said) == 2
    launches((0.6, 0.0))
    assert autofit.verify(folder, tolerance=0.5).broken == ()


def test_a_launch_that_failed_breaks_the_promise_at_once(folder, launches):
    made = launches(Crashed(reason="no such file", log_tail=""))
    found = autofit.verify(folder)
    assert (found.broken, found.speed_ratio, len(made)) == (("crashed: no such file",), 0.0, 1)
    assert repr(found) == "Verification(broken: crashed: no such file)"


def test_launches_on_a_busy_machine_are_not_judged(folder, launches):
    made = launches(*[(0.5, 0.9)] * 4)
    with pytest.raises(MachineError, match="can't be judged") as caught:
        autofit.verify(folder)
    assert len(made) == 4
    assert "tolerance=0.8" in caught.value.hint
    launches(*[(0.05, 0.9)] * 4)
    with pytest.raises(MachineError, match="can't be judged") as caught:
        autofit.verify(folder, tolerance=0.9)
    assert "tolerance" not in caught.value.hint, "more is let be missing already"


@pytest.mark.parametrize("call", [autofit.verify, autofit.profile])
def test_a_config_that_was_changed_since_is_not_launched(folder, promised, launches, call):
    made = launches()
    (folder / DOCUMENT_FILE).write_text(dump_json(DOCUMENT, replace(promised, config_sha256=config_sha256(folder))))
    (folder / MODEL_FOLDER / "config.json").write_text("{} ")
    with pytest.raises(InputError, match="is not what was tuned"):
        call(folder)
    assert not made


@pytest.mark.parametrize("name", [YAML, ARGUMENTS])
@pytest.mark.parametrize(("text", "words"), [("", ""), ("[]", "holds no settings"), ("{", "can't be read")])
def test_a_file_that_nobody_can_read_is_not_launched(folder, launches, name, text, words):
    made = launches()
    (folder / name).write_text(text)
    with pytest.raises(InputError, match=rf"{name} {words}") as caught:
        autofit.verify(folder)
    assert "put it back as it was" in caught.value.hint
    assert not made


def test_settings_that_are_not_the_plan_s_are_told(folder, launches):
    said = []
    launches((0.95, 0.0))
    arguments, config = (json.loads((folder / name).read_text()) for name in (ARGUMENTS, YAML))
    optimizer = arguments.pop("optim")
    (folder / ARGUMENTS).write_text(json.dumps(arguments | {"learning_rate": 0.1, "gradient_accumulation_steps": 7}))
    (folder / YAML).write_text(json.dumps(config | {"num_processes": 2}))
    assert autofit.verify(folder, say=said.append).broken == ()
    changed = f"gradient_accumulation_steps is 7, not 4; without optim={optimizer!r}"
    assert said == [
        f"{folder / YAML} is not as the plan in autofit.json: num_processes is 2, not 1",
        f"{folder / ARGUMENTS} is not as the plan in autofit.json: {changed}",
    ]


def test_a_folder_is_no_option_whatever_it_is_called(monkeypatch, promised):
    started = []

    def refuse(command, **_):
        started.append(command)
        raise OSError("not here")

    monkeypatch.setattr(launching.subprocess, "Popen", refuse)
    with pytest.raises(MachineError, match="can't be started: not here"):
        launching.launch_here(Path("-x"), 3, promised, {})
    assert not any(word.startswith("-x") for word in started[0])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"steps": 1}, "steps=1 is out of range"),
        ({"steps": 2.5}, "steps=2.5 is out of range"),
        ({"steps": 1001}, "steps=1001 is out of range"),
        ({"tolerance": -0.1}, "tolerance=-0.1 is out of range"),
        ({"tolerance": float("nan")}, "tolerance=nan"),
    ],
)
def test_bad_arguments_are_refused_before_a_launch(folder, launches, bad, words):
    made = launches()
    with pytest.raises(InputError, match=words) as caught:
        autofit.verify(folder, **bad)
    assert caught.value.hint
    assert not made


def test_an_answer_for_a_gpu_is_not_said_to_be_broken_where_there_is_none(folder, promised, monkeypatch):
    card = replace(promised.hardware, device="cuda", name="NVIDIA H100")
    (folder / DOCUMENT_FILE).write_text(dump_json(DOCUMENT, replace(promised, hardware=card)))
    monkeypatch.setattr(launching, "missing_cuda", lambda: "the installed torch is built without CUDA")
    with pytest.raises(MachineError, match="the plan is for NVIDIA H100: the installed torch") as caught:
        autofit.verify(folder)
    assert caught.value.hint == "verify it on a machine with NVIDIA H100"


def test_a_folder_without_an_answer_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"holds no autofit\.json"):
        autofit.verify(tmp_path)


def test_a_launch_is_held_to_the_ceiling_and_to_the_speed(promised):
    promise = promised.promise
    run = next(trial.outcome for trial in promised.trials if trial.plan == promised.plan)
    kept = replace(run, samples_per_second=0.91 * promise.samples_per_second, peak_bytes=promise.limit_bytes)
    assert verify.judge(promise, kept, tolerance=0.1).broken == ()
    (words,) = verify.judge(promise, replace(kept, peak_bytes=promise.limit_bytes + 1), tolerance=0.1).broken
    assert "is above the ceiling" in words
    slow = replace(kept, samples_per_second=0.89 * promise.samples_per_second)
    (words,) = verify.judge(promise, slow, tolerance=0.1).broken
    assert "11% below the promised" in words
    fast = replace(promise, samples_per_second=1083.2)
    (words,) = verify.judge(fast, replace(kept, samples_per_second=1e-3), tolerance=0.1).broken
    assert words == "0.001000 samples/s are 100% below the promised 1,083 (tolerance 10%)"


def test_a_launch_below_an_estimate_broke_no_promise(promised):
    run = next(trial.outcome for trial in promised.trials if trial.plan == promised.plan)
    slow = replace(run, samples_per_second=promised.promise.samples_per_second / 4)
    found = verify.judge(promised.promise, slow, tolerance=0.3, estimated=True)
    assert found.estimated
    assert "below the estimated" in found.broken[0]
    assert "promised" not in found.broken[0]


@pytest.mark.parametrize("told", [True, False])
def test_a_launch_that_crashed_is_told_by_the_words_of_the_script(tmp_path, told):
    error = "InputError: precision has no value 'zz'"
    own = f"Traceback (most recent call last):\n  File 'script.py'\n{error}\nhint: known: fp32\n"
    launchers = "Traceback (most recent call last):\n  File 'cli.py'\nsubprocess.CalledProcessError: Command '...'"
    found = launching._outcome(tmp_path, a_document(hardware=CPU), 1, own + launchers if told else launchers, 10.0)
    assert isinstance(found, Crashed)
    assert found.reason.endswith(error if told else "Command '...'")
