"""What a technique is shown of training steps that ran, to read its own evidence off it.

The observer of :mod:`autofit.training.observer` watches the model's forward passes and what belongs to no technique.
A technique that needs to see more of a forward pass hangs hooks of its own on the model, by :class:`Hooks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from autofit.contract.recipe import Recipe

Seen = Mapping[str, Any]
"""What a technique saw of itself, as JSON values; empty where nothing was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A model that trained some steps, and what was seen of it meanwhile.

    Attributes:
        model: The model before Accelerate or a Trainer wraps it.
        running: The module whose forward pass ran: the model itself, unless a wrapper made a copy of it.
        optimizer: The innermost optimizer, under Accelerate's and DeepSpeed's wrappers.
        accelerator: The accelerator that prepared both; ``None`` where there is none.
        recipe: What was to be run; its ``state`` holds what a technique's own code counted.
        rows: Rows of a micro-batch: of the largest one, since an epoch may end with a smaller one.
        accumulation: Micro-batches in an optimizer step; ``None`` where they only stand for more.
        products: Of each repeated layer the first module that multiplies by a matrix; of the model, where it has no
            layers.
        layer_forwards: How often each layer ran forward in a micro-step; layers that never did, or only inside of
            compiled graphs, are left out.
        forwards_in_graph: The same of a layer inside of a compiled graph, the most that was seen.
        output: The dtype of what the last product gave, and the product; no product inside of a compiled graph.
        in_graph: Whether the model's whole forward pass is inside of a compiled graph.
        compiled_graphs: Graphs that ``torch.compile`` has made in this process.
        loader: The loader that gave the micro-batches; ``None`` where it is not known.
    """

    model: nn.Module
    running: nn.Module
    optimizer: Any
    accelerator: Any
    recipe: Recipe
    rows: int | None
    accumulation: int | None
    products: tuple[nn.Module, ...]
    layer_forwards: tuple[int, ...]
    forwards_in_graph: int | None
    output: tuple[str | None, nn.Module | None]
    in_graph: bool
    compiled_graphs: int
    loader: Any = None

    @property
    def on_cuda(self) -> bool:
        """Whether the device is a CUDA one."""
        return self.recipe.facts.hardware.device == "cuda"

    @property
    def engine(self) -> str:
        """What runs the model, as Accelerate calls it: ``NO``, ``MULTI_GPU``, ``DEEPSPEED``, ``FSDP``, ``FSDP2``...

        ``DataParallel``, of which Accelerate knows nothing: a Trainer of one process that sees several devices splits
        its batches over them.
        """
        if getattr(self.running, "_is_replica", False):  # torch.nn.parallel.replicate says so
            return "DataParallel"
        kind = str(getattr(self.accelerator, "distributed_type", "NO")).rsplit(".", 1)[-1]
        return kind + "2" * bool(kind == "FSDP" and getattr(self.accelerator, "is_fsdp2", False))

    def state_tensors(self) -> list[Any]:
        """The tensors of the optimizer's state; step counts and scales of one element are left out."""
        states = [one for one in getattr(self.optimizer, "state", {}).values() if isinstance(one, Mapping)]
        tensors = [value for state in states for value in state.values() if hasattr(value, "dtype")]
        return [tensor for tensor in tensors if tensor.numel() > 1]


Read = Callable[[Ran], Seen]


class Hooks:
    """Forward hooks on a model, which cost some microseconds each and are taken off together.

    They are called for the passes of training alone: not in ``model.eval()``, unless nothing else was seen (a loop may
    train a model as ``from_pretrained`` leaves it, in that mode), and not without gradients. That is told
    at the beginning of the model's forward pass, since reentrant checkpointing runs layers without gradients; layers
    that run by themselves are asked there (below an adapter, the model inside generates). What a backward pass
    recomputes belongs to training, whatever ran without gradients before it (the reference of DPO).

    A compiler takes hooks into its graph: a hook asks ``torch.compiler.is_compiling()``, looks once while the graph is
    made, by ``torch._dynamo.comptime``, and leaves nothing in it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._training = True
        self._in_its_mode = False
        self._inside = False
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end),
        ]

    def _begin(self, module: nn.Module, _args: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            self._in_its_mode = self._in_its_mode or module.training
            self._training = module.training == self._in_its_mode and torch.is_grad_enabled()
            self._inside = True

    def _end(self, *_: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            self._inside = False

    def _for_training(self, hook: Callable[..., None]) -> Callable[..., None]:
        import torch

        def only(module: nn.Module, given: Any, more: Any) -> None:
            if torch.compiler.is_compiling():
                trains = module.training
            else:  # -1 outside of a backward pass
                trains = self._training and (self._inside or torch.is_grad_enabled())
                trains |= torch._C._current_graph_task_id() >= 0  # noqa: SLF001 - there is no other
            if trains:
                hook(module, given, more)

        return only

    def before(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call ``hook(module, args, kwargs)`` before each forward pass of a module."""
        self._handles.append(module.register_forward_pre_hook(self._for_training(hook), with_kwargs=True))

    def after(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call ``hook(module, args, output)`` after each forward pass of a module."""
        self._handles.append(module.register_forward_hook(self._for_training(hook)))

    def close(self) -> None:
        """Take all of them off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def dtype_name(tensor: Any) -> str:
    """The dtype of a tensor, such as ``bfloat16``."""
    return str(tensor.dtype).removeprefix("torch.")
