"""Checkpointing by hand: the same gradients, the right layers, and what is held meanwhile."""

import copy
import dataclasses
import importlib
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from autofit.contract import placement
from autofit.contract.observation import Hooks
from autofit.contract.script import Script
from autofit.costmodel.seconds.roofline import KINDS
from autofit.costmodel.tracing.recorder import Recorder
from autofit.registry import technique
from tests.support.copies import Copies
from tests.support.synthetic import cpu_facts, cuda_facts
from tests.support.tiny import CONFIGS as TINY
from tests.support.traced import PLAIN, Lab

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 128, "n_positions": 64}
CONFIGS = {**TINY, "gpt2 without dropout": {**GPT2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
                                            "summary_first_dropout": 0.0}, "gpt2": GPT2}  # fmt: skip


@pytest.fixture
def strategy():
    assert technique("checkpointing")
    return importlib.import_module("autofit.strategies.checkpointing")


def build(config, **changes):
    values = {**CONFIGS[config], **changes}
    torch.manual_seed(0)
    settings = AutoConfig.for_model(values.pop("model_type"), **values)
    settings.use_cache = False
    return AutoModelForCausalLM.from_config(settings).train()


def gradients(model, dtype=None):
    torch.manual_seed(1)
    rows = torch.randint(0, 128, (2, 16))
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert torch.equal(gradient, theirs[name]), name


def keep_products(model):
    strategy = importlib.import_module("autofit.strategies.checkpointing")
    return strategy.keep_products(model, strategy.KeptOutputs())


# -- the same gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS)
def test_gradients_are_those_of_a_model_that_keeps_everything(strategy, config, dtype):
    plain = build(config)
    wanted = gradients(copy.deepcopy(plain), dtype)
    for wrap in (keep_products, strategy.switch_on):
        same(gradients(wrap(copy.deepcopy(plain)), dtype), wanted)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_either_attention_will_do(strategy, attention):
    plain = build("llama", attn_implementation=attention)
    kept = strategy.KeptOutputs()
    same(gradients(strategy.keep_products(copy.deepcopy(plain), kept)), gradients(plain))
    # q, k, v, attention, o, gate, up and down of two layers; attention that is not fused is recomputed
    assert kept.count == (16 if attention == "sdpa" else 14)


def test_attention_is_recomputed_where_numbers_are_drawn(strategy):
    kept = strategy.KeptOutputs()
    strategy.keep_products(build("gpt2"), kept)
    assert not kept.names & strategy.kept.ATTENTION
    strategy.keep_products(build("gpt2 without dropout"), kept)
    assert kept.names > strategy.kept.ATTENTION


def test_every_operator_that_is_kept_is_one_of_pytorchs(strategy):
    for name in strategy.kept.PRODUCTS | strategy.kept.ATTENTION:
        space, _, op = name.rpartition("::")
        if space == "aten":
            assert hasattr(torch.ops.aten, op), name


def test_adapters_train_behind_frozen_layers(strategy):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    plain = build("llama")
    wanted = gradients(peft.get_peft_model(copy.deepcopy(plain), settings))
    for value in ("selective", "on the host"):
        kept, inputs = strategy.KeptOutputs(), strategy.HostInputs()
        by_hand = {
            "selective": lambda model, kept=kept: strategy.keep_products(model, kept),
            "on the host": lambda model, inputs=inputs: strategy.switch_on(model, checkpoint=inputs.checkpoint),
        }
        wrap = by_hand[value]
        torch.manual_seed(0)
        adapted = peft.get_peft_model(wrap(copy.deepcopy(plain)), settings)
        found = gradients(adapted)
        assert found.keys() == wanted.keys()
        if value == "selective":
            assert kept.count > 16


# -- which layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "switched"), [(1, "111111"), (2, "101010"), (4, "100010")])
def test_every_so_many_layers(strategy, every, switched):
    model = strategy.switch_on(build("llama", num_hidden_layers=6), every=every)
    assert "".join(str(int(layer.gradient_checkpointing)) for layer in model.model.layers) == switched


@pytest.mark.parametrize(("value", "fits"), [("off", {0}), ("full", {6}), ("every_2", {1, 2, 3, 4, 5})])
def test_layers_inside_of_others_are_recomputed_with_them(strategy, value, fits):
    """Each hybrid layer of Zamba2 holds another layer: of its 6 layers ``every_2`` recomputes 4."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64, "n_mamba_heads": 2}
    kinds = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("zamba2", **sizes, **kinds))
    assert strategy.inside_others(model) == 2
    seen = ({"layers": 6, "layers_recomputed": again, "layers_inside": 2} for again in range(7))
    in_effect, facts = technique("checkpointing").in_effect, cpu_facts()
    assert {one["layers_recomputed"] for one in seen if in_effect(value, one, facts) is None} == fits


def statuses(facts):
    return {choice.value: choice.status for choice in technique("checkpointing").choices(facts)}


@pytest.mark.parametrize(("layers", "few"), [(1, {"every_2", "every_4"}), (7, {"every_4"}), (8, set())])
def test_what_is_offered_depends_on_the_number_of_layers(layers, few):
    facts = cuda_facts()
    facts = dataclasses.replace(facts, model=dataclasses.replace(facts.model, layers=layers))
    assert {value for value, status in statuses(facts).items() if status == "withheld"} == few


@pytest.mark.parametrize("able", [True, False])
def test_layers_that_always_run_again_are_no_checkpointing(able):
    """Reformer's are reversible, and it knows no checkpointing: no plan of it took effect."""
    facts = cpu_facts()
    facts = dataclasses.replace(facts, model=dataclasses.replace(facts.model, supports_checkpointing=able))
    said = technique("checkpointing").in_effect("off", {"layers": 3, "layers_recomputed": 3}, facts)
    assert (said is None) is not able


def test_a_cpu_has_no_other_memory():
    assert statuses(cpu_facts())["full_offload"] == "withheld"


@pytest.mark.parametrize("switched", ["", "switched on"])
def test_what_a_script_has_switched_on_in_a_model_of_its_own_is_a_choice(switched):
    """diffusers' models recompute, too: none but their scripts can switch it on, and any plan can leave it so."""
    facts, script = cpu_facts(), Script(path="t.py", sha256="", trainer="", micro_batch=4, accumulation=2)
    script = dataclasses.replace(script, checkpointing=switched)
    workload = dataclasses.replace(facts.workload, script=script, launch_path="loop")
    model = dataclasses.replace(facts.model, supports_checkpointing=False, layers=0)
    facts, one = dataclasses.replace(facts, model=model, workload=workload), technique("checkpointing")
    assert [value for value, status in statuses(facts).items() if status == "offered"] == (
        ["off", "full"] if switched else ["off"]
    )
    if not switched:
        return
    assert one.own(facts) == one.leanest(facts) == "full"
    for value in ("full", "off"):
        block, recipe = torch.nn.Linear(2, 2), SimpleNamespace(facts=facts, model_wraps=[], state={})
        block.gradient_checkpointing = True
        one.apply(value, recipe)
        for wrap in recipe.model_wraps:
            wrap(block)
        assert block.gradient_checkpointing is (value == "full")


class Parts(torch.nn.Module):
    """As diffusers' models are: what stands before the blocks is never computed again."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(2, 2)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()) for _ in range(3))
        self.head, self.gradient_checkpointing = torch.nn.Linear(2, 1), True

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_model_of_a_scripts_own_is_seen_to_recompute(recomputes):
    facts = cpu_facts()
    script = Script(path="t.py", sha256="", trainer="", micro_batch=4, accumulation=2, checkpointing="switched on")
    model = dataclasses.replace(facts.model, supports_checkpointing=False, layers=0, layer_classes=())
    facts = dataclasses.replace(facts, model=model, workload=dataclasses.replace(facts.workload, script=script))
    one, trained = technique("checkpointing"), Parts()
    trained.recomputes = recomputes
    read = one.watch(trained, SimpleNamespace(facts=facts), Hooks(trained))
    trained(torch.ones(1, 2)).sum().backward()
    seen = read(None)
    assert seen == {"layers": 5, "layers_recomputed": 3 * recomputes}
    assert (one.in_effect("full", seen, facts) is None) is recomputes
    assert (one.in_effect("off", seen, facts) is None) is not recomputes
    assert one.in_effect("full", {"layers": None, "layers_recomputed": None}, facts) is None  # inside a graph


@pytest.mark.parametrize(("version", "name"), [("5.17.0", "gradient"), ("5.23.0", "activation")])
def test_arguments_carry_what_they_can(version, name):
    facts = dataclasses.replace(cuda_facts(), packages={"transformers": version})
    one = technique("checkpointing")
    for value, on, settings, lines in (
        ("off", False, {}, 0),
        ("full", True, {}, 0),
        ("every_4", True, {"every_n_layers": 4}, 0),
        ("selective", False, {}, 1),
        ("full_offload", False, {}, 1),
    ):
        emission = one.emit(value, {}, facts)
        assert emission.training_args == {
            f"{name}_checkpointing": on,
            f"{name}_checkpointing_kwargs": {"use_reentrant": False, **settings},
        }
        assert len(emission.script) == lines


# -- what is held -------------------------------------------------------------------------------------------------


def test_inputs_wait_on_the_host(strategy, monkeypatch):
    plain = build("llama")
    keeper = strategy.HostInputs()
    kept = strategy.switch_on(copy.deepcopy(plain), checkpoint=keeper.checkpoint)
    same(gradients(kept), gradients(copy.deepcopy(plain)))
    assert keeper.moved_bytes == 0  # all of it is small
    monkeypatch.setattr(placement, "_SMALLEST_BYTES", 1)
    kept, copies, inputs = strategy.switch_on(copy.deepcopy(plain), checkpoint=keeper.checkpoint), Copies(), []
    for layer in kept.model.layers:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    kept.model.norm.register_forward_pre_hook(lambda *_: inputs.append([ref() is None for ref in inputs]))
    with placement.use(copies):
        ours = gradients(kept)
    same(ours, gradients(plain))
    assert inputs[2][1], "a layer's input is still on the device"  # the first one's is a variable of the model
    size = 2 * 16 * 32 * 4
    assert [host.nbytes for host in copies.moved] == [size, size]
    assert keeper.moved_bytes == 2 * size


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    wide = {**TINY["llama"], "num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 1024,
            "max_position_embeddings": 1024}  # fmt: skip
    return Lab(tmp_path_factory.mktemp("wide"), wide, device="cuda", seq_len=1024)


@pytest.mark.slow
def test_the_less_is_kept_the_less_is_needed(lab):
    plan = PLAIN.replaced(micro_batch=8, precision="bf16")
    values = ("off", "every_4", "every_2", "selective", "full", "full_offload")
    needs = {value: lab.need(plan.replaced(checkpointing=value)).peak_bytes for value in values}
    off, full = needs["off"], needs["full"]
    assert off > needs["every_4"] > needs["every_2"] > full > needs["full_offload"]
    assert off > needs["selective"] > full
    # one layer is whole in either while it is recomputed
    assert needs["every_2"] == pytest.approx((off + full) / 2, rel=0.1)
    assert needs["every_4"] == pytest.approx(off - (off - full) / 4, rel=0.1)
    assert needs["selective"] < off - (off - full) / 4


@pytest.mark.parametrize("value", ["full", "every_2", "selective", "full_offload"])
def test_a_loop_is_traced_with_a_devices_habits_too(tmp_path, value):
    """On a loop it is switched on before a trace puts a device's habits in place; GPT-2 has dropout and layer norms."""
    plan = PLAIN.replaced(checkpointing=value, precision="bf16", micro_batch=4)
    peaks = [
        Lab(tmp_path / path, "gpt2", device="cuda", launch_path=path).micro(plan).tape.live(4).max()
        for path in ("trainer", "loop")
    ]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)


def test_inputs_on_the_host_are_counted_there(lab):
    plan = PLAIN.replaced(micro_batch=16, precision="bf16", checkpointing="full_offload")
    inputs = 8 * 16 * 1024 * 256 * 4  # layers, rows, tokens, hidden, bytes: autocast keeps the residuals in float32
    assert lab.need(plan).elsewhere_bytes == inputs
    full = lab.need(plan.replaced(checkpointing="full"))
    assert full.elsewhere_bytes == 0
    # but for one or two that are in use, and what the gradients that are there in the end need anyway
    assert 0.3 * inputs < full.peak_bytes - lab.need(plan).peak_bytes <= inputs


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pythons_part_in_checkpointing_counts_for_the_host(tmp_path, device):
    """Hooks for what autograd saves, and a mode that looks at each operator: both are there and back in Python."""
    hooks, lab = torch.utils.checkpoint._checkpoint_hook, Lab(tmp_path, "llama", device=device)
    plan = PLAIN.replaced(micro_batch=2, precision="bf16")

    def operators(value):
        return float(lab.micro(plan.replaced(checkpointing=value)).work(np.array([2.0])).operators[0])

    found = {value: operators(value) for value in ("off", "every_2", "full", "selective")}
    assert found["off"] < found["every_2"] < found["full"] < found["selective"]
    # of nine layers, every other one; a recomputed operator is one more, and Python's part as much again and more
    assert found["every_2"] - found["off"] == pytest.approx((found["full"] - found["off"]) * 5 / 9, rel=0.2)
    assert found["full"] > 1.6 * found["off"]
    # cuDNN's attention, which a card of 9.0 takes, saves more tensors, each of which a hook sees again
    assert found["selective"] > (2 if device == "cpu" else 1.9) * found["full"]
    assert torch.utils.checkpoint._checkpoint_hook is hooks
    assert operators("off") == found["off"]


def test_a_pytorch_without_that_class_is_left_alone(strategy, monkeypatch):
    monkeypatch.delattr(torch.utils.checkpoint, "_checkpoint_hook")
    recorder = Recorder(fake=False)
    with strategy.counting(recorder):
        assert not hasattr(torch.utils.checkpoint, "_checkpoint_hook")
        strategy.KeptOutputs().policy(SimpleNamespace(is_recompute=False), torch.ops.aten.mm.default)
    assert not hasattr(torch.utils.checkpoint, "_checkpoint_hook")
    assert recorder.tape().work[-1, KINDS.index("other"), 2] == strategy.tracing._HOST_A_SEEN_OPERATOR


def test_where_a_trainer_generates_every_layer_is_recomputed_or_none():
    """It switches recomputation off meanwhile, and on again without the arguments that tell of some layers."""
    strategy, facts = technique("checkpointing"), cuda_facts()
    script = Script(path="t.py", sha256="", trainer="GRPOTrainer", micro_batch=4, accumulation=2, generated=16)
    found = []
    for one in (script, dataclasses.replace(script, generated=0)):
        asked = dataclasses.replace(facts, workload=dataclasses.replace(facts.workload, script=one))
        found.append({choice.value for choice in strategy.choices(asked) if choice.status != "withheld"})
    assert found[0] == {"off", "full"} < found[1]


@pytest.mark.parametrize(("adapter", "status"), [("PrefixTuningConfig", "withheld"), ("PromptTuningConfig", "offered")])
def test_what_an_adapter_trains_in_a_cache_is_not_recomputed(adapter, status):
    """transformers takes the cache away where it recomputes a layer, with nothing but a warning."""
    import peft

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**GPT2))
    adapted = peft.get_peft_model(model, getattr(peft, adapter)(task_type="CAUSAL_LM", num_virtual_tokens=4))
    strategy, facts = technique("checkpointing"), cuda_facts()
    said = strategy.in_script(adapted)
    script = Script(path="t.py", sha256="", trainer="", micro_batch=4, accumulation=2, checkpointing=said)
    facts = dataclasses.replace(facts, workload=dataclasses.replace(facts.workload, script=script))
    found = {one.value: one for one in strategy.choices(facts)}["full"]
    assert found.status == status
    assert strategy.leanest(facts) == ("off" if said else "full")
    assert strategy.own(facts) == "off"
