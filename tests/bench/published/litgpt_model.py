"""LitGPT's models with their operators in their order: what autograd keeps of them is what it kept of LitGPT's.

One class for what LitGPT has in four files; what differed between its versions is told by :class:`Era`. Inference
(key-value cache, merging) is left out.

Source, Apache-2.0: Lightning-AI/litgpt ``lit_gpt/{model,lora,adapter,adapter_v2,rmsnorm}.py`` at 069f6584 (2023-10) and
``litgpt/{model,lora}.py`` at 5895df10 (2024-04) and 00af8b0d (2024-09).
"""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from .fourbit import FourBit, FourBitLinear

if TYPE_CHECKING:
    from .litgpt_configs import Config

Norm = Literal["weight times float32", "float32 away first", "float32 weight"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Era:
    """What LitGPT did at a time.

    Attributes:
        norm: ``RMSNorm``: ``(weight * x).to(dtype)`` with a 16-bit weight (2023); ``x.to(dtype) * weight`` from
            7c157492 (2024-02-23) on; ``(x * weight.float()).to(dtype)`` from 916a84ca (2024-07-22) on.
        pads_out_of_place: LoRA's padding with ``index_copy`` and two transposes, before f84b6109 (2024-05-06).
        sliding_windows: Whether attention had windows at all: since 916a84ca.
        first_is_longest: The scripts of 2023 put the longest sample into the first micro-batch; those of 2024 shuffle.
    """

    norm: Norm
    pads_out_of_place: bool
    sliding_windows: bool
    first_is_longest: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What is trained.

    Attributes:
        method: ``full``, ``lora``, ``adapter`` or ``adapter_v2``.
        rank: Of LoRA.
        dropout: Of LoRA.
        targets: Of LoRA: ``query``, ``key``, ``value``, ``projection``, ``mlp``, ``head``.
        four_bit: How the frozen weights are quantised.
    """

    method: Literal["full", "lora", "adapter", "adapter_v2"]
    rank: int = 0
    dropout: float = 0.05
    targets: frozenset[str] = field(default_factory=frozenset)
    four_bit: FourBit | None = None


def _plain_linear(ins: int, outs: int, *, bias: bool, tuning: Tuning) -> nn.Module:
    if tuning.four_bit is not None:
        return FourBitLinear(ins, outs, bias=bias, how=tuning.four_bit)
    linear = nn.Linear(ins, outs, bias=bias)
    return linear.requires_grad_(tuning.method == "full")


class LoRALinear(nn.Module):
    """``lora.LoRALinear``; without a rank a linear like any other."""

    def __init__(self, ins: int, outs: int, *, bias: bool, tuning: Tuning, rank: int) -> None:
        super().__init__()
        self.linear = _plain_linear(ins, outs, bias=bias, tuning=tuning)
        self.rank = rank
        self.dropout = nn.Dropout(tuning.dropout)
        if rank:
            self.lora_A = nn.Parameter(torch.empty(rank, ins))
            self.lora_B = nn.Parameter(torch.empty(outs, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both branches."""
        pretrained: torch.Tensor = self.linear(x)
        if not self.rank:
            return pretrained
        lora = (self.dropout(x) @ self.lora_A.transpose(0, 1) @ self.lora_B.transpose(0, 1)) * 2.0
        return pretrained + lora


class LoRAQKVLinear(nn.Module):
    """``lora.LoRAQKVLinear``: the branches of query, key and value side by side, padded with zeros."""

    def __init__(self, config: Config, *, tuning: Tuning, era: Era) -> None:
        super().__init__()
        self.config, self.era = config, era
        self.enabled = [name in tuning.targets for name in ("query", "key", "value")]
        rank = tuning.rank if any(self.enabled) else 0
        outs = (config.n_head + 2 * config.n_query_groups) * config.head_size
        self.outs, self.rank = outs, rank
        self.linear = _plain_linear(config.n_embd, outs, bias=config.bias, tuning=tuning)
        self.dropout = nn.Dropout(tuning.dropout)
        if rank:
            heads = (config.n_head, config.n_query_groups, config.n_query_groups)
            self.shapes = [config.head_size * n for n, on in zip(heads, self.enabled, strict=True) if on]
            self.lora_A = nn.Parameter(torch.empty(rank * sum(self.enabled), config.n_embd))
            self.lora_B = nn.Parameter(torch.empty(sum(self.shapes), rank))
            self.register_buffer("index", torch.empty(sum(self.shapes), dtype=torch.int64), persistent=False)

    def _conv1d(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.config.n_head == self.config.n_query_groups:
            return F.conv1d(x, weight, groups=sum(self.enabled))
        parts = zip(x.chunk(sum(self.enabled), dim=1), weight.split(self.shapes), strict=True)
        return torch.cat([F.conv1d(a, b) for a, b in parts], dim=1)

    def _zero_pad(self, x: torch.Tensor) -> torch.Tensor:
        if all(self.enabled):
            return x
        if not self.era.pads_out_of_place:
            result = x.new_zeros(*x.shape[:-1], self.outs)
            return result.index_copy_(dim=-1, index=self.index, source=x)
        x = x.transpose(0, 1)
        result = x.new_zeros((*x.shape[:-1], self.outs)).view(-1, self.outs)
        result = result.index_copy(1, self.index.clone(), x.reshape(-1, sum(self.shapes)))
        return result.view((*x.shape[:-1], self.outs)).transpose(0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both branches."""
        pretrained: torch.Tensor = self.linear(x)
        if not self.rank:
            return pretrained
        after_a = F.linear(self.dropout(x), self.lora_A)
        after_b = self._conv1d(after_a.transpose(-2, -1), self.lora_B.unsqueeze(-1)).transpose(-2, -1)
        lora = self._zero_pad(after_b) * 2.0
        return pretrained + lora


class AdapterV2Linear(nn.Module):
    """``adapter_v2.AdapterV2Linear``: a trained scale and bias behind every linear."""

    def __init__(self, ins: int, outs: int, *, bias: bool, tuning: Tuning) -> None:
        super().__init__()
        self.linear = _plain_linear(ins, outs, bias=bias, tuning=tuning)
        self.adapter_bias = nn.Parameter(torch.empty(outs))
        self.adapter_scale = nn.Parameter(torch.empty(outs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale and shift."""
        return self.adapter_scale * (self.linear(x) + self.adapter_bias)


def _linear(ins: int, outs: int, *, bias: bool, tuning: Tuning, target: str) -> nn.Module:
    if tuning.method == "lora":
        rank = tuning.rank if target in tuning.targets else 0
        return LoRALinear(ins, outs, bias=bias, tuning=tuning, rank=rank)
    if tuning.method == "adapter_v2":
        return AdapterV2Linear(ins, outs, bias=bias, tuning=tuning)
    return _plain_linear(ins, outs, bias=bias, tuning=tuning)


class RMSNorm(nn.Module):
    """``RMSNorm``, whose casts moved twice."""

    def __init__(self, size: int, *, era: Era, offset: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.era, self.offset = era, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise in float32."""
        dtype = x.dtype
        x = x.float()
        norm_x = torch.mean(x * x, dim=-1, keepdim=True)
        normed = x * torch.rsqrt(norm_x + 1e-5)
        if self.era.norm == "weight times float32":
            return (self.weight * normed).to(dtype=dtype)
        if self.era.norm == "float32 away first":
            normed = normed.to(dtype=dtype)
            return normed * (1 + self.weight) if self.offset else normed * self.weight
        weight = (1 + self.weight) if self.offset else self.weight
        return (normed * weight.float()).to(dtype=dtype)


def _norm(config: Config, *, tuning: Tuning, era: Era) -> nn.Module:
    norm = (
        RMSNorm(config.n_embd, era=era, offset="gemma" in config.name)
        if config.norm == "RMSNorm"
        else nn.LayerNorm(config.n_embd)
    )
    return norm.requires_grad_(tuning.method in {"full", "adapter_v2"})


class MLP(nn.Module):
    """``GptNeoxMLP``, ``LLaMAMLP`` and ``GemmaMLP``."""

    def __init__(self, config: Config, *, tuning: Tuning) -> None:
        super().__init__()
        self.config = config
        width, inner = config.n_embd, config.intermediate_size
        if config.mlp == "GptNeoxMLP":
            self.fc = _linear(width, inner, bias=config.bias, tuning=tuning, target="mlp")
        else:
            self.fc_1 = _linear(width, inner, bias=config.bias, tuning=tuning, target="mlp")
            self.fc_2 = _linear(width, inner, bias=config.bias, tuning=tuning, target="mlp")
        self.proj = _linear(inner, width, bias=config.bias, tuning=tuning, target="mlp")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Out and in again."""
        approximate = self.config.gelu_approximate
        if self.config.mlp == "GptNeoxMLP":
            x = self.fc(x)
            x = F.gelu(x, approximate=approximate)
            return self.proj(x)  # type: ignore[no-any-return]
        x_fc_1 = self.fc_1(x)
        x_fc_2 = self.fc_2(x)
        if self.config.mlp == "GemmaMLP":
            x = F.gelu(x_fc_1, approximate=approximate) * x_fc_2
        else:
            x = F.silu(x_fc_1) * x_fc_2
        return self.proj(x)  # type: ignore[no-any-return]


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate; ``cos`` and ``sin`` are float32, so the product is."""
    half = x.size(-1) // 2
    x1 = x[..., :half]
    x2 = x[..., half:]
    rotated = torch.cat((-x2, x1), dim=-1)
    roped = (x * cos) + (rotated * sin)
    return roped.to(dtype=x.dtype)


class CausalSelfAttention(nn.Module):
    """``CausalSelfAttention``; with an adapter's prompt from ``adapter_start_layer`` on."""

    prompt_length, start_layer = 10, 2

    def __init__(self, config: Config, block: int, *, tuning: Tuning, era: Era) -> None:
        super().__init__()
        self.config = config
        outs = (config.n_head + 2 * config.n_query_groups) * config.head_size
        if tuning.method == "lora":
            self.attn: nn.Module = LoRAQKVLinear(config, tuning=tuning, era=era)
        else:
            self.attn = _linear(config.n_embd, outs, bias=config.bias, tuning=tuning, target="query")
        inner = config.head_size * config.n_head
        self.proj = _linear(inner, config.n_embd, bias=config.bias, tuning=tuning, target="projection")
        window = config.sliding_window_size if era.sliding_windows else 0
        self.window = window if block % config.sliding_window_every == 0 else 0
        self.prompted = tuning.method.startswith("adapter") and block >= self.start_layer
        if self.prompted:
            self.adapter_wte = nn.Embedding(self.prompt_length, config.n_embd)
            self.gating_factor = nn.Parameter(torch.empty(1, 1, config.n_head, 1))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Attend."""
        config = self.config
        batch, rows, _ = x.size()
        groups, size = config.n_query_groups, config.head_size
        q, k, v = self._heads(self.attn(x), batch, rows)
        if groups != config.n_head:
            q_per_kv = config.n_head // groups
            k = k.expand(batch, groups, q_per_kv, rows, size)
            v = v.expand(batch, groups, q_per_kv, rows, size)
        q = q.reshape(batch, -1, rows, size)
        k = k.reshape(batch, -1, rows, size)
        v = v.reshape(batch, -1, rows, size)
        n = int(config.rotary_percentage * size)
        q_roped = apply_rope(q[..., :n], cos, sin)
        k_roped = apply_rope(k[..., :n], cos, sin)
        q = torch.cat((q_roped, q[..., n:]), dim=-1)
        k = torch.cat((k_roped, k[..., n:]), dim=-1)
        y = self._attend(q, k, v)
        if self.prompted:
            y = y + self.gating_factor * self._prompt(q)
        y = y.reshape(batch, rows, size * config.n_head)
        return self.proj(y)  # type: ignore[no-any-return]

    def _heads(self, qkv: torch.Tensor, batch: int, rows: int) -> tuple[torch.Tensor, ...]:
        q_per_kv = self.config.n_head // self.config.n_query_groups
        qkv = qkv.view(batch, rows, self.config.n_query_groups, q_per_kv + 2, self.config.head_size)
        qkv = qkv.permute(0, 2, 3, 1, 4)
        return qkv.split((q_per_kv, 1, 1), dim=2)

    def _prompt(self, q: torch.Tensor) -> torch.Tensor:
        config = self.config
        prefix = self.adapter_wte.weight.reshape(1, self.prompt_length, config.n_embd)
        _, ak, av = self._heads(self.attn(prefix), 1, self.prompt_length)
        if config.n_query_groups != 1:
            q_per_kv = config.n_head // config.n_query_groups
            ak = ak.repeat_interleave(q_per_kv, dim=2)
            av = av.repeat_interleave(q_per_kv, dim=2)
        ak = ak.view(1, -1, self.prompt_length, config.head_size)
        av = av.view(1, -1, self.prompt_length, config.head_size)
        mask = torch.ones(q.size(2), self.prompt_length, dtype=torch.bool, device=q.device)
        return self._attend(q, ak.expand(q.size(0), -1, -1, -1), av.expand(q.size(0), -1, -1, -1), mask)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = q.size(2)
        if self.window and mask is None:
            mask = torch.ones(rows, rows, dtype=q.dtype, device=q.device).triu(diagonal=1)
            mask.masked_fill_(mask.bool(), float("-inf"))
            bias = torch.ones_like(mask).tril(diagonal=-self.window)
            bias.masked_fill_(bias.bool(), float("-inf"))
            mask += bias
        if not self.config.attention_softcapping:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=mask is None)
            return y.transpose(1, 2)
        scores = q @ k.mT * 0.5
        cap = self.config.attention_softcapping
        scores = torch.tanh(scores / cap) * cap
        if mask is None:
            mask = torch.ones(rows, rows, dtype=q.dtype, device=q.device).triu(diagonal=1)
            mask.masked_fill_(mask.bool(), torch.finfo(q.dtype).min)
        scores = scores + mask
        scores = F.softmax(scores, dim=-1, dtype=torch.float).to(dtype=q.dtype)
        return (scores @ v).transpose(1, 2)


class Block(nn.Module):
    """``Block``: parallel and sequential residuals."""

    def __init__(self, config: Config, block: int, *, tuning: Tuning, era: Era) -> None:
        super().__init__()
        self.config = config
        self.norm_1 = _norm(config, tuning=tuning, era=era)
        self.attn = CausalSelfAttention(config, block, tuning=tuning, era=era)
        self.norm_2 = None if config.shared_attention_norm else _norm(config, tuning=tuning, era=era)
        self.mlp = MLP(config, tuning=tuning)
        self.post_attention_norm = _norm(config, tuning=tuning, era=era) if config.post_norms else nn.Identity()
        self.post_mlp_norm = _norm(config, tuning=tuning, era=era) if config.post_norms else nn.Identity()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """One layer."""
        n_1 = self.norm_1(x)
        h = self.post_attention_norm(self.attn(n_1, cos, sin))
        if self.config.parallel_residual:
            n_2 = n_1 if self.norm_2 is None else self.norm_2(x)
            return self.mlp(n_2) + h + x  # type: ignore[no-any-return]
        assert self.norm_2 is not None
        x = h + x
        return self.post_mlp_norm(self.mlp(self.norm_2(x))) + x  # type: ignore[no-any-return]


class GPT(nn.Module):
    """``GPT``."""

    def __init__(self, config: Config, *, tuning: Tuning, era: Era) -> None:
        super().__init__()
        self.config_ = config
        windows = [era.sliding_windows and i % config.sliding_window_every == 0 for i in range(config.n_layer)]
        self.config = types.SimpleNamespace(layer_types=windows if config.sliding_window_size else None)
        self.lm_head = _linear(
            config.n_embd, config.padded_vocab_size, bias=config.lm_head_bias, tuning=tuning, target="head"
        )
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd).requires_grad_(tuning.method == "full")
        self.h = nn.ModuleList(Block(config, i, tuning=tuning, era=era) for i in range(config.n_layer))
        self.ln_f = _norm(config, tuning=tuning, era=era)
        self.cos: Any = None
        self.sin: Any = None

    def make_rope(self, rows: int) -> None:
        """``model.max_seq_length = rows``: made anew outside of the precision's context, so in float32."""
        n = int(self.config_.rotary_percentage * self.config_.head_size)
        self.cos = torch.empty(rows, n, dtype=torch.float32)
        self.sin = torch.empty(rows, n, dtype=torch.float32)

    def forward(self, idx: torch.Tensor, lm_head_chunk_size: int = 0) -> Any:
        """Logits, in chunks where asked for."""
        cos, sin = self.cos[: idx.size(1)], self.sin[: idx.size(1)]
        x = self.wte(idx)
        if self.config_.scale_embeddings:
            x = x * 45.0
        for block in self.h:
            x = block(x, cos, sin)
        x = self.ln_f(x)
        if lm_head_chunk_size > 0:
            return [self.lm_head(part) for part in x.split(lm_head_chunk_size, dim=1)]  # not capped, there either
        x = self.lm_head(x)
        cap = self.config_.final_softcapping
        return torch.tanh(x / cap) * cap if cap else x
