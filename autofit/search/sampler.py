"""The default sampler: which plan is worth the next trial, or that none is.

In words: begin with the plan that is expected to be fast and sure to be small; from then on take the plan with the
largest expected gain in throughput over the best so far, times the probability that it fits and runs; stop when no
plan is expected to gain one per cent. Where what is worth trying is not likely to fit, try the same with fewer rows
first. As long as nothing has fitted, go towards the smallest plan.

The regressions behind it are in :mod:`autofit.search.surrogate`. Any Optuna user can have it::

    study = optuna.create_study(direction="maximize", sampler=AutofitSampler(space, limit_bytes=22 * 2**30))
    trial = study.ask(distributions(space))
    trial.set_constraint("memory", peak_bytes / limit_bytes - 1)
    study.tell(trial, samples_per_second)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from autofit.contract.plan import Plan, Value
from autofit.costmodel.forecast import Forecast
from autofit.costmodel.timeline import Bools, Floats
from autofit.search.study import CONSTRAINT, REJECTED, STARTED, distributions
from autofit.search.surrogate import (
    FOLLOWS,
    ROWS,
    Encoded,
    Needs,
    Pace,
    below,
    encode,
    gain,
    needs,
    predict,
    predict_sum,
    sharpen,
)
from autofit.space import Space

Verdict = Literal["measured", "out_of_memory", "timed_out", "failed", "running"]

LEAST_TRIALS = 6
LEAST_GAIN = 0.01
_LOW_MEMORY_TRIES = 4
_FRUITLESS_TRIES = 12
LIKELY = 0.6
CAUTION = 2
"""Of the probability to fit, in the choice among plans that may not."""
_SURE = 0.95
LIKELY_WORKS = 0.5
_AS_GOOD = 0.4
_TRIALS_TO_A_BREAK = 10
_WORTH_A_SCOUT = 0.75
_SCOUTED = 50
_WORTH_A_DARE = 0.03
_DARED, _DARED_IN_A_ROW = 1, 4
_SURELY_STDS = 3.0
_ABSURD = math.log(8)
_LEAST_NOISE, _MOST_NOISE = 0.005, 0.1
"""Of the logarithm of a run's seconds, by its steps: two of them alone would claim seven times their scatter."""
_RUN_NOISE = 0.4
_DOUBT = 1.5
"""Before the search ends it takes the standard deviations that many times: who is sure too early ends too early."""
_DEEP = -4.0
_MOST_TELLING = 160
"""What a regression over so many observations takes grows with their cube: more of them are thinned out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a study says of one plan.

    Attributes:
        place: Where the plan stands in ``space.plans``.
        seconds: Seconds per sample of a measured plan.
        peak_bytes: Of a measured plan, or of one that ran out of memory; 0 where not known.
        needed_bytes: Of a measured plan: the same without what the allocator only keeps.
        noise: Standard deviation of the logarithm of ``seconds``.
        on_device: Whether it was the device's memory that ran out.
    """

    place: int
    verdict: Verdict
    seconds: float = 0.0
    peak_bytes: float = 0.0
    needed_bytes: float = 0.0
    noise: float = _LEAST_NOISE
    on_device: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The next plan, or none.

    Attributes:
        place: Where it stands in ``space.plans``; ``None`` if nothing is worth trying.
        expected_gain: Expected gain in throughput over the best so far, as a share of it; ``None`` while there
            is no best.
        reason: Why this plan, or why none, in words.
    """

    place: int | None
    expected_gain: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Caution:
    """What a plan that may not fit has to offer.

    Attributes:
        likely: The least probability that it fits.
        gain: The least expected gain.
        power: Of the probability in the choice, beyond its part in the gain: a plan that does not fit says little of
            any other.
    """

    likely: float
    gain: float
    power: int


class AutofitSampler(optuna.samplers.BaseSampler):
    """Optuna sampler over the plans of a space, each technique a categorical parameter.

    Args:
        space: The plans, and what to expect of them.
        limit_bytes: The ceiling that the constraint ``memory`` is relative to.
        not_first: Values by technique that the first trial avoids where it can.
        seed: For parameters that are not of the space, which are sampled at random.
        forecast: What the traces say of the plans' memory.
    """

    def __init__(
        self,
        space: Space,
        *,
        limit_bytes: int,
        not_first: Mapping[str, Collection[Value]] | None = None,
        seed: int = 0,
        forecast: Forecast | None = None,
    ) -> None:
        self.space = space
        self.encoded = encode(space, forecast)
        self.limit_bytes = limit_bytes
        self._first = first_place(self.encoded, self._without(not_first or {}), limit_bytes)
        self._smallest = smallest_place(self.encoded, space)
        self._knobs = [place for place, name in enumerate(self.encoded.names) if name not in {ROWS, FOLLOWS}]
        self._others = optuna.samplers.RandomSampler(seed=seed)
        self._known: tuple[tuple[Seen, ...], Advice] | None = None

    def advise(self, trials: Sequence[FrozenTrial]) -> Advice:
        """The next plan, given what a study holds."""
        seen = tuple(observations(trials, self.encoded, self.limit_bytes))
        if self._known is None or self._known[0] != seen:
            self._known = seen, self._advise(seen)
        return self._known[1]

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Every technique, at once."""
        return dict(distributions(self.space))

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A whole plan; the smallest one again where none is worth trying."""
        others = [one for one in study.get_trials(deepcopy=False) if one.number != trial.number]
        place = self.advise(others).place
        return dict(self.space.plans[self._smallest if place is None else place])

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A parameter that is not of the space: at random."""
        return self._others.sample_independent(study, trial, param_name, param_distribution)

    def _advise(self, seen: Sequence[Seen]) -> Advice:
        found = needed(self.encoded, seen, self.limit_bytes)
        free = ~excluded(self.encoded, seen, self.limit_bytes, found)
        fitting = [one for one in seen if one.verdict == "measured" and one.peak_bytes <= self.limit_bytes]
        if not free.any():
            if not seen:
                return Advice(place=None, expected_gain=None, reason="no plan fits, by its trace")
            return Advice(place=None, expected_gain=None, reason="every plan was tried or is known not to fit")
        if not fitting:
            return self._first_that_fits(seen, free, found)
        return self._faster(seen, fitting, free, found)

    def _faster(self, seen: Sequence[Seen], fitting: Sequence[Seen], free: Bools, found: Needs | None) -> Advice:
        """A plan that is worth it; a scout for one that may not fit; one that may not; or none."""
        belief = believe(self.encoded, seen, self.limit_bytes, found)
        best = min(float(belief.time[one.place]) for one in fitting)  # one measurement may have been a lucky one
        caution = self._caution(seen)
        risky = belief.fits < _SURE
        likely = free & (~risky | (belief.fits >= caution.likely))
        leader = min(fitting, key=lambda one: belief.time[one.place]).place
        gains, doubted = (
            gain(belief.time, times * belief.time_std, best) * belief.fits * belief.works for times in (1.0, _DOUBT)
        )
        doubted[self._fewer(fitting)] = 0.0
        for promised, may in ((gains, "is expected to gain"), (doubted, "may gain, if less is known than it seems,")):
            worth = likely & (promised >= np.where(risky, caution.gain, LEAST_GAIN))
            if worth.any():
                score = self._near(np.where(worth, promised * belief.fits**caution.power, -1.0), leader)
                return self._take(score, promised, belief, may)
        if self.encoded.forecast is not None:
            scout = self._scout(seen, np.where(free, gains, 0.0), free & (belief.fits >= _WORTH_A_SCOUT))
            if scout is not None:
                return scout
            dare = free & (gains >= self._worth_a_dare(seen))
            if dare.any():
                return self._take(np.where(dare, gains * belief.fits, -1.0), gains, belief)
        if self.encoded.forecast is not None and not likely.any():
            return Advice(place=None, expected_gain=None, reason="none of the plans left is likely to fit")
        candidates = likely if likely.any() else free
        if sum(one.verdict == "measured" for one in seen) >= LEAST_TRIALS:
            most = float(gains[candidates].max())
            reason = f"none of the {free.sum()} plans left is expected to be {LEAST_GAIN:.0%} faster than the best"
            return Advice(place=None, expected_gain=most, reason=reason)
        runs = candidates & (belief.works > LIKELY_WORKS)  # a trial that is made for its own sake should at least run
        score = np.where(runs if runs.any() else candidates, gains * belief.fits**caution.power, -1.0)
        return self._take(score, gains, belief)

    def _fewer(self, fitting: Sequence[Seen]) -> Bools:
        """Plans that are a measured one but with fewer rows: hardly any is faster."""
        most = np.zeros(int(self.encoded.family.max()) + 1)
        for one in fitting:
            family = self.encoded.family[one.place]
            most[family] = max(most[family], self.encoded.rows[one.place])
        fewer: Bools = self.encoded.rows < most[self.encoded.family]
        return fewer

    def _take(self, score: Floats, gains: Floats, belief: Belief, may: str = "is expected to gain") -> Advice:
        """The plan with the highest score."""
        place = self._foremost(score, belief.memory)
        reason = f"{may} {gains[place]:.1%} over the best, and {belief.fits[place]:.0%} likely to fit"
        return Advice(place=place, expected_gain=float(gains[place]), reason=reason)

    def _scout(self, seen: Sequence[Seen], gains: Floats, sure: Bools) -> Advice | None:
        """With fewer rows, a plan of a kind that is worth trying but may not fit: it tells what its kind needs."""
        measured = {int(self.encoded.family[one.place]) for one in seen if one.verdict == "measured"}
        for place in np.argsort(-gains)[:_SCOUTED]:
            if gains[place] < LEAST_GAIN:
                return None
            family, rows = int(self.encoded.family[place]), self.encoded.rows
            kin = np.flatnonzero(sure & (self.encoded.family == family) & (rows < rows[place]))
            if len(kin) and family not in measured:
                words = f"shows whether {self.space.plans[place].words()} fits, which may gain {gains[place]:.1%}"
                return Advice(place=int(kin[rows[kin].argmax()]), expected_gain=float(gains[place]), reason=words)
        return None

    def _worth_a_dare(self, seen: Sequence[Seen]) -> float:
        """What a plan that is not likely to fit has to promise, to be tried since nothing else is left.

        Each break beyond one in ten asks for twice as much: to end the search for fear of another one would cost more
        than a few trials where half of the speed is at stake.
        """
        broke = [one.verdict == "out_of_memory" for one in seen]
        in_a_row = len(seen) - max((place + 1 for place, one in enumerate(broke) if not one), default=0)
        if in_a_row >= _DARED_IN_A_ROW:
            return math.inf
        too_many = max(0.0, sum(broke) - _DARED - len(seen) / _TRIALS_TO_A_BREAK)
        return _WORTH_A_DARE * math.pow(2.0, too_many)

    def _near(self, score: Floats, leader: int) -> Floats:
        """Of the plans that are about as good as the best choice, those that differ least from the fastest so far.

        Where two values are changed at once, what comes of it is hard to tell apart.
        """
        changed = (self.encoded.codes != self.encoded.codes[leader])[:, self._knobs].sum(axis=1)
        good = score >= _AS_GOOD * score.max()
        return np.where(good & (changed == changed[good].min()), score, -1.0)

    def _caution(self, seen: Sequence[Seen]) -> Caution:
        """How careful to be: one trial in ten may run out of memory, where more did a break has to be worth more."""
        if self.encoded.forecast is None:
            return Caution(likely=0.0, gain=LEAST_GAIN, power=1)
        broken = sum(one.verdict == "out_of_memory" for one in seen)
        too_many = max(0.0, broken - 1 - len(seen) / _TRIALS_TO_A_BREAK)
        if not too_many:
            return Caution(likely=LIKELY, gain=LEAST_GAIN, power=CAUTION)
        return Caution(likely=0.8, gain=2 * LEAST_GAIN * max(1.0, too_many), power=6)

    def _first_that_fits(self, seen: Sequence[Seen], free: Bools, found: Needs | None) -> Advice:
        """While nothing fitted: the first plan, one that likely fits, the smallest one, then a few small ones."""
        tried = [one.place for one in seen if one.verdict != "running"]
        broken = sum(one.verdict in {"out_of_memory", "measured"} for one in seen)
        belief = believe(self.encoded, seen, self.limit_bytes, found)
        if self._smallest in tried:
            after = len(tried) - tried.index(self._smallest) - 1
            if broken and after >= _LOW_MEMORY_TRIES:
                reason = f"nothing fits: neither the smallest plan nor the {after} small ones tried after it"
                return Advice(place=None, expected_gain=None, reason=reason)
        if len(tried) >= _FRUITLESS_TRIES:
            return Advice(place=None, expected_gain=None, reason=f"none of the {len(tried)} plans tried ran")
        place, reason = self._towards_smallest(belief, free, tried=len(tried), broken=broken)
        return Advice(place=place, expected_gain=None, reason=reason)

    def _towards_smallest(self, belief: Belief, free: Bools, *, tried: int, broken: int) -> tuple[int, str]:
        if not tried and free[self._first]:
            how = "the largest micro-batch that fits" if self.encoded.forecast else "the smallest sensible micro-batch"
            return self._first, f"expected to be fast, with {how}"
        speed = np.exp(belief.time.min() - belief.time) * belief.works
        likely = free & (belief.fits >= LIKELY) if broken else free
        if broken < 2 and likely.any():
            return self._foremost(np.where(likely, speed * belief.fits, -1.0), belief.memory), "fast, and likely to fit"
        if free[self._smallest]:
            return self._smallest, "the smallest plan of all"
        small = np.where(free, np.log(belief.works) - belief.memory, -np.inf)
        return self._foremost(small, belief.memory), "the least memory of what is left"

    def _without(self, avoided: Mapping[str, Collection[Value]]) -> Bools:
        kept = np.ones(len(self.space.plans), dtype=bool)
        for column, (name, values) in enumerate(self.space.domains.items()):
            keep = np.array([value not in avoided.get(name, ()) for value in values])
            kept &= keep[self.encoded.codes[:, column]]
        return kept

    def _foremost(self, score: Floats, memory: Floats) -> int:
        """The highest score; ties go to less memory, then to the simpler plan, then to the earlier one."""
        tied = np.flatnonzero(score >= score.max() - 1e-9 * abs(score.max()))
        order = np.lexsort((self.encoded.extras[tied], np.round(memory[tied], 6)))
        return int(tied[order[0]])


def smallest_place(encoded: Encoded, space: Space) -> int:
    """The plan that needs the least memory: by its trace, where every plan has one, else by the techniques' priors."""
    if encoded.forecast is None or np.isnan(encoded.forecast.tensor_bytes).any():
        return encoded.index[space.smallest()]
    return int(np.lexsort((encoded.extras, encoded.forecast.tensor_bytes))[0])


def first_place(encoded: Encoded, allowed: Bools | None = None, limit_bytes: int | None = None) -> int:
    """Where to begin: the fastest values by prior.

    Where the traces say what fits, at the largest micro-batch that surely does. Where they don't, at the smallest one
    that is not absurdly slow: it is the likeliest to fit, and shows the memory that does not depend on the rows, which
    is what the other families differ in. Absurdly slow is more than 8 times slower per sample than the best micro-batch
    is expected to be. ``allowed`` keeps values that change the training method out of the first trial.
    """
    allowed = np.ones(len(encoded.rows), dtype=bool) if allowed is None or not allowed.any() else allowed
    found = None if limit_bytes is None else needed(encoded, (), limit_bytes)
    if found is not None and limit_bytes is not None:
        mean, std = found.logarithms()
        fits = allowed & (below((math.log(limit_bytes) - mean) / std) > _SURE)
        if fits.any():
            return int(np.argmin(np.where(fits, encoded.time_mean, np.inf)))
    quickest = np.where(allowed, encoded.time_mean, np.inf)
    fastest = int(np.argmin(quickest))
    kin = allowed & (encoded.family == encoded.family[fastest])
    sensible = kin & (encoded.time_mean <= quickest[fastest] + _ABSURD)
    smallest = sensible & (encoded.rows == encoded.rows[sensible].min())
    return int(np.flatnonzero(smallest)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """What is believed of every plan: logarithms of seconds per sample and of peak bytes, and probabilities."""

    time: Floats
    time_std: Floats
    memory: Floats
    fits: Floats
    works: Floats


def believe(encoded: Encoded, seen: Sequence[Seen], limit_bytes: int, found: Needs | None = None) -> Belief:
    """The belief about every plan after what was seen; ``found`` is what :func:`needed` says, where that is known."""
    time, time_std = _time(encoded, seen)
    memory, memory_std = _memory(encoded, seen, limit_bytes, found or needed(encoded, seen, limit_bytes))
    return Belief(
        time=time,
        time_std=time_std,
        memory=memory,
        fits=below((math.log(limit_bytes) - memory) / memory_std),
        works=_works(encoded, seen),
    )


def _telling(seen: Sequence[Seen]) -> Sequence[Seen]:
    """All of them, or where they are very many the fastest, and an even share of the others."""
    if len(seen) <= _MOST_TELLING:
        return seen
    ranked = sorted(seen, key=lambda one: one.seconds)
    half = _MOST_TELLING // 2
    rest = ranked[half:]
    return [*ranked[:half], *(rest[place * len(rest) // half] for place in range(half))]


def _time(encoded: Encoded, seen: Sequence[Seen]) -> tuple[Floats, Floats]:
    """A plan that timed out counts as twice as slow as the slowest that was measured, give or take a half."""
    measured = _telling([one for one in seen if one.verdict == "measured"])
    late = _telling([one for one in seen if one.verdict == "timed_out"] if measured else [])
    values = [math.log(one.seconds) for one in measured]
    places = np.array([one.place for one in (*measured, *late)], dtype=np.int64)
    seconds = np.array(values + [max(values, default=0.0) + math.log(2)] * len(late))
    noise = np.array([one.noise for one in measured] + [0.5] * len(late))
    if isinstance(encoded.time, Pace):
        return predict_sum(encoded.time, seen=places, values=seconds, noise=noise)
    return predict(encoded.time, encoded.time_mean, seen=places, values=seconds, noise=noise)


def _memory(encoded: Encoded, seen: Sequence[Seen], limit_bytes: int, found: Needs | None) -> tuple[Floats, Floats]:
    """By the traces and what was learned of them; by the techniques' expectations where nothing was traced."""
    if found is None or np.isnan(found.mean).any():
        mean, std = _untraced(encoded, seen, limit_bytes)
    if found is not None:
        known, (by_trace, trace_std) = ~np.isnan(found.mean), found.logarithms()
        mean = by_trace if known.all() else np.where(known, by_trace, mean)
        std = trace_std if known.all() else np.where(known, trace_std, std)
    measured = [one for one in seen if one.verdict == "measured" and one.peak_bytes > 0]
    mean, std = sharpen(encoded, mean, std, {one.place: one.peak_bytes for one in measured})
    if encoded.forecast is not None:  # one measurement scatters, and so will the next
        std = np.maximum(std, 0.5 * encoded.forecast.own_bytes / np.exp(mean))
    return mean, std


def _untraced(encoded: Encoded, seen: Sequence[Seen], limit_bytes: int) -> tuple[Floats, Floats]:
    """An out-of-memory is a censored observation: 15 % above the ceiling at least, or where it was expected."""
    measured = _telling([one for one in seen if one.verdict == "measured" and one.peak_bytes > 0])
    broke = _telling([one for one in seen if one.verdict == "out_of_memory" and one.on_device])
    places = np.array([one.place for one in measured], dtype=np.int64)
    values = np.log(np.array([one.peak_bytes for one in measured], dtype=float))
    noise = np.full(len(measured), _LEAST_NOISE)
    if broke:
        at = np.array([one.place for one in broke], dtype=np.int64)
        least = np.log([max(one.peak_bytes, 1.15 * limit_bytes) for one in broke])
        if measured:
            both, known = encoded.memory.among(np.concatenate([places, at])), np.arange(len(places))
            expected, _ = predict_sum(both, seen=known, values=values, noise=noise)
            least = np.maximum(least, expected[len(places) :])
        places, values = np.concatenate([places, at]), np.concatenate([values, least])
        noise = np.concatenate([noise, np.full(len(broke), 0.2)])
    return predict_sum(encoded.memory, seen=places, values=values, noise=noise)


def needed(encoded: Encoded, seen: Sequence[Seen], limit_bytes: int) -> Needs | None:
    """What is believed of the peaks of the plans that were traced; ``None`` where there are no traces.

    What broke the ceiling tells that it is above it, and no more than that.
    """
    forecast = encoded.forecast
    if forecast is None:
        return None
    measured = _telling([one for one in seen if one.verdict == "measured" and one.needed_bytes > 0])
    broke = _telling([one for one in seen if one.verdict == "out_of_memory" and one.on_device])
    places = np.array([one.place for one in measured], dtype=np.int64)
    peaks = np.array([one.needed_bytes for one in measured], dtype=float)
    noise = np.full(len(measured), _RUN_NOISE)
    found = needs(encoded, seen=places, peaks=peaks, noise=noise)
    if not broke:
        return found
    at = np.array([one.place for one in broke], dtype=np.int64)
    at = at[~np.isnan(found.mean[at])]
    beyond, scatter = above(found.mean[at], found.std[at], float(limit_bytes))
    both = needs(
        encoded,
        seen=np.concatenate([places, at]),
        peaks=np.concatenate([peaks, beyond]),
        noise=np.concatenate([noise, scatter / forecast.own_bytes[at]]),
    )
    return dataclasses.replace(both, scatter=found.scatter, count=found.count)


def above(mean: Floats, std: Floats, limit: float) -> tuple[Floats, Floats]:
    """The measurement, and its standard deviation, that tells the same of a normal belief as that it is above a limit.

    By the moments of the truncated normal, by its tail's series where the limit lies deep in it. What was far above
    the limit before is hardly told anything.
    """
    z = (mean - limit) / std
    near, deep = np.maximum(z, _DEEP), np.maximum(-z, -_DEEP)
    density = np.exp(-0.5 * near * near) / math.sqrt(2 * math.pi)
    hazard = np.where(z > _DEEP, density / below(near), deep + 1 / deep)
    shrunk = np.where(z > _DEEP, 1 - hazard * (hazard + near), 1 / (deep * deep + 6))  # of the variance
    shrunk = np.minimum(shrunk, 1 - 1e-6)
    precision = (1 / shrunk - 1) / std**2
    told = (mean + std * hazard) / (shrunk * std**2) - mean / std**2
    return told / precision, np.sqrt(1 / precision)


def _works(encoded: Encoded, seen: Sequence[Seen]) -> Floats:
    """Probability that a plan runs at all, from the failures: a value that never worked takes the blame.

    Where each of a failed plan's values has worked in another plan, its family takes the blame.
    """
    works = np.ones(len(encoded.rows))
    failed = [one.place for one in seen if one.verdict == "failed"]
    if not failed:
        return works
    good = np.array([one.place for one in seen if one.verdict in {"measured", "out_of_memory"}], dtype=np.int64)
    for place in failed:
        worked = np.array(
            [(encoded.codes[good, c] == encoded.codes[place, c]).any() for c in range(encoded.codes.shape[1])]
        )
        if worked.all():
            works[encoded.family == encoded.family[place]] *= 0.3
        for column in np.flatnonzero(~worked):
            works[encoded.codes[:, column] == encoded.codes[place, column]] *= 0.2
    return works


def excluded(encoded: Encoded, seen: Sequence[Seen], limit_bytes: int, found: Needs | None = None) -> Bools:
    """Plans that were tried, or are known not to fit.

    That are the rows at or above those that broke the ceiling, and plans whose trace is so far above it that nothing
    that was measured speaks for them.
    """
    out = np.zeros(len(encoded.rows), dtype=bool)
    found = found or needed(encoded, seen, limit_bytes)
    if found is not None:
        mean, std = found.logarithms()
        out |= mean - _SURELY_STDS * std > math.log(limit_bytes)  # never where nothing was traced
    for one in seen:
        out[one.place] = True
        if one.verdict == "out_of_memory" or one.peak_bytes > limit_bytes:
            out |= (encoded.family == encoded.family[one.place]) & (encoded.rows >= encoded.rows[one.place])
    return out


def _known(params: Mapping[str, Any], encoded: Encoded) -> dict[str, Any]:
    """The parameters that are of the space; an Optuna user may have others beside them."""
    return {name: value for name, value in params.items() if name in encoded.names}


def observations(trials: Sequence[FrozenTrial], encoded: Encoded, limit_bytes: int) -> list[Seen]:
    """What a study's trials say; proposals that never ran, and trials that were interrupted, say nothing."""
    seen = []
    for trial in trials:
        kind = trial.user_attrs.get("kind")
        place = encoded.index.get(Plan(trial.user_attrs.get("plan") or _known(trial.params, encoded)))
        cut_short = trial.state == TrialState.FAIL and kind in {STARTED, "measured", "out_of_memory", "timed_out"}
        if place is None or kind == REJECTED or cut_short:
            continue
        excess = trial.constraints.get(CONSTRAINT)
        peak = float(trial.user_attrs.get("peak_bytes", 0.0 if excess is None else (1 + excess) * limit_bytes))
        if not trial.state.is_finished():
            seen.append(Seen(place=place, verdict="running"))
        elif trial.state == TrialState.COMPLETE and trial.value is not None and trial.value > 0:
            scatter = min(max(trial.user_attrs.get("relative_spread", 0.0) / 1.96, _LEAST_NOISE), _MOST_NOISE)
            noise = math.hypot(scatter, trial.user_attrs.get("disturbance", 0.0))
            needed = float(trial.user_attrs.get("needed_bytes", peak))
            seen.append(
                Seen(
                    place=place,
                    verdict="measured",
                    seconds=1 / trial.value,
                    peak_bytes=peak,
                    needed_bytes=needed,
                    noise=noise,
                )
            )
        elif trial.state == TrialState.PRUNED and excess is not None and excess > 0:
            on_device = trial.user_attrs.get("where", "device") == "device"
            seen.append(Seen(place=place, verdict="out_of_memory", peak_bytes=peak, on_device=on_device))
        else:
            verdict: Verdict = "timed_out" if trial.state == TrialState.PRUNED else "failed"
            seen.append(Seen(place=place, verdict=verdict))
    return seen
