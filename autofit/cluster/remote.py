"""What a tune gets in the place of its fork server and its runner, where trials run on a cluster."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from autofit.cluster.host import KNOWN, Files, read_files, write_files
from autofit.cluster.nodes import connected, last_line
from autofit.cluster.slots import Slot, Slots
from autofit.cluster.together import answers, shares
from autofit.contract.outcome import TRIAL, Crashed, Measured, PredictedSpeed, Trial
from autofit.contract.plan import Plan
from autofit.system import strict_json
from autofit.system.errors import MachineError
from autofit.system.files import write_atomically, writing
from autofit.system.forking.server import ForkServer
from autofit.system.job import JOB
from autofit.system.strict_json import dump_json
from autofit.training.guard.loss_curve import CURVE, of_ranks
from autofit.training.jobs import CurveJob, TrialJob
from autofit.training.joined import joined
from autofit.training.runner import TRIAL_FILE, Rated, trial_folder, unrated
from autofit.training.timing import Effort

if TYPE_CHECKING:
    from autofit.contract.facts import Facts

_MOST_LOST = 1
"""Hosts that a trial may be lost with: a plan that takes its machine down must not take down all of them."""
_HERE = {"trace", "check"}
"""Jobs that need no device and read or write folders of this machine."""
_BY_RANKS = {"curve", "trial"}
"""Jobs that train, with all ranks."""


class ClusterServer(ForkServer):
    """A fork server whose jobs run on a machine of the cluster, but for those that need no device.

    Args:
        log: File that takes what the server of this machine prints.
        slots: Where the others run.
        modules: Modules to load beyond the usual ones.
    """

    def __init__(self, log: Path, slots: Slots, modules: tuple[str, ...] = ()) -> None:
        super().__init__(log, "cpu", modules)
        self.slots = slots
        self._here = ForkServer(log, "cpu", modules)

    @connected()
    def run(self, folder: Path, *, kill_after_seconds: float, early: bool = False) -> int | None:
        """Run the job in a folder and wait for its end; see :meth:`ForkServer.run`.

        Raises:
            MachineError: No machine can be used, or the one that the job ran on was lost.
        """
        files = read_files(folder)
        job = json.loads(files[JOB])
        if job["kind"] in _HERE:
            return self._here.run(folder, kill_after_seconds=kill_after_seconds, early=early)
        config: Files = read_files(Path(job["config"])) if "config" in job else {}
        slot, ray = self.slots.first(), self.slots.cluster.ray
        hosts = slot.hosts if job["kind"] in _BY_RANKS else slot.hosts[:1]
        try:
            told = shares(hosts, self.slots.processes, slot.nodes[0].address, ray)
            asked = [
                host.job.remote(files, config, share, seconds=kill_after_seconds, early=early)
                for host, share in zip(hosts, told, strict=True)
            ]
            found, failed = answers(asked, hosts, _job_failed, self.slots.cluster)
        except ray.exceptions.RayError as error:
            self.slots.lose(slot, last_line(error))
            raise MachineError(
                f"{slot.name} was lost while a job ran on it: {last_line(error)}", hint="go on with --resume"
            ) from error
        status, _ = found[failed or 0]
        with writing(folder):
            for place in (*range(len(found)), failed or 0):
                write_files(folder, found[place][1])
            if failed is None and job["kind"] == "curve":
                write_atomically(folder / CurveJob.RESULT, _one_curve([files for _, files in found]))
        return None if status is None else int(status)

    def stop_job(self) -> None:
        """Kill what runs, here and there."""
        self._here.stop_job()
        self.slots.stop()

    def close(self) -> None:
        """End this machine's server and every host, and leave the cluster."""
        self._here.close()
        self.slots.close()
        self.slots.cluster.close()


class ClusterRunner:
    """Runs each trial on a slot of the cluster; several may run at once, each asked for in a thread of its own.

    Args:
        folder: ``trials/`` of the output folder, on this machine.
        facts: What the plans are for.
        slots: Where they run.
        predicted: Peak bytes of each plan by its trace.
        known: The trials so far.
        note: Told of what is worth a line.
        rated: Puts the MFU into what was measured.
        speeds: Predicted speed of each plan.
    """

    def __init__(
        self,
        folder: Path,
        facts: Facts,
        slots: Slots,
        predicted: Mapping[Plan, int],
        *,
        known: Sequence[Trial] = (),
        note: Callable[[str], None] = lambda _: None,
        rated: Rated = unrated,
        speeds: Mapping[Plan, PredictedSpeed] = MappingProxyType({}),
    ) -> None:
        self.folder, self.facts, self.slots = folder, facts, slots
        self.predicted, self.speeds, self.known = predicted, speeds, known
        self.note, self.rated = note, rated

    @connected()
    def run(
        self, number: int, plan: Plan, effort: Effort, *, purpose: Literal["search", "final"], limit_seconds: float
    ) -> Trial:
        """Run one trial and return it.

        One whose machine dies is run again on another: that says nothing of its plan, unless it happens twice.

        Raises:
            MachineError: The folder can't be written, or no machine is left.
        """
        told = {
            "number": number,
            "plan": dict(plan),
            "effort": dataclasses.asdict(effort),
            "purpose": purpose,
            "limit_seconds": limit_seconds,
            "predicted_bytes": self.predicted.get(plan),
            "known": KNOWN.dump_json(self._kin(plan)),
        }
        began = time.monotonic()
        lost: list[str] = []
        while True:
            slot = self.slots.take()
            try:
                trial, files = self._asked(slot, told)
            finally:
                self.slots.give_back(slot)
            if self.slots.closing:
                raise MachineError("the tune was stopped while the trial ran")
            if slot.alive or len(lost) == _MOST_LOST:
                break
            lost.append(slot.name)
            self.note(f"trial {number} was lost with its host on {slot.name}: it is run again")
        outcome = trial.outcome
        trial = dataclasses.replace(
            trial,
            outcome=self.rated(plan, outcome) if isinstance(outcome, Measured) else outcome,
            wall_seconds=time.monotonic() - began,
            predicted_speed=self.speeds.get(plan),
        )
        folder = trial_folder(self.folder, number)
        with writing(folder):
            write_files(folder, {name: content for name, content in files.items() if name != TRIAL_FILE})
            folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / TRIAL_FILE, dump_json(TRIAL, trial))
        return trial

    def _asked(self, slot: Slot, told: Mapping[str, Any]) -> tuple[Trial, Files]:
        """What a slot's hosts say of a trial, and its files."""
        ray = self.slots.cluster.ray
        try:
            parts = shares(slot.hosts, self.slots.processes, slot.nodes[0].address, ray)
            asked = [host.trial.remote(told, share) for host, share in zip(slot.hosts, parts, strict=True)]
            found, failed = answers(asked, slot.hosts, _trial_failed, self.slots.cluster)
        except ray.exceptions.RayTaskError as error:  # the host lives, and could not do it
            raise MachineError(f"{slot.name}: {last_line(error)}", hint="go on with --resume") from error
        except ray.exceptions.RayError as error:
            if not self.slots.closing:
                self.slots.lose(slot, last_line(error))
            crashed = Crashed(reason=f"killed with its host on {slot.name}", log_tail=last_line(error))
            plan: Plan = Plan(told["plan"])
            return (
                Trial(
                    number=told["number"], plan=plan, outcome=crashed, wall_seconds=0.0, purpose=told["purpose"],
                    predicted_bytes=told["predicted_bytes"],
                ),
                {},
            )  # fmt: skip
        files: Files = {}
        for node, (_, written, notes) in zip(slot.nodes, found, strict=True):
            files = written | files
            for words in notes:
                self.note(f"{node.name}: {words}")
        trials = [_read(text) for text, _, _ in found]
        if failed is not None:
            return trials[failed], files | found[failed][1]
        measured = [one.outcome for one in trials if isinstance(one.outcome, Measured)]
        return dataclasses.replace(trials[0], outcome=joined(measured)), files

    def _kin(self, plan: Plan) -> tuple[Trial, ...]:
        """The trials that a new one is held against: its plan with other rows."""

        def others(one: Plan) -> dict[str, object]:
            return {name: value for name, value in one.items() if name not in {"micro_batch", "accumulation"}}

        wanted = others(plan)
        return tuple(trial for trial in tuple(self.known) if others(trial.plan) == wanted)


def _read(text: str) -> Trial:
    trial: Trial = strict_json.read(TRIAL, text.encode())
    return trial


def _trial_failed(answer: tuple[str, Files, list[str]]) -> bool:
    """Whether a host's part of a trial ends the others': their ranks would wait for its."""
    return not isinstance(_read(answer[0]).outcome, Measured)


def _one_curve(machines: Sequence[Files]) -> str:
    """The curve of all machines' ranks, as JSON."""
    return dump_json(CURVE, of_ranks([strict_json.read(CURVE, files[CurveJob.RESULT]) for files in machines]))


def _job_failed(answer: tuple[int | None, Files]) -> bool:
    """The same of a job: it has left no curve, or one that says why there is none, or nothing was measured."""
    curve, outcome = (json.loads(answer[1].get(job.RESULT, b"{}") or b"{}") for job in (CurveJob, TrialJob))
    return answer[0] != 0 or bool(curve.get("failed")) or outcome.get("kind", "measured") != "measured"
