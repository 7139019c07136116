"""Reading the facts, in a process that may import torch and touch the device."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from autofit.contract.facts import Task
from autofit.machine.meters import control_groups
from autofit.machine.nvml import device_used_bytes, driver, seen_uuid
from autofit.system.errors import ModelError

_SCHEDULED = {"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID"}
"""Of a job that a scheduler gives its devices, others the next time."""


def describe_model(name: str, config: Path, *, trust_remote_code: bool, task: Task | None = None) -> dict[str, Any]:
    """Sizes and abilities of the causal language model that a ``config.json`` describes; built without storage.

    Args:
        name: What the user calls the model.
        config: Its folder.
        trust_remote_code: Whether the model's own code may run.
        task: What it is to be trained for, whatever its config names; ``None``: what its config names.

    Returns:
        The fields of :class:`autofit.contract.facts.Model`.

    Raises:
        ModelError: The model's type has no causal language model, or the config names a model for another task.
        Exception: transformers can't read the config or build the model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.from_pretrained(config, trust_remote_code=trust_remote_code)
    _check_task(name, settings, task, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(settings, trust_remote_code=trust_remote_code)
    return {
        **describe_built(name, settings, model),
        "trust_remote_code": trust_remote_code,
        "plain_head": _has_plain_head(model),
    }


def describe_built(name: str, settings: Any, model: Any) -> dict[str, Any]:
    """Sizes and abilities of a model of transformers, read off the model as it stands.

    Args:
        name: What the user calls it.
        settings: Its config.
        model: With storage or without.

    Returns:
        Fields of :class:`autofit.contract.facts.Model`.
    """
    text = settings.get_text_config()
    classes = {type(module).__name__ for module in model.modules()}
    longest = max(0, int(getattr(text, "max_position_embeddings", None) or 0))  # XLNet says -1 for no end
    return {
        "name": name,
        "architecture": type(model).__name__,
        "model_type": settings.model_type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": int(getattr(text, "num_hidden_layers", 0) or 0),
        "hidden_size": int(getattr(text, "hidden_size", 0) or 0),
        "vocab_size": _vocabulary(model),
        "max_positions": longest or None,
        "supports_checkpointing": bool(model.supports_gradient_checkpointing),
        "layer_classes": tuple(sorted(set(getattr(model, "_no_split_modules", None) or ()) & classes)),
        "has_experts": any("expert" in part.lower() for part in classes),
        "attention": str(text._attn_implementation),  # noqa: SLF001 - there is no other
        "attentions": _attentions(model),
        "attention_dropout": any(getattr(text, name, 0) for name in ("attention_dropout", "attn_pdrop")),
        "liger": settings.model_type in _ligers_types(),
        "position_rows": _position_rows(model, longest),
        "named": tuple(settings.architectures or ()),
        "products": _products(model),
    }


def _check_task(name: str, settings: Any, task: Task | None, *, trust_remote_code: bool) -> None:
    """Refuse a config without a causal language model, or one for another task where the user has not asked for this.

    A base model such as ``LlamaModel`` has no task of its own, nor has a config that names no class.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    causal: Any = AutoModelForCausalLM._model_mapping  # noqa: SLF001 - transformers has no other list of them
    named = tuple(settings.architectures or ())
    own = (getattr(settings, "auto_map", None) or {}).get("AutoModelForCausalLM", "")
    what = f"{name!r} is a config of {' and '.join(named) or f'the type {settings.model_type}'}"
    if type(settings) not in causal and not (own and trust_remote_code):
        raise ModelError(
            f"{what}, and transformers has no causal language model of the type {settings.model_type}",
            hint="autofit tunes the training of causal language models (next-token prediction) only",
        )
    if task is not None or not named or own.rpartition(".")[2] in named:
        return
    built = causal[type(settings)].__name__ if type(settings) in causal else ""
    bases = {base for entry in MODEL_MAPPING_NAMES.values() for base in ((entry,) if isinstance(entry, str) else entry)}
    if not any(
        one == built or one.endswith(("ForCausalLM", "LMHeadModel")) or (one in bases and one.endswith("Model"))
        for one in named
    ):
        raise ModelError(
            f"{what}, which is no causal language model: autofit can't tune the training that it is made for yet",
            hint=f"`--task causal-lm` tunes {built or 'its causal language model'} instead, trained on next-token "
            "prediction: another model and another loss",
        )


def _products(model: Any) -> list[tuple[int, int, int]]:
    """Inputs, outputs and number of the linear layers; a ``Conv1D``'s weight lies the other way round."""
    import torch

    weights = [
        (module.weight.T if type(module).__name__ == "Conv1D" else module.weight)
        for module in model.modules()
        if not isinstance(module, torch.nn.Embedding) and getattr(getattr(module, "weight", None), "ndim", 0) == 2
    ]
    counted = Counter((int(weight.shape[1]), int(weight.shape[0])) for weight in weights)
    return [(*shape, count) for shape, count in sorted(counted.items())]


def _input_embeddings(model: Any) -> Any:
    """The table of the vocabulary; ``None`` where the model reads no tokens."""
    import torch

    try:
        found = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return found if isinstance(found, torch.nn.Embedding) else None


def _vocabulary(model: Any) -> int:
    """Rows of that table; 1 where the model reads no tokens."""
    table = _input_embeddings(model)
    return 1 if table is None else int(table.weight.shape[0])


def _position_rows(model: Any, longest: int) -> int | None:
    """How many tokens a row may have by the model's learned table of positions, where it has one.

    Some tables begin with entries that no token has: OPT's ``offset``, RoBERTa's padding.
    """
    import torch

    found = [
        module.num_embeddings
        - int(getattr(module, "offset", 0) or 0)
        - (0 if module.padding_idx is None else module.padding_idx + 1)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
        and module.num_embeddings >= longest > 0
        and ("position" in name or name.endswith("wpe"))
        and module is not _input_embeddings(model)
    ]
    return min(found, default=None)


def _ligers_types() -> tuple[str, ...]:
    """Model types that Liger has kernels for, read off its source: importing it may take the device."""
    spec = importlib.util.find_spec("liger_kernel")
    if spec is None or not spec.submodule_search_locations:
        return ()
    source = Path(spec.submodule_search_locations[0]) / "transformers" / "monkey_patch.py"
    try:
        tree = ast.parse(source.read_text("utf-8"))
    except (OSError, ValueError, SyntaxError):
        return ()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_TYPE_TO_APPLY_LIGER_FN":
            return tuple(ast.literal_eval(key) for key in getattr(node.value, "keys", ()))
    return ()


def _attentions(model: Any) -> tuple[str, ...]:
    """Implementations of attention that the model's class says it supports."""
    found = ["eager"]
    if getattr(model, "_supports_sdpa", False):
        found.append("sdpa")
    if getattr(model, "_supports_flash_attn", False):
        # a class may name the only ones it goes with; transformers takes one of those for any other
        only = getattr(model, "_compatible_flash_implementations", None)
        found += [name for name in ("flash_attention_2", "flash_attention_3") if only is None or name in only]
    if getattr(model, "_supports_flex_attn", False):
        found.append("flex_attention")
    return tuple(found)


def _has_plain_head(model: Any) -> bool:
    """Whether the output layer's product goes as it is into transformers' loss for causal language models.

    Seen by running what the class does behind its layers, on a hidden state without storage.
    """
    import torch
    from transformers.loss.loss_utils import ForCausalLMLoss
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Given(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            return None  # fields of other models' outputs

    head, seen = model.get_output_embeddings(), []
    own = getattr(model, "loss_function", None)
    if type(head) is not torch.nn.Linear or own is not ForCausalLMLoss or model.base_model is model:
        return False

    def loss(logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        seen.append(logits)
        return logits.new_zeros(())

    made: list[torch.Tensor] = []
    head.to(torch.bfloat16)  # so that a class which makes float32 of it is seen to do so
    handle = head.register_forward_hook(lambda *run: made.append(run[-1]))
    try:
        hidden = torch.empty(1, 4, head.in_features, dtype=head.weight.dtype, device="meta")
        model.base_model.forward = lambda *_, **__: Given(last_hidden_state=hidden)
        model.loss_function = loss
        ids = torch.zeros(1, 4, dtype=torch.long, device="meta")
        model(input_ids=ids, labels=ids)
    except Exception:  # noqa: BLE001 - a class that can't be run like this is not one that is known
        return False
    finally:
        handle.remove()
    return len(made) == 1 and len(seen) == 1 and seen[0] is made[0]


def describe_hardware(device: str) -> dict[str, Any]:
    """The device and its host.

    Returns:
        The fields of :class:`autofit.contract.facts.Hardware`.
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
    uuid = seen_uuid()
    total = int(properties.total_memory)
    used = device_used_bytes(uuid)  # before this process has a context of its own there
    _ = torch.ones(2, device="cuda").sum().item()  # a device that can't is better known now than by every trial
    count = torch.cuda.device_count()
    with driver() as nvml:
        version = str(nvml.nvmlSystemGetDriverVersion())
        if visible and not _SCHEDULED & os.environ.keys():
            count = max(count, int(nvml.nvmlDeviceGetCount()))  # a launch from another shell would see them all
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
        "threads": given_threads() or 1,
        "driver": version,
        "count": count,
    }
