"""The model of the peak memory of each plan, with and without traces.

With traces (:func:`traced_posterior`), the peak is a line in the traced bytes: its offset, its slope and the share that
fragmentation adds are learned from the trials. Without (:class:`PeakModel`), it is ``fixed + slope x rows``, where each
value of a plan may change both. :func:`constrain_within_families` then bounds either by what was measured in the same
family.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autofit.contract.trace import Ints
from autofit.costmodel.forecast import Forecast
from autofit.costmodel.tracing.timeline import Floats
from autofit.search.surrogate.features import BATCH_SPLIT, Features
from autofit.search.surrogate.gp import FixedFeatures, Kernel, predict
from autofit.search.surrogate.time_model import CURVE_STD, FAMILY_STD, LEVEL_STD, is_untraced
from autofit.space import Space

_GROWING_SHARE, _GROWING_SHARE_STD = 0.15, 1.5
"""Of the fixed bytes, what each row adds; and the standard deviation of its logarithm."""
_SLOPE_STD = 0.5
_MIN_STD_FACTOR = 0.7
_PRIOR_RESIDUALS = 2
"""The scatter is estimated as if so many residuals of the expected size had been seen before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakModel:
    """Peak memory as ``exp(fixed) + rows x exp(slope)``, both linear in the same latent variables.

    The latent variables have a standard normal prior: the level, the share that grows with the rows, and each value's
    effect on either part.

    Attributes:
        fixed, slope: What each latent variable adds to the logarithms, of shape ``(plans, latents)``.
        fixed_mean, slope_mean: The prior means of the logarithms.
        family: Of each plan.
        rows: The micro-batch of each plan.
    """

    fixed: Floats
    slope: Floats
    fixed_mean: Floats
    slope_mean: Floats
    family: Ints
    rows: Floats

    @property
    def latents(self) -> int:
        """The number of latent variables."""
        return int(self.fixed.shape[1])

    def subset(self, plans: Ints) -> PeakModel:
        """The same for some plans."""
        return dataclasses.replace(
            self,
            fixed=self.fixed[plans],
            slope=self.slope[plans],
            fixed_mean=self.fixed_mean[plans],
            slope_mean=self.slope_mean[plans],
            family=self.family[plans],
            rows=self.rows[plans],
        )

    def linearize(self, latents: Floats) -> tuple[Floats, Kernel]:
        """Each plan's logarithm of the peak bytes less its linear part, and the covariance of that part."""
        fixed = self.fixed_mean + self.fixed @ latents
        grown = self.slope_mean + self.slope @ latents + np.log(self.rows)
        total = np.logaddexp(fixed, grown)
        gradient = self.slope + np.exp(fixed - total)[:, None] * (self.fixed - self.slope)
        kernel = Kernel(
            features=gradient,
            family=self.family,
            rows=self.rows,
            family_std=FAMILY_STD,
            curve_std=CURVE_STD,
        )
        return total - gradient @ latents, kernel


def peak_model(space: Space, features: Features) -> PeakModel:
    """The model of the peaks by the techniques' priors alone."""
    count = len(features.rows)
    mean, zero, level = np.zeros(count), np.zeros(count), np.full(count, LEVEL_STD)
    for column, name in enumerate(features.names):
        if name not in BATCH_SPLIT:
            priors = [space.priors[name][value] for value in space.domains[name]]
            mean += np.array([prior.memory[0] for prior in priors])[features.codes[:, column]]
    fixed, slope = [level, zero], [level, np.full(count, _GROWING_SHARE_STD)]
    for (name, value), present in features.indicators.items():
        std = space.priors[name][value].memory[1]
        fixed += [present * std, zero]
        slope += [zero, present * math.hypot(std, _SLOPE_STD)]
    return PeakModel(
        fixed=np.column_stack(fixed),
        slope=np.column_stack(slope),
        fixed_mean=mean,
        slope_mean=mean + math.log(_GROWING_SHARE),
        family=features.family,
        rows=features.rows,
    )


# -- with traces --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeakPosterior:
    """The posterior of the peak of every plan that was traced; NaN for the others.

    Attributes:
        mean, std: Bytes.
        offset_bytes, slope, heap_share: What all plans have in common, ``offset + slope x traced + heap_share x
            activations``; the overhead of the kernels is added to it.
        scatter: Root mean square of the measurements' relative distance from that line.
        count: Measurements that it is based on.
    """

    mean: Floats
    std: Floats
    offset_bytes: float
    slope: float
    heap_share: float
    scatter: float
    count: int

    def log_moments(self) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithm of the bytes."""
        mean = np.maximum(self.mean, 1.0)
        return np.log(mean), self.std / mean


def residual_kernel(features: Features, forecast: Forecast) -> Kernel:
    """The covariance of the peaks around their line, in units of each plan's own standard deviation.

    First what all plans have in common: the offset, a share of the tensors, and the heap's fragmentation; then what a
    value adds: the code and the buffers of its library, and a share of the tensors.
    """
    prior, unit, traced = forecast.peak_prior, forecast.residual_std_bytes, np.nan_to_num(forecast.tensor_bytes)
    zero = np.zeros(len(features.rows))
    present = np.column_stack([zero, *features.indicators.values()])
    untraced = [column for column in features.indicators.values() if is_untraced(column, forecast)]
    columns = [
        (prior.heap_share_std * forecast.activation_bytes / unit)[:, None],
        (prior.value_bytes / unit)[:, None] * present,
        (prior.value_share * traced / unit)[:, None] * present,
        (forecast.approximate_std_bytes / unit)[:, None] * np.column_stack([zero, *untraced]),
    ]
    return Kernel(
        features=np.column_stack([prior.offset_std / unit, prior.slope_std * traced / unit]),
        family=features.family,
        rows=features.rows,
        family_std=0.8,
        curve_std=0.6,
        fixed=FixedFeatures.of(np.column_stack(columns)),
    )


def traced_posterior(
    forecast: Forecast, kernel: Kernel, *, observed: Ints, peaks: Floats, noise: Floats
) -> PeakPosterior:
    """The posterior of all peaks, from their traces and from those that were measured.

    A Gaussian regression (Rasmussen and Williams, 2.1) around a line in the traced bytes, in units of each plan's own
    standard deviation. Measurements that scatter more than the prior says widen all standard deviations.

    Args:
        forecast: What the traces say.
        kernel: See :func:`residual_kernel`.
        observed: Indices of the observed plans; those that were not traced are left out.
        peaks: Their peak bytes.
        noise: Standard deviation of each, in the same units.
    """
    prior = forecast.peak_prior
    traced = np.nan_to_num(forecast.tensor_bytes)
    known = ~np.isnan(forecast.tensor_bytes)
    observed, peaks, noise = observed[known[observed]], peaks[known[observed]], noise[known[observed]]
    unit = forecast.residual_std_bytes
    line = np.nan_to_num(forecast.device_bytes)
    values = (peaks - line[observed]) / unit[observed]
    mean, std = predict(kernel, np.zeros(len(traced)), observed=observed, values=values, noise=noise)
    expected = np.array([prior.offset_bytes, prior.slope, prior.heap_share])
    common, std_factor, scatter = expected, 1.0, 0.0
    if len(observed):
        own = kernel.subset(observed)
        covariance = own.covariance(np.arange(len(observed))) + np.diag(noise**2)
        dual = np.asarray(np.linalg.solve(covariance, values), dtype=np.float64)
        learned = own.feature_weights(dual)[: len(expected)]
        common = expected + learned * [prior.offset_std, prior.slope_std, prior.heap_share_std]
        variance = (_PRIOR_RESIDUALS + float(values @ dual)) / (_PRIOR_RESIDUALS + len(observed))
        std_factor = max(_MIN_STD_FACTOR, math.sqrt(variance))
        amounts = np.column_stack([np.ones(len(observed)), traced[observed], forecast.activation_bytes[observed]])
        on_line = line[observed] + amounts @ (common - expected)
        scatter = float(np.sqrt(np.mean((on_line / peaks - 1) ** 2)))
    untraced = np.where(known, 0.0, np.nan)
    return PeakPosterior(
        mean=line + mean * unit + untraced,
        std=std_factor * std * unit + untraced,
        offset_bytes=float(common[0]),
        slope=float(common[1]),
        heap_share=float(common[2]),
        scatter=scatter,
        count=len(observed),
    )


# -- within a family ----------------------------------------------------------------------------------------------


def constrain_within_families(
    features: Features, mean: Floats, std: Floats, peaks: Mapping[int, float]
) -> tuple[Floats, Floats]:
    """Predictions that agree with what was measured of plans of the same family.

    Inside a family peak memory is ``fixed + slope x rows`` with nothing below zero. One measured point bounds
    the others: the peak neither falls with the rows nor grows faster than they do. Two points make a line. It is
    trusted to 2 % between them and to 4 % more for each factor e outside: the peak may lie in another phase of the
    step there, where it grows faster.

    Args:
        features: Of the space.
        mean: Predicted logarithm of the peak bytes of each plan.
        std: Its standard deviation.
        peaks: Measured peak bytes, by the plan's index.
    """
    mean, std = mean.copy(), std.copy()
    families: dict[int, dict[float, float]] = {}
    for plan, peak in peaks.items():
        points = families.setdefault(int(features.family[plan]), {})
        points[features.rows[plan]] = max(peak, points.get(features.rows[plan], 0.0))
    for family, points in families.items():
        members = np.flatnonzero(features.family == family)
        at = np.array(sorted(points))
        bytes_at = np.array([points[row] for row in at])
        rows = features.rows[members]
        nearest = np.abs(np.log(rows)[:, None] - np.log(at)[None, :]).argmin(axis=1)
        ratio = np.log(rows / at[nearest])
        low = np.log(bytes_at[nearest]) + np.minimum(ratio, 0)
        high = np.log(bytes_at[nearest]) + np.maximum(ratio, 0)
        new_mean = np.clip(mean[members], low, high)
        new_std = np.minimum(std[members], 0.5 * (high - low) + 0.01)
        if len(at) > 1:
            slope, fixed = _line(at, bytes_at)
            beyond = np.where((rows > at[-1]) | (rows < at[0]), np.abs(ratio), 0.0)
            line_std = np.where(np.isin(rows, at), 0.005, 0.02) + 0.04 * beyond
            better = line_std < new_std
            new_mean = np.where(better, np.clip(np.log(fixed + slope * rows), low, high), new_mean)
            new_std = np.where(better, line_std, new_std)
        mean[members], std[members] = new_mean, new_std
    return mean, std


def _line(at: Floats, values: Floats) -> tuple[float, float]:
    """Slope and fixed part, neither below zero, through the two points with the most rows."""
    slope = max(0.0, float((values[-1] - values[-2]) / (at[-1] - at[-2])))
    fixed = max(0.0, float(values[-1] - slope * at[-1]))
    return (slope, fixed) if fixed else (float(values[-1] / at[-1]), 0.0)
