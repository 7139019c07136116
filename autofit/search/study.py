"""The Optuna study in the output folder: an index of the trials, never their truth.

Each trial's ``outcome.json`` is the truth. The study is what Optuna's samplers, and ``optuna-dashboard``, read; its
journal (:mod:`autofit.search.journal`) is set aside and written anew from the outcomes where it can't be read or
differs from them.

How an outcome is told: a measured plan is COMPLETE with its samples/s; one that ran out of memory is PRUNED with a
violated constraint, and so needs no invented value; one that timed out is PRUNED; all else is FAIL. Optuna's TPE
ranks violated constraints last and PRUNED before them, and ignores FAIL (``_split_trials`` in
``optuna/samplers/_tpe/sampler.py`` of 5.0); its GP reads COMPLETE alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, RDBStorage
from optuna.study import StudyDirection
from optuna.trial import TrialState

from autofit.contract.outcome import Measured, Outcome, OutOfMemory, TimedOut, Trial
from autofit.search import journal
from autofit.space import Space
from autofit.system.errors import InputError, MachineError

STUDY = "autofit"
CONSTRAINT = "memory"
"""``peak / ceiling - 1``: above zero where a plan did not fit."""
STARTED = "started"
"""The kind of a trial that was asked for and not told yet; one that stays so was interrupted."""
REJECTED = "rejected"
"""The kind of a proposal that was answered without running it."""
_LEAST_EXCESS = 0.01
Agrees = Callable[[optuna.Study], bool]
"""Whether all that a study holds is true."""
UNREADABLE = (
    LookupError, ValueError, TypeError, AttributeError, AssertionError, ArithmeticError, RecursionError,
    optuna.exceptions.OptunaError,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An outcome as a study holds it."""

    state: TrialState
    value: float | None
    constraint: float | None
    attributes: dict[str, Any]


def record(trial: Trial, limit_bytes: int) -> Record:
    """How a trial is told to a study."""
    outcome: Outcome = trial.outcome
    attributes: dict[str, Any] = {"kind": _kind(outcome), "plan": dict(trial.plan)}
    state, value, constraint = TrialState.FAIL, None, None
    match outcome:
        case Measured():
            attributes["peak_bytes"] = outcome.peak_bytes
            # what the tensors and the context held: reserved memory depends on what came before
            attributes["needed_bytes"] = outcome.allocated_bytes + outcome.outside_bytes
            attributes["relative_spread"] = outcome.step_seconds_spread / outcome.step_seconds
            if outcome.disturbed:
                attributes["disturbance"] = outcome.disturbance
            state, value = TrialState.COMPLETE, outcome.samples_per_second
            constraint = outcome.peak_bytes / limit_bytes - 1
        case OutOfMemory():
            attributes["where"] = outcome.where
            attributes["peak_bytes"] = outcome.peak_bytes
            if not outcome.external_pressure:  # which says nothing of the plan
                state, constraint = TrialState.PRUNED, max(outcome.peak_bytes / limit_bytes - 1, _LEAST_EXCESS)
        case TimedOut():
            state = TrialState.PRUNED
    return Record(state=state, value=value, constraint=constraint, attributes=attributes)


def _kind(outcome: Outcome) -> str:
    return "squeezed" if isinstance(outcome, OutOfMemory) and outcome.external_pressure else outcome.kind


def tell_trial(study: optuna.Study, asked: optuna.Trial, trial: Trial, limit_bytes: int) -> None:
    """Finish a trial that was asked for; its number comes last of the attributes, and says that they are whole."""
    told = record(trial, limit_bytes)
    if told.constraint is not None:
        asked.set_constraint(CONSTRAINT, told.constraint)
    for name, value in told.attributes.items():
        asked.set_user_attr(name, value)
    asked.set_user_attr("number", trial.number)
    study.tell(asked, told.value, told.state)


def distributions(space: Space) -> dict[str, CategoricalDistribution]:
    """Each technique as a categorical parameter."""
    return {name: CategoricalDistribution(values) for name, values in space.domains.items()}


@contextlib.contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna without its chatter, its log level put back afterwards."""
    logger = logging.getLogger("optuna")
    level = logger.level
    logger.setLevel(max(logger.getEffectiveLevel(), logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def storage_errors(where: object) -> Iterator[None]:
    """A disk or a database that fails, in words.

    Raises:
        MachineError: The study could not be read or written.
    """
    hint = "free some space or give another folder by --output; what was measured so far is kept, and --resume goes on"
    try:
        with quiet_optuna():
            yield
    except OSError as error:
        raise MachineError(f"{where} can't be read or written: {error.strerror or error}", hint=hint) from error
    except optuna.exceptions.StorageInternalError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise MachineError(f"the study's storage failed: {reason}", hint="see to the --storage database") from error


def open_study(
    folder: Path,
    *,
    storage: str | None,
    sampler: BaseSampler,
    trials: Sequence[Trial],
    space: Space,
    limit_bytes: int,
) -> optuna.Study:
    """The study of an output folder, holding ``trials`` (those of the search) and no others.

    A journal that can't be read, or that holds finished trials other than these or another space, is renamed to
    ``journal.log.broken-N``; in a database the next free study name is taken. Trials that the study lacks are
    added. A trial that was left running is told to have failed.

    Raises:
        MachineError: The folder can't be written, or the database failed.
        InputError: The storage URL can't be used.
    """
    # of a plan that was measured once more, the first trial said nothing
    searched = list({trial.plan: trial for trial in trials if trial.purpose == "search"}.values())
    agrees = functools.partial(_agrees, trials=searched, space=space, limit_bytes=limit_bytes)
    with storage_errors(folder / journal.JOURNAL_FILE if storage is None else "the study's storage"):
        if storage is None:
            study = _from_journal(folder / journal.JOURNAL_FILE, sampler, agrees)
        else:
            study = _from_database(storage, folder, sampler, agrees)
        _complete(study, searched, space, limit_bytes)
    return study


def _from_journal(path: Path, sampler: BaseSampler, agrees: Agrees) -> optuna.Study:
    """The study of a journal; of a new one, where it can't be read or does not agree with the trials."""
    path.parent.mkdir(parents=True, exist_ok=True)
    journal.repair(path)
    try:
        study = _load(journal.storage(path), STUDY, sampler)
        usable = agrees(study)
    except UNREADABLE:
        usable = False
    if not usable:
        number = 1
        while (aside := path.with_name(f"{path.name}.broken-{number}")).exists():
            number += 1
        path.rename(aside)
        study = _load(journal.storage(path), STUDY, sampler)
    return study


def _from_database(url: str, folder: Path, sampler: BaseSampler, agrees: Agrees) -> optuna.Study:
    """The study of a folder in a database; where one of its name holds other trials, the next free name's."""
    from sqlalchemy.exc import SQLAlchemyError

    try:
        _check_own(url)
        storage = RDBStorage(url)
    except (SQLAlchemyError, ImportError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"--storage {url!r} can't be used: {reason}",
            hint="write it like sqlite:///study.db, and install the driver that its scheme names",
        ) from error
    try:
        base = name = f"{STUDY}-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]}"
        number = 1
        while not agrees(study := _load(storage, name, sampler)):
            number += 1
            name = f"{base}-{number}"
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise InputError(
            f"--storage {url!r} can't be used: {reason}", hint="is it damaged? Name another, such as sqlite:///study.db"
        ) from error
    return study


def _check_own(url: str) -> None:
    """Refuse an SQLite file of another program, before Optuna puts its tables into it.

    Raises:
        InputError: It is one.
    """
    import sqlalchemy

    if not url.startswith("sqlite"):
        return  # a server's database may hold tables of several programs
    engine = sqlalchemy.create_engine(url)
    try:
        tables = sqlalchemy.inspect(engine).get_table_names()
    finally:
        engine.dispose()
    if tables and "version_info" not in tables:
        raise InputError(
            f"--storage {url!r} is no study's: it holds the tables {', '.join(sorted(tables)[:5])}",
            hint="name a file that is not there yet, or one of an earlier tune",
        )


def _load(storage: BaseStorage, name: str, sampler: BaseSampler) -> optuna.Study:
    try:
        return optuna.load_study(study_name=name, storage=storage, sampler=sampler)
    except KeyError:
        return optuna.create_study(study_name=name, storage=storage, sampler=sampler, direction="maximize")


def _agrees(study: optuna.Study, trials: Sequence[Trial], space: Space, limit_bytes: int) -> bool:
    """Whether all that a study holds is also true, and can be read in this space."""
    known = {trial.number: trial for trial in trials}
    wanted = distributions(space)
    told: set[int] = set()
    for held in study.get_trials(deepcopy=False):
        if any(wanted.get(name) != distribution for name, distribution in held.distributions.items()):
            return False
        number = held.user_attrs.get("number")
        if number is None:
            continue
        true = known.get(number) if type(number) is int and number not in told else None
        if true is None or not _same(held, record(true, limit_bytes)):
            return False
        told.add(number)
    return study.directions == [StudyDirection.MAXIMIZE]


def _same(held: optuna.trial.FrozenTrial, true: Record) -> bool:
    """Whether a study holds a trial as it was told; a database may round its numbers."""
    return (
        held.state == true.state
        and all(held.user_attrs.get(name) == value for name, value in true.attributes.items())
        and _close(held.value if true.value is not None else None, true.value)
        and _close(held.constraints.get(CONSTRAINT), true.constraint)
    )


def _close(one: float | None, other: float | None) -> bool:
    return one is other or (one is not None and other is not None and math.isclose(one, other, rel_tol=1e-9))


def _complete(study: optuna.Study, trials: Sequence[Trial], space: Space, limit_bytes: int) -> None:
    told = set()
    for held in study.get_trials(deepcopy=False):
        if not held.state.is_finished():
            study.tell(held.number, state=TrialState.FAIL)
        elif "number" in held.user_attrs:
            told.add(held.user_attrs["number"])
    for trial in trials:
        if trial.number not in told:
            add_trial(study, trial, space, limit_bytes)


def add_trial(study: optuna.Study, trial: Trial, space: Space, limit_bytes: int) -> None:
    """Add a finished trial to a study; one that the space does not hold is left out."""
    wanted = distributions(space)
    if set(trial.plan) != set(wanted) or any(trial.plan[name] not in wanted[name].choices for name in wanted):
        return
    told = record(trial, limit_bytes)
    study.add_trial(
        optuna.trial.create_trial(
            state=told.state,
            value=told.value,
            params=dict(trial.plan),
            distributions=dict(wanted),
            user_attrs={**told.attributes, "number": trial.number},
            constraints=None if told.constraint is None else {CONSTRAINT: told.constraint},
        )
    )
