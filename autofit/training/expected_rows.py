"""Rows of different lengths: those that a few steps take for what many would, and the tokens that are no padding."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autofit.system.statistics import median

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.training.row_order import Unlike
    from autofit.training.timing import Clock


def tokens_of(inputs: Any) -> tuple[Any, int] | None:
    """Tokens of a batch that are no padding, and its places for tokens; ``None`` where it has none.

    The first is a tensor where a mask is added up, on its device, so that nothing waits for it.
    """
    ids: Any = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if not hasattr(ids, "numel"):
        return None
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is not None and getattr(mask, "shape", None) == ids.shape:
        return mask.sum(), ids.numel()
    if mask is None and getattr(positions, "shape", None) == ids.shape:
        # rows are runs of positions; what fills a packed row up stays at one
        goes_on = positions[..., 1:] == positions[..., :-1] + 1
        runs = goes_on[..., :1].sum() + (goes_on[..., 1:] & ~goes_on[..., :-1]).sum()
        return goes_on.sum() + runs, ids.numel()
    return ids.numel(), ids.numel()


def without_padding(inputs: Any) -> Any:
    """A batch without the columns that are padding in every row, at its end: how far it is padded does not count."""
    if not isinstance(inputs, Mapping):
        return inputs
    ids: Any = inputs.get("input_ids")
    mask: Any = inputs.get("attention_mask")
    if getattr(mask, "ndim", 0) < 2 or getattr(ids, "shape", None) != mask.shape:
        return inputs
    used = mask.reshape(-1, mask.shape[-1]).any(0).nonzero()
    width = int(used[-1]) + 1 if len(used) else 0
    return {name: one[..., :width] if getattr(one, "shape", None) == ids.shape else one for name, one in inputs.items()}


class Tokens:
    """Counts the tokens of each step that are no padding, and the places for tokens; without a clock nothing."""

    def __init__(self, clock: Clock | None) -> None:
        self.clock = clock
        self.totals: dict[int, Any] = defaultdict(int)
        self.places: dict[int, list[int]] = defaultdict(list)
        self.unlike: Unlike | None = None

    def take(self, unlike: Unlike) -> None:
        """Micro-batches that differ much are to be trained on."""
        self.unlike = unlike

    def count(self, inputs: Any, *, training: bool = True) -> None:
        """A micro-batch; one that is evaluated does not count."""
        found = tokens_of(inputs) if self.clock is not None and training else None
        if self.clock is not None and found is not None:
            self.totals[self.clock.done] += found[0]
            self.places[self.clock.done].append(found[0 if self.clock.recipe.unpadded else 1])

    def tell(self) -> None:
        """Tell the clock the tokens of each timed step, and the share of padding of all of them."""
        timed = [] if self.clock is None else self.clock.timed
        if self.clock is None or not timed or not all(step in self.totals for step in timed):
            return
        tokens, places = [float(self.totals[step]) for step in timed], [self.places[step] for step in timed]
        self.clock.step_tokens = [self.clock.world.mean(one) for one in tokens]  # ranks take a step together
        self.clock.padding = 1 - sum(tokens) / float(sum(map(sum, places)))
        if self.unlike is not None:
            self._tell_unlike(self.clock, self.unlike, places)

    def _tell_unlike(self, clock: Clock, unlike: Unlike, places: Sequence[Sequence[int]]) -> None:
        """Tell the places of each whole step, and of one in the mean: the epoch's, by how the collator pads."""
        first = clock.effort.warm_up
        said = sum(sum(unlike.places[step - first]) for step in clock.timed)
        usual = unlike.usual * sum(map(sum, places)) / said
        recipe = clock.recipe
        clock.step_places = [whole_step(one, recipe.accumulation) for one in places]
        clock.usual_places = usual * recipe.accumulation
        tokens = mean_tokens(recipe.facts)
        if tokens is not None:
            clock.padding = max(0.0, 1 - tokens * recipe.micro_batch / usual)


def whole_step(micro_steps: Sequence[float], accumulation: int) -> float:
    """What micro-steps come to that stand for more of them: the first, and the others in its place."""
    first, *later = micro_steps
    return first + (accumulation - 1) * sum(later) / len(later) if later else accumulation * first


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
    if clock.usual_places is not None:
        tokens = mean_tokens(facts)
        return _of_usual_places(steps, clock.step_places, clock.usual_places), tokens or float(facts.tokens_a_sample)
    rows = clock.recipe.micro_batch * clock.accumulation
    timed = sum(counted) / len(counted) / rows
    usual = mean_tokens(facts) or timed
    rates = [step / tokens for step, tokens in zip(steps, counted, strict=True)]
    level = sum(steps) / sum(rates) * usual / timed
    return tuple(rate * level for rate in rates), usual


def _of_usual_places(steps: Sequence[float], places: Sequence[float], usual: float) -> tuple[float, ...]:
    """Seconds of each step if it had as many places for tokens as is usual.

    What a place takes is the median of the slopes between any two steps (Theil and Sen), no less than nothing and no
    more than the quickest step took for each of its places.
    """
    pairs = itertools.combinations(zip(steps, places, strict=True), 2)
    slopes = [(one[0] - other[0]) / (one[1] - other[1]) for one, other in pairs if one[1] != other[1]]
    most = min(step / place for step, place in zip(steps, places, strict=True))
    slope = min(most, max(0.0, median(slopes))) if slopes else 0.0
    return tuple(step + slope * (usual - place) for step, place in zip(steps, places, strict=True))
