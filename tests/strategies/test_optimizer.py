"""Optimizers and precisions that need a package or a device: what is said of them, and what they do to a tiny model."""

import importlib
from dataclasses import replace

import pytest

from autofit import space
from autofit.contract.script import Script
from autofit.contract.technique import Kind
from autofit.machine.packages import installed
from autofit.registry import recipe_of, technique
from tests.support.synthetic import cpu_facts, cuda_facts
from tests.support.traced import PLAIN

OPTIMIZER, PRECISION = technique("optimizer"), technique("precision")
PACKAGES = (
    "bitsandbytes", "torchao", "galore-torch", "apollo-torch", "lomo-optim", "schedulefree", "torch-optimi",
)  # fmt: skip
EVERY_PACKAGE = {**cuda_facts().packages, **dict.fromkeys(PACKAGES, "1.0.0")}
EVERY = frozenset(Kind)


def cuda(capability=(8, 0), **packages):
    facts = cuda_facts()
    hardware = replace(facts.hardware, capability=capability)
    return replace(facts, hardware=hardware, packages={**EVERY_PACKAGE, **packages})


def said(one, facts):
    return {choice.value: choice for choice in one.choices(facts)}


# -- what is said of them --------------------------------------------------------------------------------------------


def test_every_optimizer_is_to_be_had_where_all_is_installed():
    choices = said(OPTIMIZER, cuda())
    assert [value for value, choice in choices.items() if choice.status == "withheld"] == ["galore_adamw_8bit"]
    assert {value for value, choice in choices.items() if choice.status == "offered"} == {
        "adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "sgd",
    }  # fmt: skip


def test_a_missing_package_is_named_with_its_command():
    bare = replace(cuda(), packages={"torch": "2.13.0"})
    choices = said(OPTIMIZER, bare)
    assert {value for value, choice in choices.items() if choice.status != "withheld"} == {"adamw", "adafactor", "sgd"}
    assert choices["lomo"].reason == "lomo-optim is not installed: pip install lomo-optim"
    assert choices["galore_adamw"].reason.endswith("pip install galore-torch")
    assert said(PRECISION, replace(cuda((9, 0)), packages={}))["fp8"].reason.endswith("pip install torchao")


@pytest.mark.parametrize(
    ("facts", "value", "words"),
    [
        (replace(cpu_facts(), packages=EVERY_PACKAGE), "adalomo", "made on a CUDA device"),
        (replace(cpu_facts(), packages=EVERY_PACKAGE), "paged_lion_8bit", "falls back to unpaged"),
        (cuda(), "galore_adamw_8bit", "arguments by their places"),
        (replace(cuda(), workload=replace(cuda().workload, launch_path="loop")), "lomo", "learning rate"),
        (replace(cuda(), workload=replace(cuda().workload, processes=2)), "lomo", "summed over the processes"),
        (
            replace(cuda(), hardware=replace(cuda().hardware, precisions=("fp32",))),
            "adamw_torchao_8bit_stochastic",
            "would emulate",
        ),
    ],
)
def test_an_optimizer_that_can_not_run_here_is_withheld(facts, value, words):
    choice = said(OPTIMIZER, facts)[value]
    assert choice.status == "withheld"
    assert words in choice.reason


@pytest.mark.parametrize(
    ("value", "others", "words"),
    [
        ("lomo", {"accumulation": 2}, "can't be accumulated"),
        ("lomo", {"precision": "fp16"}, "scaled"),
        ("lomo", {}, None),
        ("adamw_torchao_8bit_stochastic", {}, "rounds bfloat16 weights"),
        ("adamw_torchao_8bit_stochastic", {"precision": "bf16_weights"}, None),
        ("galore_adamw", {"adapter": "lora"}, "an adapter leaves few"),
        ("galore_adamw", {"accumulation": 8}, None),
    ],
)
def test_what_can_not_go_together(value, others, words):
    found = OPTIMIZER.conflict(value, {**PLAIN, **others}, cuda())
    assert found is None if words is None else words in found


def test_only_plain_state_waits_on_the_host():
    offload = technique("offload")
    for value, choice in said(OPTIMIZER, cuda()).items():
        refused = offload.conflict("optimizer", PLAIN.replaced(optimizer=value), cuda())
        assert (refused is None) == (value in {"adamw", "adafactor", "sgd"}), choice


def test_what_is_written():
    for value in said(OPTIMIZER, cuda()):
        written = OPTIMIZER.emit(value, PLAIN, cuda()).training_args
        projected = value.startswith(("galore", "apollo"))
        assert written["optim_target_modules"] == ("all-linear" if projected else None)
        assert ("rank=128" in str(written["optim_args"])) == projected
        assert ("bf16_stochastic_round=True" in str(written["optim_args"])) == value.endswith("stochastic")


def test_a_plain_loop_gets_a_schedule_free_optimizer_in_training_mode():
    loop = replace(cuda(), workload=replace(cuda().workload, launch_path="loop"))
    plan = PLAIN.replaced(optimizer="schedule_free_adamw")
    assert len(recipe_of(plan, loop).optimizer_wraps) == 1
    assert recipe_of(plan, cuda()).optimizer_wraps == []


STEPPED = {"class": "bitsandbytes.optim.lion.Lion", "paged": False}


@pytest.mark.parametrize(
    ("value", "seen", "words"),
    [
        ("lion", {"state_dtypes": ("float32",)}, None),
        ("lion", {"state_dtypes": ("float32", "uint8")}, "fewer bits"),
        ("lion_8bit", {"state_dtypes": ("float32",)}, "no 8-bit state"),
        ("lion_8bit", {"state_dtypes": ("uint8",)}, None),
        ("paged_lion_8bit", {"state_dtypes": ("uint8",)}, "not paged"),
        ("lion_8bit", {"state_dtypes": ("uint8",), "paged": True}, "is paged"),
        ("galore_adamw", {"class": "galore_torch.adamw.AdamW", "paged": None}, "no gradient"),
    ],
)
def test_what_stepped_is_told_from_what_is_like_it(value, seen, words):
    found = OPTIMIZER.in_effect(value, {**STEPPED, **seen}, cuda())
    assert found is None if words is None else words in found


def test_another_class_that_stepped_is_no_optimizer_of_the_plan():
    facts = cuda()
    for value, choice in said(OPTIMIZER, facts).items():
        if choice.status != "withheld":
            found = OPTIMIZER.in_effect(value, {**STEPPED, "class": "somebody.Else"}, facts)
            assert found.startswith("somebody.Else stepped, not "), value


def test_lomo_is_searched_without_accumulation():
    plans = space.build(cuda(), EVERY, {"optimizer": ("lomo",), "precision": ("bf16", "fp16")}).plans
    assert {plan["accumulation"] for plan in plans} == {1}
    assert {plan["precision"] for plan in plans} == {"bf16"}


# -- what they do ----------------------------------------------------------------------------------------------------


def tiny_model():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=120, num_hidden_layers=2, num_attention_heads=4, vocab_size=96
    )
    return LlamaForCausalLM(config)


def test_lomo_leaves_no_gradients_and_moves_every_weight():
    pytest.importorskip("lomo_optim")
    import torch

    facts = replace(cpu_facts(), packages=installed())
    model = tiny_model()
    built = recipe_of(PLAIN.replaced(optimizer="lomo", accumulation=1), facts).optimizer(model, output_dir="unused")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rows = torch.arange(32).view(2, 16)
    built.fused_backward(model(input_ids=rows, labels=rows).loss, 0.1)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert not torch.equal(parameter, before[name]), name


def test_stochastic_rounding_keeps_small_updates():
    """Updates of a hundredth of the last place move no weight, but for one in a hundred by chance."""
    pytest.importorskip("torchao")
    import torch

    rounding = importlib.import_module("torchao.optim.quant_utils")._fp32_to_bf16_sr
    torch.manual_seed(0)
    updated = torch.full((100_000,), 1.0 + 2**-7 / 100)
    assert updated.bfloat16().eq(1).all()
    assert rounding(updated).float().mean().item() == pytest.approx(updated[0].item(), rel=2e-5)


def test_stable_adamw_sums_bfloat16_weights_by_kahan():
    pytest.importorskip("optimi")
    import torch

    facts = replace(cpu_facts(), packages=installed())
    plan = PLAIN.replaced(optimizer="stable_adamw", precision="bf16_weights")
    model = tiny_model().bfloat16()
    built = recipe_of(plan, facts).optimizer(model, output_dir="unused")
    rows = torch.arange(32).view(2, 16)
    model(input_ids=rows, labels=rows).loss.backward()
    built.step()
    states = list(built.state.values())
    assert len(states) == len(list(model.parameters()))
    assert all(state["kahan_comp"].dtype == torch.bfloat16 for state in states)


# -- float8 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "packages", "status"),
    [((8, 9), {}, "on_request"), ((9, 0), {}, "on_request"), ((8, 6), {}, "withheld")],
)
def test_float8_is_to_be_had_from_ada_on(capability, packages, status):
    assert said(PRECISION, cuda(capability, **packages))["fp8"].status == status
    assert said(PRECISION, cpu_facts())["fp8"].status == "withheld"


def test_float8_layers_are_told_from_none():
    seen = {"compute_dtype": "bfloat16", "weights_dtype": "float32", "float8_linears": 14, "loss_scaled": False}
    assert PRECISION.in_effect("fp8", seen, cuda()) is None
    assert "14 linear layers" in PRECISION.in_effect("bf16", seen, cuda())
    assert "0 linear layers" in PRECISION.in_effect("fp8", {**seen, "float8_linears": 0}, cuda())


def test_linear_layers_multiply_in_float8_but_not_the_head():
    pytest.importorskip("torchao")
    model = tiny_model()
    weights = {name: id(parameter) for name, parameter in model.named_parameters()}
    wrap = importlib.import_module("autofit.strategies.precision.float8").multiply_in_float8
    assert wrap(model) is model
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if hasattr(module, "in_features")}
    assert kinds.pop("lm_head") == "Linear"
    assert {kind for name, kind in kinds.items() if "self_attn" in name} == {"Float8Linear"}
    assert {kind for name, kind in kinds.items() if "mlp" in name} == {"Linear"}, "120 is no multiple of 16"
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == weights


@pytest.mark.parametrize("engine", ["fsdp", "zero2", "zero3"])
def test_float8_is_not_tried_under_an_engine(engine):
    found = PRECISION.conflict("fp8", PLAIN.replaced(parallel=engine), cuda((9, 0)))
    assert "float8" in found


@pytest.mark.parametrize(("arguments", "words"), [(None, ""), ("rank=8", " (rank=8)")])
def test_a_scripts_optimizer_that_has_no_value_is_named_with_what_it_was_given(arguments, words):
    own = {"optim": "galore_adamw", "optim_args": arguments}
    script = Script(path="train.py", sha256="", trainer="Trainer", micro_batch=4, accumulation=2, own=own)
    facts = cpu_facts()
    facts = replace(facts, workload=replace(facts.workload, script=script))
    assert technique("optimizer").held(facts).reason == f"the script asks for galore_adamw{words}"


@pytest.mark.parametrize(("asked", "changed"), [("schedule_free_adamw", False), ("adamw_torch", True)])
def test_a_scripts_own_optimizer_changes_nothing(asked, changed):
    script = Script(
        path="train.py",
        sha256="",
        trainer="Trainer",
        micro_batch=4,
        accumulation=2,
        own={"optim": asked, "optim_args": None},
    )
    facts = replace(cuda(), workload=replace(cpu_facts().workload, script=script))
    assert (OPTIMIZER.changes("schedule_free_adamw", PLAIN, facts) is not None) == changed


@pytest.mark.parametrize(("layers", "value"), [("all-linear", "galore_adamw"), (["q_proj"], "adamw"), (None, "adamw")])
def test_a_scripts_projected_layers_stay_its_own(layers, value):
    rows = importlib.import_module("autofit.strategies.optimizer.rows").ROWS
    own = {"optim": "galore_adamw", "optim_args": rows["galore_adamw"].args, "optim_target_modules": layers}
    script = Script(path="train.py", sha256="", trainer="Trainer", micro_batch=4, accumulation=2, own=own)
    facts = cuda()
    held = technique("optimizer").held(replace(facts, workload=replace(facts.workload, script=script)))
    assert (held.value, held.by_script) == (value, value == "adamw")
