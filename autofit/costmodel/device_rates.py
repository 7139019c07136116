"""What a device does in a second, timed before the first trial: it tells which precision is worth trying first.

And on a CPU, what the kernels of a precision take of its memory.

==================  ==============================================================================================
products            of the model's own shapes, forward and both backward ones, in each precision of the device
``attention``       the fused kernel in 16 bits, forward and backward
``memory``          a product of two tensors as large as the layers' widest activation
``transfer``        a pinned copy to the device; only where there is a bus
``operators``       a chain of operators so small that nothing but the host counts
==================  ==============================================================================================

A step is made of much else, so that these are expectations, which the trials correct. Each is the quickest of some
repeats: what disturbs a repeat makes it slower, never faster.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from autofit.costmodel.seconds.roofline import WORK, Work, nominal_seconds
from autofit.costmodel.tracing.recorder import Recorder
from autofit.machine.meters import fault_in_libraries, status
from autofit.system.units import MIB

if TYPE_CHECKING:
    from autofit.contract.facts import Facts

_REPEATS = 12
_LEAST_REPEATS = 3
_SECONDS = 0.04
"""For the repeats of one product, where they are not done before."""
_SHAPES = 4
_MOST_BYTES = 256 * MIB
"""Of all that one product holds: the search itself needs the device next."""
_MOST_WEIGHTS, _SIDE = 1 << 26, 1 << 13
"""Numbers in the weight of one product, and in a side of it that is cut for their sake."""
_BEYOND_A_CACHE = 16 * MIB
"""Numbers of 4 bytes: more than the cache of a GPU holds."""
_CPU = torch.device("cpu")
_HEAD_SIZE = 64
_FEW = 64
_LINKS = 24
_DTYPES: dict[Work, torch.dtype] = {
    "matmul fp32": torch.float32,
    "matmul tf32": torch.float32,
    "matmul bf16": torch.bfloat16,
    "matmul fp16": torch.float16,
}


def rates_of(facts: Facts) -> dict[Work, float]:
    """Units of each kind of :data:`~autofit.costmodel.seconds.roofline.WORK` a second, of those that this device has.

    Raises:
        RuntimeError: The device can't (out of memory, a kernel that is missing).
    """
    device = torch.device(facts.hardware.device)
    shapes = shapes_of(facts)
    found: dict[Work, float] = {}
    for kind, dtype in _DTYPES.items():
        if kind.removeprefix("matmul ") not in facts.hardware.precisions:
            continue
        with _tf32(kind == "matmul tf32"):
            work = seconds = 0.0
            for wide, narrow, count in shapes:
                tokens = tokens_of(facts, wide + narrow)
                work += count * 6 * tokens * wide * narrow
                seconds += count * _product_seconds(tokens, wide, narrow, dtype, device)
        found[kind] = work / seconds
    half = next((_DTYPES[kind] for kind in ("matmul bf16", "matmul fp16") if kind in found), None)
    if device.type == "cpu":
        found["attention"] = found["matmul fp32"]  # which there it takes in float32 as well as in 16 bits
    elif half is not None:
        found["attention"] = _attention(facts, half, device)
    inner = [max(one[:2]) for one in facts.model.products if facts.model.vocab_size not in one[:2]]
    widest = max(inner, default=facts.model.hidden_size or 512)
    least = _BEYOND_A_CACHE if device.type == "cuda" else 0
    one, other = torch.ones(2, max(tokens_of(facts, 2 * widest) * widest, least), device=device)
    found["memory"] = 3 * one.nbytes / _seconds(lambda: one * other, device)
    if device.type == "cuda":
        there = torch.ones(_BEYOND_A_CACHE, pin_memory=True)
        found["transfer"] = there.nbytes / _seconds(lambda: there.to(device, non_blocking=True), device)
    found["operators"] = _operators(device)
    return found


def kernel_overhead_bytes(facts: Facts) -> dict[Work, int]:
    """What the first products of a precision leave in this process on a CPU, beside those of float32: code, buffers.

    To be asked before anything else was computed in it. The libraries' own pages are no part of it, as in a trial.
    """
    if facts.hardware.device != "cpu":
        return {}
    found: dict[Work, int] = {}
    fault_in_libraries()
    _use(facts, torch.float32)
    for kind, dtype in _DTYPES.items():
        if dtype != torch.float32 and kind.removeprefix("matmul ") in facts.hardware.precisions:
            before = _resident_bytes()
            _use(facts, dtype)
            found[kind] = max(0, _resident_bytes() - before)
    return found


def _use(facts: Facts, dtype: torch.dtype) -> None:
    """Run what a step of the model takes in a precision, with few tokens."""
    for wide, narrow, _ in shapes_of(facts):
        tokens = min(tokens_of(facts, wide + narrow), _FEW)
        given, weight, gradient = _numbers([(tokens, wide), (narrow, wide), (tokens, narrow)], dtype, _CPU)
        _ = given @ weight.T, gradient @ weight, gradient.T @ given
    _attention(facts, dtype, _CPU, most_tokens=_FEW)


def _resident_bytes() -> int:
    """Of this process, without what its heap keeps of what was freed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return status()["VmRSS"]


def shapes_of(facts: Facts) -> list[tuple[int, int, int]]:
    """Inputs, outputs and number of the linear layers that most of the model's arithmetic is in.

    Of a very large one a part counts for the whole, which is as fast.
    """
    hidden = facts.model.hidden_size or 512
    known = sorted(facts.model.products, key=lambda one: -math.prod(one))[:_SHAPES] or [(hidden, 4 * hidden, 1)]
    return [
        (min(wide, max(_MOST_WEIGHTS // narrow, _SIDE)), min(narrow, max(_MOST_WEIGHTS // wide, _SIDE)), count)
        for wide, narrow, count in known
    ]


def tokens_of(facts: Facts, width: int) -> int:
    """Tokens of a micro-batch as they are usual: as many as a quarter of the batch has, where that is not too much.

    All products in the slowest precision should take a tenth of a second or so, and what one of them holds, of so many
    numbers a token, should be a small part of the ceiling.
    """
    work = facts.workload
    hardware = facts.hardware
    usual = work.seq_len * max(1, work.global_batch // 4)
    shapes = shapes_of(facts)
    nominal = nominal_seconds(None, on_cpu=hardware.device == "cpu", threads=hardware.threads)
    slowest = 1 / nominal[WORK.index("matmul fp32")]
    by_time = 0.1 * slowest / sum(6 * wide * narrow for wide, narrow, _ in shapes)
    by_bytes = min(_MOST_BYTES, work.limit_bytes / 4) / (8 * width)
    return max(16, int(min(usual, by_time, by_bytes)))


def _numbers(sizes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Random ones, since a GPU that is at its limit of power multiplies equal ones faster; a CPU takes long to draw."""
    make = torch.randn if device.type == "cuda" else torch.ones
    return [make(size, dtype=dtype, device=device) for size in sizes]


def _product_seconds(tokens: int, wide: int, narrow: int, dtype: torch.dtype, device: torch.device) -> float:
    """Of a linear layer: its output, and the gradients of its input and of its weight."""
    given, weight, gradient = _numbers([(tokens, wide), (narrow, wide), (tokens, narrow)], dtype, device)
    return sum(
        _seconds(call, device)
        for call in (lambda: given @ weight.T, lambda: gradient @ weight, lambda: gradient.T @ given)
    )


def _attention(facts: Facts, dtype: torch.dtype, device: torch.device, most_tokens: int = 1 << 30) -> float:
    """FLOP/s of the fused kernel, whose forward pass is two products and whose backward pass is five."""
    heads = max(1, (facts.model.hidden_size or _HEAD_SIZE) // _HEAD_SIZE)
    tokens = min(tokens_of(facts, 8 * heads * _HEAD_SIZE), most_tokens)
    length = min(facts.workload.seq_len, tokens)
    rows = tokens // length
    size = (rows, heads, length, _HEAD_SIZE)
    given = [one.requires_grad_() for one in _numbers([size] * 3, dtype, device)]

    def call() -> None:
        query, key, value = given
        torch.autograd.grad(F.scaled_dot_product_attention(query, key, value, is_causal=True).sum(), given)

    return 14 * rows * heads * length * length * _HEAD_SIZE / _seconds(call, device)


def _operators(device: torch.device) -> float:
    """Operators of forward and backward that the host issues in a second, counted as a trace counts them."""
    weight = torch.ones(8, 8, device=device, requires_grad=True)
    given = torch.ones(1, 8, device=device)

    def call() -> None:
        hidden = given
        for _ in range(_LINKS):
            hidden = hidden + F.layer_norm(F.gelu(F.linear(hidden, weight)), (8,))
        torch.autograd.grad(hidden.sum(), weight)

    call()
    with Recorder(fake=False) as recorder:
        recorder.mark("step")
        call()
    counted = float(recorder.tape(since=1).work.sum(axis=(0, 1))[2])
    return counted / _seconds(call, device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The quickest of some repeats."""
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    call()
    wait()
    found: list[float] = []
    while len(found) < _LEAST_REPEATS or (len(found) < _REPEATS and sum(found) < _SECONDS):
        began = time.perf_counter()
        call()
        wait()
        found.append(time.perf_counter() - began)
    return min(found)


@contextlib.contextmanager
def _tf32(on: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if on else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
