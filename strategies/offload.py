"""Offload: what waits in the host's memory while the device does not need it.

- ``activations``: tensors saved for the backward pass are copied to pinned host memory and back. Saves what
  checkpointing saves without recomputing; costs two copies over the bus. Weights, and the copies that autocast
  makes of them, stay. Source: ``torch.autograd.graph.saved_tensors_hooks``.
- ``optimizer``: the optimizer's state lives in pinned host memory; a step brings it in a few hundred MiB at a
  time, steps those parameters on the device, and takes it out again. The arithmetic is the same.
  Under DeepSpeed (``parallel=zero2``) it is ZeRO-Offload: gradients and state on the host, with a vectorized AdamW
  there. Ren et al. (arXiv 2101.06840).
- ``parameters``: parameters, gradients and state on the host. Under ``parallel=fsdp`` a layer's weights come in when it
  runs, and the optimizer steps on the host (``fsdp_offload_params``); under ``parallel=zero3`` DeepSpeed does the same.

All of class ``exact``. The host has a ceiling of its own, since this spends it. On a CPU the device's memory is
the host's, so there is nothing to offload to.

Not covered: disks (NVMe); overlapping the copies of activations with the computation on a stream of their own.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autofit.contract.emission import Emission
from autofit.contract.forward import run_forward_in
from autofit.contract.layout import engine_of, layout_of
from autofit.contract.placement import KeptOnHost, current
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

_PLAIN_STATE = {"adamw", "adafactor", "sgd"}
_CHUNK_BYTES = 256 << 20
_HOST_STEP_PASSES = 7
"""An AdamW step on the host reads weight, gradient and both moments, and writes all but the gradient."""
_HOST_SUM_PASSES = 3
"""To add to a gradient on the host reads two numbers, and writes one."""
_ZERO3_LIVE_PARAMETERS, _ZERO_BUCKET_PARAMETERS = 10**9, 5 * 10**8
"""DeepSpeed's ``stage3_max_live_parameters`` and ``reduce_bucket_size``, where the user sets none."""


class Offload(Technique):
    """What waits on the host."""

    name = "offload"
    baseline = "none"

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        none = Choice("none", Kind.EXACT, "offered", "everything stays on the device")
        if facts.hardware.device == "cpu":
            same = "the device's memory is the host's memory"
            return (
                none,
                *(Choice(value, Kind.EXACT, "withheld", same) for value in ("activations", "optimizer", "parameters")),
            )
        state_bytes = 16 * facts.model.parameters
        host = facts.workload.host_limit_bytes

        def fits(value: str, needed: int, reason: str) -> Choice:
            if needed > host:
                short = f"it needs {needed >> 20} MiB on the host, whose ceiling is {host >> 20} MiB"
                return Choice(value, Kind.EXACT, "withheld", short)
            return Choice(value, Kind.EXACT, "offered", reason)

        return (
            none,
            Choice("activations", Kind.EXACT, "offered", "saved tensors wait in pinned host memory"),
            fits("optimizer", state_bytes // 2, "the optimizer's state waits in pinned host memory"),
            fits("parameters", state_bytes, "parameters, gradients and state on the host, by FSDP or ZeRO-3"),
        )

    def conflict(self, value: Value, others: Mapping[str, Value], facts: Facts) -> str | None:
        parallel, optimizer = others["parallel"], others["optimizer"]
        engine = engine_of(parallel)
        if engine in {"fsdp", "deepspeed"}:
            return _under_engine(value, others, facts)
        if not_tried := self.not_tried_split(value, others, {"none"}):
            return not_tried
        if value == "parameters":
            return "parallel=fsdp or zero3 keeps parameters on the host"
        if value == "activations" and others["checkpointing"] != "off":
            return "what checkpointing leaves is little; checkpointing=full_offload moves that"
        if value == "optimizer" and optimizer not in _PLAIN_STATE:
            return f"{optimizer} keeps or places its state in a way of its own"
        return None

    def apply(self, value: Value, recipe: Recipe) -> None:
        if value == "activations":
            keeper = recipe.state[self.name] = HostActivations()
            recipe.model_wraps.append(functools.partial(offload_activations, keeper=keeper))
        elif value == "optimizer" and engine_of(recipe.plan["parallel"]) != "deepspeed":
            recipe.optimizer_wraps.append(keep_state_on_host)

    def held(self, facts: Facts) -> Held | None:
        script = facts.workload.script
        return (
            None
            if script is None
            else Held(self.baseline, "what waits on the host is not tried with scripts yet", firm=True)
        )

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        if engine_of(plan["parallel"]) in {"fsdp", "deepspeed"}:
            return Emission()  # the engine's own settings say it
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
        if value == "parameters" and part != "evaluation":
            return value  # FSDP's shares are counted on the host; what DeepSpeed leaves there is not traced
        matters = {"micro_steps": "activations", "optimizer": "optimizer"}.get(part)
        return value if value == matters else "none"

    def runs_as(self, value: Value) -> Value:
        return "none" if value == "parameters" else value

    def host_offload(self, value: Value, plan: Mapping[str, Value], facts: Facts, weights: Ints) -> HostOffload | None:
        engine = engine_of(plan["parallel"])
        if engine not in {"fsdp", "deepspeed"} or value not in {"optimizer", "parameters"}:
            return None
        layout = layout_of(plan["parallel"], facts.workload.processes)
        shards = 1 if layout is None else layout.shard
        model, traced = facts.model, float(weights.sum())
        # FSDP's weights are traced as a rank's shares; DeepSpeed's as they are without it
        whole, share = (traced * shards, traced) if engine == "fsdp" else (traced, traced / shards)
        width = 2 if plan["precision"] == "bf16_weights" else 4
        shrunk = 0.5 if plan["precision"] in {"bf16", "fp16"} else 1.0  # each engine gathers weights in what computes
        through_host = _HOST_STEP_PASSES * share
        if engine == "fsdp":  # the root stays gathered, its gradient beside it; of the layers, this one and the next
            large = model.vocab_size * model.hidden_size * width / shards
            root = float(weights[weights >= large].sum()) * shards  # embedding and head
            layer = (whole - root) / max(model.layers, 1)
            held = shrunk * (2 * root + 3 * layer) + layer
            # weights come in for each pass; gradients go out once, or in each micro-step, and are added up there
            each, once = (3 + _HOST_SUM_PASSES, -_HOST_SUM_PASSES) if plan.get("sync_each_batch") == "on" else (2, 1)
            return HostOffload(held_bytes=held, micro_step_bytes=each * share, step_bytes=through_host + once * share)
        held = shrunk * (whole if value == "optimizer" else min(whole, _ZERO3_LIVE_PARAMETERS * width))
        held += shrunk * min(whole, _ZERO_BUCKET_PARAMETERS * width)
        up_and_down = 1 if value == "optimizer" else 3
        return HostOffload(held_bytes=held, micro_step_bytes=up_and_down * shrunk * share, step_bytes=through_host)

    def observe(self, ran: Ran) -> Seen:
        keeper = ran.recipe.state.get(self.name)
        return {
            "engine": ran.engine,
            "activation_bytes": keeper.moved_bytes if isinstance(keeper, HostActivations) else 0,
            "optimizer": type(ran.optimizer).__qualname__,
            "state_devices": sorted({tensor.device.type for tensor in ran.state_tensors()}),
            "parameter_devices": sorted({parameter.device.type for parameter in ran.model.parameters()}),
        }

    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        engine = seen.get("engine", "NO")
        states, parameters = seen.get("state_devices", []), seen.get("parameter_devices", [])
        if value == "activations" and not seen.get("activation_bytes"):
            return "no activation was copied to the host"
        if engine == "DEEPSPEED":
            on_host = "CPUAdam" in str(seen.get("optimizer"))
            return None if on_host == (value != "none") else f"{seen.get('optimizer')} stepped"
        if value == "optimizer" and "cpu" not in states:
            return f"the optimizer's state is on {', '.join(states) or 'no device'}"
        if value == "parameters" and (engine != "FSDP2" or parameters != ["cpu"]):
            return f"the parameters are on {', '.join(parameters) or 'no device'}"
        if value == "none" and facts.hardware.device == "cuda" and parameters == ["cpu"]:
            return "the parameters are on the host"
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
            "parameters": Prior(time=(0.9, 0.5), memory=(-1.0, 0.4)),
        }[str(value)]


def _under_engine(value: Value, others: Mapping[str, Value], facts: Facts) -> str | None:  # noqa: PLR0911 - a rule each
    """Why an engine can't go with a value, or with what else steps on the host."""
    parallel, optimizer, engine = others["parallel"], others["optimizer"], engine_of(others["parallel"])
    alone = facts.workload.processes == 1
    if value == "activations":
        return f"hooks that move saved tensors to the host were not tried under {parallel}"
    if value == "none" and alone:
        return f"one process has nobody to share with: {parallel} needs offload=optimizer or parameters"
    if value == "optimizer" and (engine == "fsdp" or (alone and parallel != "zero2")):
        return f"{parallel} keeps the optimizer's state where the parameters are: offload=parameters"
    if value == "parameters" and parallel not in {"fsdp", "zero3"}:
        return "parallel=fsdp or zero3 keeps parameters on the host"
    frozen = others["adapter"] != "none" and (alone or engine != "fsdp")
    if value != "none" and (optimizer != "adamw" or frozen):
        what = optimizer if optimizer != "adamw" else "an adapter beside frozen weights"
        return f"{parallel} steps on the host, where {what} does not run"
    if value == "parameters" and engine == "fsdp" and others["precision"] == "fp16":
        return "gradients on the host can't be scaled with those on the device"
    return None


class HostActivations(KeptOnHost):
    """Keeps the tensors that a forward pass of a model saves for its backward pass on the host.

    The model's parameters stay where they are, and so do autocast's copies of them: tensors of a parameter's shape. An
    activation has that shape too where a micro-batch has as many tokens as a layer has columns.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shapes: set[tuple[int, ...]] = set()

    def stays(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is left where it is."""
        shaped = tuple(tensor.shape) in self._shapes
        return (shaped and not _is_computed(tensor)) or super().stays(tensor)

    def hooks(self, model: nn.Module) -> torch.autograd.graph.saved_tensors_hooks:
        """The context to run a forward pass of the model in."""
        if not self._shapes:
            for parameter in model.parameters():
                self._shapes.update({tuple(parameter.shape), tuple(reversed(parameter.shape))})
        return self.waiting()


_COPIES = {"TBackward0", "TransposeBackward0", "ToCopyBackward0"}


def _is_computed(tensor: torch.Tensor) -> bool:
    """Whether the graph says that a tensor is more than a parameter in another layout or dtype."""
    node = tensor.grad_fn
    while node is not None and node.name() in _COPIES:
        node = node.next_functions[0][0]
    return node is not None and "AccumulateGrad" not in node.name()


def offload_activations(model: PreTrainedModel, keeper: HostActivations) -> PreTrainedModel:
    """Run every forward pass of the model with its saved tensors on the host."""

    def with_host_activations(self: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with keeper.hooks(self):
            return forward(self, *args, **kwargs)

    run_forward_in(model, with_host_activations)
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
