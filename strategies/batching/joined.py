"""Rows of a padded batch joined to one without padding, in the model's forward pass."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any, cast


def joining(model: Any, counted: dict[str, int]) -> Any:
    """The model, which joins the rows of a padded batch when it trains, and counts how many batches it did so."""
    own = model.forward
    forward = getattr(own, "__func__", None)

    @functools.wraps(forward or own)
    def with_joined_rows(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            found = None if args else joined(kwargs)
            counted["padded" if found is None else "joined"] += 1
            kwargs = found or kwargs
        return forward(self, *args, **kwargs) if forward else own(*args, **kwargs)

    # bound to the model, so that a copy runs its own layers
    by_itself = functools.update_wrapper(functools.partial(with_joined_rows, model), own)
    model.forward = types.MethodType(with_joined_rows, model) if forward else by_itself
    return model


def joined(batch: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rows of a batch as one without padding; ``None`` where that would be another training.

    Each row keeps its tokens and positions. Its first label goes, which nothing in it predicts.
    """
    import torch

    ids, mask, labels = (cast("Any", batch.get(name)) for name in ("input_ids", "attention_mask", "labels"))
    tensors = {name for name, one in batch.items() if isinstance(one, torch.Tensor) and one.ndim}
    if not {"input_ids", "labels"} <= tensors <= {"input_ids", "attention_mask", "labels"} or labels.shape != ids.shape:
        return None
    places = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    if kept.shape != ids.shape or not ((kept == (places < kept.sum(-1, keepdim=True))) & (kept | (labels < 0))).all():
        return None
    told = labels.masked_fill(places == 0, -100)
    each = {"input_ids": ids, "labels": told, "position_ids": places}
    return {**batch, "attention_mask": None, **{name: one[kept][None] for name, one in each.items()}}
