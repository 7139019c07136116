"""Every whole step of a folder of measurements, predicted and printed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import clock, score
from .rows import Step, read
from .score import Scored
from .tracing import Traced, cache_folder, traced


def run(
    folder: Path, *, fits: dict[str, Any] | None = None, versus: bool = False, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Predict the whole steps of a folder.

    Args:
        folder: Holds the files of measurements.
        fits: Coefficients by the card that they have not seen; those that ship where there are none.
        versus: Whether today's plain roofline and a flat share of the peak are scored on the same rows.
        say: Takes each line that is for a person.
    """
    steps = read(folder)
    traces, broken = traces_of(steps)
    expressed = [step for step in steps if step.program in traces]
    scored = [
        Scored(step=step, predicted=clock.by_laws(step, traces[step.program], _fit(fits, step)))  # type: ignore[index]
        for step in expressed
    ]
    tell_rows(scored, say)
    found = score.summary(scored)
    reasons = Counter((step.source, step.reason) for step in steps if step.program is None)
    reasons.update((step.source, broken[step.program]) for step in steps if step.program in broken)
    found["unexpressed"] = {
        "rows": sum(reasons.values()),
        "reasons": {f"{source}: {reason}": count for (source, reason), count in sorted(reasons.items())},
    }
    if versus:
        found["versus"] = {
            name: score.summary([Scored(step=step, predicted=rule(step, traces[step.program])) for step in expressed])  # type: ignore[index]
            for name, rule in (("roofline", clock.by_roofline), ("flat_40_percent", clock.by_flat_share))
        }
    return found


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


def _fit(fits: dict[str, Any] | None, step: Step) -> Any:
    assert step.card is not None
    return None if fits is None else fits.get(step.card.name, fits.get(""))


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
