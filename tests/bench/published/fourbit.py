"""bitsandbytes' 4-bit linear under fake tensors: what it holds, what it makes for a moment, and what it keeps.

- Held: two values a byte; a float32 ``absmax`` for each block of 64 values, or with double quantisation a byte for
  each block and a float32 for each 256 of those.
- For a moment, forward and backward: the weight in the type that was quantised, and a copy in the type of the input
  where that differs. LitGPT quantises from float16 (Lightning's ``BitsandbytesPrecision``: ``weight.to(torch.half)``),
  so with bfloat16 inputs there are two.
- Kept: ``ctx.tensors = (A, B)`` held the input ``A`` up to version 0.43.1, though nothing needs it (taken out by
  9e753741, pull request 1270, 2024-07-16). It is an attribute of the graph's node and no saved tensor, so the backward
  pass does not free it: it lives as long as somebody holds the loss, through the whole next forward pass.

Source: ``bitsandbytes/autograd/_functions.py`` (``MatMul4Bit``) and ``functional.py`` (``quantize_4bit``,
``dequantize_4bit``) at 0.42.0 and 0.43.2; ``lightning/fabric/plugins/precision/bitsandbytes.py`` at 2.1.0 and 2.3.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

_BLOCK, _BLOCK_OF_BLOCKS = 64, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBit:
    """How weights are quantised.

    Attributes:
        double: Whether the scales are quantised once more.
        keeps_input: Whether the version is older than 0.43.2.
        quantised_from: Type of the weights when they were quantised.
    """

    double: bool
    keeps_input: bool
    quantised_from: torch.dtype = torch.float16


def scales_of(numel: int) -> list[torch.Tensor]:
    """What lies beside a weight whose scales are quantised once more."""
    blocks = -(-numel // _BLOCK)
    return [
        torch.empty(blocks, dtype=torch.uint8),
        torch.empty(-(-blocks // _BLOCK_OF_BLOCKS), dtype=torch.float32),
        torch.empty(16, dtype=torch.float32),
        torch.empty(256, dtype=torch.float32),
        torch.empty((), dtype=torch.float32),
    ]


class FourBitLinear(nn.Module):
    """Stands for ``bitsandbytes.nn.Linear4bit``; its tensors have shapes only."""

    def __init__(self, ins: int, outs: int, *, bias: bool, how: FourBit) -> None:
        super().__init__()
        count = ins * outs
        blocks = -(-count // _BLOCK)
        self.how = how
        self.shape = (outs, ins)
        self.weight = nn.Parameter(torch.empty((count + 1) // 2, 1, dtype=torch.uint8), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outs), requires_grad=False) if bias else None
        self.register_buffer("absmax", torch.empty(blocks, dtype=torch.uint8 if how.double else torch.float32))
        self.register_buffer("code", torch.empty(16, dtype=torch.float32))
        if how.double:
            self.register_buffer("absmax2", torch.empty(-(-blocks // _BLOCK_OF_BLOCKS), dtype=torch.float32))
            self.register_buffer("code2", torch.empty(256, dtype=torch.float32))
            self.register_buffer("offset", torch.empty((), dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply with the weight as it was."""
        result: torch.Tensor = _Multiply.apply(x, self.bias, self)  # type: ignore[no-untyped-call]
        return result

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """``dequantize_4bit(...).to(dtype)``."""
        held = self.absmax
        scales = held.to(torch.float32) if self.how.double else held
        weight = torch.empty(self.shape, dtype=self.how.quantised_from, device=self.weight.device)
        del scales
        return weight.to(dtype)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, linear: FourBitLinear) -> torch.Tensor:  # type: ignore[override]
        ctx.linear = linear
        ctx.kept = x if linear.how.keeps_input and x.requires_grad else None
        return F.linear(x, linear.dequantised(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return torch.matmul(grad, ctx.linear.dequantised(grad.dtype)), None, None
