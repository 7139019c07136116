"""Notes and errors of a tune, from its trials: disturbed trials, traced against measured peaks, why nothing won."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from autofit.contract.outcome import Crashed, Measured, Outcome, OutOfMemory, Trial
from autofit.search.decision import nearest_change
from autofit.system import units
from autofit.system.errors import AutofitError, MachineError, NothingFits
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
    """How the measured peaks differ from the traced ones, in a sentence; ``None`` with fewer than two of them."""
    if found is None or found.count < 2:
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
) -> AutofitError:
    """Why there is no winner: no plan fits, or none could be measured."""
    limit_bytes = facts.workload.limit_bytes
    if refused:
        plan, why = next(iter(refused.items()))
        return MachineError(
            f"no measured plan trains like the float32 baseline: {plan.words()}: {why}",
            hint="is it a bug of a library? --no-guard writes the fastest plan all the same",
        )
    if not trials and forecast is not None:
        smallest = int(np.nanargmin(forecast.device_bytes))
        needed = units.size(float(forecast.device_bytes[smallest]))
        return NothingFits(
            f"Nothing fits, by what the plans' traces say: the smallest needs about {needed} under a ceiling of "
            f"{units.size(limit_bytes)} ({space.plans[smallest].words()}). What may help: a ceiling of "
            f"{needed} (--memory-limit), a shorter sequence (--seq-len), or --allow exact,numeric,method."
        )
    if not trials or any(_shows_memory(trial.outcome) for trial in trials):
        return NothingFits(f"Nothing fits. {nearest_change(trials, space, limit_bytes, facts)}")
    return _none_measured(trials, trials_folder)


def _none_measured(trials: Sequence[Trial], trials_folder: Path) -> MachineError:
    """Why every trial failed."""
    last = trials[-1]
    logs = f"its logs are in {trial_folder(trials_folder, last.number)}"
    reasons = {trial.outcome.reason for trial in trials if isinstance(trial.outcome, Crashed)}
    if len(reasons) == 1 and all(isinstance(trial.outcome, Crashed) for trial in trials):
        return MachineError(
            f"every plan that was tried crashed alike: {reasons.pop()}",
            hint=f"does the model train at all, and are the sizes in its config right? {logs}",
        )
    why = getattr(last.outcome, "reason", last.outcome.kind.replace("_", " "))
    return MachineError(f"no plan could be measured; the last one, {last.plan.words()}: {why}", hint=logs)


def _shows_memory(outcome: Outcome) -> bool:
    """Whether an outcome says how much memory its plan needs."""
    return isinstance(outcome, Measured) or (isinstance(outcome, OutOfMemory) and not outcome.external_pressure)
