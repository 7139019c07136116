"""What a tune tells while it runs; the seam between the story and whoever shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.contract.outcome import Purpose, Trial
    from autofit.contract.plan import Plan
    from autofit.space import Space


class Events(Protocol):
    """Told of everything that happens, in order."""

    def note(self, words: str) -> None:
        """Something worth a line."""

    def ready(self, facts: Facts, space: Space, known: int) -> None:
        """The facts are read; ``known`` trials were measured before."""

    def trial_begins(self, number: int, plan: Plan, purpose: Purpose, seconds_left: float | None) -> None:
        """A trial begins."""

    def trial_ends(self, trial: Trial, best: Trial | None) -> None:
        """A trial has ended; ``best`` is the fastest that fits so far."""

    def close(self) -> None:
        """Nothing more comes."""


class Silent:
    """Tells nobody."""

    def note(self, words: str) -> None:
        """Nothing."""

    def ready(self, facts: Facts, space: Space, known: int) -> None:
        """Nothing."""

    def trial_begins(self, number: int, plan: Plan, purpose: Purpose, seconds_left: float | None) -> None:
        """Nothing."""

    def trial_ends(self, trial: Trial, best: Trial | None) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
