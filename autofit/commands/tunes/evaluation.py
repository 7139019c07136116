"""The evaluation batch of a winner: as many rows as its trace says stay below the training, once a run has shown it.

Of a script it is the script's own, with which a run of the winner has to stay under the ceiling, or else a smaller one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from autofit.contract.facts import Facts
from autofit.contract.outcome import OUTCOME, Crashed, Measured, Outcome, OutOfMemory, TimedOut
from autofit.contract.plan import Plan
from autofit.costmodel.tracing.trace_store import evaluated_rows
from autofit.output.plan_words import outcome_words
from autofit.output.text import plural
from autofit.system.errors import MachineError
from autofit.system.forking.server import ForkServer
from autofit.system.units import size
from autofit.training.jobs import TrialJob
from autofit.training.timing import Effort

if TYPE_CHECKING:
    from autofit.search.decision import Decision

Try = Callable[[Plan, Facts, float], Outcome]
"""Runs some steps of a plan, between which a batch is evaluated, for so many seconds at most."""
Evaluated = tuple[Measured, int, list[str]]
UNEVALUATED = "the script's evaluation is not measured, nor held against the ceiling"
_EFFORT = Effort(min_steps=1, max_steps=1)
_SCATTER = 1.05
"""The resident set of a process is up to so many times that of another one that does the same."""
_PEAKS = ("peak_bytes", "allocated_bytes", "reserved_bytes", "outside_bytes", "host_bytes")


def evaluating(decision: Decision, facts: Facts, rows: int, run: Callable[[Facts], Outcome]) -> Evaluated:
    """Run a winner with so many rows evaluated at once, and where that takes more than its training, with fewer.

    Args:
        decision: The winner.
        facts: What it is for.
        rows: That stay below the training by its trace, or that a script evaluates; 0: no more than usual.
        run: Runs the winner.

    Returns:
        What was measured of it, the rows, 0 for what is usual, and what was tried in vain, a sentence each.
    """
    if facts.workload.script is not None:
        return _of_script(decision, facts, rows, run)
    mine = decision.measured
    said: list[str] = []
    while rows > evaluated_rows(decision.plan, facts):
        found = run(facts.evaluating(rows))
        if isinstance(found, Measured) and found.allocated_bytes <= _SCATTER * mine.allocated_bytes:
            return _with_peaks(mine, found), rows, said
        took = outcome_words(found)
        if isinstance(found, Measured):
            took = f"it takes {size(found.allocated_bytes)}, and training {size(mine.allocated_bytes)}"
        said.append(f"an evaluation batch of {rows} rows is not written: beside the winner {took}")
        rows //= 2
    return mine, 0, said


def scripts_own(facts: Facts) -> int:
    """Rows that a script evaluates at once, where that can be tried beside the winner; else 0."""
    script = facts.workload.script
    return 0 if script is None else script.evaluated_rows


def _of_script(decision: Decision, facts: Facts, rows: int, run: Callable[[Facts], Outcome]) -> Evaluated:
    """The same of a script's own rows; where they don't fit under the ceiling, fewer are tried."""
    mine, own, took = decision.measured, rows, ""
    while rows:
        found = run(facts.evaluating(rows))
        if isinstance(found, Measured) and found.peak_bytes <= facts.workload.limit_bytes:
            fewer = f"the script evaluates {plural(rows, 'row')} at once, and not {own}: {took}"
            return _with_peaks(mine, found), rows, [fewer] if rows < own else []
        took = f"{plural(rows, 'row')} beside the winner: {outcome_words(found)}"
        if isinstance(found, Measured):
            took = f"{plural(rows, 'row')} beside the winner take {size(found.peak_bytes)}"
        elif not isinstance(found, OutOfMemory):
            return mine, 0, [f"{UNEVALUATED}: {took}"]
        rows //= 2
    helps = "preprocess_logits_for_metrics can make them smaller"
    if facts.hardware.device == "cuda":
        helps += ", and eval_accumulation_steps keeps fewer of them on the device"
    kept = f"where compute_metrics reads the predictions of all rows, {helps}"
    return mine, 0, [f"the script's evaluation does not fit under the ceiling: {took}; {kept}"]


def _with_peaks(mine: Measured, found: Measured) -> Measured:
    """What was measured of a winner, with the larger peaks of the two."""
    peaks = {name: max(getattr(found, name), getattr(mine, name)) for name in _PEAKS}
    return dataclasses.replace(mine, **peaks)


def trials_of(folder: Path, config: Path, server: ForkServer) -> Try:
    """Runs each plan in a process of its own, and keeps no folder of it."""

    def run(plan: Plan, facts: Facts, seconds: float) -> Outcome:
        job = TrialJob(plan=plan, facts=facts, config=str(config.resolve()), effort=_EFFORT)
        try:
            with server.ask(folder, job, kill_after_seconds=seconds) as answer:
                if answer is None:
                    return TimedOut(limit_seconds=seconds, phase="evaluation")
                found: Outcome = OUTCOME.validate_python(answer)
                return found
        except MachineError as error:
            return Crashed(reason=error.message, log_tail="")

    return run
