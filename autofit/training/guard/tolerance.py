"""How far two curves lie apart, and how far the arithmetic allows them to.

Three curves of the same rows and weights are compared: the plan's, ``a``; the float32 baseline's, ``r``; and that
baseline's in Monte Carlo arithmetic, ``m``, whose matrix products and optimizer state are rounded at random to the
plan's format (:mod:`autofit.training.guard.rounding`). The distance of ``m`` to ``r`` is the spread, and it follows the
model, its depth and the format. With ``g`` the gradient of all parameters in the first step, ``p`` one parameter of
it, ``u`` the updates of all steps, ``L`` the losses and ``n`` the norms of each step's gradients, before and after they
are clipped::

    E     = |g_m - g_r| / |g_r|                                     relative error of the whole gradient
    E_u   = |u_m - u_r| / |u_r|
    |g_a - g_r|       <= C E |g_r|
    |g_a,p - g_r,p|   <= C (|g_m,p - g_r,p| + E |g_r,p| + s_p E |g_r|)
    |u_a - u_r|       <= C E_u |u_r|
    |u_a,p - u_r,p|   <= C (|u_m,p - u_r,p| + E_u |u_r,p|) + S_p |u_r,p|
    |L_a - L_r|       <= C max_t |L_m - L_r| + E/10 L_r + E_u |L_r - L_r,0| + e L_r
    |n_a - n_r|       <= C (max_t |n_m - n_r| / n_r + E) n_r

A parameter's error is held against the whole gradient too. ``s_p`` is 1/2 for parameters of one dimension: their
gradients are sums over tokens, which some kernels add up in 16 bits; a bias of BERT's LayerNorm may lose a fifth of its
small gradient, and the training does not notice. For all others, whose gradients are matrix products, it is 1/20.
``S_p`` is the square root of the relative tolerance of the parameter's gradient, since Adam's first updates have the
gradient's signs, a relative error flips about that share of them, and a distance is the root of the flips' share. It is
one half at most, and one half for parameters of one dimension, where a single flip shows: a weight that does not move
is outside. ``E`` and ``E_u`` are no less than :data:`LEAST`, since the order of a sum is no matter of the format. ``e``
is what the plan's losses lose where an engine tells them in 16 bits, as FSDP2 does under mixed precision.

Of several ranks each one's curve is compared. What they have in common must not be farther apart than :data:`APART`,
whatever the method: after the collectives each has the same gradients and weights, mostly to the bit.

Of these tolerances 72 honest plans over 12 architectures reach at most 0.40. Defects in 16-bit plans exceed them 1.5
(weights without a float32 copy) to 700 times, those in exact plans 80 to 430,000 times, but for gradients that are
absent, which are refused by :func:`missing` (``tests/bench/guard_bench.py``, 2026-11-23). Distances are those of
sketches (:mod:`autofit.training.guard.sketch`).

Not covered: a defect below the rounding of the plan's own format; clipping, where the norm is below the limit; a
uniform scale of the weights' decay, which Trainer's default of zero hides; what only shows after more than these steps.
Where a router picks experts, rounding sends tokens elsewhere: single parameters are compared in float32 only, so that
in 16 bits a router whose gradient is there but wrong passes where the whole gradient hides it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autofit.training.guard.loss_curve import Curve
from autofit.training.guard.sketch import Sketch, distance

C = 3.0
LEAST = 1e-5
APART = 2.0**-8
"""Of a norm: what the shortest of the formats rounds."""
LOST = 0.9
"""Share of its norm that rounding may move a gradient by: of one that is moved farther nothing is left to compare."""
_VECTOR, _MATRIX = 1 / 2, 1 / 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One quantity of two curves.

    Attributes:
        what: The quantity, in words.
        difference: As a share of ``scale``.
        tolerance: The most that the difference may be.
        scale: The words for what both are shares of.
    """

    what: str
    difference: float
    tolerance: float
    scale: str

    @property
    def ratio(self) -> float:
        """Of the difference to the tolerance: above 1 the plan is refused."""
        if not self.difference:  # also where both are nothing, of which no tolerance is a share
            return 0.0
        return self.difference / self.tolerance if math.isfinite(self.difference) and self.tolerance else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vectors:
    """The distances of three curves' vectors, for each parameter and for all of them."""

    plan: Mapping[str, float]
    spread: Mapping[str, float]
    norm: Mapping[str, float]
    total: float
    error: float

    @property
    def difference(self) -> float:
        """Of the whole vector, relative."""
        return math.hypot(*self.plan.values()) / self.total


def compare(plan: Curve, baseline: Curve, rounded: Curve, *, single: bool) -> Iterator[Comparison]:
    """Every quantity of a plan's curve against the baseline's.

    Args:
        plan: The plan's curve.
        baseline: The float32 baseline's.
        rounded: The baseline's in Monte Carlo arithmetic of the plan's format.
        single: Whether single parameters are compared.
    """
    gradients = _vectors(plan.gradients, baseline.gradients, rounded.gradients)
    updates = _vectors(plan.updates, baseline.updates, rounded.updates)
    allowed: dict[str, float] = {}
    error = gradients.error if gradients else LEAST
    if gradients is not None:
        yield Comparison(
            what="the gradient of all parameters", difference=gradients.difference, tolerance=C * error,
            scale="its norm",
        )  # fmt: skip
        for name, norm in gradients.norm.items():
            share = _VECTOR if name in baseline.vectors else _MATRIX
            allowed[name] = C * (gradients.spread[name] + error * norm + share * error * gradients.total)
            if single:
                yield Comparison(
                    what=f"the gradient of {name}",
                    difference=gradients.plan[name] / gradients.total,
                    tolerance=allowed[name] / gradients.total,
                    scale="the norm of the whole gradient",
                )
    if updates is not None:
        yield Comparison(
            what="the update of all parameters", difference=updates.difference, tolerance=C * updates.error,
            scale="its norm",
        )  # fmt: skip
        for name, norm in updates.norm.items() if single else ():
            if norm == 0:
                continue
            of_gradient = gradients.norm.get(name, 0.0) if gradients else 0.0
            few = name in baseline.vectors or not of_gradient
            flips = 0.5 if few else min(0.5, math.sqrt(allowed[name] / of_gradient))
            yield Comparison(
                what=f"the update of {name}",
                difference=updates.plan[name] / updates.total,
                tolerance=(C * (updates.spread[name] + updates.error * norm) + flips * norm) / updates.total,
                scale="the norm of the whole update",
            )
    yield from _losses(plan, baseline, rounded, error, updates.error if updates else error)
    for what, mine, theirs, drawn in (
        ("the norm of the gradients", plan.raw_norms, baseline.raw_norms, rounded.raw_norms),
        ("the norm of the clipped gradients", plan.norms, baseline.norms, rounded.norms),
    ):
        norms = [(one, other) for one, other in zip(mine, theirs, strict=False) if one and other]
        if norms:
            yield Comparison(
                what=what,
                difference=max(abs(one - other) / other for one, other in norms),
                tolerance=C * (_spread(drawn, theirs) + error),
                scale="the baseline's",
            )


def moved(baseline: Curve, rounded: Curve) -> float:
    """How far rounding moves the whole gradient, as a share of its norm; 0 where there is none."""
    found = _vectors(rounded.gradients, baseline.gradients, rounded.gradients)
    return 0.0 if found is None else found.difference


def ranks_apart(plan: Curve) -> Iterator[Comparison]:
    """What ranks have in common, of each whose curve is not the first one's against that."""
    for other in plan.others:
        pairs = {"gradient": (plan.gradients, other.gradients), "update": (plan.updates, other.updates)}
        for what, (first, own) in pairs.items():
            found = _vectors(own, first, first)
            if found is not None:
                yield Comparison(
                    what=f"the {what} of all parameters", difference=found.difference, tolerance=APART,
                    scale="its norm",
                )  # fmt: skip


def missing(plan: Curve, baseline: Curve) -> list[str]:
    """Parameters that have a gradient in the baseline and none in the plan; nothing where the plan renames them.

    A gradient of zeros is none either, where the baseline's is more than :data:`LEAST` of the whole gradient: formats
    round, but none rounds all of a parameter to zero.
    """
    if not plan.gradients or plan.gradients.keys() - baseline.gradients.keys():
        return []
    norm = {name: math.hypot(*one) for name, one in baseline.gradients.items()}
    least = LEAST * math.hypot(*norm.values())
    absent = [name for name in norm if norm[name] and name not in plan.gradients]
    zero = [name for name, one in plan.gradients.items() if not any(one) and norm[name] > least]
    return sorted([*absent, *zero])


def _losses(plan: Curve, baseline: Curve, rounded: Curve, error: float, drift: float) -> Iterator[Comparison]:
    """The loss of the step whose difference is the largest part of its tolerance."""
    spread = max((abs(m - r) for m, r in zip(rounded.losses, baseline.losses, strict=False)), default=0.0)
    found = []
    for step, (one, other) in enumerate(zip(plan.losses, baseline.losses, strict=False), start=1):
        allowed = C * spread + (error / 10 + plan.loss_error) * abs(other) + drift * abs(other - baseline.losses[0])
        scale = max(abs(other), 1e-12)
        found.append(
            Comparison(
                what=f"the loss of step {step}",
                difference=abs(one - other) / scale,
                tolerance=allowed / scale,
                scale="the baseline's",
            )
        )
    yield from sorted(found, key=lambda one: one.ratio)[-1:]


def _vectors(
    plan: Mapping[str, Sketch], baseline: Mapping[str, Sketch], rounded: Mapping[str, Sketch]
) -> _Vectors | None:
    """Distances over the parameters that all three have; ``None`` where there are none."""
    names = [name for name in baseline if name in plan and name in rounded]
    norm = {name: math.hypot(*baseline[name]) for name in names}
    total = math.hypot(*norm.values())
    if total == 0:
        return None
    spread = {name: distance(rounded[name], baseline[name]) for name in names}
    return _Vectors(
        plan={name: distance(plan[name], baseline[name]) for name in names},
        spread=spread,
        norm=norm,
        total=total,
        error=max(LEAST, math.hypot(*spread.values()) / total),
    )


def _spread(rounded: tuple[float, ...], baseline: tuple[float, ...]) -> float:
    """The largest relative distance of two series."""
    return max((abs(a - b) / b for a, b in zip(rounded, baseline, strict=False) if b), default=0.0)
