"""Model FLOPs utilisation (MFU) of a measured plan, and the refusal of steps that no device can be so fast at.

The FLOPs are those that the plan's traces count, and the rates are a card's dense peaks (``machine/cards.json``):

- **Model FLOPs**: matrix products and attention of the forward and backward pass of what is trained, as if nothing were
  recomputed. They come from the trace of the same plan without checkpointing, less the product that the backward pass
  of fused attention repeats. Attention counts over the whole square, also under a causal mask, as in PaLM (arXiv
  2204.02311, appendix B) and torchtitan. fp32's fused attention is not told apart from other products, so that its
  repeated one is counted.
- **Executed FLOPs**: what the plan's own trace counts, recomputation included, at least: a causal kernel leaves out
  half of the square.

Nothing is said of a device that is not in the catalogue, of a precision without a known peak, and of a plan that can't
be traced.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from autofit.contract.outcome import Crashed, Measured
from autofit.costmodel.families import arithmetic_of, families_of, without_checkpointing
from autofit.costmodel.seconds.roofline import KINDS, Numbers, Totals
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
_ATTENTION = KINDS.index("attention")
_UNREPEATED = 6 / 7
"""Of fused attention: two products forward and five backward, one of which makes the scores again."""
_CAUSAL = 0.5
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
        executed = _step_flops(own[0], plan, self.facts) + _flops(own[1].work())
        least_seconds = _least_seconds(card, executed)
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
    flops = _step_flops(unrepeated[0], plan, facts)
    flops[_ATTENTION] *= _UNREPEATED
    return float(flops.sum())


def peak_flops(card: Card, plan: Plan, facts: Facts) -> float | None:
    """FLOP/s of the card in the arithmetic of most of the plan's products; ``None`` where that is not known."""
    return card.peak(compute_precision(recipe_of(plan, facts)))


def _step_flops(micro: MicroPart, plan: Plan, facts: Facts) -> Numbers:
    """FLOPs of the micro-steps of an optimizer step, by kind."""
    built = recipe_of(plan, facts)
    rows = np.array([float(built.loaded_rows)])
    return built.accumulation * _flops(micro.work(rows).computed_in(**arithmetic_of(built)))


def compute_precision(recipe: Recipe) -> Precision:
    """The arithmetic of most of a plan's matrix products."""
    return recipe.sixteen_bits or ("tf32" if recipe.tf32 else "fp32")


def _flops(totals: Totals) -> Numbers:
    """Of each kind that has a peak rate, summed over what else there is."""
    flops = np.atleast_2d(totals.flops)[:, :_PRODUCTS]
    return np.asarray(flops.sum(axis=0))


def _least_seconds(card: Card, flops: Numbers) -> float:
    """Of so many FLOPs of each kind at the card's peaks; 0 of a kind whose peak is not known."""
    halves = max(card.peak("bf16") or 0.0, card.peak("fp16") or 0.0)
    peaks = [card.fp32, card.peak("tf32"), card.peak("bf16"), card.peak("fp16"), halves / _CAUSAL]
    return sum(float(count) / peak for count, peak in zip(flops, peaks, strict=True) if peak)
