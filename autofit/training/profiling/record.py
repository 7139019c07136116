"""PyTorch's profiler around some optimizer steps, and the files that it leaves.

On a time line, with two steps of warm-up and two to be profiled::

    warm-up | warm-up, evaluation | one more | loader, step | loader, step | end
                                             ^ start                       ^ stop
"""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

from autofit.training.profiling.breakdown import Breakdown, breakdown
from autofit.training.timing import Effort

TRACE, MEMORY = "trace.json.gz", "memory.json"
_WARM_UP = 2
_POINTS = 4000


class StepProfiler:
    """Profiles steps of a training whose clock tells of each step that is done.

    Args:
        steps: Optimizer steps to profile.
        on_cuda: Whether they run on a GPU.
    """

    def __init__(self, steps: int, *, on_cuda: bool) -> None:
        self.steps = steps
        self.on_cuda = on_cuda
        self.wall_seconds = 0.0
        self._profile: Any = None
        self._began = 0.0

    @property
    def effort(self) -> Effort:
        """Of the clock: warm-up, one more step, since the warm-up ends with an evaluation, and those to profile."""
        steps = self.steps + 1
        return Effort(
            fidelity="whole", warm_up=_WARM_UP, min_steps=steps, max_steps=steps, seconds=float(1 << 30), target=0.0
        )

    def on_step(self, done: int) -> None:
        """So many steps are done, and the device is at rest."""
        if done == _WARM_UP + 1:
            self._start()
        elif done == _WARM_UP + 1 + self.steps:
            self.wall_seconds = time.perf_counter() - self._began
            self._profile.stop()

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity
        from torch.profiler.profiler import profile  # where a script runs, the other name is that of an idle one

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_cuda else [])]
        self._profile = profile(activities=activities, profile_memory=True)
        self._profile.start()
        self._began = time.perf_counter()

    def write(self, folder: Path) -> Breakdown:
        """Leave the trace for Perfetto and the memory's time line in a folder, and return where the time went."""
        raw = folder / "trace.json"
        self._profile.export_chrome_trace(str(raw))
        trace = json.loads(raw.read_text("utf-8"))
        raw.unlink()
        points = memory_points(trace["traceEvents"], on_cuda=self.on_cuda)
        first = points[0][0] if points else 0.0
        trace["traceEvents"] += [
            {"ph": "C", "name": "memory (bytes)", "pid": 0, "ts": at, "args": {"allocated": held}}
            for at, held in points
        ]
        with gzip.open(folder / TRACE, "wt", encoding="utf-8", compresslevel=5) as file:
            json.dump(trace, file)
        line = [[round((at - first) * 1e-6, 7), held] for at, held in thinned(points)]
        about = {
            "device": "cuda" if self.on_cuda else "cpu",
            "columns": ["seconds", "bytes"],
            "bytes": "what the allocator has handed out"
            if self.on_cuda
            else "what was allocated since the profile began, less what was freed",
            "points": line,
        }
        (folder / MEMORY).write_text(json.dumps(about), "utf-8")
        return breakdown(self._profile.events(), wall_seconds=self.wall_seconds, steps=self.steps, on_cuda=self.on_cuda)


def memory_points(events: list[dict[str, Any]], *, on_cuda: bool) -> list[tuple[float, int]]:
    """Microseconds and bytes of each allocation and release on the device, in order.

    Args:
        events: ``traceEvents`` of a trace with ``profile_memory``.
        on_cuda: Of the GPU's allocator; else of the host's, whose bytes are counted from the first event on.
    """
    wanted = 1 if on_cuda else 0  # c10::DeviceType
    seen = [one for one in events if one.get("name") == "[memory]" and one["args"].get("Device Type") == wanted]
    seen.sort(key=lambda one: float(one["ts"]))
    if on_cuda:
        return [(float(one["ts"]), int(one["args"]["Total Allocated"])) for one in seen]
    held, found = 0, []
    for one in seen:
        held += int(one["args"]["Bytes"])
        found.append((float(one["ts"]), held))
    return found


def thinned(points: list[tuple[float, int]], most: int = _POINTS) -> list[tuple[float, int]]:
    """At most so many points: of each stretch the one with the most bytes, so that no peak is lost."""
    size = -(-len(points) // most) or 1
    return [max(points[at : at + size], key=lambda one: one[1]) for at in range(0, len(points), size)]
