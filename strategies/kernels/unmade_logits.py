"""Logits of an evaluation that are made when somebody asks for their values, and else not at all.

A Trainer drops the logits of an evaluation unless there is a metric to compute, but the model that makes them can't
know: with a vocabulary of 128,000 tokens those of one long row are more than all of its training holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_PAST_OPERATORS = ("numpy", "tolist", "__array__", "__repr__")
"""Methods of a tensor that read its values themselves."""


def unmade_logits(head: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor, hidden: torch.Tensor) -> Any:
    """What stands for ``head(hidden)`` in float32, as Accelerate hands logits on, until its values are asked for.

    Args:
        head: The output layer's forward pass; it is called with the autocast of now, and without gradients.
        weight: The layer's, of ``(vocabulary, width)``; who asks once it has changed gets an error.
        hidden: Of ``(rows, positions, width)``; held as long as the result is.
    """
    return _type()(head, weight, hidden)


@functools.cache
def _type() -> Any:
    """The class of such tensors; made when torch is there."""
    import torch
    from torch.utils._pytree import tree_map_only

    class UnmadeLogits(torch.Tensor):
        """A tensor without values, until an operator is given it."""

        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        @staticmethod
        def __new__(cls: Any, _head: Any, weight: torch.Tensor, hidden: torch.Tensor) -> Any:
            shape = (*hidden.shape[:-1], weight.shape[0])
            return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=hidden.device)

        def __init__(self, head: Any, weight: torch.Tensor, hidden: torch.Tensor) -> None:
            device = hidden.device.type
            self.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
            self.head, self.weight, self.version = head, weight, weight._version
            self.hidden: torch.Tensor | None = hidden
            self.logits: torch.Tensor | None = None

        def made(self) -> torch.Tensor:
            """The logits; made once."""
            if self.logits is None:
                if self.weight._version != self.version:
                    raise RuntimeError("kernels=chunked_ce: logits were asked for after the weights had changed")
                device, dtype, on = self.autocast
                with torch.no_grad(), torch.autocast(device, dtype, enabled=on):
                    self.logits = self.head(self.hidden).float()
                self.hidden = None
            return self.logits

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            args, kwargs = tree_map_only(cls, cls.made, (args, kwargs or {}))
            return func(*args, **kwargs)

        data = property(made)

    for name in _PAST_OPERATORS:
        setattr(UnmadeLogits, name, functools.partialmethod(_of_made, name))
    return UnmadeLogits


def _of_made(unmade: Any, name: str, *given: Any, **options: Any) -> Any:
    return getattr(unmade.made(), name)(*given, **options)
