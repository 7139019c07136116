"""Which linear layers of a model are passed by, read off its classes."""

import pytest
import torch
import transformers

from autofit.machine.direct_reads import read_directly

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("auto", "kind", "sizes", "found"),
    [
        ("AutoModelForMaskedLM", "mobilebert", {"vocab_size": 32, "hidden_size": 512}, {"cls.predictions.dense"}),
        ("AutoModel", "siglip_vision_model", {"image_size": 16, "patch_size": 8}, {"head.attention.out_proj"}),
        ("AutoModelForCausalLM", "bloom", {"vocab_size": 32, "n_layer": 1, "n_head": 2}, set()),
        ("AutoModelForSeq2SeqLM", "t5", {"vocab_size": 32, "num_layers": 1, "d_model": 16, "d_ff": 16}, set()),
        ("AutoModelForCausalLM", "llama", {"vocab_size": 32}, set()),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_layers_whose_weights_are_handed_on_are_named_and_no_others(auto, kind, sizes, found):
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **sizes})
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(config)
    paths = read_directly(model)
    assert {path.removeprefix("vision_model.") for path in paths} == found
    layers = {name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    assert set(paths) <= layers
