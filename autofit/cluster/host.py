"""One machine's part of a tune over a cluster: a long-lived actor with its cards, a warm fork server and a runner.

Ray makes a :class:`Host` in a placement group that holds its cards, and hides the other ones from it. What it gets and
gives is JSON and the bytes of files: no folder is shared between the machines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from pydantic import TypeAdapter

from autofit import _version
from autofit.cluster.shared import Shared
from autofit.contract.facts import FACTS, Facts, Hardware
from autofit.contract.outcome import TRIAL, Trial
from autofit.contract.plan import Plan
from autofit.machine.describe import cpu_name, host_memory
from autofit.machine.jobs import HardwareJob
from autofit.machine.nvml import cards
from autofit.machine.other_processes import warnings
from autofit.machine.packages import installed
from autofit.machine.select import hardware_lock
from autofit.system.errors import LockHeld, MachineError, ServerLost
from autofit.system.forking.server import ForkServer
from autofit.system.job import JOB
from autofit.system.strict_json import dump_json
from autofit.training.ranks import Share, free_port
from autofit.training.runner import ProcessRunner, trial_folder
from autofit.training.scripts.snapshots import snapshots_of
from autofit.training.timing import Effort

Files = dict[str, bytes]
"""The files of a folder, by their paths in it."""
KNOWN: TypeAdapter[tuple[Trial, ...]] = TypeAdapter(tuple[Trial, ...])
"""Trials that another one is held against."""
_PREFIX = "autofit-node-"
_LOG, _CONFIG = "forkserver.log", "model"
_MOST_BYTES = 16 << 20
"""Of a file that is sent: logs of a trial are cut off at their end, no other file is as large."""


def describe_node(device: str, shared: Shared | None = None) -> dict[str, Any]:
    """What has to be the same on every machine.

    Returns:
        ``versions``; ``devices``, name and memory of each card, or of the CPU; and ``lacks``: why a script can't be
        run there.
    """
    found = cards() if device == "cuda" else [(cpu_name(), host_memory()[0])]
    return {"versions": versions(), "devices": found, "lacks": "" if shared is None else shared.lacks()}


def versions() -> dict[str, str]:
    """Of autofit, Python and the packages that an answer holds for, on this machine."""
    return {"autofit": _version.__version__, "python": ".".join(map(str, sys.version_info[:3])), **installed()}


def read_files(folder: Path) -> Files:
    """The files of a folder and of those in it, but for links and hidden ones."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not path.is_symlink() and not any(part.startswith(".") for part in name.parts):
            with path.open("rb") as file:
                found[name.as_posix()] = file.read(_MOST_BYTES)
    return found


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Put files into a folder, which is made where it is missing."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def passing_folder(stack: contextlib.ExitStack) -> Path:
    """A folder on this machine, which is removed in the end, also where this process is killed.

    A shell of its own waits for the end of a pipe that this process holds. It is no child of this process: Ray kills
    those of a worker that it ends.
    """
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    waits = 'exec 3<&0; (read -r _ <&3; sleep 1; rm -rf -- "$1") &'
    reads, writes = os.pipe()
    null = subprocess.DEVNULL  # else it would hold what this process writes to
    words = ["sh", "-c", waits, "sh", str(folder)]
    subprocess.run(words, stdin=reads, stdout=null, stderr=null, start_new_session=True, check=True)
    os.close(reads)
    stack.callback(os.close, writes)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Host:
    """Runs jobs and trials on its cards, one at a time.

    Args:
        device: ``cuda`` or ``cpu``.
        modules: To be loaded by the fork server beforehand.
        shared: Of a script that is run here.
    """

    def __init__(self, device: str, modules: tuple[str, ...], shared: Shared | None = None) -> None:
        as_outside_ray()
        if shared is not None:
            os.chdir(shared.folder)
        self._device = device
        self._stack = contextlib.ExitStack()
        self.folder = passing_folder(self._stack)
        self._server = ForkServer(self.folder / _LOG, device, modules)
        self._stack.callback(self._server.close)
        self._server.start()
        self._runner: ProcessRunner | None = None
        self._notes: list[str] = []

    def open(self, facts_text: str, config: Files) -> str:
        """Take the question and hold the card; returns why its card can't be used, in words, or nothing."""
        facts: Facts = FACTS.validate_json(facts_text)
        write_files(self.folder / _CONFIG, config)
        here = facts.workload.processes // facts.workload.nodes
        with self._server.ask(self.folder, HardwareJob(device=facts.hardware.device, processes=here)) as answer:
            if answer is None or "hardware" not in answer:
                return "its device can't be used: " + (answer["device"] if answer else "no answer in a minute")
        own = Hardware(**answer["hardware"])
        try:
            self._stack.enter_context(hardware_lock(own))
        except LockHeld as error:
            return error.message
        if own.driver != facts.hardware.driver:
            return f"its driver is {own.driver}, the first one's {facts.hardware.driver}"
        if own.device == "cuda" and own.free_bytes < facts.workload.limit_bytes:
            return "other processes hold memory of its device that trials need"
        changed = ("uuid", "visible_id", "beside", "free_bytes", "others_bytes", "host_free_bytes")
        mine = {name: getattr(own, name) for name in changed}
        facts = dataclasses.replace(facts, hardware=dataclasses.replace(facts.hardware, **mine))
        trials, note = self.folder / "trials", self._notes.append
        snapshots = snapshots_of(trials, facts, self._server, note)
        self._runner = ProcessRunner(trials, facts, self.folder / _CONFIG, self._server, note=note, snapshots=snapshots)
        self._notes += warnings(facts.hardware, self.folder)
        return ""

    def port(self) -> int:
        """A port of this machine that ranks of others can be told to come to."""
        return free_port("")

    def job(
        self, files: Files, config: Files, share: Mapping[str, Any] | None, *, seconds: float, early: bool
    ) -> tuple[int | None, Files]:
        """Run the job of a folder; returns its status, as :meth:`ForkServer.run` does, and the files after it.

        Args:
            files: Of the folder.
            config: Of the model's folder.
            share: Of the ranks, those that run here; ``None`` where all do.
            seconds: After which it is killed.
            early: It needs the model's class alone.
        """
        folder = Path(tempfile.mkdtemp(prefix="job-", dir=self.folder))
        try:
            write_files(self.folder / _CONFIG, config)
            write_files(folder, files)
            told = json.loads(files[JOB])
            if "config" in told:
                told["config"] = str(self.folder / _CONFIG)
            if share is not None:
                told["share"] = dict(share)
            (folder / JOB).write_text(json.dumps(told), "utf-8")
            status = self._server.run(folder, kill_after_seconds=seconds, early=early)
            return status, read_files(folder)
        except ServerLost:
            return int(signal.SIGKILL), read_files(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def trial(self, told: Mapping[str, Any], share: Mapping[str, Any] | None) -> tuple[str, Files, list[str]]:
        """Run a trial, or this machine's part of it.

        Args:
            told: ``number``, ``plan``, ``effort``, ``purpose``, ``limit_seconds`` as a runner gets them, as JSON
                values; ``predicted_bytes``; ``known``: trials to hold it against.
            share: Of its ranks, those that run here; ``None`` where all do.

        Returns:
            The trial as JSON, the files of its folder, and what is worth a line.
        """
        assert self._runner is not None
        plan, number = Plan(told["plan"]), int(told["number"])
        self._runner.share = None if share is None else Share(**share)
        self._runner.known = KNOWN.validate_json(told["known"])
        self._runner.predicted = {} if told["predicted_bytes"] is None else {plan: told["predicted_bytes"]}
        folder = trial_folder(self._runner.folder, number)
        try:
            trial = self._runner.run(
                number, plan, Effort(**told["effort"]), purpose=told["purpose"], limit_seconds=told["limit_seconds"]
            )
            notes, self._notes[:] = list(self._notes), []
            return dump_json(TRIAL, trial), read_files(folder), notes
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def stop(self) -> None:
        """Kill the job that is running."""
        self._server.stop_job()

    def close(self) -> None:
        """End the fork server, give the card back, and leave no file."""
        self._stack.close()


def as_outside_ray() -> None:
    """Take back what Ray has put into the environment: a launch would find the threads that the machine gives.

    Raises:
        MachineError: The environment of Ray's own process on this machine can't be read.
    """
    try:
        outside = psutil.Process(os.getppid()).environ()
    except psutil.Error as error:
        raise MachineError(f"Ray's process on {socket.gethostname()} can't be read: {error}") from error
    if "OMP_NUM_THREADS" in outside:
        os.environ["OMP_NUM_THREADS"] = outside["OMP_NUM_THREADS"]
    else:
        os.environ.pop("OMP_NUM_THREADS", None)
