"""Each task's batch fits the forward pass of its models: the loss is finite, and has a gradient."""

import dataclasses
import importlib.util
import json
from typing import get_args

import pytest
import torch
import transformers
from pydantic import TypeAdapter

from autofit.contract.facts import Model, Task
from autofit.contract.technique import Kind
from autofit.registry import recipe_of, technique
from autofit.training.tasks.choose import describe_model
from autofit.training.tasks.rows import task_rows
from autofit.training.tasks.table import TASKS
from tests.support.families import CONFIGS
from tests.support.synthetic import cpu_facts
from tests.support.tiny import PLAIN

_LENGTHS = {"tokens": 24, "pixels": 64, "samples": 2000, "frames": 40}


def facts_for(name, folder):
    """What a tune would know of one of the configs, with the model's folder."""
    task, config = CONFIGS[name]
    if any(importlib.util.find_spec(module) is None for module in TASKS[task].packages):
        pytest.skip(f"{task} needs {', '.join(TASKS[task].packages)}")
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    found = describe_model(name, folder, trust_remote_code=False)
    model = TypeAdapter(Model).validate_python(found)
    length = model.usual_seq_len if model.length.fixed else _LENGTHS[model.length.unit]
    facts = cpu_facts()
    return dataclasses.replace(
        facts, model=model, workload=dataclasses.replace(facts.workload, seq_len=length, global_batch=4)
    )


_QUICK = list({task: name for name, (task, _) in reversed(CONFIGS.items())}.values())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in _QUICK else [pytest.mark.slow]) for name in CONFIGS]
)
def test_a_batch_fits_forward_and_its_loss_has_a_gradient(name, tmp_path):
    facts = facts_for(name, tmp_path)
    assert facts.model.task == CONFIGS[name][0]
    torch.manual_seed(0)
    model = recipe_of(PLAIN, facts).model(None, config=tmp_path)
    TASKS[facts.model.task].prepare(model)
    for few in (None, 4):
        rows = task_rows(facts, model.config, 8, few=few)
        batch = rows.collate([rows[index] for index in range(4)])
        assert len(rows) == 8
        assert all(len(column) == 4 for column in batch.values() if column is not True)
        assert batch[facts.model.main_input].shape[-1] in {facts.workload.seq_len, *_LENGTHS.values(), 32, 80, 16}
        loss = model(**batch).loss
        assert torch.isfinite(loss)
        loss.backward()
    assert any(float(one.grad.abs().sum()) for one in model.parameters() if one.grad is not None)


def test_every_task_has_a_name_for_the_command_line_and_an_auto_class():
    assert set(TASKS) == set(get_args(Task)) == {task for task, _ in CONFIGS.values()} | {"causal-lm"}
    assert all(hasattr(transformers, kind.auto) for kind in TASKS.values())


@pytest.mark.parametrize(("name", "why"), [("clip", "contrastive"), ("resnet", "BatchNorm")])
def test_accumulation_is_another_method_where_the_loss_depends_on_the_micro_batch(name, why, tmp_path):
    facts = facts_for(name, tmp_path)
    kinds = {one.value: one.kind for one in technique("micro_batch").choices(facts)}
    assert kinds == {1: Kind.METHOD, 2: Kind.METHOD, 4: Kind.EXACT}
    assert {one.value: one.kind for one in technique("accumulation").choices(facts)}[4] == Kind.METHOD
    assert why in technique("micro_batch").changes(1, facts)
    assert technique("micro_batch").changes(4, facts) is None


@pytest.mark.parametrize("name", ["llama-classes", "t5", "vit"])
def test_what_is_for_next_token_prediction_alone_is_withheld_with_a_reason(name, tmp_path):
    facts = facts_for(name, tmp_path)
    for knob, value in (("kernels", "chunked_ce"), ("adapter", "lora:r=16")):
        choice = technique(knob).choice(value, facts)
        assert choice.status == "withheld"
        assert facts.model.architecture in choice.reason
