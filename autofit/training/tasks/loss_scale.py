"""Whether an accumulation divides a model's loss: a Trainer may leave that to the model, and the model may not do it.

A ``transformers.Trainer`` hands a model whose ``forward()`` takes any keyword the number of items of the whole
accumulation, and takes its loss for divided by it (``Trainer.training_step``, transformers 5.23). Many losses do not
look at that number: then the gradients of an accumulation add up, and are so many times as large.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from autofit.system.other_kernels import without_launches
from autofit.training.tasks.rows import make_batch

if TYPE_CHECKING:
    from autofit.training.tasks.kind import Kind, Spec

_ITEMS = "num_items_in_batch"
_FEW_LAYERS = 2
"""Of the longest list of layers, each of which hands on what the last one does."""
_ASKED = {"__bool__": False, "__int__": 1, "__float__": 1.0, "__index__": 1, "item": 1}
"""The value that a tensor without values is said to have, by how it is asked."""


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
    # tensors of the meta device take a tenth of the time, and say less of themselves; a model may need all its layers
    for fake, layers in ((False, _FEW_LAYERS), (False, None), (True, None)):
        # a model may ask for values, which there are none of
        with contextlib.suppress(Exception), _cut(model, layers):
            return not _looks_at_items(lambda items, of: model(**of(batch), **{_ITEMS: items}), model, fake=fake)
    return not _hands_items_on(model)


@contextlib.contextmanager
def _cut(model: Any, count: int | None) -> Iterator[None]:
    """A model with the first layers of its longest list of them alone; with all where no ``count`` is given."""
    from torch import nn

    lists = (one for one in model.modules() if isinstance(one, nn.ModuleList))
    layers = vars(max(lists, key=len, default=nn.ModuleList()))
    whole = layers["_modules"]
    layers["_modules"] = dict([*whole.items()][:count])
    try:
        yield
    finally:
        layers["_modules"] = whole


def script_leaves_undivided(trainer: Any, batch: Any) -> bool | None:
    """Whether a script's Trainer takes its loss for divided by the micro-steps of an accumulation, and it is not.

    Args:
        trainer: About to train.
        batch: A micro-batch, as its loader makes it.

    Returns:
        ``None`` where neither a run without values nor the text of its model tells.
    """
    from transformers import Trainer

    counted = _counts_items(trainer, batch)
    if _divides_itself(trainer, counted=counted):
        return False
    if not counted:
        return None  # its function for the loss divides by what it knows, or does not
    inner = trainer.accelerator.unwrap_model(trainer.model)
    if type(inner).__name__.endswith("ForCTC") and inner.config.ctc_loss_reduction == "sum":
        return False  # gradients that add up are right
    rows = {name: one for name, one in batch.items() if name != "attention_mask"}  # it is asked whether it hides any
    try:
        return not _looks_at_items(
            lambda items, of: trainer.compute_loss(trainer.model, of(rows), num_items_in_batch=items), trainer.model
        )
    except Exception:  # noqa: BLE001 - a script's own code, or a model that asks for values
        if type(trainer).compute_loss is not Trainer.compute_loss or trainer.compute_loss_func is not None:
            return None
        told = _hands_items_on(inner)
        return None if told is None else not told


def _divides_itself(trainer: Any, *, counted: bool) -> bool:
    """Whether a Trainer divides the loss by the micro-steps, or is told what the loss is (``training_step``)."""
    if getattr(trainer, "loss_is_scaled_for_ga", None) is not None:
        return True
    if trainer.compute_loss_func is not None:
        return False
    return not (trainer.model_accepts_loss_kwargs and counted)


def _counts_items(trainer: Any, batch: Any) -> bool:
    """Whether a Trainer counts anything in a micro-batch: labels, where they are numbers."""
    import torch

    return (
        isinstance(batch, Mapping) and trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))[1] is not None
    )


def _looks_at_items(
    forward: Callable[[Any, Callable[[Any], dict[str, Any]]], Any], model: Any, *, fake: bool = True
) -> bool:
    """Whether the number of items goes into any computation of a forward pass, which is run without values.

    Args:
        forward: Given the number, and what makes a batch of tensors without values out of another.
        model: What runs it.
        fake: Whether its tensors are to be fake ones; else they have no values by themselves.
    """
    import torch
    from torch._subclasses import FakeTensor, FakeTensorMode
    from torch.overrides import TorchFunctionMode
    from torch.utils._pytree import tree_leaves

    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None

    def without_values(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device) if mode is None else mode.from_tensor(tensor.to(device))

    items = without_values(torch.ones(()))
    seen: list[str] = []

    class Uses(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if any(one is items for one in tree_leaves((args, kwargs))) and name not in {"__get__", "to"}:
                seen.append(name)
            if name in _ASKED and (args[0].is_meta or isinstance(args[0], FakeTensor)):
                return _ASKED[name]
            return func(*args, **(kwargs or {}))

    def of(batch: Mapping[str, Any]) -> dict[str, Any]:
        return {name: without_values(one) if isinstance(one, torch.Tensor) else one for name, one in batch.items()}

    try:
        with mode or contextlib.nullcontext(), Uses(), without_launches():
            forward(items, of)
    except Exception:
        if not seen:  # what it does with its loss later is nothing to this
            raise
    return bool(seen)


def _hands_items_on(model: Any) -> bool | None:
    """Whether the texts say so: of ``forward()``, and of the loss of transformers that it hands all keywords.

    Returns:
        ``None`` where ``forward()`` names neither: another module's may.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    loss = getattr(model, "loss_function", None)
    for kind in type(model).__mro__:
        text = inspect.getsource(vars(kind)["forward"]) if "forward" in vars(kind) else ""
        _, calls, handed = text.rpartition("loss_function(")
        if calls and "**kwargs" in handed and loss is not None:
            divides = inspect.getsource(loss)
            return _ITEMS in divides or "fixed_cross_entropy(" in divides
        if calls or _ITEMS in text:
            return _ITEMS in text
        if text and "super().forward(" not in text:
            return None
    return None
