"""In which order a measurement takes rows of different lengths: the longest first, then those that are to be expected.

A few steps stand for many. Where rows are drawn at random, each step takes rows evenly from the short to the long
ones. Where a sampler puts rows of about the same length together, whole micro-batches of an epoch of its own are taken,
evenly from the short to the long ones; since they are unlike, a step is told by how many places for tokens it has.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autofit.training.ranks import own_rank

if TYPE_CHECKING:
    from autofit.training.timing import Listener

_LOOKED_AT = 1000
"""Micro-batches of a sampler that makes them itself, among which the largest are found."""
_GOLDEN = (math.sqrt(5) - 1) / 2
_MEAN_OF_A_TAIL = 1 - 1 / math.e
"""The quantile of an exponential tail that its mean is at: where the first step looks in each group of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Rows that a measurement wants.

    Attributes:
        micro_batch, accumulation: The plan's.
        micro_steps: Micro-batches that are run for an optimizer step.
        warm_up: Steps that are dropped.
        steps: Steps that follow.
        longest: Places of the longest rows; the first ones together make the largest micro-batch.
        places: Of some rows, evenly spread over the data set, the shortest first.
        ranks: Processes, of which each takes every so many-th micro-batch of a sampler.
        rank: The number of this one.
    """

    micro_batch: int
    accumulation: int
    micro_steps: int
    warm_up: int
    steps: int
    longest: Sequence[int]
    places: Sequence[int]
    ranks: int = 1
    rank: int = 0

    @property
    def a_step(self) -> int:
        """Rows of an optimizer step, as many as are run, of all ranks."""
        return self.micro_batch * self.micro_steps * self.ranks


def wanted(clock: Listener, steps: int, *, longest: Sequence[int], places: Sequence[int]) -> Wanted:
    """What a clock wants in its warm-up and in so many steps that follow."""
    return Wanted(
        micro_batch=clock.recipe.micro_batch,
        accumulation=clock.recipe.accumulation,
        micro_steps=clock.accumulation,
        warm_up=clock.effort.warm_up,
        steps=steps,
        longest=longest,
        places=places,
        ranks=clock.recipe.facts.workload.processes,
        rank=own_rank() or 0,
    )


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
        rows = [places[one] for one in _evenly(len(places), a_step, step)]
        numbers.shuffle(rows)
        taken += rows
    return taken


def _evenly(count: int, parts: int, step: int) -> list[int]:
    """Of each of as many equal parts of a list one place; in each step another one."""
    shift = (_MEAN_OF_A_TAIL + step * _GOLDEN) % 1
    return [int((one + shift) / parts * count) for one in range(parts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlike:
    """Micro-batches of a sampler that puts rows of about the same length together.

    Attributes:
        rows: Of the steps that are timed, in order.
        places: Places for tokens of each micro-batch of this rank in each of these steps, padded to its longest row.
        usual: The same of a micro-batch in the mean over the epoch.
    """

    rows: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    usual: float


def unlike(sampler: Any, asked: Wanted) -> Unlike:
    """Micro-batches of an epoch of a ``LengthGroupedSampler``, evenly from the short to the long ones."""
    sampler.batch_size = asked.micro_batch * asked.accumulation  # where fewer micro-steps stand for more
    lengths, rows = sampler.lengths, asked.micro_batch
    epoch = [int(place) for place in sampler]
    whole = len(epoch) // rows * rows
    made = [epoch[first : first + rows] for first in range(0, whole, rows)]
    made = made or [[*itertools.islice(itertools.cycle(epoch), rows)]]
    made.sort(key=lambda one: max(lengths[place] for place in one))
    sizes = [rows * int(max(lengths[place] for place in one)) for one in made]
    numbers = random.Random(0)
    taken: list[int] = []
    places: list[tuple[int, ...]] = []
    for step in range(asked.steps):
        chosen = _evenly(len(made), asked.micro_steps * asked.ranks, step)
        numbers.shuffle(chosen)
        taken += [place for one in chosen for place in made[one]]
        places.append(tuple(sizes[one] for one in chosen[asked.rank :: asked.ranks]))
    return Unlike(rows=tuple(taken), places=tuple(places), usual=sum(sizes) / len(sizes))


def order(usual: Any, asked: Wanted, told: Callable[[Unlike], None] = lambda _: None) -> Any:
    """A sampler of the longest rows in each step of the warm-up, and then of the rows to be expected.

    Rows come again where there are too few.

    Args:
        usual: The sampler of the training itself; ``None``: rows are drawn at random.
        asked: Which rows.
        told: Given what is taken where micro-batches are unlike.
    """
    from torch.utils.data import RandomSampler
    from transformers.trainer_pt_utils import LengthGroupedSampler

    longest = [*itertools.islice(itertools.cycle(asked.longest), asked.a_step)]
    if isinstance(usual, LengthGroupedSampler):
        found = unlike(usual, asked)
        told(found)
        then = [*found.rows]
    elif (usual is None or isinstance(usual, RandomSampler)) and asked.places:
        then = expected(asked.places, asked.a_step, asked.steps)
    else:
        then = [*itertools.islice(itertools.cycle([int(place) for place in usual]), asked.steps * asked.a_step)]
    return in_order([*longest * asked.warm_up, *then], of=usual)


def in_order(places: Sequence[int], *, of: Iterable[int] | None = None) -> Any:
    """A sampler of these places; ``own`` is the class of the sampler that it stands for."""
    from torch.utils.data import Sampler

    class Order(Sampler[int]):
        own = None if of is None else type(of).__name__

        def __iter__(self) -> Iterator[int]:
            return iter(places)

        def __len__(self) -> int:
            return len(places)

    return Order()


def sample(
    trainer: Any, change: Callable[[Any], Any], among: Callable[[list[list[int]]], list[list[int]]] | None = None
) -> None:
    """Have a Trainer take its rows by another sampler than its own.

    A Trainer of a class that makes its loader without asking for a sampler has that loader's changed.

    Args:
        trainer: Before it trains.
        change: Given its own sampler; returns the other one.
        among: Where a sampler makes the micro-batches of a loader itself: given those of an epoch, returns which are
            taken. ``None``: it keeps its order.
    """
    from torch.utils.data import BatchSampler
    from transformers import Trainer

    own = trainer._get_train_sampler  # noqa: SLF001 - a Trainer has no other place for it
    was_asked = False

    def changed(dataset: Any = None) -> Any:
        nonlocal was_asked
        was_asked = True
        usual = own(dataset)
        return usual if usual is None or isinstance(usual, BatchSampler) else change(usual)

    def made(loader: Callable[[], Any]) -> Any:
        found = loader()
        if not was_asked:
            _sample_in(found, change, among)
        return found

    trainer._get_train_sampler = changed  # noqa: SLF001 - as above
    usually = Trainer.get_train_dataloader
    if getattr(type(trainer), "get_train_dataloader", usually) is not usually:
        trainer.get_train_dataloader = functools.partial(made, trainer.get_train_dataloader)


def _sample_in(
    loader: Any, change: Callable[[Any], Any], among: Callable[[list[list[int]]], list[list[int]]] | None
) -> None:
    """The same of a loader that is made, PyTorch's or Accelerate's around it; of a stream nothing."""
    from torch.utils.data import BatchSampler

    holder, dealt, makes = _samplers_of(loader)
    if type(makes).__iter__ is BatchSampler.__iter__:
        makes.sampler = change(makes.sampler)
    elif among is not None and (batches := own_batches(loader)):
        chosen = _chosen(makes, among(batches))
        if dealt is makes:
            vars(holder)["batch_sampler"] = chosen  # a loader refuses another one by its name
        else:
            dealt.batch_sampler = chosen


def _samplers_of(loader: Any) -> tuple[Any, Any, Any]:
    """PyTorch's loader, what gives a process its micro-batches, and what makes them: none of a stream."""
    from torch.utils.data import BatchSampler, IterableDataset

    holder = getattr(loader, "base_dataloader", loader)
    dealt = getattr(holder, "batch_sampler", None)
    makes: Any = getattr(dealt, "batch_sampler", dealt)  # what Accelerate deals out to several processes
    streams = isinstance(getattr(holder, "dataset", None), IterableDataset) or not isinstance(makes, BatchSampler)
    return holder, dealt, None if streams else makes


def own_batches(loader: Any) -> list[list[int]]:
    """The first micro-batches of an epoch, where a loader's sampler makes them in a way of its own; else none."""
    from torch.utils.data import BatchSampler

    makes = _samplers_of(loader)[2]
    if makes is None or type(makes).__iter__ is BatchSampler.__iter__:
        return []
    return [[int(place) for place in one] for one in itertools.islice(makes, _LOOKED_AT)]


def _chosen(own: Any, batches: list[list[int]]) -> Any:
    """A sampler of these micro-batches in the place of the one that has made them."""
    from torch.utils.data import BatchSampler

    class Chosen(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            return iter(batches)

        def __len__(self) -> int:
            return len(batches)

    return Chosen(own.sampler, own.batch_size, own.drop_last)


def largest_first(asked: Wanted, batches: list[list[int]]) -> list[list[int]]:
    """Of a sampler's own micro-batches those with the longest rows in each step of the warm-up, then all in order."""
    a_step = asked.micro_steps * asked.ranks
    largest = by_longest(batches, (*asked.places, *reversed(asked.longest)))
    first = [*itertools.islice(itertools.cycle(largest[:a_step]), a_step)]
    return [*first * asked.warm_up, *itertools.islice(itertools.cycle(batches), asked.steps * a_step)]


def by_longest(batches: Sequence[Sequence[int]], places: Iterable[int]) -> list[list[int]]:
    """Micro-batches, those with the longest rows first, and the longest first in each.

    Args:
        batches: Places of rows.
        places: Of rows whose length is known, the shortest first.
    """
    sizes = {place: size for size, place in enumerate(places)}

    def known(place: int) -> int:
        return -sizes.get(place, -1)

    return sorted((sorted(one, key=known) for one in batches if one), key=lambda one: known(one[0]))
