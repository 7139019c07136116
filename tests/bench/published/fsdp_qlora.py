"""AnswerDotAI's ``fsdp_qlora``: LoRA and QLoRA of Hugging Face's Llama under FSDP 1, on one rank of several.

- Weights and adapters are bfloat16; no autocast. QLoRA: nf4 with quantised scales, packed as bfloat16; each weight is
  quantised on the card and waits on the host. PEFT's adapters of rank 64 on all seven linears of a layer, dropout 0.1.
- Every layer is a unit, every matrix of an adapter is one, the rest (embedding, head, last norm) is the root. A unit is
  wrapped from the inside out: its parameters come to the card, rank 0's are sent in flat buckets of 250 MiB, all are
  joined, the share is cloned. What that leaves in the allocator's cache serves the steps behind it.
- A unit is gathered on a stream of its own, whose blocks no other stream gets. Before that the host waits until the
  device is through with all but one of those that were freed (``limit_all_gathers``). The root stays gathered until the
  end of the backward pass. The layer below is gathered before a layer's backward pass has ended.
- Layers are checkpointed, reentrant. The loop holds the output, logits included, through the backward pass.
- With offload the shares are on the host, and come to the card with each gathering; so do optimizer and gradients.
  ``NO_SHARD`` ("DDP" on the page) gathers nothing.
- The figure is ``max_memory_reserved`` of an epoch, on a card of which the context takes a part: where the allocator
  finds no more it gives back what it only keeps. NCCL's buffers are not taken off: only those of NVLink are known.
- Rows are cut to the context length, so all are that long.

Source: AnswerDotAI/fsdp_qlora 05ed9f2 ``train.py`` and ``benchmarks_03_2024.md`` (its command lines); transformers
4.37 ``modeling_llama.py`` (``LlamaSdpaAttention``), Apache-2.0; peft 0.9 ``tuners/lora/{layer,bnb}.py``; bitsandbytes
0.43.0; torch 2.2 ``distributed/fsdp/{_init_utils,_runtime_utils,_flat_param}.py``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from autofit.costmodel.forecast import context_bytes
from autofit.costmodel.memory import allocator
from autofit.machine import gpu_catalogue

from . import fake
from .fourbit import scales_of

DTYPE = torch.bfloat16
RANK, DROPOUT = 64, 0.1
Linear = Callable[[int, torch.Tensor], torch.Tensor]
IN_FLIGHT = 2
"""``_FreeEventQueue._max_num_inflight_all_gathers``."""
ROWS_BY_TEXT = 2048
"""Of the tables that have no column for it: each says so in the line below it."""
BUCKET_BYTES = 250 * 2**20
"""``PARAM_BROADCAST_BUCKET_SIZE``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama or a Mistral."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int

    def linears(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of a layer's linears: query, key, value, output, gate, up, down."""
        keys = self.hidden // self.heads * self.kv_heads
        width, inner = self.hidden, self.intermediate
        return (
            (width, width),
            (keys, width),
            (keys, width),
            (width, width),
            (inner, width),
            (inner, width),
            (width, inner),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the script."""

    shape: Shape
    batch: int
    rows: int
    ranks: int
    four_bit: bool
    shard: bool
    offload: bool
    card: str


SHAPES: Mapping[str, Shape] = {
    "llama27b": Shape(layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32, vocab=32000),
    "llama270b": Shape(layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8, vocab=32000),
    "mistral7b": Shape(layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, vocab=32000),
    "yi34b": Shape(layers=60, hidden=7168, intermediate=20480, heads=56, kv_heads=8, vocab=64000),
}
"""Of the ``config.json`` of meta-llama/Llama-2-7b-hf and -70b-hf, mistralai/Mistral-7B-v0.2, 01-ai/Yi-34B."""


@functools.cache
def reserved_bytes(run: Run) -> int:
    """``max_memory_reserved`` of its first two steps, on a card that has no more than it has."""
    card = gpu_catalogue.find(run.card)
    tape = fake.run(nn.Module, functools.partial(_steps, run), shorten=False, capability=card.capability)
    first = len(tape.sizes)
    events = np.concatenate([np.arange(first, first + fake.HANDLES), tape.events])
    sizes = np.concatenate([tape.bytes_at(0), np.full(fake.HANDLES, float(fake.WORKSPACE_BYTES))])
    streams = np.concatenate([tape.streams, np.zeros(fake.HANDLES, dtype=np.int64)])
    room = card.usable_bytes - context_bytes(card.capability)
    return int(allocator.replay(events, sizes, streams, capacity_bytes=room).peak_reserved_bytes)


class _World:
    """The streams, and what was freed while the device may still use it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.gathering, self.reducing, self.sending = (torch.cpu.Stream() for _ in range(3))
        self.freed: list[list[torch.Tensor]] = []

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """What is allocated inside is on that stream."""
        return torch.cpu.stream(stream) if self.run.shard else nullcontext()


class _Unit:
    """Parameters that are gathered together; wrapped when it is made."""

    def __init__(self, world: _World, numels: list[int]) -> None:
        self.world, self.numels, self.total = world, numels, sum(numels)
        self.gathered: list[torch.Tensor] = []
        self.state: list[torch.Tensor] = []
        self.grad: torch.Tensor | None = None
        self.share = -(-self.total // world.run.ranks) if world.run.shard else self.total
        held = [torch.empty(numel, dtype=DTYPE) for numel in numels]
        self._broadcast()
        whole = torch.empty(self.total, dtype=DTYPE)
        self.shard = torch.empty(self.share, dtype=DTYPE) if world.run.shard else whole
        del held, whole
        if world.run.offload:
            del self.shard

    def _broadcast(self) -> None:
        """Rank 0's parameters, flat, in buckets of which two are under way."""
        under_way: list[torch.Tensor] = []
        for bucket in _buckets(self.numels):
            if len(under_way) == 2:
                under_way.pop(0)
            under_way.append(torch.empty(bucket, dtype=DTYPE))

    def gather(self) -> torch.Tensor:
        """The flat tensor, whole."""
        if not self.world.run.shard:
            return self.shard
        if not self.gathered:
            if len(self.world.freed) >= IN_FLIGHT:
                self.world.freed.pop(0)
            if self.world.run.offload:
                with self.world.on(self.world.sending):
                    self.gathered.append(torch.empty(self.share, dtype=DTYPE))
            with self.world.on(self.world.gathering):
                self.gathered.append(torch.empty(self.share * self.world.run.ranks, dtype=DTYPE))
        return self.gathered[-1]

    def drop(self) -> None:
        """Free what was gathered."""
        if self.world.run.shard and self.gathered:
            self.world.freed.append(self.gathered)
            self.gathered = []

    def reduce(self, grad: torch.Tensor) -> None:
        """Keep the share of a whole gradient, or send it to the host."""
        with self.world.on(self.world.reducing):
            mine = torch.empty(self.share, dtype=DTYPE) if self.world.run.shard else grad
        if not self.world.run.offload:
            self.grad = mine


def _buckets(numels: list[int]) -> Iterator[int]:
    """``torch::utils::take_tensors``: a bucket is full with the tensor that reaches the limit."""
    held = 0
    for numel in numels:
        if held and (held + numel) * DTYPE.itemsize > BUCKET_BYTES:
            yield held
            held = 0
        held += numel
    if held:
        yield held


class _Layer:
    """A decoder layer: what is frozen is one unit, each matrix of an adapter another."""

    def __init__(self, world: _World) -> None:
        self.world, run = world, world.run
        self.run = run
        linears = run.shape.linears()
        self.adapters = [(_Unit(world, [RANK * ins]), _Unit(world, [outs * RANK])) for outs, ins in linears]
        packed = 4 if run.four_bit else 1
        self.unit = _Unit(world, [outs * ins // packed for outs, ins in linears] + [run.shape.hidden] * 2)
        self.below: _Layer | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """With its unit gathered."""
        parts = self.unit.gather().split(self.unit.numels)
        linear = functools.partial(self._linear, parts)
        residual = hidden
        hidden = _norm(hidden, parts[-2])
        hidden = self._attention(hidden, linear)
        hidden = residual + hidden
        residual = hidden
        hidden = _norm(hidden, parts[-1])
        hidden = linear(6, F.silu(linear(4, hidden)) * linear(5, hidden))
        return residual + hidden

    def _attention(self, hidden: torch.Tensor, linear: Linear) -> torch.Tensor:
        shape, (batch, rows, width) = self.run.shape, hidden.shape
        size = width // shape.heads
        query = linear(0, hidden)
        key = linear(1, hidden)
        value = linear(2, hidden)
        query, key, value = (one.view(batch, rows, -1, size).transpose(1, 2) for one in (query, key, value))
        query, key = _positions(query, key)
        if shape.kv_heads != shape.heads:
            key = _repeated(key, shape.heads // shape.kv_heads)
            value = _repeated(value, shape.heads // shape.kv_heads)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out = out.transpose(1, 2).contiguous()
        return linear(3, out.reshape(batch, rows, width))

    def _linear(self, parts: tuple[torch.Tensor, ...], number: int, x: torch.Tensor) -> torch.Tensor:
        first, second = self.adapters[number]
        outs, ins = self.run.shape.linears()[number]
        if not self.run.four_bit:
            result = F.linear(x, parts[number].view(outs, ins))
            return result + _adapted(x, first, second)
        result = _FourBitLinear.apply(x, (outs, ins), outs * ins)  # type: ignore[no-untyped-call]
        result = result.clone()
        result += _adapted(x, first, second)
        return result


def _positions(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``apply_rotary_pos_emb``."""
    cos, sin = (torch.empty(1, 1, *query.shape[-2:], dtype=DTYPE) for _ in range(2))
    turned = (query * cos) + (_rotated(query) * sin)
    return turned, (key * cos) + (_rotated(key) * sin)


def _repeated(x: torch.Tensor, groups: int) -> torch.Tensor:
    """``repeat_kv``."""
    batch, heads, rows, size = x.shape
    return x[:, :, None].expand(batch, heads, groups, rows, size).reshape(batch, heads * groups, rows, size)


def _adapted(x: torch.Tensor, first: _Unit, second: _Unit) -> torch.Tensor:
    result: torch.Tensor = _Leaf.apply(_Leaf.apply(F.dropout(x, DROPOUT), first), second)  # type: ignore[no-untyped-call]
    return result * 0.25


class _Leaf(torch.autograd.Function):
    """A linear that is a unit: gathered for its forward and again for its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, unit: _Unit) -> torch.Tensor:  # type: ignore[override]
        ctx.unit = unit
        ctx.save_for_backward(x)
        weight = unit.gather()[: unit.total].view(-1, x.shape[-1])
        out = F.linear(x, weight)
        unit.drop()
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        unit: _Unit = ctx.unit
        weight = unit.gather()[: unit.total].view(-1, x.shape[-1])
        back = grad.matmul(weight)
        unit.drop()
        unit.reduce(grad.flatten(0, 1).t().matmul(x.flatten(0, 1)).flatten())
        return back, None


class _FourBitLinear(torch.autograd.Function):
    """``MatMul4Bit`` of 0.43.0, which keeps its input; the weight is made whole for a moment."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: tuple[int, int], numel: int) -> torch.Tensor:  # type: ignore[override]
        ctx.shape, ctx.numel, ctx.kept = shape, numel, x
        return F.linear(x, _whole(shape, numel))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return torch.matmul(grad, _whole(ctx.shape, ctx.numel)), None, None


def _whole(shape: tuple[int, int], numel: int) -> torch.Tensor:
    scales = torch.empty(-(-numel // 64), dtype=torch.float32)
    weight = torch.empty(shape, dtype=DTYPE)
    del scales
    return weight


def _norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``LlamaRMSNorm``."""
    wide = hidden.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(variance + 1e-5)
    return weight * wide.to(hidden.dtype)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class _Checkpointed(torch.autograd.Function):
    """A layer, reentrant."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: _Layer) -> torch.Tensor:  # type: ignore[override]
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            result = layer(x)
        layer.unit.drop()
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        layer: _Layer = ctx.layer
        layer.unit.gather()
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_()
        with torch.enable_grad():
            result = layer(x)
        torch.autograd.backward(result, grad)
        del result
        if layer.below is not None:
            layer.below.unit.gather()
        layer.unit.drop()
        return x.grad, None


def _steps(run: Run, _: nn.Module, watch: fake.Watch) -> None:
    """The wrapping, and two steps: the second has the optimizer's state."""
    watch.mark("wrap")
    world = _World(run)
    linears = run.shape.linears() * run.shape.layers if run.four_bit else ()
    scales = [scales_of(outs * ins) for outs, ins in linears]  # loading: all that it leaves on the card
    layers = [_Layer(world) for _ in range(run.shape.layers)]
    for below, layer in itertools.pairwise(layers):
        layer.below = below
    root = _Unit(world, [run.shape.vocab * run.shape.hidden] * 2 + [run.shape.hidden])
    units = [unit for layer in layers for pair in layer.adapters for unit in pair]
    for step in range(2):
        watch.step = step
        watch.mark("step")
        _micro_step(run, layers, root)
        world.freed.clear()
        if not run.offload:
            for unit in units:
                unit.state = unit.state or [torch.empty(unit.share, dtype=DTYPE) for _ in range(2)]
            _ = [torch.empty(unit.share, dtype=DTYPE) for unit in units]  # foreach: the denominators
            del _
        for unit in units:
            unit.grad = None
    del scales


def _micro_step(run: Run, layers: list[_Layer], root: _Unit) -> None:
    ids, labels = (torch.empty(run.batch, run.rows, dtype=torch.int64) for _ in range(2))
    embedding, head, weight = root.gather()[: root.total].split(root.numels)
    hidden = F.embedding(ids, embedding.view(-1, run.shape.hidden)).requires_grad_()
    for layer in layers:
        hidden = _Checkpointed.apply(hidden, layer)  # type: ignore[no-untyped-call]
    hidden = _norm(hidden, weight)
    logits = F.linear(hidden, head.view(-1, run.shape.hidden))
    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    wanted = labels[..., 1:].contiguous()
    loss = F.cross_entropy(shifted.view(-1, run.shape.vocab), wanted.view(-1))
    del hidden, shifted, wanted
    loss.backward()
    root.drop()
