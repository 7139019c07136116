"""What other projects are told of a plan's precision, and what they do otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autofit.contract.layout import engine_of

from .arithmetic import AUTOCAST, autocast

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autofit.contract.facts import Facts
    from autofit.contract.plan import Value

_PURE: dict[str, dict[str, Any]] = {
    "sft": {"model_init_kwargs": {"dtype": "bfloat16"}},
    "axolotl": {"bfloat16": True},
    "llamafactory": {"pure_bf16": True},
}
"""How other projects are told of bfloat16 weights."""
_UNDER_AUTOCAST: dict[str, dict[str, Any]] = {"sft": _PURE["sft"], "axolotl": {}, "llamafactory": {}}
"""The same under autocast, of which an argument tells; Axolotl then loads them so, and LLaMA-Factory as they are."""
_NOT_PURE = {
    "axolotl": "Axolotl computes under bfloat16 autocast besides; without an adapter or FlashAttention it keeps "
    "embeddings, norms and the output layer in float32, unless FSDP splits them",
    "llamafactory": "LLaMA-Factory loads weights in the dtype that their files say, so these have to say bfloat16",
}
_REFUSED_ON_A_CPU = {"llamafactory": "LLaMA-Factory refuses bfloat16 weights (pure_bf16) on a CPU"}
"""What they do otherwise. Axolotl 0.19: ``TrainerBuilderBase._configure_precision_settings``,
``ModelLoader._configure_embedding_dtypes``; LLaMA-Factory 0.9.5: ``load_model``, ``get_train_args``."""


def told(value: Value, mixed: str) -> Mapping[str, Mapping[str, Any]]:
    """What each of them is told of bfloat16 weights, by the project; ``mixed`` is Accelerate's word for autocast."""
    if value != "bf16_weights":
        return {}
    return _UNDER_AUTOCAST if mixed == "bf16" else _PURE


def otherwise(value: Value, plan: Mapping[str, Value], facts: Facts) -> Mapping[str, str]:
    """What other projects do otherwise, in words: Axolotl has no autocast over float32 weights."""
    if value == "bf16_weights" and autocast(value, plan, facts) == "bf16":
        return {"llamafactory": _NOT_PURE["llamafactory"]}
    if value == "bf16_weights":
        return {**_NOT_PURE, **(_REFUSED_ON_A_CPU if facts.hardware.device == "cpu" else {})}
    quantized, engine = plan.get("quantization", "none") != "none", engine_of(plan.get("parallel", "none"))
    if value not in AUTOCAST or quantized or engine == "deepspeed":  # whose float32 copy is there as well
        return {}
    lost = "" if plan.get("adapter", "none") != "none" else ": small updates are lost"
    if lost and value == "fp16":
        lost = ", and fails in the first step: PyTorch scales no loss for float16 gradients"
    return {"axolotl": f"Axolotl loads the float32 weights in {AUTOCAST[str(value)]}, which is another training{lost}"}
