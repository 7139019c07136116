"""An adapter on a live model, through PEFT: it is put on, and read off."""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from .wanted import Wanted

_PEFT_TASKS = {
    "causal-lm": "CAUSAL_LM",
    "script": "CAUSAL_LM",
    "seq2seq-lm": "SEQ_2_SEQ_LM",
    "sequence-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
    "question-answering": "QUESTION_ANS",
}
"""What PEFT calls tasks; of the others it has no class of its own."""
SHARED = {"lora", "rslora"}
"""Adapters whose layers share an input under autocast, see :func:`_outside_autocast`."""


def adapt(
    wanted: Wanted,
    model: PreTrainedModel,
    *,
    task: str = "causal-lm",
    whole: tuple[str, ...] = (),
    around: tuple[str, ...] = (),
) -> PreTrainedModel:
    """Freeze the model and put the adapter on it, through PEFT.

    Args:
        wanted: The adapter.
        model: The model.
        task: What it is trained for.
        whole: Modules that are trained whole.
        around: What paths look like of layers whose weights the model reads itself: no adapter would be trained there.
    """
    from peft import IA3Config, LoraConfig, get_peft_model

    targets: Any = list(wanted.targets) or "all-linear"
    config: Any
    common: dict[str, Any] = {"target_modules": targets, "task_type": _PEFT_TASKS.get(task)}
    if whole:
        common["modules_to_save"] = list(whole)
    left = [*map(re.escape, [*whole, *([] if wanted.targets else _routers(model))]), *around]
    if left:  # "all-linear" would take their layers too
        common["exclude_modules"] = rf"({'|'.join(left)})(\..*)?"
    if wanted.method == "ia3":
        config = IA3Config(feedforward_modules=[], **common)
    else:
        config = LoraConfig(
            r=wanted.rank,
            lora_alpha=wanted.alpha,
            lora_dropout=wanted.dropout,
            use_rslora=wanted.method == "rslora",
            use_dora=wanted.method == "dora",
            **common,
        )
    shapes_only = any(parameter.is_meta for parameter in model.parameters())
    adapted = cast("PreTrainedModel", get_peft_model(model, config, low_cpu_mem_usage=shapes_only))
    if wanted.method in SHARED:
        layers: list[Any] = [one for one in adapted.modules() if hasattr(one, "lora_A")]
        for layer in layers:
            layer._cast_input_dtype = functools.partial(_outside_autocast, layer._cast_input_dtype)  # noqa: SLF001
    try:
        model.get_input_embeddings()
    except NotImplementedError:  # PEFT asks again where it saves an adapter beside an own vocabulary (Wav2Vec2's CTC)
        model.get_input_embeddings = _none  # type: ignore[assignment, method-assign]
    return adapted


def _none() -> None:
    """The table of tokens of a model that reads sounds or images."""


def _routers(model: nn.Module) -> list[str]:
    """Routers that are linear layers and give more than their product (Llama 4, Phi-MoE): PEFT can't wrap one."""
    from torch import nn

    found = ((name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear))
    return [name for name, one in found if "Router" in type(one).__name__]


def _outside_autocast(cast_input: Callable[..., torch.Tensor], x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The input of a LoRA layer in the dtype of its matrices, unless autocast casts both to 16 bits anyway.

    PEFT turns an input in 16 bits to float32, and autocast back: the same numbers, once more for each of the layers
    that are given it, and all of them are kept for the backward pass. Its layers of quantized weights leave that out
    under autocast, too (``tuners/lora/bnb.py``).
    """
    import torch

    return x if torch.is_autocast_enabled(x.device.type) else cast_input(x, dtype)


def adapter_on(model: nn.Module) -> tuple[str | None, list[str]]:
    """The adapter whose layers are switched on, in words, and the names of the modules that it is on.

    Read off PEFT's layers, not off its config: a config says what was asked for.
    """
    kinds, names = set(), set()
    modules = cast("list[tuple[str, Any]]", list(model.named_modules()))
    configs: dict[str, Any] = next((one.peft_config for _, one in modules if hasattr(one, "peft_config")), {})
    for path, module in modules:
        if not getattr(module, "adapter_layer_names", ()) or getattr(module, "disable_adapters", True):
            continue
        if "modules_to_save" in module.adapter_layer_names:
            continue  # it is trained whole
        for active in module.active_adapters:
            if active in getattr(module, "lora_A", ()):
                kind = "dora" if active in getattr(module, "lora_magnitude_vector", ()) else "lora"
                fused = _fused(module.r[active], configs.get(active))
                rooted = math.sqrt(fused) if getattr(module, "use_rslora", {}).get(active) else 1
                kinds.add(f"{kind} r={module.r[active] // fused} scaling={module.scaling[active] / rooted:.4g}")
            else:
                kinds.add(type(module).__module__.split(".")[-2])
            names.add(path.rpartition(".")[2])
    return " and ".join(sorted(kinds)) or None, sorted(names)


def weights_added(model: nn.Module) -> Iterator[nn.Parameter]:
    """What PEFT has put beside a model's layers, and keeps in float32: those of ``cast_adapter_dtype``.

    A module that is trained whole (``modules_to_save``) has the dtype that it is loaded in. So have the copies that LN
    tuning trains, which are among these: a trial's evidence tells.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch import nn

    layers = [one for one in model.modules() if isinstance(one, BaseTunerLayer)]
    tables = {one for layer in layers for one in layer.modules() if isinstance(one, nn.ModuleDict | nn.ParameterDict)}
    for table in tables:
        yield from table.parameters()


def _fused(rank: int, config: Any) -> int:
    """How many weights stand in the one that an adapter of this rank is on.

    An expert's two first weights are one parameter, on which PEFT puts an adapter of the rank of both together
    (``peft.utils.transformers_weight_conversion``).
    """
    patterns = getattr(config, "rank_pattern", None) or {}
    return rank // config.r if rank in patterns.values() and rank % config.r == 0 else 1
