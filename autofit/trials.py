"""One plan -> one outcome, in a process and a folder of its own.

The folder is the trial: ``job.json`` in, ``outcome.json`` out (written aside, renamed into place), its logs beside
them, and at last ``trial.json``, which is the outcome with its number, plan and cost. A folder without ``trial.json``
is a trial that was cut off.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from autofit import strict
from autofit.clock import Effort
from autofit.files import write_atomically, writing
from autofit.forkserver import ForkServer
from autofit.neighbours import crowded
from autofit.plan import OUTCOME, TRIAL, Crashed, Measured, Outcome, OutOfMemory, Plan, TimedOut, Trial, dump_json
from autofit.redact import redacted
from autofit.worker import JOB, JOBS, OUTCOME_FILE, PROGRESS_FILE, TrialJob

if TYPE_CHECKING:
    from autofit.facts import Facts

TRIAL_FILE = "trial.json"
_LOG_TAIL_BYTES = 4000


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
        say: Told before a trial whose ceiling others have taken a part of.
    """

    def __init__(
        self,
        folder: Path,
        facts: Facts,
        config: Path,
        server: ForkServer,
        predicted: Mapping[Plan, int] | None = None,
        *,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.say = say
        self._crowded = False
        self.predicted = predicted or {}
        self.folder = folder
        self.facts = facts
        self.config = config
        self.server = server

    def run(
        self, number: int, plan: Plan, effort: Effort, *, purpose: Literal["search", "final"], limit_seconds: float
    ) -> Trial:
        """Run one trial and return it.

        Raises:
            MachineError: The folder can't be written, or no process can be started.
        """
        began = time.monotonic()
        folder = trial_folder(self.folder, number)
        with writing(folder):
            if folder.exists():  # one that was cut off
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
        job = TrialJob(plan=plan, facts=self.facts, config=str(self.config.resolve()), effort=effort)
        write_atomically(folder / JOB, dump_json(JOBS, job))
        self.settle()
        self._look_around(number)
        kills_before = memory_kills()
        status = self.server.run(folder.resolve(), kill_after_seconds=limit_seconds)
        outcome = self._outcome(folder, status, limit_seconds, host_ran_out=memory_kills() > kills_before)
        trial = Trial(
            number=number,
            plan=plan,
            outcome=outcome,
            wall_seconds=time.monotonic() - began,
            purpose=purpose,
            predicted_bytes=self.predicted.get(plan),
        )
        write_atomically(folder / TRIAL_FILE, dump_json(TRIAL, trial))
        return trial

    def settle(self, patience_seconds: float = 10.0) -> None:
        """Wait until the device's memory has come back from the trial before.

        The driver frees it some time after the process has ended. Where it does not come back, somebody else has
        taken it; the trial is run all the same, and says so itself by what it finds.
        """
        hardware = self.facts.hardware
        if hardware.device != "cuda":
            return
        from autofit.memory import device_used_bytes

        deadline = time.monotonic() + patience_seconds
        slack = 64 << 20
        while device_used_bytes(hardware.uuid) > hardware.others_bytes + slack and time.monotonic() < deadline:
            time.sleep(0.05)

    def _look_around(self, number: int) -> None:
        """Say so, once, where others have taken a part of the ceiling."""
        crowd = crowded(self.facts)
        if crowd is not None and not self._crowded:
            self.say(f"before trial {number}: {crowd}")
        self._crowded = crowd is not None

    def _outcome(self, folder: Path, status: int | None, limit_seconds: float, *, host_ran_out: bool) -> Outcome:
        """The child's own verdict where it wrote one; else what its end tells."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            outcome: Outcome = strict.read(OUTCOME, (folder / OUTCOME_FILE).read_bytes())
            return outcome
        phase = "start"
        with contextlib.suppress(OSError):
            phase = (folder / PROGRESS_FILE).read_text("utf-8").strip() or phase
        if status is None:
            return TimedOut(limit_seconds=limit_seconds, phase=phase)
        tail = log_tail(folder)
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number == signal.SIGKILL and host_ran_out:
                work, on_cpu = self.facts.workload, self.facts.hardware.device == "cpu"
                return OutOfMemory(
                    where="device" if on_cpu else "host",
                    phase="load",
                    limit_bytes=work.limit_bytes if on_cpu else work.host_limit_bytes,
                    peak_bytes=max(work.limit_bytes, work.host_limit_bytes) if on_cpu else work.host_limit_bytes,
                )
            name = signal.Signals(number).name
            return Crashed(reason=f"killed by {name} after {phase}", log_tail=tail)
        return Crashed(reason=f"ended with status {os.WEXITSTATUS(status)} after {phase}", log_tail=tail)


def memory_kills() -> int:
    """How many processes the kernel has killed for memory so far: of this control group, or of the machine."""
    kills = 0
    for counts in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control", "/proc/vmstat"):
        with contextlib.suppress(OSError):
            for line in Path(counts).read_text("ascii").splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    kills += int(count)
    return kills


def trial_folder(folder: Path, number: int) -> Path:
    """The folder of a trial inside ``trials/``."""
    return folder / f"{number:05d}"


def log_tail(folder: Path) -> str:
    """The end of what the trial printed on stderr."""
    try:
        with (folder / "stderr.log").open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _LOG_TAIL_BYTES))
            return redacted(file.read().decode("utf-8", "replace").strip())
    except OSError:
        return ""


def finished(folder: Path) -> Iterator[Trial]:
    """The trials in ``trials/`` that have ended, by number; what can't be read counts as cut off."""
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.name.isdigit())
    except FileNotFoundError:
        return
    for name in names:
        with contextlib.suppress(OSError, ValueError):
            trial = strict.read(TRIAL, (folder / name / TRIAL_FILE).read_bytes())
            if trial.number == int(name):
                yield trial


def training_seconds(trial: Trial) -> float:
    """Seconds of a trial that went into training steps."""
    outcome = trial.outcome
    return outcome.training_seconds if isinstance(outcome, Measured | OutOfMemory) else 0.0
