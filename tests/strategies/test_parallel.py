"""How several processes train: what is offered where, what is written, and what old plans become."""

import importlib
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from autofit import space
from autofit.contract.layout import data_parallel, data_parallel_sizes, layout_of
from autofit.contract.observation import Ran
from autofit.contract.plan import Plan
from autofit.contract.script import Script
from autofit.machine.model import describe_built
from autofit.registry import converted, recipe_of, technique, techniques
from autofit.system.errors import InputError
from tests.support.synthetic import cpu_facts, cuda_facts
from tests.support.tiny import PLAIN

PARALLEL = technique("parallel")


def world(processes, *, nodes=1, device="cuda", **packages):
    facts = (cuda_facts if device == "cuda" else cpu_facts)(global_batch=32, processes=processes, nodes=nodes)
    plain = {name: version for name, version in facts.packages.items() if name != "deepspeed"}
    return replace(facts, packages={**plain, **packages})


def offered(facts):
    return [choice.value for choice in PARALLEL.choices(facts) if choice.status == "offered"]


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        (world(1), ["none", "fsdp"]),
        (world(1, deepspeed="0.18.0"), ["none", "fsdp", "zero2", "zero3"]),
        (world(1, device="cpu"), ["none"]),
        (world(2), ["ddp", "fsdp", "fsdp:noreshard"]),
        (world(8), ["ddp", "fsdp", "fsdp:noreshard", "hsdp:2x4"]),
        (world(8, nodes=4), ["ddp", "fsdp", "fsdp:noreshard", "hsdp:4x2"]),
        (world(2, deepspeed="0.18.0"), ["ddp", "fsdp", "fsdp:noreshard", "zero1", "zero2", "zero3"]),
        (world(2, device="cpu"), ["ddp"]),
    ],
)
def test_what_is_offered_depends_on_world_device_and_packages(facts, wanted):
    assert offered(facts) == wanted
    for choice in PARALLEL.choices(facts):
        assert choice.value == "none" or layout_of(choice.value, facts.workload.processes) is not None
        assert choice.reason


def test_deepspeed_clips_no_gradients_of_a_scripts_own_loop():
    for trainer, wanted in (("Trainer", {"zero1", "zero2", "zero3"}), ("", set())):
        facts = world(2, deepspeed="0.18.0")
        script = Script(path="train.py", sha256="", trainer=trainer, micro_batch=4, accumulation=2, rows=100)
        facts = replace(facts, workload=replace(facts.workload, script=script))
        assert {one for one in offered(facts) if one.startswith("zero")} == wanted


def test_deepspeed_clips_gradients_as_a_scripts_trainer_does():
    facts = world(2, deepspeed="0.18.0")
    for own, wanted in (({"max_grad_norm": 0.3}, 0.3), ({}, 1.0)):
        script = Script(path="train.py", sha256="", trainer="Trainer", micro_batch=4, accumulation=2, rows=100, own=own)
        of_script = replace(facts, workload=replace(facts.workload, script=script))
        assert yaml_of("zero2", of_script)["deepspeed_config"]["gradient_clipping"] == wanted


def test_every_plan_of_a_world_makes_the_global_batch():
    facts = world(4, deepspeed="0.18.0")
    plans = space.build(facts).plans
    assert {plan["parallel"] for plan in plans} == set(offered(facts))
    for plan in plans[::7]:
        assert plan["micro_batch"] * plan["accumulation"] * data_parallel(plan, facts.workload) == 32


def test_a_batch_that_the_processes_can_not_share_is_refused():
    facts = world(5)
    with pytest.raises(InputError, match="can't be split over 5 processes") as caught:
        space.build(facts)
    assert "30 or 35" in caught.value.hint


LLAMA = {
    "tensor_split": ("colwise", "colwise_gather_output", "embedding_rowwise", "rowwise"),
    "tensor_sizes": {"attention heads": 32, "key-value heads": 4, "entries of the vocabulary": 32000},
}


def split_world(processes, *, model=LLAMA, nodes=1, device="cuda", transformers="5.23.0", **work):
    facts = world(processes, nodes=nodes, device=device, transformers=transformers)
    workload = replace(facts.workload, **work)
    return replace(facts, model=replace(facts.model, **model), workload=workload)


@pytest.mark.parametrize(
    ("facts", "value", "why"),
    [
        (split_world(2), "tp2xfsdp1", None),
        (split_world(8), "tp4xfsdp2", None),
        (split_world(8), "tp8xfsdp1", "8 processes can't share 4 key-value heads"),
        (split_world(2, device="cpu"), "tp2xfsdp1", "refuses tensor parallelism on a CPU"),
        (split_world(2, transformers="5.22.1"), "tp2xfsdp1", "5.22.1 is too old, 5.23 is needed"),
        (split_world(2, model={}), "tp2xfsdp1", "no plan of tensor parallelism"),
        (split_world(2, model={**LLAMA, "task": "ctc"}), "tp2xfsdp1", "not tried with ctc"),
        (
            split_world(2, model={**LLAMA, "tensor_split": ("colwise", "replicated_with_grad_allreduce")}),
            "tp2xfsdp1",
            "anew in each micro-step",
        ),
        (split_world(2, model={**LLAMA, "tensor_split": ("moe_tp_experts",)}), "tp2xfsdp1", "moe_tp_experts"),
    ],
)
def test_products_are_shared_where_heads_and_vocabulary_divide(facts, value, why):
    choice = PARALLEL.choice(value, facts)
    assert (choice.status, why is None) in {("on_request", True), ("withheld", False)}
    assert why is None or why in choice.reason


def test_products_are_shared_inside_a_machine_only():
    values = {choice.value for choice in PARALLEL.choices(split_world(8, nodes=4))}
    assert "tp2xfsdp4" in values
    assert not any(str(value).startswith(("tp4", "tp8")) for value in values)


def test_processes_that_share_products_count_once_in_the_global_batch():
    facts = split_world(4)
    assert data_parallel_sizes(facts) == [4, 2, 1]
    assert data_parallel_sizes(world(4)) == [4]
    for value, ranks in (("tp2xfsdp2", 2), ("tp4xfsdp1", 1)):
        given = {"parallel": (value,)}
        plans = space.build(facts, given=given).plans
        assert plans
        assert {plan["micro_batch"] * plan["accumulation"] * ranks for plan in plans} == {32}
        assert {plan["offload"] for plan in plans} == {"none"}
        assert {plan["compile"] for plan in plans} == {"off"}


PARTED = {"context_split": True, "plain_head": True}
TRIED = {"torch": "2.13.0+cu130", "transformers": "5.23.0", "accelerate": "1.15.0"}


def parted_world(processes, *, capability=(9, 0), packages=TRIED, model=PARTED, **work):
    facts = split_world(processes, model=model, **work)
    hardware = replace(facts.hardware, capability=capability)
    return replace(facts, hardware=hardware, packages={**facts.packages, **packages})


@pytest.mark.parametrize(
    ("facts", "value", "why"),
    [
        (parted_world(2), "cp2xfsdp1", None),
        (parted_world(8), "cp4xfsdp2", None),
        (parted_world(2, device="cpu"), "cp2xfsdp1", "no ring attention for a CPU"),
        (parted_world(2, capability=(7, 5)), "cp2xfsdp1", "FlashAttention, which"),
        (parted_world(2, packages={**TRIED, "torch": "2.12.1"}), "cp2xfsdp1", "2.12.1 is too old, 2.13 is needed"),
        (parted_world(2, packages={**TRIED, "accelerate": "1.14.0"}), "cp2xfsdp1", "1.15 is needed"),
        (parted_world(2, launch_path="loop"), "cp2xfsdp1", "a plain loop does not"),
        (parted_world(2, lengths=(5, 9)), "cp2xfsdp1", "rows of several lengths"),
        (parted_world(4, seq_len=1020), "cp2xfsdp2", None),
        (parted_world(4, seq_len=1020), "cp4xfsdp1", "1020 tokens are not divisible by 8"),
        (parted_world(2, model={**PARTED, "task": "ctc"}), "cp2xfsdp1", "not tried with ctc"),
        (parted_world(2, model={"plain_head": True}), "cp2xfsdp1", "causal over whole rows"),
        (parted_world(2, model={"context_split": True}), "cp2xfsdp1", "takes shifted labels"),
        (parted_world(2, model={**PARTED, "attention_dropout": True}), "cp2xfsdp1", "drops attention weights"),
        (parted_world(2, model={**PARTED, "layer_classes": ()}), "cp2xfsdp1", "names no layer"),
    ],
)
def test_tokens_are_shared_where_flash_attention_is_causal_over_the_whole_row(facts, value, why):
    choice = PARALLEL.choice(value, facts)
    assert (choice.status, why is None) in {("on_request", True), ("withheld", False)}
    assert why is None or why in choice.reason


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


@pytest.mark.parametrize(
    ("model_type", "changes", "can"),
    [
        ("llama", {}, True),
        ("qwen3", {"head_dim": 256}, True),
        ("qwen3", {"head_dim": 512}, False),
        ("mistral", {"sliding_window": None}, True),
        ("mistral", {"sliding_window": 8}, False),
        ("gemma2", {}, False),
        ("gpt_oss", {"num_local_experts": 2}, False),
        ("deepseek_v3", {"first_k_dense_replace": 2}, False),
        ("gpt2", {}, False),
        ("mamba", {}, False),
    ],
)
def test_which_models_are_split_by_tokens(model_type, changes, can):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SMALL, **changes}))
    assert describe_built(model_type, model.config, model)["context_split"] is can


def test_processes_that_share_tokens_count_once_in_the_global_batch():
    facts = parted_world(4)
    assert data_parallel_sizes(facts) == [4, 2, 1]
    for value, ranks in (("cp2xfsdp2", 2), ("cp4xfsdp1", 1)):
        plans = space.build(facts, given={"parallel": (value,)}).plans
        assert plans
        assert {plan["micro_batch"] * plan["accumulation"] * ranks for plan in plans} == {32}
        assert {plan["precision"] for plan in plans} <= {"bf16", "bf16_weights"}
        assert {plan["compile"] for plan in plans} == {"off"}


def yaml_of(value, facts, **others):
    return recipe_of(PLAIN.replaced(parallel=value, **others), facts).emission.accelerate


def test_what_is_written():
    four = world(4)
    assert yaml_of("ddp", four) | {"distributed_type": "MULTI_GPU", "num_processes": 4} == yaml_of("ddp", four)
    fsdp = yaml_of("fsdp", four)
    assert (fsdp["distributed_type"], fsdp["fsdp_config"]["fsdp_reshard_after_forward"]) == ("FSDP", True)
    assert "parallelism_config" not in fsdp
    assert yaml_of("fsdp:noreshard", four)["fsdp_config"]["fsdp_reshard_after_forward"] is False
    assert yaml_of("fsdp", four, offload="parameters")["fsdp_config"]["fsdp_offload_params"] is True
    sizes = yaml_of("hsdp:2x2", four)["parallelism_config"]
    assert sizes["parallelism_config_dp_replicate_size"] * sizes["parallelism_config_dp_shard_size"] == 4
    tensor = yaml_of("tp2xfsdp2", four)
    assert (tensor["distributed_type"], tensor["parallelism_config"]["parallelism_config_tp_size"]) == ("MULTI_GPU", 2)
    assert "setup.model" in " ".join(recipe_of(PLAIN.replaced(parallel="tp2xfsdp2"), four).emission.script)
    context = yaml_of("cp2xfsdp2", four)
    assert (context["distributed_type"], context["fsdp_config"]) == ("FSDP", fsdp["fsdp_config"])
    ring = {name.removeprefix("parallelism_config_"): value for name, value in context["parallelism_config"].items()}
    assert (ring["cp_size"], ring["dp_shard_size"], ring["cp_comm_strategy"]) == (2, 2, "allgather")
    zero = yaml_of("zero2", four, offload="optimizer")
    assert (zero["deepspeed_config"]["zero_stage"], zero["deepspeed_config"]["offload_optimizer_device"]) == (2, "cpu")


@pytest.mark.parametrize(
    ("before", "now"),
    [("none", ("none", "none")), ("activations", ("none", "activations")), ("fsdp2", ("fsdp", "parameters")),
     ("zero2", ("zero2", "optimizer")), ("zero3", ("zero3", "parameters"))],
)  # fmt: skip
def test_a_plan_of_an_earlier_version_becomes_one_of_today(before, now):
    old = Plan({name: value for name, value in PLAIN.items() if name != "parallel"} | {"offload": before})
    found = converted(old)
    assert (found["parallel"], found["offload"]) == now
    assert converted(found) == found
    assert {name: found[name] for name in found if name not in {"parallel", "offload"}} == {
        name: old[name] for name in old if name != "offload"
    }


SEEN = {"engine": "FSDP2", "processes": 4, "mesh": [4], "shards": 4, "units": 3, "freed_units": 2}


def test_the_rows_of_a_process_are_told_where_every_layout_has_as_many():
    """Where groups of processes may share a micro-batch, a value alone does not say how many they are."""
    for name in ("micro_batch", "accumulation"):
        said = [choice.reason for choice in technique(name).choices(split_world(2))]
        assert not any("of a process" in words for words in said)
        assert all("of a process" in choice.reason for choice in technique(name).choices(world(2)))


SEQ_LEN = world(4).workload.seq_len
RING = {**SEEN, "context": 2, "tokens": SEQ_LEN // 2, "same_rows": True}
SPLIT = {"engine": "MULTI_GPU", "processes": 4, "tensor": 2, "split_weights": 9, "fsdp": 2, "same_rows": True}


@pytest.mark.parametrize(
    ("value", "seen", "why"),
    [
        ("fsdp", SEEN, None),
        ("fsdp", {**SEEN, "engine": "MULTI_CPU"}, "not fully sharded data parallel"),
        ("fsdp", {**SEEN, "processes": 1}, "1 process(es) trained together, not 4"),
        ("fsdp", {**SEEN, "shards": 1}, "split over 1 processes, not 4"),
        ("fsdp", {**SEEN, "freed_units": 0}, "0 of 3 units"),
        ("fsdp:noreshard", SEEN, "2 of 3 units"),
        ("fsdp:noreshard", {**SEEN, "freed_units": 0}, None),
        ("hsdp:2x2", {**SEEN, "mesh": [2, 2], "shards": 2}, None),
        ("hsdp:2x2", {**SEEN, "shards": 2}, "a mesh of [4]"),
        ("ddp", {**SEEN, "engine": "NO"}, "not DistributedDataParallel"),
        ("zero2", {"engine": "DEEPSPEED", "processes": 4, "zero_stage": 3}, "stage 3"),
        ("tp2xfsdp2", SPLIT, None),
        ("tp2xfsdp2", {**SPLIT, "engine": "FSDP2"}, "not tensor parallelism"),
        ("tp2xfsdp2", {**SPLIT, "tensor": 1, "split_weights": 0}, "1 processes share each product, not 2"),
        ("tp2xfsdp2", {**SPLIT, "fsdp": 1}, "split over 1 groups, not 2"),
        ("tp2xfsdp2", {**SPLIT, "same_rows": False}, "train on different rows"),
        ("cp2xfsdp2", RING, None),
        ("cp2xfsdp2", {**RING, "context": 1}, "1 processes share the tokens of each row, not 2"),
        ("cp2xfsdp2", {**RING, "tokens": SEQ_LEN}, f"{SEQ_LEN} tokens of a row, not {SEQ_LEN // 2}"),
        ("cp2xfsdp2", {**RING, "shards": 2}, "split over 2 processes, not 4"),
        ("cp2xfsdp2", {**RING, "same_rows": False}, "parts of different rows"),
    ],
)
def test_what_was_ignored_is_told(value, seen, why):
    found = PARALLEL.in_effect(value, seen, world(4))
    assert found is None if why is None else why in found


def test_parts_of_one_row_are_told_from_parts_of_two():
    continues = importlib.import_module("autofit.strategies.parallel.context").continues
    # the row 0 to 11 over two processes: tokens 0 to 2 and 9 to 11, 3 to 5 and 6 to 8; what follows 11 is not learned
    assert continues([[[0, 3], [9, -100]], [[3, 6], [6, 9]]])
    assert not continues([[[0, 3], [9, -100]], [[53, 56], [56, 59]]])
    assert not continues([[[0, 6], [6, -100]], [[0, 6], [6, -100]]])


def test_a_model_that_one_process_splits_over_its_devices_is_told():
    model, facts = torch.nn.Linear(2, 2), world(1)
    seen = {
        "model": model, "optimizer": None, "accelerator": None, "recipe": recipe_of(PLAIN, facts), "rows": 2,
        "accumulation": 1, "products": (model,), "layer_forwards": (1,), "forwards_in_graph": None,
        "output": ("float32", model), "in_graph": False, "compiled_graphs": 0,
    }  # fmt: skip
    whole, part = Ran(running=model, **seen), Ran(running=model._replicate_for_data_parallel(), **seen)
    assert PARALLEL.in_effect("none", PARALLEL.observe(whole), facts) is None
    found = PARALLEL.in_effect("none", PARALLEL.observe(part), facts)
    assert found == "the model runs under DataParallel, not no engine"


@pytest.mark.parametrize(
    ("processes", "plan", "why"),
    [
        (1, {"parallel": "fsdp", "offload": "none"}, "nobody to share with"),
        (1, {"parallel": "fsdp", "offload": "parameters"}, None),
        (1, {"parallel": "none", "offload": "parameters"}, "parallel=fsdp or zero3"),
        (2, {"parallel": "fsdp", "offload": "none"}, None),
        (2, {"parallel": "fsdp:noreshard", "offload": "parameters"}, "parallel=fsdp or zero3"),
        (2, {"parallel": "fsdp", "offload": "none", "optimizer": "adamw_8bit"}, "adamw_8bit was not tried"),
        (2, {"parallel": "fsdp", "offload": "none", "quantization": "int8"}, "leaves weights of int8 whole"),
        (2, {"parallel": "zero2", "offload": "optimizer"}, None),
        (2, {"parallel": "ddp", "offload": "none", "optimizer": "adamw_8bit"}, None),
        (2, {"parallel": "tp2xfsdp1", "offload": "none"}, None),
        (2, {"parallel": "tp2xfsdp1", "offload": "none", "optimizer": "sgd"}, "momentum of a whole vocabulary"),
        (4, {"parallel": "tp2xfsdp2", "offload": "none", "optimizer": "sgd"}, None),
        (2, {"parallel": "tp2xfsdp1", "offload": "activations"}, "offload=activations was not tried"),
        (2, {"parallel": "tp2xfsdp1", "offload": "none", "quantization": "nf4"}, "quantization=nf4 was not tried"),
        (2, {"parallel": "cp2xfsdp1", "precision": "bf16", "checkpointing": "full"}, None),
        (2, {"parallel": "cp2xfsdp1", "precision": "fp32"}, "which computes in 16 bits"),
        (2, {"parallel": "cp2xfsdp1", "precision": "bf16", "attention": "eager"}, "sdpa alone, not of eager"),
        (2, {"parallel": "cp2xfsdp1", "precision": "bf16", "kernels": "liger"}, "liger was not tried"),
        (2, {"parallel": "cp2xfsdp1", "precision": "bf16", "kernels": "chunked_ce", "adapter": "lora:r=16"}, None),
        (2, {"parallel": "cp2xfsdp1", "precision": "bf16", "offload": "parameters"}, "parallel=fsdp or zero3"),
    ],
)
def test_what_does_not_go_together_is_told(processes, plan, why):
    whole = PLAIN.replaced(**plan)
    asked = [one for one in techniques() if one.name not in {"micro_batch", "accumulation"}]
    said = [words for one in asked if (words := one.conflict(whole[one.name], whole, world(processes)))]
    assert not said if why is None else any(why in words for words in said)


@pytest.mark.parametrize(
    ("value", "words"),
    [("cp2xfsdp4", "labels that are not the logits' own"), ("tp2xfsdp4", "each row 2 times"), ("fsdp", None)],
)
def test_what_an_evaluation_makes_of_shared_rows_is_said(value, words):
    facts = world(8)
    said = PARALLEL.changes(value, {}, facts)
    assert (words in said) if words else said is None
    loop = replace(facts, workload=replace(facts.workload, launch_path="loop"))
    assert PARALLEL.changes(value, {}, loop) is None
