"""What a model of images or sounds is called with, in the dtype of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def cast_main_input(model: PreTrainedModel) -> PreTrainedModel:
    """Cast images and sounds to the dtype of the weights: processors make float32, and not every model casts it.

    Generation gives them to the model's encoder alone (Whisper), without the model's forward pass.
    """
    import torch

    name = model.main_input_name

    def cast(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = given.get(name)
        if isinstance(own, torch.Tensor) and own.is_floating_point():
            given = {**given, name: own.to(torch.bfloat16)}
        return args, given

    encoder = model.get_encoder() if model.config.is_encoder_decoder else model
    for module in {model, encoder}:
        module.register_forward_pre_hook(cast, with_kwargs=True)
    return model
