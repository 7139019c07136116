"""Adapters and quantized weights: how they are written, and that random weights are made as loaded ones are."""

import copy
import dataclasses
import functools
import importlib
import pickle
import sys

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForAudioClassification, AutoModelForCausalLM, AutoModelForCTC

from autofit import space
from autofit.contract.script import Script
from autofit.contract.technique import Kind
from autofit.machine.model import describe_built
from autofit.registry import recipe_of, technique, techniques
from autofit.search import samplers
from autofit.search.samplers import make_sampler
from autofit.system.errors import InputError
from autofit.system.tensor_cache import TensorCache
from autofit.training.guard import equivalence
from autofit.training.scripts.leave import Refused
from autofit.training.scripts.patches import Patches
from tests.support.families import facts_for
from tests.support.synthetic import cpu_facts
from tests.support.tiny import write_config
from tests.support.traced import CONFIGS, PLAIN, facts_of

ADAPTER = technique("adapter")
peft_layers = importlib.import_module("autofit.strategies.adapter.peft_layers")
wanted = importlib.import_module("autofit.strategies.adapter.wanted")
FACTS = dataclasses.replace(cpu_facts(), packages={"peft": "0.18.0", "bitsandbytes": "0.50.0"})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("none", "none"),
        ("lora", "lora:r=16"),
        ("lora:r=16", "lora:r=16"),
        ("lora:r=8:alpha=16", "lora:r=8"),
        ("lora:alpha=8:r=8", "lora:r=8:alpha=8"),
        ("lora:targets=v_proj+q_proj:dropout=0.050", "lora:r=16:dropout=0.05:targets=q_proj+v_proj"),
        ("rslora:r=64", "rslora:r=64"),
        ("dora", "dora:r=16"),
        ("ia3:targets=k_proj", "ia3:targets=k_proj"),
    ],
)
def test_a_value_is_written_in_one_way(text, value):
    assert ADAPTER.parse(text, FACTS) == value
    assert ADAPTER.parse(value, FACTS) == value


@pytest.mark.parametrize(
    "text",
    ["lora:", "lora:r", "lora:r=0", "lora:r=-1", "lora:r=1.5", "lora:r=8:r=8", "lora:rank=8", "lora:dropout=1",
     "lora:targets=", "lora:targets=a+", "ia3:r=8", "qlora", "none:r=8", "lora r=8", "lora:r=99999999"],
)  # fmt: skip
def test_what_can_not_be_read_is_refused(text):
    with pytest.raises(InputError, match="adapter has no value") as caught:
        ADAPTER.parse(text, FACTS)
    assert "lora:r=16" in caught.value.hint


def test_what_is_said_of_a_value_that_is_not_listed():
    listed = {choice.value: choice for choice in ADAPTER.choices(FACTS)}
    for value in ("none", "lora:r=16", "ia3"):
        assert ADAPTER.choice(value, FACTS) == listed[value]
    for value, like in (("lora:r=8", "lora:r=16"), ("dora:r=4:alpha=2", "dora:r=16"), ("ia3:targets=k_proj", "ia3")):
        found = ADAPTER.choice(value, FACTS)
        assert (found.value, found.kind, found.status) == (value, Kind.METHOD, listed[like].status)
        assert found.reason.startswith(listed[like].reason)
        plan = PLAIN.replaced(adapter=value)
        assert equivalence.kind_of(plan, FACTS) == Kind.METHOD, "its losses are not held to those of the baseline plan"
    assert equivalence.kind_of(PLAIN, FACTS) == Kind.EXACT
    sampler = make_sampler("autofit", space.build(FACTS, given={"adapter": ("none", "lora:r=8")}), FACTS, 0, None)
    first = sampler.space.plans[sampler._first]
    assert first["adapter"] == "none", "another training method is not tried first"
    for given, later in ({"adapter": ("lora:r=8",)}, []), ({"adapter": ("none", "lora:r=8")}, ["bf16_weights"]):
        plans = space.build(FACTS, frozenset(Kind), given)
        assert "bf16_weights" in plans.domains["precision"]
        assert samplers._other_methods(plans, FACTS)["precision"] == later, "numeric beside an adapter"


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2}
_MAMBA = ("mamba", {"vocab_size": 32, "state_size": 4, **_SMALL}, AutoModelForCausalLM)
_WAVLM = (
    "wavlm",
    {"num_attention_heads": 2, "intermediate_size": 32, "conv_dim": [8] * 7, "num_conv_pos_embeddings": 4,
     "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, **_SMALL},
    AutoModelForAudioClassification,
)  # fmt: skip


@pytest.mark.parametrize("kind", [_MAMBA, _WAVLM], ids=lambda one: one[0])
def test_no_adapter_is_put_where_a_model_reads_the_weights_itself(kind):
    name, sizes, auto = kind
    config = AutoConfig.for_model(name, **sizes)
    model = auto.from_config(config)
    direct = describe_built("m", config, model)["read_directly"]
    assert any(path.endswith(".layers.*.mixer.out_proj" if name == "mamba" else ".attention.k_proj") for path in direct)
    facts = dataclasses.replace(FACTS, model=dataclasses.replace(FACTS.model, model_type=name, read_directly=direct))
    for value in ("lora:r=16:targets=out_proj+in_proj", "ia3:targets=out_proj"):
        with pytest.raises(InputError, match="reads the weights of its out_proj itself"):
            ADAPTER.parse(value, facts)
    adapted = peft_layers.adapt(wanted.read("lora:r=2"), model, task="other", around=direct)
    given = {"input_values": torch.randn(2, 8000)} if name == "wavlm" else {"input_ids": torch.zeros(2, 8).long()}
    labels = torch.zeros(2).long() if name == "wavlm" else torch.zeros(2, 8).long()
    adapted(**given, labels=labels).loss.backward()
    trained = {path: one.grad for path, one in adapted.named_parameters() if "lora_A" in path}
    inside = {path for path in trained if ".layers." in path}
    assert inside
    assert not [path for path in inside if trained[path] is None], "an adapter is never trained"
    assert not any(path.rsplit(".lora_A")[0].endswith("out_proj") for path in trained)
    assert "but" in ADAPTER.changes("lora:r=16", PLAIN, facts)
    exported = ADAPTER.emit("lora:r=16", PLAIN, facts)
    assert exported.elsewhere["sft"]["peft_config"]["exclude_modules"] == "|".join(direct)
    assert "out_proj" in exported.otherwise["llamafactory"]


def test_a_weight_that_a_model_reads_itself_is_not_packed():
    config = AutoConfig.for_model("bamba", hidden_size=32, num_hidden_layers=2, vocab_size=64, intermediate_size=32,
        num_attention_heads=2, num_key_value_heads=2, mamba_n_heads=2, mamba_d_head=32, mamba_d_state=8,
        mamba_n_groups=1, attn_layer_indices=[1])  # fmt: skip
    told = describe_built("m", config, AutoModelForCausalLM.from_config(config))
    loading = importlib.import_module("autofit.strategies.quantization.loading")
    made = loading.random_model(
        loading.quantization_config("nf4", "bfloat16", kept=told["unquantized"]),
        functools.partial(AutoModelForCausalLM.from_config, config),
        on_cpu=True,
        cache=TensorCache(),
    )
    packed = {name for name, one in made.named_modules() if type(one).__name__ == "Linear4bit"}
    linear = {name for name, one in made.named_modules() if isinstance(one, torch.nn.Linear)}
    assert linear - packed == {"lm_head", "model.layers.0.mamba.out_proj"}


def test_peft_puts_neither_dora_nor_dropout_on_stacked_experts():
    from peft import LoraConfig, get_peft_model

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "num_attention_heads": 2, "num_experts": 2}
    config = AutoConfig.for_model("qwen3_moe", moe_intermediate_size=16, intermediate_size=16, head_dim=8, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    found = describe_built("m", config, model)["lora_on_experts"]
    moe = dataclasses.replace(
        FACTS, model=dataclasses.replace(FACTS.model, model_type="qwen3_moe", lora_on_experts=found)
    )
    for value in ("dora:r=16", "lora:r=4:dropout=0.05", "dora:r=4:targets=down_proj+q_proj"):
        found = ADAPTER.choice(value, moe)
        assert found.status == "withheld"
        assert "targets=q_proj+v_proj" in found.reason
    for value in ("lora:r=16", "rslora:r=16", "ia3", "dora:r=16:targets=q_proj+v_proj"):
        assert ADAPTER.choice(value, moe).status != "withheld"
    assert ADAPTER.choice("dora:r=16", FACTS).status != "withheld"
    half = ADAPTER.choice("lora:r=16:targets=gate_proj+q_proj", moe)
    assert half.status == "withheld"
    assert "both or none" in half.reason
    assert ADAPTER.choice("lora:r=16:targets=gate_proj+up_proj", moe).status != "withheld"
    with pytest.raises(ValueError, match="use_dora"):
        get_peft_model(model, LoraConfig(target_modules="all-linear", use_dora=True))
    with pytest.raises(ValueError, match="without also targeting up_proj"):
        get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(target_modules=["gate_proj"]))


def test_without_peft_there_is_no_adapter():
    with pytest.raises(InputError, match="peft is not installed"):
        ADAPTER.parse("lora:r=16", dataclasses.replace(FACTS, packages={}))
    with pytest.raises(InputError):
        ADAPTER.parse("lora:r=3", dataclasses.replace(FACTS, packages={}))


def test_values_that_need_the_same_share_a_trace():
    assert ADAPTER.traced_as("rslora:r=8:alpha=3", "micro_steps") == "lora:r=8"
    assert ADAPTER.traced_as("lora:r=8:dropout=0.1", "micro_steps") == "lora:r=8:dropout=0.1"
    assert ADAPTER.traced_as("lora:r=8:dropout=0.1", "optimizer") == "lora:r=8"
    assert ADAPTER.traced_as("dora:r=8", "optimizer") == "dora:r=8"
    assert technique("quantization").traced_as("nf4", "optimizer") == "none"


def built(config, folder, **values):
    plan = PLAIN.replaced(**values)
    return recipe_of(plan, facts_of(config)).model(None, config=write_config(folder, CONFIGS[config]))


def evidence(model):
    """What an observer sees of a model that has not run."""
    from autofit.training.observer import Observer

    facts = facts_of("llama")
    observer = Observer(model, recipe_of(PLAIN, facts))
    optimizer = torch.optim.SGD([torch.zeros(1)])
    return observer.evidence(optimizer, None, None)


def test_what_is_seen_of_an_adapter(tmp_path):
    plain = evidence(built("llama", tmp_path))
    assert plain.of("adapter")["adapter"] is None
    assert plain.trainable_parameters == plain.parameters
    value = "rslora:r=4:alpha=6:targets=q_proj+v_proj"
    seen = evidence(built("llama", tmp_path, adapter=value))
    told = seen.of("adapter")
    assert (told["adapter"], told["modules"]) == ("lora r=4 scaling=3", ["q_proj", "v_proj"])
    assert seen.trainable_parameters == 9 * 4 * (64 + 64 + 64 + 32)  # layers x rank x the sides of both
    assert seen.parameters == plain.parameters + seen.trainable_parameters
    assert ADAPTER.in_effect(value, told, FACTS) is None
    for other in ("none", "lora:r=4", "rslora:r=4:targets=q_proj+v_proj", "rslora:r=4:alpha=6:targets=q_proj"):
        assert ADAPTER.in_effect(other, told, FACTS)
    thawed = {**told, "frozen_parameters": 0}
    assert "not frozen" in ADAPTER.in_effect(value, thawed, FACTS)


@pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")  # PEFT's own, of its own patterns
@pytest.mark.parametrize("value", ["lora:r=4", "rslora:r=4"])
def test_an_adapter_of_twice_the_rank_on_an_experts_two_first_weights_is_the_one_that_was_asked_for(tmp_path, value):
    told = evidence(built("mixtral", tmp_path, adapter=value)).of("adapter")
    assert "experts" in told["modules"]
    assert ADAPTER.in_effect(value, told, FACTS) is None
    assert ADAPTER.in_effect(value.replace("4", "8"), told, FACTS)


@pytest.mark.parametrize(
    ("name", "sizes"), [("llama4_text", {"intermediate_size_mlp": 16, "head_dim": 8}), ("phimoe", {})]
)
def test_a_router_that_gives_more_than_its_product_gets_no_adapter(name, sizes):
    """PEFT takes it for a linear layer, and its forward pass crashed."""
    config = AutoConfig.for_model(
        name, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=2, vocab_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes,
    )  # fmt: skip
    model = peft_layers.adapt(
        wanted.wanted_by("lora:r=4"), AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    )
    ids = torch.ones(1, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    assert {"q_proj", "v_proj"} <= {*peft_layers.adapter_on(model)[1]}
    assert "router" not in peft_layers.adapter_on(model)[1]


@pytest.mark.parametrize(
    ("experts", "known", "value", "told"),
    [
        (True, False, "lora:r=4", True),
        (True, True, "lora:r=4", False),
        (True, False, "lora:r=4:targets=q_proj", False),
        (False, False, "lora:r=4", False),
    ],
)
def test_experts_that_get_no_adapter_are_told(experts, known, value, told):
    model = dataclasses.replace(FACTS.model, has_experts=experts, lora_on_experts=known)
    said = ADAPTER.changes(value, {}, dataclasses.replace(FACTS, model=model))
    assert ("experts" in said) == told


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("bert-masked", None),
        ("bert-classes", "classifier"),
        ("llama-classes", "score"),
        ("bert-tokens", "classifier"),
        ("llama-answers", "qa_outputs"),
        ("bert-choices", "classifier"),
        ("t5", None),
        ("vit", "classifier"),
        ("wav2vec2", "lm_head"),
    ],
)
def test_a_head_that_is_learned_anew_is_trained_whole_beside_an_adapter(name, head, tmp_path):
    facts = facts_for(name, tmp_path)
    recipe = recipe_of(PLAIN.replaced(adapter="lora:r=4"), facts)
    model = recipe.model(None, config=tmp_path)
    trained = {path for path, one in model.named_parameters() if one.requires_grad and "lora" not in path}
    assert all(f".{head}.modules_to_save" in path for path in trained)
    assert bool(trained) == (head is not None)
    assert not any(".lora_" in path for path, _ in model.named_parameters() if f".{head}." in path)
    assert ADAPTER.in_effect("lora:r=4", evidence(model).of("adapter"), facts) is None
    assert ("whole" in ADAPTER.changes("lora:r=4", {}, facts)) == (head is not None)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_an_adapter_beside_a_vocabulary_of_ones_own_is_saved_and_loaded(tmp_path):
    """PEFT asks for the table of tokens where it saves, and Wav2Vec2 has none: a training was lost at its end."""
    facts = facts_for("wav2vec2", tmp_path)
    base = AutoModelForCTC.from_config(AutoConfig.from_pretrained(tmp_path))
    base.save_pretrained(tmp_path / "base")
    recipe = recipe_of(PLAIN.replaced(adapter="lora:r=4"), facts)
    model = recipe.model(tmp_path / "base", config=tmp_path, others={"vocab_size": 41, "ignore_mismatched_sizes": True})
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCTC.from_pretrained(tmp_path / "base", vocab_size=41, ignore_mismatched_sizes=True)
    again = peft.PeftModel.from_pretrained(loaded, tmp_path / "saved").eval()
    sound = torch.randn(1, 2000)
    assert torch.equal(model.eval()(sound).logits, again(sound).logits)


def test_a_model_of_convolutions_is_offered_no_adapter(tmp_path):
    choice = next(one for one in ADAPTER.choices(facts_for("resnet", tmp_path)) if one.value == "lora:r=16")
    assert (choice.status, "no linear layers" in choice.reason) == ("withheld", True)


def test_an_adapter_that_is_switched_off_is_none(tmp_path):
    model = built("llama", tmp_path, adapter="lora:r=4")
    with model.disable_adapter():
        assert ADAPTER.in_effect("lora:r=4", evidence(model).of("adapter"), FACTS)


def test_a_script_s_own_adapter_is_told_by_the_technique_in_the_field_of_its_name(tmp_path):
    assert ADAPTER.in_script(built("llama", tmp_path)) is None
    model = built("llama", tmp_path, adapter="lora:r=4")
    assert ADAPTER.in_script(model) == "LORA r=4"
    shrinking = peft.AdaLoraConfig(init_r=12, target_r=4, total_step=9, target_modules=["q_proj"])
    assert ADAPTER.in_script(peft.get_peft_model(built("llama", tmp_path), shrinking)) == "ADALORA r=12"
    fields = {one.name for one in dataclasses.fields(Script)}
    assert {one.name for one in techniques() if one.in_script(model) is not None} == {"adapter"}
    assert fields >= {"adapter", "quantization", "checkpointing"}


@pytest.mark.parametrize(
    ("config", "alone"),
    [
        (peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), True),
        (peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, trainable_token_indices=[1, 2]), True),
        (peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]), True),
        (peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]), True),
        (peft.VeraConfig(target_modules=["q_proj"]), True),
        (peft.AdaLoraConfig(init_r=6, target_r=4, total_step=9, target_modules=["q_proj"]), True),
        (peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]), False),
    ],
)
def test_what_a_script_trains_beside_its_adapter_is_told(tmp_path, config, alone):
    """The dtypes of another model, loaded in 16 bits, are what it stands for: an adapter's stay float32."""
    assert not ADAPTER.trains_alone(built("llama", tmp_path))
    model = peft.get_peft_model(built("llama", tmp_path), config)
    assert ADAPTER.trains_alone(model) == alone
    halved = peft.get_peft_model(built("llama", tmp_path, precision="bf16_weights"), copy.deepcopy(config))
    dtypes = {one.dtype for one in halved.parameters() if one.requires_grad}
    assert (dtypes == {torch.float32}) == alone
    next(one for one in model.parameters() if not one.requires_grad).requires_grad_()
    assert not ADAPTER.trains_alone(model)


def test_a_script_that_loads_quantized_weights_is_told_the_knobs_that_do():
    patches = Patches(train=lambda *_: None)
    with pytest.raises(Refused) as error:
        patches._loading({"quantization_config": object()})
    assert error.value.hint == "tune by the model's name with --fix adapter=lora:r=16 --fix quantization=nf4"


@pytest.mark.parametrize("adapter", ["lora:r=4", "rslora:r=4", "dora:r=4", "ia3"])
def test_adapters_of_16_bit_weights_are_float32(adapter, tmp_path):
    model = built("llama", tmp_path, adapter=adapter, precision="bf16_weights")
    assert {one.dtype for one in model.parameters() if one.requires_grad} == {torch.float32}
    assert {one.dtype for one in model.parameters() if not one.requires_grad} == {torch.bfloat16}
    assert evidence(model).of("precision")["weights_dtype"] == "bfloat16"


def plainly(model):
    """The same model with PEFT's own layers."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        vars(module).pop("_cast_input_dtype", None)
    return plain


def trained(model, ids):
    """Loss and gradients under autocast, and the bytes that are kept for the backward pass."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one), torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return loss.detach(), gradients, sum(kept.values())


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("precision", ["bf16_weights", "bf16"])
@pytest.mark.parametrize("adapter", ["lora:r=4", "rslora:r=4"])
@pytest.mark.parametrize("config", ["llama", "gpt2"])
def test_under_autocast_layers_share_their_input_and_train_as_peft_s_own_do(tmp_path, config, adapter, precision):
    model = built(config, tmp_path, adapter=adapter, precision=precision)
    model.eval()  # without dropout
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_B" in name:
                one.normal_(std=0.02)
    ids = torch.arange(64).reshape(2, 32)
    loss, gradients, kept = trained(model, ids)
    same, theirs, copied = trained(plainly(model), ids)
    assert torch.equal(loss, same)
    assert gradients.keys() == theirs.keys()
    assert gradients
    assert all(torch.equal(one, theirs[name]) for name, one in gradients.items())
    assert kept < copied


def test_outside_autocast_the_input_is_cast_as_peft_does(tmp_path):
    model = built("llama", tmp_path, adapter="lora:r=4", precision="bf16_weights").eval()
    ids = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        wanted = plainly(model)(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits, wanted)
        assert torch.equal(pickle.loads(pickle.dumps(model))(input_ids=ids).logits, wanted), "it can be sent away"
    assert model.generate(input_ids=ids, max_new_tokens=2).shape == (1, 10)
    assert not [name for name, _ in model.merge_and_unload().named_modules() if "lora" in name]


@pytest.mark.parametrize("value", ["nf4", "int8"])
@pytest.mark.parametrize("config", ["llama", "gpt2"])
def test_random_weights_are_quantized_as_loaded_ones_are(tmp_path, config, value):
    folder = write_config(tmp_path / "config", CONFIGS[config])
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(tmp_path / "weights")
    filled = recipe_of(PLAIN.replaced(adapter="lora:r=4", quantization=value), facts_of(config))

    def described(model):
        return {
            name: (tuple(one.shape), one.dtype, one.requires_grad, type(one).__name__)
            for name, one in model.named_parameters()
        }

    loaded, made = filled.model(tmp_path / "weights", config=folder), filled.model(None, config=folder)
    assert described(made) == described(loaded)
    assert evidence(made).of("quantization") == evidence(loaded).of("quantization")
    assert evidence(made).of("quantization")["weight"].startswith(value)
    assert made.is_quantized
    assert loaded.is_quantized
    ids = torch.ones(2, 8, dtype=torch.long)
    for model in (loaded, made):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert torch.isfinite(loss)
        assert all(one.grad is not None for one in model.parameters() if one.requires_grad)
    tables = [name for name, _ in made.named_buffers() if name.endswith(("absmax", "scales"))]
    assert tables
    assert not set(tables) & set(made.state_dict())


@pytest.mark.parametrize("value", ["nf4", "int8", "int8_torchao"])
def test_a_shape_is_quantized_once_for_all_trials(tmp_path, value, monkeypatch):
    if value == "int8_torchao":
        pytest.importorskip("torchao", reason="torchao is not installed")
    folder = write_config(tmp_path / "config", CONFIGS["llama"])
    random = vars(sys.modules[f"{type(technique('quantization')).__module__}.loading"])
    made = []

    def counted(*args, make=random["_random"]):
        made.append(args)
        return make(*args)

    monkeypatch.setitem(random, "_random", counted)

    def parts(kept):
        filled = recipe_of(PLAIN.replaced(adapter="lora:r=4", quantization=value), facts_of("llama"))
        filled.tensor_cache = kept
        torch.manual_seed(0)
        model = filled.model(None, config=folder)
        tensors = {}
        for name, one in (*model.named_parameters(), *model.named_buffers()):
            inner = getattr(one, "tensor_data_names", None)
            tensors |= {f"{name}.{part}": getattr(one, part) for part in inner} if inner else {name: one}
        return model, tensors

    first, tensors = parts(TensorCache(tmp_path / "kept"))
    shapes = {one[:2] for one in made}
    assert len(made) == len(shapes) == len(list((tmp_path / "kept").iterdir())) > 0
    made.clear()
    second, again = parts(TensorCache(tmp_path / "kept"))
    assert not made
    third, alone = parts(TensorCache())
    assert {one[:2] for one in made} == shapes
    for other in (again, alone):
        assert tensors.keys() == other.keys()
        assert all(torch.equal(one, other[name]) for name, one in tensors.items())
    ids = torch.ones(2, 8, dtype=torch.long)
    losses = {model.train(False)(input_ids=ids, labels=ids).loss.item() for model in (first, second, third)}
    assert len(losses) == 1


def test_torchao_s_weights_are_made_as_loaded_ones_are(tmp_path):
    pytest.importorskip("torchao", reason="torchao is not installed")
    folder = write_config(tmp_path / "config", CONFIGS["llama"])
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(tmp_path / "weights")
    filled = recipe_of(PLAIN.replaced(adapter="lora:r=4", quantization="int8_torchao"), facts_of("llama"))
    loaded, made = filled.model(tmp_path / "weights", config=folder), filled.model(None, config=folder)

    def described(model):
        return {
            name: (tuple(one.shape), one.dtype, one.requires_grad, type(one).__name__)
            for name, one in model.named_parameters()
        }

    assert described(made) == described(loaded)
    ids = torch.ones(2, 8, dtype=torch.long)
    for model in (loaded, made):
        seen = evidence(model).of("quantization")
        assert technique("quantization").in_effect("int8_torchao", seen, FACTS) is None
        for other in ("none", "nf4", "int8"):
            assert technique("quantization").in_effect(other, seen, FACTS)
        assert type(model.get_output_embeddings().weight) is torch.nn.Parameter
        model(input_ids=ids, labels=ids).loss.backward()
        assert all(one.grad is not None for one in model.parameters() if one.requires_grad)


def test_torchao_s_weights_are_refused_where_they_are_of_no_use():
    one = technique("quantization")
    packages = {**FACTS.packages, "torchao": "0.18.0"}

    def said(**model):
        facts = dataclasses.replace(FACTS, packages=packages, model=dataclasses.replace(FACTS.model, **model))
        return {choice.value: (choice.status, choice.reason) for choice in one.choices(facts)}

    assert said()["int8_torchao"][0] == "on_request"
    assert "Conv1D" in said(model_type="gpt2")["int8_torchao"][1]
    assert "no adapter" in said()["int4_torchao"][1]
    assert "torchao is not installed" in {choice.value: choice.reason for choice in one.choices(FACTS)}["int8_torchao"]
    assert "autocast" in one.conflict("int8_torchao", {"adapter": "lora:r=16", "precision": "bf16"}, FACTS)
    assert "need an adapter" in one.conflict("int8_torchao", {"adapter": "none", "precision": "fp32"}, FACTS)
    assert one.conflict("int8_torchao", {"adapter": "lora:r=16", "precision": "bf16_weights"}, FACTS) is None
    assert one.traced_as("int8_torchao", "micro_steps") is None


def test_linear_layers_are_made_whole_again_afterwards(tmp_path):
    model = built("llama", tmp_path, adapter="lora:r=4", quantization="nf4")
    assert not any(one.is_meta for one in (*model.parameters(), *model.buffers()))
    head = model.get_output_embeddings()
    assert type(head) is torch.nn.Linear
    assert head.weight.std() == pytest.approx(0.02, rel=0.1)
    assert not torch.nn.Linear(4, 4).weight.is_meta


def test_quantized_weights_need_lora():
    quantization = technique("quantization")
    assert quantization.conflict("none", {"adapter": "none"}, FACTS) is None
    assert quantization.conflict("nf4", {"adapter": "rslora:r=8"}, FACTS) is None
    assert "need an adapter" in quantization.conflict("nf4", {"adapter": "none"}, FACTS)
    for adapter in ("dora:r=8", "ia3"):
        assert "not covered" in quantization.conflict("nf4", {"adapter": adapter}, FACTS)


def test_nothing_is_seen_of_an_empty_model():
    assert ADAPTER.in_effect("lora:r=4", {}, FACTS) == "the model's adapter is none, not lora r=4 scaling=2"
