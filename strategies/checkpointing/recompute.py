"""Switches the recomputation of a model's layers on and off by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from transformers import PreTrainedModel


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """PyTorch's, looked up when it is called: a trace puts another in its place."""
    import torch.utils.checkpoint

    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def switch_on(model: PreTrainedModel, every: int = 1, checkpoint: Callable[..., Any] = checkpoint) -> PreTrainedModel:
    """Switch it on by hand, where no Trainer reads the argument or no argument says it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    # a model's own code may not know the other argument
    enable({"use_reentrant": False}, **({"every_n_layers": every} if every > 1 else {}))
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            vars(module)["_gradient_checkpointing_func"] = checkpoint
    return model


def switch_off(model: PreTrainedModel) -> PreTrainedModel:
    """Switch it off where a script has switched it on: no argument of a Trainer does."""
    for module in recomputing(model):
        module.gradient_checkpointing = False
    return model


def recomputing(model: nn.Module) -> Iterator[Any]:
    """The modules that recompute what is inside them."""
    return (module for module in model.modules() if getattr(module, "gradient_checkpointing", False))
