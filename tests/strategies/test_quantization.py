"""Quantized weights: what evaluation leaves of them."""

import dataclasses
import importlib

import pytest
import torch

from autofit.registry import technique
from tests.support.synthetic import cuda_facts


def test_evaluation_leaves_4bit_weights_as_they_train(monkeypatch):
    """On a CPU with AVX-512 for bfloat16 bitsandbytes packs them anew when it evaluates, which has no gradient."""
    modules = pytest.importorskip("bitsandbytes.nn.modules")
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: True)
    monkeypatch.setattr(modules, "_convert_weight_packed_for_cpu", lambda *_: pytest.fail("packed"))
    assert technique("quantization")
    loading = importlib.import_module("autofit.strategies.quantization.loading")
    network = torch.nn.Sequential(modules.Linear4bit(32, 32, quant_type="nf4", compute_dtype=torch.float32)).to("cpu")
    assert loading.keep_as_loaded(network) is network
    with torch.no_grad():
        network.eval()(torch.ones(2, 32))
    hidden = torch.ones(2, 32, requires_grad=True)
    network.train()(hidden).sum().backward()
    assert hidden.grad.abs().sum() > 0


@pytest.mark.parametrize("value", ["nf4", "int8", "int8_torchao"])
def test_a_model_that_is_no_causal_language_model_has_no_quantized_weights(value):
    facts = cuda_facts()
    classes = dataclasses.replace(facts, model=dataclasses.replace(facts.model, task="image-classification"))
    choice = technique("quantization").choice(value, classes)
    assert choice.status == "withheld"
    assert "only causal language models are quantized" in choice.reason
