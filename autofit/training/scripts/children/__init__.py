"""Python programs that a script starts while it is described: none of them trains."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from autofit.system.files import added_environment

_MARK = "AUTOFIT_CHILD_TRAINED"
"""The file that a program makes which would have trained; ``sitecustomize.py`` beside this names it, too."""


@contextlib.contextmanager
def no_child_trains() -> Iterator[Callable[[], bool]]:
    """Have each Python program that is started meanwhile end where it would make its first backward pass.

    Such a program knows nothing of a plan: it would train to its end, over what it has trained before.

    Returns:
        Whether one would have trained.
    """
    with tempfile.TemporaryDirectory(prefix="autofit-", ignore_cleanup_errors=True) as folder:
        mark = Path(folder) / "trained"
        searched = os.pathsep.join(one for one in (str(Path(__file__).parent), os.environ.get("PYTHONPATH")) if one)
        with added_environment({"PYTHONPATH": searched, _MARK: f"{os.getpid()} {mark}"}):
            yield mark.exists


def note_if_child() -> None:
    """Note that the training of this process is ended, where it was forked from one that runs a script."""
    process, _, mark = os.environ.get(_MARK, "").partition(" ")
    if mark and int(process) != os.getpid():
        with contextlib.suppress(OSError):
            Path(mark).touch()
