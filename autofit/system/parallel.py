"""A function over a list, on every core: for arithmetic in plain Python, which threads would not speed up.

Each process has a socket of its own: one that is killed while it answers keeps nobody waiting.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import TypeVar, cast

from autofit.system.errors import MachineError
from autofit.system.processes import die_with_parent

Given = TypeVar("Given")
Found = TypeVar("Found")
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def on_every_core(function: Callable[[Given], Found], values: Sequence[Given]) -> list[Found]:
    """``[function(value) for value in values]``, by forked processes, which see what the function closes over.

    In a worker of a ``multiprocessing.Pool``, which may have no children, by that process alone.

    Raises:
        MachineError: One of the processes was killed.
    """
    cores = min(len(os.sched_getaffinity(0)), len(values))
    if cores < 2 or multiprocessing.current_process().daemon:
        return [function(value) for value in values]
    found: dict[int, Found] = {}
    left = iter(range(len(values)))
    with _workers(lambda place: function(values[place]), cores) as links:
        asked = {link: next(left) for link in links}
        for link, place in asked.items():
            with _told():
                link.send(place)
        while asked:
            for link in cast("list[Connection]", wait([*asked])):
                with _told():
                    well, answer = link.recv()
                if not well:
                    raise answer
                found[asked.pop(link)] = answer
                for place in itertools.islice(left, 1):
                    asked[link] = place
                    with _told():
                        link.send(place)
    return [found[place] for place in range(len(values))]


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """A process that is gone is told in words."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise MachineError(
            "a process that worked out a part of the answer was killed", hint="has the machine enough memory left?"
        ) from error


@contextlib.contextmanager
def _workers(function: Callable[[int], object], count: int) -> Iterator[list[Connection]]:
    """Forked processes that call a function, each with the number that its link is told."""
    forks = multiprocessing.get_context("fork")
    made: list[tuple[ForkProcess, Connection]] = []
    try:
        for _ in range(count):
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)  # a fork must not hear one as this process does
            try:
                ours, theirs = forks.Pipe()
                worker = forks.Process(target=_work, args=(function, theirs, os.getpid()), daemon=True)
                with theirs:
                    worker.start()
                made.append((worker, ours))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield [link for _, link in made]
    finally:
        for worker, link in made:
            link.close()
            worker.kill()
        for worker, _ in made:
            worker.join()


def _work(function: Callable[[int], object], link: Connection, parent: int) -> None:
    """In a forked process: signals end it, whose handlers here are its parent's; and so does its parent's end."""
    die_with_parent(parent, signal.SIGKILL)
    for number in _ENDINGS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDINGS)
    while True:
        place = link.recv()
        try:
            answer = True, function(place)
        except Exception as error:  # noqa: BLE001 - the parent raises it again
            error.add_note(traceback.format_exc())
            answer = False, error
        link.send(answer)
