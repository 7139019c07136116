"""The guard of the training itself: a plan that is fast because it trains something else must not win.

The winner trains a few optimizer steps, and so does a reference: plain in everything, in float32, with the same
micro-batch and accumulation. Both have the same weights and rows (:mod:`autofit.training.loss_curve`). Compared are

- the gradient of each parameter in the first step, where the weights are still the same: a gradient that is missing,
  scaled or averaged wrongly shows here, even where clipping and Adam's division hide it from the losses;
- the gradients that the optimizer steps with, clipped as they are: clipping that is left out shows here;
- the losses of all steps.

The bounds follow the loosest class among the winner's values. Exact: the order of rounding, which a few steps carry
on. Numeric: bfloat16 keeps 8 bits, so that a product is off by 0.4 %, and a gradient of many products by some more.
Another training method has no such bound: it has to stay finite, and not to explode.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from autofit.contract.outcome import Measured
from autofit.contract.plan import Plan
from autofit.contract.technique import Kind
from autofit.registry import extra_seconds, techniques
from autofit.system.errors import MachineError
from autofit.training.jobs import CurveJob
from autofit.training.loss_curve import CURVE, NOT_FINITE, Curve

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.system.fork_server import ForkServer

MOST_STEPS, LEAST_STEPS = 8, 3
SHARE = 0.1
"""Of the time that a tune has spent, which its guard may take."""
_SLOWER = 3.0  # the reference, than the winner; bounds the steps only
_PATIENCE = 20.0
_EXPLODED = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The most that two curves may differ, as shares.

    Attributes:
        loss: Of the reference's loss, in each step.
        norm: Of the reference's norm of all gradients, in each step.
        gradient: Of the norm of a parameter's gradient in the first step.
    """

    loss: float
    norm: float
    gradient: float


BOUNDS = {
    Kind.EXACT: Bounds(loss=1e-3, norm=1e-2, gradient=1e-3),
    Kind.NUMERIC: Bounds(loss=2e-2, norm=1e-1, gradient=5e-2),
}
_SMALL = 1e-2
"""A gradient that is this share of the largest one is noise to those who round."""


Verdict = Literal["same", "other", "method", "alone", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A short training of the winner beside one of a plain plan, on the same rows and weights.

    Attributes:
        verdict: ``same``: within the bounds; ``other``: outside of them; ``method``: another training method, which
            only has to stay finite; ``alone``: there was nothing to compare with; ``unknown``: it did not end.
        words: The verdict in a sentence.
        losses, reference_losses: Of each optimizer step.
        bound, difference: Of the losses, as shares of the reference's: the most that may be, the most that was.
    """

    verdict: Verdict
    words: str
    reference: Plan | None = None
    losses: tuple[float, ...] = ()
    reference_losses: tuple[float, ...] = ()
    bound: float | None = None
    difference: float | None = None
    seconds: float = 0.0


class Look(Protocol):
    """Trains a plan beside a reference; see :meth:`Guards.look`."""

    def __call__(self, plan: Plan, measured: Measured, *, spent_seconds: float, left_seconds: float | None) -> Guard:
        """The verdict."""


@dataclass(slots=True)
class Guards:
    """Trains winners beside their references, each in a process of its own.

    Args:
        folder: Where the processes may write for as long as they run.
        facts: What the plans are for.
        config: Folder that holds the model's ``config.json``.
        server: Forks the processes.
    """

    folder: Path
    facts: Facts
    config: Path
    server: ForkServer
    _known: dict[tuple[Plan, int], Curve] = field(default_factory=dict)

    def look(self, plan: Plan, measured: Measured, *, spent_seconds: float, left_seconds: float | None) -> Guard:
        """Whether the plan trains as the reference does.

        Raises:
            MachineError: No process can be started, or nothing can be written.
        """
        began = time.monotonic()
        steps = how_many(measured.step_seconds, spent_seconds)

        def train(one: Plan) -> Curve:
            if (one, steps) not in self._known:
                gone = time.monotonic() - began
                left = math.inf if left_seconds is None else left_seconds - gone
                limit = 60 + 3 * extra_seconds(one, self.facts) + _PATIENCE * steps * measured.step_seconds
                self._known[one, steps] = self._train(one, steps, max(10.0, min(limit, left)))
            return self._known[one, steps]

        mine = train(plan)
        found = None
        if mine.failed is None:
            for reference in references(plan, self.facts):
                theirs = train(reference) if reference != plan else None
                if theirs is None or theirs.failed is None:
                    found = judge(plan, self.facts, mine, reference, theirs)
                    break
        found = found or judge(plan, self.facts, mine, None, None)
        return dataclasses.replace(found, seconds=time.monotonic() - began)

    def _train(self, plan: Plan, steps: int, limit_seconds: float) -> Curve:
        job = CurveJob(plan=plan, facts=self.facts, config=str(self.config.resolve()), steps=steps)
        try:
            with self.server.ask(self.folder, job, kill_after_seconds=limit_seconds) as answer:
                return Curve(failed="it took too long") if answer is None else CURVE.validate_python(answer)
        except MachineError as error:
            return Curve(failed=error.message)


def how_many(step_seconds: float, spent_seconds: float) -> int:
    """Optimizer steps that take about a tenth of the time that was spent."""
    affordable = SHARE * spent_seconds / ((1 + _SLOWER) * step_seconds)
    return max(LEAST_STEPS, min(MOST_STEPS, int(affordable)))


def references(plan: Plan, facts: Facts) -> Iterator[Plan]:
    """Plain plans to compare with, the nearest one first, then the one that needs the least memory."""
    plain = Plan({one.name: one.baseline for one in techniques()})
    rows, accumulation = int(plan["micro_batch"]), int(plan["accumulation"])
    yield plain.replaced(micro_batch=rows, accumulation=accumulation)
    small = plain.replaced(micro_batch=1, accumulation=rows * accumulation)
    lean = {one.name: one.leanest(facts) for one in techniques()}
    yield small.replaced(**{name: value for name, value in lean.items() if name not in {"micro_batch", "accumulation"}})


def kind_of(plan: Plan, facts: Facts) -> Kind:
    """The loosest class among the plan's values; plain ones count as exact."""
    found = {one.choice(plan[one.name], facts).kind for one in techniques() if plan[one.name] != one.baseline}
    return next((kind for kind in (Kind.METHOD, Kind.NUMERIC) if kind in found), Kind.EXACT)


def judge(plan: Plan, facts: Facts, mine: Curve, reference: Plan | None, theirs: Curve | None) -> Guard:
    """The verdict on two curves; ``theirs`` is ``None`` where there is nothing to compare with."""
    kind = kind_of(plan, facts)
    pairs = zip(mine.losses, theirs.losses, strict=False) if theirs else ()
    difference = max((_apart(one, other) for one, other in pairs), default=None)
    verdict, words = _alone(plan, mine, reference if theirs is None else None)
    bounds = None
    if not verdict and theirs is not None and difference is not None:
        bounds = BOUNDS.get(kind)
        verdict, words = _compared(facts, mine, theirs, kind, difference)
    return Guard(
        verdict=verdict or ("alone" if theirs is None else "unknown"),
        words=words,
        reference=reference,
        losses=mine.losses,
        reference_losses=theirs.losses if theirs else (),
        bound=bounds.loss if bounds else None,
        difference=difference,
    )


def _alone(plan: Plan, mine: Curve, reference: Plan | None) -> tuple[Verdict | None, str]:
    """What a curve says by itself: a verdict where it needs no other, and words."""
    losses, steps = mine.losses, len(mine.losses)
    if mine.failed == NOT_FINITE:
        return "other", f"its loss was not finite in optimizer step {steps + 1}"
    if mine.failed is not None:
        return "unknown", f"its short training did not end: {mine.failed}"
    if max(losses) > _EXPLODED * losses[0]:
        return "other", f"its loss went from {losses[0]:.3g} to {max(losses):.3g} in {steps} steps"
    same = "it is the plain plan itself" if reference == plan else "no plain plan fits to compare with"
    return None, f"its loss stayed finite in {steps} optimizer steps; {same}"


def _compared(facts: Facts, mine: Curve, theirs: Curve, kind: Kind, difference: float) -> tuple[Verdict, str]:
    """The verdict on two whole curves, whose losses differ so much, and words."""
    bounds, steps = BOUNDS.get(kind), len(mine.losses)
    if bounds is None:
        words = "another training method: its losses stayed finite, and differ from the plain plan's by up to"
        return "method", f"{words} {_percent(difference)} in {steps} steps"
    why = _unlike(mine, theirs, bounds, routed=facts.model.has_experts and kind != Kind.EXACT)
    if why is None and difference > bounds.loss:
        allowed = f"{_percent(bounds.loss)} is allowed"
        why = f"its losses differ from the plain plan's by up to {_percent(difference)}; {allowed}"
    if why is not None:
        return "other", why
    words = "it trains as the plain plan does: the losses differ by no more than"
    allowed = f"{_percent(bounds.loss)} is allowed: {kind.value}"
    return "same", f"{words} {_percent(difference)} in {steps} steps ({allowed})"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _unlike(mine: Curve, theirs: Curve, bounds: Bounds, *, routed: bool) -> str | None:
    """How the gradients differ, in words, or ``None``.

    Args:
        mine: The winner's.
        theirs: The reference's.
        bounds: What may differ.
        routed: Rounding sends tokens to other experts: gradients of single parameters can't be compared.
    """
    if mine.gradients and theirs.gradients:
        whole, wanted = (math.hypot(*one.gradients.values()) for one in (mine, theirs))
        if _apart(whole, wanted) > bounds.norm:
            return f"the norm of its gradients is {whole:.3g} where the plain plan's is {wanted:.3g}"
        if mine.gradients.keys() == theirs.gradients.keys() and not routed:
            name = max(theirs.gradients, key=lambda name: _beside(name, mine.gradients, theirs.gradients))
            if _beside(name, mine.gradients, theirs.gradients) > bounds.gradient:
                return (
                    f"the gradient of {name} has the norm {mine.gradients[name]:.3g} where the plain plan's has "
                    f"{theirs.gradients[name]:.3g}"
                )
        missing = theirs.gradients.keys() - mine.gradients.keys()
        if missing and mine.gradients.keys() <= theirs.gradients.keys():
            return f"{len(missing)} parameters have no gradient, such as {min(missing)}"
    for step, (one, other) in enumerate(zip(mine.norms, theirs.norms, strict=False), start=1):
        if one and other and _apart(one, other) > bounds.norm:
            return f"it stepped with gradients of the norm {one:.3g} in step {step}, the plain plan with {other:.3g}"
    return None


def _apart(one: float, other: float) -> float:
    return abs(one - other) / max(abs(other), 1e-12)


def _beside(name: str, mine: Mapping[str, float], theirs: Mapping[str, float]) -> float:
    """How far a parameter's gradient is off, small ones against the largest."""
    return abs(mine[name] - theirs[name]) / max(theirs[name], _SMALL * max(theirs.values()), 1e-12)
