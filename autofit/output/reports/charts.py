"""Where the marks of a chart go: plain numbers that the page's template draws as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autofit.contract.outcome import Measured
from autofit.output.document import Document
from autofit.output.plan_words import plan_words
from autofit.output.standings import Standing, standings
from autofit.system.units import GIB, KIB, MIB, TIB, size

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 74, 676, 24, 338
_LABEL_WIDTH = 140
_CUT = 3.0  # a ceiling further out than this many times the largest peak would squeeze the points together


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis: where, and what it says."""

    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One trial; ``role`` is ``winner``, ``baseline`` or ``other``."""

    x: float
    y: float
    role: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Words beside the point at ``at_x``, ``at_y``, set so that they stay inside the chart."""

    at_x: float
    at_y: float
    x: float
    y: float
    anchor: str
    role: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """Samples/s over peak memory.

    Attributes:
        front: Path through the plans that no other beats in both; a staircase.
        ceiling_x: Where the ceiling stands, ``None`` where it is too far out to be drawn to scale.
        ceiling: The ceiling in words.
    """

    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    x_unit: str
    points: tuple[Mark, ...]
    labels: tuple[Label, ...]
    front: str
    ceiling_x: float | None
    ceiling: str


def scatter(document: Document) -> Scatter:
    """The chart of every measured trial; the front runs through plans, each with all its runs together."""
    ranked = standings(document)
    limit = document.promise.limit_bytes
    runs = [(trial, trial.outcome) for trial in document.trials if isinstance(trial.outcome, Measured)]
    largest_peak = max([one.peak_bytes for one in ranked] + [run.peak_bytes for _, run in runs])
    fastest = max([one.samples_per_second for one in ranked] + [run.samples_per_second for _, run in runs])
    in_sight = limit <= _CUT * largest_peak
    x_end = max(limit, largest_peak) if in_sight else 1.25 * largest_peak
    y_end = 1.16 * fastest

    def across(peak_bytes: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * peak_bytes / x_end, 1)

    def up(rate: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * rate / y_end, 1)

    unit, unit_bytes = next(
        (name, step)
        for name, step in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
        if x_end >= 2 * step or step == KIB
    )
    baseline = None if ranked[0].is_baseline else next((one for one in ranked if one.is_baseline), None)
    marked = [("winner", "winner", ranked[0]), *([("baseline", "best baseline", baseline)] if baseline else [])]
    roles = {one.plan: role for role, _, one in marked}
    points = [
        Mark(
            x=across(run.peak_bytes),
            y=up(run.samples_per_second),
            role=roles.get(trial.plan, "other"),
            label=f"{plan_words(trial.plan)}: {run.samples_per_second:,.4g} samples/s, {size(run.peak_bytes)}",
        )
        for trial, run in runs
    ]
    return Scatter(
        x_ticks=tuple(Tick(across(at * unit_bytes), f"{at:g}") for at in ticks(x_end / unit_bytes)),
        y_ticks=tuple(Tick(up(at), f"{at:,g}") for at in ticks(y_end)),
        x_unit=unit,
        points=tuple(points),
        labels=tuple(
            _label(across(one.peak_bytes), up(one.samples_per_second), role, text) for role, text, one in marked
        ),
        front=_staircase([(across(one.peak_bytes), up(one.samples_per_second)) for one in pareto(ranked)]),
        ceiling_x=across(limit) if in_sight else None,
        ceiling=f"ceiling {size(limit)}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Losses over optimizer steps: the winner's, and those of the plan that it was compared with."""

    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    winner: str
    reference: str


def losses(document: Document) -> Losses | None:
    """The chart of the short training, where there was one."""
    guard = document.guard
    if guard is None or len(guard.losses) < 2:
        return None
    curves = (guard.losses, guard.reference_losses)
    seen = [loss for curve in curves for loss in curve]
    low, high = min(seen), max(seen)
    room = max(0.1 * (high - low), 1e-6 * abs(high), 1e-9)
    low, high = low - room, high + room
    last = len(guard.losses)

    def across(step: int) -> float:
        return round(LEFT + (RIGHT - LEFT) * (step - 1) / (last - 1), 1)

    def up(loss: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (loss - low) / (high - low), 1)

    def path(curve: Sequence[float]) -> str:
        points = [f"{across(step)} {up(loss)}" for step, loss in enumerate(curve, start=1)]
        return f"M{'L'.join(points)}" if points else ""

    marks = between(low, high)
    return Losses(
        x_ticks=tuple(Tick(across(step), str(step)) for step in range(1, last + 1)),
        y_ticks=tuple(Tick(up(mark), f"{mark:g}") for mark in marks),
        winner=path(guard.losses),
        reference=path(guard.reference_losses),
    )


def pareto(ranked: Sequence[Standing]) -> list[Standing]:
    """The plans that no other beats in both speed and memory, by rising memory."""
    front: list[Standing] = []
    for one in sorted(ranked, key=lambda one: (one.peak_bytes, -one.samples_per_second)):
        if not front or one.samples_per_second > front[-1].samples_per_second:
            front.append(one)
    return front


def ticks(end: float, wanted: int = 5) -> list[float]:
    """Round numbers from zero up to ``end``, about as many as wanted.

    >>> ticks(22.0)
    [0.0, 5.0, 10.0, 15.0, 20.0]
    """
    power = 10.0 ** math.floor(math.log10(end / wanted))
    gap = next(factor * power for factor in (1, 2, 5, 10) if end / (factor * power) <= wanted)
    return [float(f"{gap * index:.6g}") for index in range(math.floor(end / gap + 1e-9) + 1)]


def between(low: float, high: float, wanted: int = 7) -> list[float]:
    """Round numbers from ``low`` to ``high``, about as many as wanted.

    >>> between(9.365, 9.499)
    [9.38, 9.4, 9.42, 9.44, 9.46, 9.48]
    """
    gap = ticks(high - low, wanted)[1]
    first = math.ceil(low / gap - 1e-9)
    return [float(f"{gap * index:.9g}") for index in range(first, math.floor(high / gap + 1e-9) + 1)]


def _label(x: float, y: float, role: str, text: str) -> Label:
    """The winner's words above its point, the baseline plan's below; to the right where there is room."""
    away = 12 if x < RIGHT - _LABEL_WIDTH else -12
    return Label(
        at_x=x,
        at_y=y,
        x=x + away,
        y=y - 14 if role == "winner" else y + 24,
        anchor="start" if away > 0 else "end",
        role=role,
        text=text,
    )


def _staircase(corners: Sequence[tuple[float, float]]) -> str:
    """A path that keeps a speed until more memory buys a higher one."""
    (x, y), *rest = corners
    return f"M{x} {y}" + "".join(f"H{right}V{upper}" for right, upper in rest) + f"H{RIGHT}"
