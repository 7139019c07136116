"""What a recomputed layer keeps besides its input, and its input on the host."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from autofit.contract.placement import KeptOnHost

from .recompute import checkpoint, switch_on

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.utils.checkpoint import CheckpointPolicy
    from transformers import PreTrainedModel

PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_grouped_mm"})
ATTENTION = frozenset({
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward", "flex_attention",
})  # fmt: skip


class KeptOutputs:
    """Checkpoints a layer but for the outputs of matrix products and of attention.

    Attributes:
        names: Operators whose outputs are kept.
        count: Outputs that were kept so far.
    """

    def __init__(self) -> None:
        self.names = PRODUCTS | ATTENTION
        self.count = 0

    def policy(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """What PyTorch asks for every operator."""
        from torch.utils.checkpoint import CheckpointPolicy

        if op.name().partition(".")[0] not in self.names:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.count += not context.is_recompute  # which some versions of PyTorch ask for too
        return CheckpointPolicy.MUST_SAVE

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer."""
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        contexts = functools.partial(create_selective_checkpoint_contexts, self.policy)
        return checkpoint(function, *args, context_fn=contexts, **kwargs)


def keep_products(model: PreTrainedModel, kept: KeptOutputs) -> PreTrainedModel:
    """Recompute what lies between the matrix products of the layers."""
    settings = model.config.get_text_config().to_dict()
    dropout = any("drop" in name and isinstance(value, float) and value > 0 for name, value in settings.items())
    kept.names = PRODUCTS if dropout else PRODUCTS | ATTENTION
    return switch_on(model, checkpoint=kept.checkpoint)


class HostInputs(KeptOnHost):
    """Checkpoints a layer, with its inputs on the host until they are needed."""

    def stays(self, tensor: torch.Tensor) -> bool:
        """Of a layer's inputs those of floating point are its activations."""
        return not tensor.is_floating_point() or super().stays(tensor)

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer; what it saves inside is dropped before these hooks would see it."""
        with self.waiting():
            return checkpoint(function, *args, **kwargs)
