"""What whole steps and a card of ours tell that no published kernel does: products on tensor cores, fused attention,
copies, gaps between kernels, the host.

The kernels' coefficients are held but for those in :data:`WANTED`, which no published kernel is of. They are fitted to
whole steps and to the operators that were timed alone on :data:`OWN_CARD`, both of the same weight, and to the whole
steps that those are of. Steps that differ in the accumulation alone are one row, the median of them; no source decides
by its number of rows, since at most :data:`MOST` of each source and card are fitted to, and the interval is the
geometric mean over the cards of each source, each card left out in turn. The same minimizer as the kernels', no random
numbers.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from autofit.costmodel.seconds import operator_time, step_time
from autofit.costmodel.seconds.kernel_laws import Figures
from autofit.costmodel.seconds.operator_time import TIMED_KINDS, Operators
from autofit.costmodel.seconds.roofline import Numbers
from tests.bench import own_operators
from tests.bench.own_operators import OWN_CARD

from .rows import Step
from .tracing import Traced

WANTED = (
    *(("product", f"tensor_{name}") for name in ("share", "reuse", "flop_per_joule", "start")),
    *(("attention", name) for name in (
        "forward", "backward", "width", "idle", "newer", "newer_backward", "efficient", "efficient_newer",
        "forward_full", "backward_full", "keys",
    )),
    ("quantized", "element"),
    *(("passes", name) for name in ("copy", "reduction", "gather", "optimizer", "dequantize")),
    ("step", "slack"),
    ("step", "sharded"),
    ("step", "older"),
    ("step", "host"),
)  # fmt: skip
START = {"slack": 0.0, "sharded": 0.0, "older": 0.0, "gap": float(np.log(1.2e-6)), "host": float(np.log(8e-6))}
"""How much slower unaligned products are is not fitted, since small ones would decide: it is the median of those of
2,048 rows and more on :data:`OWN_CARD`, 160 to 240 and 95 to 150 TFLOP/s where aligned ones reach 710 to 820.
The gap is not fitted: steps that keep :data:`OWN_CARD` busy take 0.6 to 1.9 µs a kernel more than their kernels."""
_DIGITS = 4
MOST = 60
"""Steps of each source and card that are fitted to."""
_NOTHING = TIMED_KINDS.index("nothing")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Operators of many steps side by side.

    Attributes:
        operators, figures: Of shape ``(operators,)``; calls are those of the whole step.
        bound: Seconds that no operator takes less than.
        step: Which step each operator is of.
        sharded: 1 for each step that is a rank's of several, else 0; of shape ``(steps,)``.
        older: 1 for each step of a program of before April 2023, slower by a factor of its own, else 0.
        count: Steps.
    """

    operators: Operators
    figures: Figures
    bound: Numbers
    step: Any
    sharded: Numbers
    older: Numbers
    count: int


def batch_of(steps: Sequence[Step], traces: Mapping[Any, Traced]) -> Batch:
    """The operators of all steps, each on its own card."""
    found, figures, bounds, owners = [], [], [], []
    for place, step in enumerate(steps):
        own = operators_of(step, traces[step.program])
        assert step.card is not None
        found.append(own)
        figures.append(operator_time.figures_of(own, step.card))
        bounds.append(operator_time.bound_seconds(own, step.card))
        owners.append(np.full(len(own), place))
    return Batch(
        operators=_joined(Operators, found),
        figures=_joined(Figures, figures),
        bound=np.concatenate(bounds),
        step=np.concatenate(owners),
        sharded=np.array([float(step.world > 1) for step in steps]),
        older=np.array([float(step.older) for step in steps]),
        count=len(steps),
    )


def operators_of(step: Step, trace: Traced) -> Operators:
    """Of a whole optimizer step, each with all of its calls."""
    assert step.card is not None
    calls = np.array([step.accumulation, step.accumulation, 1]) @ trace.calls
    called = calls > 0
    rows = trace.operators[called] + step.rows * trace.operators_per_row[called]
    operators = Operators.from_rows(rows, calls[called])
    return operators.computed_in(tf32=step.tf32 and step.card.tf32 is not None, fp16=step.fp16)


def _joined(kind: Any, parts: Sequence[Any]) -> Any:
    return kind(**{one.name: np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(kind)})


def predicted(batch: Batch, fit: Mapping[str, Mapping[str, float]]) -> Numbers:
    """Seconds of each step."""
    each = np.maximum(operator_time.device_seconds(batch.operators, batch.figures, fit), batch.bound)
    calls, launches = batch.operators.calls, batch.operators.calls * (batch.operators.kind != _NOTHING)
    device, host, kernels = (
        np.bincount(batch.step, weights, batch.count) for weights in (calls * each, calls, launches)
    )
    age = np.exp(fit["step"].get("older", 0.0) * batch.older)
    return step_time.together(device * age, kernels * age, host, batch.sharded, fit["step"])


def refined(
    fit: Mapping[str, Mapping[str, float]], steps: Sequence[Step], traces: Mapping[Any, Traced]
) -> dict[str, dict[str, float]]:
    """The coefficients, those that are wanted fitted to these steps."""
    from tests.bench.fit_time_model import _minimized

    steps = _thinned(steps)
    batch = batch_of(steps, traces)
    own, whole_own = own_operators.to_fit(OWN_CARD), own_operators.steps_of(OWN_CARD)
    measured = np.log(np.concatenate([[step.seconds for step in steps], own.seconds, whole_own.seconds]))
    weight = np.concatenate(
        [
            np.ones(len(steps)),
            np.full(len(own), np.sqrt(len(steps) / len(own))),  # both count alike
            np.full(len(whole_own.seconds), np.sqrt(MOST / len(whole_own.seconds))),  # one source more
        ]
    )
    whole = {part: dict(its) for part, its in fit.items()} | {"step": dict(START)}
    start = np.array([whole[part][name] for part, name in WANTED])

    def with_values(values: Any) -> dict[str, dict[str, float]]:
        trial = {part: dict(its) for part, its in whole.items()}
        for (part, name), value in zip(WANTED, values, strict=True):
            trial[part][name] = round(float(value), 9)
        return trial

    def residuals(values: Any) -> Any:
        trial = with_values(values)
        alone = own_operators.predicted(own, trial)
        together = whole_own.predicted(trial)
        return weight * (np.log(np.concatenate([predicted(batch, trial), alone, together])) - measured)

    values = _minimized(residuals, start)
    return with_values([round(float(value), _DIGITS) for value in values])


def with_steps(found: Mapping[str, Any], steps: Sequence[Step], traces: Mapping[Any, Traced]) -> dict[str, Any]:
    """What a fit to kernels found, with what these steps tell, and how far whole steps are off."""
    fit = refined(found["fit"], steps, traces)
    cards = sorted({step.card.name for step in steps if step.card is not None})
    unseen = np.full(len(steps), np.nan)
    for card in cards:
        mine = np.array([step.card is not None and step.card.name == card for step in steps])
        others = [step for step, out in zip(steps, mine, strict=True) if not out]
        if others:
            unseen[mine] = _errors(refined(found["fit"], others, traces), steps, mine, traces)
    seen = _errors(fit, steps, np.ones(len(steps), dtype=bool), traces)
    stds = {"seen": _spread(seen, steps)}
    stds["unseen"] = max(stds["seen"], _spread(unseen, steps))
    return {**found, "fit": fit, "steps": {"rows": len(steps), "cards": cards, "log_std": stds}}


def _errors(fit: Mapping[str, Any], steps: Sequence[Step], mine: Any, traces: Mapping[Any, Traced]) -> Numbers:
    some = [step for step, wanted in zip(steps, mine, strict=True) if wanted]
    measured: Numbers = np.log([step.seconds for step in some])
    return measured - np.log(predicted(batch_of(some, traces), fit))


def _origin(step: Step) -> tuple[str, str]:
    assert step.card is not None
    return step.source, step.card.name


def _spread(errors: Numbers, steps: Sequence[Step]) -> float:
    """The geometric mean, over the cards of each source, of the standard deviation whose 80 % interval holds 80 %.

    A new card may be any of them. That of the median card is too narrow: half of the cards are farther off than it.
    """
    origins: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for step, error in zip(steps, errors.tolist(), strict=True):
        if not np.isnan(error):
            origins[_origin(step)].append(abs(error))
    each = [float(np.quantile(its, 0.8)) for its in origins.values()]
    return round(statistics.geometric_mean(each) / step_time.EIGHTY, 3) if each else 0.0


def _thinned(steps: Sequence[Step]) -> list[Step]:
    """At most so many of each source and card, evenly over their order.

    Of steps that differ in the accumulation alone, the one whose pace is their median.
    """
    alike: defaultdict[Any, list[Step]] = defaultdict(list)
    for step in steps:
        alike[_origin(step), step.program, step.rows, step.tf32, step.fp16].append(step)
    origins: defaultdict[tuple[str, str], list[Step]] = defaultdict(list)
    for (origin, *_), members in alike.items():
        middle = statistics.median_low(one.seconds / one.tokens for one in members)
        origins[origin].append(next(one for one in members if one.seconds / one.tokens == middle))
    kept = (its if len(its) <= MOST else [its[k * len(its) // MOST] for k in range(MOST)] for its in origins.values())
    return [step for its in kept for step in its]


def folds(steps: Sequence[Step], count: int) -> list[list[str]]:
    """Names of the cards that each fold holds out; every card is held out once."""
    cards = sorted({step.card.name for step in steps if step.card is not None})
    return [cards[fold::count] for fold in range(min(count, len(cards)))]
