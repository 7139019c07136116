"""Trials that are forked from a user's script where it begins to train: as those that run all of it, or not at all."""

import os
import signal
from dataclasses import replace

import pytest

from autofit import space
from autofit.commands.request import Request
from autofit.commands.scripts.request import script_facts
from autofit.contract.outcome import Measured
from autofit.registry import recipe_of
from autofit.system.units import MIB
from autofit.training.runner import ProcessRunner
from autofit.training.scripts import snapshots
from autofit.training.scripts.snapshot import off_the_device
from autofit.training.scripts.snapshots import Snapshots
from autofit.training.timing import Effort
from tests.support.scripted import tiny_bert
from tests.support.synthetic import cuda_facts
from tests.support.tiny import gone

QUICK = Effort(min_steps=2, max_steps=2)
SCRIPT = """
import os, sys, torch
from transformers import AutoModelForMaskedLM, Trainer, TrainingArguments

class Rows(torch.utils.data.Dataset):
    def __init__(self):
        with open(os.environ["MADE"], "a") as made:
            made.write("made\\n")
        self.ballast = torch.ones({ballast} << 18)
        gone = torch.ones({gone} << 18)
        self.rows = torch.randint(1, 100, (48, 16))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        return {{"input_ids": self.rows[place], "labels": self.rows[place]}}

rows = Rows()
model = AutoModelForMaskedLM.from_pretrained("{model}")
arguments = TrainingArguments(
    "mine", per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to="none", use_cpu=True
)
{more}
Trainer(model=model, args=arguments, train_dataset=rows).train()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_bert(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def tried(server, tmp_path, model):
    """``tried(more, **sizes)``: runners with and without snapshots of a script, its facts, and what it tells."""

    class Tried:
        def __init__(self, more="", ballast=1, gone=1, memory_limit="8GiB"):
            self.made = tmp_path.with_name(f"{tmp_path.name}-made")  # beside the script it would be undone
            script = tmp_path / "train.py"
            set_there = f"os.environ['MADE'] = {str(self.made)!r}"
            text = SCRIPT.format(model=model, more=more, ballast=ballast, gone=gone)
            script.write_text(text.replace("\nclass", f"\n{set_there}\nclass", 1))
            request = Request(
                model=str(script), device="cpu", global_batch=None, arguments=(), memory_limit=memory_limit
            )
            self.facts = script_facts(tmp_path, request, "cpu", server, lambda _: None)
            self.notes = []
            self.number = 0
            folder = tmp_path / "trials"
            self.snapshots = Snapshots(folder, self.facts, server, self.notes.append)
            self.forking = ProcessRunner(folder, self.facts, tmp_path / "model", server, snapshots=self.snapshots)
            self.plain = ProcessRunner(folder, self.facts, tmp_path / "model", server)

        def plan(self, **values):
            return space.build(self.facts).own(self.facts).replaced(**values)

        def run(self, runner, purpose="search", **values):
            self.number += 1
            plan = self.plan(**values)
            return runner.run(self.number, plan, QUICK, purpose=purpose, limit_seconds=120.0).outcome

        @property
        def runs(self):
            """How often the script has made its data, all in all."""
            return len(self.made.read_text().splitlines())

    found = []

    def make(*args, **kwargs):
        found.append(Tried(*args, **kwargs))
        return found[-1]

    yield make
    for one in found:
        for each in one.snapshots._made.values():
            each.close()


@pytest.mark.slow
def test_trials_that_load_alike_share_one_run_of_the_script(tried):
    one = tried()
    before = one.runs
    splits = ({"micro_batch": 8, "accumulation": 1}, {"micro_batch": 2, "accumulation": 4}, {"precision": "bf16"})
    forked = [one.run(one.forking, **values) for values in splits]
    assert all(isinstance(outcome, Measured) for outcome in forked), forked
    assert one.runs == before + 1
    assert "forked from the script where it begins to train" in one.notes[0]
    assert len(one.notes) == 1
    whole = [one.run(one.plain, **values) for values in splits]
    assert one.runs == before + 4
    for mine, other in zip(forked, whole, strict=True):
        assert mine.loss == other.loss
        assert (mine.evidence, mine.notes, mine.fidelity) == (other.evidence, other.notes, other.fidelity)
    assert [outcome.evidence.of("micro_batch")["rows"] for outcome in forked] == [8, 2, 4]


@pytest.mark.slow
def test_what_is_loaded_otherwise_comes_of_a_run_of_its_own(tried):
    one = tried()
    before = one.runs
    plans = [{}, {"attention": "eager"}, {"attention": "eager", "micro_batch": 8, "accumulation": 1}, {}]
    kinds = {recipe_of(one.plan(**values), one.facts).model_arguments.get("attn_implementation") for values in plans}
    assert len(kinds) == 2
    found = [one.run(one.forking, **values) for values in plans]
    assert all(isinstance(outcome, Measured) for outcome in found), found  # each value is seen to be in effect
    assert one.runs == before + 2
    assert len(one.notes) == 1


@pytest.mark.slow
def test_a_finalist_runs_all_of_the_script(tried):
    one = tried()
    one.run(one.forking)
    before = one.runs
    assert isinstance(one.run(one.forking, "final"), Measured)
    assert one.runs == before + 1


@pytest.mark.parametrize(
    ("ballast", "gone_again"),
    [(200, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 1), (1, 400)))],
)
def test_what_the_script_holds_and_held_before_it_trains_counts(tried, ballast, gone_again):
    """Its pages are shared with the process that the trial is forked from; a launch has them to itself."""
    one = tried(ballast=ballast, gone=gone_again)
    forked, whole = one.run(one.forking), one.run(one.plain)
    assert not [words for words in one.notes if "each trial" in words]
    assert 0.99 * max(ballast, gone_again) * MIB < whole.peak_bytes < (max(ballast, gone_again) + 120) * MIB
    assert forked.peak_bytes == pytest.approx(whole.peak_bytes, abs=4 * MIB)


@pytest.mark.slow
def test_a_plan_that_breaks_the_ceiling_is_out_of_memory(tried):
    one = tried(ballast=60, memory_limit="56MiB")
    assert one.run(one.forking).kind == "out_of_memory"
    assert one.run(one.plain).kind == "out_of_memory"
    assert len(one.notes) == 1


UNSAFE = {
    "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()": "a thread of its",
    "import subprocess\nchild = subprocess.Popen(['sleep', '99'])": "a process that it has started runs",
    "text = open(__file__)": "train.py is open",
    "import socket\npair = socket.socketpair()": "a connection is open",
    "import mmap\nshared = mmap.mmap(-1, 4096)": "memory that other processes write to is mapped",
}


@pytest.mark.slow
@pytest.mark.parametrize("more", UNSAFE)
def test_a_script_that_can_not_be_forked_runs_in_each_trial_and_that_is_told(tried, more):
    one = tried(more)
    before = one.runs
    found = [one.run(one.forking), one.run(one.forking, micro_batch=8, accumulation=1)]
    assert all(isinstance(outcome, Measured) for outcome in found), found
    assert one.runs == before + 3
    assert len(one.notes) == 1
    assert "each trial runs the script from its first line" in one.notes[0]
    assert UNSAFE[more] in one.notes[0]


@pytest.mark.slow
def test_a_trial_that_fails_in_a_fork_alone_is_run_again_and_no_other_is_forked(tried):
    one = tried(
        "first = os.getpid()\n"
        "class Trainer(Trainer):\n"
        "    def train(self):\n"
        "        assert os.getpid() == first, 'forked'\n"
        "        return super().train()"
    )
    before = one.runs
    assert isinstance(one.run(one.forking), Measured)
    assert isinstance(one.run(one.forking), Measured)
    assert one.runs == before + 3
    assert "ended as crashed (AssertionError: forked) when it was, and as measured when not" in one.notes[-1]


@pytest.mark.slow
def test_a_snapshot_that_is_killed_is_told_and_its_trial_runs_all_of_the_script(tried):
    one = tried()
    one.run(one.forking)
    (snapshot,) = one.snapshots._made.values()
    os.kill(snapshot._pid, signal.SIGKILL)
    assert gone(snapshot._pid)
    before = one.runs
    assert isinstance(one.run(one.forking), Measured)
    assert one.runs == before + 1
    assert "the snapshot that the trial was forked from ended" in one.notes[-1]


@pytest.mark.slow
def test_a_snapshot_that_would_leave_too_little_memory_is_not_kept(tried, monkeypatch):
    monkeypatch.setattr(snapshots, "host_memory", lambda: (0, 0))
    one = tried()
    assert isinstance(one.run(one.forking), Measured)
    assert "a trial may need" in one.notes[0]
    assert not one.snapshots._made


@pytest.mark.parametrize(("capability", "able"), [((9, 0), True), ((6, 1), False)])
def test_who_asks_for_triton_while_it_is_imported_is_answered_without_the_device(monkeypatch, capability, able):
    """As torchao does, which transformers imports where it is installed."""
    import torch
    from torch.utils import _triton

    monkeypatch.setattr(torch._C, "_cuda_init", lambda: None, raising=False)  # not in a build for the CPU
    before = _triton.has_triton
    with off_the_device(replace(cuda_facts().hardware, capability=capability), "train.py") as touched:
        monkeypatch.setattr(_triton, "has_triton_package", lambda: True)
        assert _triton.has_triton() is able
        assert touched == []
    assert _triton.has_triton is before
