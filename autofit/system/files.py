"""Files that are whole or absent."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import site
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from autofit import _version
from autofit.system.errors import CantWrite, InputError, MachineError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write aside, flush to the disk, rename into place: a reader sees the old file or the new one.

    Raises:
        MachineError: The disk is full, or the folder can't be written.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise machine_error(error, path) from error


def machine_error(error: OSError, path: Path) -> CantWrite:
    """An operating-system error on a file, in words."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return CantWrite(f"the disk is full: {path} can't be written", hint="free some space and try again")
    if error.errno == errno.EROFS:
        return CantWrite(f"{path} can't be written any more: it is read-only", hint="make it writable and try again")
    if error.errno == errno.EFBIG:
        return CantWrite(
            f"{path} can't be written: no file may grow that large here",
            hint="raise the limit (`ulimit -f unlimited`) and try again",
        )
    if error.errno == errno.ENOENT:
        return CantWrite(f"{path} can't be written: its folder is gone", hint="was it deleted or moved?")
    return CantWrite(f"{path} can't be written: {error.strerror or error}", hint="check the folder and try again")


def refuse_a_lost_place(folder: Path) -> None:
    """Say that a folder is gone, or its disk full: what failed there seldom says so itself.

    Raises:
        MachineError: Nothing more can be written there.
    """
    if not folder.exists():
        raise MachineError(f"{folder} is gone: it was deleted or moved meanwhile", hint="begin again")
    with contextlib.suppress(OSError):
        if shutil.disk_usage(folder).free == 0:
            raise machine_error(OSError(errno.ENOSPC, ""), folder)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an operating-system error inside into words.

    Raises:
        MachineError: There was one.
    """
    try:
        yield
    except OSError as error:
        raise machine_error(error, path) from error


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder's files into another one, over what is there.

    ``shutil.copytree`` keeps the text alone of what went wrong with a file, so that a full disk looks like any error.

    Raises:
        MachineError: The disk is full, or something can't be read or written.
    """

    def copy(file: str, there: str) -> None:
        with writing(Path(there)):
            shutil.copy2(file, there)

    with writing(target):
        shutil.copytree(source, target, copy_function=copy, dirs_exist_ok=True)


def usable_folder(path: Path) -> Path:
    """The folder, made where it does not exist, and tried by writing into it.

    Raises:
        InputError: It is no folder, or can't be made or written.
    """
    try:
        str(path.absolute()).encode()
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".autofit-{os.getpid()}.tmp"
        probe.write_bytes(b"")
        probe.unlink()
    except (OSError, ValueError) as error:
        words = getattr(error, "strerror", None) or str(error)
        if isinstance(error, UnicodeEncodeError):  # helper processes are told of it in JSON
            words = "its path is not UTF-8"
        if isinstance(error, FileExistsError) and path.is_symlink() and not path.exists():
            words = f"it is a link to {path.readlink()}, which is not there"
        elif isinstance(error, FileExistsError | NotADirectoryError):
            file = next((one for one in (path, *path.parents) if one.exists()), path)
            raise InputError(
                f"--output {str(path)!r}: {str(file)!r} is a file, and a folder is wanted",
                hint="name a folder; a new one is made",
            ) from error
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise machine_error(error, path) from error
        raise InputError(
            f"--output {str(path)!r} can't be written: {words}", hint="name one that you may write to by --output"
        ) from error
    return path


def source_root() -> Path:
    """The folder that holds the package ``autofit``: what a helper process needs on its path."""
    return Path(_version.__file__).resolve().parent.parent


_BEFORE = "AUTOFIT_PATHS_BEFORE"
_SEARCHED = ("PYTHONPATH", "PYTHONSAFEPATH")


def helper_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a helper process: it finds this package, and takes no folder of the user's for another one.

    ``python -m`` searches the current folder first: a data folder called ``scipy`` would be imported as that package.
    Where Python finds this package by itself, nothing comes before the user's own ``PYTHONPATH``.
    """
    before = {name: environment[name] for name in _SEARCHED if name in environment}
    by_itself = str(source_root()) in {sysconfig.get_path("purelib"), site.getusersitepackages()}
    searched = os.pathsep.join(
        path for path in ("" if by_itself else str(source_root()), before.get("PYTHONPATH")) if path
    )
    return {**environment, "PYTHONPATH": searched, "PYTHONSAFEPATH": "1", _BEFORE: json.dumps(before)}


def search_as_before() -> None:
    """Have programs that this helper process starts search where they would have before :func:`helper_environment`.

    A user's script starts such: under ``PYTHONSAFEPATH`` a Python program finds no module that lies beside it.
    """
    told = os.environ.pop(_BEFORE, None)
    if told is None:
        return
    for name in _SEARCHED:
        os.environ.pop(name, None)
    os.environ.update(json.loads(told))


@contextlib.contextmanager
def added_environment(told: Mapping[str, str]) -> Iterator[None]:
    """Set some variables of this process, for what is started meanwhile; then put back what stood there."""
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


LEDGER = "AUTOFIT_LEDGER"
"""The variable that tells a process where it notes what :func:`put_back` undoes when it has ended."""
ASIDE = ".before-autofit"
"""A folder into which files are moved that :func:`put_back` is to put back."""
LEDGER_FILE = ".autofit-ledger"
"""In the folder of a job: what :func:`put_back` undoes when it has ended."""


def note(ledger: Path, *paths: Path) -> None:
    """Add to a ledger what :func:`put_back` is to undo, before it is done.

    Args:
        ledger: The file.
        paths: One that is made; or one that is moved, and the name that it is given, in a folder :data:`ASIDE` where
            it is to stand over all that stands in its place by then; or the ledger of another process, which does not
            outlive this one.
    """
    with ledger.open("a", encoding="utf-8") as lines:
        lines.write("\n" + json.dumps([str(one) for one in paths]) + "\n")  # the line before it may be torn


def put_back(ledger: Path) -> None:
    """Undo what a process that has ended has done to the files of others, as :func:`note` was told.

    What is undone goes from the ledger's end: whoever is stopped in the midst of it is followed by another call.

    Args:
        ledger: The file; gone afterwards.
    """
    with contextlib.suppress(OSError):
        lines = ledger.read_bytes().splitlines(keepends=True)
        left = sum(map(len, lines))
        for line in reversed(lines):
            with contextlib.suppress(OSError, ValueError):  # a line may be torn; a folder may hold more by now
                _undo(*map(Path, json.loads(line)))
            left -= len(line)
            os.truncate(ledger, left)
        ledger.unlink()


def _undo(path: Path, aside: Path | None = None) -> None:
    if path.name == LEDGER_FILE:
        put_back(path)
    elif aside is None:
        _remove(path)
    else:
        _move_back(path, aside)


def _move_back(path: Path, aside: Path) -> None:
    there = os.path.lexists(aside)
    if aside.parent.name == ASIDE:
        if there:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.replace(path)
        aside.parent.rmdir()  # the last one; or whoever put that back was stopped
    elif there and not os.path.lexists(path):  # else it is what a process beside this one has put back, or keeps
        aside.replace(path)


def _remove(path: Path) -> None:
    """Delete a file or an empty folder."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink()


def last_words(log: Path) -> str:
    """The last line of a log, to be put behind what is said of its process."""
    with contextlib.suppress(OSError):
        lines = log.read_text("utf-8", "replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""
    return ""
