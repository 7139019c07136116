"""The rows that a script trains on: how long they are, and in which order a measurement takes them.

A row is as long as the script's own collator makes it: the numbers in all tensors of a batch of that row alone. Whether
a plan fits is judged on the longest rows, so they come first in each step that is dropped as warm-up. What is timed is
the batch to be expected: where the script shuffles, each step takes rows evenly from the short to the long ones of a
sample, in a random order; elsewhere they come in the script's own order. Which rows these are is chosen once, when
the script is described.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autofit.training.expected_rows import expected, tokens_of

if TYPE_CHECKING:
    from autofit.contract.facts import Script

SAMPLED_ROWS = 500
"""Rows that are put through the collator to know what is to be expected."""
LONGEST_ROWS = 64
SAMPLING_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Some rows of a data set.

    Attributes:
        rows: In the whole data set; ``None`` where it has no length, and then nothing is sampled.
        looked_at: Rows whose length was looked at, as they lie in the data set, to find the longest.
        sizes: Numbers in a batch of the row alone, all tensors together, by the row's place: of rows evenly spread.
        longest: Places of the longest rows that were found. The first ones together have the most of each tensor.
        longest_size: Numbers in a batch of the largest of them alone.
        tokens: Mean tokens of the spread rows that are no padding; ``None`` where they have none.
    """

    rows: int | None
    looked_at: int = 0
    sizes: Mapping[int, int] = field(default_factory=dict)
    longest: tuple[int, ...] = ()
    longest_size: int = 0
    tokens: float | None = None

    @property
    def spread(self) -> tuple[int, ...]:
        """Places of the spread rows, the shortest first."""
        return tuple(sorted(self.sizes, key=lambda place: self.sizes[place]))


def sample_of(dataset: Any, collate: Callable[[list[Any]], Any] | None) -> Sample:
    """Look at some rows of a data set, for some two seconds at most.

    Half of the time goes into finding the longest rows: by the columns of a table of ``datasets``, else by reading
    rows from all over the data set; the other half into making batches of single rows.

    Args:
        dataset: Of any kind; one without a length is not looked at.
        collate: Makes a batch of rows; ``None`` where the data set does so itself.
    """
    try:
        rows = len(dataset)
    except TypeError:
        return Sample(rows=None)
    if not hasattr(dataset, "__getitem__") or not rows:
        return Sample(rows=rows or None)
    until = time.monotonic() + SAMPLING_SECONDS / 2
    long, looked_at = _long_by_columns(dataset), rows
    places = list(range(rows))
    random.Random(0).shuffle(places)  # where time is up early, what was seen is spread over all rows
    if long is None:
        raw = {}
        for place in places:
            raw[place] = _numbers(dataset[place])
            if time.monotonic() > until:
                break
        places, looked_at = list(raw), len(raw)
        long = sorted(raw, key=lambda place: -raw[place])[:LONGEST_ROWS]
    until = time.monotonic() + SAMPLING_SECONDS / 2
    parts: dict[int, Mapping[str, int]] = {}
    tokens: dict[int, int | None] = {}
    for place in dict.fromkeys([*_alternately(places[:SAMPLED_ROWS], long)]):
        parts[place], tokens[place] = _alone(dataset[place], collate)
        if time.monotonic() > until:
            break
    spread = [place for place in places[:SAMPLED_ROWS] if place in parts]
    counted = [count for place in spread if (count := tokens[place]) is not None]
    longest = _worst_first(parts)
    return Sample(
        rows=rows,
        looked_at=looked_at,
        sizes={place: sum(parts[place].values()) for place in spread},
        longest=tuple(longest),
        longest_size=sum(parts[longest[0]].values()),
        tokens=sum(counted) / len(counted) if counted else None,
    )


def _alternately(some: Sequence[int], others: Sequence[int]) -> Iterator[int]:
    """Of the one, of the other: where time is up early, there are of both."""
    for pair in itertools.zip_longest(some, others):
        yield from (place for place in pair if place is not None)


def _worst_first(parts: Mapping[int, Mapping[str, int]]) -> list[int]:
    """Places of the longest rows; those that have the most of some tensor first, since each is padded by itself."""
    largest = sorted(parts, key=lambda place: -sum(parts[place].values()))
    names = dict.fromkeys(name for row in parts.values() for name in row)
    most = [max(largest, key=lambda place: parts[place].get(name, 0)) for name in names]
    return list(dict.fromkeys([*most, *largest]))[:LONGEST_ROWS]


def _long_by_columns(dataset: Any) -> list[int] | None:
    """Places of the rows with the longest lists or texts in a table of ``datasets``, none of which is made.

    ``None`` where the data set is no such table.
    """
    table, moved = getattr(dataset, "data", None), getattr(dataset, "_indices", None)
    if table is None or not hasattr(table, "column_names"):
        return None
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    found: list[int] = []
    for name in table.column_names:
        column = table.column(name)
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            lengths = pc.list_value_length(column)
        elif pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            lengths = pc.binary_length(column)
        else:
            continue
        counts = lengths.fill_null(0).to_numpy()
        if moved is not None:
            counts = counts[moved.column(0).to_numpy()]
        found += np.argsort(-counts, kind="stable")[:LONGEST_ROWS].tolist()
    return list(dict.fromkeys(found)) or None


def _alone(row: Any, collate: Callable[[list[Any]], Any] | None) -> tuple[Mapping[str, int], int | None]:
    """Numbers in each tensor of a batch of a row alone, and its tokens without padding."""
    batch = row
    if collate is not None:
        with contextlib.suppress(Exception):  # a collator that needs more rows: then the row counts as it lies
            batch = collate([row])
    if not isinstance(batch, Mapping):
        return {"": _numbers(batch)}, None
    counted = tokens_of(batch)
    return {str(name): _numbers(value) for name, value in batch.items()}, None if counted is None else int(counted[0])


def _numbers(value: Any) -> int:
    """How many numbers a value holds; of a text its characters."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return math.prod(shape)
    if isinstance(value, Mapping):
        return sum(_numbers(part) for part in value.values())
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Sequence):
        return len(value) if value and isinstance(value[0], int | float) else sum(_numbers(part) for part in value)
    return int(isinstance(value, int | float))


def take_in_order(trainer: Any, script: Script, *, a_step: int, warm_up: int, steps: int) -> None:
    """Have a Trainer train on the longest rows first, then on those that are to be expected; see :func:`order`.

    A data set without a length keeps its order, and so does one whose sampler makes the micro-batches itself.
    """
    _sample(trainer, script, lambda usual: order(usual, script, a_step=a_step, warm_up=warm_up, steps=steps))


def take_the_same(trainer: Any, script: Script, *, a_step: int, steps: int) -> None:
    """Have a Trainer train on the same rows in each of some optimizer steps, those that are to be expected.

    What keeps its order in :func:`take_in_order` does so here.
    """

    def again(usual: Iterable[int]) -> Any:
        first = [int(place) for place in order(usual, script, a_step=a_step, warm_up=0, steps=1)]
        return in_order(first * steps)

    _sample(trainer, script, again)


def _sample(trainer: Any, script: Script, change: Callable[[Iterable[int]], Any]) -> None:
    from torch.utils.data import BatchSampler

    own = trainer._get_train_sampler  # noqa: SLF001 - a Trainer has no other place for it

    def changed(dataset: Any = None) -> Any:
        usual = own(dataset)
        if usual is None or isinstance(usual, BatchSampler) or not script.longest_places:
            return usual
        return change(usual)

    trainer._get_train_sampler = changed  # noqa: SLF001 - as above


def order(usual: Iterable[int], script: Script, *, a_step: int, warm_up: int, steps: int) -> Any:
    """A sampler of the longest rows in each step of the warm-up, and then of the rows to be expected.

    Rows come again where there are too few.

    Args:
        usual: The script's own sampler.
        script: Knows the places of its rows.
        a_step: Rows of an optimizer step, as many as are run.
        warm_up: Steps that are dropped.
        steps: Steps that follow.
    """
    from torch.utils.data import RandomSampler

    longest = [*itertools.islice(itertools.cycle(script.longest_places), a_step)]
    if isinstance(usual, RandomSampler) and script.places:
        then = expected(script.places, a_step, steps)
    else:
        then = [*itertools.islice(itertools.cycle([int(place) for place in usual]), steps * a_step)]
    return in_order([*longest * warm_up, *then])


def in_order(places: Sequence[int]) -> Any:
    """A sampler of these places."""
    from torch.utils.data import Sampler

    class Order(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(places)

        def __len__(self) -> int:
            return len(places)

    return Order()
