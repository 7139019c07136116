"""Which plan next: Optuna's ask and tell over the space; no device.

Whatever the sampler (:mod:`autofit.search.samplers`), a plan is asked once, and one that is known not to fit never:
with all else but accumulation equal, the rows at or above a micro-batch that ran out of memory.

Optuna's own samplers propose each technique's value independently. A proposal that is no plan of the space, or is known
not to fit, is told as infeasible without running it; one that was tried before is told as failed, which they ignore;
after 50 of them in a row, or after the first once a hundred trials were made, a random untried plan is taken.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import optuna
from optuna.trial import TrialState

from autofit.contract.facts import Facts
from autofit.contract.outcome import Trial
from autofit.contract.plan import Plan
from autofit.costmodel.forecast import Forecast
from autofit.search.risk import FIT_POWER, LIKELY_FITS
from autofit.search.sampler import LIKELY_RUNS, AutofitSampler
from autofit.search.samplers import make_sampler
from autofit.search.study import (
    CONSTRAINT,
    REJECTED,
    STARTED,
    UNREADABLE,
    add_trial,
    distributions,
    open_study,
    storage_errors,
    tell_trial,
)
from autofit.search.surrogate.features import ACCUMULATION, MICRO_BATCH
from autofit.search.surrogate.observation import Observation, observations
from autofit.search.surrogate.peak_model import PeakPosterior
from autofit.search.surrogate.posterior import excluded, peak_posterior, posterior, surrogate
from autofit.search.tradeoffs import Expected
from autofit.space import Space
from autofit.system.errors import MachineError

_REJECTIONS = 50
_MANY, _LATE_REJECTIONS = 100, 1
"""After so many trials a proposal is hardly ever new, and each one that is rejected makes the journal longer."""
_AS_FAST = 0.03
"""As the logarithm of seconds."""


class Searcher:
    """Asks for plans and is told of trials.

    Args:
        study: Holds the trials; made by :func:`autofit.search.study.open_study`.
        sampler: Its name; the study's own sampler must be that one.
        limit_bytes: The ceiling on the device.

    Attributes:
        stopped: Why nothing is worth trying any more, in words; empty as long as something is.
        reason: Why the last plan was asked for, in words.
        expected_gain: Gain in throughput over the best so far that the last plan is expected to bring, as a
            share of it; ``None`` where nothing has fitted yet, and for samplers that do not say.
    """

    def __init__(
        self,
        space: Space,
        study: optuna.Study,
        *,
        sampler: str,
        limit_bytes: int,
        seed: int = 0,
        forecast: Forecast | None = None,
        reopen: Callable[[optuna.samplers.BaseSampler], optuna.Study] | None = None,
    ) -> None:
        self.space = space
        self._reopen = reopen
        self.study = study
        self.name = sampler
        self.limit_bytes = limit_bytes
        self.stopped = ""
        self.reason = ""
        self.expected_gain: float | None = None
        self._random = random.Random(seed)
        self._model = study.sampler.model if isinstance(study.sampler, AutofitSampler) else surrogate(space, forecast)
        self._asked: dict[Plan, optuna.Trial] = {}

    def ask(self) -> Plan | None:
        """The next plan; ``None`` if none is worth trying, and then :attr:`stopped` says why.

        Raises:
            MachineError: The study could not be written.
        """
        with storage_errors("the search's journal"):
            try:
                return self._next()
            except (FileNotFoundError, *UNREADABLE):
                if not self._reopened():
                    raise
                return self._next()

    def _next(self) -> Plan | None:
        asked, self.reason = self._ask()
        if asked is None:
            self.stopped = self.reason
            return None
        trial, plan = asked
        trial.set_user_attr("kind", STARTED)
        trial.set_user_attr("plan", dict(plan))
        self._asked[plan] = trial
        return plan

    def _reopened(self) -> bool:
        """Open the study anew, repaired from the outcomes: another process has damaged or removed it."""
        if self._reopen is None:
            return False
        self.study = self._reopen(self.study.sampler)
        self._asked.clear()
        return True

    def tell(self, trial: Trial) -> None:
        """Say what came of a plan, also of one that was not asked for. Finals say nothing here.

        Raises:
            MachineError: The study could not be written.
        """
        if trial.purpose != "search":
            return
        with storage_errors("the search's journal"):
            asked = self._asked.pop(trial.plan, None)
            try:
                if asked is None:
                    add_trial(self.study, trial, self.space, self.limit_bytes)
                else:
                    tell_trial(self.study, asked, trial, self.limit_bytes)
            except (FileNotFoundError, *UNREADABLE):
                if not self._reopened():
                    raise

    # -- what the models say --------------------------------------------------------------------------------------

    def expected(self, plan: Plan) -> Expected | None:
        """The posterior of a plan; ``None`` where nothing was measured, or it is no plan of the space."""
        index, observed = self._model.features.index.get(plan), self._observed()
        if index is None or not any(one.result == "measured" for one in observed):
            return None
        found = posterior(self._model, observed, self.limit_bytes)
        return Expected(
            sample_seconds=math.exp(found.time[index]),
            spread=float(found.time_std[index]),
            peak_bytes=math.exp(found.peak[index]),
            peak_spread=float(found.peak_std[index]),
        )

    def fastest_untried(self, plans: Collection[Plan]) -> Plan | None:
        """Of some plans, the untried one that is expected to be the fastest of those that likely fit.

        Returns:
            ``None`` where one that was measured is about as fast, none likely fits, or nothing was measured at all.
        """
        observed, index = self._observed(), self._model.features.index
        some = np.array([index[plan] for plan in plans if plan in index], dtype=np.int64)
        if not len(some) or not any(one.result == "measured" for one in observed):
            return None
        peaks = peak_posterior(self._model, observed, self.limit_bytes)
        found = posterior(self._model, observed, self.limit_bytes, peaks)
        out = excluded(self._model, observed, self.limit_bytes, peaks)
        measured = [one.plan for one in observed if one.result == "measured" and one.peak_bytes <= self.limit_bytes]
        known = found.time[np.intersect1d(some, measured)]
        may = (found.fits >= LIKELY_FITS) & (found.runs > LIKELY_RUNS) & ~out
        likely = some[may[some] & (found.time[some] <= known.min(initial=math.inf) - _AS_FAST)]
        if not len(likely):
            return None
        return self.space.plans[int(likely[(found.time - FIT_POWER * np.log(found.fits))[likely].argmin()])]

    def peak_posterior(self) -> PeakPosterior | None:
        """How the measured peaks differ from the traced ones; ``None`` without traces."""
        return peak_posterior(self._model, self._observed(), self.limit_bytes)

    def _observed(self) -> list[Observation]:
        return observations(self.study.get_trials(deepcopy=False), self._model.features, self.limit_bytes)

    # -- asking ---------------------------------------------------------------------------------------------------

    def _ask(self) -> tuple[tuple[optuna.Trial, Plan] | None, str]:
        """A new trial of the study with its plan, or ``None``; and why."""
        if isinstance(self.study.sampler, AutofitSampler):
            suggestion = self.study.sampler.suggest(self.study.get_trials(deepcopy=False))
            self.expected_gain = suggestion.expected_gain
            if suggestion.plan is None:
                return None, suggestion.reason
            trial = self.study.ask(dict(distributions(self.space)))
            return (trial, self.space.plans[suggestion.plan]), suggestion.reason
        observed = self._observed()
        taken = excluded(self._model, observed, self.limit_bytes)
        free = np.flatnonzero(~taken)
        if not len(free):
            return None, "every plan was tried or is known not to fit"
        if self.name == "grid":
            return self._enqueued(self.space.plans[free[0]]), "the next of the space"
        tried = {one.plan for one in observed}
        patience = _REJECTIONS if len(observed) < _MANY else _LATE_REJECTIONS
        for _ in range(patience):
            trial = self.study.ask(dict(self._parameters()))
            index = self._index_of(trial)
            if index is not None and not taken[index]:
                return (trial, self.space.plans[index]), f"proposed by {self.name}"
            self._reject(trial, known=index in tried)
        plan = self.space.plans[self._random.choice(free.tolist())]
        return self._enqueued(plan), f"random, since {patience} proposals of {self.name} were tried or can't be"

    def _parameters(self) -> dict[str, optuna.distributions.CategoricalDistribution]:
        """The parameters of Optuna's samplers: the accumulation follows from the micro-batch."""
        every = distributions(self.space)
        return {name: one for name, one in every.items() if name != ACCUMULATION or MICRO_BATCH not in every}

    def _index_of(self, trial: optuna.Trial) -> int | None:
        """The index of the plan that a sampler proposed; ``None`` where the space has no such plan."""
        values = trial.params
        if ACCUMULATION in self.space.domains and ACCUMULATION not in values:
            any_plan = self.space.plans[0]
            values[ACCUMULATION] = int(any_plan[MICRO_BATCH]) * int(any_plan[ACCUMULATION]) // int(values[MICRO_BATCH])
        return self._model.features.index.get(Plan(values))

    def _enqueued(self, plan: Plan) -> tuple[optuna.Trial, Plan]:
        """A trial of exactly this plan."""
        parameters = self._parameters()
        self.study.enqueue_trial({name: plan[name] for name in parameters})
        return self.study.ask(dict(parameters)), plan

    def _reject(self, trial: optuna.Trial, *, known: bool) -> None:
        trial.set_user_attr("kind", REJECTED)
        if known:
            self.study.tell(trial, state=TrialState.FAIL)
            return
        trial.set_constraint(CONSTRAINT, 1.0)
        self.study.tell(trial, state=TrialState.PRUNED)


def open_searcher(
    folder: Path,
    space: Space,
    facts: Facts,
    *,
    sampler: str = "autofit",
    seed: int = 0,
    storage: str | None = None,
    trials: Sequence[Trial] = (),
    forecast: Forecast | None = None,
) -> Searcher:
    """A searcher over the study in an output folder, which is made where it is missing.

    Args:
        folder: The output folder; the journal lies in it.
        space: The plans that may be tried.
        facts: The ceiling, and which values change the training method.
        sampler: One of :data:`~autofit.search.samplers.SAMPLERS`.
        seed: Of whatever is drawn at random.
        storage: A database URL to keep the study in, instead of a journal in the folder.
        trials: What was tried; their outcomes are the truth, the study follows them. Where the list grows with what
            is tried later, a study that is damaged meanwhile is repaired from it.
        forecast: What the traces say of the plans' memory.

    Raises:
        InputError: No such sampler or storage, or what the sampler needs is not installed.
        MachineError: The folder or the database can't be written.
    """
    limit_bytes = facts.workload.limit_bytes

    def study(own: optuna.samplers.BaseSampler) -> optuna.Study:
        return open_study(folder, storage=storage, sampler=own, trials=trials, space=space, limit_bytes=limit_bytes)

    def again(own: optuna.samplers.BaseSampler) -> optuna.Study:
        if not folder.is_dir():
            raise MachineError(f"{folder} is gone: it was deleted or moved while the tune ran", hint="tune again")
        return study(own)

    first = study(make_sampler(sampler, space, facts, seed, forecast))
    return Searcher(space, first, sampler=sampler, limit_bytes=limit_bytes, seed=seed, forecast=forecast, reopen=again)
