"""The parent's side of a process that forks one child for each job: what the two say to each other."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import Any

from autofit.system.errors import MachineError

_TICK_SECONDS = 1.0


class Link:
    """Runs jobs by a process that forks one child for each, and kills them."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._job = 0
        self.import_seconds = 0.0

    def run(self, folder: Path, *, kill_after_seconds: float, early: bool = False) -> int | None:
        """Run the job in a folder and wait for its end.

        Its time is that in which this process lived: where both were stopped for an hour, the hour does not count.

        Args:
            folder: Holds its ``job.json``.
            kill_after_seconds: From its start.
            early: It needs the model's class alone, and may run beside the server's other imports.

        Returns:
            The exit status as ``os.waitpid`` gives it; ``None`` where it had to be killed for taking too long.

        Raises:
            MachineError: The server can't be started.
            ServerLost: It ended while the job ran.
        """
        self._send({"run": str(folder), "early": early})
        left = None
        late = False
        while True:
            message, left = self._hear(left)
            if message is None:
                if left is not None and left <= 0:
                    late = True
                    self._kill()
                    left = None
            elif "ready" in message:
                self.import_seconds = float(message["ready"])
            elif "pid" in message:
                self._job = int(message["pid"])
                left = kill_after_seconds
            elif "exit" in message:
                self._job = 0
                return None if late else int(message["exit"])

    def _kill(self) -> None:
        """TERM to the job's group, and KILL if it is still there three seconds later."""
        self._send({"kill": int(signal.SIGTERM)})
        if not (self._socket and select.select([self._socket], [], [], 3.0)[0]):
            self._send({"kill": int(signal.SIGKILL)})

    def stop_job(self) -> None:
        """Kill the job that is running, at once; for a parent that ends."""
        if self._socket is not None:
            with contextlib.suppress(MachineError):
                self._send({"kill": int(signal.SIGKILL)})

    def _hear(self, left: float | None) -> tuple[dict[str, Any] | None, float | None]:
        """The next message, or ``None`` after a while; and what is left of some seconds in which this process lived."""
        asked = time.monotonic()
        message = self._receive(None if left is None else max(0.0, min(left, _TICK_SECONDS)))
        return message, None if left is None else left - min(time.monotonic() - asked, 2 * _TICK_SECONDS)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            assert self._socket is not None
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise self._lost() from error

    def _receive(self, timeout: float | None) -> dict[str, Any] | None:
        """The next message, or ``None`` at the time-out."""
        assert self._socket is not None
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self._socket], [], [], timeout)
            if not readable:
                return None
            try:
                part = self._socket.recv(65536)
            except OSError as error:
                raise self._lost() from error
            if not part:
                raise self._lost()
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _lost(self) -> MachineError:
        """End what is left of the process and its job; the error that says so."""
        raise NotImplementedError

    def _end_job(self) -> bool:
        """End what the job has started: it dies with this process by itself. Whether there was one."""
        job, self._job = self._job, 0
        if job:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(job, signal.SIGKILL)
        return bool(job)
