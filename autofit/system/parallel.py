"""A function over a list, on every core: for arithmetic in plain Python, which threads would not speed up."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

Given = TypeVar("Given")
Found = TypeVar("Found")
_WORK: list[Callable[[object], object]] = []


def on_every_core(function: Callable[[Given], Found], values: Sequence[Given]) -> list[Found]:
    """``[function(value) for value in values]``, by forked processes, which see what the function closes over."""
    cores = min(len(os.sched_getaffinity(0)), len(values))
    if cores < 2:
        return [function(value) for value in values]
    _WORK.append(function)  # type: ignore[arg-type]
    try:
        with concurrent.futures.ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("fork")) as pool:
            return list(pool.map(_call, values))  # type: ignore[arg-type]
    finally:
        _WORK.pop()


def _call(value: object) -> object:
    return _WORK[-1](value)
