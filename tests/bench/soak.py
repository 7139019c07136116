"""Hundreds of trials, a random fault in every third: the answer is the one that an undisturbed tune gives.

``python tests/bench/soak.py --trials 500 --seed 0 --json``. Each trial is a real process of the real runner, with its
folder, its limit and its line in the journal, and the faults happen in it. Its training is played: a trial writes what
a synthetic landscape says of its plan, so that the two answers can be held against one another exactly, and so that
500 take minutes. With ``--real`` each trial trains. The last line is one JSON object.
"""

# ruff: noqa: E402 - the tests' own modules are found from the repository

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(HERE))

import psutil

from autofit import space
from autofit.search import loop
from autofit.search.loop import Campaign
from autofit.search.searcher import open_searcher
from autofit.search.trial_log import TrialLog
from autofit.system.forking.server import ForkServer
from autofit.training.runner import ProcessRunner, finished
from tests.faults.injection import DEATHS, HANGS, midst
from tests.support.synthetic import GIB, Landscape, cpu_facts
from tests.support.tiny import describe, write_config

PLAYED = """
import sys
sys.path.insert(0, {here!r})
from autofit import worker
from autofit.training.timing import Clock
from autofit.system.files import write_atomically
from autofit.contract.outcome import OUTCOME
from autofit.system.strict_json import dump_json
from tests.support.synthetic import GIB, Landscape
job = worker.JOBS.validate_json((folder / "job.json").read_bytes())
land = Landscape(facts=job.facts, row_bytes=0.05 * GIB)
"""
PLAY = "write_atomically(folder / 'outcome.json', dump_json(OUTCOME, land.outcome(job.plan, 0)))\n"
OOM = "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB.')"
SQUEEZED = """
from autofit.contract.outcome import OutOfMemory
found = OutOfMemory(where="device", phase="{phase}", limit_bytes=job.facts.workload.limit_bytes, peak_bytes=1 << 20)
write_atomically(folder / "outcome.json", dump_json(OUTCOME, found))
"""
DIVERGED = """
from autofit.contract.outcome import Diverged
write_atomically(folder / "outcome.json", dump_json(OUTCOME, Diverged(loss="nan", step=1)))
"""
CHILDREN = """
import os, signal, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.setsid()
    if os.fork():
        os._exit(0)
    time.sleep(1000)
time.sleep(0.1)
os._exit(9)
"""
SERVER = "import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(100)\n"


def faults(real: bool) -> dict[str, str]:
    """What a trial's process does instead of its work, by name."""
    found = {"children": CHILDREN, "torn result": "(folder / 'outcome.json').write_text('{')\n", "server": SERVER}
    for name, (action, _) in DEATHS.items():
        found[name] = midst(action) if real else f"import ctypes, os, signal\n{action}\n"
    for name, action in HANGS.items():
        found[f"hangs {name}"] = midst(action) if real else f"import ctypes, os, signal, time\n{action}\n"
    for phase in ("forward", "backward", "optimizer"):
        found[f"out of memory, {phase}"] = (
            midst(f"import torch; {OOM}", phase) if real else SQUEEZED.format(phase=phase)
        )
    found["not a number"] = DIVERGED
    return found


class Faulty:
    """A runner that leaves a fault in the model's folder for every third trial."""

    def __init__(
        self, runner: ProcessRunner, config: Path, prologue: str, work: str, kinds: dict, rng: random.Random | None
    ):
        self.runner, self.script = runner, config / "fault.py"
        self.prologue, self.work, self.kinds, self.rng = prologue, work, kinds, rng
        self.calls, self.injected, self.last = 0, Counter(), None

    def run(self, number, plan, effort, *, purpose, limit_seconds):
        code = self.work
        due = self.rng is not None and self.calls % 3 == 2
        again = self.last == plan  # the second look at a plan is left alone: every third is the rule, not every one
        self.calls += 1
        if due and not again:
            name = self.rng.choice(sorted(self.kinds))
            self.injected[name] += 1
            code = self.kinds[name]
        elif due:
            self.calls -= 1
        self.last = plan
        self.script.write_text(self.prologue + code, "utf-8")
        return self.runner.run(number, plan, effort, purpose=purpose, limit_seconds=limit_seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true", help="train in each trial")
    parser.add_argument("--json", action="store_true", help="no talk")
    options = parser.parse_args()
    loop.LEAST_LIMIT_SECONDS = 3.0 if not options.real else 10.0
    loop.SLOWEST = 3
    loop.MOST_REPEATS = 0
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        result = soak(Path(folder), options)
    print(json.dumps(result))
    return 0 if result["passed"] else 1


def soak(root: Path, options: argparse.Namespace) -> dict:
    os.environ["PYTHONPATH"] = os.pathsep.join((str(HERE), str(HERE / "tests" / "support")))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TMPDIR"] = os.environ["AUTOFIT_LOCKS"] = str(root / "tmp")
    (root / "tmp").mkdir()
    config = write_config(root / "tiny", vocab_size=1024)
    server = ForkServer(root / "server.log", "cpu", ("faulty", "tests.support.synthetic"))
    answers, rows, began = {}, {}, time.monotonic()
    with contextlib.closing(server):
        if options.real:
            facts = describe(server, config, limit_bytes=GIB, global_batch=16)
            plans = space.build(facts)
        else:
            facts = cpu_facts(global_batch=64)
            plans = space.build(facts, space.parse_allowed("exact,numeric,method"))
        prologue, work = ("", "honest(folder)\n") if options.real else (PLAYED.format(here=str(HERE)), PLAY)
        first = psutil.Process()
        for name in ("soak", "undisturbed"):
            output = root / name
            output.mkdir()
            rng = random.Random(options.seed) if name == "soak" else None
            done = TrialLog()
            notes: list[str] = []
            runner = Faulty(
                ProcessRunner(output / "trials", facts, config, server, known=done, note=notes.append),
                config, prologue, work, faults(options.real), rng,
            )  # fmt: skip
            searcher = open_searcher(output, plans, facts, sampler="random", seed=options.seed, trials=done)
            files_before = first.num_fds()
            one = Campaign(facts=facts, space=plans, runner=runner, trials=done, note=notes.append, hopeless=1e9)
            start = time.monotonic()
            ended = False
            wanted = rows["soak"]["plans"] if rng is None else None  # the same plans, without the faults
            while not ended and (len(done) < options.trials if wanted is None else _plans(done) < wanted):
                ended = not one.step(searcher)
                if not options.json and len(done) % 50 == 0:
                    print(f"{name}: {len(done)} trials, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            plans_tried = _plans(done)
            decision = one.playoff()
            answers[name] = decision
            rows[name] = {
                "trials": len(done),
                "plans": plans_tried,
                "seconds": round(time.monotonic() - start, 1),
                "injected": dict(runner.injected),
                "outcomes": dict(Counter(trial.outcome.kind for trial in done)),
                "descriptors_before": files_before,
                "descriptors_after": first.num_fds(),
                "readable_again": len(list(finished(output / "trials"))) == len(done),
                "journal_lines_whole": all(
                    isinstance(json.loads(line), dict) for line in (output / "journal.log").read_text().splitlines()
                ),
                "stray_files": [path.name for path in output.rglob("*.tmp")],
            }
        helper = server._process.pid if server._process else 0
        orphans = [pid for pid in _ours(root) if pid != helper]
    time.sleep(0.5)
    left = _ours(root)
    strays = [path.name for path in (root / "tmp").iterdir() if not path.name.startswith("torchinductor_")]
    quiet, loud = answers["undisturbed"], answers["soak"]
    ratio = loud.measured.step_seconds / quiet.measured.step_seconds if loud and quiet else None
    if not options.real and loud and quiet:  # what the land itself says of the two plans, without noise
        land = Landscape(facts=facts, row_bytes=0.05 * GIB)
        ratio = land.step_seconds(loud.plan) / land.step_seconds(quiet.plan)
    noise = 0.03 if not options.real else max(
        0.1, (quiet.measured.step_seconds_spread + loud.measured.step_seconds_spread) / quiet.measured.step_seconds
    )  # fmt: skip
    soaked = rows["soak"]
    checks = {
        "same_answer_within_noise": ratio is not None and ratio <= 1 + noise,
        "no_orphans": not orphans and not left,
        "no_stray_files": not strays and not soaked["stray_files"],
        "no_leaked_descriptors": soaked["descriptors_after"] <= soaked["descriptors_before"] + 1,
        "all_trials_readable": soaked["readable_again"] and soaked["journal_lines_whole"],
    }
    return {
        "bench": "soak",
        "at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "trials_wanted": options.trials,
        "seed": options.seed,
        "real_training": options.real,
        "faults_injected": sum(soaked["injected"].values()),
        "same_plan": bool(loud and quiet and loud.plan == quiet.plan),
        "step_time_against_undisturbed": ratio,
        "noise": noise,
        "orphans": orphans + left,
        "checks": checks,
        "passed": all(checks.values()),
        "seconds": round(time.monotonic() - began, 1),
        "runs": rows,
    }


def _plans(trials: list) -> int:
    return len({trial.plan for trial in trials})


def _ours(root: Path) -> list[int]:
    """All that was started here and runs, whoever its parent is now."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            started_here = one.environ().get("TMPDIR") == str(root / "tmp")
            if started_here and one.pid != os.getpid() and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one.pid)
    return found


if __name__ == "__main__":
    sys.exit(main())
