"""What really happened: evidence of each knob, read off the live model and optimizer.

A knob that a library ignored must not be measured as if it had been used. The same observer watches a trial and a
launch; what it sees goes to each technique's ``in_effect``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autofit.plan import Evidence

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autofit.recipe import Recipe


class Observer:
    """Watches a model through forward hooks, which cost some microseconds a micro-step.

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
        self.leaf_calls = 0
        self._handles: list[Any] = []
        self.leaf = leaf = _first_product(model, recipe.facts.model.layer_classes)
        self._handles.append(model.register_forward_pre_hook(self._before_model, with_kwargs=True))
        if leaf is not None:
            self._handles.append(leaf.register_forward_hook(self._after_leaf))

    def _before_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None:
            self.rows, self.seq_len = int(ids.shape[0]), int(ids.shape[-1])
        self.padding_mask = kwargs.get("attention_mask") is not None
        self.micro_steps += 1

    def _after_leaf(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        # layers of quantized weights give back the dtype that they were given
        inside = "int8" if _quantized(module) == "int8" else getattr(module, "compute_dtype", None)
        self.compute_dtype = str(inside or first.dtype).removeprefix("torch.")
        self.leaf_calls += 1

    def close(self) -> None:
        """Take the hooks off."""
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
        group = real.param_groups[0] if getattr(real, "param_groups", None) else {}
        on_cuda = self.recipe.facts.hardware.device == "cuda"
        adapter, adapted = _adapter(self.model)
        return Evidence(
            micro_batch=self.rows,
            seq_len=self.seq_len,
            accumulation=accumulation,
            padding_mask=self.padding_mask,
            compute_dtype=self.compute_dtype,
            weights_dtype=_dtype(_main_weight(parameters)),
            gradient_scaler=getattr(accelerator, "scaler", None) is not None,
            tf32=torch.backends.cuda.matmul.fp32_precision == "tf32" if on_cuda else None,
            layer_forwards=round(self.leaf_calls / self.micro_steps) if self.micro_steps and self.leaf_calls else None,
            optimizer=f"{type(real).__module__}.{type(real).__qualname__}",
            optimizer_fused=group.get("fused"),
            optimizer_momentum=group.get("momentum"),
            optimizer_state_dtypes=state_dtypes,
            optimizer_state_devices=state_devices,
            parameter_devices=tuple(sorted({parameter.device.type for parameter in parameters})),
            offloaded_activation_bytes=getattr(keeper, "moved_bytes", 0),
            parameters=sum(parameter.numel() for parameter in parameters),
            trainable_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            adapter=adapter,
            adapted=adapted,
            quantized=_quantized(self.leaf),
            engine=_engine(accelerator),
        )


def _first_product(model: nn.Module, layer_classes: tuple[str, ...]) -> nn.Module | None:
    """The first module inside the first layer that multiplies by a matrix: it is recomputed with its layer."""
    layer = next((module for module in model.modules() if type(module).__name__ in layer_classes), model)
    for module in layer.modules():
        weight = getattr(module, "weight", None)
        shape = getattr(weight, "ds_shape", getattr(weight, "shape", ()))  # ZeRO-3 leaves an empty tensor behind
        if len(shape) == 2 and not any(module.children()) and "Embed" not in type(module).__name__:
            return module
    return None


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


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _state(optimizer: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Dtypes and device types of the optimizer's state; step counts and scales of one element are left out."""
    dtypes, devices = set(), set()
    for state in getattr(optimizer, "state", {}).values():
        for value in state.values() if isinstance(state, dict) else ():
            if hasattr(value, "dtype") and value.numel() > 1:
                dtypes.add(_dtype(value))
                devices.add(value.device.type)
    return tuple(sorted(dtypes)), tuple(sorted(devices))


def _engine(accelerator: Any) -> str:
    """What runs the model: ``none``, ``fsdp2``, ``fsdp1`` or ``deepspeed``."""
    kind = str(getattr(accelerator, "distributed_type", "NO")).rsplit(".", 1)[-1]
    if kind == "FSDP":
        return "fsdp2" if getattr(accelerator, "is_fsdp2", False) else "fsdp1"
    return "deepspeed" if kind == "DEEPSPEED" else "none"
