"""Model FLOPs utilisation (MFU) of a measured plan, and the refusal of steps that no device can be so fast at.

The FLOPs are those that the plan's traces count, and the rates are a card's dense peaks (``machine/cards.json``):

- **Model FLOPs**: matrix products and attention of the forward and backward pass of what is trained, as if nothing were
  recomputed. They come from the trace of the same plan without checkpointing, less the product that the backward pass
  of fused attention repeats. Attention counts over the whole square, also under a causal mask or a window, as in PaLM
  (arXiv 2204.02311, appendix B) and torchtitan. So MFU passes 1 where long rows are attended to in fp32: a causal
  kernel leaves out half of the square, and is nearly as fast as the peak.
- **Executed FLOPs**: what the plan's own trace counts, recomputation included, without what a causal kernel leaves out.

Nothing is said of a device that is not in the catalogue, of a precision without a known peak, and of a plan that can't
be traced.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from autofit.contract.outcome import Crashed, Measured
from autofit.costmodel.families import arithmetic_of, families_of, without_checkpointing
from autofit.costmodel.seconds.operator_time import ARITHMETICS, TIMED_KINDS, Operators, TimedKind
from autofit.costmodel.seconds.roofline import KINDS, Numbers
from autofit.registry import recipe_of

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.contract.plan import Plan
    from autofit.contract.recipe import Recipe
    from autofit.costmodel.memory.parts import MicroPart
    from autofit.costmodel.tracing.trace_store import Traces
    from autofit.machine.gpu_catalogue import Card, Precision
    from autofit.space import Space

_PRODUCTS = KINDS.index("other")
"""The kinds before it are matrix products and attention: those that a card's peak rates are of."""
_REPEATED = 1 / 7
"""Of fused attention: two products forward and five backward, one of which makes the scores again."""
_COMPUTED = 0.5
"""Of the FLOPs that a trace's operators give fused attention, which count twice what is not causal."""
HEADROOM = 1.1
"""A card may be faster than its datasheet's clock: a GeForce was seen at 106 % (:class:`~.gpu_catalogue.Card`)."""


class Utilisation:
    """Sets the MFU of what was measured, and refuses what can't have been.

    Args:
        space: The plans that will be asked about.
        traces: Theirs; what is missing is made.
        facts: What the plans are for.
        card: The device, where the catalogue has it.

    Raises:
        MachineError: No process can be started to trace, or nothing can be written.
    """

    def __init__(self, space: Space, traces: Traces, facts: Facts, card: Card | None) -> None:
        self.traces = traces
        self.facts = facts
        self.card = card
        if card is not None:
            families = families_of(space)
            traces.prepare([*families, *map(without_checkpointing, families)])

    def rated(self, plan: Plan, outcome: Measured) -> Measured | Crashed:
        """The outcome with its MFU; ``Crashed`` where its steps are shorter than the device's peak rates allow."""
        card, own = self.card, self.traces.parts(plan)
        unrepeated = self.traces.parts(without_checkpointing(plan))
        if card is None or own is None or unrepeated is None:
            return outcome
        built = recipe_of(plan, self.facts)
        micro_step = built.accumulation * _least_seconds(card, _operators(own[0], built))
        least_seconds = micro_step + _least_seconds(card, own[1].operators())
        if outcome.step_seconds * HEADROOM < least_seconds:
            return Crashed(
                reason=f"its steps were timed at {outcome.step_seconds:.3g} s, where the peak rates of {card.name} "
                f"allow no less than {least_seconds:.3g} s: a bug of the measurement, not a fast plan"
            )
        peak, flops = card.peak(compute_precision(built)), model_flops(self.traces, plan, self.facts)
        if not peak or flops is None:
            return outcome
        return dataclasses.replace(outcome, mfu=flops / (peak * outcome.step_seconds))


def model_flops(traces: Traces, plan: Plan, facts: Facts) -> float | None:
    """Model FLOPs of a whole optimizer step; ``None`` where the plan without recomputation was not traced."""
    unrepeated = traces.parts(without_checkpointing(plan))
    if unrepeated is None:
        return None
    micro, built = unrepeated[0], recipe_of(plan, facts)
    totals = micro.work(np.array([float(built.loaded_rows)]))
    every = float(totals.flops[:, :_PRODUCTS].sum())
    attention = every - float(_flops(_operators(micro, built), "product").sum())
    return built.accumulation * (every - _REPEATED * attention)


def peak_flops(card: Card, plan: Plan, facts: Facts) -> float | None:
    """FLOP/s of the card in the arithmetic of most of the plan's products; ``None`` where that is not known."""
    return card.peak(compute_precision(recipe_of(plan, facts)))


def _operators(micro: MicroPart, built: Recipe) -> Operators:
    """Those of one of the plan's micro-steps."""
    return micro.operators(float(built.loaded_rows)).computed_in(**arithmetic_of(built))


def compute_precision(recipe: Recipe) -> Precision:
    """The arithmetic of most of a plan's matrix products."""
    return recipe.sixteen_bits or ("tf32" if recipe.tf32 else "fp32")


def _flops(operators: Operators, kind: TimedKind) -> Numbers:
    """Of all calls of a kind, by arithmetic."""
    mine = operators.at(np.flatnonzero(operators.kind == TIMED_KINDS.index(kind)))
    return np.asarray(np.bincount(mine.arithmetic, mine.calls * mine.flops, len(ARITHMETICS)), dtype=np.float64)


def _least_seconds(card: Card, operators: Operators) -> float:
    """Of their FLOPs at the card's peaks; 0 of an arithmetic whose peak is not known.

    PyTorch's attention in float32 makes each product of three in TF32 on tensor cores (``OpMultiplyAddFastF32`` in its
    ``mem_eff_attention/gemm_kernel_utils.h``), so that the peak of float32 does not hold it.
    """
    peaks = {name: card.peak(name) for name in ARITHMETICS}
    fused = {**peaks, "fp32": max(card.fp32, peaks["tf32"] or 0.0)}
    both = ((_flops(operators, "product"), peaks), (_COMPUTED * _flops(operators, "attention"), fused))
    return sum(
        float(count) / peak
        for counts, rates in both
        for count, name in zip(counts, ARITHMETICS, strict=True)
        if (peak := rates[name])
    )
