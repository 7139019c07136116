"""Which outcome wins, and why. Pure: outcomes in, a decision and its reason out.

The fastest plan that never broke the ceiling wins. Two plans whose step times differ by less than their
uncertainties (the root of their summed squared spreads) are equally fast; of those the one with less memory wins,
if by more than 2 %, and else the simpler one. More than 3 % apart is never a tie, however wide the noise: more speed
than that is not given up on a doubt.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autofit.contract.facts import Facts
from autofit.contract.outcome import Measured, Outcome, OutOfMemory, TimedOut, Trial, Unsupported
from autofit.contract.plan import Plan
from autofit.contract.technique import Kind
from autofit.registry import techniques
from autofit.space import Space, held_by_script
from autofit.system.statistics import median, spread
from autofit.system.units import duration, size

_NEAR, _NEAR_IN_NOISE = 1.10, 1.25
SAME_MEMORY, _SAME_SPEED = 1.02, 1.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A plan with all that was measured of it, pooled into one outcome."""

    plan: Plan
    measured: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The winner, and why it won, in words; ``runners_up`` are the others that fit, fastest first."""

    plan: Plan
    measured: Measured
    reason: str
    runners_up: tuple[Contender, ...]


def finalists(
    trials: Sequence[Trial], limit_bytes: int, count: int = 3, differing: Mapping[Plan, str] | None = None
) -> list[Plan]:
    """The plans that are worth measuring again, best first: those within 10 % of the best, or within noise and 25 %.

    The noise of a trial that was cut off after two steps knows no bounds. Where the best was measured on a calm
    machine, those that others disturbed whenever they were measured can't be compared with it: the best of them are
    measured again too, in the place of the last of the calm ones. Those in ``differing`` are out; see
    :func:`decide`.
    """
    contenders, _ = _contenders(trials, limit_bytes, differing or {})
    near = _near(contenders)
    # where the best was disturbed itself, these are near to it too
    slowed = [plan for plan in _near([one for one in contenders if one.measured.disturbed]) if plan not in near]
    return [*near[: max(1, count - len(slowed))], *slowed][:count]


def _near(contenders: Sequence[Contender]) -> list[Plan]:
    """Those that are about as fast as the first."""
    if not contenders:
        return []
    best = contenders[0].measured
    return [
        one.plan
        for one in contenders
        if one.measured.step_seconds <= best.step_seconds * (_NEAR_IN_NOISE if _tied(one.measured, best) else _NEAR)
    ]


def decide(trials: Sequence[Trial], limit_bytes: int, differing: Mapping[Plan, str] | None = None) -> Decision | None:
    """The winner, or ``None`` where nothing that fits was measured.

    Of each plan the measurements of the best fidelity count, pooled. A plan that broke the ceiling once is out, and
    so is one that once failed in a way that time does not explain. Where finals were measured, the winner is
    one of the finalists: a quick look at a plan promises nothing.

    Args:
        trials: All that was tried.
        limit_bytes: The ceiling on the device.
        differing: Plans whose losses or gradients differ from the float32 baseline's, each with the difference.
    """
    contenders, refused = _contenders(trials, limit_bytes, differing or {})
    if not contenders:
        return None
    final = {trial.plan for trial in trials if trial.purpose == "final" and isinstance(trial.outcome, Measured)}
    eligible = [one for one in contenders if one.plan in final] or contenders
    fastest = eligible[0]
    in_noise = [one for one in eligible if _tied(one.measured, fastest.measured)]
    tied = [one for one in in_noise if one.measured.step_seconds <= fastest.measured.step_seconds * _SAME_SPEED]
    least = min(one.measured.peak_bytes for one in tied)
    small = [one for one in tied if one.measured.peak_bytes <= least * SAME_MEMORY]
    winner = min(small, key=lambda one: (changed_values(one.plan), one.measured.step_seconds))
    return Decision(
        plan=winner.plan,
        measured=winner.measured,
        reason=" ".join([_reason(winner, fastest, eligible, tied, sure=len(in_noise) == 1), *refused]),
        runners_up=tuple(one for one in contenders if one is not winner),
    )


def changed_values(plan: Plan) -> int:
    """How many values are not the baseline, micro-batch and accumulation apart: the measure of simplicity."""
    counted = [one for one in techniques() if one.name not in {"micro_batch", "accumulation"} and one.name in plan]
    return sum(plan[one.name] != one.baseline for one in counted)


def _tied(one: Measured, other: Measured) -> bool:
    """Whether two step times can't be told apart; the global batch is the same, so steps compare."""
    noise = math.hypot(one.step_seconds_spread, other.step_seconds_spread)
    return abs(one.step_seconds - other.step_seconds) <= noise


def _contenders(
    trials: Iterable[Trial], limit_bytes: int, differing: Mapping[Plan, str]
) -> tuple[list[Contender], list[str]]:
    """The plans that fit, fastest first, and what was refused though it was measured, in words."""
    by_plan: dict[Plan, list[Trial]] = {}
    for trial in trials:
        by_plan.setdefault(trial.plan, []).append(trial)
    contenders, refused = [], []
    for plan, tried in by_plan.items():
        runs = [trial.outcome for trial in tried if isinstance(trial.outcome, Measured)]
        failures = _failures(tried)
        if not runs:
            continue
        pooled = pool(runs)
        if pooled.peak_bytes > limit_bytes or any(isinstance(one, OutOfMemory) for one in failures):
            refused.append(f"Refused: {plan.words()} fitted once, and broke the ceiling another time.")
        elif plan in differing:
            refused.append(f"Refused: {plan.words()} does not train like the float32 baseline: {differing[plan]}.")
        elif failures:
            refused.append(f"Refused: {plan.words()} ran once, and {failures[-1].kind} another time.")
        else:
            contenders.append(Contender(plan=plan, measured=pooled))
    contenders.sort(key=lambda one: (one.measured.step_seconds, one.measured.peak_bytes, changed_values(one.plan)))
    return contenders, refused


def _failures(tried: Sequence[Trial]) -> list[Outcome]:
    """What speaks against a plan that was measured, too.

    Where others held the memory nothing does; a first failure after which the plan was measured is an accident,
    unless it broke the ceiling.
    """
    failures = [
        (place, trial.outcome)
        for place, trial in enumerate(tried)
        if not isinstance(trial.outcome, Measured | TimedOut)
        and not (isinstance(trial.outcome, OutOfMemory) and trial.outcome.external_pressure)
    ]
    if len(failures) == 1:
        place, only = failures[0]
        ran_after = any(isinstance(trial.outcome, Measured) for trial in tried[place + 1 :])
        if ran_after and not isinstance(only, OutOfMemory | Unsupported):
            return []
    return [outcome for _, outcome in failures]


def pool(runs: Sequence[Measured]) -> Measured:
    """All measurements of a plan as one: times of the best fidelity, memory at its most.

    Those that others disturbed or a pause cut short count for the spread only, where there are others.
    """
    whole = [run for run in runs if run.fidelity == "whole"] or list(runs)
    timed = [run for run in whole if not run.disturbed and not run.paused] or whole
    newest = timed[-1]
    steps = tuple(step for run in timed for step in run.steps)
    seconds = median(steps) if steps else median([run.step_seconds for run in timed])
    change = newest.step_seconds / seconds
    return dataclasses.replace(
        newest,
        step_seconds=seconds,
        step_seconds_spread=_spread(whole),
        samples_per_second=newest.samples_per_second * change,
        tokens_per_second=newest.tokens_per_second * change,
        steps=steps,
        peak_bytes=max(run.peak_bytes for run in runs),
        allocated_bytes=max(run.allocated_bytes for run in runs),
        reserved_bytes=max(run.reserved_bytes for run in runs),
        outside_bytes=max(run.outside_bytes for run in runs),
        host_bytes=max(run.host_bytes for run in runs),
        training_seconds=sum(run.training_seconds for run in runs),
        alloc_retries=max(run.alloc_retries for run in runs),
        mfu=None if newest.mfu is None else newest.mfu * change,
        notes=tuple(dict.fromkeys(note for run in runs for note in run.notes)),
    )


def _spread(runs: Sequence[Measured]) -> float:
    """Of the step seconds over some runs of one plan: that of their steps, and of the runs against one another.

    Steps of one run are alike: the runs' own medians scatter more than theirs, and lie within half of their range.
    """
    steps = tuple(step for run in runs for step in run.steps)
    seconds = [run.step_seconds for run in runs]
    within = spread(steps) if steps else max(run.step_seconds_spread for run in runs)
    return max(within, (max(seconds) - min(seconds)) / 2)


def _reason(
    winner: Contender, fastest: Contender, eligible: Sequence[Contender], tied: Sequence[Contender], *, sure: bool
) -> str:
    mine = winner.measured
    said = (
        f"{mine.samples_per_second:.3g} samples/s "
        f"({duration(mine.step_seconds)} a step, give or take {duration(mine.step_seconds_spread)})"
    )
    if winner is not fastest:
        theirs = fastest.measured
        slower = mine.step_seconds / theirs.step_seconds - 1
        said = f"As fast as the fastest within noise: {said}, {slower:.1%} behind {fastest.plan.words()}"
        saved = theirs.peak_bytes - mine.peak_bytes
        if mine.peak_bytes * SAME_MEMORY < theirs.peak_bytes:
            return f"{said}, with {size(saved)} less memory ({size(mine.peak_bytes)})."
        count = changed_values(winner.plan)
        return f"{said}, with about the same memory, and simpler ({count} values that are not the baseline)."
    among = f"{len(eligible)} finalists" if len(eligible) > 1 else "those that fit"
    said = f"The fastest of {among}: {said}"
    after = [one for one in eligible if one is not winner]
    if not after:
        return said + "."
    ahead = after[0].measured.step_seconds / mine.step_seconds - 1
    if len(tied) == 1:
        noise = "which is more than the noise" if sure else "which is within the noise of the two"
        return f"{said}, {ahead:.1%} ahead of the next of them, {noise}."
    return f"{said}; {len(tied) - 1} equally fast within noise, none with clearly less memory or simpler."


def nearest_change(trials: Sequence[Trial], space: Space, limit_bytes: int, facts: Facts | None = None) -> str:
    """Where nothing fits: the tightest peak that was seen, and the nearest change that may help, in words.

    Args:
        trials: All that was tried.
        space: The plans that might have been.
        limit_bytes: The ceiling on the device.
        facts: Lets it name the values that ``--allow method`` would add; without them none is named.
    """
    worst: dict[Plan, tuple[int, Measured | OutOfMemory]] = {}
    for trial in trials:
        found = trial.outcome
        if isinstance(found, OutOfMemory) and (found.where == "host" or found.external_pressure):
            continue
        if isinstance(found, Measured | OutOfMemory):
            need = _held_or_traced(found, trial.predicted_bytes)
            before = worst.get(trial.plan, (need, found))  # what fitted once may break the ceiling another time
            worst[trial.plan] = max(before, (need, found), key=lambda one: (isinstance(one[1], OutOfMemory), one[0]))
    on_host = [
        trial.plan for trial in trials if isinstance(trial.outcome, OutOfMemory) and trial.outcome.where == "host"
    ]
    if not worst and on_host:
        spent = [one for one in techniques() if any(one.spends_host(plan[one.name]) for plan in on_host)]
        off = " ".join(f"--fix {one.name}={one.baseline}" for one in spent)
        free = "Every plan that was tried ran out of the host's memory: free some of it"
        return f"{free}, or keep less there ({off})." if off else f"{free}."
    if not worst:
        return "No plan that was tried got as far as to show its memory."
    plan, (need, outcome) = min(worst.items(), key=lambda one: (one[1][0], changed_values(one[0])))
    if isinstance(outcome, Measured):
        words = [f"The tightest plan that was seen needs {size(need)} under a ceiling of {size(limit_bytes)}"]
        change = f"a ceiling of {size(need)}"
    else:
        peak, more = outcome.peak_bytes, outcome.requested_bytes or 0
        asked = f" and asked for {size(more)} more" if more else ""
        named = {"load": "while loading", "optimizer": "in the optimizer's step"}
        where = named.get(outcome.phase, f"in the {outcome.phase} pass")
        traced = f" (by its trace it needs about {size(need)})" if need > peak + more else ""
        need = max(need, peak + more)
        held = f"held {size(peak)}{asked} {where}, under a ceiling of {size(limit_bytes)}{traced}"
        words = [f"The tightest plan that was seen {held}"]
        change = f"a ceiling of more than {size(max(need, limit_bytes))}"
    words.append(f"({plan.words()}). What may help: {change} (--memory-limit)")
    shorter = shorter_rows(facts)
    if shorter and (isinstance(outcome, Measured) or outcome.phase in {"forward", "backward"}):
        words.append(f"or {shorter}")
    smaller = [] if facts is None else _smaller_methods(space, facts)
    if smaller:
        words.append(f"or --allow exact,numeric,method, which adds {', '.join(smaller)}")
    return " ".join(words) + "."


def shorter_rows(facts: Facts | None) -> str:
    """How activations shrink with the rows, in words; empty where a script's rows are no text."""
    if facts is None or facts.workload.script is None:
        return "a shorter sequence (--seq-len: activations shrink with it)"
    return (
        "shorter rows, by the script's own arguments (activations shrink with them)"
        if facts.model.sample_tokens
        else ""
    )


def _held_or_traced(outcome: Measured | OutOfMemory, traced_bytes: int | None) -> int:
    """The peak of a plan; one that broke the ceiling was stopped before it, and its trace may tell it."""
    return outcome.peak_bytes if isinstance(outcome, Measured) else max(outcome.peak_bytes, traced_bytes or 0)


def _smaller_methods(space: Space, facts: Facts) -> list[str]:
    """Values of another training method that are to be had here, are not in the space, and save memory."""
    held = {name for name, _ in held_by_script(facts)}
    return [
        f"{one.name}={choice.value}"
        for one in techniques()
        for choice in one.choices(facts)
        if choice.status == "offered"
        and one.name not in held
        and choice.kind == Kind.METHOD
        and choice.value not in space.domains.get(one.name, ())
        and one.prior(choice.value, facts).memory[0] < 0
    ]
