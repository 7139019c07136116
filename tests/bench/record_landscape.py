"""Record a landscape: every plan of a space measured several times, each round in another order.

    python tests/bench/record_landscape.py CONFIG --output FILE.jsonl [--rounds 3] [--global-batch 32] [--seq-len 64]

The ceiling is the whole machine, so that any lower one can be played back. A recording that was cut off goes on where
it stopped. The plans' traces are written beside what is measured.
"""

import argparse
import contextlib
import dataclasses
import datetime as dt
import itertools
import json
import os
import platform
import random
import tempfile
import time
from pathlib import Path

from autofit import space
from autofit.commands.facts import read_facts, with_rates
from autofit.commands.model_source import fetch, modeling_module
from autofit.commands.request import Request
from autofit.contract.facts import Facts
from autofit.contract.outcome import Measured
from autofit.contract.plan import Plan
from autofit.costmodel.forecast import forecast
from autofit.costmodel.tracing.trace_store import Traces, cache_folder
from autofit.machine import gpu_catalogue
from autofit.machine.select import choose_device, hardware_lock
from autofit.registry import techniques
from autofit.search.recordings.landscape import Landscape
from autofit.search.recordings.writer import Writer, pack, traced
from autofit.system import units
from autofit.system.forking.server import ForkServer
from autofit.training.runner import ProcessRunner
from autofit.training.timing import Effort

EFFORT = Effort(min_steps=3, max_steps=6, seconds=0.8)
LONGEST_SECONDS = 120.0


def record(options: argparse.Namespace) -> None:
    """Measure every plan ``--rounds`` times."""
    target = Path(options.output)
    with tempfile.TemporaryDirectory(prefix="autofit-landscape-") as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        config = fetch(options.config, folder / "model", trust_remote_code=False)
        device = choose_device(options.device)
        server = stack.enter_context(
            contextlib.closing(ForkServer(folder / "server.log", device, modeling_module(config)))
        )
        request = Request(
            model=options.config,
            device=device,
            seq_len=options.seq_len,
            global_batch=options.global_batch,
            memory_limit=options.memory_limit,
            launch_path=options.launch_path,
        )
        facts = read_facts(folder, request, device, server, print)
        hardware = facts.hardware
        stack.enter_context(hardware_lock(hardware))
        facts = with_rates(folder, facts, server, print)
        plans = space.build(
            facts, space.parse_allowed(options.allow), space.parse_knobs(options.fix, options.among, facts)
        )
        card = gpu_catalogue.matching(hardware.name, hardware.total_bytes)
        cast = forecast(plans, Traces(facts, config, lambda: server, folder, cache_folder()), facts, card, print)
        print(
            f"{len(plans.plans)} plans, {options.rounds} rounds, {units.size(facts.workload.limit_bytes)}", flush=True
        )
        done: dict[object, int] = {}
        if target.exists():
            known = Landscape.read(target)
            done = {plan: len(known.of(plan)) for plan in plans.plans}
        provenance = {
            "recorded": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {len(os.sched_getaffinity(0))} of them used",
            "command": f"rounds={options.rounds} allow={options.allow} fix={options.fix} among={options.among}",
            "config": json.loads((config / "config.json").read_text("utf-8")),
        }
        writer = Writer(target, facts, plans, cast, provenance)
        runner = ProcessRunner(folder / "trials", facts, config, server)
        numbers = itertools.count()
        began = time.monotonic()
        for turn in range(options.rounds):
            order = list(plans.plans)
            random.Random(turn).shuffle(order)
            todo = [plan for plan in order if done.get(plan, 0) <= turn]
            for plan in todo:
                if options.budget_seconds and time.monotonic() - began > options.budget_seconds:
                    print("the time is spent", flush=True)
                    return
                trial = runner.run(next(numbers), plan, EFFORT, purpose="search", limit_seconds=LONGEST_SECONDS)
                if isinstance(trial.outcome, Measured) and trial.outcome.disturbed:
                    trial = runner.run(next(numbers), plan, EFFORT, purpose="search", limit_seconds=LONGEST_SECONDS)
                writer.add(trial)
            print(f"round {turn + 1}: {len(todo)} trials, {time.monotonic() - began:.0f} s", flush=True)
    if options.pack:
        pack(target, Path(options.pack))


def retrace(options: argparse.Namespace) -> None:
    """Put what today's traces say in the place of what they said; the measurements stay as they are."""
    source = Path(options.retrace)
    land = Landscape.read(source)
    plain = {one.name: one.baseline for one in techniques()}
    with tempfile.TemporaryDirectory(prefix="autofit-landscape-") as scratch:
        folder = Path(scratch)
        (folder / "given").mkdir()
        (folder / "given" / "config.json").write_text(json.dumps(land.provenance["config"]), "utf-8")
        config = fetch(str(folder / "given"), folder / "model", trust_remote_code=False)
        server = ForkServer(folder / "server.log", "cpu", modeling_module(config))
        hardware = land.facts.hardware
        card = gpu_catalogue.matching(hardware.name, hardware.total_bytes)
        whole = dataclasses.replace(land.space, plans=tuple(Plan({**plain, **plan}) for plan in land.space.plans))
        facts, provenance = land.facts, dict(land.provenance)
        with contextlib.closing(server):
            if options.rates:
                facts = timed_again(folder, facts, server)
                provenance["rates"] = (
                    f"timed {dt.datetime.now(dt.UTC).isoformat(timespec='seconds')}, not when recorded"
                )
            traces = Traces(facts, config, lambda: server, folder, cache_folder())
            cast = forecast(whole, traces, facts, card, print)
        said = traced(land.space, cast)
        aside = folder / "land.jsonl"
        writer = Writer(aside, facts, land.space, None, provenance)
        for run in sorted((run for runs in land.runs.values() for run in runs), key=lambda run: run.at):
            writer.write(dataclasses.replace(run, **said[run.plan]))
        pack(aside, Path(options.output))
    print(f"{options.output}: {len(land.runs)} plans")


def timed_again(folder: Path, facts: Facts, server: ForkServer) -> Facts:
    """The facts with what a device of the same name does in a second now."""
    hardware = facts.hardware
    request = Request(
        model=facts.model.name, device="cpu", seq_len=facts.workload.seq_len, global_batch=facts.workload.global_batch
    )
    here = read_facts(folder, request, "cpu", server, print)
    if (hardware.device, hardware.name) != ("cpu", here.hardware.name):
        raise SystemExit(f"recorded on {hardware.name}, this is {here.hardware.name}")
    return with_rates(folder, dataclasses.replace(facts, model=here.model), server, print)


def main() -> None:
    """Record one landscape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", default="demo")
    parser.add_argument("--retrace", help="A landscape: write it to --output, gzipped, with the traces of today.")
    parser.add_argument("--rates", action="store_true", help="With --retrace: time the device anew, if it is this one.")
    parser.add_argument("--output", required=True)
    parser.add_argument("--pack", help="Write it gzipped to this file at last.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget-seconds", type=float, default=0.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--memory-limit", default="95%")
    parser.add_argument("--launch-path", default="trainer", choices=("trainer", "loop"))
    parser.add_argument("--allow", default="exact,numeric,method")
    parser.add_argument("--fix", action="append", default=[])
    parser.add_argument("--among", action="append", default=[])
    options = parser.parse_args()
    if options.retrace:
        retrace(options)
    else:
        record(options)


if __name__ == "__main__":
    main()
