"""``autofit tune``: facts -> space -> search -> trials -> decision -> files."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from autofit import space
from autofit.commands.backend import Backend, DeviceBackend, predicted_bytes, predicted_speeds
from autofit.commands.model_source import fetch, modeling_module, own_code
from autofit.commands.output_folder import (
    BEGUN,
    FORKSERVER_LOG,
    LOCK,
    names_before,
    remove_leftovers,
    remove_unstarted_output,
)
from autofit.commands.request import (
    DEFAULT_GLOBAL_BATCH,
    TRIALS,
    Request,
    Search,
    as_classes,
    as_knobs,
    check_request,
    keep_request,
    started_before,
    validated,
)
from autofit.commands.scripts.named import is_script
from autofit.commands.scripts.request import script_notes
from autofit.commands.shell.explanations import disturbance_notes, no_winner, peak_correction
from autofit.commands.shell.tune_config import write_config
from autofit.contract.facts import Facts, LaunchPath, Task
from autofit.costmodel.forecast import Forecast
from autofit.output.document import MODEL_FOLDER, REQUEST
from autofit.output.plan_words import plan_words
from autofit.output.result import Result, compose, write_result
from autofit.search import tradeoffs
from autofit.search.events import Events, Silent
from autofit.search.loop import Campaign
from autofit.search.recordings.writer import Writer
from autofit.search.searcher import open_searcher
from autofit.search.trial_log import TrialLog
from autofit.system import units
from autofit.system.errors import InputError, Interrupted, MachineError, Stopped
from autofit.system.files import usable_folder
from autofit.system.fork_server import ForkServer
from autofit.system.locks import held, waited_for
from autofit.system.tensor_cache import CACHE_FOLDER, TensorCache
from autofit.training.guard.equivalence import Look
from autofit.training.runner import Rated, finished

if TYPE_CHECKING:
    from autofit.search.decision import Decision
    from autofit.search.searcher import Searcher
    from autofit.space import Space
    from autofit.training.guard.equivalence import Guard

T = TypeVar("T")
MOST_GUARDS = 3


def tune(
    model: str,
    *,
    output: str | Path | None = None,
    device: str = "auto",
    processes: int | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    memory_limit: str | int | None = None,
    trials: int = 40,
    timeout: str | float | None = None,
    allow: str | Sequence[str] = "exact,numeric",
    fix: Mapping[str, object] | Sequence[str] = (),
    among: Mapping[str, object] | Sequence[str] = (),
    sampler: str = "autofit",
    launch_path: LaunchPath = "trainer",
    task: Task | None = None,
    lengths: str | Path | None = None,
    trust_remote_code: bool = False,
    storage: str | None = None,
    record: str | Path | None = None,
    resume: bool = False,
    seed: int = 0,
    guard: bool = True,
    arguments: Sequence[str] = (),
    call: int = 1,
    wait: bool = False,
    on: str | None = None,
    tokens: str | float | None = None,
    price: str | float | None = None,
    events: Events | None = None,
    backend: Backend | None = None,
) -> Result:
    """Find the fastest training configuration that fits.

    Args:
        model: Hub id, folder or file with a ``config.json``, or ``demo``; or the path of a training script.
        output: Folder for the answer and the trials; a temporary one by default.
        device: ``auto``, ``cuda`` or ``cpu``.
        processes: Of the whole training, one on each GPU; by default one.
        seq_len: Tokens in a row; by default the lesser of 1024 and the model's longest.
        global_batch: Rows to an optimizer step; by default 32, or what the script takes.
        memory_limit: The ceiling: bytes, a size (``"22GiB"``) or a share of what is free (``"90%"``); by default
            92 % of what is free.
        trials: No more plans than these before the playoff; what is measured once more comes on top.
        timeout: No longer than this: seconds, or words such as ``"10m"``.
        allow: Classes of techniques that may be used: ``exact``, ``numeric``, ``method``.
        fix: A value for each knob that is held: ``{"precision": "bf16"}``, or ``["precision=bf16"]``.
        among: The values that a knob is restricted to: ``{"micro_batch": [1, 2]}``, or ``["micro_batch=1,2"]``.
        sampler: ``autofit``, ``tpe``, ``gp``, ``random`` or ``grid``.
        launch_path: ``trainer`` or ``loop``: how the training will be run.
        task: What the model is to be trained for; by default what its config names.
        lengths: File with the tokens of each row, or of a sample of them; by default all are as long as ``seq_len``.
        trust_remote_code: Whether the model's own code may run.
        storage: URL of an Optuna storage, instead of the journal in the output folder.
        record: File that gets a line of JSON for each trial.
        resume: Go on with what the output folder holds.
        seed: Of the search and of the random tokens.
        guard: Reject a winner whose losses or gradients in a few steps differ from a float32 baseline's.
        arguments: What stands behind the script on its command line.
        call: Which of the script's calls of ``train()`` is tuned.
        wait: Wait for a device that another tune holds, instead of giving up.
        on: Measure on the machines of a Ray cluster, several trials at once: ``auto``, ``HOST:PORT`` or
            ``ray://HOST[:PORT]``.
        tokens: Tell how long a training on so many takes with the winner; 1e9 where a ``price`` is given alone.
        price: Of an hour of all devices of the training, such as ``"2.5/h"``: tell what that training costs.
        events: Told of what happens.
        backend: Where to measure; by default this machine's device.

    Raises:
        InputError: An argument or the model can't be used.
        NothingFits: Every plan that was tried breaks the ceiling.
        MachineError: The machine stands in the way, or no plan got as far as to be measured.
        Interrupted: Ctrl-C; the best so far is written, if there is one.
    """
    default_batch = None if is_script(str(model)) else DEFAULT_GLOBAL_BATCH
    request = validated(
        Request,
        {
            "model": str(model),
            "device": device,
            "processes": processes,
            "seq_len": seq_len,
            "global_batch": default_batch if global_batch is None else global_batch,
            "memory_limit": None if memory_limit is None else str(memory_limit),
            "launch_path": launch_path,
            "trust_remote_code": trust_remote_code,
            "seed": seed,
            "task": task,
            "lengths": None if lengths is None else str(lengths),
            "arguments": tuple(arguments),
            "call": call,
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
            "on": on,
            "tokens": None if tokens is None else units.parse_tokens(tokens),
            "price": None if price is None else units.parse_price(str(price)),
        },
    )
    check_request(request, settings)
    folder = Path(output) if output else Path(tempfile.mkdtemp(prefix="autofit-"))
    fresh = not output or not folder.exists()
    before = names_before(folder)
    usable_folder(folder)
    teller = events or Silent()
    with held(folder / LOCK, f"another tune is writing {folder}", "give each tune its own --output"):
        if before & BEGUN:
            remove_leftovers(folder)
        try:
            found = _Tune(folder, request, settings, teller, backend or _backend(request, settings), wait).run(
                resume=resume
            )
            write_config(folder, request, settings)
            return found
        finally:
            teller.close()
            if not (folder / REQUEST).exists():
                remove_unstarted_output(folder, whole=fresh, but=before)


def _backend(request: Request, settings: Search) -> Backend:
    """Where to measure."""
    if settings.on is None:
        return DeviceBackend()
    from autofit.commands.on_cluster import ClusterBackend

    return ClusterBackend(settings.on, request.processes or 1)


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
        return None, error if isinstance(error, Stopped) else Interrupted("stopped by Ctrl-C")


@dataclass(slots=True)
class _Tune:
    """One tune, from the facts to the files.

    Attributes:
        wait: Whether to wait for a device that another tune holds.
        notes: What a reader of the report should know, in order; :meth:`_note` adds to them.
        guard: The comparison of the winner's training with a baseline's, once it was made.
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

    @property
    def trials_folder(self) -> Path:
        return self.folder / TRIALS

    def run(self, *, resume: bool) -> Result:
        before = started_before(self.folder, self.request, resume=resume, say=self._note)
        device = self.backend.device(before.facts.hardware.device if before else self.request.device, self._note)
        config = self.folder / MODEL_FOLDER
        modules: tuple[str, ...] = ()
        if not self.request.is_script:
            if before is None:
                fetch(self.request.model, config, trust_remote_code=self.request.trust_remote_code)
            code = own_code(config, trusted=self.request.trust_remote_code)
            if code is not None:
                self._note(code)
            modules = modeling_module(config)
        server = self.backend.server(self.folder / FORKSERVER_LOG, device, modules)
        with contextlib.closing(server), TensorCache(self.trials_folder / CACHE_FOLDER):
            if before is not None:
                facts = before.facts
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
                script = facts.workload.script
                if before is None and (script is None or script.trainer):  # a plain loop has no forecast
                    facts = self.backend.rates(self.folder, facts, server, self._note)
                return self._tune(facts, plans, config, server)

    def _space(self, facts: Facts) -> Space:
        """The plans that may be tried."""
        return space.build(
            facts,
            space.parse_allowed(self.settings.allowed),
            space.parse_knobs(self.settings.fix, self.settings.among, facts),
        )

    def _check_tokens(self, facts: Facts) -> None:
        """Refuse to tell the hours of tokens of a model that takes none."""
        asked = self.settings.tokens is not None or self.settings.price is not None
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
        found, rated = self.backend.forecast(
            plans, facts, config, server=server, folder=self.folder, note=self._note, say=self.events.note
        )
        campaign = self._campaign(facts, plans, config, server, found, rated)
        spent = sum(trial.wall_seconds for trial in campaign.trials)
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
                decision, stopped = _until_stopped(lambda: self._decision(campaign, searcher, look))
        if stopped is not None:
            decision = self._best_so_far(campaign, server, stopped)
        for words in disturbance_notes(campaign.trials):
            self._note(words)
        if decision is None:
            raise no_winner(
                campaign.trials, campaign.refused, facts, plans, forecast=found, trials_folder=self.trials_folder
            )
        correction = peak_correction(searcher.peak_posterior(), facts)
        if correction:
            self._note(correction)
        document = compose(
            decision,
            facts,
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
        speeds = predicted_speeds(plans, found) if alike else {}
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
                self._note("the time is spent: the winner's training was not compared with the float32 baseline's")
                return decision
            plan, spent = decision.plan, time.monotonic() - self.began
            self.events.note(f"comparing the training of {plan_words(plan)} with the float32 baseline's")
            found = look(plan, decision.measured, spent_seconds=spent, left_seconds=left)
            if found.verdict != "other":
                self.guard = found
                if found.verdict == "unknown":
                    self._note(f"the winner's training was not compared with the float32 baseline's: {found.words}")
                return decision
            campaign.refuse(plan, found.words)
            self._note(f"refused, though it was the fastest: {plan.words()}: {found.words}")
            decision = campaign.playoff()
        if decision is not None:
            self._note(f"{MOST_GUARDS} plans were refused; the winner was not compared any more")
        return decision
