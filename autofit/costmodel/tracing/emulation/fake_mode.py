"""Fake tensors in less time: what an operator makes of given shapes is worked out once.

A trace calls the same few hundred operators some thousand times. PyTorch's own mode remembers what they make too, but
its look-up was more than half of a trace. What is remembered here depends on shapes, strides and storages alone;
whatever can't be told by these (values, operators that write, tensors of other layouts) goes to PyTorch's mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

_PLAIN = frozenset({
    int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout,
})  # fmt: skip
_BY_SHAPE = frozenset({"aten", "bitsandbytes", "fsdp"})
"""Libraries whose operators make the same of the same shapes, unless they say that they write."""
_wrapper: Callable[..., FakeTensor] = torch.Tensor._make_wrapper_subclass
_UNTOLD = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


def signature(func: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
    """All that an operator's result depends on but values; ``None`` where more may matter."""
    key: list[Any] = [id(func), torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    told = _tell(key, args)
    if told and kwargs:
        key.extend(kwargs)
        told = _tell(key, kwargs.values())
    return tuple(key) if told else None


def _tell(key: list[Any], values: Iterable[Any]) -> bool:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            dtype = value.dtype
            if value.layout is not torch.strided or dtype.is_complex or value.constant is not None:
                return False
            size = value.untyped_storage().nbytes()
            key.extend((dtype, value.shape, value.stride(), value.storage_offset(), size, value.requires_grad))
            key.append(value.fake_device)
        elif kind in _PLAIN:
            key.extend((kind, value))
        elif kind is list or kind is tuple:
            key.extend((kind, len(value)))
            if not _tell(key, value):
                return False
        else:
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that an operator makes: its sizes, and the place among the tensors given of the one that it views."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    views: int | None


@dataclass(frozen=True, slots=True)
class _Given:
    """A result that is one of the tensors given, by its place among them."""

    place: int


_Known = tuple[type | None, tuple[Any, ...]]
"""What holds the results, ``None`` where there is one alone; and they."""


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """PyTorch's mode of fake tensors, which looks first whether an operator was called with such tensors before.

    What is known holds for every trace of a process. Its tensors are *native*: they lie in storages of their device,
    without memory. PyTorch's own lie on ``meta``, and who asks one for its device asks every dispatch mode: two of
    three calls of a trace.
    """

    _known: ClassVar[dict[Hashable | None, _Known]] = {}

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # its keys take as long as what they save: most is known here
        self._patterns: dict[torch.device, FakeTensor] = {}
        unsafe = self._allow_unsafe_data_ptr_access
        guards = torch._C._set_warn_deprecated_on_mutable_data_ptr, torch._C._set_throw_on_mutable_data_ptr
        self._guard: Callable[[torch.Tensor], None] = guards[0 if unsafe else 1]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: the wrapper that keeps a compiler out takes time on every operator."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        key = signature(func, args, kwargs) if _may_be_known(func) else None
        known = None if key is None else self._known.get(key)
        if known is not None:
            return self._made_again(known, args, kwargs)
        stands = _Stands(self)
        # what a tensor itself is told, PyTorch's mode has to tell that one
        told = isinstance(func, torch._ops.OpOverload) and torch.Tag.inplace_view in func.tags
        given = (args, kwargs) if told else tree_map_only(FakeTensor, stands.stand_in, (args, kwargs))
        result = super().__torch_dispatch__(func, types, *given)
        described = None if key is None else _described(result, _tensors(*given))
        if described is not None:
            self._known[key] = described
            return self._made_again(described, args, kwargs)
        return tree_map_only(FakeTensor, stands.meant, result)

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Hashable | None]:
        """What an operator makes, for the mode right above this one; and its key, where it was known.

        What is known is not asked for by way of PyTorch's dispatcher.
        """
        key = signature(func, args, kwargs) if _may_be_known(func) else None
        known = self._known.get(key)
        return (func(*args, **kwargs), None) if known is None else (self._made_again(known, args, kwargs), key)

    def _made_again(self, known: _Known, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        kind, outputs = known
        given = _tensors(args, kwargs) if any(map(_is_of_given, outputs)) else []
        made = [self._make(one, given) if type(one) in {_Made, _Given} else one for one in outputs]
        return made[0] if kind is None else kind(made)

    def _make(self, one: _Made | _Given, given: list[FakeTensor]) -> FakeTensor:
        """A fake tensor with the attributes of one that PyTorch made, whose constructor was a fifth of a trace."""
        if type(one) is _Given:
            return given[one.place]
        assert isinstance(one, _Made)
        if one.views is not None:
            return self.view(given[one.views].untyped_storage(), one)
        with torch._C._DisableTorchDispatch():
            made = _wrapper(FakeTensor, one.shape, one.stride, 0, None, one.dtype, torch.strided, one.device)
        return self._fake(made, one.device)

    def view(self, storage: torch.UntypedStorage, one: _Made) -> FakeTensor:
        """A fake tensor that lies in a storage."""
        with torch._C._DisableTorchDispatch():
            if storage.device.type == "meta":
                bare = torch.empty(0, dtype=one.dtype, device="meta")
                bare.set_(storage, one.offset, one.shape, one.stride)
                made: FakeTensor = torch.Tensor._make_subclass(
                    FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=one.device
                )
            else:
                made = _wrapper(FakeTensor, (0,), (1,), 0, None, one.dtype, torch.strided, one.device)
                made.set_(storage, one.offset, one.shape, one.stride)
        return self._fake(made, one.device)

    def _fake(self, made: FakeTensor, device: torch.device) -> FakeTensor:
        """Give a tensor the attributes of a fake one."""
        pattern = self._patterns.get(device)
        if pattern is None:
            with torch._C._DisableTorchDispatch():
                self._patterns[device] = pattern = FakeTensor(self, torch.empty(0, device="meta"), device)
        self._guard(made)
        vars(made).update(vars(pattern), native=True)
        return made


def resize_native(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """``storage.resize_(size)``, which takes one without memory for a mistake; what grows lies on ``meta``."""
    with torch._C._DisableTorchDispatch():
        view = _wrapper(FakeTensor, (0,), (1,), 0, None, torch.uint8, torch.strided, storage.device)
        view.set_(storage, 0, (0,), (1,))
        torch.ops.inductor.resize_storage_bytes_(view, size)
    return storage


class _Stands:
    """PyTorch's own fake tensors in the place of native ones, for one call of an operator."""

    def __init__(self, mode: FakeMode) -> None:
        self.mode = mode
        self.storages: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self.tensors: list[tuple[FakeTensor, FakeTensor]] = []

    def stand_in(self, one: FakeTensor) -> FakeTensor:
        """What PyTorch's mode is given for a tensor; views of one storage stay views of one."""
        storage = one.untyped_storage()
        if storage.device.type == "meta" and not vars(one).get("native"):
            return one
        held = next((other for mine, other in self.storages if mine._cdata == storage._cdata), None)
        if held is None:
            held = torch.UntypedStorage(storage.nbytes(), device="meta")  # type: ignore[no-untyped-call]
            self.storages.append((storage, held))
        made = self.mode.view(held, _made(one, None))
        self.tensors.append((one, made))
        return made

    def meant(self, one: FakeTensor) -> FakeTensor:
        """What a tensor of PyTorch's mode is in the storage that it stands for."""
        for mine, other in self.tensors:
            if one is other:
                return mine
        for storage, held in self.storages:
            if one.untyped_storage()._cdata == held._cdata:
                return self.mode.view(storage, _made(one, None))
        return one


def called(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Hashable | None]:
    """The same as :meth:`FakeMode.run` where no such mode is."""
    return func(*args, **kwargs), None


def of_operator(function: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """:func:`functools.cache` for what is asked of operators, whose own hash is a call of Python."""
    known: dict[int, tuple[bool, Any]] = {}

    @functools.wraps(function)
    def asked(func: Any) -> bool:
        found = known.get(id(func))
        if found is None:
            found = known[id(func)] = function(func), func  # which is held, so that its id stays its own
        return found[0]

    return asked


@of_operator
def _may_be_known(func: Any) -> bool:
    """Whether shapes tell what an operator makes, and it makes it without writing to what is given."""
    return (
        isinstance(func, torch._ops.OpOverload)
        and func.namespace in _BY_SHAPE
        and not func._schema.is_mutable
        and not any(tag in func.tags for tag in _UNTOLD)
        and "lift" not in func._schema.name
        and "resize" not in func._schema.name
    )


def _is_of_given(one: Any) -> bool:
    return type(one) is _Given or (type(one) is _Made and one.views is not None)


def _tensors(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[FakeTensor]:
    found: list[FakeTensor] = []
    for value in (*args, *kwargs.values()):
        found += (one for one in (value if isinstance(value, (list, tuple)) else (value,)) if type(one) is FakeTensor)
    return found


def _made(value: FakeTensor, views: int | None) -> _Made:
    offset = int(value.storage_offset())
    return _Made(tuple(value.shape), value.stride(), offset, value.dtype, value.fake_device, views)


def _described(result: Any, given: list[FakeTensor]) -> _Known | None:
    """What was made, so that it can be made again; ``None`` where it can't."""
    kind = type(result) if isinstance(result, (list, tuple)) else None
    if kind not in {None, list, tuple}:
        return None
    outputs = [_one(value, given) for value in (result if kind is not None else (result,))]
    return None if any(one is NotImplemented for one in outputs) else (kind, tuple(outputs))


def _one(value: Any, given: list[FakeTensor]) -> Any:
    if type(value) is not FakeTensor:
        return value if type(value) in {int, float, bool, type(None)} else NotImplemented
    held = value.untyped_storage()
    owners = [place for place, one in enumerate(given) if one.untyped_storage()._cdata == held._cdata]
    plain = value.layout is torch.strided and not value.dtype.is_complex and not value.requires_grad
    if not plain or value.constant is not None:
        return NotImplemented
    same = [place for place, one in enumerate(given) if value is one]
    if same:
        return _Given(same[0]) if len(same) == 1 else NotImplemented
    made = _made(value, owners[0] if owners else None)
    if not owners:
        last = sum((size - 1) * step for size, step in zip(made.shape, made.stride, strict=True))
        spans = (last + 1 if value.numel() else 0) * value.itemsize
        if made.offset or held.nbytes() != spans:
            return NotImplemented
    return made
