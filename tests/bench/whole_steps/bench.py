"""Every whole step of a folder of measurements, predicted and printed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autofit.costmodel.seconds import operator_time, step_time
from autofit.costmodel.seconds.roofline import Numbers
from autofit.system.errors import InputError

from . import clock, exchanges, fit, score
from .clock import Seconds
from .rows import Step, read
from .score import Scored
from .tracing import Traced, cache_folder, traced


def run(
    folder: Path, *, folds: int | None = None, versus: bool = False, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Predict the whole steps of a folder.

    Args:
        folder: Holds the files of measurements.
        folds: The cards are held out in so many groups, each predicted by a fit that has not seen its steps (nor, where
            the kernels' rows are in the folder, its kernels); ``None`` uses the coefficients that ship.
        versus: Whether today's plain roofline and a flat share of the peak are scored on the same rows.
        say: Takes each line that is for a person.
    """
    steps = read(folder)
    traces, broken = traces_of(steps)
    expressed = [step for step in steps if step.program in traces]
    by_law = predicted(expressed, traces) if folds is None else held_out(folder, expressed, traces, folds)
    scored = [Scored(step=step, predicted=one) for step, one in zip(expressed, by_law, strict=True)]
    tell_rows(scored, say)
    found = score.summary(scored)
    reasons = Counter((step.source, step.reason) for step in steps if step.program is None)
    reasons.update((step.source, broken[step.program]) for step in steps if step.program in broken)
    found["unexpressed"] = {f"{source}: {reason}": count for (source, reason), count in sorted(reasons.items())}
    if versus:
        found["versus"] = {
            name: score.summary([Scored(step=step, predicted=rule(step, traces[step.program])) for step in expressed])  # type: ignore[index]
            for name, rule in (("roofline", clock.by_roofline), ("flat_40_percent", clock.by_flat_share))
        }
    return found


def predicted(steps: Sequence[Step], traces: Mapping[Any, Traced], found: Any = None) -> list[Seconds]:
    """By what a fit found, or by what ships."""
    found = operator_time.coefficients() if found is None else found
    if not steps:
        return []
    alone = computed(steps, traces, found)
    seconds = alone + exchanges.added(steps, alone)
    return [
        Seconds(seconds=float(one), log_std=step_time.log_std_of(step.card, found))
        for step, one in zip(steps, seconds, strict=True)
    ]


def computed(steps: Sequence[Step], traces: Mapping[Any, Traced], found: Any = None) -> Numbers:
    """Seconds of each step but for collectives between machines; those inside of one are in the laws of whole steps."""
    found = operator_time.coefficients() if found is None else found
    return fit.predicted(fit.batch_of(steps, traces), found["fit"])


def held_out(folder: Path, steps: Sequence[Step], traces: Mapping[Any, Traced], count: int) -> list[Seconds]:
    """Each card by a fit that has seen neither its steps nor, where they are in the folder, its kernels."""
    from tests.bench import fit_time_model

    answers: dict[int, Seconds] = {}
    for cards in fit.folds(steps, count):
        mine = [place for place, step in enumerate(steps) if step.card is not None and step.card.name in cards]
        others = [step for step in steps if step.card is not None and step.card.name not in cards and step.nodes == 1]
        kernels = fit_time_model.found_without(folder, cards)
        found = fit.with_steps(kernels, others, traces)
        answers |= dict(zip(mine, predicted([steps[place] for place in mine], traces, found), strict=True))
    return [answers[place] for place in range(len(steps))]


def fitted(found: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What a fit to kernels found, with what the steps of a folder tell.

    Raises:
        InputError: The folder holds no step that can be expressed, or a program's trace broke.
    """
    steps = read(folder)
    traces, broken = traces_of(steps)
    if broken:
        raise InputError(f"the trace of a step's program broke: {min(broken.values())}", hint="mend it first")
    expressed = [step for step in steps if step.program in traces and step.nodes == 1]
    if not expressed:
        raise InputError(f"{folder} has no whole step that can be expressed", hint="give the folder of the steps")
    return fit.with_steps(found, expressed, traces)


def traces_of(steps: Sequence[Step]) -> tuple[dict[Any, Traced], dict[Any, str]]:
    """The trace of each program, and why some have none."""
    programs = sorted({step.program for step in steps if step.program is not None}, key=repr)
    folder = cache_folder()
    traces, broken = {}, {}
    for number, program in enumerate(programs):
        if sys.stderr.isatty():
            print(f"\rprogram {number + 1} of {len(programs)}", end="", file=sys.stderr)
        try:
            traces[program] = traced(program, folder)
        except Exception as error:  # noqa: BLE001 - a program that breaks is told, and the others are still of use
            broken[program] = f"its trace broke: {type(error).__name__}: {error}"[:200]
    return traces, broken


def tell_rows(scored: Sequence[Scored], say: Callable[[str], None]) -> None:
    """Each row by source and card, with the signed error, and the figures of each group."""
    for (source, card), members in score.grouped(scored, lambda s: (s.source, s.card.name if s.card else "")).items():
        say(f"\n== {source} on {card}")
        for one in members:
            step = one.step
            say(
                f"  {one.error:+8.1%}  predicted {one.predicted.seconds * 1e3:10.2f} measured "
                f"{step.seconds * 1e3:10.2f} ms  {step.model} {step.setting} {step.configuration}"
            )
        figures = score.errors(members)
        say(
            f"  median {figures['median_absolute_error']:.1%}, p90 {figures['p90_absolute_error']:.1%}, "
            f"signed {figures['median_error']:+.1%}"
        )
