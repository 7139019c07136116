"""The output folder of a tune: what may stand there before it, and what is removed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from autofit.commands.request import TRIALS
from autofit.commands.shell.tune_config import CONFIG
from autofit.costmodel.tracing.trace_store import TRACES
from autofit.output.document import DOCUMENT_FILE, MODEL_FOLDER, REQUEST
from autofit.output.emit import ARGUMENTS, ASIDE, REPORT, YAML
from autofit.search.journal import JOURNAL_FILE, JOURNAL_LOCK_FILE
from autofit.system.errors import InputError
from autofit.system.files import LEDGER_FILE, put_back
from autofit.system.forking.server import FAILED_JOB_LOG

LOCK = ".lock"
FORKSERVER_LOG = "forkserver.log"
_WRITTEN = {
    MODEL_FOLDER, DOCUMENT_FILE, YAML, ARGUMENTS, REPORT, TRIALS, FORKSERVER_LOG, JOURNAL_FILE, JOURNAL_LOCK_FILE,
    CONFIG,
}  # fmt: skip
BEGUN = {REQUEST, LOCK}
"""One of these is in every folder that a tune has written to."""
_FOLDERS = {MODEL_FOLDER, TRIALS, TRACES}
CONFIG_FILES = {MODEL_FOLDER, DOCUMENT_FILE, YAML, ARGUMENTS, REPORT}
"""What an answer is made of, a tune's or an estimate's."""


def remove_leftovers(folder: Path) -> None:
    """Undo and delete what a tune that was killed has left. The caller holds the folder's lock."""
    for ledger in sorted(folder.rglob(LEDGER_FILE), key=lambda one: one.stat().st_mtime, reverse=True):
        put_back(ledger)
    for left in (*folder.glob(".ask-*"), folder / ASIDE):
        shutil.rmtree(left, ignore_errors=True)
    for left in (*folder.glob(".*.tmp"), *(folder / TRIALS).glob("*/.*.tmp")):
        with contextlib.suppress(OSError):
            left.unlink()


def remove_answer(folder: Path) -> None:
    """Delete what an answer is made of. The caller holds the folder's lock, and knows that nobody else wrote it."""
    for name in (*CONFIG_FILES, ASIDE):
        shutil.rmtree(folder / name, ignore_errors=True)
        with contextlib.suppress(OSError):
            (folder / name).unlink(missing_ok=True)


def names_in(folder: Path) -> frozenset[str]:
    """The names in a folder; ``new/..`` is the one that it will be as soon as ``new`` is made.

    Raises:
        OSError: It is not there, or can't be looked into.
        ValueError: No path is like that.
    """
    return frozenset(entry.name for entry in Path(os.path.realpath(folder)).iterdir())


def names_before(folder: Path) -> frozenset[str] | None:
    """The names in a folder before a tune begins there; ``None`` where it can't be looked into.

    Raises:
        InputError: Something has a name that the tune would write to, and no tune has written it.
    """
    try:
        there = names_in(folder)
    except (OSError, ValueError):
        return None  # not there yet, or no folder: the next who looks says so
    clash = sorted(there & _WRITTEN)
    if clash and not BEGUN & there:
        raise InputError(
            f"{folder} holds {', '.join(clash)}, which no tune wrote: it would be written over",
            hint="name a new or an empty folder by --output",
        )
    check_kinds(folder, there)
    return there


def check_kinds(folder: Path, there: Collection[str]) -> None:
    """Refuse a folder that has something else where a file or a folder is to be written: a device reads without end.

    Args:
        folder: The output folder.
        there: The names in it.

    Raises:
        InputError: A file's name is that of a folder or a device, or a folder's that of something else.
    """
    for name in sorted(_WRITTEN | BEGUN):
        path, wants_folder = folder / name, name in _FOLDERS
        if name not in there or (path.is_dir() if wants_folder else path.is_file() or not path.exists()):
            continue
        found = "a folder" if path.is_dir() else "a file" if path.is_file() else "no file"
        found = f"a link to {path.readlink()}, which is not there" if not path.exists() else found
        raise InputError(
            f"{path} is {found}, and {'a folder' if wants_folder else 'a file'} of that name is written",
            hint="move it away, or name another folder by --output",
        )


def remove_unstarted_output(folder: Path, *, whole: bool, but: Collection[str]) -> None:
    """Delete what a tune that failed before its first trial has written.

    Args:
        folder: The output folder.
        whole: Whether this tune made the folder, so that all of it is deleted; the log of a failed job is kept.
        but: Names that stood there before.
    """
    if whole and not (folder / FAILED_JOB_LOG).exists():
        shutil.rmtree(folder, ignore_errors=True)
        return
    for name in {MODEL_FOLDER, TRACES} - set(but):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in {FORKSERVER_LOG, JOURNAL_FILE, LOCK} - set(but):
        (folder / name).unlink(missing_ok=True)
