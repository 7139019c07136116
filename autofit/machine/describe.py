"""Reading the facts of the device and its host, in a process that may import torch and touch the device."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import psutil

from autofit.machine.meters import control_groups
from autofit.machine.nvml import device_used_bytes, driver, seen_uuid

_SCHEDULED = {"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID"}
"""Of a job that a scheduler gives its devices, others the next time."""


def describe_hardware(device: str, processes: int = 1) -> dict[str, Any]:
    """The device and its host.

    Args:
        device: ``cuda`` or ``cpu``.
        processes: On this machine, each of which is to have a card of its own.

    Returns:
        The fields of :class:`autofit.contract.facts.Hardware`.
    """
    total, free = host_memory()
    host = {"host_total_bytes": total, "host_free_bytes": free, "compilers": compilers()}
    if device == "cuda":
        return {**host, **_cuda(processes)}
    return {
        **host,
        "device": "cpu",
        "name": cpu_name(),
        "total_bytes": total,
        "free_bytes": free,
        "precisions": ("fp32", "bf16") if _cpu_multiplies_bf16() else ("fp32",),
        "threads": cpu_threads(),
    }


def host_memory() -> tuple[int, int]:
    """Total and free bytes of the host, no more than the control group allows."""
    memory = psutil.virtual_memory()
    total, free = int(memory.total), int(memory.available)
    for folder in control_groups():
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            try:
                limit = int((folder / limit_file).read_text("ascii"))
                used = int((folder / used_file).read_text("ascii"))
            except (OSError, ValueError):
                continue
            total = min(total, limit)
            free = max(1, min(free, limit - used))
    return total, free


def compilers() -> tuple[str, ...]:
    """What there is to compile with, looked for as Triton (``cc``, ``python.h``) and PyTorch (``c++``) do."""
    wanted = {"cc": (os.environ.get("CC"), "cc", "gcc", "clang"), "c++": (os.environ.get("CXX"), "g++")}
    found = tuple(name for name, files in wanted.items() if any(file and shutil.which(file) for file in files))
    scheme = sysconfig.get_default_scheme()  # Debian's own is where pip installs, and not where Python lies
    headers = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])
    return (*found, "python.h") if (headers / "Python.h").is_file() else found


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "CPU"


def cpu_threads() -> int:
    """Threads that ``accelerate launch`` gives to one CPU process: its own rule."""
    return given_threads() or max(1, psutil.cpu_count(logical=False) or 1)


def given_threads() -> int:
    """What ``OMP_NUM_THREADS`` says, for the outermost level; 0 where it says nothing that can be read."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(given) if given.isascii() and given.isdigit() else 0


def _cpu_multiplies_bf16() -> bool:
    """Whether the processor has instructions for bfloat16 products (AVX-512 BF16, AMX, Arm's BF16)."""
    flags = Path("/proc/cpuinfo").read_text("utf-8", "replace").split()
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags))


def _cuda(processes: int) -> dict[str, Any]:
    import torch

    count = torch.cuda.device_count()
    cards = [_memory_of(index) for index in range(min(processes, count))]
    tightest = min(range(len(cards)), key=lambda index: cards[index][1] - cards[index][2])
    properties = torch.cuda.get_device_properties(tightest)
    major, minor = properties.major, properties.minor
    precisions = ["fp32"]
    if major >= 8:
        precisions += ["tf32", "bf16"]
    if major >= 7 or (major, minor) == (6, 0):
        precisions.append("fp16")
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    uuid, total, used = cards[tightest]
    for index in range(len(cards)):
        _ = torch.ones(2, device=f"cuda:{index}").sum().item()  # one that can't is better known now than by every trial
    with driver() as nvml:
        version = str(nvml.nvmlSystemGetDriverVersion())
        if visible and not _SCHEDULED & os.environ.keys():
            count = max(count, int(nvml.nvmlDeviceGetCount()))  # a launch from another shell would see them all
    return {
        "device": "cuda",
        "name": properties.name,
        "uuid": uuid or None,
        "visible_id": visible[tightest] if visible else str(tightest),
        "total_bytes": total,
        "free_bytes": max(1, total - used),
        "others_bytes": used,
        "beside": tuple((name, whole) for name, whole, _ in cards if name != uuid),
        "precisions": tuple(precisions),
        "capability": (major, minor),
        "l2_bytes": int(properties.L2_cache_size),
        "threads": given_threads() or 1,
        "driver": version,
        "count": count,
    }


def _memory_of(index: int) -> tuple[str, int, int]:
    """UUID of a card, its memory, and what of it is used: before this process has a context of its own there."""
    import torch

    uuid = seen_uuid(index)
    return uuid, int(torch.cuda.get_device_properties(index).total_memory), device_used_bytes(uuid)
