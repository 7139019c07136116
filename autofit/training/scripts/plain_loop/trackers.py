"""What stands for the trackers of a plain loop that is described or measured: nobody is told of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self


class Idle:
    """A tracker, or whatever a script asks of one: it takes every call, and does nothing.

    Args:
        name: What the script finds the tracker by.
    """

    def __init__(self, name: str = "untracked") -> None:
        self.name = name

    def __getattr__(self, name: str) -> Idle:
        if name.startswith("__"):
            raise AttributeError(name)
        return Idle()

    def __call__(self, *_: Any, **__: Any) -> Idle:
        """Take a call of whatever was asked for."""
        return Idle()

    def __getitem__(self, _: Any) -> Idle:
        return Idle()

    def __setitem__(self, *_: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __fspath__(self) -> str:
        return self.name

    __str__ = __fspath__


def init_trackers(accelerator: Any, *_: Any, **__: Any) -> None:
    """Stand for ``Accelerator.init_trackers``: those that the script asks for are there, and idle."""
    names = (getattr(one, "value", None) or getattr(one, "name", one) for one in accelerator.log_with)
    accelerator.trackers = [Idle(str(name)) for name in names]
