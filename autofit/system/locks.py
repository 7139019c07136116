"""Locks that die with their process: flock(2) on a small file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from autofit.system.errors import AutofitError, LockHeld, MachineError

LOCKS = "AUTOFIT_LOCKS"
"""The variable that names another folder for the locks of devices."""
_SHARED = (Path("/run/lock"), Path("/tmp"), Path("/var/tmp"))  # noqa: S108 - the files are opened with care
_IN_USE = ".autofit-in-use"
_ABANDONED_SECONDS = 600.0
_UNLOCKABLE = f"can its folder be written? {LOCKS} names another folder for the locks of devices"


@contextlib.contextmanager
def held(path: Path, message: str, hint: str) -> Iterator[None]:
    """Hold a lock while inside.

    Raises:
        LockHeld: Somebody else holds it (``message``).
        MachineError: It can't be made.
    """
    try:
        descriptor = _opened(path)
    except OSError as error:
        raise MachineError(f"no lock at {path}: {error.strerror}", hint=_UNLOCKABLE) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _holder(descriptor)
            raise LockHeld(f"{message}{f': process {pid}' if pid else ''}", hint=hint) from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def waited_for(
    lock: Callable[[], contextlib.AbstractContextManager[None]], say: Callable[[str], None], every_seconds: float = 2.0
) -> Iterator[bool]:
    """Hold a lock while inside, after whoever holds it now; gives whether it was waited for.

    Args:
        lock: Makes the context that takes the lock or raises :class:`LockHeld`.
        say: Told who holds it, once for each holder.
        every_seconds: How often it is tried again.

    Raises:
        MachineError: The lock can't be made.
    """
    said = ""
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock())
                break
            except LockHeld as error:
                if error.message != said:
                    say(f"{error.message}: waiting for it to end")
                    said = error.message
                time.sleep(every_seconds)
        yield bool(said)


def _opened(path: Path) -> int:
    """The lock's file, made where it is missing; one of another user can only be read, which is enough for flock(2)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    how = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe of that name would be waited for
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | how, 0o644)
        os.fchmod(descriptor, 0o644)  # whatever the umask says, others may know of it
    except FileExistsError:
        try:
            descriptor = os.open(path, os.O_RDWR | how)  # NFS wants it writable
        except PermissionError:
            descriptor = os.open(path, os.O_RDONLY | how)
    return descriptor


def _holder(descriptor: int) -> int | None:
    """The process that holds a lock, as the kernel lists it; ``None`` where it is out of sight."""
    inode = str(os.fstat(descriptor).st_ino)
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text("ascii").splitlines():
            words = line.split()
            if len(words) > 5 and words[1] == "FLOCK" and words[5].rpartition(":")[2] == inode and int(words[4]) > 0:
                return int(words[4])
    return None


def _folder() -> Path:
    """The folder for the locks of devices: one that every process of the machine finds, whoever its user is.

    What one user alone can write is left out, even where that is this one: the next would look elsewhere.
    ``TMPDIR`` is no such place: each user, job or shell may have its own.
    """
    given = os.environ.get(LOCKS)
    return Path(given) if given else next(filter(_for_all, _SHARED), Path(tempfile.gettempdir()))


def _for_all(folder: Path) -> bool:
    """Whether every user can make files in a folder, and nobody can take those of others away."""
    try:
        mode = folder.stat().st_mode
    except OSError:
        return False
    everyone = stat.S_IWOTH | stat.S_IXOTH | stat.S_ISVTX
    return stat.S_ISDIR(mode) and mode & everyone == everyone and os.access(folder, os.W_OK)  # not if it is read-only


def device_lock(device: str) -> contextlib.AbstractContextManager[None]:
    """The lock of a device, for all users of the machine: two tunes on it would time each other.

    Args:
        device: ``cpu``, or a CUDA device as ``CUDA_VISIBLE_DEVICES`` calls it.
    """
    safe = "".join(letter if letter.isalnum() else "-" for letter in device)
    path = _folder() / f"autofit-{safe}.lock"
    return held(
        path,
        f"another tune is measuring on this device ({device})",
        "wait for it to end (a tune does by --wait): two tunes on one device time each other",
    )


class WaitingLock:
    """A lock that is waited for, by processes and by threads: ``flock(2)`` on a file, which may stay."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._own = threading.Lock()
        self._descriptor = -1

    def acquire(self) -> bool:
        """Wait for the lock.

        Raises:
            OSError: The file can't be made, or the file system has no locks.
        """
        self._own.acquire()
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except BaseException:
                os.close(descriptor)
                raise
        except BaseException:
            self._own.release()
            raise
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)
        self._descriptor = -1
        self._own.release()


@contextlib.contextmanager
def scratch_folder(kind: str) -> Iterator[Path]:
    """A temporary folder that is removed in the end; one whose process was killed is removed by a later one.

    A file in it is locked as long as it is used: the kernel frees a lock where its process ends. Where it can't be
    made, or the file system has no locks, nobody else removes the folder.
    """
    with tempfile.TemporaryDirectory(prefix=f"autofit-{kind}-") as made:
        folder = Path(made)
        _remove_abandoned(folder.parent)
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                descriptor = _opened(folder / _IN_USE)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                yield folder
            except AutofitError as error:
                if error.hint and str(folder) in error.hint:  # such as a log that goes with the folder
                    error.hint = None
                raise


def _remove_abandoned(folder: Path) -> None:
    """Delete the scratch folders of this user that nobody uses, and that are not just being made."""
    for mark in folder.glob(f"autofit-*-*/{_IN_USE}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(mark, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                seen = os.fstat(descriptor)
                if seen.st_uid == os.geteuid() and time.time() - seen.st_mtime > _ABANDONED_SECONDS:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(mark.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
