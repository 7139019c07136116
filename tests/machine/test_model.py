"""What matters of a model: its sizes, and whether the loss of a row depends on the others."""

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING

from autofit.machine.model import depends_on_rows
from autofit.training.tasks.choose import describe_model


@pytest.mark.parametrize(
    ("layer", "depends"),
    [
        (nn.BatchNorm1d(4), True),
        (nn.BatchNorm1d(4, track_running_stats=False), True),
        (nn.InstanceNorm1d(4), False),
        (nn.LayerNorm(4), False),
    ],
)
def test_norms_over_a_micro_batch_are_told_whatever_they_keep(layer, depends):
    assert bool(depends_on_rows(nn.Sequential(nn.Linear(4, 4), layer))) is depends


@pytest.mark.parametrize(
    ("name", "depends"),
    [
        ("CohereForCausalLM", False),
        ("Cohere2ForCausalLM", False),
        ("CLIPModel", True),
        ("ClapModel", True),
        ("AlignModel", True),
    ],
)
def test_logits_are_contrastive_where_their_scale_is_trained(name, depends):
    """Cohere's models scale theirs by a number of the config; they were held to one micro-batch."""
    kind = getattr(transformers, name)
    with torch.device("meta"):
        model = kind(kind.config_class())
    assert bool(depends_on_rows(model)) is depends


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="this transformers has no Gemma 4")
def test_a_config_that_gives_sizes_for_each_layer_is_read(tmp_path):
    """Gemma 4's refuses to tell one width of all heads; those of some layers are wider than FlashAttention knows."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 128, "hidden_size_per_layer_input": 8}
    wide = {
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": 128,
    }
    config = transformers.AutoConfig.for_model("gemma4_text", **sizes, **wide)
    config.architectures = ["Gemma4ForCausalLM"]
    config.save_pretrained(tmp_path)
    found = describe_model("gemma", tmp_path, trust_remote_code=False)
    assert (found["layers"], found["hidden_size"], found["task"]) == (4, 64, "causal-lm")
    assert not found["context_split"]
    assert found["tensor_sizes"]["attention heads"] == config.num_attention_heads


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Mixtral", {"num_hidden_layers": 1}),
        ("Dbrx", {"n_layers": 1, "attn_config": {"kv_n_heads": 1, "rope_theta": 10_000.0}}),
        ("JetMoe", {"num_hidden_layers": 1}),
    ],
)
@pytest.mark.parametrize("told", [False, True])
def test_the_loss_that_balances_experts_is_told_whatever_its_weight_is_called(name, sizes, told):
    """DBRX has it in the config of its experts, and JetMoE by another name: they were split as if rows were alone."""
    kind = getattr(transformers, f"{name}ForCausalLM")
    with torch.device("meta"):
        model = kind(kind.config_class(output_router_logits=told, **sizes))
    assert bool(depends_on_rows(model)) is told


@pytest.mark.parametrize(
    ("name", "sizes", "told"),
    [
        ("NllbMoe", {"encoder_layers": 1, "decoder_layers": 1, "encoder_sparse_step": 1}, True),
        ("SwitchTransformers", {"num_layers": 1, "num_sparse_encoder_layers": 1}, False),
    ],
)
def test_experts_that_a_micro_batch_fills_are_told(name, sizes, told):
    """NLLB-MoE's have room for 64 tokens of all rows, Switch's for 64 of each: nothing was said of either."""
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    with torch.device("meta"):
        model = kind(kind.config_class(num_experts=4, vocab_size=64, **sizes))
    assert any(hasattr(one, "expert_capacity") for one in model.modules())
    assert bool(depends_on_rows(model)) is told


def test_a_scale_for_each_head_makes_no_loss_contrastive():
    model = nn.Linear(4, 4)
    model.config = transformers.LlamaConfig()
    model.temperature = nn.Parameter(torch.ones(4))
    assert depends_on_rows(model) is None
    model.temperature = nn.Parameter(torch.ones(()))
    assert depends_on_rows(model)


_DECODER = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16, "vocab_size": 64}


def described(tmp_path, kind, **sizes):
    transformers.AutoConfig.for_model(kind, **_DECODER, **sizes).save_pretrained(tmp_path)
    return describe_model(kind, tmp_path, trust_remote_code=False, task="causal-lm")


def test_attention_is_that_of_the_config_that_the_model_keeps(tmp_path):
    """Pegasus' decoder keeps a copy; what attends was told as none, and no trial "took effect"."""
    assert described(tmp_path, "pegasus")["attention"] == "sdpa"


def test_the_positions_of_a_decoder_of_sounds_are_told(tmp_path):
    """Whisper's config calls them otherwise; rows of 1024 tokens were tried on its 448 positions."""
    found = described(tmp_path, "whisper", pad_token_id=0, begin_suppress_tokens=None, encoder_layers=1)
    assert (found["position_rows"], found["max_positions"]) == (448, 448)
