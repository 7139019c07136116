"""Reading the facts, in a process that may import torch and touch the device."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import psutil

from autofit.memory import device_used_bytes


def describe_model(name: str, config: Path, *, trust_remote_code: bool) -> dict[str, Any]:
    """Sizes and abilities of the causal language model that a ``config.json`` describes; built without storage.

    Returns:
        The fields of :class:`autofit.facts.Model`.

    Raises:
        Exception: transformers can't read the config or build the model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.from_pretrained(config, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(settings, trust_remote_code=trust_remote_code)
    text = settings.get_text_config()
    embeddings = model.get_input_embeddings()
    classes = {type(module).__name__ for module in model.modules()}
    longest = getattr(text, "max_position_embeddings", None)
    return {
        "name": name,
        "architecture": type(model).__name__,
        "model_type": settings.model_type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": int(getattr(text, "num_hidden_layers", 0) or 0),
        "hidden_size": int(getattr(text, "hidden_size", 0) or 0),
        "vocab_size": int(embeddings.weight.shape[0]),
        "max_positions": int(longest) if longest else None,
        "supports_checkpointing": bool(model.supports_gradient_checkpointing),
        "layer_classes": tuple(sorted(set(getattr(model, "_no_split_modules", None) or ()) & classes)),
        "has_experts": any("expert" in part.lower() for part in classes),
        "trust_remote_code": trust_remote_code,
    }


def describe_hardware(device: str) -> dict[str, Any]:
    """The device and its host.

    Returns:
        The fields of :class:`autofit.facts.Hardware`.
    """
    total, free = host_memory()
    host = {"host_total_bytes": total, "host_free_bytes": free, "compilers": compilers()}
    if device == "cuda":
        return {**host, **_cuda()}
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
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit = int(Path(limit_file).read_text("ascii"))
            used = int(Path(used_file).read_text("ascii"))
        except (OSError, ValueError):
            continue
        if limit < total:
            total, free = limit, max(1, min(free, limit - used))
    return total, free


def compilers() -> tuple[str, ...]:
    """Compilers on the path, looked for as Triton (``cc``) and PyTorch (``c++``) do."""
    wanted = {"cc": (os.environ.get("CC"), "cc", "gcc", "clang"), "c++": (os.environ.get("CXX"), "g++")}
    return tuple(name for name, files in wanted.items() if any(file and shutil.which(file) for file in files))


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "CPU"


def cpu_threads() -> int:
    """Threads that ``accelerate launch`` gives to one CPU process: its own rule."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    return max(1, psutil.cpu_count(logical=False) or 1)


def _cpu_multiplies_bf16() -> bool:
    """Whether the processor has instructions for bfloat16 products (AVX-512 BF16, AMX, Arm's BF16)."""
    flags = Path("/proc/cpuinfo").read_text("utf-8", "replace").split()
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags))


def _cuda() -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    major, minor = properties.major, properties.minor
    precisions = ["fp32"]
    if major >= 8:
        precisions += ["tf32", "bf16"]
    if major >= 7 or (major, minor) == (6, 0):
        precisions.append("fp16")
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    uuid = str(getattr(properties, "uuid", "") or "")
    uuid = uuid if not uuid or uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    total = int(properties.total_memory)
    used = device_used_bytes(uuid)  # before this process has a context of its own there
    return {
        "device": "cuda",
        "name": properties.name,
        "uuid": uuid or None,
        "visible_id": visible[0] if visible else "0",
        "total_bytes": total,
        "free_bytes": max(1, total - used),
        "others_bytes": used,
        "precisions": tuple(precisions),
        "capability": (major, minor),
        "threads": int(os.environ.get("OMP_NUM_THREADS", "1") or 1),
        "driver": torch.version.cuda,
        "count": torch.cuda.device_count(),
    }
