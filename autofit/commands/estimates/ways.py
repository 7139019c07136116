"""The ways of training a model on a card (full, LoRA, QLoRA): of each the fastest plan that fits, and the smallest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from autofit import space
from autofit.commands.estimates.plans import AS_FAST, Estimated, estimated_plan, fitting_bytes, replayed_bytes
from autofit.commands.request import Search
from autofit.contract.facts import Facts
from autofit.contract.plan import Plan, Value
from autofit.contract.technique import Kind
from autofit.costmodel.families import Known
from autofit.costmodel.forecast import MARGIN, Forecast, forecast
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
    """Every way of training, in the order of the techniques that tell them apart, found on every core.

    Args:
        facts: Model, card and sizes.
        spaces: Of :func:`spaces_by_way`.
        traces: Made already: a process that is forked here can't ask for one.
        card: The catalogue's, where it is known.
        known: What was forecast before for these facts and this card.
    """
    looks = {
        name: _Look.at(plans, forecast(plans, traces, facts, card, known=known), traces, facts)
        for name, plans in spaces.items()
        if not isinstance(plans, str)
    }
    asked = [(name, end) for name, look in looks.items() if look.traced for end in (_smallest, _fastest)]

    def answer(place: int) -> tuple[Estimated | None, int]:
        name, end = asked[place]
        return end(looks[name])

    found = dict(zip(asked, on_every_core(answer, range(len(asked))), strict=True))
    for one in (one for one, _ in found.values() if one is not None):
        if facts.hardware.device != "cpu":  # what those processes have replayed, this one need not
            traces.capacities[traces.alike(one.plan, facts)] = replayed_bytes(one, facts)

    def way(name: str, plans: space.Space | str) -> Way:
        if isinstance(plans, str):
            return Way(name=name, fastest=None, smallest=None, stops=plans)
        if not looks[name].traced:
            why = "; ".join(sorted({said for plan in plans.plans if (said := traces.untraced(plan))}))
            return Way(name=name, fastest=None, smallest=None, stops=f"no estimate: {why}")
        (fastest, count), (smallest, _) = found[name, _fastest], found[name, _smallest]
        assert smallest is not None
        return _way(name, looks[name], fastest, smallest, count)

    return tuple(way(name, plans) for name, plans in spaces.items())


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
            found[name] = held if isinstance(held, str) else not_outdone(facts, allowed, held)
        except InputError as error:  # of what the user holds and this way needs, one excludes the other
            found[name] = error.message
    return found


def not_outdone(facts: Facts, allowed: frozenset[Kind], given: Knobs) -> space.Space:
    """The plans, without those than which another one is no slower and no larger, whatever the card.

    The arguments are those of :func:`autofit.space.build`. Such two plans differ by a knob that the user does not hold.

    Raises:
        InputError: As :func:`autofit.space.build`.
    """
    plans = space.build(facts, allowed, given)
    every = set(plans.plans)

    def outdone(plan: Plan) -> bool:
        better = {
            one.name: one.outdone_by(plan[one.name], plan, facts) for one in techniques() if one.name not in given
        }
        return any(plan.replaced(**{name: value}) in every for name, value in better.items() if value is not None)

    return plans.of(plan for plan in plans.plans if not outdone(plan))


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


@dataclass(frozen=True, slots=True)
class _Look:
    """The first look at the plans of a way, at their tensors alone.

    Attributes:
        plans: All of them.
        cast: Their forecast.
        traces: Hold their traces.
        facts: Model, card and sizes.
        need: Bytes of each, with the margin.
        pace: What ranks each by speed, the fastest lowest.
        traced: Places of those that have an estimate.
    """

    plans: space.Space
    cast: Forecast
    traces: Traces
    facts: Facts
    need: Floats
    pace: Floats
    traced: list[int]

    @classmethod
    def at(cls, plans: space.Space, cast: Forecast, traces: Traces, facts: Facts) -> _Look:
        """The look at a space and its forecast."""
        need = cast.predicted_bytes * (1 + MARGIN)
        pace = cast.seconds if cast.known_card else cast.work @ cast.nominal
        return cls(plans, cast, traces, facts, need, pace, np.flatnonzero(~np.isnan(need)).tolist())

    def judged(self, place: int, at_most: int | None) -> Estimated | None:
        """A plan after its allocations were replayed; ``None`` where it needs more than ``at_most`` bytes."""
        return estimated_plan(place, self.plans, self.cast, self.traces, self.facts, at_most=at_most)


def _way(name: str, look: _Look, fastest: Estimated | None, smallest: Estimated, count: int) -> Way:
    """A way of which ``count`` plans fit: the fastest of them, where the replays found one, and the smallest of all."""
    if fastest is None and smallest.verdict == "fits":
        fastest = smallest
    smallest = min(smallest, fastest or smallest, key=lambda one: one.device_bytes)
    count, every = max(count, int(fastest is not None)), len(look.traced)
    if fastest is None:
        stops = what_stops(smallest, look.plans, look.facts)
    elif count == every:
        stops = f"all of its {count} plans fit" if count > 1 else "its one plan fits"
    else:
        largest = float(look.need[look.traced].max())
        stops = f"{count} of its {every} plans fit; the largest needs {units.size(largest)}"
    return Way(name=name, fastest=fastest, smallest=smallest, stops=stops)


def _fastest(look: _Look) -> tuple[Estimated | None, int]:
    """The fastest plan that fits, or the simplest that is as fast, and of how many that fit."""
    need, pace = look.need, look.pace

    def rank(place: int) -> tuple[float, ...]:
        return changed_values(look.plans.plans[place]), float(pace[place]), float(need[place])

    limit = look.facts.workload.limit_bytes
    fitting = sorted((place for place in look.traced if need[place] <= limit), key=lambda place: float(pace[place]))
    for _ in range(_MOST_REPLAYS):  # the allocator's replay may say that what seemed to fit does not
        if not fitting:
            break
        alike = [place for place in fitting if not pace[place] > pace[fitting[0]] * (1 + AS_FAST)]
        best = min(alike, key=rank)
        fastest = look.judged(best, fitting_bytes(look.facts))
        if fastest is not None:
            return fastest, len(fitting)
        fitting.remove(best)
    return None, len(fitting)


def _smallest(look: _Look) -> tuple[Estimated | None, int]:
    """The plan that runs on the smallest card, of all that can be estimated."""
    return _smallest_of(look.traced, look.need, look.judged), len(look.traced)


def _smallest_of(places: list[int], need: Floats, judged: Callable[[int, int | None], Estimated | None]) -> Estimated:
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
    counted = " in an evaluation (--launch-path loop counts none)" if facts.workload.script is None else ", to generate"
    evaluates = counted * (smallest.need.segment == "evaluation")
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
