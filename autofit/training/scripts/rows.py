"""The rows that a script trains on: how long they are, and in which order a measurement takes them.

A row is as long as the script's own collator makes it: the numbers in all tensors of a batch of that row alone. Whether
a plan fits is judged on the longest rows, so they come first in each step that is dropped as warm-up. What is timed is
the batch to be expected: where the script shuffles, each step takes rows evenly from the short to the long ones of a
sample, in a random order; elsewhere they come in the script's own order. Which rows these are is chosen once, when
the script is described.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autofit.system.units import duration
from autofit.training.expected_rows import Tokens, tokens_of
from autofit.training.row_order import Wanted, by_longest, in_order, largest_first, order, own_batches, sample

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
        counts: Tokens of the spread rows that are no padding, in the order of ``spread``; empty where they have none.
    """

    rows: int | None
    looked_at: int = 0
    sizes: Mapping[int, int] = field(default_factory=dict)
    longest: tuple[int, ...] = ()
    longest_size: int = 0
    counts: tuple[int, ...] = ()

    @property
    def tokens(self) -> float | None:
        """Mean tokens of the spread rows that are no padding; ``None`` where they have none."""
        return sum(self.counts) / len(self.counts) if self.counts else None

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
    longest = _worst_first(parts)
    sizes = {place: sum(parts[place].values()) for place in spread}
    counted = (tokens[place] for place in sorted(sizes, key=lambda place: sizes[place]))
    return Sample(
        rows=rows,
        looked_at=looked_at,
        sizes=sizes,
        longest=tuple(longest),
        longest_size=sum(parts[longest[0]].values()),
        counts=tuple(count for count in counted if count is not None),
    )


def of_one_batch(rows: Sample, loader: Any) -> Sample:
    """The same with the longest rows of one micro-batch, where a loader makes these itself: others may not go along."""
    batches = by_longest(own_batches(loader), (*rows.spread, *reversed(rows.longest)))
    return dataclasses.replace(rows, longest=tuple(batches[0])) if batches and rows.longest else rows


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


def take_in_order(trainer: Any, asked: Wanted, tokens: Tokens) -> None:
    """Have a Trainer train on the longest rows first, then on those that are to be expected.

    A data set without a length keeps its order. A loader whose sampler makes the micro-batches itself keeps these, the
    largest first.

    Args:
        trainer: Before it trains.
        asked: Which rows.
        tokens: Told where micro-batches are unlike.
    """
    if asked.longest:
        sample(trainer, lambda usual: order(usual, asked, tokens.take), lambda made: largest_first(asked, made))


def take_the_same(trainer: Any, asked: Wanted) -> None:
    """Have a Trainer train on the same rows in each of some optimizer steps, those that are to be expected.

    They are the same whether or not its sampler puts rows of about the same length together. What keeps its order in
    :func:`take_in_order` does so here.

    Args:
        trainer: Before it trains.
        asked: Which rows, of steps alike.
    """
    from transformers.trainer_pt_utils import LengthGroupedSampler

    def again(usual: Iterable[int]) -> Any:
        once = dataclasses.replace(asked, warm_up=0, steps=1)
        at_random = isinstance(usual, LengthGroupedSampler) and once.places
        return in_order([*order(None if at_random else usual, once)] * asked.steps, of=usual)

    def made_again(batches: list[list[int]]) -> list[list[int]]:
        a_step = asked.micro_steps * asked.ranks
        return [*itertools.islice(itertools.cycle(batches), a_step)] * asked.steps

    if asked.longest:
        sample(trainer, again, made_again)


LENGTHS_SECONDS = 60.0
"""Reading the lengths of all rows takes no longer, or rows are not grouped by them."""


def why_ungrouped(trainer: Any, dataset: Any, row_seconds: float | None) -> str | None:
    """Why a Trainer can't take rows of about the same length together, in words; ``None`` where it can.

    Args:
        trainer: The script's.
        dataset: What its loader reads.
        row_seconds: What making a row takes; ``None``: not known.
    """
    from transformers import Trainer

    kind = type(trainer)
    for name in ("_get_train_sampler", "get_train_dataloader"):
        if getattr(kind, name) is not getattr(Trainer, name):
            return f"{kind.__name__} chooses its rows itself"
    if not hasattr(dataset, "__len__") or not len(dataset):
        return "its data set tells no number of rows"
    if trainer.args.length_column_name in (getattr(dataset, "column_names", None) or ()):
        return None
    seconds = (row_seconds or 0.0) * len(dataset)
    if seconds > LENGTHS_SECONDS:
        return f"a Trainer would read all {len(dataset):,} rows for their lengths first, in {duration(seconds)}"
    return _why_unread(dataset, next(iter(getattr(trainer.processing_class, "model_input_names", ())), "input_ids"))


def _why_unread(dataset: Any, name: str) -> str | None:
    """Why a Trainer can't read the lengths of all rows, in words."""
    first = dataset[0]
    if not isinstance(first, Mapping) or name not in first:
        return f"a row of its data set has no {name}, whose length a Trainer looks at"
    if not hasattr(dataset, "__iter__") and not _ends(dataset):
        return "a Trainer would read its rows for ever: its data set raises no IndexError behind the last one"
    return None


def _ends(dataset: Any) -> bool:
    """Whether going through a data set by its numbers comes to an end."""
    try:
        dataset[len(dataset)]
    except IndexError:
        return True
    except Exception:  # noqa: BLE001 - a data set's own code can raise anything; going through it raises the same
        return False
    return False


def rows_in(batch: Any) -> int:
    """Rows of a micro-batch; 0 of what is no mapping of tensors."""
    tensors = batch.values() if isinstance(batch, Mapping) else ()
    return next((len(one) for one in tensors if getattr(one, "ndim", 0)), 0)
