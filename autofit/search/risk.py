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
_FREE_OOMS, _MAX_OOMS_IN_A_ROW, _TRIALS_PER_OOM = 1, 4, 10


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
    too_many = max(0.0, _out_of_memory(observed) - 1 - len(observed) / _TRIALS_PER_OOM)
    if not too_many:
        return RiskLimits(min_fits=LIKELY_FITS, min_gain=MIN_GAIN, fit_power=FIT_POWER)
    return RiskLimits(min_fits=0.8, min_gain=2 * MIN_GAIN * max(1.0, too_many), fit_power=6)


def min_gain_if_infeasible(observed: Sequence[Observation]) -> float:
    """The expected gain from which on a plan that probably does not fit is tried, since nothing else is left.

    Each out-of-memory beyond one in ten doubles it; four in a row end the search. To end it sooner would cost more than
    a few trials where half of the speed is at stake.
    """
    broke = [one.result == "out_of_memory" for one in observed]
    in_a_row = len(observed) - max((place + 1 for place, one in enumerate(broke) if not one), default=0)
    if in_a_row >= _MAX_OOMS_IN_A_ROW:
        return math.inf
    too_many = max(0.0, sum(broke) - _FREE_OOMS - len(observed) / _TRIALS_PER_OOM)
    return _MIN_INFEASIBLE_GAIN * math.pow(2.0, too_many)


def _out_of_memory(observed: Sequence[Observation]) -> int:
    return sum(one.result == "out_of_memory" for one in observed)
