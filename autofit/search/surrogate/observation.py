"""What the trials of an Optuna study say of the plans, as observations for the regressions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from autofit.contract.plan import Plan
from autofit.contract.trace import Ints
from autofit.search.study import CONSTRAINT, REJECTED, STARTED
from autofit.search.surrogate.features import Features

Result = Literal["measured", "out_of_memory", "timed_out", "failed", "running"]

MIN_NOISE, _MAX_NOISE = 0.005, 0.1
"""Of the logarithm of a run's seconds, from the scatter of its steps: two steps alone would claim seven times it."""
_FAR_LESS = 5.0
_MAX_OBSERVATIONS = 160
"""The cost of a regression grows with the cube of the observations: beyond that many they are thinned out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a study says of one plan.

    Attributes:
        plan: Index of the plan in ``space.plans``.
        result: How its trial ended.
        seconds: Seconds per sample of a measured plan.
        peak_bytes: Of a measured plan, or of one that ran out of memory; 0 where not known.
        needed_bytes: Of a measured plan: the same without what the allocator only caches.
        noise: Standard deviation of the logarithm of ``seconds``.
        on_device: Whether it was the device's memory that ran out.
    """

    plan: int
    result: Result
    seconds: float = 0.0
    peak_bytes: float = 0.0
    needed_bytes: float = 0.0
    noise: float = MIN_NOISE
    on_device: bool = True


def _space_params(params: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The parameters that are of the space; an Optuna user may have others beside them."""
    return {name: value for name, value in params.items() if name in names}


def observations(trials: Sequence[FrozenTrial], features: Features, limit_bytes: int) -> list[Observation]:
    """What a study's trials say; rejected proposals and interrupted trials say nothing."""
    found = []
    for trial in trials:
        kind = trial.user_attrs.get("kind")
        plan = features.index.get(Plan(trial.user_attrs.get("plan") or _space_params(trial.params, features.names)))
        interrupted = trial.state == TrialState.FAIL and kind in {STARTED, "measured", "out_of_memory", "timed_out"}
        if plan is not None and kind != REJECTED and not interrupted:
            found.append(_observation(trial, plan, limit_bytes))
    return found


def _observation(trial: FrozenTrial, plan: int, limit_bytes: int) -> Observation:
    excess = trial.constraints.get(CONSTRAINT)
    peak = float(trial.user_attrs.get("peak_bytes", 0.0 if excess is None else (1 + excess) * limit_bytes))
    if not trial.state.is_finished():
        return Observation(plan=plan, result="running")
    if trial.state == TrialState.COMPLETE and trial.value is not None and trial.value > 0:
        scatter = min(max(trial.user_attrs.get("relative_spread", 0.0) / 1.96, MIN_NOISE), _MAX_NOISE)
        return Observation(
            plan=plan,
            result="measured",
            seconds=1 / trial.value,
            peak_bytes=peak,
            needed_bytes=float(trial.user_attrs.get("needed_bytes", peak)),
            noise=math.hypot(scatter, trial.user_attrs.get("disturbance", 0.0)),
        )
    if trial.state == TrialState.PRUNED and excess is not None and excess > 0:
        on_device = trial.user_attrs.get("where", "device") == "device"
        return Observation(plan=plan, result="out_of_memory", peak_bytes=peak, on_device=on_device)
    return Observation(plan=plan, result="timed_out" if trial.state == TrialState.PRUNED else "failed")


def subsample(observed: Sequence[Observation]) -> Sequence[Observation]:
    """All of them, or where they are very many the fastest half of a fixed number and an even share of the others."""
    if len(observed) <= _MAX_OBSERVATIONS:
        return observed
    ranked = sorted(observed, key=lambda one: one.seconds)
    half = _MAX_OBSERVATIONS // 2
    rest = ranked[half:]
    return [*ranked[:half], *(rest[place * len(rest) // half] for place in range(half))]


def undisturbed(measured: Sequence[Observation]) -> Sequence[Observation]:
    """Without those that say nothing any more: their plan was measured again, far less disturbed."""
    least: dict[int, float] = {}
    for one in measured:
        least[one.plan] = min(one.noise, least.get(one.plan, math.inf))
    return [one for one in measured if one.noise <= _FAR_LESS * least[one.plan]]


def plans_of(observed: Sequence[Observation]) -> Ints:
    """The indices of the observed plans."""
    return np.array([one.plan for one in observed], dtype=np.int64)
