"""Kernels by themselves: functions that call one or a few, over sizes that trainings have and some that are odd."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

_HALVES, _FULL = torch.bfloat16, torch.float32
_SHAPES = (
    (768, 768), (3072, 768), (768, 3072), (2048, 2048), (8192, 2048), (2048, 8192), (4096, 4096), (14336, 4096),
    (1000, 1024), (50257, 768), (768, 50257), (50264, 768), (2050, 2050), (2052, 2052), (32000, 2048), (2048, 32000),
    (128256, 2048), (5120, 1024), (16, 4096), (4096, 16),
)  # fmt: skip
_ROWS = (1, 64, 500, 512, 2048, 4096, 8192, 16384)
_LAYOUTS = ("nt", "nn", "tn")
_PRECISIONS = (("bf16", _HALVES, 4e14), ("tf32", _FULL, 2e14), ("fp32", _FULL, 4e13))
"""With about how many FLOP/s a product is made."""
_MOST_SECONDS = 8e-3
_ATTENTION = (
    (1, 16, 512, 64), (8, 12, 1024, 64), (4, 32, 2048, 64), (1, 32, 8192, 64), (32, 16, 512, 64), (2, 16, 2048, 128),
    (1, 32, 4096, 128), (4, 32, 2048, 128), (1, 16, 1024, 128), (1, 8, 2048, 256), (16, 12, 256, 64),
    (2, 64, 4096, 128), (8, 8, 512, 64), (8, 14, 512, 64), (7, 12, 512, 64), (2, 12, 500, 64),
)  # fmt: skip
_BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
_TABLES = ((2048, 2048, 128256), (8192, 768, 50257), (4096, 4096, 32000), (8192, 896, 151936))


def kernels() -> dict[str, list[Callable[[], None]]]:
    """The functions, by the name of their group."""
    attentions = list(_attentions())
    return {
        **{f"product {name}": list(_products(name, dtype, rate)) for name, dtype, rate in _PRECISIONS},
        "attention": attentions,
        "batched": [
            functools.partial(batched, batch * heads, rows, width)
            for batch, heads, rows, width in _ATTENTION
            if rows <= 2048
        ],
        "rows": [
            functools.partial(over_rows, m, n, dtype)
            for m in (512, 2048, 8192, 32768)
            for n in (768, 2048, 4096, 14336)
            for dtype in (_HALVES, _FULL)
            if m * n <= 1 << 28
        ],
        "table": [functools.partial(table, *sizes, dtype) for sizes in _TABLES for dtype in (_HALVES, _FULL)],
        "optimizer": [
            functools.partial(update, count, number, dtype, **given)
            for count in (1 << 20, 1 << 26, 1 << 28)
            for number in (1, 64, 400)
            for dtype in (_HALVES, _FULL)
            for given in ({"fused": True}, {"foreach": True})
        ],
    }


def _products(name: str, dtype: torch.dtype, rate: float) -> Iterator[Callable[[], None]]:
    """All layouts and rows of 16 bits, some of 32."""
    for number, (n, k) in enumerate(_SHAPES):
        for m in _ROWS if name == "bf16" else _ROWS[number % 2 :: 2]:
            if 2 * m * n * k / rate < _MOST_SECONDS:
                for layout in _LAYOUTS if name == "bf16" else _LAYOUTS[number % 3 : number % 3 + 1]:
                    yield functools.partial(product, m, n, k, dtype, layout=layout, tf32=name == "tf32")


def _attentions() -> Iterator[Callable[[], None]]:
    for batch, heads, rows, width in _ATTENTION:
        for backend in _BACKENDS:
            yield functools.partial(attention, batch, (heads, heads), rows, width, _HALVES, backend)
        yield functools.partial(attention, batch, (heads, heads // 4), rows, width, _HALVES, _BACKENDS[1])
        if rows < 8192:
            yield functools.partial(attention, batch, (heads, heads), rows, width, _FULL, _BACKENDS[2])


def tensor(*shape: int, dtype: torch.dtype = _HALVES, grad: bool = False) -> torch.Tensor:
    """Random, on the device."""
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_(grad)


def product(m: int, n: int, k: int, dtype: torch.dtype, *, layout: str, tf32: bool) -> None:
    """``(m, k) x (k, n)``, three times."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    left = tensor(k, m, dtype=dtype).t() if layout[0] == "t" else tensor(m, k, dtype=dtype)
    right = tensor(n, k, dtype=dtype).t() if layout[1] == "t" else tensor(k, n, dtype=dtype)
    for _ in range(3):
        left @ right
    torch.backends.cuda.matmul.allow_tf32 = False


def batched(batch: int, rows: int, width: int) -> None:
    """The two products of attention, three times."""
    query, key = tensor(batch, rows, width), tensor(batch, rows, width)
    for _ in range(3):
        torch.bmm(torch.bmm(query, key.transpose(1, 2)), key)


def attention(
    batch: int, heads: tuple[int, int], rows: int, width: int, dtype: torch.dtype, backend: SDPBackend
) -> None:
    """Forward and backward, twice; ``heads`` are the query's and the key's."""
    query = tensor(batch, heads[0], rows, width, dtype=dtype, grad=True)
    key, value = (tensor(batch, heads[1], rows, width, dtype=dtype, grad=True) for _ in range(2))
    with sdpa_kernel(backend):
        for _ in range(2):
            out = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=heads[0] != heads[1]
            )
            out.sum().backward()  # type: ignore[no-untyped-call]


def over_rows(m: int, n: int, dtype: torch.dtype) -> None:
    """Norms, softmax, activations, sums, copies and elementwise operators on ``m`` rows of ``n``, twice."""
    x, weight, bias = tensor(m, n, dtype=dtype, grad=True), tensor(n, dtype=dtype, grad=True), tensor(n, dtype=dtype)
    for _ in range(2):
        made: Any
        for made in (
            functional.layer_norm(x, (n,), weight, bias), functional.rms_norm(x, (n,), weight),
            functional.softmax(x, -1), functional.gelu(x), functional.silu(x),
        ):  # fmt: skip
            made.backward(x.detach())
        with torch.no_grad():
            (x * x, x + x, x * 2, x.float(), x.to(_HALVES), x.sum(-1), x.sum(0), x.pow(2).mean(-1), x.amax(-1))
            (torch.cat((x, x), -1), x.t().contiguous(), x.view(-1, 2, n // 2).transpose(0, 1).contiguous())
            (x[:, : n // 2] * x[:, n // 2 :], x * weight, x * x[:, :1], x.square().sum(), x.clone(), -x)
            (torch.zeros_like(x), functional.dropout(x, 0.1), x.norm())


def table(m: int, n: int, words: int, dtype: torch.dtype) -> None:
    """An embedding of ``words`` rows of ``n``, and the loss over as many, of ``m`` tokens, twice."""
    weight, ids = tensor(words, n, dtype=dtype, grad=True), torch.randint(0, words, (m,), device="cuda")
    logits = tensor(m, words, dtype=_FULL, grad=True)
    for _ in range(2):
        functional.embedding(ids, weight).sum().backward()  # type: ignore[no-untyped-call]
        functional.cross_entropy(logits, ids).backward()  # type: ignore[no-untyped-call]


def update(count: int, number: int, dtype: torch.dtype, **given: bool) -> None:
    """AdamW's step on ``count`` weights in ``number`` tensors, three times."""
    weights = [tensor(count // number, dtype=dtype).requires_grad_() for _ in range(number)]
    for one in weights:
        one.grad = torch.ones_like(one)
    optimizer = torch.optim.AdamW(weights, lr=1e-5, **given)  # type: ignore[arg-type]
    for _ in range(3):
        optimizer.step()
