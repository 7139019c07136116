"""The samplers of ``--sampler``, by name; optuna is imported when one is made.

============  =======================================================================================
``autofit``   the default, :class:`~autofit.search.sampler.AutofitSampler`; the only one that stops by itself
``tpe``       Optuna's tree-structured Parzen estimator
``gp``        Optuna's Gaussian process; needs scipy
``random``    plans at random
``grid``      every plan, in the space's order
============  =======================================================================================
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from autofit.contract.technique import Kind
from autofit.registry import technique
from autofit.system.errors import InputError, near

if TYPE_CHECKING:
    import optuna

    from autofit.contract.facts import Facts
    from autofit.contract.plan import Value
    from autofit.contract.technique import Technique
    from autofit.costmodel.forecast import Forecast
    from autofit.space import Space

SAMPLERS = ("autofit", "tpe", "gp", "random", "grid")


def check_sampler(name: str) -> None:
    """Check that a sampler is known and that what it needs is installed.

    Raises:
        InputError: It is not.
    """
    if name not in SAMPLERS:
        raise InputError(f"--sampler {name!r} is not known", hint=near(name, SAMPLERS))
    missing = [package for package in ("scipy", "torch") if importlib.util.find_spec(package) is None]
    if name == "gp" and missing:
        raise InputError(f"--sampler gp needs {' and '.join(missing)}", hint=f"pip install {' '.join(missing)}")


def make_sampler(
    name: str, space: Space, facts: Facts, seed: int, forecast: Forecast | None
) -> optuna.samplers.BaseSampler:
    """The sampler of that name.

    Raises:
        InputError: There is none, or a package that it needs is missing.
    """
    import optuna

    from autofit.search.sampler import AutofitSampler

    check_sampler(name)
    if name == "autofit":
        limit_bytes = facts.workload.limit_bytes
        methods = _other_methods(space, facts)
        own = space.own(facts)
        return AutofitSampler(space, limit_bytes=limit_bytes, own=own, not_first=methods, seed=seed, forecast=forecast)
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed)
    return optuna.samplers.GPSampler(seed=seed) if name == "gp" else optuna.samplers.RandomSampler(seed=seed)


def _other_methods(space: Space, facts: Facts) -> dict[str, list[Value]]:
    """The values, by technique, that change the training method in some plan."""

    def changes(one: Technique, value: Value) -> bool:
        choice = one.choice(value, facts)
        if choice.at_best is None:
            return choice.kind == Kind.METHOD
        return any(one.kind(value, plan, facts) == Kind.METHOD for plan in space.plans if plan[one.name] == value)

    return {
        name: [value for value in values if changes(technique(name), value)] for name, values in space.domains.items()
    }
