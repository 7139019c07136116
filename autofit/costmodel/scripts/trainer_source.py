"""A script's Trainer as what a trace trains: its model, its rows, its loss and its steps, on fake tensors."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from autofit.costmodel.scripts.generation import trace_generation
from autofit.costmodel.scripts.known_values import KnownValues
from autofit.costmodel.scripts.script_source import ScriptSource, apart
from autofit.costmodel.tracing.layers import Marks, TraceDone
from autofit.costmodel.tracing.shard_layout import layout_of
from autofit.system.errors import ModelError
from autofit.system.job import error_words
from autofit.training.rollouts import Completed, makes_rows
from autofit.training.scripts.watched import watch, wrap_model, wrap_optimizer

if TYPE_CHECKING:
    from autofit.contract.recipe import Recipe
    from autofit.contract.script import Script


class TrainerSource(ScriptSource):
    """A Trainer that is about to train.

    Args:
        recipe: Which it was made with.
        script: Whose it is.
        trainer: The Trainer.
        train: Trains it.
    """

    def __init__(self, recipe: Recipe, script: Script, trainer: Any, train: Callable[[], Any]) -> None:
        super().__init__(recipe, script)
        self.trainer, self.train = trainer, train
        self._given = False
        self._generates = makes_rows(type(trainer))
        layout = layout_of(recipe)
        many = script.generated_at_once(1) > 0 and recipe.micro_batch > 1  # one row does not tell what they take
        self.evaluates = many and (layout.bucketed or not layout.engine)

    def model(self, *, fake: bool) -> Any:
        """The script's model, wrapped as the plan says."""
        trainer = self.trainer
        if self._generates:
            trainer._prepare_inputs = lambda batch: batch  # noqa: SLF001 - where it generates
        trainer.model_init = None
        wrap_model(trainer, self.recipe)
        self.beside = apart(trainer.model, vars(trainer).values())
        return trainer.model

    @functools.cached_property
    def loader(self) -> Any:
        """The Trainer's; to make it may take a look at every row."""
        made = self.trainer.get_train_dataloader()
        return Completed(self.trainer, made) if self._generates else made

    def take_rows(self, *, grows: bool, given: bool = False) -> None:
        """Take the longest row as often as the plan says; once where the gradients are given."""
        self._given = given
        self.collate(1 if given else self.recipe.micro_batch, grows=grows)

    def run(self, model: Any, marks: Marks, *, fake: bool) -> None:
        """Train until the marks say enough."""
        trainer = self.trainer
        optimizers = [] if trainer.optimizer is None else [trainer.optimizer]
        known = self.stand_ready(model, marks, optimizers, fake=fake)
        steps = marks.effort.warm_up
        trainer.args.max_steps, trainer.args.logging_nan_inf_filter = steps, False
        wrap_optimizer(trainer, self.recipe)
        loader = _Batches(lambda: self.fresh(known), steps * marks.accumulation)
        trainer.get_train_dataloader = lambda: loader
        if self._given:
            trainer.compute_loss = _loss_of_the_model
        watch(trainer, marks, stepped=lambda: _stop_after(marks, steps))
        with known or contextlib.nullcontext():
            with contextlib.suppress(TraceDone):
                self.train()
            if marks.past is not None and self.evaluates:
                self._generate(marks, known)
        if trainer.is_deepspeed_enabled != (self.recipe.emission.accelerate.get("distributed_type") == "DEEPSPEED"):
            raise ModelError("the Trainer was not trained by the engine that the plan says")

    def _generate(self, marks: Marks, known: KnownValues | None) -> None:
        """Trace what the Trainer generates; where that fails it is told, and left out."""
        try:
            trace_generation(self.trainer, marks, self.fresh(known))
        except Exception as error:  # noqa: BLE001 - a model's own code can raise anything; it is told
            traceback.print_exc()
            self.evaluates = False
            marks.recorder.notes.add(f"the memory of generating is not known: {error_words(error)}")


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
