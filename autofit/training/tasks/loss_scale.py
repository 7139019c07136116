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

from autofit.contract.technique import replacing
from autofit.system.other_kernels import without_launches
from autofit.training.tasks.rows import make_batch

if TYPE_CHECKING:
    from autofit.training.tasks.kind import Kind, Spec

_ITEMS = "num_items_in_batch"
FEW_LAYERS = 2
"""Of the longest list of layers, each of which hands on what the last one does."""
_ASKED = {"__bool__": False, "__int__": 1, "__float__": 1.0, "__index__": 1, "item": 1}
"""The value that a tensor without values is said to have, by how it is asked."""
_SCALES = {"mul", "rmul", "imul", "multiply", "div", "truediv", "itruediv", "true_divide", "divide", "backward"}
"""What makes no sum of what it is given."""


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
    for fake, layers in ((False, FEW_LAYERS), (False, None), (True, None)):
        # a model may ask for values, which there are none of
        with contextlib.suppress(Exception), cut(model, layers):
            return not _divides(lambda items, of: model(**of(batch), **{_ITEMS: items}), model, fake=fake)
    return not _hands_items_on(model)


@contextlib.contextmanager
def cut(model: Any, count: int | None) -> Iterator[None]:
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
        ``None`` where neither a run without values nor the text of its model tells, or where a part of it is divided.
    """
    from transformers import Trainer

    kind = type(trainer)
    counted = _counts_items(trainer, batch)
    itself = _divides_itself(trainer, counted=counted)
    if not _steps_as_a_trainer(kind) or not (itself or counted):
        return (
            None  # what it takes its gradients of, or its function for the loss, divides by what it knows, or does not
        )
    if itself and (trainer.loss_is_scaled_for_ga or of_a_library(kind.compute_loss) or not isinstance(batch, Mapping)):
        return False
    inner = trainer.accelerator.unwrap_model(trainer.model)
    if type(inner).__name__.endswith("ForCTC") and inner.config.ctc_loss_reduction == "sum":
        return False  # gradients that add up are right
    rows = {name: one for name, one in batch.items() if name != "attention_mask"}  # it is asked whether it hides any
    steps = _Steps(2)  # a script may divide where there are several
    trainer.current_gradient_accumulation_steps = steps
    divided: bool | None = None
    try:
        with replacing([(trainer.args, "gradient_accumulation_steps", steps)]):
            divided = _divides(
                lambda items, of: trainer.compute_loss(trainer.model, of(rows), num_items_in_batch=items),
                trainer.model,
                steps=steps,
            )
    except Exception:  # noqa: BLE001 - a script's own code, or a model that asks for values
        if kind.compute_loss is Trainer.compute_loss and trainer.compute_loss_func is None:
            divided = _hands_items_on(inner)
    finally:
        del trainer.current_gradient_accumulation_steps
    if itself:
        return None if steps.used else False  # it would divide once more
    return None if divided is None else not divided


class _Steps(int):
    """The micro-steps of an accumulation, where it is to be seen whether a loss is divided by them.

    Attributes:
        used: Whether a tensor was.
    """

    used = False


def _steps_as_a_trainer(kind: Any) -> bool:
    """Whether a class of Trainer takes its gradients as transformers' own does, by the texts of its classes."""
    for one in kind.__mro__:
        step = vars(one).get("training_step")
        if step is None or of_a_library(step):
            continue
        text = ""
        with contextlib.suppress(OSError, TypeError):  # a function without a text
            text = inspect.getsource(step)
        if ".training_step(" not in text or "backward(" in text:
            return False
    return True


def of_a_library(one: Any) -> bool:
    """Whether a class or a function is of a library of Trainers."""
    return (getattr(one, "__module__", None) or "").partition(".")[0] in {
        "transformers",
        "trl",
        "sentence_transformers",
    }


def _divides_itself(trainer: Any, *, counted: bool) -> bool:
    """Whether a Trainer divides the loss by the micro-steps, or is told what the loss is (``training_step``)."""
    if getattr(trainer, "loss_is_scaled_for_ga", None) is not None:
        return True
    if trainer.compute_loss_func is not None:
        return False
    return not (trainer.model_accepts_loss_kwargs and counted)


def averages(trainer: Any, batch: Any) -> bool:
    """Whether a Trainer takes the mean of its micro-batches' losses, whatever rows they have.

    Args:
        trainer: About to train.
        batch: A micro-batch, as its loader makes it.
    """
    return _divides_itself(trainer, counted=_counts_items(trainer, batch)) and not trainer.loss_is_scaled_for_ga


def _counts_items(trainer: Any, batch: Any) -> bool:
    """Whether a Trainer counts anything in a micro-batch: labels, where they are numbers."""
    import torch

    return (
        isinstance(batch, Mapping) and trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))[1] is not None
    )


def answering() -> contextlib.AbstractContextManager[Any]:
    """Have a tensor without values say one where it is asked for it."""
    from torch._subclasses import FakeTensor
    from torch.overrides import TorchFunctionMode

    class Answers(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if name in _ASKED and (args[0].is_meta or isinstance(args[0], FakeTensor)):
                return _ASKED[name]
            return func(*args, **(kwargs or {}))

    return Answers()


def _divides(
    forward: Callable[[Any, Callable[[Any], dict[str, Any]]], Any],
    model: Any,
    *,
    fake: bool = True,
    steps: _Steps | None = None,
) -> bool | None:
    """Whether the number of items goes into any computation of a forward pass, which is run without values.

    Args:
        forward: Given the number, and what makes a batch of tensors without values out of another.
        model: What runs it.
        fake: Whether its tensors are to be fake ones; else they have no values by themselves.
        steps: Micro-steps of the accumulation, by which a loss may be divided, too.

    Returns:
        ``None`` where something that it did not go into is added to what it did: a part of the loss is divided.
    """
    import torch
    from torch._subclasses import FakeTensorMode
    from torch.overrides import TorchFunctionMode
    from torch.utils._pytree import tree_leaves

    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None

    def without_values(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device) if mode is None else mode.from_tensor(tensor.to(device))

    items = without_values(torch.ones(()))
    numbers: dict[int, Any] = {id(items): items}
    """What is computed of the number alone."""
    divided: dict[int, Any] = {}
    """What it goes into; kept, so that no other comes to have its ``id``."""
    used, in_part = False, False

    class Uses(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal used, in_part
            name = getattr(func, "__name__", "")
            given = tree_leaves((args, kwargs))
            counts = any(one is steps or id(one) in numbers for one in given if one is not None)
            found = func(*args, **(kwargs or {}))
            if name == "__get__" or not (counts or any(id(one) in divided for one in given)):
                return found
            used |= counts and name != "to"
            if steps is not None and any(one is steps for one in given):
                steps.used = True
            others = [one for one in given if isinstance(one, torch.Tensor) and id(one) not in numbers]
            made = {id(one): one for one in tree_leaves(found) if isinstance(one, torch.Tensor)}
            if not others:
                numbers.update(made)
                return found
            beside = [one for one in others if id(one) not in divided and one.requires_grad]
            in_part |= not counts and bool(beside) and name.strip("_") not in _SCALES
            divided.update(made)
            return found

    def of(batch: Mapping[str, Any]) -> dict[str, Any]:
        return {name: without_values(one) if isinstance(one, torch.Tensor) else one for name, one in batch.items()}

    try:
        with mode or contextlib.nullcontext(), answering(), Uses(), without_launches(), _experts_in_any_dtype(model):
            forward(items, of)
    except Exception:
        if not used:  # what it does with its loss later is nothing to this
            raise
    return None if in_part else used


def _experts_in_any_dtype(model: Any) -> contextlib.AbstractContextManager[None]:
    """Have experts multiplied by operators that take float32 without values, too: grouped ones take bfloat16 alone."""
    own = {id(one.config): one.config for one in model.modules() if hasattr(one, "config")}
    name = "_experts_implementation_internal"
    return replacing([(config, name, "batched_mm") for config in own.values() if hasattr(config, name)])


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
