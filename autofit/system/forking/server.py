"""The parent's side of the fork server: starts it, runs jobs and makes snapshots by it, and ends it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autofit.system.errors import MachineError, ServerLost
from autofit.system.files import last_words, refuse_a_lost_place, write_atomically, writing
from autofit.system.forking import begun
from autofit.system.forking.link import Link
from autofit.system.forking.snapshot import Snapshot
from autofit.system.job import JOB, Job, job_text

FAILED_JOB_LOG = "failed-job.log"


class ForkServer(Link):
    """The parent's side: starts the server, runs jobs, kills them.

    Args:
        log: File that takes what the server prints.
        device: ``cuda`` or ``cpu``.
        modules: Modules to load beyond the usual ones, such as the model's; what can't be loaded is left out.
        trains: Whether jobs train, or only trace: what that has no use for takes two seconds to load.

    Attributes:
        ends: When what is asked has to be answered, by ``time.monotonic()``.
        late: Whether an answer was not there then.
    """

    def __init__(self, log: Path, device: str, modules: tuple[str, ...] = (), *, trains: bool = True) -> None:
        super().__init__()
        self.log = self._printed = log
        self.device, self.modules, self.trains = device, modules, trains
        self.ends, self.late = math.inf, False
        self._process: subprocess.Popen[bytes] | None = None
        self._snapshots: list[Snapshot] = []

    def start(self) -> None:
        """Start the server without waiting for it, or take over one alike that was begun ahead."""
        ahead = begun.AHEAD.pop((self.device, self.trains), None)
        made = ahead or begun.begin(self.log, self.device, trains=self.trains)
        self._process, self._socket, self._printed, self._buffer = *made, b""
        if self.modules:
            self._send({"load": list(self.modules)})

    def run(self, folder: Path, *, kill_after_seconds: float, early: bool = False) -> int | None:
        """Run the job in a folder and wait for its end; the server is started where there is none."""
        self._started()
        try:
            return super().run(folder, kill_after_seconds=kill_after_seconds, early=early)
        except BaseException:  # interrupted: what the job has noted there is undone before its folder goes
            self.close()
            raise

    def snapshot(self, folder: Path, *, kill_after_seconds: float) -> Snapshot:
        """Have the job in a folder run up to where it asks for others, and wait until they can be forked there.

        Raises:
            Unforkable: They can't be, it never asked, or took too long.
            MachineError: The server can't be started.
        """
        self._started()
        ours, theirs = socket.socketpair()
        made = Snapshot(ours, folder)
        self._snapshots.append(made)
        try:
            assert self._socket is not None
            with theirs:
                words = json.dumps({"snapshot": str(folder)}).encode() + b"\n"
                socket.send_fds(self._socket, [words], [theirs.fileno()])
            made.wait(kill_after_seconds)
        except OSError as error:
            raise self._lost() from error
        except BaseException:
            made.close()
            raise
        return made

    def _started(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self.start()

    def close(self) -> None:
        """End the server, and with it the job that is running, and the snapshots."""
        self._job = 0
        while self._snapshots:
            self._snapshots.pop().close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            begun.end(self._process)
            self._process = None

    def rest(self) -> None:
        """End the server, or one alike that was begun ahead, until it is asked again: what it loads takes a core."""
        if self._process is None and (self.device, self.trains) in begun.AHEAD:
            self.start()
        self.close()

    @contextlib.contextmanager
    def ask(
        self, folder: Path, job: Job, *, kill_after_seconds: float = 60.0, early: bool = False
    ) -> Iterator[dict[str, Any] | None]:
        """Give the server a job in a scratch folder and read its answer; ``None`` where it gave none in time.

        Raises:
            MachineError: The job's process ended without an answer.
        """
        left = max(0.0, self.ends - time.monotonic())
        with writing(folder):
            scratch = Path(tempfile.mkdtemp(prefix=".ask-", dir=folder))
        try:
            write_atomically(scratch / JOB, job_text(job))
            status = self.run(scratch.resolve(), kill_after_seconds=min(kill_after_seconds, left), early=early)
            if status is None:
                self.late |= left < kill_after_seconds
                yield None
                return
            try:
                text = (scratch / job.RESULT).read_text("utf-8")
            except FileNotFoundError:
                refuse_a_lost_place(folder)
                log = scratch / "stderr.log"
                with contextlib.suppress(OSError):
                    shutil.copyfile(log, folder / FAILED_JOB_LOG)
                code = os.waitstatus_to_exitcode(status)
                raise MachineError(
                    f"a helper process ended with status {code} and no answer{last_words(log)}",
                    hint=f"its log is {folder / FAILED_JOB_LOG}",
                ) from None
            yield json.loads(text)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _lost(self) -> MachineError:
        status = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._process.wait(5)  # the socket closes a little before its end
        lost = ServerLost if self._end_job() else MachineError
        self.close()
        with contextlib.suppress(OSError):  # one that was begun ahead prints to a file that goes
            shutil.copyfile(self._printed, self.log)
        return lost(
            f"the process that starts trials ended (status {status}){last_words(self._printed)}",
            hint=f"its log is {self.log}; go on with --resume",
        )
