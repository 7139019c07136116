"""nanotron's Llama on one rank of a data- and tensor-parallel world, as the Ultra-Scale Playbook swept it.

- bfloat16 weights; **float32 gradients** in one buffer, **float32 master weights** in another
  (``FP32GradientAccumulator``); AdamW, fused. With ZeRO-1 master weights and AdamW's state are split over the
  data-parallel ranks, by parameter; the gradients' buffer is not.
- ``DistributedDataParallel`` (more than one data-parallel rank) keeps bfloat16 buckets beside the gradients. Its hook
  adds them to the float32 buffer, and ZeRO-1 flattens each bucket's float32 gradients to reduce and scatter them.
- FlashAttention-2 on ``q`` and a packed ``kv``, flash-attn's rotary embedding, Triton's RMS norm; nothing recomputed.
- The head's logits become float32 while the 16-bit ones are there; the loss subtracts the maximum into a new tensor,
  and makes of it the softmax and the gradient in place.
- Tensor parallel in two modes. ``REDUCE_SCATTER`` (with sequence parallelism, asynchronous, the gathered input is
  not kept: ``tp_recompute_allgather``) splits the rows between products; ``ALL_REDUCE`` holds them whole.
- Known to be wrong: the last block that ZeRO-1 flattens (of the embedding) is held here until the next reduction. The
  source frees it before, and what it stands in for was not found. ``_all_gather_params``, which joins all parameters
  once more behind each step, is left out: with it, and without that block, the smaller model's rows of micro-batch 1
  are met within 0.4 % (but that without accumulation), the larger model's are up to 12 % too high.
- ``Mem Res (GB)``: ``max_memory_reserved`` after three steps. That this is the column, and not ``Mem Alloc``, follows
  from the code: ``log_memory`` resets the peaks behind the backward pass of each of the first five steps, so that
  ``max_memory_allocated`` would not depend on the micro-batch.

Source, Apache-2.0: huggingface/nanotron 9055c664 (2025-01): ``models/llama.py``, ``parallel/tensor_parallel/
functional.py``, ``optim/{gradient_accumulator,zero}.py``, ``trainer.py``, ``helpers.py``; ``scripts/
scaling_benchmarks.py`` at e24d2483.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from autofit.costmodel.memory import allocator
from autofit.costmodel.tracing.timeline import Tape

from . import fake

Mode = Literal["REDUCE_SCATTER", "ALL_REDUCE"]
_SMS = 132
_WORKSPACE_BYTES = 32 * 2**20
"""cuBLAS' on Hopper, one of each thread; ``CublasHandlePool.cpp``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the sweep, of one rank."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    tied: bool
    rows: int
    batch: int
    accumulation: int
    dp: int
    tp: int
    zero: int
    mode: Mode = "REDUCE_SCATTER"


def reserved_bytes(run: Run) -> int:
    """``max_memory_reserved`` of the run's first steps."""
    same = replace(run, accumulation=min(run.accumulation, 2), dp=run.dp if run.zero or run.dp == 1 else 2)
    return _reserved(same)


@functools.cache
def _reserved(run: Run) -> int:
    tape = _tape(run)
    first = len(tape.sizes)
    events = np.concatenate([np.arange(first, first + 2), tape.events])
    sizes = np.concatenate([tape.bytes_at(0), np.full(2, float(_WORKSPACE_BYTES))])
    return int(allocator.replay(events, sizes).peak_reserved_bytes)


def _tape(run: Run) -> Tape:
    _BUFFERS.clear()
    return fake.run(functools.partial(_build, run), functools.partial(_steps, run))


def _build(run: Run) -> Llama:
    with fake.default_dtype(torch.bfloat16):
        return Llama(run).train()


def _parameter_numels(run: Run) -> Iterator[int]:
    """Of one rank, in the model's order."""
    head = run.hidden // run.heads
    qkv = (run.heads + 2 * run.kv_heads) * head
    vocabulary = run.vocab * run.hidden // run.tp
    yield vocabulary
    for _ in range(run.layers):
        yield run.hidden
        yield qkv * run.hidden // run.tp
        yield run.hidden * run.hidden // run.tp
        yield run.hidden
        yield 2 * run.intermediate * run.hidden // run.tp
        yield run.intermediate * run.hidden // run.tp
    yield run.hidden
    if not run.tied:
        yield vocabulary


def _steps(run: Run, model: Llama, watch: fake.Watch) -> None:
    """Two optimizer steps: the first without AdamW's state."""
    numels = list(_parameter_numels(run))
    share = run.dp if run.zero else 1
    shares = [-(-numel // share) for numel in numels]
    held = [torch.empty(sum(numels), dtype=torch.float32), torch.empty(sum(shares), dtype=torch.float32)]
    if run.dp > 1:
        held += [torch.empty(numel, dtype=torch.bfloat16) for numel in reversed(numels)]  # the reducer's buckets
    flattened: list[torch.Tensor] = []
    for turn in range(2):
        for micro in range(run.accumulation):
            watch.step, watch.backward = turn * run.accumulation + micro, False
            watch.mark("pre")
            ids = torch.empty(run.batch, run.rows, dtype=torch.int64)
            loss = model(ids, torch.empty_like(ids)) / run.accumulation
            watch.backward = True
            watch.mark("headB")
            loss.backward()
            del loss
            watch.mark("step")
            if micro == run.accumulation - 1 and run.dp > 1 and run.zero:
                for numel in reversed(numels):  # reduce_scatter_coalesced flattens what it sends, and what it gets
                    flattened[:] = [torch.empty(-(-numel // run.dp) + part * (numel - 1)) for part in (0, 1)]
            for parameter in model.parameters():
                parameter.grad = None
        if turn == 0:
            held += [torch.empty(numel, dtype=torch.float32) for numel in shares for _ in range(2)]


class Llama(nn.Module):
    """The share of one rank."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.embedding = nn.Embedding(run.vocab // run.tp, run.hidden)
        self.decoder = nn.ModuleList([Layer(run) for _ in range(run.layers)])
        self.norm = nn.Parameter(torch.empty(run.hidden))
        self.head = self.embedding.weight if run.tied else nn.Parameter(torch.empty(run.vocab // run.tp, run.hidden))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss; its caller holds the float32 logits meanwhile."""
        logits = self._logits(ids)
        loss: torch.Tensor = _CrossEntropy.apply(logits, labels.transpose(0, 1).contiguous())  # type: ignore[no-untyped-call]
        return loss.transpose(0, 1).mean()

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        run = self.run
        hidden = self.embedding(ids.transpose(0, 1))
        if run.tp > 1:
            hidden = hidden * torch.ones(*hidden.shape[:-1], 1, dtype=torch.bool)
            if run.mode == "REDUCE_SCATTER":
                hidden = _ReduceScatter.apply(hidden, run.tp)  # type: ignore[no-untyped-call]
        for layer in self.decoder:
            hidden = layer(hidden)
        hidden = _Norm.apply(hidden, self.norm)  # type: ignore[no-untyped-call]
        logits = _column(hidden, self.head, run)
        return logits.float()


class Layer(nn.Module):
    """``LlamaDecoderLayer``."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.head = run.hidden // run.heads
        self.queries, self.keys = run.heads // run.tp, run.kv_heads // run.tp
        self.norm1 = nn.Parameter(torch.empty(run.hidden))
        self.qkv = nn.Parameter(torch.empty((self.queries + 2 * self.keys) * self.head, run.hidden))
        self.o = nn.Parameter(torch.empty(run.hidden, self.queries * self.head))
        self.norm2 = nn.Parameter(torch.empty(run.hidden))
        self.gate_up = nn.Parameter(torch.empty(2 * run.intermediate // run.tp, run.hidden))
        self.down = nn.Parameter(torch.empty(run.hidden, run.intermediate // run.tp))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run it."""
        residual = hidden
        hidden = _Norm.apply(hidden, self.norm1)  # type: ignore[no-untyped-call]
        hidden = self._attention(hidden)
        hidden = hidden + residual
        residual = hidden
        hidden = _Norm.apply(hidden, self.norm2)  # type: ignore[no-untyped-call]
        hidden = self._mlp(hidden)
        return hidden + residual

    def _mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        merged = _column(hidden, self.gate_up, self.run)
        gate, up = torch.split(merged, merged.shape[-1] // 2, dim=-1)
        return _row(F.silu(gate) * up, self.down, self.run)

    def _attention(self, hidden: torch.Tensor) -> torch.Tensor:
        states = _column(hidden, self.qkv, self.run)
        rows, batch, _ = states.shape
        if self.queries == self.keys:
            packed = states.view(rows, batch, 3, self.queries, self.head).permute(2, 1, 0, 3, 4).contiguous()
            query, key, value = packed
            del packed
        else:
            widths = [self.queries * self.head, self.keys * self.head, self.keys * self.head]
            query, key, value = (
                part.transpose(0, 1).contiguous().view(batch, rows, -1, self.head)
                for part in torch.split(states, widths, dim=-1)
            )
        pair = torch.cat([key.unsqueeze(0), value.unsqueeze(0)], dim=0).permute(1, 2, 0, 3, 4).contiguous()
        query, pair = _Rotary.apply(query, pair)  # type: ignore[no-untyped-call]
        key, value = torch.split(pair, 1, dim=2)
        out: torch.Tensor = _Flash.apply(  # type: ignore[no-untyped-call]
            query.reshape(batch * rows, self.queries, self.head),
            key.view(batch * rows, self.keys, self.head),
            value.view(batch * rows, self.keys, self.head),
            batch,
        )
        out = out.contiguous().view(batch, rows, self.queries * self.head).transpose(0, 1)
        return _row(out, self.o, self.run)


def _column(hidden: torch.Tensor, weight: torch.Tensor, run: Run) -> torch.Tensor:
    """``column_linear``."""
    if run.mode == "REDUCE_SCATTER" and run.tp > 1:
        result: torch.Tensor = _Column.apply(hidden, weight, run.tp)  # type: ignore[no-untyped-call]
        return result
    return F.linear(hidden, weight)


def _row(hidden: torch.Tensor, weight: torch.Tensor, run: Run) -> torch.Tensor:
    """``row_linear``."""
    if run.mode == "REDUCE_SCATTER":
        result: torch.Tensor = _Row.apply(hidden, weight, run.tp)  # type: ignore[no-untyped-call]
        return result
    return F.linear(hidden, weight)


class _Column(torch.autograd.Function):
    """``_ColumnLinearAsyncCommunication``; its input is gathered into a buffer that all of them share."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, tp: int) -> torch.Tensor:  # type: ignore[override]
        ctx.tp = tp
        hidden = hidden.contiguous()
        ctx.save_for_backward(hidden, weight)
        _shared("allgather", tp, hidden)
        return hidden.new_empty(hidden.shape[0] * tp, *hidden.shape[1:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        whole = grad.matmul(weight)
        grad = grad.contiguous()
        mine = torch.empty_like(hidden)
        weight_grad = torch.empty_like(weight)
        del whole
        return mine, weight_grad, None


class _Row(torch.autograd.Function):
    """``_RowLinearAsyncCommunication``."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, tp: int) -> torch.Tensor:  # type: ignore[override]
        ctx.tp = tp
        out = F.linear(hidden, weight)
        if tp > 1:
            out = out.new_empty(out.shape[0] // tp, *out.shape[1:])
        ctx.save_for_backward(hidden, weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        grad = grad.contiguous()
        if ctx.tp > 1:
            _shared("allgather2", ctx.tp, grad)
        hidden_grad = torch.empty(hidden.shape, dtype=hidden.dtype)
        flat = hidden.contiguous()
        weight_grad = torch.empty_like(weight)
        del flat
        return hidden_grad, weight_grad, None


class _ReduceScatter(torch.autograd.Function):
    """``DifferentiableReduceScatterSum``."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, tp: int) -> torch.Tensor:  # type: ignore[override]
        ctx.tp = tp
        return hidden.new_empty(hidden.shape[0] // tp, *hidden.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad.new_empty(grad.shape[0] * ctx.tp, *grad.shape[1:]), None


class _Norm(torch.autograd.Function):
    """flash-attn's Triton RMS norm: keeps its input and a float32 for each row."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(hidden, weight, torch.empty(hidden.shape[:-1], dtype=torch.float32))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, weight, _ = ctx.saved_tensors
        grad = grad.contiguous()
        partial = torch.empty(_SMS, weight.shape[0], dtype=torch.float32)
        return torch.empty_like(hidden), partial.sum(0).to(weight.dtype)


class _Rotary(torch.autograd.Function):
    """flash-attn's: of the query into a new tensor, of the key in its place in the packed pair."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, pair: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.mark_dirty(pair)
        return torch.empty(query.shape, dtype=query.dtype), pair

    @staticmethod
    def backward(_: Any, query: torch.Tensor, pair: torch.Tensor) -> Any:  # type: ignore[override]
        return torch.empty_like(query), pair


class _Flash(torch.autograd.Function):
    """FlashAttention-2 for rows in a line; its backward pass adds up the query's gradient in float32."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: int) -> torch.Tensor:  # type: ignore[override]
        out = torch.empty_like(query)
        ctx.batch = batch
        ctx.save_for_backward(query, key, value, out, torch.empty(query.shape[1], query.shape[0], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:  # type: ignore[override]
        query, key, value, *_rest = ctx.saved_tensors
        gradients = [torch.empty(one.shape, dtype=one.dtype) for one in (query, key, value)]
        rows, heads, width = query.shape
        padded = rows + 128 * ctx.batch
        held = [torch.empty(padded, heads, -(-width // 32) * 32), torch.empty(heads, padded)]
        del held
        return *gradients, None


class _CrossEntropy(torch.autograd.Function):
    """``_ShardedCrossEntropy``."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        largest = torch.max(logits, dim=-1)[0]
        softmax = logits - largest.unsqueeze(dim=-1)
        picked, mask = torch.empty_like(largest), labels < 0
        total = softmax.sum(dim=-1)
        loss = torch.log(total) - picked
        ctx.save_for_backward(softmax, mask, labels.clone())
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        softmax, _, _ = ctx.saved_tensors
        return softmax.mul_(grad.unsqueeze(dim=-1)), None


_BUFFERS: dict[str, torch.Tensor] = {}


def _shared(name: str, tp: int, part: torch.Tensor) -> None:
    """``MemoryBuffer``: one buffer for each name, that grows."""
    wanted = part.numel() * tp
    if name not in _BUFFERS or _BUFFERS[name].numel() < wanted:
        _BUFFERS[name] = torch.empty(wanted, dtype=part.dtype)
