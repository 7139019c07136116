"""A machine that is only played: its facts are this one's, its outcomes those of a synthetic landscape."""

import contextlib
from pathlib import Path

from autofit.commands.request import STARTED, TRIALS
from autofit.commands.tunes.backend import DeviceBackend
from autofit.contract.outcome import TRIAL
from autofit.output.document import REQUEST
from autofit.system.files import write_atomically
from autofit.system.strict_json import dump_json
from autofit.training.runner import TRIAL_FILE, trial_folder, unrated
from tests.support.synthetic import GIB, Landscape


class Replay:
    """Answers with a landscape, and leaves each trial in its folder as a real runner does.

    Args:
        folder: The output folder.
        events: By the number of the call, an exception to raise instead, or an outcome to answer with.
        landscape: Changes of the landscape.

    Attributes:
        asked: ``(number, plan, purpose)`` of every call, in order.
    """

    def __init__(self, folder: Path, events=None, **landscape):
        self.folder = folder
        self.events = events or {}
        self.shape = {"row_bytes": 0.05 * GIB, **landscape}
        self.asked = []
        self.efforts = []

    @property
    def facts(self):
        return STARTED.validate_json((self.folder / REQUEST).read_bytes()).facts

    @property
    def land(self):
        return Landscape(facts=self.facts, **self.shape)

    def run(self, number, plan, effort, *, purpose, limit_seconds):
        assert limit_seconds > 0
        event = self.events.get(len(self.asked))
        self.asked.append((number, plan, purpose))
        self.efforts.append(effort)
        if isinstance(event, BaseException):
            raise event
        trial = self.land.trial(plan, number, purpose)
        if event is not None:
            object.__setattr__(trial, "outcome", event)
        folder = trial_folder(self.folder / TRIALS, number)
        folder.mkdir(parents=True)
        write_atomically(folder / TRIAL_FILE, dump_json(TRIAL, trial))
        return trial


class Played(DeviceBackend):
    """A backend whose trials a runner plays: facts are this machine's; nothing is locked, timed, traced or trained.

    Args:
        server: Forks the process that reads the facts, for many tunes.
        given: The runner.
    """

    def __init__(self, server, given):
        self.lent, self.given = server, given

    def server(self, log, device, modules):
        return Lent(self.lent)

    def lock(self, facts):
        return contextlib.nullcontext()

    def rates(self, folder, facts, server, note):
        return facts

    def warnings(self, facts, folder):
        return ()

    def forecast(self, space, facts, config, *, server, folder, note, say):
        return None, unrated

    def runner(self, *_, **__):
        return self.given

    def look(self, *_):
        return None


class Recorded(Played):
    """A backend that plays a recorded landscape: its facts, its forecast and its trials; needs no device."""

    def device(self, asked, note):
        return "cpu"

    def facts(self, *_):
        return self.given.facts

    def same_hardware(self, folder, facts, server):
        return facts

    def forecast(self, space, *_, **__):
        return self.given.landscape.forecast_of(space), unrated


class Lent:
    """A fork server that many tunes use, since loading torch takes seconds."""

    def __init__(self, server):
        self.server = server

    def __getattr__(self, name):
        return getattr(self.server, name)

    def close(self):
        """It is not theirs to close."""

    rest = close
