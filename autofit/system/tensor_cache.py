"""Disk cache of quantized random weights, per tune.

Quantizing takes seconds and is the same in every trial. Where a file can't be written or read, it is done again.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Self

from autofit.system.errors import MachineError
from autofit.system.files import write_atomically
from autofit.system.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

CACHE_FOLDER = "kept"
"""The folder's name, beside the trials' folders."""
_SUFFIX = ".safetensors"
_LEFT_FREE_BYTES = GIB
"""Of the disk: the tune's own records come first."""


class TensorCache:
    """A cache of tensors by name, one file each.

    Args:
        folder: Holds the files; made when it is needed. ``None`` caches nothing.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def tensors(self, name: str, make: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The cached tensors of a name; where there are none, those that ``make`` returns, which are then cached.

        Args:
            name: Says all that it depends on; the name of a file.
            make: Makes tensors that share no storage.

        Returns:
            Tensors on the default device.
        """
        if self.folder is None:
            return make()
        file = self.folder / f"{name}{_SUFFIX}"
        known = _read(file)
        if known is None:
            known = make()
            _write(file, known)
        return known

    def __enter__(self) -> Self:
        self.forget()  # what a process that was killed has left
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()

    def forget(self) -> None:
        """Delete the cache."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _read(file: Path) -> dict[str, torch.Tensor] | None:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        found = load(file.read_bytes())  # read, not mapped: pages of a file would count as the trial's memory
    except (OSError, SafetensorError, ValueError):
        return None
    device = torch.get_default_device()
    return {name: tensor.to(device) for name, tensor in found.items()}


def _write(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save

    with contextlib.suppress(OSError, MachineError):
        file.parent.mkdir(parents=True, exist_ok=True)
        room = shutil.disk_usage(file.parent).free - sum(tensor.nbytes for tensor in tensors.values())
        if room >= _LEFT_FREE_BYTES:
            write_atomically(file, save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))
