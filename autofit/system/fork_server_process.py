"""The process of the fork server: loads torch and transformers, then forks one child for each job.

Run by :class:`autofit.system.fork_server.ForkServer`, which tells why it is there and what the messages are, as
``python -m autofit.system.fork_server_process FD DEVICE train|trace [MODULE ...]``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FIRST = ("torch", "transformers", "transformers.modeling_utils")
_ALWAYS = ("torch._dynamo", "accelerate.commands.launch")
_WORKER = "autofit.worker"
"""The module whose ``main`` does a job; known by name, since it knows every kind of job and this one none."""
# peft and bitsandbytes, which Trainer's module imports, ask for the device at import; a forked child can't use CUDA
# once its parent has touched it; so does torchao, which transformers imports where it is installed
_ON_CPU = ("transformers.trainer", _WORKER, "torch.utils.data")


def die_with_parent(parent: int, number: int) -> None:
    """Ask the kernel for a signal when the parent ends; end at once where it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def load_bitsandbytes() -> None:
    """Import bitsandbytes where it is installed, and have it compile its functions when they are first called.

    It compiles them when it is imported (0.50), for which PyTorch loads Inductor: a second and 40 MB of each process
    that imports Trainer, and hardly any calls them. Where it or torch can't be imported nothing is said: who needs them
    is told.
    """
    if "bitsandbytes" in sys.modules or not find_spec("bitsandbytes"):
        return
    try:
        import torch
    except ImportError:
        return

    at_once = torch.compile

    def at_first_call(function: Any = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(at_first_call, **options)
        compiled: Any = functools.cache(lambda: at_once(function, **options))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return call

    torch.compile = at_first_call  # type: ignore[assignment]
    try:
        importlib.import_module("bitsandbytes")
    except Exception:  # noqa: BLE001, S110 - as said above
        pass
    finally:
        torch.compile = at_once


def own_threads() -> None:
    """Make PyTorch's pool of threads anew in a process that was just forked, while it has a single thread.

    The first call after a fork does that, and nothing guards it: where autograd's threads of several devices begin at
    once, all but one find no pool, and abort ("Invalid thread pool!", ``caffe2/utils/threadpool``, torch 2.13).
    """
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "set_num_threads"):
        torch.set_num_threads(torch.get_num_threads())


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
    """The server's process: load, then serve; see :class:`autofit.system.fork_server.ForkServer` for the arguments."""
    began = time.monotonic()
    control = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    server = _Server(control, device)
    signal.signal(signal.SIGTERM, server.end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(os.getppid(), signal.SIGTERM)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.register_at_fork(after_in_child=own_threads)
    if not trains:
        _leave_out("datasets", "scipy")
    first = [*_FIRST, *modules]
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
