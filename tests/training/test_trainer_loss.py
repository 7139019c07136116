"""How the loss of a script's Trainer is made of the rows of its micro-batch."""

import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss, normalize
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from autofit.training.scripts.plain_loop import reasons, trainer_loss
from autofit.training.scripts.plain_loop.losses import Judged
from autofit.training.scripts.plain_loop.trainer_loss import loss_of_rows, samples_otherwise, told


class Net(torch.nn.Module):
    """A model of a script's own: features of rows, and the mean of their errors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, rows, labels=None):
        features = self.linear(rows)
        loss = {} if labels is None else {"loss": mse_loss(features[:, 0], labels)}
        return {**loss, "features": features}


class Own(Trainer):
    """A Trainer with a loss of the script's own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return self.own(model(**inputs)["features"], inputs["labels"])


def made(loss, tmp_path, **given):
    torch.manual_seed(0)
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    trainer = (Own if loss else Trainer)(**{"model": Net(), "args": arguments, **given})
    trainer.own = loss
    return trainer


def of_rows(trainer, rows=6):
    return loss_of_rows(trainer, {"rows": torch.randn(rows, 4), "labels": torch.randn(rows)})


def in_batch_negatives(features, _labels):
    one = normalize(features)
    return cross_entropy(one @ one.flip(1).T / 0.05, torch.arange(len(one)))


def mean(features, labels):
    return mse_loss(features[:, 0], labels)


COUNTED = []


def counting(features, labels):
    COUNTED.append(1)
    return mean(features, labels) * len(COUNTED)


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (None, (Judged.MEAN, None)),
        (mean, (Judged.MEAN, None)),
        (lambda features, labels: mean(features + torch.randn_like(features), labels), (Judged.MEAN, None)),
        (lambda features, _: features.square().sum() / 100, (Judged.SUM, None)),
        (in_batch_negatives, (Judged.TOGETHER, None)),
        (lambda *given: mean(*given).sqrt(), (Judged.TOGETHER, None)),
        (counting, (None, reasons.UNSTEADY)),
        (lambda *_: 1 / 0, (None, None)),
    ],
)
def test_how_a_loss_of_a_scripts_own_is_made_of_its_rows_is_asked_of_some_of_them(loss, found, tmp_path):
    assert of_rows(made(loss, tmp_path)) == found


def test_a_function_for_the_loss_is_asked_too(tmp_path):
    trainer = made(
        None, tmp_path, compute_loss_func=lambda outputs, labels, **_: mean(outputs["features"], labels).exp()
    )
    assert of_rows(trainer) == (Judged.TOGETHER, None)


def halved(batches, items):
    return batches[: max(1, len(batches) // 2)], items


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (None, None),
        (lambda batches, items: (batches[::-1], items + 1), None),
        (lambda batches, _: (batches, None), None),
        (lambda batches, _: (batches, len(batches)), reasons.SAMPLES),
        (halved, reasons.SAMPLES),
        (lambda *_: 1 / 0, reasons.SAMPLES),
    ],
)
def test_a_trainer_that_takes_its_batches_by_their_number_keeps_its_split(says, why, tmp_path):
    class Takes(Trainer):
        def get_batch_samples(self, *given):
            return says(*super().get_batch_samples(*given))

    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    trainer = (Trainer if says is None else Takes)(model=llama(1), args=arguments)
    ids = torch.randint(32, (5, 8))
    assert samples_otherwise(trainer, {"input_ids": ids, "labels": ids}) == why


def test_a_model_of_packed_weights_is_not_asked(tmp_path):
    trainer = made(lambda *_: pytest.fail("it was asked"), tmp_path)
    trainer.model.linear.weight = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    assert of_rows(trainer) == (None, None)


def llama(layers):
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=layers, **shape))


def test_a_librarys_loss_and_model_are_not_asked(tmp_path, monkeypatch):
    trainer = made(None, tmp_path, model=llama(1))
    monkeypatch.setattr(trainer.model, "forward", lambda *_, **__: pytest.fail("it was asked"))
    ids = torch.randint(32, (6, 8))
    assert loss_of_rows(trainer, {"input_ids": ids, "labels": ids}) == (None, None)


@pytest.mark.parametrize(("most", "ran"), [(1e9, {5}), (1.5e6, {2}), (1e5, set())])
def test_a_large_model_is_asked_with_few_layers_and_one_that_is_too_large_is_not(most, ran, tmp_path, monkeypatch):
    trainer = made(None, tmp_path, model=llama(5))
    layers = []

    def compute_loss(model, inputs, **_):
        layers.append(len(model.model.layers))
        return model(**inputs).logits.logsumexp((0, 1, 2))

    trainer.compute_loss = compute_loss
    monkeypatch.setattr(trainer_loss, "_MOST_PRODUCTS", most)
    assert loss_of_rows(trainer, {"input_ids": torch.randint(32, (6, 8))}) == (Judged.TOGETHER if ran else None, None)
    assert set(layers) == ran
    assert len(trainer.model.model.layers) == 5


@pytest.mark.parametrize(
    ("judged", "averages", "changed"),
    [
        (Judged.MEAN, True, {}),
        (Judged.WEIGHTED, True, {}),
        (None, True, {}),
        (Judged.TOGETHER, True, {"depends_on_rows": reasons.TOGETHER}),
        (Judged.SUM, True, {"own_split": reasons.SUMS_OF_TRAINER}),
        (Judged.SUM, False, {"undivided": False}),
    ],
)
def test_what_is_divided_by_the_accumulation_alone_keeps_its_split(judged, averages, changed):
    """And a sum that nobody divides needs no scale: it is the same however the rows are split."""
    script = {"own_split": None, "depends_on_rows": None, "undivided": not averages, "averages": averages}
    told(now := {**script}, judged, None)
    assert now == {**script, **changed}


def test_a_loss_that_changes_with_each_micro_batch_keeps_its_split():
    script = {"own_split": None, "depends_on_rows": None, "undivided": False, "averages": True}
    told(script, None, reasons.UNSTEADY)
    assert script["own_split"] == reasons.UNSTEADY
