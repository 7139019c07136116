"""The seconds of a step on a card that is not here, from what a trace counted.

Each operator takes as long as the slower of its arithmetic and its memory traffic, both at the share of the
datasheet's figure that is usually reached. The host issues the operators one after the other while the device
works, so that a whole step takes as long as the slower of the two:

    device  ▕██ matmul ██▏█ other █▏███ attention ███▏...      sum of max(FLOPs / rate, bytes / bandwidth)
    host    ▕op▏op▏op▏op▏op▏op▏...                             operators x seconds each

Good for order, not for level. Published rooflines of this form are 31.9 % off on the mean over 52 trainings, at
worst 52.9 %, and differently so per card: V100 16.4 %, A100 28.5 %, H100 35.3 %, L4 47.0 % (NeuSight's end-to-end
table, ASPLOS'25). What they miss, such as the shape's fit to tiles or clocks under load, is alike for the plans of
one model on one card, so the order of plans holds better than the seconds. Nothing here is fitted to a measurement.

Not covered: fused or compiled graphs, data loading, copies to the host that overlap
with work. On AMD the share below is too high: its best products were seen at 51 to 60 % of peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autofit.machine.gpu_catalogue import Card

Kind = Literal["matmul fp32", "matmul tf32", "matmul bf16", "matmul fp16", "attention", "other", "transfer"]
"""``attention`` is a fused kernel in 16 bits; one in fp32 counts as ``matmul fp32``. ``other`` is all that uses no
tensor cores: elementwise, normalization, softmax, copies, optimizer. ``transfer`` goes over the bus to the host."""
KINDS: tuple[Kind, ...] = get_args(Kind)
_COLUMN = {kind: column for column, kind in enumerate(KINDS)}
Operator = tuple[float, float, Kind]
"""FLOPs, bytes read and written, kind."""
Numbers = NDArray[np.float64]

Work = Literal[
    "matmul fp32",
    "matmul tf32",
    "matmul bf16",
    "matmul fp16",
    "attention",
    "memory",
    "transfer",
    "operators",
    "network",
]
"""What a step is made of, each part of it at a rate of its own: FLOPs, bytes read and written, bytes over the bus,
operators; and the seconds of collectives that do not hide (:mod:`~autofit.costmodel.seconds.collectives`)."""
WORK: tuple[Work, ...] = get_args(Work)

MATMUL_SHARE = 0.75
"""Of the peak rate. torch assumes the same (torch/utils/_runtime_estimation.py); over all shapes the best were 87 % on
an A100 SXM, 80 % on an H100 SXM, 84 % on a GH200 (stas00/ml-engineering, table of achievable matmul FLOPS)."""
ATTENTION_SHARE = 0.5
"""Of the peak rate. FlashAttention-2 reaches 50 to 73 % on an A100 (arXiv 2307.08691), 35 % on an H100 (arXiv
2407.08608)."""
BANDWIDTH_SHARE = 0.8
"""Of the datasheet's bandwidth. 90 % from 100 MB on and 75 % from 10 MB on (calculon, a100_80g.json); 74 to 83 % by
BabelStream on a GH200 (UoB-HPC/BabelStream issue 194)."""
BUS_SHARE = 0.8
"""Of the raw rate of the bus, for pinned copies: 24 to 26 of the 31.5 GB/s of PCIe 4.0 x16 are usual (CUDA's
bandwidthTest), and an H100 made 53 of 63."""
_BUS_BYTES_PER_SECOND = 2.5e10
"""The same over PCIe 4.0, for a card that is not known."""
HOST_SECONDS_PER_OPERATOR = 8e-6
"""Python, autograd, dispatcher and launch of one eager operator. Layer by layer 5 to 25 µs (jiahuanglin.xyz, GPU kernel
serving, lesson 18); the low end, since most operators of a step are issued by autograd's C++ engine."""
SLOW_HOST_SECONDS_PER_OPERATOR = 2e-5
"""The same of two rented machines, one with an H100 and one with an H200: 16 to 40 µs (2026-11)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Totals:
    """What operators sum up to, by kind; a leading axis, where there is one, runs over plans.

    Sums know less than the operators: a kind counts as one that is bound by arithmetic or by memory as a whole, so
    that the seconds of sums are never more than those of :func:`seconds`.

    Attributes:
        flops: Of shape ``(..., len(KINDS))``.
        moved_bytes: Of the same shape.
        operators: How many there are, of shape ``(...)``.
    """

    flops: Numbers
    moved_bytes: Numbers
    operators: Numbers

    @classmethod
    def of(cls, operators: Iterable[Operator]) -> Self:
        """The sums over the operators of one trace."""
        flops, moved, kinds = _columns(operators)
        length = len(KINDS)
        return cls(
            flops=np.asarray(np.bincount(kinds, flops, length), dtype=np.float64),
            moved_bytes=np.asarray(np.bincount(kinds, moved, length), dtype=np.float64),
            operators=np.asarray(len(kinds), dtype=np.float64),
        )

    def computed_in(self, *, tf32: bool = False, fp16: bool = False) -> Totals:
        """The same where float32 products are made in TF32, or what was traced in bfloat16 is made in float16."""
        flops, moved = self.flops.copy(), self.moved_bytes.copy()
        moves: list[tuple[Kind, Kind]] = [("matmul fp32", "matmul tf32")] if tf32 else []
        moves += [("matmul bf16", "matmul fp16")] if fp16 else []
        for before, after in moves:
            for column in (flops, moved):
                column[..., _COLUMN[after]] += column[..., _COLUMN[before]]
                column[..., _COLUMN[before]] = 0
        return Totals(flops=flops, moved_bytes=moved, operators=self.operators)


def step_seconds(
    card: Card, *, micro_step: Totals, optimizer_step: Totals, accumulation: ArrayLike
) -> NDArray[np.float64]:
    """The seconds of a whole optimizer step: ``accumulation`` micro-steps and one step of the optimizer.

    Arrays over plans are taken everywhere and broadcast; a hundred thousand plans take some ten milliseconds.
    """
    times = np.asarray(accumulation, dtype=float)
    device = times * _device_seconds(card, micro_step) + _device_seconds(card, optimizer_step)
    host = (times * micro_step.operators + optimizer_step.operators) * HOST_SECONDS_PER_OPERATOR
    return np.maximum(device, host)


def amounts(*, micro_step: Totals, optimizer_step: Totals, accumulation: ArrayLike) -> Numbers:
    """How much of each of :data:`WORK` a whole optimizer step is, without collectives; shape ``(plans, len(WORK))``."""
    times = np.asarray(accumulation, dtype=float)
    flops = times[:, None] * micro_step.flops + optimizer_step.flops
    moved = times[:, None] * micro_step.moved_bytes + optimizer_step.moved_bytes
    bus = _COLUMN["transfer"]
    on_device = moved.sum(axis=-1) - moved[:, bus]
    operators = times * micro_step.operators + optimizer_step.operators
    return np.column_stack([flops[:, : _COLUMN["other"]], on_device, moved[:, bus], operators, np.zeros(len(times))])


def nominal_seconds(
    card: Card | None, *, on_cpu: bool, threads: int = 1, rates: Mapping[str, float] | None = None
) -> Numbers:
    """Seconds for each unit of :data:`WORK`, as far as they are known beforehand.

    On a card that is not in the catalogue, and on a CPU, they are of the right order and not more, but where the device
    was timed: ``rates`` are units in a second. What is measured later corrects them.
    """
    seconds = _unmeasured_seconds(card, on_cpu=on_cpu, threads=threads)
    for kind, rate in (rates or {}).items():
        if kind in WORK and rate > 0:
            seconds[WORK.index(kind)] = 1 / rate
    return seconds


def _unmeasured_seconds(card: Card | None, *, on_cpu: bool, threads: int) -> Numbers:
    if card is not None:
        rates = [*_rates(card)[: _COLUMN["other"]], *_bandwidths(card)[[_COLUMN["other"], _COLUMN["transfer"]]]]
        return 1 / np.array([*rates, 1 / HOST_SECONDS_PER_OPERATOR, 1.0])
    if on_cpu:
        flops = 4e10 * max(threads, 1)
        return 1 / np.array([flops] * 5 + [1e10, 1e10, 1 / HOST_SECONDS_PER_OPERATOR, 1.0])
    rates = [1.5e13, 6e13, 1.2e14, 1.2e14, 6e13, 8e11, _BUS_BYTES_PER_SECOND, 1 / HOST_SECONDS_PER_OPERATOR, 1.0]
    return 1 / np.array(rates)


def _columns(operators: Iterable[Operator]) -> tuple[Numbers, Numbers, NDArray[np.intp]]:
    rows = list(operators)
    flops = np.array([row[0] for row in rows], dtype=float)
    moved = np.array([row[1] for row in rows], dtype=float)
    return flops, moved, np.array([_COLUMN[row[2]] for row in rows], dtype=np.intp)


def _device_seconds(card: Card, totals: Totals) -> Numbers:
    arithmetic = totals.flops / _rates(card)
    traffic = totals.moved_bytes / _bandwidths(card)
    return np.asarray(np.maximum(arithmetic, traffic).sum(axis=-1))


def _bandwidths(card: Card) -> Numbers:
    """Attainable bytes per second for each of :data:`KINDS`."""
    own = card.bandwidth_bytes_per_second * BANDWIDTH_SHARE
    return np.array([card.bus_bytes_per_second * BUS_SHARE if kind == "transfer" else own for kind in KINDS])


def _rates(card: Card) -> Numbers:
    """Attainable FLOP/s for each of :data:`KINDS`."""
    half = card.peak("bf16") or card.rate("fp16")
    attainable: dict[Kind, float] = {
        "matmul fp32": card.rate("fp32") * MATMUL_SHARE,
        "matmul tf32": card.rate("tf32") * MATMUL_SHARE,
        "matmul bf16": card.rate("bf16") * MATMUL_SHARE,
        "matmul fp16": card.rate("fp16") * MATMUL_SHARE,
        "attention": half * ATTENTION_SHARE,
        "other": card.fp32,
        "transfer": card.fp32,
    }
    return np.array([attainable[kind] for kind in KINDS])
