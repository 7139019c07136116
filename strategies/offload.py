"""Offload: what waits in the host's memory while the device does not need it.

- ``activations``: tensors saved for the backward pass are copied to pinned host memory and back. Saves what
  checkpointing saves without recomputing; costs two copies over the bus. Weights, and the copies that autocast
  makes of them, stay. Source: ``torch.autograd.graph.saved_tensors_hooks``.
- ``optimizer``: the optimizer's state lives in pinned host memory; a step brings it in a few hundred MiB at a
  time, steps those parameters on the device, and takes it out again. The arithmetic is the same.
- ``fsdp2``: parameters, gradients and state on the host through PyTorch's fully sharded data parallel
  (``fsdp_offload_params``); a layer's weights come in when it runs, and the optimizer steps on the host.
- ``zero2``, ``zero3``: DeepSpeed's ZeRO-Offload, where DeepSpeed is installed: gradients and state (2), and the
  parameters too (3), with a vectorized AdamW on the host. Ren et al. (arXiv 2101.06840).

All of class ``exact``. The host has a ceiling of its own, since this spends it. On a CPU the device's memory is
the host's, so there is nothing to offload to.

Not covered: disks (NVMe); overlapping the copies of activations with the computation on a stream of their own.
"""

from __future__ import annotations

import functools
import math
import types
from typing import TYPE_CHECKING, Any

from autofit.contract.emission import Emission
from autofit.contract.placement import current
from autofit.contract.technique import Choice, Held, HostOffload, Kind, Part, Prior, Technique

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from autofit.contract.facts import Facts
    from autofit.contract.observation import Ran, Seen
    from autofit.contract.plan import Value
    from autofit.contract.recipe import Recipe
    from autofit.contract.trace import Ints

_ENGINES = {"fsdp2": "fsdp2", "zero2": "deepspeed", "zero3": "deepspeed"}
_OF_ACCELERATE = {"FSDP2": "fsdp2", "FSDP": "fsdp1", "DEEPSPEED": "deepspeed"}
"""Engines, as Accelerate calls them."""
_REFUSED = {
    ("fsdp2", "fp16"): "gradients on the host can't be scaled with those on the device",
    **dict.fromkeys(
        (("zero2", "bf16_weights"), ("zero3", "bf16_weights")), "DeepSpeed keeps a float32 copy of its own"
    ),
    **{(engine, "fp8"): f"float8 layers were not tried under {engine}" for engine in _ENGINES},
}
_SMALLEST_BYTES = 1 << 20  # smaller tensors cost more to move than they free
_PLAIN_STATE = {"adamw", "adafactor", "sgd"}
_CHUNK_BYTES = 256 << 20
_HOST_STEP_PASSES = 7
"""An AdamW step on the host reads weight, gradient and both moments, and writes all but the gradient."""
_ZERO3_LIVE_PARAMETERS, _ZERO_BUCKET_PARAMETERS = 10**9, 5 * 10**8
"""DeepSpeed's ``stage3_max_live_parameters`` and ``reduce_bucket_size``, where the user sets none."""


class Offload(Technique):
    """What waits on the host."""

    name = "offload"
    baseline = "none"
    packages = {"deepspeed": ""}

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        none = Choice("none", Kind.EXACT, "offered", "everything stays on the device")
        if facts.hardware.device == "cpu":
            same = "the device's memory is the host's memory"
            return (
                none,
                *(
                    Choice(value, Kind.EXACT, "withheld", same)
                    for value in ("activations", "optimizer", "fsdp2", "zero2", "zero3")
                ),
            )
        state_bytes = 16 * facts.model.parameters
        host = facts.workload.host_limit_bytes

        def fits(value: str, needed: int, reason: str) -> Choice:
            if needed > host:
                short = f"it needs {needed >> 20} MiB on the host, whose ceiling is {host >> 20} MiB"
                return Choice(value, Kind.EXACT, "withheld", short)
            return Choice(value, Kind.EXACT, "offered", reason)

        lacking = self.lacks(facts, "deepspeed")
        fsdp2 = fits("fsdp2", state_bytes, "parameters, gradients and state on the host; Accelerate launches it")
        if not facts.model.layer_classes:
            fsdp2 = Choice("fsdp2", Kind.EXACT, "withheld", f"{facts.model.architecture} names no layer to shard by")
        return (
            none,
            Choice("activations", Kind.EXACT, "offered", "saved tensors wait in pinned host memory"),
            fits("optimizer", state_bytes // 2, "the optimizer's state waits in pinned host memory"),
            fsdp2,
            *(
                Choice(stage, Kind.EXACT, "withheld", lacking)
                if lacking
                else fits(stage, state_bytes, "DeepSpeed's ZeRO-Offload")
                for stage in ("zero2", "zero3")
            ),
        )

    def conflict(self, value: Value, others: Mapping[str, Value], facts: Facts) -> str | None:
        optimizer, precision = others["optimizer"], others["precision"]
        if value in _ENGINES and not str(others["parallel"]).startswith(("none", "ddp")):
            return f"{value} shards by itself, and so does {others['parallel']}"
        if value == "activations" and others["checkpointing"] != "off":
            return "what checkpointing leaves is little; checkpointing=full_offload moves that"
        if value == "optimizer" and optimizer not in _PLAIN_STATE:
            return f"{optimizer} keeps or places its state in a way of its own"
        if value in _ENGINES and (optimizer != "adamw" or others["adapter"] != "none"):
            what = optimizer if optimizer != "adamw" else "an adapter beside frozen weights"
            return f"{value} steps on the host, where {what} does not run"
        if value == "zero3" and others["kernels"] == "chunked_ce":
            return "DeepSpeed holds the output layer's weight only while that layer runs"
        return _REFUSED.get((str(value), str(precision)))

    def apply(self, value: Value, recipe: Recipe) -> None:
        if value == "activations":
            keeper = recipe.state[self.name] = HostActivations()
            recipe.model_wraps.append(functools.partial(offload_activations, keeper=keeper))
        elif value == "optimizer":
            recipe.optimizer_wraps.append(keep_state_on_host)

    def held(self, facts: Facts) -> Held | None:
        script = facts.workload.script
        return (
            None
            if script is None
            else Held(self.baseline, "what waits on the host is not tried with scripts yet", firm=True)
        )

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        if value == "fsdp2":
            return Emission(
                accelerate={
                    "distributed_type": "FSDP",
                    "fsdp_config": {
                        "fsdp_version": 2,
                        "fsdp_offload_params": True,
                        "fsdp_reshard_after_forward": True,
                        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                        "fsdp_transformer_layer_cls_to_wrap": ",".join(facts.model.layer_classes),
                        "fsdp_state_dict_type": "FULL_STATE_DICT",
                        "fsdp_cpu_ram_efficient_loading": False,
                        "fsdp_activation_checkpointing": False,
                    },
                }
            )
        if value in {"zero2", "zero3"}:
            return Emission(
                accelerate={
                    "distributed_type": "DEEPSPEED",
                    "deepspeed_config": {
                        "zero_stage": int(str(value)[-1]),
                        "offload_optimizer_device": "cpu",
                        "offload_param_device": "cpu" if value == "zero3" else "none",
                        "gradient_accumulation_steps": int(plan["accumulation"]),
                        "gradient_clipping": 1.0,
                        "zero3_init_flag": False,
                        "zero3_save_16bit_model": value == "zero3",
                    },
                }
            )
        lines = {
            "activations": ("keep activations on the host: model = setup.model(...)",),
            "optimizer": (
                (
                    "keep the optimizer's state on the host: "
                    "Trainer(..., optimizers=(setup.optimizer(model, learning_rate=...), None))"
                ),
            ),
        }
        return Emission(script=lines.get(str(value), ()))

    def traced_as(self, value: Value, part: Part) -> Value | None:
        if value in _ENGINES:
            return None  # shards live in processes that a trace does not have
        matters = {"micro_steps": "activations", "optimizer": "optimizer"}[part]
        return value if value == matters else "none"

    def host_offload(self, value: Value, plan: Mapping[str, Value], facts: Facts, weights: Ints) -> HostOffload | None:
        if value not in _ENGINES:
            return None
        model, every = facts.model, float(weights.sum())
        width = 2 if plan["precision"] == "bf16_weights" else 4
        shrunk = 0.5 if plan["precision"] in {"bf16", "fp16"} else 1.0  # each engine gathers weights in what computes
        root = float(weights[weights >= model.vocab_size * model.hidden_size * width].sum())  # embedding and head
        layer = (every - root) / max(model.layers, 1)
        through_host = _HOST_STEP_PASSES * every
        if value == "fsdp2":  # the root stays gathered, its gradient beside it; of the layers, this one and the next
            held = shrunk * (2 * root + 3 * layer) + layer
            return HostOffload(held_bytes=held, micro_step_bytes=3 * every, step_bytes=through_host)
        held = shrunk * (every if value == "zero2" else min(every, _ZERO3_LIVE_PARAMETERS * width))
        held += shrunk * min(every, _ZERO_BUCKET_PARAMETERS * width)
        up_and_down = 1 if value == "zero2" else 3
        return HostOffload(held_bytes=held, micro_step_bytes=up_and_down * shrunk * every, step_bytes=through_host)

    def observe(self, ran: Ran) -> Seen:
        keeper = ran.recipe.state.get(self.name)
        return {
            "engine": _OF_ACCELERATE.get(ran.engine, "none"),
            "activation_bytes": keeper.moved_bytes if isinstance(keeper, HostActivations) else 0,
            "optimizer": type(ran.optimizer).__qualname__,
            "state_devices": sorted({tensor.device.type for tensor in ran.state_tensors()}),
            "parameter_devices": sorted({parameter.device.type for parameter in ran.model.parameters()}),
        }

    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        engine, runs = _ENGINES.get(str(value), "none"), seen.get("engine", "none")
        states, parameters = seen.get("state_devices", []), seen.get("parameter_devices", [])
        if runs != engine:
            return f"the model runs under {runs}, not {engine}"
        if value == "activations" and not seen.get("activation_bytes"):
            return "no activation was copied to the host"
        if value == "optimizer" and "cpu" not in states:
            return f"the optimizer's state is on {', '.join(states) or 'no device'}"
        if engine == "deepspeed" and "CPUAdam" not in str(seen.get("optimizer")):
            return f"{seen.get('optimizer')} stepped, not DeepSpeed's optimizer for the host"
        if value == "fsdp2" and parameters != ["cpu"]:
            return f"the parameters are on {', '.join(parameters) or 'no device'}"
        return None

    def spends_host(self, value: Value) -> bool:
        return value != self.baseline

    def word(self, value: Value) -> str | None:
        return None if value == self.baseline else f"offload {value}"

    def prior(self, value: Value, facts: Facts) -> Prior:
        """What crosses the bus costs time in proportion; how much of it hides is not known beforehand."""
        return {
            "none": Prior(time=(0.0, 0.01), memory=(0.0, 0.01)),
            "activations": Prior(time=(0.5, 0.4), memory=(-0.4, 0.3)),
            "optimizer": Prior(time=(0.3, 0.3), memory=(-0.3, 0.2)),
            "fsdp2": Prior(time=(0.9, 0.5), memory=(-1.0, 0.4)),
            "zero2": Prior(time=(0.6, 0.5), memory=(-0.7, 0.3)),
            "zero3": Prior(time=(0.9, 0.5), memory=(-1.0, 0.4)),
        }[str(value)]


class HostActivations:
    """Keeps the tensors that one forward pass saves for its backward pass on the host.

    The model's parameters stay where they are, and so do tensors of a parameter's shape (autocast's copies).

    Attributes:
        moved_bytes: Bytes copied to the host so far.
    """

    def __init__(self) -> None:
        self.moved_bytes = 0
        self._keep: set[tuple[int, ...]] = set()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Copy to the host, or keep; what comes back is what ``unpack`` gets."""
        small = tensor.nbytes < _SMALLEST_BYTES
        if small or tuple(tensor.shape) in self._keep or not current().on_device(tensor):
            return tensor
        self.moved_bytes += tensor.nbytes
        return (tensor.device, current().to_host(tensor))

    def unpack(self, packed: Any) -> torch.Tensor:
        """Bring back what ``pack`` moved."""
        if isinstance(packed, tuple):
            device, host = packed
            return current().to_device(host, device)
        kept: torch.Tensor = packed
        return kept

    def hooks(self, model: nn.Module) -> torch.autograd.graph.saved_tensors_hooks:
        """The context to run a forward pass of the model in."""
        from torch.autograd.graph import saved_tensors_hooks

        if not self._keep:
            for parameter in model.parameters():
                self._keep.update({tuple(parameter.shape), tuple(reversed(parameter.shape))})
        return saved_tensors_hooks(self.pack, self.unpack)


def offload_activations(model: PreTrainedModel, keeper: HostActivations) -> PreTrainedModel:
    """Run every forward pass of the model with its saved tensors on the host."""
    forward = model.forward

    @functools.wraps(forward)
    def with_host_activations(*args: Any, **kwargs: Any) -> Any:
        with keeper.hooks(model):
            return forward(*args, **kwargs)

    model.forward = with_host_activations
    return model


def keep_state_on_host(optimizer: torch.optim.Optimizer, chunk_bytes: int = _CHUNK_BYTES) -> torch.optim.Optimizer:
    """Keep the state on the host between steps, and bring it to the device a chunk of parameters at a time.

    The parameter groups are split so that each holds about ``chunk_bytes`` of parameters. A step then visits
    them one by one: bring in, step, take out. State of one element (step counts) stays where it is.
    """
    import torch

    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        settings = {name: value for name, value in group.items() if name != "params"}
        held = math.inf
        for parameter in group["params"]:
            if held >= chunk_bytes:
                groups.append({**settings, "params": []})
                held = 0
            groups[-1]["params"].append(parameter)
            held += parameter.nbytes
    optimizer.param_groups = groups
    step = optimizer.step

    @functools.wraps(step)
    def step_in_chunks(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        result, whole = None, optimizer.param_groups
        try:
            for group in whole:
                _move_state(optimizer, group, out=False)
                optimizer.param_groups = [group]
                result = step(*args, **kwargs)
                _move_state(optimizer, group, out=True)
        finally:
            optimizer.param_groups = whole
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # whoever reads the state next reads it whole
        return result

    # a bound method: PyTorch's schedulers wrap what is under it
    optimizer.step = types.MethodType(step_in_chunks, optimizer)  # type: ignore[method-assign]
    return optimizer


def _move_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], *, out: bool) -> None:
    """Move the state of a group's parameters to pinned host memory, or back to where the parameters are."""
    import torch

    for parameter in group["params"]:
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or value.numel() <= 1:
                continue
            if not out:
                if not current().on_device(value):
                    state[name] = current().to_device(value, parameter.device)
            elif current().on_device(value):
                state[name] = current().to_host(value)
