"""Which implementations an architecture may have, and which kernel is seen to run."""

import importlib
import types
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM

from autofit.machine import model as described
from autofit.registry import recipe_of, technique
from tests.support.synthetic import cpu_facts, cuda_facts, model
from tests.support.tiny import CONFIGS, PLAIN, write_config

ATTENTION = technique("attention")
kernels_behind = importlib.import_module("autofit.strategies.attention")._kernels_behind
BOTH = {"flash-attn": "2.8.3", "flash-attn-3": "3.0.0", "triton": "3.7.0"}
EVERY = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def built(config="llama", **options):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[config]), **options).train()


def seen(found, **context):
    ids = torch.randint(0, 128, (2, 16))
    return kernels_behind(found(input_ids=ids, labels=ids, **context))


# -- what is seen ---------------------------------------------------------------------------------------------------


def test_the_kernel_that_ran_is_read_off_the_graph():
    assert seen(built()) == ["flash"]
    with sdpa_kernel(SDPBackend.MATH):
        assert seen(built()) == ["math"]
    assert seen(built(attn_implementation="eager")) == []


def test_checkpointing_does_not_hide_it():
    found = built()
    found.gradient_checkpointing_enable({"use_reentrant": False})
    assert seen(found, use_cache=False) == ["flash"]
    found.gradient_checkpointing_enable({"use_reentrant": True})
    found.enable_input_require_grads()
    assert seen(found, use_cache=False) is None


def test_nothing_is_seen_without_a_graph():
    with torch.no_grad():
        assert seen(built()) is None
    assert kernels_behind(torch.ones(2)) is None


class Node:
    """One of autograd's, as far as it is looked at."""

    def __init__(self, name, *before):
        self._name = name
        self.next_functions = tuple((one, 0) for one in before)

    def name(self):
        return self._name


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("ScaledDotProductFlashAttentionBackward0", ["flash"]),
        ("ScaledDotProductEfficientAttentionBackward0", ["efficient"]),
        ("ScaledDotProductCudnnAttentionBackward0", ["cudnn"]),
        ("FlashAttnFuncBackward", ["flash_attn"]),
        ("GeneratedBackwardFor_flash_attn__flash_attn_forward_defaultBackward", ["flash_attn"]),
        ("FlexAttentionAutogradOpBackward", ["flex"]),
        ("CompiledFunctionBackward", None),
        ("SoftmaxBackward0", []),
    ],
)
def test_kernels_have_their_names(name, kernel):
    root = Node("AddBackward0", Node("MulBackward0"), Node(name, Node("ViewBackward0")), None)
    assert kernels_behind({"loss": types.SimpleNamespace(grad_fn=root), "other": 1}) == kernel


@pytest.mark.parametrize(
    ("value", "config", "kernels", "good"),
    [
        ("default", "sdpa", ("flash",), True),
        ("default", "sdpa", (), True),  # layers of another kind are what a script gets
        ("default", "eager", (), False),
        ("eager", "eager", (), True),
        ("eager", "eager", ("flash",), False),  # the class ignores it
        ("eager", "sdpa", ("flash",), False),
        ("sdpa", "sdpa", ("math",), True),
        ("sdpa", "sdpa", ("efficient", "flash"), True),
        ("sdpa", "sdpa", (), False),
        ("sdpa", "sdpa", None, True),
        ("flash_attention_2", "flash_attention_2", ("flash_attn",), True),
        ("flash_attention_2", "flash_attention_2", ("flash",), False),
        ("flash_attention_2", "flash_attention_2", ("flash", "flash_attn"), False),
        ("flash_attention_2", "sdpa", ("flash",), False),
        ("flash_attention_3", "flash_attention_3", ("flash_attn",), True),
        ("flex_attention", "flex_attention", ("flex",), True),
        ("flex_attention", "flex_attention", ("math",), False),
    ],
)
def test_a_value_that_was_ignored_is_not_in_effect(value, config, kernels, good):
    said = ATTENTION.in_effect(value, {"implementation": config, "kernels": kernels}, cuda_facts())
    assert (said is None) is good


def test_a_module_of_the_users_own_attends_as_it_does():
    """That of sentence-transformers has the config of the model inside it."""
    facts = replace(cuda_facts(), model=replace(model(), model_type="", attention="its own"))
    assert ATTENTION.in_effect("default", {"implementation": "sdpa", "kernels": None}, facts) is None


# -- what is offered ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "picked", "supported"),
    [
        ("llama", "sdpa", EVERY),
        ("gpt2", "sdpa", EVERY[:4]),
        ("gemma2", None, None),  # another one with another transformers
        ("bloom", "eager", EVERY[:1]),
    ],
)
def test_what_a_class_supports_is_read(model_type, picked, supported):
    config = AutoConfig.for_model(model_type)
    with torch.device("meta"):
        found = AutoModelForCausalLM.from_config(config)
    if picked is None:
        picked = "sdpa" if "sdpa" in described._attentions(found) else "eager"
        supported = tuple(name for name in EVERY if name != "sdpa" or picked == "sdpa")
    assert found.config._attn_implementation == picked
    assert described._attentions(found) == supported


def statuses(facts):
    return {choice.value: choice.status for choice in ATTENTION.choices(facts)}


def test_a_cpu_has_the_default_and_operators():
    assert statuses(cpu_facts()) == {
        "default": "offered", "sdpa": "withheld", "eager": "offered",
        "flash_attention_2": "withheld", "flash_attention_3": "withheld", "flex_attention": "withheld",
    }  # fmt: skip
    found = statuses(replace(cpu_facts(), model=model(attention="eager", attentions=("eager",))))
    assert (found["default"], found["eager"], found["sdpa"]) == ("offered", "withheld", "withheld")


@pytest.mark.parametrize(
    ("capability", "two", "three"),
    [
        ((7, 5), "withheld", "withheld"),
        ((8, 6), "offered", "withheld"),
        ((9, 0), "offered", "offered"),
        ((12, 0), "offered", "withheld"),
    ],
)
def test_flash_attention_needs_its_device(capability, two, three):
    facts = cuda_facts()
    facts = replace(
        facts,
        packages={**facts.packages, **BOTH},
        hardware=replace(facts.hardware, capability=capability),
        model=model(attentions=EVERY),
    )
    found = statuses(facts)
    assert (found["flash_attention_2"], found["flash_attention_3"]) == (two, three)
    assert found["flex_attention"] == "on_request"
    assert statuses(replace(facts, packages={}))["flash_attention_2"] == "withheld"
    dropping = replace(facts, model=model(attentions=EVERY, attention_dropout=True))
    assert statuses(dropping)["flash_attention_3"] == "withheld"


@pytest.mark.parametrize(
    ("precision", "good"), [("fp32", 0), ("tf32", 0), ("bf16", 1), ("fp16", 1), ("bf16_weights", 1)]
)
def test_flash_attention_computes_in_16_bits(precision, good):
    said = ATTENTION.conflict("flash_attention_2", {"precision": precision}, cuda_facts())
    assert (said is None) is bool(good)
    assert ATTENTION.conflict("eager", {"precision": precision}, cuda_facts()) is None


# -- how it is carried ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pretrained", [False, True])
def test_the_model_is_loaded_with_it(tmp_path, pretrained):
    folder = write_config(tmp_path)
    if pretrained:
        built().save_pretrained(folder)
    for value, wanted in (("default", "sdpa"), ("eager", "eager")):
        made = recipe_of(PLAIN.replaced(attention=value), cpu_facts()).model(
            folder if pretrained else None, config=folder
        )
        assert made.config._attn_implementation == wanted
