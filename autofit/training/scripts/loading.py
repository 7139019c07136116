"""How fast a script's own loader makes micro-batches by itself, without a training step and without a device."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import psutil

from autofit.training.loader_waits import LoaderWaits
from autofit.training.row_order import own_batches

if TYPE_CHECKING:
    from autofit.contract.recipe import Recipe

SECONDS = 0.5
"""How long it is timed with each number of workers, at least; longer where a micro-batch takes longer."""
LONGEST_SECONDS = 20.0
"""After this no further number of workers is timed; a worker that gives nothing for as long is given up."""
_QUICK = 5e-5
"""Seconds a row below which nothing is gained by workers: handing a micro-batch over takes longer."""
_MORE = 1.1
_COUNTS = (1, 2, 4, 8, 16, 32)
SPLIT_BATCHES = "split_batches"


def splitting(config: Any) -> dict[str, bool]:
    """Whether several processes share each micro-batch of a loader, as Accelerate is told; else each takes its own."""
    return {SPLIT_BATCHES: True} if config.split_batches else {}


def rows_of_batches(loader: Any) -> int | None:
    """Rows that a loader says it puts into a micro-batch; ``None`` where it does not."""
    return getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)


def drops_last(loader: Any) -> bool:
    """Whether a loader leaves out the rows of an epoch that make no whole micro-batch."""
    return any(getattr(one, "drop_last", False) for one in (loader, getattr(loader, "batch_sampler", None)))


def rows_an_epoch(loader: Any, rows: int) -> int | None:
    """Rows that a loader gives in an epoch, on one process; ``None`` where it has no length.

    Args:
        loader: PyTorch's, or Accelerate's around it, as the script trains on it.
        rows: Of a micro-batch.
    """
    try:
        given, there = len(loader) * rows, len(loader.dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None
    return there if rows_of_batches(loader) is None or there <= given < there + rows else given


def length_of(loader: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """How long a Trainer trains by its arguments, as fields of :class:`autofit.contract.script.Script`."""
    steps, epochs = max(0, arguments["max_steps"]), float(arguments["num_train_epochs"])
    each = rows_an_epoch(loader, int(arguments["per_device_train_batch_size"]))
    return {"steps": steps, "epochs_rows": None if each is None else each * epochs, "epochs": epochs}


def ignores_workers(trainer: Any, loader: Any) -> str | None:
    """Why the number of workers is the script's own, in words: its Trainer makes its loader without its arguments'.

    Args:
        trainer: Whose loader may be the script's own.
        loader: That it has made.
    """
    from transformers import Trainer

    if getattr(trainer.get_train_dataloader, "__func__", None) is Trainer.get_train_dataloader:
        return None
    own, asked = trainer.args.dataloader_num_workers, int(loader.num_workers) + 1
    trainer.args.dataloader_num_workers = asked
    try:
        made = trainer.get_train_dataloader()
    finally:
        trainer.args.dataloader_num_workers = own
    takes = made.num_workers == asked
    return None if takes else f"its {type(trainer).__name__} makes its loader itself, without dataloader_num_workers"


def loading_of(loader: Any, rows: int, *, fixed: str | None = None) -> dict[str, Any]:
    """How a loader loads, timed alone with more and more workers until they make no more rows.

    Args:
        loader: PyTorch's, or Accelerate's around it, as the script trains on it.
        rows: Of a micro-batch.
        fixed: Why another number of workers can't be had, where the script itself stands against it.

    Returns:
        The fields of :class:`autofit.contract.script.Loading`.
    """
    found: dict[str, Any] = {
        "workers": int(loader.num_workers),
        "prefetch": loader.prefetch_factor,
        "persistent": bool(loader.persistent_workers),
        "pinned": bool(loader.pin_memory),
        "fixed": fixed or _fixed(loader),
        "cores": len(os.sched_getaffinity(0)),
    }
    rates: list[tuple[int, float]] = []
    if found["fixed"] is None:
        with contextlib.suppress(RuntimeError):  # workers that stand still: what was timed before them counts
            for count, rate, worker_bytes in _timed(loader, rows, found["cores"]):
                rates.append((count, rate))
                found["worker_bytes"] = max(found.get("worker_bytes", 0), worker_bytes)
    return {**found, "rows_per_second": rates}


def _fixed(loader: Any) -> str | None:
    """Why another number of workers can't be had."""
    from torch.utils.data import IterableDataset

    if isinstance(loader.dataset, IterableDataset):
        return "its data set is read in order, and each worker would read all of it"
    if not hasattr(loader.dataset, "__len__") or not len(loader.dataset):
        return "its data set tells no number of rows"
    return None


def _timed(loader: Any, rows: int, cores: int) -> Iterator[tuple[int, float, int]]:
    """Numbers of workers, rows a second with them, and what a worker held for itself."""
    made_itself = own_batches(loader)  # which may read each row
    until = time.monotonic() + LONGEST_SECONDS
    _, before, _ = first = 0, *_alone(loader, rows, 0, made_itself)
    yield first
    if 1 / before < _QUICK:
        return
    for count in [*dict.fromkeys(one for one in (*_COUNTS, loader.num_workers) if 0 < one <= cores)]:
        rate, worker_bytes = _alone(loader, rows, count, made_itself)
        yield count, rate, worker_bytes
        if (count > 1 and rate < _MORE * before) or time.monotonic() > until:
            return
        before = rate


def _alone(loader: Any, rows: int, workers: int, made_itself: list[list[int]]) -> tuple[float, int]:
    """Rows a second that a loader like another one makes, and the bytes that its largest worker holds for itself.

    What its sampler has ``made_itself`` are its micro-batches, where there are such.
    """
    from torch.utils.data import DataLoader

    places = itertools.islice(iter(loader.sampler), 0 if made_itself else 64 * rows * max(1, workers))
    alone = _Again([int(place) for place in places])
    order = {"batch_sampler": _Again(made_itself)} if made_itself else {"batch_size": rows, "sampler": alone}
    made: Any = DataLoader(
        loader.dataset,
        **order,
        num_workers=workers,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if workers else None,
        timeout=LONGEST_SECONDS if workers else 0,
    )
    batches = iter(made)
    burst = max(1, workers)  # workers hand over one micro-batch each, at about the same time
    for _ in range(burst):
        next(batches)
    began, done = time.perf_counter(), 0
    while not done or time.perf_counter() - began < SECONDS:
        for _ in range(burst):
            next(batches)
        done += burst
    seconds = time.perf_counter() - began
    held = max(map(own_bytes, multiprocessing.active_children()), default=0) if workers else 0
    del batches
    return done * rows / seconds, held


class _Again:
    """A sampler that hands out the same places, or micro-batches, again and again."""

    def __init__(self, places: list[Any]) -> None:
        self.places = places

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self.places)


def own_bytes(process: multiprocessing.process.BaseProcess) -> int:
    """Memory of a process that it shares with none; 0 where it has ended."""
    try:
        return int(psutil.Process(process.pid).memory_full_info().uss)
    except psutil.Error:
        return 0


def workers_bytes() -> int:
    """What the worker processes of this one hold for themselves, all together."""
    return sum(map(own_bytes, multiprocessing.active_children()))


def waits_of(recipe: Recipe, workers: int, prefetch: int | None) -> LoaderWaits:
    """What listens for the waits of a script's loader with so many workers, and so many micro-batches ahead of each."""
    script = recipe.facts.workload.script
    loading = None if script is None else script.loading
    row_seconds = None if loading is None else loading.row_seconds(workers)
    return LoaderWaits(
        workers=workers,
        ahead=workers * (prefetch or 2),
        batch_seconds=None if row_seconds is None else row_seconds * recipe.micro_batch,
    )
