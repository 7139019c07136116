"""The autocast that a loop, a Trainer or a model enters by itself, seen where its device is not."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

from autofit.system.other_kernels import without_launches
from autofit.training.observer import layer_products
from autofit.training.scripts.leave import generated_rows, refusing_to_generate
from autofit.training.tasks.loss_scale import answering


def note_autocast() -> list[Mapping[str, str]]:
    """The autocasts that a script is in, the innermost last: the dtype of each by the kind of device that it counts on.

    One for the processor may be for ``accelerator.device.type``, which is another kind where the script trains.
    """
    import torch

    owner: Any = torch.autocast
    make, enter, leave = owner.__init__, owner.__enter__, owner.__exit__
    inside: list[Mapping[str, str]] = []

    @functools.wraps(make)
    def made(one: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any, **kwargs: Any) -> None:
        make(one, device_type, dtype, enabled, *args, **kwargs)
        kinds = ("cpu", "cuda") if device_type == "cpu" else (device_type,)
        asked = {kind: dtype or torch.get_autocast_dtype(kind) for kind in kinds} if enabled else {}
        one.__dict__["asked"] = {kind: str(found).removeprefix("torch.") for kind, found in asked.items()}

    @functools.wraps(enter)
    def entered(one: Any) -> Any:
        inside.append(one.__dict__.get("asked", {}))
        return enter(one)

    @functools.wraps(leave)
    def left(one: Any, *args: Any) -> Any:
        inside.pop()
        return leave(one, *args)

    owner.__init__, owner.__enter__, owner.__exit__ = made, entered, left
    return inside


def before_products(model: Any, tell: Callable[[], None]) -> None:
    """Have it told where a model is about to multiply by the first matrix of one of its layers."""
    import torch

    def hook(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            tell()

    for called, _ in layer_products(model):
        called.register_forward_pre_hook(hook)


def autocast_of(trainer: Any, batch: Any, inside: list[Mapping[str, str]]) -> Mapping[str, str]:
    """The autocast in which a Trainer's step calls its model's layers: it runs up to the first of them.

    It runs without values, since it may ask another model first, and on real tensors where it can't.

    Args:
        trainer: About to train; it is not used any more.
        batch: A micro-batch, as its loader makes it.
        inside: The autocasts that the script is in.

    Returns:
        Its dtypes by the kind of device; empty where there is none, and where the step fails before.

    Raises:
        Refused: A model generates before.
    """
    import torch
    from torch._subclasses import FakeTensorMode

    class Reached(BaseException):
        """No ``except Exception`` of the script's stops it."""

    found: list[Mapping[str, str]] = []

    def reached() -> None:
        found.append(inside[-1] if inside else {})
        raise Reached

    before_products(trainer.model, reached)
    for values in (FakeTensorMode(allow_non_fake_inputs=True), contextlib.nullcontext()):
        with contextlib.suppress(Reached, Exception), refusing_to_generate(generated_rows(type(trainer))):
            items = trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))[1]
            with torch.compiler.set_stance("force_eager"), values, answering(), without_launches():
                trainer.training_step(trainer.model, batch, items)
        if found:
            return found[0]
    return {}


def autocast_of_gpus() -> None:
    """Have the processor compute in what a script asks of a GPU that is not here: PyTorch would leave it out."""
    import torch

    owner: Any = torch.autocast
    make = owner.__init__

    @functools.wraps(make)
    def made(one: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        asked = dtype if device_type == "cpu" else dtype or torch.get_autocast_dtype(device_type)
        make(one, "cpu", asked, *args, **kwargs)

    owner.__init__ = made
