"""The one door to ``strategies/``: every technique by name, and a plan's recipe."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, cast

from autofit.contract.plan import Plan
from autofit.contract.recipe import Recipe, ground
from autofit.contract.technique import Kind
from autofit.system.errors import InputError, near
from autofit.system.files import source_root

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from autofit.contract.facts import Facts
    from autofit.contract.plan import Value
    from autofit.contract.technique import Technique

_NAME = "autofit.strategies"
_LOADING = threading.Lock()


def _strategies() -> ModuleType:
    """The package of techniques: inside ``autofit/`` where it is installed, beside it in a checkout.

    By its place, not by its name: beside a checkout another one may be installed, whose techniques are others.
    """
    with _LOADING:  # another thread would find it half loaded
        return sys.modules.get(_NAME) or _loaded()


def _loaded() -> ModuleType:
    if (source_root() / "autofit" / "strategies" / "__init__.py").exists():
        return importlib.import_module(_NAME)
    folder = source_root() / "strategies"
    spec = importlib.util.spec_from_file_location(
        _NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not (folder / "__init__.py").exists():
        raise ImportError(f"autofit's techniques are missing: no {folder}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    return module


def techniques() -> tuple[Technique, ...]:
    """Every technique, in the order in which they fill the recipe."""
    return cast("tuple[Technique, ...]", _strategies().ALL)


def baselines() -> dict[str, Value]:
    """The baseline value of every technique."""
    return {one.name: one.baseline for one in techniques()}


def source_folders() -> tuple[Path, Path]:
    """The folders that hold autofit's own code: the package, and the techniques."""
    return source_root() / "autofit", Path(str(_strategies().__file__)).resolve().parent


def technique(name: str) -> Technique:
    """The technique of that name.

    Raises:
        InputError: There is none.
    """
    for one in techniques():
        if one.name == name:
            return one
    raise InputError(f"{name!r} is not a knob", hint=near(name, [one.name for one in techniques()]))


def recipe_of(plan: Plan, facts: Facts) -> Recipe:
    """The recipe of a plan: every technique fills its slots, in order.

    Raises:
        InputError: The plan lacks a technique, or names an unknown one or an unknown value.
    """
    known = techniques()
    missing = [one.name for one in known if one.name not in plan]
    unknown = [name for name in plan if name not in {one.name for one in known}]
    if missing or unknown:
        raise InputError(
            f"not a plan of this version: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}",
            hint="tune again with this version",
        )
    check_values(plan, facts)
    filled = Recipe(plan=plan, facts=facts, emission=ground(facts))
    for one in known:
        if by_script(one, facts):
            continue
        value = plan[one.name]
        filled.add(one.emit(value, plan, facts))
        one.apply(value, filled)
    return filled


def loaded_rows(plan: Plan, facts: Facts) -> int:
    """Rows of a micro-batch as the model gets it: the plan's, unless one of its values joins several to one."""
    rows = int(plan["micro_batch"])
    for one in techniques():
        rows = one.loaded_rows(plan[one.name], rows, facts)
    return rows


def converted(plan: Plan) -> Plan:
    """A plan out of a file, in the values of today; what is not known stays."""
    values: Mapping[str, Value] = plan
    for one in techniques():
        values = one.converted(values)
    return plan if values is plan else Plan(values)


def by_script(one: Technique, facts: Facts) -> bool:
    """Whether the user's script does itself what the technique would do."""
    held = one.held(facts)
    return held is not None and held.by_script


def check_values(plan: Plan, facts: Facts) -> None:
    """Refuse a plan with a value that a technique does not know; for plans that come out of a file.

    Raises:
        InputError: There is one.
    """
    for one in techniques():
        if one.name in plan and not one.knows(plan[one.name], facts):
            value = plan[one.name]
            raise InputError(f"{one.name} has no value {str(value)[:80]!r}", hint=one.suggest(value, facts))


def changes(plan: Plan, facts: Facts) -> list[str]:
    """What the plan changes in the training, a sentence each."""
    said = (one.changes(plan[one.name], plan, facts) or _left_out(one, plan[one.name], facts) for one in techniques())
    return [sentence for sentence in said if sentence]


def _left_out(one: Technique, value: Value, facts: Facts) -> str | None:
    """That a script's own value is left out for the baseline, where that is no exact one."""
    if facts.workload.script is None or value != one.baseline or value == (own := one.own(facts)):
        return None
    if one.choice(own, facts).kind == Kind.EXACT:
        return None
    return f"{one.name} is {value}, where the script's own is {own}."


def extra_seconds(plan: Plan, facts: Facts) -> float:
    """What a trial of the plan is expected to cost beyond its steps."""
    script = facts.workload.script
    before = script.seconds if script else 0.0
    return before + sum(technique(name).prior(value, facts).extra_seconds for name, value in plan.items())
