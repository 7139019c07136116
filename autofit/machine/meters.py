"""How much memory a process holds, on the device and on the host, and how it is kept under a ceiling.

CPU: the resident set. ``VmHWM`` is its exact peak, reset by writing 5 to ``/proc/self/clear_refs``. File pages of
libraries are faulted in before the base is read, so that a fresh process and a forked one, which start with
different shares of them, count the same afterwards.

A process that is forked for a trial has pages of the one that it comes from, which has built there what the trial would
have: they count as the trial's own. The kernel leaves file pages out of a fork, so they are faulted in again.

CUDA: the allocator's own counters, plus what lies outside it (context, kernels, managed memory): what this process
holds of the device, less what the allocator holds. The driver tells the first in two ways; the larger counts:

- It lists the process with its bytes. What the driver's own module holds for it is not in them: managed memory, and
  some more (9 MB beside 1 GiB and a context on an H100).
- The device's used bytes have grown since before there was a context. What others are listed with is left out, then and
  now; siblings (other ranks) and children are no others. What is listed for nobody counts as this process's.

The first is never less than what the process allocated, whoever comes or goes. The second adds what the first lacks.
What others take unlisted is in it, which is too much; what they give back unlisted hides as much managed memory of this
process. Without neighbours it is the device's growth.

Where the driver does not tell, the device's growth counts, with all that neighbours take. So it is where it does not
list this process (in a container, by some drivers), or without bytes (WDDM, so WSL), or with fewer than the allocator
holds; and where it listed the number before there was a context: a process outside the container has it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from autofit.machine.nvml import DeviceUse, device_use, local_rank, seen_uuid
from autofit.machine.other_processes import kin
from autofit.system.units import GIB, MIB

if TYPE_CHECKING:
    from autofit.contract.facts import Facts

_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14
_PRESENT_BIT = 63  # of an entry of /proc/PID/pagemap
_LATE_KERNELS_BYTES = 32 * MIB  # room for kernels that are loaded after warm-up
_STATUS = re.compile(r"^(VmHWM|VmPeak|VmRSS|VmData|RssAnon):\s+(\d+) kB", re.MULTILINE)


class CeilingBroken(Exception):  # noqa: N818 - it becomes an outcome
    """The process holds more than it may."""

    def __init__(self, where: Literal["device", "host"], peak_bytes: int) -> None:
        super().__init__(f"{where}: {peak_bytes} bytes")
        self.where = where
        self.peak_bytes = peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Peaks since the meter was made, in bytes; see :class:`autofit.contract.outcome.Measured`.

    ``settled_bytes`` lay outside of the allocator when warm-up was over, or later where the driver lists them as this
    process's: what else came later may be somebody else's.
    """

    peak_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    outside_bytes: int
    host_bytes: int
    alloc_retries: int = 0
    settled_bytes: int = 0


class Meter(Protocol):
    """Reads the peaks of this process."""

    def check(self) -> None:
        """Raise :class:`CeilingBroken` where a ceiling is broken. Cheap: called after every phase."""

    def settle(self) -> None:
        """Called once after warm-up, when kernels are loaded and the state exists."""

    def read(self) -> Reading:
        """The peaks so far."""


def status() -> dict[str, int]:
    """Bytes by name from ``/proc/self/status``."""
    return {name: int(kib) * 1024 for name, kib in _STATUS.findall(Path("/proc/self/status").read_text("ascii"))}


def address_limit() -> int | None:
    """The bytes of addresses that a process may have (``ulimit -v``); ``None`` for any."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def reset_peak() -> None:
    """Make the kernel count the peak resident set from now on."""
    with contextlib.suppress(OSError):  # a kernel without it counts from the start: too much, never too little
        Path("/proc/self/clear_refs").write_text("5", "ascii")


def highest_bytes() -> int:
    """The peak of the resident set since it was last reset."""
    peak = status().get("VmHWM")
    if peak is None:  # gVisor has none
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return peak


def fault_in_libraries() -> None:
    """Read every mapped library page into the resident set, so that it belongs to the base."""
    _fault_in(_mapped_files())


def _mapped_files() -> Iterator[tuple[int, int]]:
    """First address and the one behind the last of each mapping of a file that can be read."""
    for line in Path("/proc/self/maps").read_text("utf-8", "replace").splitlines():
        span, access, _offset, _device, inode, *path = line.split(maxsplit=5)
        # what a driver maps is no library
        if inode != "0" and access.startswith("r") and not "".join(path).startswith("/dev/"):
            start, end = (int(part, 16) for part in span.split("-"))
            yield start, end


def _file_pages() -> list[tuple[int, int]]:
    """The parts of mapped files that are in the resident set."""
    import numpy as np

    found = []
    size = resource.getpagesize()
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        for start, end in _mapped_files():
            entries = os.pread(pagemap.fileno(), (end - start) // size * 8, start // size * 8)
            there = np.frombuffer(entries, np.uint64) >> np.uint64(_PRESENT_BIT)
            turns = np.flatnonzero(np.diff(there.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
            found += [(start + first * size, start + last * size) for first, last in turns.tolist()]
    return found


def _fault_in(spans: Iterable[tuple[int, int]]) -> None:
    """Read some addresses into the resident set."""
    libc = ctypes.CDLL(None, use_errno=True)
    for start, end in spans:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _POPULATE_READ)


class Inheritance:
    """What a process holds when others are forked from it, above its base, which is now."""

    def __init__(self) -> None:
        fault_in_libraries()
        reset_peak()
        self.base_bytes = status()["VmRSS"]
        self.held_bytes = self.peak_bytes = 0
        self._pages: list[tuple[int, int]] = []

    def leave(self) -> None:
        """Look at it in the process that is to be forked, before anything else is done for that."""
        self.held_bytes = status()["VmRSS"] - self.base_bytes
        self.peak_bytes = highest_bytes() - self.base_bytes
        self._pages = _file_pages()

    def take(self) -> None:
        """Hold the same in a process that was just forked."""
        _fault_in(self._pages)


class HostMeter:
    """The resident set above that of the idle process: the CPU's device memory, and every device's host side."""

    def __init__(
        self, limit_bytes: int, where: Literal["device", "host"], inherited: Inheritance | None = None
    ) -> None:
        if inherited is None:
            fault_in_libraries()
        reset_peak()
        self.limit_bytes = limit_bytes
        self.where: Literal["device", "host"] = where
        self.base_bytes = status()["VmRSS"] - (inherited.held_bytes if inherited else 0)
        self._inherited_bytes = inherited.peak_bytes if inherited else 0

    def peak_bytes(self) -> int:
        """Peak since the meter was made, above the base."""
        return max(self._inherited_bytes, highest_bytes() - self.base_bytes)

    def check(self) -> None:
        """Raise where the peak is above the ceiling."""
        peak = self.peak_bytes()
        if peak > self.limit_bytes:
            raise CeilingBroken(self.where, peak)

    def settle(self) -> None:
        """Nothing to do: the resident set has no cache of its own."""

    def read(self) -> Reading:
        """The peak, the same by every name."""
        peak = self.peak_bytes()
        return Reading(peak_bytes=peak, allocated_bytes=peak, reserved_bytes=peak, outside_bytes=0, host_bytes=peak)


class CudaMeter:
    """The allocator's peaks and what lies outside it; tells the allocator that the card is as large as the ceiling."""

    def __init__(
        self, limit_bytes: int, host_limit_bytes: int, uuid: str | None, inherited: Inheritance | None = None
    ) -> None:
        import torch

        self.uuid = seen_uuid() or uuid  # a launch may see another card than was tuned on
        self.before = device_use(self.uuid)
        torch.cuda.set_device(local_rank())
        self.device = torch.cuda.current_device()
        warm = torch.ones(64, 64, device="cuda")
        _ = (warm @ warm).sum().item()
        del warm, _
        torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 - a launch takes its own in the model's first product
        torch.cuda.empty_cache()
        self.limit_bytes = limit_bytes
        self.total_bytes = torch.cuda.get_device_properties(self.device).total_memory
        self.host = HostMeter(host_limit_bytes, "host", inherited)
        self._outside_bytes = self._settled_bytes = 0
        self._measure_outside()
        self._cap()

    def _measure_outside(self) -> None:
        import torch

        reserved = torch.cuda.memory_reserved()
        held, listed = _own_bytes(self.before, device_use(self.uuid), reserved)
        self._outside_bytes = max(self._outside_bytes, held - reserved)
        self._settled_bytes = max(self._settled_bytes, listed - reserved)

    def _cap(self) -> None:
        import torch

        share = (self.limit_bytes - self._outside_bytes - _LATE_KERNELS_BYTES) / self.total_bytes
        if share <= 0:
            raise CeilingBroken("device", self._outside_bytes)
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0))

    def check(self) -> None:
        """The device's ceiling is held by the allocator itself; the host's is checked here."""
        self.host.check()

    def settle(self) -> None:
        """Count the kernels that warm-up has loaded as outside, and hold the allocator to the rest."""
        import torch

        torch.cuda.synchronize()
        self._measure_outside()
        if torch.cuda.max_memory_reserved() + self._outside_bytes > self.limit_bytes:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self._cap()
        self._settled_bytes = self._outside_bytes

    def read(self) -> Reading:
        """The peaks so far."""
        import torch

        torch.cuda.synchronize()
        self._measure_outside()
        stats = torch.cuda.memory_stats()
        reserved = torch.cuda.max_memory_reserved()
        return Reading(
            peak_bytes=reserved + self._outside_bytes,
            allocated_bytes=torch.cuda.max_memory_allocated(),
            reserved_bytes=reserved,
            outside_bytes=self._outside_bytes,
            host_bytes=self.host.peak_bytes(),
            alloc_retries=int(stats.get("num_alloc_retries", 0)),
            settled_bytes=self._settled_bytes,
        )


def _own_bytes(before: DeviceUse, now: DeviceUse, reserved_bytes: int) -> tuple[int, int]:
    """What this process holds of a device; of that, what the driver lists as its own: 0 where it does not tell.

    Args:
        before: When this process had no context yet.
        now: Any time later.
        reserved_bytes: What its allocator holds now.
    """
    grown = now.used_bytes - before.used_bytes
    listed = now.held_bytes.get(os.getpid()) or 0
    if os.getpid() in before.held_bytes or listed < max(reserved_bytes, 1):
        return grown, 0
    own = kin()
    past, present = (sum(held or 0 for pid, held in use.held_bytes.items() if pid not in own) for use in (before, now))
    return max(listed, grown - (present - past)), listed


def control_groups() -> Iterator[Path]:
    """The kernel's groups that bound this process's memory, its own first, then those around it."""
    try:
        lines = Path("/proc/self/cgroup").read_text("ascii", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        _number, kinds, name = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root = Path("/sys/fs/cgroup/memory" if kinds else "/sys/fs/cgroup")
        own = root / name.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_dir():
                yield folder
            if folder == root:
                break


def memory_kills() -> int:
    """How many processes the kernel has killed for memory so far: of this control group, or of the machine."""
    kills = 0
    groups = [folder / name for folder in control_groups() for name in ("memory.events", "memory.oom_control")]
    for counts in (*groups, Path("/proc/vmstat")):
        with contextlib.suppress(OSError):
            for line in counts.read_text("ascii").splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    kills += int(count)
    return kills


def meter(facts: Facts, inherited: Inheritance | None = None) -> Meter:
    """The meter for the device, with the workload's ceilings; starts to count now, what is inherited included."""
    work = facts.workload
    if facts.hardware.device == "cuda":
        return CudaMeter(work.limit_bytes, work.host_limit_bytes, facts.hardware.uuid, inherited)
    return HostMeter(work.limit_bytes, "device", inherited)


def guard_host(limit_bytes: int) -> None:
    """A safety net: let allocations fail far above the ceiling, before the machine itself runs out.

    The ceiling is judged by the meter; data that is mapped but never touched counts here, so this limit is looser.
    """
    _set_data_rlimit(int(limit_bytes * 1.5) + GIB)


@contextlib.contextmanager
def guarded(more_bytes: int) -> Iterator[None]:
    """Let allocations fail inside, once the process holds so many bytes more than now."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    _set_data_rlimit(more_bytes)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _set_data_rlimit(more_bytes: int) -> None:
    net = status()["VmData"] + more_bytes
    _soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or net < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (net, hard))


def out_of_memory(error: BaseException) -> tuple[Literal["device", "host"], int | None] | None:
    """Where an exception says that memory ran out, and how many bytes were asked for; ``None`` for other errors.

    PyTorch has a class for CUDA's; the CPU allocator and the pinned-memory allocator raise plain errors.
    """
    import torch

    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        found = re.search(r"Tried to allocate ([\d.]+) (MiB|GiB)", text)
        asked = int(float(found[1]) * (MIB if found[2] == "MiB" else GIB)) if found else None
        return "device", asked
    if isinstance(error, MemoryError):
        return "host", None
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in text:
        found = re.search(r"you tried to allocate (\d+) bytes", text)
        return "host", int(found[1]) if found else None
    if isinstance(error, RuntimeError) and re.search(
        r"CUDA( driver)? error: out of memory|CUDA out of memory|ALLOC(ATION)?_FAILED"
        r"|Triton Error \[CUDA\]: out of memory|Cuda failure.*'out of memory'",
        text,
    ):
        return "device", None  # of a library with an allocator of its own, or of the driver
    return None


def warm_up_threads() -> None:
    """Start the threads and load the kernels that every step needs, so that they belong to the base of memory."""
    import torch

    with torch.random.fork_rng(devices=[]):  # what is random afterwards is as without it
        layer = torch.nn.Linear(256, 256)
    layer(torch.ones(256, 256)).sum().backward()
