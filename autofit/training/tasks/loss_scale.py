"""Whether an accumulation divides a model's loss: a Trainer may leave that to the model, and the model may not do it.

A ``transformers.Trainer`` hands a model whose ``forward()`` takes any keyword the number of items of the whole
accumulation, and takes its loss for divided by it (``Trainer.training_step``, transformers 5.23). Many losses do not
look at that number: then the gradients of an accumulation add up, and are so many times as large.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autofit.training.tasks.rows import make_batch

if TYPE_CHECKING:
    from autofit.training.tasks.kind import Kind, Spec

_ITEMS = "num_items_in_batch"


def leaves_undivided(model: Any, kind: Kind, spec: Spec) -> bool:
    """Whether under a Trainer nobody divides a model's loss by the micro-steps of an accumulation.

    Args:
        model: On the meta device.
        kind: Its task.
        spec: What its batches are made by.
    """
    import torch

    taken = inspect.signature(model.forward).parameters.values()
    takes_any = any(one.kind == inspect.Parameter.VAR_KEYWORD for one in taken)
    if "labels" not in kind.arguments or not getattr(model, "accepts_loss_kwargs", takes_any):
        return False  # the Trainer divides
    if kind.sums(model.config):
        return False
    batch = {**make_batch(kind, spec, 2, torch.Generator()), **kind.constants}
    kind.prepare(model)
    try:
        return not _looks_at_items(lambda items: model(**_on_meta(batch), **{_ITEMS: items}))
    except Exception:  # noqa: BLE001 - a model may ask for values, which there are none of
        return not _hands_items_on(model)


def script_leaves_undivided(trainer: Any, batch: Any) -> bool:
    """Whether a script's Trainer takes its loss for divided by the micro-steps of an accumulation, and it is not.

    Args:
        trainer: About to train. Its model has no weights after this.
        batch: A micro-batch, as its loader makes it.
    """
    from transformers import Trainer

    takes = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    says = getattr(trainer, "loss_is_scaled_for_ga", None)
    if not takes or says is not None or not isinstance(batch, Mapping) or "labels" not in batch:
        return False  # it divides, or it is told what the loss is, or there is nothing to count
    inner = trainer.accelerator.unwrap_model(trainer.model)
    if type(inner).__name__.endswith("ForCTC") and inner.config.ctc_loss_reduction == "sum":
        return False  # gradients that add up are right
    rows = {name: one for name, one in batch.items() if name != "attention_mask"}  # it is asked whether it hides any
    try:
        model = trainer.model.to("meta")
        return not _looks_at_items(lambda items: trainer.compute_loss(model, _on_meta(rows), num_items_in_batch=items))
    except Exception:  # noqa: BLE001 - a script's own code, or a model that asks for values
        inherited = type(trainer).compute_loss is Trainer.compute_loss and trainer.compute_loss_func is None
        return inherited and not _hands_items_on(inner)


def _on_meta(batch: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    return {name: one.to("meta") if isinstance(one, torch.Tensor) else one for name, one in batch.items()}


def _looks_at_items(forward: Callable[[Any], Any]) -> bool:
    """Whether the number of items goes into any computation of a forward pass, which is given it."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._pytree import tree_leaves

    items = torch.ones((), device="meta")
    seen: list[str] = []

    class Uses(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if any(one is items for one in tree_leaves((args, kwargs))) and name not in {"__get__", "to"}:
                seen.append(name)
            return func(*args, **(kwargs or {}))

    with Uses():
        forward(items)
    return bool(seen)


def _hands_items_on(model: Any) -> bool:
    """Whether the texts say so: of ``forward()``, and of the loss of transformers that it hands all keywords."""
    text = inspect.getsource(type(model).forward)
    loss = getattr(model, "loss_function", None)
    _, calls, handed = text.rpartition("loss_function(")
    if not calls or "**kwargs" not in handed or loss is None:
        return _ITEMS in text
    divides = inspect.getsource(loss)
    return _ITEMS in divides or "fixed_cross_entropy(" in divides
