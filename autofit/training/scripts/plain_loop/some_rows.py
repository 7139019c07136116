"""How a script's loss is made of the rows of its micro-batch: its loop is given batches of some of them.

Its models are not run for it: what they gave for the rows of its first batch is given again. A model that gives a loss
itself is run, where that takes some seconds. Random numbers that belong to a row are those of its first time.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import random
import time
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autofit.training.scripts.plain_loop import reasons
from autofit.training.scripts.plain_loop.losses import COMBINED, Judged, judged, unsteady

_LONGEST_SECONDS = 10.0
"""What running its models again may take, and what all else that it does may."""
_DRAWN = {
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial",
    "poisson", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_",
}  # fmt: skip
_MAKES = {"add", "sub", "mul", "lerp"}
"""What makes an average of the weights that is put in the place of the last."""
_DROPS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
_ATTENDS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_ROUNDED, _HALF_ROUNDED = 1e-5, 1e-2
"""By how much of itself a loss in 32 bits, and one of numbers in 16 bits, may differ where it is the same."""


class _NotRows(Exception):  # noqa: N818 - it is no error: nothing can be told
    """What is no row, nor all rows, of a micro-batch."""


@dataclass(slots=True)
class SomeRows:
    """A loop that is given some rows of its first batch, then others.

    Attributes:
        asking: Whether it is given these now.
    """

    asking: bool = False
    without_gradients: bool = False
    """Whether its first batch runs a model without gradients."""
    buffer: str = ""
    """What a model changes beside its weights where it runs the first batch; empty where it changes nothing."""
    _models: list[Any] = field(default_factory=list)
    _outputs: list[list[Any]] = field(default_factory=list)
    """What each model has given for the first batch."""
    _notes: bool = False
    _differentiates: bool = False
    """Whether the first batch takes gradients beside its backward pass: of what is given again there are none."""
    _began: float = 0.0
    _seconds: float = 0.0
    """What the first batch took, up to its loss."""
    _losses: list[float] = field(default_factory=list)
    _rounded: float = _ROUNDED
    _drawn: list[Any] = field(default_factory=list)
    """Random numbers for all the rows."""
    _written: list[dict[int, Any]] = field(default_factory=list)
    """Shapes of what was changed in place with each of its batches, by where it lies.

    Of what was made of a weight it is that of the weight, below zero.
    """
    _buffers: list[dict[str, float]] = field(default_factory=list)
    """Sums of what its models keep beside their weights, when the first batch came."""

    def watch(self, model: Any) -> None:
        """Note what a model gives."""
        import torch
        from torch.utils._pytree import tree_map

        if not self._models:
            self._watch_gradients()
        given: list[Any] = []
        self._models.append(model)
        self._outputs.append(given)

        def called(_model: Any, _given: Any, output: Any) -> None:
            if self._notes:
                given.append(tree_map(_alone, output))
                self.without_gradients |= not torch.is_grad_enabled()

        model.register_forward_hook(called)

    def _watch_gradients(self) -> None:
        """Note whether the first batch takes some beside its backward pass."""
        import torch

        gradients = torch.autograd.grad

        @functools.wraps(gradients)
        def differentiated(*args: Any, **kwargs: Any) -> Any:
            self._differentiates |= self._notes
            return gradients(*args, **kwargs)

        torch.autograd.grad = differentiated

    def begins(self) -> None:
        """A batch comes, which may be the first that is trained on."""
        for given in self._outputs:
            given.clear()
        self._buffers = [*map(_buffers_of, self._models)]
        self._notes, self._began, self.without_gradients = True, time.monotonic(), False

    def ends(self) -> None:
        """The loss of the first batch is there."""
        self._notes, self._seconds = False, time.monotonic() - self._began
        for then, model in zip(self._buffers, self._models, strict=False):
            now = _buffers_of(model)
            changed = (name for name, one in then.items() if name in now and not math.isclose(now[name], one))
            self.buffer = self.buffer or next(changed, "")

    def note(self, loss: Any, *, autocast: bool) -> None:
        """The loss of some rows is there."""
        halved = autocast or loss.element_size() < 4
        self._rounded = _HALF_ROUNDED if halved else self._rounded
        self._losses.append(float(loss.detach()))

    def batches(self, batch: Any, rows: int) -> Iterator[Any]:
        """Batches of some rows of the first one, for each of which a loss is awaited."""
        import torch

        chosen, began = _pairs(rows), time.monotonic()
        with contextlib.suppress(_NotRows):
            runs = self._runs(rows, sum(2 * len(one) for one in COMBINED))
            states = random.getstate(), numpy_state(), torch.get_rng_state()
            for number, combined in enumerate(COMBINED):
                places = [place for one in combined for place in chosen[one]]
                some = rows_at(batch, rows, places)
                random.setstate(states[0])
                set_numpy_state(states[1])
                torch.set_rng_state(states[2])
                self._written.append({})
                weights = {one.data_ptr() for one in self._weights()}
                drawing = _drawing(self._drawn, combined, self._written[-1], weights)
                with self._replaying(rows, None if runs else places), drawing:
                    yield some
                if len(self._losses) != number + 1 or time.monotonic() - began > _LONGEST_SECONDS:
                    return

    def found(self) -> Judged | None:
        """What the losses tell; ``None`` where they don't."""
        return judged(self._losses, self._rounded) if len(self._losses) == len(COMBINED) else None

    def own_split(self) -> str | None:
        """What it does with each batch that belongs to an optimizer step, in words."""
        if self._every().intersection(one.data_ptr() for one in self._weights()):
            return reasons.WRITES
        if self._averages():
            return reasons.KEEPS_AVERAGES
        return self.unsteady()

    def unsteady(self) -> str | None:
        """That the loss of the same rows is another one each time, in words."""
        changed = len(self._losses) == len(COMBINED) and unsteady(self._losses, self._rounded)
        return reasons.UNSTEADY if changed else None

    def _averages(self) -> bool:
        """Whether it has changed as many numbers with each batch as its models' weights are, not these.

        Numbers that are made of weights without gradients, and no weights, count as changed: they may be kept.
        """
        weights = self._weights()
        own, shapes = {one.data_ptr() for one in weights}, {one.shape for one in weights}
        if not (every := self._every() - own):
            return False
        alike = [shape for place, shape in self._written[-1].items() if place in every and shape in shapes]
        return bool(2 * sum(map(math.prod, alike)) >= sum(one.numel() for one in weights))

    def _weights(self) -> list[Any]:
        """What its models train."""
        return [one for model in self._models for one in model.parameters() if one.requires_grad]

    def _every(self) -> set[int]:
        """Where what it has changed in place with each batch lies."""
        return set.intersection(*map(set, self._written)) if len(self._written) == len(COMBINED) else set()

    def _runs(self, rows: int, asked: int) -> bool:
        """Whether models are run again: what they give is more than rows, or differentiated, and it takes some seconds.

        Raises:
            _NotRows: It takes longer, and nothing else is told.
        """
        import torch
        from torch.utils._pytree import tree_leaves

        given = [one for one in tree_leaves(self._outputs) if isinstance(one, torch.Tensor)]
        single = any(not one.ndim and one.requires_grad for one in given)
        unlike = any(one.ndim and len(one) != rows for one in given)
        if (single or unlike or self._differentiates) and self._seconds / rows * asked < _LONGEST_SECONDS:
            return True
        if unlike or self._differentiates:
            raise _NotRows
        return False

    @contextlib.contextmanager
    def _replaying(self, rows: int, places: list[int] | None) -> Iterator[None]:
        """Models give again what they gave for the rows at these places; ``None`` runs them."""
        if places is None:
            yield
            return
        own = [vars(model).get("forward") for model in self._models]
        for model, given in zip(self._models, self._outputs, strict=True):
            calls = iter([_given_for(one, rows, places) for one in given])
            model.forward = lambda *_, calls=calls, **__: next(calls)
        try:
            yield
        finally:
            for model, forward in zip(self._models, own, strict=True):
                del model.forward
                if forward is not None:
                    model.forward = forward


def _pairs(rows: int) -> list[tuple[int, int]]:
    """Three times two rows, as unlike as may be: a loss may have no value, or always the same one, of a single row."""
    apart = [(place, place + 1) for place in range(0, rows - 1, 2)]
    others = itertools.combinations(range(rows), 2)
    doubled = ((place, place) for place in range(rows))
    found = [*dict.fromkeys([*apart[:3], *itertools.islice(others, 6), *doubled])][:3]
    return [found[place % len(found)] for place in range(3)]


def rows_at(value: Any, rows: int, places: Sequence[int]) -> Any:
    """Rows of a batch.

    Raises:
        _NotRows: It has a part that is not one of each row: it may have been counted.
    """
    import numpy as np
    import torch

    if value is None or isinstance(value, str | bytes | bool):
        return value
    if isinstance(value, int) and value == rows:  # it tells how many there are
        return len(places)
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.ndim and len(value) == rows:
            return value[list(places)]
        raise _NotRows
    if isinstance(value, MutableMapping):
        made: Any = copy.copy(value)
        made.update({name: rows_at(one, rows, places) for name, one in value.items()})
        return made
    if not isinstance(value, list | tuple):
        return _object_of(value, rows, places)
    if len(value) == rows and not any(isinstance(one, torch.Tensor | np.ndarray) and len(one) == rows for one in value):
        found = [value[place] for place in places]
    else:
        found = [rows_at(one, rows, places) for one in value]
    return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)


def _object_of(value: Any, rows: int, places: Sequence[int]) -> Any:
    """Rows of a batch of a class of the script's, which holds them as its attributes."""
    named = (*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ()))
    parts = {name: getattr(value, name) for name in named if not name.startswith("__") and hasattr(value, name)}
    if not parts or callable(value):
        raise _NotRows
    made = copy.copy(value)
    for name, one in parts.items():
        object.__setattr__(made, name, rows_at(one, rows, places))  # it may be frozen
    return made


def _alone(one: Any) -> Any:
    """What a model has given, without what it was computed from."""
    import torch

    return one.detach().requires_grad_(one.requires_grad) if isinstance(one, torch.Tensor) else one


def _given_for(output: Any, rows: int, places: Sequence[int]) -> Any:
    """What a model has given for some of its rows."""
    import torch
    from torch.utils._pytree import tree_map

    def part(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        some = one.detach()[list(places)] if one.ndim and len(one) == rows else one.detach().clone()
        return some.requires_grad_(one.requires_grad)

    return tree_map(part, output)


def numpy_state() -> Any:
    """The state of NumPy's own random numbers."""
    import numpy as np

    return np.random.get_state()  # noqa: NPY002 - a script's own numbers may be those


def set_numpy_state(state: Any) -> None:
    """Put one of :func:`numpy_state` back."""
    import numpy as np

    np.random.set_state(state)  # noqa: NPY002


def _buffers_of(model: Any) -> dict[str, float]:
    """Sums of what a model keeps beside its weights, by their names."""
    import torch

    every = ((name, one) for name, one in model.named_buffers() if one.dtype.is_floating_point and not one.is_meta)
    return {name: float(one.sum(dtype=torch.float64)) for name, one in every}


def _drawing(
    drawn: list[Any], combined: Sequence[int], written: dict[int, Any], weights: set[int]
) -> contextlib.AbstractContextManager[Any]:
    """Random numbers of some rows are those that were drawn for all of them; nothing is dropped.

    Args:
        drawn: What was drawn for all rows; filled where it is empty.
        combined: Which thirds of these are in the batch.
        written: Filled with the shapes of what is changed in place, by where it lies.
        weights: Where what is trained lies.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    first, again = not drawn, iter([*drawn])

    class Draws(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name, kwargs = getattr(func, "__name__", ""), kwargs or {}
            if name in _DROPS:
                return args[0] if args else kwargs["input"]
            if name == "scaled_dot_product_attention":
                args, kwargs = (), {**dict(zip(_ATTENDS, args, strict=False)), **kwargs, "dropout_p": 0.0}
            found = func(*args, **kwargs)
            if name.endswith("_") and not name.endswith(("__", "requires_grad_")) and args:
                into = args[0] if isinstance(args[0], list | tuple) else [args[0]]
                written.update({one.data_ptr(): one.shape for one in into if isinstance(one, torch.Tensor)})
            if name in _MAKES and not getattr(found, "requires_grad", True):
                of = [one for one in args if isinstance(one, torch.Tensor) and one.shape == found.shape]
                written.update({-one.data_ptr(): one.shape for one in of if one.data_ptr() in weights})
            if name not in _DRAWN or not isinstance(found, torch.Tensor):
                return found
            if first:
                drawn.append(found.detach().clone())
                return found
            return _put(found, _thirds(next(again, None), combined))

    return Draws()


def _thirds(drawn: Any, combined: Sequence[int]) -> Any:
    """What was drawn for some thirds of all rows."""
    if drawn is None or not drawn.ndim or len(drawn) % 3:
        return drawn
    return drawn.unflatten(0, (3, -1))[list(combined)].flatten(0, 1)


def _put(found: Any, wanted: Any) -> Any:
    """Random numbers with others in their place, where they are as many."""
    import torch

    if wanted is not None and wanted.shape == found.shape:
        with torch.no_grad():
            found.copy_(wanted)
    return found
