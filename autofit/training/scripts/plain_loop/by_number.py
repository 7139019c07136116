"""What the text of a loop, or of a function that it calls, does by the number of its batches."""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import textwrap
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

_COUNTED = "it tells by the number of its batches when to leave its loop, or which to leave out (line {} of {})"
_TAKES = "it takes by the number of its batches what belongs to each, as by {} (line {} of {})"
_TRAINS = "it trains otherwise by the number of its batches, or by what it sums up of each (line {} of {})"
_STEPS = {"backward", "step", "requires_grad_"}
"""Methods that train by what they are given."""
_SETS = {
    *_STEPS, "zero_grad", "load_state_dict", "add_param_group", "clip_grad_norm_", "clip_grad_value_",
    "update_parameters", "set_trigger",
}  # fmt: skip
"""Methods, and functions of PyTorch and Accelerate, that change what is trained, or until when."""
_WEIGHTS = ("parameters(", "state_dict(")
"""How a text takes a model's weights one by one."""
_GROUPS = "param_groups"
"""What an optimizer calls its learning rates and the like."""
_LEAVE = (ast.Break, ast.Continue, ast.Return, ast.Raise)
_READ = (ast.Name, ast.Attribute, ast.Subscript)
_SETTING = (ast.Assign, ast.AugAssign, ast.AnnAssign)
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
    text = _Text([*_at_each_batch(inner)])
    names = {name for one in text.every if isinstance(one, ast.AugAssign) and _goes_on(one) for name in _targets(one)}
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
    return next((_COUNTED.format(one.lineno, path.name) for one in inner.body if isinstance(one, ast.Break)), None)


def _count(text: _Text, loop: Any, names: set[str], frame: FrameType) -> None:
    """Find what in the text of a frame's loop depends on the number of its batches; ``names`` it counts or sums up."""
    given = {ast.unparse(one) for one in getattr(loop.target, "elts", [loop.target])}
    always = {id(one) for one in _unconditional(loop.body)}  # a number may be set back now and then
    fresh = [one for one in text.every if id(one) in always or not _is_empty(getattr(one, "value", None))]
    anew = {name for one in fresh if not _goes_on(one) for name in _targets(one)}
    text.known = ({*text.counted()} - given | names) - anew
    taken = [one for one in text.every if isinstance(one, ast.Subscript) and not _is_there(one.value, frame, loop)]
    text.absent = {id(part) for one in taken for part in ast.walk(one)}
    calls = [(one, _called(one, frame)) for one in text.every if isinstance(one, ast.Call)]
    text.calls = {id(call): called for call, called in calls if called is not None}
    text.spread()


@dataclass(slots=True)
class _Text:
    """What a loop, or a function that it calls, does with each batch.

    Attributes:
        every: All of its parts, but for what is done only where gradients are synchronized.
        known: Names of what depends on the number of batches.
        absent: By its ``id`` what does not count.
        calls: Functions that it calls, by the ``id`` of the call.
    """

    every: list[Any]
    known: set[str] = field(default_factory=set)
    absent: Container[int] = ()
    calls: dict[int, _Called] = field(default_factory=dict)

    def counted(self) -> Iterator[str]:
        """Names of what it adds to: a number, a list, a progress bar."""
        for one in self.every:
            yield from _targets(one) if _goes_on(one) else ()
            if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute):
                if one.func.attr == "append":
                    yield ast.unparse(one.func.value)
                elif one.func.attr == "update" and all(isinstance(given, ast.Constant) for given in one.args):
                    yield f"{ast.unparse(one.func.value)}.n"

    def reads(self, node: ast.AST) -> bool:
        """Whether a part of it reads what depends on the number of batches."""
        read = (one for one in ast.walk(node) if isinstance(one, _READ) and id(one) not in self.absent)
        return any(ast.unparse(one) in self.known for one in read)

    def spread(self) -> None:
        """Find what is computed of that which is known to depend on it."""
        before = -1
        while len(self.known) != before:
            before = len(self.known)
            for one in self.every:
                if isinstance(one, ast.If) and self.reads(one.test):
                    self.known.update(name for part in _at_each_batch(one) for name in _targets(part))
                elif isinstance(one, _SETTING) and one.value and self.reads(one.value):
                    self.known.update(_targets(one))
                elif id(one) in self.calls:
                    self.known |= self.calls[id(one)].told(one, self)

    def line(self) -> int | None:
        """The line in which it trains by that: what it steps or computes gradients of, and when."""
        for one in self.every:
            if isinstance(one, ast.If) and self.reads(one.test) and any(map(self._changes, _at_each_batch(one))):
                return int(one.lineno)
            trains = isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in _STEPS
            if any(map(self.reads, one.args if trains else _put_into_groups(one))):
                return int(one.lineno)
            if id(one) in self.calls and self.calls[id(one)].text.line():
                return int(one.lineno)
        return None

    def _changes(self, node: ast.AST) -> bool:
        called = self.calls.get(id(node))
        return _changes(node) or (called is not None and any(map(_changes, called.text.every)))


@dataclass(frozen=True, slots=True)
class _Called:
    """A function of the script's that its loop calls.

    Attributes:
        text: Of it, where the object that a method is called on has the name that the loop has for it.
        parameters: Those that its call gives, in their order.
        own: Names that are its own.
        on: What a method is called on; empty for a function.
        beside: Whether it is in the loop's file, and so reads the same global names.
    """

    text: _Text
    parameters: Sequence[str]
    own: Container[str]
    on: str
    beside: bool

    def told(self, call: ast.Call, by: _Text) -> set[str]:
        """What the loop, too, then knows to depend on the number of its batches: what the function keeps or returns."""

        def outer(names: set[str]) -> set[str]:
            free = {name for name in names if _root(name) not in self.own}
            return {name for name in free if self.beside or _root(name) == _root(self.on)}

        given = [*zip(self.parameters, call.args, strict=False), *((one.arg, one.value) for one in call.keywords)]
        known = {name for name, value in given if name is not None and by.reads(value)}
        kept = {name for name in self.text.counted() if _root(name) not in self.own}
        self.text.known |= known | outer(by.known) | kept
        self.text.spread()
        returns = any(isinstance(one, ast.Return) and self.text.reads(one) for one in self.text.every)
        return outer(self.text.known) | ({ast.unparse(call.func)} if returns else set())


def _called(call: ast.Call, frame: FrameType) -> _Called | None:
    """The function that a call in a frame's loop is for, where it stands beside that; ``None`` for a library's."""
    function, receiver = _object(call.func, frame), None
    if isinstance(function, staticmethod):
        function = function.__func__
    elif isinstance(call.func, ast.Attribute) and not isinstance(_object(call.func.value, frame), type | ModuleType):
        receiver = call.func.value
    if not isinstance(function, FunctionType):
        return None
    path, of = Path(function.__code__.co_filename), Path(frame.f_code.co_filename)
    if not path.is_relative_to(of.parent) or "site-packages" in path.parts:
        return None
    body: Any = None
    with contextlib.suppress(OSError, SyntaxError):
        body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(body, ast.FunctionDef):
        return None
    parameters = [one.arg for one in (*body.args.posonlyargs, *body.args.args)]
    own = _own_names(body)
    if receiver is not None:
        own -= {*parameters[:1]}
        body, parameters = _renamed(body, dict.fromkeys(parameters[:1], receiver)), parameters[1:]
    on = "" if receiver is None else ast.unparse(receiver)
    return _Called(_Text([*_at_each_batch(body)]), parameters, own, on, path == of)


def _renamed(tree: Any, names: dict[str, ast.expr]) -> Any:
    """A function's text in which other expressions stand in the place of some names."""

    class Renames(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return names.get(node.id, node)

    return Renames().visit(tree)


def _object(node: ast.AST, frame: FrameType) -> Any:
    """What a name, or an attribute of one, stands for in a frame; no property is asked."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute) and (owner := _object(node.value, frame)) is not None:
        return inspect.getattr_static(owner, node.attr, None)
    return None


def _root(name: str) -> str:
    """The first part of what is read: of ``self.steps[0]`` it is ``self``."""
    return name.partition("[")[0].partition(".")[0]


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
    own = _own_names(tree) - {"self"}
    kept = {name for one in every if _adds(one) for name in _targets(one) if name.partition(".")[0] not in own}
    text = _Text(every, kept)
    text.spread()
    for one in every:
        returns = isinstance(one, ast.Return) and one.value is not None and text.reads(one.value)
        if returns or (isinstance(one, ast.If) and text.reads(one.test) and any(map(_changes, ast.walk(one)))):
            return first + int(one.lineno) - 1
    return None


def _own_names(tree: ast.AST) -> set[str]:
    """Names that a function sets or is given, and that are not those of what is outside of it."""
    every: list[Any] = [*ast.walk(tree)]
    outside = {name for one in every if isinstance(one, ast.Global | ast.Nonlocal) for name in one.names}
    own = {one.id for one in every if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)} - outside
    return own | {one.arg for one in every if isinstance(one, ast.arg)}


def _adds(node: Any) -> bool:
    """Whether a statement sets what it has read."""
    if not isinstance(node, ast.Assign):
        return isinstance(node, ast.AugAssign)
    return not {ast.unparse(part) for part in ast.walk(node.value)}.isdisjoint(_targets(node))


def _goes_on(node: ast.AST) -> bool:
    """Whether a statement adds to what was there before."""
    if not isinstance(node, ast.Assign):
        return isinstance(node, ast.AugAssign) and not _at_a_step(node.value)
    values = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
    return any(_adds(ast.Assign(node.targets, one)) for one in values if isinstance(one, ast.BinOp))


def _is_empty(node: ast.AST | None) -> bool:
    """Whether what is set says nothing of a batch: a number, or an empty list."""
    return isinstance(node, ast.Constant) or (isinstance(node, ast.List) and not node.elts)


def _unconditional(body: list[Any]) -> Iterator[ast.AST]:
    """Statements of a loop that each batch runs."""
    for one in body:
        yield one
        if isinstance(one, ast.With):
            yield from _unconditional(one.body)


def _targets(node: ast.AST) -> list[str]:
    """Names that a statement sets."""
    return [ast.unparse(part) for target in _assigned(node) for part in getattr(target, "elts", [target])]


def _put_into_groups(node: ast.AST) -> list[ast.AST]:
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


def _changes(node: ast.AST) -> bool:
    """Whether a statement changes what is trained, or how."""
    if _put_into_groups(node):
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
