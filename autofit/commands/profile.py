"""``autofit profile DIR``: where the time of the answer's optimizer step goes, and what binds it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from autofit.commands.launching import check_one_machine, on_its_device
from autofit.commands.model_source import modeling_module
from autofit.contract.facts import Facts
from autofit.contract.outcome import Measured
from autofit.contract.plan import Plan
from autofit.machine.select import choose_device, hardware_lock
from autofit.output.document import MODEL_FOLDER, Document, check_config, read_document
from autofit.output.emit import edited_settings
from autofit.output.plan_words import outcome_words
from autofit.system import strict_json
from autofit.system.errors import InputError, MachineError
from autofit.system.files import added_environment, usable_folder, write_atomically, writing
from autofit.system.forking.server import ForkServer
from autofit.system.job import JOB, job_text
from autofit.system.locks import scratch_folder
from autofit.system.strict_json import dump_json
from autofit.training.joined import log_tail
from autofit.training.launch_environment import check_environment
from autofit.training.profiling.breakdown import Breakdown
from autofit.training.profiling.jobs import PROFILED, Profiled, ProfileJob
from autofit.training.profiling.record import MEMORY, TRACE

FOLDER, RESULT = "profile", "profile.json"
MOST_STEPS = 100
_LONGEST_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Where the time of a step goes.

    Attributes:
        plan: What was profiled.
        promised_seconds: Of a step without the profiler, as the answer says.
        breakdown: Times by kind of work, under the profiler.
        peak_bytes: What the device held at most.
        trace, memory: The files: a trace for https://ui.perfetto.dev, and the memory's time line.
        notes: What a reader should know.
    """

    plan: Plan
    promised_seconds: float
    breakdown: Breakdown
    peak_bytes: int
    trace: str
    memory: str
    notes: tuple[str, ...] = ()


PROFILE: TypeAdapter[Profile] = TypeAdapter(Profile)


def profile(
    folder: str | Path,
    *,
    steps: int = 3,
    output: str | Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Run some steps of the answer's plan, as a trial does, under ``torch.profiler``.

    Args:
        folder: Output folder of ``autofit tune``.
        steps: Optimizer steps to profile, from 1 to 100, after three others.
        output: Folder for the trace, the memory's time line and ``profile.json``; by default ``profile`` in ``folder``.
        say: Called with a line of text for each stage.

    Raises:
        InputError: An argument is out of range, or the folder lacks a file.
        MachineError: The device is not here or a tune is measuring on it, the plan can't be run, or the files can't be
            written.
    """
    if not (isinstance(steps, int) and 1 <= steps <= MOST_STEPS):
        raise InputError(f"--steps {steps} is out of range", hint=f"give a whole number from 1 to {MOST_STEPS}")
    check_environment()
    document = read_document(folder)
    folder = Path(folder)
    config = folder / MODEL_FOLDER
    if document.workload.script is None and not (config / "config.json").is_file():
        raise InputError(
            f"{folder} holds no {MODEL_FOLDER}/config.json", hint="give the whole folder that `autofit tune` wrote"
        )
    check_config(document, folder)
    check_one_machine(document, folder, "profile runs", "tune for one machine to see where the time of a step goes")
    choose_device(document.hardware.device)
    target = folder / FOLDER if output is None else Path(output)
    usable_folder(target)
    facts, notes = _facts(document)
    notes += [f"{words}; the plan is profiled" for words in edited_settings(document, folder)]
    for words in notes:
        say(words)
    say(f"profiling {steps} step{'s' if steps > 1 else ''} of {document.plan.words()}")
    job = ProfileJob(plan=document.plan, facts=facts, config=str(config.resolve()), steps=steps)
    with scratch_folder("profile") as scratch, hardware_lock(document.hardware):
        inside = scratch / "0"
        inside.mkdir()
        found = _run(job, inside, on_its_device(document, say))
        if not isinstance(found.outcome, Measured) or found.breakdown is None:
            raise MachineError(
                f"the plan could not be profiled: {outcome_words(found.outcome)}",
                hint="`autofit verify` tells whether it still runs; --steps 1 needs the least memory",
            )
        with writing(target):
            for name in (TRACE, MEMORY):
                shutil.copyfile(inside / name, target / name)
    answer = Profile(
        plan=document.plan,
        promised_seconds=document.promise.step_seconds,
        breakdown=found.breakdown,
        peak_bytes=found.outcome.peak_bytes,
        trace=str(target / TRACE),
        memory=str(target / MEMORY),
        notes=(*notes, *found.outcome.notes),
    )
    write_atomically(target / RESULT, dump_json(PROFILE, answer))
    return answer


def _facts(document: Document) -> tuple[Facts, list[str]]:
    """The facts of the answer, and what a reader of a profile should know.

    The profiler's own records lie in the host's memory, so that the ceiling of a training on the CPU would count them.
    """
    facts, notes = document.facts, []
    if document.estimated is not None:
        notes.append(f"the answer is an estimate for {document.hardware.name}; this profile is of the device here")
    if facts.hardware.device == "cpu":
        work = facts.workload
        facts = replace(facts, workload=replace(work, limit_bytes=max(work.limit_bytes, facts.hardware.total_bytes)))
    if document.workload.script is None:
        notes.append("rows are random and made in memory: a real loader may take longer")
    if document.workload.processes > 1:
        notes.append(f"of {document.workload.processes} processes the first was profiled")
    return facts, notes


def _run(job: ProfileJob, folder: Path, shown: Mapping[str, str]) -> Profiled:
    """The job, in a process of its own.

    Raises:
        MachineError: It ended without an answer.
    """
    write_atomically(folder / JOB, job_text(job))
    modules = () if job.facts.workload.script is not None else modeling_module(Path(job.config))
    server = ForkServer(folder.parent / "forkserver.log", job.facts.hardware.device, modules)
    with contextlib.closing(server):
        with added_environment(shown):
            server.start()
        status = server.run(folder.resolve(), kill_after_seconds=_LONGEST_SECONDS)
    try:
        return strict_json.read(PROFILED, (folder / ProfileJob.RESULT).read_bytes())
    except FileNotFoundError:
        tail = log_tail(folder).strip()
        last = tail.splitlines()[-1][:300] if tail else "no output"
        why = f"took more than {_LONGEST_SECONDS:.0f} s" if status is None else f"ended with status {status}: {last}"
        raise MachineError(f"the process that profiles {why}", hint="give fewer --steps") from None
