"""``tune.yaml``: every option of a tune, written beside its answer, and read by ``--config`` to repeat it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autofit.system.errors import InputError, near
from autofit.system.files import write_atomically

if TYPE_CHECKING:
    from autofit.commands.request import Request, Search

CONFIG = "tune.yaml"
_RENAMED = {"timeout_seconds": "timeout", "allowed": "allow"}
_NOT_KEPT = {"resume", "as_json", "verbose", "config"}


def write_config(folder: Path, request: Request, settings: Search) -> None:
    """Write the options of a tune into its folder; what was not given is left out.

    Raises:
        MachineError: The disk is full, or the folder can't be written.
    """
    from yaml import safe_dump

    given: dict[str, Any] = {"output": str(folder), **asdict(request), **asdict(settings)}
    options: dict[str, Any] = {}
    for field, value in given.items():
        name = _RENAMED.get(field, field)
        if isinstance(value, Mapping):
            options[name] = [f"{knob}={_listed(values)}" for knob, values in value.items()]
        elif isinstance(value, tuple):
            options[name] = [str(one) for one in value]
        elif name == "timeout" and value is not None:
            options[name] = f"{value:f}".rstrip("0").rstrip(".") + "s"
        else:
            options[name] = str(value) if isinstance(value, Path) else value
    kept = {name: value for name, value in options.items() if value is not None and value != []}
    write_atomically(folder / CONFIG, safe_dump(kept, sort_keys=False))


def read_config(context: click.Context, _parameter: click.Parameter, path: str | None) -> None:
    """Take the options of a file as the command's defaults, so that the command line wins.

    Raises:
        InputError: It can't be read, or holds what is no option.
    """
    if path is None:
        return
    from yaml import YAMLError

    from autofit.commands.shell.options_file import parse

    if Path(path).is_dir():  # as is the empty path
        said = f"{path!r} is a folder" if path else "names no file"
        raise InputError(f"--config {said}", hint=f"give a {CONFIG} of a tune")
    try:
        found = parse(Path(path).read_text("utf-8"))
    except (OSError, ValueError, YAMLError) as error:
        first = str(error).splitlines()[0]
        raise InputError(f"--config {path!r} can't be read: {first}", hint=f"give a {CONFIG} of a tune") from None
    if not isinstance(found, dict):
        raise InputError(f"--config {path!r} holds no options", hint=f"write it like {CONFIG}: trials: 20")
    params = sorted(context.command.params, key=lambda one: str(one.name))
    known = {one.name: one for one in params if one.name and one.name not in _NOT_KEPT}
    options = {name: value for name, value in found.items() if value is not None}
    for name, value in options.items():
        if name not in known:
            raise InputError(f"--config {path!r}: {name!r} is no option of {context.info_name}", hint=near(name, known))
        if isinstance(value, dict):
            raise InputError(f"--config {path!r}: {name} is a mapping", hint=f"write {name}: [KNOB=VALUE, ...]")
        if (wanted := _wanted(known[name], value)) is not None:
            raise InputError(f"--config {path!r}: {name} is {value!r}", hint=f"{wanted} is wanted, as in a {CONFIG}")
    context.default_map = {**(context.default_map or {}), **options}


def _wanted(option: click.Parameter, value: object) -> str | None:
    """What an option takes, in words, where a value of YAML is no such thing."""
    if option.multiple or option.nargs == -1:
        good = isinstance(value, list) and not any(isinstance(one, list | dict) for one in value)
        return None if good else "a list"
    if getattr(option, "is_flag", False):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(value, list):
        return "one value"
    if option.type is click.INT and not re.fullmatch(r"[-+]?[0-9]+", str(value)):
        return "a whole number"
    return "a text or a number" if isinstance(value, bool) else None


def _listed(values: object) -> str:
    """One value, or several with commas."""
    if isinstance(values, Iterable) and not isinstance(values, str):
        return ",".join(str(value) for value in values)
    return str(values)
