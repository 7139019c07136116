"""Whether an accumulation divides a model's loss: a Trainer may leave that to the model, and the model may not do it.

A ``transformers.Trainer`` hands a model whose ``forward()`` takes any keyword the number of items of the whole
accumulation, and takes its loss for divided by it (``Trainer.training_step``, transformers 5.23). Many losses do not
look at that number: then the gradients of an accumulation add up, and are so many times as large.
"""

from __future__ import annotations

import inspect
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
    taken = inspect.signature(model.forward).parameters.values()
    takes_any = any(one.kind == inspect.Parameter.VAR_KEYWORD for one in taken)
    if "labels" not in kind.arguments or not getattr(model, "accepts_loss_kwargs", takes_any):
        return False  # the Trainer divides
    if kind.sums(model.config):
        return False
    try:
        return not _looks_at_items(model, kind, spec)
    except Exception:  # noqa: BLE001 - a model may ask for values, which there are none of
        return not _hands_items_on(model)


def _looks_at_items(model: Any, kind: Kind, spec: Spec) -> bool:
    """Whether the number of items goes into any computation of a forward pass."""
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

    batch = {**make_batch(kind, spec, 2, torch.Generator()), **kind.constants}
    given = {name: one.to("meta") if isinstance(one, torch.Tensor) else one for name, one in batch.items()}
    kind.prepare(model)
    with Uses():
        model(**given, **{_ITEMS: items})
    return bool(seen)


def _hands_items_on(model: Any) -> bool:
    """Whether the texts say so: of ``forward()``, and of the loss of transformers that it hands all keywords."""
    text = inspect.getsource(type(model).forward)
    loss = getattr(model, "loss_function", None)
    if "**kwargs" not in text.rpartition("loss_function(")[2] or loss is None:
        return _ITEMS in text
    divides = inspect.getsource(loss)
    return _ITEMS in divides or "fixed_cross_entropy(" in divides
