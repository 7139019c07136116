"""What a script's text takes from elsewhere that may train: a Trainer of transformers, an Accelerator."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path


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
