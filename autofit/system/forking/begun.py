"""A server's process is started, ahead of who asks it where that is known, and ended."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from autofit.system.files import helper_environment, writing
from autofit.system.locks import scratch_folder
from autofit.system.redact import harmless


class Begun(NamedTuple):
    """A server's process, its socket, and what it prints."""

    process: subprocess.Popen[bytes]
    link: socket.socket
    log: Path


AHEAD: dict[tuple[str, bool], Begun] = {}
"""Servers that nobody has asked yet, by the device and whether their jobs train."""


@contextlib.contextmanager
def begun_ahead(device: str, *, trains: bool) -> Iterator[None]:
    """Have a server, with the arguments of ``ForkServer``, load ahead of who asks it: the first alike takes it."""
    with scratch_folder("server") as folder:
        AHEAD[device, trains] = begin(folder / "forkserver.log", device, trains=trains)
        try:
            yield
        finally:
            if left := AHEAD.pop((device, trains), None):
                left.link.close()
                end(left.process)


def begin(log: Path, device: str, *, trains: bool) -> Begun:
    """Start a server's process."""
    ours, theirs = socket.socketpair()
    # a driver that was asked once can't be used after a fork; this asks NVML instead
    environment = {**harmless(os.environ), "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TOKENIZERS_PARALLELISM": "false"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # what is loaded for the CPU asks for a device that is there
    if not trains:
        environment["TORCHDYNAMO_DISABLE"] = "1"  # bitsandbytes asks for the compiler when it is imported
    arguments = [str(theirs.fileno()), device, "train" if trains else "trace"]
    with theirs, writing(log), log.open("ab") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", "autofit.system.forking.process", *arguments],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            env=helper_environment(environment),
            start_new_session=True,
        )
    return Begun(process, ours, log)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a server's process, which does not see its socket close while it loads."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
