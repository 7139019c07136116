"""Which parts of a model recompute, and which of them stand inside others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from autofit.contract.observation import Hooks, Read


def inside_others(model: nn.Module) -> int:
    """Layers that stand inside of others: transformers counts both."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = {one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)}
    return len(layers & {part for one in layers for part in one.modules() if part is not one})


def watch_parts(model: nn.Module, hooks: Hooks) -> Read:
    """Watch which parts of the modules that can recompute run, and which do so again in the backward pass."""
    import torch

    ran: tuple[set[nn.Module], set[nn.Module]] = set(), set()

    def before(part: nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            ran[torch._C._current_graph_task_id() >= 0].add(part)  # noqa: SLF001 - as torch.utils.checkpoint asks

    able = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    children = [child for module in able for child in module.children()]
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
    for part in {one for child in children for one in (child.children() if isinstance(child, lists) else [child])}:
        hooks.before(part, before)
    # none where a compiled graph holds them all
    return lambda _: {"layers": len(ran[0]) or None, "layers_recomputed": len(ran[1]) if ran[0] else None}
