"""What the Nvidia driver tells of a device, by its library NVML; none of it makes a CUDA context."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from autofit.system.errors import MachineError


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
        raise MachineError(f"the Nvidia driver does not answer ({error})", hint="what does nvidia-smi say?") from error


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
        return int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used)


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


def seen_uuid() -> str:
    """The UUID of this process's own device, as the driver calls it; empty where PyTorch tells none.

    Makes no context.

    Raises:
        MachineError: As for :func:`uuid_in_driver`.
    """
    import torch

    uuid = str(getattr(torch.cuda.get_device_properties(local_rank()), "uuid", "") or "")
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
