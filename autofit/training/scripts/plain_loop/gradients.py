"""What a script does to its gradients and learning rates with each batch: a mark in their place tells."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_MARK = 1e4
"""A gradient that is clipped where any is."""


def groups_of(accelerator: Any) -> list[dict[str, Any]]:
    """What the optimizers of an Accelerator train."""
    optimizers = [] if accelerator is None else accelerator._optimizers  # noqa: SLF001 - there is no other
    return [group for one in optimizers for group in one.param_groups]


def hooked(groups: list[dict[str, Any]]) -> bool:
    """Whether a hook of the script's is given the gradients of each backward pass."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(one, kind, None) for group in groups for one in group["params"] for kind in kinds)


@dataclass(slots=True)
class Marked:
    """Small parameters that have a gradient since a batch came: what clears gradients clears that, too.

    They are the smallest bias, the smallest matrix and so on: a script may change the gradients of some kinds alone.

    Attributes:
        scheduled: Whether a schedule has stepped since then.
    """

    scheduled: bool = False
    _parameters: list[Any] = field(default_factory=list)
    _rates: list[float] = field(default_factory=list)

    def put(self, groups: list[dict[str, Any]]) -> None:
        """A batch has come."""
        import torch

        trained = (one for group in groups for one in group["params"] if one.requires_grad)
        smallest: dict[int, Any] = {}
        for one in sorted(trained, key=lambda one: one.numel()):
            smallest.setdefault(one.ndim, one)
        self._parameters = [*smallest.values()]
        for one in self._parameters:
            one.grad = torch.full_like(one, _MARK)
        self._rates, self.scheduled = _rates_of(groups), False

    def take(self) -> None:
        """Gradients are to be computed."""
        for one in self._parameters:
            one.grad = None

    def cleared(self) -> bool:
        """Whether gradients were cleared since then."""
        return any(one.grad is None or not one.grad.any() for one in self._parameters)

    def changed(self) -> bool:
        """Whether they were changed."""
        return not all((one.grad == _MARK).all() for one in self._parameters)

    def rated(self, groups: list[dict[str, Any]]) -> bool:
        """Whether learning rates were."""
        return self.scheduled or self._rates != _rates_of(groups)


def _rates_of(groups: list[dict[str, Any]]) -> list[float]:
    return [float(group["lr"]) for group in groups]


def note_steps(owner: Any, told: Callable[[], None]) -> None:
    """Have it told where something of a class steps."""
    step = owner.step

    @functools.wraps(step)
    def stepped(*args: Any, **kwargs: Any) -> None:
        told()
        step(*args, **kwargs)

    owner.step = stepped
