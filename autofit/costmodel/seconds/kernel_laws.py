"""The laws behind :mod:`autofit.costmodel.seconds.operator_time`: seconds of a kernel by its shape and its card.

Each law is a sum of smooth, monotone terms; ``costmodel/README.md`` derives them and shows how well they do.
Coefficients are natural logarithms, so that all of them are positive and a fit needs no bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from autofit.costmodel.seconds.roofline import Numbers

Coefficients = Mapping[str, float]

_ROW = 1024.0
"""Elements of a row from which PyTorch's softmax takes a block instead of a warp (aten, PersistentSoftmax.cuh)."""
_WIDE_ROW = 16384.0
"""Elements of a row that no longer fit into a block's shared memory, in float32."""
_QUERIES = 128.0
"""Rows of the query in a tile of FlashAttention-2."""
_IDLE_WATTS = 10.0
_JOULES_PER_BYTE = {"gddr": 60e-12, "hbm": 30e-12}
"""What a card draws beside its SMs: always, and for its memory at full bandwidth (about 4 pJ a bit of HBM2 and
twice that of GDDR, recalled and not checked). Constants, not fitted: five cards do not tell them from the FLOP of a
joule. Of a T4 29 of its 70 W, of an L4 28 of 72 W, of an A100 PCIe 57 of 250 W."""
_SHARP = 4.0
"""Exponent of the smooth maximum of two times: 19 % above the larger where they are equal."""
_TILES: dict[tuple[int, bool], tuple[tuple[int, int], ...]] = {
    (6, False): ((64, 64), (32, 128), (128, 32)),
    (6, True): ((128, 64),),
    (7, False): ((128, 128), (128, 64), (32, 128), (128, 32), (64, 32), (32, 32)),
    (7, True): ((128, 64), (64, 64), (32, 128), (128, 32)),
    (8, False): ((128, 128), (128, 64), (32, 128), (128, 32), (64, 32), (32, 32)),
    (8, True): ((128, 128),),
}
"""Tiles (columns, rows) of cuBLAS' float32 kernels, by generation and whether the product is batched: the names of the
kernels in NeuSight's rows (CUDA 12.1). The fastest tile by the law is taken."""
_NEWEST = 8
"""Later generations multiply in float32 with the kernels of this one."""
_AMPERE = 2048.0
"""FLOP a clock and SM of an A100's tensor cores in 16 bits. Shared memory gives an SM 128 bytes a clock, on every
generation since Volta (NVIDIA's tuning guides)."""
_SHARED_OPERANDS = {9: 1.6, 10: 2.7}
"""How often one instruction uses an element, next to warps that hold tiles of 64 x 64 in registers (Volta to Ada, and
Blackwell's GeForce): Hopper's wgmma multiplies 64 x 256, Blackwell's tcgen05 128 x 256 out of shared memory (PTX ISA),
each ``mn/(m + n)``."""
_DATACENTER = (9, 10)
"""Generations on which PyTorch takes cuDNN's attention, and whose tensor cores older kernels can't fill."""
_WHOLE_VECTOR = 16.0
"""Bytes that Hopper's tensor memory accelerator needs rows to be a multiple of (CUDA C++ Programming Guide); without it
cuBLAS takes kernels of Ampere's instructions, and with an odd number of 16-bit elements those that load one by one."""
_ASYNCHRONOUS_COPIES = 9
"""The generation from which that is so."""
_TENSOR_TILES = ((128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Of kernels on tensor cores (CUTLASS' default configurations)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Figures:
    """What the laws need of a card, one value for each operator: operators of several cards may stand side by side.

    Attributes:
        sms: Streaming multiprocessors.
        peak: FLOP/s of the arithmetic of each operator.
        bandwidth: Bytes per second of the device's memory.
        bus: Bytes per second to the host, one way, raw.
        stacked: 1 where it is HBM, 0 where it is GDDR.
        l2: Bytes.
        hz: Boost clock.
        watts: Thermal design power.
        generation: Major compute capability, 6 or later.
        efficiency: How many FLOP a joule allows, next to 16 nm.
        tensor: 1 where the arithmetic is done on tensor cores, else 0.
    """

    sms: Numbers
    peak: Numbers
    bandwidth: Numbers
    bus: Numbers
    stacked: Numbers
    l2: Numbers
    hz: Numbers
    watts: Numbers
    generation: Numbers
    efficiency: Numbers
    tensor: Numbers

    def at(self, places: Any) -> Figures:
        """Those of some operators."""
        return Figures(**{field.name: getattr(self, field.name)[places] for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Products:
    """``batch`` times ``(m, k) x (k, n)``, whose elements have ``size`` bytes; one value for each operator.

    ``aligned_bytes`` is the largest power of two, of 16 at most, that divides each row of all three matrices.
    """

    batch: Numbers
    m: Numbers
    n: Numbers
    k: Numbers
    size: Numbers
    aligned_bytes: Numbers

    def at(self, places: Any) -> Products:
        """Some of them."""
        return Products(**{field.name: getattr(self, field.name)[places] for field in fields(self)})


def larger(*times: Numbers, sharp: float = _SHARP) -> Numbers:
    """A smooth maximum."""
    top = np.maximum.reduce(times)
    safe = np.where(top > 0, top, 1.0)
    return np.asarray(top * sum((one / safe) ** sharp for one in times) ** (1 / sharp))


def memory_seconds(figures: Figures, fit: Coefficients, moved_bytes: Numbers) -> Numbers:
    """Of bytes that are read and written in order by many threads.

    HBM and GDDR (whose ECC lies in the same memory) reach different shares. On Pascal an SM has too few bytes in flight
    to keep HBM busy.
    """
    share = np.where(figures.stacked > 0, np.exp(fit["hbm"]), np.exp(fit["gddr"]))
    memory = moved_bytes / (figures.bandwidth * share)
    flying = moved_bytes * np.exp(fit["clocks_per_byte_6"]) / (figures.sms * figures.hz)
    return np.where((figures.generation == 6) & (figures.stacked > 0), larger(memory, flying), memory)


def product_seconds(
    figures: Figures, fit: Coefficients, memory: Coefficients, products: Products, *, pause: float = 0.0
) -> Numbers:
    """Of matrix products.

    The output is cut into tiles. Each SM makes its share of them one after the other; a tile takes its FLOPs and a
    start-up, at the SM's rate, which the tile's reuse of what it loads and the card's power cap. Beside that run the
    bytes from memory: each operand once, and again for each tile where the L2 cache doesn't keep it. A card that is at
    its limit of power cools down in a ``pause`` in seconds after each product.
    """
    batched = products.batch > 1
    found = np.empty(len(batched))
    for tensor, generation, group in sorted(set(zip(figures.tensor, figures.generation, batched, strict=True))):
        places = np.flatnonzero((figures.tensor == tensor) & (figures.generation == generation) & (batched == group))
        tiles = _TENSOR_TILES if tensor else _TILES[min(int(generation), _NEWEST), bool(group)]
        own, shapes = figures.at(places), products.at(places)
        found[places] = np.minimum.reduce(
            [_tile_seconds(own, fit, memory, shapes, tile=tile, pause=pause) for tile in tiles]
        )
    return found


def _tile_seconds(
    figures: Figures,
    fit: Coefficients,
    memory: Coefficients,
    products: Products,
    *,
    tile: tuple[int, int],
    pause: float,
) -> Numbers:
    batch, m, n, k, size = products.batch, products.m, products.n, products.k, products.size
    columns, rows = tile
    kind = "tensor" if figures.tensor[0] else "simt"
    generation = int(figures.generation[0])
    older = min(generation, _NEWEST)
    tiles = batch * np.ceil(n / columns) * np.ceil(m / rows)
    waves = tiles / figures.sms
    whole = 1 / (1 + np.exp(-fit["whole"]))
    waves = (1 - whole) * waves + whole * np.ceil(waves)
    reuse = columns * rows / (columns + rows)
    fed = np.exp(fit[f"{kind}_reuse"])
    if kind == "tensor":  # the faster an SM multiplies, the more often it must use what shared memory gives it
        fed = (
            fed * figures.peak / (figures.sms * figures.hz) / _AMPERE * size / 2 / _SHARED_OPERANDS.get(generation, 1.0)
        )
    share = np.exp(fit[f"{kind}_share"]) * reuse / (reuse + fed)
    share = share / (1 + share**8) ** (1 / 8)
    if kind == "tensor" and generation >= _ASYNCHRONOUS_COPIES:
        share = share * np.where(products.aligned_bytes < _WHOLE_VECTOR, np.exp(fit["unaligned"]), 1.0)
        share = share * np.where(products.aligned_bytes < 4, np.exp(fit["odd"]), 1.0)
    work = waves * 2.0 * columns * rows * (k + np.exp(fit[f"{kind}_start"])) * figures.sms
    free = work / (figures.peak * share)
    joules = np.where(figures.stacked > 0, _JOULES_PER_BYTE["hbm"], _JOULES_PER_BYTE["gddr"])
    beside = _IDLE_WATTS + joules * figures.bandwidth
    spare = np.maximum(figures.watts - beside, 0.25 * figures.watts)
    powered = work / (spare * figures.efficiency * np.exp(fit[f"{kind}_flop_per_joule"]) * 1e9 * share)
    arithmetic = larger(free, powered * free / (free + pause), sharp=12.0)
    once = size * batch * (m * k + k * n + m * n)
    if generation == 6:  # the bias is copied to the output, which the product then adds to
        once = once + np.where(batch > 1, 0.0, 2.0) * size * m * n
    compulsory = memory_seconds(figures, memory, once) * np.exp(fit["passes"])
    if kind == "tensor":  # whose order of tiles keeps in L2 what the next ones need
        return larger(arithmetic, compulsory)
    operand = size * n * k
    spill = operand / (operand + np.exp(fit["kept"]) * figures.l2)
    again = size * tiles * (columns + rows) * k * spill
    if generation == 6:
        again = again * (1 + size * k / np.exp(fit["row_bytes_6"]))
    stream = again / (figures.bandwidth * np.exp(fit[f"again_{older}"]))
    return larger(arithmetic, compulsory, stream)


def streaming_seconds(
    figures: Figures, fit: Coefficients, memory: Coefficients, *, moved_bytes: Numbers, m: Numbers, n: Numbers,
    backward: Numbers,
) -> Numbers:  # fmt: skip
    """Of ``m`` rows of ``n`` elements each: their bytes, some more than once, or the clocks that an SM needs for them.

    A row that a warp can't hold (some thousand elements) is read again; in the forward pass, which needs its maximum
    and its sum first, once more where a block can't either.
    """
    again = np.exp(fit["again"]) * n / (n + _ROW) + (1 - backward) * np.exp(fit["wide"]) * n / (n + _WIDE_ROW)
    clocks = m * np.exp(fit["row"]) + m * n * np.exp(fit["element"])
    bytes_seconds = memory_seconds(figures, memory, moved_bytes) * (np.exp(fit["passes"]) + again)
    return larger(bytes_seconds, clocks / (figures.sms * figures.hz))


def quantized_seconds(
    figures: Figures, fit: Coefficients, memory: Coefficients, *, moved_bytes: Numbers, n: Numbers
) -> Numbers:
    """Of an optimizer's update whose state has 8 bits: the clocks that an SM needs to quantize an element, or bytes."""
    clocks = n * np.exp(fit["element"]) / (figures.sms * figures.hz)
    return larger(clocks, memory_seconds(figures, memory, moved_bytes))


def attention_seconds(
    figures: Figures, fit: Coefficients, memory: Coefficients, *, flops: Numbers, moved_bytes: Numbers, batch: Numbers,
    m: Numbers, n: Numbers, width: Numbers, backward: Any, efficient: Any, full: Any,
) -> Numbers:  # fmt: skip
    """Of a fused kernel that keeps no scores: half of the FLOPs that it is given, at the share that its tiles reach.

    A block of :data:`_QUERIES` rows of one head is one tile; few of them leave SMs idle, and each has a start that
    takes as long as some ``keys``. PyTorch's memory-efficient kernel (``efficient``) has Ampere's instructions; in
    float32 (``full``) it is the only one.
    """
    modern = np.isin(figures.generation, _DATACENTER)
    newer = np.exp(np.where(backward, fit["newer_backward"], fit["newer"]))
    share = np.exp(np.where(backward, fit["backward"], fit["forward"])) * np.where(modern, newer, 1.0)
    slower = np.exp(np.where(modern, fit["efficient_newer"], fit["efficient"]))
    share = np.where(efficient, share * slower, share)
    share = np.where(full, np.exp(np.where(backward, fit["backward_full"], fit["forward_full"])), share)
    share = np.minimum(share * width / (width + np.exp(fit["width"])), 1.0)
    waves = batch * m / _QUERIES / figures.sms
    busy = waves / (waves + np.exp(fit["idle"]))
    arithmetic = 0.5 * flops * (1 + np.exp(fit["keys"]) / n) / (figures.peak * share * busy)
    return larger(arithmetic, memory_seconds(figures, memory, moved_bytes))
