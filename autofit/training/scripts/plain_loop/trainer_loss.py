"""How a Trainer's loss is made of the rows of its micro-batch, where the loss or the model is the script's own.

It is asked of some rows, then of others, as a plain loop's is; with few layers where its model is large.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from autofit.training.scripts.leave import generated_rows, refusing_to_generate
from autofit.training.scripts.plain_loop import reasons
from autofit.training.scripts.plain_loop.losses import COMBINED, Judged, takes_rows_together
from autofit.training.scripts.plain_loop.some_rows import SomeRows, rows_at
from autofit.training.scripts.rows import rows_in
from autofit.training.tasks.loss_scale import FEW_LAYERS, cut, of_a_library

ROWS = 6
"""Rows of which others may be unlike: three times two."""
_MOST_PRODUCTS = 5e11
"""Products of a weight that asking may take: some ten seconds of two cores."""
_PATCH = 3 * 16 * 16
"""Numbers of an image, or of a sound, that are about one position of a model."""


def loss_of_rows(trainer: Any, batch: Any) -> tuple[Judged | None, str | None]:
    """How a Trainer's loss is made of its rows, and why its split is the script's own, in words.

    Args:
        trainer: About to train, on the CPU.
        batch: Some of its rows, as its collator makes them.

    Returns:
        Neither where both its loss and its model are a library's, where weights are packed, where asking takes too
        long, and where it fails.

    Raises:
        Refused: A model generates for the loss.
    """
    import torch

    model, rows = trainer.model, rows_in(batch)
    inner = trainer.accelerator.unwrap_model(model)
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    libraries = all(map(of_a_library, (trainer.compute_loss, type(inner).forward)))
    packed = not all(one.is_floating_point() for one in inner.parameters())
    if (libraries and trainer.compute_loss_func is None) or packed or not rows:
        return None, None
    some, together, half = SomeRows(), False, any(one.element_size() < 4 for one in model.parameters())

    def called(*_: Any) -> None:
        nonlocal half
        half |= torch.is_autocast_enabled("cpu")

    with contextlib.suppress(Exception), refusing_to_generate(generated_rows(type(trainer))), _few_layers(inner, batch):
        items = trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))[1]
        heard = torch.nn.modules.module.register_module_forward_pre_hook(called)
        model.train()
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        try:
            for part in some.batches(batch, rows):
                inputs = trainer._prepare_inputs(part)  # noqa: SLF001 - as its step does
                asked = rows_in(inputs)
                loss = trainer.compute_loss(model, inputs, num_items_in_batch=items)
                together |= takes_rows_together(loss, asked)
                some.note(loss, autocast=half)
        finally:
            heard.remove()
            del trainer.current_gradient_accumulation_steps
    return Judged.TOGETHER if together else some.found(), some.unsteady()


def told(script: dict[str, Any], judged: Judged | None, own_split: str | None) -> None:
    """Put what :func:`loss_of_rows` has found into what is told of a script's Trainer.

    A sum that nobody divides is the same under each split.
    """
    script["own_split"] = own_split
    if judged == Judged.SUM and script["averages"]:
        script["own_split"] = own_split or reasons.SUMS_OF_TRAINER
    elif judged == Judged.SUM:
        script["undivided"] = False
    elif judged == Judged.TOGETHER:
        script["depends_on_rows"] = script["depends_on_rows"] or reasons.TOGETHER


def samples_otherwise(trainer: Any, batch: Any) -> str | None:
    """Whether a Trainer's own ``get_batch_samples`` goes by how a step's rows are split, in words.

    Args:
        trainer: About to train.
        batch: Some of its rows, which are given to it at once, and in two halves.
    """
    import torch

    if of_a_library(trainer.get_batch_samples):
        return None
    rows, found = rows_in(batch), []
    with contextlib.suppress(Exception):
        halves = [rows_at(batch, rows, places) for places in (range(rows // 2), range(rows // 2, rows))]
        for given in ([batch], halves):
            batches, items = trainer.get_batch_samples(iter(given), len(given), torch.device("cpu"))
            found.append((sum(map(rows_in, batches)), items if items is None else float(items)))
    return None if len(found) == 2 and found[0] == found[1] else reasons.SAMPLES


@contextlib.contextmanager
def _few_layers(model: Any, batch: Mapping[str, Any]) -> Iterator[None]:
    """A model with so few layers that asking does not take long.

    Raises:
        ValueError: It does.
    """
    asked = 2 * sum(map(len, COMBINED))
    positions: float = max(_positions(one) / len(one) for one in batch.values() if getattr(one, "ndim", 0))

    def products() -> float:
        return asked * positions * float(sum(one.numel() for one in model.parameters()))

    with cut(model, None if products() <= _MOST_PRODUCTS else FEW_LAYERS):
        if products() > _MOST_PRODUCTS:
            raise ValueError("too large")
        yield


def _positions(tensor: Any) -> float:
    """About how many positions a model has for a tensor of a batch."""
    return float(tensor.numel() / (_PATCH if tensor.is_floating_point() else 1))
