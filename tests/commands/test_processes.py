"""How many processes a training may have here, and a whole tune of two on this CPU."""

import dataclasses
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from autofit import cli
from autofit.commands.facts import shared_by, workload
from autofit.commands.launching import on_its_device
from autofit.commands.profile import profile
from autofit.commands.request import Request
from autofit.commands.scripts.run import run
from autofit.commands.verify import verify
from autofit.contract.outcome import Measured
from autofit.contract.script import Script
from autofit.output import wording
from autofit.output.document import read_document
from autofit.output.emit import YAML
from autofit.registry import recipe_of
from autofit.system.errors import InputError
from autofit.training.launch_environment import launch_environment, write_yaml
from autofit.training.ranks import free_port
from tests.output.test_emit import a_document, a_plan, output_folder, written
from tests.support.synthetic import cpu_facts, cuda_facts, model
from tests.support.tiny import write_config

TUNE = ["tune", "demo", "--device", "cpu", "--processes"]


def test_more_processes_than_cards_are_refused(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    hardware = dataclasses.replace(cuda_facts().hardware, count=4)
    assert shared_by(hardware, 4) is hardware
    with pytest.raises(InputError, match="--processes 8: 4 GPUs can be seen here") as caught:
        shared_by(hardware, 8)
    assert "--processes 4 or less" in caught.value.hint
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    with pytest.raises(InputError, match="--processes 2: 1 GPU can be seen here"):
        shared_by(hardware, 2)


def test_processes_on_the_cpu_share_its_memory_and_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    whole = cpu_facts().hardware
    half = shared_by(whole, 2)
    assert (half.total_bytes, half.free_bytes, half.threads) == (whole.total_bytes // 2, whole.free_bytes // 2, 4)
    work = workload(Request(model="demo", processes=2, global_batch=8), model(), half, lambda _: None)
    assert work.processes == 2
    assert work.limit_bytes == int(half.free_bytes * 0.92)
    assert 2 * work.host_limit_bytes <= whole.host_free_bytes


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["0"], "--processes 0 is out of range"),
        (["1000"], "--processes 1000 is out of range"),
        (["two"], "not a valid"),
        (["4", "--nodes", "0"], "--nodes 0 is out of range"),
        (["128", "--nodes", "1"], "--processes 128 is out of range"),
        (["5", "--nodes", "2"], "--nodes 2: 5 processes can't be spread over them evenly"),
        (["4", "--nodes", "2"], "--nodes 2: a tune over several machines runs on a Ray cluster"),
    ],
)
def test_a_number_that_is_none_is_refused_in_a_line(tmp_path, more, words):
    done = CliRunner().invoke(cli.main, [*TUNE, *more, "--output", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert words in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_batch_that_two_processes_can_not_share_is_refused(tmp_path):
    done = CliRunner().invoke(cli.main, [*TUNE, "2", "--global-batch", "5", "--output", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "a global batch of 5 can't be split over 2 processes" in done.output
    assert "4 or 6 can" in done.output


@pytest.mark.slow
@pytest.mark.parametrize("launch_path", ["trainer", pytest.param("loop", marks=pytest.mark.by_hand)])
def test_a_tune_of_two_processes_is_launched_and_kept(tmp_path, monkeypatch, launch_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for one another crawl where others compute too
    config, out = write_config(tmp_path / "llama"), tmp_path / "out"
    held = ("micro_batch=1", "precision=fp32", "attention=default", "kernels=none", "checkpointing=off")
    fixed = [part for knob in (*held, "optimizer=adamw") for part in ("--fix", knob)]
    sizes = ["--seq-len", "32", "--global-batch", "4", "--trials", "1", "--launch-path", launch_path]
    command = ["tune", str(config), "--device", "cpu", "--processes", "2", *sizes, *fixed, "--output", str(out)]
    done = CliRunner().invoke(cli.main, command)
    assert done.exit_code == 0, done.output
    found = read_document(out)
    assert (found.plan["parallel"], found.plan["accumulation"], found.workload.processes) == ("ddp", 2, 2)
    assert found.guard.verdict == "same", found.guard.words
    launched = verify(out, steps=2, tolerance=1)  # how fast it is says nothing beside other tests
    assert isinstance(launched.outcome, Measured), launched.outcome
    assert not launched.broken
    assert launched.outcome.evidence.of("parallel")["processes"] == 2


def of_machines(facts, nodes, processes):
    """Facts of a training that several machines share."""
    work = dataclasses.replace(facts.workload, nodes=nodes, processes=processes)
    return dataclasses.replace(facts, workload=work)


def test_an_answer_for_several_machines_says_what_each_runs_and_is_not_verified_on_one(tmp_path):
    facts = of_machines(cuda_facts(global_batch=64), nodes=4, processes=32)
    folder = output_folder(tmp_path)
    document = a_document(a_plan(facts, parallel="ddp"), facts)
    script = Script(path="train.py", sha256="", trainer="Trainer", micro_batch=1, accumulation=1)
    theirs = dataclasses.replace(document, workload=dataclasses.replace(document.workload, script=script))
    launch, _ = wording.launch_commands(document, folder)
    assert "--machine_rank 0 --main_process_ip ADDRESS" in " ".join(launch)
    assert "train.py --machine-rank 0 --main-process-ip ADDRESS" in " ".join(wording.launch_commands(theirs, folder)[0])
    for one, said in ((document, document.script), (theirs, wording.script_lines(theirs, folder))):
        assert wording.launch_commands(one, folder)[1][-2:] == ["--on", "auto"]
        assert "on each of the 4 machines" in " ".join(said)
    written(folder, facts, check=lambda *_: None, parallel="ddp")
    script = tmp_path / "train.py"
    script.write_text("")
    for command in (verify, profile, lambda folder: run(folder, script)):
        with pytest.raises(InputError, match=r"is for 4 machines, and (verify|profile|run) "):
            command(folder)
    with pytest.raises(InputError, match="--machine-rank 4 is none of 4 machines"):
        run(folder, script, machine_rank=4, main_process_ip="here")


def test_a_launch_for_one_machine_is_told_of_no_other(tmp_path):
    folder = output_folder(tmp_path)
    written(folder, check=lambda *_: None)
    script = tmp_path / "train.py"
    script.write_text("")
    done = CliRunner().invoke(
        cli.main, ["run", str(folder), str(script), "--machine-rank", "0", "--", "--their", "args"]
    )
    assert (done.exit_code, "--machine-rank: " in done.output) == (2, True), done.output


@pytest.mark.parametrize(("processes", "shown"), [(1, "3"), (2, None), (8, None)])
def test_one_process_is_shown_its_own_card_and_several_find_theirs(processes, shown):
    facts = cuda_facts(global_batch=64, processes=processes)
    facts = dataclasses.replace(facts, hardware=dataclasses.replace(facts.hardware, count=8, visible_id="3"))
    plan = a_plan(facts, parallel="ddp" if processes > 1 else "none")
    assert recipe_of(plan, facts).emission.accelerate.get("gpu_ids") == shown


def test_ranks_on_the_cpu_know_one_another_before_a_trainer_is_made(tmp_path):
    """A script may ask for its rank, or read its own part of the data, as soon as it has arguments."""
    facts = cpu_facts(global_batch=8, processes=2)
    write_yaml(tmp_path / YAML, dict(recipe_of(a_plan(facts, parallel="ddp"), facts).emission.accelerate))
    for environment in (launch_environment(tmp_path / YAML, 1), on_its_device(facts, print)):
        assert environment["ACCELERATE_USE_CPU"] == "true"
    assert on_its_device(cuda_facts(global_batch=8, processes=2), print) == {}


@pytest.mark.slow
def test_two_launchers_of_one_file_make_one_world(tmp_path):
    facts = of_machines(cpu_facts(global_batch=8), nodes=2, processes=2)
    emitted = recipe_of(a_plan(facts, parallel="ddp"), facts).emission
    assert "machine_rank" not in emitted.accelerate
    assert "main_process_ip" not in emitted.accelerate
    write_yaml(tmp_path / YAML, dict(emitted.accelerate))
    script = tmp_path / "count.py"
    script.write_text(
        "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n"
        "ranks = accelerator.gather(torch.tensor([accelerator.process_index]))\n"
        "print('world', accelerator.num_processes, ranks.tolist())\naccelerator.end_training()\n"
    )
    place = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", tmp_path / YAML]
    launched = [
        subprocess.Popen(
            [*command, "--machine_rank", str(rank), *place, script],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in launched:
            said, _ = process.communicate(timeout=120)
            assert "world 2 [0, 1]" in said
    finally:
        for process in launched:
            process.kill()
