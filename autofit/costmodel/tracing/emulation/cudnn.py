"""Attention by cuDNN's kernel, which PyTorch prefers on cards of capability 9.x and 10.x.

=====================  ============================================================================================
forward                two seeds, the result, a float32 a row where a gradient is wanted; the plan's workspace
backward               three gradients; a copy of a gradient that comes in with its numbers apart; a workspace: the
                       query's gradient in float32, a float32 a row, with grouped queries key's and value's
                       gradients for every head, and the plan's own
=====================  ============================================================================================

Sources: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (``check_prefer_cudnn_attention``,
``can_use_cudnn_attention``), ``attention_backward.cu``, ``aten/src/ATen/native/cudnn/MHA.cpp``; cuDNN's frontend,
``node/scaled_dot_product_flash_attention.h``. The workspaces were measured on an H100 (PyTorch 2.11, cuDNN 9.19); what
a plan takes on a card of 10.x, or by another cuDNN, is taken to be the same.

A build of PyTorch for the CPU does not know the cuDNN of one for CUDA: taken is what PyPI's wheels require, 9.19 (of
2.11), 9.20 (2.12, 2.13), 9.24 (2.14) and 9.26 (2.15). It is preferred above 9.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version

if TYPE_CHECKING:
    from autofit.costmodel.tracing.recorder import Recorder

_SIXTEEN = (torch.bfloat16, torch.float16)
_HOPPER = (9, 0)
_RELEASE = Version(torch.__version__).release
_ANY_DROPOUT, _WIDE_BY_VERSION = _RELEASE < (2, 12), _RELEASE >= (2, 14)
_ALIGNED, _DROPOUT_STEPS, _WIDTH, _WIDEST = 8, 16, 128, 256
_PLAN_BYTES = 256
"""What a plan of cuDNN takes beside what its frontend tells."""


def takes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    *, dtype: torch.dtype, capability: tuple[int, int], dropout: float,
) -> bool:  # fmt: skip
    """Whether PyTorch takes cuDNN's kernel; the arguments are those of ``fused_attention``, of four dimensions each."""
    if capability < _HOPPER or dtype not in _SIXTEEN or not torch._C._get_cudnn_sdp_enabled():
        return False
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    rows, columns = query.shape[-2], key.shape[-2]
    if columns <= 1 or rows < 1 or any(one.stride(-1) != 1 for one in (query, key, value)):
        return False
    if dropout and (rows == 1 or not (_ANY_DROPOUT or (dropout * _DROPOUT_STEPS).is_integer())):
        return False
    if mask is not None and not _knows(mask, (*query.shape[:-1], columns)):
        return False
    return _knows_widths(query.shape[-1], value.shape[-1], capability, trains=_trains(query, key, value))


def _knows(mask: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Of two or four dimensions, each the scores' or one, and not learned."""
    sizes = zip(mask.shape, shape[-mask.dim() :], strict=True) if mask.dim() in {2, 4} else ()
    return mask.dim() in {2, 4} and not mask.requires_grad and all(size in {1, whole} for size, whole in sizes)


def _knows_widths(keys: int, values: int, capability: tuple[int, int], *, trains: bool) -> bool:
    widest = max(keys, values)
    if keys % _ALIGNED or values % _ALIGNED or widest > _WIDEST:
        return False
    if widest <= _WIDTH or (keys, values) == (192, _WIDTH):
        return True
    if _WIDE_BY_VERSION:
        return not trains or keys == values == _WIDEST
    return capability == _HOPPER


def _trains(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(one.requires_grad for one in tensors)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    *, is_causal: bool, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """The result of the operator that :func:`stand_ins` knows; a mask is made numbers of the query's type first."""
    if mask is not None:
        mask = mask.to(query.dtype) if mask.is_floating_point() else torch.zeros_like(mask, dtype=query.dtype)
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention
    sums = _trains(query, key, value)
    result: torch.Tensor = operator(query, key, value, mask, sums, 0.0, is_causal, False, scale=scale)[0]
    return result


def stand_ins() -> dict[Any, Any]:
    """For the operators of both passes."""
    ops = torch.ops.aten
    return {
        ops._scaled_dot_product_cudnn_attention.default: _forward,
        ops._scaled_dot_product_cudnn_attention_backward.default: _backward,
    }


def _forward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    results, query = list(recorder.run(func, args, kwargs)[0]), args[0]
    results[6:8] = [query.new_empty((), dtype=torch.int64) for _ in range(2)]
    if not args[4]:
        results[1] = query.new_empty(0)
    for place in (6, 7, 0, 1):
        recorder.follow(results[place], func, args)
    with recorder.holding(0, beside=_PLAN_BYTES, name="attention's workspace"):
        return tuple(results)


def _backward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradient, query, key, value = args[:4]
    batch, heads, rows, width = query.shape
    gradients = recorder.run(func, args, kwargs)[0]
    for made in gradients:
        recorder.follow(made, func, args)
    copied = [gradient.numel() * gradient.element_size()] if gradient.stride(-1) != 1 else []
    workspace = 4 * batch * heads * rows * (width + 1)
    if key.shape[1] != heads:
        workspace += key.element_size() * batch * heads * key.shape[2] * (width + value.shape[-1])
    with (
        recorder.holding(*copied, name="a gradient made contiguous"),
        recorder.holding(workspace, beside=_PLAN_BYTES, name="attention's workspace"),
    ):
        return gradients
