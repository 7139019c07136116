"""The default sampler: which plan is worth the next trial, or that none is.

Constrained Bayesian optimization over a finite space. A suggestion is made in this order:

1. The candidates are the plans that were not tried and are not known not to fit. Without any, the search ends.
2. The first trial is what the user's script does by itself. The next is the plan that the priors expect to be the
   fastest, at the largest micro-batch that the traces say fits.
3. While nothing has fitted: a plan that likely fits, then the smallest plan, then a few small ones.
4. Else the plan with the largest expected improvement in throughput, times the probability that it fits and runs. Of
   those that are nearly as good, only the ones that change the fewest values of the best plan so far.
5. The search ends when no candidate is expected to improve by one per cent.

A plan that runs now counts as it is expected to end (:mod:`autofit.search.surrogate.pending`), so that several workers
do not ask for the same. The models are in :mod:`autofit.search.surrogate`; how much risk of running out of memory is
taken, in :mod:`autofit.search.risk`. Any Optuna user can have the sampler::

    study = optuna.create_study(direction="maximize", sampler=AutofitSampler(space, limit_bytes=22 * 2**30))
    trial = study.ask(distributions(space))
    trial.set_constraint("memory", peak_bytes / limit_bytes - 1)
    study.tell(trial, samples_per_second)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial

from autofit.contract.plan import Plan, Value
from autofit.costmodel.forecast import Forecast
from autofit.costmodel.tracing.timeline import Bools, Floats
from autofit.search.risk import LIKELY_FITS, MIN_GAIN, RiskLimits, min_gain_if_infeasible, risk_limits
from autofit.search.study import distributions
from autofit.search.surrogate.features import BATCH_SPLIT, Features
from autofit.search.surrogate.gp import expected_improvement, normal_cdf
from autofit.search.surrogate.observation import Observation, observations, plans_of
from autofit.search.surrogate.pending import told_as_predicted
from autofit.search.surrogate.posterior import Posterior, Surrogate, excluded, peak_posterior, posterior, surrogate
from autofit.space import Space

MIN_TRIALS = 6
"""Measured plans before the search may end because nothing is expected to gain."""
LIKELY_RUNS = 0.5
_SURELY_FITS = 0.95
_STD_FACTOR = 1.5
"""Before the search ends it is asked once more with standard deviations that much larger: they may be too small."""
_NEARLY_BEST = 0.4
"""Share of the highest score from which on a plan is chosen by how few values it changes."""
_MAX_SLOWDOWN = math.log(8)
_MAX_LIKELY_PLANS = 2
"""Where so many plans ran and none fitted, the smallest plan is tried, whatever the models say."""
_MAX_SMALL_PLANS, _MAX_FAILURES = 4, 12
"""Nothing fits where so many plans did not after the smallest; nothing runs where so many did not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """The next plan, or none.

    Attributes:
        plan: Its index in ``space.plans``; ``None`` if nothing is worth trying.
        expected_gain: Expected gain in throughput over the best so far, as a share of it; ``None`` while there
            is no best.
        reason: Why this plan, or why none, in words.
    """

    plan: int | None
    expected_gain: float | None = None
    reason: str


class AutofitSampler(optuna.samplers.BaseSampler):
    """Optuna sampler over the plans of a space, each technique a categorical parameter.

    Args:
        space: The plans, and their priors.
        limit_bytes: The ceiling that the constraint ``memory`` is relative to.
        own: What the user's script does by itself, which is tried before all else.
        not_first: Values by technique that the first trial avoids where it can.
        seed: For parameters that are not of the space, which are sampled at random.
        forecast: What the traces say of the plans' memory.
    """

    def __init__(
        self,
        space: Space,
        *,
        limit_bytes: int,
        own: Plan | None = None,
        not_first: Mapping[str, Collection[Value]] | None = None,
        seed: int = 0,
        forecast: Forecast | None = None,
    ) -> None:
        self.space = space
        self.model = surrogate(space, forecast)
        self.limit_bytes = limit_bytes
        features = self.model.features
        self._own = None if own is None else features.index[own]
        self._first = _first_plan(self.model, _plans_without(not_first or {}, space, features), limit_bytes)
        self._smallest = _smallest_plan(self.model, space)
        self._family_columns = [column for column, name in enumerate(features.names) if name not in BATCH_SPLIT]
        self._random = optuna.samplers.RandomSampler(seed=seed)
        self._cached: tuple[tuple[Observation, ...], Suggestion] | None = None

    def suggest(self, trials: Sequence[FrozenTrial]) -> Suggestion:
        """The next plan, given what a study holds.

        The last suggestion is kept: who asks for it, to read its reason, then has ``study.ask`` make the same.
        """
        observed = tuple(observations(trials, self.model.features, self.limit_bytes))
        if self._cached is None or self._cached[0] != observed:
            self._cached = observed, self._suggest(observed)
        return self._cached[1]

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Every technique, at once."""
        return dict(distributions(self.space))

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A whole plan; the smallest one again where none is worth trying."""
        earlier = [one for one in study.get_trials(deepcopy=False) if one.number != trial.number]
        plan = self.suggest(earlier).plan
        return dict(self.space.plans[self._smallest if plan is None else plan])

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A parameter that is not of the space: at random."""
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def _suggest(self, observed: Sequence[Observation]) -> Suggestion:
        observed = told_as_predicted(self.model, observed, self.limit_bytes)
        peaks = peak_posterior(self.model, observed, self.limit_bytes)
        candidates = ~excluded(self.model, observed, self.limit_bytes, peaks)
        if not candidates.any():
            reason = "every plan was tried or is known not to fit" if observed else "no plan fits, by its trace"
            return Suggestion(plan=None, reason=reason)
        if (opening := self._opening(observed, candidates)) is not None:
            return opening
        belief = posterior(self.model, observed, self.limit_bytes, peaks)
        fitting = [one for one in observed if one.result == "measured" and one.peak_bytes <= self.limit_bytes]
        if not fitting:
            return self._suggest_feasible(observed, candidates, belief)
        return self._suggest_faster(observed, fitting, candidates, belief)

    def _opening(self, observed: Sequence[Observation], candidates: Bools) -> Suggestion | None:
        """The script's own plan, then the first one; ``None`` where others were tried already."""
        tried = {one.plan for one in observed if one.result != "running"}
        if self._own is not None and not tried and candidates[self._own]:
            return Suggestion(plan=self._own, reason="what the script does by itself")
        if not tried - {self._own} and candidates[self._first]:
            how = "the largest micro-batch that fits" if self.model.forecast else "the smallest sensible micro-batch"
            return Suggestion(plan=self._first, reason=f"expected to be fast, with {how}")
        return None

    # -- while nothing fits ---------------------------------------------------------------------------------------

    def _suggest_feasible(self, observed: Sequence[Observation], candidates: Bools, belief: Posterior) -> Suggestion:
        """One that likely fits, the smallest one, then a few small ones."""
        tried = [one.plan for one in observed if one.result != "running"]
        ran = sum(one.result in {"out_of_memory", "measured"} for one in observed)
        after_smallest = len(tried) - tried.index(self._smallest) - 1 if self._smallest in tried else 0
        if ran and after_smallest >= _MAX_SMALL_PLANS:
            reason = f"nothing fits: neither the smallest plan nor the {after_smallest} small ones tried after it"
            return Suggestion(plan=None, reason=reason)
        if len(tried) >= _MAX_FAILURES:
            return Suggestion(plan=None, reason=f"none of the {len(tried)} plans tried ran")
        likely = candidates & (belief.fits >= LIKELY_FITS) if ran else candidates
        if ran < _MAX_LIKELY_PLANS and likely.any():
            speed = np.exp(belief.time.min() - belief.time) * belief.runs
            plan = _argmax(np.where(likely, speed * belief.fits, -1.0), self.model, belief)
            return Suggestion(plan=plan, reason="fast, and likely to fit")
        if candidates[self._smallest]:
            return Suggestion(plan=self._smallest, reason="the smallest plan of all")
        small = np.where(candidates, np.log(belief.runs) - belief.peak, -np.inf)
        return Suggestion(plan=_argmax(small, self.model, belief), reason="the least memory of what is left")

    # -- once something fits --------------------------------------------------------------------------------------

    def _suggest_faster(
        self, observed: Sequence[Observation], fitting: Sequence[Observation], candidates: Bools, belief: Posterior
    ) -> Suggestion:
        """A plan that is expected to gain; one that probably does not fit but promises much; or none."""
        traced = self.model.forecast is not None
        # the priors alone know too little of the memory to rule a plan out: there the product with the gain decides
        limits = risk_limits(observed) if traced else RiskLimits(min_fits=0.0, min_gain=MIN_GAIN, fit_power=1)
        risky = belief.fits < _SURELY_FITS
        likely = candidates & (~risky | (belief.fits >= limits.min_fits))
        leader = min(fitting, key=lambda one: belief.time[one.plan]).plan
        best = float(belief.time[leader])  # of the posterior: one measurement may have been a lucky one
        gains, optimistic = (
            expected_improvement(belief.time, factor * belief.time_std, best) * belief.fits * belief.runs
            for factor in (1.0, _STD_FACTOR)
        )
        optimistic[self._smaller_micro_batches(fitting)] = 0.0
        # by the models as they are; then as if they were too sure of themselves
        for gain, words in ((gains, "is expected to gain"), (optimistic, "may gain, if the model is too sure,")):
            worth = likely & (gain >= np.where(risky, limits.min_gain, MIN_GAIN))
            if worth.any():
                score = self._few_changes(np.where(worth, gain * belief.fits**limits.fit_power, -1.0), leader)
                return self._highest(score, gain, belief, words)
        if traced:  # nothing likely is worth a trial: one that probably does not fit has to promise more
            worth = candidates & (gains >= min_gain_if_infeasible(observed))
            if worth.any():
                return self._highest(np.where(worth, gains * belief.fits, -1.0), gains, belief)
            if not likely.any():
                return Suggestion(plan=None, reason="none of the plans left is likely to fit")
        rest = likely if likely.any() else candidates
        if sum(one.result == "measured" for one in observed) >= MIN_TRIALS:
            reason = f"none of the {candidates.sum()} plans left is expected to be {MIN_GAIN:.0%} faster than the best"
            return Suggestion(plan=None, expected_gain=float(gains[rest].max()), reason=reason)
        # too little was measured to trust the models: one more trial, which should at least run
        runs = rest & (belief.runs > LIKELY_RUNS)
        score = np.where(runs if runs.any() else rest, gains * belief.fits**limits.fit_power, -1.0)
        return self._highest(score, gains, belief)

    def _smaller_micro_batches(self, fitting: Sequence[Observation]) -> Bools:
        """Plans that are a measured one but with fewer rows: hardly any is faster."""
        family, rows, plans = self.model.features.family, self.model.features.rows, plans_of(fitting)
        most = np.zeros(family.max() + 1)
        np.maximum.at(most, family[plans], rows[plans])
        smaller: Bools = rows < most[family]
        return smaller

    def _few_changes(self, score: Floats, leader: int) -> Floats:
        """The scores of the plans that are nearly the best and differ least from the fastest so far; -1 elsewhere.

        Where two values are changed at once, their effects are hard to tell apart.
        """
        codes = self.model.features.codes
        changed = (codes != codes[leader])[:, self._family_columns].sum(axis=1)
        good = score >= _NEARLY_BEST * score.max()
        return np.where(good & (changed == changed[good].min()), score, -1.0)

    def _highest(
        self, score: Floats, gains: Floats, belief: Posterior, words: str = "is expected to gain"
    ) -> Suggestion:
        """The plan with the highest score."""
        plan = _argmax(score, self.model, belief)
        reason = f"{words} {gains[plan]:.1%} over the best, and {belief.fits[plan]:.0%} likely to fit"
        return Suggestion(plan=plan, expected_gain=float(gains[plan]), reason=reason)


def _argmax(score: Floats, model: Surrogate, belief: Posterior) -> int:
    """The plan with the highest score; ties go to less memory, then to the simpler plan, then to the earlier."""
    tied = np.flatnonzero(score >= score.max() - 1e-9 * abs(score.max()))
    order = np.lexsort((model.features.changed_values[tied], np.round(belief.peak[tied], 6)))
    return int(tied[order[0]])


# -- plans that are known before the first trial --------------------------------------------------------------------


def _plans_without(avoided: Mapping[str, Collection[Value]], space: Space, features: Features) -> Bools:
    """Which plans have none of some values, given by technique."""
    kept = np.ones(len(space.plans), dtype=bool)
    for column, (name, values) in enumerate(space.domains.items()):
        keep = np.array([value not in avoided.get(name, ()) for value in values])
        kept &= keep[features.codes[:, column]]
    return kept


def _smallest_plan(model: Surrogate, space: Space) -> int:
    """The plan that needs the least memory: by its trace, where every plan has one, else by the techniques' priors."""
    if model.forecast is None or np.isnan(model.forecast.tensor_bytes).any():
        return model.features.index[space.smallest()]
    return int(np.lexsort((model.features.changed_values, model.forecast.tensor_bytes))[0])


def _first_plan(model: Surrogate, allowed: Bools, limit_bytes: int) -> int:
    """The plan to begin with: the fastest values by prior.

    Where the traces say what fits, at the largest micro-batch that surely does. Where they don't, at the smallest one
    that is not more than 8 times slower per sample than the best: it is the likeliest to fit, and shows the memory that
    does not depend on the rows, which is what the other families differ in.

    Args:
        model: Of the space.
        allowed: Plans to choose from, if there are any: those that don't change the training method.
        limit_bytes: The ceiling.
    """
    rows, family = model.features.rows, model.features.family
    if not allowed.any():
        allowed = np.ones_like(allowed)
    times = np.where(allowed, model.time_mean, np.inf)
    peaks = peak_posterior(model, (), limit_bytes)
    if peaks is not None:
        mean, std = peaks.log_moments()
        fits = allowed & (normal_cdf((math.log(limit_bytes) - mean) / std) > _SURELY_FITS)
        if fits.any():
            return int(np.argmin(np.where(fits, times, np.inf)))
    fastest = int(np.argmin(times))
    sensible = (family == family[fastest]) & (times <= times[fastest] + _MAX_SLOWDOWN)
    return int(np.flatnonzero(sensible & (rows == rows[sensible].min()))[0])
