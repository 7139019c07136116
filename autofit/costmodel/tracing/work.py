"""The work of an operator: its FLOPs by kind, and the bytes that it reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from torch.utils.flop_counter import flop_registry

from autofit.costmodel.seconds.roofline import Kind


def work_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, outputs: list[Any]
) -> tuple[Kind, float, list[int]]:
    """Of an operator its kind, its FLOPs, and the bytes of each tensor that it reads or writes."""
    kind: Kind
    moved = [tensor.nbytes for tensor in outputs if isinstance(tensor, torch.Tensor)]
    first = None
    for value in args:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                moved.append(tensor.nbytes)
                first = tensor if first is None else first
    flops, kind = 0.0, "other"
    counter = flop_registry.get(func._overloadpacket)
    if "flash_attention" in str(func) or "cudnn_attention" in str(func):  # PyTorch's own counter takes no grouped heads
        flops = _attention_flops(func, args, kwargs)
        kind = _product(first) if first is None or first.dtype == torch.float32 else "attention"
    elif func is torch.ops.aten.convolution_backward.default:
        flops, kind = _convolution_backward_flops(args, result), _product(first)
    elif counter is not None:
        flops = float(counter(*_usual(func, args), **kwargs, out_val=result))
        kind = _product(args[1] if "addmm" in func._schema.name else first)  # what is added stands first
    elif func is torch.ops.aten._grouped_mm.default:  # which PyTorch's own counter does not know
        flops, kind = 2.0 * args[0].numel() * args[1].shape[-1], _product(first)
    return kind, flops, moved


def by_rows(rows: int | None, flops: float, moved: Sequence[int]) -> tuple[float, float, float, float]:
    """One operator's FLOPs and the bytes that it reads or writes: of no rows, and of each row."""
    if rows is None:
        return flops, sum(moved), 0.0, 0.0
    grows = sum(size for size in moved if size % rows == 0)
    fixed = flops if flops % rows else 0.0
    return fixed, sum(moved) - grows, (flops - fixed) / rows, grows / rows


def _usual(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments that PyTorch's counter takes: those of the usual overload, without another's type of the result."""
    usual = getattr(func._overloadpacket, "default", func)
    return args[: sum(not one.kwarg_only for one in usual._schema.arguments)]


def _product(tensor: torch.Tensor | None) -> Kind:
    """The kind of a product of such tensors."""
    kinds: dict[torch.dtype, Kind] = {torch.bfloat16: "matmul bf16", torch.float16: "matmul fp16"}
    return "matmul fp32" if tensor is None else kinds.get(tensor.dtype, "matmul fp32")


def counts_twice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, columns: int) -> bool:
    """Whether :func:`work_of` counts twice what attention over such a square computes: causal, or one of a ring's."""
    return _is_causal(func, args, kwargs) or _in_ring(rows, columns)


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    place = next((k for k, one in enumerate(func._schema.arguments) if one.name == "is_causal"), len(args))
    return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))


def _in_ring(rows: int, columns: int) -> bool:
    return distributed.is_initialized() and rows != columns


def _convolution_backward_flops(args: tuple[Any, ...], result: Any) -> float:
    """Those of the gradients of input and weight; PyTorch's own counter takes no groups for the weight's."""
    *given, groups, (wants_input, wants_weight, _) = args
    count = flop_registry[torch.ops.aten.convolution_backward]
    to_input = float(count(*given, groups, [wants_input, False, False], out_val=result))
    to_weight = float(count(*given, groups, [False, wants_weight, False], out_val=result))
    return to_input + to_weight / int(groups)


def _attention_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Two products forward, five backward, over the whole square: what PyTorch's own counter does for CUDA's.

    A causal kernel leaves out half of it, which is known to who reads them: a block of a ring that leaves out nothing
    counts twice.

    Source: ``torch.utils.flop_counter.sdpa_flop_count`` and ``sdpa_backward_flop_count``.
    """
    backward = "backward" in str(func)
    query, key, value = args[1:4] if backward else args[0:3]
    batch, heads, rows, width = query.shape
    columns, value_width = key.shape[-2], value.shape[-1]
    batch *= 2 if _in_ring(rows, columns) and not _is_causal(func, args, kwargs) else 1
    scores = 2.0 * batch * heads * rows * columns * width
    outputs = 2.0 * batch * heads * rows * columns * value_width
    return float(3 * scores + 2 * outputs if backward else scores + outputs)
