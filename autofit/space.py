"""The space: techniques x model x machine -> the plans that may be tried."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autofit.contract.plan import Plan, Value
from autofit.contract.technique import Choice, Held, Kind, Prior, Technique
from autofit.registry import technique, techniques
from autofit.system.errors import InputError

if TYPE_CHECKING:
    from autofit.contract.facts import Facts

Knobs = Mapping[str, object] | Sequence[str]
"""Values for knobs: by name, or as texts of the command line."""


@dataclass(frozen=True, slots=True)
class Space:
    """The plans that may be tried.

    Attributes:
        domains: For each technique, in their order, the values that may be tried.
        plans: Every combination that no technique objects to.
        priors: What to expect of each value before anything was measured.
    """

    domains: Mapping[str, tuple[Value, ...]]
    plans: tuple[Plan, ...]
    priors: Mapping[str, Mapping[Value, Prior]]

    def expected(self, plan: Plan) -> tuple[float, float]:
        """Prior means of a plan, as logarithms of factors: seconds per sample, peak memory."""
        priors = [self.priors[name][value] for name, value in plan.items()]
        return sum(prior.time[0] for prior in priors), sum(prior.memory[0] for prior in priors)

    def own(self, facts: Facts) -> Plan | None:
        """What the user's script does by itself; ``None`` where no script is tuned, or that may not be tried."""
        if facts.workload.script is None:
            return None
        plan = Plan({name: technique(name).own(facts) for name in self.domains})
        return plan if plan in self.plans else None

    def of(self, plans: Iterable[Plan]) -> Space:
        """The same space with these plans of it alone."""
        plans = tuple(plans)
        used = {name: {plan[name] for plan in plans} for name in self.domains}
        domains = {name: tuple(one for one in values if one in used[name]) for name, values in self.domains.items()}
        priors = {name: {one: self.priors[name][one] for one in values} for name, values in domains.items()}
        return Space(domains=domains, plans=plans, priors=priors)

    def smallest(self) -> Plan:
        """The plan that is expected to need the least memory."""
        return min(self.plans, key=lambda plan: (self.expected(plan)[1], self.expected(plan)[0]))


def parse_allowed(text: str) -> frozenset[Kind]:
    """The classes of ``--allow exact,numeric,method``.

    Raises:
        InputError: A class of another name, or ``exact`` is left out, without which the batch can't be split.
    """
    allowed = set()
    for word in text.split(","):
        try:
            allowed.add(Kind(word.strip().lower()))
        except ValueError:
            raise InputError(
                f"--allow {word!r} is not a class of techniques",
                hint="known: " + ", ".join(kind.value for kind in Kind),
            ) from None
    if Kind.EXACT not in allowed:
        raise InputError(
            f"--allow {text!r} leaves exact out, and no plan can do without", hint=f"write it like --allow exact,{text}"
        )
    return frozenset(allowed)


def parse_assignment(text: str, option: str) -> tuple[str, str]:
    """``("knob", "value")`` of ``knob=value``.

    Raises:
        InputError: Nothing on one side of the equals sign, or none.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        like = next((f"{one.name}={one.baseline}" for one in techniques() if one.says_itself), "KNOB=VALUE")
        raise InputError(f"{option} {text!r} is not KNOB=VALUE", hint=f"write it like {option} {like}")
    return name.strip(), value.strip()


def parse_knobs(fix: Knobs, among: Knobs, facts: Facts) -> dict[str, tuple[Value, ...]]:
    """The values that ``--fix`` and ``--among`` leave, by technique.

    Args:
        fix: ``KNOB=VALUE`` texts of the command line; or, from Python, one value for each knob.
        among: ``KNOB=V1,V2`` texts of the command line; or, from Python, some values for each knob.
        facts: What the techniques are asked about.

    Raises:
        InputError: An unknown knob or value, one that can't be had here, or a knob that is given twice.
    """
    given: dict[str, tuple[Value, ...]] = {}
    for name, values in (*_fixed(fix), *_among(among)):
        one = technique(name)
        if name in given:
            raise InputError(f"{name} is given twice", hint="give each knob once, by --fix or by --among")
        if not values:
            raise InputError(f"among {name!r}: no value is given", hint="give one value or more")
        given[name] = tuple(dict.fromkeys(one.parse(str(value), facts) for value in values))
    return given


def _fixed(knobs: Knobs) -> list[tuple[str, list[object]]]:
    """Each knob of ``--fix`` with its value."""
    if isinstance(knobs, Mapping):
        return [(name, [value]) for name, value in knobs.items()]
    return [(name, [value]) for name, value in (parse_assignment(text, "--fix") for text in knobs)]


def _among(knobs: Knobs) -> list[tuple[str, list[object]]]:
    """Each knob of ``--among`` with its values."""
    if isinstance(knobs, Mapping):
        return [(name, list(as_tuple(values))) for name, values in knobs.items()]
    pairs = [parse_assignment(text, "--among") for text in knobs]
    return [(name, [value.strip() for value in values.split(",")]) for name, values in pairs]


def as_tuple(given: object) -> tuple[object, ...]:
    """Several values, or one, as one would write them in Python."""
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)


def build(
    facts: Facts,
    allowed: frozenset[Kind] = frozenset({Kind.EXACT, Kind.NUMERIC}),
    given: Mapping[str, tuple[Value, ...]] | None = None,
) -> Space:
    """Every plan that may be tried.

    A technique's baseline value is always allowed; of a script, what it does itself, and another value where its class
    and that of what it would take the place of are. What the user names by ``given`` is allowed whatever its class.

    Raises:
        InputError: Nothing is left, or the global batch can't be split over the processes.
    """
    given = given or {}
    work = facts.workload
    if work.global_batch % work.processes:
        batch, processes = work.global_batch, work.processes
        below, above = batch // processes * processes, math.ceil(batch / processes) * processes
        raise InputError(
            f"a global batch of {batch} can't be split over {processes} processes",
            hint=f"{' or '.join(str(b) for b in (below, above) if b)} can",
        )
    domains: dict[str, tuple[Value, ...]] = {}
    unsure: dict[str, frozenset[Value]] = {}
    for one in techniques():
        held = one.held(facts)
        if held is not None and (one.name not in given or held.firm or held.by_script):
            domains[one.name] = _held_values(one.name, held, given)
            continue
        if one.name in given:
            domains[one.name] = given[one.name]
            continue
        domains[one.name], unsure[one.name] = _allowed_values(one, facts, allowed)
    plans: list[dict[str, Value]] = [{}]
    objection = None
    for one in techniques():
        grown = []
        for plan in plans:
            for value in domains[one.name]:
                reason = one.conflict(value, plan, facts)
                if reason is None:
                    grown.append({**plan, one.name: value})
                else:
                    objection = reason
        if not grown:
            raise InputError(
                f"no plan is left: {objection or f'{one.name} has no value here'}",
                hint="give --fix or --among other values, or none",
            )
        plans = grown
    priors = {one.name: {value: one.prior(value, facts) for value in domains[one.name]} for one in techniques()}
    sure = (plan for plan in plans if _are_allowed(plan, unsure, facts, allowed))
    return Space(domains=domains, plans=(), priors=priors).of(Plan(plan) for plan in sure)


def _are_allowed(
    plan: Mapping[str, Value], unsure: Mapping[str, frozenset[Value]], facts: Facts, allowed: frozenset[Kind]
) -> bool:
    """Whether the values whose class hangs on the others of their plan are of an allowed one here."""
    return all(
        technique(name).kind(plan[name], plan, facts) in allowed
        for name, values in unsure.items()
        if plan[name] in values
    )


def _allowed_values(
    one: Technique, facts: Facts, allowed: frozenset[Kind]
) -> tuple[tuple[Value, ...], frozenset[Value]]:
    """What a technique offers of the allowed classes, and what a script does itself; see :func:`build`.

    Returns:
        The values; and those of them that are of an allowed class beside some values only.
    """
    choices = one.choices(facts)
    kinds = {choice.value: choice.kind for choice in choices}
    own = one.baseline if facts.workload.script is None else one.own(facts)
    own = own if own in kinds else one.baseline
    leaves = own == one.baseline or kinds[own] in allowed

    def may(choice: Choice) -> bool:
        always = choice.kind in allowed or choice.value == one.baseline
        return choice.value == own or (leaves and (always or choice.at_best in allowed))

    found = [choice for choice in choices if choice.status == "offered" and may(choice)]
    varies = (one for one in found if one.at_best is not None and not {one.kind, one.at_best} <= allowed)
    return tuple(choice.value for choice in found), frozenset(choice.value for choice in varies) - {own}


def _held_values(name: str, held: Held, given: Mapping[str, tuple[Value, ...]]) -> tuple[Value, ...]:
    """The value that a script holds a technique at.

    Raises:
        InputError: The user asks for another one.
    """
    if any(value != held.value for value in given.get(name, ())):
        asked = ", ".join(str(value) for value in given[name])
        raise InputError(
            f"{name}={asked} can't be had with this script: {held.reason}",
            hint=f"leave {name} out, or change the script",
        )
    return (held.value,)


def held_by_script(facts: Facts) -> list[tuple[str, Held]]:
    """The techniques that the user's script holds at a value of its own, by name."""
    return [(one.name, held) for one in techniques() if (held := one.held(facts)) is not None]


def offers(facts: Facts) -> list[tuple[str, Choice]]:
    """Every choice of every technique with what this machine makes of it, for the doctor and the report."""
    return [(one.name, choice) for one in techniques() for choice in one.choices(facts)]
