"""Follows the storages of a run, real or fake: a dispatch mode that writes a tape.

It sees every operator after autograd and autocast, so that what they keep is seen too. A storage is a block from the
operator that made it until nobody holds it any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autofit.costmodel.seconds.operator_time import Operator
from autofit.costmodel.seconds.roofline import KINDS
from autofit.costmodel.tracing.emulation.fake_mode import FakeMode, called, signature
from autofit.costmodel.tracing.emulation.in_place import add, only_writes
from autofit.costmodel.tracing.emulation.said_values import follow_number, question, said_value
from autofit.costmodel.tracing.operator_table import calls_of, collective_of, is_convolutional
from autofit.costmodel.tracing.tape_writer import TapeWriter
from autofit.costmodel.tracing.timeline import CATEGORIES, ELSEWHERE, Category, Tape
from autofit.costmodel.tracing.work import by_rows, work_of

_WEIGHTS, _COPIES, _TEMPORARIES, _COMMUNICATION = map(
    CATEGORIES.index, ("weights", "copies", "temporaries", "communication")
)
_DEVICE = torch.ops.prim.device.default
"""Asked of a fake tensor that is not native by every call from Python."""
_VALUE = torch.ops.aten._local_scalar_dense.default
_TO_COPY = torch.ops.aten._to_copy.default
_ADD = torch.ops.aten.add_.Tensor
_META = torch.device("meta")
BY_BYTES = "layers with kernels of other packages are taken to be as fast as the bytes they move: less is known of them"
CONVOLVES = "less is known of convolutional networks: published trainings of ResNet-50 took 0.8 to 1.8 times as long"
StandIn = Callable[["Recorder", Any, tuple[Any, ...], dict[str, Any]], Any]


class Recorder(TapeWriter, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows storages while it is entered.

    Args:
        stand_ins: What is called instead of an operator, with this recorder, the operator and its arguments.
        fake: Whether tensors have no values; then one that is asked for is 1, unless plain numbers alone made it.
        mode: The mode of fake tensors right below this one.
        rows: Of :class:`TapeWriter`.
        groups: Whether the device multiplies experts in bfloat16 all at once.
    """

    def __init__(
        self,
        *,
        stand_ins: dict[Any, StandIn] | None = None,
        fake: bool = True,
        mode: FakeMode | None = None,
        rows: int | None = None,
        groups: bool = False,
    ) -> None:
        TapeWriter.__init__(self, rows)
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        self.fake = fake
        self.run = called if mode is None else mode.run
        self.groups = groups
        self.stand_ins = {torch.ops.aten.add.Tensor: add, **(stand_ins or {})}
        self._number_of: dict[Any, int] = {torch.cpu.current_stream(): 0}  # streams, which a trace has in name only
        self._counted: dict[Hashable, tuple[int, tuple[float, float, float, float], int, float]] = {}
        self._called: dict[int, str] = {}  # operators' names, which it takes long to put together
        self._block: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._closed = False
        self._elsewhere = 0
        self._paused = 0
        self._label = _TEMPORARIES
        self._share: float | None = None  # of its size, up to which what is made grows with the rows
        self._emptied: dict[int, tuple[str, int]] = {}  # storages of no bytes, which may get theirs back
        self.notes: set[str] = set()
        self.guessed = False  # whether a condition was asked of values that are not known

    # -- following ------------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: the wrapper that keeps a compiler out would be a tenth of a trace."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator and write down what it made."""
        if self.fake and (func is _DEVICE or func is _VALUE):
            return args[0].device if func is _DEVICE else self._say(args[0])
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented  # its own dispatch comes down to local tensors
        if self._closed or self._paused or kwargs.get("device") == _META:
            return func(*args, **kwargs)
        stand_in, key = self.stand_ins.get(func), None
        if stand_in is not None:
            result = stand_in(self, func, args, kwargs)
        elif self.fake and only_writes(func):
            result = kwargs.get("out", args[0]) if func._schema.returns else None
        else:
            result, key = self.run(func, args, kwargs)
        follow_number(func, args, kwargs, result)
        outputs = [result] if isinstance(result, torch.Tensor) else tree_leaves(result)
        made = stand_in is not None  # which may have written down what it made
        for tensor in outputs:
            if isinstance(tensor, torch.Tensor):
                made |= self.follow(tensor, func, args)
        if func.namespace in {"c10d", "_c10d_functional"}:
            self._send(collective_of(func, args, outputs, waits=self._label != _COMMUNICATION))
        elif made or func._schema.is_mutable:
            self._count(key, func, args, kwargs, result, outputs)
        return result

    def _say(self, tensor: torch.Tensor) -> Any:
        """The value that a model is told of a tensor without one."""
        self.guessed |= tensor.dtype == torch.bool
        self.notes |= question(tensor)
        return said_value(tensor)

    def follow(self, tensor: torch.Tensor, func: Any, args: tuple[Any, ...]) -> bool:
        """Write down a tensor that an operator made; returns whether it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._block or key in self._emptied:
            return False
        category = self._label
        if func is _TO_COPY and self._is_weight(args[0]):
            category = _COPIES
        name = self._called.get(id(func)) or self._called.setdefault(id(func), str(func))
        self._write(storage, key, name, category)
        return True

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """The block that a tensor lies in; ``None`` where it was not followed."""
        return self._block.get(tensor.untyped_storage()._cdata)

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        block = self.block_of(tensor)
        return block is not None and self.categories[block] == _WEIGHTS

    def _write(self, storage: torch.UntypedStorage, key: int, name: str, category: int) -> int:
        block = self._begin(key, storage.nbytes(), name, category)
        self._watched[key] = weakref.ref(storage, functools.partial(self._free, key))
        return block

    def _begin(self, key: int, size: int, name: str, category: int) -> int:
        block = self._block[key] = self._new_block(size, name, ELSEWHERE if self._elsewhere else category)
        return block

    def _new_block(self, size: int, name: str, category: int) -> int:
        operator = self.names.setdefault(name, len(self.names))
        stream = self._number_of.setdefault(torch.cpu.current_stream(), len(self._number_of))
        block = self.begin_block(size, operator, category, stream)
        if category == _COMMUNICATION:
            self.fixed.add(block)
        if self._share is not None:
            self.most[block] = size * self._share
        return block

    def _free(self, key: int, _: object) -> None:
        """A storage is gone."""
        del self._watched[key]
        if not self._closed and self._emptied.pop(key, None) is None:
            self.end_block(self._block.pop(key))

    def _count(self, key: Hashable | None, func: Any, args: Any, kwargs: Any, result: Any, outputs: list[Any]) -> None:  # noqa: PLR0917
        """Add an operator's work to its segment; what it is of such tensors is worked out once."""
        key = key or signature(func, (args, outputs), kwargs)
        counted = None if key is None else self._counted.get(key)
        if counted is None:
            kind, flops, moved = work_of(func, args, kwargs, result, outputs)
            one, each, calls = calls_of(func, args, kwargs, outputs, flops, groups=self.groups)
            if is_convolutional(func, args):
                self.notes.add(CONVOLVES)
            counted = KINDS.index(kind), by_rows(self.rows, flops, moved), self.operators.index_of(one, each), calls
            if key is not None:
                self._counted[key] = counted
        self.add_work(*counted[:2], counted[3])
        self.operators.call(len(self.segments) - 1, *counted[2:])

    def _send(self, one: Operator | None) -> None:
        """Add a collective; gathered weights don't grow with the rows, whatever divides them."""
        if one is None:
            return
        by_chance = self._label == _COMMUNICATION and self.rows and one.moved_bytes % self.rows == 0
        payload = one.moved_bytes - bool(by_chance)
        self._describe(dataclasses.replace(one, moved_bytes=payload), [payload])

    def _describe(self, one: Operator, moved: Sequence[float], calls: float = 1.0) -> None:
        self.operators.add(len(self.segments) - 1, one, moved, calls)

    # -- what the run tells ---------------------------------------------------------------------------------------

    def call(self, tensors: Iterable[torch.Tensor | None], category: Category) -> None:
        """Say what some tensors are."""
        index = CATEGORIES.index(category)
        for tensor in tensors:
            if tensor is None:
                continue
            storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
            block = self._block.get(storage._cdata)
            if block is None:
                block = self._write(storage, storage._cdata, category, index)
            if self.categories[block] != ELSEWHERE:
                self.categories[block] = index

    @contextlib.contextmanager
    def up_to(self, share: float) -> Iterator[None]:
        """What is made in here grows with the rows up to this share of its size."""
        before, self._share = self._share, share
        try:
            yield
        finally:
            self._share = before

    @contextlib.contextmanager
    def holding(self, *sizes: int, name: str, beside: int = 0, after: int | None = None) -> Iterator[None]:
        """Blocks of these bytes live while the context does: a kernel's own, ``beside`` of any rows.

        Those with an ``after`` are there from more than so many rows on, and do not grow.
        """
        blocks = [self._new_block(size + beside, name, _TEMPORARIES) for size in sizes]
        self.beside |= dict.fromkeys(blocks, beside)
        self.after |= {} if after is None else dict.fromkeys(blocks, after)
        try:
            yield
        finally:
            for block in blocks:
                self.end_block(block)

    def adds_to(self, tensor: torch.Tensor) -> None:
        """One of the same shape is added to a tensor, in place."""
        self._count(None, _ADD, (tensor, tensor), {}, tensor, [tensor])

    def launched(self, arguments: Iterable[Any]) -> None:
        """A kernel of Triton's reads or writes each of its tensors once: a rule where it has no law."""
        if self._closed or self._paused:
            return
        self.notes.add(BY_BYTES)
        tensors = {id(one): one for one in arguments if isinstance(one, torch.Tensor)}.values()
        moved = [one.nbytes for one in tensors]
        self.add_work(KINDS.index("other"), by_rows(self.rows, 0.0, moved))
        written = max((one.numel() for one in tensors), default=1)
        self._describe(Operator(kind="elementwise", moved_bytes=sum(moved), n=written), moved)

    def passes(self, *sizes: int) -> None:
        """A kernel writes these bytes and reads them again, in memory that it takes for itself."""
        if not self._closed:
            self.add_work(KINDS.index("other"), by_rows(self.rows, 0.0, [2 * size for size in sizes]))
            moved = [2.0 * size for size in sizes]
            self._describe(Operator(kind="dequantize", moved_bytes=sum(moved)), moved)

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What is made in here lies outside of the device's allocator: on the host, or in managed memory."""
        self._elsewhere += 1
        try:
            yield
        finally:
            self._elsewhere -= 1

    def transfer(self, moved_bytes: int) -> None:
        """Bytes go over the bus, to the host or back."""
        if not self._closed:
            self.add_work(KINDS.index("transfer"), by_rows(self.rows, 0.0, [moved_bytes]))
            self._describe(Operator(kind="transfer", moved_bytes=float(moved_bytes)), [moved_bytes])

    def busies_host(self, operators: float) -> None:
        """Python keeps the host for as long as it takes to issue so many operators."""
        if not self._closed:
            self.add_work(KINDS.index("other"), (0.0, 0.0, 0.0, 0.0), operators)
            self._describe(Operator(kind="nothing"), [], operators)

    def lies_elsewhere(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was made :meth:`elsewhere`."""
        block = self.block_of(tensor)
        return block is not None and self.categories[block] == ELSEWHERE

    @contextlib.contextmanager
    def communicating(self) -> Iterator[None]:
        """What is made in here are gathered parameters and buffers of collectives, of the same size for any rows."""
        before, self._label = self._label, _COMMUNICATION
        try:
            yield
        finally:
            self._label = before

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs in here is not written down: it has no tensors of its own in a real run."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage that is followed has another size: its block ends, and one of the new size begins."""
        key = storage._cdata
        if self._closed:
            return
        if key in self._block:
            block = self._block[key]
            self._emptied[key] = "resize_", self.categories[block]
            self.end_block(self._block.pop(key))
        if storage.nbytes() and key in self._emptied:
            self._begin(key, storage.nbytes(), *self._emptied.pop(key))

    def close(self) -> None:
        """Write no more."""
        self._closed = True

    def tape(self, *, since: int = 0, until: int | None = None) -> Tape:
        """What was written, see :meth:`TapeWriter.tape`; nothing is written any more."""
        self.close()
        return super().tape(since=since, until=until)
