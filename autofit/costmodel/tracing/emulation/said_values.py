"""Values that tensors without any are said to have: those of plain numbers, and yes or no where a model asks."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from autofit.costmodel.tracing.emulation.fake_mode import of_operator

_NUMBER = "known_number"
"""Attribute of a fake tensor whose value is known."""
_OF_MANY = {torch.ops.aten.all.default: True, torch.ops.aten.any.default: False}
"""What is said of values that are not known: all are finite and none is padding, as of the rows that are traced."""
_COMPARES = frozenset({torch.ops.aten.eq.Tensor, torch.ops.aten.ne.Scalar})


@of_operator
def _makes_number(func: Any) -> bool:
    """Whether an operator makes one number of two, says whether something holds of many, or if a number is one."""
    ops = torch.ops.aten
    of_two = {ops.add.Tensor, ops.sub.Tensor, ops.mul.Tensor, ops.div.Tensor, ops.div.Tensor_mode}
    return func in {*of_two, *_OF_MANY, *_COMPARES}


def _is_finite(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is asked if a number is itself, or no infinity: the two halves of ``torch.isfinite``."""
    return args[0] is args[1] if func is torch.ops.aten.eq.Tensor else args[1] == math.inf


def follow_number(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Keep the value of what a model computes of plain numbers alone, such as ``torch.div(length, window)``.

    Whether something holds of many values is said without them, and so is whether a number is finite.
    """
    if not _makes_number(func) or result.dim():
        return
    if func in _OF_MANY:
        vars(result)[_NUMBER] = _OF_MANY[func]
        return
    if func in _COMPARES:
        if _is_finite(func, args):
            vars(result)[_NUMBER] = True
        return
    values = [vars(one).get(_NUMBER) if isinstance(one, torch.Tensor) else one for one in args]
    if None not in values:
        with torch._C._DisableTorchDispatch():
            vars(result)[_NUMBER] = func(*map(torch.tensor, values), **kwargs).item()


def said_value(tensor: torch.Tensor) -> Any:
    """The value that a fake tensor is said to have: its own, where that is known."""
    usual = False if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 1
    return vars(tensor).get(_NUMBER, usual)


def question(tensor: torch.Tensor) -> set[str]:
    """Which question of a model's is answered, as a note, where no row might be what it looks for."""
    if vars(tensor).get(_NUMBER) is not False:
        return set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(("torch.", "autofit.")):
        frame = frame.f_back
    if frame is None:
        return set()
    where = f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
    return {f"{where}, asks whether any of a batch's values is special: a trace has none and says no"}
