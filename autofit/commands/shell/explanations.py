"""Notes and errors of a tune, from its trials: disturbed trials, traced against measured peaks, why nothing won."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from autofit.contract.outcome import Crashed, Diverged, Measured, Outcome, OutOfMemory, TimedOut, Trial, Unsupported
from autofit.output.plan_words import outcome_words, plan_words
from autofit.search.decision import nearest_change, shorter_rows
from autofit.system import units
from autofit.system.errors import AutofitError, InputError, MachineError, NothingFits
from autofit.system.statistics import median
from autofit.training.runner import trial_folder

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.contract.plan import Plan
    from autofit.costmodel.forecast import Forecast
    from autofit.search.surrogate.peak_model import PeakPosterior
    from autofit.space import Space

NOTICEABLE = 0.1
"""Median CPU share of other processes from which a note is made."""
_OF_THE_MACHINE = (
    "cuda", "nccl", "cublas", "cudnn", "acceleratorerror", "memoryerror", "dataloader worker", "no space left",
    "killed by", "ended with status", "a package is missing",
)  # fmt: skip
"""What the reason of a failure says where it may be no fault of the user's script."""


def disturbance_notes(trials: Sequence[Trial]) -> list[str]:
    """Which trials other processes disturbed, and how much of the CPU they used, a sentence each."""
    notes = []
    repeated = [
        (one.number, one.outcome.disturbance)
        for one, after in itertools.pairwise(trials)
        if isinstance(one.outcome, Measured)
        and one.outcome.disturbed
        and one.plan == after.plan
        and one.purpose == after.purpose == "search"
    ]
    if repeated:
        which = f"trial{'' if len(repeated) == 1 else 's'} {', '.join(str(number) for number, _ in repeated)}"
        most = max(share for _, share in repeated)
        notes.append(f"other processes used up to {most:.0%} of the CPU during {which}: measured again")
    shares = [trial.outcome.disturbance for trial in trials if isinstance(trial.outcome, Measured)]
    if shares and median(shares) > NOTICEABLE:
        notes.append(
            f"other processes used {median(shares):.0%} of the CPU while the trials ran: "
            "training is faster on an idle machine"
        )
    return notes


def peak_correction(found: PeakPosterior | None, facts: Facts) -> str | None:
    """How the measured peaks differ from the traced ones, in a sentence; ``None`` where they are too few to tell."""
    if found is None or found.count < 2 or found.slope <= 0 or found.heap_share < 0:
        return None
    kernels = "".join(
        f", and {units.size(taken)} for the kernels of {kind.removeprefix('matmul ')}"
        for kind, taken in facts.kernel_overhead_bytes.items()
        if taken
    )
    heap = f" + {found.heap_share:.2g} x the activations that a heap has held" if found.heap_share else ""
    sign = "-" if found.offset_bytes < 0 else "+"
    return (
        f"measured peaks are {found.slope:.3g} x the traced ones{heap} {sign} "
        f"{units.size(abs(found.offset_bytes))}{kernels}, give or take {found.scatter:.1%} ({found.count} trials)"
    )


def no_winner(
    trials: Sequence[Trial],
    refused: Mapping[Plan, str],
    facts: Facts,
    space: Space,
    *,
    forecast: Forecast | None,
    trials_folder: Path,
    timeout: float | None = None,
) -> AutofitError:
    """Why there is no winner: no plan fits, or none could be measured.

    Args:
        trials: All that was tried.
        refused: Plans that were measured and do not train like the baseline, with the reason.
        facts: What the tune was about.
        space: The plans that might have been tried.
        forecast: What their traces say.
        trials_folder: Where the logs are.
        timeout: The time budget in seconds, where it is spent.
    """
    limit_bytes = facts.workload.limit_bytes
    if refused:
        plan, why = next(iter(refused.items()))
        return MachineError(
            f"no measured plan trains like the float32 baseline: {plan_words(plan)}: {why}",
            hint="is it a bug of a library? --no-guard writes the fastest plan all the same",
        )
    if not trials and forecast is not None:
        smallest = int(np.nanargmin(forecast.device_bytes))
        needed = units.size(float(forecast.device_bytes[smallest]))
        helps = [f"a ceiling of {needed} (--memory-limit)", shorter_rows(facts), "--allow exact,numeric,method"]
        return NothingFits(
            f"Nothing fits, by what the plans' traces say: the smallest needs about {needed} under a ceiling of "
            f"{units.size(limit_bytes)} ({space.plans[smallest].words()}). What may help: "
            f"{', or '.join(filter(None, helps))}."
        )
    if not trials or any(_shows_memory(trial.outcome) for trial in trials):
        said = f"Nothing fits. {nearest_change(trials, space, limit_bytes, facts)}"
        return NothingFits(said, hint=None if timeout is None else _cut_short(trials, space, timeout))
    if timeout is not None and isinstance(trials[-1].outcome, TimedOut):
        return _deadline(trials, trials_folder, timeout)
    return _none_measured(trials, trials_folder, scripted=facts.workload.script is not None)


def _cut_short(trials: Sequence[Trial], space: Space, timeout: float) -> str:
    """What a short time has left out, in a sentence."""
    tried = len({trial.plan for trial in trials})
    return (
        f"the search ended after {tried} of {len(space.plans)} plans, by --timeout ({units.duration(timeout)}): give "
        "it more, and --resume, to try the others"
    )


def _deadline(trials: Sequence[Trial], trials_folder: Path, timeout: float) -> MachineError:
    """The time budget was spent before a plan was measured."""
    last = trials[-1]
    assert isinstance(last.outcome, TimedOut)
    which = "the only trial" if len(trials) == 1 else f"the last of {len(trials)} trials"
    return MachineError(
        f"--timeout: {units.duration(timeout)} are spent, and no plan was measured: {which}, "
        f"{plan_words(last.plan)}, was ended in {last.outcome.phase} "
        f"after {units.duration(last.outcome.limit_seconds)}",
        hint="give a longer --timeout with --resume, or none; "
        f"the trial's logs are in {trial_folder(trials_folder, last.number)}",
    )


def _none_measured(trials: Sequence[Trial], trials_folder: Path, *, scripted: bool) -> InputError | MachineError:
    """Why every trial failed."""
    last = trials[-1]
    logs = f"its logs are in {trial_folder(trials_folder, last.number)}"
    if all(isinstance(trial.outcome, Diverged) for trial in trials):
        ask = "does the script's loss stay finite by itself?" if scripted else "are the sizes in its config right?"
        return InputError(f"every plan that was tried {outcome_words(last.outcome)}", hint=f"{ask} {logs}")
    reasons = {trial.outcome.reason for trial in trials if isinstance(trial.outcome, Crashed)}
    if len(reasons) == 1 and all(isinstance(trial.outcome, Crashed) for trial in trials):
        reason = reasons.pop()
        crashed = f"every plan that was tried crashed alike: {reason}"
        if not scripted:
            ask = "does the model train at all, and are the sizes in its config right?"
        elif reason.startswith("FileNotFoundError"):
            ask = "nothing is saved while a script is tuned: does it read what it has saved?"
        else:
            ask = "does the script train by itself with these arguments?"
        kind = InputError if scripted and not _of_the_machine(reason) else MachineError
        return kind(crashed, hint=f"{ask} {logs}")
    refused = {trial.outcome.reason for trial in trials if isinstance(trial.outcome, Unsupported)}
    if scripted and len(refused) == 1 and all(isinstance(trial.outcome, Unsupported) for trial in trials):
        reason = refused.pop()
        kind = MachineError if _of_the_machine(reason) else InputError
        return kind(f"no plan could be measured: {reason}", hint=logs)
    why = getattr(last.outcome, "reason", last.outcome.kind.replace("_", " "))
    return MachineError(f"no plan could be measured; the last one, {last.plan.words()}: {why}", hint=logs)


def _of_the_machine(reason: str) -> bool:
    """Whether a failure of a user's script may be no fault of the script."""
    return any(word in reason.lower() for word in _OF_THE_MACHINE)


def _shows_memory(outcome: Outcome) -> bool:
    """Whether an outcome says how much memory its plan needs."""
    return isinstance(outcome, Measured) or (isinstance(outcome, OutOfMemory) and not outcome.external_pressure)
