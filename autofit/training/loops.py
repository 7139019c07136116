"""Training steps on the two launch paths, watched by a clock: the same code in a trial and in a launch.

On the ``trainer`` path the steps are those of a real ``transformers.Trainer``, on the ``loop`` path those of a plain
Accelerate loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.contract.layout import data_parallel
from autofit.contract.outcome import Evidence
from autofit.training.expected_rows import Tokens
from autofit.training.observer import Observer
from autofit.training.row_order import order, sample, wanted
from autofit.training.tasks.rows import rows_of_an_epoch, task_rows
from autofit.training.tasks.table import kind_of
from autofit.training.timing import Clock, Listener

if TYPE_CHECKING:
    from torch.utils.data import Dataset
    from transformers import PreTrainedModel

    from autofit.contract.recipe import Recipe


def random_rows(recipe: Recipe, model: Any, rows: int, *, differ: bool = False) -> Dataset[Any]:
    """Random rows of the model's task; ``rows`` is the length that the loader sees. For ``differ`` see the rows."""
    facts = recipe.facts
    kind_of(facts.model.task).prepare(model)
    return task_rows(facts, model.config, rows, differ=differ)


def _rows(clock: Listener, model: Any, steps: int, *, differ: bool) -> Dataset[Any]:
    """Random rows of so many steps, or of an epoch that they stand for."""
    if differ:
        return random_rows(clock.recipe, model, rows_of_an_epoch(clock.recipe.facts), differ=True)
    ranks = data_parallel(clock.recipe.plan, clock.recipe.facts.workload)
    return random_rows(clock.recipe, model, clock.recipe.micro_batch * clock.accumulation * ranks * steps)


def _in_order(usual: Any, clock: Listener, tokens: Tokens) -> Any:
    """A sampler of random rows that differ in length; ``usual`` is the training's own, none draws at random."""
    count = rows_of_an_epoch(clock.recipe.facts)
    asked = wanted(clock, clock.effort.max_steps, longest=(count,), places=range(count))
    return order(usual, asked, tokens.take)


def run_trainer(
    clock: Listener,
    args: Any,
    model: Any,
    optimizer: Any = None,
    *,
    dataset: Dataset[Any] | None = None,
    begin: Callable[[Any], None] = lambda _: None,
) -> Evidence:
    """Train by a ``transformers.Trainer`` until the clock says enough.

    Args:
        clock: Listens.
        args: The ``TrainingArguments``, with ``max_steps`` large enough for the clock's effort.
        model: The model, wrapped as the plan says.
        optimizer: Where the plan wraps the optimizer; otherwise Trainer makes it.
        dataset: Rows to train on; where none are given, random ones, of which a batch is evaluated too.
        begin: Given the trainer before it trains.
    """
    from transformers import Trainer, TrainerCallback

    observer = Observer(model, clock.recipe)
    seen: list[Evidence] = []

    class Told(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.step_begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if trainer.accelerator.optimizer_step_was_skipped:
                clock.step_skipped()
            if clock.step_end():
                control.should_training_stop = True
            if clock.done == clock.effort.warm_up:
                observer.loader = trainer.callback_handler.train_dataloader
                seen.append(observer.evidence(trainer.optimizer, trainer.accelerator, counted(clock)))
                observer.close()
                if dataset is None:
                    evaluate_once(trainer, data)
            return control

    class Listened(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            tokens.count(inputs, training=model.training)
            clock.forward_begin()
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            clock.forward_end()
            return loss

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            clock.backward_end(loss)
            return loss

    tokens = _tokens(clock, dataset)
    differ = tokens.clock is not None
    data = dataset or _rows(clock, model, args.max_steps, differ=differ)
    collate: Any = getattr(data, "collate", None)
    joined = differ and clock.recipe.joined_rows is not None
    trainer = Listened(
        model=model,
        args=args,
        train_dataset=clock.recipe.dataset(data, collate) if joined else data,
        data_collator=None if collate is None else clock.recipe.collator(collate),
        callbacks=[Told()],
        optimizers=(optimizer, None),
    )
    if differ and not joined:
        sample(trainer, lambda usual: _in_order(usual, clock, tokens))
    begin(trainer)
    trainer.train()
    tokens.tell()
    return observer.with_later_state(seen[0], trainer.optimizer, trainer.accelerator, counted(clock))


def evaluate_once(trainer: Any, rows: Any = None) -> None:
    """Evaluate one batch as a Trainer does, between two steps: its peak belongs to the training's.

    It is one of some rows, or else of those that are trained on.
    """
    model, rows = trainer.model, trainer.train_dataset if rows is None else rows
    first = len(rows)  # where rows differ in length, the longest ones lie behind the last
    batch = trainer.data_collator([rows[first + one] for one in range(trainer.args.per_device_eval_batch_size)])
    with between_steps(model):
        trainer.prediction_step(model, batch, prediction_loss_only=True)


@contextlib.contextmanager
def between_steps(model: Any) -> Iterator[None]:
    """Let a model that trains be evaluated for a while.

    Nothing is compiled for it, since a graph of its own would take longer than the whole measurement.
    """
    import torch

    model.eval()
    with torch.compiler.set_stance("force_eager"):
        yield
    model.train()


def run_loop(
    clock: Listener,
    accelerator: Any,
    model: Any,
    optimizer: Any,
    max_grad_norm: float = 1.0,
    *,
    dataset: Dataset[Any] | None = None,
    shuffle: bool = True,
) -> Evidence:
    """Train by a plain Accelerate loop until the clock says enough; the loop of ``examples/train_loop.py``.

    Args:
        clock: Listens.
        accelerator: From ``setup.accelerator()``, or the like.
        model: The model, wrapped as the plan says.
        optimizer: Its optimizer.
        max_grad_norm: Gradients are clipped to this norm, as a Trainer does by default.
        dataset: Rows to train on; random ones where none are given.
        shuffle: Whether the rows are trained on in random order.
    """
    from torch.utils.data import DataLoader, RandomSampler

    observer = Observer(model, clock.recipe)
    evidence = None
    tokens = _tokens(clock, dataset)
    differ = tokens.clock is not None
    data = dataset or _rows(clock, model, clock.effort.warm_up + clock.effort.max_steps, differ=differ)
    collate: Any = getattr(data, "collate", None)
    joined = differ and clock.recipe.joined_rows is not None
    rows = clock.recipe.loaded_rows if dataset is None else clock.recipe.micro_batch
    if joined:
        data = clock.recipe.dataset(data, collate)
        count = (clock.effort.warm_up + clock.effort.max_steps) * clock.accumulation * rows
        sampler: Any = RandomSampler(data, replacement=True, num_samples=count)
    else:
        sampler = _in_order(None, clock, tokens) if differ else None
    loader = DataLoader(
        data,
        batch_size=rows,
        shuffle=shuffle and not differ,
        sampler=sampler,
        pin_memory=clock.on_cuda,
        collate_fn=None if collate is None else clock.recipe.collator(collate),
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    fresh = True
    for batch in loader:
        tokens.count(batch)
        if fresh:
            clock.step_begin()
        with accelerator.accumulate(model):
            clock.forward_begin()
            loss = model(**batch).loss
            clock.forward_end()
            accelerator.backward(loss)
            clock.backward_end(loss / clock.accumulation)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        fresh = accelerator.sync_gradients
        if fresh:
            if accelerator.optimizer_step_was_skipped:
                clock.step_skipped()
            enough = clock.step_end()
            if clock.done == clock.effort.warm_up:
                observer.loader = loader
                evidence = observer.evidence(optimizer, accelerator, counted(clock))
                observer.close()
            if enough:
                break
    if evidence is None:
        raise RuntimeError("the loader ended before the warm-up did")
    tokens.tell()
    return observer.with_later_state(evidence, optimizer, accelerator, counted(clock))


def _tokens(clock: Listener, dataset: Any) -> Tokens:
    """What counts tokens where random rows are as long as the workload tells; a trace's marks count none."""
    told = isinstance(clock, Clock) and dataset is None and clock.recipe.facts.workload.lengths
    return Tokens(clock if told and isinstance(clock, Clock) else None)


def counted(clock: Listener) -> int | None:
    """Micro-steps that were counted in an optimizer step; nothing where they only stand for more."""
    return None if clock.in_parts else clock.accumulated


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What is trained where it matters what is learned, and not only how fast.

    Attributes:
        begin: Given the model once it stands, with the same weights whatever the plan.
        rows: To be trained on, given the model.
        arguments: Fields of ``TrainingArguments`` that a plan does not decide.
    """

    begin: Callable[[PreTrainedModel], None]
    rows: Callable[[PreTrainedModel], Dataset[Any]]
    arguments: Mapping[str, Any]


def run_recipe(clock: Listener, *, config: Path, folder: Path, lesson: Lesson | None = None) -> Evidence:
    """Build all that the recipe says, with random weights, and train on its launch path: what a trial does.

    Args:
        clock: Listens.
        config: Folder that holds the ``config.json``.
        folder: Where a Trainer may write.
        lesson: What to train; random rows where nothing is to be learned.
    """
    import torch

    recipe = clock.recipe
    torch.manual_seed(recipe.facts.workload.seed)
    engine = recipe.emission.accelerate["distributed_type"]
    sharded = engine not in {"NO", "MULTI_GPU"} or recipe.spread is not None
    # a device's random numbers are others than the host's
    device = "cuda" if clock.on_cuda and not sharded and lesson is None else "cpu"
    trainer = recipe.facts.workload.launch_path == "trainer"
    given = {"output_dir": str(folder), **(lesson.arguments if lesson else {})}
    args = None
    if trainer:
        args = recipe.training_arguments(**{**untuned(clock, folder), **given})
        args.gradient_accumulation_steps = clock.accumulation
        if lesson is not None:
            args.train_sampling_strategy = "sequential"  # whatever a plan says: the same rows for all of them
            args.per_device_train_batch_size = recipe.micro_batch
    model = recipe.model(None, config=config, device=device)
    if clock.on_cuda:
        torch.cuda.empty_cache()  # a script's weights come from the host: what making random ones took goes back
    optimizer = recipe.optimizer(model, **given) if recipe.optimizer_wraps or not trainer else None
    rows = None
    if lesson is not None:
        rows = lesson.rows(model)
        lesson.begin(model)
    if args is not None:
        return run_trainer(clock, args, model, optimizer, dataset=rows)
    accelerator = recipe.accelerator(gradient_accumulation_steps=clock.accumulation)
    return run_loop(clock, accelerator, model, optimizer, dataset=rows, shuffle=lesson is None)


def untuned(clock: Listener, folder: Path) -> dict[str, Any]:
    """Fields of ``TrainingArguments`` that a measurement needs and a plan does not decide."""
    return {
        "output_dir": str(folder),
        "max_steps": clock.effort.warm_up + clock.effort.max_steps,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "seed": clock.recipe.facts.workload.seed,
    }
