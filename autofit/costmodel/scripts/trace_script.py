"""Traces of a script: it runs once up to its training, without a device, and a process is forked there for each trace.

What a plan says where a model is loaded comes before that, so the script runs once for each such saying. Where threads
of the script's own are alive, forking it is not safe: then it runs anew for each trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autofit.costmodel.scripts.loop_snapshot import LoopSnapshot
from autofit.costmodel.scripts.snapshot import UNSAFE, Snapshot, in_child, report
from autofit.costmodel.tracing.shard_layout import layout_of
from autofit.registry import recipe_of
from autofit.training.scripts.patches import said_where_loaded

if TYPE_CHECKING:
    from autofit.costmodel.tracing.trace_request import TraceRequest, TraceRequests

_SPLIT = "a plain loop's step is not traced where its weights or their state are split over processes"


def trace_script(job: TraceRequests, folder: Path) -> dict[str, str]:
    """Trace every request.

    Returns:
        Why it failed, by the request's file.
    """
    script = job.facts.workload.script
    assert script is not None
    kind = Snapshot if script.trainer else LoopSnapshot
    layouts = {one.file: layout_of(recipe_of(one.plan, job.facts)) for one in job.requests}
    split = {file for file, one in layouts.items() if not script.trainer and one.splits}
    for requests in _by_loading(job, [one for one in job.requests if one.file not in split]):
        if in_child(kind(job, tuple(requests), folder).run) == UNSAFE:
            for request in requests:
                in_child(kind(job, (request,), folder).run)
    return {
        request.file: _SPLIT if request.file in split else _why(folder, request)
        for request in job.requests
        if not job.is_made(request)
    }


def _by_loading(job: TraceRequests, requests: Sequence[TraceRequest]) -> list[list[TraceRequest]]:
    """The requests, those together that say the same where a model is loaded."""
    groups: dict[str, list[TraceRequest]] = {}
    for request in sorted(requests, key=lambda one: one.part):
        groups.setdefault(said_where_loaded(recipe_of(request.plan, job.facts)), []).append(request)
    return list(groups.values())


def _why(folder: Path, request: TraceRequest) -> str:
    with contextlib.suppress(OSError):
        return f"its trace failed: {report(folder, request).read_text('utf-8')}"
    return "its trace took too long or was killed"
