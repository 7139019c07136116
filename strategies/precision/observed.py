"""What a step computed in, what its weights are kept in, and what is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autofit.contract.observation import dtype_name

if TYPE_CHECKING:
    from torch import nn


def compute_dtype(given: str | None, product: Any) -> str | None:
    """What a product computed in, that gave this dtype: layers of quantized weights give back what they were given."""
    import torch

    inside = getattr(product, "compute_dtype", None)
    if getattr(getattr(product, "weight", None), "dtype", None) == torch.int8:
        return "int8"
    return given if inside is None else str(inside).removeprefix("torch.")


def main_weight(model: nn.Module) -> nn.Parameter:
    """The largest weight of the model itself: no adapter's, which is trained beside frozen ones, and no packed one.

    Nor one that its class keeps in float32 whatever is asked, as Ernie 4.5's are that balance its experts, and frozen.
    """
    floats = [(name, one) for name, one in model.named_parameters() if one.dtype.is_floating_point]
    kept = {
        part
        for module in model.modules()
        for part in (
            *(getattr(module, "_keep_in_fp32_modules", None) or ()),
            *(getattr(module, "_keep_in_fp32_modules_strict", None) or ()),
        )
    }
    free = [one for name, one in floats if not any(part in name for part in kept)] or [one for _, one in floats]
    frozen = [one for one in free if not one.requires_grad]
    return max(frozen or free, key=lambda one: one.numel())


def trained_dtype(model: nn.Module) -> str | None:
    """That of the largest trainable weight; ``None`` where there is none."""
    trained = [one for one in model.parameters() if one.requires_grad]
    return dtype_name(max(trained, key=lambda one: one.numel())) if trained else None
