"""What a script writes where it is described, traced or measured.

Its own training has not written that: what was there before is put back when the process has ended, and what a trial
makes anew is deleted. What it makes while it is described stays, since trials may read it; arrays among that, written
where weights were random, are named: its training would take them for its own models'.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autofit.system.files import note

_ARRAYS = {
    ".arrow", ".bin", ".feather", ".joblib", ".mmap", ".npy", ".npz", ".parquet", ".pickle", ".pkl", ".pt", ".pth",
}  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR
_NAMED_BY_WEIGHTS = "cache-"
"""How ``datasets`` calls a table that it names by what has made it, weights included."""
_ASIDE = ".before-autofit"
_CACHES = ("CACHE", "CACHE_DIR", "HF_HOME", "TORCH_HOME")
"""How the names of variables end that tell where a library keeps what all programs share."""


class Written:
    """Notes the files that this process opens to write, from when it begins."""

    def __init__(self) -> None:
        self._paths: dict[Path, None] = {}
        self._notes = False

    def begin(self) -> None:
        """Note from now on."""
        if not self._notes:
            self._notes = True
            sys.addaudithook(self._opened)

    def _opened(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(args[0], (str, os.PathLike)) or not (args[2] or 0) & _WRITES:
            return
        with contextlib.suppress(OSError, TypeError):  # what is raised in here, the script would be told of its file
            path = Path(args[0])
            if path.suffix.lower() in _ARRAYS:
                self._paths[path.absolute()] = None

    def arrays(self) -> tuple[str, ...]:
        """Those of arrays that are there and will be, by their paths."""
        return tuple(str(one) for one in self._paths if _stays(one) and not os.path.lexists(_aside(one)))


def _stays(path: Path) -> bool:
    """Whether a later run of the script would find a file again."""
    if path.name.startswith(_NAMED_BY_WEIGHTS) or not path.is_file():
        return False
    datasets = sys.modules.get("datasets")  # whose tables have names of their own here
    return datasets is None or not path.is_relative_to(datasets.config.HF_DATASETS_CACHE)


def keep_as_it_was(script: Path, *, new_files_stay: bool) -> None:
    """Note from now on what this process changes beside a script and where it was called, to be undone at its end.

    A file or folder that was there before is moved aside just before it is written, replaced or deleted; what the
    script finds in its place is a copy, or empty. Whoever holds the old one open goes on with it.

    Args:
        script: The script.
        new_files_stay: Whether what it makes anew stays.
    """
    from autofit.system.fork_server_process import LEDGER

    if LEDGER in os.environ:
        sys.addaudithook(_Kept({Path.cwd(), script.resolve().parent}, LEDGER, new_files_stay=new_files_stay))


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}{_ASIDE}")


class _Kept:
    """An audit hook: hears of what this process does to files, before it is done."""

    def __init__(self, folders: set[Path], ledger: str, *, new_files_stay: bool) -> None:
        temporary = Path(tempfile.gettempdir()).resolve()  # of every program, PyTorch's compiler among them
        self._folders = {one for one in (one.resolve() for one in folders) if not temporary.is_relative_to(one)}
        caches = (value for name, value in os.environ.items() if name.endswith(_CACHES) and value)
        self._not = {Path(one).absolute() for one in caches}
        self._ledger = ledger
        self._new_files_stay = new_files_stay
        self._began = time.time() - 1.0  # a file system's clock lies some hundredths of a second behind
        self._made: set[Path] = set()
        self._inside = threading.local()
        self._heard: dict[str, Callable[..., None]] = {
            "open": self._open,
            "os.mkdir": self._make,
            "os.symlink": lambda _, made, folder=-1: self._make(made, None, folder),
            "os.rename": self._rename,
            "os.remove": self._delete,
            "shutil.rmtree": self._delete,
        }

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if (hears := self._heard.get(event)) is None or getattr(self._inside, "it", False):
            return
        self._inside.it = True
        try:
            with contextlib.suppress(OSError, TypeError, ValueError):  # else the script would be told of its file
                hears(*args)
        finally:
            self._inside.it = False

    def _open(self, name: Any, _: Any, flags: int | None) -> None:
        if not flags or not flags & _WRITES or isinstance(name, int):
            return
        path = self._found(os.path.realpath(os.fsdecode(name)))
        if path is None:
            return
        if not os.path.lexists(path):
            self._new(path)
        elif flags & (os.O_TRUNC | os.O_APPEND) and path.is_file():
            self._keep(path, copies=not flags & os.O_TRUNC)

    def _make(self, name: Any, _: Any = None, folder: int | None = -1) -> None:
        if folder in {-1, None} and (path := self._found(name)) and not os.path.lexists(path):
            self._new(path)

    def _rename(self, source: Any, target: Any, *folders: int) -> None:
        if any(one != -1 for one in folders):
            return
        moved, path = self._found(source), self._found(target)
        ours = moved in self._made
        if moved is not None and not ours and moved.is_file():
            self._keep(moved, copies=True)
            ours = os.path.lexists(_aside(moved))
        if path is not None and os.path.lexists(path):
            self._keep(path, copies=False)
        elif path is not None and ours:
            self._new(path)

    def _delete(self, name: Any, folder: int | None = None) -> None:
        if folder in {-1, None} and (path := self._found(name)) and os.path.lexists(path):
            self._keep(path, copies=False)

    def _found(self, name: Any) -> Path | None:
        """A path where what is done to it is undone: beside the script, in no hidden folder or cache, none of ours."""
        path = Path(os.path.abspath(os.fsdecode(name)))  # noqa: PTH100 - a link is itself
        path = Path(os.path.realpath(path.parent)) / path.name
        if any(path.is_relative_to(one) for one in self._not) or path.suffix == ".lock":  # another program may hold it
            return None
        own = Path(os.environ[self._ledger]).resolve().parent
        for folder in self._folders:
            if path.is_relative_to(folder) and path != folder:
                parts = path.relative_to(folder).parts
                if "__pycache__" in parts or (parts[1:] and parts[0].startswith(".")):  # ~/.cache, ~/.triton
                    return None
                within = folder / parts[0]
                answers = own.parents[: 1 if own.name.startswith(".ask-") else 2]  # DIR/.ask-1, DIR/trials/0001
                return None if own.is_relative_to(within) or folder in answers else path
        return None

    def _new(self, path: Path) -> None:
        self._made.add(path)
        if not self._new_files_stay:
            self._note(path)

    def _keep(self, path: Path, *, copies: bool) -> None:
        """Move aside what was there before the script began, once."""
        aside, before = _aside(path), path.lstat()
        folder = path.is_dir() and not path.is_symlink()
        if path in self._made or os.path.lexists(aside) or (before.st_mtime > self._began and not folder):
            return
        self._note(path, aside)
        path.rename(aside)
        try:
            if folder:
                path.mkdir()
            elif copies:
                shutil.copy2(aside, path)
            else:
                path.touch()
        except OSError:  # the disk is full
            aside.replace(path)

    def _note(self, *paths: Path) -> None:
        note(Path(os.environ[self._ledger]), *paths)
