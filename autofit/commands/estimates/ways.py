"""The ways of training a model on a card (full, LoRA, QLoRA): of each the fastest plan that fits, and the smallest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from autofit import space
from autofit.commands.estimates.plans import AS_FAST, Estimated, estimated_plan, fitting_bytes, replayed_bytes
from autofit.commands.request import Search
from autofit.contract.facts import Facts
from autofit.contract.plan import Value
from autofit.contract.technique import Kind
from autofit.costmodel.families import Known
from autofit.costmodel.forecast import MARGIN, forecast
from autofit.costmodel.tracing.timeline import Category, Floats
from autofit.costmodel.tracing.trace_store import Traces
from autofit.machine.gpu_catalogue import Card
from autofit.registry import techniques
from autofit.search.decision import changed_values
from autofit.system import units
from autofit.system.errors import InputError
from autofit.system.parallel import on_every_core

Knobs = Mapping[str, tuple[Value, ...]]
AS_ASKED = "as asked"
_MOST_REPLAYS = 8
_FIXED: tuple[Category, ...] = ("weights", "gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of training, predicted.

    Attributes:
        name: Such as ``full`` or ``LoRA``; ``as asked`` where the user holds the knobs that tell ways apart.
        fastest: The fastest plan that fits, or the simplest that is as fast by 3 %; ``None`` where none fits.
        smallest: The plan that needs the least memory; ``None`` where none can be estimated.
        stops: What keeps its other plans, or all of them, from fitting, in words.
    """

    name: str
    fastest: Estimated | None
    smallest: Estimated | None
    stops: str


def ways(
    facts: Facts,
    spaces: Mapping[str, space.Space | str],
    traces: Traces,
    card: Card | None,
    known: Known,
) -> tuple[Way, ...]:
    """Every way of training, in the order of the techniques that tell them apart; each in a process of its own.

    Args:
        facts: Model, card and sizes.
        spaces: Of :func:`spaces_by_way`.
        traces: Made already: a process that is forked here can't ask for one.
        card: The catalogue's, where it is known.
        known: What was forecast before for these facts and this card.
    """

    def found(name: str) -> Way:
        plans = spaces[name]
        if isinstance(plans, str):
            return Way(name=name, fastest=None, smallest=None, stops=plans)
        return _way(name, plans, facts, traces, card, known)

    every = on_every_core(found, [*spaces][::-1])[::-1]  # those that come last take the longest, and begin first
    for one in (one for way in every for one in (way.fastest, way.smallest) if one is not None):
        if facts.hardware.device != "cpu":  # what those processes have replayed, this one need not
            traces.capacities[traces.alike(one.plan, facts)] = replayed_bytes(one, facts)
    return tuple(every)


def spaces_by_way(facts: Facts, given: Knobs, allowed: frozenset[Kind]) -> dict[str, space.Space | str]:
    """The plans of each way of training, or why it has none.

    Args:
        facts: Model, card and sizes.
        given: The values of the knobs that the user holds.
        allowed: Classes of the other values.
    """
    found: dict[str, space.Space | str] = {}
    for name, held in held_by_way(facts, given).items():
        try:
            found[name] = held if isinstance(held, str) else space.build(facts, allowed, held)
        except InputError as error:  # of what the user holds and this way needs, one excludes the other
            found[name] = error.message
    return found


def smaller_way(facts: Facts, settings: Search) -> str | None:
    """What to ask for where full training does not fit; nothing where the user holds what tells ways apart."""
    given = space.parse_knobs(settings.fix, settings.among, facts)
    if AS_ASKED in (held := held_by_way(facts, given)):
        return None
    asked = {name: knobs for name, knobs in held.items() if not isinstance(knobs, str)}
    name, knobs = list(asked.items())[-1]
    words = " ".join(f"--fix {knob}={values[-1]}" for knob, values in knobs.items() if knob not in given)
    return f"every weight is trained here; {name} needs less: {words}" if len(asked) > 1 else None


def held_by_way(facts: Facts, given: Knobs) -> dict[str, Knobs | str]:
    """The knobs of each way, or why it, or what it builds on, can't be had."""
    telling = [one for one in techniques() if one.ways]
    if any(one.name in given for one in telling):
        return {AS_ASKED: given}
    found: dict[str, Knobs | str] = {}
    for place, one in enumerate(telling):
        before = {other.name: tuple(other.ways.values()) for other in telling[:place]}
        after = {other.name: (other.baseline,) for other in telling[place + 1 :]}
        below = [other.choice(value, facts) for other in telling[:place] for value in other.ways.values()]
        for name, value in one.ways.items():
            withheld = [choice.reason for choice in (one.choice(value, facts), *below) if choice.status == "withheld"]
            found[name] = withheld[0] if withheld else {**given, **before, one.name: (value,), **after}
    return found


def _way(name: str, plans: space.Space, facts: Facts, traces: Traces, card: Card | None, known: Known) -> Way:  # noqa: PLR0917 - of the story above
    cast = forecast(plans, traces, facts, card, known=known)
    limit = facts.workload.limit_bytes
    need = cast.predicted_bytes * (1 + MARGIN)
    pace = cast.seconds if cast.known_card else cast.work @ cast.nominal
    traced = np.flatnonzero(~np.isnan(need))
    if not len(traced):
        why = "; ".join(sorted({said for plan in plans.plans if (said := traces.untraced(plan))}))
        return Way(name=name, fastest=None, smallest=None, stops=f"no estimate: {why}")

    def judged(place: int, at_most: int | None) -> Estimated | None:
        return estimated_plan(place, plans, cast, traces, facts, at_most=at_most)

    def rank(place: int) -> tuple[float, ...]:
        return changed_values(plans.plans[place]), float(pace[place]), float(need[place])

    smallest = _smallest([int(place) for place in traced], need, judged)
    fitting = sorted((int(place) for place in traced if need[place] <= limit), key=lambda place: float(pace[place]))
    fastest = None
    for _ in range(_MOST_REPLAYS):  # the allocator's replay may say that what seemed to fit does not
        if not fitting:
            break
        alike = [place for place in fitting if not pace[place] > pace[fitting[0]] * (1 + AS_FAST)]
        best = min(alike, key=rank)
        fastest = judged(best, fitting_bytes(facts))
        if fastest is not None:
            break
        fitting.remove(best)
    if fastest is None and smallest.verdict == "fits":
        fastest = smallest
    smallest = min(smallest, fastest or smallest, key=lambda one: one.device_bytes)
    count = max(len(fitting), int(fastest is not None))
    if fastest is None:
        stops = what_stops(smallest, plans, facts)
    elif count == len(traced):
        stops = f"all of its {count} plans fit" if count > 1 else "its one plan fits"
    else:
        stops = f"{count} of its {len(traced)} plans fit; the largest needs {units.size(float(need[traced].max()))}"
    return Way(name=name, fastest=fastest, smallest=smallest, stops=stops)


def _smallest(places: list[int], need: Floats, judged: Callable[[int, int | None], Estimated | None]) -> Estimated:
    """Of plans the one that runs on the smallest card: their tensors alone may put them in another order."""
    first, *others = sorted(places, key=lambda place: float(need[place]))[:_MOST_REPLAYS]
    smallest = judged(first, None)
    assert smallest is not None
    for place in others:
        if need[place] >= smallest.device_bytes * (1 + MARGIN):
            break
        smallest = judged(place, smallest.device_bytes - 1) or smallest
    return smallest


def what_stops(smallest: Estimated, plans: space.Space, facts: Facts) -> str:
    """Why not even the smallest plan fits, in words."""
    needs = f"its smallest plan needs {units.size(smallest.device_bytes)}"
    alone = fixed_bytes(smallest)
    if alone + outside_bytes(smallest) > facts.workload.limit_bytes:
        return f"{needs}: weights and gradients alone are {units.size(alone)}{_untried(plans, facts)}"
    parts = smallest.need.by_category
    largest = max(parts, key=lambda one: parts[one])
    evaluates = " in an evaluation (--launch-path loop counts none)" * (smallest.need.segment == "evaluation")
    return f"{needs}{evaluates}, of which {largest} take {units.size(parts[largest])}"


def _untried(plans: space.Space, facts: Facts) -> str:
    """What would make weights smaller and is in none of the plans, in words."""
    for one in techniques():
        value, words = one.saves.get("weights", (one.baseline, ""))
        choice, tried = one.choice(value, facts), {plan[one.name] for plan in plans.plans}
        if words and choice.status != "withheld" and value not in tried:
            return f"; not tried: {words} (--fix {one.name}={value}, class {choice.kind})"
    return ""


def fixed_bytes(one: Estimated) -> int:
    """Bytes of weights and gradients, which neither a shorter sequence nor a smaller micro-batch makes smaller."""
    return sum(one.need.by_category.get(name, 0) for name in _FIXED)


def outside_bytes(one: Estimated) -> int:
    """Bytes that a process takes beside its tensors: context, workspaces, the allocator's rounding."""
    return one.device_bytes - one.need.peak_bytes
