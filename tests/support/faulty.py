"""A worker that can be told to fail: loaded by a fork server as one of its modules, it stands before the real one.

A job whose folder, or whose model's folder, holds ``fault.py`` runs that file instead, with ``folder`` (the job's) in
its namespace. So does one that is named in the folder ``AUTOFIT_FAULTS``: ``16-off.py`` for a trial of 16 rows with
checkpointing off, ``curve.py``, ``check.py`` and the like for other jobs; once, and then the file is called ``.done``.
A trial that is forked from a user's script does so where it begins, and goes on where the file calls ``honest``.
Whatever else the server does is the real thing.
"""

import contextlib
import json
import os
from pathlib import Path

from autofit import worker
from autofit.system.job import JOB
from autofit.training.timing import Clock

FAULT = "fault.py"
FAULTS = "AUTOFIT_FAULTS"
PHASES = {"load": "step_begin", "forward": "forward_begin", "backward": "forward_end", "optimizer": "backward_end"}
honest = worker.main
honest_snapshot = worker.snapshot


def main(folder):
    for place in (folder, *configured(folder)):
        fault = place / FAULT
        if fault.exists():
            perform(fault.read_text("utf-8"), folder)
            return
    script = due(folder)
    if script is None:
        honest(folder)
    else:
        perform(script, folder)


def perform(script, folder, work=honest):
    exec(compile(script, FAULT, "exec"), {"folder": folder, "honest": work, "at": at, "__name__": "fault"})


def at(phase, action, step=1):
    """Have something happen in the midst of the training: in a phase of an optimizer step, the first being 0."""
    name = PHASES[phase]
    usual = getattr(Clock, name)

    def listened(clock, *arguments):
        answer = usual(clock, *arguments)  # from here on the phase is called so
        if clock.done == step:
            setattr(Clock, name, usual)
            action()
        return answer

    setattr(Clock, name, listened)


def due(folder):
    """The script that waits for this job, taken away so that it waits for no other."""
    waiting = os.environ.get(FAULTS)
    if not waiting:
        return None
    job = json.loads((folder / JOB).read_text("utf-8"))
    name = "{micro_batch}-{checkpointing}".format(**job["plan"]) if job["kind"] == "trial" else job["kind"]
    done = Path(waiting, f"{name}.done")
    with contextlib.suppress(FileNotFoundError):
        Path(waiting, f"{name}.py").rename(done)
        return done.read_text("utf-8")
    return None


def configured(folder):
    """The folder of the model's config, where the job names one."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        yield Path(json.loads((folder / JOB).read_text("utf-8"))["config"])


def snapshot(folder, next_job):
    def forked():
        own = next_job()
        if script := due(own):
            perform(script, own, lambda _: None)
        return own

    if not (folder / FAULT).exists():
        return honest_snapshot(folder, forked)
    names = {"folder": folder, "next_job": next_job, "why": "", "__name__": "fault"}
    exec(compile((folder / FAULT).read_text("utf-8"), FAULT, "exec"), names)
    return names["why"]


worker.main, worker.snapshot = main, snapshot
