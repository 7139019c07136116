"""What a script writes where it is described, traced or measured.

Its own training has not written that: what was there before is put back when the process has ended, and what a trial
makes anew is deleted. What it makes while it is described stays, since trials may read it; arrays among that, written
where weights were random, are named: its training would take them for its own models'.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autofit.system.files import ASIDE, LEDGER, note

_ARRAYS = {
    ".arrow", ".bin", ".feather", ".joblib", ".mmap", ".npy", ".npz", ".parquet", ".pickle", ".pkl", ".pt", ".pth",
}  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR
_NAMED_BY_WEIGHTS = "cache-"
"""How ``datasets`` calls a table that it names by what has made it, weights included."""
_LARGE = 256 << 20
"""Bytes of a file that is not copied: added to, it is left alone; given another name, it gets its own back."""
_FULL = {errno.ENOSPC, errno.EDQUOT}
_PATIENCE_SECONDS = 5.0
"""For another process that moves files of the same folder aside."""
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
        return tuple(str(one) for one in self._paths if _stays(one) and not _is_aside(Path(os.path.realpath(one))))


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
    if LEDGER in os.environ:
        temporary = Path(tempfile.gettempdir()).resolve()  # of every program, PyTorch's compiler among them
        folders = {one.resolve() for one in (Path.cwd(), script.resolve().parent)}
        _tops.extend(sorted(one for one in folders if not temporary.is_relative_to(one)))
        kept = _Kept(LEDGER, new_files_stay=new_files_stay)
        _kept.append(kept)
        sys.addaudithook(kept)


def nothing_more_stays() -> None:
    """Have what is made from now on go at the end: the script is left, and saves what has not been trained."""
    for one in _kept:
        one.new_files_stay = False


_kept: list[_Kept] = []
"""What hears of this process's changes."""
_tops: list[Path] = []
"""The folders in which this process notes what it changes, the outer one first: each process takes the same."""


def _asides(path: Path) -> list[Path]:
    """Where something may be moved to: at the top, or beside it where that is another file system."""
    top = next((one for one in _tops if path.is_relative_to(one)), path.parent)
    name = f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}-{path.name[:40]}{ASIDE}"
    return [folder / ASIDE / name for folder in dict.fromkeys((top, path.parent))]


def _is_aside(path: Path) -> bool:
    """Whether a process, this one or one beside it, has moved aside what was there before, and will put it back."""
    return any(map(os.path.lexists, _asides(path)))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Have no other process, nor thread, move files of a folder aside meanwhile."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        until = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < until:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.002)
            except OSError:  # a file system without
                break
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked meanwhile holds it, too
        os.close(handle)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


class _DiskFullError(OSError):
    """What the script would write over can't be moved aside, and it could write nothing there: let it be told so."""


class _Kept:
    """An audit hook: hears of what this process does to files, before it is done."""

    def __init__(self, ledger: str, *, new_files_stay: bool) -> None:
        caches = (value for name, value in os.environ.items() if name.endswith(_CACHES) and value)
        self._not = {Path(one).absolute() for one in caches}
        self._ledger = ledger
        self.new_files_stay = new_files_stay
        self._began = time.time() - 1.0  # a file system's clock lies some hundredths of a second behind
        self._made: set[Path] = set()
        self._inside = threading.local()
        self._heard: dict[str, Callable[..., None]] = {
            "open": self._open,
            "os.mkdir": self._make,
            "os.symlink": lambda _, made, folder=-1: self._make(made, None, folder),
            "os.link": self._link,
            "os.rename": self._rename,
            "os.remove": lambda name, folder=-1: self._delete(name, folder, folders=False),
            "os.truncate": lambda name, _: self._open(name, None, os.O_WRONLY | os.O_APPEND),
            "os.utime": self._touch,
            "shutil.rmtree": lambda name, folder=None: self._delete(name, folder, folders=True),
        }

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if (hears := self._heard.get(event)) is None or getattr(self._inside, "it", False):
            return
        self._inside.it = True
        try:
            hears(*args)
        except _DiskFullError:
            raise
        except Exception:  # noqa: BLE001, S110 - the script would be told of its file
            pass
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
        elif flags & (os.O_TRUNC | os.O_APPEND) and path.is_file() and os.access(path, os.W_OK):
            self._keep(path, copies=not flags & os.O_TRUNC)

    def _make(self, name: Any, _: Any = None, folder: int | None = -1) -> None:
        if folder in {-1, None} and (path := self._found(name)) and not os.path.lexists(path):
            self._new(path)

    def _link(self, _: Any, target: Any, *folders: int) -> None:
        """A second name is made; what it names may be the user's, and stays to be kept."""
        path = None if any(one != -1 for one in folders) else self._found(target)
        if path is not None and not os.path.lexists(path) and not self.new_files_stay and not self._goes(path):
            self._note(path)

    def _touch(self, name: Any, _: Any, __: Any, folder: int | None = -1) -> None:
        """Its time is set: it would look as if it had been made since."""
        if folder in {-1, None} and not isinstance(name, int):
            self._open(name, None, os.O_WRONLY | os.O_APPEND)

    def _rename(self, source: Any, target: Any, *folders: int) -> None:
        if any(one != -1 for one in folders):
            return
        moved, path = self._found(source), self._found(target)
        ours, whole = False, False
        if moved is not None:
            ours = moved in self._made or self._goes(moved)
            whole = _is_folder(moved) or (not ours and moved.stat().st_size > _LARGE)
            if moved.is_file() and not ours and not whole:
                self._keep(moved, copies=True)
                ours = _is_aside(moved)
        self._replace(path, ours=ours and not whole)
        if moved is not None and whole and not (ours and self.new_files_stay):
            self._note(moved, Path(os.path.abspath(os.fsdecode(target))))  # noqa: PTH100 - a link is itself

    def _replace(self, path: Path | None, *, ours: bool) -> None:
        """Something is given another's name."""
        if path is None:
            return
        if not os.path.lexists(path):
            if ours:
                self._new(path)
        elif not _is_folder(path):  # an empty one alone can be replaced, by another
            self._keep(path, copies=False)

    def _delete(self, name: Any, folder: int | None, *, folders: bool) -> None:
        path = self._found(name) if folder in {-1, None} else None
        if path is not None and os.path.lexists(path) and _is_folder(path) == folders:
            self._keep(path, copies=False)

    def _found(self, name: Any) -> Path | None:
        """A path where what is done to it is undone: beside the script, in no hidden folder or cache, none of ours."""
        path = Path(os.path.abspath(os.fsdecode(name)))  # noqa: PTH100 - a link is itself
        path = Path(os.path.realpath(path.parent)) / path.name
        if any(path.is_relative_to(one) for one in self._not) or path.suffix == ".lock":  # another program may hold it
            return None
        own = Path(os.environ[self._ledger]).resolve().parent
        for folder in _tops:
            if path.is_relative_to(folder) and path != folder:
                parts = path.relative_to(folder).parts
                if "__pycache__" in parts or (parts[1:] and parts[0].startswith(".")):  # ~/.cache, ~/.triton
                    return None
                within = folder / parts[0]
                answers = own.parents[: 1 if own.name.startswith(".ask-") else 2]  # DIR/.ask-1, DIR/trials/0001
                return None if own.is_relative_to(within) or folder in answers else path
        return None

    def _goes(self, path: Path) -> bool:
        """Whether it goes by itself when what stood in its place, or in that of its folder, is put back."""
        tops = {up for one in _tops for up in (one, *one.parents)}
        return any(_is_aside(one) for one in (path, *path.parents) if one not in tops)

    def _new(self, path: Path) -> None:
        if self._goes(path):  # when that was put back by a process beside this one, it would be deleted in its place
            return
        self._made.add(path)
        if not self.new_files_stay:
            self._note(path)

    def _keep(self, path: Path, *, copies: bool) -> None:
        """Move aside what was there before the script began, once."""
        with _alone(path.parent):
            before, now = path.lstat(), time.time()
            since = self._began < before.st_mtime < now + 1.0 and not _is_folder(path)
            if path in self._made or since or _is_aside(path) or (copies and before.st_size > _LARGE):
                return
            why = None
            for aside in _asides(path) * 2:  # a process beside this one may have deleted their empty folder
                try:
                    self._note(path, aside)
                    aside.parent.mkdir(exist_ok=True)
                    path.rename(aside)
                    self._stand_in(path, aside, copies=copies)
                except OSError as error:
                    why = error
                else:
                    return
            if why is not None and why.errno in _FULL and not copies:
                raise _DiskFullError(why.errno, why.strerror, str(path)) from why

    @staticmethod
    def _stand_in(path: Path, aside: Path, *, copies: bool) -> None:
        """Have the script find something in the place of what was moved aside."""
        try:
            if _is_folder(aside):
                path.mkdir()
                shutil.copymode(aside, path)
            elif copies:
                shutil.copy2(aside, path)
            else:
                path.touch()
                shutil.copymode(aside, path)
        except OSError:
            aside.replace(path)
            raise

    def _note(self, *paths: Path) -> None:
        note(Path(os.environ[self._ledger]), *paths)
