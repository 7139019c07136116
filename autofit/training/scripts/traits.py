"""What is told of a script's model, whatever trains it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from autofit.machine.model import depends_on_rows
from autofit.registry import techniques
from autofit.training.scripts.leave import Refused
from autofit.training.scripts.patches import Patches
from autofit.training.scripts.rows import Sample


def traits(patches: Patches, model: Any, rows: Sample, seconds: float) -> dict[str, Any]:
    """What a script trains, but for how its loop or its Trainer does.

    Returns:
        ``script``: fields of :class:`autofit.contract.facts.Script`; ``model``: the model itself; ``config``: its
        config as JSON values, empty where it is none of transformers.

    Raises:
        Refused: The model has no weights, or they can't be trained as they are.
    """
    import torch
    from transformers import PreTrainedModel

    inner = inner_of(model)
    first = max(inner.parameters(), key=lambda one: one.numel(), default=None)
    if first is None:
        raise Refused(f"the script trains a {type(inner).__name__}, which has no parameters", "hand on the whole model")
    own = not isinstance(inner, PreTrainedModel)  # sentence-transformers' have the config of the model inside
    settings: Any = None if own else getattr(inner, "config", None)
    text = settings.to_json_string(use_diff=False) if hasattr(settings, "to_json_string") else "{}"
    dtype = str(first.dtype).removeprefix("torch.")
    if first.dtype not in {torch.float32, torch.bfloat16}:
        raise Refused(
            f"the script trains weights in {dtype}, which lose almost every update",
            "load the model in float32 or bfloat16, and ask for --fp16 instead",
        )
    asked = {name: value for name, value in patches.said.items() if name == "attn_implementation"}
    attends = getattr(settings, "_attn_implementation", None)
    if not patches.loaded and isinstance(attends, str):  # made by its class, so that nothing else can be asked for
        asked["attn_implementation"] = attends
    script = {
        "loads": asked,
        "weights_dtype": dtype,
        **{one.name: words for one in techniques() if (words := one.in_script(model)) is not None},
        "compiled": hasattr(model, "_orig_mod"),
        "depends_on_rows": depends_on_rows(inner),
        "rows": rows.rows,
        "sampled": rows.looked_at,
        "longest": rows.longest_size,
        "mean_length": sum(rows.sizes.values()) / max(1, len(rows.sizes)),
        "tokens_a_row": rows.tokens,
        "lengths": rows.counts,
        "places": rows.spread,
        "longest_places": rows.longest,
        "seconds": seconds,
    }
    return {"script": script, "model": inner, "config": json.loads(text)}


def longest_batch(loader: Any, rows: Sample, micro_batch: int) -> Any:
    """A micro-batch of the longest rows, as a script's own collator makes it; its first, where they are not known."""
    if not rows.longest or loader.collate_fn is None:
        return next(iter(loader))
    places = [*itertools.islice(itertools.cycle(rows.longest), micro_batch)]
    return loader.collate_fn([loader.dataset[place] for place in places])


def shapes(batch: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of a micro-batch's tensors, by their names."""
    import torch

    if not isinstance(batch, Mapping):
        return {}
    return {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)}


def inner_of(model: Any) -> Any:
    """The model of transformers inside of a compiled one, or below an adapter."""
    model = getattr(model, "_orig_mod", model)
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model
