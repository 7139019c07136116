"""Traces of every task against the same steps on real tensors, on both launch paths."""

import dataclasses
import json

import pytest
import torch
from torch.utils._pytree import tree_leaves

from autofit.costmodel.tracing import fake_run, trace_job
from autofit.costmodel.tracing.timeline import CATEGORIES
from autofit.registry import technique
from autofit.training.tasks.rows import make_batch, spec_of
from autofit.training.tasks.table import kind_of
from tests.support.families import CONFIGS, facts_for
from tests.support.traced import PLAIN, Lab, like_a_process_of_its_own

pytestmark = pytest.mark.slow
GLOBAL_BATCH = 8


class TaskLab(Lab):
    """Traces of one of the tasks' configs."""

    def __init__(self, name, folder, launch_path):
        facts = facts_for(name, folder)
        work = dataclasses.replace(facts.workload, launch_path=launch_path, global_batch=GLOBAL_BATCH)
        self.folder, self.facts, self._parts = folder, dataclasses.replace(facts, workload=work), {}


def pool_bytes(lab):
    """Of the rows that are drawn from, which a run on a CPU holds too."""
    from transformers import AutoConfig

    spec = spec_of(lab.facts, AutoConfig.from_pretrained(lab.folder))
    made = make_batch(kind_of(lab.facts.model.task), spec, GLOBAL_BATCH, torch.Generator())
    return sum(one.nbytes for one in tree_leaves(made))


@pytest.mark.parametrize("launch_path", ["trainer", "loop"])
@pytest.mark.parametrize("name", [name for name, (task, _) in CONFIGS.items() if not kind_of(task).untraced])
def test_a_trace_of_a_task_needs_what_real_tensors_need(name, launch_path, tmp_path):
    lab = TaskLab(name, tmp_path, launch_path)
    plan = PLAIN.replaced(micro_batch=4, accumulation=2)
    live, need = lab.real(plan).live(0), lab.need(plan)
    assert need.peak_bytes == pytest.approx(live.max(), rel=0.02, abs=pool_bytes(lab) + 4096)


@pytest.mark.parametrize("name", [name for name, (task, _) in CONFIGS.items() if not kind_of(task).untraced])
def test_a_trace_knows_what_gets_no_gradient(name, tmp_path):
    lab = TaskLab(name, tmp_path, "trainer")
    plan = PLAIN.replaced(micro_batch=2)
    assert lab.micro_steps(plan, accumulation=1).unused == lab.micro_steps(plan, fake=False, accumulation=1).unused


@pytest.mark.parametrize("name", [name for name, (task, _) in CONFIGS.items() if not kind_of(task).untraced])
def test_what_the_micro_steps_tell_of_gradients_is_not_traced_again(name, tmp_path, monkeypatch):
    lab, known = TaskLab(name, tmp_path, "trainer"), trace_job.Known()
    plan = trace_job.telling(PLAIN)
    with like_a_process_of_its_own():
        again = fake_run.unused(plan, lab.facts, config=lab.folder, folder=lab.folder)
        trace_job.micro_part(plan, lab.facts, lab.folder, lab.folder, known=known)
    # what CTC's loss asks is not known
    assert known.unused == ({} if name in {"wav2vec2", "hubert"} else {plan: again})
    traced = lab.optimizer(PLAIN)
    if known.unused:
        monkeypatch.delattr(fake_run, "unused")
    with like_a_process_of_its_own():
        found = trace_job.optimizer_part(PLAIN, lab.facts, lab.folder, lab.folder, known=known)
    assert found.state_bytes == traced.state_bytes > 0


def unused_layers(lab, plan):
    """Of a vision model those whose weights get no gradient, by number."""
    with like_a_process_of_its_own():
        found = fake_run.unused(plan, lab.facts, config=lab.folder, folder=lab.folder)
    return {int(name.partition(".layers.")[2].partition(".")[0]) for name in found if ".layers." in name}


@pytest.mark.parametrize("changes", [{}, {"optimizer": "adamw_8bit"}, {"adapter": "lora:r=16"}])
def test_an_optimizer_makes_no_state_of_layers_that_the_loss_does_not_use(changes, tmp_path):
    """BEiT's segmentation takes the outputs of some layers, and nothing of those above."""
    lab = TaskLab("beit", tmp_path, "trainer")
    config = {**CONFIGS["beit"][1], "num_hidden_layers": 16, "out_indices": [1, 2, 3, 4]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = PLAIN.replaced(micro_batch=4, accumulation=2, **changes)
    live, need = lab.real(plan).live(0), lab.need(plan)
    assert unused_layers(lab, plan) == {*range(3, 16)}
    assert need.peak_bytes == pytest.approx(live.max(), rel=0.005, abs=pool_bytes(lab) + 4096)


def of_two_ranks(name, folder):
    """The traces of one rank on a card."""
    lab = TaskLab(name, folder, "trainer")
    hardware = dataclasses.replace(lab.facts.hardware, device="cuda", capability=(9, 0))
    work = dataclasses.replace(lab.facts.workload, processes=2)
    lab.facts = dataclasses.replace(lab.facts, hardware=hardware, workload=work)
    return lab


@pytest.mark.parametrize("name", ["bert-classes", "roberta-tokens", "vit", "siglip"])
def test_a_rank_has_half_of_a_model_whose_embeddings_accelerate_shards_by_themselves(name, tmp_path):
    lab = of_two_ranks(name, tmp_path)
    held = Lab.micro(lab, PLAIN.replaced(parallel="fsdp", micro_batch=2)).weights.sum()
    assert held == pytest.approx(4 * lab.facts.model.parameters / 2, rel=0.05)


@pytest.mark.parametrize(
    ("name", "why", "error"),
    [
        ("clip", "CLIPModel tells none", "get_input_embeddings"),
        ("bart", "its model.encoder.embed_tokens holds a weight of its embeddings, too", "shared"),
        ("bert-masked", "its cls.predictions holds a weight of its embeddings, too", "shared"),
    ],
)
def test_fsdp2_is_withheld_where_accelerate_can_not_shard_the_embeddings(name, why, error, tmp_path):
    lab = of_two_ranks(name, tmp_path)
    choice = technique("parallel").choice("fsdp", lab.facts)
    assert choice.status == "withheld"
    assert why in choice.reason
    with pytest.raises((NotImplementedError, ValueError), match=error):
        Lab.micro(lab, PLAIN.replaced(parallel="fsdp", micro_batch=2))


def test_a_rank_makes_no_state_of_layers_that_the_loss_does_not_use(tmp_path):
    """FSDP2 gives their shards no gradient."""
    lab = of_two_ranks("beit", tmp_path)
    held = []
    for layers in (4, 16):
        config = {**CONFIGS["beit"][1], "num_hidden_layers": layers, "out_indices": [1, 2, 3, 4]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        held.append(Lab.optimizer(lab, PLAIN.replaced(parallel="fsdp")).state_bytes)
        lab._parts.clear()
    assert held[0] == held[1] > 0


@pytest.mark.parametrize("name", ["llama-classes", "bert-answers", "t5", "vit", "wav2vec2-classes"])
def test_a_trace_of_an_adapter_beside_a_new_head_needs_what_real_tensors_need(name, tmp_path):
    lab = TaskLab(name, tmp_path, "trainer")
    plan = PLAIN.replaced(micro_batch=4, accumulation=2, adapter="lora:r=16")
    live, need = lab.real(plan).live(0), lab.need(plan)
    assert need.peak_bytes == pytest.approx(live.max(), rel=0.02, abs=pool_bytes(lab) + 4096)


@pytest.mark.parametrize("launch_path", ["trainer", "loop"])
def test_a_single_micro_step_holds_one_batch(launch_path, tmp_path):
    """A loader brings the next one, to the host."""
    lab = TaskLab("vit", tmp_path, launch_path)
    micro = lab.micro(PLAIN.replaced(micro_batch=4, accumulation=1))
    tape = micro.tape_of(1)
    batch = tape.categories == CATEGORIES.index("batch")
    assert tape.bytes_at(4)[batch].sum() == 4 * (4 * 3 * 32 * 32 + 8)


def test_features_of_speech_that_are_masked_are_traced(tmp_path):
    """SpecAugment, which wav2vec2's configs ask for; the gradient of what is put in their place is made by a mask."""
    lab = TaskLab("wav2vec2-classes", tmp_path, "trainer")
    config = {**CONFIGS["wav2vec2-classes"][1], "mask_time_prob": 0.2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = PLAIN.replaced(micro_batch=4, accumulation=2)
    live, need = lab.real(plan).live(0), lab.need(plan)
    assert need.peak_bytes == pytest.approx(live.max(), rel=0.02, abs=pool_bytes(lab) + 4096)


def test_a_model_that_computes_sizes_with_tensors_is_traced(tmp_path, monkeypatch):
    """Longformer divides a row into chunks; which of its weights are unused depends on values, which are not known."""
    longformer = {**CONFIGS["roberta-masked"][1], "model_type": "longformer", "attention_window": 8}
    config = {**longformer, "architectures": ["LongformerForMaskedLM"]}
    monkeypatch.setitem(CONFIGS, "longformer", ("masked-lm", config))
    lab = TaskLab("longformer", tmp_path, "trainer")
    plan = PLAIN.replaced(micro_batch=4, accumulation=2)
    real, need = lab.real(plan), lab.need(plan)
    held = real.by_category(int(real.live(0).argmax()))
    for name in ("weights", "gradients", "activations", "logits"):
        assert need.by_category[name] == pytest.approx(held[CATEGORIES.index(name)], rel=0.005), name


def test_a_model_that_looks_at_certain_layers_is_traced_whole(tmp_path):
    """BEiT's segmentation takes the outputs of layers by their number."""
    lab = TaskLab("beit", tmp_path, "trainer")
    config = {**CONFIGS["beit"][1], "num_hidden_layers": 12, "out_indices": [3, 5, 7, 11]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = PLAIN.replaced(micro_batch=4, accumulation=2)
    live, need = lab.real(plan).live(0), lab.need(plan)
    assert need.peak_bytes == pytest.approx(live.max(), rel=0.03, abs=pool_bytes(lab) + 4096)
