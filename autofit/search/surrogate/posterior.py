"""From the trials to the posterior of every plan: its time, its peak memory, whether it fits and whether it runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autofit.costmodel.forecast import Forecast
from autofit.costmodel.tracing.timeline import Bools, Floats
from autofit.search.surrogate.features import Features, features_of
from autofit.search.surrogate.gp import Kernel, normal_cdf, predict, predict_log_sum, truncated_normal_update
from autofit.search.surrogate.observation import MIN_NOISE, Observation, plans_of, subsample, undisturbed
from autofit.search.surrogate.peak_model import (
    PeakModel,
    PeakPosterior,
    constrain_within_families,
    peak_model,
    residual_kernel,
    traced_posterior,
)
from autofit.search.surrogate.time_model import TimeModel, time_model
from autofit.space import Space

_RUN_NOISE = 0.4
"""Between two measurements of one plan's peak, in its own standard deviations."""
_EXCLUDE_STDS = 3.0
_PRIOR_RESIDUALS = 2.0
"""Of the times, see :func:`~autofit.search.surrogate.gp.predict`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """The models of a space's plans, before any observation.

    Attributes:
        features: The space as arrays.
        time_mean: Prior mean of the logarithm of the seconds per sample, up to a constant.
        time: The model of the seconds of a sample: by what the traces counted, or by the techniques' priors alone.
        peak: The model of the peak bytes by the techniques' priors.
        forecast: What the traces say of the peak bytes, where there are any.
        peak_residual: The covariance of the peaks around the line that the traces make of them.
    """

    features: Features
    time_mean: Floats
    time: Kernel | TimeModel
    peak: PeakModel
    forecast: Forecast | None = None
    peak_residual: Kernel | None = None


def surrogate(space: Space, forecast: Forecast | None = None) -> Surrogate:
    """The models of a space; a few seconds for 100,000 plans."""
    features = features_of(space)
    time_mean, time = time_model(space, features, forecast)
    return Surrogate(
        features=features,
        time_mean=time_mean,
        time=time,
        peak=peak_model(space, features),
        forecast=forecast,
        peak_residual=None if forecast is None else residual_kernel(features, forecast),
    )


# -- the posterior ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """The posterior of every plan.

    Attributes:
        time: Mean of the logarithm of the seconds per sample.
        time_std: Its standard deviation.
        peak: Mean of the logarithm of the peak bytes.
        peak_std: Its standard deviation.
        fits: Probability that the peak stays below the ceiling.
        runs: Probability that the plan runs at all.
    """

    time: Floats
    time_std: Floats
    peak: Floats
    peak_std: Floats
    fits: Floats
    runs: Floats


def posterior(
    model: Surrogate, observed: Sequence[Observation], limit_bytes: int, peaks: PeakPosterior | None = None
) -> Posterior:
    """The posterior of every plan; ``peaks`` is what :func:`peak_posterior` gave, where it is known already."""
    time, time_std = _time(model, observed)
    peak, peak_std = _peak(model, observed, limit_bytes, peaks or peak_posterior(model, observed, limit_bytes))
    return Posterior(
        time=time,
        time_std=time_std,
        peak=peak,
        peak_std=peak_std,
        fits=normal_cdf((math.log(limit_bytes) - peak) / peak_std),
        runs=_run_probability(model.features, observed),
    )


def _out_of_memory(observed: Sequence[Observation]) -> Sequence[Observation]:
    """Those for which the device's memory did not suffice."""
    return subsample([one for one in observed if one.result == "out_of_memory" and one.on_device])


def _time(model: Surrogate, observed: Sequence[Observation]) -> tuple[Floats, Floats]:
    """A plan that timed out counts as twice as slow as the slowest that was measured, with a std of one half."""
    measured = subsample(undisturbed([one for one in observed if one.result == "measured"]))
    late = subsample([one for one in observed if one.result == "timed_out"] if measured else [])
    values = [math.log(one.seconds) for one in measured]
    plans = plans_of([*measured, *late])
    seconds = np.array(values + [max(values, default=0.0) + math.log(2)] * len(late))
    noise = np.array([one.noise for one in measured] + [0.5] * len(late))
    if isinstance(model.time, TimeModel):
        return predict_log_sum(
            model.time, observed=plans, values=seconds, noise=noise, prior_residuals=_PRIOR_RESIDUALS
        )
    return predict(model.time, model.time_mean, observed=plans, values=seconds, noise=noise)


def _peak(
    model: Surrogate, observed: Sequence[Observation], limit_bytes: int, peaks: PeakPosterior | None
) -> tuple[Floats, Floats]:
    """By the traces and what was learned of them; by the techniques' priors where nothing was traced."""
    if peaks is None:
        mean, std = _untraced_peak(model, observed, limit_bytes)
    else:
        mean, std = peaks.log_moments()
        if (untraced := np.isnan(mean)).any():
            mean, std = np.where(untraced, _untraced_peak(model, observed, limit_bytes), (mean, std))
    measured = {one.plan: one.peak_bytes for one in observed if one.result == "measured" and one.peak_bytes > 0}
    mean, std = constrain_within_families(model.features, mean, std, measured)
    if model.forecast is not None:  # one measurement scatters, and so will the next
        std = np.maximum(std, 0.5 * model.forecast.residual_std_bytes / np.exp(mean))
    return mean, std


def _untraced_peak(model: Surrogate, observed: Sequence[Observation], limit_bytes: int) -> tuple[Floats, Floats]:
    """An out-of-memory is a censored observation: 15 % above the ceiling at least, or where it was expected."""
    measured = subsample([one for one in observed if one.result == "measured" and one.peak_bytes > 0])
    broke = _out_of_memory(observed)
    plans = plans_of(measured)
    values = np.log(np.array([one.peak_bytes for one in measured], dtype=float))
    noise = np.full(len(measured), MIN_NOISE)
    if broke:
        censored = plans_of(broke)
        least = np.log([max(one.peak_bytes, 1.15 * limit_bytes) for one in broke])
        if measured:
            both, known = model.peak.subset(np.concatenate([plans, censored])), np.arange(len(plans))
            expected, _ = predict_log_sum(both, observed=known, values=values, noise=noise)
            least = np.maximum(least, expected[len(plans) :])
        plans, values = np.concatenate([plans, censored]), np.concatenate([values, least])
        noise = np.concatenate([noise, np.full(len(broke), 0.2)])
    return predict_log_sum(model.peak, observed=plans, values=values, noise=noise)


def peak_posterior(model: Surrogate, observed: Sequence[Observation], limit_bytes: int) -> PeakPosterior | None:
    """The posterior of the peaks of the plans that were traced; ``None`` where there are no traces.

    A plan that ran out of memory is an observation that its peak is above the ceiling, and no more than that.
    """
    forecast, kernel = model.forecast, model.peak_residual
    if forecast is None or kernel is None:
        return None
    measured = subsample([one for one in observed if one.result == "measured" and one.needed_bytes > 0])
    broke = _out_of_memory(observed)
    plans = plans_of(measured)
    peaks = np.array([one.needed_bytes for one in measured], dtype=float)
    noise = np.full(len(measured), _RUN_NOISE)
    found = traced_posterior(forecast, kernel, observed=plans, peaks=peaks, noise=noise)
    if not broke:
        return found
    censored = plans_of(broke)
    censored = censored[~np.isnan(found.mean[censored])]
    beyond, scatter = truncated_normal_update(found.mean[censored], found.std[censored], float(limit_bytes))
    both = traced_posterior(
        forecast,
        kernel,
        observed=np.concatenate([plans, censored]),
        peaks=np.concatenate([peaks, beyond]),
        noise=np.concatenate([noise, scatter / forecast.residual_std_bytes[censored]]),
    )
    return dataclasses.replace(both, scatter=found.scatter, count=found.count)


def _run_probability(features: Features, observed: Sequence[Observation]) -> Floats:
    """Probability that a plan runs at all, from the failures: a value that never worked is taken as the cause.

    Where each of a failed plan's values has worked in another plan, its family is taken as the cause.
    """
    runs = np.ones(len(features.rows))
    failed = [one.plan for one in observed if one.result == "failed"]
    if not failed:
        return runs
    good = plans_of([one for one in observed if one.result in {"measured", "out_of_memory"}])
    for plan in failed:
        worked = (features.codes[good] == features.codes[plan]).any(axis=0)
        if worked.all():
            runs[features.family == features.family[plan]] *= 0.3
        for column in np.flatnonzero(~worked):
            runs[features.codes[:, column] == features.codes[plan, column]] *= 0.2
    return runs


def excluded(
    model: Surrogate, observed: Sequence[Observation], limit_bytes: int, peaks: PeakPosterior | None = None
) -> Bools:
    """Plans that were tried, or are known not to fit.

    The latter are those with as many rows as one of their family that ran out of memory, or more, and those whose
    posterior peak is more than three standard deviations above the ceiling.
    """
    out = np.zeros(len(model.features.rows), dtype=bool)
    peaks = peaks or peak_posterior(model, observed, limit_bytes)
    if peaks is not None:
        mean, std = peaks.log_moments()
        out |= mean - _EXCLUDE_STDS * std > math.log(limit_bytes)  # never where nothing was traced
    family, rows = model.features.family, model.features.rows
    for one in observed:
        out[one.plan] = True
        if one.result == "out_of_memory" or one.peak_bytes > limit_bytes:
            out |= (family == family[one.plan]) & (rows >= rows[one.plan])
    return out
