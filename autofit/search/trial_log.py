"""The trials of a tune, in order: one owner adds to them, everyone else reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

from autofit.contract.outcome import Trial


class TrialLog(Sequence[Trial]):
    """The trials so far. Only the :class:`~autofit.search.loop.Campaign` adds; it is handed out as a ``Sequence``.

    Args:
        trials: Those that are known already.
    """

    def __init__(self, trials: Iterable[Trial] = ()) -> None:
        self._trials = list(trials)

    def add(self, trial: Trial) -> None:
        """Append a trial that has ended."""
        self._trials.append(trial)

    @overload
    def __getitem__(self, index: int) -> Trial: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Trial, ...]: ...
    def __getitem__(self, index: int | slice) -> Trial | tuple[Trial, ...]:
        return tuple(self._trials[index]) if isinstance(index, slice) else self._trials[index]

    def __len__(self) -> int:
        return len(self._trials)
