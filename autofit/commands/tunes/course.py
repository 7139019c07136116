"""The course of a tune: facts -> space -> search -> trials -> decision -> files."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from autofit import space
from autofit.commands.model_source import config_words, fetch, modeling_module
from autofit.commands.request import TRIALS, Request, Search, keep_request, started_before
from autofit.commands.scripts.request import check_same_training, script_notes
from autofit.commands.shell.explanations import disturbance_notes, no_winner, peak_correction
from autofit.commands.tunes.backend import Backend, predicted_bytes, predicted_speeds
from autofit.commands.tunes.evaluation import UNEVALUATED, Try, evaluating, scripts_own, trials_of
from autofit.commands.tunes.output_folder import FORKSERVER_LOG
from autofit.contract.facts import Facts
from autofit.contract.outcome import Outcome, Trial
from autofit.costmodel.forecast import Forecast
from autofit.output.document import MODEL_FOLDER, REQUEST, read_document
from autofit.output.plan_words import plan_words
from autofit.output.result import Result, compose, write_result
from autofit.output.text import plural
from autofit.search import tradeoffs
from autofit.search.events import Events
from autofit.search.loop import LONGEST_TRIAL_SECONDS, Campaign
from autofit.search.recordings.writer import Writer
from autofit.search.searcher import open_searcher
from autofit.search.trial_log import TrialLog
from autofit.system.errors import AutofitError, InputError, Interrupted, MachineError, Stopped
from autofit.system.forking.server import ForkServer
from autofit.system.locks import waited_for
from autofit.system.tensor_cache import CACHE_FOLDER, TensorCache
from autofit.system.units import duration
from autofit.training.guard.equivalence import Look
from autofit.training.runner import Rated, finished

if TYPE_CHECKING:
    from autofit.search.decision import Decision
    from autofit.search.searcher import Searcher
    from autofit.space import Space
    from autofit.training.guard.equivalence import Guard

T = TypeVar("T")
MOST_GUARDS = 3


@contextlib.contextmanager
def _best_in_hint(campaign: Campaign) -> Iterator[None]:
    """Name the best plan so far in the hint of a machine error: the tune may not be resumable."""
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
        return None, _stopped(error)


def _stopped(error: KeyboardInterrupt) -> Stopped:
    return error if isinstance(error, Stopped) else Interrupted("stopped by Ctrl-C")


@contextlib.contextmanager
def _resumable() -> Iterator[None]:
    """Say what is left where a tune is stopped while its answer is made."""
    try:
        yield
    except KeyboardInterrupt as error:
        stopped = _stopped(error)
        stopped.hint = "the answer was being written: no trial is lost, go on with --resume"
        raise stopped from None


@dataclass(slots=True)
class Course:
    """The course of one tune, from the facts to the files.

    Attributes:
        wait: Whether to wait for a device that another tune holds.
        notes: What a reader of the report should know, in order; :meth:`_note` adds to them.
        guard: The comparison of the winner's training with a baseline's, once it was made.
        evaluated_rows: That a run of the winner has evaluated at once, where they are more than usual.
    """

    folder: Path
    request: Request
    settings: Search
    events: Events
    backend: Backend
    wait: bool = False
    began: float = field(default_factory=time.monotonic)
    notes: list[str] = field(default_factory=list)
    guard: Guard | None = None
    evaluated_rows: int = 0

    @property
    def trials_folder(self) -> Path:
        """A folder for each trial."""
        return self.folder / TRIALS

    def run(self, *, resume: bool) -> Result:
        """The answer, written; raises as :func:`autofit.commands.tune.tune` says."""
        before = started_before(self.folder, self.request, resume=resume, say=self._note)
        device = self.backend.device(before.facts.hardware.device if before else self.request.device, self._note)
        config = self.folder / MODEL_FOLDER
        modules: tuple[str, ...] = ()
        if not self.request.is_script:
            if before is None:
                fetch(self.request.model, config, trust_remote_code=self.request.trust_remote_code)
            for words in config_words(config, trusted=self.request.trust_remote_code):
                self._note(words)
            modules = modeling_module(config)
        server = self.backend.server(self.folder / FORKSERVER_LOG, device, modules)
        cache = TensorCache(self.trials_folder / CACHE_FOLDER)
        with cache, contextlib.closing(server), self._in_time(server):  # what a snapshot has noted is undone first
            if before is not None:
                facts = self.backend.same_hardware(self.folder, before.facts, server)
                for words in check_same_training(self.folder, self.request, facts, server, self.events.note):
                    self._note(words)
            else:
                facts = self.backend.facts(self.folder, self.request, device, server, self._note)
            self._check_tokens(facts)
            plans = self._space(facts)
            for words in script_notes(facts):
                self._note(words)
            with self._locked(facts) as waited:
                if waited and before is None:  # what was free then is not what is free now
                    facts = self.backend.facts(self.folder, self.request, device, server, self._note)
                    plans = self._space(facts)
                if before is None:
                    facts = self.backend.rates(self.folder, facts, server, self._note)
                return self._tune(facts, plans, config, server)

    @contextlib.contextmanager
    def _in_time(self, server: ForkServer) -> Iterator[None]:
        """Have the server answer before the time budget is spent, until its times are others.

        Raises:
            MachineError: It was spent before the question was known.
        """
        given = self.settings.timeout_seconds
        server.ends = math.inf if given is None else self.began + given
        try:
            yield
        except AutofitError as error:
            if not server.late:
                raise
            spent = f"{duration(given or 0.0)} are spent"
            raise MachineError(
                f"--timeout: {spent}, and what {self.request.model!r} trains is not known yet",
                hint="give a longer --timeout, or none",
            ) from error

    def _space(self, facts: Facts) -> Space:
        """The plans that may be tried."""
        return space.build(
            facts,
            space.parse_allowed(self.settings.allowed),
            space.parse_knobs(self.settings.fix, self.settings.among, facts),
        )

    def _check_tokens(self, facts: Facts) -> None:
        """Refuse to tell the hours of tokens of a model that takes none; a script's own training has rows."""
        priced = self.settings.price is not None and facts.workload.own_rows is None
        asked = self.settings.tokens is not None or priced
        if asked and not facts.model.sample_tokens:
            raise InputError(
                f"--tokens and --price: {facts.model.name} is not trained on text",
                hint="leave them out; the answer tells samples/s",
            )

    @contextlib.contextmanager
    def _locked(self, facts: Facts) -> Iterator[bool]:
        """Hold the device's lock; gives whether it was waited for."""
        if self.wait:
            with waited_for(lambda: self.backend.lock(facts), self.events.note) as waited:
                yield waited
        else:
            with self.backend.lock(facts):
                yield False

    def _note(self, words: str) -> None:
        self.notes.append(words)
        self.events.note(words)

    def _tune(self, facts: Facts, plans: Space, config: Path, server: ForkServer) -> Result:
        """Search, decide and write; the best so far where the tune is stopped."""
        for words in self.backend.warnings(facts, self.folder):
            self._note(words)
        if facts.model.has_experts:
            self._note("experts are routed by random weights here: trained ones may be less balanced, and slower")
        left = self._left()
        server.ends = math.inf if left is None else time.monotonic() + left / 2  # trials tell what traces do not
        found, rated = self.backend.forecast(
            plans, facts, config, server=server, folder=self.folder, note=self._note, say=self.events.note
        )
        server.ends, server.late = math.inf, False  # trials have limits, and an answer is written, however late
        campaign = self._campaign(facts, plans, config, server, found, rated)
        spent = self._spent(campaign.trials)
        with _best_in_hint(campaign):
            self.events.ready(facts, plans, len(campaign.trials))
            _, stopped = _until_stopped(campaign.retry_interrupted_trial)
            searcher = open_searcher(
                self.folder,
                plans,
                facts,
                sampler=self.settings.sampler,
                seed=self.request.seed,
                storage=self.settings.storage,
                trials=campaign.trials if stopped is None else campaign.trials[:-1],  # the last one is to be repeated
                forecast=found,
            )
            if not (self.folder / REQUEST).exists():
                keep_request(self.folder, self.request, facts)
            decision = None
            if stopped is None:
                look = self.backend.look(self.folder, facts, config, server) if self.settings.guard else None
                run = trials_of(self.trials_folder, config, server)
                decision, stopped = _until_stopped(
                    lambda: self._evaluating(self._decision(campaign, searcher, look), facts, plans, found, run)
                )
        if stopped is not None:
            decision = self._best_so_far(campaign, server, stopped)
            self._unevaluated(facts)
        for words in disturbance_notes(campaign.trials):
            self._note(words)
        if decision is None:
            raise no_winner(
                campaign.trials,
                campaign.refused,
                facts,
                plans,
                forecast=found,
                trials_folder=self.trials_folder,
                timeout=self.settings.timeout_seconds if campaign.is_spent() else None,
            )
        with _resumable():
            correction = peak_correction(searcher.peak_posterior(), facts)
            if correction:
                self._note(correction)
            document = compose(
                decision,
                facts.evaluating(self.evaluated_rows),
                campaign.trials,
                notes=self.notes,
                seconds=spent + time.monotonic() - self.began,
                guard=self.guard,
                front=tradeoffs.front(decision),
                contributions=tradeoffs.contributions(decision, campaign.trials, plans, facts, searcher.expected),
                tokens=self.settings.tokens,
                price=self.settings.price,
            )
            result = write_result(document, self.folder, server)
        if stopped is not None:
            stopped.answer = result
            stopped.hint = f"the best so far is in {self.folder}; go on with --resume"
            raise stopped
        return result

    def _campaign(  # noqa: PLR0917 - what the tune has found out
        self, facts: Facts, plans: Space, config: Path, server: ForkServer, found: Forecast | None, rated: Rated
    ) -> Campaign:
        """The campaign with the trials that are known; it alone adds to them."""
        trials = TrialLog(finished(self.trials_folder))
        predicted = predicted_bytes(plans, found)
        work = facts.workload
        alike = work.processes == 1 and not work.lengths and work.script is None  # else no range is known
        speeds = predicted_speeds(plans, facts, found) if alike else {}
        runner = self.backend.runner(
            self.trials_folder, facts, config, server, predicted, known=trials, note=self._note, rated=rated,
            speeds=speeds,
        )  # fmt: skip
        record = self.settings.record
        return Campaign(
            facts=facts,
            space=plans,
            runner=runner,
            events=self.events,
            note=self._note,
            left=self._left,
            seconds=self.settings.timeout_seconds,
            trials=trials,
            record=Writer(record, facts, plans, found) if record else None,
            workers=self.backend.workers(),
        )

    def _best_so_far(self, campaign: Campaign, server: ForkServer, stopped: Stopped) -> Decision:
        """End the running trial, and decide among what was measured.

        Raises:
            Stopped: Nothing was measured inside the ceiling yet.
        """
        self.events.note("stopping: the best so far is being written")
        server.stop_job()
        server.close()
        decision = campaign.decide()
        if decision is None:
            stopped.hint = "no plan was measured inside the ceiling yet; go on with --resume"
            raise stopped
        self._note("stopped before its end: this is the best of what was measured until then")
        return decision

    def _decision(self, campaign: Campaign, searcher: Searcher, look: Look | None) -> Decision | None:
        """Search, re-measure the finalists, and compare the winner's training with a baseline's."""
        campaign.search(searcher, self.settings.trials)
        campaign.baseline(searcher, self.settings.trials)
        decision = campaign.playoff()
        return decision if look is None else self._guarded(decision, campaign, look)

    def _evaluating(
        self, decision: Decision | None, facts: Facts, plans: Space, found: Forecast | None, run: Try
    ) -> Decision | None:
        """The winner, run once more with the most rows that a Trainer may evaluate at once, which is kept."""
        roomy = None if found is None else found.evaluable_rows
        left, rows = self._left(), scripts_own(facts)
        if decision is not None and roomy is not None and facts.workload.script is None:
            rows = int(roomy[plans.plans.index(decision.plan)])
        if decision is None or not rows:
            return decision
        if left is not None and left <= 0:
            self._unevaluated(facts)
            return decision
        self.events.note(f"evaluating {plural(rows, 'row')} at once beside the winner")

        def attempt(one: Facts) -> Outcome:
            left = self._left()
            return run(decision.plan, one, LONGEST_TRIAL_SECONDS if left is None else max(1.0, left))

        measured, rows, said = evaluating(decision, facts, rows, attempt)
        for words in said:
            self._note(words)
        self.evaluated_rows = rows
        return dataclasses.replace(decision, measured=measured)

    def _unevaluated(self, facts: Facts) -> None:
        """Say that nobody has looked at a script's evaluation."""
        if scripts_own(facts):
            self._note(f"{UNEVALUATED}: the tune has ended before")

    def _spent(self, trials: Sequence[Trial]) -> float:
        """Seconds of the tunes that this one goes on with: what their answer tells, or at least those of its trials."""
        seconds = sum(trial.wall_seconds for trial in trials)
        with contextlib.suppress(AutofitError):
            return max(seconds, read_document(self.folder).seconds) if trials else 0.0
        return seconds

    def _left(self) -> float | None:
        """Seconds left of the time budget."""
        given = self.settings.timeout_seconds
        return None if given is None else given - (time.monotonic() - self.began)

    def _guarded(self, decision: Decision | None, campaign: Campaign, look: Look) -> Decision | None:
        """The first winner whose training agrees with the float32 baseline's; others are refused.

        Args:
            decision: The winner so far.
            campaign: Is told which plans to refuse, and re-measures the rest.
            look: Compares the training of a plan with the baseline's.
        """
        for _ in range(MOST_GUARDS):
            if decision is None:
                return None
            left = self._left()
            if left is not None and left <= 0:
                self._note(
                    "the time is spent: the winner's training was not compared with the float32 baseline's; --resume "
                    "with a longer --timeout compares them"
                )
                return decision
            plan, spent = decision.plan, time.monotonic() - self.began
            self.events.note(f"comparing the training of {plan_words(plan)} with the float32 baseline's")
            found = look(plan, decision.measured, spent_seconds=spent, left_seconds=left)
            if found.verdict != "other":
                self.guard = found
                if found.split is not None:
                    self.events.note(found.split)
                if found.verdict == "unknown":
                    self._note(f"the winner's training was not compared with the float32 baseline's: {found.words}")
                return decision
            campaign.refuse(plan, found.words)
            self._note(f"refused, though it was the fastest: {plan_words(plan)}: {found.words}")
            decision = campaign.playoff()
        if decision is not None:
            self._note(f"{MOST_GUARDS} plans were refused; the winner was not compared any more")
        return decision
