"""The model of the seconds per sample: what the traces counted, each part at a rate that the trials correct.

Where plans were traced, :class:`TimeModel` sums the seconds of each kind of work
(:data:`~autofit.costmodel.seconds.roofline.WORK`) and the effect of each value. Without traces, the logarithm of the
seconds is the sum of the techniques' priors and of a Gaussian process (:func:`additive_kernel`):

=====================  ==============================================================================
level                  what all plans share: model, device, sequence; hardly known in advance
effect of a value      one indicator per value that is not a baseline, as uncertain as its prior says
micro-batch            smooth curves ``t1 + t0 / rows``
value x micro-batch    a value may change how the time depends on the micro-batch
family                 plans that differ in the micro-batch alone share what does not add up
=====================  ==============================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autofit.contract.plan import Plan, Value
from autofit.contract.trace import Ints
from autofit.costmodel.forecast import Forecast
from autofit.costmodel.tracing.timeline import Floats
from autofit.registry import baselines
from autofit.search.surrogate.features import Features
from autofit.search.surrogate.gp import FixedFeatures, Kernel
from autofit.space import Space

LEVEL_STD = 10.0
FAMILY_STD, CURVE_STD = 0.06, 0.04
_HALF_SPEED_ROWS = (1.0, 8.0, 64.0)
_SCALE_STD = {True: 0.5, False: 2.0}
_RATE_STD = {True: 0.4, False: 1.0}
"""Of the logarithms of a machine's overall speed and of each of its rates, where those were timed or its card is in the
catalogue, and where not."""
_EFFECT_STD = 0.15
"""Of the logarithm of what a value costs beyond what its trace counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """Seconds of a sample as a sum of what the trace counted, each part at its own rate.

    The latent variables have a standard normal prior: the logarithm of each rate, and the effect of each value. The
    derivative of the logarithm of the sum by a rate is that part's share of the seconds.

    Attributes:
        parts: Logarithms of the seconds of each part at its expected rate, of shape ``(plans, parts)``.
        parts_std: How well each rate is known.
        effects: One row per plan, each column scaled to a prior standard deviation of one.
        effects_mean: Expected sum of the effects.
        family: Of each plan.
        rows: The micro-batch of each plan.
        family_std: See :class:`~autofit.search.surrogate.gp.Kernel`.
        curve_std: Likewise.
    """

    parts: Floats
    parts_std: Floats
    effects: FixedFeatures
    effects_mean: Floats
    family: Ints
    rows: Floats
    family_std: float
    curve_std: float

    @property
    def latents(self) -> int:
        """The number of latent variables."""
        return int(self.parts.shape[1] + self.effects.columns.shape[1])

    def subset(self, plans: Ints) -> TimeModel:
        """The same for some plans."""
        return dataclasses.replace(
            self,
            parts=self.parts[plans],
            effects=self.effects.subset(plans),
            effects_mean=self.effects_mean[plans],
            family=self.family[plans],
            rows=self.rows[plans],
        )

    def linearize(self, latents: Floats) -> tuple[Floats, Kernel]:
        """Each plan's logarithm of the seconds less its linear part, and the covariance of that part."""
        rates = latents[: self.parts.shape[1]]
        moved = self.parts + self.parts_std * rates
        total = np.logaddexp.reduce(moved, axis=1)
        shares = np.exp(moved - total[:, None]) * self.parts_std
        kernel = Kernel(
            features=shares,
            family=self.family,
            rows=self.rows,
            family_std=self.family_std,
            curve_std=self.curve_std,
            fixed=self.effects,
        )
        return total + self.effects_mean - shares @ rates, kernel  # the effects are linear


def time_model(space: Space, features: Features, forecast: Forecast | None) -> tuple[Floats, Kernel | TimeModel]:
    """The model of the seconds of a sample, and its prior mean: from the traces where there are any."""
    if forecast is not None and not np.isnan(forecast.work).all():
        model = _from_traces(space, features, forecast)
        return model.linearize(np.zeros(model.latents))[0], model
    mean = np.zeros(len(features.rows))
    for column, name in enumerate(features.names):
        priors = [space.priors[name][value] for value in space.domains[name]]
        mean += np.array([prior.time[0] for prior in priors])[features.codes[:, column]]
    return mean, additive_kernel(space, features)


def additive_kernel(space: Space, features: Features) -> Kernel:
    """The covariance of the logarithm of the seconds where nothing was traced."""
    rows = features.rows
    columns = [np.full(len(rows), LEVEL_STD)]
    columns += [0.3 * np.log((1 + half / rows) / (1 + half)) for half in _HALF_SPEED_ROWS]
    for (name, value), present in features.indicators.items():
        columns += [present * space.priors[name][value].time[1], present * features.overhead_curve * 0.1]
    return Kernel(
        features=np.column_stack(columns),
        family=features.family,
        rows=rows,
        family_std=FAMILY_STD,
        curve_std=CURVE_STD,
    )


def _from_traces(space: Space, features: Features, forecast: Forecast) -> TimeModel:
    """The model on what the traces counted.

    A value whose trace differs from the baseline's needs no prior mean of its own. A plan that was not traced counts as
    the median plan.
    """
    work = forecast.work * forecast.nominal
    unknown = np.isnan(work).any(axis=1)
    work[unknown] = np.median(work[~unknown], axis=0)
    counted = work[:, work.max(axis=0) > 0]
    known = forecast.timed or forecast.known_card
    mean, columns = np.zeros(len(features.rows)), [np.full(len(features.rows), _SCALE_STD[known])]
    for (name, value), present in features.indicators.items():
        expected, std = space.priors[name][value].time
        if _differs_in_trace(space, counted, features.index, name, value):
            expected, std = 0.0, std if is_untraced(present, forecast) else _EFFECT_STD
        mean += present * expected
        if std:  # of a value that costs nothing of its own there is nothing to learn
            columns += [present * std, present * features.overhead_curve * 0.1]
    return TimeModel(
        parts=np.log(np.maximum(counted, 1e-300)),
        parts_std=np.full(counted.shape[1], _RATE_STD[known]),
        effects=FixedFeatures.of(np.column_stack(columns)),
        effects_mean=mean,
        family=features.family,
        rows=features.rows,
        family_std=FAMILY_STD,
        curve_std=CURVE_STD,
    )


def is_untraced(present: Floats, forecast: Forecast | None) -> bool:
    """Whether no plan that has a value can be traced, though each has a forecast by its nearest traceable plan."""
    return forecast is not None and bool(forecast.approximate[present > 0].all()) and bool(present.any())


def _differs_in_trace(space: Space, work: Floats, index: Mapping[Plan, int], name: str, value: Value) -> bool:
    """Whether the trace of a technique's value counts other work than that of its baseline."""
    baseline = baselines().get(name)
    if baseline is None:
        return False
    for place, plan in enumerate(space.plans):
        if plan[name] == value:
            other = index.get(plan.replaced(**{name: baseline}))
            if other is not None:
                return not np.allclose(work[place], work[other], rtol=1e-6)
    return False
