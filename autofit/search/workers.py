"""Who runs the trials of a search: one after another, or several at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

from autofit.contract.outcome import Trial

Job = Callable[[], Trial]
"""Runs one trial."""


class Workers(Protocol):
    """Run trials, as many at once as they are."""

    @property
    def count(self) -> int:
        """Trials that may run at once now."""

    def begin(self, job: Job) -> None:
        """Begin a trial."""

    def ended(self) -> Trial:
        """Wait for the next of those that were begun."""


class OneByOne:
    """Runs each trial where it is waited for."""

    count = 1

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def begin(self, job: Job) -> None:
        """Keep it until somebody waits for it."""
        self._jobs.append(job)

    def ended(self) -> Trial:
        """Run it."""
        return self._jobs.pop(0)()


class Threads:
    """Runs each trial in a thread, which waits for processes elsewhere.

    Args:
        counted: Trials that may run at once now; where it falls, those that run go on.
    """

    def __init__(self, counted: Callable[[], int]) -> None:
        self._counted = counted
        self._pool = ThreadPoolExecutor(max_workers=1024, thread_name_prefix="trial")
        self._running: set[Future[Trial]] = set()

    @property
    def count(self) -> int:
        """Trials that may run at once now."""
        return self._counted()

    def begin(self, job: Job) -> None:
        """Begin a trial in a thread of its own."""
        self._running.add(self._pool.submit(job))

    def ended(self) -> Trial:
        """Wait for the next; what it raised is raised here."""
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        one = done.pop()
        self._running.discard(one)
        return one.result()

    def close(self) -> None:
        """Begin nothing more; what runs has to be ended by whoever runs it."""
        self._pool.shutdown(wait=False, cancel_futures=True)
