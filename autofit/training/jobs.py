"""The jobs that train, each in a process of its own: a trial measures a plan, a curve records what it learns.

A training of several processes is one job, too: its process forks the ranks (:mod:`autofit.training.ranks`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter

from autofit.contract.facts import Facts
from autofit.contract.outcome import OUTCOME, Crashed, Measured, Outcome, OutOfMemory, Unsupported
from autofit.contract.plan import Plan
from autofit.contract.recipe import Recipe
from autofit.machine.describe import given_threads
from autofit.machine.meters import CeilingBroken, Inheritance, guard_host, memory_kills, meter, warm_up_threads
from autofit.machine.model import describe_built, describe_module
from autofit.registry import recipe_of
from autofit.system import strict_json
from autofit.system.errors import InputError
from autofit.system.files import write_atomically
from autofit.system.forking.imports import load_bitsandbytes
from autofit.system.job import JOB, error_words
from autofit.system.strict_json import dump_json
from autofit.system.tensor_cache import CACHE_FOLDER, TensorCache
from autofit.training.guard.loss_curve import CURVE, Curve, listener_of, of_ranks, record
from autofit.training.guard.rounding import Rounding, rounded
from autofit.training.guard.script_curve import script_curve
from autofit.training.joined import failure_words, joined, unwritten
from autofit.training.launch_environment import launch_environment, write_yaml
from autofit.training.loops import run_recipe
from autofit.training.measure import clock_of, concluded
from autofit.training.ranks import PROGRESS_FILE, Share, all_here, own_rank, rank_folder, result_file, run_ranks
from autofit.training.scripts.entry import describe, keep_quiet, measure_steps, rows_words
from autofit.training.scripts.leave import Refused, name_of
from autofit.training.scripts.snapshot import ScriptSnapshot
from autofit.training.timing import Clock, Effort


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialJob:
    """Measure one plan."""

    RESULT: ClassVar[str] = "outcome.json"
    kind: Literal["trial"] = "trial"
    plan: Plan
    facts: Facts
    config: str
    effort: Effort
    share: Share | None = None

    def run(self, folder: Path) -> None:
        """Leave the plan's outcome; every failure that can be caught is one."""

        def train(rank: int) -> None:
            found = tried(self, rank_folder(folder, rank), folder.parent, rank)
            write_atomically(result_file(folder, rank), dump_json(OUTCOME, found))

        if is_rank(train):
            return
        alone = self.facts.workload.processes == 1
        outcome = tried(self, folder, folder.parent) if alone else tried_by_ranks(self.facts, folder, train, self.share)
        write_atomically(folder / self.RESULT, dump_json(OUTCOME, outcome))


TRIAL_JOB: TypeAdapter[TrialJob] = TypeAdapter(TrialJob)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotJob:
    """Run a user's script up to its Trainer, and have trials forked there.

    Attributes:
        plan: One that says what all of the trials' plans say where a model is loaded.
    """

    plan: Plan
    facts: Facts

    def run(self, folder: Path, next_job: Callable[[], Path]) -> str:
        """Serve trials; in the process of one, leave its outcome.

        Args:
            folder: Where the script may write until it trains.
            next_job: Waits until a trial is forked; returns in its process, with its folder.

        Returns:
            Why no trial can be forked, in words; nothing in the process of a trial.
        """
        facts, recipe, before = self.facts, recipe_of(self.plan, self.facts), dict(os.environ)
        _take_environment(_launch_of(recipe, folder), facts)
        launch = {name: value for name, value in os.environ.items() if before.get(name) != value}
        keep_quiet()

        def begin(own: Path, inherited: Inheritance) -> tuple[Clock, Mapping[str, str]]:
            job = TRIAL_JOB.validate_json((own / JOB).read_bytes())
            for name, value in launch.items():  # what the snapshot's own launch has set, and not the script
                if os.environ.get(name) == value:
                    os.environ.pop(name)
                    os.environ |= {name: before[name]} if name in before else {}
            recipe = recipe_of(job.plan, facts)
            _take_environment(_launch_of(recipe, own), facts)
            _computing(facts)
            return _clock(job, recipe, own, own.parent, inherited=inherited), _of_the_launch()

        snapshot = ScriptSnapshot(
            recipe=recipe, folder=folder, threads=given_threads() or 1, next_job=next_job, begin=begin
        )
        found = snapshot.run()
        if snapshot.own is None:
            return str(found)
        outcome = caught(facts, lambda: snapshot.outcome(found))
        write_atomically(snapshot.own / TrialJob.RESULT, dump_json(OUTCOME, outcome))
        return ""


SNAPSHOT_JOB: TypeAdapter[SnapshotJob] = TypeAdapter(SnapshotJob)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeScriptJob:
    """Run a user's script up to its training, on the CPU, and write down what it would train.

    Attributes:
        draws: Whether its weights are drawn, as those of each trial are; else it is told sooner, and in less memory.
    """

    RESULT: ClassVar[str] = "script.json"
    kind: Literal["describe_script"] = "describe_script"
    path: str
    arguments: tuple[str, ...]
    call: int
    draws: bool = True

    def run(self, folder: Path) -> None:
        """Leave ``script``, ``model`` and ``config``, or an ``error`` with its ``hint``."""
        write_atomically(folder / self.RESULT, json.dumps(_described(self, folder), allow_nan=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveJob:
    """Train some steps of a plan, possibly in a rounded arithmetic, and write down what it learns."""

    RESULT: ClassVar[str] = "curve.json"
    kind: Literal["curve"] = "curve"
    plan: Plan
    facts: Facts
    config: str
    steps: int
    rounding: Rounding | None = None
    share: Share | None = None

    def run(self, folder: Path) -> None:
        """Leave the curve; every failure that can be caught stands in it in words."""

        def train(rank: int) -> None:
            found = _trained(self, rank_folder(folder, rank), rank)
            write_atomically(result_file(folder, rank), dump_json(CURVE, found))

        if is_rank(train):
            return
        alone = self.facts.workload.processes == 1
        curve = _trained(self, folder) if alone else _trained_by_ranks(self.facts, folder, train, self.share)
        write_atomically(folder / self.RESULT, dump_json(CURVE, curve))


def is_rank(train: Callable[[int], None]) -> bool:
    """Whether this process is one of a job's ranks; then its part is done."""
    rank = own_rank()
    if rank is not None:
        train(rank)
    return rank is not None


def tried_by_ranks(facts: Facts, folder: Path, train: Callable[[int], None], share: Share | None = None) -> Outcome:
    """The one outcome of a plan that several ranks train: the first failure, or the worst rank's figures.

    Args:
        facts: What the plan is for.
        folder: Of the job.
        train: Done in each rank's process.
        share: The ranks that run here; ``None`` where all do.
    """
    share = share or all_here(facts.workload.processes)

    def outcome(rank: int) -> Outcome:
        found: Outcome = strict_json.read(OUTCOME, result_file(folder, rank).read_bytes())
        return found

    def failed(rank: int) -> bool:
        return not isinstance(outcome(rank), Measured)

    kills_before = memory_kills()
    failure = run_ranks(folder, share, train, failed, on_cuda=facts.hardware.device == "cuda")
    if failure is None:
        return joined([found for rank in share.ranks if isinstance(found := outcome(rank), Measured)])
    if failure.wrote:
        return outcome(failure.rank)
    return unwritten(failure, folder, facts, host_ran_out=memory_kills() > kills_before)


def _trained_by_ranks(facts: Facts, folder: Path, train: Callable[[int], None], share: Share | None) -> Curve:
    """The one curve of a plan that several ranks train."""
    share = share or all_here(facts.workload.processes)

    def curve(rank: int) -> Curve:
        return strict_json.read(CURVE, result_file(folder, rank).read_bytes())

    def failed(rank: int) -> bool:
        return curve(rank).failed is not None

    failure = run_ranks(folder, share, train, failed, on_cuda=facts.hardware.device == "cuda")
    if failure is None:
        return of_ranks([curve(rank) for rank in share.ranks])
    return curve(failure.rank) if failure.wrote else Curve(failed=failure_words(failure, folder))


def tried(
    job: TrialJob,
    folder: Path,
    trials: Path,
    rank: int | None = None,
    on_step: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """The outcome of a plan; whatever is unforeseen is a crash with its traceback, never swallowed.

    Args:
        job: What to measure.
        folder: Where this process may write.
        trials: Where trials keep what is the same in all of them.
        rank: Of this process, where there are several.
        on_step: Told how many optimizer steps are done, each time.
    """
    return caught(job.facts, lambda: _measured(job, folder, trials, rank, on_step))


def caught(facts: Facts, run: Callable[[], Outcome]) -> Outcome:
    """The outcome of what is run, whatever it raises."""
    try:
        return run()
    except CeilingBroken as broken:
        work = facts.workload
        return OutOfMemory(
            where=broken.where,
            phase="load",
            limit_bytes=work.limit_bytes if broken.where == "device" else work.host_limit_bytes,
            peak_bytes=broken.peak_bytes,
        )
    except Refused as refused:
        return Unsupported(reason=refused.message)
    except ImportError as error:
        traceback.print_exc()
        return Unsupported(reason=f"a package is missing or broken: {error}")
    except Exception as error:  # noqa: BLE001 - the top of the worker
        traceback.print_exc()
        reason = error_words(error)
        return Crashed(reason=reason, log_tail=traceback.format_exc()[-4000:])


def _described(job: DescribeScriptJob, folder: Path) -> dict[str, Any]:
    """What a script would train, as JSON values, or why it can't be tuned."""
    keep_quiet()
    try:
        found = describe(job.path, job.arguments, call=job.call, folder=folder, draws=job.draws)
    except (InputError, Refused) as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        return {"error": error.message, "hint": error.hint}
    model, parameters = found.pop("model"), found.pop("parameters")
    name = name_of(job.path, job.arguments)
    of_transformers = bool(found["config"])
    told = describe_built(name, model.config, model) if of_transformers else describe_module(name, model)
    return {**found, "model": {**told, "parameters": parameters}}


def _trained(job: CurveJob, folder: Path, rank: int | None = None) -> Curve:
    """The curve of a plan; whatever is unforeseen is told in words."""
    try:
        recipe = _launched(job.plan, job.facts, folder, rank)
        script = job.facts.workload.script
        if script is not None:
            keep_quiet()
            listener = listener_of(recipe, job.steps, meter(job.facts), _teller(folder))
            return script_curve(listener, script, folder=folder, environment=_of_the_launch(), rounding=job.rounding)
        with rounded(job.rounding) if job.rounding else contextlib.nullcontext():
            return record(
                recipe, job.steps, meter(job.facts), config=Path(job.config), folder=folder, beat=_teller(folder)
            )
    except Refused as refused:
        return Curve(failed=refused.message)
    except Exception as error:  # noqa: BLE001 - the top of the worker
        traceback.print_exc()
        return Curve(failed=error_words(error))


def _measured(job: TrialJob, folder: Path, trials: Path, rank: int | None, on_step: Callable[[int], None]) -> Outcome:
    recipe, script = _launched(job.plan, job.facts, folder, rank), job.facts.workload.script
    clock = _clock(job, recipe, folder, trials, on_step=on_step)
    if script is None:
        return concluded(clock, lambda: run_recipe(clock, config=Path(job.config), folder=folder))
    keep_quiet()
    environment = _of_the_launch()
    return concluded(
        clock,
        lambda: measure_steps(clock, script, folder=folder, environment=environment),
        words=rows_words(script),
    )


def _clock(
    job: TrialJob,
    recipe: Recipe,
    folder: Path,
    trials: Path,
    *,
    on_step: Callable[[int], None] = lambda _: None,
    inherited: Inheritance | None = None,
) -> Clock:
    """What listens to a trial, from now on; see :func:`tried`."""
    recipe.tensor_cache = TensorCache(trials / CACHE_FOLDER)
    tell = _teller(folder)
    tell("load")
    counter = meter(job.facts, inherited)
    effort, script = job.effort, job.facts.workload.script
    if script is not None and (script.own_split is not None or script.generated):  # fewer can't stand for its own
        effort = dataclasses.replace(effort, fidelity="whole")
    clock = clock_of(recipe, effort, counter, tell, on_step)
    _tell_micro_steps(clock)
    return clock


def _tell_micro_steps(clock: Clock) -> None:
    """Tell DeepSpeed, which counts the micro-steps itself, of those that stand for more."""
    name = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    if clock.in_parts and name in os.environ:
        os.environ[name] = str(clock.accumulation)


def _of_the_launch() -> dict[str, str]:
    """The variables by which a launch tells the plan."""
    return {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}


def _teller(folder: Path) -> Callable[[str], None]:
    """Writes down what the process does just now, for whoever waits for it."""
    progress = os.open(folder / PROGRESS_FILE, os.O_WRONLY | os.O_CREAT, 0o644)

    def tell(words: str) -> None:
        with contextlib.suppress(OSError):  # in place: a process that is killed here leaves no empty file
            os.pwrite(progress, words.ljust(32).encode(), 0)

    return tell


def _launched(plan: Plan, facts: Facts, folder: Path, rank: int | None) -> Recipe:
    """Become the process that ``accelerate launch`` starts for a plan, and return its recipe."""
    recipe = recipe_of(plan, facts)
    _take_environment(_launch_of(recipe, folder, rank), facts)
    load_bitsandbytes()
    from transformers import Trainer, utils

    _ = Trainer  # imported before the base of memory is read
    utils.logging.set_verbosity(logging.ERROR)
    _computing(facts)
    return recipe


def _launch_of(recipe: Recipe, folder: Path, rank: int | None = None) -> dict[str, str]:
    """The variables that a launch sets for a recipe."""
    config_file = folder / "accelerate.yaml"
    write_yaml(config_file, dict(recipe.emission.accelerate))
    return launch_environment(config_file, rank)


def _computing(facts: Facts) -> None:
    """Have all threads that a launch has, and the host's memory guarded."""
    import torch

    torch.set_num_threads(given_threads() or 1)
    warm_up_threads()
    if facts.hardware.device == "cpu":
        guard_host(facts.workload.limit_bytes)


def _take_environment(environment: Mapping[str, str], facts: Facts) -> None:
    """Become a process that ``accelerate launch`` has started."""
    os.environ.update(environment)
    if facts.hardware.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
