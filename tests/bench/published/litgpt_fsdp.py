"""What a rank holds when LitGPT's scripts shard a model: FSDP 1 as Lightning Fabric sets it up, written out.

- A unit for each block and one for the rest; a unit's parameters are one flat tensor, of which a rank holds its share.
- A block is gathered for its forward pass, and again for its backward pass, where the block below it is gathered ahead
  (``BackwardPrefetch.BACKWARD_PRE``). The root unit stays gathered from its forward to the end of the backward pass.
- ``use_orig_params=True``: where one parameter of a unit is trained, **all of them get gradients**, since they are
  views of the flat tensor; first one by one, then joined.
- ``fabric.no_backward_sync`` while accumulating: **gradients stay whole** on every rank until they are synchronised.
- Blocks are checkpointed (``activation_checkpointing_policy={Block}``). Buffers are cast to bfloat16.

Source: ``finetune/lora.py`` and ``litgpt/finetune/full.py`` as in :mod:`published.litgpt`; lightning 2.1.0
``fabric/strategies/fsdp.py`` and ``plugins/precision/fsdp.py``; torch 2.1 ``distributed/fsdp/_runtime_utils.py``
(``_post_backward_hook``, ``_should_free_in_backward``, ``_prefetch_handle``), ``_limiter_utils.py`` and
``flat_param.py``. Not modelled: NCCL's buffers, which lie outside of PyTorch's counters.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call

if TYPE_CHECKING:
    from .litgpt_model import GPT

DTYPE = torch.bfloat16
IN_FLIGHT = 2
"""``_FreeEventQueue._max_num_inflight_all_gathers``: before a unit is gathered, the host waits until no more than one
of those that it has freed is still in use on the device."""


class Unit(nn.Module):
    """A module whose parameters are gathered when it runs; it holds a share of them."""

    def __init__(self, module: nn.Module, ranks: int, freed: list[torch.Tensor]) -> None:
        super().__init__()
        self.freed = freed
        self.shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        self.numels = [parameter.numel() for parameter in module.parameters()]
        self.is_trained = any(parameter.requires_grad for parameter in module.parameters())
        trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        self.ranks = ranks
        share = -(-sum(self.numels) // ranks)
        self.shard = nn.Parameter(torch.empty(share, dtype=DTYPE), requires_grad=False)
        self.trained_share = -(-trained // ranks)
        self.held = (module,)  # hidden, so that its parameters are no tensors of ours
        self.gathered: torch.Tensor | None = None
        self.grad: torch.Tensor | None = None
        self.grad_shard: torch.Tensor | None = None
        self.state: list[torch.Tensor] = []

    def gather(self) -> torch.Tensor:
        """The flat tensor, whole."""
        if self.gathered is None:
            if len(self.freed) >= IN_FLIGHT:
                self.freed.pop(0)
            self.gathered = torch.empty(sum(self.numels), dtype=DTYPE)  # what is padded is less than a share's element
        return self.gathered

    def drop(self) -> None:
        """Free what was gathered; the host is ahead of the device, and the allocator waits for the device."""
        assert self.gathered is not None
        self.freed.append(self.gathered)
        self.gathered = None

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameters in a flat tensor."""
        parts = flat.split(self.numels)
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def take(self, grad: torch.Tensor, *, synchronise: bool) -> None:
        """What happens to a unit's whole gradient."""
        if self.grad is not None:
            self.grad += grad
        else:
            self.grad = grad
        del grad
        if synchronise:
            shard = torch.empty(self.shard.numel(), dtype=DTYPE)
            self.grad = None
            if self.grad_shard is None:
                self.grad_shard = shard
            else:
                self.grad_shard += shard

    def step(self) -> None:
        """AdamW's state of its own share; foreach makes one more tensor of all of them for a moment."""
        if self.is_trained and not self.state:
            self.state = [torch.empty(self.trained_share, dtype=DTYPE) for _ in range(2)]


class ShardedBlock(Unit):
    """A block: checkpointed, and gathered twice."""

    below: tuple[ShardedBlock, ...] = ()
    owner: tuple[Sharding, ...] = ()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Run it."""
        result: torch.Tensor = _Checkpointed.apply(x, self.owner[0].anchor, self, cos, sin)  # type: ignore[no-untyped-call]
        return result


class _Checkpointed(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, _: torch.Tensor, unit: ShardedBlock, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        ctx.unit, ctx.cos, ctx.sin = unit, cos, sin
        ctx.save_for_backward(x)
        result: torch.Tensor = functional_call(unit.held[0], unit.views(unit.gather()), (x, cos, sin))
        unit.drop()
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        unit: ShardedBlock = ctx.unit
        flat = unit.gather()
        for one in unit.below:
            one.gather()
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_(ctx.needs_input_grad[0])
        with torch.enable_grad():
            whole = flat.detach().requires_grad_(unit.is_trained)
            result = functional_call(unit.held[0], unit.views(whole), (x, ctx.cos, ctx.sin))
        torch.autograd.backward(result, grad)
        del result, flat
        unit.drop()
        gradient, whole.grad = whole.grad, None
        del whole
        if gradient is not None:
            unit.take(gradient, synchronise=unit.owner[0].synchronise)
        return x.grad, None, None, None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, sharding: Sharding) -> torch.Tensor:  # type: ignore[override]
        ctx.sharding = sharding
        flat = sharding.root.gather()
        sharding.root.gathered = None
        return flat

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.sharding.root.take(grad, synchronise=ctx.sharding.synchronise)
        return None, None


class Sharding(nn.Module):
    """A model in units."""

    def __init__(self, model: GPT, ranks: int) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.empty(1, dtype=DTYPE))
        self.synchronise = True
        self.freed: list[torch.Tensor] = []
        blocks = [ShardedBlock(block, ranks, self.freed) for block in model.h]
        for below, block in itertools.pairwise(blocks):
            block.below = (below,)
        for block in blocks:
            block.owner = (self,)
        model.h = nn.ModuleList()
        self.root = Unit(model, ranks, self.freed)
        self.h = nn.ModuleList(blocks)
        self.model = (model,)

    def make_rope(self, rows: int) -> None:
        """As the model does, and cast."""
        model = self.model[0]
        model.make_rope(rows)
        model.cos, model.sin = model.cos.to(DTYPE), model.sin.to(DTYPE)
        for block in self.h:
            for module in block.held[0].modules():  # type: ignore[union-attr, index]
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")

    def gathered_root(self) -> torch.Tensor:
        """The root unit, gathered until nobody needs it: a leaf would be held by the graph, as a storage is not."""
        result: torch.Tensor = _Gathered.apply(self.anchor, self)  # type: ignore[no-untyped-call]
        return result if self.root.is_trained else result.detach()

    def forward(self, idx: torch.Tensor, flat: torch.Tensor, lm_head_chunk_size: int) -> Any:
        """Run it with a gathered root unit."""
        model = self.model[0]
        held, model.h = model.h, self.h
        try:
            views = self.root.views(flat)
            with _parameters(model, views):
                return model(idx, lm_head_chunk_size=lm_head_chunk_size)
        finally:
            model.h = held

    def units(self) -> list[Unit]:
        """All of them."""
        return [self.root, *self.h]  # type: ignore[list-item]


class _parameters:  # noqa: N801 - a context
    """Other tensors in the place of a module's parameters, those of blocks aside."""

    def __init__(self, module: nn.Module, views: dict[str, torch.Tensor]) -> None:
        self.module, self.views = module, views
        self.before: list[tuple[nn.Module, str, nn.Parameter]] = []

    def __enter__(self) -> None:
        for name, view in self.views.items():
            path, _, last = name.rpartition(".")
            owner = self.module.get_submodule(path)
            parameter = owner._parameters.pop(last)
            assert parameter is not None
            self.before.append((owner, last, parameter))
            object.__setattr__(owner, last, view)

    def __exit__(self, *_: object) -> None:
        for owner, last, parameter in self.before:
            object.__delattr__(owner, last)
            owner._parameters[last] = parameter
