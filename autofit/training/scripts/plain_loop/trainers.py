"""What a script's text takes from elsewhere that may train (a Trainer, an Accelerator), and loops without either."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autofit.training.scripts.leave import Refused


def taken(path: str) -> tuple[list[tuple[str, str]], bool]:
    """What a script's text takes from which modules, and whether it prepares anything."""
    nodes = list(ast.walk(ast.parse(Path(path).read_bytes())))
    named = {
        alias.asname or alias.name: alias.name for one in nodes if isinstance(one, ast.Import) for alias in one.names
    }
    attributes = [one for one in nodes if isinstance(one, ast.Attribute)]
    taken = [(named.get(ast.unparse(one.value)), one.attr) for one in attributes]
    taken += [(one.module, alias.name) for one in nodes if isinstance(one, ast.ImportFrom) for alias in one.names]
    prepares = any(one.attr.startswith("prepare") for one in attributes)
    return [(module, name) for module, name in taken if module], prepares


def may_train_later(taken: list[tuple[str, str]], prepares: bool, *, accelerated: bool) -> bool:
    """Whether a script takes a Trainer of transformers, or an Accelerator that prepares something."""
    kinds = {kind for module, name in taken for kind in _trainers(module, name)}
    return "Trainer" in kinds or (prepares if "Accelerator" in kinds else accelerated)


def _trainers(module: str, name: str) -> Iterator[str]:
    """Which of Trainer and Accelerator a name of a module is; what is not imported yet may be what it is called."""
    from accelerate import Accelerator
    from transformers import Trainer

    there = sys.modules.get(module)
    for one in dir(there) if name == "*" else [name]:
        if not one.endswith(("Trainer", "Accelerator")):
            continue
        kind = getattr(there, one, None)
        for known in (Trainer, Accelerator):
            if issubclass(kind, known) if isinstance(kind, type) else one.endswith(known.__name__):
                yield known.__name__


def refuse_loops_of_its_own(path: str, known: Callable[[], bool], accelerated: Callable[[], bool]) -> None:
    """Leave a script where its first optimizer step is neither a Trainer's nor an Accelerator's.

    Such a loop would train to its end. Where the script's text takes a Trainer or an Accelerator from elsewhere, and
    prepares something with that, it may come before these.

    Args:
        path: Of the script.
        known: Whether it has made a Trainer, or an optimizer of an Accelerator's steps now.
        accelerated: Whether it has made an Accelerator.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    named = functools.cache(lambda: taken(path))  # each of its steps asks

    def stepped(*_: Any) -> None:
        if not (known() or may_train_later(*named(), accelerated=accelerated())):
            raise Refused(
                f"{Path(path).name} trains in a loop without Accelerate, into which no plan can be put",
                "have an Accelerator prepare model, optimizer and loader, and call its backward(loss); or write a "
                "function that returns the model, its batches and its loss: autofit tune my.nets:make",
            )

    register_optimizer_step_post_hook(stepped)
