"""Which plan next: Optuna's ask and tell over the space; no device.

Whatever the sampler, a plan is asked once, and one that is known not to fit never: with all else but accumulation
equal, the rows at or above a micro-batch that broke the ceiling.

============  =======================================================================================
``autofit``   the default, :class:`~autofit.search.sampler.AutofitSampler`; the only one that stops by itself
``tpe``       Optuna's tree-structured Parzen estimator
``gp``        Optuna's Gaussian process; needs scipy
``random``    plans at random
``grid``      every plan, in the space's order
============  =======================================================================================

Optuna's own samplers propose knobs that know nothing of one another. A proposal that is no plan of the space, or is
known not to fit, is told as an infeasible one without running it; one that was tried before is told as failed,
which teaches nothing; after 50 of them in a row, or after the first once a hundred trials were made, a plan that was
not tried is drawn.
"""

from __future__ import annotations

import importlib.util
import math
import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import optuna
from optuna.trial import TrialState

from autofit.contract.facts import Facts
from autofit.contract.outcome import Trial
from autofit.contract.plan import Plan, Value
from autofit.contract.technique import Kind
from autofit.costmodel.forecast import Forecast
from autofit.registry import technique
from autofit.search import study as journal
from autofit.search.sampler import (
    CAUTION,
    LIKELY,
    LIKELY_WORKS,
    Advice,
    AutofitSampler,
    believe,
    excluded,
    needed,
    observations,
)
from autofit.search.surrogate import FOLLOWS, ROWS, Needs, encode
from autofit.search.tradeoffs import Expected
from autofit.space import Space
from autofit.system.errors import InputError, MachineError, near

SamplerName = Literal["autofit", "tpe", "gp", "random", "grid"]
_REJECTIONS = 50
_ABOUT_AS_FAST = 0.03
"""As the logarithm of seconds."""
_MANY, _LATE_REJECTIONS = 100, 1
"""After so many trials a proposal is hardly ever new, and each one that is rejected makes the journal longer."""


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
        self._encoded = study.sampler.encoded if isinstance(study.sampler, AutofitSampler) else encode(space, forecast)
        self._asked: dict[Plan, optuna.Trial] = {}

    def ask(self) -> Plan | None:
        """The next plan; ``None`` if none is worth trying, and then :attr:`stopped` says why.

        Raises:
            MachineError: The study could not be written.
        """
        with journal.writing("the search's journal"):
            try:
                return self._next()
            except (FileNotFoundError, *journal.UNREADABLE):
                if not self._renewed():
                    raise
                return self._next()

    def _next(self) -> Plan | None:
        trial, self.reason = self._ask()
        if trial is None:
            self.stopped = self.reason
            return None
        plan = self.space.plans[self._place(trial)]
        trial.set_user_attr("kind", journal.STARTED)
        trial.set_user_attr("plan", dict(plan))
        self._asked[plan] = trial
        return plan

    def _renewed(self) -> bool:
        """Open the study anew, mended by the outcomes: somebody has written into it, or taken it away."""
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
        with journal.writing("the search's journal"):
            asked = self._asked.pop(trial.plan, None)
            try:
                if asked is None:
                    journal.add(self.study, trial, self.space, self.limit_bytes)
                else:
                    journal.tell(self.study, asked, trial, self.limit_bytes)
            except (FileNotFoundError, *journal.UNREADABLE):
                if not self._renewed():
                    raise

    def expected(self, plan: Plan) -> Expected | None:
        """What is believed of a plan after what was measured; ``None`` where nothing was, or it is no plan here."""
        place = self._encoded.index.get(plan)
        seen = observations(self.study.get_trials(deepcopy=False), self._encoded, self.limit_bytes)
        if place is None or not any(one.verdict == "measured" for one in seen):
            return None
        belief = believe(self._encoded, list(seen), self.limit_bytes)
        return Expected(
            sample_seconds=math.exp(belief.time[place]),
            spread=float(belief.time_std[place]),
            peak_bytes=math.exp(belief.memory[place]),
        )

    def foremost(self, plans: Collection[Plan]) -> Plan | None:
        """The plan that is believed to be the fastest of some that likely fit, where it was not tried yet.

        Returns:
            ``None`` where one that was measured is about as fast, none likely fits, or nothing was measured at all.
        """
        seen = observations(self.study.get_trials(deepcopy=False), self._encoded, self.limit_bytes)
        places = np.array([self._encoded.index[plan] for plan in plans if plan in self._encoded.index], dtype=np.int64)
        if not len(places) or not any(one.verdict == "measured" for one in seen):
            return None
        found = needed(self._encoded, seen, self.limit_bytes)
        belief = believe(self._encoded, seen, self.limit_bytes, found)
        out = excluded(self._encoded, seen, self.limit_bytes, found)
        measured = [one.place for one in seen if one.verdict == "measured" and one.peak_bytes <= self.limit_bytes]
        known = belief.time[np.intersect1d(places, measured)]
        may = (belief.fits >= LIKELY) & (belief.works > LIKELY_WORKS) & ~out
        likely = places[may[places] & (belief.time[places] <= known.min(initial=math.inf) - _ABOUT_AS_FAST)]
        if not len(likely):
            return None
        return self.space.plans[int(likely[(belief.time - CAUTION * np.log(belief.fits))[likely].argmin()])]

    def correction(self) -> Needs | None:
        """How the measured peaks lie to the traces; ``None`` without traces."""
        seen = observations(self.study.get_trials(deepcopy=False), self._encoded, self.limit_bytes)
        return needed(self._encoded, seen, self.limit_bytes)

    def _ask(self) -> tuple[optuna.Trial | None, str]:
        trials = self.study.get_trials(deepcopy=False)
        if isinstance(self.study.sampler, AutofitSampler):
            advice: Advice = self.study.sampler.advise(trials)
            self.expected_gain = advice.expected_gain
            trial = None if advice.place is None else self.study.ask(dict(journal.distributions(self.space)))
            return trial, advice.reason
        seen = observations(trials, self._encoded, self.limit_bytes)
        taken = excluded(self._encoded, seen, self.limit_bytes)
        free = np.flatnonzero(~taken)
        if not len(free):
            return None, "every plan was tried or is known not to fit"
        if self.name == "grid":
            return self._exactly(self.space.plans[free[0]]), "the next of the space"
        tried = {one.place for one in seen}
        patience = _REJECTIONS if len(seen) < _MANY else _LATE_REJECTIONS
        for _ in range(patience):
            trial = self.study.ask(dict(self._knobs()))
            if self._place(trial) >= 0 and not taken[self._place(trial)]:
                return trial, f"proposed by {self.name}"
            self._reject(trial, known=self._place(trial) in tried)
        plan = self.space.plans[self._random.choice(free.tolist())]
        return self._exactly(plan), f"drawn, after {patience} proposals of {self.name} that were tried or can't be"

    def _knobs(self) -> dict[str, optuna.distributions.CategoricalDistribution]:
        """The parameters of Optuna's samplers: the accumulation follows from the micro-batch."""
        every = journal.distributions(self.space)
        return {name: one for name, one in every.items() if name != FOLLOWS or ROWS not in every}

    def _place(self, trial: optuna.Trial) -> int:
        """Where a proposal stands in the space, -1 for one that is no plan of it."""
        values = trial.params
        if FOLLOWS in self.space.domains and FOLLOWS not in values:
            batch = self.space.plans[0]
            values[FOLLOWS] = int(batch[ROWS]) * int(batch[FOLLOWS]) // int(values[ROWS])
        return self._encoded.index.get(Plan(values), -1)

    def _exactly(self, plan: Plan) -> optuna.Trial:
        knobs = self._knobs()
        self.study.enqueue_trial({name: plan[name] for name in knobs})
        return self.study.ask(dict(knobs))

    def _reject(self, trial: optuna.Trial, *, known: bool) -> None:
        trial.set_user_attr("kind", journal.REJECTED)
        if known:
            self.study.tell(trial, state=TrialState.FAIL)
            return
        trial.set_constraint(journal.CONSTRAINT, 1.0)
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
        sampler: ``autofit``, ``tpe``, ``gp``, ``random`` or ``grid``.
        seed: Of whatever is drawn at random.
        storage: A database URL to keep the study in, instead of a journal in the folder.
        trials: What was tried; their outcomes are the truth, the study follows them. Where the list grows with what
            is tried later, a study that is damaged meanwhile is mended by it.
        forecast: What the traces say of the plans' memory.

    Raises:
        InputError: No such sampler or storage, or what the sampler needs is not installed.
        MachineError: The folder or the database can't be written.
    """
    limit_bytes = facts.workload.limit_bytes

    def study(own: optuna.samplers.BaseSampler) -> optuna.Study:
        return journal.open_study(
            folder, storage=storage, sampler=own, trials=trials, space=space, limit_bytes=limit_bytes
        )

    def again(own: optuna.samplers.BaseSampler) -> optuna.Study:
        if not folder.is_dir():
            raise MachineError(f"{folder} is gone: it was deleted or moved while the tune ran", hint="tune again")
        return study(own)

    first = study(make_sampler(sampler, space, facts, seed, forecast))
    return Searcher(space, first, sampler=sampler, limit_bytes=limit_bytes, seed=seed, forecast=forecast, reopen=again)


def make_sampler(
    name: str, space: Space, facts: Facts, seed: int, forecast: Forecast | None
) -> optuna.samplers.BaseSampler:
    """The sampler of that name.

    Raises:
        InputError: There is none, or a package that it needs is missing.
    """
    match name:
        case "autofit":
            return AutofitSampler(
                space,
                limit_bytes=facts.workload.limit_bytes,
                not_first=_other_methods(space, facts),
                seed=seed,
                forecast=forecast,
            )
        case "tpe":
            return optuna.samplers.TPESampler(seed=seed)
        case "gp":
            missing = [package for package in ("scipy", "torch") if importlib.util.find_spec(package) is None]
            if missing:
                need = " and ".join(missing)
                raise InputError(f"--sampler gp needs {need}", hint=f"pip install {' '.join(missing)}")
            return optuna.samplers.GPSampler(seed=seed)
        case "random" | "grid":
            return optuna.samplers.RandomSampler(seed=seed)
        case _:
            raise InputError(f"{name!r} is not a sampler", hint=near(name, get_args(SamplerName)))


def _other_methods(space: Space, facts: Facts) -> dict[str, list[Value]]:
    """The values, by technique, that change the training method."""
    return {
        name: [value for value in values if technique(name).choice(value, facts).kind == Kind.METHOD]
        for name, values in space.domains.items()
    }
