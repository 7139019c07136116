"""LitGPT's model configurations, as far as memory depends on them.

Source: ``litgpt/config.py`` of Lightning-AI/litgpt, commits 069f6584 (2023-10) to 00af8b0d (2024-09), Apache-2.0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One model, in LitGPT's own words; defaults are LitGPT's own."""

    name: str
    vocab_size: int = 50254
    padding_multiple: int = 512
    padded_vocab_size: int = 0
    block_size: int = 4096
    n_layer: int = 16
    n_head: int = 32
    n_embd: int = 4096
    head_size: int = 0
    n_query_groups: int = 0
    rotary_percentage: float = 0.25
    parallel_residual: bool = True
    shared_attention_norm: bool = False
    bias: bool = True
    lm_head_bias: bool = False
    norm: str = "LayerNorm"
    mlp: str = "GptNeoxMLP"
    gelu_approximate: str = "none"
    intermediate_size: int = 0
    scale_embeddings: bool = False
    post_norms: bool = False
    attention_softcapping: float = 0.0
    final_softcapping: float = 0.0
    sliding_window_size: int = 0
    sliding_window_every: int = 1

    def whole(self) -> Config:
        """With what ``__post_init__`` works out."""
        multiple = self.padding_multiple
        return replace(
            self,
            padded_vocab_size=self.padded_vocab_size or -(-self.vocab_size // multiple) * multiple,
            head_size=self.head_size or self.n_embd // self.n_head,
            n_query_groups=self.n_query_groups or self.n_head,
            intermediate_size=self.intermediate_size or 4 * self.n_embd,
        )


_LLAMA = Config(
    name="",
    vocab_size=32000,
    padding_multiple=64,
    rotary_percentage=1.0,
    parallel_residual=False,
    bias=False,
    norm="RMSNorm",
    mlp="LLaMAMLP",
)
_LLAMA_3 = replace(_LLAMA, vocab_size=128000, padded_vocab_size=128256, block_size=8192, n_query_groups=8)
_GEMMA = replace(_LLAMA, vocab_size=256000, mlp="GemmaMLP", gelu_approximate="tanh", scale_embeddings=True)
_GEMMA_2 = replace(
    _GEMMA,
    block_size=8192,
    head_size=256,
    post_norms=True,
    attention_softcapping=50.0,
    final_softcapping=30.0,
    sliding_window_size=4096,
    sliding_window_every=2,
)
_PHI = Config(
    name="",
    vocab_size=50257,
    padded_vocab_size=51200,
    block_size=2048,
    shared_attention_norm=True,
    lm_head_bias=True,
    gelu_approximate="tanh",
)
_PYTHIA = Config(name="", padding_multiple=128, block_size=2048)
_FALCON = Config(name="", block_size=2048, vocab_size=65024, padded_vocab_size=65024, rotary_percentage=1.0, bias=False)

_CONFIGS = (
    Config(name="stablelm-base-alpha-3b"),
    Config(name="stablelm-base-alpha-7b", n_head=48, n_embd=6144, padding_multiple=256),
    replace(_PYTHIA, name="pythia-410m", n_layer=24, n_embd=1024, n_head=16),
    replace(_PYTHIA, name="pythia-1b", n_embd=2048, n_head=8),
    replace(_PYTHIA, name="pythia-1.4b", n_layer=24, n_embd=2048, n_head=16),
    replace(_PYTHIA, name="pythia-2.8b", n_layer=32, n_embd=2560),
    replace(_PYTHIA, name="pythia-6.9b", n_layer=32, padding_multiple=256),
    replace(_PYTHIA, name="pythia-12b", n_layer=36, n_embd=5120, n_head=40),
    replace(
        _FALCON, name="falcon-7b", n_layer=32, n_head=71, n_embd=4544, n_query_groups=1, shared_attention_norm=True
    ),
    replace(_FALCON, name="falcon-40b", n_layer=60, n_head=128, n_embd=8192, n_query_groups=8),
    replace(_LLAMA, name="llama-2-7b", n_layer=32, intermediate_size=11008),
    replace(_LLAMA, name="llama-2-13b", n_layer=40, n_head=40, n_embd=5120, intermediate_size=13824),
    replace(_LLAMA, name="llama-2-70b", n_layer=80, n_head=64, n_embd=8192, n_query_groups=8, intermediate_size=28672),
    replace(_LLAMA_3, name="llama-3-8b", n_layer=32, intermediate_size=14336),
    replace(_LLAMA_3, name="llama-3.1-8b", n_layer=32, intermediate_size=14336),
    replace(_LLAMA_3, name="llama-3-70b", n_layer=80, n_head=64, n_embd=8192, intermediate_size=28672),
    replace(_LLAMA_3, name="llama-3.2-1b", n_embd=2048, intermediate_size=8192),
    replace(_LLAMA_3, name="llama-3.2-3b", n_layer=28, n_embd=3072, n_head=24, intermediate_size=8192),
    replace(
        _LLAMA,
        name="codellama-7b",
        vocab_size=32016,
        padding_multiple=16,
        block_size=16384,
        n_layer=32,
        intermediate_size=11008,
    ),
    replace(
        _LLAMA,
        name="codellama-13b",
        vocab_size=32016,
        padding_multiple=16,
        block_size=16384,
        n_layer=40,
        n_head=40,
        n_embd=5120,
        intermediate_size=13824,
    ),
    replace(_LLAMA, name="mistral-7b", n_layer=32, n_query_groups=8, intermediate_size=14336),
    replace(
        _LLAMA,
        name="tiny-llama",
        block_size=2048,
        n_layer=22,
        n_embd=2048,
        intermediate_size=5632,
        n_query_groups=4,
    ),
    replace(_GEMMA, name="gemma-2b", n_embd=2048, n_layer=18, n_head=8, n_query_groups=1, intermediate_size=16384),
    replace(_GEMMA, name="gemma-7b", n_embd=3072, n_layer=28, n_head=16, head_size=256, intermediate_size=24576),
    replace(_GEMMA_2, name="gemma-2-2b", n_embd=2304, n_layer=26, n_head=8, n_query_groups=4, intermediate_size=9216),
    replace(_GEMMA_2, name="gemma-2-9b", n_embd=3584, n_layer=42, n_head=16, n_query_groups=8, intermediate_size=14336),
    replace(_PHI, name="phi-1.5", n_embd=2048, n_layer=24, rotary_percentage=0.5),
    replace(_PHI, name="phi-2", n_embd=2560, n_layer=32, rotary_percentage=0.4),
    replace(_LLAMA, name="phi-3-mini", padded_vocab_size=32064, n_embd=3072, n_layer=32, intermediate_size=8192),
)


def config_of(model: str, params: str = "") -> Config | None:
    """The configuration that a table means by a name and, where the name leaves it open, a number of parameters.

    >>> config_of("Llama 2", "7 B / trainable 4,194,304").name
    'llama-2-7b'
    >>> config_of("Phi-3-mini-4k-instruct").name
    'phi-3-mini'
    """
    size = re.match(r"\s*([\d.]+)\s*B\b", params)
    said = _plain(model)
    for wanted in (said, said + _plain(f"{size[1]}b") if size else said):
        found = [config for config in _CONFIGS if wanted.startswith(_plain(config.name))]
        if found:
            return max(found, key=lambda config: len(config.name)).whole()
    return None


_SAME = {"stablelmalpha": "stablelmbasealpha", "phi15": "phi1.5", "tinyllama1.1b": "tinyllama"}


def _plain(name: str) -> str:
    """Letters and digits of a model's name, without its owner."""
    plain = re.sub(r"[^a-z0-9.]", "", name.rpartition("/")[2].lower())
    for other, ours in _SAME.items():
        if plain.startswith(other):
            return ours + plain.removeprefix(other)
    return plain
