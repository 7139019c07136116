"""Simulate landscapes of a card that is not here: what the traces say of every plan, and drawn what they don't know.

    python tests/bench/simulate_landscape.py CONFIG --gpu "RTX 4090" --output FOLDER [--draws 6] [--allow ...]
    python tests/bench/search_bench.py --landscapes FOLDER --ceilings 22GiB,14GiB,11GiB --only autofit

No measurement: it shows how the search bears being wrong about a card by as much as is published, and no more. Each
draw is another card of that name:

- each rate of the roofline is off by 30 % (one standard deviation of its logarithm): published ones are 32 % off on the
  mean (NeuSight, ASPLOS'25);
- each value's own cost by 10 %, each pair's by 4 %, each plan's by 1 %; few rows fill the card up to 15 % worse;
- peaks by 2 % a value and 1 % a pair, the context by 40 %; what engines leave on the device by 20 %;
- two runs of a plan differ by 1 %. A trial takes eight seconds and its steps.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import math
import random
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autofit import space
from autofit.commands.estimates.other_card import elsewhere
from autofit.commands.facts import read_facts
from autofit.commands.model_source import fetch, modeling_module
from autofit.commands.request import Request
from autofit.contract.facts import Facts
from autofit.contract.outcome import Trial
from autofit.contract.plan import Plan
from autofit.costmodel.forecast import Forecast, context_bytes, forecast, workspace_bytes
from autofit.costmodel.seconds.roofline import WORK
from autofit.costmodel.tracing.trace_store import Traces, cache_folder
from autofit.machine import gpu_catalogue
from autofit.registry import technique
from autofit.search.recordings.writer import Writer
from autofit.space import Space
from autofit.system.forking.server import ForkServer
from tests.support.synthetic import measured

RATE, VALUE, PAIR, PLAN = 0.3, 0.1, 0.04, 0.01
MEMORY, MEMORY_PAIR, CONTEXT, ROUGH = 0.02, 0.01, 0.4, 0.2
FEW_ROWS = 0.15
NOISE, RUNS, STEPS = 0.01, 3, 6
START_SECONDS = 8.0
EVERY = 1 << 50


class Card:
    """One draw: how far this card is from what is said of it."""

    def __init__(self, draw: int, facts: Facts, plans: Space, cast: Forecast, wrong: float = 1.0) -> None:
        self.draw, self.facts, self.plans, self.cast, self.wrong = draw, facts, plans, cast, wrong
        rates = np.array([math.exp(self._normal(f"rate {kind}", RATE)) for kind in WORK])
        self.work = cast.work * cast.nominal * rates
        self.context_bytes = context_bytes(facts.hardware.capability) * math.exp(self._normal("context", CONTEXT))
        self.context_bytes += workspace_bytes(facts.hardware.capability)
        self.few_rows = FEW_ROWS * math.exp(self._normal("few rows", 0.5))

    def _normal(self, word: str, std: float) -> float:
        return random.Random(hashlib.sha256(f"{self.draw} {word}".encode()).digest()).gauss(0, std * self.wrong)

    def _effect(self, what: str, plan: Plan, value: float, pair: float) -> float:
        knobs = [
            f"{name}={choice}"
            for name, choice in plan.items()
            if name not in {"micro_batch", "accumulation"} and choice != technique(name).baseline
        ]
        return sum(self._normal(f"{what} {knob}", value) for knob in knobs) + sum(
            self._normal(f"{what} {one} {other}", pair) for one, other in itertools.combinations(knobs, 2)
        )

    def seconds(self, place: int) -> float:
        """Of a step."""
        plan, work = self.plans.plans[place], self.work[place]
        host = work[WORK.index("operators")]
        device = (work.sum() - host) * (1 + self.few_rows / int(plan["micro_batch"]))
        sample = max(host, device) + 0.1 * min(host, device)
        effect = self._effect("time", plan, VALUE, PAIR) + self._normal(plan.words(), PLAN)
        return float(sample * self.facts.workload.global_batch * math.exp(effect))

    def peak_bytes(self, place: int) -> int:
        """On the device."""
        effect = self._effect("memory", self.plans.plans[place], MEMORY, MEMORY_PAIR)
        if self.cast.approximate[place]:
            effect += self._normal(f"rough {self.plans.plans[place]['offload']}", ROUGH)
        return int(self.cast.tensor_bytes[place] * math.exp(effect) + self.context_bytes)

    def write(self, path: Path) -> None:
        """All plans, each measured some times."""
        path.unlink(missing_ok=True)
        noted = {"simulated": self.draw, "about": __doc__.splitlines()[0]}
        writer, numbers, chance = (
            Writer(path, self.facts, self.plans, self.cast, noted),
            itertools.count(),
            random.Random(self.draw),
        )
        for place, plan in enumerate(self.plans.plans):
            true, peak = self.seconds(place), self.peak_bytes(place)
            for _ in range(RUNS):
                steps = tuple(true * math.exp(chance.gauss(0, NOISE)) for _ in range(STEPS))
                spent = sum(steps) * (STEPS + 2) / STEPS
                outcome = measured(steps, peak, self.facts, training_seconds=spent, limit_bytes=EVERY)
                wall = START_SECONDS + outcome.training_seconds
                writer.add(Trial(number=next(numbers), plan=plan, outcome=outcome, wall_seconds=wall, purpose="search"))


def traced(options: argparse.Namespace) -> tuple[Facts, Space, Forecast]:
    """What a tune on such a card would know before its first trial."""
    request = Request(model=options.config, seq_len=options.seq_len, global_batch=options.global_batch)
    card = gpu_catalogue.find(options.gpu)
    with tempfile.TemporaryDirectory(prefix="autofit-simulate-") as scratch:
        folder = Path(scratch)
        config = fetch(options.config, folder / "model", trust_remote_code=False)
        server = ForkServer(folder / "server.log", "cpu", modeling_module(config), trains=False)
        with contextlib.closing(server):
            model = read_facts(folder, request, "cpu", server, print).model
            facts = elsewhere(request, model, card, card.memory_bytes)
            names = card.driver_names or (card.name,)  # as a device tells its name, so that the search knows the card
            facts = dataclasses.replace(facts, hardware=dataclasses.replace(facts.hardware, name=names[0]))
            knobs = space.parse_knobs(options.fix, options.among, facts)
            plans = space.build(facts, space.parse_allowed(options.allow), knobs)
            cast = forecast(plans, Traces(facts, config, lambda: server, folder, cache_folder()), facts, card, print)
    known = ~np.isnan(cast.tensor_bytes) & ~np.isnan(cast.work).any(axis=1)
    if not known.all():
        print(f"{(~known).sum()} plans are left out: nothing says what they need")
        plans = dataclasses.replace(plans, plans=tuple(itertools.compress(plans.plans, known)))
        columns = {
            name: getattr(cast, name)[known]
            for name in ("tensor_bytes", "seconds", "work", "approximate", "kernel_overhead_bytes", "activation_bytes")
        }
        cast = dataclasses.replace(cast, **columns)
    return facts, plans, cast


def main() -> None:
    """Write some draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=6)
    parser.add_argument("--wrong", type=float, default=1.0, help="How many times as far off as said above.")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--allow", default="exact,numeric")
    parser.add_argument("--fix", action="append", default=[])
    parser.add_argument("--among", action="append", default=[])
    options = parser.parse_args()
    facts, plans, cast = traced(options)
    options.output.mkdir(parents=True, exist_ok=True)
    name = f"{Path(options.config).stem} on {facts.hardware.name}".replace(" ", "-")
    for draw in range(options.draws):
        Card(draw, facts, plans, cast, options.wrong).write(options.output / f"{name}-{draw}.jsonl")
    print(f"{options.draws} draws of {len(plans.plans)} plans in {options.output}")


if __name__ == "__main__":
    main()
