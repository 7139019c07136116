"""The study's journal: a file of JSON lines in the output folder, which Optuna writes and reads.

It is cut back to its last whole line on opening: Optuna raises on a torn line as soon as another one follows. It is
guarded by ``flock``: Optuna's own lock files outlive a killed process and stall the next one for 30 s.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._file import BaseJournalFileLock

from autofit.system.locks import WaitingLock

JOURNAL_FILE = "journal.log"
_LOCK = ".lock"
JOURNAL_LOCK_FILE = JOURNAL_FILE + _LOCK


class JournalLock(WaitingLock, BaseJournalFileLock):
    """The lock of a journal, as Optuna wants it."""


def _lock_file(path: Path) -> Path:
    return path.with_name(path.name + _LOCK)


def storage(path: Path) -> JournalStorage:
    """The journal as Optuna's storage."""
    return JournalStorage(JournalFileBackend(str(path), lock_obj=JournalLock(_lock_file(path))))


def repair(path: Path) -> str | None:
    """Cut a journal back to its last whole line; returns what was done, in words.

    Whatever follows the first line that is torn, or is not a JSON object, is cut. Nothing is lost by that: the
    outcomes are the truth.

    Raises:
        OSError: The file can't be read or written.
    """
    if not path.exists():
        return None
    lock = JournalLock(_lock_file(path))
    lock.acquire()
    try:
        kept = lines = 0
        with path.open("rb") as file:
            for line in file:
                if not _whole(line):
                    break
                kept, lines = kept + len(line), lines + 1
        lost = path.stat().st_size - kept
        if not lost:
            return None
        with path.open("r+b") as file:
            file.truncate(kept)
            os.fsync(file.fileno())
    finally:
        lock.release()
    return f"{path.name}: {lost} bytes after line {lines} were no whole record and were cut off"


def _whole(line: bytes) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
