"""Each task's batch fits the forward pass of its models: the loss is finite, and has a gradient."""

import dataclasses
import json
from typing import get_args

import pytest
import torch
import transformers
from pydantic import TypeAdapter

from autofit.contract.facts import Model, Task
from autofit.contract.plan import Plan
from autofit.contract.technique import Kind
from autofit.registry import recipe_of, technique, techniques
from autofit.system.errors import ModelError
from autofit.training.guard.loss_curve import CURVE
from autofit.training.jobs import CurveJob
from autofit.training.tasks.choose import describe_model
from autofit.training.tasks.rows import task_rows
from autofit.training.tasks.table import TASKS
from tests.support.cases import some_slow
from tests.support.families import CONFIGS, LENGTHS, facts_for
from tests.support.synthetic import cpu_facts
from tests.support.tiny import PLAIN

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
        assert batch[facts.model.main_input].shape[-1] in {facts.workload.seq_len, *LENGTHS.values(), 32, 80, 16}
        loss = model(**batch).loss
        assert torch.isfinite(loss)
        loss.backward()
    assert any(float(one.grad.abs().sum()) for one in model.parameters() if one.grad is not None)


_VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
_FRAMES = {**_VISION, "num_mel_bins": 16, "subsampling_conv_channels": 8}


@pytest.mark.parametrize(
    ("task", "config", "heads"),
    [
        ("image-classification", {"model_type": "siglip", "vision_config": _VISION}, ("classifier",)),
        ("ctc", {"model_type": "parakeet_ctc", "encoder_config": _FRAMES, "pad_token_id": 0}, ("ctc_head",)),
        ("question-answering", {"model_type": "t5", "d_model": 32, "d_ff": 32, "num_layers": 1}, ("qa_outputs",)),
    ],
)
def test_what_is_learned_anew_is_no_part_of_what_is_pretrained(task, config, heads, tmp_path):
    """These have no base model, but parts of one: an adapter was kept off them, and found no layer."""
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    assert describe_model("its", tmp_path, trust_remote_code=False, task=task)["new_modules"] == heads


@pytest.mark.parametrize("task", ["image-classification", "contrastive"])
def test_a_class_that_reads_patches_is_refused(task, tmp_path):
    """SigLIP 2 was handed images, and each trial crashed."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "siglip2", "vision_config": _VISION}), "utf-8")
    with pytest.raises(ModelError, match=r"reads patches of images, and their rows and columns \(spatial_shapes\)"):
        describe_model("its", tmp_path, trust_remote_code=False, task=task)


def test_frames_of_a_sound_are_told_where_the_loss_counts_them(tmp_path):
    """Parakeet's asks its mask how long a clip is, and can't do without."""
    config = {"model_type": "parakeet_ctc", "encoder_config": _FRAMES, "vocab_size": 32, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    found = describe_model("parakeet", tmp_path, trust_remote_code=False)
    facts = cpu_facts(seq_len=64, global_batch=2)
    facts = dataclasses.replace(facts, model=TypeAdapter(Model).validate_python(found))
    model = recipe_of(PLAIN, facts).model(None, config=tmp_path)
    rows = task_rows(facts, model.config, 2)
    assert torch.isfinite(model(**rows.collate([rows[0], rows[1]])).loss)


_NOT_TOKENS = (
    "vit", "resnet", "segformer", "beit", "detr", "wav2vec2", "hubert", "ast", "whisper", "speech-to-text", "clip",
    "siglip",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "whisper" else [pytest.mark.slow]) for name in _NOT_TOKENS]
)
def test_images_and_sounds_fit_weights_in_sixteen_bits(name, tmp_path):
    """Rows are float32, as processors make them."""
    facts = facts_for(name, tmp_path)
    recipe = recipe_of(PLAIN.replaced(precision="bf16_weights"), facts)
    model = recipe.model(None, config=tmp_path)
    TASKS[facts.model.task].prepare(model)
    rows = task_rows(facts, model.config, 4)
    loss = model(**rows.collate([rows[index] for index in range(4)])).loss
    loss.backward()
    assert torch.isfinite(loss)


@pytest.mark.parametrize("task", ["question-answering", "sequence-classification"])
def test_a_decoder_that_reads_a_whole_text_is_told_its_first_token(task, tmp_path):
    """T5 has models for these, too, of the same configs."""
    config = {"model_type": "t5", "d_model": 32, "d_ff": 32, "num_layers": 1, "vocab_size": 96, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    found = describe_model("t5", tmp_path, trust_remote_code=False, task=task)
    facts = dataclasses.replace(cpu_facts(seq_len=16), model=TypeAdapter(Model).validate_python(found))
    model = recipe_of(PLAIN, facts).model(None, config=tmp_path)
    TASKS[task].prepare(model)
    rows = task_rows(facts, model.config, 2)
    assert torch.isfinite(model(**rows.collate([rows[0], rows[1]])).loss)


@pytest.mark.parametrize("given", [{}, {"pad_token_id": None}])
def test_a_decoder_whose_first_token_the_config_leaves_to_the_script_is_trained(given, tmp_path):
    facts = facts_for("t5", tmp_path)
    config = {name: value for name, value in CONFIGS["t5"][1].items() if name != "decoder_start_token_id"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **given}), "utf-8")
    model = recipe_of(PLAIN, facts).model(None, config=tmp_path)
    TASKS[facts.model.task].prepare(model)
    rows = task_rows(facts, model.config, 2)
    assert torch.isfinite(model(**rows.collate([rows[0], rows[1]])).loss)


def test_every_task_has_a_name_for_the_command_line_and_an_auto_class():
    assert set(TASKS) == set(get_args(Task)) == {task for task, _ in CONFIGS.values()} | {"causal-lm"}
    assert all(hasattr(transformers, kind.auto) for kind in TASKS.values())


@pytest.mark.parametrize(("name", "why"), [("clip", "contrastive"), ("resnet", "BatchNorm")])
def test_accumulation_is_another_method_where_the_loss_depends_on_the_micro_batch(name, why, tmp_path):
    facts = facts_for(name, tmp_path)
    kinds = {one.value: one.kind for one in technique("micro_batch").choices(facts)}
    assert kinds == {1: Kind.METHOD, 2: Kind.METHOD, 4: Kind.EXACT}
    assert {one.value: one.kind for one in technique("accumulation").choices(facts)}[4] == Kind.METHOD
    assert why in technique("micro_batch").changes(1, {}, facts)
    assert technique("micro_batch").changes(4, {}, facts) is None


@pytest.mark.parametrize("name", ["llama-classes", "t5", "vit"])
def test_what_is_for_next_token_prediction_alone_is_withheld_with_a_reason(name, tmp_path):
    facts = facts_for(name, tmp_path)
    for knob, value in (("kernels", "chunked_ce"), ("quantization", "nf4")):
        choice = technique(knob).choice(value, facts)
        assert choice.status == "withheld"
        assert facts.model.architecture in choice.reason


@pytest.mark.parametrize(
    "name", some_slow(["bert-classes", "t5", "wav2vec2", "vit", "clip"], lambda name: name == "t5")
)
def test_accumulated_gradients_are_those_of_the_whole_batch(name, server, tmp_path):
    """Of BERT and T5 a Trainer takes the loss for divided, and the model does not divide it; wav2vec2's is a sum."""
    (tmp_path / "config").mkdir()
    facts = facts_for(name, tmp_path / "config")
    assert facts.model.undivided == (name in {"bert-classes", "t5"})
    norms = []
    for rows in (4, 1):
        plan = Plan({one.name: one.baseline for one in techniques()}).replaced(micro_batch=rows, accumulation=4 // rows)
        job = CurveJob(plan=plan, facts=facts, config=str(tmp_path / "config"), steps=3)
        with server.ask(tmp_path, job) as answer:
            curve = CURVE.validate_python(answer)
        assert curve.failed is None
        norms.append(curve.raw_norms[0])
    if facts.depends_on_rows is None:
        assert norms[1] == pytest.approx(norms[0], rel=0.01)
