"""What the text of a loop, or of a function that it calls, does by the number of its batches."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_COUNTED = "it tells by the number of its batches when to leave its loop, or which to leave out (line {} of {})"
_TAKES = "it takes by the number of its batches what belongs to each, as by {} (line {} of {})"
_TRAINS = "it trains otherwise by the number of its batches, or by what it sums up of each (line {} of {})"
_STEPS = {"backward", "step", "requires_grad_"}
"""Methods that train by what they are given."""
_SETS = {*_STEPS, "zero_grad", "load_state_dict", "add_param_group", "clip_grad_norm_", "clip_grad_value_"}
"""Methods, and functions of PyTorch, that change what is trained."""
_GROUPS = "param_groups"
"""What an optimizer calls its learning rates and the like."""
_LEAVE = (ast.Break, ast.Continue, ast.Return)
_Loop = ast.For | ast.While


def takes_by_number(own_split: str | None) -> bool:
    """Whether a script's split is its own since it takes what belongs to a batch by the number of that."""
    return own_split is not None and own_split.startswith(_TAKES.partition("{")[0])


def by_its_number(frame: FrameType, path: Path, *, counts: bool) -> str | None:
    """What a frame's loop does by the number of batches, in words: to go on, to train on one, to take another's rows.

    Args:
        frame: In the middle of its loop.
        path: Of its text.
        counts: Whether it is given a number beside each batch, as by ``enumerate``.
    """
    positions = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    loops = max(_loops_at(tree, positions[0] or frame.f_lineno, []), key=len, default=[])
    if not loops:
        return None
    inner: Any = loops[-1]
    added = (one for one in _at_each_batch(inner) if isinstance(one, ast.AugAssign))
    names = {ast.unparse(one.target) for one in added if not _at_a_step(one.value)}
    if counts and isinstance(inner.target, ast.Tuple):
        names.add(ast.unparse(inner.target.elts[0]))
    for one in _decisions(loops[0], loops):
        if names & {ast.unparse(part) for part in ast.walk(one.test) if isinstance(part, ast.Name | ast.Attribute)}:
            return _COUNTED.format(one.lineno, path.name)
    read: Iterator[Any] = (one for one in _at_each_batch(inner) if isinstance(one, ast.Subscript))
    for part in read:
        counted = isinstance(part.ctx, ast.Load) and ast.unparse(part.slice) in names
        if counted and _is_there(part.value, frame, inner):
            return _TAKES.format(ast.unparse(part), part.lineno, path.name)
    if line := _trains_by(inner, names, frame):
        return _TRAINS.format(line, path.name)
    return next((_COUNTED.format(one.lineno, path.name) for one in inner.body if isinstance(one, ast.Break)), None)


def _trains_by(loop: Any, names: set[str], frame: FrameType) -> int | None:
    """The line in which a loop trains by the number of its batches: what it steps or computes gradients of, and when.

    Args:
        loop: Over its batches.
        names: What it counts, or sums up of each.
        frame: In the middle of it.
    """
    every: list[Any] = [*_at_each_batch(loop)]
    given = {ast.unparse(one) for one in getattr(loop.target, "elts", [loop.target])}
    always = [*_unconditional(loop.body)]  # a number may be set back now and then
    fresh = [one for one in every if one in always or not isinstance(getattr(one, "value", None), ast.Constant)]
    anew = {name for one in fresh if not _goes_on(one) for name in _targets(one)}
    known = ({name for one in every if _goes_on(one) for name in _targets(one)} - given | names) - anew
    taken = [one for one in every if isinstance(one, ast.Subscript) and not _is_there(one.value, frame, loop)]
    reads = _readers_of(known, every, absent={id(part) for one in taken for part in ast.walk(one)})
    for one in every:
        if isinstance(one, ast.If) and reads(one.test) and any(map(_changes, _at_each_batch(one))):
            return int(one.lineno)
        trains = isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in _STEPS
        if any(map(reads, one.args if trains else _put_into_groups(one))):
            return int(one.lineno)
    return None


def _readers_of(known: set[str], every: list[Any], absent: Container[int] = ()) -> Callable[[ast.AST], bool]:
    """Whether a part of a text reads what depends on these names.

    Args:
        known: The names; those that are computed of them are put in.
        every: All parts of the text.
        absent: By its ``id`` what does not count.
    """

    def reads(node: ast.AST) -> bool:
        read = (one for one in ast.walk(node) if isinstance(one, ast.Name | ast.Attribute) and id(one) not in absent)
        return any(ast.unparse(one) in known for one in read)

    before = -1
    while len(known) != before:
        before = len(known)
        for one in every:
            if isinstance(one, ast.If) and reads(one.test):
                known.update(name for part in _at_each_batch(one) for name in _targets(part))
            elif isinstance(one, ast.Assign | ast.AugAssign | ast.AnnAssign) and one.value and reads(one.value):
                known.update(_targets(one))
    return reads


def line_of_calls(function: Any) -> int | None:
    """The line in which a function of each micro-batch goes by what it keeps from one call to the next.

    Its text is read: what it returns, or changes of the training, may depend on what it counts or sums up in an
    attribute or a name outside of it. What other functions keep for it is not seen.

    Args:
        function: That computes a loss, or makes a step.
    """
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    every: list[Any] = [*ast.walk(tree)]
    outside = {name for one in every if isinstance(one, ast.Global | ast.Nonlocal) for name in one.names}
    own = {one.id for one in every if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)} - outside
    own |= {one.arg for one in every if isinstance(one, ast.arg)} - {"self"}
    kept = {name for one in every if _adds(one) for name in _targets(one) if name.partition(".")[0] not in own}
    reads = _readers_of(kept, every)
    for one in every:
        returns = isinstance(one, ast.Return) and one.value is not None and reads(one.value)
        if returns or (isinstance(one, ast.If) and reads(one.test) and any(map(_changes, ast.walk(one)))):
            return first + int(one.lineno) - 1
    return None


def _adds(node: Any) -> bool:
    """Whether a statement sets what it has read."""
    if not isinstance(node, ast.Assign):
        return isinstance(node, ast.AugAssign)
    return not {ast.unparse(part) for part in ast.walk(node.value)}.isdisjoint(_targets(node))


def _goes_on(node: ast.AST) -> bool:
    """Whether a statement adds to what was there before."""
    if isinstance(node, ast.Assign):
        value: Any = node.value
        added = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
        return added and ast.unparse(value.left) in _targets(node)
    return isinstance(node, ast.AugAssign)


def _unconditional(body: list[Any]) -> Iterator[ast.AST]:
    """Statements of a loop that each batch runs."""
    for one in body:
        yield one
        if isinstance(one, ast.With):
            yield from _unconditional(one.body)


def _targets(node: ast.AST) -> list[str]:
    """Names that a statement sets."""
    if isinstance(node, ast.Assign):
        parts = [part for target in node.targets for part in getattr(target, "elts", [target])]
        return [ast.unparse(part) for part in parts]
    return [ast.unparse(node.target)] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []


def _put_into_groups(node: ast.AST) -> list[ast.AST]:
    """What a statement, or a loop over an optimizer's groups, sets in these: a learning rate, a weight decay."""
    if isinstance(node, ast.For) and _GROUPS in ast.unparse(node.iter):
        names = {one.id for one in ast.walk(node.target) if isinstance(one, ast.Name)}
        parts: list[ast.AST] = [*ast.walk(node)]
    else:
        names, parts = set(), [node]
    every: list[Any] = [one for one in parts for target in _assigned(one) if _is_of_a_group(target, names)]
    return [one.value for one in every]


def _assigned(node: ast.AST) -> list[Any]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AugAssign) else []


def _is_of_a_group(node: Any, names: set[str]) -> bool:
    """Whether a value of an optimizer's group is set there, such as ``optimizer.param_groups[0]["lr"]``."""
    return isinstance(node, ast.Subscript) and (_GROUPS in (of := ast.unparse(node.value)) or of in names)


def _changes(node: ast.AST) -> bool:
    """Whether a statement changes what is trained, or how."""
    if _put_into_groups(node):
        return True
    if isinstance(node, ast.Assign):
        return any(isinstance(one, ast.Attribute) and one.attr == "requires_grad" for one in node.targets)
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _SETS


def _is_there(node: ast.AST, frame: FrameType, loop: ast.AST) -> bool:
    """Whether there is what a loop's text reads from: a script may make its cache only where it is told to."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    if not isinstance(node, ast.Name) or node.id in frame.f_locals or node.id in frame.f_globals:
        return True
    return any(
        isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store) and one.id == node.id for one in ast.walk(loop)
    )


def _loops_at(node: ast.AST, line: int, around: list[_Loop]) -> Iterator[list[_Loop]]:
    """Each ``for`` whose iterable stands at a line, behind the loops of its function around it."""
    if isinstance(node, ast.For) and node.iter.lineno <= line <= (node.iter.end_lineno or line):
        yield [*around, node]
    if isinstance(node, _Loop):
        around = [*around, node]
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        around = []
    for child in ast.iter_child_nodes(node):
        yield from _loops_at(child, line, around)


def _at_each_batch(node: ast.AST) -> Iterator[ast.AST]:
    """What is inside of a loop, but for what is done only where gradients are synchronized."""
    for child in _parts(node):
        if not (isinstance(child, ast.If) and _at_a_step(child.test)):
            yield child
            yield from _at_each_batch(child)


def _at_a_step(node: ast.AST) -> bool:
    """Whether a condition or a number tells of an optimizer step."""
    return "sync_gradients" in ast.unparse(node)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node, but for a branch that trains otherwise: without ``accelerator.accumulate``."""
    if not isinstance(node, ast.If):
        yield from ast.iter_child_nodes(node)
        return
    yield node.test
    for branch in (node.body, node.orelse):
        text = "\n".join(map(ast.unparse, branch))
        if "backward(" not in text or "optimizer.step(" not in text or "accumulate(" in text:
            yield from branch


def _decisions(node: ast.AST, loops: list[_Loop]) -> Iterator[Any]:
    """What decides whether a loop goes on or leaves a batch out; not in other loops beside or inside of it."""
    if isinstance(node, ast.While) or (
        isinstance(node, ast.If) and any(isinstance(one, _LEAVE) for one in [*node.body, *node.orelse])
    ):
        yield node
    for child in _parts(node):
        if not isinstance(child, _Loop | ast.FunctionDef | ast.Lambda) or child in loops:
            yield from _decisions(child, loops)
