"""CPU contention: the share of CPU time that other processes use while something is measured."""

from __future__ import annotations

import contextlib
import os
import time

import psutil


class CpuShare:
    """Measures, from its construction on, how other processes use the CPUs that this process may run on.

    Other processes count, but for those that this one has started (a loader's workers), and so do other guests of the
    host, as far as the kernel sees them (steal time).

    Args:
        siblings: Whether the other processes of this one's parent belong to the same training.
    """

    def __init__(self, *, siblings: bool = False) -> None:
        self._siblings = siblings
        self._processors = sorted(os.sched_getaffinity(0))
        self._began = time.monotonic()
        self._busy = _busy_seconds(self._processors)
        self._own = _own_seconds(siblings=siblings)

    def others(self) -> float:
        """The share of these CPUs that other processes used, from 0 to 1."""
        wall = (time.monotonic() - self._began) * len(self._processors)
        busy = _busy_seconds(self._processors) - self._busy
        own = _own_seconds(siblings=self._siblings) - self._own
        return min(1.0, max(0.0, (busy - own) / wall)) if wall > 0 else 0.0


def _busy_seconds(processors: list[int]) -> float:
    every = psutil.cpu_times(percpu=True)
    busy = 0.0
    for number in processors:
        if number >= len(every):  # a container that shows fewer than there are
            continue
        times = every[number]
        idle = times.idle + getattr(times, "iowait", 0.0)
        # guest time is counted in user time already
        busy += sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return busy


def _own_seconds(*, siblings: bool) -> float:
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    root = psutil.Process(os.getppid() if siblings else os.getpid())
    for one in root.children(recursive=True):
        if one.pid != os.getpid():
            with contextlib.suppress(psutil.Error):
                used = one.cpu_times()
                own += used.user + used.system
    return own
