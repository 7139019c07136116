"""Landscapes: what every plan of a space gave on one device, read from recordings.

Measurements of one plan differ: that is the device's noise, and it is played back too.

A ceiling below the recorded one is judged by what a plan needs: at its peak, what was allocated and what lies outside
of the allocator. What the allocator only kept would have been given back.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from autofit.contract.facts import FACTS, Facts
from autofit.contract.outcome import Measured
from autofit.contract.plan import Plan
from autofit.costmodel import forecast as forecasts
from autofit.costmodel.forecast import Forecast
from autofit.costmodel.seconds.roofline import WORK
from autofit.costmodel.tracing.timeline import Floats
from autofit.costmodel.tracing.trace_store import untraceable
from autofit.machine import gpu_catalogue
from autofit.registry import baselines, check_values, techniques
from autofit.search.recordings.writer import RUN, Run, open_recording
from autofit.space import Space
from autofit.system import strict_json
from autofit.system.errors import InputError
from autofit.system.statistics import median


@dataclass(frozen=True, eq=False)
class Landscape:
    """What was measured of the plans of one space.

    Attributes:
        runs: By plan, in the order in which they were measured.
        provenance: Where, when and by what it was recorded.
    """

    facts: Facts
    runs: Mapping[Plan, tuple[Run, ...]]
    provenance: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Landscape:
        """Read a file; one that holds several recordings of one question is read as one.

        Raises:
            InputError: The file can't be read, is no landscape, or holds measurements of different questions.
        """
        facts: Facts | None = None
        provenance: dict[str, Any] = {}
        runs: dict[Plan, list[Run]] = {}
        try:
            with open_recording(path) as file:
                for number, text in enumerate(file, 1):
                    line = strict_json.loads(text)
                    if "facts" in line:
                        if unknown := sorted(line.keys() - {"facts", "provenance"}):
                            raise strict_json.UnknownKeyError(f"{unknown[0]} is not a known key")
                        found = strict_json.read(FACTS, json.dumps(line["facts"]))
                        if facts is not None and not _comparable(facts, found):
                            raise InputError(
                                f"{path}, line {number}: another model, device or workload than above it",
                                hint="keep each in a file of its own",
                            )
                        facts = facts or found
                        provenance.update(line.get("provenance", {}))
                        continue
                    run = strict_json.read(RUN, text)
                    if facts is not None and run.plan not in runs:
                        check_values(run.plan, facts)
                    runs.setdefault(run.plan, []).append(run)
        except (OSError, ValueError, ValidationError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            first = str(error).splitlines()[0]
            raise InputError(f"{path} is no landscape: {first}", hint="write one by --record") from error
        if facts is None or not runs:
            raise InputError(f"{path} holds no measurement", hint="write one by --record")
        return cls(facts, _alike(runs), provenance)

    def at(self, limit_bytes: int) -> Facts:
        """The facts under another ceiling."""
        return dataclasses.replace(
            self.facts, workload=dataclasses.replace(self.facts.workload, limit_bytes=limit_bytes)
        )

    @functools.cached_property
    def space(self) -> Space:
        """The plans that were measured, as a space."""
        known = [one for one in techniques() if all(one.name in plan for plan in self.runs)]
        used = {one.name: {plan[one.name] for plan in self.runs} for one in known}
        domains = {one.name: tuple(sorted(used[one.name], key=_order(one.choices(self.facts)))) for one in known}
        plans = sorted(
            self.runs, key=lambda plan: [domains[name].index(plan[name]) for name in domains if name in plan]
        )
        priors = {one.name: {value: one.prior(value, self.facts) for value in domains[one.name]} for one in known}
        return Space(domains=domains, plans=tuple(plans), priors=priors)

    @functools.cached_property
    def forecast(self) -> Forecast | None:
        """What the traces said when it was recorded; ``None`` where nothing was traced."""
        return self.forecast_of(self.space)

    def forecast_of(self, space: Space) -> Forecast | None:
        """The same for the plans of a space; those that were not measured have none."""

        def column(name: str) -> Floats:
            held = [getattr(self.of(plan)[0], name) if self.of(plan) else None for plan in space.plans]
            return np.array([math.nan if value is None else float(value) for value in held])

        tensors = column("traced_bytes")
        if np.isnan(tensors).all():
            return None
        nothing = (math.nan,) * len(WORK)
        # what was recorded before a kind of work was counted had none of it
        work = np.array(
            [
                (*held[0].work, *[0.0] * (len(WORK) - len(held[0].work))) if held and held[0].work else nothing
                for held in map(self.of, space.plans)
            ]
        )
        hardware = self.facts.hardware
        card = gpu_catalogue.matching(hardware.name, hardware.total_bytes)
        return Forecast(
            tensor_bytes=tensors,
            seconds=column("traced_seconds"),
            work=work,
            nominal=forecasts.nominal_of(self.facts, card),
            known_card=card is not None,
            timed=bool(self.facts.rates),
            approximate=np.array([bool(untraceable(plan)) for plan in space.plans]) & ~np.isnan(tensors),
            peak_prior=forecasts.peak_prior(hardware),
            kernel_overhead_bytes=forecasts.kernel_overhead_bytes(self.facts, work),
            activation_bytes=np.nan_to_num(column("activation_bytes")),
        )

    def of(self, plan: Plan) -> tuple[Run, ...]:
        """The measurements of a plan; knobs that were not known then count where they have the baseline."""
        found = self.runs.get(plan)
        if found is None:
            known = next(iter(self.runs))
            plain = baselines()
            if all(plan[name] == plain.get(name) for name in plan if name not in known):
                found = self.runs.get(Plan({name: plan[name] for name in known if name in plan}))
        return found or ()

    def seconds(self, plan: Plan) -> float:
        """A plan's true seconds per step: the median over its measurements; infinite where there is none."""
        steps = [run.outcome.step_seconds for run in self.of(plan) if isinstance(run.outcome, Measured)]
        return median(steps) if steps else math.inf

    def fits(self, plan: Plan, limit_bytes: int) -> bool:
        """Whether every measurement of a plan stays below a ceiling, and none failed."""
        runs = self.of(plan)
        return bool(runs) and all(
            isinstance(run.outcome, Measured) and needed(run.outcome) <= limit_bytes for run in runs
        )

    def best(self, limit_bytes: int) -> Plan | None:
        """The truly fastest plan that fits."""
        fitting = [plan for plan in self.runs if self.fits(plan, limit_bytes)]
        return min(fitting, key=self.seconds, default=None)

    @functools.cached_property
    def noise(self) -> float:
        """How far one measurement of a plan usually lies from what it truly takes, as a share of it.

        From how far two measurements of a plan lie apart, which does not depend on how many there are: of three, one
        is the median itself, and to count from it would tell half of the noise.
        """
        apart = []
        for plan, runs in self.runs.items():
            steps = [run.outcome.step_seconds for run in runs if isinstance(run.outcome, Measured)]
            apart += [abs(one - other) / self.seconds(plan) for one, other in itertools.combinations(steps, 2)]
        return median(apart) / math.sqrt(2) if apart else 0.0


def needed(outcome: Measured) -> int:
    """What a plan must have on its device: allocated at its peak, and outside of the allocator."""
    return outcome.allocated_bytes + outcome.outside_bytes


def _comparable(one: Facts, other: Facts) -> bool:
    """Whether two recordings answer one question; what is free on the machine may differ."""
    work, other_work = (
        dataclasses.replace(facts.workload, limit_bytes=0, host_limit_bytes=0) for facts in (one, other)
    )
    return one.model == other.model and one.hardware.name == other.hardware.name and work == other_work


def _order(choices: Iterable[Any]) -> Any:
    """Sorts values as a technique lists them; others by their words, after those."""
    places = {choice.value: place for place, choice in enumerate(choices)}
    return lambda value: (places.get(value, len(places)), str(value))


def _alike(runs: Mapping[Plan, list[Run]]) -> dict[Plan, tuple[Run, ...]]:
    """The runs by plans that all name the same knobs: one that came later was plain before."""
    names = {name: None for plan in runs for name in plan}
    plain = baselines()
    whole: dict[Plan, tuple[Run, ...]] = {}
    for plan, every in runs.items():
        alike = Plan({name: plan.get(name, plain.get(name, "")) for name in names})
        named = every if alike == plan else [dataclasses.replace(run, plan=alike) for run in every]
        whole[alike] = (*whole.get(alike, ()), *named)
    return whole
