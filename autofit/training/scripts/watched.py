"""A script's Trainer: what is put around its model and optimizer, and how its steps are listened to."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autofit.contract.technique import replacing
from autofit.system.errors import InputError
from autofit.training.loops import between_steps
from autofit.training.rollouts import makes_rows
from autofit.training.scripts.leave import Enough, generated_rows, refusing_to_generate
from autofit.training.scripts.rows import of_one_batch, rows_in, sample_of
from autofit.training.scripts.traits import longest_batch

if TYPE_CHECKING:
    from autofit.contract.recipe import Recipe
    from autofit.training.timing import Listener


def wrap(trainer: Any, recipe: Recipe, *, accumulation: int | None = None, joins: bool = True) -> None:
    """Put around a Trainer's model and optimizer what no argument carries.

    Args:
        trainer: About to train.
        recipe: Of the plan.
        accumulation: Of the script now; ``None`` where that is what was tuned.
        joins: Whether its rows are joined where the plan says so.
    """
    if joins:
        join_rows(trainer, recipe)
    wrap_model(trainer, recipe, accumulation=accumulation)
    wrap_optimizer(trainer, recipe)
    keep_evaluated_order(trainer, recipe)
    keep_streams_whole(trainer, recipe)


def join_rows(trainer: Any, recipe: Recipe) -> None:
    """Have a Trainer train on rows of which each is several of its data set's, where the plan says so.

    Raises:
        InputError: It makes its loader itself, or its rows can't be joined.
    """
    from transformers import Trainer

    if not recipe.dataset_wraps:
        return
    if type(trainer).get_train_dataloader is not Trainer.get_train_dataloader:
        kind = type(trainer).__name__
        raise InputError(f"{kind} makes its loader itself, so its rows can't be joined", hint="tune the script itself")
    own = trainer.train_dataset
    trainer._set_signature_columns_if_needed()  # noqa: SLF001 - a Trainer has no other place for it
    if hasattr(own, "column_names"):  # as the Trainer itself does for its loader
        unused = {*own.column_names} - {*trainer._signature_columns}  # noqa: SLF001 - as above
        own = own.remove_columns(sorted(unused)) if trainer.args.remove_unused_columns else own
    trainer._signature_columns = [*trainer._signature_columns, "position_ids"]  # noqa: SLF001 - as above
    trainer.train_dataset = recipe.dataset(own, trainer.data_collator)


def wrap_model(trainer: Any, recipe: Recipe, *, accumulation: int | None = None) -> None:
    """Put around a Trainer's model, and around its collator, what no argument carries; see :func:`wrap`."""
    if recipe.collate_wraps:
        trainer.data_collator = recipe.collator(trainer.data_collator)
    if recipe.model_wraps or recipe.optimizer_wraps:
        trainer.model_init = None  # it has made the model, and would make another one
    for around_model in recipe.model_wraps:
        trainer.model = trainer.model_wrapped = around_model(trainer.model)
    script = recipe.facts.workload.script
    if script is not None and script.undivided:
        sizes = next((one[0] for one in script.batch.values() if one), None)
        joins = bool(recipe.dataset_wraps or recipe.collate_wraps) or script.micro_batch == 1  # a row may be several
        countable = sizes == script.micro_batch and not joins
        keep_scale(trainer, accumulation or script.accumulation, countable=countable)


def keep_evaluated_order(trainer: Any, recipe: Recipe) -> None:
    """Have a Trainer evaluate rows in the order in which its script does: a plan is about those it trains on.

    A Trainer takes the argument for both, and a script may hold predictions against the rows of its data set.
    """
    script = recipe.facts.workload.script
    own = "random" if script is None else script.own.get("train_sampling_strategy", "random")
    if trainer.args.train_sampling_strategy == own:
        return
    sampler = trainer._get_eval_sampler  # noqa: SLF001 - a Trainer has no other place for it

    def as_the_script(*args: Any, **kwargs: Any) -> Any:
        with replacing([(trainer.args, "train_sampling_strategy", own)]):
            return sampler(*args, **kwargs)

    trainer._get_eval_sampler = as_the_script  # noqa: SLF001 - as above


def keep_streams_whole(trainer: Any, recipe: Recipe) -> None:
    """Have data sets that are read in order read as the script says: each worker of the plan's would read all of one.

    What is trained on is none, or no workers would be planned; what is evaluated may be.
    """
    from torch.utils.data import IterableDataset

    script = recipe.facts.workload.script
    if script is None or script.loading is None or not recipe.loader_arguments:
        return
    names = {"num_workers": "workers", "prefetch_factor": "prefetch", "persistent_workers": "persistent"}
    own = [(trainer.args, f"dataloader_{name}", getattr(script.loading, one)) for name, one in names.items()]
    loader = trainer._get_dataloader  # noqa: SLF001 - a Trainer has no other place for it

    def as_the_script(dataset: Any, *args: Any, **kwargs: Any) -> Any:
        with replacing(own if isinstance(dataset, IterableDataset) else []):
            return loader(dataset, *args, **kwargs)

    trainer._get_dataloader = as_the_script  # noqa: SLF001 - as above


def keep_scale(trainer: Any, accumulation: int, *, countable: bool = False) -> None:
    """Have gradients as large as a script's own accumulation leaves them, of a loss that nobody divides by it.

    Of an epoch's last rows it makes as many micro-batches as it needs, which may be fewer than of a whole step's. Rows
    that are joined into one can't be counted; that they are not is ``countable``, or seen in a whole micro-batch.
    """
    compute_loss, get_batch_samples = trainer.compute_loss, trainer.get_batch_samples
    planned = trainer.args.gradient_accumulation_steps
    whole = trainer.args.per_device_train_batch_size * planned
    times = accumulation / planned

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal times, countable
        batches, items = get_batch_samples(*args, **kwargs)
        rows = sum(map(rows_in, batches))
        countable |= any(rows_in(one) == trainer.args.per_device_train_batch_size for one in batches)
        if countable and batches:
            times = math.ceil(rows * accumulation / whole) / len(batches)
        return batches, items

    def scaled(model: Any, *args: Any, **kwargs: Any) -> Any:
        found = compute_loss(model, *args, **kwargs)
        if times == 1 or not model.training:
            return found
        return (found[0] * times, *found[1:]) if isinstance(found, tuple) else found * times

    trainer.compute_loss, trainer.get_batch_samples = scaled, counted


def wrap_optimizer(trainer: Any, recipe: Recipe) -> None:
    """Put around a Trainer's optimizer what no argument carries; its model is wrapped already."""
    if recipe.optimizer_wraps:
        optimizer = trainer.create_optimizer()
        for around_optimizer in recipe.optimizer_wraps:
            optimizer = around_optimizer(optimizer)
        trainer.optimizer = optimizer


def watch(
    trainer: Any,
    clock: Listener,
    *,
    count: Callable[[Any], None] = lambda _: None,
    stepped: Callable[[], None] = lambda: None,
) -> None:
    """Have a clock told of each part of a Trainer's steps, which end when it says enough.

    Args:
        trainer: About to train; its own loss is kept.
        clock: Listens.
        count: Given each micro-batch.
        stepped: Called after each optimizer step.

    Raises:
        Refused: From a step in which a model generates.
    """
    from transformers import EarlyStoppingCallback, TrainerCallback

    compute_loss, training_step, generates = trainer.compute_loss, trainer.training_step, makes_rows(type(trainer))

    def timed_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not model.training:
            return compute_loss(model, inputs, *args, **kwargs)
        count(inputs)
        clock.forward_begin()
        loss = compute_loss(model, inputs, *args, **kwargs)
        clock.forward_end()
        return loss

    def timed_step(*args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if generates else refusing_to_generate(generated_rows(type(trainer))):
            loss = training_step(*args, **kwargs)
        clock.backward_end(loss)
        return loss

    class Told(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.step_begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if trainer.accelerator.optimizer_step_was_skipped:
                clock.step_skipped()
            if clock.step_end():
                control.should_training_stop = True
            stepped()
            return control

    trainer.pop_callback(EarlyStoppingCallback)
    trainer.add_callback(Told())
    trainer.compute_loss, trainer.training_step = timed_loss, timed_step


def evaluate_longest(trainer: Any, rows: int) -> None:
    """Evaluate the longest rows as ``Trainer.evaluate`` does, between two steps: its peak belongs to the training's.

    Args:
        trainer: That trains.
        rows: Evaluated at once.
    """

    def loop(loader: Any, *_: Any, prediction_loss_only: bool | None = None, ignore_keys: Any = None, **__: Any) -> Any:
        seen = of_one_batch(sample_of(loader.dataset, loader.collate_fn), loader)
        together = min(rows, seen.rows or rows)
        batch = longest_batch(loader, seen, together)
        loss_only = trainer.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        _evaluate(
            trainer,
            lambda: trainer.prediction_step(trainer.model, batch, loss_only, ignore_keys=ignore_keys)[1:],
            together,
            seen.rows or together,
        )
        raise Enough(None)  # its metrics, and who listens to it, are no matter

    given, own = trainer.eval_dataset, vars(trainer).get("evaluation_loop")
    trainer.evaluation_loop = loop
    with replacing([(trainer.args, "per_device_eval_batch_size", rows)]), between_steps(trainer.model):
        for names in [(name,) for name in given] if isinstance(given, dict) else [()]:  # as it does while it trains
            with contextlib.suppress(Enough):
                trainer.evaluate(*names)
    del trainer.evaluation_loop
    if own is not None:
        trainer.evaluation_loop = own


def _evaluate(trainer: Any, predict: Callable[[], tuple[Any, Any]], rows: int, of: int) -> None:
    """Evaluate the last batch of so many rows while what ``compute_metrics`` is to read of the others is held.

    A Trainer keeps that on the device until its end, or for ``eval_accumulation_steps`` batches, then on the host, and
    joins each batch to it; of several processes each keeps what all of them predict (``Trainer.evaluation_loop`` of
    transformers 5.23).
    """
    import torch
    from torch.utils._pytree import tree_map
    from transformers.trainer_pt_utils import nested_concat

    args, ranks = trainer.args, trainer.accelerator.num_processes

    def gathered(one: Any) -> Any:
        return torch.cat([one] * ranks) if ranks > 1 and isinstance(one, torch.Tensor) and one.ndim else one

    def predicted() -> list[Any]:
        logits, labels = predict()
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        return [tree_map(gathered, logits), tree_map(gathered, labels)]

    def of_others(one: Any) -> Any:
        many = isinstance(one, torch.Tensor) and one.ndim
        return one.new_ones((others, *one.shape[1:])) if many else one  # written to, or a CPU would not hold them

    found = predicted()
    batches = args.eval_accumulation_steps if args.device.type != "cpu" else None
    others = min(of, (batches or of) * rows * ranks) - rows * ranks
    if others <= 0 or args.batch_eval_metrics:
        return
    held = [tree_map(of_others, one) for one in found]
    del found
    for place, one in enumerate(predicted()):
        if one is not None and args.eval_do_concat_batches:
            held[place] = nested_concat(held[place], one)  # type: ignore[no-untyped-call]
