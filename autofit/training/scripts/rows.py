"""The rows that a script trains on: how long they are, and in which order a measurement takes them.

Whether a plan fits is judged on the longest rows, so those of a sample come first, in the steps that are dropped as
warm-up. What is timed are rows in the script's own order, which is the batch to be expected.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autofit.training.timing import Clock

SAMPLED_ROWS = 1000
SAMPLING_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Some rows of a data set, evenly spread over it.

    Attributes:
        rows: In the whole data set; ``None`` where it has no length, and then nothing is sampled.
        sizes: Numbers in a row, all columns together, by its place in the data set.
    """

    rows: int | None
    sizes: Mapping[int, int]

    def longest(self) -> list[int]:
        """Places of the rows, the longest first."""
        return sorted(self.sizes, key=lambda place: -self.sizes[place])


def sample(trainer: Any) -> Sample:
    """Look at some rows of a Trainer's data set, for two seconds at most."""
    trainer._set_signature_columns_if_needed()  # noqa: SLF001 - which columns reach the model
    return sample_of(trainer.train_dataset, set(trainer._signature_columns or ()))  # noqa: SLF001 - as above


def sample_of(dataset: Any, columns: set[str]) -> Sample:
    """Look at some rows of a data set, for two seconds at most.

    Args:
        dataset: Of any kind; one without a length is not looked at.
        columns: Those that reach the model; a row that has none of them counts whole.
    """
    try:
        rows = len(dataset)
    except TypeError:
        return Sample(rows=None, sizes={})
    if not hasattr(dataset, "__getitem__") or not rows:
        return Sample(rows=rows or None, sizes={})
    sizes: dict[int, int] = {}
    until = time.monotonic() + SAMPLING_SECONDS
    places = list(range(0, rows, max(1, rows // SAMPLED_ROWS)))
    random.Random(0).shuffle(places)  # where time is up early, what was seen is spread over all rows
    for place in places:
        row = dataset[place]
        if isinstance(row, Mapping):
            kept = [value for name, value in row.items() if name in columns] or list(row.values())
        else:
            kept = [row]
        sizes[place] = sum(_numbers(value) for value in kept)
        if time.monotonic() > until:
            break
    return Sample(rows=rows, sizes=sizes)


def _numbers(value: Any) -> int:
    """How many numbers a value holds."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return math.prod(shape)
    if isinstance(value, Mapping):
        return sum(_numbers(part) for part in value.values())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return len(value) if value and isinstance(value[0], int | float) else sum(_numbers(part) for part in value)
    return int(isinstance(value, int | float))


def take_in_order(trainer: Any, seen: Sample, *, longest: int, then: int) -> None:
    """Have a Trainer train on its longest rows first, then on others in the order of its own sampler.

    Rows come again where there are too few. A data set without a length keeps its order.

    Args:
        trainer: About to train.
        seen: Some rows of its data set.
        longest: How many of the longest rows come first.
        then: How many rows follow.
    """
    from torch.utils.data import BatchSampler

    own = trainer._get_train_sampler  # noqa: SLF001 - a Trainer has no other place for it

    def ordered(dataset: Any = None) -> Any:
        usual = own(dataset)
        if usual is None or isinstance(usual, BatchSampler) or not seen.sizes:
            return usual
        return order(usual, seen, longest=longest, then=then)

    trainer._get_train_sampler = ordered  # noqa: SLF001 - as above


def order(usual: Iterable[int], seen: Sample, *, longest: int, then: int) -> Any:
    """A sampler of the longest rows, and then of rows in the order of the usual one; they come again as needed."""
    from torch.utils.data import Sampler

    first = itertools.islice(itertools.cycle(seen.longest()), longest)
    places = [*first, *itertools.islice(itertools.cycle([int(place) for place in usual]), then)]

    class Order(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(places)

        def __len__(self) -> int:
            return len(places)

    return Order()


class Tokens:
    """Counts the tokens of the timed micro-steps that are no padding; on the device, so that nothing waits for it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.micro_steps = 0
        self.total: Any = 0

    def count(self, inputs: Any) -> None:
        """A micro-batch."""
        if self.clock.done < self.clock.effort.warm_up or not isinstance(inputs, Mapping):
            return
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        if ids is None or not hasattr(ids, "numel"):
            return
        if mask is not None and getattr(mask, "shape", None) == ids.shape:
            self.total = self.total + mask.sum()
        else:
            self.total = self.total + ids.numel()
        self.micro_steps += 1

    def a_row(self, micro_batch: int) -> float | None:
        """Tokens of a row, the mean over the timed ones; ``None`` where there are none."""
        return float(self.total) / (self.micro_steps * micro_batch) if self.micro_steps else None
