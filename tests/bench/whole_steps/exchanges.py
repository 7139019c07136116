"""The collectives of a published step: Composer's FSDP wraps every block, and the rest is the root.

A micro-step gathers the root once and each block twice (forward, and again backward), and scatters each gradient:
Composer sends them in every micro-step. Source: ``composer/trainer/dist_strategy.py``, FULL_SHARD.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autofit.costmodel.seconds import collectives
from autofit.costmodel.seconds.collectives import Links, collective
from autofit.costmodel.seconds.operator_time import COLUMNS, Operator, Operators, row_of
from autofit.costmodel.seconds.roofline import Numbers

from .rows import Step

_HALF = 2


def operators_of(step: Step) -> Operators:
    """The collectives of a whole optimizer step; none where one rank trains, or it is not said how."""
    if step.world == 1 or step.program is None or not step.reduced_bytes:
        return Operators.from_rows(np.zeros((0, len(COLUMNS))))
    shape = dict(step.program.shape)
    hidden, layers, ratio = shape["hidden"], shape["layers"], shape["ratio"]
    block = (4 + 2 * ratio) * hidden**2
    root = (shape["vocab"] + step.program.seq_len) * hidden

    def both(parameters: int, gathers: int, times: int) -> list[tuple[Operator, float]]:
        calls = float(times * step.accumulation)
        return [
            (collective("all_gather", float(_HALF * parameters), step.world), gathers * calls),
            (collective("reduce_scatter", float(step.reduced_bytes * parameters), step.world), calls),
        ]

    found = both(block, 2, layers) + both(root, 1, 1)
    return Operators.from_rows(np.array([row_of(one) for one, _ in found]), np.array([calls for _, calls in found]))


def links_of(step: Step) -> Links:
    """What the ranks of a step talk over."""
    assert step.card is not None
    return collectives.links_of(step.card, processes=step.world, nodes=step.nodes)


def added(steps: Sequence[Step], computed: Numbers, fit: Mapping[str, Any] | None = None) -> Numbers:
    """Seconds that collectives add to each step beside its compute.

    Args:
        steps: Of the same length.
        computed: Seconds of each without collectives.
        fit: Coefficients; those that ship by default.
    """
    sent = np.zeros(len(steps))
    for place, step in enumerate(steps):
        own = operators_of(step)
        if len(own):
            sent[place] = own.calls @ collectives.seconds(own, links_of(step), fit)
    return collectives.exposed(sent, computed, "fsdp", np.ones(len(steps), dtype=np.int64), fit)
