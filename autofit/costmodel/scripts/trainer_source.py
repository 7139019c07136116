"""A script's Trainer as what a trace trains: its model, its rows, its loss and its steps, on fake tensors."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autofit.costmodel.scripts.known_values import KnownValues
from autofit.costmodel.tracing.layers import Marks, TraceDone
from autofit.costmodel.tracing.source import call_batch, make_fake
from autofit.system.errors import ModelError
from autofit.training.scripts.watched import watch, wrap_model, wrap_optimizer

if TYPE_CHECKING:
    from autofit.contract.facts import Script
    from autofit.contract.recipe import Recipe


class TrainerSource:
    """A Trainer that is about to train.

    Args:
        recipe: Which it was made with.
        script: Whose it is.
        trainer: The Trainer.
        train: Trains it.
    """

    evaluates = False  # what a script evaluates is not measured either

    def __init__(self, recipe: Recipe, script: Script, trainer: Any, train: Callable[[], Any]) -> None:
        self.recipe, self.script, self.trainer, self.train = recipe, script, trainer, train
        self.beside: list[nn.Module] = []
        self._batch: Mapping[str, Any] = {}
        self._values_known = True
        self._given = False

    @contextlib.contextmanager
    def prepared(self) -> Iterator[Recipe]:
        """The recipe, in whose environment the script runs already."""
        yield self.recipe

    def model(self, *, fake: bool) -> Any:
        """The script's model, wrapped as the plan says."""
        trainer = self.trainer
        trainer.model_init = None
        wrap_model(trainer, self.recipe)
        inside = {id(module) for module in trainer.model.modules()}
        others = [one for one in vars(trainer).values() if isinstance(one, nn.Module)]
        self.beside = [one for one in others if all(id(module) not in inside for module in one.modules())]
        return trainer.model

    def take_rows(self, *, grows: bool, given: bool = False) -> None:
        """Collate the longest row, again and again, as the script would; with real values."""
        self._given = given
        rows = 1 if given else self.recipe.micro_batch
        loader = self.trainer.get_train_dataloader()
        self._batch, self._values_known = longest_rows(loader, self.script, rows)
        for name, tensor in self._batch.items():
            if grows and isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.numel() % rows:
                shape = tuple(tensor.shape)
                raise ModelError(f"the script's batches don't grow with their rows: {name} of {rows} rows is {shape}")

    def run(self, model: Any, marks: Marks, *, fake: bool) -> None:
        """Train until the marks say enough."""
        recorder, trainer = marks.recorder, self.trainer
        known = KnownValues() if fake else None
        if fake:
            self._make_fake(model)
        every = [model, *self.beside]
        recorder.call([one for each in every for one in (*each.parameters(), *each.buffers())], "weights")
        recorder.mark("begin")
        model.register_forward_pre_hook(call_batch(recorder), with_kwargs=True)
        marks.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        steps = marks.effort.warm_up
        trainer.args.max_steps, trainer.args.logging_nan_inf_filter = steps, False
        wrap_optimizer(trainer, self.recipe)
        loader = _Batches(lambda: self._fresh(known), steps * marks.accumulation)
        trainer.get_train_dataloader = lambda: loader
        if self._given:
            trainer.compute_loss = _loss_of_the_model
        watch(trainer, marks, stepped=lambda: _stop_after(marks, steps))
        with contextlib.suppress(TraceDone), known or contextlib.nullcontext():
            self.train()

    def _fresh(self, known: KnownValues | None) -> Any:
        """The micro-batch anew, real or fake."""

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            if self._values_known and known is not None:
                known.tell(made, tensor)
            return made

        return _each(self._batch, torch.clone if known is None else fake)

    def _make_fake(self, model: Any) -> None:
        made: dict[int, torch.Tensor] = {}
        for one in (model, *self.beside):
            made |= make_fake(one)
            one.to = lambda *_, __one=one, **__: __one  # it is where it should be
        handed = self.trainer.optimizer
        if handed is not None:
            handed = getattr(handed, "optimizer", handed)
            for group in handed.param_groups:
                group["params"] = [made.get(id(parameter), parameter) for parameter in group["params"]]


def longest_rows(loader: Any, script: Script, rows: int) -> tuple[Mapping[str, Any], bool]:
    """A micro-batch of a loader, each row as long as the longest, and whether its values are those of real rows.

    Raises:
        ModelError: Rows can't be taken one by one, or their batch has no names.
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
    for batch in (alike, mixed):
        if not isinstance(batch, Mapping):
            made = type(batch).__name__
            raise ModelError(f"the script's collator makes a {made}, and a trace takes a mapping of names to tensors")
    if all(_numbers(alike[name]) >= _numbers(value) for name, value in mixed.items() if name in alike):
        return alike, True
    return mixed, False


def _numbers(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A batch with every tensor changed."""
    if isinstance(value, Mapping):
        return {name: _each(one, change) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_each(one, change) for one in value)
    return change(value) if isinstance(value, torch.Tensor) else value


def _loss_of_the_model(model: Any, _inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
    """The loss that a model gives which has its gradients given."""
    loss: torch.Tensor = model().loss
    return loss


def _stop_after(marks: Marks, steps: int) -> None:
    if marks.done >= steps:
        raise TraceDone


class _Batches:
    """Stands for a Trainer's loader: so many micro-batches."""

    def __init__(self, make: Callable[[], Any], count: int) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.count):
            yield self.make()
