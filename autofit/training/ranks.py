"""The ranks of a job: forked by its process, watched together, ended together.

Where a training is one of several processes, the job's own process trains nothing. It forks the ranks and waits::

    job's process --fork--> rank 0, rank 1, ...   rank-K/       its logs, and what it does just now (progress)
                                                  rank-K.json   its result, renamed into place before it ends

The first rank that fails ends the others: a rank that has run out of memory writes its result and exits before it
reaches another collective, in which the rest would wait for it. A rank that stands still keeps the others waiting, too:
it is found where no rank has told anything for a while, and on the CPU none uses the processor.

Ranks die with the job's process, and are in its group: whoever kills that group ends them all.

Where a training is spread over machines, each runs such a job with its :class:`Share` of the ranks. They wait for those
of other machines then, whose work nobody sees here: only a long silence after some steps says that one stands still.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import psutil

from autofit.system.forking.imports import device_is_spoilt
from autofit.system.processes import die_with_parent, end_fork, print_into

RANK = "AUTOFIT_RANK"
"""Set in the process of a rank, to its number."""
PROGRESS_FILE = "progress"
_TICK_SECONDS = 0.2
_STILL_SECONDS = 5.0
_STILL_ELSEWHERE_SECONDS = 60.0
"""The same where other machines have ranks, too."""
_GAPS = 5.0
"""Times as long as the longest silence so far, which a rank on a GPU may be silent for."""
_SETTLED = 6
"""Times that each rank has told something before their silence says anything: loading takes as long as it takes, and so
does a first step. Two optimizer steps tell that often."""
_IDLE = 0.02
"""Of a processor, that each of some ranks which wait for one another uses at most: process groups look for work."""


def own_rank() -> int | None:
    """Which rank of a job this process is; ``None`` where it is none."""
    given = os.environ.get(RANK)
    return None if given is None else int(given)


def result_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its result."""
    return folder / f"rank-{rank}.json"


def rank_folder(folder: Path, rank: int) -> Path:
    """Where a rank's logs lie, and what it writes."""
    return folder / f"rank-{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The ranks of a training that one machine runs.

    Attributes:
        first: The lowest of them.
        count: How many.
        world: Ranks of the whole training.
        machine: Which machine it is, counted from 0.
        address: Of the first machine, as the others reach it.
        port: That rank 0 listens to there.
    """

    first: int
    count: int
    world: int
    machine: int
    address: str
    port: int

    @property
    def ranks(self) -> range:
        """The numbers of the ranks."""
        return range(self.first, self.first + self.count)


def all_here(count: int) -> Share:
    """All ranks of a training, on this machine."""
    return Share(first=0, count=count, world=count, machine=0, address="127.0.0.1", port=free_port())


def rank_environment(rank: int, share: Share) -> dict[str, str]:
    """What torchrun tells a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - share.first),
        "WORLD_SIZE": str(share.world),
        "LOCAL_WORLD_SIZE": str(share.count),
        "GROUP_RANK": str(share.machine),
        "MASTER_ADDR": share.address,
        "MASTER_PORT": str(share.port),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this machine that nobody listens to now; of all its addresses where ``host`` is empty."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def phase_of(folder: Path) -> str:
    """What the rank does that has told something the longest ago; empty where nothing was told.

    Every rank that does so is named: those that wait cannot be told from the one at fault.
    """
    told: list[tuple[int, str, int]] = []
    for path in folder.glob(f"rank-*/{PROGRESS_FILE}"):
        with contextlib.suppress(OSError):
            told.append((path.stat().st_mtime_ns, path.read_text("utf-8").strip(), int(path.parent.name[5:])))
    phase = min(told, default=(0, "", 0))[1]
    ranks = sorted(rank for _, there, rank in told if there == phase)
    return f"{phase} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})" if ranks else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The rank that ended a job before its time.

    Attributes:
        status: Its exit status as ``os.waitpid`` gives it; ``None`` where it stood still and was killed.
        wrote: Whether it left a result.
        still_seconds: How long nobody had told anything.
    """

    rank: int
    status: int | None
    wrote: bool
    still_seconds: float = 0.0


@dataclass(slots=True)
class _Beats:
    """When ranks told something last: whether they stand still.

    Its time is that in which this process lived: where the machine was stopped for an hour, the hour does not count.
    """

    files: tuple[Path, ...]
    on_cuda: bool
    spread: bool = False
    silent_seconds: float = 0.0
    longest_seconds: float = 0.0
    _newest: Mapping[Path, int] = field(default_factory=dict)
    _told: dict[Path, int] = field(default_factory=dict)
    _used: Mapping[int, float] = field(default_factory=dict)
    _ticks: deque[tuple[float, Mapping[int, float]]] = field(default_factory=deque)
    _then: float = field(default_factory=time.monotonic)

    def still(self, pids: Mapping[int, int]) -> bool:
        """Whether no rank goes on any more, as far as can be seen."""
        now = time.monotonic()
        lived, self._then = min(now - self._then, 5 * _TICK_SECONDS), now
        newest = {path: _told_at(path) for path in self.files}
        if newest != self._newest:
            for path in self.files:
                self._told[path] = self._told.get(path, 0) + (newest[path] != self._newest.get(path, 0))
            self._newest = newest
            if self._settled():
                self.longest_seconds = max(self.longest_seconds, self.silent_seconds)
            self.silent_seconds = 0.0
        self.silent_seconds += lived
        used = {pid: _cpu_seconds(pid) for pid in pids}
        self._ticks.append((lived, {pid: seconds - self._used.get(pid, 0.0) for pid, seconds in used.items()}))
        self._used = used
        while sum(seconds for seconds, _ in self._ticks) - self._ticks[0][0] > _STILL_SECONDS:
            self._ticks.popleft()
        if self.spread:
            longest = max(_STILL_ELSEWHERE_SECONDS, _GAPS * self.longest_seconds)
            return self._settled() and self.silent_seconds > longest
        if self.on_cuda:  # waiting for a GPU keeps a CPU busy
            return self._settled() and self.silent_seconds > max(_STILL_SECONDS, _GAPS * self.longest_seconds)
        seen = sum(seconds for seconds, _ in self._ticks)
        most = max((sum(tick.get(pid, 0.0) for _, tick in self._ticks) for pid in pids), default=0.0)
        idle = seen > _STILL_SECONDS and most < _IDLE * seen
        return idle and self.silent_seconds > _STILL_SECONDS and not any(map(_wants_to_run, pids))

    def _settled(self) -> bool:
        return min(self._told.values(), default=0) >= _SETTLED


def _told_at(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _wants_to_run(pid: int) -> bool:
    """Whether a thread of a process runs, or waits for nothing but a processor."""
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if path.read_text("utf-8", "replace").rpartition(")")[2].split()[0] == "R":
                return True
    return False


def _cpu_seconds(pid: int) -> float:
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


def run_ranks(
    folder: Path, share: Share, work: Callable[[int], None], failed: Callable[[int], bool], *, on_cuda: bool
) -> Failure | None:
    """Fork the ranks of a job, and wait until all have ended or one has failed.

    Args:
        folder: Of the job.
        share: The ranks.
        work: Done in each rank's process, with its number; leaves :func:`result_file`.
        failed: Whether the result of a rank is a failure that ends the others.
        on_cuda: Whether ranks wait for GPUs.

    Returns:
        The rank that failed first; ``None`` where none has.
    """
    pids: dict[int, int] = {}
    try:
        for rank in share.ranks:
            rank_folder(folder, rank).mkdir(exist_ok=True)
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                _become(folder, rank, share, parent=parent, work=work)
            pids[pid] = rank
        files = tuple(rank_folder(folder, rank) / PROGRESS_FILE for rank in share.ranks)
        beats = _Beats(files, on_cuda, spread=share.count < share.world)
        while pids:
            _wait(pids)
            found = _ended(folder, pids, failed)
            if found is not None:
                return found
            if pids and beats.still(pids):
                last = {rank: _told_at(rank_folder(folder, rank) / PROGRESS_FILE) for rank in pids.values()}
                silent = min(last, key=lambda rank: last[rank])
                return Failure(rank=silent, status=None, wrote=False, still_seconds=beats.silent_seconds)
        return None
    finally:
        _kill(pids)


def _become(folder: Path, rank: int, share: Share, *, parent: int, work: Callable[[int], None]) -> NoReturn:
    """The process of a rank; never returns."""
    code = 1
    try:
        die_with_parent(parent, signal.SIGKILL)
        print_into(rank_folder(folder, rank))
        os.environ.update({RANK: str(rank), **rank_environment(rank, share)})
        if device_is_spoilt():
            os.execv(sys.executable, [sys.executable, "-m", "autofit.worker", str(folder)])  # noqa: S606 - a list
        work(rank)
        code = 0
    except BaseException:  # noqa: BLE001 - the top of the child; it must not return into the job
        import traceback

        traceback.print_exc()
    finally:
        end_fork(code)  # without a word to the process group: others may have ended


def _wait(pids: Mapping[int, int]) -> None:
    """Wait a little, or until a rank ends."""
    handles = []
    with contextlib.suppress(ProcessLookupError):
        handles = [os.pidfd_open(pid) for pid in pids]
    try:
        select.select(handles, [], [], _TICK_SECONDS)
    finally:
        for handle in handles:
            os.close(handle)


def _ended(folder: Path, pids: dict[int, int], failed: Callable[[int], bool]) -> Failure | None:
    """Take away the ranks that have ended; the first one among them that failed.

    One that was killed comes before those whose connection to it broke; of the others the one that wrote first.
    """
    found: list[tuple[tuple[int, int], Failure]] = []
    for pid, rank in list(pids.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            continue
        del pids[pid]
        path = result_file(folder, rank)
        wrote = path.exists()
        if not wrote or failed(rank):
            when = path.stat().st_mtime_ns if wrote else 0
            found.append(((int(wrote), when), Failure(rank=rank, status=status, wrote=wrote)))
    return min(found, key=lambda one: one[0])[1] if found else None


def _kill(pids: dict[int, int]) -> None:
    """End the ranks that are left and all that they have started."""
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            for one in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    pids.clear()
