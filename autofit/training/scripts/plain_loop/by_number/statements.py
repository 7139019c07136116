"""What a statement of a script's text sets, adds to or changes of the training."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

STEPS = {"backward", "step", "requires_grad_"}
"""Methods that train by what they are given."""
_SETS = {
    *STEPS, "zero_grad", "load_state_dict", "add_param_group", "clip_grad_norm_", "clip_grad_value_",
    "update_parameters", "set_trigger",
}  # fmt: skip
"""Methods, and functions of PyTorch and Accelerate, that change what is trained, or until when."""
_WEIGHTS = ("parameters(", "state_dict(")
"""How a text takes a model's weights one by one."""
_GROUPS = "param_groups"
"""What an optimizer calls its learning rates and the like."""
SETTING = (ast.Assign, ast.AugAssign, ast.AnnAssign)


def goes_on(node: ast.AST) -> bool:
    """Whether a statement adds to what was there before."""
    if not isinstance(node, ast.Assign):
        return isinstance(node, ast.AugAssign) and not _at_a_step(node.value)
    values = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
    return any(adds(ast.Assign(node.targets, one)) for one in values if isinstance(one, ast.BinOp))


def adds(node: Any) -> bool:
    """Whether a statement sets what it has read."""
    if not isinstance(node, ast.Assign):
        return isinstance(node, ast.AugAssign)
    return not {ast.unparse(part) for part in ast.walk(node.value)}.isdisjoint(targets(node))


def is_empty(node: ast.AST | None) -> bool:
    """Whether what is set says nothing of a batch: a number, or an empty list."""
    return isinstance(node, ast.Constant) or (isinstance(node, ast.List) and not node.elts)


def unconditional(body: list[Any]) -> Iterator[ast.AST]:
    """Statements of a loop that each batch runs."""
    for one in body:
        yield one
        if isinstance(one, ast.With):
            yield from unconditional(one.body)


def targets(node: ast.AST) -> list[str]:
    """Names that a statement sets."""
    return [ast.unparse(part) for target in _assigned(node) for part in getattr(target, "elts", [target])]


def put_into_groups(node: ast.AST) -> list[ast.AST]:
    """What a statement, or a loop over an optimizer's groups, sets in these: a learning rate, a weight decay."""
    if isinstance(node, ast.For) and _GROUPS in ast.unparse(node.iter):
        names = {one.id for one in ast.walk(node.target) if isinstance(one, ast.Name)}
        parts: list[ast.AST] = [*ast.walk(node)]
    else:
        names, parts = set(), [node]
    every: list[Any] = [one for one in parts for target in _assigned(one) if _is_of_a_group(target, names)]
    return [one.value for one in every if one.value]


def _assigned(node: ast.AST) -> list[Any]:
    """What a statement sets, side by side where it sets several to one value."""
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def _is_of_a_group(node: Any, names: set[str]) -> bool:
    """Whether a value of an optimizer's group is set there, such as ``optimizer.param_groups[0]["lr"]``."""
    return isinstance(node, ast.Subscript) and (_GROUPS in (of := ast.unparse(node.value)) or of in names)


def changes(node: ast.AST) -> bool:
    """Whether a statement changes what is trained, or how."""
    if put_into_groups(node):
        return True
    if isinstance(node, ast.For) and any(name in ast.unparse(node.iter) for name in _WEIGHTS):
        return any(map(_writes, ast.walk(node)))
    if isinstance(node, ast.Assign):
        return any(isinstance(one, ast.Attribute) and one.attr == "requires_grad" for one in node.targets)
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _SETS


def _writes(node: ast.AST) -> bool:
    """Whether a tensor is changed in its place."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr.endswith("_") and not node.func.attr.endswith("__")
    return any(isinstance(one, ast.Attribute) and one.attr == "data" for one in _assigned(node))


def at_each_batch(node: ast.AST) -> Iterator[ast.AST]:
    """What is inside of a loop, but for what is done only where gradients are synchronized."""
    for child in parts(node):
        if not (isinstance(child, ast.If) and _at_a_step(child.test)):
            yield child
            yield from at_each_batch(child)


def _at_a_step(node: ast.AST) -> bool:
    """Whether a condition or a number tells of an optimizer step."""
    return "sync_gradients" in ast.unparse(node)


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node, but for a branch that trains otherwise: without ``accelerator.accumulate``."""
    if not isinstance(node, ast.If):
        yield from ast.iter_child_nodes(node)
        return
    yield node.test
    for branch in (node.body, node.orelse):
        text = "\n".join(map(ast.unparse, branch))
        if "backward(" not in text or "optimizer.step(" not in text or "accumulate(" in text:
            yield from branch
