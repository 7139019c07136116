"""What the ranks of one training say together: one outcome.

The device must hold what its worst rank held, and a step takes as long as on the slowest.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autofit.contract.outcome import OUTCOME, Crashed, Measured, Outcome, OutOfMemory, TimedOut
from autofit.system import strict_json
from autofit.system.redact import redacted
from autofit.training.ranks import PROGRESS_FILE, Failure, rank_folder, result_file

if TYPE_CHECKING:
    from autofit.contract.facts import Facts

_LOG_TAIL_BYTES = 4000


def joined(ranks: Sequence[Measured]) -> Measured:
    """What all ranks measured, as one: the slowest one's times, the worst one's memory, the mean loss."""
    slowest = max(ranks, key=lambda one: one.step_seconds)
    worst = max(ranks, key=lambda one: one.peak_bytes)
    return dataclasses.replace(
        slowest,
        peak_bytes=worst.peak_bytes,
        allocated_bytes=max(one.allocated_bytes for one in ranks),
        reserved_bytes=worst.reserved_bytes,
        outside_bytes=worst.outside_bytes,
        host_bytes=max(one.host_bytes for one in ranks),
        alloc_retries=max(one.alloc_retries for one in ranks),
        disturbance=max(one.disturbance for one in ranks),
        loss=sum(one.loss for one in ranks) / len(ranks),
    )


def outcome_of_ranks(folder: Path, count: int) -> Outcome:
    """The one outcome of a launch: of the rank that failed first, or of all ranks together.

    Raises:
        OSError: A rank has left none, and none of the others has failed.
    """
    found: list[tuple[int, Outcome]] = []
    for rank in range(count):
        path = result_file(folder, rank)
        if path.exists():
            found.append((path.stat().st_mtime_ns, strict_json.read(OUTCOME, path.read_bytes())))
    failed = [(when, one) for when, one in found if not isinstance(one, Measured)]
    if failed:
        return min(failed, key=lambda one: one[0])[1]
    if len(found) < count:
        raise FileNotFoundError(f"{count - len(found)} of {count} ranks left no outcome")
    return joined([one for _, one in found if isinstance(one, Measured)])


def failure_words(failure: Failure, folder: Path) -> str:
    """How a rank ended that has left no result."""
    phase = rank_phase(folder, failure.rank)
    if failure.status is None:
        return f"{_still(folder, phase)} after {phase}"
    if os.WIFSIGNALED(failure.status):
        return f"rank {failure.rank} was killed by {signal.Signals(os.WTERMSIG(failure.status)).name} after {phase}"
    return f"rank {failure.rank} ended with status {os.WEXITSTATUS(failure.status)} after {phase}"


def unwritten(failure: Failure, folder: Path, facts: Facts, *, host_ran_out: bool) -> Outcome:
    """The outcome of a rank that has left none."""
    status = failure.status
    if status is None:
        phase = rank_phase(folder, failure.rank)
        return TimedOut(limit_seconds=failure.still_seconds, phase=f"{phase}, where {_still(folder, phase)}")
    if host_ran_out and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return killed_for_memory(facts)
    return Crashed(reason=failure_words(failure, folder), log_tail=log_tail(rank_folder(folder, failure.rank)))


def _still(folder: Path, phase: str) -> str:
    """Which ranks got no further than ``phase``; of several, those that wait cannot be told from the one at fault."""
    ranks = sorted(int(path.name[5:]) for path in folder.glob("rank-*") if path.is_dir())
    there = [str(rank) for rank in ranks if rank_phase(folder, rank) == phase]
    return f"rank{'s' * (len(there) > 1)} {', '.join(there)} stood still"


def killed_for_memory(facts: Facts) -> OutOfMemory:
    """The outcome of a process that the kernel has killed for the host's memory."""
    work, on_cpu = facts.workload, facts.hardware.device == "cpu"
    return OutOfMemory(
        where="device" if on_cpu else "host",
        phase="load",
        limit_bytes=work.limit_bytes if on_cpu else work.host_limit_bytes,
        peak_bytes=max(work.limit_bytes, work.host_limit_bytes) if on_cpu else work.host_limit_bytes,
    )


def rank_phase(folder: Path, rank: int) -> str:
    """What a rank did last, as far as it told."""
    try:
        return (rank_folder(folder, rank) / PROGRESS_FILE).read_text("utf-8").strip() or "start"
    except OSError:
        return "start"


def log_tail(folder: Path) -> str:
    """The end of what a process printed on stderr."""
    try:
        with (folder / "stderr.log").open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _LOG_TAIL_BYTES))
            return redacted(file.read().decode("utf-8", "replace").strip())
    except OSError:
        return ""
