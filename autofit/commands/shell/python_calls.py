"""What a call from Python has and a command has not: models as objects, errors in arguments' names, progress."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import numbers
import os
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from autofit.commands.shell.terminal import refuse_a_lost_folder, reopen_closed_streams
from autofit.costmodel.tracing.trace_store import cache_folder
from autofit.system.errors import AutofitError, InputError, Stopped
from autofit.system.files import write_atomically, writing

Call = TypeVar("Call", bound=Callable[..., Any])
_OPTION = re.compile(
    r"""--(no-)?([a-z][a-z-]*[a-z])(?![\w-])          # an option
    (?:[ ](                                         # and what is given to it:
        "[^"]*" | '[^']*'                           # in quotation marks
        | -?\d(?:[\w.]*\w)?(?:/h|%)? | None | nan    # a number, with a unit or without, or none
        | [a-z_]+=[\w:.+-]*\w                       # KNOB=VALUE
        | [a-z]+(?:,[a-z]+)+                        # words with commas
    )(?![\w'"]))?""",
    re.VERBOSE,
)
_PLAIN = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|None|nan|'.*'|\".*\"")


def for_python(function: Call) -> Call:
    """The function of a command as Python calls it."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        given, named = tuple(map(_plain, given)), {name: _plain(value) for name, value in named.items()}
        if "model" in parameters:
            if given:
                given = (as_source(given[0]), *given[1:])
            elif "model" in named:
                named["model"] = as_source(named["model"])
        for name, value in {**dict(zip(parameters, given, strict=False)), **named}.items():
            if name in parameters:
                _check_type(name, value, parameters[name].default)
        if "events" in parameters and named.get("events") is None and _watched():
            from autofit.commands.shell.console import ConsoleEvents, StderrConsole

            named["events"] = ConsoleEvents(StderrConsole(), named.get("trials", parameters["trials"].default))
        reopen_closed_streams()
        try:
            refuse_a_lost_folder()
            return _anywhere(function(*given, **named))
        except (AutofitError, Stopped) as error:
            known = {*parameters, *_arguments_of_calls()}
            error.message = in_arguments(error.message, known)
            error.hint = error.hint and in_arguments(error.hint, known)
            error.args = (error.message, *error.args[1:])
            raise

    return call  # type: ignore[return-value]


_PATH = (str, os.PathLike)
_TAKEN: dict[str, tuple[tuple[type, ...], str]] = {
    "folder": (_PATH, "the path of a folder"),
    "output": ((*_PATH, NoneType), "the path of a folder"),
    "gpu": ((str, NoneType), "the name of a card, one in each call"),
    "memory": ((str, int, float, NoneType), "a size, such as '24GiB'"),
    "arguments": ((list, tuple), "a list of texts"),
    "tolerance": ((int, float, NoneType), "a share from 0 to 1"),
}
"""What an argument may be, where nobody who reads it says so."""


def _plain(value: object) -> object:
    """A number or a truth value of NumPy's as Python's own; all else as it is."""
    if type(value).__module__ == "numpy" and type(value).__name__ in {"bool", "bool_"}:
        return bool(value)
    if type(value) in {int, float, bool} or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _check_type(name: str, value: object, default: object) -> None:
    """Refuse what an argument can't be: another type, or an output without a name, as of an unset variable.

    Raises:
        InputError: It is such a value.
    """
    if isinstance(default, bool) and not (isinstance(value, int) and value in {0, 1}):  # 'no' would count as yes
        raise InputError(f"{name} is a {type(value).__name__}", hint="give True or False")
    if name == "output" and value == "":
        raise InputError("output is empty", hint="name a folder, or leave it out")
    kinds, wanted = _TAKEN.get(name, ((object,), "a number or a text: True and False are for what is done or not"))
    if not isinstance(value, kinds) or (isinstance(value, bool) and not isinstance(default, bool)):
        raise InputError(f"{name} is a {type(value).__name__}", hint=f"give {wanted}")


def _anywhere(found: Any) -> Any:
    """An answer whose folder is found from every folder: a notebook may go elsewhere."""
    from autofit.output.result import Result

    return dataclasses.replace(found, folder=found.folder.absolute()) if isinstance(found, Result) else found


def _arguments_of_calls() -> set[str]:
    """The arguments of every such function: an error of one may point to another."""
    from autofit.commands.estimates.estimate import estimate
    from autofit.commands.profile import profile
    from autofit.commands.tune import tune
    from autofit.commands.verify import verify

    return {name for call in (estimate, profile, tune, verify) for name in inspect.signature(call).parameters}


def in_arguments(words: str, known: Collection[str]) -> str:
    """Options of the command line as arguments of functions, where they have such.

    >>> in_arguments("--memory-limit 90GiB is too much; --no-guard, --json", {"memory_limit", "guard"})
    'memory_limit="90GiB" is too much; guard=False, --json'
    """

    def replaced(found: re.Match[str]) -> str:
        name, given = found[2].replace("-", "_"), found[3]
        if name not in known:
            return found[0]
        if found[1] or given is None:
            said = f"{name}=False" if found[1] else f"{name}=True" if name == "resume" else name
            return said if given is None else f"{said} {given}"
        return f"{name}={given}" if _PLAIN.fullmatch(given) else f'{name}="{given}"'

    return _OPTION.sub(replaced, words)


def as_source(model: object) -> str:
    """A hub id or a path as it is; a config or model object as a folder with its ``config.json``.

    The folder is in the user's cache, one for each content, so that a tune of the same object can be resumed.

    Raises:
        InputError: It is none of these.
    """
    if isinstance(model, str | Path):
        return str(model)
    config: Any = getattr(model, "config", model)
    if not callable(getattr(config, "to_dict", None)):
        raise InputError(
            f"model is a {type(model).__name__}",
            hint="give a hub id, a folder, a config or model of transformers, or a function's name: 'my.nets:make'",
        )
    content = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
    if config is not model:
        content["architectures"] = [type(model).__name__]
    text = json.dumps(content, indent=1, sort_keys=True, default=str)
    content_hash = hashlib.sha256(text.encode()).hexdigest()[:16]
    folder = cache_folder().parent / "configs" / f"{type(model).__name__}-{content_hash}"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.json", text)
    return str(folder)


def _watched() -> bool:
    """Whether somebody sees what is printed: a terminal or a notebook."""
    try:
        return "ipykernel" in sys.modules or sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, it is closed, or somebody's own
        return False
