"""nanotron's Llama on one rank: what its forward and backward pass allocate and keep, operator by operator.

Lines in brackets are those of huggingface/nanotron 67c5ebb6 (Apache-2.0), under ``src/nanotron/``: ``llama.py`` and
``functional.py`` are ``models/`` and ``parallel/tensor_parallel/``; ``rotary.py``, ``flash_api.cpp`` and Triton's
``layer_norm.py`` are of Dao-AILab/flash-attention 2.5.8. ``_Norm``, ``_Rotary``, ``_Flash``, ``_CrossEntropy``,
``_Column`` and ``_Row`` are custom functions there, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

Mode = Literal["REDUCE_SCATTER", "ALL_REDUCE"]
_SMS = 132
_WORKSPACE_BYTES = 32 * 2**20
"""cuBLAS' on Hopper; PyTorch's ``CublasHandlePool.cpp``."""


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
        """The loss; its caller holds the float32 logits meanwhile (llama.py:1014), and nobody the 16-bit ones."""
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
        return logits.float()  # while the 16-bit ones are there (llama.py:909)


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
        self.tables: list[torch.Tensor] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run it."""
        residual = hidden
        hidden = _Norm.apply(hidden, self.norm1)  # type: ignore[no-untyped-call]
        attended = self._attention(hidden)  # a dict holds it until the layer returns (llama.py:725)
        hidden = attended + residual
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
            query, key, value = packed  # views (llama.py:470)
            del packed
        else:
            widths = [self.queries * self.head, self.keys * self.head, self.keys * self.head]
            query, key, value = (
                part.transpose(0, 1).contiguous().view(batch, rows, -1, self.head)
                for part in torch.split(states, widths, dim=-1)
            )
        # llama.py:655
        pair = torch.cat([key.unsqueeze(0), value.unsqueeze(0)], dim=0).permute(1, 2, 0, 3, 4).contiguous()
        if not self.tables:  # of each layer its own (llama.py:410), from the first pass on (rotary.py:400)
            self.tables += [torch.empty(rows, self.head // 2, dtype=torch.bfloat16) for _ in ("cos", "sin")]
        query = _Rotary.apply(query)  # type: ignore[no-untyped-call]
        pair = _Rotary.apply(pair)  # type: ignore[no-untyped-call]
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
    """``column_linear`` (functional.py:431): asynchronous in the sweep with ``REDUCE_SCATTER``, of one rank as well."""
    if run.mode == "REDUCE_SCATTER":
        result: torch.Tensor = _Column.apply(hidden, weight, run.tp)  # type: ignore[no-untyped-call]
        return result
    out = F.linear(hidden, weight)
    _workspace("forward")
    out.register_hook(lambda _: _workspace("backward"))  # type: ignore[no-untyped-call]
    return out


def _row(hidden: torch.Tensor, weight: torch.Tensor, run: Run) -> torch.Tensor:
    """``row_linear`` (functional.py:584)."""
    if run.mode == "REDUCE_SCATTER":
        result: torch.Tensor = _Row.apply(hidden, weight, run.tp)  # type: ignore[no-untyped-call]
        return result
    return F.linear(hidden, weight)


class _Column(torch.autograd.Function):
    """``_ColumnLinearAsyncCommunication`` (functional.py:118).

    Of several ranks the input is gathered into a buffer that all of them share, once more in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, tp: int) -> torch.Tensor:  # type: ignore[override]
        ctx.tp = tp
        if tp > 1:
            hidden = hidden.contiguous()
            _shared("allgather", tp, hidden)
            out = hidden.new_empty(hidden.shape[0] * tp, *hidden.shape[1:-1], weight.shape[0])
        else:
            out = F.linear(hidden, weight)
        ctx.save_for_backward(hidden, weight)
        _workspace("forward")
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        whole = grad.matmul(weight)  # held until the function returns (functional.py:296)
        _workspace("backward")
        grad = grad.contiguous()
        mine = torch.empty_like(hidden) if ctx.tp > 1 else whole
        return mine, torch.empty_like(weight), None


class _Row(torch.autograd.Function):
    """``_RowLinearAsyncCommunication`` (functional.py:453)."""

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
        if ctx.tp > 1:
            grad = grad.contiguous()
            _shared("allgather2", ctx.tp, grad)
            hidden_grad = torch.empty(hidden.shape, dtype=hidden.dtype)
        else:
            hidden_grad = grad.matmul(weight)
        hidden = hidden.contiguous()
        return hidden_grad, torch.empty_like(weight), None


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
    """flash-attn's Triton RMS norm: keeps its input and a float32 for each row (layer_norm.py:763, 632)."""

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
    """flash-attn's, in place, and so its gradient (rotary.py:462, 243).

    The query is a view of the tensor of query, key and value that ``_attention`` made contiguous, which is so kept
    whole until the backward pass; the key is rotated in the packed pair. The source marks neither as changed.
    """

    @staticmethod
    def forward(_: Any, states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return states

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad


class _Flash(torch.autograd.Function):
    """FlashAttention-2 for rows in a line; adds up the query's gradient in float32 (flash_api.cpp:1141)."""

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
    """``_ShardedCrossEntropy``: subtracts the maximum into a new tensor, the rest in place (functional.py:31)."""

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


BUFFERS: dict[str, torch.Tensor] = {}
"""What a process takes once and keeps, by name."""


def _shared(name: str, tp: int, part: torch.Tensor) -> None:
    """``MemoryBuffer``: one buffer for each name, that grows."""
    wanted = part.numel() * tp
    if name not in BUFFERS or BUFFERS[name].numel() < wanted:
        BUFFERS[name] = torch.empty(wanted, dtype=part.dtype)


def _workspace(thread: str) -> None:
    """cuBLAS' workspace: taken behind the result of a thread's first product, and kept.

    In the backward pass that is the head's. The smallest free block that is large enough is then the one of the float32
    logits, which the next forward pass can't take again: from the second micro-batch on there is one more of them.
    """
    if thread not in BUFFERS:
        BUFFERS[thread] = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8)
