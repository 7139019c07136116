"""A process that has torch and transformers loaded, and forks one child for each job.

Importing them takes seconds, a fork takes hundredths. The server never touches the device, so that each child can;
where a library does when it is imported, the child becomes a fresh process and imports all anew.
Jobs have no use for tokens and passwords, so their environment holds none: no log and no model's own code tells one.
It is the parent's child and dies with it: it sees its socket close, and asks the kernel for SIGTERM when the parent
goes (PR_SET_PDEATHSIG); each job's process is in a session of its own, asks for SIGKILL when the server goes, and is
killed as a group. Both are needed: the signal alone is lost where the server has not asked yet, the socket alone
where a child has inherited it.

A snapshot is a child that has run a job of its own up to some point and forks one child there for each further job, as
the server does: what the job has made until then need not be made again. It lives until it is closed.

This is the parent's side; the process itself is :mod:`autofit.system.fork_server_process`. Messages are lines of JSON:
``{"load": MODULES}``, ``{"run": FOLDER, "early": BOOL}`` and ``{"kill": SIGNAL}`` to the server, ``{"ready":
SECONDS}``, ``{"pid": PID}`` and ``{"exit": STATUS}`` back; ``{"snapshot": FOLDER}`` with a socket, by which a snapshot
is told the same, and says ``{"snapshot": PID}`` first, and ``{"refused": WORDS}`` where it can't be forked.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from autofit.system.errors import MachineError, ServerLost
from autofit.system.files import helper_environment, last_words, refuse_a_full_disk, write_atomically, writing
from autofit.system.job import JOB, Job, job_text
from autofit.system.locks import scratch_folder
from autofit.system.redact import harmless
from autofit.system.units import duration

FAILED_JOB_LOG = "failed-job.log"
_TICK_SECONDS = 1.0


class Unforkable(Exception):  # noqa: N818 - an answer more than an error
    """No job can be forked from a snapshot, and why, in words."""


class _Forking:
    """The parent's side of a process that forks one child for each job: runs jobs, and kills them."""

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


class ForkServer(_Forking):
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
        begun = _AHEAD.pop((self.device, self.trains), None) or _begin(self.log, self.device, trains=self.trains)
        self._process, self._socket, self._printed, self._buffer = *begun, b""
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
            _end(self._process)
            self._process = None

    def rest(self) -> None:
        """End the server, or one alike that was begun ahead, until it is asked again: what it loads takes a core."""
        if self._process is None and (self.device, self.trains) in _AHEAD:
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
                refuse_a_full_disk(folder)
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


class Snapshot(_Forking):
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


class _Begun(NamedTuple):
    """A server's process, its socket, and what it prints."""

    process: subprocess.Popen[bytes]
    link: socket.socket
    log: Path


_AHEAD: dict[tuple[str, bool], _Begun] = {}
"""By the device and whether its jobs train."""


@contextlib.contextmanager
def begun_ahead(device: str, *, trains: bool) -> Iterator[None]:
    """Have a server, of arguments as of :class:`ForkServer`, load ahead of who asks it: the first alike takes it."""
    with scratch_folder("server") as folder:
        _AHEAD[device, trains] = _begin(folder / "forkserver.log", device, trains=trains)
        try:
            yield
        finally:
            if left := _AHEAD.pop((device, trains), None):
                left.link.close()
                _end(left.process)


def _begin(log: Path, device: str, *, trains: bool) -> _Begun:
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
            [sys.executable, "-m", "autofit.system.fork_server_process", *arguments],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            env=helper_environment(environment),
            start_new_session=True,
        )
    return _Begun(process, ours, log)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server's process, which does not see its socket close while it loads."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
