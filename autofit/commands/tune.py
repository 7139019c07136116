"""The story, read first: facts -> space -> search -> choose -> emit.

(The module is not called ``tune``: importing it would then hide the function of that name in the package.)
"""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from autofit import space
from autofit.commands.model_source import fetch, modeling_module, own_code
from autofit.commands.request import (
    TRIALS,
    Request,
    Search,
    Started,
    as_classes,
    as_knobs,
    check_request,
    keep_request,
    read_facts,
    started_before,
    validated,
    with_rates,
)
from autofit.contract.facts import Facts, LaunchPath, Task
from autofit.contract.outcome import Crashed, Measured, Outcome, OutOfMemory, Trial
from autofit.contract.plan import Plan
from autofit.costmodel.forecast import Forecast, forecast
from autofit.costmodel.tracing.trace_store import Traces, cache_folder
from autofit.costmodel.utilisation import Utilisation
from autofit.machine import gpu_catalogue, other_processes
from autofit.machine.select import choose_device, hardware_lock, left_unused
from autofit.output.document import DOCUMENT_FILE, MODEL_FOLDER, REQUEST
from autofit.output.emit import ARGUMENTS, ASIDE, REPORT, YAML
from autofit.output.result import Result, compose, write_result
from autofit.search import recording, tradeoffs
from autofit.search.decision import nearest_change
from autofit.search.events import Events, Silent
from autofit.search.loop import Campaign
from autofit.search.recording import Replay
from autofit.search.searcher import open_searcher
from autofit.search.study import JOURNAL_FILE
from autofit.system import units
from autofit.system.errors import AutofitError, InputError, Interrupted, MachineError, NothingFits, Stopped
from autofit.system.files import usable_folder
from autofit.system.fork_server import FAILED_JOB_LOG, ForkServer
from autofit.system.locks import held
from autofit.system.statistics import median
from autofit.system.tensor_cache import KEPT, Kept
from autofit.training.equivalence import Guards, Look
from autofit.training.runner import ProcessRunner, Rated, Runner, finished, trial_folder, unrated

if TYPE_CHECKING:
    from autofit.search.decision import Decision
    from autofit.search.searcher import Searcher
    from autofit.space import Space
    from autofit.training.equivalence import Guard

T = TypeVar("T")
LOCK = ".lock"
FORKSERVER_LOG = "forkserver.log"
_WRITTEN = {
    MODEL_FOLDER, DOCUMENT_FILE, YAML, ARGUMENTS, REPORT, TRIALS, FORKSERVER_LOG, JOURNAL_FILE
}  # fmt: skip
_BEGUN = {REQUEST, LOCK}
"""One of these is in every folder that a tune has written to."""
NOTICEABLE = 0.1
MOST_GUARDS = 3


def tune(
    model: str,
    *,
    output: str | Path | None = None,
    device: str = "auto",
    seq_len: int | None = None,
    global_batch: int = 32,
    memory_limit: str | int | None = None,
    trials: int = 40,
    timeout: str | float | None = None,
    allow: str | Sequence[str] = "exact,numeric",
    fix: Mapping[str, object] | Sequence[str] = (),
    among: Mapping[str, object] | Sequence[str] = (),
    sampler: str = "autofit",
    launch_path: LaunchPath = "trainer",
    task: Task | None = None,
    trust_remote_code: bool = False,
    storage: str | None = None,
    record: str | Path | None = None,
    resume: bool = False,
    seed: int = 0,
    guard: bool = True,
    events: Events | None = None,
    runner: Runner | None = None,
) -> Result:
    """Find the fastest training configuration that fits.

    Args:
        model: Hub id, folder or file with a ``config.json``, or ``demo``.
        output: Folder for the answer and the trials; a temporary one by default.
        device: ``auto``, ``cuda`` or ``cpu``.
        seq_len: Tokens in a row; by default the lesser of 1024 and the model's longest.
        global_batch: Rows to an optimizer step.
        memory_limit: The ceiling: bytes, a size (``"22GiB"``) or a share of what is free (``"90%"``); by default
            92 % of what is free.
        trials: No more plans than these before the playoff; what is measured once more comes on top.
        timeout: No longer than this: seconds, or words such as ``"10m"``.
        allow: Classes of techniques that may be used: ``exact``, ``numeric``, ``method``.
        fix: Knobs that are held at a value.
        among: Knobs that are held to some values.
        sampler: ``autofit``, ``tpe``, ``gp``, ``random`` or ``grid``.
        launch_path: ``trainer`` or ``loop``: how the training will be run.
        task: ``causal-lm`` tunes next-token prediction, whatever the config names; by default a config that names a
            model for another task is refused.
        trust_remote_code: Whether the model's own code may run.
        storage: URL of an Optuna storage, instead of the journal in the output folder.
        record: File that gets a line of JSON for each trial.
        resume: Go on with what the output folder holds.
        seed: Of the search and of the random tokens.
        guard: Train the winner a few steps beside a plain plan, and refuse it where it trains otherwise.
        events: Told of what happens.
        runner: Turns plans into outcomes; by default each trial is a process on this machine.

    Raises:
        InputError: An argument or the model can't be used.
        NothingFits: Every plan that was tried breaks the ceiling.
        MachineError: The machine stands in the way, or no plan got as far as to be measured.
        Interrupted: Ctrl-C; the best so far is written, if there is one.
    """
    request = validated(
        Request,
        {
            "model": str(model),
            "device": device,
            "seq_len": seq_len,
            "global_batch": global_batch,
            "memory_limit": None if memory_limit is None else str(memory_limit),
            "launch_path": launch_path,
            "trust_remote_code": trust_remote_code,
            "seed": seed,
            "task": task,
        },
    )
    settings = validated(
        Search,
        {
            "trials": trials,
            "timeout_seconds": units.parse_duration(timeout) if isinstance(timeout, str) else timeout,
            "allowed": as_classes(allow),
            "fix": as_knobs(fix),
            "among": as_knobs(among),
            "sampler": sampler,
            "storage": storage,
            "record": record or None,
            "guard": guard,
        },
    )
    check_request(request, settings)
    folder = Path(output) if output else Path(tempfile.mkdtemp(prefix="autofit-"))
    fresh = not output or not folder.exists()
    before = _of_others(folder)
    usable_folder(folder)
    teller = events or Silent()
    with held(folder / LOCK, f"another tune is writing {folder}", "give each tune its own --output"):
        if before & _BEGUN:
            _sweep(folder)
        try:
            return _Tune(folder, request, settings, teller, runner).run(resume=resume)
        finally:
            teller.close()
            if not (folder / REQUEST).exists():
                _leave_no_trace(folder, whole=fresh, but=before)


def predicted(plans: Space, cast: Forecast | None) -> dict[Plan, int]:
    """Peak bytes of the plans by their traces, where there are any."""
    if cast is None:
        return {}
    pairs = zip(plans.plans, cast.predicted_bytes.tolist(), strict=True)
    return {plan: round(peak) for plan, peak in pairs if not math.isnan(peak)}


@contextlib.contextmanager
def _best_in_hint(campaign: Campaign) -> Iterator[None]:
    """Say what is known so far where the machine stands in the way: it may be all that is left of it."""
    try:
        yield
    except MachineError as error:
        best = campaign.decide()
        if best is not None:
            error.hint = f"{error.hint or 'go on with --resume'}; the best so far: {best.plan.words()}"
        raise


def _until_stopped(work: Callable[[], T]) -> tuple[T | None, Stopped | None]:
    """What some work gives, or what has stopped it."""
    try:
        return work(), None
    except KeyboardInterrupt as error:
        return None, error if isinstance(error, Stopped) else Interrupted("stopped by Ctrl-C")


def _says_of_memory(outcome: Outcome) -> bool:
    """Whether it tells what a plan needs."""
    return isinstance(outcome, Measured) or (isinstance(outcome, OutOfMemory) and not outcome.external_pressure)


def _sweep(folder: Path) -> None:
    """Take away what a tune that was killed has left half written; nobody else writes here now."""
    for left in (*folder.glob(".ask-*"), folder / ASIDE):
        shutil.rmtree(left, ignore_errors=True)
    for left in (*folder.glob(".*.tmp"), *(folder / TRIALS).glob("*/.*.tmp")):
        with contextlib.suppress(OSError):
            left.unlink()


def _of_others(folder: Path) -> frozenset[str]:
    """What stands in a folder before a tune begins there.

    Raises:
        InputError: Something has a name that the tune would write to, and no tune has written it.
    """
    try:
        there = frozenset(entry.name for entry in folder.iterdir())
    except (OSError, ValueError):
        return frozenset()  # not there yet, or no folder: the next who looks says so
    clash = sorted(there & _WRITTEN)
    if clash and not _BEGUN & there:
        raise InputError(
            f"{folder} holds {', '.join(clash)}, which no tune wrote: it would be written over",
            hint="name a new or an empty folder by --output",
        )
    return there


def _leave_no_trace(folder: Path, *, whole: bool, but: Collection[str]) -> None:
    """Take away what a tune that never began has written, ``but`` what stood there before, and the log of a failure."""
    if whole and not (folder / FAILED_JOB_LOG).exists():
        shutil.rmtree(folder, ignore_errors=True)
        return
    if MODEL_FOLDER not in but:
        shutil.rmtree(folder / MODEL_FOLDER, ignore_errors=True)
    for name in {FORKSERVER_LOG, JOURNAL_FILE, LOCK} - set(but):
        (folder / name).unlink(missing_ok=True)


@dataclass(slots=True)
class _Tune:
    """One tune, from the first fact to the last file."""

    folder: Path
    request: Request
    settings: Search
    events: Events
    given_runner: Runner | None
    began: float = field(default_factory=time.monotonic)
    spent: float = 0.0
    trials: list[Trial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refused: dict[Plan, str] = field(default_factory=dict)
    guard: Guard | None = None

    def run(self, *, resume: bool) -> Result:
        before = started_before(self.folder, self.request, resume=resume, say=self._note)
        device = self._chosen_device(before)
        config = self.folder / MODEL_FOLDER
        if before is None:
            fetch(self.request.model, config, trust_remote_code=self.request.trust_remote_code)
        code = own_code(config, trusted=self.request.trust_remote_code)
        if code is not None:
            self._note(code)
        server = ForkServer(self.folder / FORKSERVER_LOG, device, modeling_module(config))
        with contextlib.closing(server), Kept(self.folder / TRIALS / KEPT):
            if before is not None:
                facts = before.facts
            elif isinstance(self.given_runner, Replay):
                facts = self.given_runner.facts
            else:
                facts = read_facts(self.folder, self.request, device, server, self._note)
            plans = space.build(
                facts,
                space.parse_allowed(self.settings.allowed),
                space.parse_knobs(self.settings.fix, self.settings.among, facts),
            )
            with self._device(facts):
                if before is None and self.given_runner is None:
                    facts = with_rates(self.folder, facts, server, self._note)
                return self._tune(facts, plans, config, server)

    def _chosen_device(self, before: Started | None) -> Literal["cuda", "cpu"]:
        if isinstance(self.given_runner, Replay):
            return "cpu"  # what is played back needs no device
        device = choose_device(before.facts.hardware.device if before else self.request.device)
        if before is None and device == "cpu" and self.request.device == "auto" and (why := left_unused()):
            self._note(f"an Nvidia card is here and is not used, the processor is: {why}")
        return device

    def _device(self, facts: Facts) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.given_runner is not None else hardware_lock(facts.hardware)

    def _note(self, words: str) -> None:
        self.notes.append(words)
        self.events.note(words)

    def _tune(self, facts: Facts, plans: Space, config: Path, server: ForkServer) -> Result:
        settings = self.settings
        if self.given_runner is None:
            for words in other_processes.warnings(facts.hardware, self.folder):
                self._note(words)
        if facts.model.has_experts:
            self._note("experts are routed by random weights here: trained ones may be less balanced, and slower")
        self.trials = list(finished(self.folder / TRIALS))
        self.spent += sum(trial.wall_seconds for trial in self.trials)
        traces = Traces(facts, config, lambda: server, self.folder, cache_folder())
        cast, rated = self._forecast(plans, facts, traces)
        runner = self.given_runner or ProcessRunner(
            self.folder / TRIALS,
            facts,
            config,
            server,
            predicted(plans, cast),
            known=self.trials,
            note=self._note,
            rated=rated,
        )
        campaign = Campaign(
            facts=facts,
            space=plans,
            runner=runner,
            events=self.events,
            note=self._note,
            left=self._left,
            seconds=settings.timeout_seconds,
            trials=self.trials,
            record=recording.Writer(settings.record, facts, plans, cast) if settings.record else None,
            refused=self.refused,
        )
        with _best_in_hint(campaign):
            self.events.ready(facts, plans, len(self.trials))
            _, stopped = _until_stopped(campaign.take_up)
            searcher = open_searcher(
                self.folder,
                plans,
                facts,
                sampler=settings.sampler,
                seed=self.request.seed,
                storage=settings.storage,
                trials=self.trials if stopped is None else self.trials[:-1],  # whose last one says nothing yet
                forecast=cast,
            )
            if not (self.folder / REQUEST).exists():
                keep_request(self.folder, self.request, facts)
            decision = None
            if stopped is None:
                guards = Guards(self.folder, facts, config, server)
                decision, stopped = _until_stopped(lambda: self._decision(campaign, searcher, guards))
        if stopped is not None:
            self.events.note("stopping: the best so far is being written")
            server.stop_job()
            server.close()
            decision = campaign.decide()
            if decision is None:
                stopped.hint = "no plan was measured inside the ceiling yet; go on with --resume"
                raise stopped
            self._note("stopped before its end: this is the best of what was measured until then")
        self._say_if_disturbed()
        if decision is None:
            raise self._nothing(facts, plans, cast)
        self._say_correction(searcher, facts)
        result = write_result(
            compose(
                decision,
                facts,
                self.trials,
                notes=self.notes,
                seconds=self.spent + time.monotonic() - self.began,
                guard=self.guard,
                front=tradeoffs.front(decision),
                contributions=tradeoffs.contributions(decision, self.trials, plans, facts, searcher.expected),
            ),
            self.folder,
            server,
        )
        if stopped is not None:
            stopped.hint = f"the best so far is in {self.folder}; go on with --resume"
            raise stopped
        return result

    def _decision(self, campaign: Campaign, searcher: Searcher, guards: Guards) -> Decision | None:
        """The search, the playoff, and a look at how the winner trains."""
        campaign.search(searcher, self.settings.trials)
        campaign.baseline(searcher, self.settings.trials)
        decision = campaign.playoff()
        if self.given_runner is None and self.settings.guard:
            decision = self._guarded(decision, guards.look, campaign.playoff)
        return decision

    def _forecast(self, plans: Space, facts: Facts, traces: Traces) -> tuple[Forecast | None, Rated]:
        """What the traces say of the plans' memory and FLOPs; a tune does without where they can't be made."""
        if isinstance(self.given_runner, Replay):
            return self.given_runner.landscape.forecast_of(plans), unrated
        if self.given_runner is not None:
            return None, unrated
        hardware = facts.hardware
        card = gpu_catalogue.matching(hardware.name, hardware.total_bytes)
        try:
            cast = forecast(plans, traces, facts, card, say=self.events.note)
            rated = Utilisation(plans, traces, facts, card).rated
        except AutofitError as error:
            self._note(f"memory is not forecast: {error.message}")
            return None, unrated
        for why in sorted(set(traces.failed.values())):
            self._note(f"some plans have no forecast: {why}")
        return None if np.isnan(cast.tensor_bytes).all() else cast, rated

    def _say_correction(self, searcher: Searcher, facts: Facts) -> None:
        """Say how the measured peaks lie to the traces."""
        found = searcher.peak_posterior()
        brought = "".join(
            f", and {units.size(taken)} for the kernels of {kind.removeprefix('matmul ')}"
            for kind, taken in facts.kernel_overhead_bytes.items()
            if taken
        )
        if found is not None and found.count > 1:
            heap = f" + {found.heap_share:.2g} x the activations that a heap has held" if found.heap_share else ""
            sign = "-" if found.offset_bytes < 0 else "+"
            self._note(
                f"measured peaks are {found.slope:.3g} x the traced ones{heap} {sign} "
                f"{units.size(abs(found.offset_bytes))}{brought}, "
                f"give or take {found.scatter:.1%} ({found.count} trials)"
            )

    def _nothing(self, facts: Facts, plans: Space, cast: Forecast | None) -> AutofitError:
        """Why there is no winner: no plan fits, or none got as far as to tell."""
        trials = tuple(self.trials)
        if self.refused:
            plan, why = next(iter(self.refused.items()))
            return MachineError(
                f"every plan that was measured trains otherwise than a plain one: {plan.words()}: {why}",
                hint="is it a bug of a library? --no-guard writes the fastest plan all the same",
            )
        if not trials and cast is not None:
            place = int(np.nanargmin(cast.device_bytes))
            needed = units.size(float(cast.device_bytes[place]))
            return NothingFits(
                f"Nothing fits, by what the plans' traces say: the smallest needs about {needed} under a ceiling of "
                f"{units.size(facts.workload.limit_bytes)} ({plans.plans[place].words()}). What may help: a ceiling of "
                f"{needed} (--memory-limit), a shorter sequence (--seq-len), or --allow exact,numeric,method."
            )
        if not trials or any(_says_of_memory(trial.outcome) for trial in trials):
            return NothingFits(f"Nothing fits. {nearest_change(trials, plans, facts.workload.limit_bytes, facts)}")
        last = trials[-1]
        logs = f"its logs are in {trial_folder(self.folder / TRIALS, last.number)}"
        alike = {trial.outcome.reason for trial in trials if isinstance(trial.outcome, Crashed)}
        if len(alike) == 1 and all(isinstance(trial.outcome, Crashed) for trial in trials):
            return MachineError(
                f"every plan that was tried crashed alike: {alike.pop()}",
                hint=f"does the model train at all, and are the sizes in its config right? {logs}",
            )
        why = getattr(last.outcome, "reason", last.outcome.kind.replace("_", " "))
        return MachineError(
            f"no plan could be measured; the last one, {last.plan.words()}: {why}",
            hint=logs,
        )

    def _left(self) -> float | None:
        """Seconds left of the time that was given."""
        given = self.settings.timeout_seconds
        return None if given is None else given - (time.monotonic() - self.began)

    def _say_if_disturbed(self) -> None:
        """Say so where others took a good part of the processors while trials were timed."""
        again = [
            (one.number, one.outcome.disturbance)
            for one, after in itertools.pairwise(self.trials)
            if isinstance(one.outcome, Measured)
            and one.outcome.disturbed
            and one.plan == after.plan
            and one.purpose == after.purpose == "search"
        ]
        if again:
            which = f"trial{'' if len(again) == 1 else 's'} {', '.join(str(number) for number, _ in again)}"
            most = max(share for _, share in again)
            self._note(f"others took up to {most:.0%} of the processors during {which}: measured once more")
        shares = [trial.outcome.disturbance for trial in self.trials if isinstance(trial.outcome, Measured)]
        if shares and median(shares) > NOTICEABLE:
            self._note(
                f"others took {median(shares):.0%} of the processors while the trials ran: "
                "on a quieter machine all of this is faster"
            )

    def _guarded(self, decision: Decision | None, look: Look, again: Callable[[], Decision | None]) -> Decision | None:
        """The first winner that trains as a plain plan does; what trains otherwise is refused.

        Args:
            decision: The winner so far.
            look: Trains a plan beside a plain one.
            again: Holds the playoff without those that were refused.
        """
        for _ in range(MOST_GUARDS):
            if decision is None:
                return None
            left = self._left()
            if left is not None and left <= 0:
                self._note("the time is spent: the winner's training was not compared with a plain plan's")
                return decision
            plan, spent = decision.plan, time.monotonic() - self.began
            self.events.note(f"comparing the training of {plan.words()} with a plain plan's")
            found = look(plan, decision.measured, spent_seconds=spent, left_seconds=left)
            if found.verdict != "other":
                self.guard = found
                if found.verdict == "unknown":
                    self._note(f"the winner's training was not compared with a plain plan's: {found.words}")
                return decision
            self.refused[plan] = found.words
            self._note(f"refused, though it was the fastest: {plan.words()}: {found.words}")
            decision = again()
        if decision is not None:
            self._note(f"{MOST_GUARDS} plans trained otherwise than a plain one; the winner was not compared any more")
        return decision
