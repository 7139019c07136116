"""Gaussian process regression over the plans of a space, in plain numpy.

The covariance of two plans is a sum of parts (:class:`Kernel`): one for each feature that they share, and one for
plans of a family, which differ in the micro-batch alone. :func:`predict` conditions on the observed plans;
:func:`predict_log_sum` does the same for the logarithm of a sum of exponentials, by linearization.

Known error: effects that depend on *pairs* of values are modelled by the family part alone, so an unmeasured family is
predicted as if effects added up. Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006),
algorithm 2.1; the sum of kernels is their section 2.7.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from autofit.contract.trace import Ints
from autofit.costmodel.tracing.timeline import Floats

_ITERATIONS = 12
"""Gauss-Newton steps; with a step length of one half they suffice for a change below rounding."""
_DEEP = -4.0
"""Below so many standard deviations the normal tail's series is used."""


def _squared_norms(columns: Floats) -> Floats:
    """The squared norm of each row."""
    return np.asarray(np.einsum("ij,ij->i", columns, columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedFeatures:
    """Feature columns that do not change between calls, and the squared norm of each row.

    Attributes:
        columns: Of shape ``(plans, features)``.
        squared_norms: Of shape ``(plans,)``.
    """

    columns: Floats
    squared_norms: Floats

    @classmethod
    def of(cls, columns: Floats) -> FixedFeatures:
        """Compute the norms once."""
        return cls(columns=columns, squared_norms=_squared_norms(columns))

    def subset(self, plans: Ints) -> FixedFeatures:
        """The rows of some plans."""
        return FixedFeatures(columns=self.columns[plans], squared_norms=self.squared_norms[plans])


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The covariance function of the residual of one logarithm, such as that of the seconds per sample.

    Attributes:
        features: Of shape ``(plans, features)``, each column scaled to a prior standard deviation of one.
        family: Of each plan, see :class:`~autofit.search.surrogate.features.Features`.
        rows: The micro-batch of each plan.
        family_std: Standard deviation of what a family has beyond the sum of its values' effects.
        curve_std: Standard deviation of what changes with the micro-batch inside a family.
        fixed: Further feature columns that do not change between linearizations.
    """

    features: Floats
    family: Ints
    rows: Floats
    family_std: float
    curve_std: float
    fixed: FixedFeatures | None = None

    def subset(self, plans: Ints) -> Kernel:
        """The same for some plans."""
        return dataclasses.replace(
            self,
            features=self.features[plans],
            family=self.family[plans],
            rows=self.rows[plans],
            fixed=self.fixed and self.fixed.subset(plans),
        )

    def prior_variance(self) -> Floats:
        """The prior variance of each plan."""
        variance = _squared_norms(self.features) + (self.family_std**2 + self.curve_std**2)
        return variance if self.fixed is None else variance + self.fixed.squared_norms

    def feature_weights(self, dual: Floats) -> Floats:
        """The weights of the features, given the dual coefficient of each plan."""
        weights: Floats = self.features.T @ dual
        return weights if self.fixed is None else np.concatenate([weights, self.fixed.columns.T @ dual])

    def covariance(self, observed: Ints) -> Floats:
        """The prior covariance of the observed plans with all plans, of shape ``(observed, plans)``."""
        cross = self.features[observed] @ self.features.T
        if self.fixed is not None:
            cross += self.fixed.columns[observed] @ self.fixed.columns.T
        log_rows = np.log2(self.rows)
        for row, plan in enumerate(observed):
            members = np.flatnonzero(self.family == self.family[plan])
            closeness = np.exp(-0.5 * ((log_rows[members] - log_rows[plan]) / 2.0) ** 2)
            cross[row, members] += self.family_std**2 + self.curve_std**2 * closeness
        return cross


class LogSum(Protocol):
    """A model whose prediction is the logarithm of a sum of exponentials, each linear in the latent variables.

    The latent variables have a standard normal prior.
    """

    @property
    def latents(self) -> int:
        """The number of latent variables."""

    def subset(self, plans: Ints) -> LogSum:
        """The same for some plans."""

    def linearize(self, latents: Floats) -> tuple[Floats, Kernel]:
        """Offset of each plan, and covariance of the part that is linear in the latents, around given latents."""


def predict(
    kernel: Kernel,
    prior_mean: Floats,
    *,
    observed: Ints,
    values: Floats,
    noise: Floats,
    prior_residuals: float = math.inf,
) -> tuple[Floats, Floats]:
    """Posterior mean and standard deviation of every plan.

    Args:
        kernel: Covariance of the residual.
        prior_mean: Of each plan.
        observed: Indices of the observed plans; one may occur more than once.
        values: The observations.
        noise: Standard deviation of each observation.
        prior_residuals: Where it is finite, observations that scatter more than the prior says widen every standard
            deviation: the scatter is estimated as if so many residuals of the expected size had been seen before.
    """
    if len(observed) == 0:
        return prior_mean, np.sqrt(kernel.prior_variance())
    cross = kernel.covariance(observed)
    lower = np.linalg.cholesky(cross[:, observed] + np.diag(noise**2))
    # the inverse of a small, well-conditioned triangle: numpy has no triangular solve, and a general one is slower
    whitened = np.linalg.inv(lower) @ cross
    residual = np.linalg.solve(lower, values - prior_mean[observed])
    variance = kernel.prior_variance() - np.einsum("ij,ij->j", whitened, whitened)
    if math.isfinite(prior_residuals):
        variance *= max(1.0, (prior_residuals + float(residual @ residual)) / (prior_residuals + len(observed)))
    return prior_mean + whitened.T @ residual, np.sqrt(np.maximum(variance, 1e-10))


def predict_log_sum(
    model: LogSum, *, observed: Ints, values: Floats, noise: Floats, prior_residuals: float = math.inf
) -> tuple[Floats, Floats]:
    """Posterior mean and standard deviation of the logarithm of every plan's sum: of its bytes, or of its seconds.

    The sum is linearized around the posterior of the latents (damped Gauss-Newton), and is then a linear regression.

    Args:
        model: How the parts of the sum depend on the latents.
        observed: Indices of the observed plans.
        values: The logarithms of the observations.
        noise: Standard deviation of each of them.
        prior_residuals: See :func:`predict`.
    """
    own, every = model.subset(observed), np.arange(len(observed))
    latents = np.zeros(model.latents)
    for iteration in range(_ITERATIONS if len(observed) else 0):
        offset, kernel = own.linearize(latents)
        covariance = kernel.covariance(every) + np.diag(noise**2)
        found = kernel.feature_weights(np.asarray(np.linalg.solve(covariance, values - offset), dtype=np.float64))
        latents = found if iteration == 0 else 0.5 * (latents + found)
    offset, kernel = model.linearize(latents)
    return predict(kernel, offset, observed=observed, values=values, noise=noise, prior_residuals=prior_residuals)


def normal_cdf(z: Floats) -> Floats:
    """The cumulative distribution function of the standard normal, to 1e-7.

    Abramowitz and Stegun 26.2.17; numpy has no error function, and scipy is not needed for anything else.

    >>> normal_cdf(np.array([-1.96, 0.0, 1.96])).round(3)
    array([0.025, 0.5  , 0.975])
    """
    t = 1 / (1 + 0.2316419 * np.abs(z))
    terms = (1.330274429, -1.821255978, 1.781477937, -0.356563782, 0.319381530)
    series = functools.reduce(lambda total, term: total * t + term, terms, np.zeros_like(t)) * t
    tail = np.exp(-0.5 * np.minimum(z * z, 1400.0)) / math.sqrt(2 * math.pi) * series
    return np.where(z >= 0, 1 - tail, tail)


def truncated_normal_update(mean: Floats, std: Floats, limit: float) -> tuple[Floats, Floats]:
    """The observation, and its noise, that updates a normal prior like the knowledge that the value is above a limit.

    Its posterior has the moments of the truncated normal; by the series of the tail where the limit lies deep in it. A
    prior that lies far above the limit is hardly changed.

    Returns:
        Value and standard deviation of the equivalent observation.
    """
    z = (mean - limit) / std
    near, deep = np.maximum(z, _DEEP), np.maximum(-z, -_DEEP)
    density = np.exp(-0.5 * near * near) / math.sqrt(2 * math.pi)
    hazard = np.where(z > _DEEP, density / normal_cdf(near), deep + 1 / deep)
    shrunk = np.where(z > _DEEP, 1 - hazard * (hazard + near), 1 / (deep * deep + 6))  # of the variance
    shrunk = np.minimum(shrunk, 1 - 1e-6)
    precision = (1 / shrunk - 1) / std**2
    weighted = (mean + std * hazard) / (shrunk * std**2) - mean / std**2
    return weighted / precision, np.sqrt(1 / precision)


def expected_improvement(mean: Floats, std: Floats, best: float) -> Floats:
    """Expected improvement of the throughput over the best so far, as a share of it.

    The mean of ``max(exp(best - y) - 1, 0)``: Jones, Schonlau and Welch (1998), for a log-normal objective.

    Args:
        mean: Of the logarithm of the seconds per sample, for each plan.
        std: Its standard deviation.
        best: The logarithm of the seconds per sample of the best plan so far.
    """
    ahead = best - mean
    return np.maximum(
        np.exp(np.minimum(ahead + std**2 / 2, 50.0)) * normal_cdf((ahead + std**2) / std) - normal_cdf(ahead / std), 0.0
    )
