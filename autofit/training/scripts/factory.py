"""The script that stands for a factory: ``python factory.py MODULE:NAME FOLDER [--flags of TrainingArguments]``.

A factory is a function of the user's that takes nothing and returns three things:

- the model: a ``torch.nn.Module`` with its weights, on the CPU;
- the batches: a function that makes a batch of so many rows, or a data set (anything with a length and rows) whose
  rows PyTorch's usual collator puts together; a batch is a ``dict`` or a tuple of tensors whose first dimension
  is the rows;
- the loss: a function of the model and a batch that returns a tensor with one number, the mean over the rows.

It is trained by a transformers ``Trainer``, so that all that can be tuned of a script can be tuned of it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # modules of this folder must not stand for the user's
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

from autofit.system.job import error_words
from autofit.training.scripts.leave import Refused

USUAL_ROWS, USUAL_STEPS = 32, 1000
_AUTOFIT = Path(__file__).resolve().parents[2]
_WANTED = "return (model, batches, loss): a torch.nn.Module; a function of a number of rows, or a data set; a function \
of the model and a batch"


def main(name: str, folder: str, flags: list[str]) -> None:
    """Train what a factory returns.

    Args:
        name: ``MODULE:NAME``.
        folder: Where its module, or the first package of its name, lies.
        flags: Fields of ``TrainingArguments``, as a command line has them.
    """
    from transformers import HfArgumentParser, Trainer, TrainingArguments

    model, batches, loss = made(name, folder)
    rows, collate, endless = _rows(name, batches)
    reader: Any = HfArgumentParser
    parser = reader(TrainingArguments, prog=name)
    parser.set_defaults(per_device_train_batch_size=USUAL_ROWS, **({"max_steps": USUAL_STEPS} if endless else {}))
    (arguments,) = parser.parse_args_into_dataclasses(flags)
    arguments.remove_unused_columns = False  # forward() does not tell which columns the loss reads
    check_loss(name, model, collate([rows[0]] * 2 if not endless else [0, 0]), loss)

    class FactoryTrainer(Trainer):
        """Takes the factory's own loss."""

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return loss(model, inputs)

    trainer = FactoryTrainer(model, arguments, train_dataset=rows, data_collator=collate)
    trainer.model_accepts_loss_kwargs = False  # it is the mean of a micro-batch, which accumulation divides
    trainer.train()
    if arguments.should_save:
        trainer.save_model()


def made(name: str, folder: str) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """What a factory returns.

    Raises:
        Refused: There is no such factory, it fails, or it returns something else.
    """
    import torch

    module, _, attribute = name.partition(":")
    sys.path.insert(0, folder)
    try:
        factory: Any = importlib.import_module(module)
    except Exception as error:
        raise Refused(f"{module} can't be imported{_place(error)}: {error_words(error)}", "mend it first") from error
    for part in attribute.split("."):
        if not hasattr(factory, part):
            raise Refused(f"{module} has no {attribute}", "give MODULE:NAME of a function in it")
        factory = getattr(factory, part)
    if not callable(factory):
        raise Refused(f"{name} is {_kind(factory)}, and no function", _WANTED)
    try:
        found = factory()
    except Exception as error:
        raise Refused(f"{name} failed{_place(error)}: {error_words(error)}", "does it work by itself?") from error
    if not isinstance(found, tuple | list) or len(found) != 3:
        count = f" of {len(found)}" if isinstance(found, tuple | list) else ""
        raise Refused(f"{name} returns {_kind(found)}{count}", _WANTED)
    model, batches, loss = found
    if not isinstance(model, torch.nn.Module):
        raise Refused(f"{name} returns {_kind(model)} for the model", _WANTED)
    if not callable(loss):
        raise Refused(f"{name} returns {_kind(loss)} for the loss", _WANTED)
    return model, batches, loss


def _rows(name: str, batches: Any) -> tuple[Any, Callable[[list[Any]], Any], bool]:
    """A data set, what puts its rows together, and whether it never ends."""
    from torch.utils.data import IterableDataset, default_collate

    def checked(batch: Any, asked: int) -> Any:
        if not isinstance(batch, Mapping | list | tuple) or not batch:
            raise Refused(f"a batch of {name} is {_kind(batch)}", "make it a dict of tensors, by name, or a tuple")
        for key, value in batch.items() if isinstance(batch, Mapping) else enumerate(batch):
            if hasattr(value, "shape") and tuple(value.shape[:1]) != (asked,):
                raise Refused(
                    f"a batch of {name} for {asked} rows has {key!r} of the shape {tuple(value.shape)}",
                    f"the first dimension is the rows: {asked}",
                )
        return batch

    if hasattr(batches, "__getitem__") and hasattr(batches, "__len__"):
        if not len(batches):
            raise Refused(f"the data set of {name} has no rows", "give it some")
        return batches, lambda rows: checked(default_collate(rows), len(rows)), False
    if not callable(batches):
        raise Refused(f"{name} returns {_kind(batches)} for the batches", _WANTED)

    class Endless(IterableDataset[int]):
        """Rows that are made when a batch of them is."""

        def __iter__(self) -> Iterator[int]:
            while True:
                yield 0

    return Endless(), lambda rows: checked(batches(len(rows)), len(rows)), True


def check_loss(name: str, model: Any, batch: Any, loss: Callable[[Any, Any], Any]) -> None:
    """Take the loss once, on a copy without storage.

    Raises:
        Refused: It fails, or gives no number that can be trained on.
    """
    import copy

    import torch
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeCopyMode,
        FakeTensorMode,
        UnsupportedOperatorException,
    )

    untold = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(fake):
        without_storage = copy.deepcopy(model).train()
    with fake:
        try:
            found = loss(without_storage, batch)
        except untold:
            return  # it looks at values, which a copy without storage has none of
        except Exception as error:
            raise Refused(f"the loss of {name} failed{_place(error)}: {error_words(error)}", _WANTED) from error
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        shape = f" of the shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else ""
        raise Refused(f"the loss of {name} is {_kind(found)}{shape}", "return a tensor with one number")
    used = "are the model's weights trainable, and is it used?"
    if not found.requires_grad:
        raise Refused(f"the loss of {name} has no gradient", used)
    both = (*without_storage.parameters(), *model.parameters())  # a loss may know the model by itself
    weights = [one for one in both if one.requires_grad]
    with fake, contextlib.suppress(*untold):
        if weights and all(one is None for one in torch.autograd.grad(found, weights, allow_unused=True)):
            raise Refused(f"the loss of {name} does not depend on a weight of the model", used)


def _kind(found: Any) -> str:
    import torch

    if isinstance(found, torch.Tensor):
        return "a tensor"
    return "None" if found is None else f"a {type(found).__name__}"


def _place(error: BaseException) -> str:
    """The innermost line of the user's own where an error came up, in words."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _is_own(file: str) -> bool:
    return "site-packages" not in file and not file.startswith("<") and _AUTOFIT not in Path(file).parents


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
