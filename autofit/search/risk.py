"""How much risk of running out of memory the search accepts: about one trial in ten may."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autofit.search.surrogate.observation import Observation

MIN_GAIN = 0.01
LIKELY_FITS = 0.6
FIT_POWER = 2
"""Exponent of the probability to fit, in the choice among plans that may not."""
_MIN_INFEASIBLE_GAIN = 0.03
_MAX_OOMS_IN_A_ROW = 4
_FREE_OOMS, _TRIALS_PER_OOM = 1, 10
"""One out-of-memory is accepted anyway, and a further one for each ten trials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RiskLimits:
    """What a plan that may not fit has to offer.

    Attributes:
        min_fits: The least probability that it fits.
        min_gain: The least expected gain.
        fit_power: Exponent of that probability in the choice, beyond its part in the gain: a plan that does not fit
            says little of any other.
    """

    min_fits: float
    min_gain: float
    fit_power: int


def risk_limits(observed: Sequence[Observation]) -> RiskLimits:
    """One trial in ten may run out of memory; where more did, a plan that may not fit has to promise more."""
    too_many = _too_many_ooms(observed)
    if not too_many:
        return RiskLimits(min_fits=LIKELY_FITS, min_gain=MIN_GAIN, fit_power=FIT_POWER)
    return RiskLimits(min_fits=0.8, min_gain=2 * MIN_GAIN * max(1.0, too_many), fit_power=6)


def min_gain_if_infeasible(observed: Sequence[Observation]) -> float:
    """The expected gain from which on a plan that probably does not fit is tried, since nothing else is left.

    Each out-of-memory beyond one in ten doubles it; four in a row end the search. To end it sooner would cost more than
    a few trials where half of the speed is at stake.
    """
    last = observed[-_MAX_OOMS_IN_A_ROW:]
    if len(last) == _MAX_OOMS_IN_A_ROW and all(one.result == "out_of_memory" for one in last):
        return math.inf
    return _MIN_INFEASIBLE_GAIN * math.pow(2.0, _too_many_ooms(observed))


def _too_many_ooms(observed: Sequence[Observation]) -> float:
    """How many more trials ran out of memory than are accepted."""
    return max(
        0.0, sum(one.result == "out_of_memory" for one in observed) - _FREE_OOMS - len(observed) / _TRIALS_PER_OOM
    )
