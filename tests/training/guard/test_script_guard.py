"""The guard of a user's script: its own model, rows and loss, trained by a plan and by the baseline."""

import pytest

from autofit.contract.plan import Plan
from autofit.registry import techniques
from autofit.training.guard.equivalence import Guards
from tests.support.script_traces import facts_of_script
from tests.support.scripted import SCRIPTS, tiny_bert
from tests.support.synthetic import measured

CLASSIFY = (SCRIPTS / "classify.py").read_text()
HEAD = "if __name__ =="
OTHER_LOSS = '''class Trainer(Trainer):
    """Its loss is half as large under bfloat16."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs, *args, **kwargs) * (0.5 if self.args.bf16 else 1.0)


'''
LOSS_BY_ROWS = '''class Trainer(Trainer):
    """Its loss grows by the square of the rows of a micro-batch."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs, *args, **kwargs) * len(inputs["input_ids"]) ** 2


'''
OTHER_ROWS = """import os
_collate = collate
def collate(rows):
    batch = _collate(rows)
    return {**batch, "input_ids": batch["input_ids"] + int.from_bytes(os.urandom(1)) % 2}
"""
OTHER_WEIGHTS = "torch.seed()\n"


@pytest.fixture
def looked(server, tmp_path):
    """``looked(script, **values)``: the guard's words on a plan of a script."""

    def look(text, micro_batch=4, **values):
        tiny_bert(tmp_path / "tiny")
        script = tmp_path / "train.py"
        script.write_text(text)
        facts = facts_of_script(server, tmp_path, script, "--model", tmp_path / "tiny", "--rows", 32)
        plan = Plan({one.name: one.baseline for one in techniques()}).replaced(
            micro_batch=micro_batch, accumulation=8 // micro_batch, **values
        )
        guards = Guards(tmp_path, facts, tmp_path / "model", server)
        return guards.look(plan, measured([0.1] * 3, 2**20, facts), spent_seconds=0.0, left_seconds=None)

    return look


@pytest.mark.slow
def test_an_honest_plan_passes(looked):
    found = looked(CLASSIFY, precision="bf16", checkpointing="full")
    assert found.verdict == "same", found.words
    assert len(found.losses) == len(found.reference_losses) == 3
    assert found.losses[-1] < found.losses[0]
    assert found.split is None


@pytest.mark.slow
def test_a_plan_that_trains_something_else_is_refused(looked):
    found = looked(CLASSIFY.replace(HEAD, OTHER_LOSS + HEAD), precision="bf16")
    assert found.verdict == "other", found.words


@pytest.mark.slow
@pytest.mark.parametrize(("change", "what"), [(OTHER_ROWS, "other rows"), (OTHER_WEIGHTS, "other weights")])
def test_what_is_another_training_each_time_is_not_compared(looked, change, what):
    found = looked(CLASSIFY.replace(HEAD, change + HEAD), precision="bf16")
    assert found.verdict == "unknown"
    assert what in found.words


@pytest.mark.slow
def test_a_loss_that_nobody_divides_is_kept_as_large(looked):
    """A Trainer takes BERT's loss for divided by the accumulation, and BERT does not divide it."""
    found = looked(CLASSIFY, micro_batch=2)
    assert found.verdict == "alone", "the baseline itself, split otherwise than the script"
    assert found.split is None


@pytest.mark.slow
def test_a_sum_over_rows_that_nobody_divides_is_the_same_however_it_is_split(looked):
    found = looked(CLASSIFY.replace(HEAD, LOSS_BY_ROWS.replace("** 2", "") + HEAD), micro_batch=2)
    assert found.verdict == "alone"
    assert found.split is None


@pytest.mark.slow
def test_a_training_that_hangs_on_the_split_is_told(looked):
    found = looked(CLASSIFY.replace(HEAD, LOSS_BY_ROWS + HEAD), micro_batch=2)
    assert found.verdict == "alone"
    assert "its micro-batch of 2 rows is another training than the script's of 4" in found.split
