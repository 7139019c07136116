"""What a loop does by the number of its batches: to go on, to take what belongs to one, to train on it."""

from __future__ import annotations

import ast
import itertools
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from autofit.training.scripts.plain_loop.by_number.statements import (
    at_each_batch,
    goes_on,
    is_empty,
    parts,
    targets,
    unconditional,
)
from autofit.training.scripts.plain_loop.by_number.text import Scope, Text

_COUNTED = "it tells by the number of its batches when to leave its loop, or which to leave out (line {} of {})"
_BY_LOSS = "it goes by the loss of a micro-batch when to leave its loop, or how to train (line {} of {})"
_TAKES = "it takes by the number of its batches what belongs to each, as by {} (line {} of {})"
_TRAINS = "it trains otherwise by the number of its batches, or by what it sums up of each (line {} of {})"
_LEAVE = (ast.Break, ast.Continue, ast.Return, ast.Raise)
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
    text = Text([*at_each_batch(inner)])
    names = {name for one in text.every if isinstance(one, ast.AugAssign) and goes_on(one) for name in targets(one)}
    if counts and isinstance(inner.target, ast.Tuple):
        names.add(ast.unparse(inner.target.elts[0]))
    _count(text, inner, names, frame)
    for one in _decisions(loops[0], loops):
        if text.reads(one.test):
            return _COUNTED.format(one.lineno, path.name)
    for part in text.every:
        counted = isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Load)
        if counted and ast.unparse(part.slice) in names and _is_there(part.value, frame, inner):
            return _TAKES.format(ast.unparse(part), part.lineno, path.name)
    if line := text.line():
        return _TRAINS.format(line, path.name)
    ends = next((_COUNTED.format(one.lineno, path.name) for one in inner.body if isinstance(one, ast.Break)), None)
    return ends or _by_its_loss(text.every, [*_decisions(loops[0], loops)], frame)


def _by_its_loss(every: list[Any], decisions: list[Any], frame: FrameType) -> str | None:
    """What a frame's loop does by how large the loss of a batch is, in words; ``every`` part of it is given."""
    text = Text(every, of_losses=True)
    text.known = text.first(())
    text.follow(_scope(frame))
    text.spread()
    trains = [one for one in every if isinstance(one, ast.If) and any(map(text.changes, at_each_batch(one)))]
    line = next((one.lineno for one in (*decisions, *trains) if text.reads(one.test)), None)
    return _BY_LOSS.format(line, Path(frame.f_code.co_filename).name) if line else None


def _scope(frame: FrameType) -> Scope:
    """Where the names of a frame's text stand for objects."""
    path = Path(frame.f_code.co_filename)
    return Scope(ChainMap(frame.f_locals, frame.f_globals), path, path.parent)


def _count(text: Text, loop: Any, names: set[str], frame: FrameType) -> None:
    """Find what in the text of a frame's loop depends on the number of its batches; ``names`` it counts or sums up."""
    given = {ast.unparse(one) for one in getattr(loop.target, "elts", [loop.target])}
    always = {id(one) for one in unconditional(loop.body)}  # a number may be set back now and then
    fresh = [one for one in text.every if id(one) in always or not is_empty(getattr(one, "value", None))]
    anew = {name for one in fresh if not goes_on(one) for name in targets(one)}
    text.known = ({*text.counted()} - given | names) - anew
    taken = [one for one in text.every if isinstance(one, ast.Subscript) and not _is_there(one.value, frame, loop)]
    text.absent = {id(part) for one in taken for part in ast.walk(one)}
    text.follow(_scope(frame))
    text.spread()


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


def _decisions(node: ast.AST, loops: list[_Loop]) -> Iterator[Any]:
    """What decides whether a loop goes on or leaves a batch out; not in other loops beside or inside of it."""
    if isinstance(node, ast.While) or (
        isinstance(node, ast.If) and any(isinstance(one, _LEAVE) for one in [*node.body, *node.orelse])
    ):
        yield node
    for child in parts(node):
        if not isinstance(child, _Loop | ast.FunctionDef | ast.Lambda) or child in loops:
            yield from _decisions(child, loops)
