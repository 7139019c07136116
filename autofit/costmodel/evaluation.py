"""How many rows a Trainer evaluates at once: more than it trains on, where they have room and make it faster.

An evaluation keeps no activations for a backward pass, so that it takes more rows at once in the same memory. Those
that stay below the training's own peak never decide whether a run fits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofit.registry import technique
from autofit.training.tasks.table import kind_of

if TYPE_CHECKING:
    from autofit.contract.facts import Facts

_FASTER = 0.03
"""What twice the rows are to save of a row's time to be worth their memory."""


def most_rows(facts: Facts) -> int:
    """The power of two from which on more rows at once are not expected to be faster; 0 where none may be added."""
    work = facts.workload
    if work.script is not None or work.launch_path != "trainer" or held_at_the_micro_batch(facts):
        return 0
    rows, pace = 1, technique("micro_batch").prior
    while pace(rows, facts).time[0] - pace(2 * rows, facts).time[0] > _FASTER:
        rows *= 2
    return rows


def held_at_the_micro_batch(facts: Facts) -> str | None:
    """Why a Trainer evaluates no more rows than it trains on, whatever there is room for; ``None`` where it may."""
    if kind_of(facts.model.task).generates:
        return "no more than it trains on, since what generation takes (predict_with_generate) is not known"
    if facts.depends_on_rows is not None:
        return f"no more than it trains on, since {facts.depends_on_rows}"
    return None
