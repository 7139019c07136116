"""What of each parameter lies in one rank of a plan's world.

Read off what the plan writes (its Accelerate YAML), as Accelerate reads it, and held against the trace of the real
sharding: :func:`local_bytes` of the traced model must be what FSDP2 made of it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from autofit.contract.emission import Emission

if TYPE_CHECKING:
    from collections.abc import Iterable

    from autofit.contract.facts import Facts
    from autofit.contract.recipe import Recipe

_ENGINE_KEYS = ("fsdp_config", "deepspeed_config", "parallelism_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a plan spreads a model over its world.

    Attributes:
        shards: Ranks that share a parameter, by its first dimension.
        tensor: Ranks that share the products, each with a part of the weights; FSDP splits those parts.
        context: Ranks that share the tokens of each row; FSDP splits the weights over them, too.
        upcast: Whether trainable parameters of fewer bits become float32 (``accelerate/utils/fsdp_utils.py``,
            ``fsdp2_prepare_model`` of 1.15, under mixed precision).
        bucketed: Whether DDP's reducer keeps a copy of all gradients in its buckets.
        gathers_late: Whether gradients stay whole on every rank between the micro-steps of an accumulation.
        engine: Whether an engine runs the model, so that a trace needs its world, also one of a single process.
        on_host: Whether shares of weights, gradients and optimizer state wait on the host (``fsdp_offload_params``).
        units: Names of the classes of modules that are sharded one at a time.
        zero: Stage of DeepSpeed's ZeRO, whose engine has the weights in buffers of its own and steps by itself; else 0.
    """

    shards: int = 1
    tensor: int = 1
    context: int = 1
    upcast: bool = False
    bucketed: bool = False
    gathers_late: bool = False
    engine: bool = False
    on_host: bool = False
    units: frozenset[str] = frozenset()
    zero: int = 0

    @property
    def splits(self) -> bool:
        """Whether weights, or their state, are split over processes."""
        return self.shards > 1 or self.zero > 0

    def buckets_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """Bytes of the reducer's buckets; a gradient is copied there and back, since it is no view of its bucket.

        Source: ``torch/csrc/distributed/c10d/reducer.cpp`` (``initialize_buckets``); ``gradient_as_bucket_view`` is
        false unless asked for, and so it is in Accelerate.
        """
        trained = (parameter.nbytes for parameter in parameters if parameter.requires_grad)
        return sum(trained) if self.bucketed else 0


class Loading(NamedTuple):
    """Allocations and frees while a model gets onto its device, and the bytes of their blocks.

    See :func:`autofit.costmodel.memory.allocator.replay`. The first blocks are those of
    :func:`local_bytes`, which stay.
    """

    events: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a model holds, before it takes a step.

    Attributes:
        weights: Bytes of each parameter and buffer of the whole model.
        buckets_bytes: Of DDP's reducer, of the whole model.
        host_bytes: Of the weights that wait on the host.
        loading: How a sharded model gets onto the device.
    """

    weights: tuple[int, ...]
    buckets_bytes: int = 0
    host_bytes: int = 0
    loading: Loading | None = None


def layout_of(recipe: Recipe) -> Layout:
    """The layout that a plan's files ask for."""
    world = recipe.facts.workload.processes
    written = recipe.emission.accelerate
    engine = written.get("distributed_type", "NO")
    if engine == "FSDP":
        sizes = written.get("parallelism_config") or {}
        replicas = int(sizes.get("parallelism_config_dp_replicate_size", 1))
        config = written.get("fsdp_config") or {}
        return Layout(
            shards=world // replicas,
            context=int(sizes.get("parallelism_config_cp_size", 1)),
            upcast=recipe.mixed_precision != "no",
            gathers_late=not recipe.sync_each_batch,
            engine=True,
            on_host=bool(config.get("fsdp_offload_params")),
            units=frozenset(str(config.get("fsdp_transformer_layer_cls_to_wrap") or "").split(",")),
        )
    tensor = int((written.get("parallelism_config") or {}).get("parallelism_config_tp_size", 1))
    if tensor > 1:  # transformers' own FSDP keeps the weights' dtype, and in a plain loop nobody defers its gradients
        by_trainer = recipe.facts.workload.launch_path == "trainer"
        return Layout(shards=world // tensor, tensor=tensor, gathers_late=by_trainer and world > tensor, engine=True)
    if engine == "DEEPSPEED":  # what it does at the end of an accumulation, its first micro-step alone may do
        return Layout(gathers_late=True, engine=True, zero=int(written["deepspeed_config"]["zero_stage"]))
    return Layout(bucketed=engine == "MULTI_GPU" and world > 1, engine=world > 1)


def local_shape(parameter: torch.Tensor, layout: Layout, split: int | None = None) -> tuple[int, ...]:
    """Shape of one rank's share: FSDP2 pads every share to that of the first rank.

    Weights in integers are left whole, as Accelerate leaves 4-bit weights whose storage is no float.

    Args:
        parameter: The whole one.
        layout: How it is spread.
        split: The dimension along which the ranks that share its products each have a part.
    """
    shape = list(parameter.shape)
    if split is not None:
        shape[split] = -(-shape[split] // layout.tensor)
    if layout.shards > 1 and shape and (parameter.is_floating_point() or parameter.requires_grad):
        shape[0] = -(-shape[0] // layout.shards)
    return tuple(shape)


_SPLITS = {
    "colwise": (-2, -1),
    "colwise_gather_output": (-2, -1),
    "embedding_rowwise": (0, None),
    "rowwise": (-1, None),
}
"""The dimensions along which a matrix and a vector are split, by transformers' names of the ways to
(``shard_param`` in ``transformers/distributed/tensor_parallel.py`` of 5.23)."""


def split_dimensions(model: nn.Module, layout: Layout) -> dict[int, int]:
    """Of each parameter that ranks which share its products have a part of, the dimension; by the parameter's id."""
    found = {}
    for parameter, way in _split_ways(model, layout):
        dimension = _SPLITS.get(way, (None, None))[parameter.ndim == 1]
        if dimension is not None:
            found[id(parameter)] = dimension
    return found


def _split_ways(model: Any, layout: Layout) -> list[tuple[nn.Parameter, str]]:
    """Parameters of transformers' plan, and how each is split."""
    if layout.tensor == 1:
        return []
    parameters = dict(model.named_parameters())
    expanded = model._expand_parallel_plan(model.tp_plan)  # as it is split in earnest
    return [(parameters[name], way) for name, way in expanded.items() if name in parameters]


def local_dtype(parameter: torch.Tensor, layout: Layout) -> torch.dtype:
    """Dtype of one rank's share."""
    return torch.float32 if layout.upcast and parameter.requires_grad else parameter.dtype


def held(model: nn.Module, layouts: Iterable[Layout], beside: Iterable[nn.Module] = ()) -> list[Held]:
    """What one rank holds of a model, and of those beside it, before it takes a step; under each layout."""
    # to walk a model takes long: its adapters are modules of modules
    parameters, buffers = list(model.parameters()), list(model.buffers())
    found = []
    for layout in layouts:
        shares = share_bytes(model, layout, parameters)
        here = _on_device(layout, shares, buffers)
        on_host = shares.values() if layout.on_host else ()
        loading = None
        if layout.shards > 1 and layout.tensor == 1:  # a model that is split as it is loaded comes there in shares
            loading = _loading(model, layout, shares, here, parameters)
        found.append(
            Held(
                weights=(*here.values(), *(size for one in beside for size in local_bytes(one, layout))),
                # one share at a time is brought in to be gathered
                buckets_bytes=layout.buckets_bytes(parameters) + max(on_host, default=0),
                host_bytes=sum(on_host),
                loading=loading,
            )
        )
    return found


def local_bytes(model: nn.Module, layout: Layout) -> list[int]:
    """Bytes of each parameter and buffer of one rank that lie on its device."""
    return [*_on_device(layout, share_bytes(model, layout, model.parameters()), model.buffers()).values()]


def _on_device(layout: Layout, shares: dict[int, int], buffers: Iterable[torch.Tensor]) -> dict[int, int]:
    """Of the shares and the buffers those that are not on the host, by the tensor's id."""
    return ({} if layout.on_host else shares) | {id(buffer): buffer.nbytes for buffer in buffers}


def share_bytes(model: nn.Module, layout: Layout, parameters: Iterable[nn.Parameter]) -> dict[int, int]:
    """Bytes of one rank's share of each parameter of a model, by the parameter's id."""
    splits = split_dimensions(model, layout)
    shapes = ((one, local_shape(one, layout, splits.get(id(one)))) for one in parameters)
    return {id(one): math.prod(shape) * local_dtype(one, layout).itemsize for one, shape in shapes}


def _loading(
    model: nn.Module, layout: Layout, shares: dict[int, int], kept: dict[int, int], parameters: list[nn.Parameter]
) -> Loading:
    """How one rank's share of a model that is sharded gets onto its device.

    Each unit is brought there whole and freed once its shares are made; the embeddings are held until the last unit is
    done. Source: ``fully_shard``, and ``fsdp2_prepare_model`` of ``accelerate/utils/fsdp_utils.py`` (1.15), whose
    variables hold them.
    """
    found = _Loading(layout, shares, kept)
    embeddings = [
        parameter
        for name in ("get_input_embeddings", "get_output_embeddings")
        if (module := getattr(model, name, lambda: None)()) is not None
        for parameter in module.parameters()
    ]
    held = {id(one) for one in embeddings}
    for module in model.modules():
        if type(module).__name__ in layout.units:
            found.shard(one for one in module.parameters() if id(one) not in held)
    late = [block for one in embeddings for block in found.shard([one], free=False)]
    found.shard(parameters)
    found.events += [~block for block in late]
    return found.done()


class _Loading:
    """Writes down allocations and frees; the first blocks are the parameters and buffers that stay."""

    def __init__(self, layout: Layout, shares: dict[int, int], kept: dict[int, int]) -> None:
        self.layout, self.shares = layout, shares
        self.number = {key: block for block, key in enumerate(kept)}
        self.sizes = list(kept.values())
        self.events: list[int] = []
        self.sharded: set[int] = set()

    def shard(self, parameters: Iterable[nn.Parameter], *, free: bool = True) -> list[int]:
        """Bring parameters whole, make their shares, and free what was brought, or return its blocks."""
        unit = {id(one): one for one in parameters if id(one) not in self.sharded}
        self.sharded |= set(unit)
        brought = [self._new(one.numel() * local_dtype(one, self.layout).itemsize) for one in unit.values()]
        for key in unit:
            if key in self.number:
                self.events.append(self.number[key])
            else:
                self.events.append(~self._new(self.shares[key]))
        if free:
            self.events += [~block for block in brought]
        return brought

    def _new(self, size: int) -> int:
        self.sizes.append(size)
        self.events.append(len(self.sizes) - 1)
        return len(self.sizes) - 1

    def done(self) -> Loading:
        """With what is not sharded."""
        missing = set(self.number.values()) - set(self.events)
        return Loading((*self.events, *sorted(missing)), tuple(self.sizes))


def cut(model: nn.Module, layout: Layout) -> dict[int, int]:
    """Put one rank's share in the place of each parameter of a model on the meta device; shared ones stay shared.

    Returns:
        By the id of a share how many numbers its gradient has, where it has more: PyTorch leaves that of a table whose
        rows are split whole in each rank, until FSDP splits it.
    """
    if not layout.engine or layout.bucketed:  # each rank has the whole
        return {}
    tables = {id(one) for one, way in _split_ways(model, layout) if way == "embedding_rowwise" and layout.shards == 1}
    whole: dict[int, int] = {}
    made: dict[int, nn.Parameter] = {}
    splits = split_dimensions(model, layout)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                shape = local_shape(parameter, layout, splits.get(id(parameter)))
                share = torch.empty(shape, dtype=local_dtype(parameter, layout), device="meta")
                made[id(parameter)] = nn.Parameter(share, parameter.requires_grad)
                if id(parameter) in tables:
                    whole[id(made[id(parameter)])] = parameter.numel()
            module._parameters[name] = made[id(parameter)]
    return whole


def one_process(facts: Facts) -> Facts:
    """The same question for one process alone."""
    return dataclasses.replace(facts, workload=dataclasses.replace(facts.workload, processes=1))


def without_engine(emission: Emission) -> Emission:
    """What a plan writes, without what spreads it over a world."""
    accelerate: dict[str, Any] = {name: v for name, v in emission.accelerate.items() if name not in _ENGINE_KEYS}
    accelerate.update(distributed_type="NO", num_processes=1, num_machines=1)
    return dataclasses.replace(emission, accelerate=accelerate)


def on_device(emission: Emission) -> Emission:
    """What a plan writes, without what keeps its shares on the host: on a fake CPU a copy there would be none."""
    config = emission.accelerate.get("fsdp_config")
    if not config or not config.get("fsdp_offload_params"):
        return emission
    accelerate = {**emission.accelerate, "fsdp_config": {**config, "fsdp_offload_params": False}}
    return dataclasses.replace(emission, accelerate=accelerate)


def accumulating(emission: Emission, micro_steps: int) -> Emission:
    """What a plan writes, with so many micro-steps to an optimizer step where an engine is told of them."""
    config = emission.accelerate.get("deepspeed_config")
    if not config:
        return emission
    told = {**config, "gradient_accumulation_steps": micro_steps}
    return dataclasses.replace(emission, accelerate={**emission.accelerate, "deepspeed_config": told})
