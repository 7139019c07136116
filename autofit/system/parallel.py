"""A function over a list, on every core: for arithmetic in plain Python, which threads would not speed up."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

Given = TypeVar("Given")
Found = TypeVar("Found")
_WORK: list[Callable[[object], object]] = []
"""In a forked process: what it is to do."""


def on_every_core(function: Callable[[Given], Found], values: Sequence[Given]) -> list[Found]:
    """``[function(value) for value in values]``, by forked processes, which see what the function closes over.

    In a worker of a ``multiprocessing.Pool``, which may have no children, by that process alone.
    """
    cores = min(len(os.sched_getaffinity(0)), len(values))
    if cores < 2 or multiprocessing.current_process().daemon:
        return [function(value) for value in values]
    begin = functools.partial(_WORK.append, function)  # type: ignore[arg-type]
    forks = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(cores, forks, initializer=begin) as pool:
        return list(pool.map(_call, values))  # type: ignore[arg-type]


def _call(value: object) -> object:
    return _WORK[-1](value)
