"""The autocast that a loop enters by itself, seen where its device is not."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any


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
        inside.append(one.__dict__["asked"])
        return enter(one)

    @functools.wraps(leave)
    def left(one: Any, *args: Any) -> Any:
        inside.pop()
        return leave(one, *args)

    owner.__init__, owner.__enter__, owner.__exit__ = made, entered, left
    return inside


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
