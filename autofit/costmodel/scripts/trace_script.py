"""Traces of a script: it runs once up to its training, without a device, and a process is forked there for each trace.

What a plan says where a model is loaded comes before that, so the script runs once for each such saying. Where threads
of the script's own are alive, forking it is not safe: then it runs anew for each trace.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from autofit.costmodel.scripts.loop_snapshot import LoopSnapshot
from autofit.costmodel.scripts.snapshot import UNSAFE, Snapshot, in_child, report
from autofit.registry import recipe_of
from autofit.training.scripts.patches import said_where_loaded

if TYPE_CHECKING:
    from autofit.costmodel.tracing.trace_request import TraceRequest, TraceRequests


def trace_script(job: TraceRequests, folder: Path) -> dict[str, str]:
    """Trace every request.

    Returns:
        Why it failed, by the request's file.
    """
    script = job.facts.workload.script
    assert script is not None
    kind = Snapshot if script.trainer else LoopSnapshot
    for requests in _by_loading(job):
        if in_child(kind(job, tuple(requests), folder).run) == UNSAFE:
            for request in requests:
                in_child(kind(job, (request,), folder).run)
    return {request.file: _why(folder, request) for request in job.requests if not job.is_made(request)}


def _by_loading(job: TraceRequests) -> list[list[TraceRequest]]:
    """The requests, those together that say the same where a model is loaded."""
    groups: dict[str, list[TraceRequest]] = {}
    for request in sorted(job.requests, key=lambda one: one.part):
        groups.setdefault(said_where_loaded(recipe_of(request.plan, job.facts)), []).append(request)
    return list(groups.values())


def _why(folder: Path, request: TraceRequest) -> str:
    with contextlib.suppress(OSError):
        return f"its trace failed: {report(folder, request).read_text('utf-8')}"
    return "its trace took too long or was killed"
