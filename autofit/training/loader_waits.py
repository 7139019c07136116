"""What a training loop waits for its loader, apart from what its steps take by themselves."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

_WAITS = 0.05
_NO_MATTER = 0.5


@dataclass(slots=True)
class LoaderWaits:
    """Waits of the timed steps for their micro-batches.

    Worker processes hand their micro-batches over in bursts: of four workers, four come at about the same time. So the
    waits of whole bursts are spread evenly over the steps. Micro-batches that were loaded ahead during a slow warm-up
    would hide that a loader is too slow: where it may be, they are trained on before a step is timed.

    Attributes:
        workers: Processes that load; 0 where the training's own process does.
        ahead: Micro-batches that may lie ready when the warm-up ends.
        batch_seconds: What the loader needs for a micro-batch by itself, all workers together; ``None``: not known.
        worker_bytes: Memory that the workers hold for themselves, all together.
        steps: Of each timed step, seconds that it waited, and micro-batches that it got.
    """

    workers: int = 0
    ahead: int = 0
    batch_seconds: float | None = None
    worker_bytes: int = 0
    steps: list[tuple[float, int]] = field(default_factory=list)
    _asked: float | None = None
    _seconds: float = 0.0
    _inside: float = 0.0
    _batches: int = 0

    def asked(self) -> None:
        """The loop asks for micro-batches. The device may go on meanwhile: nothing is synchronized."""
        self._asked = time.perf_counter()

    def came(self, batches: int = 1, *, inside: bool) -> None:
        """They are there.

        Args:
            batches: How many.
            inside: Whether the step had begun before they were asked for.
        """
        if self._asked is not None:
            waited = time.perf_counter() - self._asked
            self._seconds += waited
            self._inside += waited if inside else 0.0
        self._asked = None
        self._batches += batches

    def end_step(self) -> tuple[float, int, float]:
        """Seconds waited since the last step's end, micro-batches got, and the seconds that lie inside of the step."""
        ended = self._seconds, self._batches, self._inside
        self._seconds = self._inside = 0.0
        self._batches = 0
        return ended

    def drained(self, batches: int, step_seconds: float) -> bool:
        """Whether what was loaded ahead is trained on, or can be no matter, so that this step may be timed.

        Args:
            batches: Micro-batches of the step.
            step_seconds: What it took by itself.
        """
        if self.ahead <= 0 or not batches:
            return True
        if self.batch_seconds is not None and self.batch_seconds < _NO_MATTER * step_seconds / batches:
            self.ahead = 0
            return True
        self.ahead -= batches
        return False

    def burst(self, accumulation: int) -> int:
        """Steps after which the bursts of the workers come round again."""
        return max(1, self.workers // math.gcd(max(1, self.workers), accumulation))

    def batch_wait(self, accumulation: int) -> float:
        """Seconds that a micro-batch of the timed steps was waited for: the mean over the last whole bursts.

        Args:
            accumulation: Micro-batches that are run for a step.
        """
        burst = self.burst(accumulation)
        counted = self.steps[-(len(self.steps) // burst * burst or len(self.steps)) :]
        batches = sum(count for _, count in counted)
        return sum(waited for waited, _ in counted) / batches if batches else 0.0

    def binds(self, seconds: float) -> bool:
        """Whether the waits are a share of the timed steps that matters.

        Args:
            seconds: What the timed steps took by themselves.
        """
        return sum(waited for waited, _ in self.steps) > _WAITS * seconds

    def most_steps(self, usual: int, accumulation: int) -> int:
        """Steps to be timed at most: two whole bursts where the loader binds."""
        return max(usual, 2 * self.burst(accumulation))
