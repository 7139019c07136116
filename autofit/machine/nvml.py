"""What the Nvidia driver tells of a device, by its library NVML; none of it makes a CUDA context."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autofit.system.errors import MachineError

_LOOKS = 5
"""At a device at most, until nobody has taken or given back memory between two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What of a device is used at one moment.

    Attributes:
        used_bytes: By all together: what ``nvidia-smi`` counts.
        held_bytes: Of each process that the driver lists, by its number; ``None`` where it does not tell them. Managed
            memory is in none of them.
    """

    used_bytes: int
    held_bytes: Mapping[int, int | None]


@contextlib.contextmanager
def driver() -> Iterator[Any]:
    """The driver's own library, NVML; makes no context.

    Raises:
        MachineError: It does not answer, or not to what is asked inside.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        said = "knows no such device" if str(error) == "Not Found" else "does not answer"
        raise MachineError(f"the Nvidia driver {said} ({error})", hint="what does nvidia-smi say?") from error


@contextlib.contextmanager
def on_device(uuid: str | None) -> Iterator[tuple[Any, Any]]:
    """NVML, and its handle of a device: of the first one where nothing is known of it.

    Raises:
        MachineError: As for :func:`driver`.
    """
    with driver() as nvml:
        yield nvml, nvml.nvmlDeviceGetHandleByUUID(uuid) if uuid else nvml.nvmlDeviceGetHandleByIndex(0)


def device_used_bytes(uuid: str | None) -> int:
    """What ``nvidia-smi`` counts as used on a device, by all processes together; makes no context.

    Raises:
        MachineError: The driver does not tell; that of a chip which shares the host's memory does not.
    """
    with on_device(uuid) as (nvml, handle):
        return _used_bytes(nvml, handle)


def _used_bytes(nvml: Any, handle: Any) -> int:
    return int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used)


def device_use(uuid: str | None) -> DeviceUse:
    """What is used on a device, and by whom: of a moment in which no process took or gave back any, where there is one.

    Raises:
        MachineError: As for :func:`device_used_bytes`.
    """
    with on_device(uuid) as (nvml, handle):
        held = held_bytes(nvml, handle)
        for _ in range(_LOOKS):
            used, before, held = _used_bytes(nvml, handle), held, held_bytes(nvml, handle)
            if held == before:
                break
    return DeviceUse(used_bytes=used, held_bytes=held)


def held_bytes(nvml: Any, handle: Any) -> dict[int, int | None]:
    """Bytes of a device by process, ``None`` where the driver does not tell them; empty where it lists no processes."""
    held: dict[int, int | None] = {}
    for ask in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        with contextlib.suppress(nvml.NVMLError):
            held.update({one.pid: one.usedGpuMemory for one in ask(handle)})
    return held


def cards() -> list[tuple[str, int]]:
    """Name and memory of each card of this machine; none where there is no driver."""
    found = []
    with contextlib.suppress(ImportError, MachineError), driver() as nvml:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            found.append((str(nvml.nvmlDeviceGetName(handle)), int(nvml.nvmlDeviceGetMemoryInfo(handle).total)))
    return found


def local_rank() -> int:
    """Which process of this machine's this is, and so which of the devices that it sees is its own."""
    given = os.environ.get("LOCAL_RANK", "")
    return int(given) if given.isascii() and given.isdigit() else 0


def seen_uuid(index: int | None = None) -> str:
    """The UUID of a device, as the driver calls it; empty where PyTorch tells none.

    Makes no context.

    Args:
        index: Of those that this process sees; this process's own by default.

    Raises:
        MachineError: As for :func:`uuid_in_driver`.
    """
    import torch

    index = local_rank() if index is None else index
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", "") or "")
    return uuid_in_driver(uuid) if uuid else ""


def uuid_in_driver(uuid: str) -> str:
    """How the driver calls a device, or a slice of one (MIG), whose UUID CUDA tells without a prefix.

    Raises:
        MachineError: It knows it by neither.
    """
    if uuid.startswith(("GPU-", "MIG-")):
        return uuid
    with driver() as nvml:
        try:
            nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError:
            nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
            return f"MIG-{uuid}"
    return f"GPU-{uuid}"
