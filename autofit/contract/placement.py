"""Where a tensor waits: on the device, or in the host's pinned memory.

The seam at which a trace, in which both are fake, tells them apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from autofit.contract.trace import TraceRecorder


class Placement(Protocol):
    """Moves tensors between the device and its host."""

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the device."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in the host's pinned memory, laid out as the tensor, so that kernels find it again as they gave it.

        It is made by the device's stream, so not to be read before it is done.
        """

    def to_device(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy on the device."""


class Cuda:
    """The real one."""

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the device."""
        return tensor.device.type == "cuda"

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in the host's pinned memory."""
        import torch

        try:
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            # CUDA's words are the same as for the device
            raise MemoryError(f"the host has no {tensor.nbytes} bytes left to pin") from error
        return host.copy_(tensor, non_blocking=True)

    def to_device(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy on the device."""
        return host.to(device, non_blocking=True, copy=True)


class Traced:
    """The one of a trace: both sides are fake, and the recorder remembers which is which."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self.recorder = recorder

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the device."""
        return not self.recorder.lies_elsewhere(tensor)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that the recorder counts elsewhere."""
        import torch

        self.recorder.transfer(tensor.nbytes)
        with self.recorder.elsewhere():
            return torch.empty_like(tensor)

    def to_device(self, host: torch.Tensor, device: Any) -> torch.Tensor:
        """A copy on the device."""
        import torch

        self.recorder.transfer(host.nbytes)
        return torch.empty_like(host)


_SMALLEST_BYTES = 1 << 16
"""Copying less takes no less time. Many small ones are much: Mamba's scan saves two tensors for each position."""
_CURRENT: list[Placement] = [Cuda()]


def current() -> Placement:
    """The placement that is in use."""
    return _CURRENT[-1]


@contextlib.contextmanager
def use(placement: Placement) -> Iterator[None]:
    """Use another placement for a while."""
    _CURRENT.append(placement)
    try:
        yield
    finally:
        _CURRENT.pop()


class KeptOnHost:
    """Tensors that autograd saves for a backward pass, kept on the host until they are needed.

    Attributes:
        moved_bytes: Bytes copied to the host so far.
    """

    def __init__(self) -> None:
        self.moved_bytes = 0

    def stays(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is left where it is: a small one costs more to move than it frees.

        A part of a large one holds the whole of it: Mamba's scan saves each position of its states for itself.
        """
        return tensor.untyped_storage().nbytes() < _SMALLEST_BYTES or not current().on_device(tensor)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Copy to the host, or keep; what comes back is what ``unpack`` gets."""
        if self.stays(tensor):
            return tensor
        self.moved_bytes += tensor.nbytes
        return (tensor.device, current().to_host(tensor))

    def unpack(self, packed: Any) -> torch.Tensor:
        """Bring back what ``pack`` moved."""
        if isinstance(packed, tuple):
            device, host = packed
            return current().to_device(host, device)
        kept: torch.Tensor = packed
        return kept

    def waiting(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context in which tensors are saved so."""
        from torch.autograd.graph import saved_tensors_hooks

        return saved_tensors_hooks(self.pack, self.unpack)
