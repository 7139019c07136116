"""Linear layers whose weights their model reads itself: what is put in the place of such a layer is passed by."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_NO_STEP = {"torch.nn.modules.module", "transformers.modeling_utils"}
"""Where the methods of every module and model are: they load, tie and count weights."""
_ASKS = {"isinstance", "id", "hasattr", "getattr"}


def read_directly(model: Any) -> tuple[str, ...]:
    """Paths of the linear layers whose weights a module above them hands to a kernel, as ``layers.*.mixer.out_proj``.

    Mamba's fused kernels take the weight of the output projection, PyTorch's ``MultiheadAttention`` and WavLM's those
    of theirs. An adapter on such a layer would not be trained, and a kernel can't read packed weights. Whether the
    kernel is there, or the layer itself is called in its place, does not matter: what is trained is not to differ by
    that. Read off the source of the modules' classes.
    """
    import torch

    found, known = set(), dict[type, frozenset[str]]()
    for path, module in model.named_modules():
        kind = type(module)
        layers = [name for name, one in module.named_children() if isinstance(one, torch.nn.Linear)]
        if not layers:
            continue
        if kind not in known:
            known[kind] = frozenset(_weights_handed_on(kind))
        found |= {f"{path}.{name}".removeprefix(".") for name in layers if name in known[kind]}
    return tuple(sorted({_NUMBER.sub("*", path) for path in found}))


def _weights_handed_on(kind: type) -> Iterator[str]:
    """The names of ``self.NAME.weight`` that methods of a class call something with."""
    for name in dir(kind):
        method: Any = inspect.unwrap(getattr(kind, name, None))  # type: ignore[arg-type]
        named = getattr(getattr(method, "__code__", None), "co_names", ())
        if "weight" not in named or name.startswith(("__init", "_init")) or method.__module__ in _NO_STEP:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        except (OSError, SyntaxError, TypeError):  # made in code
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) not in _ASKS:
                handed = [*node.args, *(one.value for one in node.keywords)]
            elif isinstance(node, ast.List | ast.Tuple):
                handed = node.elts
            else:
                continue
            yield from (layer for one in handed if (layer := _layer_of(one)) is not None)


def _layer_of(node: ast.expr) -> str | None:
    """The ``NAME`` of ``self.NAME.weight``; ``None`` for any other expression."""
    if isinstance(node, ast.Attribute) and node.attr == "weight":
        owner = node.value
        if isinstance(owner, ast.Attribute) and isinstance(owner.value, ast.Name) and owner.value.id == "self":
            return owner.attr
    return None
