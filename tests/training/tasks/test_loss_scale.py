"""Whether an accumulation divides the loss of a script's model."""

import functools

import peft
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from autofit.training.tasks.loss_scale import _hands_items_on, averages, leaves_undivided, script_leaves_undivided
from autofit.training.tasks.rows import Spec
from autofit.training.tasks.table import TASKS
from tests.support.tiny import CONFIGS

TINY = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
)
BERT = BertConfig(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
)
BATCH = {"input_ids": torch.ones(2, 8, dtype=torch.long), "labels": torch.ones(2, 8, dtype=torch.long)}
CLASSES = {**BATCH, "labels": torch.ones(2, dtype=torch.long)}


class HandsAllOn(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class AsksForValues(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        assert kwargs["input_ids"].numpy().any()
        return super().forward(*args, **kwargs)


class ReadsItsLoss(LlamaForCausalLM):
    """As one that logs a metric of its own: the loss is there by then."""

    def forward(self, **kwargs):
        found = super().forward(**kwargs)
        assert found.loss.detach().numpy() >= 0
        return found


class WrapsThat(torch.nn.Module):
    """Its text tells nothing."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **kwargs):
        return self.inner(**kwargs)


class Wraps(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **kwargs):
        assert kwargs["input_ids"].numpy().any()
        return self.inner(**kwargs)


class OwnMean(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = super().forward(input_ids=input_ids).logits
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class NeedsItsLast(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        assert self.model.layers[self.config.num_hidden_layers - 1] is not None
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(
    ("made", "undivided", "ran"), [(LlamaForCausalLM, False, 2), (OwnMean, True, 2), (NeedsItsLast, False, 8)]
)
def test_few_layers_tell_whether_a_loss_looks_at_the_items(made, undivided, ran):
    config = LlamaConfig(**{**TINY.to_dict(), "num_hidden_layers": 8})
    with torch.device("meta"):
        model = made(config)
    calls = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: calls.append(1))
    spec = Spec(config=config, main="input_ids", length=8, vocabulary=64)
    assert leaves_undivided(model, TASKS["causal-lm"], spec) is undivided
    assert len(calls) == ran
    assert len(model.model.layers) == 8


@pytest.mark.parametrize("balanced", [False, True])
def test_the_loss_that_balances_experts_is_not_divided_by_the_items(balanced):
    """Under 4 micro-batches its gradients were 4 times as large: a Trainer takes the whole loss for divided."""
    config = AutoConfig.for_model(**CONFIGS["mixtral"], output_router_logits=balanced)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    spec = Spec(config=config, main="input_ids", length=8, vocabulary=128)
    assert leaves_undivided(model, TASKS["causal-lm"], spec) is balanced


def adapted(model):
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


class LossOfItsLogits(LlamaForCausalLM):
    def forward(self, input_ids=None, **kwargs):
        return {"loss": super().forward(input_ids=input_ids).logits.mean()}


class Boxes(torch.nn.Module):
    """As a detector: its labels are a list, which a Trainer counts nothing in."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, input_ids, labels, **kwargs):
        return {"loss": self.weight * input_ids.float().mean()}


@pytest.mark.parametrize(
    ("make", "batch", "undivided"),
    [
        (lambda: LlamaForCausalLM(TINY), BATCH, False),
        (lambda: HandsAllOn(TINY), BATCH, False),
        (lambda: AsksForValues(TINY), BATCH, False),
        (lambda: adapted(LlamaForCausalLM(TINY)), BATCH, False),
        (lambda: WrapsThat(ReadsItsLoss(TINY)), BATCH, False),
        (lambda: OwnMean(TINY), BATCH, True),
        (lambda: adapted(OwnMean(TINY)), BATCH, True),
        (lambda: BertForSequenceClassification(BERT), CLASSES, True),
        (Boxes, {**BATCH, "labels": [{"boxes": torch.ones(4)}] * 2}, False),
        (Boxes, {"input_ids": BATCH["input_ids"]}, False),
        (lambda: Wraps(LlamaForCausalLM(TINY)), BATCH, None),
    ],
)
def test_a_scripts_loss_is_known_to_be_divided_or_not_or_it_is_said(make, batch, undivided, tmp_path):
    trainer = Trainer(model=make(), args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none"))
    batch = {**batch, "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    assert script_leaves_undivided(trainer, batch) is undivided


@pytest.mark.parametrize(
    ("make", "batch", "scaled", "mean"),
    [
        (lambda: LlamaForCausalLM(TINY), BATCH, None, False),
        (lambda: OwnMean(TINY), BATCH, None, False),
        (Boxes, {"input_ids": BATCH["input_ids"]}, None, True),
        (lambda: LlamaForCausalLM(TINY), BATCH, False, True),
        (lambda: LlamaForCausalLM(TINY), BATCH, True, False),
    ],
)
def test_a_trainer_takes_the_mean_of_its_micro_batches_where_it_divides_itself(make, batch, scaled, mean, tmp_path):
    class Told(Trainer):
        loss_is_scaled_for_ga = scaled

    trainer = Told(model=make(), args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none"))
    assert averages(trainer, batch) is mean


def test_an_adapters_model_is_asked_for_its_base():
    assert _hands_items_on(adapted(HandsAllOn(TINY))) is True


@pytest.mark.parametrize(
    ("function", "labels", "undivided"),
    [
        (lambda outputs, _labels, num_items_in_batch=None: outputs["loss"] / num_items_in_batch, True, False),
        (lambda outputs, _labels, **_: outputs["loss"], True, True),
        (lambda outputs, _labels, **_: outputs["loss"], False, None),
    ],
)
def test_a_function_for_the_loss_divides_or_does_not(function, labels, undivided, tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    trainer = Trainer(model=LossOfItsLogits(TINY), args=args, compute_loss_func=function)
    batch = BATCH if labels else {"input_ids": BATCH["input_ids"]}
    assert script_leaves_undivided(trainer, batch) is undivided


def test_a_trainer_that_is_told_what_its_loss_is_scales_it_by_that(tmp_path):
    class Told(Trainer):
        loss_is_scaled_for_ga = False

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    assert script_leaves_undivided(Told(model=OwnMean(TINY), args=args), BATCH) is False


def mean(_trainer, model, inputs, **_):
    return torch.nn.functional.cross_entropy(
        model(inputs["input_ids"]).logits.flatten(0, 1), inputs["labels"].flatten()
    )


def weighed(_trainer, model, inputs, num_items_in_batch=None, **_):
    return model(**inputs, num_items_in_batch=num_items_in_batch).loss / num_items_in_batch


def distilled(_trainer, model, inputs, num_items_in_batch=None, **_):
    found = model(**inputs, num_items_in_batch=num_items_in_batch)
    return 0.5 * found.loss + 0.5 * found.logits.square().mean()


def both_divided(trainer, model, inputs, num_items_in_batch=None, **_):
    found = model(**inputs, num_items_in_batch=num_items_in_batch)
    return torch.zeros(()) + found.loss + found.logits.square().mean() / trainer.current_gradient_accumulation_steps


def by_itself(trainer, model, inputs, **_):
    steps = trainer.args.gradient_accumulation_steps
    return mean(trainer, model, inputs) / steps if steps > 1 else mean(trainer, model, inputs)


def own_step(trainer, model, inputs, *_):
    trainer.accelerator.backward(trainer.compute_loss(model, inputs))


def timed_step(trainer, model, inputs, *args):
    return Trainer.training_step(trainer, model, inputs, *args)


@pytest.mark.parametrize(
    ("members", "divides", "undivided"),
    [
        ({"compute_loss": mean}, False, True),
        ({"compute_loss": weighed}, False, False),
        ({"compute_loss": distilled}, False, None),
        ({"compute_loss": both_divided}, False, False),
        ({"compute_loss": by_itself}, False, False),
        ({"compute_loss": mean}, True, False),
        ({"compute_loss": by_itself}, True, None),
        ({"training_step": timed_step}, False, False),
        ({"training_step": own_step}, False, None),
        ({"training_step": eval("lambda *given: Trainer.training_step(*given)")}, False, None),  # it has no text
        ({"training_step": functools.partialmethod(timed_step)}, False, None),
    ],
)
def test_a_loss_that_a_trainer_of_the_scripts_own_takes_is_known_to_be_divided_or_that_is_said(
    members, divides, undivided, tmp_path
):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    trainer = type("Own", (Trainer,), members)(model=LlamaForCausalLM(TINY), args=args)
    if divides:
        trainer.model_accepts_loss_kwargs = False
    assert script_leaves_undivided(trainer, BATCH) is undivided
    assert trainer.args.gradient_accumulation_steps == 1


def test_a_loss_to_which_an_adapter_adds_something_is_divided_in_part(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    adapter = peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9, task_type="CAUSAL_LM")
    trainer = Trainer(model=peft.get_peft_model(LlamaForCausalLM(TINY), adapter), args=args)
    assert script_leaves_undivided(trainer, BATCH) is None
