"""Runs trials until nothing is worth trying, then re-measures the finalists until the winner is stable.

Whatever runs the trials: a device, or a landscape that is played back.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from autofit import registry
from autofit.contract.facts import Facts
from autofit.contract.outcome import Crashed, Diverged, Measured, Outcome, OutOfMemory, Purpose, TimedOut, Trial
from autofit.contract.plan import Plan
from autofit.search import decision
from autofit.search.decision import Decision
from autofit.search.events import Events, Silent
from autofit.search.recordings.writer import Writer
from autofit.search.searcher import Searcher
from autofit.search.trial_log import TrialLog
from autofit.search.workers import OneByOne, Workers
from autofit.space import Space
from autofit.system.statistics import median
from autofit.training.runner import Runner
from autofit.training.timing import Effort

LONGEST_TRIAL_SECONDS = 900.0
_COMPILE_FACTOR = 3
"""How many times as long as expected a compiler may take."""
FINALISTS = 3
ROUNDS = 2
DISAGREEMENT = 1.15
MOST_REPEATS = 6
CREDIT, EARNED = 3.0, 0.25
"""Failures that are looked at twice, if they come again: what was no accident is not repeated for ever. Each trial that
was measured earns a part of one."""
LEAST_LIMIT_SECONDS = 120.0
SLOWEST = 10
"""A trial that takes so many times as long as those that were measured hangs."""
BASELINES = 2
HOPELESS = 1.5
"""A trial whose first steps are that many times slower than the best is cut off."""
TIGHT, LOOKS_AT_TIGHT = 0.95, 5
"""On a CPU a winner whose peak is above that share of the ceiling is measured so many times: a process's resident set
scatters by some per cent, where what a GPU's allocator holds is the same every time."""
FINAL = Effort(fidelity="whole", min_steps=3, max_steps=8, seconds=6.0, target=0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """A trial of the search that a worker runs; ``first`` is the one that it repeats."""

    number: int
    plan: Plan
    first: Trial | None


@dataclass(slots=True, kw_only=True)
class Campaign:
    """The trials of one question.

    Attributes:
        left: Seconds left of the time budget; ``None`` for no limit.
        seconds: The time budget.
        trials: The trials so far. The campaign alone adds to them; others read.
        record: Where each trial is also written.
        workers: Run the trials of the search; those of the playoff run alone.
    """

    facts: Facts
    space: Space
    runner: Runner
    events: Events = field(default_factory=Silent)
    note: Callable[[str], None] = lambda _: None
    left: Callable[[], float | None] = lambda: None
    seconds: float | None = None
    trials: TrialLog = field(default_factory=TrialLog)
    record: Writer | None = None
    _refused: dict[Plan, str] = field(default_factory=dict)
    repeats: int = 0
    credit: float = CREDIT
    hopeless: float = HOPELESS
    workers: Workers = field(default_factory=OneByOne)
    _running: list[_Running] = field(default_factory=list)

    @property
    def limit_bytes(self) -> int:
        """The ceiling on the device."""
        return self.facts.workload.limit_bytes

    @property
    def refused(self) -> Mapping[Plan, str]:
        """Plans that must not win, each with the reason."""
        return MappingProxyType(self._refused)

    def refuse(self, plan: Plan, why: str) -> None:
        """Exclude a plan from winning."""
        self._refused[plan] = why

    def best(self) -> Trial | None:
        """The fastest measured trial inside the ceiling."""
        fitting = [
            (trial.outcome.samples_per_second, trial)
            for trial in self.trials
            if isinstance(trial.outcome, Measured) and trial.outcome.peak_bytes <= self.limit_bytes
        ]
        return max(fitting, key=lambda pair: pair[0], default=(0.0, None))[1]

    def run(self, plan: Plan, effort: Effort, purpose: Purpose, *, again: bool = False) -> Trial:
        """One trial by itself; once more where its failure may be no fault of the plan's, or it was disturbed."""
        trial = self._keep(self._job(plan, effort, purpose)())
        return trial if again else self._settled(trial, effort)

    def _job(self, plan: Plan, effort: Effort, purpose: Purpose) -> partial[Trial]:
        """Tell that a trial begins, and return what runs it."""
        number = max([trial.number for trial in self.trials] + [one.number for one in self._running], default=-1) + 1
        left = self.left()
        self.events.trial_begins(number, plan, purpose, left)
        walls = self._walls()
        longest = min(LONGEST_TRIAL_SECONDS, max(LEAST_LIMIT_SECONDS, SLOWEST * median(walls) if walls else math.inf))
        longest += _COMPILE_FACTOR * registry.extra_seconds(plan, self.facts)
        limit = longest if left is None else max(10.0, min(longest, left))
        return partial(self.runner.run, number, plan, effort, purpose=purpose, limit_seconds=limit)

    def _keep(self, trial: Trial) -> Trial:
        """Keep and tell a trial."""
        self.trials.add(trial)
        if self.record is not None:
            self.record.add(trial)
        self.events.trial_ends(trial, self.best())
        return trial

    def retry_interrupted_trial(self) -> None:
        """Repeat the last trial of a resumed tune, where it was to be repeated and the tune was stopped before."""
        ends = [(trial.plan, trial.purpose) for trial in self.trials[-2:]]
        if ends and ends.count(ends[-1]) == 1:
            last = self.trials[-1]
            self._settled(last, FINAL if last.purpose == "final" else self._effort())

    def _settled(self, trial: Trial, effort: Effort) -> Trial:
        """The trial; or another one of its plan, where the first may say nothing of it."""
        first = None
        while self._repeats(trial, first):
            first, trial = trial, self.run(trial.plan, effort, trial.purpose, again=True)
            self._learn(first, trial)
        return trial

    def _repeats(self, trial: Trial, first: Trial | None) -> bool:
        """Whether a trial may say nothing of its plan, and is repeated, which is told.

        One that itself repeats the trial ``first`` is only where that was measured and this one failed.
        """
        if first is not None and (isinstance(trial.outcome, Measured) or not isinstance(first.outcome, Measured)):
            return False
        doubt = self._doubt(trial)
        if doubt is None:
            if isinstance(trial.outcome, Measured):
                self.credit = min(CREDIT, self.credit + EARNED)
            return False
        # on a busy machine there are many such, of which the end of the tune tells in one line
        busy = isinstance(trial.outcome, Measured) and trial.outcome.disturbed
        (self.events.note if busy else self.note)(f"{doubt}: re-measuring")
        return True

    def _learn(self, first: Trial, second: Trial) -> None:
        """Whether a failure that was repeated was an accident."""
        if not isinstance(first.outcome, Measured):
            cured = isinstance(second.outcome, Measured)
            self.credit = min(CREDIT, self.credit + 1) if cured else self.credit - 1

    def _doubt(self, trial: Trial) -> str | None:
        """Why a trial may say nothing of its plan, in words; ``None`` where it does, or enough were repeated."""
        why = doubt(trial)
        if why is None or self._seconds_left() < trial.wall_seconds:
            return None
        if not isinstance(trial.outcome, Measured):
            return why if self.credit >= 1 and not self._crashes_always(trial.outcome) else None
        self.repeats += 1
        if self.repeats == MOST_REPEATS + 1:
            self.note("the machine stays busy: disturbed trials are not repeated any more")
        return why if self.repeats <= MOST_REPEATS else None

    def _crashes_always(self, outcome: Outcome) -> bool:
        """Whether a plan has crashed by the same error twice: then it is no accident. Who was killed may be one."""
        if not isinstance(outcome, Crashed) or outcome.reason.startswith("killed "):
            return False
        alike = [
            one.plan for one in self.trials if isinstance(one.outcome, Crashed) and one.outcome.reason == outcome.reason
        ]
        return len(set(alike)) < len(alike)

    def search(self, searcher: Searcher, most_trials: int) -> None:
        """Ask, run, tell, until nothing is worth trying or the budget is spent; what runs then is waited for."""
        while True:
            why_none = self._fill(searcher, most_trials)
            if not self._take(searcher):
                if why_none:
                    self.note(why_none)
                return

    def step(self, searcher: Searcher) -> bool:
        """What the next trial of the search says of its plan; returns whether there was one."""
        self._fill(searcher, sys.maxsize)
        return self._take(searcher)

    def _fill(self, searcher: Searcher, most_trials: int) -> str:
        """Give each free worker a plan that is worth trying; returns why one got none, in words, if there are any."""
        while len(self._running) < self.workers.count:
            if self._tried() >= most_trials:
                return ""
            if self.trials and self.is_spent():
                return "the time is spent: the search was cut short"
            plan = searcher.ask()
            if plan is None:
                return searcher.stopped
            self._begin(plan)
        return ""

    def _begin(self, plan: Plan, first: Trial | None = None) -> None:
        """Let a worker run a trial of the search; ``first`` is the one that it repeats."""
        effort = self._effort()
        job = self._job(plan, effort, "search")
        self._running.append(_Running(number=job.args[0], plan=plan, first=first))
        self.workers.begin(job)

    def _take(self, searcher: Searcher) -> bool:
        """Tell what the next trial that ends says of its plan; returns whether there was one."""
        while self._running:
            trial = self._keep(self.workers.ended())
            was = next(one for one in self._running if one.number == trial.number)
            self._running.remove(was)
            if was.first is not None:
                self._learn(was.first, trial)
            if not self._repeats(trial, was.first):
                searcher.tell(trial)
                return True
            self._begin(trial.plan, trial)
        return False

    def baseline(self, searcher: Searcher, most_trials: int) -> None:
        """Measure the baseline plan that is believed to be the fastest, unless one as fast was: what the winner gained.

        Where it does not turn out to be the fastest, or to fit, another one follows.
        """
        baselines = [plan for plan in self.space.plans if not decision.changed_values(plan)]
        for _ in range(min(BASELINES, most_trials - self._tried())):
            plan = searcher.fastest_untried(baselines)
            if plan is None or self._seconds_left() < self._playoff_seconds() + max(self._walls(), default=0.0):
                return
            searcher.tell(self.run(plan, Effort(), "search"))

    def _seconds_left(self) -> float:
        """Seconds left of the time budget; infinite without a limit."""
        left = self.left()
        return math.inf if left is None else left

    def _walls(self) -> list[float]:
        """What the trials that were measured took, all in all."""
        return [one.wall_seconds for one in self.trials if isinstance(one.outcome, Measured)]

    def _tried(self) -> int:
        """Plans that the search has tried, or tries now."""
        tried = {trial.plan for trial in self.trials if trial.purpose == "search"}
        return len(tried | {one.plan for one in self._running})

    def _effort(self) -> Effort:
        """Of a trial of the search: one that is far slower than the best is cut off."""
        best = self.best()
        hopeless = best.outcome.step_seconds * self.hopeless if best and isinstance(best.outcome, Measured) else 0.0
        return Effort(hopeless_seconds=hopeless)

    def playoff(self) -> Decision | None:
        """Re-measure the finalists, whole and interleaved, until the winner is stable."""
        for _ in range(4):
            finalists = [
                plan
                for plan in decision.finalists(tuple(self.trials), self.limit_bytes, FINALISTS, self.refused)
                if self._finals(plan) < ROUNDS
            ]
            if not finalists:
                break
            for round_number in range(ROUNDS):
                for plan in finalists:
                    if self._seconds_left() <= 0:
                        self.note("the time is spent: the playoff was cut short")
                        return self.decide()
                    if self._finals(plan) <= round_number:
                        self.run(plan, FINAL, "final")
            for plan in finalists:
                if numbers := self._disagree(plan):
                    self.note(f"trials {numbers} of one plan differ: other processes were running; re-measuring")
                    self.run(plan, FINAL, "final")
            if self._is_stable():
                break
        return self.decide()

    def decide(self) -> Decision | None:
        """The winner among all that was measured of the space; ``None`` where nothing fitted."""
        allowed = set(self.space.plans)
        eligible = tuple(trial for trial in self.trials if trial.plan in allowed)
        return decision.decide(eligible, self.limit_bytes, self.refused)

    def is_spent(self) -> bool:
        """Whether the time budget leaves no room for another trial of the search."""
        return self._seconds_left() < self._playoff_seconds()

    def _playoff_seconds(self) -> float:
        """What the playoff will take, from what trials took; half of the time at most."""
        walls = self._walls()
        if not walls:
            return 0.0
        script = self.facts.workload.script
        least = script.seconds if script else 0.0  # finalists run all of it, where others may be forked from it
        usual = FINALISTS * ROUNDS * 1.3 * max(least, median(walls))
        return min(usual, (self.seconds or math.inf) / 2)

    def _finals(self, plan: Plan) -> int:
        return sum(trial.purpose == "final" and trial.plan == plan for trial in self.trials)

    def _is_stable(self) -> bool:
        """Whether the winner is stable: measured in the playoff, and still first after it.

        On a CPU, a winner whose peak is close to the ceiling is measured some more times first.
        """
        first = decision.finalists(tuple(self.trials), self.limit_bytes, 1, self.refused)
        before = self.decide()
        if before is None or not first or not self._finals(first[0]):
            return False
        if self.facts.hardware.device == "cpu":
            self._measure_tight(before.plan)
        after = self.decide()
        return after is not None and after.plan == before.plan

    def _measure_tight(self, plan: Plan) -> None:
        """Repeat a plan whose peak is close to the ceiling until it was below it often enough, or broke it."""
        peaks = [
            trial.outcome.peak_bytes
            for trial in self.trials
            if trial.plan == plan and isinstance(trial.outcome, Measured)
        ]
        while TIGHT * self.limit_bytes <= max(peaks) <= self.limit_bytes and len(peaks) < LOOKS_AT_TIGHT:
            if self._seconds_left() <= 0:
                return
            outcome = self.run(plan, FINAL, "final").outcome
            if not isinstance(outcome, Measured):
                return
            peaks.append(outcome.peak_bytes)

    def _disagree(self, plan: Plan) -> str:
        """The final trials of a plan, such as ``8 and 9``, if they differ by more than those of a machine at rest."""
        seconds = {
            trial.number: trial.outcome.step_seconds
            for trial in self.trials
            if trial.purpose == "final" and trial.plan == plan and isinstance(trial.outcome, Measured)
        }
        differ = len(seconds) == ROUNDS and max(seconds.values()) > DISAGREEMENT * min(seconds.values())
        return " and ".join(map(str, seconds)) if differ else ""


def doubt(trial: Trial) -> str | None:
    """Why a trial may say nothing of its plan, in words.

    A ceiling that was broken and a value that can't be had are the plan's own; what crashed, hung or was disturbed
    may be an accident.
    """
    found, which = trial.outcome, f"trial {trial.number}"
    words = None
    if isinstance(found, Measured) and found.paused:
        words = f"{which} disturbed (the machine was paused during a step)"
    elif isinstance(found, Measured) and found.disturbed:
        words = f"{which} disturbed (other processes used {found.disturbance:.0%} CPU)"
    elif isinstance(found, OutOfMemory) and found.external_pressure:
        words = f"{which} ran out of memory that other processes held"
    elif isinstance(found, Crashed):
        words = f"{which} crashed ({found.reason})"
    elif isinstance(found, Diverged):
        words = f"the loss of {which} was not finite"
    elif isinstance(found, TimedOut):
        words = f"{which} hung ({found.phase})"
    return words
