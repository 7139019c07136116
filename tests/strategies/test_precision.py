"""What shows that a precision took effect, and what shows that it did not."""

import dataclasses
import importlib
import subprocess
import sys
import textwrap

import pytest
import torch
import transformers

from autofit import space
from autofit.contract.script import Script
from autofit.contract.technique import Kind
from autofit.costmodel.families import arithmetic_of
from autofit.costmodel.tracing.trace_store import PARTS
from autofit.registry import recipe_of, technique
from tests.support.synthetic import cpu_facts, cuda_facts
from tests.support.tiny import PLAIN

PRECISION = technique("precision")
FACTS = cpu_facts()
SEEN = {
    "fp32": {"compute_dtype": "float32", "weights_dtype": "float32"},
    "bf16": {"compute_dtype": "bfloat16", "weights_dtype": "float32"},
    "bf16_weights": {"compute_dtype": "bfloat16", "weights_dtype": "bfloat16"},
    "fp16": {"compute_dtype": "float16", "weights_dtype": "float32", "loss_scaled": True},
    "fp8": {"compute_dtype": "bfloat16", "weights_dtype": "float32", "float8_linears": 4},
}


@pytest.mark.parametrize("value", SEEN)
def test_each_value_is_known_by_its_evidence_and_no_other_by_it(value):
    assert [one for one, seen in SEEN.items() if PRECISION.in_effect(value, seen, FACTS) is None] == [value]


def test_float16_without_a_scaled_loss_is_refused():
    seen = {**SEEN["fp16"], "loss_scaled": False}
    assert PRECISION.in_effect("fp16", seen, FACTS) == "the loss is not scaled"


@pytest.mark.parametrize(
    ("value", "own", "frozen", "trained", "refused"),
    [
        ("bf16", False, "bfloat16", "float32", None),
        ("fp16", False, "float16", "float32", None),
        ("bf16", False, "bfloat16", "bfloat16", "casts what it trains to bfloat16"),
        ("bf16", True, "bfloat16", "bfloat16", None),
        ("bf16", True, "float16", "float32", "the weights are float16, not float32"),
        ("fp32", False, "bfloat16", "float32", "the weights are bfloat16, not float32"),
    ],
)
def test_a_loop_may_cast_its_weights_to_what_autocast_computes_in(value, own, frozen, trained, refused):
    """As diffusers' scripts do with what they don't train, and under bfloat16 with their adapters."""
    seen = {**SEEN[value], "weights_dtype": frozen, "trained_dtype": trained}

    def judged(trainer):
        script = Script(path="train.py", sha256="", trainer=trainer, micro_batch=4, accumulation=2, own={value: own})
        facts = cuda_facts()
        facts = dataclasses.replace(facts, workload=dataclasses.replace(facts.workload, script=script))
        return PRECISION.in_effect(value, seen, facts)

    assert judged("") is None if refused is None else refused in judged("")
    assert "the weights are" in judged("Trainer"), "there a plan says how they are loaded"


def test_over_16_bit_weights_a_script_keeps_the_autocast_and_the_tf32_that_it_asks_for():
    """As those that train an adapter do: TRL's SFTTrainer asks for bfloat16 by itself."""
    facts = cuda_facts()
    script = Script(path="train.py", sha256="", trainer="Trainer", micro_batch=4, accumulation=2)
    asking = dataclasses.replace(script, weights_dtype="bfloat16", own={"bf16": True, "tf32": True})

    def written(script, value="bf16_weights", parallel="none"):
        work = dataclasses.replace(facts.workload, script=script)
        plan = PLAIN.replaced(precision=value, parallel=parallel)
        here = dataclasses.replace(facts, workload=work)
        emitted, recipe = PRECISION.emit(value, plan, here), recipe_of(plan, here)
        arguments = emitted.training_args
        assert arguments["bf16"] == (emitted.accelerate["mixed_precision"] == "bf16")
        assert (recipe.mixed_precision == "bf16", recipe.tf32) == (arguments["bf16"], arguments["tf32"])
        return arguments["bf16"], arguments["tf32"], "autocast is off" in (PRECISION.changes(value, plan, here) or "")

    assert written(asking) == (True, True, False)
    assert written(asking, parallel="ddp") == (True, True, False)
    assert written(asking, parallel="fsdp") == (False, True, True), "there Accelerate would make the weights float32"
    packed = dataclasses.replace(asking, quantization="nf4, stored in bfloat16")
    assert written(packed, parallel="fsdp") == (True, True, False), "there it leaves them as they are"
    assert written(packed, parallel="zero2") == (False, True, True)
    assert written(dataclasses.replace(asking, own={})) == (False, False, False)
    assert written(dataclasses.replace(asking, weights_dtype="float32"), "fp32") == (False, False, False)


def test_frozen_16_bit_weights_beside_an_adapter_are_under_autocast():
    """So the adapter, which stays in float32, is multiplied in 16 bits as the weights are."""

    def of(parallel="none", heads=(), **values):
        facts = cuda_facts()
        facts = dataclasses.replace(facts, model=dataclasses.replace(facts.model, new_modules=heads))
        plan = PLAIN.replaced(precision="bf16_weights", parallel=parallel, **values)
        filled = recipe_of(plan, facts)
        assert filled.emission.training_args["bf16"] == (filled.mixed_precision == "bf16")
        said = PRECISION.changes("bf16_weights", plan, facts)
        return filled.weights_dtype, filled.mixed_precision, PRECISION.kind("bf16_weights", plan, facts), said

    for parallel in ("none", "ddp", "fsdp"):
        *found, said = of(parallel, adapter="lora:r=16")
        assert found == ["bfloat16", "bf16", Kind.NUMERIC]
        assert said == "Frozen weights are bfloat16, under bfloat16 autocast; the adapter's stay float32."
    for values in ({}, {"adapter": "lora:r=16", "heads": ("score",)}):
        *found, said = of(**values)
        assert found == ["bfloat16", "no", Kind.METHOD]
        assert "updates smaller than the last place of a weight are lost" in said


def test_what_an_engine_makes_of_autocast_is_told():
    """Under DDP norms and reductions stay in float32, under engines that split the weights they don't."""

    def said(precision, parallel):
        return PRECISION.changes(precision, PLAIN.replaced(precision=precision, parallel=parallel), cuda_facts())

    for precision in ("bf16", "fp16"):
        assert said(precision, "none") == said(precision, "ddp")
        assert "averaged over the processes in them" in said(precision, "fsdp:noreshard")
        assert "DeepSpeed casts the whole model to 16 bits" in said(precision, "zero2")
    assert said("fp32", "fsdp") is None
    assert "FSDP" not in said("tf32", "fsdp")


@pytest.mark.parametrize("loop", [False, True])
def test_a_script_s_own_adapter_over_float32_weights_may_have_them_in_16_bits(loop):
    """TRL loads a model so that is told by its name; what else is trained keeps its float32."""
    script = Script(
        path="train.py",
        sha256="",
        trainer="" if loop else "SFTTrainer",
        micro_batch=4,
        accumulation=2,
        adapter="LORA r=4",
    )

    def asked(**traits):
        facts = cuda_facts(global_batch=8)
        own = dataclasses.replace(script, **traits)
        return dataclasses.replace(facts, workload=dataclasses.replace(facts.workload, script=own))

    alone, beside = asked(trains_adapter=True, own={"bf16": True}), asked(own={"bf16": True})
    usual = frozenset({Kind.EXACT, Kind.NUMERIC})
    assert "bf16_weights" in space.build(alone, usual).domains["precision"]
    assert "bf16_weights" not in space.build(beside, usual).domains["precision"]
    assert "bf16_weights" not in space.build(alone, frozenset({Kind.EXACT})).domains["precision"]
    plan = PLAIN.replaced(precision="bf16_weights")
    assert (recipe_of(plan, alone).mixed_precision, recipe_of(plan, beside).mixed_precision) == ("bf16", "no")
    seen = {**SEEN["bf16_weights"], "trained_dtype": "float32"}
    assert PRECISION.in_effect("bf16_weights", seen, alone) is None
    seen["trained_dtype"] = "bfloat16"  # autocast_adapter_dtype=False
    assert "the script's adapter is bfloat16 under it, too" in PRECISION.in_effect("bf16_weights", seen, alone)
    assert PRECISION.in_effect("bf16_weights", seen, beside) is None, "then it was asked for"
    loaded = asked(trains_adapter=True, weights_dtype="bfloat16")
    assert recipe_of(plan, loaded).mixed_precision == "no", "as the script has it"
    assert PRECISION.changes("bf16_weights", plan, loaded) == "Frozen weights are bfloat16; the adapter's stay float32."
    assert PRECISION.in_effect("bf16_weights", seen, loaded) is None


def test_frozen_float16_weights_stay_as_the_script_loads_them_with_its_own_autocast():
    """As on cards without bfloat16: an adapter in float32 over a model in float16, its loss scaled."""

    def seen_by(own, value="fp16_weights", facts=None, parallel="none"):
        facts = facts or cuda_facts()
        script = Script(path="train.py", sha256="", trainer="Trainer", micro_batch=4, accumulation=2)
        script = dataclasses.replace(script, weights_dtype="float16", own=own)
        facts = dataclasses.replace(facts, workload=dataclasses.replace(facts.workload, script=script))
        plan = PLAIN.replaced(precision=value, parallel=parallel)
        return facts, plan, recipe_of(plan, facts)

    facts, plan, plain = seen_by({})
    assert (plain.weights_dtype, plain.mixed_precision, plain.sixteen_bits) == ("float16", "no", "fp16")
    assert PRECISION.held(facts).value == "fp16_weights"
    assert {one["precision"] for one in space.build(facts, frozenset({Kind.EXACT})).plans} == {"fp16_weights"}
    assert arithmetic_of(plain) == {"tf32": False, "fp16": True}
    assert "fp16_weights" not in {one.value for one in PRECISION.choices(cuda_facts())}
    in_float16 = {"compute_dtype": "float16", "weights_dtype": "float16", "loss_scaled": False}
    assert PRECISION.in_effect("fp16_weights", in_float16, facts) is None
    assert "float32" in PRECISION.in_effect("fp16_weights", {**in_float16, "weights_dtype": "float32"}, facts)

    scaled, _, recipe = seen_by({"fp16": True})
    assert (recipe.mixed_precision, recipe.emission.training_args["fp16"]) == ("fp16", True)
    assert PRECISION.in_effect("fp16_weights", in_float16, scaled) == "the loss is not scaled"
    assert PRECISION.in_effect("fp16_weights", {**in_float16, "loss_scaled": True}, scaled) is None
    assert seen_by({"fp16": True}, facts=FACTS)[2].mixed_precision == "no", "a Trainer leaves it out there"
    assert seen_by({"bf16": True})[2].sixteen_bits == "bf16"
    of_images = dataclasses.replace(cuda_facts().model, main_input="pixel_values")
    recipe = seen_by({}, facts=dataclasses.replace(cuda_facts(), model=of_images))[2]
    assert recipe.model_wraps == [], "a script casts its images itself"
    assert "float16, not bfloat16" in PRECISION.in_effect("fp16_weights", in_float16, seen_by({"bf16": True})[0])

    for parallel, refused in (("none", False), ("ddp", False), ("fsdp", True), ("zero2", True)):
        why = PRECISION.conflict("fp16_weights", {**plan, "parallel": parallel}, facts)
        assert (why is not None) == refused
    assert [PRECISION.traced_as("fp16_weights", part) for part in PARTS] == ["bf16_weights"] * 2
    assert seen_by({"fp16": True}, "bf16_weights")[2].mixed_precision == "bf16", "what stands for it is traced so"


@pytest.mark.parametrize("generates", [False, True])
def test_sounds_in_float32_are_heard_by_weights_in_bfloat16(generates):
    """Generation gives them to the encoder itself, past the model's forward pass."""
    width = {"d_model": 32, "num_mel_bins": 8, "vocab_size": 64, "max_source_positions": 20, "max_target_positions": 16}
    sides = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1)
    config = transformers.WhisperConfig(**width, **sides, **tokens, suppress_tokens=None, begin_suppress_tokens=None)
    model = transformers.WhisperForConditionalGeneration(config).to(torch.bfloat16)
    facts = dataclasses.replace(FACTS, model=dataclasses.replace(FACTS.model, main_input="input_features"))
    for wrap in recipe_of(PLAIN.replaced(precision="bf16_weights"), facts).model_wraps:
        model = wrap(model)
    sounds = torch.randn(2, 8, 40)
    if generates:
        assert len(model.generate(input_features=sounds, max_new_tokens=3)) == 2
    else:
        assert torch.isfinite(model(input_features=sounds, labels=torch.ones(2, 4, dtype=torch.long)).loss)


@pytest.mark.slow
def test_a_ctc_loss_is_not_broken_by_a_flag_of_tf32():
    """Which ``tf32: false`` does: PyTorch's two flags of cuDNN differ from then on, and its loss asks for both."""
    speech = dataclasses.replace(FACTS, model=dataclasses.replace(FACTS.model, task="ctc"))
    written = [
        PRECISION.emit(value, PLAIN.replaced(precision=value), facts).training_args["tf32"]
        for facts in (FACTS, speech)
        for value in ("bf16", "tf32")
    ]
    assert written == [False, True, None, True]
    program = """
        import torch
        from autofit.contract.recipe import keep_flags_alike

        torch.backends.fp32_precision = "{value}"
        keep_flags_alike()
        with torch.backends.cudnn.flags(enabled=False):
            assert torch.backends.cuda.matmul.fp32_precision == "{value}"
    """
    for value in ("ieee", "tf32"):
        subprocess.run([sys.executable, "-c", textwrap.dedent(program.format(value=value))], check=True)


@pytest.mark.parametrize(("facts", "value"), [(cpu_facts(), "bf16"), (cuda_facts(), "fp16")])
def test_an_autocast_of_the_script_is_the_precision_of_every_plan(facts, value):
    """Nothing is put into the script for it: a second autocast, or a second scaler, would be another training."""
    script = Script(
        path="t.py",
        sha256="",
        trainer="",
        micro_batch=4,
        accumulation=1,
        autocast={"cpu": "bfloat16", "cuda": "float16"},
    )
    facts = dataclasses.replace(facts, workload=dataclasses.replace(facts.workload, script=script))
    built = space.build(facts, allowed=frozenset(Kind))
    assert built.domains["precision"] == (value,)
    assert recipe_of(built.plans[0], facts).mixed_precision == "no"
    asks = dataclasses.replace(script, own={"bf16": True})
    both = dataclasses.replace(facts, workload=dataclasses.replace(facts.workload, script=asks))
    assert recipe_of(built.plans[0], both).mixed_precision == value


def test_weights_that_stay_in_float32_whatever_is_asked_do_not_speak_for_the_others():
    """Ernie 4.5's that balance its experts are frozen besides: bfloat16 weights never "took effect"."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 0}
    settings = transformers.Ernie4_5_MoeConfig(**sizes, **experts, num_hidden_layers=1, intermediate_size=32)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    assert any(one.dtype == torch.float32 and not one.requires_grad for one in model.parameters())
    main = importlib.import_module("autofit.strategies.precision.observed").main_weight
    assert main(model).dtype == torch.bfloat16
