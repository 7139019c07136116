"""Words in, words out, exit code: data on stdout, talk on stderr."""

import errno
import importlib
import inspect
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import pytest
import yaml
from accelerate.utils.environment import get_int_from_env
from click.testing import CliRunner

import autofit
from autofit import cli
from autofit.commands.request import Request, Search
from autofit.commands.shell import terminal
from autofit.commands.shell.doctor_table import SCREEN_LINES
from autofit.commands.shell.tune_config import read_config as read_options
from autofit.commands.shell.tune_config import write_config as write_options
from autofit.commands.verify import TOLERANCE, VERIFICATION, Verification, judge
from autofit.contract.outcome import Crashed
from autofit.machine import other_processes
from autofit.output.document import DOCUMENT, DOCUMENT_FILE, read_document
from autofit.registry import techniques
from autofit.system import errors
from autofit.system.errors import Terminated
from autofit.system.strict_json import dump_json
from autofit.system.units import parse_duration
from tests.support.replay import Lent, Played, Replay
from tests.support.synthetic import GIB
from tests.support.tiny import REPOSITORY, write_config

OPTIONS = ["--device", "cpu", "--memory-limit", "1GiB", "--seq-len", "32", "--global-batch", "16"]
TUNE = ["tune", "demo", "--fix", "precision=fp32", *OPTIONS]


@pytest.fixture
def run(server, monkeypatch, tmp_path):
    """The command line in this process, with one server for all tunes; ``replay`` stands for the device."""
    monkeypatch.chdir(tmp_path)
    played = importlib.import_module("autofit.commands.tune").tune  # as the command line calls it

    def invoke(*words, replay=None):
        runner = replay or Replay(tmp_path / "out")
        backend = Played(server, runner)
        monkeypatch.setattr(
            "autofit.commands.tune.tune", lambda *args, **options: played(*args, backend=backend, **options)
        )
        return CliRunner().invoke(cli.main, [str(word) for word in words], prog_name="autofit")

    return invoke


@pytest.fixture
def tune(run, tmp_path):
    """``autofit tune demo`` into one folder."""

    def invoke(*words, replay=None, trials=3):
        return run(*TUNE, "--output", tmp_path / "out", "--trials", trials, *words, replay=replay)

    return invoke


def one_line(stderr):
    """The last message on stderr and its hint; nothing of Python's is shown."""
    assert "Traceback" not in stderr
    assert 'File "' not in stderr
    lines = stderr.rstrip().splitlines()
    if len(lines) > 2 and lines[-1].startswith("hint: "):
        assert lines[-2] == ""
        return lines[-3], lines[-1]
    return lines[-1], ""


# --- names ------------------------------------------------------------------------------------------------------


def test_the_public_names_are_there_and_are_what_they_are_called():
    assert sorted(autofit.__all__) == [
        "AutofitError",
        "Plan",
        "Promise",
        "Result",
        "Setup",
        "__version__",
        "estimate",
        "load",
        "profile",
        "tune",
        "verify",
    ]
    assert set(autofit.__all__) <= set(dir(autofit)), "what a shell completes"
    for name in autofit.__all__:
        found = getattr(autofit, name)
        assert getattr(found, "__name__", "__version__") == name
        if name in {"estimate", "load", "tune", "verify"}:
            assert inspect.isfunction(found)
            assert "Raises:" in inspect.getdoc(found)
    assert issubclass(errors.InputError, autofit.AutofitError)
    with pytest.raises(AttributeError, match="no attribute 'tuen'"):
        _ = autofit.tuen


# --- options --------------------------------------------------------------------------------------------------------


def test_the_options_are_the_keywords_of_the_function():
    given = cli.main.commands["tune"].make_context("tune", ["demo"]).params
    keywords = dict(inspect.signature(autofit.tune).parameters)
    for name in ("events", "backend"):  # seams, not choices
        del keywords[name]
    assert given.keys() - {"as_json", "verbose"} == keywords.keys()
    for name, keyword in keywords.items():
        if name not in {"model", "output"}:
            assert given[name] == keyword.default, name


def test_every_option_says_what_it_is_for():
    for command in cli.main.commands.values():
        assert command.help
        for one in command.params:
            if isinstance(one, click.Option):
                assert one.help, one.name
                assert one.help.endswith((".", "]", ")")), one.help


def test_the_command_line_is_the_one_that_was_designed():
    found = {
        name: sorted(word for one in command.params for word in one.opts if word.startswith("--"))
        for name, command in cli.main.commands.items()
    }
    assert found == {
        "tune": [
            "--allow", "--among", "--call", "--config", "--device", "--fix", "--global-batch", "--guard", "--json",
            "--launch-path", "--lengths", "--memory-limit", "--nodes", "--on", "--output", "--price", "--processes",
            "--record", "--resume", "--sampler", "--seed", "--seq-len", "--storage", "--task", "--timeout", "--tokens",
            "--trials", "--trust-remote-code", "--verbose", "--wait",
        ],
        "estimate": [
            "--all", "--allow", "--among", "--cache", "--call", "--fix", "--global-batch", "--gpu", "--gpus", "--json",
            "--launch-path", "--memory", "--nodes", "--output", "--price", "--seq-len", "--task", "--tokens",
            "--trust-remote-code",
        ],
        "run": ["--machine-rank", "--main-process-ip", "--main-process-port"],
        "verify": ["--json", "--on", "--steps", "--tolerance"],
        "doctor": ["--all", "--device", "--json", "--model", "--task"],
        "profile": ["--json", "--output", "--steps"],
        "report": ["--json"],
        "export": ["--to"],
        "compare": [],
        "schema": [],
    }  # fmt: skip
    assert [name for name, command in cli.main.commands.items() if command.hidden] == ["schema"]


def test_completion_is_what_the_help_says(run, monkeypatch):
    said = run("--help").stdout
    assert 'eval "$(_AUTOFIT_COMPLETE=bash_source autofit)"' in said
    monkeypatch.setenv("COMP_WORDS", "autofit comp")
    monkeypatch.setenv("COMP_CWORD", "1")
    done = CliRunner().invoke(cli.main, [], prog_name="autofit", env={"_AUTOFIT_COMPLETE": "bash_complete"})
    assert done.stdout == "plain,compare\n"


def test_every_keyword_is_documented():
    text = inspect.getdoc(autofit.tune)
    for name in inspect.signature(autofit.tune).parameters:
        assert re.search(rf"^ +{name}: \S", text, re.MULTILINE), name


# --- what is printed ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_json_is_all_of_stdout(tune, tmp_path):
    done = tune("--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((tmp_path / "out" / DOCUMENT_FILE).read_text())
    assert done.stdout == dump_json(DOCUMENT, read_document(tmp_path / "out"))
    assert done.stderr.strip()


def test_the_answer_is_on_stdout_and_the_talk_on_stderr(tune, tmp_path):
    done = tune()
    assert done.exit_code == 0, done.stderr
    found = read_document(tmp_path / "out")
    assert "samples/s" in done.stdout
    assert f"{found.plan['micro_batch']} x {found.plan['accumulation']} x 1 = 16" in done.stdout
    assert "accelerate launch" in done.stdout
    assert all(len(line) <= 100 or str(tmp_path) in line for line in done.stdout.splitlines()), "a path is whole"
    assert "\x1b" not in done.stdout + done.stderr
    for trial in found.trials:
        assert re.search(rf"\b{trial.number}\b", done.stderr)


def test_a_tune_is_repeated_from_its_own_file_and_the_command_line_wins(tune, run, tmp_path):
    first = tune("--fix", "optimizer=adamw", "--among", "micro_batch=1,2", "--timeout", "10m")
    assert first.exit_code == 0, first.stderr
    kept = tmp_path / "out" / "tune.yaml"
    again = run("tune", "--config", kept, "--output", tmp_path / "again", replay=Replay(tmp_path / "again"))
    assert again.exit_code == 0, again.stderr
    plans = [[trial.plan for trial in read_document(tmp_path / name).trials] for name in ("out", "again")]
    assert plans[0] == plans[1]
    texts = [(tmp_path / name / "tune.yaml").read_text("utf-8").splitlines() for name in ("out", "again")]
    assert texts[0][1:] == texts[1][1:]
    assert "timeout: 600s" in texts[0]
    wins = run("tune", "--config", kept, "--trials", "0", "--output", tmp_path / "third")
    assert "--trials 0 is out of range" in wins.stderr
    (tmp_path / "wrong.yaml").write_text("trails: 3\n")
    wrong = run("tune", "demo", "--config", tmp_path / "wrong.yaml")
    assert wrong.exit_code == 2
    assert "'trails' is no option of tune" in wrong.stderr
    assert "trials" in wrong.stderr
    assert run("tune", "demo", "--config", tmp_path / "none.yaml").exit_code == 2


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("trials: [1]", "one value"),
        ("output: [a]", "one value"),
        ("guard: 3", "true or false"),
        ("fix: precision=bf16", "a list"),
        ("fix: [[precision, bf16]]", "a list"),
        ("trials: 3.5", "a whole number"),
        ("seed: true", "a whole number"),
        ("seed: ten", "a whole number"),
        ("guard: yes", "true or false"),
        ("task: true", "a text or a number"),
    ],
)
def test_a_value_of_another_kind_in_a_file_of_options_is_refused(run, tmp_path, line, wanted):
    (tmp_path / "odd.yaml").write_text(f"{line}\n")
    done = run("tune", "demo", "--config", tmp_path / "odd.yaml")
    assert done.exit_code == 2
    message, hint = one_line(done.stderr)
    assert f"odd.yaml': {line.partition(':')[0]} is " in message
    assert hint == f"hint: {wanted} is wanted, as in a tune.yaml"


def test_values_in_a_file_of_options_are_taken_as_they_are_written(tmp_path):
    lines = ("seq-len: 010", "on: local", "timeout: 1:30", "arguments: [--bf16, yes, --run, 1.10, 010, true, null]")
    (tmp_path / "odd.yaml").write_text("\n".join(lines))
    context = click.Context(cli.main.commands["tune"])
    read_options(context, click.Option(["--config"]), str(tmp_path / "odd.yaml"))
    arguments = ["--bf16", "yes", "--run", "1.10", "010", "true", "null"]
    assert context.default_map == {"seq_len": "010", "on": "local", "timeout": "1:30", "arguments": arguments}


def test_arguments_come_back_from_a_file_of_options_as_they_were(tmp_path):
    arguments = ("--bf16", "yes", "1.10", "010", "", "~", "null", "on", "a: b", "[1]", "é", "\n", "x " * 99)
    write_options(tmp_path, Request(model="train.py", arguments=arguments), Search(on="auto"))
    context = click.Context(cli.main.commands["tune"])
    read_options(context, click.Option(["--config"]), str(tmp_path / "tune.yaml"))
    assert context.default_map["arguments"] == list(arguments)
    assert context.default_map["on"] == "auto"


@pytest.mark.parametrize("lines", ["trials: 3\ntrials: 0\n", "seq-len: 8\ntrials: 0\nseq_len: 16\n"])
def test_an_option_that_a_file_of_options_gives_twice_is_refused(run, tmp_path, lines):
    (tmp_path / "odd.yaml").write_text(lines)
    done = run("tune", "demo", "--config", tmp_path / "odd.yaml")
    assert done.exit_code == 2
    message, _ = one_line(done.stderr)
    assert message.endswith(f"{lines.partition(':')[0].replace('-', '_')} is given twice")


def test_an_option_without_a_value_in_a_file_of_options_is_not_given(run, tmp_path):
    (tmp_path / "odd.yaml").write_text("device:\nsampler: null\ntrials: 0\n")
    done = run("tune", "demo", "--config", tmp_path / "odd.yaml")
    assert "--trials 0 is out of range" in done.stderr


@pytest.mark.parametrize("seconds", [600.0, 1234567.0, 1234.5678])
def test_a_timeout_comes_back_from_a_file_of_options_as_it_was(tmp_path, seconds):
    write_options(tmp_path, Request(model="demo"), Search(timeout_seconds=seconds))
    assert parse_duration(yaml.safe_load((tmp_path / "tune.yaml").read_text())["timeout"]) == seconds


def test_the_report_is_shown_again_and_written_anew(tune, run, tmp_path):
    first = tune("--verbose")
    (tmp_path / "out" / "report.html").unlink()
    again = run("report", tmp_path / "out")
    assert again.exit_code == 0
    assert again.stdout == first.stdout
    assert (tmp_path / "out" / "report.html").is_file()
    as_json = run("report", tmp_path / "out", "--json")
    assert json.loads(as_json.stdout) == json.loads((tmp_path / "out" / DOCUMENT_FILE).read_text())


def test_an_answer_is_shown_where_its_page_cant_be_written(tune, run, tmp_path):
    """The folder may be somebody else's."""
    first, page = tune("--verbose"), tmp_path / "out" / "report.html"
    page.unlink()
    page.mkdir()  # in its place nothing can be renamed
    again = run("report", tmp_path / "out")
    assert (again.exit_code, again.stdout) == (5, first.stdout)
    assert "report.html can't be written" in again.stderr


def test_options_reach_the_tune(tune, tmp_path):
    replay = Replay(tmp_path / "out")
    done = tune(
        "--among", "micro_batch=2,4", "--fix", "optimizer=sgd", "--fix", "checkpointing=off", "--fix", "kernels=none",
        "--launch-path", "loop", "--sampler", "grid", "--record", tmp_path / "record", "--seed", "3", replay=replay,
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert {plan["micro_batch"] for _, plan, _ in replay.asked} == {2, 4}
    assert {plan["optimizer"] for _, plan, _ in replay.asked} == {"sgd"}
    found = read_document(tmp_path / "out")
    assert (found.workload.launch_path, found.workload.seed, found.workload.seq_len) == ("loop", 3, 32)
    assert found.workload.limit_bytes == GIB
    assert len((tmp_path / "record").read_text().splitlines()) == len(replay.asked) + 1


def test_the_default_folder(run, tmp_path):
    done = run(*TUNE, "--trials", "1", replay=Replay(tmp_path / "autofit-out"))
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "autofit-out" / DOCUMENT_FILE).is_file()


def test_resume_goes_on(tune, tmp_path):
    assert tune(trials=2).exit_code == 0
    refused = tune(trials=2)
    assert refused.exit_code == 2
    assert "--resume" in one_line(refused.stderr)[1]
    other = tune("--resume", "--seq-len", "64", trials=2)
    assert other.exit_code == 2
    assert "begun with --seq-len 32, this is with --seq-len 64" in one_line(other.stderr)[0]
    replay = Replay(tmp_path / "out")
    assert tune("--resume", trials=2, replay=replay).exit_code == 0
    assert replay.asked == []


# --- exit codes -----------------------------------------------------------------------------------------------------

USAGE = [
    (["tune", "no/such/model/here"], "no file or folder"),
    (["tune", ""], "is no model"),
    (["tune", "demo", "--global-batch", "0"], "--global-batch 0"),
    (["tune", "demo", "--trials", "0"], "--trials 0"),
    (["tune", "train.py", "--epochs", "3"], "there is no option --epochs"),
    (["run", "out", "train.py", "--epochs", "3"], "there is no option --epochs"),
    (["tune", "demo", "--seq-len", "1"], "--seq-len 1"),
    (["tune", "demo", "--memory-limit", "banana"], "'banana' is not a memory limit"),
    (["tune", "demo", "--memory-limit", "0%"], "not a share"),
    (["tune", "demo", "--memory-limit", "900TiB", "--device", "cpu"], "more than the"),
    (["tune", "demo", "--timeout", "soon"], "'soon' is not a duration"),
    (["tune", "demo", "--sampler", "best"], "'best' is not known"),
    (["tune", "demo", "--allow", "magic"], "'magic' is not a class"),
    (["tune", "demo", "--launch-path", "notebook"], "--launch-path 'notebook'"),
    (["estimate", "demo", "--memory", "8GiB", "--launch-path", "traner"], "--launch-path 'traner'"),
    (["tune", "demo", "--device", "tpu"], "'tpu' is not known"),
    ([*TUNE[:2], *OPTIONS, "--fix", "precison=bf16"], "'precison' is not a knob"),
    ([*TUNE[:2], *OPTIONS, "--fix", "precision"], "is not KNOB=VALUE"),
    ([*TUNE[:2], *OPTIONS, "--among", "micro_batch=3,4"], "has no value '3'"),
    ([*TUNE[:2], *OPTIONS, "--fix", "offload=parameters"], "can't be had here"),
    (["tune", "demo", "--output", "a-file"], "'a-file' is a file, and a folder is wanted"),
    (["tune", "demo", "--record", "."], "--record '.' is a folder"),
    (["tune", "demo", "--config", ""], "--config names no file"),
    (["tune", "demo", "--config", "."], "--config '.' is a folder"),
    (["tune", "demo", "--output", "a-file/out"], "'a-file' is a file, and a folder is wanted"),
    (["verify", "a-file"], "'a-file' is a file, and the output folder of a tune is wanted"),
    (["export", "a-file", "--to", "cli"], "'a-file' is a file, and the output folder of a tune is wanted"),
    (["tune", "demo", "--output", ""], "--output '' is empty"),
    (["estimate", "demo", "--gpu", ""], "--gpu '' is empty"),
    (["estimate", "demo", "--gpu", "H100", "--price", ""], "--price '' is empty"),
    (["tune", "demo", "--config", ""], "--config"),
    (["report", ""], "DIR '' is empty"),
    (["compare", "torn", ""], "DIR '' is empty"),
    (["run", "", "train.py"], "DIR '' is empty"),
    (["tune", "demo", "--output", "nul\0byte"], "can't be written"),
    (["tune", "demo", "--output", "n" * 300], "can't be written: File name too long"),
    (["verify", "no-folder"], "holds no autofit.json: there is no such folder"),
    (["report", "no-folder"], "holds no autofit.json"),
    (["report", "torn"], "can't be read"),
    (["doctor", "--device", "tpu"], "'tpu' is not known"),
    (["doctor", "--task", "poetry"], "task"),
    (["doctor", "--model", "no/such/model/here", "--device", "cpu"], "no file or folder"),
]


@pytest.mark.parametrize(
    ("words", "said"), USAGE, ids=lambda value: " ".join(value[:5]) if isinstance(value, list) else ""
)
def test_bad_input_is_one_line_and_a_hint(run, tmp_path, words, said):
    (tmp_path / "a-file").write_text("")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / DOCUMENT_FILE).write_text('{"format": 1')
    done = run(*words)
    assert done.exit_code == 2, done.stderr
    message, hint = one_line(done.stderr)
    assert message.startswith("error: ")
    assert said in message
    assert len(hint) > len("hint: ")
    assert done.stdout == ""


def test_a_python_without_docstrings_is_refused():
    command = [sys.executable, "-OO", "-m", "autofit", "verify", "somewhere"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 2
    message, hint = one_line(done.stderr)
    assert message == "error: Python leaves out docstrings here, and transformers reads its own"
    assert "PYTHONOPTIMIZE" in hint


def test_verify_tells_how_much_of_the_speed_may_be_missing(run):
    said = " ".join(run("verify", "--help").stdout.split())
    assert f"{TOLERANCE['cuda']} on a GPU, {TOLERANCE['cpu']} on a CPU" in said


@pytest.mark.parametrize("words", [["tune", "demo"], ["estimate", "demo", "--memory", "8GiB"], ["verify", "somewhere"]])
@pytest.mark.parametrize("threads", ["", "abc", "4,2"])
def test_threads_that_accelerate_launch_can_not_read_are_refused(run, monkeypatch, words, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    with pytest.raises(ValueError, match="invalid literal"):
        get_int_from_env(["OMP_NUM_THREADS"], 1)
    done = run(*words)
    assert done.exit_code == 2
    message, hint = one_line(done.stderr)
    assert message == f"error: OMP_NUM_THREADS is {threads!r} here, and accelerate launch reads a whole number from it"
    assert "unset it" in hint
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["tune"],
        ["tune", "a", "b"],
        ["tune", "demo", "--nonsense"],
        ["tune", "demo", "--trials", "x"],
        ["tune", "demo", "--seed"],
        ["verify", "x", "--steps", "1"],
        ["verify", "x", "--tolerance", "1.5"],
        ["tuen"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_told_by_the_parser(run, words):
    done = run(*words)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert "Error: " in done.stderr


def test_a_name_that_steers_the_terminal_is_shown_as_it_is_written(run, tmp_path):
    folder = tmp_path / "new\nline\x1b[31m\u202e"
    folder.mkdir()
    (folder / "config.json").write_text("")
    done = run("tune", folder)
    assert done.exit_code == 2
    message, hint = one_line(done.stderr)
    assert message.endswith(r"new\nline\x1b[31m\u202e/config.json is empty")
    assert hint
    assert done.stderr.replace("\n", "").isprintable()


def test_a_device_that_is_not_there_is_the_machines_fault(run, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run("tune", "demo", "--device", "cuda")
    assert done.exit_code == 5
    message, hint = one_line(done.stderr)
    assert message.startswith("error: --device cuda: ")
    assert "autofit doctor" in hint


def test_nothing_fits_is_an_answer_and_no_error(tune, tmp_path):
    done = tune(replay=Replay(tmp_path / "out", row_bytes=300 * GIB))
    assert done.exit_code == 3
    message, _ = one_line(done.stderr)
    assert message.startswith("Nothing fits. The tightest plan that was seen")
    assert done.stdout == ""


def test_where_every_plan_fails_the_logs_are_named(tune, tmp_path):
    done = tune(replay=Replay(tmp_path / "out", dict.fromkeys(range(9), Crashed(reason="boom"))))
    assert done.exit_code == 5
    message, hint = one_line(done.stderr)
    assert "boom" in message
    assert str(tmp_path / "out" / "trials") in hint


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_ctrl_c_keeps_the_best_so_far(tune, tmp_path, as_json):
    done = tune(*as_json, replay=Replay(tmp_path / "out", {2: KeyboardInterrupt()}))
    assert done.exit_code == 130
    assert "--resume" in one_line(done.stderr)[1]
    found = read_document(tmp_path / "out")
    assert done.stdout == dump_json(DOCUMENT, found) if as_json else "samples/s" in done.stdout


@pytest.mark.parametrize("outcomes", [{}, {2: KeyboardInterrupt()}], ids=["at its end", "a second time"])
def test_ctrl_c_while_the_answer_is_written_says_that_no_trial_is_lost(tune, tmp_path, monkeypatch, outcomes):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("autofit.commands.tunes.course.write_result", interrupted)
        done = tune(replay=Replay(tmp_path / "out", outcomes))
    assert done.exit_code == 130
    assert one_line(done.stderr) == (
        "error: stopped by Ctrl-C",
        "hint: the answer was being written: no trial is lost, go on with --resume",
    )
    assert not (tmp_path / "out" / "autofit.json").exists()
    assert tune("--resume").exit_code == 0
    assert read_document(tmp_path / "out").plan


def test_ctrl_c_before_the_tune_has_begun(run, monkeypatch):
    def interrupted(_wanted):
        raise KeyboardInterrupt

    monkeypatch.setattr("autofit.commands.tunes.backend.choose_device", interrupted)
    done = run("tune", "demo")
    assert done.exit_code == 130
    assert one_line(done.stderr)[0] == "interrupted"


ENDINGS = [signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", ENDINGS)
def test_termination_ends_a_tune_as_ctrl_c_does(tune, tmp_path, number):
    class Terminating(Replay):
        def run(self, *args, **options):
            if len(self.asked) == 2:
                os.kill(os.getpid(), number)
                time.sleep(5)
            return super().run(*args, **options)

    unheard = {one: signal.signal(one, lambda *_: pytest.fail("nobody heard it")) for one in ENDINGS}
    try:
        before = {one: signal.getsignal(one) for one in ENDINGS}
        done = tune(replay=Terminating(tmp_path / "out"))
        assert {one: signal.getsignal(one) for one in ENDINGS} == before
    finally:
        for one, handler in unheard.items():
            signal.signal(one, handler)
    assert done.exit_code == 143
    message, hint = one_line(done.stderr)
    assert number.name in message
    assert "--resume" in hint
    assert "samples/s" in done.stdout
    assert len(read_document(tmp_path / "out").trials) == 2


def test_an_estimate_that_is_terminated_while_it_is_imported_leaves_nothing(run, monkeypatch, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def imported(*_, **__):
        assert list(scratch.glob("autofit-server-*"))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(cli, "_estimate", imported)
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # without it, this process would end
    try:
        done = run("estimate", "demo", "--gpu", "4090")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done.exit_code == 143
    assert not list(scratch.iterdir())


def test_a_bug_is_not_hidden(tune, tmp_path):
    done = tune(replay=Replay(tmp_path / "out", {1: ZeroDivisionError("a bug")}))
    assert isinstance(done.exception, ZeroDivisionError)


@pytest.mark.parametrize(
    ("broken", "ratio"), [((), 1.0), ((), 49.8), (("half as fast",), 0.5)], ids=["kept", "faster", "broken"]
)
@pytest.mark.parametrize("as_json", [False, True], ids=["words", "json"])
def test_a_verification_is_told_by_its_exit_code(tune, run, monkeypatch, tmp_path, broken, ratio, as_json):
    tune(trials=1)
    found = read_document(tmp_path / "out")
    verified = Verification(
        promise=found.promise,
        outcome=found.trials[-1].outcome,
        tolerance=0.1,
        speed_ratio=ratio,
        broken=broken,
        command=("accelerate", "launch"),
        launches=1,
    )
    asked = []
    monkeypatch.setattr(
        "autofit.commands.verify.verify", lambda folder, **options: asked.append((folder, options)) or verified
    )
    done = run("verify", "out", "--steps", "7", *(["--json"] if as_json else []))
    assert asked[0][0] == "out"
    assert (asked[0][1]["steps"], asked[0][1]["tolerance"]) == (7, None)
    assert done.exit_code == (4 if broken else 0)
    if as_json:
        assert VERIFICATION.validate_json(done.stdout) == verified
    else:
        assert "promised" in done.stdout
        assert ("kept:" in done.stdout) == (not broken)
        assert ("far above the promise" in done.stdout) == (ratio > 2)
    if broken:
        assert "half as fast" in one_line(done.stderr)[0]


@pytest.mark.parametrize("share", ["0", "1"])
def test_what_a_user_lets_pass_does_not_say_what_is_far_above(tune, run, monkeypatch, tmp_path, share):
    tune(trials=1)
    found = read_document(tmp_path / "out")
    asked = []

    def verify(_, **options):
        asked.append(options["tolerance"])
        return judge(found.promise, found.trials[-1].outcome, tolerance=options["tolerance"])

    monkeypatch.setattr("autofit.commands.verify.verify", verify)
    done = run("verify", "out", "--tolerance", share)
    assert (asked, done.exit_code) == ([float(share)], 0)
    assert "kept: every knob took effect, speed and memory are as promised" in done.stdout


def test_a_folder_named_like_a_package_is_not_imported(tmp_path):
    for name in ("click", "optuna", "pydantic"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('a folder of the user')")
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-m", "autofit", "report", "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert one_line(done.stderr)[0] == "error: out holds no autofit.json"


@pytest.mark.parametrize("module", ["autofit", "autofit.cli"])
def test_the_program_itself(tmp_path, module):
    """The real thing, as a shell starts it."""
    command = [sys.executable, "-m", module]
    done = subprocess.run([*command, "report", str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert one_line(done.stderr) == (
        f"error: {tmp_path} holds no autofit.json",
        "hint: give the folder of a tune",
    )
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"autofit, version {autofit.__version__}\n"


def test_the_doctor_takes_the_hint_that_it_gives(run, monkeypatch, server, tmp_path):
    monkeypatch.setattr("autofit.commands.doctor.ForkServer", lambda *_: Lent(server))
    config = write_config(tmp_path, {"model_type": "bert", "architectures": ["BertForNextSentencePrediction"]})
    refused = run("doctor", "--device", "cpu", "--model", str(config))
    assert refused.exit_code == 2
    assert "--task takes another model of its type, with another loss: causal-lm" in refused.stderr
    assert run("doctor", "--device", "cpu", "--model", str(config), "--task", "causal-lm").exit_code == 0


def test_a_doctor_that_is_terminated_says_so(run, monkeypatch):
    monkeypatch.setattr("autofit.commands.doctor.examine", lambda *_: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # without it, this process would end
    try:
        done = run("doctor", "--device", "cpu")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done.exit_code == 143
    assert "stopped by SIGTERM" in done.stderr


def test_the_doctor_tells_what_is_to_be_had(run, monkeypatch, server):
    monkeypatch.setattr("autofit.commands.doctor.ForkServer", lambda *_: Lent(server))
    monkeypatch.setattr(other_processes, "warnings", lambda *_: ())  # who else is here differs, and takes lines
    done = run("doctor", "--device", "cpu", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["hardware"]["device"] == "cpu"
    assert {offer["technique"] for offer in found["choices"]} >= {"micro_batch", "precision", "offload"}
    assert found["packages"]["torch"]
    listed = {(row["technique"], row["choice"]): row for row in found["techniques"]}
    assert set(listed) == {(offer["technique"], offer["value"]) for offer in found["choices"]}
    assert {name for name, _ in listed} == {one.name for one in techniques()}
    for row in listed.values():
        assert list(row) == ["technique", "choice", "class", "available", "reason"]
        assert row["class"] in {"exact", "numeric", "method"}
        assert row["reason"]
    assert listed["precision", "fp32"]["available"] is True
    assert listed["offload", "optimizer"]["available"] is False
    assert listed["checkpointing", "selective"]["available"] is True  # on request
    short = run("doctor", "--device", "cpu").stdout
    full = run("doctor", "--device", "cpu", "--all").stdout
    assert len(short.splitlines()) <= SCREEN_LINES
    for wanted in ("memory:", "packages:", "not installed:", "paged_adamw_8bit", "the device's memory is the"):
        assert wanted in full
    for wanted in ("memory:", "packages:", "paged_adamw_8bit", "not here: activations", "* of class method"):
        assert wanted in short
    cut = [line.rstrip() for line in short.splitlines() if "not here:" in line]
    assert all(line.endswith((")", "…")) for line in cut)
    assert "micro_batch" in full
    assert "micro_batch" not in short
    assert "checkpointing" in short


# --- streams that nobody reads, and signals that nobody wants to hear ------------------------------------------------

COMMAND = [sys.executable, "-m", "autofit.cli", "schema"]


def test_a_reader_that_has_seen_enough_is_no_failure():
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


@pytest.mark.parametrize("word", ["schema", "--help", "--version"])
def test_a_stdout_that_takes_nothing_is_the_machine(word):
    command = [*COMMAND[:-1], word]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 5
    assert done.stderr == "error: stdout can't be written: No space left on device\n"


def test_a_table_is_printed_in_a_locale_without_its_letters(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    terminal.data_console().print("83 \u00b1 2 \u2588")
    sys.stdout.flush()
    assert written.getvalue() == b"83 \xb1 2 \\u2588\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_streams_that_are_closed_from_the_start(closed):
    done = subprocess.run(
        f"{shlex.join(COMMAND)} {closed}", shell=True, capture_output=True, cwd=REPOSITORY, check=False
    )
    assert done.returncode == 0
    assert done.stderr == b""
    assert bool(done.stdout) == (closed == "2>&-")


def test_a_current_folder_that_is_gone(tmp_path):
    command = f'mkdir "{tmp_path}/gone" && cd "{tmp_path}/gone" && rmdir ../gone && {shlex.join(COMMAND)}'
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 5
    assert "error: the current folder is gone\n" in done.stderr


def test_an_error_that_nobody_reads_keeps_its_exit_code(tmp_path):
    command = [sys.executable, "-m", "autofit.cli", "report", str(tmp_path / "none")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY) as process:
        process.stderr.close()
        assert process.wait(60) == 2


def test_a_tune_whose_terminal_was_closed_keeps_its_exit_code(tune, tmp_path, monkeypatch):
    def closed(*_words, **_how):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("autofit.cli._show_answer", closed)
    monkeypatch.setattr(terminal, "_redirect_to_null", lambda _: None)
    done = tune(replay=Replay(tmp_path / "out", {2: Terminated("stopped by SIGHUP")}))
    assert done.exit_code == 143
    assert one_line(done.stderr)[0] == "error: stopped by SIGHUP"


def test_nohup_is_obeyed():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminal.terminable():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
