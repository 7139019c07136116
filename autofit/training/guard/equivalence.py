"""The guard: reject a winner whose losses, gradients or updates differ from those of a float32 baseline.

A plan that is fast because it trains something else must not win. The winner trains a few optimizer steps, and so does
the baseline plan: every technique off, float32, the same micro-batch and accumulation. Both start from the same weights
and train on the same rows (:mod:`autofit.training.guard.loss_curve`). The baseline is trained once more in Monte Carlo
arithmetic of the winner's format (:mod:`autofit.training.guard.rounding`). The distance between the two baselines is
what that format does to this model; a few times that distance is what the winner may differ
(:mod:`autofit.training.guard.tolerance` has the formula, its source and what it does not cover).

A winner of class ``method`` (another optimizer family, adapters, 16-bit weights) is another training method and has no
such tolerance: its losses have to stay finite, and must not grow to twice the first one unless the baseline's do.

Of a script with a Trainer the short training is the script's own (:mod:`autofit.training.guard.script_curve`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from autofit.contract.layout import PARALLEL, data_parallel
from autofit.contract.outcome import Measured
from autofit.contract.plan import Plan
from autofit.contract.technique import Kind
from autofit.registry import baselines, extra_seconds, recipe_of, technique, techniques
from autofit.system.errors import MachineError
from autofit.training.guard.loss_curve import CURVE, NOT_FINITE, OUT_OF_MEMORY, Curve
from autofit.training.guard.rounding import Rounding
from autofit.training.guard.sketch import distance
from autofit.training.guard.tolerance import LOST, Comparison, compare, missing, moved, ranks_apart
from autofit.training.jobs import CurveJob

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.system.forking.server import ForkServer

MOST_STEPS, LEAST_STEPS = 8, 3
SHARE = 0.1
"""Of the time that a tune has spent, which its guard may take."""
_SLOWER, _ROUNDED_SLOWER = 3.0, 6.0
"""Step time of the baseline, and of the baseline in Monte Carlo arithmetic, in the winner's; bounds the steps only."""
_PATIENCE = 40.0
_LATE = "it took too long; --resume compares them once more"
_NO_TIME = "the time is spent; --resume with a longer --timeout compares them"
_EXPLODED = 2.0
_SAME_WEIGHTS = 0.1
"""Of the norm: weights of another draw lie 1.4 apart, those of a format of 8 bits less than 0.1."""
_FLOAT32_BITS = 20
"""Of the mantissa, that stand for float32: 3 fewer than it has, for what the order of long sums does."""
_SEED = 1
_AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}
"""What autocast gives a LayerNorm on a CPU; on a GPU it gives float32."""


Verdict = Literal["same", "other", "method", "alone", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The comparison of the winner's short training with a baseline plan's.

    Attributes:
        verdict: ``same``: within the tolerance; ``other``: outside of it; ``method``: another training method, whose
            losses only have to stay finite; ``alone``: no baseline to compare with; ``unknown``: the training failed.
        words: The verdict in a sentence.
        losses, reference_losses: Of each optimizer step.
        bound, difference: Of the loss in the step that comes nearest to its tolerance, as shares of the baseline's
            loss: the tolerance and the difference. For another method the largest difference.
        split: Where the plan splits the batch otherwise than the script itself and that is another training, in words.
    """

    verdict: Verdict
    words: str
    reference: Plan | None = None
    losses: tuple[float, ...] = ()
    reference_losses: tuple[float, ...] = ()
    bound: float | None = None
    difference: float | None = None
    split: str | None = None
    seconds: float = 0.0


class Look(Protocol):
    """Compares the training of a plan with a baseline's; see :meth:`Guards.look`."""

    def __call__(self, plan: Plan, measured: Measured, *, spent_seconds: float, left_seconds: float | None) -> Guard:
        """The verdict."""


@dataclass(slots=True)
class Guards:
    """Compares the training of winners with their baselines', each run in a process of its own.

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
    _known: dict[tuple[Plan, int, Rounding | None], Curve] = field(default_factory=dict)

    def look(self, plan: Plan, measured: Measured, *, spent_seconds: float, left_seconds: float | None) -> Guard:
        """Whether the plan trains as the baseline does.

        Raises:
            MachineError: No process can be started, or nothing can be written.
        """
        began = time.monotonic()
        steps = how_many(measured.step_seconds, spent_seconds)

        def train(one: Plan, rounding: Rounding | None = None) -> Curve:
            if (one, steps, rounding) not in self._known:
                gone = time.monotonic() - began
                left = math.inf if left_seconds is None else left_seconds - gone
                script = self.facts.workload.script
                begin = 60 + 3 * extra_seconds(one, self.facts) + (0 if script is None else 3 * script.seconds)
                limit = begin + _PATIENCE * steps * measured.step_seconds
                if left <= 0:
                    return Curve(failed=_NO_TIME)
                found = self._train(one, steps, min(limit, left), rounding)
                cut = found.failed == _LATE and left < limit
                self._known[one, steps, rounding] = Curve(failed=_NO_TIME) if cut else found
            return self._known[one, steps, rounding]

        mine = train(plan)
        found, failed = None, None
        if mine.failed is None:
            rounding = rounding_of(plan, self.facts)
            for reference in references(plan, self.facts):
                if reference == plan:
                    found = judge(plan, self.facts, mine, reference, None)
                    break
                theirs = train(reference)
                rounded = train(reference, rounding) if rounding and theirs.failed is None else theirs
                if theirs.failed is None and rounded.failed is None:
                    found = judge(plan, self.facts, mine, reference, theirs, rounded=rounded)
                    break
                why = theirs.failed or rounded.failed
                failed = failed if why == OUT_OF_MEMORY else why
        found = found or judge(plan, self.facts, mine, None, None, failed=failed)
        agrees = found.reference is not None and found.verdict in {"same", "method", "alone"}
        split = split_words(found.reference, self.facts, train) if agrees and found.reference else None
        return dataclasses.replace(found, split=split, seconds=time.monotonic() - began)

    def _train(self, plan: Plan, steps: int, limit_seconds: float, rounding: Rounding | None) -> Curve:
        config = str(self.config.resolve())
        facts = facts_of(plan, self.facts)
        job = CurveJob(plan=plan, facts=facts, config=config, steps=steps, rounding=rounding)
        try:
            with self.server.ask(self.folder, job, kill_after_seconds=limit_seconds) as answer:
                return Curve(failed=_LATE) if answer is None else CURVE.validate_python(answer)
        except MachineError as error:
            return Curve(failed=error.message)


def how_many(step_seconds: float, spent_seconds: float) -> int:
    """Optimizer steps that take about a tenth of the time that was spent."""
    affordable = SHARE * spent_seconds / ((1 + _SLOWER + _ROUNDED_SLOWER) * step_seconds)
    return max(LEAST_STEPS, min(MOST_STEPS, int(affordable)))


def facts_of(plan: Plan, facts: Facts) -> Facts:
    """What a plan is trained with: one of a single process in a world of one, whatever the facts' world is."""
    work, hardware = facts.workload, facts.hardware
    if work.processes == 1 or plan[PARALLEL] != technique(PARALLEL).baseline:
        return facts
    shared = work.processes if hardware.device == "cpu" else 1  # they share the host's memory
    alone = dataclasses.replace(work, processes=1, nodes=1, limit_bytes=work.limit_bytes * shared)
    return dataclasses.replace(facts, workload=alone)


def references(plan: Plan, facts: Facts) -> Iterator[Plan]:
    """Baseline plans to compare with: the one with the plan's own split, then the one that needs the least memory.

    Both are of one process: what several make of a step is held against what one makes of the same rows. A script's are
    of as many as the plan's, since it is its own training there that the plan is to keep: its loss may count them.
    """
    baseline = Plan(baselines())
    rows = int(plan["micro_batch"])
    if facts.workload.script is not None:
        there = baseline.replaced(**{PARALLEL: technique(PARALLEL).baseline_for(facts)})
        yield there.replaced(micro_batch=rows, accumulation=plan["accumulation"])
        return  # other splits draw its random numbers in another order
    accumulation = int(plan["accumulation"]) * data_parallel(plan, facts.workload)
    yield baseline.replaced(micro_batch=rows, accumulation=accumulation)
    if facts.depends_on_rows is not None:
        return  # other splits are other trainings
    small = baseline.replaced(micro_batch=1, accumulation=rows * accumulation)
    lean = {one.name: one.leanest(facts_of(baseline, facts)) for one in techniques()}
    yield small.replaced(**{name: value for name, value in lean.items() if name not in {"micro_batch", "accumulation"}})


def split_words(baseline: Plan, facts: Facts, train: Callable[[Plan, Rounding | None], Curve]) -> str | None:
    """Whether a script's training hangs on how the batch is split, where a plan splits it otherwise than the script.

    Args:
        baseline: The baseline plan with the plan's split.
        facts: What the plan is for.
        train: Gives the curve of a plan, in some rounding.

    Returns:
        By how much the two splits differ, or why that was not looked at, in words; ``None`` where they do not.
    """
    script, work = facts.workload.script, facts.workload
    if script is None:
        return None
    rows = math.gcd(script.micro_batch, work.global_batch // work.processes)
    own = baseline.replaced(micro_batch=rows, accumulation=work.global_batch // (rows * work.processes))
    rounding = rounding_of(own, facts)
    if own == baseline or rounding is None:
        return None
    unseen = (
        f"Whether the script's loss is the same in micro-batches of {baseline['micro_batch']} rows was not looked at"
    )
    if script.factory is not None and script.rows is None:
        return f"{unseen}: rows are drawn anew for each micro-batch, so that no two splits train on the same"
    curves = [train(baseline, None), train(own, None), train(own, rounding)]
    failed = next((one.failed for one in curves if one.failed is not None), None)
    if failed is not None:
        return f"{unseen}: {failed}"
    worst = max(compare(*curves, single=False), key=lambda one: one.ratio)
    if worst.ratio <= 1:
        return None
    return (
        f"its micro-batch of {baseline['micro_batch']} rows is another training than the script's of "
        f"{rows}: {worst.what} differs by {_percent(worst.difference)} of {worst.scale}; a loss that is "
        "a mean over each micro-batch does that, one that nobody divides by the accumulation, and random numbers that "
        "are drawn for each"
    )


def kind_of(plan: Plan, facts: Facts) -> Kind:
    """The loosest class among the plan's values; baseline values count as exact."""
    chosen = [one for one in techniques() if plan[one.name] != one.baseline_for(facts)]
    found = {one.kind(plan[one.name], plan, facts) for one in chosen}
    return next((kind for kind in (Kind.METHOD, Kind.NUMERIC) if kind in found), Kind.EXACT)


def rounding_of(plan: Plan, facts: Facts) -> Rounding | None:
    """The Monte Carlo arithmetic of the plan's format; ``None`` for another training method, which has no tolerance."""
    if kind_of(plan, facts) == Kind.METHOD:
        return None
    filled = recipe_of(plan, facts)
    bits = min(_FLOAT32_BITS, filled.product_bits)
    rows = _AUTOCAST.get(filled.mixed_precision, "float32") if facts.hardware.device == "cpu" else "float32"
    return Rounding(product_bits=bits, state_bits=filled.state_bits, seed=_SEED, norm_dtype=rows)


def judge(
    plan: Plan,
    facts: Facts,
    mine: Curve,
    reference: Plan | None,
    theirs: Curve | None,
    *,
    rounded: Curve | None = None,
    failed: str | None = None,
) -> Guard:
    """The verdict on a plan's curve.

    Args:
        plan: The winner.
        facts: What it is for.
        mine: Its curve.
        reference: The baseline plan; ``None`` where none fits.
        theirs: The baseline's curve; ``None`` where there is nothing to compare with.
        rounded: The baseline's in Monte Carlo arithmetic; needed beside ``theirs`` unless the plan is another method.
        failed: Why there is nothing to compare with, where baselines fit.
    """
    kind = kind_of(plan, facts)
    verdict, words = _alone(plan, mine, theirs, reference if theirs is None else None, failed)
    bound = difference = None
    if not verdict and theirs is not None:
        unlike = _unlike(mine, theirs, rounded or theirs)
        if unlike is not None:
            verdict, words = "unknown", unlike
        elif kind == Kind.METHOD or rounded is None:
            pairs = zip(mine.losses, theirs.losses, strict=False)
            difference = max(abs(one - other) / max(abs(other), 1e-12) for one, other in pairs)
            words = "another training method: its losses stayed finite, and differ from the float32 baseline's by up to"
            verdict, words = "method", f"{words} {_percent(difference)} in {len(mine.losses)} steps"
        else:
            single = kind == Kind.EXACT or not facts.model.has_experts
            ranks = (mine, *mine.others)
            found = [each for one in ranks for each in compare(one, theirs, rounded, single=single)]
            loss = next(one for one in found if one.what.startswith("the loss"))
            bound, difference = loss.tolerance, loss.difference
            lacking = [name for one in ranks for name in missing(one, theirs)]
            verdict, words = _compared(found, lacking, len(mine.losses))
    return Guard(
        verdict=verdict or ("alone" if theirs is None else "unknown"),
        words=words,
        reference=reference,
        losses=mine.losses,
        reference_losses=theirs.losses if theirs else (),
        bound=bound,
        difference=difference,
    )


def _unlike(mine: Curve, theirs: Curve, again: Curve) -> str | None:
    """Why trainings can't be compared: a script's may differ by themselves, and rounding may leave nothing of them."""
    if _other_rows(theirs, again):
        return "the script trains on other rows each time it is run"
    if _other_rows(mine, theirs):
        return "it trains on other rows than the baseline plan: the script draws others under it, or changes its data"
    for one in (theirs, again):
        both = [name for name in mine.began if name in one.began] if mine.rows else []
        norm = math.hypot(*(math.hypot(*one.began[name]) for name in both))
        if math.hypot(*(distance(mine.began[name], one.began[name]) for name in both)) > _SAME_WEIGHTS * norm:
            return "the script begins with other weights each time it is run"
    if (share := moved(theirs, again)) > LOST:
        return f"rounding to its format alone moves the gradient by {_percent(share)} of its norm: nothing can be told"
    return None


def _other_rows(one: Curve, other: Curve) -> bool:
    return any(first != second for first, second in zip(one.rows, other.rows, strict=False))


def _alone(
    plan: Plan, mine: Curve, theirs: Curve | None, reference: Plan | None, failed: str | None
) -> tuple[Verdict | None, str]:
    """What a curve says by itself: a verdict where it needs no other, and words."""
    losses, steps = mine.losses, len(mine.losses)
    if mine.failed == NOT_FINITE:
        return "other", f"its loss was not finite in optimizer step {steps + 1}"
    if mine.failed is not None:
        return "unknown", f"its short training failed: {mine.failed}"
    if _exploded(losses) and not (theirs is not None and _exploded(theirs.losses)):
        return "other", f"its loss grew from {losses[0]:.3g} to {max(losses):.3g} in {steps} steps"
    apart = max(ranks_apart(mine), key=lambda one: one.ratio, default=None)
    if apart is not None and apart.ratio > 1:
        return "other", f"{apart.what} differs between its ranks by {_percent(apart.difference)} of {apart.scale}"
    none = f"could be compared with: {failed}" if failed else "fits to compare with"
    same = "it is the baseline plan itself" if reference == plan else f"no baseline plan {none}"
    return None, f"its loss stayed finite in {steps} optimizer steps; {same}"


def _exploded(losses: Sequence[float]) -> bool:
    """Whether the loss grew by more than it was at first."""
    return bool(losses) and max(losses) - losses[0] > (_EXPLODED - 1) * abs(losses[0])


def _compared(found: list[Comparison], lacking: list[str], steps: int) -> tuple[Verdict, str]:
    """The verdict on the comparisons with a baseline, and words."""
    if lacking:
        some = f"{len(lacking)} parameters have" if len(lacking) > 1 else "a parameter has"
        return "other", f"{some} no gradient, such as {lacking[0]}"
    worst = max(found, key=lambda one: one.ratio)
    apart = f"{_percent(worst.difference)} of {worst.scale} (tolerance {_percent(worst.tolerance)})"
    if worst.ratio > 1:
        return "other", f"{worst.what} differs from the float32 baseline's by {apart}"
    near = f"in {steps} steps; the nearest to its tolerance is {worst.what}: {apart}"
    return "same", f"losses, gradients and updates are the float32 baseline's within the rounding of its format {near}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"
