"""Tuned for real, and launched for real: what `autofit tune` writes is what `accelerate launch` runs."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from pydantic import TypeAdapter

from autofit.commands import launching, verify
from autofit.commands.request import STARTED
from autofit.commands.verify import VERIFICATION
from autofit.contract.facts import Facts
from autofit.contract.outcome import Measured, Unsupported
from autofit.output import result
from autofit.output.document import DOCUMENT, DOCUMENT_FILE, MODEL_FOLDER, REQUEST, read_document
from autofit.registry import technique
from autofit.system.errors import MachineError
from autofit.system.strict_json import dump_json
from tests.support import synthetic
from tests.support.tiny import MIB, PLAIN, REPOSITORY, gone, offspring, wait_until, write_config

pytestmark = pytest.mark.slow
PATHS = ("trainer", "loop")
EVERY_KNOB = {
    "micro_batch": 2,
    "accumulation": 2,
    "precision": "bf16",
    "checkpointing": "full",
    "optimizer": "adamw_8bit",
}
WIDE_TOLERANCE = 0.8
"""These tests run beside others, on machines that are shared: whether speed is kept to a tenth is no matter here."""


def environment(folder):
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}


def python(folder, *words):
    """Runs Python as a shell in ``folder`` does."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def command(folder, *words):
    """Runs a program as a shell in ``folder`` does."""
    return python(folder, "-m", *words)


AUTOFIT = ("-P", "-m", "autofit.cli")
"""As the installed command is run: what lies in the current folder is no package."""


def like_packages(folder):
    """A folder of the user's in which others are called as packages are; they stand in nobody's way."""
    for name in ("scipy", "torch", "accelerate"):
        (folder / "projects" / name).mkdir(parents=True, exist_ok=True)
        (folder / "projects" / name / "__init__.py").write_text("raise RuntimeError('a folder of the user')")
    return folder / "projects"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Output folders of real tunes, by launch path."""
    known = {}

    def find(launch_path):
        if launch_path not in known:
            folder = tmp_path_factory.mktemp(launch_path)
            write_config(folder / "tiny", vocab_size=4096, hidden_size=64, intermediate_size=128)
            done = python(
                like_packages(folder), *AUTOFIT, "tune", "../tiny", "--output", "../out", "--trials", 3,
                "--global-batch", 4, "--launch-path", launch_path,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert "a folder of the user" not in done.stderr
            known[launch_path] = folder / "out"
        return known[launch_path]

    return find


@pytest.fixture(scope="module")
def every_knob(tuned, server, tmp_path_factory):
    """Output folders whose plan, made by hand, has no baseline value, by launch path."""
    known = {}

    def find(launch_path):
        if launch_path not in known:
            source = tuned(launch_path)
            folder = tmp_path_factory.mktemp(f"every-knob-{launch_path}") / "out"
            shutil.copytree(source / MODEL_FOLDER, folder / MODEL_FOLDER)
            document = dataclasses.replace(read_document(source), plan=PLAIN.replaced(**EVERY_KNOB))
            result.write_result(document, folder, server)
            known[launch_path] = folder
        return known[launch_path]

    return find


def copied(folder, to):
    """A copy that a test may tamper with."""
    for name in ("accelerate.yaml", "training_args.json", "report.html", "autofit.json"):
        to.mkdir(exist_ok=True)
        shutil.copyfile(folder / name, to / name)
    shutil.copytree(folder / MODEL_FOLDER, to / MODEL_FOLDER)
    return to


def promise_changed(folder, **changes):
    document = read_document(folder)
    promise = dataclasses.replace(document.promise, **changes)
    text = dump_json(DOCUMENT, dataclasses.replace(document, promise=promise))
    (folder / DOCUMENT_FILE).write_text(text, "utf-8")


def no_words_of_a_bug(done):
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("launch_path", ["trainer", pytest.param("loop", marks=pytest.mark.by_hand)])
def test_two_processes_do_not_train_with_twice_the_rows(tuned, tmp_path, launch_path):
    folder = copied(tuned(launch_path), tmp_path / "out")
    script = REPOSITORY / "examples" / f"train_{launch_path}.py"
    given = folder / "training_args.json" if launch_path == "trainer" else folder
    two = tmp_path / "two.yaml"
    two.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\n")
    done = subprocess.run(
        [
            sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(two),
            str(script), str(given),
        ],
        cwd=tmp_path,
        env={**environment(tmp_path), "ACCELERATE_USE_CPU": "true"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "this training runs on 2 processes" in done.stderr
    assert "an optimizer step would take 8 rows, not 4" in done.stderr
    assert "trained" not in done.stdout


# the promise


@pytest.mark.parametrize("launch_path", PATHS)
def test_a_real_tune_makes_a_promise_that_verify_finds_kept(tuned, launch_path):
    folder = tuned(launch_path)
    document = read_document(folder)
    assert document.promise.launch_path == launch_path
    words = ("verify", folder, "--json", "--tolerance", str(WIDE_TOLERANCE))
    done = python(like_packages(folder.parent), *AUTOFIT, *words)
    no_words_of_a_bug(done)
    found = TypeAdapter(verify.Verification).validate_json(done.stdout)
    assert found.promise == document.promise
    assert isinstance(found.outcome, Measured), found.outcome
    assert found.outcome.fidelity == "whole"
    assert len(found.outcome.steps) == 5
    assert found.outcome.evidence.of("accumulation")["micro_steps"] == document.plan["accumulation"]
    # where others had the processors at that moment, the speed alone may have suffered
    assert (done.returncode, found.broken, found.launches) == (0, (), 1)
    # trial and launch count memory alike, from whatever base they started
    assert abs(found.outcome.peak_bytes - found.promise.peak_bytes) < 0.25 * found.promise.peak_bytes + 8 * MIB


def test_a_real_tune_times_the_device_and_keeps_what_it_found(tuned):
    folder = tuned("trainer")
    facts = STARTED.validate_json((folder / REQUEST).read_bytes()).facts
    kinds = {f"matmul {precision}" for precision in facts.hardware.precisions}
    assert kinds <= set(facts.rates)
    assert all(rate > 0 for rate in facts.rates.values())
    assert set(facts.kernel_overhead_bytes) == kinds - {"matmul fp32"}
    assert sum(count for *_, count in read_document(folder).model.products) > 1


SAMPLE = {
    "trainer": {"attention": "eager", "checkpointing": "selective", "adapter": "lora:r=16", "quantization": "nf4"},
    "loop": {"precision": "bf16_weights", "kernels": "chunked_ce", "adapter": "dora:r=16", "optimizer": "adafactor"},
}
"""What no other test here launches; `tests/bench/launch_matrix.py` launches every value by itself."""


@pytest.mark.parametrize("launch_path", PATHS)
def test_a_sample_of_other_values_is_launched_for_two_steps(tuned, server, tmp_path, monkeypatch, launch_path):
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    source, folder = tuned(launch_path), tmp_path / "out"
    shutil.copytree(source / MODEL_FOLDER, folder / MODEL_FOLDER)
    document = dataclasses.replace(read_document(source), plan=PLAIN.replaced(**SAMPLE[launch_path]))
    result.write_result(document, folder, server)
    found = verify.verify(folder, steps=2, tolerance=1.0)
    assert isinstance(found.outcome, Measured), found.outcome  # so each value was seen in effect
    assert (len(found.outcome.steps), found.launches, found.broken) == (2, 1, ())
    for name in SAMPLE[launch_path]:
        assert technique(name).in_effect(PLAIN[name], found.outcome.evidence.of(name), document.facts)


@pytest.mark.by_hand
def test_a_promise_that_is_too_good_is_found_broken(tuned, tmp_path):
    folder = copied(tuned("loop"), tmp_path / "out")
    promise = read_document(folder).promise
    promise_changed(folder, samples_per_second=promise.samples_per_second * 100, limit_bytes=MIB)
    done = command(tmp_path, "autofit.cli", "verify", "out")
    assert done.returncode == 4
    no_words_of_a_bug(done)
    last = done.stderr.strip().splitlines()[-3]
    assert last.startswith("error: the launch broke the promise: peak memory ")
    assert "is above the ceiling of 1.0 MiB" in last
    assert "samples/s are 9" in last
    assert "below the promised" in last
    assert done.stdout.startswith("promised ")
    assert "launched " in done.stdout
    assert "launch 2: " in done.stderr  # what was slow is tried once more
    assert "kept" not in done.stdout


def test_a_launch_that_breaks_the_ceiling_is_out_of_memory(tuned, tmp_path):
    folder = copied(tuned("trainer"), tmp_path / "out")
    document = read_document(folder)
    workload = dataclasses.replace(document.workload, limit_bytes=MIB)
    text = dump_json(DOCUMENT, dataclasses.replace(document, workload=workload))
    (folder / DOCUMENT_FILE).write_text(text, "utf-8")
    done = command(tmp_path, "autofit.cli", "verify", "out", "--json")
    assert done.returncode == 4
    no_words_of_a_bug(done)
    found = VERIFICATION.validate_json(done.stdout)
    assert found.outcome.kind == "out_of_memory"
    assert found.speed_ratio == 0
    assert found.launches == 1
    assert "error: the launch broke the promise: out of memory on the device in forward: " in done.stderr


def test_an_argument_that_was_switched_off_is_noticed(every_knob, tmp_path):
    folder = copied(every_knob("trainer"), tmp_path / "out")
    arguments = json.loads((folder / "training_args.json").read_text())
    names = [name for name, value in arguments.items() if name.endswith("checkpointing") and value is True]
    assert len(names) == 1
    (folder / "training_args.json").write_text(json.dumps({**arguments, names[0]: False}))
    done = command(tmp_path, "autofit.cli", "verify", "out", "--json")
    assert done.returncode == 4
    no_words_of_a_bug(done)
    found = VERIFICATION.validate_json(done.stdout)
    assert isinstance(found.outcome, Unsupported)
    (words,) = found.broken
    why = "0 of 2 layers ran forward more than once in a micro-step"
    assert words == f"unsupported: checkpointing=full did not take effect: {why}"
    assert f"error: the launch broke the promise: {words}" in done.stderr
    assert "hint: was one of its files changed" in done.stderr


def test_a_folder_without_an_answer_is_bad_input(tmp_path):
    done = command(tmp_path, "autofit.cli", "verify", ".")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "error: . holds no autofit.json"
    assert done.stdout == ""


@pytest.mark.parametrize("name", ["accelerate.yaml", "training_args.json", "model/config.json"])
def test_a_folder_that_lacks_a_file_is_bad_input(tuned, tmp_path, name):
    folder = copied(tuned("trainer"), tmp_path / "out")
    (folder / name).unlink()
    done = command(tmp_path, "autofit.cli", "verify", "out")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == f"error: out holds no {name}"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_verify_takes_its_launch_with_it(tuned, number, code):
    folder = tuned("loop")
    process = subprocess.Popen(
        [sys.executable, "-m", "autofit.cli", "verify", folder.name, "--steps", "1000"],
        cwd=folder.parent,
        env=environment(folder.parent),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started = []
    try:
        wait_until(lambda: len(offspring(process.pid)) == 2, what="the training under the launcher")
        started = offspring(process.pid)
        process.send_signal(number)
        words = process.communicate(timeout=60)[1]
        assert process.returncode == code
        assert gone(*started)
    finally:
        process.kill()
        process.communicate()
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert words.strip() == ("interrupted" if number == signal.SIGINT else "error: stopped by SIGTERM")
    assert list(folder.parent.glob("autofit-verify-*")) == []


# the examples


def launched(folder, example, *words):
    return command(
        folder.parent, "accelerate.commands.accelerate_cli", "launch",
        "--config_file", f"{folder.name}/accelerate.yaml", REPOSITORY / "examples" / example, *words,
    )  # fmt: skip


def check_trained(done, folder):
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("ignored:")] == []
    assert f"plan: {read_document(folder).plan.words()}" in lines
    plan = read_document(folder).plan
    assert lines[-1] == f"trained 4 steps of {plan['micro_batch']} x {plan['accumulation']} rows a process"


@pytest.mark.parametrize("which", [pytest.param("tuned", marks=pytest.mark.by_hand), "every_knob"])
def test_the_trainer_example_runs_by_the_files(request, which):
    folder = request.getfixturevalue(which)("trainer")
    check_trained(launched(folder, "train_trainer.py", f"{folder.name}/training_args.json"), folder)


@pytest.mark.parametrize("which", [pytest.param("tuned", marks=pytest.mark.by_hand), "every_knob"])
def test_the_loop_example_runs_by_the_files(request, which):
    folder = request.getfixturevalue(which)("loop")
    check_trained(launched(folder, "train_loop.py", folder.name), folder)


@pytest.mark.parametrize("launch_path", [pytest.param("trainer", marks=pytest.mark.by_hand), "loop"])
def test_an_example_says_that_its_rows_are_tokens(tuned, tmp_path, launch_path):
    folder = copied(tuned(launch_path), tmp_path / "out")
    document = json.loads((folder / DOCUMENT_FILE).read_text("utf-8"))
    document["model"] |= {"task": "image-classification", "auto": "AutoModelForImageClassification"}
    (folder / DOCUMENT_FILE).write_text(json.dumps(document), "utf-8")
    given = folder / "training_args.json" if launch_path == "trainer" else folder
    done = python(tmp_path, REPOSITORY / "examples" / f"train_{launch_path}.py", given)
    assert done.returncode == 1
    said = f"the answer in {folder} is for image-classification, and the rows here are tokens: "
    assert done.stderr.splitlines()[-1].startswith(said)
    no_words_of_a_bug(done)


def test_the_example_says_which_knob_was_ignored(every_knob, tmp_path):
    folder = copied(every_knob("trainer"), tmp_path / "out")
    arguments = json.loads((folder / "training_args.json").read_text())
    arguments["gradient_accumulation_steps"] = 1
    arguments["optim"] = "adamw_torch"
    (folder / "training_args.json").write_text(json.dumps(arguments))
    done = launched(folder, "train_trainer.py", "out/training_args.json")
    assert done.returncode == 0, done.stderr
    ignored = [line for line in done.stdout.splitlines() if line.startswith("ignored:")]
    assert ignored == [
        "ignored: accumulation=2: 1 micro-batches went into an optimizer step, not 2",
        "ignored: optimizer=adamw_8bit: torch.optim.adamw.AdamW stepped, not bitsandbytes.optim.adamw.AdamW",
    ]


BUSY, QUIET = {"disturbance": 0.6}, {}


@pytest.mark.parametrize(
    ("launches", "answer"),
    [
        ([(0.1, BUSY), (1.0, QUIET)], 2),
        ([(0.1, BUSY), (0.1, BUSY), (0.1, BUSY), (0.9, BUSY)], 4),
        ([(0.1, QUIET), (0.2, QUIET)], "broken"),
        ([(0.1, BUSY), (0.1, QUIET), (0.2, QUIET)], "broken"),
        ([(0.1, BUSY), (0.3, BUSY), (0.1, BUSY), (0.1, BUSY)], "others"),
    ],
)
def test_a_launch_beside_others_says_nothing(tuned, monkeypatch, launches, answer):
    folder = tuned("loop")
    document = read_document(folder)
    facts = Facts(model=document.model, hardware=document.hardware, workload=document.workload)
    outcomes = [
        synthetic.measured((document.promise.step_seconds / speed,) * 3, MIB, facts, **others)
        for speed, others in launches
    ]
    waiting, said = list(outcomes), []
    monkeypatch.setattr(launching, "launch_here", lambda *_: (("accelerate",), waiting.pop(0)))
    if answer == "others":
        with pytest.raises(MachineError, match=r"in each of 4 launches other processes .* came to 30%"):
            verify.verify(folder, say=said.append)
    else:
        found = verify.verify(folder, say=said.append)
        assert bool(found.broken) == (answer == "broken")
        assert found.outcome == (outcomes[-1])
    assert waiting == []
    busy = [others is BUSY and speed < 0.7 for speed, others in launches]
    assert ["other processes used 60%" in words for words in said] == busy[: len(said)]


def test_who_computes_on_the_host_is_no_excuse_on_a_gpu(tuned, monkeypatch):
    folder = tuned("loop")
    document = read_document(folder)
    there = dataclasses.replace(document, hardware=dataclasses.replace(document.hardware, device="cuda"))
    facts = Facts(model=document.model, hardware=document.hardware, workload=document.workload)
    slow = synthetic.measured((10 * document.promise.step_seconds,) * 3, MIB, facts, **BUSY)
    launched = []
    monkeypatch.setattr(verify, "read_document", lambda _: there)
    monkeypatch.setattr(launching, "launch_here", lambda *_: launched.append(1) or (("accelerate",), slow))
    assert verify.verify(folder).broken
    assert len(launched) == 1
