"""Rows of different lengths: those that a few steps take for what many would, and the tokens that are no padding."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.training.timing import Clock

_GOLDEN = (math.sqrt(5) - 1) / 2
_MEAN_OF_A_TAIL = 1 - 1 / math.e
"""The quantile of an exponential tail that its mean is at: where the first step looks in each group of rows."""


def expected(places: Sequence[int], a_step: int, steps: int) -> list[int]:
    """Rows of some steps: each step's evenly from the short to the long ones, in a random order.

    So a few steps see what many would on the average, where rows drawn at random would see more short or long ones.

    Args:
        places: Of rows, the shortest first.
        a_step: Rows of a step.
        steps: How many steps.
    """
    numbers = random.Random(0)
    taken: list[int] = []
    for step in range(steps):
        shift = (_MEAN_OF_A_TAIL + step * _GOLDEN) % 1
        rows = [places[int((one + shift) / a_step * len(places))] for one in range(a_step)]
        numbers.shuffle(rows)
        taken += rows
    return taken


def tokens_of(inputs: Any) -> tuple[Any, int] | None:
    """Tokens of a batch that are no padding, and its places for tokens; ``None`` where it has none.

    The first is a tensor where a mask is added up, on its device, so that nothing waits for it.
    """
    ids: Any = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if not hasattr(ids, "numel"):
        return None
    mask = inputs.get("attention_mask")
    counted = mask.sum() if mask is not None and getattr(mask, "shape", None) == ids.shape else ids.numel()
    return counted, ids.numel()


class Tokens:
    """Counts the tokens of each step that are no padding, and the places for tokens; without a clock nothing."""

    def __init__(self, clock: Clock | None) -> None:
        self.clock = clock
        self.totals: dict[int, Any] = defaultdict(int)
        self.places: dict[int, int] = defaultdict(int)

    def count(self, inputs: Any) -> None:
        """A micro-batch."""
        found = None if self.clock is None else tokens_of(inputs)
        if self.clock is not None and found is not None:
            self.totals[self.clock.done] += found[0]
            self.places[self.clock.done] += found[1]

    def tell(self) -> None:
        """Tell the clock the tokens of each timed step, and the share of padding of all of them."""
        timed = [] if self.clock is None else self.clock.timed
        if self.clock is not None and timed and all(step in self.totals for step in timed):
            self.clock.step_tokens = [float(self.totals[step]) for step in timed]
            self.clock.padding = 1 - sum(self.clock.step_tokens) / sum(self.places[step] for step in timed)


def mean_tokens(facts: Facts) -> float | None:
    """Tokens of a row without padding, the mean over the data set; ``None`` where that is not known."""
    work = facts.workload
    if work.lengths:
        return facts.model.sample_tokens * sum(work.lengths) / len(work.lengths)
    return work.script.tokens_a_row if work.script is not None else None


def usual_steps(clock: Clock) -> tuple[tuple[float, ...], float]:
    """Seconds of each timed step if its rows were the usual ones, and tokens of a row without padding.

    Steps of few rows differ by what they happen to train on. Each is told by its own tokens, so that the median is no
    short step's; all together take as long as they took, but for rows that are longer or shorter than usual.
    """
    facts, steps, counted = clock.recipe.facts, clock.waited_steps(), clock.step_tokens
    if len(counted) != len(steps) or not all(counted):
        return steps, float(facts.tokens_a_sample)
    rows = clock.recipe.micro_batch * clock.accumulation
    timed = sum(counted) / len(counted) / rows
    usual = mean_tokens(facts) or timed
    rates = [step / tokens for step, tokens in zip(steps, counted, strict=True)]
    level = sum(steps) / sum(rates) * usual / timed
    return tuple(rate * level for rate in rates), usual
