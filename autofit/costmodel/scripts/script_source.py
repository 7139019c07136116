"""What a trace of a script trains on: its own longest row, and its model on fake tensors."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import honor_type
from torch import nn

from autofit.costmodel.scripts.known_values import LARGEST, KnownValues
from autofit.costmodel.tracing.layers import Marks
from autofit.costmodel.tracing.source import call_batch, make_fake
from autofit.system.errors import ModelError

if TYPE_CHECKING:
    from autofit.contract.recipe import Recipe
    from autofit.contract.script import Script


class ScriptSource:
    """A script that is about to train.

    Args:
        recipe: What it was changed by.
        script: The script.
    """

    evaluates = False  # what a script evaluates is not measured either
    loader: Any
    """The script's own, which is trained on."""

    def __init__(self, recipe: Recipe, script: Script) -> None:
        self.recipe, self.script = recipe, script
        self.beside: list[nn.Module] = []
        self._batch: Any = {}
        self._alike = True
        self.padded: bool | None = None
        """Whether the masks of its micro-batches hide something; decided by its rows where it is not said before."""

    @contextlib.contextmanager
    def prepared(self) -> Iterator[Recipe]:
        """The recipe, in whose environment the script runs already."""
        yield self.recipe

    def paddings(self) -> tuple[bool, ...]:
        """What ``padded`` may be: see :func:`paddings`."""
        return paddings(self.loader, self.script, self.recipe.micro_batch)

    def collate(self, rows: int, *, grows: bool) -> None:
        """Collate the longest row, again and again, as the script would; with real values.

        Raises:
            ModelError: Rows can't be taken one by one, or their batch does not grow with them.
        """
        self._batch, self._alike = longest_rows(self.loader, self.script, rows, grows=grows)
        if self.padded is None:
            self.padded = paddings(self.loader, self.script, rows)[0]
        for name, tensor in _parts(self._batch).items():
            if grows and isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.numel() % rows:
                shape = tuple(tensor.shape)
                raise ModelError(f"the script's batches don't grow with their rows: {name} of {rows} rows is {shape}")

    def stand_ready(self, model: Any, marks: Marks, optimizers: Iterable[Any], *, fake: bool) -> KnownValues | None:
        """Have model and optimizers hold fake tensors, tell the recorder, and begin segment 1.

        Returns:
            Knows the batches' values, where tensors are fake; to be entered before the steps.
        """
        recorder = marks.recorder
        known = KnownValues(recorder) if fake else None
        if fake:
            self._make_fake(model, optimizers)
        if known is not None and not self.padded:
            known.answers_transformers()
        every = [model, *self.beside]
        recorder.call([one for each in every for one in (*each.parameters(), *each.buffers())], "weights")
        recorder.mark("begin")
        model.register_forward_pre_hook(call_batch(recorder), with_kwargs=True)
        marks.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return known

    def fresh(self, known: KnownValues | None) -> Any:
        """The micro-batch anew, real or fake."""

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            if known is not None and not isinstance(tensor, _Invented):
                known.tell(made, tensor, mixed=not self._alike)
            return made

        return _each(self._batch, torch.clone if known is None else fake)

    def _make_fake(self, model: Any, optimizers: Iterable[Any]) -> None:
        made: dict[int, torch.Tensor] = {}
        for one in (model, *self.beside):
            made |= make_fake(one)
            one.to = lambda *_, __one=one, **__: __one  # it is where it should be
        for optimizer in optimizers:
            for group in getattr(optimizer, "optimizer", optimizer).param_groups:  # not those of layers left out
                group["params"] = [made[id(one)] for one in group["params"] if id(one) in made]


def apart(model: nn.Module, others: Iterable[Any]) -> list[nn.Module]:
    """Those of some objects that are modules, and share none with the model."""
    inside = {id(module) for module in model.modules()}
    modules = {id(one): one for one in others if isinstance(one, nn.Module)}.values()
    return [one for one in modules if all(id(module) not in inside for module in one.modules())]


_FEW = 8
"""Rows that differ and are collated together; those that have the most of some tensor come first."""


def longest_rows(loader: Any, script: Script, rows: int, *, grows: bool = False) -> tuple[Any, bool]:
    """A micro-batch of a loader, each row as long as the longest, and whether they are the same row.

    Args:
        loader: The script's own.
        script: Whose longest rows are known.
        rows: How many.
        grows: Whether two rows tell what so many are, where each tensor grows by as much with each: of images, to
            collate a hundred takes seconds and gigabytes. Large fractions, and those that differ, have no values then.

    Raises:
        ModelError: Rows can't be taken one by one, or their batch is neither a mapping nor a sequence.
    """
    _check_takes_rows(loader)
    places = script.longest_places
    first = None if places else next(iter(loader.dataset))

    def alike(count: int) -> Any:
        return loader.collate_fn([loader.dataset[places[0]] if places else first for _ in range(count)])

    def mixed(count: int) -> Any:
        return loader.collate_fn([loader.dataset[place] for place in itertools.islice(itertools.cycle(places), count)])

    def more_of_some(batch: Any, than: Any) -> bool:
        sizes = {name: _numbers(value) for name, value in _parts(than).items()}
        return any(sizes[name] < _numbers(value) for name, value in _parts(batch).items() if name in sizes)

    if grows and not (places and more_of_some(mixed(_FEW), alike(_FEW))):
        with contextlib.suppress(Exception):  # a collator may want more than one row
            return _grown(alike(1), alike(2), rows), True
    whole = alike(rows)
    if places and more_of_some(other := mixed(rows), whole):
        return other, False
    return whole, True


def _check_takes_rows(loader: Any) -> None:
    if loader.collate_fn is None or loader.batch_sampler is None:
        raise ModelError("the script's loader makes its micro-batches itself, and a trace makes them row by row")


def paddings(loader: Any, script: Script, rows: int) -> tuple[bool, ...]:
    """Whether masks hide something of micro-batches of so many rows, as long as the longest: each answer that comes.

    Rows of one length have no padding among themselves, and have some beside a shorter one. Which of both takes more
    is told by a trace of each: attention without a mask may run in another kernel.

    Raises:
        ModelError: Rows can't be taken one by one.
    """
    _check_takes_rows(loader)

    def hides(places: Sequence[int]) -> bool:
        mask = _parts(loader.collate_fn([loader.dataset[place] for place in places])).get("attention_mask")
        return not isinstance(mask, torch.Tensor) or not bool(mask.all())

    longest = script.longest_places[:_FEW]
    if not longest:
        return (True,)
    if rows == 1:
        return (hides(longest[:1]),)
    shorter = True
    with contextlib.suppress(Exception):  # rows that a collator takes with their like alone
        shorter = hides([longest[0], *script.places[:1]])
    return tuple(sorted({hides(longest), shorter}))


def _grown(one: Any, two: Any, rows: int) -> Any:
    """A batch of so many rows that are alike, told by those of one and of two of them.

    Raises:
        ValueError: They don't tell it.
    """
    if isinstance(one, Mapping):
        return type(one)({name: _grown(value, two[name], rows) for name, value in one.items()})  # type: ignore[call-arg]
    if isinstance(one, (list, tuple)) and len(one) == len(two):
        return honor_type(one, (_grown(*both, rows) for both in zip(one, two, strict=True)))
    if not isinstance(one, torch.Tensor):
        if one != two:
            raise ValueError("it is no tensor, and another one with another row")
        return one
    grows = [size != other for size, other in zip(one.shape, two.shape, strict=True)]
    twice = one.repeat([1 + grown for grown in grows])
    if sum(grows) > 1 or twice.shape != two.shape or not (one.is_floating_point() or torch.equal(twice, two)):
        raise ValueError("it does not grow by as much with each row")
    times = [rows if grown else 1 for grown in grows]
    if one.is_floating_point() and (one.numel() * max(times, default=1) > LARGEST or not torch.equal(twice, two)):
        made = one.new_empty([size * count for size, count in zip(one.shape, times, strict=True)])
        return made.as_subclass(_Invented)
    return one.repeat(times)


class _Invented(torch.Tensor):
    """A tensor of a batch whose size is told by fewer rows, and whose values are not."""


def _parts(batch: Any) -> Mapping[Any, Any]:
    """What a batch holds, by name or place.

    Raises:
        ModelError: It is neither a mapping nor a sequence.
    """
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, (list, tuple)):
        return dict(enumerate(batch))
    made = type(batch).__name__
    raise ModelError(f"the script's collator makes a {made}, and a trace takes a mapping of names to tensors")


def _numbers(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A batch of the same kind with every tensor changed, made as Accelerate makes one on another device."""
    if isinstance(value, Mapping):
        return type(value)({name: _each(one, change) for name, one in value.items()})  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        return honor_type(value, (_each(one, change) for one in value))
    return change(value) if isinstance(value, torch.Tensor) else value
