"""Trials that run now, told to the models as they are expected to end.

Where several are run at once, the next plan is asked for before the last ones have ended. Each that runs counts as
measured, with its posterior mean: that a plan is being tried is known, and nothing else. It is the "constant liar"
whose lie is the model's own prediction ("kriging believer"): Ginsbourger, Le Riche and Carraro, *Kriging is well-suited
to parallelize optimization* (2010), section 3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from autofit.search.surrogate.observation import Observation
from autofit.search.surrogate.posterior import Surrogate, peak_posterior, posterior

_FITS = 0.5


def told_as_predicted(model: Surrogate, observed: Sequence[Observation], limit_bytes: int) -> Sequence[Observation]:
    """The observations, each that is ``running`` as the one that is expected of it.

    Until the first trial was measured they are left as they are: what is tried meanwhile is what likely fits and is
    fast by itself, for there is no best plan yet that a gain could be expected over.
    """
    done = [one for one in observed if one.result != "running"]
    if len(done) == len(observed) or not any(one.result == "measured" for one in done):
        return observed
    peaks = peak_posterior(model, done, limit_bytes)
    belief = posterior(model, done, limit_bytes, peaks)

    def expected(one: Observation) -> Observation:
        if one.result != "running":
            return one
        peak = math.exp(belief.peak[one.plan])
        if belief.fits[one.plan] < _FITS:
            return dataclasses.replace(one, result="out_of_memory", peak_bytes=max(peak, limit_bytes))
        traced = peaks is not None and not math.isnan(peaks.mean[one.plan])
        return dataclasses.replace(
            one,
            result="measured",
            seconds=math.exp(belief.time[one.plan]),
            peak_bytes=min(peak, limit_bytes),
            needed_bytes=float(peaks.mean[one.plan]) if peaks is not None and traced else peak,
        )

    return [expected(one) for one in observed]
