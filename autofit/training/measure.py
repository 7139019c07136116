"""Training steps -> one outcome: what was timed, or how it failed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autofit.contract.outcome import Diverged, Evidence, Measured, Outcome, OutOfMemory, Unsupported
from autofit.contract.recipe import Recipe
from autofit.machine.meters import CeilingBroken, Meter, out_of_memory
from autofit.registry import by_script, techniques
from autofit.system.statistics import median, spread
from autofit.training.observer import compiled_graphs
from autofit.training.tasks.rows import rows_words
from autofit.training.timing import PARTS, Clock, Effort, NotFinite
from autofit.training.world import World

RECOMPILED = "compiled again while the steps were timed (graphs made: {}): the plan is slower than it could be"


def measure(
    recipe: Recipe,
    effort: Effort,
    meter: Meter,
    run: Callable[[Clock], Evidence],
    progress: Callable[[str], None] = lambda _: None,
    *,
    words: str | None = None,
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

    Raises:
        Exception: Whatever is none of the expected failures.
    """
    facts = recipe.facts
    shortened = effort.fidelity == "parts" and recipe.accumulation > PARTS
    clock = Clock(
        recipe=recipe,
        effort=effort,
        meter=meter,
        accumulation=PARTS if shortened else recipe.accumulation,
        on_cuda=facts.hardware.device == "cuda",
        world=World(size=facts.workload.processes),
        progress=progress,
    )
    limit = facts.workload.limit_bytes
    try:
        evidence = run(clock)
    except CeilingBroken as broken:
        return OutOfMemory(
            where=broken.where,
            phase=clock.phase,
            limit_bytes=limit if broken.where == "device" else facts.workload.host_limit_bytes,
            peak_bytes=broken.peak_bytes,
            training_seconds=clock.training_seconds,
        )
    except NotFinite as bad:
        return Diverged(loss=str(bad.loss), step=bad.step, training_seconds=clock.training_seconds)
    except Exception as error:
        found = out_of_memory(error)
        if found is None:
            raise
        where, asked = found
        on_cpu = facts.hardware.device == "cpu"
        reading = meter.read()
        held = reading.peak_bytes if where == "device" or on_cpu else reading.host_bytes
        return OutOfMemory(
            where="device" if on_cpu else where,
            phase=clock.phase,
            limit_bytes=limit if where == "device" or on_cpu else facts.workload.host_limit_bytes,
            peak_bytes=held + (asked or 0),
            requested_bytes=asked,
            training_seconds=clock.training_seconds,
        )
    disturbance = clock.cpu.others()
    evidence = dataclasses.replace(evidence, recompiles=compiled_graphs() - evidence.compiled_graphs)
    reading = meter.read()
    if reading.peak_bytes > limit:
        return OutOfMemory(
            where="device",
            phase=clock.phase,
            limit_bytes=limit,
            peak_bytes=reading.peak_bytes,
            external_pressure=reading.reserved_bytes + reading.settled_bytes <= limit,
            training_seconds=clock.training_seconds,
        )
    for one in techniques():
        if by_script(one, facts):
            continue
        ignored = one.in_effect(recipe.plan[one.name], evidence.of(one.name), facts)
        if ignored is not None:
            return Unsupported(reason=f"{one.name}={recipe.plan[one.name]} did not take effect: {ignored}")
    seconds = median(clock.steps)
    rows = facts.workload.global_batch
    return Measured(
        step_seconds=seconds,
        step_seconds_spread=spread(clock.steps),
        samples_per_second=rows / seconds,
        tokens_per_second=rows * (clock.tokens_a_row or facts.tokens_a_sample) / seconds,
        peak_bytes=reading.peak_bytes,
        allocated_bytes=reading.allocated_bytes,
        reserved_bytes=reading.reserved_bytes,
        outside_bytes=reading.outside_bytes,
        host_bytes=reading.host_bytes,
        limit_bytes=limit,
        fidelity="parts" if shortened else "whole",
        steps=tuple(clock.steps),
        training_seconds=clock.training_seconds,
        warm_up_seconds=clock.warm_up_seconds,
        loss=clock.loss,
        alloc_retries=reading.alloc_retries,
        disturbance=disturbance,
        evidence=evidence,
        notes=(words or rows_words(facts), *([RECOMPILED.format(evidence.recompiles)] if evidence.recompiles else [])),
    )
