"""A script's loader: as the plan would have it, and what it tells of its own."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import pickle
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autofit.training.scripts.plain_loop.by_number.text import line_of_calls
from autofit.training.scripts.plain_loop.some_rows import numpy_state, set_numpy_state
from autofit.training.tasks.loss_scale import of_a_library

if TYPE_CHECKING:
    from autofit.contract.recipe import Recipe

_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context",
    "generator", "prefetch_factor", "persistent_workers",
)  # fmt: skip

_FEW = 8
"""Rows of which three are chosen to ask a collator of."""
_SEEDS = 32
"""How often it is asked: it may blend now and then alone, and a random order of two rows is half of the time theirs."""
_LONGEST_SECONDS = 2.0


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


def blends_rows(loader: Any, places: Sequence[int]) -> bool:
    """Whether what a loader's collator makes of a row depends on the others of its micro-batch, as MixUp does.

    It is asked of one row beside a second and beside a third, by the same random numbers. Where it draws more of these
    for the one than for the other, or makes something else of the same rows each time, nothing is told.

    Args:
        loader: PyTorch's, or Accelerate's around it, as the script trains on it.
        places: Of some of its rows, the longest first; empty where they are not known.
    """
    import torch

    states = random.getstate(), numpy_state()
    with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):  # a script's collator can raise anything
        try:
            return _blends(loader.collate_fn, _some(loader, places))
        finally:
            random.setstate(states[0])
            set_numpy_state(states[1])
    return False


def counts_calls(loader: Any) -> str | None:
    """What a loader's own collator does by what it keeps of the micro-batches before, in words."""
    collate: Any = getattr(loader.collate_fn, "data_collator", loader.collate_fn)
    collate = collate.func if isinstance(collate, functools.partial) else collate
    calls = [collate]
    if not inspect.isroutine(collate):
        calls = [getattr(type(collate), name, None) for name in ("__call__", "torch_call")]
    for one in calls:
        if one is not None and not of_a_library(one) and (line := line_of_calls(one, collate)):
            return f"its collator ({one.__qualname__}) goes by what it keeps of the micro-batches before (line {line})"
    return None


@dataclass(frozen=True, slots=True)
class _Collated:
    """What a collator has made: its tensors by where they lie, and the state of random numbers before and after."""

    tensors: dict[str, Any]
    before: bytes
    after: bytes


def _some(loader: Any, places: Sequence[int]) -> list[Any]:
    """Some rows, the longest first where that is known."""
    if places:
        return [loader.dataset[place] for place in places[:_FEW]]
    return [*itertools.islice(iter(loader.dataset), _FEW)]


def _blends(collate: Any, some: list[Any]) -> bool:
    """The same of a collator and some rows: the first beside two others that are as large, if there are such."""
    alone, until = [_collated(collate, [row], 0).tensors for row in some], time.monotonic() + _LONGEST_SECONDS
    sizes = [{name: part.shape for name, part in one.items()} for one in alone]
    pairs = [*itertools.combinations(range(1, len(some)), 2)]
    second, third = next((pair for pair in pairs if sizes[pair[0]] == sizes[pair[1]]), pairs[0])
    one_each = [{name for name, part in alone[at].items() if len(part) == 1} for at in (0, second, third)]
    names = sorted(set.intersection(*one_each))  # of others there may be several for a row, or none
    for seed in range(_SEEDS):
        made, again = (_collated(collate, [some[0], some[second]], seed) for _ in range(2))
        other = _collated(collate, [some[0], some[third]], seed)
        if not _same(made.tensors, again.tensors) or time.monotonic() > until:
            return False
        if made.after == other.after and _unlike(_rows(made, names), _rows(other, names)):
            return True
        if made.before == made.after == other.after:  # it draws none
            return False
    return False


def _collated(collate: Any, rows: list[Any], seed: int) -> _Collated:
    """What a collator makes of rows by these random numbers, as if it had made nothing before."""
    import numpy as np
    import torch
    from torch.utils._pytree import keystr, tree_flatten_with_path

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - a script's own numbers may be those
    torch.manual_seed(seed)
    fresh = _fresh(collate, seed)
    before = _drawn(fresh)
    batch = fresh(copy.deepcopy(rows))
    found = tree_flatten_with_path(dict(batch) if isinstance(batch, Mapping) else batch)[0]
    tensors = {keystr(path): one for path, one in found if isinstance(one, torch.Tensor) and one.ndim}
    return _Collated(tensors, before, _drawn(fresh))


def _fresh(collate: Any, seed: int) -> Any:
    """A collator that keeps nothing of its calls in this one: what it counts, and what it draws by itself."""
    made = copy.copy(collate)
    for name, one in [*getattr(made, "__dict__", {}).items()]:
        if name == "data_collator":
            setattr(made, name, _fresh(one, seed))
        elif _draws(one):
            setattr(made, name, _seeded(one, seed))
    return made


def _draws(one: Any) -> bool:
    """Whether it makes random numbers by itself."""
    import numpy as np
    import torch

    return isinstance(one, random.Random | np.random.Generator | np.random.RandomState | torch.Generator)


def _seeded(one: Any, seed: int) -> Any:
    """What draws as another one does, from a seed on."""
    import numpy as np
    import torch

    if isinstance(one, np.random.Generator):
        return np.random.default_rng(seed)
    if isinstance(one, torch.Generator):
        return torch.Generator(one.device).manual_seed(seed)
    return random.Random(seed) if isinstance(one, random.Random) else np.random.RandomState(seed)


def _drawn(collate: Any) -> bytes:
    """The state of all random numbers that a collator may draw."""
    import torch

    inner = getattr(collate, "data_collator", collate)
    own = [one for one in getattr(inner, "__dict__", {}).values() if _draws(one)]
    return pickle.dumps((random.getstate(), numpy_state(), torch.get_rng_state().numpy(), own))


def _rows(made: _Collated, names: Sequence[str]) -> list[dict[str, Any]]:
    """What a collator has made of each of two rows; none where a tensor is not of both."""
    parts = {name: made.tensors[name] for name in names}
    if not parts or {len(one) for one in parts.values()} != {2}:
        return []
    return [{name: one[place] for name, one in parts.items()} for place in range(2)]


def _unlike(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Whether no row is among others of the same shapes: a collator may sort them."""
    shapes = [[part.shape for part in row.values()] for row in (*some, *others)]
    if not (some and others) or any(one != shapes[0] for one in shapes):
        return False
    return not any(_same(one, other) for one in some for other in others)


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether all tensors are the same."""
    import torch

    return one.keys() == other.keys() and all(torch.equal(part, other[name]) for name, part in one.items())
