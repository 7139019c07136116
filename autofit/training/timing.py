"""The clock that listens to a training loop: how long, how much memory, and when enough was seen.

A run on a time line, with accumulation 4::

    load   | warm-up step 1   | warm-up step 2   | timed step               | timed step ...
    model, | f b f b  clip+opt| f b f b  clip+opt| f b f b f b f b  clip+opt| ...
    data   | state is created | first with state |<------ step_seconds ---->|

``parts``: where the accumulation is above three, each step runs three micro-steps only, and the step that they stand
for is added up: first micro-step (gradients are created) + (accumulation - 1) x later ones (gradients are added to) +
clipping and optimizer. ``whole``: every micro-step is run; finalists and launches are measured so.

What a step of a user's script waits for its loader counts, evenly spread over the steps
(:mod:`autofit.training.loader_waits`). The device is waited for at the end of each step: what a loader without
workers would load while the device still computes is counted in full, so that no wait is told too short.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from autofit.contract.outcome import Phase
from autofit.machine.cpu_contention import CpuShare
from autofit.machine.meters import Meter
from autofit.system.statistics import median, spread
from autofit.training.loader_waits import LoaderWaits
from autofit.training.world import World

if TYPE_CHECKING:
    import torch

    from autofit.contract.recipe import Recipe

PARTS = 3
"""Micro-steps that stand for a longer accumulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured.

    Attributes:
        warm_up: Optimizer steps that are dropped; the state is created in the first, so there are two at least.
        min_steps, max_steps: Timed optimizer steps.
        seconds: After ``min_steps``, stop once the timed steps took this long.
        target: After ``min_steps``, stop once the spread is below this share of the median.
        hopeless_seconds: Stop after two timed steps that are both slower than this; 0 for never.
    """

    fidelity: Literal["parts", "whole"] = "parts"
    warm_up: int = 2
    min_steps: int = 3
    max_steps: int = 10
    seconds: float = 4.0
    target: float = 0.02
    hopeless_seconds: float = 0.0


class Listener(Protocol):
    """What a training loop tells of itself; a clock, or a trace's marks."""

    recipe: Recipe
    effort: Effort
    accumulation: int
    accumulated: int
    done: int
    on_cuda: bool

    @property
    def in_parts(self) -> bool:
        """Whether fewer micro-steps are run than the plan says."""

    def step_begin(self) -> None:
        """An optimizer step begins."""

    def forward_begin(self) -> None:
        """A micro-step begins."""

    def forward_end(self) -> None:
        """The loss is there."""

    def backward_end(self, loss: torch.Tensor) -> None:
        """The gradients of a micro-step are there; ``loss`` is its share of the step's."""

    def step_skipped(self) -> None:
        """The gradients of a scaled loss overflowed, and the optimizer did not step; told before :meth:`step_end`."""

    def step_end(self) -> bool:
        """An optimizer step is done; returns whether enough was seen."""


@dataclass(slots=True)
class Clock:
    """Listens to a training loop: times it, checks memory after each phase, and says when enough was seen."""

    recipe: Recipe
    effort: Effort
    meter: Meter
    accumulation: int
    """Micro-steps that are run for an optimizer step: the plan's, or fewer for ``parts``."""
    on_cuda: bool
    world: World = field(default_factory=World)
    progress: Callable[[str], None] = lambda _: None
    on_step: Callable[[int], None] = lambda _: None
    """Told how many optimizer steps are done, each time, while the device is at rest."""
    phase: Phase = "load"
    steps: list[float] = field(default_factory=list)
    """Seconds of each timed step by itself, without its waits for the loader."""
    waits: LoaderWaits = field(default_factory=LoaderWaits)
    training_seconds: float = 0.0
    warm_up_seconds: float = 0.0
    loss: float = math.nan
    done: int = 0
    accumulated: int = 0
    cpu: CpuShare = field(default_factory=CpuShare)
    timed: list[int] = field(default_factory=list)
    """Which steps were timed, from 0."""
    step_tokens: list[float] = field(default_factory=list)
    """Tokens without padding of each timed step, where rows differ; empty where all are as the workload says."""
    step_places: list[float] = field(default_factory=list)
    """Places for tokens of each timed step, where micro-batches are unlike."""
    usual_places: float | None = None
    """The same of a step in the mean; ``None`` where steps are alike."""
    padding: float | None = None
    """Share of the timed micro-batches' places for tokens that is padding; ``None`` where rows are none of tokens."""
    notes: list[str] = field(default_factory=list)
    """What a reader of the measurement should know, in order."""
    _started: float = 0.0
    _micro: list[float] = field(default_factory=list)
    _mark: float = 0.0
    _loss: torch.Tensor | None = None
    _skipped: bool = False

    def _now(self) -> float:
        if self.on_cuda:
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    @property
    def in_parts(self) -> bool:
        """Whether fewer micro-steps are run than the plan says."""
        return self.accumulation != self.recipe.accumulation

    @property
    def most_steps(self) -> int:
        """Optimizer steps that are run at most, the dropped ones included."""
        ahead = math.ceil(self.waits.ahead / self.accumulation)
        return self.effort.warm_up + ahead + self.waits.most_steps(self.effort.max_steps, self.accumulation)

    @property
    def loaded_steps(self) -> int:
        """Steps behind the warm-up that a loader is to have rows for: one more than are run.

        Accelerate fetches a micro-batch ahead. With none left to fetch, the last timed step would wait for nothing.
        """
        return self.most_steps - self.effort.warm_up + 1

    def waited_steps(self) -> tuple[float, ...]:
        """Seconds of each timed step, with the waits for the loader spread evenly over them."""
        waited = self.waits.batch_wait(self.accumulation) * self.recipe.accumulation
        return tuple(step + waited for step in self.steps)

    def step_begin(self) -> None:
        """An optimizer step begins."""
        if self.done == 0 and self.recipe.slow_start:
            self.progress(self.recipe.slow_start)
        self._started = self._mark = self._now()
        self._micro.clear()

    def forward_begin(self) -> None:
        """A micro-step begins."""
        self.phase = "forward"
        if self.in_parts:
            self._mark = self._now()

    def forward_end(self) -> None:
        """The loss is there."""
        self.meter.check()
        self.phase = "backward"
        self._beat()

    def backward_end(self, loss: torch.Tensor) -> None:
        """The gradients of a micro-step are there; ``loss`` is its share of the step's."""
        self.meter.check()
        # a copy: the next micro-step of a CUDA graph writes to the same place
        self._loss = loss.detach().clone() if self._loss is None else self._loss + loss.detach()
        if self.in_parts:
            now = self._now()
            self._micro.append(now - self._mark)
            self._mark = now
        else:
            self._micro.append(0.0)
        self.phase = "optimizer"
        self._beat()

    def _beat(self) -> None:
        """Where others wait for this rank, they are told that it goes on."""
        if self.world.size > 1:
            self.progress(f"step {self.done}, before {self.phase}")

    def step_skipped(self) -> None:
        """A step without its optimizer is no step: it is not timed."""
        self._skipped = True

    def step_end(self) -> bool:
        """An optimizer step is done; returns whether enough was seen."""
        now = self._now()
        self.meter.check()
        self.training_seconds += now - self._started
        self.accumulated = len(self._micro)
        if self._loss is not None:
            self.loss, self._loss = float(self._loss), None
            if not math.isfinite(self.loss):
                raise NotFinite(self.loss, self.done)
        self.done += 1
        if self.done == self.effort.warm_up:
            self.meter.settle()
            self.warm_up_seconds = self.training_seconds
            self.cpu = CpuShare(siblings=self.world.size > 1)
        waited, batches, inside = self.waits.end_step()
        whole = self.accumulated >= self.accumulation  # else an epoch ended within it
        if self.done > self.effort.warm_up and whole and not self._skipped:
            step = self._whole(now, inside)
            if self.waits.drained(batches, step):
                self.steps.append(step)
                self.timed.append(self.done - 1)
                self.waits.steps.append((waited, batches))
        self._skipped = False
        self.progress(f"step {self.done}")
        self.on_step(self.done)
        return self.world.agrees(self._enough())

    def _whole(self, now: float, waited: float) -> float:
        if not self.in_parts:
            return now - self._started - waited
        first, *later = self._micro
        if self.world.size > 1:  # gradients are exchanged in the last one
            *later, last = later
            return first + (self.recipe.accumulation - 2) * sum(later) / len(later) + last + (now - self._mark)
        return first + (self.recipe.accumulation - 1) * sum(later) / len(later) + (now - self._mark)

    def _enough(self) -> bool:
        effort, steps = self.effort, self.waited_steps()
        bound = self.waits.binds(sum(self.steps))
        if len(steps) >= (self.waits.most_steps(effort.max_steps, self.accumulation) if bound else effort.max_steps):
            return True
        if len(steps) >= 2 and effort.hopeless_seconds and min(steps) > effort.hopeless_seconds:
            return True
        spent = sum(steps) if not self.in_parts else sum(steps) * self.accumulation / self.recipe.accumulation
        if len(steps) >= 2 and spent > 3 * effort.seconds:
            return True
        if len(steps) < effort.min_steps or (bound and len(steps) < 2 * self.waits.burst(self.accumulation)):
            return False
        return spent > effort.seconds or spread(steps) < effort.target * median(steps)


class NotFinite(Exception):  # noqa: N818 - it becomes an outcome
    """The loss is NaN or infinite."""

    def __init__(self, loss: float, step: int) -> None:
        super().__init__(f"loss {loss} in step {step}")
        self.loss = loss
        self.step = step
