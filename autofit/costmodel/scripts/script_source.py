"""What a trace of a script trains on: its own longest row, and its model on fake tensors."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autofit.costmodel.scripts.known_values import KnownValues
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

    def __init__(self, recipe: Recipe, script: Script) -> None:
        self.recipe, self.script = recipe, script
        self.beside: list[nn.Module] = []
        self._batch: Any = {}
        self._values_known = True

    @contextlib.contextmanager
    def prepared(self) -> Iterator[Recipe]:
        """The recipe, in whose environment the script runs already."""
        yield self.recipe

    def collate(self, loader: Any, rows: int, *, grows: bool) -> None:
        """Collate the longest row, again and again, as the script would; with real values.

        Raises:
            ModelError: Rows can't be taken one by one, or their batch does not grow with them.
        """
        self._batch, self._values_known = longest_rows(loader, self.script, rows)
        for name, tensor in _parts(self._batch).items():
            if grows and isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.numel() % rows:
                shape = tuple(tensor.shape)
                raise ModelError(f"the script's batches don't grow with their rows: {name} of {rows} rows is {shape}")

    def stand_ready(self, model: Any, marks: Marks, optimizer: Any, *, fake: bool) -> KnownValues | None:
        """Have model and optimizer hold fake tensors, tell the recorder, and begin segment 1.

        Returns:
            Knows the batches' values, where tensors are fake; to be entered before the steps.
        """
        recorder = marks.recorder
        known = KnownValues(recorder) if fake else None
        if fake:
            self._make_fake(model, optimizer)
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
            if self._values_known and known is not None:
                known.tell(made, tensor)
            return made

        return _each(self._batch, torch.clone if known is None else fake)

    def _make_fake(self, model: Any, optimizer: Any) -> None:
        made: dict[int, torch.Tensor] = {}
        for one in (model, *self.beside):
            made |= make_fake(one)
            one.to = lambda *_, __one=one, **__: __one  # it is where it should be
        if optimizer is not None:
            for group in getattr(optimizer, "optimizer", optimizer).param_groups:
                group["params"] = [made.get(id(parameter), parameter) for parameter in group["params"]]


def apart(model: nn.Module, others: Iterable[Any]) -> list[nn.Module]:
    """Those of some objects that are modules, and share none with the model."""
    inside = {id(module) for module in model.modules()}
    modules = {id(one): one for one in others if isinstance(one, nn.Module)}.values()
    return [one for one in modules if all(id(module) not in inside for module in one.modules())]


def longest_rows(loader: Any, script: Script, rows: int) -> tuple[Any, bool]:
    """A micro-batch of a loader, each row as long as the longest, and whether its values are those of real rows.

    Raises:
        ModelError: Rows can't be taken one by one, or their batch is neither a mapping nor a sequence.
    """
    if loader.collate_fn is None or loader.batch_sampler is None:
        raise ModelError("the script's loader makes its micro-batches itself, and a trace makes them row by row")
    places = script.longest_places
    several = list(itertools.islice(itertools.cycle(places), rows))
    if places:
        alike = loader.collate_fn([loader.dataset[places[0]] for _ in range(rows)])
    else:
        first = next(iter(loader.dataset))
        alike = loader.collate_fn([first for _ in range(rows)])
    mixed = loader.collate_fn([loader.dataset[place] for place in several]) if places else alike
    sizes = {name: _numbers(value) for name, value in _parts(alike).items()}
    if all(sizes[name] >= _numbers(value) for name, value in _parts(mixed).items() if name in sizes):
        return alike, True
    return mixed, False


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
    """A batch of the same kind with every tensor changed."""
    if isinstance(value, Mapping):
        changed = {name: _each(one, change) for name, one in value.items()}
        return type(value)(changed) if hasattr(value, "data") else changed  # type: ignore[call-arg]  # BatchEncoding
    if isinstance(value, (list, tuple)):
        return type(value)(_each(one, change) for one in value)
    return change(value) if isinstance(value, torch.Tensor) else value
