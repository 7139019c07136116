"""The job of tracing: requests in, files of arrays out, on every core. Runs in a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import logging
import os
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autofit.costmodel.memory.parts import MicroPart, OptimizerPart, first_alone, pack
from autofit.costmodel.tracing import fake_run
from autofit.costmodel.tracing.emulation import named_modules
from autofit.costmodel.tracing.longer_tape import lengthen
from autofit.costmodel.tracing.shard_layout import Held, layout_of
from autofit.costmodel.tracing.timeline import ELSEWHERE, Tape, UnlikeError
from autofit.costmodel.tracing.trace_request import alone_plan, run_plan, traced_plan
from autofit.machine.meters import status
from autofit.registry import recipe_of, technique
from autofit.system.job import error_words
from autofit.system.processes import end_fork
from autofit.system.units import MIB

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.contract.plan import Plan
    from autofit.costmodel.tracing.source import Source
    from autofit.costmodel.tracing.trace_request import TraceRequest, TraceRequests

_NUMBER_BYTES = 4
_ROWS = 2
"""Some layers want more than one row to train on."""
_GARBAGE_BYTES = 512 * MIB
"""What traces may leave behind, some MB each, before it is collected."""
_MANY = 6
"""Evaluations from which on there are several for each core of a small machine."""


def trace_all(job: TraceRequests, folder: Path) -> dict[str, str]:
    """Trace every request, one process to a core.

    Returns:
        Why it failed, by the request's file.
    """
    cores = len(os.sched_getaffinity(0))
    ordered = _in_groups(job.requests, cores)
    cores = max(1, min(cores, len(ordered)))
    waiting, feed = os.pipe()  # a child takes a number out when it has time
    children = []
    for core in range(cores):
        child = os.fork()
        if child == 0:
            os.close(feed)
            _child(job, _taken(ordered, waiting), folder / f"failed-{core}.json")
        children.append(child)
    os.close(waiting)
    with contextlib.suppress(BrokenPipeError), os.fdopen(feed, "wb") as numbers:
        numbers.write(b"".join(number.to_bytes(_NUMBER_BYTES, "big") for number in range(len(ordered))))
    failed: dict[str, str] = {}
    for core, child in enumerate(children):
        _, status = os.waitpid(child, 0)
        try:
            failed.update(json.loads((folder / f"failed-{core}.json").read_text("utf-8")))
        except (OSError, ValueError):
            code = os.waitstatus_to_exitcode(status)
            failed = {one.file: f"its trace ended with status {code}" for one in job.requests} | failed
    done = {request.file for request in job.requests if job.is_made(request)}
    return {file: reason for file, reason in failed.items() if file not in done}


def _in_groups(requests: Iterable[TraceRequest], cores: int) -> list[list[TraceRequest]]:
    """Those that one process traces one after the other, since they share a run or a micro-step; what is run first.

    The dear ones come first, so that the cores end together. Those with the same evaluation are one group where there
    are several such groups for each core of a small machine, and where there are for each of these cores, optimizers'
    steps are behind the micro-steps that tell which parameters get no gradient; elsewhere those are one group whose
    micro-steps are the same where they are the only ones.
    """

    def evaluation(request: TraceRequest) -> str:
        plan = request.plan if request.part == "micro_steps" else telling(request.plan)
        return (traced_plan(plan, "evaluation") or plan).words()

    def place(request: TraceRequest) -> tuple[object, ...]:
        run = run_plan(request.plan)
        alone = alone_plan(run)
        return (*key(request), request.part, alone.words(), alone != run, run.words(), run != request.plan)

    def key(request: TraceRequest) -> tuple[str, ...]:
        if many:
            return "" if joined else request.part, evaluation(request)
        return request.part, evaluation(request), alone_plan(run_plan(request.plan)).words()

    requests = list(requests)
    count = len({evaluation(one) for one in requests if one.part == "micro_steps"})
    many, joined = count >= _MANY, count >= max(_MANY, cores * _MANY // 2)
    groups = [list(group) for _, group in itertools.groupby(sorted(requests, key=place), key)]
    return sorted(groups, key=_toil, reverse=True) if many else groups


def _toil(group: Iterable[TraceRequest]) -> int:
    """How long a group is about to take, beside others: a technique that is used adds to each trace."""
    return sum(1 + sum(value != technique(name).baseline for name, value in one.plan.items()) for one in group)


def _taken(ordered: list[list[TraceRequest]], waiting: int) -> Iterator[list[TraceRequest]]:
    """Requests as this process comes to them; the others take theirs from the same pipe."""
    while number := os.read(waiting, _NUMBER_BYTES):
        yield ordered[int.from_bytes(number, "big")]


def _child(job: TraceRequests, groups: Iterable[list[TraceRequest]], report: Path) -> None:
    """Trace some requests and end the process."""
    code = 1
    try:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        gc.disable()  # a twentieth of the traces
        failed, known, resident = {}, Known(), status()["VmRSS"]
        for request, alike in ((one, group) for group in groups for one in group):
            known.plans = tuple(one.plan for one in alike)
            try:
                _trace(job, request, known, report.parent)
            except Exception as error:  # noqa: BLE001 - a model's own code can raise anything; it is told
                traceback.print_exc()
                failed[request.file] = f"its trace failed: {error_words(error)}"
            if status()["VmRSS"] > resident + _GARBAGE_BYTES:
                gc.collect()
                resident = status()["VmRSS"]
        report.write_text(json.dumps(failed), "utf-8")
        code = 0
    finally:
        end_fork(code)


def _trace(job: TraceRequests, request: TraceRequest, known: Known, folder: Path) -> None:
    """Trace one; what is written for it lies in the job's folder, which goes also where this process is killed."""
    config = Path(job.config)
    with tempfile.TemporaryDirectory(prefix="trace-", dir=folder) as made, named_modules.at_once():
        scratch = Path(made)
        if request.part == "micro_steps":
            arrays = pack(micro_part(request.plan, job.facts, config, scratch, known=known), None)
        else:
            arrays = pack(None, optimizer_part(request.plan, job.facts, config, scratch, known=known))
    save(job, request, arrays)


def save(job: TraceRequests, request: TraceRequest, arrays: dict[str, Any]) -> None:
    """Leave a trace in the file that its request names, whole or not at all."""
    try:
        _write(Path(job.folder) / request.file, arrays)
    except OSError:  # a full disk, a quota
        if not job.spare:
            raise
        _write(Path(job.spare) / request.file, arrays)


def _write(target: Path, arrays: dict[str, Any]) -> None:
    aside = target.with_name(f".{target.stem}-{os.getpid()}.npz")
    target.parent.mkdir(exist_ok=True)
    try:
        with zipfile.ZipFile(
            aside, "w", zipfile.ZIP_DEFLATED, compresslevel=1
        ) as archive:  # numpy's level takes thrice as long
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w") as file:
                    np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)
        aside.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


@dataclasses.dataclass(slots=True)
class Known:
    """What a process has traced that other plans of the same question share.

    Attributes:
        plans: Of the requests that are traced one after the other.
        runs: The last two plans whose micro-steps were run, and what came of them.
        ready: The same of plans that will not be run, since one was that runs as they do.
        steps: The last optimizer's steps that were run, by the plan that runs so.
        evaluations: Evaluation steps, by the plan that is traced for them.
        unused: The parameters that get no gradient, by the plan that is traced for them.
    """

    plans: tuple[Plan, ...] = ()
    runs: dict[Plan, MicroPart] = dataclasses.field(default_factory=dict)
    ready: dict[Plan, MicroPart] = dataclasses.field(default_factory=dict)
    steps: dict[Plan, Tape] = dataclasses.field(default_factory=dict)
    evaluations: dict[Plan | None, Tape] = dataclasses.field(default_factory=dict)
    unused: dict[Plan, frozenset[str]] = dataclasses.field(default_factory=dict)


def micro_part(
    plan: Plan,
    facts: Facts,
    config: Path,
    folder: Path,
    *,
    source: Source | None = None,
    whole: bool = False,
    any_rows: bool = True,
    known: Known | None = None,
) -> MicroPart:
    """The micro-steps of the plan, for any number of rows and with every layer.

    Args:
        plan: The plan.
        facts: What it is for.
        config: Folder that holds the ``config.json``.
        folder: Where a Trainer may write.
        source: What trains, once; the model of the config where none is given. What :func:`alone_tape` gives of
            another one is to be put in.
        whole: Leave no layer out.
        any_rows: Whether it is to hold for any number of rows above one; else for the plan's alone.
        known: What was traced before of the config's model, and takes what is traced now.

    Raises:
        UnlikeError: Layers of the source that were taken to be alike are not: it is to be traced whole, by another
            source.
    """
    known = known or Known()
    if plan in known.ready:
        return known.ready.pop(plan)
    trace = functools.partial(_micro_steps, plan, facts, config, folder, source=source, whole=whole, any_rows=any_rows)
    alike = {one for one in known.plans if run_plan(one) == plan} - {plan}
    found, tape = trace(accumulation=2, evaluations=known.evaluations, alike=alike)
    alone = None
    if found.gathers_late and source is None:
        sending = known.runs.get(alone_plan(plan))
        alone = trace(accumulation=1)[1] if sending is None else first_alone(sending.tape)
    if not (found.guessed or layout_of(recipe_of(plan, facts)).engine) and facts.workload.processes == 1:
        known.unused[plan] = found.unused
    part = part_of(found, tape, alone=alone)
    known.runs = dict([*known.runs.items()][-1:]) | {plan: part}
    for one, held in found.alike.items():
        waiting = part.without("gradients") if held.host_bytes else part
        known.ready[one] = dataclasses.replace(waiting, **_held(held))
    return part


def alone_tape(plan: Plan, facts: Facts, config: Path, folder: Path, *, source: Source, whole: bool = False) -> Tape:
    """A micro-step that is the only one of its optimizer step; the arguments are those of :func:`micro_part`."""
    return _micro_steps(plan, facts, config, folder, accumulation=1, source=source, whole=whole, any_rows=True)[1]


def part_of(found: fake_run.MicroSteps, tape: Tape, *, alone: Tape | None = None) -> MicroPart:
    """What was traced, with the tape of the whole model, and of a micro-step that is the only one of its step."""
    return MicroPart(tape=tape, evaluation=found.evaluation, notes=found.notes, alone=alone, **_held(found))


def _held(found: Held) -> dict[str, Any]:
    """What a model holds, as fields of :class:`MicroPart`."""
    return {
        "weights": np.array(found.weights, dtype=np.int64),
        "buckets_bytes": found.buckets_bytes,
        "host_bytes": found.host_bytes,
        "loading": (np.array(found.loading.events), np.array(found.loading.sizes)) if found.loading else None,
    }


def _micro_steps(
    plan: Plan,
    facts: Facts,
    config: Path,
    folder: Path,
    *,
    accumulation: int,
    source: Source | None,
    whole: bool,
    any_rows: bool,
    evaluations: dict[Plan | None, Tape] | None = None,
    alike: Collection[Plan] = (),
) -> tuple[fake_run.MicroSteps, Tape]:
    """What was traced, its evaluation and the tape of the whole model.

    No evaluation is traced without a place for it among ``evaluations``, or where it is there already.
    """
    trace = functools.partial(
        fake_run.micro_steps,
        plan,
        facts,
        config=config,
        folder=folder,
        accumulation=accumulation,
        source=source,
        any_rows=any_rows,
        alike=alike,
    )
    evaluated = traced_plan(plan, "evaluation")
    evaluation = (evaluations or {}).get(evaluated)
    try:
        found = trace(whole=whole, evaluates=evaluations is not None and evaluation is None)
        tape, evaluation = lengthen(found.tape, found.copies), evaluation or _lengthened(found)
    except UnlikeError:
        if source is not None:
            raise
        found = trace(whole=True, evaluates=evaluations is not None)
        return found, found.tape
    if evaluations is not None and evaluation is not None:
        evaluations[evaluated] = evaluation
    return dataclasses.replace(found, evaluation=evaluation), tape


def _lengthened(found: fake_run.MicroSteps) -> Tape | None:
    return found.evaluation and lengthen(found.evaluation, found.copies)


def optimizer_part(
    plan: Plan,
    facts: Facts,
    config: Path,
    folder: Path,
    *,
    source: Source | None = None,
    unused: frozenset[str] | None = None,
    known: Known | None = None,
) -> OptimizerPart:
    """The optimizer's step of the plan; the arguments are those of :func:`micro_part`.

    The ``unused`` parameters get no gradient; where they are not given, they are traced of the config's model.
    """
    known = known or Known()
    if unused is None:
        unused = _unused(plan, facts, config, folder, known.unused)
    tape = known.steps.get(run_plan(plan))
    if tape is None:
        tape = fake_run.optimizer_steps(plan, facts, config=config, folder=folder, source=source, unused=unused)
        known.steps = {run_plan(plan): tape}
    if layout_of(recipe_of(plan, facts)).on_host:
        tape = dataclasses.replace(tape, categories=np.full_like(tape.categories, ELSEWHERE))
    return OptimizerPart(tape=tape, elsewhere_bytes=round(float(tape.live_elsewhere(0).max())))


def telling(plan: Plan) -> Plan:
    """The plan whose micro-steps, on one process, tell which parameters an optimizer's step finds without gradient."""
    return (traced_plan(plan, "micro_steps") or plan).replaced(micro_batch=_ROWS)


def _unused(plan: Plan, facts: Facts, config: Path, folder: Path, known: dict[Plan, frozenset[str]]) -> frozenset[str]:
    """The parameters of the config's model that get no gradient; none are known where its step can't be traced."""
    plan = telling(plan)
    if plan not in known:
        trace = functools.partial(fake_run.unused, plan, facts, config=config, folder=folder)
        try:
            try:
                known[plan] = trace()
            except UnlikeError:
                known[plan] = trace(whole=True)
        except Exception:  # noqa: BLE001 - the trace of the micro-steps tells it
            traceback.print_exc()
            known[plan] = frozenset()
    return known[plan]
