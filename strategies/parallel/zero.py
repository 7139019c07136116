"""DeepSpeed in a trace: its own engine, on fake tensors of a fake world.

Its flat buffers of weights, its buckets and its shares of the state are made by DeepSpeed itself, of the installed
version. What it has to be told: that the CPU it runs on has streams as a GPU has, that all ranks agree, and that no
gradient is infinite. It takes its optimizer's step at the end of the last backward pass.

Tried with DeepSpeed 0.19.
"""

from __future__ import annotations

import copy
import functools
import sys
from typing import TYPE_CHECKING, Any

from autofit.contract.technique import replacing

if TYPE_CHECKING:
    from collections.abc import Callable

_AGREEMENTS = ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks")
_ROOM = 1 << 60


def on_cpu() -> list[tuple[Any, str, Any]]:
    """What lets DeepSpeed's engine run on fake tensors of a CPU as it does on a GPU."""
    import torch
    from deepspeed.accelerator import real_accelerator
    from transformers.integrations import deepspeed as noted

    before, accelerator = real_accelerator.ds_accelerator, _like_a_gpu()
    real_accelerator.ds_accelerator = accelerator  # its modules ask for it as they are imported
    try:
        from deepspeed.comm import comm
        from deepspeed.runtime.zero import stage3, stage_1_and_2
        from deepspeed.utils import groups
    finally:
        real_accelerator.ds_accelerator = before
    changes = [(real_accelerator, "ds_accelerator", accelerator), (torch.Tensor, "record_stream", lambda *_: None)]
    # what it would leave behind: a product of its own, the world that it has come to know, and transformers' note of
    # its settings, by which the next model would be made in shares
    changes.append((torch.nn.functional, "linear", torch.nn.functional.linear))
    changes.append((noted, "_hf_deepspeed_config_weak_ref", None))
    kept = [(module, name) for module in (comm, groups) for name, value in vars(module).items() if _told(name, value)]
    changes += [(module, name, copy.copy(getattr(module, name))) for module, name in kept]
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("deepspeed.runtime")]
    changes += [(one, name, lambda *_, **__: None) for one in modules for name in _AGREEMENTS if hasattr(one, name)]
    engines = (stage_1_and_2.DeepSpeedZeroOptimizer, stage3.DeepSpeedZeroOptimizer_Stage3)
    return [*changes, *((engine, "has_overflow", _never(engine.has_overflow)) for engine in engines)]


def _told(name: str, value: Any) -> bool:
    """Whether a name of a module is a variable of it."""
    return not name.startswith("__") and (value is None or isinstance(value, (dict, list, bool)))


def _never(asked: Callable[..., Any]) -> Callable[..., bool]:
    """Asks, for the memory that it takes, and says no."""
    import torch

    @functools.wraps(asked)
    def no(*args: Any, **kwargs: Any) -> bool:
        with replacing([(torch.Tensor, "item", lambda _: 0)]):  # no trace knows the number
            asked(*args, **kwargs)
        return False

    return no


def _like_a_gpu() -> Any:
    """DeepSpeed's accelerator of a CPU, with streams, and with room for any model."""
    import torch
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    first = torch.cpu.current_stream()

    def no(*_: Any) -> bool:
        return False

    members = {
        "Stream": type("Stream", (torch.cpu.Stream,), {"synchronize": no, "query": lambda _: True}),
        "Event": type("Event", (torch.cpu.Event,), {"__init__": lambda *_, **__: None}),
        **dict.fromkeys(("is_synchronized_device", "resolves_data_dependency", "handles_memory_backpressure"), no),
        "use_host_timers": lambda _: True,
        "available_memory": lambda *_: _ROOM,
        "create_op_builder": lambda *_: None,
        "stream": lambda _, stream: torch.cpu.stream(stream),
        "current_stream": lambda *_: torch.cpu.current_stream(),
        "default_stream": lambda *_: first,
    }
    return type("LikeAGpu", (CPU_Accelerator,), members)()
