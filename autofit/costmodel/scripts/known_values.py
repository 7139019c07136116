"""Values of small tensors, kept beside fake tensors: what a script's loss asks of its batch is answered.

A trainer's own loss looks at what a batch holds: how many tokens are no padding, where an answer begins. A fake tensor
has no values, so those of the batch are kept here, and what is computed from them alone is computed once more for real.
Of what is not known, a fraction that is asked for is 1, such as a loss that is logged; a condition does not hold, such
as that a layer is dropped now and then, but one of all values does, such as that they are finite; where a whole number
is asked for, which may be a size, the run fails. Of a batch whose rows differ conditions alone are known: how many
there are of something is another number for as many others. One number that is drawn for each row, such as a timestep,
is drawn for real, so that a schedule can be searched for it: the place where it is found is answered, all else that is
asked of it as of what is not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary
from transformers import masking_utils

from autofit.costmodel.tracing.emulation.said_values import question, said_value
from autofit.system.errors import ModelError

if TYPE_CHECKING:
    from autofit.costmodel.tracing.recorder import Recorder

LARGEST = 1 << 22
"""Numbers of a tensor whose values are kept."""
_ASKED = torch.ops.aten._local_scalar_dense.default
_BY_PLACES = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}
_NEW = {
    torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step,
    torch.ops.aten.full.default, torch.ops.aten.ones.default, torch.ops.aten.zeros.default,
    torch.ops.aten.scalar_tensor.default,
}  # fmt: skip
_IS_NUMBER = {torch.ops.aten.eq.Scalar: False, torch.ops.aten.ne.Scalar: True}
"""What is said where it is asked which fractions of a batch are a number: none, as of images without one of zeros."""
_FINDS = {torch.ops.aten.nonzero.default, torch.ops.aten.argmax.default, torch.ops.aten.argmin.default}
"""What makes places of what is looked for."""
_LOOKED_AT = {_ASKED, *_BY_PLACES, *_IS_NUMBER}
_UNKNOWN = {
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows the values of some fake tensors while it is entered, as the last of the modes.

    Args:
        recorder: Is told where a condition is asked of what is not known.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._known: Any = WeakIdKeyDictionary()
        self._drawn: Any = WeakIdKeyDictionary()
        """Those of them that come of drawn numbers, and whether they are places of these."""
        self._mixed: Any = WeakIdKeyDictionary()
        """Those of them that come of rows that differ."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def tell(self, fake: torch.Tensor, real: torch.Tensor, *, mixed: bool = False) -> None:
        """Say what a fake tensor holds, and whether of rows that differ; large ones are not kept."""
        if real.numel() <= LARGEST:
            with _disable_current_modes():
                self._known[fake] = real.clone()  # which operators in place may change
            if mixed:
                self._mixed[fake] = True

    def answers_transformers(self) -> None:
        """Have transformers ask a mask whether it hides anything, which of fake tensors it takes for granted."""
        place: Any = masking_utils
        own = place.is_tracing

        def is_tracing(tensor: Any = None) -> bool:
            known = isinstance(tensor, FakeTensor) and tensor in self._known
            return bool(own(None if known else tensor))

        place.is_tracing = is_tracing  # the process ends with its trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator on fake tensors, and on known values once more."""
        kwargs = kwargs or {}
        looked_at = func in _LOOKED_AT or func._schema.is_mutable
        if not looked_at and any(type(one) is FakeTensor and one not in self._known for one in args):
            return func(*args, **kwargs)  # as of most operators; the rest takes longer than they
        return self._once_more(func, args, kwargs)

    def _once_more(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator whose values are known, or that asks for some or changes them."""
        given, tensors = (args, kwargs), [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        known = {id(one): self._value(one) for one in tensors}
        all_known = all(value is not None for value in known.values())
        if func is _ASKED:
            return self._asked(args[0], known[id(args[0])])
        if func in _IS_NUMBER and args[0].is_floating_point() and not args[0].requires_grad and not all_known:
            return self._said(func(*args), _IS_NUMBER[func])
        sized = torch.Tag.dynamic_output_shape not in func.tags and torch.Tag.data_dependent_output not in func.tags
        if func in _BY_PLACES:
            args = (args[0], [*self._places(args[1])], *args[2:])
        if not sized:
            all_known &= not any(one in self._mixed for one in tensors)
        repeats = all_known and (_draws_rows(args) if _random(func) else _repeats(func, tensors))
        result = func(*args, **kwargs) if sized or not repeats else None
        if repeats and not any(isinstance(one, FakeTensor) and one.numel() > LARGEST for one in tree_leaves(result)):
            real = _really(func, *tree_map_only(torch.Tensor, lambda one: known[id(one)], given))
            if real is not NotImplemented:
                result = result if sized else tree_map_only(torch.Tensor, _fake_like, real)  # sizes depend on values
                self._keep(func, tensors, zip(tree_leaves(result), tree_leaves(real), strict=True))
                return result
        if func._schema.is_mutable:
            self._forget(func, args)
        return func(*args, **kwargs) if repeats and not sized else result

    def _keep(self, func: Any, given: list[torch.Tensor], made: Iterable[tuple[Any, torch.Tensor]]) -> None:
        """Know from now on what an operator has made of tensors, and what that comes of."""
        mixed = any(one in self._mixed for one in given)
        drawn = [self._drawn[one] for one in given if one in self._drawn] or [False] * _random(func)
        for fake, value in made:
            if isinstance(fake, FakeTensor) and value.numel() <= LARGEST:
                self._known[fake] = value
                if mixed:
                    self._mixed[fake] = True
                if drawn:
                    self._drawn[fake] = any(drawn) or func in _FINDS

    def _said(self, fake: torch.Tensor, value: bool) -> torch.Tensor:
        """The tensor, of which every value is said to be this one."""
        with _disable_current_modes():
            self._known[fake] = torch.tensor(value).expand(fake.shape)
        return fake

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.numel() <= LARGEST:
            return tensor  # made from Python's numbers
        found: torch.Tensor | None = self._known.get(tensor)
        return found

    def _forget(self, func: Any, args: tuple[Any, ...]) -> None:
        """Something unknown, or drawn, is written into a tensor: what shares its storage is unknown from now on."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = {storage_of(one) for one in tree_leaves(value) if isinstance(one, torch.Tensor)}
            for one in [one for one in self._known if storage_of(one) in written]:
                del self._known[one]

    def _asked(self, tensor: torch.Tensor, known: torch.Tensor | None) -> Any:
        place = self._drawn.get(tensor)  # None where nothing was drawn
        answers = tensor.dtype == torch.bool or tensor not in self._mixed
        if known is not None and answers and (place is None or (place and _whole(tensor))):
            with _disable_current_modes():
                return known.item()
        self._recorder.guessed |= tensor.dtype == torch.bool
        self._recorder.notes |= question(tensor)
        if not _whole(tensor):
            return said_value(tensor)
        raise ModelError("the script's loss asks for a number that only a run on real weights tells")

    def _places(self, indices: Any) -> Any:
        """Masks whose values are known, as the places where they are true."""
        for one in indices:
            guess = one is None or one.dtype != torch.bool or one in self._drawn or one in self._mixed
            if not guess and self._value(one) is not None:
                yield from self._nonzero(one).unbind(1)
            else:
                yield one

    def _nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        with self:
            return torch.nonzero(mask)


def _really(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator makes of values; ``NotImplemented`` where the CPU has none for them, such as of float16."""
    with _disable_current_modes(), torch.no_grad():
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            return NotImplemented


def _draws_rows(args: tuple[Any, ...]) -> bool:
    """Whether a random operator with these arguments makes a row of numbers out of nothing."""
    made = not any(isinstance(one, torch.Tensor) for one in args)
    return made and any(isinstance(one, list) and len(one) == 1 for one in args)


def _repeats(func: Any, tensors: list[torch.Tensor]) -> bool:
    return bool(tensors or func in _NEW) and func not in _UNKNOWN


def _whole(tensor: torch.Tensor) -> bool:
    return tensor.dtype != torch.bool and not tensor.dtype.is_floating_point


def _fake_like(real: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)


def storage_of(tensor: torch.Tensor) -> int:
    """What tells storages apart, of fake tensors too."""
    return int(tensor.untyped_storage()._cdata)


def _random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags
