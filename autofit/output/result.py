"""The answer: the winner as a document, its files, and the object that Python gets."""

from __future__ import annotations

import datetime as dt
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit import registry, space
from autofit._version import __version__
from autofit.contract.outcome import Measured, Promise, Trial
from autofit.contract.plan import Plan
from autofit.output.document import DOCUMENT_FILE, MODEL_FOLDER, Document, Estimated, Offer, Training, config_sha256
from autofit.output.emit import ARGUMENTS, REPORT, YAML, emit
from autofit.output.jobs import CheckJob
from autofit.output.reports import report
from autofit.output.wording import uncertain
from autofit.search.tradeoffs import Contribution, Point
from autofit.system.errors import EmissionError
from autofit.system.files import copy_folder, usable_folder, writing
from autofit.system.forking.server import ForkServer
from autofit.system.statistics import median
from autofit.system.units import size
from autofit.training.guard.equivalence import Guard
from autofit.training.runner import training_seconds
from autofit.training.scripts.plain_loop.patches import COUNTS

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from autofit.contract.facts import Facts
    from autofit.contract.technique import Choice
    from autofit.search.decision import Decision


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Result:
    """The answer of a tune.

    Attributes:
        folder: Where the files are.
        document: All that is in ``autofit.json``.
    """

    folder: Path
    document: Document

    def __repr__(self) -> str:
        promise, doubt = self.promise, uncertain(self.document)
        said = f"{promise.samples_per_second:.4g} samples/s, {size(promise.peak_bytes)}{doubt and f' ({doubt})'}"
        return f"Result({self.plan.words()}: {said}, in {str(self.folder)!r})"

    def _repr_html_(self) -> str:
        """The answer as a notebook shows it: the winner, the promise and the command that launches it."""
        return report.notebook(self.document, folder=str(self.folder))

    @property
    def plan(self) -> Plan:
        """The winner's value of each technique."""
        return self.document.plan

    @property
    def promise(self) -> Promise:
        """What training will do."""
        return self.document.promise

    def training_arguments(self, **others: Any) -> TrainingArguments:
        """``transformers.TrainingArguments`` with every tuned field, and ``others`` for the rest."""
        return registry.recipe_of(self.plan, self.document.facts).training_arguments(**others)

    def save(self, folder: str | Path) -> Path:
        """Copy the emitted files (not the trials) to another folder; into their own nothing is copied.

        Raises:
            InputError: The folder can't be written.
        """
        target = usable_folder(Path(folder))
        if target.samefile(self.folder):
            return target
        with writing(target):
            for name in (YAML, ARGUMENTS, REPORT, DOCUMENT_FILE):
                shutil.copyfile(self.folder / name, target / name)
        copy_folder(self.folder / MODEL_FOLDER, target / MODEL_FOLDER)
        return target


def _seen_changes(measured: Measured, guard: Guard | None) -> tuple[str, ...]:
    """What the winner's runs have shown to be another training than a script's own, as sentences."""
    said = [guard.split] if guard is not None and guard.split is not None else []
    said += [COUNTS] if COUNTS in measured.notes else []
    return tuple(f"{words[0].upper()}{words[1:]}." for words in said)


def _offers(plan: Plan, facts: Facts) -> tuple[Offer, ...]:
    """What every technique offers, and the plan's own values where they are none of these."""
    known = space.offers(facts)
    listed = {(name, choice.value) for name, choice in known}
    own = [(one.name, one.choice(plan[one.name], facts)) for one in registry.techniques()]
    every: list[tuple[str, Choice]] = [*known, *(pair for pair in own if (pair[0], pair[1].value) not in listed)]
    return tuple(
        Offer(technique=name, value=choice.value, kind=choice.kind.value, status=choice.status, reason=choice.reason)
        for name, choice in every
    )


def write_result(document: Document, folder: Path, server: ForkServer) -> Result:
    """Write the four files, each loaded back in a process of its own.

    Raises:
        MachineError: The disk is full, or the folder can't be written.
        EmissionError: A file is refused by the library that reads it.
    """

    def check(aside: Path) -> None:
        job = CheckJob(folder=str(aside.resolve()))
        with server.ask(folder, job) as answer:
            if answer is None or answer["error"]:
                raise EmissionError(f"the emitted files are refused: {answer['error'] if answer else 'no answer'}")

    with writing(folder):
        document = replace(document, config_sha256=config_sha256(folder))
    emit(document, folder, report.html(document, folder=str(folder)), check)
    return Result(folder=folder, document=document)


def compose(
    decision: Decision,
    facts: Facts,
    trials: Sequence[Trial],
    *,
    notes: Sequence[str],
    seconds: float,
    guard: Guard | None = None,
    front: Sequence[Point] = (),
    contributions: Sequence[Contribution] = (),
    tokens: float | None = None,
    price: float | None = None,
) -> Document:
    """The winner and its evidence as a document.

    Args:
        decision: Which plan won, and why.
        facts: What it won for.
        trials: All of them, in order.
        notes: What was said on the way.
        seconds: Wall seconds of the whole tune.
        guard: What a short training of the winner showed.
        front: What smaller ceilings would give.
        contributions: What each value of the winner is good for.
        tokens: Of a training whose hours are asked about.
        price: Of an hour of it.
    """
    measured = decision.measured
    walls = [trial.wall_seconds for trial in trials]
    spent = sum(walls)
    added = (
        ("the winner was not measured whole: its micro-steps were added up",) if measured.fidelity == "parts" else ()
    )
    recipe = registry.recipe_of(decision.plan, facts)
    return Document(
        autofit=__version__,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        model=facts.model,
        workload=facts.workload,
        hardware=facts.hardware,
        versions=dict(facts.packages),
        plan=decision.plan,
        promise=Promise(
            launch_path=facts.workload.launch_path,
            samples_per_second=measured.samples_per_second,
            tokens_per_second=measured.tokens_per_second,
            step_seconds=measured.step_seconds,
            step_seconds_spread=measured.step_seconds_spread,
            peak_bytes=measured.peak_bytes,
            allocated_bytes=measured.allocated_bytes,
            reserved_bytes=measured.reserved_bytes,
            outside_bytes=measured.outside_bytes,
            limit_bytes=facts.workload.limit_bytes,
            mfu=measured.mfu,
        ),
        reason=decision.reason,
        changes=(*_seen_changes(measured, guard), *registry.changes(decision.plan, facts)),
        script=recipe.emission.script,
        offers=_offers(decision.plan, facts),
        trials=tuple(trials),
        notes=tuple(dict.fromkeys((*notes, *added, *measured.notes))),
        front=tuple(front),
        contributions=tuple(contributions),
        guard=guard,
        training=Training.at(
            samples_per_second=measured.samples_per_second,
            tokens_per_second=measured.tokens_per_second,
            workload=facts.workload,
            tokens=tokens,
            price=price,
        ),
        seconds=seconds,
        training_share=sum(training_seconds(trial) for trial in trials) / max(spent, seconds, 1e-9),
        median_trial_seconds=median(walls) if walls else 0.0,
    )


def compose_estimate(
    plan: Plan,
    promise: Promise,
    facts: Facts,
    *,
    estimated: Estimated,
    reason: str,
    notes: Sequence[str],
    seconds: float,
) -> Document:
    """A predicted plan as a document: no trial, and marked as estimated.

    Args:
        plan: What is recommended.
        promise: What is predicted of it.
        facts: The card and the question.
        estimated: How far off the prediction may be.
        reason: Why this plan.
        notes: What was assumed.
        seconds: Wall seconds of the estimate.
    """
    return Document(
        autofit=__version__,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        model=facts.model,
        workload=facts.workload,
        hardware=facts.hardware,
        versions=dict(facts.packages),
        plan=plan,
        promise=promise,
        reason=reason,
        changes=tuple(registry.changes(plan, facts)),
        script=registry.recipe_of(plan, facts).emission.script,
        offers=_offers(plan, facts),
        trials=(),
        notes=tuple(dict.fromkeys(notes)),
        seconds=seconds,
        training_share=0.0,
        median_trial_seconds=0.0,
        estimated=estimated,
    )
