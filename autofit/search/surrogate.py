"""What a few measured plans say about all others: two Bayesian regressions, one of time and one of memory.

Both work on logarithms, where factors add up: the seconds per sample and the peak bytes of a plan are the prior's
mean (the sum of the techniques' own :class:`~autofit.contract.technique.Prior`) plus a residual. The residual is a
Gaussian process whose covariance is a sum of parts that a person can name:

=====================  ==============================================================================
level                  what all plans share: model, device, sequence; hardly known beforehand
a value's own effect   one indicator per value that is not plain, as uncertain as its prior says
micro-batch            smooth curves of the physics: ``t1 + t0 / rows`` and ``fixed + slope x rows``
value x micro-batch    a value may change how time and memory depend on the rows
family                 plans that differ by nothing but the rows share what does not add up
=====================  ==============================================================================

Known error: effects that depend on *pairs* of values are seen by the family part alone, so that an unmeasured
family is predicted as if effects added up. Source: Rasmussen and Williams, "Gaussian Processes for Machine
Learning" (2006), algorithm 2.1; the sum of kernels is their section 2.7.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autofit.contract.plan import Plan, Value
from autofit.contract.trace import Ints
from autofit.costmodel.forecast import Forecast
from autofit.costmodel.timeline import Floats
from autofit.registry import techniques
from autofit.space import Space

ROWS = "micro_batch"
FOLLOWS = "accumulation"
"""Given the rows, the global batch leaves one accumulation: it is no degree of freedom of its own."""

_LEVEL_STD = 10.0
_GROWS, _GROWS_STD = 0.15, 1.5
_SLOPE_STD = 0.5
_ROUNDS = 12
_LEAST_WIDENED = 0.7
_LEVELS_ROWS = (1.0, 8.0, 64.0)
_SCALE_STD = {True: 0.5, False: 2.0}
_RATE_STD = {True: 0.4, False: 1.0}
"""Of the logarithms of a machine's pace and of each of its rates, where those were timed or its card is in the
catalogue, and where not."""
_EFFECT_STD = 0.15
"""Of the logarithm of what a value costs beyond what its trace counts."""


def _squares(columns: Floats) -> Floats:
    """Of each row, the sum."""
    return np.asarray(np.einsum("ij,ij->i", columns, columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """Columns of features, one row per plan, and of each row the sum of squares."""

    columns: Floats
    squares: Floats

    @classmethod
    def of(cls, columns: Floats) -> Steady:
        """With the squares summed."""
        return cls(columns=columns, squares=_squares(columns))

    def among(self, places: Ints) -> Steady:
        """Of some plans only."""
        return Steady(columns=self.columns[places], squares=self.squares[places])


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The covariance of one logarithm's residual.

    Attributes:
        features: One row per plan, each column scaled to a prior standard deviation of one.
        family: Of each plan, see :class:`Encoded`.
        rows: Of each plan.
        family_std: Standard deviation of what a family has beyond the sum of its values' effects.
        curve_std: The same for what changes with the rows inside a family.
        steady: More columns of features, which are the same at every look: not copied, and their squares summed once.
    """

    features: Floats
    family: Ints
    rows: Floats
    family_std: float
    curve_std: float
    steady: Steady | None = None

    def among(self, places: Ints) -> Kernel:
        """The same of some plans only."""
        return dataclasses.replace(
            self,
            features=self.features[places],
            family=self.family[places],
            rows=self.rows[places],
            steady=self.steady and self.steady.among(places),
        )

    def own(self) -> Floats:
        """Prior variance of each plan."""
        squares = _squares(self.features) + (self.family_std**2 + self.curve_std**2)
        return squares if self.steady is None else squares + self.steady.squares

    def weigh(self, weights: Floats) -> Floats:
        """The unknowns behind the features, given the weight of each plan."""
        found: Floats = self.features.T @ weights
        return found if self.steady is None else np.concatenate([found, self.steady.columns.T @ weights])

    def between(self, seen: Ints) -> Floats:
        """Prior covariance of some plans, a row each, with every plan."""
        cross = self.features[seen] @ self.features.T
        if self.steady is not None:
            cross += self.steady.columns[seen] @ self.steady.columns.T
        steps = np.log2(self.rows)
        for place, plan in enumerate(seen):
            kin = np.flatnonzero(self.family == self.family[plan])
            closeness = np.exp(-0.5 * ((steps[kin] - steps[plan]) / 2.0) ** 2)
            cross[place, kin] += self.family_std**2 + self.curve_std**2 * closeness
        return cross


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Peak memory as ``exp(fixed) + rows x exp(slope)``, both linear in the same unknowns.

    The unknowns are standard normal beforehand: the level, the share that grows with the rows, and each value's
    effect on either part.
    """

    fixed: Floats
    slope: Floats
    fixed_mean: Floats
    slope_mean: Floats
    family: Ints
    rows: Floats
    family_std: float
    curve_std: float

    @property
    def unknowns(self) -> int:
        """How many."""
        return int(self.fixed.shape[1])

    def among(self, places: Ints) -> Shape:
        """The same of some plans only."""
        return dataclasses.replace(
            self,
            fixed=self.fixed[places],
            slope=self.slope[places],
            fixed_mean=self.fixed_mean[places],
            slope_mean=self.slope_mean[places],
            family=self.family[places],
            rows=self.rows[places],
        )

    def at(self, unknowns: Floats) -> tuple[Floats, Kernel]:
        """Each plan's logarithm of the peak bytes less its linear part, and the covariance of that part."""
        fixed = self.fixed_mean + self.fixed @ unknowns
        grown = self.slope_mean + self.slope @ unknowns + np.log(self.rows)
        total = np.logaddexp(fixed, grown)
        gradient = self.slope + np.exp(fixed - total)[:, None] * (self.fixed - self.slope)
        kernel = Kernel(
            features=gradient,
            family=self.family,
            rows=self.rows,
            family_std=self.family_std,
            curve_std=self.curve_std,
        )
        return total - gradient @ unknowns, kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds of a sample as a sum of what the trace counted, each part at a rate of its own.

    The unknowns are standard normal beforehand: the logarithm of each rate, and of each value's own effect. In the
    logarithm of the sum a rate counts as much as its share of the seconds.

    Attributes:
        parts: Logarithms of the seconds of each part at its expected rate, a row for each plan; of nothing, -inf.
        parts_std: How well each rate is known.
        effects: One row per plan, each column scaled to a prior standard deviation of one.
        effects_mean: Expected sum of the effects.
    """

    parts: Floats
    parts_std: Floats
    effects: Steady
    effects_mean: Floats
    family: Ints
    rows: Floats
    family_std: float
    curve_std: float

    @property
    def unknowns(self) -> int:
        """How many."""
        return int(self.parts.shape[1] + self.effects.columns.shape[1])

    def among(self, places: Ints) -> Pace:
        """The same of some plans only."""
        return dataclasses.replace(
            self,
            parts=self.parts[places],
            effects=self.effects.among(places),
            effects_mean=self.effects_mean[places],
            family=self.family[places],
            rows=self.rows[places],
        )

    def at(self, unknowns: Floats) -> tuple[Floats, Kernel]:
        """Each plan's logarithm of the seconds less its linear part, and the covariance of that part."""
        rates = unknowns[: self.parts.shape[1]]
        moved = self.parts + self.parts_std * rates
        total = np.logaddexp.reduce(moved, axis=1)
        shares = np.exp(moved - total[:, None]) * self.parts_std
        kernel = Kernel(
            features=shares,
            family=self.family,
            rows=self.rows,
            family_std=self.family_std,
            curve_std=self.curve_std,
            steady=self.effects,
        )
        return total + self.effects_mean - shares @ rates, kernel  # the effects are linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A space as numbers, computed once: one entry per plan, in the order of ``space.plans``.

    Attributes:
        names: The techniques.
        index: Where a plan stands.
        codes: The position of each value in its domain, a column per technique.
        rows: The micro-batch.
        family: A number for all else but micro-batch and accumulation.
        extras: How many values are not plain, micro-batch and accumulation apart.
        time_mean: Prior mean of the logarithm of the seconds per sample, up to a constant.
        time: The seconds of a sample: by what the traces counted, or by the techniques' expectations alone.
        memory: The peak bytes.
        indicators: One column for each value that is not plain: 1 where a plan has it.
        untraced: The same for the values that no traced plan has, of those that are forecast.
        forecast: What the traces say of the peak bytes, where there are any.
        beyond: The covariance of the peaks around the line that the traces make of them.
    """

    names: tuple[str, ...]
    index: Mapping[Plan, int]
    codes: Ints
    rows: Floats
    family: Ints
    extras: Ints
    time_mean: Floats
    time: Kernel | Pace
    memory: Shape
    indicators: Floats
    untraced: Floats
    forecast: Forecast | None = None
    beyond: Kernel | None = None


def encode(space: Space, forecast: Forecast | None = None) -> Encoded:
    """The space as numbers; a few seconds for 100,000 plans."""
    plain = {one.name: one.baseline for one in techniques()}
    names = list(space.domains)
    places = [{value: place for place, value in enumerate(space.domains[name])} for name in names]
    codes = np.array(
        [[place[plan[name]] for name, place in zip(names, places, strict=True)] for plan in space.plans],
        dtype=np.int64,
    )
    count = len(space.plans)
    rows = np.ones(count)
    if ROWS in names:
        rows = np.array([float(v) for v in space.domains[ROWS]])[codes[:, names.index(ROWS)]]
    time_mean, memory_mean, extras = np.zeros(count), np.zeros(count), np.zeros(count, dtype=np.int64)
    family = np.zeros(count, dtype=np.int64)
    time_columns: list[Floats] = []
    nothing = np.zeros(count)
    level = np.full(count, _LEVEL_STD)
    on_fixed = [level, nothing]
    on_slope = [level, np.full(count, _GROWS_STD)]
    bent = np.log((1 + 8 / rows) / 9)
    effects: dict[tuple[str, Value], Floats] = {}
    for column, name in enumerate(names):
        priors = [space.priors[name][value] for value in space.domains[name]]
        time_mean += np.array([prior.time[0] for prior in priors])[codes[:, column]]
        if name in {ROWS, FOLLOWS}:
            continue
        memory_mean += np.array([prior.memory[0] for prior in priors])[codes[:, column]]
        family = family * len(priors) + codes[:, column]
        for place, value in enumerate(space.domains[name]):
            if value == plain.get(name, space.domains[name][0]):
                continue
            here = (codes[:, column] == place).astype(float)
            extras += codes[:, column] == place
            effects[name, value] = here
            time_columns += [here * priors[place].time[1], here * bent * 0.1]
            memory_std = priors[place].memory[1]
            on_fixed += [here * memory_std, nothing]
            on_slope += [nothing, here * math.hypot(memory_std, _SLOPE_STD)]
    time_rows = [0.3 * np.log((1 + k / rows) / (1 + k)) for k in _LEVELS_ROWS]
    family = np.unique(family, return_inverse=True)[1].astype(np.int64)
    index = {plan: place for place, plan in enumerate(space.plans)}
    time: Kernel | Pace = Kernel(
        features=np.column_stack([level, *time_rows, *time_columns]),
        family=family,
        rows=rows,
        family_std=0.06,
        curve_std=0.04,
    )
    if forecast is not None and not np.isnan(forecast.work).all():
        time = _pace(space, forecast, effects, index, rows, family)
        time_mean = time.at(np.zeros(time.unknowns))[0]
    encoded = Encoded(
        names=tuple(names),
        index=index,
        codes=codes,
        rows=rows,
        family=family,
        extras=extras,
        time_mean=time_mean,
        time=time,
        memory=Shape(
            fixed=np.column_stack(on_fixed),
            slope=np.column_stack(on_slope),
            fixed_mean=memory_mean,
            slope_mean=memory_mean + math.log(_GROWS),
            family=family,
            rows=rows,
            family_std=0.06,
            curve_std=0.04,
        ),
        indicators=np.column_stack([nothing, *effects.values()]),
        untraced=np.column_stack([nothing, *(here for here in effects.values() if _is_rough(here, forecast))]),
        forecast=forecast,
    )
    return encoded if forecast is None else dataclasses.replace(encoded, beyond=_beyond(forecast, encoded))


def _pace(  # noqa: PLR0917 - what encode has found
    space: Space,
    forecast: Forecast,
    effects: Mapping[tuple[str, Value], Floats],
    index: Mapping[Plan, int],
    rows: Floats,
    family: Ints,
) -> Pace:
    """The seconds by what the traces counted.

    A value that they tell from the plain one needs no expectation of its own.
    Where a plan was not traced at all it counts as the one in the middle.
    """
    work = forecast.work * forecast.nominal
    unknown = np.isnan(work).any(axis=1)
    work[unknown] = np.median(work[~unknown], axis=0)
    counted = work[:, work.max(axis=0) > 0]
    plain = {one.name: one.baseline for one in techniques()}
    mean, columns = np.zeros(len(rows)), [np.full(len(rows), _SCALE_STD[forecast.timed or forecast.known_card])]
    bent = np.log((1 + 8 / rows) / 9)
    for (name, value), here in effects.items():
        expected, std = space.priors[name][value].time
        if _shows(space, counted, index, (name, value, plain.get(name))):
            expected, std = 0.0, std if _is_rough(here, forecast) else _EFFECT_STD
        mean += here * expected
        columns += [here * std, here * bent * 0.1]
    return Pace(
        parts=np.log(np.maximum(counted, 1e-300)),
        parts_std=np.full(counted.shape[1], _RATE_STD[forecast.timed or forecast.known_card]),
        effects=Steady.of(np.column_stack(columns)),
        effects_mean=mean,
        family=family,
        rows=rows,
        family_std=0.06,
        curve_std=0.04,
    )


def _is_rough(here: Floats, forecast: Forecast | None) -> bool:
    """Whether every plan that has a value is one that can't be traced, and is forecast all the same."""
    return forecast is not None and bool(forecast.rough[here > 0].all()) and bool(here.any())


def _shows(space: Space, work: Floats, index: Mapping[Plan, int], asked: tuple[str, Value, Value | None]) -> bool:
    """Whether the traces tell a technique's value from its plain one."""
    name, value, plain = asked
    if plain is None:
        return False
    for place, plan in enumerate(space.plans):
        if plan[name] == value:
            other = index.get(plan.replaced(**{name: plain}))
            if other is not None:
                return not np.allclose(work[place], work[other], rtol=1e-6)
    return False


def predict(kernel: Kernel, prior_mean: Floats, *, seen: Ints, values: Floats, noise: Floats) -> tuple[Floats, Floats]:
    """Posterior mean and standard deviation of every plan.

    Args:
        kernel: Covariance of the residual.
        prior_mean: What was expected of each plan.
        seen: Which plans were observed; one may stand there more than once.
        values: What was observed, as logarithms.
        noise: Standard deviation of each observation.
    """
    if len(seen) == 0:
        return prior_mean, np.sqrt(kernel.own())
    cross = kernel.between(seen)
    lower = np.linalg.cholesky(cross[:, seen] + np.diag(noise**2))
    # the inverse of a small, well-kept triangle: numpy has no triangular solve, and a general one is slower
    whitened = np.linalg.inv(lower) @ cross
    residual = np.linalg.solve(lower, values - prior_mean[seen])
    variance = kernel.own() - np.einsum("ij,ij->j", whitened, whitened)
    return prior_mean + whitened.T @ residual, np.sqrt(np.maximum(variance, 1e-10))


def predict_sum(shape: Shape | Pace, *, seen: Ints, values: Floats, noise: Floats) -> tuple[Floats, Floats]:
    """Posterior mean and standard deviation of the logarithm of every plan's sum: of its bytes, or of its seconds.

    A sum of exponentials is linearized where the observations say that it stands (Gauss and Newton, damped), and is
    then a regression like any other.

    Args:
        shape: How the parts of the sum depend on the unknowns.
        seen: Which plans were observed.
        values: The logarithms of what was observed.
        noise: Standard deviation of each observation.
    """
    observed, every = shape.among(seen), np.arange(len(seen))
    unknowns = np.zeros(shape.unknowns)
    for turn in range(_ROUNDS if len(seen) else 0):
        offset, kernel = observed.at(unknowns)
        covariance = kernel.between(every) + np.diag(noise**2)
        found = kernel.weigh(np.asarray(np.linalg.solve(covariance, values - offset), dtype=np.float64))
        unknowns = found if turn == 0 else 0.5 * (unknowns + found)
    offset, kernel = shape.at(unknowns)
    return predict(kernel, offset, seen=seen, values=values, noise=noise)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Needs:
    """What is believed of the peak of every plan that was traced; NaN for the others.

    Attributes:
        mean, std: Bytes.
        offset_bytes, slope, heap_share: What all plans have in common, ``offset + slope x traced + heap_share x
            activations``; what their kernels take is beside it.
        scatter: How far the measurements lie around that line, as a share of them.
        count: Measurements that it stands on.
    """

    mean: Floats
    std: Floats
    offset_bytes: float
    slope: float
    heap_share: float
    scatter: float
    count: int

    def logarithms(self) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithm of the bytes."""
        mean = np.maximum(self.mean, 1.0)
        return np.log(mean), self.std / mean


def _beyond(forecast: Forecast, encoded: Encoded) -> Kernel:
    """The covariance of the peaks around their line, in units of each plan's own deviation.

    First what all plans have in common: what lies beside the tensors, a share of them, and what the heap keeps of the
    activations; then what a value brings: the code and the buffers of its library, and a share of the tensors.
    """
    beside, unit, traced = forecast.beside, forecast.own_bytes, np.nan_to_num(forecast.tensor_bytes)
    steady = [
        (beside.heap_share_std * forecast.activation_bytes / unit)[:, None],
        (beside.value_bytes / unit)[:, None] * encoded.indicators,
        (beside.value_share * traced / unit)[:, None] * encoded.indicators,
        (forecast.rough_bytes / unit)[:, None] * encoded.untraced,
    ]
    return Kernel(
        features=np.column_stack([beside.offset_std / unit, beside.slope_std * traced / unit]),
        family=encoded.family,
        rows=encoded.rows,
        family_std=0.8,
        curve_std=0.6,
        steady=Steady.of(np.column_stack(steady)),
    )


def needs(encoded: Encoded, *, seen: Ints, peaks: Floats, noise: Floats) -> Needs:
    """The peaks of all plans, from their traces and from those that were measured.

    A regression with normal priors (Rasmussen and Williams, 2.1) around a line in the traced bytes, in units of a
    plan's own deviation. Measurements that scatter more than was believed widen all of it.

    Args:
        encoded: The space, with a forecast.
        seen: Which plans were observed; those that were not traced are left out.
        peaks: Their peak bytes.
        noise: Standard deviation of each, in the same units.
    """
    forecast, kernel = encoded.forecast, encoded.beyond
    assert forecast is not None
    assert kernel is not None
    beside = forecast.beside
    traced = np.nan_to_num(forecast.tensor_bytes)
    known = ~np.isnan(forecast.tensor_bytes)
    seen, peaks, noise = seen[known[seen]], peaks[known[seen]], noise[known[seen]]
    unit = forecast.own_bytes
    line = np.nan_to_num(forecast.device_bytes)
    values = (peaks - line[seen]) / unit[seen]
    mean, std = predict(kernel, np.zeros(len(traced)), seen=seen, values=values, noise=noise)
    expected = np.array([beside.offset_bytes, beside.slope, beside.heap_share])
    common, widened, scatter = expected, 1.0, 0.0
    if len(seen):
        observed = kernel.among(seen)
        covariance = observed.between(np.arange(len(seen))) + np.diag(noise**2)
        weights = np.asarray(np.linalg.solve(covariance, values), dtype=np.float64)
        learned = observed.weigh(weights)[: len(expected)]
        common = expected + learned * [beside.offset_std, beside.slope_std, beside.heap_share_std]
        # as if two had been seen before that scattered as they are believed to
        widened = max(_LEAST_WIDENED, math.sqrt((2 + float(values @ weights)) / (2 + len(seen))))
        amounts = np.column_stack([np.ones(len(seen)), traced[seen], forecast.activation_bytes[seen]])
        on_line = line[seen] + amounts @ (common - expected)
        scatter = float(np.sqrt(np.mean((on_line / peaks - 1) ** 2)))
    nothing = np.where(known, 0.0, np.nan)
    return Needs(
        mean=line + mean * unit + nothing,
        std=widened * std * unit + nothing,
        offset_bytes=float(common[0]),
        slope=float(common[1]),
        heap_share=float(common[2]),
        scatter=scatter,
        count=len(seen),
    )


def sharpen(encoded: Encoded, mean: Floats, std: Floats, peaks: Mapping[int, float]) -> tuple[Floats, Floats]:
    """Memory predictions held to physics within the families that were measured.

    Inside a family peak memory is ``fixed + slope x rows`` with nothing below zero. One measured point bounds
    the others: it neither falls with the rows nor grows faster than they do. Two make a line. It is trusted to
    2 % between them and to 4 % more for each factor e outside: the peak may lie in another phase of the step
    there, where it grows faster.

    Args:
        encoded: The space.
        mean: Predicted logarithm of the peak bytes of each plan.
        std: Its standard deviation.
        peaks: Measured peak bytes by plan.
    """
    mean, std = mean.copy(), std.copy()
    families: dict[int, dict[float, float]] = {}
    for plan, peak in peaks.items():
        points = families.setdefault(int(encoded.family[plan]), {})
        points[encoded.rows[plan]] = max(peak, points.get(encoded.rows[plan], 0.0))
    for family, points in families.items():
        kin = np.flatnonzero(encoded.family == family)
        at = np.array(sorted(points))
        bytes_at = np.array([points[row] for row in at])
        rows = encoded.rows[kin]
        nearest = np.abs(np.log(rows)[:, None] - np.log(at)[None, :]).argmin(axis=1)
        ratio = np.log(rows / at[nearest])
        low = np.log(bytes_at[nearest]) + np.minimum(ratio, 0)
        high = np.log(bytes_at[nearest]) + np.maximum(ratio, 0)
        kin_mean = np.clip(mean[kin], low, high)
        kin_std = np.minimum(std[kin], 0.5 * (high - low) + 0.01)
        if len(at) > 1:
            slope, fixed = _line(at, bytes_at)
            beyond = np.where((rows > at[-1]) | (rows < at[0]), np.abs(ratio), 0.0)
            line_std = np.where(np.isin(rows, at), 0.005, 0.02) + 0.04 * beyond
            better = line_std < kin_std
            kin_mean = np.where(better, np.clip(np.log(fixed + slope * rows), low, high), kin_mean)
            kin_std = np.where(better, line_std, kin_std)
        mean[kin], std[kin] = kin_mean, kin_std
    return mean, std


def _line(at: Floats, values: Floats) -> tuple[float, float]:
    """Slope and fixed part, neither below zero, through the two points that stand highest."""
    slope = max(0.0, float((values[-1] - values[-2]) / (at[-1] - at[-2])))
    fixed = max(0.0, float(values[-1] - slope * at[-1]))
    return (slope, fixed) if fixed else (float(values[-1] / at[-1]), 0.0)


def gain(mean: Floats, std: Floats, best: float) -> Floats:
    """Expected gain of throughput over the best, as a share of it.

    ``mean`` and ``std`` are of the logarithm of the seconds per sample, ``best`` is that of the best plan: the
    mean of ``max(exp(best - y) - 1, 0)``. Jones, Schonlau and Welch (1998), for a log-normal objective.
    """
    ahead = best - mean
    return np.maximum(
        np.exp(np.minimum(ahead + std**2 / 2, 50.0)) * below((ahead + std**2) / std) - below(ahead / std), 0.0
    )


def below(z: Floats) -> Floats:
    """The standard normal's distribution function, to 1e-7.

    Abramowitz and Stegun 26.2.17; numpy has no error function, and scipy is not needed for anything else.
    """
    t = 1 / (1 + 0.2316419 * np.abs(z))
    terms = (1.330274429, -1.821255978, 1.781477937, -0.356563782, 0.319381530)
    series = functools.reduce(lambda total, term: total * t + term, terms, np.zeros_like(t)) * t
    tail = np.exp(-0.5 * np.minimum(z * z, 1400.0)) / math.sqrt(2 * math.pi) * series
    return np.where(z >= 0, 1 - tail, tail)
