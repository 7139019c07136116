"""Scripts that load weights in 4 bits themselves: their model on random weights, and what is left to a plan."""

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
    "max_position_embeddings": 64,
}  # fmt: skip


def plain():
    """A model that is not quantized; its config is its own, since quantizing writes into it."""
    return LlamaForCausalLM(LlamaConfig(**SIZES))


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
    """Shapes and dtypes of weights, and what belongs to those in 4 bits."""
    found = {}
    for name, one in model.named_parameters():
        found[name] = tuple(one.shape), one.dtype
        if (state := getattr(one, "quant_state", None)) is not None:
            inner = (state.state2.absmax.shape, state.state2.absmax.dtype, state.offset.shape) if state.nested else None
            scales = state.absmax.shape, state.absmax.dtype
            found[name] += (state.quant_type, state.shape, state.dtype, state.blocksize, *scales, inner)
    return found


@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize(
    ("kind", "nested", "storage"),
    [("nf4", True, torch.uint8), ("fp4", False, torch.uint8), ("nf4", True, torch.bfloat16)],
)
def test_a_model_of_random_weights_is_as_from_pretrained_would_load_it(tmp_path, kind, nested, storage, draws):
    plain().save_pretrained(tmp_path)
    config = in_4_bits(kind, nested=nested, storage=storage)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)
    found = made(config, draws=draws)
    assert layout(found) == layout(loaded)
    packed = next(one for one in found.parameters() if type(one).__name__ == "Params4bit")
    assert packed.dtype == storage
    assert bool(packed.any()) == draws
    ids = torch.arange(8)[None]
    assert found(input_ids=ids, labels=ids).loss.isfinite()


def test_a_checkpoint_that_is_quantized_already_says_so_in_its_config(tmp_path):
    config = LlamaConfig(**SIZES, quantization_config=in_4_bits().to_dict())
    build_it = lambda settings, **_: LlamaForCausalLM(settings)  # noqa: E731
    found = random_model(LlamaForCausalLM, tmp_path, {"config": config}, build_it, draws=False)
    assert technique("quantization").in_script(found) == "nf4 twice"


def test_what_a_module_calls_its_weight_may_be_any():
    """As a loss has it that is weighed by a number."""
    model = plain()
    model.loss = torch.nn.Module()
    model.loss.weight = 0.5
    model.register_buffer("weight", torch.ones(2, 2, dtype=torch.int8))
    assert technique("quantization").in_script(model) is None


def test_weights_in_4_bits_are_counted_as_what_they_stand_for():
    told = [describe_built("llama", one.config, one) for one in (plain(), made(in_4_bits()))]
    assert told[0]["parameters"] == told[1]["parameters"]
    assert told[0]["products"] == told[1]["products"]


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (BitsAndBytesConfig(load_in_8bit=True), "bitsandbytes"),
        (GPTQConfig(bits=4), "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
    ],
)
def test_other_quantized_weights_are_refused_by_their_name(config, kind):
    with pytest.raises(Refused) as refused:
        made_quantized(config)
    assert refused.value.message == f"the script loads its model with quantized weights ({kind})"
    assert "--fix quantization=nf4" in refused.value.hint


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
    held = technique("quantization").held(facts)
    assert (held.value, held.by_script, "nf4 twice" in held.reason) == ("none", True, True)
    assert technique("quantization").in_effect("none", {"weight": "nf4 twice"}, facts) is None
    assert (
        technique("precision").in_effect("bf16", {"compute_dtype": "float32", "weights_dtype": "float32"}, facts)
        is None
    )


@pytest.mark.parametrize(
    ("stored", "parallel", "precision", "refused"),
    [
        ("", "ddp", "fp16", None),
        ("", "fsdp", "fp32", "stored in uint8: load them with bnb_4bit_quant_storage=torch.bfloat16"),
        ("", "zero2", "fp32", "was not tried under zero2"),
        (", stored in bfloat16", "zero2", "bf16", "was not tried under zero2"),
        (", stored in bfloat16", "tp2xfsdp1", "bf16", "was not tried under tp2xfsdp1"),
        (", stored in bfloat16", "fsdp", "fp32", None),
        (", stored in bfloat16", "fsdp:noreshard", "bf16", None),
        (", stored in bfloat16", "hsdp:2x2", "bf16_weights", None),
        (", stored in bfloat16", "fsdp", "fp16", "would cast weights that are packed in bfloat16 to float16"),
        (", stored in float32", "fsdp", "tf32", None),
        (", stored in float32", "fsdp", "bf16", "would cast weights that are packed in float32 to bfloat16"),
        (", stored in float32", "fsdp", "bf16_weights", "would cast weights that are packed in float32 to bfloat16"),
    ],
)
def test_weights_in_4_bits_are_split_where_they_stay_what_they_are(facts, stored, parallel, precision, refused):
    script = dataclasses.replace(facts.workload.script, quantization=f"nf4 twice{stored}")
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
