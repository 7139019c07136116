"""What `setup.watch` tells of a training that evaluates, ends on a small batch, or ignores a knob."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer

from autofit.output.setup import Setup
from autofit.registry import recipe_of
from tests.support.tiny import PLAIN, describe, write_config

PLAN = PLAIN.replaced(micro_batch=2, accumulation=3, kernels="chunked_ce", checkpointing="full")
ROWS = 15
"""Eight micro-batches, the last of one row; of the three optimizer steps the last has two of them."""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that wait for one another crawl where others compute too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def facts(server, tmp_path_factory):
    return describe(server, write_config(tmp_path_factory.mktemp("model") / "model"), seq_len=8, global_batch=6)


def setup_of(facts, folder):
    write_config(folder / "model")
    document = SimpleNamespace(plan=PLAN, workload=facts.workload, config_sha256=None)
    return Setup(folder=folder, document=document, recipe=recipe_of(PLAN, facts))


@pytest.fixture
def setup(facts, tmp_path):
    return setup_of(facts, tmp_path)


@pytest.fixture
def loop_setup(facts, tmp_path):
    return setup_of(replace(facts, workload=replace(facts.workload, launch_path="loop")), tmp_path)


def rows(count, tokens=8):
    return [{"input_ids": row, "labels": row} for row in torch.randint(2, 128, (count, tokens))]


def trained(setup, folder, **changed):
    """What is said of a Trainer that evaluates before, while and after it trains."""
    model = setup.model()
    args = setup.training_arguments(
        output_dir=str(folder), num_train_epochs=2, eval_strategy="steps", eval_steps=3, save_strategy="no",
        report_to="none", disable_tqdm=True, max_grad_norm=1.0,
    )  # fmt: skip
    for name, value in changed.items():
        setattr(args, name, value)
    watch = setup.watch(model)
    trainer = Trainer(model=model, args=args, train_dataset=rows(ROWS), eval_dataset=rows(11))
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    assert trainer.state.global_step > 2
    return watch.ignored(trainer.optimizer, trainer.accelerator, trainer.state.global_step)


def looped(setup, *, trains=True, gradients=True):
    """What is said of a plain loop that evaluates after every micro-batch."""
    accelerator = setup.accelerator()
    model = setup.model()
    watch = setup.watch(model)
    optimizer = setup.optimizer(model)
    loader = DataLoader(rows(ROWS), batch_size=setup.micro_batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for _ in range(2):
        for batch in loader:
            model.train(trains)
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            with torch.set_grad_enabled(gradients):
                model(**{name: column.repeat(3, 1) for name, column in batch.items()})
        steps += 3
    return watch.ignored(optimizer, accelerator, steps)


def test_a_trainer_that_evaluates_and_ends_on_a_small_batch_has_ignored_nothing(setup, tmp_path):
    assert trained(setup, tmp_path, per_device_eval_batch_size=5) == []


@pytest.mark.parametrize("gradients", [False, True])
def test_a_loop_that_evaluates_and_ends_on_a_small_batch_has_ignored_nothing(loop_setup, gradients):
    assert looped(loop_setup, gradients=gradients) == []


def test_what_was_ignored_is_told_beside_evaluations(setup, tmp_path):
    said = trained(setup, tmp_path, gradient_accumulation_steps=1)
    assert [words.partition(":")[0] for words in said] == ["accumulation=3"]
    assert "1 micro-batches went into an optimizer step, not 3" in said[0]


def test_other_rows_are_told(setup, tmp_path):
    (said,) = trained(setup, tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=3)
    assert said == "micro_batch=2: 4 rows went through the model at once, not 2"


def test_a_model_that_never_ran_in_training_mode_is_told_what_it_then_leaves_out(loop_setup):
    """As ``from_pretrained`` leaves it: its logits are an evaluation's, and it recomputes nothing."""
    assert looped(loop_setup, trains=False, gradients=False) == [
        "kernels=chunked_ce: the logits of all positions were made",
        "checkpointing=full: 0 of 2 layers ran forward more than once in a micro-step",
    ]


def test_a_model_that_never_ran_with_gradients_is_told(loop_setup):
    model, other = loop_setup.model(), loop_setup.model()
    watch, optimizer = loop_setup.watch(model), loop_setup.optimizer(other)
    (said,) = watch.ignored(optimizer, loop_setup.accelerator(), 3)
    assert said.startswith("every knob: the watched model ran no forward pass with gradients")
