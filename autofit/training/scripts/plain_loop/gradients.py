"""What a script does to its gradients and learning rates with each batch: a mark in their place tells."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_MARK = 1e4
"""A gradient that is clipped where any is."""


def groups_of(accelerator: Any) -> list[dict[str, Any]]:
    """What the optimizers of an Accelerator train."""
    optimizers = [] if accelerator is None else accelerator._optimizers  # noqa: SLF001 - there is no other
    return [group for one in optimizers for group in one.param_groups]


@dataclass(slots=True)
class Marked:
    """A small parameter that has a gradient since a batch came: what clears gradients clears that, too.

    Attributes:
        scheduled: Whether a schedule has stepped since then.
    """

    scheduled: bool = False
    _parameter: Any = None
    _rates: list[float] = field(default_factory=list)

    def put(self, groups: list[dict[str, Any]]) -> None:
        """A batch has come."""
        import torch

        trained = [one for group in groups for one in group["params"]]
        self._parameter = min((one for one in trained if one.requires_grad), key=lambda one: one.numel(), default=None)
        if self._parameter is not None:
            self._parameter.grad = torch.full_like(self._parameter, _MARK)
        self._rates, self.scheduled = _rates_of(groups), False

    def take(self) -> None:
        """Gradients are to be computed."""
        if self._parameter is not None:
            self._parameter.grad = None

    def cleared(self) -> bool:
        """Whether gradients were cleared since then."""
        one = self._parameter
        return one is not None and (one.grad is None or not one.grad.any())

    def changed(self) -> bool:
        """Whether they were changed."""
        return self._parameter is not None and not (self._parameter.grad == _MARK).all()

    def rated(self, groups: list[dict[str, Any]]) -> bool:
        """Whether learning rates were."""
        return self.scheduled or self._rates != _rates_of(groups)


def _rates_of(groups: list[dict[str, Any]]) -> list[float]:
    return [float(group["lr"]) for group in groups]
