"""Predictions against measurements: errors, order, what the choice costs, and how often the interval holds."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autofit.costmodel.seconds.step_time import EIGHTY

from .clock import Seconds
from .rows import Step

NOISE = 0.01
"""Measurements this close, as a share, have no order: repeats of one configuration differ by as much."""
_FEWEST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A step, and what was predicted of it."""

    step: Step
    predicted: Seconds

    @property
    def error(self) -> float:
        """Signed: predicted over measured, less one."""
        return self.predicted.seconds / self.step.seconds - 1

    @property
    def inside(self) -> bool:
        """Whether the measurement lies in the 80 % interval."""
        return abs(math.log(self.step.seconds / self.predicted.seconds)) <= EIGHTY * self.predicted.log_std


def p90(values: Iterable[float]) -> float:
    """The smallest value that nine tenths do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-9 * len(ordered) // 10) - 1)]


def errors(scored: Sequence[Scored]) -> dict[str, Any]:
    """Rows, median and 90th percentile of the absolute error, and the median of the signed one."""
    if not scored:
        return {"rows": 0, "median_absolute_error": None, "p90_absolute_error": None, "median_error": None}
    sizes = [abs(one.error) for one in scored]
    return {
        "rows": len(scored),
        "median_absolute_error": round(statistics.median(sizes), 4),
        "p90_absolute_error": round(p90(sizes), 4),
        "median_error": round(statistics.median(one.error for one in scored), 4),
    }


def grouped(scored: Iterable[Scored], key: Callable[[Step], Any]) -> dict[Any, list[Scored]]:
    """By a key, in the order of the keys."""
    groups: defaultdict[Any, list[Scored]] = defaultdict(list)
    for one in scored:
        groups[key(one.step)].append(one)
    return dict(sorted(groups.items()))


def together(step: Step) -> tuple[str, str, str, str]:
    """What configurations are compared within: source, model, card and software."""
    assert step.card is not None
    return step.source, step.model, step.card.name, step.setting


def kendall(members: Sequence[Scored]) -> tuple[float, int] | None:
    """Kendall's tau of seconds a token over pairs that differ by more than the noise, and their number."""
    agree = pairs = 0
    for one, other in itertools.combinations(members, 2):
        measured = math.log(_pace(one.step, one.step.seconds) / _pace(other.step, other.step.seconds))
        if abs(measured) <= NOISE:
            continue
        predicted = math.log(_pace(one.step, one.predicted.seconds) / _pace(other.step, other.predicted.seconds))
        agree += (measured * predicted > 0) - (measured * predicted < 0)
        pairs += 1
    return (agree / pairs, pairs) if pairs else None


def regret(members: Sequence[Scored]) -> float | None:
    """By how much the configuration that the prediction chooses is slower than the best; at least four of them."""
    if len({one.step.configuration for one in members}) < _FEWEST:
        return None
    chosen = min(members, key=lambda one: _pace(one.step, one.predicted.seconds))
    best = min(_pace(one.step, one.step.seconds) for one in members)
    return _pace(chosen.step, chosen.step.seconds) / best - 1


def _pace(step: Step, seconds: float) -> float:
    """Seconds a token."""
    return seconds / step.tokens


def summary(scored: Sequence[Scored]) -> dict[str, Any]:
    """The figures of the whole steps."""
    groups = grouped(scored, together)
    taus = {key: tau for key, members in groups.items() if (tau := kendall(members))}
    regrets = {key: lost for key, members in groups.items() if (lost := regret(members)) is not None}
    pairs = sum(count for _, count in taus.values())
    return {
        "steps": errors(scored) | {"by_source": {k: errors(v) for k, v in grouped(scored, lambda s: s.source).items()}},
        "rank_correlation": round(sum(tau * count for tau, count in taus.values()) / pairs, 4) if pairs else None,
        "rank_pairs": pairs,
        "choice_regret": {
            "groups": len(regrets),
            "median": round(statistics.median(regrets.values()), 4) if regrets else None,
            "worst": round(max(regrets.values()), 4) if regrets else None,
        },
        "interval_coverage": round(sum(one.inside for one in scored) / len(scored), 4) if scored else None,
    }
