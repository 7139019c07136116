"""What CUDA's kernels hold while they run, beside their results: stand-ins for operators of a trace.

=================================  ================================================================================
attention, forward                 results of parts of the keys, see :func:`_split_bytes`
attention, backward                float32 accumulators, see :func:`_flash_bytes` and :func:`_efficient_bytes`
attention by cuDNN                 workspaces, see :mod:`~autofit.costmodel.tracing.emulation.cudnn`
norms and softmax, backward        a copy of a gradient that is not contiguous, such as that of a sum
softmax                            backward its gradient times its result; where it looks for empty rows, a mask
sums over rows                     each block's partial sums, which another block adds up
an embedding, backward             a row for each part of a token's places
norms of many tensors              a partial norm of every 65,536 elements of the largest, for each tensor
=================================  ================================================================================

Sources: ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp`` (``mha_bwd``), ``attention_backward.cu``
and ``mem_eff_attention/kernel_backward.h``; ``aten/src/ATen/native/cuda/Reduce.cuh`` (``setReduceConfig``). Each has
a test on a device that compares it with the real one.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version

from autofit.costmodel.tracing.emulation import cudnn

if TYPE_CHECKING:
    from autofit.costmodel.tracing.recorder import Recorder

SIXTEEN = (torch.bfloat16, torch.float16)
_AMPERE, _LESS_SHARED_MEMORY = (8, 0), (8, 6)
_WARP, _MOST_THREADS, _VECTOR = 32, 512, 4
_FEWEST_VALUES, _MOST_VALUES = 16, 256
_FEW_PLACES, _PLACES_A_PART = 3072, 10
_CHUNK = 1 << 16
_ROWS_OF_SUMS = 32
GROUPED_EFFICIENT = Version(torch.__version__).release >= (2, 14)
"""Whether the memory-efficient kernel takes fewer heads of keys than of queries."""
_RESIDENT_THREADS = {(7, 5): 80 * 2048, (8, 6): 142 * 1536} | dict.fromkeys([(8, 0), (9, 0), (10, 0)], 132 * 2048)
"""Threads that a card runs at once, by :func:`~autofit.costmodel.tracing.trace_request.kernels_of`: those of a V100, an
L40S and an H100. A card with fewer splits a long sum over fewer blocks."""
_OF_ONE = {(8, 6): 1536}
"""Threads that a multiprocessor runs at once, where they are not 2048."""


def kernel_stand_ins(capability: tuple[int, int] = _AMPERE) -> dict[Any, Any]:
    """What kernels hold beyond the CPU's, which keeps the same for the backward pass.

    Args:
        capability: Of :func:`~autofit.costmodel.tracing.trace_request.kernels_of`.
    """
    ops = torch.ops.aten
    attention = _AttentionBackward(capability)
    reduction = functools.partial(_reduction, _RESIDENT_THREADS[capability])
    return {
        **cudnn.stand_ins(),
        ops._scaled_dot_product_flash_attention_for_cpu.default: functools.partial(_flash_forward, capability),
        ops._scaled_dot_product_flash_attention_for_cpu_backward.default: attention,
        ops._scaled_dot_product_efficient_attention_backward.default: attention,
        ops.native_dropout.default: _dropout,
        ops.native_layer_norm_backward.default: _dense_gradient,
        ops._softmax_backward_data.default: _softmax_backward,
        ops._safe_softmax.default: _safe_softmax,
        ops._log_softmax_backward_data.default: _dense_gradient,
        ops.embedding_dense_backward.default: _embedding_backward,
        ops.sum.dim_IntList: reduction,
        ops.mean.dim: reduction,
        ops.amax.default: reduction,
        ops._foreach_norm.Scalar: _foreach_norm,
    }


def device_properties(capability: tuple[int, int]) -> SimpleNamespace:
    """What the Python around a package's kernels asks of a device: into how many parts a sum is to be split."""
    major, minor = capability
    parts = _RESIDENT_THREADS[capability] // _OF_ONE.get(capability, 2048)
    return SimpleNamespace(multi_processor_count=parts, major=major, minor=minor)


def fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    *, dtype: torch.dtype, capability: tuple[int, int], dropout: float = 0.0,
) -> str | None:  # fmt: skip
    """The fused kernel that CUDA takes: ``cudnn``, ``flash`` or ``efficient``; ``None`` where it makes the scores.

    Args:
        query: ``(batch, heads, rows, width)``, as ``key`` and ``value``.
        key: May have fewer heads; the memory-efficient kernel knows that from torch 2.14 on.
        value: May be of another width; FlashAttention does not know that.
        mask: FlashAttention takes none.
        dtype: In which it computes, which autocast may have changed.
        capability: FlashAttention needs 8.0, cuDNN's comes first on 9.x and 10.x.
        dropout: That cuDNN's knows in steps.

    Source: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``.
    """
    width = query.shape[-1]
    if query.dim() != 4 or key.shape[-1] != width:
        return None
    if cudnn.takes(query, key, value, mask, dtype=dtype, capability=capability, dropout=dropout):
        return "cudnn"
    sixteen = dtype in SIXTEEN
    if sixteen and capability >= _AMPERE and mask is None and value.shape[-1] == width <= 256:
        return "flash"
    aligned = 8 if sixteen else 4 if capability >= _AMPERE else 1
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    if (same_heads or GROUPED_EFFICIENT) and width % aligned == value.shape[-1] % aligned == 0:
        return "efficient"
    return None


def _flash_forward(
    capability: tuple[int, int], recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The forward pass, whose result is there before the results of the keys' parts, and laid out as the query is.

    The memory-efficient kernel has the heads of a row beside one another, whatever the query's are like, and a number
    for each row, in rows of a multiple of 32.
    """
    results = recorder.run(func, args, kwargs)[0]
    query, key = args[:2]
    if query.dtype in SIXTEEN and capability >= _AMPERE and kwargs.get("attn_mask") is None:
        if recorder.fake:  # mha_fwd of flash_api.cpp
            results = torch.empty_like(query), results[1]
        for result in results:
            recorder.follow(result, func, args)
        with recorder.holding(*_split_bytes(query, key, _RESIDENT_THREADS[capability]), name="attention by parts"):
            pass
    elif recorder.fake:
        out, sums = results
        shape = (*sums.shape[:-1], -(-sums.shape[-1] // _ROWS_OF_SUMS) * _ROWS_OF_SUMS)
        return torch.empty_permuted(out.shape, (0, 2, 1, 3), dtype=out.dtype), sums.new_empty(shape)
    return results


def _split_bytes(query: torch.Tensor, key: torch.Tensor, threads: int) -> list[int]:
    """What FlashAttention-2 holds where too few blocks of rows would run: a result of each part of the keys.

    Source: ``flash_api.cpp`` (``set_params_splitkv``, ``num_splits_heuristic``).
    """
    batch, heads, rows, width = query.shape
    at_once = 2 * threads // 2048  # blocks: two a multiprocessor
    columns = 256 if width <= 64 else 128 if width <= 128 else 64
    blocks, parts = batch * heads * -(-rows // 64), -(-key.shape[2] // columns)
    if blocks >= 0.8 * at_once:
        return []
    efficiency = {
        count: (waves := blocks * count / at_once) / math.ceil(waves)
        for count in range(1, min(128, at_once, parts) + 1)
        if count == 1 or -(-parts // count) != -(-parts // (count - 1))
    }
    best = max(efficiency.values())
    count = next(count for count, one in efficiency.items() if one >= 0.85 * best)
    padded = -(-width // 32) * 32
    return [4 * count * batch * heads * rows, 4 * count * batch * heads * rows * padded] if count > 1 else []


class _AttentionBackward:
    """The backward pass, whose gradients are there before its accumulators, which live as long as it runs."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability

    def __call__(self, recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gradient, query, key, value = args[:4]
        flash = "flash" in str(func) and query.dtype in SIXTEEN and self.capability >= _AMPERE
        held = _flash_bytes(query, key) if flash else _efficient_bytes(query, key, value, self.capability)
        if flash:  # whose heads have to lie beside one another (_flash_attention_backward of attention_backward.cu)
            held += [one.numel() * one.element_size() for one in (gradient, args[4]) if _heads_apart(one)]
        elif gradient.stride(-1) != 1:
            held.append(_copied_bytes(gradient))
        of_inputs, of_mask = (results := recorder.run(func, args, kwargs)[0])[:3], results[3:]
        if flash and recorder.fake:  # each laid out as what it is the gradient of (mha_bwd of flash_api.cpp)
            of_inputs = tuple(torch.empty_like(one) for one in (query, key, value))
        gradients = (*of_inputs, *map(_whole, of_mask))
        for made in gradients:
            if made is not None:
                recorder.follow(made, func, args)
        with recorder.holding(*held, name="attention's accumulators"):
            return gradients


def _heads_apart(tensor: torch.Tensor) -> bool:
    return not tensor.transpose(1, 2).is_contiguous()


def _whole(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A mask's gradient with all that is allocated: its rows may be longer, and a fake one lacks the last one's end."""
    if gradient is None or gradient.stride(-2) <= gradient.shape[-1]:
        return gradient
    return gradient.new_empty((*gradient.shape[:-1], gradient.stride(-2)))[..., : gradient.shape[-1]]


def _flash_bytes(query: torch.Tensor, key: torch.Tensor) -> list[int]:
    """What FlashAttention-2 takes for itself.

    It adds up the query's gradient in float32, padded to blocks of 128 rows and 32 columns, keeps one float32 a row,
    and with grouped queries makes key's and value's gradients for every head first.
    """
    batch, heads, rows, width = query.shape
    padded = -(-rows // 128) * 128
    held = [4 * batch * heads * padded, 4 * batch * padded * heads * (-(-width // 32) * 32)]
    if key.shape[1] != heads:
        held += [key.element_size() * batch * key.shape[2] * heads * width] * 2
    return held


def _efficient_bytes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, capability: tuple[int, int]
) -> list[int]:
    """The memory-efficient kernel keeps one float32 a row, and a tile of the query's gradient for every block of rows.

    In float32 that row's number is the sum of a product, as large as the query, which is gone when the tiles come.
    With grouped queries it makes key's and value's gradients for every head first.
    """
    batch, heads, rows, width = query.shape
    sixteen = query.dtype in SIXTEEN
    wide, ampere = width > 64, capability >= _AMPERE
    tall = sixteen or (wide and capability != _LESS_SHARED_MEMORY)
    block = 128 if ampere and tall else 64
    columns = 128 if ampere and sixteen and wide else 64
    tile = 4 * (block * columns + 4)
    tiles = batch * heads * -(-rows // block) * -(-width // columns) * tile
    product = 0 if sixteen else 4 * batch * heads * rows * value.shape[-1]
    held = [4 * batch * heads * rows, max(tiles, product)]
    if key.shape[1] != heads:
        held += [key.element_size() * batch * heads * key.shape[2] * each.shape[-1] for each in (key, value)]
    return held


def _dropout(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The fused dropout, which makes the mask before the output."""
    result, mask = recorder.run(func, args, kwargs)[0]
    recorder.follow(mask, func, args)
    recorder.follow(result, func, args)
    return result, mask


def _copied_bytes(gradient: torch.Tensor) -> int:
    """What a kernel takes that reads a dense gradient: a copy of one that is not, such as that of a sum."""
    return 0 if gradient.is_contiguous() else gradient.numel() * gradient.element_size()


def _embedding_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient of an embedding, and a row in float32 for every ten places of a token, or fewer.

    Room is made for the most that a batch may need. Source: ``EmbeddingBackwardKernel.cu``.
    """
    result = recorder.run(func, args, kwargs)[0]
    places, tokens, width = args[1].numel(), args[2], result.shape[-1]
    each = recorder.rows if recorder.rows and places % recorder.rows == 0 else 1
    if places > _FEW_PLACES or each > 1:
        recorder.follow(result, func, args)
        parts = each * (places // each // _PLACES_A_PART) + (places if each > 1 else min(places, tokens))
        with recorder.holding(4 * parts * width, name="parts of an embedding's gradient"):
            pass
    return result


def _dense_gradient(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A backward kernel whose results live beside the copy of the gradient that it makes."""
    copied = _copied_bytes(args[0])
    if not copied:
        return recorder.run(func, args, kwargs)[0]
    with recorder.holding(copied, name="a gradient made contiguous"):
        results = recorder.run(func, args, kwargs)[0]
        for result in results if isinstance(results, tuple) else (results,):
            if result is not None:
                recorder.follow(result, func, args)
    return results


def _softmax_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The backward pass, whose result lives beside the product of the gradient and what the forward pass gave."""
    with recorder.holding(args[1].numel() * args[1].element_size(), name="gradient times softmax"):
        result = recorder.run(func, args, kwargs)[0]
        recorder.follow(result, func, args)
    return result


def _safe_softmax(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A softmax that looks for rows without a score, by a mask of a byte each."""
    result = recorder.run(func, args, kwargs)[0]
    recorder.follow(result, func, args)
    with recorder.holding(result.numel(), name="a mask of empty rows"):
        return result


def _foreach_norm(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Norms of many tensors at once, such as those of gradients that are clipped.

    Source: ``aten/src/ATen/native/cuda/ForeachReduceOp.cu`` (``foreach_tensor_norm_cuda``, ``kChunkSize``).
    """
    tensors = args[0]
    chunks = max(-(-tensor.numel() // _CHUNK) for tensor in tensors)
    with recorder.holding(4 * len(tensors) * chunks, name="partial norms"):
        norms = recorder.run(func, args, kwargs)[0]
        for norm in norms:
            recorder.follow(norm, func, args)
    return norms


def _reduction(threads: int, recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sum over rows, with the partial sums of its blocks."""
    result = recorder.run(func, args, kwargs)[0]
    sums, most = partial_sums(args[0], args[1] if len(args) > 1 else (), rows=recorder.rows, threads=threads)
    if sums:
        each = 2 if "amax" in str(func) and args[0].dtype in SIXTEEN else 4
        recorder.follow(result, func, args)
        with recorder.up_to(most / sums), recorder.holding(sums * each, name="partial sums"):
            pass
    return result


def partial_sums(
    given: torch.Tensor, dims: Any, *, rows: int | None = None, threads: int = _RESIDENT_THREADS[_AMPERE]
) -> tuple[int, int]:
    """How many partial sums a reduction keeps in the device's memory; 0 where each block ends its own.

    Each of 32 threads beside another adds up four columns, ``height`` threads above one another share the rows; from
    256 rows a thread on, the rows are split over blocks, each of which writes down a number a thread and column.

    Args:
        given: What is added up.
        dims: The dimensions that go; none for all.
        rows: The micro-batch of a trace that stands for any: then the sums grow with it.
        threads: As many as the device runs at once.

    Returns:
        The sums, and how many they are at most: from some row on there are as many blocks as the device runs at once.
    """
    gone = {dim % given.dim() for dim in (dims or range(given.dim()))} if given.dim() else set()
    sizes = [(given.stride(d), d in gone, given.shape[d]) for d in range(given.dim()) if given.shape[d] > 1]
    if not sizes or min(sizes)[1] or not any(reduced for _, reduced, _ in sizes):
        return 0, 0  # along the fastest dimension the threads of a warp add up among themselves
    outputs = inputs = 1
    for _, reduced, size in sizes:
        outputs, inputs = (outputs, inputs * size) if reduced else (outputs * size, inputs)
    fastest, _, columns = min(sizes)
    even = all(stride % _VECTOR == 0 for stride, *_ in sizes if stride != fastest)
    vector = _VECTOR if fastest == 1 and columns % _VECTOR == 0 and even else 1
    beside = _MOST_THREADS // vector
    wide, tall = _power_below(outputs // vector), _power_below(inputs)
    width = min(wide, _WARP)
    height = min(tall, beside // width)
    width = min(wide, beside // height)
    most_blocks = threads // (width * height)
    if rows and inputs % rows == 0:
        most = -(-most_blocks // -(-(outputs // vector) // width))  # of the blocks that share a column's rows
        a_row = outputs * (inputs // rows) * width * vector // (height * _FEWEST_VALUES)
        return rows * a_row, outputs * most * width * vector
    if rows and outputs % rows == 0:
        return 0, 0
    shared = inputs >= min(height * 16, _MOST_VALUES)
    a_thread = -(-inputs // height) if shared else inputs
    blocks = -(-(outputs // vector) // (width if shared else width * height))
    if not shared or a_thread < _MOST_VALUES or blocks > most_blocks:
        return 0, 0
    split = max(min(-(-most_blocks // blocks), -(-a_thread // _FEWEST_VALUES)), -(-a_thread // _MOST_VALUES))
    sums = outputs * split * width * vector if split > 1 else 0
    return sums, sums


def _power_below(count: int) -> int:
    return 1 << max(count, 1).bit_length() - 1
