"""Faults on a real device: out of memory in every phase, memory that comes back, and somebody who takes half of it."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import textwrap

import pytest

from autofit.commands.model_source import fetch
from autofit.contract.outcome import Crashed, Measured, OutOfMemory
from autofit.machine.nvml import device_used_bytes
from autofit.search.loop import MOST_REPEATS, Campaign
from autofit.search.trial_log import TrialLog
from autofit.space import build
from autofit.system.forking.server import ForkServer
from autofit.system.units import MIB
from autofit.training.runner import ProcessRunner
from autofit.training.timing import Effort
from tests.gpu.card import facts_on_card
from tests.gpu.models import LLAMA
from tests.support.tiny import PLAIN, SUPPORT, gone

QUICK = Effort(min_steps=2, max_steps=3, seconds=1.0)
PLAN = PLAIN.replaced(micro_batch=4, accumulation=2)
FOREIGNER = """
import sys, torch
kept = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("taken", flush=True)
sys.stdin.read()
"""


NEIGHBOUR = """
import pathlib, sys, time, torch
first, then, folder = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
kept = torch.empty(first, dtype=torch.uint8, device="cuda")
print("taken", flush=True)
while not (folder / "go").exists():
    time.sleep(0.01)
del kept
torch.cuda.empty_cache()
kept = torch.empty(then, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
(folder / "changed").touch()
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    """A server whose jobs can be told to fail, the folder of a model, and the facts."""
    folder = tmp_path_factory.mktemp("faults")
    source = folder / "source.json"
    source.write_text(json.dumps(LLAMA))
    config = fetch(str(source), folder / "model")
    with contextlib.closing(ForkServer(folder / "server.log", "cuda", ("faulty",))) as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(SUPPORT))
            server.start()
        yield server, config, facts_on_card(server, config)


@pytest.fixture
def try_fault(device, tmp_path):
    """Runs a trial whose process does something else than its work; all of the device's memory is back after it."""
    server, config, facts = device
    fault = config / "fault.py"
    uuid = facts.hardware.uuid

    def run(code=None, *, limit_bytes=None, limit_seconds=300.0):
        work = dataclasses.replace(facts.workload, limit_bytes=limit_bytes or facts.workload.limit_bytes)
        runner = ProcessRunner(tmp_path / "trials", dataclasses.replace(facts, workload=work), config, server)
        before = device_used_bytes(uuid)
        fault.unlink(missing_ok=True)
        if code is not None:
            fault.write_text(textwrap.dedent(code))
        try:
            outcome = runner.run(0, PLAN, QUICK, purpose="search", limit_seconds=limit_seconds).outcome
        finally:
            fault.unlink(missing_ok=True)
        runner.settle()
        assert device_used_bytes(uuid) <= before + 64 * MIB, "memory of the device did not come back"
        return outcome

    return run


@pytest.mark.parametrize(
    ("at", "phase"),
    [("load", "load"), ("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer")],
)
def test_the_device_runs_out_in_each_phase(try_fault, at, phase):
    outcome = try_fault(f"""
        import torch
        def act():
            kept = [torch.empty(1 << 28, dtype=torch.uint8, device="cuda") for _ in range(4096)]
        at({at!r}, act, 0)
        honest(folder)
    """)
    assert isinstance(outcome, OutOfMemory), outcome
    assert outcome.where == "device"
    assert outcome.phase == phase
    assert outcome.peak_bytes > 0.9 * outcome.limit_bytes
    assert not outcome.external_pressure


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("import ctypes; ctypes.CDLL(None).abort()", "SIGABRT"),
    ],
)
def test_a_trial_that_dies_with_memory_on_the_device(try_fault, code, words):
    outcome = try_fault(f"def act():\n    {code}\nat('backward', act)\nhonest(folder)\n")
    assert isinstance(outcome, Crashed)
    assert words in outcome.reason


def test_an_assertion_of_a_kernel_is_a_crash_and_the_next_trial_runs(try_fault):
    outcome = try_fault("""
        import torch
        def act():
            torch.zeros(4, device="cuda")[torch.tensor([7], device="cuda")].sum().item()
        at("forward", act)
        honest(folder)
    """)
    assert isinstance(outcome, Crashed)
    assert isinstance(try_fault(), Measured)


def test_a_hang_with_a_full_device_is_killed_and_its_memory_is_back(try_fault):
    outcome = try_fault(
        """
        import ctypes, signal, torch
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        def act():
            kept = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
            ctypes.PyDLL(None).sleep(1000)
        at("backward", act)
        honest(folder)
        """,
        limit_seconds=40.0,
    )
    assert outcome.kind == "timed_out"


@contextlib.contextmanager
def foreigner(count, *more, program=FOREIGNER):
    """Another process that holds so many bytes of the device."""
    command = [sys.executable, "-c", program, *map(str, (count, *more))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"taken\n"
            yield process
        finally:
            process.kill()
    assert gone(process.pid)


def test_a_process_that_takes_the_device_in_the_middle_is_noticed_and_trials_are_repeated(device, tmp_path):
    server, config, facts = device
    used = device_used_bytes(facts.hardware.uuid)
    limit = int((facts.hardware.total_bytes - used) * 0.9)
    work = dataclasses.replace(facts.workload, limit_bytes=limit)
    facts = dataclasses.replace(facts, workload=work)
    notes, trials = [], TrialLog()
    runner = ProcessRunner(tmp_path / "trials", facts, config, server, known=trials, note=notes.append)
    campaign = Campaign(facts=facts, space=build(facts), runner=runner, trials=trials, note=notes.append)
    campaign.repeats = MOST_REPEATS  # a busy machine disturbs trials too: those are not repeated here
    taken = contextlib.ExitStack()

    class Robbed:
        """Half of the device is taken before the second trial, and given back after it."""

        def run(self, number, plan, effort, **given):
            if number == 1:
                taken.enter_context(foreigner((facts.hardware.total_bytes - used) // 2))
                free = facts.hardware.total_bytes - device_used_bytes(facts.hardware.uuid)
                hoard = f"""
                import torch
                def act():
                    kept = torch.empty({free + (limit - free) // 2}, dtype=torch.uint8, device="cuda")
                at("forward", act)
                honest(folder)
                """
                (config / "fault.py").write_text(textwrap.dedent(hoard))
            try:
                return runner.run(number, plan, effort, **given)
            finally:
                (config / "fault.py").unlink(missing_ok=True)
                taken.close()

    campaign.runner = Robbed()
    for rows in (2, 4):
        campaign.run(PLAN.replaced(micro_batch=rows, accumulation=8 // rows), QUICK, "search")
    kinds = [trial.outcome.kind for trial in trials]
    assert kinds == ["measured", "out_of_memory", "measured"]
    assert trials[1].outcome.external_pressure
    assert any("another process took memory" in note for note in notes)
    assert any("trial 1 ran out of memory that other processes held" in note for note in notes)
    assert campaign.decide() is not None


@pytest.mark.parametrize(("first", "then"), [(0.01, 0.7), (0.7, 0.01)], ids=["takes", "gives back"])
def test_what_a_neighbour_takes_or_gives_back_while_a_trial_warms_up_is_not_the_trial_s(
    try_fault, device, tmp_path, first, then
):
    alone = try_fault()
    assert isinstance(alone, Measured), alone
    server, config, facts = device
    code = f"""
    import pathlib, time
    def act():
        pathlib.Path({str(tmp_path / "go")!r}).touch()
        while not pathlib.Path({str(tmp_path / "changed")!r}).exists():
            time.sleep(0.01)
    at("forward", act, 0)
    honest(folder)
    """
    shares = (int(share * facts.workload.limit_bytes) for share in (first, then))
    with foreigner(*shares, tmp_path, program=NEIGHBOUR):
        free = facts.hardware.total_bytes - device_used_bytes(facts.hardware.uuid)
        here = dataclasses.replace(facts, hardware=dataclasses.replace(facts.hardware, free_bytes=free))
        (config / "fault.py").write_text(textwrap.dedent(code))
        try:
            runner = ProcessRunner(tmp_path / "beside", here, config, server)
            beside = runner.run(0, PLAN, QUICK, purpose="search", limit_seconds=300.0).outcome
        finally:
            (config / "fault.py").unlink()
    assert isinstance(beside, Measured), beside
    assert abs(beside.outside_bytes - alone.outside_bytes) < 64 * MIB
