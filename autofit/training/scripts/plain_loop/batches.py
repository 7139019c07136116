"""How a script takes the batches of its loader: whether how many it takes is its own number."""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import itertools
import sys
import threading
import weakref
from pathlib import Path
from types import FrameType, GeneratorType
from typing import Any

from autofit.training.scripts.plain_loop.by_number.loop import by_its_number

TURNS = "it steps one of its optimizers with this batch and another one with others, so whose turn it is is its own"
THREAD = "the script takes its batches in a thread of its own, so how many it has taken when a step ends is chance"
_BY_HAND = "it asks for each batch by itself, as by next(), so how many it takes is its own"
_IN_PART = "it takes its batches by {}, so how many it takes, or how large others beside them are, is its own"
_ENDS = {zip, itertools.islice, itertools.takewhile, itertools.zip_longest, itertools.chain}
"""What may end before a loader does, or give other batches, too."""
_PASSES = (*_ENDS, enumerate, map, filter, itertools.cycle, itertools.starmap, tuple, GeneratorType)
"""What asks another iterator for what it gives; a ``zip`` has a tuple of these."""
_DEPTH = 8


def own_number(giving: FrameType) -> str | None:
    """Why how many batches a script takes is its own, in words; ``None`` where its loop takes all that come.

    Args:
        giving: The frame of the generator that gives a batch now.
    """
    if threading.current_thread() is not threading.main_thread():
        return THREAD
    *generators, asking = _asking(giving)
    if asking is None:
        return _BY_HAND
    takers = _takers(generators)
    for one in takers & _ENDS:
        return _IN_PART.format(f"{one.__name__}()")
    path = Path(asking.f_code.co_filename)
    return by_its_number(asking, path, counts=enumerate in takers)


def _asking(giving: FrameType) -> list[Any]:
    """The frames of generators of which each asks the one before, and last that whose ``for`` asks these.

    ``None`` stands in its place where a call asks, such as ``next``.
    """
    frames = [giving]
    while (frame := frames[-1].f_back) is not None:
        if dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL"):
            if frame.f_code.co_name != "__next__":
                return [*frames, None]
        elif not frame.f_code.co_flags & inspect.CO_GENERATOR:
            return [*frames, frame]
        frames.append(frame)
    return frames


def _takers(generators: list[FrameType]) -> set[type]:
    """Kinds of what takes what generators give, one from the other; what these themselves take is not seen."""
    held: list[Any] = [one for one in gc.get_objects() if type(one) is GeneratorType and one.gi_frame in generators]
    kinds: set[type] = set()
    for _ in range(_DEPTH):
        held = [one for one in gc.get_referrers(*held) if type(one) in _PASSES] if held else []
        kinds |= {*map(type, held)}
    return kinds


def note_iterators(noted: list[Any]) -> None:
    """Keep weak references to the iterators of loaders that are not prepared."""
    from torch.utils.data import DataLoader

    owner: Any = DataLoader
    iterate = owner.__iter__

    @functools.wraps(iterate)
    def begun(loader: Any) -> Any:
        made = iterate(loader)
        asking = sys._getframe(1).f_globals["__name__"]  # noqa: SLF001 - there is no other
        if not asking.startswith("accelerate."):
            noted.append(weakref.ref(made))
        return made

    owner.__iter__ = begun
