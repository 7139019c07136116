"""What a technique sees of a trace that runs: it says what a kernel would hold, move and keep the host busy with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Ints = npt.NDArray[np.int64]
StandIn = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called in an operator's place, with the recorder, the operator and its arguments."""


class TraceRecorder(Protocol):
    """Follows each tensor's storage while a step runs on fake tensors."""

    fake: bool
    """Whether tensors have no values."""
    stand_ins: dict[Any, StandIn]

    def follow(self, tensor: torch.Tensor, func: Any, args: tuple[Any, ...]) -> bool:
        """Record a tensor that an operator made; returns whether it is new."""

    def holding(self, *sizes: int, name: str) -> AbstractContextManager[None]:
        """Blocks of these bytes live while the context does: what a kernel takes for itself."""

    def passes(self, *sizes: int) -> None:
        """A kernel writes these bytes and reads them again, in memory that it takes for itself."""

    def elsewhere(self) -> AbstractContextManager[None]:
        """What is made inside lies outside the device's allocator: on the host, or in managed memory."""

    def lies_elsewhere(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was made :meth:`elsewhere`."""

    def transfer(self, moved_bytes: int) -> None:
        """Bytes go over the bus, to the host or back."""

    def busies_host(self, operators: float) -> None:
        """Python keeps the host busy for as long as it takes to issue so many operators."""
