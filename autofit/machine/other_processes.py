"""Who else is on the machine, and how much is left: asked before a tune starts, and before each trial.

On a CUDA device NVML lists the processes that hold memory of it. On the CPU the device's memory is the host's, and the
neighbours are the processes with the largest resident sets. What belongs to this process and its children is left out.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from autofit.machine.nvml import held_bytes, on_device
from autofit.system.errors import MachineError
from autofit.system.units import GIB, size

if TYPE_CHECKING:
    from autofit.contract.facts import Hardware

LOW_DISK_BYTES = GIB
"""A trial leaves less than 1 MiB; what a library unpacks or compiles on the way can be hundreds."""
LOW_HOST_BYTES = {"cuda": 4 * GIB, "cpu": 2 * GIB}
"""A process that has loaded torch, transformers and, on a GPU, CUDA's libraries holds 1 to 3 GiB of the host."""
_SHOWN = 3
_NOTICEABLE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A process of somebody else.

    Attributes:
        name: Of its program; ``?`` where it can't be seen from here.
        held_bytes: Of the device's memory; ``None`` where the driver does not tell.
    """

    pid: int
    name: str
    user: str
    held_bytes: int | None

    def words(self) -> str:
        """In a few words."""
        held = "an unknown share" if self.held_bytes is None else size(self.held_bytes)
        return f"{self.name} (process {self.pid}{' of ' + self.user if self.user else ''}) with {held}"


def neighbours(hardware: Hardware) -> tuple[Neighbour, ...]:
    """Who else holds memory of the device, the largest first."""
    uuids = [hardware.uuid, *(uuid for uuid, _ in hardware.beside)]
    on_cuda = hardware.device == "cuda"
    found = chain.from_iterable(map(_on_device, uuids)) if on_cuda else _on_host(hardware.host_total_bytes)
    return tuple(sorted(found, key=lambda one: -(one.held_bytes or 0)))


def words(found: Sequence[Neighbour]) -> str:
    """The largest of them, in words."""
    rest = len(found) - _SHOWN
    return ", ".join(one.words() for one in found[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def warnings(hardware: Hardware, folder: Path) -> tuple[str, ...]:
    """What stands in a tune's way before it starts: others on the device, a disk or a host that is nearly full."""
    said = []
    found = neighbours(hardware)
    if found:
        said.append(f"also on this device: {words(found)}; {size(hardware.free_bytes)} are free")
    elif hardware.others_bytes > GIB:
        said.append(f"others hold {size(hardware.others_bytes)} of this device; the driver does not say who")
    disk = free_disk_bytes(folder)
    if disk is not None and disk < LOW_DISK_BYTES:
        said.append(f"the disk of {folder} is nearly full: {size(disk)} are left")
    if hardware.host_free_bytes < LOW_HOST_BYTES[hardware.device]:
        said.append(
            f"the host has only {size(hardware.host_free_bytes)} of memory left, and a trial's process may take "
            f"{size(LOW_HOST_BYTES[hardware.device])}"
        )
    return tuple(said)


def free_disk_bytes(folder: Path) -> int | None:
    """What may be written beside a folder; ``None`` where that can't be told."""
    with contextlib.suppress(OSError, ValueError):
        return shutil.disk_usage(folder).free
    return None


def _on_device(uuid: str | None) -> Iterable[Neighbour]:
    """The processes that NVML lists; none where it has no answer."""
    own = _own()
    held: dict[int, int | None] = {}
    with contextlib.suppress(MachineError), on_device(uuid) as (nvml, handle):
        held = held_bytes(nvml, handle)
    for pid, count in held.items():
        if pid not in own:
            name, user = _who(pid)
            yield Neighbour(pid=pid, name=name, user=user, held_bytes=count)


def _on_host(total_bytes: int) -> Iterable[Neighbour]:
    """The processes that hold a noticeable part of the host's memory."""
    own = _own()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            held = process.memory_info().rss
            if held > _NOTICEABLE * total_bytes and process.pid not in own:
                name, user = _who(process.pid)
                yield Neighbour(pid=process.pid, name=name, user=user, held_bytes=held)


def _own() -> set[int]:
    """This process and all that it has started."""
    me = psutil.Process()
    with contextlib.suppress(psutil.Error, OSError):
        return {me.pid, *(child.pid for child in me.children(recursive=True))}
    return {os.getpid()}


def kin() -> set[int]:
    """This process, its siblings, and all that they have started: the ranks of one training are siblings."""
    me = psutil.Process()
    with contextlib.suppress(psutil.Error, OSError):
        return {me.pid, *(one.pid for one in (me.parent() or me).children(recursive=True))}
    return {me.pid}


def _who(pid: int) -> tuple[str, str]:
    """Name and user of a process; a process of another container has neither here."""
    name, user = "?", ""
    with contextlib.suppress(psutil.Error, OSError, KeyError):
        process = psutil.Process(pid)
        name = process.name() or "?"
        user = process.username()
    return name, user
