"""The parent's side of a snapshot: a job that has run up to some point, where a child is forked for each other job."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

from autofit.system.errors import MachineError, ServerLost
from autofit.system.files import last_words
from autofit.system.forking.link import Link
from autofit.system.units import duration


class Unforkable(Exception):  # noqa: N818 - an answer more than an error
    """No job can be forked from a snapshot, and why, in words."""


class Snapshot(Link):
    """The parent's side of a snapshot; :meth:`ForkServer.snapshot` makes one.

    Args:
        link: What the snapshot is told its jobs by.
        folder: Of the job that it has run.
    """

    def __init__(self, link: socket.socket, folder: Path) -> None:
        super().__init__()
        self._socket = link
        self._pid = 0
        self.folder = folder

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._socket is None

    def wait(self, seconds: float) -> None:
        """Wait until jobs can be forked.

        Raises:
            Unforkable: They can't be.
        """
        left: float | None = seconds
        while left is not None and left > 0:
            try:
                message, left = self._hear(left)
            except ServerLost as error:
                words = last_words(self.folder / "stderr.log")
                raise Unforkable(f"its process ended before it trained{words}") from error
            if message and "snapshot" in message:
                self._pid = int(message["snapshot"])
            elif message and "refused" in message:
                raise Unforkable(message["refused"])
            elif message and "ready" in message:
                return
        raise Unforkable(f"it did not begin to train in {duration(seconds)}")

    def close(self) -> None:
        """End the snapshot, and with it the job that is running."""
        self._end_job()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            if self._pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid, signal.SIGKILL)

    def _lost(self) -> MachineError:
        self._pid = 0  # it has ended, and the number may be another process's
        self.close()
        return ServerLost("the snapshot that the trial was forked from ended")
