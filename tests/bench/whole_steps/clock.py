"""The seconds of a traced step on a card by two plain rules, which the laws are held against."""

from __future__ import annotations

from dataclasses import dataclass

from autofit.costmodel.seconds import roofline
from autofit.costmodel.seconds.roofline import Totals

from .rows import Step
from .tracing import Traced

FLAT_SHARE = 0.4
_PARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Of a whole step, and the standard deviation of the logarithm of measured over predicted."""

    seconds: float
    log_std: float = 0.0


def by_roofline(step: Step, trace: Traced) -> Seconds:
    """That of autofit before there were laws."""
    assert step.card is not None
    parts = [trace.totals(part, step.rows).computed_in(tf32=step.tf32, fp16=step.fp16) for part in range(_PARTS)]
    micro = Totals(
        flops=parts[0].flops + parts[1].flops,
        moved_bytes=parts[0].moved_bytes + parts[1].moved_bytes,
        operators=parts[0].operators + parts[1].operators,
    )
    seconds = roofline.step_seconds(
        step.card, micro_step=micro, optimizer_step=parts[2], accumulation=step.accumulation
    )
    return Seconds(seconds=float(seconds))


def by_flat_share(step: Step, trace: Traced) -> Seconds:
    """FLOPs over a flat share of the peak of the step's precision."""
    assert step.card is not None
    program = step.program
    assert program is not None
    flops = sum(
        times * trace.totals(part, step.rows).flops.sum()
        for part, times in enumerate([step.accumulation, step.accumulation, 1])
    )
    precision = ("tf32" if step.tf32 else "fp32") if program.precision == "fp32" else "fp16" if step.fp16 else "bf16"
    return Seconds(seconds=float(flops / (FLAT_SHARE * step.card.rate(precision))))
