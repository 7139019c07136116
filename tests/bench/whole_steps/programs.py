"""The programs of published training steps, built from a table of shapes; what is not in it is not expressed.

============  =====================================================================================================
family        what is built, and in what it differs from what was measured
============  =====================================================================================================
``gpt``       llm-foundry's MosaicGPT and MPT, written out: fused causal attention, tied head, LayerNorm in float32 or
              (MPT's sweep) in 16 bits. One rank of FSDP: weights come gathered in bfloat16, the optimizer steps its
              shard. Gathers and scatters are taken as overlapped; ALiBi, which those runs left off, is left out
``bert``      transformers' BERT with eager attention, for pre-training or SQuAD. NVIDIA's own has fused bias and GELU,
              apex' LayerNorm, FusedAdam and FusedLAMB with multi-tensor clipping
``causal``    transformers' GPT-2 and OPT with eager attention
``resnet``    transformers' ResNet-50 (v1.5), SGD with momentum. NVIDIA's has channels last in 16 bits
============  =====================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "amp", "half", "pure half"]
"""``amp`` is autocast over float32 weights, ``half`` autocast over 16-bit weights (FSDP's, gathered), ``pure half``
16-bit weights without autocast (apex' O2, with float32 copies in the optimizer)."""
Optimizer = Literal["none", "adamw", "fused_adam", "lamb", "sgd", "sharded_adamw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is traced; the rows of a micro-batch are left open.

    Attributes:
        family: See above.
        shape: Name of the shape, or its settings as pairs.
        seq_len: Tokens in a row; pixels on a side for ``resnet``.
        task: Of ``bert``: ``pretraining`` or ``squad``.
        low_precision_norm: Of ``gpt``.
        metrics: Of ``gpt``: whether two metrics read the logits after each forward pass.
        world: Ranks that the optimizer's state is sharded over.
        train: Whether there is a backward pass.
    """

    family: Literal["gpt", "bert", "causal", "resnet"]
    shape: tuple[tuple[str, int], ...]
    seq_len: int
    precision: Precision
    optimizer: Optimizer = "none"
    task: str = ""
    checkpointing: bool = False
    low_precision_norm: bool = False
    metrics: bool = False
    world: int = 1
    train: bool = True


BERT = {
    "base": (("hidden", 768), ("layers", 12), ("heads", 12), ("vocab", 30522)),
    "large": (("hidden", 1024), ("layers", 24), ("heads", 16), ("vocab", 30522)),
}
CAUSAL = {
    "gpt2": (("hidden", 768), ("layers", 12), ("heads", 12), ("vocab", 50257), ("positions", 1024)),
    "gpt2_medium": (("hidden", 1024), ("layers", 24), ("heads", 16), ("vocab", 50257), ("positions", 1024)),
    "gpt2_large": (("hidden", 1280), ("layers", 36), ("heads", 20), ("vocab", 50257), ("positions", 1024)),
    "gpt2_xl": (("hidden", 1600), ("layers", 48), ("heads", 25), ("vocab", 50257), ("positions", 1024)),
    "gpt3_xl": (("hidden", 3072), ("layers", 24), ("heads", 24), ("vocab", 50257), ("positions", 2048)),
    "gpt3_27": (("hidden", 2560), ("layers", 32), ("heads", 32), ("vocab", 50257), ("positions", 2048)),
    "opt_13": (("hidden", 2048), ("layers", 24), ("heads", 32), ("vocab", 50272), ("positions", 2048), ("opt", 1)),
    "opt_27": (("hidden", 2560), ("layers", 32), ("heads", 32), ("vocab", 50272), ("positions", 2048), ("opt", 1)),
    "opt_67": (("hidden", 4096), ("layers", 32), ("heads", 32), ("vocab", 50272), ("positions", 2048), ("opt", 1)),
}
"""GPT-3's as in its paper (arXiv 2005.14165, table 2.1), whose XL contradicts itself: 24 heads of 128, and a width of
2,048. Taken are the heads: its backward pass was measured to be as long as that of 2.7B, and twice that of OPT-1.3B."""
