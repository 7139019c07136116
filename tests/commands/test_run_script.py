"""``autofit run``: what it launches, and what it says where that is not the training that was tuned."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

import autofit
from autofit.commands.scripts import run as scripts
from autofit.commands.scripts import run_launch, run_script
from autofit.contract.script import Script
from autofit.output.document import DOCUMENT, DOCUMENT_FILE
from autofit.system.errors import InputError
from autofit.system.processes import end_group
from autofit.system.strict_json import dump_json
from autofit.training.scripts.leave import Refused, run_to_its_end
from tests.output.test_report import CPU
from tests.output.test_report import document as a_document


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """An answer's folder, a script, and the commands that would have been launched."""
    commands = []

    class Launch:
        pid = 2**22 + 1  # above every process

        def __init__(self, command, **_):
            commands.append(list(map(str, command)))

        def wait(self):
            return 7

    monkeypatch.setattr(subprocess, "Popen", Launch)
    monkeypatch.setattr(scripts, "end_group", lambda _: None)
    (tmp_path / DOCUMENT_FILE).write_text(dump_json(DOCUMENT, a_document(hardware=CPU)))
    (tmp_path / "accelerate.yaml").write_text("{}")
    (tmp_path / "train.py").write_text("")
    return tmp_path, commands


def test_the_script_gets_its_own_arguments_and_the_plan(launched):
    folder, commands = launched
    said = []
    assert scripts.run(folder, folder / "train.py", ("--lr", "1e-4", "two words"), say=said.append) == 7
    (command,) = commands
    assert command[command.index("--config_file") + 1] == str(folder / "accelerate.yaml")
    assert "--quiet" in command  # what the script says of its failure is not followed by Accelerate's traceback
    assert command[-5:] == [str(folder), str(folder / "train.py"), "--lr", "1e-4", "two words"]
    assert "not for train.py" in " ".join(said)


@pytest.mark.parametrize(
    ("cores", "processes", "told", "words"),
    [(8, 2, "0", ["4"]), (8, 1, "0", ["8"]), (8, 1, "3", []), (2, 2, "0", []), (None, 1, "0", [])],
)
def test_accelerate_is_told_the_threads_that_it_would_warn_of(launched, monkeypatch, cores, processes, told, words):
    folder, commands = launched
    tuned = a_document(hardware=CPU)
    workload = replace(tuned.workload, processes=processes, global_batch=processes * tuned.workload.global_batch)
    document = replace(tuned, workload=workload)
    (folder / DOCUMENT_FILE).write_text(dump_json(DOCUMENT, document))
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    monkeypatch.setattr(scripts.psutil, "cpu_count", lambda logical: None if logical else cores)
    scripts.run(folder, folder / "train.py", ())
    (command,) = commands
    option = "--num_cpu_threads_per_process"
    assert command[command.index(option) + 1 :][:1] == words if words else option not in command


@pytest.mark.parametrize(("line", "status"), [("raise SystemExit(85)", 85), ("os.kill(os.getpid(), 9)", 137), ("", 0)])
def test_a_launch_of_one_process_ends_as_its_script_does(monkeypatch, line, status):
    command = [sys.executable, "-c", f"import os\n{line}"]
    monkeypatch.setattr(run_launch.launch, "prepare_simple_launcher_cmd_env", lambda _: (command, dict(os.environ)))
    monkeypatch.setattr(run_launch.launch, "simple_launcher", run_launch.one_process)
    monkeypatch.setattr("sys.argv", ["run_launch.py", "--quiet", "--cpu", "train.py"])
    with pytest.raises(SystemExit) as ends:
        run_launch.launch.main()
    assert ends.value.code == status


LAUNCHER = "import subprocess, sys; sys.exit(subprocess.Popen([sys.executable, '-c', sys.argv[1]]).wait())"
TRAINING = """
import signal, sys, time
def save(number, frame):
    time.sleep(0.6)  # longer than a launcher lives that gets the signal, too
    print("saved at", signal.Signals(number).name, flush=True)
    sys.exit(1)
signal.signal(signal.SIGINT, save)
signal.signal(signal.SIGTERM, save)
print("training", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_training_saves_before_it_is_ended(by):
    command = [sys.executable, "-c", LAUNCHER, TRAINING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as launch:
        assert launch.stdout.readline() == b"training\n"
        scripts.interrupt(launch, by, alone=True)
        end_group(launch)
        assert launch.stdout.read().decode() == f"saved at {by.name}\n"


def test_a_launcher_that_has_begun_no_training_is_not_waited_for():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as launch:
        scripts.interrupt(launch, signal.SIGINT, alone=True)
        assert launch.poll() is None
        end_group(launch)


def test_of_a_changed_script_neither_speed_nor_memory_is_vouched_for(launched):
    folder, _ = launched
    tuned = a_document(hardware=CPU)
    script = Script(path="train.py", sha256="0" * 64, trainer="Trainer", micro_batch=8, accumulation=4)
    document = replace(tuned, workload=replace(tuned.workload, script=script))
    (said,) = scripts.differences(document, scripts.named(str(folder / "train.py"), ()))
    assert said == "train.py is not the text that was tuned: its speed and memory may be others"


@pytest.mark.filterwarnings("ignore:.*tuned with other versions")
def test_a_training_on_more_processes_than_the_answer_s_is_refused_without_a_traceback(launched, monkeypatch, capsys):
    folder, _ = launched
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as stopped:
        run_script.main(str(folder), str(folder / "train.py"), ())
    assert stopped.value.code == InputError.exit_code
    said = capsys.readouterr().err
    assert said.startswith("error: this training runs on 2 processes")
    assert "\nhint: " in said
    assert "Traceback" not in said


@pytest.mark.filterwarnings("ignore:.*tuned with other versions")
def test_a_script_that_takes_a_plan_itself_gets_no_second_one(launched):
    folder, _ = launched
    (folder / "train.py").write_text(f"import autofit\nautofit.load({str(folder)!r})\n")
    with pytest.raises(Refused, match=r"takes a plan by autofit\.load, and would have two"):
        run_to_its_end(str(folder / "train.py"), (), lambda: False, by="a Trainer")
    with pytest.warns(UserWarning, match="tuned"):
        autofit.load(folder, any_hardware=True)  # a process that runs no script may


@pytest.mark.filterwarnings("ignore:.*tuned")
def test_a_script_that_no_plan_can_be_put_into_is_refused_without_a_traceback(launched, monkeypatch, capsys):
    def train_with(*_, **__):
        raise Refused("the script makes its Trainer without arguments", "give it some")

    monkeypatch.setattr("autofit.training.scripts.entry.train_with", train_with)
    folder, _ = launched
    with pytest.raises(SystemExit) as stopped:
        run_script.main(str(folder), str(folder / "train.py"), ())
    assert stopped.value.code == InputError.exit_code
    assert "error: the script makes its Trainer without arguments\nhint: give it some\n" in capsys.readouterr().err


@pytest.mark.parametrize(("begins", "steps"), [(0, 12), (5, 7), (12, 0)])
def test_the_steps_before_a_checkpoint_were_made_by_another_training(begins, steps):
    callbacks, state = [], SimpleNamespace(global_step=0)

    def train():
        state.global_step = begins
        for one in callbacks:
            one.on_train_begin(None, state, None)
        state.global_step = 12
        return "trained"

    trainer = SimpleNamespace(state=state, add_callback=callbacks.append, remove_callback=callbacks.remove)
    assert run_script._counted(trainer, train) == ("trained", steps)
    assert callbacks == []


def test_a_model_that_is_made_to_train_it_is_the_one_that_is_watched(launched, monkeypatch):
    """A Trainer with ``model_init`` makes another one where it begins."""
    folder, _ = launched
    first, second, watched = object(), object(), []
    monkeypatch.setattr(
        "autofit.output.setup.read_setup",
        lambda _: SimpleNamespace(
            check=lambda: None,
            recipe=SimpleNamespace(facts=SimpleNamespace(workload=SimpleNamespace(script=True))),
            watch=lambda model: watched.append(model) or SimpleNamespace(ignored=lambda *_, **__: []),
        ),
    )

    def trained(around, init):
        callbacks, state = [], SimpleNamespace(global_step=0)
        trainer = SimpleNamespace(
            model=first, model_init=init, state=state, add_callback=callbacks.append, optimizer=None, accelerator=None,
            remove_callback=callbacks.remove, args=SimpleNamespace(world_size=1),
            callback_handler=SimpleNamespace(train_dataloader=None),
        )  # fmt: skip

        def train():
            trainer.model = second
            callbacks[0].on_train_begin(None, state, None)
            state.global_step = 3

        around(trainer, train, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1})

    def train_with(*_, around, **__):
        for init in (None, object()):
            trained(around, init)

    monkeypatch.setattr("autofit.training.scripts.entry.train_with", train_with)
    run_script.main(str(folder), str(folder / "train.py"), ())
    assert watched == [first, second]


@pytest.mark.parametrize(
    ("text", "trained", "error", "words"),
    [
        (
            "print('hello')",
            False,
            InputError,
            r"never\.py ended without training by a Trainer: the plan was put into nothing",
        ),
        ("import sys; sys.exit(0)", False, InputError, "ended without training"),
        ("import sys; sys.exit(3)", False, SystemExit, "3"),
        ("import sys; sys.exit()", True, SystemExit, "^$"),
    ],
)
def test_a_script_that_never_trains_is_told(text, trained, error, words, tmp_path, monkeypatch):
    script = tmp_path / "never.py"
    script.write_text(text)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(error, match=words):
        run_to_its_end(str(script), (), lambda: trained, by="a Trainer")


def test_a_script_that_trained_ends_as_it_would(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("import pathlib, sys; pathlib.Path(sys.argv[1]).touch()")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    run_to_its_end(str(script), (str(tmp_path / "done"),), lambda: True, by="a Trainer")
    assert (tmp_path / "done").exists()


def test_files_that_say_otherwise_than_the_plan_are_told(launched):
    folder, _ = launched
    (folder / "training_args.json").write_text('{"per_device_train_batch_size": 77}')
    said = []
    scripts.run(folder, folder / "train.py", (), say=said.append)
    assert "per_device_train_batch_size is 77, not 8; without " in said[-1]
    assert said[-1].endswith("more; the script gets the plan")


def test_a_file_that_is_no_program_is_not_run(launched):
    folder, commands = launched
    (folder / "rows.json").write_text("{}")
    with pytest.raises(InputError, match=r"rows.json' is no training script\nhint: give a Python program"):
        scripts.run(folder, folder / "rows.json", ())
    assert commands == []


def test_a_folder_without_the_launchers_file_is_refused(launched):
    folder, commands = launched
    (folder / "accelerate.yaml").unlink()
    with pytest.raises(InputError, match=r"holds no accelerate\.yaml"):
        scripts.run(folder, folder / "train.py", ())
    assert commands == []
