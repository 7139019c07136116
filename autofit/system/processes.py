"""Processes that were started here, and all that they have started.

``python -m autofit.system.processes PARENT SIGNAL COMMAND ...`` becomes the command, which gets the signal when its
parent ends, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import psutil

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: int) -> None:
    """Ask the kernel for a signal when the parent ends; end at once where it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def print_into(folder: Path) -> None:
    """Have what this process prints go to ``stdout.log`` and ``stderr.log`` in a folder, behind what is there."""
    for stream, name in ((1, "stdout.log"), (2, "stderr.log")):
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(handle, stream)
        os.close(handle)


def end_fork(code: int) -> NoReturn:
    """End a forked process at once, with nothing of what its parent would do at its end, but for what it printed."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def bound_to_this(command: Sequence[str], number: signal.Signals) -> tuple[str, ...]:
    """A command that gets a signal when this process ends, or the thread that starts it."""
    return sys.executable, "-m", "autofit.system.processes", str(os.getpid()), str(int(number)), *command


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a launch: its group, and its ranks, which are in sessions of their own."""
    with contextlib.suppress(psutil.Error):
        for one in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                one.kill()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
    process.wait()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), int(sys.argv[2]))
    os.execv(sys.argv[3], sys.argv[3:])  # noqa: S606 - a list
