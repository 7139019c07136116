"""Tensor parallelism: processes that share the products of each micro-batch, as transformers splits a model it loads.

Each weight of an attention or feed-forward layer is cut along its outputs or inputs, so that a process has some of the
heads and columns (Megatron-LM, arXiv 1909.08053); the activations are summed over the processes twice a layer, forward
and backward. Several such groups split what is left by FSDP2 (``tp2xfsdp4``) and train on rows of their own.

No file carries it: ``from_pretrained(distributed_config=DistributedConfig(tp_size=..., fsdp_size=...))`` does, so the
model comes from ``setup.model(...)``. The Accelerate YAML says the same sizes: without them a plain loop would make it
DistributedDataParallel, and with them a model that was loaded otherwise is refused.

Sources: ``transformers/distributed/`` (``mixin.py``, ``tensor_parallel.py``, ``fsdp.py``) and
``transformers.Trainer._prepare_for_training`` of 5.23, ``accelerate.Accelerator._prepare_tp`` of 1.15.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from autofit.contract.layout import Layout, layout_of

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from autofit.contract.facts import Facts
    from autofit.contract.observation import Hooks, Seen
    from autofit.contract.plan import Value
    from autofit.contract.recipe import Recipe

LINE = "load the model split over the processes, before the Trainer or accelerator.prepare: model = setup.model(...)"


def sizes(value: Value, facts: Facts) -> Layout:
    """The layout of a value of tensor parallelism."""
    found = layout_of(value, facts.workload.processes)
    assert found is not None
    return found


def apply(value: Value, recipe: Recipe) -> None:
    """Load the model split."""
    config = functools.partial(_config, sizes(value, recipe.facts), recipe)
    recipe.load_arguments.append(lambda: {"distributed_config": config()})
    recipe.spread = lambda model: _split(model, config())


def _config(layout: Layout, recipe: Recipe) -> Any:
    """What transformers is told; FSDP gathers and computes in bfloat16 where the plan does, as Accelerate has it."""
    from transformers.distributed.configuration_utils import DistributedConfig

    mixed = recipe.mixed_precision == "bf16" and layout.shard > 1
    return DistributedConfig(tp_size=layout.tensor, fsdp_size=layout.shard, fsdp_mixed_precision=mixed)


def _split(model: PreTrainedModel, config: Any) -> PreTrainedModel:
    """The same model, split: by loading its weights where it has values, else in its place."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    kind: Any = type(model)
    first = next(model.parameters())
    if isinstance(first, FakeTensor):
        _untie(model)
        _, _, mesh = kind.prepare_distribute_model(config)
        split: PreTrainedModel = kind.maybe_distribute_model(model, config, mesh)
        split.tie_weights(recompute_mapping=False)
        return split
    with torch.device("cpu"):
        loaded: PreTrainedModel = kind.from_pretrained(
            None,
            config=model.config,
            state_dict=model.state_dict(),
            distributed_config=config,
            dtype=model.dtype,
            attn_implementation=model.config._attn_implementation,  # noqa: SLF001 - there is no other
        )
    return loaded


def _untie(model: PreTrainedModel) -> None:
    """Make tied weights parameters of their own, as they are when a model that is being loaded is split."""
    import torch

    for name in model.all_tied_weights_keys:
        module, _, last = name.rpartition(".")
        tied = model.get_parameter(name)
        own = torch.nn.Parameter(tied.detach(), requires_grad=tied.requires_grad)
        setattr(model.get_submodule(module), last, own)


def watched(model: nn.Module, hooks: Hooks) -> list[Any]:
    """A list that gets what processes which share a micro-batch must have in common: its sum, and random numbers.

    The second is the sum of the generator's state where the model drops something out, else 0: a mask of activations
    that every process has must be the same on all.
    """
    import torch

    first: list[Any] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not first:
            given = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
            dropout = torch.nn.modules.dropout._DropoutNd  # noqa: SLF001 - the parent of all kinds
            drops = any(isinstance(one, dropout) and one.p > 0 for one in module.modules())
            on_cuda = given[0].device.type == "cuda"
            states = [torch.cuda.get_rng_state(given[0].device) if on_cuda else torch.get_rng_state()] if drops else []
            first.extend((_sum(given), _sum(states)))

    hooks.before(model, keep)
    return first


def _sum(tensors: list[torch.Tensor]) -> float:
    """Of all elements, each times its place."""
    import torch

    weights = [torch.arange(1, one.numel() + 1, device=one.device) for one in tensors]
    return float(sum((one.reshape(-1) * w).sum() for one, w in zip(tensors, weights, strict=True)))


def split(model: nn.Module, first: list[Any]) -> Seen:
    """How a model is split: over how many processes, how many of its weights, and whether they share what was seen."""
    import torch
    from torch import distributed

    cut, mesh = 0, None
    shard = 1
    for parameter in model.parameters():
        part: Any = parameter
        names = tuple(getattr(getattr(part, "device_mesh", None), "mesh_dim_names", None) or ())
        if "tp" in names and part.placements[names.index("tp")].is_shard():
            cut, mesh = cut + 1, part.device_mesh["tp"]
        if "fsdp" in names:
            shard = part.device_mesh["fsdp"].size()
    found: dict[str, Any] = {"tensor": 1 if mesh is None else mesh.size(), "split_weights": cut, "fsdp": shard}
    if mesh is not None and first:
        mine = torch.tensor(first, dtype=torch.float64, device=mesh.device_type)
        least, most = mine.clone(), mine.clone()
        distributed.all_reduce(least, op=distributed.ReduceOp.MIN, group=mesh.get_group())
        distributed.all_reduce(most, op=distributed.ReduceOp.MAX, group=mesh.get_group())
        found["same_rows"], found["same_draws"] = (least == most).tolist()
    return found


def not_split(value: Value, seen: Seen, facts: Facts) -> str | None:
    """Why a model is not split as a value says."""
    layout = sizes(value, facts)
    if seen.get("tensor") != layout.tensor or not seen.get("split_weights"):
        return f"{seen.get('tensor', 1)} processes share each product, not {layout.tensor}: load it by setup.model(...)"
    if seen.get("fsdp", 1) != layout.shard:
        return f"the weights are split over {seen.get('fsdp', 1)} groups, not {layout.shard}"
    if seen.get("same_rows") is False:
        return "processes that share each product train on different rows"
    if seen.get("same_draws") is False:
        return "processes that share each product drop out different activations"
    return None
