"""Trials on a device that are forked from a user's script, which has not touched the device before."""

import contextlib

import pytest

from autofit import space
from autofit.commands.request import Request
from autofit.commands.scripts.request import script_facts
from autofit.contract.outcome import Measured
from autofit.system.forking.server import ForkServer
from autofit.system.units import MIB
from autofit.training.runner import ProcessRunner
from autofit.training.scripts.snapshots import Snapshots
from autofit.training.timing import Effort
from tests.support.scripted import tiny_bert

QUICK = Effort(min_steps=2, max_steps=2)
SCRIPT = """
import torch
from transformers import AutoModelForMaskedLM, Trainer, TrainingArguments, set_seed

open({made!r}, "a").write("made\\n")
rows = [{{"input_ids": torch.arange(1, 17), "labels": torch.arange(1, 17)}} for _ in range(48)]
set_seed(3)
arguments = TrainingArguments(
    "mine", per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to="none",
    bf16=torch.cuda.is_bf16_supported(), tf32=True,
)
model = AutoModelForMaskedLM.from_pretrained({model!r})
{more}
print("device", arguments.device, arguments.n_gpu, arguments.bf16)
Trainer(model=model, args=arguments, train_dataset=rows).train()
"""


@pytest.fixture
def tried(tmp_path):
    """Runs one plan, and then another, forked and not, of a script."""
    with contextlib.closing(ForkServer(tmp_path / "server.log", "cuda")) as server:

        def run(more=""):
            script = tmp_path / "train.py"
            made = tmp_path.with_name(f"{tmp_path.name}-made")  # beside the script it would be undone
            model = str(tiny_bert(tmp_path / "tiny"))
            script.write_text(SCRIPT.format(made=str(made), model=model, more=more))
            request = Request(model=str(script), device="cuda", global_batch=None, arguments=(), memory_limit="4GiB")
            facts = script_facts(tmp_path, request, "cuda", server, lambda _: None)
            notes = []
            before = len(made.read_text().split())
            snapshots = Snapshots(tmp_path / "trials", facts, server, notes.append)
            forking = ProcessRunner(tmp_path / "trials", facts, tmp_path / "model", server, snapshots=snapshots)
            plain = ProcessRunner(tmp_path / "trials", facts, tmp_path / "model", server)
            own = space.build(facts).own(facts)
            found, number = [], 0
            for plan in (own, own.replaced(micro_batch=8, accumulation=1)):
                for runner in (forking, plain):
                    number += 1
                    found.append(runner.run(number, plan, QUICK, purpose="search", limit_seconds=300.0).outcome)
            return found, notes, len(made.read_text().split()) - before

        yield run


def test_a_trial_that_is_forked_takes_what_another_takes(tried):
    found, notes, runs = tried()
    assert all(isinstance(outcome, Measured) for outcome in found), found
    assert "forked from the script where it begins to train" in notes[0], notes
    assert len(notes) == 1
    assert runs == 1 + 2
    for forked, whole in (found[:2], found[2:]):
        assert forked.evidence == whole.evidence
        assert (forked.allocated_bytes, forked.reserved_bytes) == (whole.allocated_bytes, whole.reserved_bytes)
        assert forked.peak_bytes == pytest.approx(whole.peak_bytes, abs=8 * MIB)
        assert forked.host_bytes == pytest.approx(whole.host_bytes, rel=0.1, abs=64 * MIB)


def test_a_script_that_uses_the_device_before_it_trains_is_not_forked(tried):
    found, notes, runs = tried("model.cuda()")
    assert all(isinstance(outcome, Measured) for outcome in found), found
    assert "it uses the GPU before it trains (line " in notes[0]
    assert runs == 1 + 4
