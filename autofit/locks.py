"""Locks that die with their process: flock(2) on a small file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from autofit.errors import MachineError


@contextlib.contextmanager
def held(path: Path, message: str, hint: str) -> Iterator[None]:
    """Hold a lock while inside.

    Raises:
        MachineError: Somebody else holds it (``message``), or it can't be made.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MachineError(f"no lock at {path}: {error.strerror}", hint="set TMPDIR to a folder you own") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MachineError(message, hint=hint) from None
        yield
    finally:
        os.close(descriptor)


def device_lock(device: str) -> contextlib.AbstractContextManager[None]:
    """The lock of a device: two tunes on it would time each other.

    Args:
        device: ``cpu``, or a CUDA device as ``CUDA_VISIBLE_DEVICES`` calls it.
    """
    safe = "".join(letter if letter.isalnum() else "-" for letter in device)
    path = Path(tempfile.gettempdir()) / f"autofit-{os.getuid()}-{safe}.lock"
    return held(
        path,
        f"another tune is measuring on this device ({device})",
        "wait for it to end: two tunes on one device time each other",
    )
