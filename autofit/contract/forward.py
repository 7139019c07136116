"""A model's forward pass inside another function, in the model's copies too."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any


def run_forward_in(model: Any, around: Callable[..., Any]) -> None:
    """Have each forward pass of a model run inside a function.

    A copy of the model, an average of its weights or Accelerate's with compiled layers, runs its own layers in it.

    Args:
        model: The model; it is changed.
        around: Called with the model whose pass it is, with its forward pass, which takes that model first, and with
            the arguments of the pass.
    """
    own = model.forward
    function = getattr(own, "__func__", None)
    run = function or (lambda _, *args, **kwargs: own(*args, **kwargs))

    @functools.wraps(function or own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, run, *args, **kwargs)

    by_itself = functools.update_wrapper(functools.partial(forward, model), own)
    model.forward = types.MethodType(forward, model) if function else by_itself
