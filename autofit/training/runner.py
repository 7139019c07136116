"""One plan -> one outcome, in a process and a folder of its own.

The folder is the trial: ``job.json`` in, ``outcome.json`` out (written aside, renamed into place), its logs beside
them, and at last ``trial.json``, which is the outcome with its number, plan and cost. A folder without ``trial.json``
is a trial that was cut off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol

from autofit.contract.outcome import (
    OUTCOME,
    TRIAL,
    Crashed,
    Measured,
    Outcome,
    OutOfMemory,
    PredictedSpeed,
    TimedOut,
    Trial,
    Unsupported,
)
from autofit.contract.plan import Plan
from autofit.machine.describe import host_memory
from autofit.machine.meters import memory_kills
from autofit.machine.nvml import device_used_bytes
from autofit.machine.other_processes import neighbours, words
from autofit.registry import converted
from autofit.system import strict_json
from autofit.system.errors import InputError, MachineError, ServerLost
from autofit.system.files import write_atomically, writing
from autofit.system.forking.server import ForkServer
from autofit.system.job import JOB, job_text
from autofit.system.strict_json import dump_json
from autofit.system.units import MIB, size
from autofit.training.jobs import TrialJob
from autofit.training.joined import killed_for_memory, log_tail
from autofit.training.ranks import PROGRESS_FILE, Share, phase_of
from autofit.training.timing import Effort

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.system.forking.snapshot import Snapshot
    from autofit.training.scripts.snapshots import Snapshots

TRIAL_FILE = "trial.json"
_SLACK_BYTES = 64 * MIB
_CLOSE = 0.9
"""Of the ceiling: a plan that ran out of memory below that did not break it."""
_NEARLY_FULL = 0.85
_CLIFF = 3.0
"""Times as long as with fewer rows: no arithmetic is, a bus is."""

Rated = Callable[[Plan, Measured], Outcome]
"""Given what was measured of a plan; returns it with its MFU, or why it can't have been."""


def unrated(_: Plan, outcome: Measured) -> Outcome:
    """The outcome as it is, where nobody counted the plan's FLOPs."""
    return outcome


class Runner(Protocol):
    """Turns plans into outcomes; the seam through which recorded devices are replayed."""

    def run(
        self, number: int, plan: Plan, effort: Effort, *, purpose: Literal["search", "final"], limit_seconds: float
    ) -> Trial:
        """Run one trial and return it."""


class ProcessRunner:
    """Runs each trial in a process of its own, on the real device.

    Args:
        folder: ``trials/`` of the output folder.
        facts: What the plans are for.
        config: Folder that holds the model's ``config.json``.
        server: Forks the processes.
        predicted: Peak bytes of each plan by its trace, to stand beside what is measured.
        known: The trials so far, to hold a new one against.
        note: Told of what is worth a line.
        rated: Puts the MFU into what was measured, or says why it can't have been.
        speeds: Predicted speed of each plan, to stand beside what is measured.
        snapshots: Of a user's script: trials of the search are forked from them. Finalists run the whole script, as
            a launch does, so that no promise rests on forks alone.
    """

    def __init__(
        self,
        folder: Path,
        facts: Facts,
        config: Path,
        server: ForkServer,
        predicted: Mapping[Plan, int] | None = None,
        *,
        known: Sequence[Trial] = (),
        note: Callable[[str], None] = lambda _: None,
        rated: Rated = unrated,
        speeds: Mapping[Plan, PredictedSpeed] = MappingProxyType({}),
        snapshots: Snapshots | None = None,
    ) -> None:
        self.rated = rated
        self.snapshots = snapshots
        self.speeds = speeds
        self.predicted = predicted or {}
        self.known = known
        self.note = note
        self.folder = folder
        self.facts = facts
        self.config = config
        self.server = server
        work, hardware = facts.workload, facts.hardware
        self.share: Share | None = None
        """Of a trial's ranks, those that run on this machine; ``None`` where all do."""
        self.room_bytes = min(work.limit_bytes, hardware.free_bytes)
        """What was free for trials; less where others have taken some of it since, and were reported."""
        self._idle_bytes = hardware.free_bytes if hardware.device == "cuda" else self.room_bytes
        self._home = _identity(folder.parent)

    def run(
        self, number: int, plan: Plan, effort: Effort, *, purpose: Literal["search", "final"], limit_seconds: float
    ) -> Trial:
        """Run one trial and return it.

        Raises:
            MachineError: The folder can't be written, or no process can be started.
        """
        began = time.monotonic()
        folder = trial_folder(self.folder, number)
        if _identity(self.folder.parent) != self._home:
            raise MachineError(
                f"{self.folder.parent} is gone: it was deleted or moved while the tune ran",
                hint="tune again, or put it back and --resume",
            )
        job = TrialJob(plan=plan, facts=self.facts, config=str(self.config.resolve()), effort=effort, share=self.share)
        snapshot = None
        if self.snapshots is not None and purpose == "search":
            snapshot = self.snapshots.of(plan, kill_after_seconds=limit_seconds)
        outcome = self._tried(folder, job, limit_seconds, snapshot)
        if self.snapshots is not None and snapshot is not None and (snapshot.closed or _may_be_the_forks(outcome)):
            whole = self._tried(folder, job, limit_seconds, None)
            if snapshot.closed or whole.kind != outcome.kind:
                forked, run = (one.kind.replace("_", " ") for one in (outcome, whole))
                said = f" ({outcome.reason})" if isinstance(outcome, Crashed) else ""
                self.snapshots.give_up(f"trial {number} ended as {forked}{said} when it was, and as {run} when not")
            outcome = whole
        if isinstance(outcome, Measured) and (why := spilled(plan, outcome, self.known, self.facts)):
            self.note(f"trial {number} {why}: counted as out of memory")
            limit = self.facts.workload.limit_bytes
            peak = max(outcome.peak_bytes, limit)
            outcome = OutOfMemory(where="device", phase="forward", limit_bytes=limit, peak_bytes=peak)
        if isinstance(outcome, Measured):
            outcome = self.rated(plan, outcome)
        trial = Trial(
            number=number,
            plan=plan,
            outcome=outcome,
            wall_seconds=time.monotonic() - began,
            purpose=purpose,
            predicted_bytes=self.predicted.get(plan),
            predicted_speed=self.speeds.get(plan),
        )
        write_atomically(folder / TRIAL_FILE, dump_json(TRIAL, trial))
        return trial

    def _tried(self, folder: Path, job: TrialJob, limit_seconds: float, snapshot: Snapshot | None) -> Outcome:
        """The outcome of a trial's process, forked from a snapshot or else from the server."""
        with writing(folder):
            if folder.exists():  # one that was cut off
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
        write_atomically(folder / JOB, job_text(job))
        self.settle()
        kills_before = memory_kills()
        lost = ""
        try:
            status = (snapshot or self.server).run(folder.resolve(), kill_after_seconds=limit_seconds)
        except ServerLost as error:
            status, lost = int(signal.SIGKILL), error.message
        ran_out = memory_kills() > kills_before
        outcome = self._outcome(folder, status, limit_seconds, host_ran_out=ran_out, lost=lost)
        if isinstance(outcome, OutOfMemory):
            outcome = self._external_pressure(job.plan, outcome, killed=ran_out)
        return outcome

    def settle(self, patience_seconds: float = 10.0) -> None:
        """Wait until the device's memory has come back: from the trial before, or from a process that took it.

        The driver frees it some time after a process has ended. Where it does not come back, somebody else keeps
        it: that is said once, and the trial is run all the same.
        """
        deadline = time.monotonic() + patience_seconds
        while (free := self.free_bytes()) < self._idle_bytes - _SLACK_BYTES and time.monotonic() < deadline:
            time.sleep(0.05)  # also where the rest were enough: what goes later may hide as much of the next trial's
        if free < self._idle_bytes - _SLACK_BYTES:
            self._idle_bytes = free  # for somebody who stays it is waited once
        if free < self.room_bytes - _SLACK_BYTES:
            who = words(neighbours(self.facts.hardware))
            self.note(
                f"another process took memory of {self.facts.hardware.name}: {size(free)} are free, where "
                f"{size(self.room_bytes)} were for trials; a trial that runs out of memory meanwhile is repeated"
                f"{'; also on this device: ' + who if who else ''}"
            )
            self.room_bytes = free

    def free_bytes(self) -> int:
        """What of the device's memory is free now: of the fullest card, where there are several."""
        hardware = self.facts.hardware
        if hardware.device == "cpu":
            return host_memory()[1]
        cards = ((hardware.uuid, hardware.total_bytes), *hardware.beside)
        return min(total - device_used_bytes(uuid) for uuid, total in cards)

    def _external_pressure(self, plan: Plan, outcome: OutOfMemory, *, killed: bool) -> OutOfMemory:
        """The outcome, marked where somebody else held the memory."""
        if outcome.where == "host":
            return outcome
        limit = self.facts.workload.limit_bytes
        crowded = self.free_bytes() < min(limit, self.facts.hardware.free_bytes) - _SLACK_BYTES
        if killed:  # nobody knows what it held; its trace may
            others = crowded or self.predicted.get(plan, limit) < limit / 2
        else:
            others = outcome.peak_bytes < (limit if crowded else _CLOSE * limit)
        return dataclasses.replace(outcome, external_pressure=others or outcome.external_pressure)

    def _outcome(
        self, folder: Path, status: int | None, limit_seconds: float, *, host_ran_out: bool, lost: str
    ) -> Outcome:
        """The child's own verdict where it wrote one; else what its end tells."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            outcome: Outcome = strict_json.read(OUTCOME, (folder / TrialJob.RESULT).read_bytes())
            return outcome
        phase = "start"
        with contextlib.suppress(OSError):
            phase = phase_of(folder) or (folder / PROGRESS_FILE).read_text("utf-8").strip() or phase
        if status is None:
            return TimedOut(limit_seconds=limit_seconds, phase=phase)
        tail = log_tail(folder)
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number == signal.SIGKILL and host_ran_out:
                return killed_for_memory(self.facts)
            if lost:
                return Crashed(reason=lost, log_tail=tail)
            name = signal.Signals(number).name
            return Crashed(reason=f"killed by {name} after {phase}", log_tail=tail)
        return Crashed(reason=f"ended with status {os.WEXITSTATUS(status)} after {phase}", log_tail=tail)


def _may_be_the_forks(outcome: Outcome) -> bool:
    """Whether an outcome may come of the fork: what has run no step, or not to its end by itself."""
    hung = isinstance(outcome, TimedOut) and outcome.phase in {"start", "load"}
    return hung or isinstance(outcome, Crashed | Unsupported)


def spilled(plan: Plan, outcome: Measured, known: Sequence[Trial], facts: Facts) -> str | None:
    """Why a driver seems to have moved memory to the host instead of failing, in words; ``None`` where it did not.

    Some drivers do. It shows by a peak that the device does not have, or by one near to it and steps that are
    several times as long as with fewer rows, where they should be shorter.
    """
    hardware = facts.hardware
    if outcome.peak_bytes > hardware.total_bytes:
        there = size(hardware.total_bytes)
        return f"held {size(outcome.peak_bytes)}, which is more than the {there} that are there: it spilled"
    physical = hardware.free_bytes if hardware.device == "cuda" else hardware.total_bytes
    if outcome.peak_bytes < _NEARLY_FULL * physical:
        return None
    for other in known:
        run, fewer = other.outcome, int(other.plan["micro_batch"]) < int(plan["micro_batch"])
        same = plan.replaced(micro_batch=other.plan["micro_batch"], accumulation=other.plan["accumulation"])
        if fewer and same == other.plan and isinstance(run, Measured) and outcome.disturbance < run.disturbance + 0.25:
            times = outcome.step_seconds / run.step_seconds
            if times > _CLIFF:
                return (
                    f"took {size(outcome.peak_bytes)} of {size(physical)}, and its steps are {times:.1f} times as long "
                    f"as with {other.plan['micro_batch']} rows: it spilled into the host's memory"
                )
    return None


def _identity(folder: Path) -> tuple[int, int] | None:
    """Which folder it is, whatever its name; ``None`` where there is none."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def trial_folder(folder: Path, number: int) -> Path:
    """The folder of a trial inside ``trials/``."""
    return folder / f"{number:05d}"


def finished(folder: Path) -> Iterator[Trial]:
    """The trials in ``trials/`` that have ended, by number; what can't be read counts as cut off.

    Raises:
        InputError: A trial has a key that this version does not know, or the folder can't be read.
    """
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.name.isdigit())
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(
            f"{folder}, which holds a tune's trials, can't be read: {error.strerror}",
            hint="put it back as it was, or choose another --output",
        ) from error
    for name in names:
        path = folder / name / TRIAL_FILE
        try:
            trial = strict_json.read(TRIAL, path.read_bytes())
        except strict_json.UnknownKeyError as error:
            raise InputError(
                f"{path} was written by another version: {error}", hint="choose another --output, or delete the folder"
            ) from error
        except (OSError, ValueError):
            continue
        if trial.number == int(name):
            yield dataclasses.replace(trial, plan=converted(trial.plan))


def training_seconds(trial: Trial) -> float:
    """Seconds of a trial that went into training steps."""
    outcome = trial.outcome
    return outcome.training_seconds if isinstance(outcome, Measured | OutOfMemory) else 0.0
