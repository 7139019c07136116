"""A space of plans as arrays: what the regressions of time and memory take as features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autofit.contract.plan import Plan, Value
from autofit.contract.trace import Ints
from autofit.costmodel.tracing.timeline import Floats
from autofit.registry import baselines
from autofit.space import Space

MICRO_BATCH = "micro_batch"
ACCUMULATION = "accumulation"
"""Follows from the micro-batch and the global batch: it is no degree of freedom of its own."""
BATCH_SPLIT = frozenset({MICRO_BATCH, ACCUMULATION})
"""How the global batch is split: plans of one family differ in these alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """A space as arrays, computed once: one entry per plan, in the order of ``space.plans``.

    Attributes:
        names: The techniques.
        index: The index of a plan.
        codes: The position of each value in its domain, a column per technique.
        rows: The micro-batch.
        family: A number for all values but micro-batch and accumulation: plans of one family share it.
        changed_values: How many values are not the baseline's, micro-batch and accumulation apart.
        indicators: For each value that is not a baseline, by technique and value: 1 where a plan has it, else 0.
    """

    names: tuple[str, ...]
    index: Mapping[Plan, int]
    codes: Ints
    rows: Floats
    family: Ints
    changed_values: Ints
    indicators: Mapping[tuple[str, Value], Floats]

    @property
    def overhead_curve(self) -> Floats:
        """Logarithm of the share of a step that does not grow with the micro-batch: 0 at one row, less at many."""
        return np.log((1 + 8 / self.rows) / 9)


def features_of(space: Space) -> Features:
    """The features of a space; a few seconds for 100,000 plans."""
    plain = baselines()
    names = list(space.domains)
    positions = [{value: code for code, value in enumerate(space.domains[name])} for name in names]
    codes = np.array(
        [[position[plan[name]] for name, position in zip(names, positions, strict=True)] for plan in space.plans],
        dtype=np.int64,
    )
    count = len(space.plans)
    rows = np.ones(count)
    if MICRO_BATCH in names:
        rows = np.array([float(v) for v in space.domains[MICRO_BATCH]])[codes[:, names.index(MICRO_BATCH)]]
    changed_values, family = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    indicators: dict[tuple[str, Value], Floats] = {}
    for column, name in enumerate(names):
        if name in BATCH_SPLIT:
            continue
        family = family * len(space.domains[name]) + codes[:, column]
        for code, value in enumerate(space.domains[name]):
            if value == plain.get(name, space.domains[name][0]):
                continue
            indicators[name, value] = (codes[:, column] == code).astype(float)
            changed_values += codes[:, column] == code
    return Features(
        names=tuple(names),
        index={plan: place for place, plan in enumerate(space.plans)},
        codes=codes,
        rows=rows,
        family=np.unique(family, return_inverse=True)[1].astype(np.int64),
        changed_values=changed_values,
        indicators=indicators,
    )
