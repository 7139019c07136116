"""The process of the fork server: loads torch and transformers, then forks one child for each job.

Run by :func:`autofit.system.forking.begun.begin` as ``python -m autofit.system.forking.process FD DEVICE train|trace``;
:mod:`autofit.system.forking` tells why it is there and what the messages are.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import psutil

from autofit.system.files import LEDGER, LEDGER_FILE, note, put_back
from autofit.system.forking.imports import (
    device_is_spoilt,
    import_transformers,
    leave_out,
    load_bitsandbytes,
    own_threads,
)
from autofit.system.other_kernels import packages_of
from autofit.system.processes import die_with_parent, end_fork, print_into

_PR_SET_CHILD_SUBREAPER = 36
_FIRST = ("torch", "transformers", "transformers.modeling_utils")
_ALWAYS = ("torch._dynamo", "accelerate.commands.launch")
_WORKER = "autofit.worker"
"""The module whose ``main`` does a job, and whose ``snapshot`` makes one; known by name, since it knows every kind of
job and this one none."""
# peft and bitsandbytes, which Trainer's module imports, ask for the device at import; a forked child can't use CUDA
# once its parent has touched it; so do torchao, which transformers imports where it is installed, and what a model's
# module takes its kernels from
_ON_CPU = ("transformers.trainer", "torch.utils.data")


def _adopt_orphans() -> None:
    """Have the kernel make children of this process of those whose parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class _Server:
    """The server's side: forks a child for each job until the socket closes."""

    def __init__(self, control: socket.socket, device: str) -> None:
        self.control = control
        self.device = device
        self.child = 0
        self.buffer = b""
        self.loading = True
        self.waiting: list[Callable[[], None]] = []
        self.snapshots: set[int] = set()
        self.ledgers: dict[int, Path] = {}

    def say(self, message: dict[str, Any]) -> None:
        """Tell the parent, or end where it is gone."""
        try:
            self.control.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.end()

    def end(self, *_: object) -> NoReturn:
        """Kill the job, the snapshots and all that they have started, and go."""
        self.snapshots.clear()
        self.sweep()
        for ledger in reversed(self.ledgers.values()):
            put_back(ledger)
        os._exit(0)

    def sweep(self) -> None:
        """Kill the job's group, and what has left the group: an orphan becomes a child of this process."""
        self.signal(signal.SIGKILL)
        for _ in range(100):
            left = self.left_behind()
            for one in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            with contextlib.suppress(ChildProcessError):
                while ended := os.waitpid(-1, os.WNOHANG)[0]:
                    self.snapshots.discard(ended)
            if not left:
                return
            time.sleep(0.005)

    def left_behind(self) -> list[psutil.Process]:
        """All processes below this one but for the snapshots, and what is below them."""
        kept, left = set(self.snapshots), []
        for one in psutil.Process().children(recursive=True):  # a parent comes before its children
            with contextlib.suppress(psutil.NoSuchProcess):
                if one.pid in kept or one.ppid() in kept:
                    kept.add(one.pid)
                else:
                    left.append(one)
        return left

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
            gc.disable()  # half a million objects are made, and none is garbage: a tenth of the imports
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
            gc.freeze()  # else each child looks through them as soon as it allocates, and when Trainer says so: 0.7 s
            gc.enable()

    def loadable(self, modules: Iterable[str]) -> list[str]:
        """Those of some modules that may be imported ahead of a fork: none that touches the device."""
        return [name for name in modules if self.device == "cpu" or not any(map(find_spec, packages_of(name)))]

    def loaded(self) -> None:
        """Begin what has waited for the imports."""
        self.loading = False
        for begin in self.waiting:
            begin()

    def turn(self, timeout: float | None = None) -> None:
        """Wait for the parent or for the end of the job or of a snapshot, and deal with it."""
        watched = {os.pidfd_open(pid): pid for pid in (*self.snapshots, self.child) if pid}
        asked: list[Any] = [self.control, *watched]
        readable, _, _ = select.select(asked, [], [], timeout)
        for ends, pid in watched.items():
            os.close(ends)
            if ends in readable:
                self.ended(pid)
        if self.control in readable:
            self.listen()

    def ended(self, pid: int) -> None:
        """The job or a snapshot has ended: end what it has left behind."""
        if pid == self.child:
            _, status = os.waitpid(pid, 0)
            self.sweep()
            put_back(self.ledgers[pid])
            del self.ledgers[pid]  # not before: :meth:`end` may break in
            self.child = 0
            self.say({"exit": status})
        elif pid in self.snapshots:  # else it was waited for already
            os.waitpid(pid, 0)
            self.snapshots.discard(pid)
            put_back(self.ledgers[pid])
            del self.ledgers[pid]
            if not self.child:  # else its end is near
                self.sweep()

    def listen(self) -> None:
        """Do what the parent says."""
        part, handles, _, _ = socket.recv_fds(self.control, 65536, 1)
        if not part:
            self.end()
        self.buffer += part
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "kill" in message:
                self.signal(message["kill"])
                continue
            if "load" in message:
                self.load(self.loadable(message["load"]), ready_for_early=False)
                continue
            if "snapshot" in message:
                folder = Path(message["snapshot"])
                begin = functools.partial(self.fork_snapshot, folder, socket.socket(fileno=handles.pop()))
            else:
                begin = functools.partial(self.fork, Path(message["run"]))
            if self.loading and not message.get("early"):
                self.waiting.append(begin)
            else:
                begin()

    def fork(self, folder: Path) -> None:
        """Fork the process of a job."""
        server = os.getpid()
        self.child = os.fork()
        if self.child == 0:
            self.control.close()
            _job(folder, server, self.device)
        self.ledgers[self.child] = _ledger(folder)
        self.say({"pid": self.child})

    def fork_snapshot(self, folder: Path, control: socket.socket) -> None:
        """Fork the process of a snapshot, which hears of its jobs by a socket of its own."""
        server = os.getpid()
        child = os.fork()
        if child == 0:
            self.control.close()
            _job(folder, server, self.device, _Snapshot(control, self.device).make)
        control.close()
        self.ledgers[child] = _ledger(folder)
        self.snapshots.add(child)


class _Snapshot(_Server):
    """The side of a snapshot: a job that has run up to some point, where a child is forked for each further job."""

    forked: Path | None = None
    """The folder of this process's job, where it is such a child."""

    def make(self, folder: Path) -> None:
        """Run the job that asks for others; where it never does, tell the parent why."""
        _adopt_orphans()
        self.say({"snapshot": os.getpid()})
        if why := importlib.import_module(_WORKER).snapshot(folder, self.next_job):
            self.say({"refused": why})

    def next_job(self) -> Path:
        """Serve until a child is forked, and return in the child, with the folder of its job."""
        self.loading = False
        self.say({"ready": 0.0})
        while self.forked is None:
            self.turn()
        return self.forked

    def fork(self, folder: Path) -> None:
        """Fork the process of a job, which goes on from here."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()  # else each child says it again
        snapshot = os.getpid()
        self.child = os.fork()
        if self.child == 0:
            self.control.close()
            _begin(folder, snapshot)
            self.forked = folder
        else:
            self.ledgers[self.child] = _ledger(folder)
            with contextlib.suppress(OSError):  # who ends this process, and the job with it, knows this ledger alone
                note(Path(os.environ[LEDGER]), _ledger(folder))
            self.say({"pid": self.child})


def serve(descriptor: int, device: str, *, trains: bool = True) -> NoReturn:
    """The server's process: load, then serve; the arguments are those of ``ForkServer``."""
    began = time.monotonic()
    control = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    server = _Server(control, device)
    signal.signal(signal.SIGTERM, server.end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(os.getppid(), signal.SIGTERM)
    _adopt_orphans()
    os.register_at_fork(after_in_child=own_threads)
    import_transformers()
    if not trains:
        leave_out("datasets", "scipy")
    first = [*((_WORKER,) if device == "cpu" else ()), *_FIRST]
    if device == "cuda" and find_spec("torchao"):
        first = [name for name in first if not name.startswith("transformers.")]
    server.load(first, ready_for_early=False)
    if device == "cpu" and trains:
        load_bitsandbytes()
    server.load((*_ALWAYS, *(_ON_CPU if device == "cpu" else ())), ready_for_early=True)
    server.say({"ready": time.monotonic() - began})
    server.loaded()
    while True:
        server.turn()


def _ledger(folder: Path) -> Path:
    return folder.absolute() / LEDGER_FILE


def _begin(folder: Path, parent: int) -> None:
    """What a child does first: a session of its own that dies with its parent, its output in the folder."""
    os.setsid()
    die_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    print_into(folder)
    os.environ[LEDGER] = str(_ledger(folder))


def _job(folder: Path, server: int, device: str, work: Callable[[Path], None] | None = None) -> NoReturn:
    """The child: does the job in the folder, or other work there; never returns."""
    code = 1
    try:
        _begin(folder, server)
        if work is None and device == "cuda" and device_is_spoilt():
            os.execv(sys.executable, [sys.executable, "-m", _WORKER, str(folder)])  # noqa: S606 - a list
        (work or importlib.import_module(_WORKER).main)(folder)
        code = 0
    except BaseException:  # noqa: BLE001 - the top of the child; it must not return into the server
        import traceback

        traceback.print_exc()
    finally:
        end_fork(code)


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2], trains=sys.argv[3] == "train")
