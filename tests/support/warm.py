"""The real command line, many times over, out of one process that has torch loaded: loading it takes seconds.

Each command is a fork of that process, in a session of its own; its fork server is a fork, too, and serves as the real
one does. All that is left out is the loading. Run by :class:`Warm` as ``python warm.py``; lines of JSON both ways.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
MARK = "AUTOFIT_TEST_MARK"


class Warm:
    """The parent's side."""

    def __init__(self, log: Path, environment: dict[str, str] | None = None):
        paths = os.pathsep.join((str(SUPPORT.parent.parent), str(SUPPORT)))
        given = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {}), "PYTHONPATH": paths}
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(SUPPORT / "warm.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=given,
                start_new_session=True,
            )
        self.ended = {}

    def start(self, **command):
        """Start a command; its pid."""
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        while True:
            said = self._hear(None)
            if "pid" in said:
                return said["pid"]

    def status(self, pid, seconds):
        """How it ended, as a shell would say it with a minus for signals; ``None`` where it runs on."""
        deadline = time.monotonic() + seconds
        while pid not in self.ended and (left := deadline - time.monotonic()) > 0:
            self._hear(left)
        return self.ended.get(pid)

    def _hear(self, seconds):
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            return {}
        line = self._line()
        said = json.loads(line)
        if "ended" in said:
            self.ended[said["ended"]] = said["status"]
        return said

    def _line(self):
        line = b""
        while not line.endswith(b"\n"):
            part = os.read(self.process.stdout.fileno(), 1)
            assert part, "the warm process is gone"
            line += part
        return line

    def close(self):
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()


class Forked:
    """A child as :class:`subprocess.Popen` shows one."""

    def __init__(self, pid):
        self.pid, self.returncode = pid, None

    def poll(self):
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(0.005)
        return self.returncode

    def send(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send(signal.SIGTERM)

    def kill(self):
        self.send(signal.SIGKILL)


def fork_a_server(log, device, *, trains):
    """In place of :func:`autofit.system.forking.begun.begin`; what stands for faults is imported here already."""
    from autofit.system.files import writing
    from autofit.system.forking.begun import Begun
    from autofit.system.forking.process import serve

    ours, theirs = socket.socketpair()
    with writing(log):
        printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.dup2(printed, 1)
            os.dup2(printed, 2)
            keep = theirs.fileno()
            os.closerange(3, keep)
            os.closerange(keep + 1, 4096)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            sys.stdout, sys.stderr = (open(number, "w", closefd=False, buffering=1) for number in (1, 2))  # noqa: SIM115
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
            serve(theirs.detach(), device, trains=trains)
        finally:
            os._exit(1)
    os.close(printed)
    theirs.close()
    return Begun(Forked(pid), ours, log)


def take_streams(command):
    """Make the command's streams this process's, and leave no other file open; what Python calls them."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        if command[name] is not None:  # a pipe has its reader by now
            os.dup2(os.open(command[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    os.closerange(3, 4096)
    for number, name in ((1, "out"), (2, "err")):
        if command[name] is None:
            os.close(number)
    return [
        None if command[name] is None else open(number, "w", closefd=False) for number, name in ((1, "out"), (2, "err"))
    ]


def become(command):
    """A fork of the warm process becomes a command."""
    import tempfile

    from autofit import cli
    from autofit.search import loop
    from autofit.system.forking import begun

    os.setsid()
    os.chdir(command["folder"])
    os.environ.update(command["environment"])
    tempfile.tempdir = None
    streams = sys.stdout, sys.stderr = take_streams(command)
    if command.get("ignored"):
        signal.signal(command["ignored"], signal.SIG_IGN)
    if command.get("group"):
        Path(command["group"], "cgroup.procs").write_text("0")
    begun.begin = fork_a_server
    for name, value in command.get("constants", {}).items():
        assert hasattr(loop, name)
        setattr(loop, name, value)
    code = 1
    try:
        cli.main(args=command["arguments"], prog_name="autofit")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001 - the top of a process
        import traceback

        traceback.print_exc()
    try:
        for stream in streams:
            if stream is not None:
                stream.flush()
    except OSError:
        code = 120
    os._exit(code)


def main():
    """The warm process."""
    import faulty

    import autofit.cli
    import autofit.commands.tune
    from autofit.system.forking.process import _ALWAYS, _ON_CPU

    _ = autofit, faulty
    for name in (
        *_ALWAYS,
        *_ON_CPU,
        "transformers.models.llama.modeling_llama",
        "optuna",
        "autofit.commands.shell.console",
    ):
        with contextlib.suppress(ImportError):
            __import__(name)
    children = {}
    buffer = b""
    while True:
        watched = [os.pidfd_open(pid) for pid in children]
        readable, _, _ = select.select([0, *watched], [], [])
        ended = [pid for pid, one in zip(children, watched, strict=True) if one in readable]
        for one in watched:
            os.close(one)
        for pid in ended:
            _, status = os.waitpid(pid, 0)
            children.pop(pid)
            say({"ended": pid, "status": os.waitstatus_to_exitcode(status)})
        if 0 not in readable:
            continue
        part = os.read(0, 65536)
        if not part:
            return
        *lines, buffer = (buffer + part).split(b"\n")
        for line in lines:
            pid = os.fork()
            if pid == 0:
                become(json.loads(line))
            children[pid] = True
            say({"pid": pid})


def say(message):
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
