"""A process that has torch and transformers loaded, and forks one child for each job.

Importing them takes seconds, a fork takes hundredths. The server never touches the device, so that each child can;
where a library does when it is imported, the child becomes a fresh process and imports all anew.
Jobs have no use for tokens and passwords, so their environment holds none: no log and no model's own code tells one.
It is the parent's child and dies with it: it sees its socket close, and asks the kernel for SIGTERM when the parent
goes (PR_SET_PDEATHSIG); each job's process is in a session of its own, asks for SIGKILL when the server goes, and is
killed as a group. Both are needed: the signal alone is lost where the server has not asked yet, the socket alone
where a child has inherited it.

Run by :class:`ForkServer`, as ``python -m autofit.system.fork_server FD DEVICE [MODULE ...]``. Messages are lines of
JSON: ``{"run": FOLDER, "early": BOOL}`` and ``{"kill": SIGNAL}`` to the server, ``{"ready": SECONDS}``,
``{"pid": PID}`` and ``{"exit": STATUS}`` back.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import psutil

from autofit.system.errors import MachineError, ServerLost
from autofit.system.files import helper_environment, write_atomically, writing
from autofit.system.job import JOB, Job, job_text
from autofit.system.redact import harmless

FAILED_JOB_LOG = "failed-job.log"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICK_SECONDS = 1.0
_FIRST = ("torch", "transformers", "transformers.modeling_utils")
_ALWAYS = ("torch._dynamo", "accelerate.commands.launch")
# peft and bitsandbytes, which Trainer's module imports, ask for the device at import; a forked child can't use CUDA
# once its parent has touched it; so does torchao, which transformers imports where it is installed
_WORKER = "autofit.worker"
"""The module whose ``main`` does a job; known by name, since it knows every kind of job and this one none."""
_ON_CPU = ("transformers.trainer", _WORKER, "torch.utils.data")


class ForkServer:
    """The parent's side: starts the server, runs jobs, kills them.

    Args:
        log: File that takes what the server prints.
        device: ``cuda`` or ``cpu``.
        modules: Modules to load beyond the usual ones, such as the model's; what can't be loaded is left out.
        trains: Whether jobs train, or only trace: what that has no use for takes two seconds to load.
    """

    def __init__(self, log: Path, device: str, modules: tuple[str, ...] = (), *, trains: bool = True) -> None:
        self.log = log
        self.trains = trains
        self.device = device
        self.modules = modules
        self.import_seconds = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._job = 0

    def start(self) -> None:
        """Start the server without waiting for it."""
        ours, theirs = socket.socketpair()
        # a driver that was asked once can't be used after a fork; this asks NVML instead
        environment = {**harmless(os.environ), "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TOKENIZERS_PARALLELISM": "false"}
        if self.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""  # what is loaded for the CPU asks for a device that is there
        if not self.trains:
            environment["TORCHDYNAMO_DISABLE"] = "1"  # bitsandbytes asks for the compiler when it is imported
        arguments = [str(theirs.fileno()), self.device, "train" if self.trains else "trace", *self.modules]
        with writing(self.log), self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "autofit.system.fork_server", *arguments],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=helper_environment(environment),
                start_new_session=True,
            )
        theirs.close()
        self._socket = ours
        self._buffer = b""

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
        if self._process is None or self._process.poll() is not None:
            self.close()
            self.start()
        self._send({"run": str(folder), "early": early})
        left = None
        late = False
        while True:
            asked = time.monotonic()
            message = self._receive(None if left is None else max(0.0, min(left, _TICK_SECONDS)))
            if left is not None:
                left -= min(time.monotonic() - asked, 2 * _TICK_SECONDS)
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
        readable, _, _ = select.select([self._socket], [], [], 3.0) if self._socket else ([], [], [])
        if not readable:
            self._send({"kill": int(signal.SIGKILL)})

    def stop_job(self) -> None:
        """Kill the job that is running, at once; for a parent that ends."""
        with contextlib.suppress(MachineError):
            self._send({"kill": int(signal.SIGKILL)})

    def close(self) -> None:
        """End the server, and with it the job that is running."""
        self._job = 0
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.terminate()  # while it loads, it does not see the socket close
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def ask(
        self, folder: Path, job: Job, *, kill_after_seconds: float = 60.0, early: bool = False
    ) -> Iterator[dict[str, Any] | None]:
        """Give the server a job in a scratch folder and read its answer; ``None`` where it gave none in time.

        Raises:
            MachineError: The job's process ended without an answer.
        """
        with writing(folder):
            scratch = Path(tempfile.mkdtemp(prefix=".ask-", dir=folder))
        try:
            write_atomically(scratch / JOB, job_text(job))
            status = self.run(scratch.resolve(), kill_after_seconds=kill_after_seconds, early=early)
            if status is None:
                yield None
                return
            try:
                text = (scratch / job.RESULT).read_text("utf-8")
            except FileNotFoundError:
                log = scratch / "stderr.log"
                with contextlib.suppress(OSError):
                    shutil.copyfile(log, folder / FAILED_JOB_LOG)
                code = os.waitstatus_to_exitcode(status)
                raise MachineError(
                    f"a helper process ended with status {code} and no answer{_last_words(log)}",
                    hint=f"its log is {folder / FAILED_JOB_LOG}",
                ) from None
            yield json.loads(text)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

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
        status = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._process.wait(5)  # the socket closes a little before its end
        job = self._job
        if job:  # it dies with the server, but what it has started does not
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(job, signal.SIGKILL)
        self.close()
        return (ServerLost if job else MachineError)(
            f"the process that starts trials ended (status {status}){_last_words(self.log)}",
            hint=f"its log is {self.log}; go on with --resume",
        )


def _last_words(log: Path) -> str:
    """The last line of a log, to be put behind what is said of its process."""
    with contextlib.suppress(OSError):
        lines = log.read_text("utf-8", "replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""
    return ""


def die_with_parent(parent: int, number: int) -> None:
    """Ask the kernel for a signal when the parent ends; end at once where it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class _Server:
    """The server's side: forks a child for each job until the socket closes."""

    def __init__(self, control: socket.socket, device: str) -> None:
        self.control = control
        self.device = device
        self.child = 0
        self.buffer = b""
        self.loading = True
        self.waiting: list[Path] = []

    def say(self, message: dict[str, Any]) -> None:
        """Tell the parent, or end where it is gone."""
        try:
            self.control.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.end()

    def end(self, *_: object) -> NoReturn:
        """Kill the job and all that it has started, and go."""
        self.sweep()
        os._exit(0)

    def sweep(self) -> None:
        """Kill the job's group, and what has left the group: an orphan becomes a child of this process."""
        self.signal(signal.SIGKILL)
        for _ in range(100):
            children = psutil.Process().children(recursive=True)
            for one in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not children:
                return
            time.sleep(0.005)

    def signal(self, number: int) -> None:
        """Send a signal to the job's whole group."""
        if self.child:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.child, number)

    def load(self, modules: Iterable[str], *, ready_for_early: bool) -> None:
        """Import some modules; those that can't be are left out."""
        for name in modules:
            if ready_for_early:
                self.turn(0)
            with contextlib.suppress(ImportError):
                importlib.import_module(name)

    def loaded(self) -> None:
        """Begin what has waited for the imports."""
        self.loading = False
        for folder in self.waiting:
            self.fork(folder)

    def turn(self, timeout: float | None = None) -> None:
        """Wait for the parent or for the job's end, and deal with it."""
        watched: list[Any] = [self.control]
        ended = os.pidfd_open(self.child) if self.child else None
        if ended is not None:
            watched.append(ended)
        readable, _, _ = select.select(watched, [], [], timeout)
        if ended is not None:
            os.close(ended)
            if ended in readable:
                _, status = os.waitpid(self.child, 0)
                self.sweep()  # what the job has left behind
                self.child = 0
                self.say({"exit": status})
        if self.control in readable:
            self.listen()

    def listen(self) -> None:
        """Do what the parent says."""
        part = self.control.recv(65536)
        if not part:
            self.end()
        self.buffer += part
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "kill" in message:
                self.signal(message["kill"])
            elif "run" in message:
                folder = Path(message["run"])
                if self.loading and not message["early"]:
                    self.waiting.append(folder)
                else:
                    self.fork(folder)

    def fork(self, folder: Path) -> None:
        """Fork the process of a job."""
        server = os.getpid()
        self.child = os.fork()
        if self.child == 0:
            self.control.close()
            _job(folder, server, self.device)
        self.say({"pid": self.child})


def serve(descriptor: int, device: str, modules: tuple[str, ...], *, trains: bool = True) -> NoReturn:
    """The server's process: load, then serve; see :class:`ForkServer` for the arguments."""
    began = time.monotonic()
    control = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    server = _Server(control, device)
    signal.signal(signal.SIGTERM, server.end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(os.getppid(), signal.SIGTERM)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if not trains:
        _leave_out("datasets", "scipy")
    first = [*_FIRST, *modules]
    if device == "cuda" and find_spec("torchao"):
        first = [name for name in first if not name.startswith("transformers.")]
    server.load(first, ready_for_early=False)
    server.load((*_ALWAYS, *(_ON_CPU if device == "cpu" else ())), ready_for_early=True)
    server.say({"ready": time.monotonic() - began})
    server.loaded()
    while True:
        server.turn()


def _leave_out(*packages: str) -> None:
    """Have transformers go without some packages, which it loads wherever they are: seconds, and a trace uses none."""
    with contextlib.suppress(ImportError):
        from transformers import utils

        for name in packages:
            if hasattr(utils, f"is_{name}_available"):
                setattr(utils, f"is_{name}_available", lambda: False)


def device_is_spoilt() -> bool:
    """Whether something that the server has imported has touched the device, so that a forked child can't use it."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda._is_in_bad_fork())  # noqa: SLF001 - PyTorch's own question before it begins


def _job(folder: Path, server: int, device: str) -> NoReturn:
    """The child: a session of its own, its output in the folder, then the worker; never returns."""
    code = 1
    try:
        os.setsid()
        die_with_parent(server, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for stream, name in ((1, "stdout.log"), (2, "stderr.log")):
            handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(handle, stream)
            os.close(handle)
        if device == "cuda" and device_is_spoilt():
            os.execv(sys.executable, [sys.executable, "-m", _WORKER, str(folder)])  # noqa: S606 - a list
        importlib.import_module(_WORKER).main(folder)
        code = 0
    except BaseException:  # noqa: BLE001 - the top of the child; it must not return into the server
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2], tuple(sys.argv[4:]), trains=sys.argv[3] == "train")
