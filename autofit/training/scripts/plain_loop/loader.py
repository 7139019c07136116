"""A script's loader: as the plan would have it, and what it tells of its own."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autofit.contract.recipe import Recipe

_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context",
    "generator", "prefetch_factor", "persistent_workers",
)  # fmt: skip


@dataclass(slots=True)
class Numbers:
    """Numbers of the loaders that a script prepares, in that order.

    One that it prepares anew once it trains, as for each epoch, has the number of the one that it prepared there first.
    """

    _count: int = 0
    _at: dict[tuple[Any, ...], deque[int]] = field(default_factory=dict)
    """By the calls that the script was in; those of several loaders, that of the last one at the end."""

    def take(self, *, anew: bool) -> int:
        """The number of a loader that is prepared now; ``anew`` where the script has trained."""
        frame: Any = sys._getframe(1)  # noqa: SLF001 - there is no other
        calls: list[Any] = []
        while frame is not None:
            calls += (frame.f_code, frame.f_lasti)
            frame = frame.f_back
        there = self._at.setdefault((*calls,), deque())
        if anew and there:
            there.rotate(-1)
        else:
            there.append(self._count)
            self._count += 1
        return there[-1]


def own_length(own: Any, accelerator: Any) -> int | None:
    """Micro-batches that a process takes of a script's own loader, as ``BatchSamplerShard`` counts them.

    ``None`` where that is not known, or the prepared loader makes the same ones and knows it.
    """
    if own.batch_size is None or not hasattr(own.dataset, "__len__"):
        return None
    count, rest = divmod(len(own), int(accelerator.num_processes))
    one_more = accelerator.even_batches or accelerator.process_index < rest
    return count + bool(rest and one_more and not own.drop_last)


def begins_at(loader: Any, row: int) -> bool:
    """Whether a loader that skips micro-batches can be made to begin at a row, which may be none of theirs."""
    from torch.utils.data import BatchSampler

    class FromRow(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            rows = itertools.islice(self.sampler, row, None)
            while taken := [*itertools.islice(rows, self.batch_size)]:
                if len(taken) == self.batch_size or not self.drop_last:
                    yield taken

    skips = loader.batch_sampler
    every = getattr(skips, "batch_sampler", None)
    if type(every) is not BatchSampler:
        return False
    skips.batch_sampler, skips.skip_batches = FromRow(every.sampler, every.batch_size, every.drop_last), 0
    return True


def rebuilt(loader: Any, *, rows: int, sampler: Any = None, changed: Mapping[str, Any] | None = None) -> Any:
    """A loader like another one, with other micro-batches, rows in another order, or other arguments."""
    from torch.utils.data import DataLoader, IterableDataset

    if loader.batch_size is None:
        return loader
    kept = {name: getattr(loader, name) for name in _KEPT}
    if not isinstance(loader.dataset, IterableDataset):
        kept["sampler"] = loader.sampler if sampler is None else sampler
    return DataLoader(loader.dataset, batch_size=rows, **{**kept, **(changed or {})})


def loader_changes(own: Any, recipe: Recipe) -> dict[str, Any]:
    """Arguments of a loader that are the plan's, in place of its own."""
    if not recipe.collate_wraps or own.collate_fn is None:
        return recipe.loader_arguments
    return {**recipe.loader_arguments, "collate_fn": recipe.collator(own.collate_fn)}
