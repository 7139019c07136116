"""Batches padded on to a multiple of tokens, by their collator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MULTIPLE = 8
FILLS = {"attention_mask": 0, "token_type_ids": 0, "labels": -100}
"""What is put behind a row, beside padding tokens: no attention, no loss (``torch.nn.CrossEntropyLoss``)."""


class ToMultiple:
    """A collator whose batches are padded on, to a multiple of tokens; else it is the one inside.

    Args:
        own: Makes a batch of rows.
        told: Holds the padding token as ``fill``, once the model is there.
    """

    def __init__(self, own: Callable[..., Any], told: Mapping[str, int]) -> None:
        self.own, self.told = own, told

    def __getattr__(self, name: str) -> Any:
        if name in {"own", "told"}:
            raise AttributeError(name)
        return getattr(self.own, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The batch of the collator inside, padded on where it has a mask of its tokens."""
        return padded_on(self.own(*args, **kwargs), fill=self.told["fill"])


def padded_on(batch: Any, *, fill: int) -> Any:
    """A batch with rows of a multiple of tokens; as it is where it has no mask that tells padding."""
    import torch

    ids = batch.get("input_ids") if hasattr(batch, "get") else None
    mask = batch.get("attention_mask") if hasattr(batch, "get") else None
    if not isinstance(ids, torch.Tensor) or getattr(mask, "shape", None) != ids.shape:
        return batch
    short = -ids.shape[-1] % MULTIPLE
    for name, value in {"input_ids": fill, **FILLS}.items():
        held = batch.get(name)
        if short and isinstance(held, torch.Tensor) and held.shape == ids.shape and not held.is_floating_point():
            batch[name] = torch.nn.functional.pad(held, (0, short), value=value)
    return batch
