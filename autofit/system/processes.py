"""Processes that were started here, and all that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

import psutil


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
