"""``torch.nn.Module.named_modules`` without a generator for each level, through which every module has to pass.

PyTorch and transformers go through a model's modules some twenty times a trace, each time eight levels down.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from autofit.contract.technique import replacing


def at_once() -> contextlib.AbstractContextManager[None]:
    """Have modules go through what is below them in this way."""
    return replacing([(nn.Module, "named_modules", _named_modules)])


def _named_modules(
    self: nn.Module, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """The same modules in the same order, also where one is put in while they are gone through."""
    memo = set() if memo is None else memo
    levels: list[tuple[str, Iterator[tuple[str, nn.Module | None]]]] = [("", iter([(prefix, self)]))]
    while levels:
        inside, children = levels[-1]
        for name, module in children:
            if module is None or module in memo:
                continue
            path = f"{inside}{name}"
            if type(module).named_modules is not _named_modules:  # a module with a way of its own
                yield from module.named_modules(memo, path, remove_duplicate)
                continue
            if remove_duplicate:
                memo.add(module)
            yield path, module
            if module._modules:
                levels.append((f"{path}." if path else "", iter(module._modules.items())))
                break
        else:
            levels.pop()
