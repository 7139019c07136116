"""The load: a tune of thousands of trials, played back from a made-up land, and then gone on with.

    python tests/bench/load.py [--trials 2000] [--samplers autofit,random] [--json FILE]

Each sampler's tune runs in a process of its own, with every trial in its folder as on a device. The default sampler
would stop after a dozen: here it is told that any gain is worth a trial. Measured are the resident set of the parent,
the size of the journal, what an ask takes early and late, and how long a resumed tune takes until it asks: with its
journal, and with the journal lost, so that it is written anew from the trials.

Asks and resumes are counted in processor time, since a shared machine may make them wait.

It ends with status 1 where a bound is broken; the last line is one JSON object.
"""

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS.parent))

from autofit import space  # noqa: E402
from autofit.commands.request import TRIALS  # noqa: E402
from autofit.commands.tune import tune  # noqa: E402
from autofit.contract.outcome import TRIAL  # noqa: E402
from autofit.costmodel.seconds.roofline import WORK  # noqa: E402
from autofit.machine.packages import installed  # noqa: E402
from autofit.output.document import read_document  # noqa: E402
from autofit.search import risk, sampler, searcher  # noqa: E402
from autofit.search.events import Silent  # noqa: E402
from autofit.search.journal import JOURNAL_FILE  # noqa: E402
from autofit.search.recordings import landscape, replay  # noqa: E402
from autofit.search.recordings.writer import Run  # noqa: E402
from autofit.search.surrogate import posterior  # noqa: E402
from autofit.system.files import write_atomically  # noqa: E402
from autofit.system.statistics import median  # noqa: E402
from autofit.system.strict_json import dump_json  # noqa: E402
from autofit.system.units import MIB  # noqa: E402
from autofit.training.runner import TRIAL_FILE, trial_folder  # noqa: E402
from tests.support import synthetic  # noqa: E402
from tests.support.replay import Recorded  # noqa: E402

KNOBS = ("compile=off",)
BOUNDS = {
    "grown_mib": 64.0,  # the resident set from the 100th trial to the last
    "journal_mib": 20.0,
    "ask_seconds": 0.2,  # of the last hundred: the median
    "resume_seconds": 5.0,
    "rebuild_seconds": 5.0,
}


def land(seed: int = 0) -> landscape.Landscape:
    """Some thousand plans on a card that nobody has, and what each of them gives."""
    facts = dataclasses.replace(synthetic.cuda_facts(global_batch=64), packages=installed())
    truth = synthetic.Landscape(facts=facts, seed=seed)
    plans = space.build(facts, space.parse_allowed("exact,numeric,method"), space.parse_knobs(KNOBS, (), facts)).plans
    runs = {}
    for plan in plans:
        trial = truth.trial(plan, 0)
        rng = np.random.default_rng(abs(hash(plan.words())) % 2**32)
        seconds = truth.step_seconds(plan) / facts.workload.global_batch
        shares = np.zeros(len(WORK))
        shares[[0, -2, -1]] = np.array([1e13, 4e11, 2e4]) * seconds * np.exp(rng.normal(0, 0.1, 3))
        run = Run(
            plan=plan,
            outcome=trial.outcome,
            wall_seconds=1.0,
            traced_bytes=round(truth.peak_bytes(plan) - 0.5 * synthetic.GIB),
            work=tuple(shares.tolist()),
        )
        runs[plan] = (run,)
    return landscape.Landscape(facts, runs, {"made up": True})


class Kept(replay.Replay):
    """Plays a land back, and leaves each trial in its folder as a real runner does."""

    folder = Path()

    def run(self, number, plan, effort, *, purpose, limit_seconds):
        """One trial."""
        trial = super().run(number, plan, effort, purpose=purpose, limit_seconds=limit_seconds)
        folder = trial_folder(self.folder / TRIALS, number)
        folder.mkdir(parents=True)
        write_atomically(folder / TRIAL_FILE, dump_json(TRIAL, trial))
        return trial


class Watched(searcher.Searcher):
    """Tells how long each ask took."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.began = time.perf_counter()
        ASKS.append(self)
        self.seconds, self.resident = [], []

    def ask(self):
        """The next plan."""
        began = time.process_time()
        try:
            return super().ask()
        finally:
            self.seconds.append(time.process_time() - began)
            self.resident.append(psutil.Process().memory_info().rss)


ASKS: list[Watched] = []


class Ready(Silent):
    """Knows when a tune had read all there was."""

    at = 0.0

    def ready(self, facts, space, known):
        """The trials that were known are read."""
        self.at, self.known = time.process_time(), known


class Unread:
    """In the server's place: nobody reads what was written for a card that is not here."""

    @contextlib.contextmanager
    def ask(self, *_):
        """No error."""
        yield {"error": None}


def go(folder: Path, name: str, trials: int, *, resume: bool = False) -> tuple[float, int]:
    """One tune; the seconds until it was ready, and how many trials it knew then."""
    searcher.Searcher = Watched
    risk.MIN_GAIN = sampler.MIN_GAIN = 0.0
    sampler.MIN_TRIALS = 10**9
    posterior._EXCLUDE_STDS = 1e9
    runner, events = Kept(land()), Ready()
    runner.folder = folder
    began = time.process_time()
    tune(
        "demo", output=folder, global_batch=64, seq_len=1024, allow="exact,numeric,method", fix=KNOBS, trials=trials,
        sampler=name, backend=Recorded(Unread(), runner), events=events, resume=resume,
    )  # fmt: skip
    return events.at - began, events.known


def first(name: str, trials: int, folder: str) -> dict:
    """A tune from its beginning to its end."""
    began = time.perf_counter()
    go(Path(folder), name, trials)
    (one,) = ASKS
    found = read_document(folder)
    asked = one.seconds[:trials]
    early, late = asked[20:120], asked[-100:]
    resident = np.array(one.resident[:trials]) / MIB
    return {
        "trials": len(found.trials),
        "seconds": round(time.perf_counter() - began, 1),
        "ask_early_seconds": round(median(early), 4),
        "ask_seconds": round(median(late), 4),
        "ask_slowest_seconds": round(max(asked), 4),
        "resident_mib": [round(float(value), 1) for value in resident[:: max(1, trials // 10)]] + [round(resident[-1])],
        "grown_mib": round(float(resident[-1] - resident[min(100, len(resident) // 2)]), 1),
        "journal_mib": round((Path(folder) / JOURNAL_FILE).stat().st_size / MIB, 2),
        "document_mib": round((Path(folder) / "autofit.json").stat().st_size / MIB, 2),
        "report_mib": round((Path(folder) / "report.html").stat().st_size / MIB, 2),
    }


def again(name: str, trials: int, folder: str) -> dict:
    """The same tune gone on with for three trials."""
    seconds, known = go(Path(folder), name, trials, resume=True)
    (one,) = ASKS
    return {"seconds": round(seconds + one.seconds[0], 2), "known": known}


def apart(function, *args) -> dict:
    """A call in a process of its own, since what it measures is that process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def measure(name: str, trials: int) -> dict:
    """All figures of one sampler."""
    folder = tempfile.mkdtemp(prefix="autofit-load-")
    try:
        found = apart(first, name, trials, folder)
        resumed = apart(again, name, trials + 3, folder)
        assert resumed["known"] == found["trials"], resumed
        (Path(folder) / JOURNAL_FILE).unlink()
        rebuilt = apart(again, name, trials + 6, folder)
        assert rebuilt["known"] > resumed["known"], rebuilt
    finally:
        shutil.rmtree(folder)
    return {**found, "resume_seconds": resumed["seconds"], "rebuild_seconds": rebuilt["seconds"]}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--samplers", default="autofit,random")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    found = {name: measure(name, arguments.trials) for name in arguments.samplers.split(",")}
    broken = [
        f"{name}: {bound} is {figures[bound]}, more than {most}"
        for name, figures in found.items()
        for bound, most in BOUNDS.items()
        if figures[bound] > most
    ]
    for words in broken:
        print(words, file=sys.stderr)
    answer = {"plans": len(land().runs), "bounds": BOUNDS, "samplers": found, "broken": broken}
    if arguments.json:
        arguments.json.write_text(json.dumps(answer, indent=1) + "\n", "utf-8")
    print(json.dumps(answer))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
