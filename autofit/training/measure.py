"""Training steps -> one outcome: what was timed, or how it failed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autofit.contract.outcome import Diverged, Evidence, Measured, Outcome, OutOfMemory, Unsupported
from autofit.contract.recipe import Recipe
from autofit.machine.meters import CeilingBroken, Meter, Reading, address_limit, out_of_memory, status
from autofit.registry import by_script, techniques
from autofit.system.statistics import median, spread
from autofit.system.units import MIB
from autofit.training.expected_rows import usual_steps
from autofit.training.observer import compiled_graphs
from autofit.training.tasks.rows import rows_words
from autofit.training.timing import PARTS, Clock, Effort, NotFinite
from autofit.training.world import World

_LEAST_ASKED = 16 * MIB
"""What an error that does not say it may have asked for."""
RECOMPILED = "compiled again while the steps were timed (graphs made: {}): the plan is slower than it could be"


def measure(
    recipe: Recipe,
    effort: Effort,
    meter: Meter,
    run: Callable[[Clock], Evidence],
    progress: Callable[[str], None] = lambda _: None,
    *,
    words: str | None = None,
    on_step: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Run training steps and turn what happens into an outcome.

    Args:
        recipe: What to run.
        effort: How much of it.
        meter: Counts memory since before the model was built.
        run: Builds everything, trains until the clock says enough, and returns what was seen; see
            :mod:`autofit.training.loops`.
        progress: Told of each step, for whoever waits.
        words: What the rows are that are trained on; ``None``: those of the model's task.
        on_step: Told how many optimizer steps are done, each time.

    Raises:
        Exception: Whatever is none of the expected failures.
    """
    clock = clock_of(recipe, effort, meter, progress, on_step)
    return concluded(clock, lambda: run(clock), words=words)


def clock_of(
    recipe: Recipe,
    effort: Effort,
    meter: Meter,
    progress: Callable[[str], None] = lambda _: None,
    on_step: Callable[[int], None] = lambda _: None,
) -> Clock:
    """What listens to the training steps of a recipe; see :func:`measure`."""
    facts = recipe.facts
    shortened = effort.fidelity == "parts" and recipe.accumulation > PARTS
    return Clock(
        recipe=recipe,
        effort=effort,
        meter=meter,
        accumulation=PARTS if shortened else recipe.accumulation,
        on_cuda=facts.hardware.device == "cuda",
        world=World(size=facts.workload.processes),
        progress=progress,
        on_step=on_step,
    )


def concluded(clock: Clock, run: Callable[[], Evidence], *, words: str | None = None) -> Outcome:
    """The outcome of what a clock listens to; see :func:`measure`."""
    recipe = clock.recipe
    facts = recipe.facts
    try:
        evidence = run()
    except Exception as error:
        failed = _failed(error, clock)
        if failed is None:
            raise
        return failed
    disturbance = clock.cpu.others()
    evidence = dataclasses.replace(evidence, recompiles=compiled_graphs() - evidence.compiled_graphs)
    reading = with_workers(clock.meter.read(), clock.waits.worker_bytes, on_cuda=clock.on_cuda)
    refused = _broken(clock, reading) or _ignored(recipe, evidence)
    if refused is not None:
        return refused
    steps, tokens = usual_steps(clock)
    seconds = median(steps)
    rows = facts.workload.global_batch
    return Measured(
        step_seconds=seconds,
        step_seconds_spread=spread(steps),
        samples_per_second=rows / seconds,
        tokens_per_second=rows * tokens / seconds,
        peak_bytes=reading.peak_bytes,
        allocated_bytes=reading.allocated_bytes,
        reserved_bytes=reading.reserved_bytes,
        outside_bytes=reading.outside_bytes,
        host_bytes=reading.host_bytes,
        limit_bytes=facts.workload.limit_bytes,
        fidelity="parts" if clock.in_parts else "whole",
        steps=steps,
        loader_seconds=clock.waits.batch_wait(clock.accumulation) * recipe.accumulation,
        padding=clock.padding,
        training_seconds=clock.training_seconds,
        warm_up_seconds=clock.warm_up_seconds,
        loss=clock.loss,
        alloc_retries=reading.alloc_retries,
        disturbance=disturbance,
        evidence=evidence,
        notes=(
            words or rows_words(facts),
            *([RECOMPILED.format(evidence.recompiles)] if evidence.recompiles else []),
            *clock.notes,
        ),
    )


def _failed(error: Exception, clock: Clock) -> OutOfMemory | Diverged | None:
    """What an error of a run means; ``None`` where it is none of the expected ones."""
    work = clock.recipe.facts.workload
    if isinstance(error, NotFinite):
        return Diverged(loss=str(error.loss), step=error.step, training_seconds=clock.training_seconds)
    if isinstance(error, CeilingBroken):
        return OutOfMemory(
            where=error.where,
            phase=clock.phase,
            limit_bytes=work.limit_bytes if error.where == "device" else work.host_limit_bytes,
            peak_bytes=error.peak_bytes,
            training_seconds=clock.training_seconds,
        )
    found = out_of_memory(error)
    if found is None:
        return None
    where, asked = found
    limit, most = address_limit(), status()["VmPeak"]
    if where == "host" and limit is not None and most + max(asked or 0, _LEAST_ASKED) > limit:
        return OutOfMemory(
            where="host",
            phase=clock.phase,
            limit_bytes=limit,
            peak_bytes=most,
            requested_bytes=asked,
            training_seconds=clock.training_seconds,
        )
    device = where == "device" or not clock.on_cuda  # a CPU's memory is the host's
    reading = clock.meter.read()
    return OutOfMemory(
        where="device" if device else where,
        phase=clock.phase,
        limit_bytes=work.limit_bytes if device else work.host_limit_bytes,
        peak_bytes=(reading.peak_bytes if device else reading.host_bytes) + (asked or 0),
        requested_bytes=asked,
        training_seconds=clock.training_seconds,
    )


def _ignored(recipe: Recipe, evidence: Evidence) -> Unsupported | None:
    """The first technique of the plan that did not take effect; what a script does itself is its own."""
    for one in techniques():
        if by_script(one, recipe.facts):
            continue
        why = one.in_effect(recipe.plan[one.name], evidence.of(one.name), recipe.facts)
        if why is not None:
            return Unsupported(reason=f"{one.name}={recipe.plan[one.name]} did not take effect: {why}")
    return None


def with_workers(reading: Reading, worker_bytes: int, *, on_cuda: bool) -> Reading:
    """Peaks with the memory of the loader's worker processes: on the host, which is the device of a CPU."""
    host = reading.host_bytes + worker_bytes
    if on_cuda or not worker_bytes:
        return dataclasses.replace(reading, host_bytes=host)
    return dataclasses.replace(reading, peak_bytes=host, allocated_bytes=host, reserved_bytes=host, host_bytes=host)


def _broken(clock: Clock, reading: Reading) -> OutOfMemory | None:
    """The ceiling that is broken by what was read after the steps; ``None`` where none is."""
    work = clock.recipe.facts.workload
    if reading.peak_bytes > work.limit_bytes:
        return OutOfMemory(
            where="device",
            phase=clock.phase,
            limit_bytes=work.limit_bytes,
            peak_bytes=reading.peak_bytes,
            external_pressure=reading.reserved_bytes + reading.settled_bytes <= work.limit_bytes,
            training_seconds=clock.training_seconds,
        )
    if clock.on_cuda and reading.host_bytes > work.host_limit_bytes:
        return OutOfMemory(
            where="host",
            phase=clock.phase,
            limit_bytes=work.host_limit_bytes,
            peak_bytes=reading.host_bytes,
            training_seconds=clock.training_seconds,
        )
    return None
