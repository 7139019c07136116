"""What really happened: evidence of each knob, read off the live model and optimizer.

A knob that a library ignored must not be measured as if it had been used. The same observer watches a trial and a
launch; what it sees goes to each technique's ``in_effect``.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any, Literal

from autofit.contract.outcome import Evidence

if TYPE_CHECKING:
    from torch import nn

    from autofit.contract.recipe import Recipe


_KERNELS = {
    "ScaledDotProductFlashAttention": "flash",
    "ScaledDotProductEfficientAttention": "efficient",
    "ScaledDotProductCudnnAttention": "cudnn",
    "SafeSoftmax": "math",
    "FlashAttn": "flash_attn",
    "flash_attn": "flash_attn",
    "FlexAttention": "flex",
    "flex_attention": "flex",
}
"""Kernels of attention, by what the names of their nodes in autograd's graph hold."""
_OPAQUE = ("CompiledFunction", "CheckpointFunction")
"""Nodes that hide what they run: torch.compile's, and reentrant checkpointing's."""


class Observer:
    """Watches a model through forward hooks, which cost some microseconds a micro-step.

    The first forward pass is looked at more closely: the kernels that ran in it are read off autograd's graph.
    A compiler takes hooks into the graph. There they look once, while the graph is made, and leave nothing in it.

    Args:
        model: The unwrapped model; wrappers keep its modules, and so the hooks.
        recipe: Tells which classes are layers.
    """

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.model = model
        self.recipe = recipe
        self.rows: int | None = None
        self.seq_len: int | None = None
        self.padding_mask: bool | None = None
        self.compute_dtype: str | None = None
        self.micro_steps = 0
        self.attention_kernels: tuple[str, ...] | None = None
        self.whole_logits: bool | None = None
        self.running: nn.Module = model
        self.model_compiled = False
        self.compiled_forwards: int | None = None
        self._handles: list[Any] = []
        self._handles.append(model.register_forward_pre_hook(self._before_model(), with_kwargs=True))
        products = _layer_products(model, recipe.facts.model.layer_classes)
        self.leaf = next(iter(products), None)
        self.calls = [0] * len(products)
        for place, product in enumerate(products):
            self._handles.append(product.register_forward_hook(self._after_product(place)))
        self._handles.append(model.register_forward_hook(self._after_model))
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if head is not None:
            self._handles.append(head.register_forward_hook(self._after_head()))

    def _before_model(self) -> Any:
        import torch

        def compiled(context: Any) -> None:
            self.model_compiled = True
            ids = context.get_local("ids")
            if ids.python_type() is not type(None):
                shape = ids.as_fake().shape
                self.rows, self.seq_len = (int(size) if isinstance(size, int) else None for size in shape)
            self.padding_mask = context.get_local("mask").python_type() is not type(None)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = kwargs.get("input_ids", args[0] if args else None)
            mask = kwargs.get("attention_mask")
            if torch.compiler.is_compiling():
                torch._dynamo.comptime.comptime(compiled)  # noqa: SLF001 - there is no other door to a graph's making
                return
            if ids is not None:
                self.rows, self.seq_len = int(ids.shape[0]), int(ids.shape[-1])
            self.padding_mask = mask is not None
            self.running = module
            self.micro_steps += 1

        return hook

    def _after_product(self, place: int) -> Any:
        import torch

        def compiled(context: Any) -> None:
            self.compute_dtype = _dtype(context.get_local("first").as_fake())
            self.compiled_forwards = max(self.compiled_forwards or 0, _forwards(context) or 0) or None

        def hook(module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if torch.compiler.is_compiling():
                torch._dynamo.comptime.comptime(compiled)  # noqa: SLF001 - as above
                return
            # layers of quantized weights give back the dtype that they were given
            inside = "int8" if _quantized(module) == "int8" else getattr(module, "compute_dtype", None)
            self.compute_dtype = str(inside or first.dtype).removeprefix("torch.")
            self.calls[place] += 1

        return hook

    def _after_model(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        import torch

        if torch.compiler.is_compiling():  # a compiled model shows no graph
            return
        if self.micro_steps == 1:
            self.attention_kernels = _attention_kernels(output)
        if self.whole_logits is None:
            self.whole_logits = False

    def _after_head(self) -> Any:
        import torch

        vocabulary = self.recipe.facts.model.vocab_size

        def compiled(context: Any) -> None:
            self.whole_logits = int(context.get_local("scores").as_fake().shape[-1]) >= vocabulary

        def hook(_module: nn.Module, args: tuple[Any, ...], scores: Any) -> None:
            if torch.compiler.is_compiling():
                torch._dynamo.comptime.comptime(compiled)  # noqa: SLF001 - as above
            elif scores is not args[0] and scores.shape[-1] >= vocabulary:
                self.whole_logits = True

        return hook

    def _forwards(self) -> list[int]:
        """How often each layer ran forward in a micro-step; those that never did, or only in graphs, are left out."""
        return [round(calls / self.micro_steps) for calls in self.calls if calls and self.micro_steps]

    def compiled(self) -> Literal["none", "regions", "model"]:
        """What of the model runs as graphs of a compiler."""
        if self.model_compiled:
            return "model"
        modules = self.running.modules()
        parts = any(hasattr(one, "_orig_mod") or one._compiled_call_impl is not None for one in modules)  # noqa: SLF001
        return "regions" if parts and compiled_graphs() else "none"

    def close(self) -> None:
        """Take the hooks off; a graph that was made with them is made anew without them, so there they stay."""
        if self.compiled() != "none":
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def evidence(self, optimizer: Any, accelerator: Any, accumulation: int | None) -> Evidence:
        """What was seen so far; to be called between two optimizer steps, after the second.

        Args:
            optimizer: The optimizer that steps, wrapped or not.
            accelerator: The accelerator that prepared it.
            accumulation: Micro-batches that were counted in one optimizer step, where they were.
        """
        import torch

        real = _unwrapped(optimizer)
        state_dtypes, state_devices = _state(real)
        parameters = list(self.model.parameters())
        keeper = getattr(self.model, "autofit_host_activations", None)
        kept = getattr(self.model, "autofit_kept_outputs", None)
        forwards = self._forwards()
        chunked = getattr(self.model, "autofit_chunked_loss", None)
        config: Any = getattr(self.model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        group = real.param_groups[0] if getattr(real, "param_groups", None) else {}
        on_cuda = self.recipe.facts.hardware.device == "cuda"
        adapter, adapted = _adapter(self.model)
        rounded = getattr(real, "bf16_stochastic_round", None)  # transformers reads a number off its argument
        return Evidence(
            micro_batch=self.rows,
            seq_len=self.seq_len,
            accumulation=accumulation,
            padding_mask=self.padding_mask,
            compute_dtype=self.compute_dtype,
            weights_dtype=_dtype(_main_weight(parameters)),
            float8_linears=sum(type(module).__name__ == "Float8Linear" for module in self.model.modules()),
            gradient_scaler=getattr(accelerator, "scaler", None) is not None,
            tf32=torch.backends.cuda.matmul.fp32_precision == "tf32" if on_cuda else None,
            layer_forwards=max(forwards, default=self.compiled_forwards),
            layers=len(forwards) or None,
            layers_recomputed=sum(count > 1 for count in forwards) if forwards else None,
            kept_outputs=getattr(kept, "count", 0),
            optimizer=f"{type(real).__module__}.{type(real).__qualname__}",
            optimizer_fused=group.get("fused"),
            optimizer_momentum=group.get("momentum"),
            optimizer_paged=getattr(real, "is_paged", None),
            optimizer_projected=_projected(real),
            optimizer_stochastic=None if rounded is None else bool(rounded),
            optimizer_state_dtypes=state_dtypes,
            optimizer_state_devices=state_devices,
            parameter_devices=tuple(sorted({parameter.device.type for parameter in parameters})),
            offloaded_activation_bytes=getattr(keeper, "moved_bytes", 0),
            attention=getattr(text, "_attn_implementation", None),
            attention_kernels=self.attention_kernels,
            whole_logits=self.whole_logits,
            chunked_losses=getattr(chunked, "losses", 0),
            liger_modules=_liger_modules(self.model),
            parameters=sum(parameter.numel() for parameter in parameters),
            trainable_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            adapter=adapter,
            adapted=adapted,
            quantized=_quantized(self.leaf),
            engine=_engine(accelerator),
            compiled=self.compiled(),
            compile_mode=_compile_mode(accelerator),
            compiled_graphs=compiled_graphs(),
            cuda_graphs=_cuda_graphs() if on_cuda else None,
        )


def with_later_state(seen: Evidence, optimizer: Any) -> Evidence:
    """The evidence, with a state that came later: while a loss scale is too high, steps are skipped."""
    if seen.optimizer_state_dtypes:
        return seen
    dtypes, devices = _state(_unwrapped(optimizer))
    return dataclasses.replace(seen, optimizer_state_dtypes=dtypes, optimizer_state_devices=devices)


def _layer_products(model: nn.Module, layer_classes: tuple[str, ...]) -> list[nn.Module]:
    """Of each layer the first module that multiplies by a matrix; of the model, where it has no layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    modules = list(model.modules())
    checkpointed = [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
    named = [module for module in modules if type(module).__name__ in layer_classes]
    products = (_first_product(layer) for layer in checkpointed or named or [model])
    return list({id(product): product for product in products if product is not None}.values())


def compiled_graphs() -> int:
    """Graphs that ``torch.compile`` has made in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def _forwards(context: Any) -> int | None:
    """Two inside a checkpoint, which is a graph inside the graph and runs again in the backward pass; else one."""
    tracing = getattr(context, "_ComptimeContext__tx", None)
    tracer = getattr(getattr(tracing, "output", None), "current_tracer", None)
    return None if tracer is None else 1 + (tracer.parent is not None)


def _compile_mode(accelerator: Any) -> str | None:
    plugin = getattr(getattr(accelerator, "state", None), "dynamo_plugin", None)
    return None if plugin is None or plugin.backend.value == "NO" else plugin.mode


def _cuda_graphs() -> bool:
    """Whether Inductor keeps a tree of recorded CUDA graphs on the device."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    manager = trees.get_container(0).tree_manager
    return manager is not None and manager.new_graph_id().id > 0


def _first_product(layer: nn.Module) -> nn.Module | None:
    """The first module inside a layer that multiplies by a matrix: it is recomputed with its layer."""
    for module in layer.modules():
        weight = getattr(module, "weight", None)
        shape = getattr(weight, "ds_shape", getattr(weight, "shape", ()))  # ZeRO-3 leaves an empty tensor behind
        if len(shape) == 2 and not any(module.children()) and "Embed" not in type(module).__name__:
            return module
    return None


def _attention_kernels(output: Any) -> tuple[str, ...] | None:
    """Kernels of attention in the graph behind a model's output; ``None`` where the graph does not show them."""
    from torch.utils._pytree import tree_leaves

    waiting = [value.grad_fn for value in tree_leaves(output) if getattr(value, "grad_fn", None) is not None]
    seen, found = set(waiting), set[str]()
    while waiting:
        node = waiting.pop()
        name = node.name()
        if any(part in name for part in _OPAQUE):
            return None
        found.update(kernel for part, kernel in _KERNELS.items() if part in name)
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                waiting.append(before)
    return tuple(sorted(found)) if seen else None


def _liger_modules(model: nn.Module) -> tuple[str, ...]:
    """Modules of Liger that hold the forward functions of this model's modules."""
    named = {getattr(module.forward, "__module__", None) or "" for module in model.modules()}
    return tuple(sorted(name for name in named if name.startswith("liger_kernel")))


def _main_weight(parameters: list[nn.Parameter]) -> nn.Parameter:
    """The largest weight of the model itself: no adapter's, which is trained beside frozen ones, and no packed one."""
    floats = [parameter for parameter in parameters if parameter.dtype.is_floating_point]
    frozen = [parameter for parameter in floats if not parameter.requires_grad]
    return max(frozen or floats, key=lambda parameter: parameter.numel())


def _quantized(leaf: nn.Module | None) -> str | None:
    """How the weight of a linear layer is quantized; ``twice`` where its scales are, too."""
    weight: Any = getattr(leaf, "weight", None)
    state = getattr(weight, "quant_state", None)
    if state is not None:
        return f"{state.quant_type}{' twice' if state.nested else ''}"
    if type(weight).__module__.startswith("torchao."):
        return type(weight).__name__
    return None if weight is None or weight.dtype.is_floating_point else _dtype(weight)


def _adapter(model: nn.Module) -> tuple[str | None, tuple[str, ...]]:
    """The adapter whose layers are switched on, in words, and the names of the modules that it is on.

    Read off PEFT's layers, not off its config: a config says what was asked for.
    """
    kinds, names = set(), set()
    for path, module in model.named_modules():
        if not getattr(module, "adapter_layer_names", ()) or getattr(module, "disable_adapters", True):
            continue
        for active in module.active_adapters:
            if active in getattr(module, "lora_A", ()):
                kind = "dora" if active in getattr(module, "lora_magnitude_vector", ()) else "lora"
                kinds.add(f"{kind} r={module.r[active]} scaling={module.scaling[active]:.4g}")
            else:
                kinds.add(type(module).__module__.split(".")[-2])
            names.add(path.rpartition(".")[2])
    return " and ".join(sorted(kinds)) or None, tuple(sorted(names))


def _unwrapped(optimizer: Any) -> Any:
    """The innermost optimizer under Accelerate's and DeepSpeed's wrappers."""
    inner = getattr(optimizer, "optimizer", None)
    while inner is not None and inner is not optimizer:
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _state(optimizer: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Dtypes and device types of the optimizer's state; step counts and scales of one element are left out."""
    dtypes, devices = set(), set()
    for state in getattr(optimizer, "state", {}).values():
        for value in state.values() if isinstance(state, dict) else ():
            if hasattr(value, "dtype") and value.numel() > 1:
                dtypes.add(_dtype(getattr(value, "codes", value)))  # torchao's state says what it stands for
                devices.add(value.device.type)
    return tuple(sorted(dtypes)), tuple(sorted(devices))


def _projected(optimizer: Any) -> int:
    """Parameters whose gradients are projected to a lower rank."""
    return sum(len(group["params"]) for group in getattr(optimizer, "param_groups", ()) if "rank" in group)


def _engine(accelerator: Any) -> str:
    """What runs the model: ``none``, ``fsdp2``, ``fsdp1`` or ``deepspeed``."""
    kind = str(getattr(accelerator, "distributed_type", "NO")).rsplit(".", 1)[-1]
    if kind == "FSDP":
        return "fsdp2" if getattr(accelerator, "is_fsdp2", False) else "fsdp1"
    return "deepspeed" if kind == "DEEPSPEED" else "none"
