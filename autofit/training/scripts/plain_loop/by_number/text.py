"""What depends on the number of a loop's batches in its text, and in that of the functions that it calls."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections import ChainMap
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from autofit.training.scripts.plain_loop.by_number.statements import (
    SETTING,
    STEPS,
    adds,
    at_each_batch,
    changes,
    goes_on,
    put_into_groups,
    targets,
)

_DEPTH = 4
"""How many functions, each called by the one before, are followed."""
_NO_SIZE = {
    "isinstance", "isnan", "isfinite", "isinf", "requires_grad", "grad_fn", "ndim", "dim", "shape", "dtype", "device",
}  # fmt: skip
"""What tells of a loss something else than how large it is."""
_READ = (ast.Name, ast.Attribute, ast.Subscript)


@dataclass(slots=True)
class Text:
    """What a loop, or a function that it calls, does with each batch.

    Attributes:
        every: All of its parts, but for what is done only where gradients are synchronized.
        of_losses: Whether what depends on the loss of a batch is looked for, and not on the number of batches.
        known: Names of what depends on that.
        absent: By its ``id`` what does not count.
        calls: Functions that it calls, by the ``id`` of the call.
    """

    every: list[Any]
    of_losses: bool = False
    known: set[str] = field(default_factory=set)
    absent: Container[int] = ()
    calls: dict[int, _Called] = field(default_factory=dict)

    def counted(self) -> Iterator[str]:
        """Names of what it adds to: a number, a list, a progress bar."""
        for one in self.every:
            yield from targets(one) if goes_on(one) else ()
            if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute):
                if one.func.attr == "append":
                    yield ast.unparse(one.func.value)
                elif one.func.attr == "accumulate":  # an Accelerator's own number of its batches
                    yield f"{ast.unparse(one.func.value)}.step"
                elif one.func.attr == "update" and all(isinstance(given, ast.Constant) for given in one.args):
                    yield f"{ast.unparse(one.func.value)}.n"

    def first(self, own: Container[str]) -> set[str]:
        """Names of what depends on it by themselves; what it adds to is none, where that is its own."""
        if not self.of_losses:
            return {name for name in self.counted() if _root(name) not in own}
        calls = [(one.func, one.args) for one in self.every if isinstance(one, ast.Call)]
        passes = [(by, given) for by, given in calls if isinstance(by, ast.Attribute) and by.attr == "backward"]
        return {ast.unparse(given[0] if given else by.value) for by, given in passes}

    def reads(self, node: ast.AST) -> bool:
        """Whether a part of it reads what depends on the number of batches, or on a loss."""
        if id(node) in self.absent or (self.of_losses and _tells_no_size(node)):
            return False
        if isinstance(node, _READ) and ast.unparse(node) in self.known:
            return True
        return any(map(self.reads, ast.iter_child_nodes(node)))

    def spread(self) -> None:
        """Find what is computed of that which is known to depend on it."""
        before = -1
        while len(self.known) != before:
            before = len(self.known)
            for one in self.every:
                if isinstance(one, ast.If) and self.reads(one.test):
                    self.known.update(name for part in at_each_batch(one) for name in targets(part))
                elif isinstance(one, SETTING) and one.value and self.reads(one.value):
                    self.known.update(targets(one))
                elif id(one) in self.calls:
                    self.known |= self.calls[id(one)].told(one, self)

    def line(self) -> int | None:
        """The line in which it trains by that: what it steps or computes gradients of, and when."""
        for one in self.every:
            if isinstance(one, ast.If) and self.reads(one.test) and any(map(self.changes, at_each_batch(one))):
                return int(one.lineno)
            trains = isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in STEPS
            if any(map(self.reads, one.args if trains else put_into_groups(one))):
                return int(one.lineno)
            if id(one) in self.calls and self.calls[id(one)].text.line():
                return int(one.lineno)
        return None

    def changes(self, node: ast.AST) -> bool:
        """Whether a statement, or a function that it calls, changes what is trained."""
        called = self.calls.get(id(node))
        return changes(node) or (called is not None and any(map(called.text.changes, called.text.every)))

    def follow(self, scope: Scope) -> None:
        """Find the functions that it calls, and those that these call."""
        calls = [one for one in self.every if isinstance(one, ast.Call)]
        found = [(one, _called(one, scope, of_losses=self.of_losses)) for one in calls]
        self.calls = {id(call): called for call, called in found if called is not None}


@dataclass(frozen=True, slots=True)
class Scope:
    """Where the names of a text stand for objects.

    Attributes:
        objects: By their names.
        file: That the text is in.
        folder: Of the script: what is outside of it is a library's.
        within: The functions that lead there.
    """

    objects: Mapping[str, Any]
    file: Path
    folder: Path
    within: tuple[FunctionType, ...] = ()


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

    text: Text
    parameters: Sequence[str]
    own: Container[str]
    on: str
    beside: bool

    def given(self, call: ast.Call) -> list[tuple[str, ast.expr]]:
        """What a call gives its parameters."""
        named = ((one.arg, one.value) for one in call.keywords if one.arg is not None)
        return [*zip(self.parameters, call.args, strict=False), *named]

    def told(self, call: ast.Call, by: Text) -> set[str]:
        """What the loop, too, then knows to depend on the number of its batches: what the function keeps or returns."""

        def outer(names: set[str]) -> set[str]:
            free = {name for name in names if _root(name) not in self.own}
            return {name for name in free if self.beside or _root(name) == _root(self.on)}

        known = {name for name, value in self.given(call) if by.reads(value)}
        self.text.known |= known | outer(by.known) | self.text.first(self.own)
        self.text.spread()
        returns = any(isinstance(one, ast.Return) and self.text.reads(one) for one in self.text.every)
        return outer(self.text.known) | ({ast.unparse(call.func)} if returns else set())


def _called(call: ast.Call, scope: Scope, *, of_losses: bool) -> _Called | None:
    """The function that a call in a text is for, where it stands beside that; ``None`` for a library's."""
    function, receiver = _function(call, scope)
    if function is None or function in scope.within or len(scope.within) == _DEPTH:
        return None
    path = Path(function.__code__.co_filename)
    if not path.is_relative_to(scope.folder) or "site-packages" in path.parts:
        return None
    body: Any = None
    with contextlib.suppress(OSError, SyntaxError):
        body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(body, ast.FunctionDef):
        return None
    parameters = [one.arg for one in (*body.args.posonlyargs, *body.args.args)]
    own = _own_names(body)
    objects: dict[str, Any] = {}
    if receiver is not None:
        own -= {*parameters[:1]}
        objects = {(root := _root(ast.unparse(receiver))): scope.objects.get(root)}
        body, parameters = _renamed(body, dict.fromkeys(parameters[:1], receiver)), parameters[1:]
    on = "" if receiver is None else ast.unparse(receiver)
    found = _Called(Text([*at_each_batch(body)], of_losses), parameters, own, on, path == scope.file)
    objects |= {name: one for name, value in found.given(call) if (one := _object(value, scope.objects)) is not None}
    names = ChainMap(objects, _closed_over(function), function.__globals__)
    found.text.follow(Scope(names, path, scope.folder, (*scope.within, function)))
    return found


def _function(call: ast.Call, scope: Scope) -> tuple[FunctionType | None, ast.expr | None]:
    """What a call runs, an object's ``__call__`` among them, and what its first parameter stands for."""
    function, receiver = _object(call.func, scope.objects), None
    if isinstance(function, staticmethod):
        function = function.__func__
    elif isinstance(function, FunctionType):
        of = _object(call.func.value, scope.objects) if isinstance(call.func, ast.Attribute) else None
        if isinstance(call.func, ast.Attribute) and not isinstance(of, type | ModuleType):
            receiver = call.func.value
    elif not isinstance(function, type):
        function, receiver = inspect.getattr_static(type(function), "__call__", None), call.func
    return (function, receiver) if isinstance(function, FunctionType) else (None, None)


def _closed_over(function: FunctionType) -> dict[str, Any]:
    """What a function knows of the function that it is defined in."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it has no value yet
            found[name] = cell.cell_contents
    return found


def _renamed(tree: Any, names: dict[str, ast.expr]) -> Any:
    """A function's text in which other expressions stand in the place of some names."""

    class Renames(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return names.get(node.id, node)

    return Renames().visit(tree)


def _object(node: ast.AST, objects: Mapping[str, Any]) -> Any:
    """What a name, or an attribute of one, stands for; no property is asked."""
    if isinstance(node, ast.Name):
        return objects.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := _object(node.value, objects)) is not None:
        return inspect.getattr_static(owner, node.attr, None)
    return None


def _tells_no_size(node: ast.AST) -> bool:
    """Whether a loss may stand there and it is no matter how large it is, as where it is asked if it is a number."""
    if isinstance(node, ast.Compare):
        return isinstance(node.ops[0], ast.Is | ast.IsNot) or ast.unparse(node.left) == ast.unparse(node.comparators[0])
    named = node.func if isinstance(node, ast.Call) else node
    return isinstance(named, ast.Name | ast.Attribute) and ast.unparse(named).rpartition(".")[2] in _NO_SIZE


def _root(name: str) -> str:
    """The first part of what is read: of ``self.steps[0]`` it is ``self``."""
    return name.partition("[")[0].partition(".")[0]


def line_of_calls(function: Any, owner: Any = None) -> int | None:
    """The line in which a function of each micro-batch goes by what it keeps from one call to the next.

    Its text is read, and that of the script's functions that it calls: what it returns, or changes of the training, may
    depend on what they count or sum up in an attribute or a name outside of them.

    Args:
        function: That computes a loss, or makes a step.
        owner: Whose method it is, where it is one that is not bound.
    """
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    every: list[Any] = [*ast.walk(tree)]
    own = _own_names(tree) - {"self"}
    kept = {name for one in every if adds(one) for name in targets(one) if name.partition(".")[0] not in own}
    text = Text(every, known=kept)
    code = inspect.unwrap(getattr(function, "__func__", function))
    if isinstance(code, FunctionType):
        path = Path(code.__code__.co_filename)
        objects = {**_closed_over(code), "self": getattr(function, "__self__", owner)}
        text.follow(Scope(ChainMap(objects, code.__globals__), path, path.parent, (code,)))
    text.spread()
    for one in every:
        returns = isinstance(one, ast.Return) and one.value is not None and text.reads(one.value)
        if returns or (isinstance(one, ast.If) and text.reads(one.test) and any(map(text.changes, ast.walk(one)))):
            return first + int(one.lineno) - 1
    return None


def _own_names(tree: ast.AST) -> set[str]:
    """Names that a function sets or is given, and that are not those of what is outside of it."""
    every: list[Any] = [*ast.walk(tree)]
    outside = {name for one in every if isinstance(one, ast.Global | ast.Nonlocal) for name in one.names}
    own = {one.id for one in every if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)} - outside
    return own | {one.arg for one in every if isinstance(one, ast.arg)}
