"""What stands for a script on the command line: a Python file, or a factory ``package.module:function``."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from autofit.cluster.shared import Shared
from autofit.system.errors import InputError
from autofit.training.scripts.leave import FACTORY

_FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A script, as it is run.

    Attributes:
        path: Of the file that is run, absolute.
        arguments: What stands behind it.
        text: The user's own file, absolute: its text is what a tune was made for.
        name: What people call it.
        factory: Whether it is one.
    """

    path: Path
    arguments: tuple[str, ...]
    text: Path
    name: str
    factory: bool = False

    @property
    def sha256(self) -> str:
        """Of its text."""
        return hashlib.sha256(self.text.read_bytes()).hexdigest()


def shared(model: str, arguments: Sequence[str] = ()) -> Shared:
    """What each machine of a cluster has to have, to run a script or a factory as it is run here.

    Raises:
        InputError: There is no such file or module.
    """
    run = named(model, arguments)
    return Shared(folder=str(Path.cwd()), path=str(run.path), text=str(run.text), sha256=run.sha256)


def is_script(model: str) -> bool:
    """Whether what stands for a model is the user's own code.

    >>> is_script("train.py"), is_script("my.models:make"), is_script("Qwen/Qwen2.5-0.5B")
    (True, True, False)
    """
    return model.endswith(".py") or is_factory(model)


def is_factory(model: str) -> bool:
    """Whether it is a function in a module."""
    return _FACTORY.fullmatch(model) is not None and not Path(model).exists()


def named(model: str, arguments: Sequence[str] = ()) -> Named:
    """The file to run for a script or a factory.

    Raises:
        InputError: There is no such file or module, or the file is no Python program by its name.
    """
    if not is_factory(model):
        path = Path(model).absolute()
        if not path.is_file():
            raise InputError(f"no script {model!r}", hint="is its path right?")
        if not is_script(model):
            raise InputError(f"{model!r} is no training script", hint="give a Python program: a file NAME.py")
        return Named(path=path, arguments=tuple(arguments), text=path, name=path.name)
    text, folder = _source(model.partition(":")[0])
    return Named(path=FACTORY, arguments=(model, str(folder), *arguments), text=text, name=model, factory=True)


def _source(module: str) -> tuple[Path, Path]:
    """The file of a module, looked for in the current folder first, and the folder of its first package.

    No code of the user's runs for it.
    """
    parts = module.split(".")
    places = [str(Path.cwd()), *sys.path]
    for place, part in enumerate(parts):
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            break
        if place == len(parts) - 1 and spec.origin is not None:
            text = Path(spec.origin).absolute()
            above = len(parts) - (text.name != "__init__.py")
            return text, text.parents[above]
        places = list(spec.submodule_search_locations or ())
    raise InputError(
        f"no module {module!r}, neither in {Path.cwd()} nor among what is installed",
        hint="call autofit in the folder that holds it: a factory is MODULE:FUNCTION",
    )
