"""A runner that answers from a landscape, with the noise and the cost that were recorded; no device."""

from __future__ import annotations

import dataclasses
import heapq
import random

from autofit.contract.outcome import Measured, Outcome, OutOfMemory, Purpose, Trial, Unsupported
from autofit.contract.plan import Plan
from autofit.search.recordings.landscape import Landscape, needed
from autofit.search.workers import Job
from autofit.system.statistics import median, spread
from autofit.training.timing import Effort


class Replay:
    """Runs trials by drawing from what was recorded.

    Each trial draws one of the measurements of its plan. Under the ceiling of the landscape or a lower one.

    Args:
        landscape: What was measured.
        limit_bytes: The ceiling.
        seed: Of the draws.

    Attributes:
        seconds: What all trials so far would have cost.
    """

    def __init__(self, landscape: Landscape, limit_bytes: int | None = None, *, seed: int = 0) -> None:
        self.landscape = landscape
        self.limit_bytes = limit_bytes or landscape.facts.workload.limit_bytes
        self.facts = landscape.at(self.limit_bytes)
        self.seed = seed
        self.seconds = 0.0

    def run(self, number: int, plan: Plan, effort: Effort, *, purpose: Purpose, limit_seconds: float) -> Trial:
        """One trial, as if it were run."""
        runs = self.landscape.of(plan)
        if not runs:
            gone = Unsupported(reason="the landscape does not hold this plan")
            return Trial(number=number, plan=plan, outcome=gone, wall_seconds=0.0, purpose=purpose)
        run = random.Random(f"{self.seed} {number} {plan.words()}").choice(runs)
        outcome, seconds = run.outcome, run.wall_seconds
        if isinstance(outcome, Measured):
            outcome, seconds = self._under(outcome, seconds, effort)
        self.seconds += seconds
        return Trial(
            number=number,
            plan=plan,
            outcome=outcome,
            wall_seconds=seconds,
            purpose=purpose,
            predicted_bytes=run.predicted_bytes,
        )

    def _under(self, outcome: Measured, seconds: float, effort: Effort) -> tuple[Outcome, float]:
        """What a measurement would have been under the ceiling, and cut off where it is hopeless."""
        limit = self.limit_bytes
        a_step = outcome.training_seconds / (len(outcome.steps) + effort.warm_up)
        if needed(outcome) > limit:
            broken = OutOfMemory(
                where="device", phase="backward", limit_bytes=limit, peak_bytes=limit, training_seconds=a_step
            )
            return broken, seconds - outcome.training_seconds + a_step
        steps = outcome.steps
        hopeless = effort.hopeless_seconds
        if hopeless and len(steps) > 2 and min(steps[:2]) > hopeless:
            seconds -= (len(steps) - 2) * a_step
            steps = steps[:2]
        took = median(steps)
        work = self.facts.workload
        outcome = dataclasses.replace(
            outcome,
            steps=steps,
            step_seconds=took,
            step_seconds_spread=spread(steps),
            samples_per_second=work.global_batch / took,
            tokens_per_second=work.global_batch * work.seq_len / took,
            training_seconds=(len(steps) + effort.warm_up) * a_step,
            peak_bytes=min(max(outcome.peak_bytes, needed(outcome)), limit),
            limit_bytes=limit,
        )
        return outcome, seconds


class ReplayWorkers:
    """Workers whose clock is played back: the trial that ends first is the one that would have ended first.

    Args:
        count: Trials that run at once.

    Attributes:
        clock_seconds: When the last trial ended, from the beginning.
        busy_seconds: What the workers have spent in trials, added up.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.clock_seconds = 0.0
        self.busy_seconds = 0.0
        self._running: list[tuple[float, int, Trial]] = []

    def begin(self, job: Job) -> None:
        """Begin a trial now."""
        trial = job()
        self.busy_seconds += trial.wall_seconds
        heapq.heappush(self._running, (self.clock_seconds + trial.wall_seconds, trial.number, trial))

    def ended(self) -> Trial:
        """The next that ends."""
        self.clock_seconds, _, trial = heapq.heappop(self._running)
        return trial
