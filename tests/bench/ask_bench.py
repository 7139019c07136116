"""What an ask costs in a wide space: the default sampler, asked and told, over a hundred thousand plans.

    python tests/bench/ask_bench.py [--plans 100000] [--trials 40] [--json]

The space is a card's: every combination of the techniques' values, also of those that are tried on request, whether
they go together or not. What their traces would say is drawn, and what a trial would give is drawn around it. Each ask
is counted alone, in seconds of the clock and of the processors; a tune of a dozen trials pays it a dozen times.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autofit import space
from autofit.contract.plan import Plan
from autofit.costmodel.forecast import Forecast, peak_prior
from autofit.costmodel.seconds.roofline import WORK
from autofit.registry import technique
from autofit.search.sampler import AutofitSampler
from autofit.search.surrogate.observation import Observation
from autofit.space import Space
from autofit.system.statistics import median
from autofit.system.units import GIB
from tests.support.synthetic import cuda_facts

LIMIT = 22 * GIB
SPLIT = ("micro_batch", "accumulation")


def wide(facts, count):
    """A space of so many plans."""
    narrow = space.build(facts)
    others = [name for name in narrow.domains if name not in SPLIT]
    values = {name: tuple(choice.value for choice in technique(name).choices(facts)) for name in others}
    splits = sorted({tuple(plan[name] for name in SPLIT) for plan in narrow.plans})
    sizes = [len(splits), *map(len, values.values())]
    places = np.unique(np.linspace(0, math.prod(sizes) - 1, count).astype(np.int64))  # spread over all of them
    plans = []
    for split, *chosen in zip(*np.unravel_index(places, sizes), strict=True):
        others_of = {name: values[name][one] for name, one in zip(others, chosen, strict=True)}
        plans.append(Plan({**dict(zip(SPLIT, splits[split], strict=True)), **others_of}))
    domains = {name: tuple(dict.fromkeys(plan[name] for plan in plans)) for name in (*SPLIT, *others)}
    priors = {
        name: {value: technique(name).prior(value, facts) for value in domain} for name, domain in domains.items()
    }
    return Space(plans=tuple(plans), domains=domains, priors=priors)


def drawn(facts, plans, rng):
    """What the traces say of a space that nothing was traced of."""
    count = len(plans.plans)
    return Forecast(
        tensor_bytes=rng.uniform(1, 40, count) * GIB,
        seconds=np.full(count, np.nan),
        work=np.exp(rng.normal(0, 0.3, (count, len(WORK)))),
        nominal=np.ones(len(WORK)),
        known_card=False,
        timed=False,
        approximate=np.zeros(count, dtype=bool),
        peak_prior=peak_prior(facts.hardware),
        kernel_overhead_bytes=np.zeros(count),
        activation_bytes=np.zeros(count),
    )


def main():
    """Print how long the asks took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", type=int, default=100_000)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng, facts = np.random.default_rng(0), cuda_facts(limit_bytes=LIMIT)
    plans = wide(facts, options.plans)
    cast = drawn(facts, plans, rng)
    began = time.perf_counter()
    sampler = AutofitSampler(plans, limit_bytes=LIMIT, forecast=cast)
    encoded = time.perf_counter() - began
    seen, clock, processors = [], [], []
    for _ in range(options.trials):
        began = time.perf_counter(), time.process_time()
        suggestion = sampler._suggest(seen)
        clock.append(time.perf_counter() - began[0])
        processors.append(time.process_time() - began[1])
        plan = int(rng.integers(len(plans.plans))) if suggestion.plan is None else suggestion.plan
        peak = float(cast.device_bytes[plan] * np.exp(rng.normal(0, 0.02)))
        seconds = float(cast.work[plan].sum() * np.exp(rng.normal(0, 0.01)))
        result = "measured" if peak <= LIMIT else "out_of_memory"
        seen.append(Observation(plan=plan, result=result, seconds=seconds, peak_bytes=peak, needed_bytes=peak))
    found = {
        "plans": len(plans.plans),
        "values": len(sampler.model.features.indicators),
        "encode_seconds": round(encoded, 2),
        "ask_seconds": round(median(clock), 3),
        "ask_seconds_of_the_first_dozen": round(median(clock[:12]), 3),
        "ask_processor_seconds": round(median(processors), 3),
        "slowest_ask_seconds": round(max(clock), 3),
    }
    print(json.dumps(found) if options.json else "\n".join(f"{name}: {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
