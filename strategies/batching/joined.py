"""Rows of a padded batch joined to one without padding, in the model's forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from autofit.contract.forward import run_forward_in


def joining(model: Any, counted: dict[str, int]) -> Any:
    """The model, which joins the rows of a padded batch when it trains, and counts how many batches it did so."""

    def with_joined_rows(self: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.training:
            found = None if args else joined(kwargs)
            counted["padded" if found is None else "joined"] += 1
            kwargs = found or kwargs
        return forward(self, *args, **kwargs)

    run_forward_in(model, with_joined_rows)
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
