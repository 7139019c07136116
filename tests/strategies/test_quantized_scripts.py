"""Scripts that load weights in 4 or 8 bits themselves: their model on random weights, and what is left to a plan."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPTQConfig, LlamaConfig, LlamaForCausalLM

from autofit.contract.script import Script
from autofit.machine.model import describe_built
from autofit.registry import recipe_of, technique
from autofit.space import build
from autofit.training.scripts.leave import Refused
from autofit.training.scripts.patches import loads_of
from autofit.training.scripts.random_weights import made_quantized, random_model
from tests.support.synthetic import cpu_facts

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 64, "attention_bias": True,
}  # fmt: skip


def plain():
    """A model that is not quantized; its config is its own, since quantizing writes into it."""
    return LlamaForCausalLM(LlamaConfig(**SIZES))


IN_8_BITS = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["down_proj", "lm_head"])


def in_4_bits(kind="nf4", *, nested=True, storage=torch.uint8):
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_quant_storage=storage,
    )


def made(config, *, draws=True):
    return made_quantized(config)(plain, draws)


def layout(model):
    """Shapes and dtypes of weights, whether they are trained, and what belongs to those in 4 or 8 bits."""
    found = {}
    for name, one in model.named_parameters():
        found[name] = tuple(one.shape), one.dtype, one.requires_grad, type(one).__name__
        if (scales := getattr(one, "SCB", None)) is not None:
            found[name] += scales.shape, scales.dtype, one.CB.data_ptr() == one.data_ptr(), one.has_fp16_weights
            state = model.get_submodule(name.removesuffix(".weight")).state
            found[name] += state.threshold, state.has_fp16_weights, state.CB
        if (state := getattr(one, "quant_state", None)) is not None:
            inner = (state.state2.absmax.shape, state.state2.absmax.dtype, state.offset.shape) if state.nested else None
            scales = state.absmax.shape, state.absmax.dtype
            found[name] += (state.quant_type, state.shape, state.dtype, state.blocksize, *scales, inner)
    return found


@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (in_4_bits("nf4"), torch.float32),
        (in_4_bits("fp4", nested=False), torch.float32),
        (in_4_bits("nf4", storage=torch.bfloat16), torch.float32),
        (IN_8_BITS, torch.float32),
        (BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), torch.float16),
    ],
    ids=["nf4", "fp4", "stored wide", "int8", "int8 without outliers"],
)
def test_a_model_of_random_weights_is_as_from_pretrained_would_load_it(tmp_path, config, dtype, draws):
    plain().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=dtype)
    found = made_quantized(config)(lambda: plain().to(dtype), draws)
    assert layout(found) == layout(loaded)
    assert (found.is_loaded_in_8bit if config.load_in_8bit else found.is_loaded_in_4bit) is True
    packed = next(one for one in found.parameters() if hasattr(one, "quant_state") or hasattr(one, "SCB"))
    assert config.load_in_8bit or packed.dtype == config.bnb_4bit_quant_storage
    assert bool(packed.any()) == draws
    ids = torch.arange(8)[None]
    assert found.train()(input_ids=ids, labels=ids).loss.isfinite()


def test_random_weights_in_8_bits_are_scaled_as_loading_scales_them():
    found = made(BitsAndBytesConfig(load_in_8bit=True))
    weight = found.model.layers[0].mlp.up_proj.weight
    assert weight.abs().amax(1).tolist() == [127] * 96, "each row's largest is the end of its range"
    assert weight.SCB.mean().item() == pytest.approx(0.05, rel=0.3), "which is some deviations of 0.02"


@pytest.mark.parametrize("passes", [0, 1])
def test_what_belongs_to_weights_in_8_bits_moves_with_the_model(passes):
    """As an Accelerator moves it; bitsandbytes leaves it behind, since ``from_pretrained`` loads to the device."""
    found = made(IN_8_BITS)
    for _ in range(passes):
        found(input_ids=torch.arange(8)[None])
    found._apply(torch.clone)
    layer = found.model.layers[0].mlp.up_proj
    holder = layer.state if passes else layer.weight
    assert holder.CB.data_ptr() == layer.weight.data_ptr()
    assert holder.SCB.device == layer.weight.device


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (in_4_bits().to_dict(), "nf4 twice"),
        (BitsAndBytesConfig(load_in_8bit=True).to_dict(), "int8"),
        ({"load_in_8bit": True}, "int8"),
    ],
)
def test_a_checkpoint_that_is_quantized_already_says_so_in_its_config(tmp_path, said, words):
    config = LlamaConfig(**SIZES, quantization_config=said)
    build_it = lambda settings, **_: LlamaForCausalLM(settings)  # noqa: E731
    found = random_model(LlamaForCausalLM, tmp_path, {"config": config}, build_it, draws=False)
    assert technique("quantization").in_script(found) == words


def test_what_a_module_calls_its_weight_may_be_any():
    """As a loss has it that is weighed by a number."""
    model = plain()
    model.loss = torch.nn.Module()
    model.loss.weight = 0.5
    model.register_buffer("weight", torch.ones(2, 2, dtype=torch.int8))
    assert technique("quantization").in_script(model) is None


@pytest.mark.parametrize("config", [in_4_bits(), IN_8_BITS])
def test_quantized_weights_are_counted_as_what_they_stand_for(config):
    told = [describe_built("llama", one.config, one) for one in (plain(), made(config))]
    assert told[0]["parameters"] == told[1]["parameters"]
    assert told[0]["products"] == told[1]["products"]


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (BitsAndBytesConfig(), "bitsandbytes"),
        (GPTQConfig(bits=4), "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
    ],
)
def test_other_quantized_weights_are_refused_by_their_name(config, kind):
    with pytest.raises(Refused) as refused:
        made_quantized(config)
    assert refused.value.message == f"the script loads its model with quantized weights ({kind})"
    assert "--fix quantization=nf4" in refused.value.hint


def test_weights_that_are_rounded_to_8_bits_in_each_step_are_refused_by_their_argument():
    with pytest.raises(Refused) as refused:
        made_quantized(BitsAndBytesConfig(load_in_8bit=True, llm_int8_has_fp16_weight=True))
    assert "llm_int8_has_fp16_weight" in refused.value.message
    assert "leave that out" in refused.value.hint


@pytest.fixture
def facts():
    facts = cpu_facts()
    script = Script(
        path="train.py", sha256="", trainer="Trainer", micro_batch=4, accumulation=2, adapter="LORA r=4",
        quantization="nf4 twice", checkpointing="switched on",
    )  # fmt: skip
    return dataclasses.replace(facts, workload=dataclasses.replace(facts.workload, script=script))


def test_a_plan_leaves_alone_how_a_script_has_quantized(facts):
    plans = build(facts).plans
    assert {plan["quantization"] for plan in plans} == {"none"}
    assert "bf16_weights" not in {plan["precision"] for plan in plans}
    work = facts.workload
    in_float16 = dataclasses.replace(work, script=dataclasses.replace(work.script, weights_dtype="float16"))
    offered = technique("precision").choices(dataclasses.replace(facts, workload=in_float16))
    assert {one.value: one.status for one in offered if "weights" in one.value} == {
        "bf16_weights": "withheld", "fp16_weights": "offered"
    }  # fmt: skip
    held = technique("quantization").held(facts)
    assert (held.value, held.by_script, "nf4 twice" in held.reason) == ("none", True, True)
    assert technique("quantization").in_effect("none", {"weight": "nf4 twice"}, facts) is None
    assert (
        technique("precision").in_effect("bf16", {"compute_dtype": "float32", "weights_dtype": "float32"}, facts)
        is None
    )


@pytest.mark.parametrize(
    ("kind", "parallel", "precision", "refused"),
    [
        ("nf4 twice", "ddp", "fp16", None),
        ("nf4 twice", "fsdp", "fp32", "stored in uint8: load them with bnb_4bit_quant_storage=torch.bfloat16"),
        ("int8", "ddp", "bf16", None),
        ("int8", "fsdp", "bf16", "stored in int8"),
        ("nf4 twice", "zero2", "fp32", "was not tried under zero2"),
        ("nf4 twice, stored in bfloat16", "zero2", "bf16", "was not tried under zero2"),
        ("nf4 twice, stored in bfloat16", "tp2xfsdp1", "bf16", "was not tried under tp2xfsdp1"),
        ("nf4 twice, stored in bfloat16", "fsdp", "fp32", None),
        ("nf4 twice, stored in bfloat16", "fsdp:noreshard", "bf16", None),
        ("nf4 twice, stored in bfloat16", "hsdp:2x2", "bf16_weights", None),
        ("nf4 twice, stored in bfloat16", "fsdp", "fp16", "would cast weights that are packed in bfloat16 to float16"),
        ("nf4 twice, stored in float32", "fsdp", "tf32", None),
        ("nf4 twice, stored in float32", "fsdp", "bf16", "that are packed in float32 to bfloat16"),
        (
            "nf4 twice, stored in float32",
            "fsdp",
            "bf16_weights",
            "that are packed in float32 to bfloat16",
        ),
    ],
)
def test_quantized_weights_are_split_where_they_stay_what_they_are(facts, kind, parallel, precision, refused):
    script = dataclasses.replace(facts.workload.script, quantization=kind)
    facts = dataclasses.replace(facts, workload=dataclasses.replace(facts.workload, script=script))
    plan = {**build(facts).plans[0], "parallel": parallel, "precision": precision}
    why_not = technique("quantization").conflict("none", plan, facts)
    assert why_not is None if refused is None else refused in why_not


def test_a_script_says_what_its_weights_in_4_bits_are_stored_in():
    told = [technique("quantization").in_script(made(in_4_bits(storage=one))) for one in (torch.uint8, torch.bfloat16)]
    assert told == ["nf4 twice", "nf4 twice, stored in bfloat16"]


def test_what_is_unpacked_keeps_the_dtype_that_the_script_says(facts):
    plan = build(facts).plans[0]
    said = {"quantization_config": in_4_bits(), "dtype": torch.bfloat16}
    assert loads_of(recipe_of(plan, facts))(said) == said
    work = facts.workload
    without = dataclasses.replace(work, script=dataclasses.replace(work.script, quantization=None))
    with pytest.raises(Refused, match="the plan is for a training without"):
        loads_of(recipe_of(plan, dataclasses.replace(facts, workload=without)))(said)


def test_a_plan_decides_whether_a_model_recomputes_that_its_script_has_switched_on(facts):
    checkpointing = technique("checkpointing")
    model = plain()
    assert checkpointing.in_script(model) is None
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    assert checkpointing.in_script(model) == "switched on"
    assert checkpointing.own(facts) == "full"
    plan = next(one for one in build(facts).plans if one["checkpointing"] == "off")
    for wrap in recipe_of(plan, facts).model_wraps:
        model = wrap(model)
    assert checkpointing.in_script(model) is None
