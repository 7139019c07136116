"""What a person sees on stderr while a tune runs: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Literal, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from autofit.contract.outcome import Measured
from autofit.output.plan_words import outcome_words, plan_words
from autofit.output.text import clean, count
from autofit.system import units

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.contract.outcome import Trial
    from autofit.contract.plan import Plan
    from autofit.space import Space

_WAITS = 0.1


def redirect_to_null(stream: TextIO | None) -> None:
    """Point a stream that can't be written at /dev/null, so that nothing fails when the interpreter flushes it."""
    with contextlib.suppress(OSError, ValueError):
        if stream is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class StderrConsole(Console):
    """A console on stderr that falls silent where nobody reads any more; rich's own would end the process."""

    def __init__(self) -> None:
        super().__init__(stderr=True, highlight=False)

    def on_broken_pipe(self) -> None:
        """Say nothing from now on, and keep nothing to be said at the end."""
        self.quiet = True
        redirect_to_null(sys.stderr)


class ConsoleEvents:
    """Shows a tune on a console.

    Args:
        console: Writes to stderr.
        most: Trials that the search may run.
    """

    def __init__(self, console: Console, most: int) -> None:
        self.console = console
        self.most = most
        self.searched = 0
        self.best: Trial | None = None
        self.now = "loading torch and transformers, reading the model"
        self.began = time.monotonic()
        self.seconds_left: float | None = None
        self._live = Live(
            get_renderable=self._status, console=console, refresh_per_second=4, transient=True, redirect_stdout=False
        )
        self._gone = False
        if console.is_terminal:
            self._live.start()

    def note(self, words: str) -> None:
        """A line of its own."""
        self._line(words)

    def ready(self, facts: Facts, space: Space, known: int) -> None:
        """The question, in full."""
        model, hardware, work = facts.model, facts.hardware, facts.workload
        self._line(
            f"{model.name}: {model.architecture}, {count(model.parameters)} parameters, {model.layers} layers"
            + ("" if model.task in {"causal-lm", "script"} else f", for {model.task}: {model.trained_on}")
        )
        self._line(
            f"on {hardware.name} ({hardware.device}), ceiling {units.size(work.limit_bytes)} "
            f"of {units.size(hardware.free_bytes)} free"
        )
        self._line(
            f"{model.rows_of(work.seq_len)}, global batch {work.global_batch}; {len(space.plans)} plans in the space"
            + (f"; {known} trials are known" if known else "")
        )

    def trial_begins(
        self, number: int, plan: Plan, purpose: Literal["search", "final"], seconds_left: float | None
    ) -> None:
        """The trial in hand."""
        self.now = f"trial {number}{' (playoff)' if purpose == 'final' else ''}: {plan_words(plan)}"
        self.began = time.monotonic()
        self.seconds_left = seconds_left

    def trial_ends(self, trial: Trial, best: Trial | None) -> None:
        """A line a trial."""
        self.searched += trial.purpose == "search"
        self.best = best
        outcome = trial.outcome
        if isinstance(outcome, Measured):
            result = f"{outcome.samples_per_second:9.3g} samples/s  {units.size(outcome.peak_bytes):>9}"
            if outcome.mfu is not None:
                result += f"  MFU {outcome.mfu:.0%}"
            if outcome.loader_seconds > _WAITS * outcome.step_seconds:
                waits = units.duration(outcome.loader_seconds)
                result += f"  waits {waits} of {units.duration(outcome.step_seconds)} for its rows"
            if best is not None and best.number == trial.number:
                result += "  best so far"
        else:
            result = outcome_words(outcome)
        purpose = "playoff" if trial.purpose == "final" else "trial  "
        self._line(f"{purpose} {trial.number:3d}  {plan_words(trial.plan):<34} {result}")

    def close(self) -> None:
        """Take the live panel away."""
        with contextlib.suppress(OSError):
            self._live.stop()

    def _line(self, words: str) -> None:
        """A line; where nobody reads any more, a tune goes on all the same."""
        if self._gone:
            return
        try:
            self.console.print(Text(clean(words)), soft_wrap=True)
        except OSError:
            self._gone = True

    def _status(self) -> Group:
        spent = time.monotonic() - self.began
        lines = [Text(f"  {self.now}  {units.duration(spent)}", style="bold")]
        left = "" if self.seconds_left is None else f", {units.duration(max(0.0, self.seconds_left - spent))} left"
        lines.append(Text(f"  {self.searched} of at most {self.most} trials{left}; Ctrl-C ends with the best so far"))
        if self.best is not None and isinstance(self.best.outcome, Measured):
            outcome = self.best.outcome
            lines.append(
                Text(
                    f"  best: {plan_words(self.best.plan)}, {outcome.samples_per_second:.3g} samples/s, "
                    f"{units.size(outcome.peak_bytes)}",
                    style="green",
                )
            )
        return Group(*lines)
