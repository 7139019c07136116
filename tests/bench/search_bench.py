"""The contest: searchers on recorded landscapes, 20 seeds each, at several ceilings.

    python tests/bench/search_bench.py --landscapes tests/data/landscapes [--json FILE] [--seeds 20] [--ablate]

Every searcher runs trials of a landscape that is played back, with the noise and the cost that were recorded. After
each trial it holds one plan as the answer: the fastest that it measured inside the ceiling, and for the batch finders,
which time nothing, the largest that fitted. Its regret is how much slower that plan truly is than the best one that
fits, by medians over all that was recorded of both. *Found* is a regret of 2 %, or of the landscape's own noise where
that is more.

====================  ================================================================================================
``autofit``           the default: traces, priors, and it stops by itself
``tpe`` ``gp``        Optuna's samplers on the same knobs, with the ceiling as a constraint; a plan is asked once, and
``random``            none at or above a micro-batch that broke
``grid``              every plan, in an order drawn by the seed
``accelerate``        ``find_executable_batch_size``: from the whole batch, times 0.9 until it fits
``lightning_power``   ``BatchSizeFinder`` by powers: from 2, doubled until it breaks
``lightning_binary``  the same, then halving between the last that fitted and the first that broke
``deepspeed``         the autotuner's fast mode: per ZeRO stage, micro-batches upward until the gain is under 5 %
``composer``          ``device_train_microbatch_size="auto"``: from the whole batch, halved until it fits
====================  ================================================================================================

The peers leave all but the micro-batch as a plain script has it; where a finder would try a size that is no divisor of
the global batch, the next smaller divisor is taken.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import multiprocessing
import random
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna

from autofit.contract.facts import Facts
from autofit.contract.outcome import Measured, Trial
from autofit.contract.plan import Plan
from autofit.contract.technique import Prior, replacing
from autofit.costmodel.forecast import Forecast, nominal_of
from autofit.registry import techniques
from autofit.search import sampler as sampling
from autofit.search.loop import HOPELESS, Campaign
from autofit.search.recordings.landscape import Landscape, needed
from autofit.search.recordings.replay import Replay, ReplayWorkers
from autofit.search.sampler import AutofitSampler
from autofit.search.samplers import make_sampler
from autofit.search.searcher import Searcher
from autofit.search.study import quiet_optuna
from autofit.search.surrogate import posterior
from autofit.search.surrogate.gp import FixedFeatures
from autofit.search.surrogate.posterior import Surrogate
from autofit.search.surrogate.time_model import TimeModel
from autofit.search.workers import OneByOne, Workers
from autofit.space import Space
from autofit.system.errors import InputError
from autofit.system.statistics import median
from autofit.system.units import parse_size, size
from autofit.training.timing import Effort

FRACTIONS = (1.0, 0.6, 0.35)
"""Ceilings, as shares of what the baseline plan with the whole batch at once needs."""
CLOSE = 0.02
MOST = 80
LOOKS = (8, 12, 20)
EFFORT = Effort()

Step = tuple[Trial, Plan | None]
"""A trial, and the answer after it."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One landscape under one ceiling."""

    name: str
    land: Landscape
    limit_bytes: int

    @property
    def land_name(self) -> str:
        """Of the landscape."""
        return self.name.partition(" @ ")[0]

    @functools.cached_property
    def best(self) -> float:
        """True seconds of the best plan that fits."""
        plan = self.land.best(self.limit_bytes)
        return math.inf if plan is None else self.land.seconds(plan)

    @property
    def close(self) -> float:
        """The regret that counts as found."""
        return max(CLOSE, self.land.noise)

    def regret(self, plan: Plan | None) -> float:
        """How much slower a plan truly is than the best, as a share of its speed; 1 where it does not fit."""
        if plan is None or not self.land.fits(plan, self.limit_bytes):
            return 1.0
        return 1 - self.best / self.land.seconds(plan)


# -- searchers ----------------------------------------------------------------------------------------------------


class Bench:
    """Runs trials for one searcher, and knows the fastest so far."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self.replay = Replay(cell.land, cell.limit_bytes, seed=seed)
        self.number = 0
        self.best: tuple[float, Plan | None] = (math.inf, None)

    def run(self, plan: Plan) -> Trial:
        """One trial."""
        trial = self.replay.run(self.number, plan, EFFORT, purpose="search", limit_seconds=900.0)
        self.number += 1
        if isinstance(trial.outcome, Measured):
            self.best = min(self.best, (trial.outcome.step_seconds, plan), key=lambda pair: pair[0])
        return trial

    @property
    def answer(self) -> Plan | None:
        """The fastest so far."""
        return self.best[1]


def sampled(
    cell: Cell, seed: int, *, name: str, ablations: Collection[str] = (), workers: Workers | None = None
) -> Iterator[Step]:
    """autofit, or one of Optuna's samplers, as ``--sampler`` runs it; autofit's playoff comes last."""
    facts = cell.land.at(cell.limit_bytes)
    space, cast = cell.land.space, cell.land.forecast if name == "autofit" else None
    for ablation in ablations:
        space, cast = ablated(cell.land.facts, space, cast, ablation)
    sampler = make_sampler(name, space, facts, seed, cast)
    if isinstance(sampler, AutofitSampler):
        for ablation in ablations:
            sampler.model = forgetful(sampler.model, ablation)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    searcher = Searcher(space, study, sampler=name, limit_bytes=cell.limit_bytes, seed=seed, forecast=cast)
    runner = Replay(cell.land, cell.limit_bytes, seed=seed)
    hopeless = 0.0 if "hopeless" in ablations else HOPELESS
    campaign = Campaign(facts=facts, space=space, runner=runner, hopeless=hopeless, workers=workers or OneByOne())
    while len(campaign.trials) < MOST:
        if name == "autofit":
            more = campaign.step(searcher)
        else:
            plan = searcher.ask()
            more = plan is not None
            if plan is not None:
                searcher.tell(campaign.run(plan, EFFORT, "search"))
        if not more:
            break
        best = campaign.best()
        yield campaign.trials[-1], best.plan if best else None
    if name == "autofit" and campaign.best():
        before = len(campaign.trials)
        decision = campaign.playoff()
        for trial in campaign.trials[before:]:
            yield trial, decision.plan if decision else None


def grid(cell: Cell, seed: int) -> Iterator[Step]:
    """Every plan once."""
    bench, order = Bench(cell, seed), list(cell.land.space.plans)
    random.Random(seed).shuffle(order)
    for plan in order:
        yield bench.run(plan), bench.answer


def plain(cell: Cell) -> dict[int, Plan]:
    """The plans of a script that knows nothing but its batch size, by their rows."""
    domains = cell.land.space.domains
    values = {one.name: one.baseline for one in techniques() if one.name in domains}
    return {
        int(plan["micro_batch"]): plan
        for plan in cell.land.space.plans
        if all(plan[name] == value for name, value in values.items() if name not in {"micro_batch", "accumulation"})
    }


def finder(cell: Cell, seed: int, *, sizes: Callable[[dict[int, Plan]], Iterator[int]]) -> Iterator[Step]:
    """A batch finder: ``sizes`` gives rows, and is sent whether they fitted; the last that fitted is the answer."""
    bench, plans = Bench(cell, seed), plain(cell)
    answer: Plan | None = None
    asking = sizes(plans)
    rows = next(asking)
    while True:
        trial = bench.run(plans[rows])
        fitted = isinstance(trial.outcome, Measured)
        answer = plans[rows] if fitted else answer
        try:
            following = asking.send(fitted)  # type: ignore[attr-defined]
        except StopIteration:
            yield trial, answer
            return
        yield trial, answer
        rows = following


def shrinking(plans: dict[int, Plan], *, factor: float) -> Iterator[int]:
    """Smaller until it fits."""
    wanted = float(max(plans))
    tried = None
    while wanted >= 1:
        rows = max((known for known in plans if known <= int(wanted)), default=min(plans))
        if rows != tried and (yield rows):
            return
        tried, wanted = rows, wanted * factor


def growing(plans: dict[int, Plan], *, binary: bool) -> Iterator[int]:
    """Doubled until it breaks; then, if wanted, halving between."""
    known = sorted(plans)
    wanted, tried, broke = 2, 0, None
    while broke is None and wanted <= 2 * known[-1]:
        rows = max((one for one in known if one <= wanted), default=known[0])
        if rows != tried:
            if not (yield rows):
                broke = rows
                break
            tried = rows
        wanted *= 2
    if not binary or broke is None:
        return
    low, high = tried, broke
    while between := [one for one in known if low < one < high]:
        middle = between[len(between) // 2]
        if (yield middle):
            low = middle
        else:
            high = middle


def deepspeed(cell: Cell, seed: int) -> Iterator[Step]:
    """Per ZeRO stage (here: none, and those that offload), micro-batches upward until a plateau."""
    bench = Bench(cell, seed)
    waits = {"none": "none", "zero2": "optimizer", "zero3": "parameters"}
    stages = [value for value in cell.land.space.domains.get("parallel", ("none",)) if value in waits]
    for stage in stages:
        before = math.inf
        for rows, plan in sorted(plain(cell).items()):
            wanted = plan.replaced(parallel=stage, offload=waits[stage]) if "offload" in plan else plan
            if not cell.land.of(wanted) or (rows > 1 and rows & (rows - 1)):
                continue
            trial = bench.run(wanted)
            yield trial, bench.answer
            if not isinstance(trial.outcome, Measured):
                break
            if before / trial.outcome.step_seconds < 1.05:
                break
            before = trial.outcome.step_seconds


SEARCHERS: dict[str, Callable[[Cell, int], Iterator[Step]]] = {
    "autofit": functools.partial(sampled, name="autofit"),
    "tpe": functools.partial(sampled, name="tpe"),
    "gp": functools.partial(sampled, name="gp"),
    "random": functools.partial(sampled, name="random"),
    "grid": grid,
    "accelerate": functools.partial(finder, sizes=functools.partial(shrinking, factor=0.9)),
    "lightning_power": functools.partial(finder, sizes=functools.partial(growing, binary=False)),
    "lightning_binary": functools.partial(finder, sizes=functools.partial(growing, binary=True)),
    "deepspeed": deepspeed,
    "composer": functools.partial(finder, sizes=functools.partial(shrinking, factor=0.5)),
}


# -- several trials at once ---------------------------------------------------------------------------------------


def together(cell: Cell, seed: int, count: int) -> dict[str, Any]:
    """A search with so many workers.

    Returns:
        ``regrets`` after each trial, ``seconds`` on the clock when each ended, ``final_regret`` after the playoff, and
        ``busy``: the share of the workers' time until the search's end that they spent in trials.
    """
    workers = ReplayWorkers(count)
    regrets, seconds, answer, twice, known = [], [], None, 0, set()
    for trial, answer in sampled(cell, seed, name="autofit", workers=workers):
        if trial.purpose == "search":
            regrets.append(cell.regret(answer))
            seconds.append(workers.clock_seconds)
            twice += trial.plan in known
            known.add(trial.plan)
    return {
        "cell": cell.name,
        "workers": count,
        "seed": seed,
        "regrets": regrets,
        "seconds": seconds,
        "final_regret": cell.regret(answer),
        "asked_twice": twice,
        "busy": workers.busy_seconds / (count * workers.clock_seconds),
    }


def _together(job: tuple[int, int, int]) -> dict[str, Any]:
    place, count, seed = job
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with quiet_optuna():
        return together(_CELLS[place], seed, count)


def compare_workers(counts: list[int], seeds: int, jobs: int) -> list[dict[str, Any]]:
    """Print what searches with several workers find, and how fast, against those with one."""
    wanted = [(place, count, seed) for count in counts for place in range(len(_CELLS)) for seed in range(seeds)]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        runs = pool.map(_together, wanted, chunksize=1)
    rows = [workers_row(count, runs) for count in counts]
    for row in rows:
        row["of_linear"] = round(row["trials_an_hour"] / (row["workers"] * rows[0]["trials_an_hour"]), 4)
        regrets = ", ".join(f"{row[f'mean_regret_at_{look}']:.1%} at {look}" for look in LOOKS)
        print(
            f"{row['workers']} workers: {row['trials_an_hour']:.0f} trials an hour ({row['of_linear']:.0%} of linear), "
            f"{row['trials']:g} trials, {row['search_seconds']:.0f} s a search, workers busy {row['busy']:.0%}; "
            f"behind the best by {regrets}, {row['mean_final_regret']:.1%} at the end; found {row['found']:.0%}"
        )
    return rows


def several_at_once(options: argparse.Namespace) -> None:
    """Compare numbers of workers; the sums are the last line, as JSON, and are written to a file where one is given."""
    rows = compare_workers([int(one) for one in options.workers.split(",")], options.seeds, options.jobs)
    if options.json and options.json != "-":
        Path(options.json).write_text(json.dumps({"workers": rows}, indent=1) + "\n")
    print(json.dumps({"workers": rows}))


def workers_row(count: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over all cells and seeds of the searches with so many workers."""
    mine = [run for run in runs if run["workers"] == count]
    close = {cell.name: cell.close for cell in _CELLS}
    trials = sum(len(run["seconds"]) for run in mine)
    seconds = sum(run["seconds"][-1] for run in mine)
    return {
        "workers": count,
        "runs": len(mine),
        "trials_an_hour": round(3600 * trials / seconds, 1),
        "trials": round(trials / len(mine), 2),
        "search_seconds": round(seconds / len(mine), 1),
        "busy": round(sum(run["busy"] for run in mine) / len(mine), 4),
        **{
            f"mean_regret_at_{look}": round(
                sum(run["regrets"][min(look, len(run["regrets"])) - 1] for run in mine) / len(mine), 4
            )
            for look in LOOKS
        },
        "mean_final_regret": round(sum(run["final_regret"] for run in mine) / len(mine), 4),
        "found": round(sum(run["final_regret"] <= close[run["cell"]] for run in mine) / len(mine), 4),
    }


# -- without a part of the knowledge ------------------------------------------------------------------------------

ABLATIONS = (
    "traces", "work", "rates", "brought", "heap", "time priors", "families", "ceilings", "dares", "near",
    "doubt", "scatter", "hopeless", "effects", "gaussian process",
)  # fmt: skip
"""What is taken away: all that the traces say, or their work alone; what was timed before, and what kernels were seen
to take; what malloc's heap keeps of activations; what a technique expects of time; that plans of a family are alike
beyond their values; that breaking a ceiling tells a bound; trying what may not fit in the end;
changing little at a time; looking once more before the end; that times which scatter more than expected widen the
doubt; cutting off hopeless trials; what a value is found to cost beyond its trace; that, and what a family is: the cost
model itself is left, the rates of the work, the offset and slope of the peaks, corrected by each trial."""


def ablated(facts: Facts, space: Space, cast: Forecast | None, ablation: str) -> tuple[Space, Forecast | None]:
    """The space and the forecast without what an ablation takes away."""
    if ablation == "time priors":
        priors = {
            name: {value: replace(prior, time=Prior().time) for value, prior in values.items()}
            for name, values in space.priors.items()
        }
        return replace(space, priors=priors), cast
    if ablation == "traces" or cast is None:
        return space, None
    usual = nominal_of(replace(facts, rates={}), None)
    changes: dict[str, dict[str, Any]] = {
        "work": {"work": cast.work * math.nan},
        "rates": {"nominal": usual, "timed": False},
        "brought": {"kernel_overhead_bytes": 0.0 * cast.kernel_overhead_bytes},
        "heap": {"activation_bytes": 0.0 * cast.activation_bytes},
    }
    return space, replace(cast, **changes.get(ablation, {}))


def forgetful(model: Surrogate, ablation: str) -> Surrogate:
    """The models without what an ablation takes away."""
    if ablation == "families":
        return replace(model, time=replace(model.time, family_std=0.0, curve_std=0.0))
    if (
        ablation in {"effects", "gaussian process"}
        and isinstance(model.time, TimeModel)
        and model.peak_residual is not None
    ):
        columns = model.time.effects.columns[:, :1]  # the machine's overall speed
        heap = None if model.peak_residual.fixed is None else FixedFeatures.of(model.peak_residual.fixed.columns[:, :1])
        own: dict[str, Any] = {} if ablation == "effects" else {"family_std": 0.0, "curve_std": 0.0}
        peaks = replace(model.peak_residual, fixed=heap, **own)
        time = replace(model.time, effects=FixedFeatures.of(columns), **own)
        return replace(model, time=time, peak_residual=peaks)
    return model


def without(ablations: Collection[str]) -> contextlib.AbstractContextManager[None]:
    """The sampler without some of its ways."""
    changes: dict[str, tuple[Any, str, Any]] = {
        "dares": (sampling, "min_gain_if_infeasible", lambda *_: math.inf),
        "near": (AutofitSampler, "_few_changes", lambda *given: given[1]),
        "doubt": (sampling, "_STD_FACTOR", 1.0),
        "scatter": (posterior, "_PRIOR_RESIDUALS", math.inf),
        "ceilings": (posterior, "truncated_normal_update", lambda *given: (given[0], 1e6 * given[1])),
    }
    return replacing([changes[ablation] for ablation in ablations if ablation in changes])


# -- scores -------------------------------------------------------------------------------------------------------


def score(cell: Cell, searcher: str, seed: int) -> dict[str, Any]:
    """One run."""
    name, *ablations = searcher.split(" - ")
    if ablations:
        with without(ablations):
            return scored(cell, functools.partial(sampled, name=name, ablations=ablations), seed)
    return scored(cell, SEARCHERS[name], seed)


def scored(cell: Cell, make: Callable[[Cell, int], Iterator[Step]], seed: int) -> dict[str, Any]:
    """One run of a searcher."""
    found: tuple[int, float] | None = None
    seconds, broken, searched = 0.0, 0, 0
    regrets: list[float] = []
    answer: Plan | None = None
    for trial, answer in make(cell, seed):
        seconds += trial.wall_seconds
        if trial.purpose == "final":
            continue
        searched += 1
        broken += trial.outcome.kind == "out_of_memory"
        regrets.append(cell.regret(answer))
        if found is None and regrets[-1] <= cell.close:
            found = searched, seconds
    return {
        "trials_to_find": found[0] if found else math.inf,
        "seconds_to_find": found[1] if found else math.inf,
        "regret": {look: regrets[min(look, len(regrets)) - 1] if regrets else 1.0 for look in LOOKS},
        "final_regret": cell.regret(answer),
        "trials": searched,
        "seconds": seconds,
        "out_of_memory": broken / max(searched, 1),
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the seeds of one cell, or over all of them."""

    def middle(values: list[float]) -> float | None:
        value = median(values)
        return round(value, 4) if math.isfinite(value) else None

    return {
        "median_trials_to_find": middle([run["trials_to_find"] for run in runs]),
        "median_seconds_to_find": middle([run["seconds_to_find"] for run in runs]),
        "found": round(sum(math.isfinite(run["trials_to_find"]) for run in runs) / len(runs), 4),
        **{f"regret_at_{look}": middle([run["regret"][look] for run in runs]) for look in LOOKS},
        "final_regret": middle([run["final_regret"] for run in runs]),
        "worst_final_regret": round(max(run["final_regret"] for run in runs), 4),
        "out_of_memory": round(
            sum(run["out_of_memory"] * run["trials"] for run in runs) / sum(run["trials"] for run in runs), 4
        ),
        "median_trials": middle([run["trials"] for run in runs]),
        "median_seconds": middle([run["seconds"] for run in runs]),
    }


def cells(folder: Path, fractions: tuple[float, ...], ceilings: tuple[int, ...] = ()) -> Iterator[Cell]:
    """Every landscape of a folder, under each ceiling at which something fits: as shares of a need, or as bytes."""
    for path in sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")]):
        land = Landscape.read(path)
        bare = Cell(name=path.name.partition(".")[0], land=land, limit_bytes=0)
        limits = {size(limit): limit for limit in ceilings}
        if not limits:
            naive = plain(bare)
            needs = [needed(run.outcome) for run in land.of(naive[max(naive)]) if isinstance(run.outcome, Measured)]
            limits = {f"{fraction:.0%}": int(1.01 * max(needs) * fraction) for fraction in fractions}
        for words, limit in limits.items():
            if land.best(limit) is not None:
                yield replace(bare, name=f"{bare.name} @ {words}", limit_bytes=limit)


_CELLS: list[Cell] = []


def _one(job: tuple[int, str, int]) -> dict[str, Any]:
    place, searcher, seed = job
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with quiet_optuna():
        return {"cell": _CELLS[place].name, "searcher": searcher, "seed": seed, **score(_CELLS[place], searcher, seed)}


def main() -> None:
    """Print a line for each searcher and cell, and last one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--landscapes", type=Path, default=Path(__file__).parent.parent / "data" / "landscapes")
    parser.add_argument("--seeds", type=int, default=20)
    usual = ",".join(name for name in SEARCHERS if name != "gp")
    parser.add_argument(
        "--only",
        default=usual,
        help="Searchers, or autofit without parts: autofit - traces - doubt.  [default: all but gp, which is slow]",
    )
    parser.add_argument("--ablate", action="store_true", help="autofit, and autofit without each of its parts.")
    parser.add_argument("--fractions", default=",".join(map(str, FRACTIONS)))
    parser.add_argument("--ceilings", help="Sizes, in the place of shares: 22GiB,14GiB.")
    parser.add_argument("--json", nargs="?", const="-", help="Write all of it to a file, or the sums to stdout.")
    parser.add_argument(
        "--slow-seeds", type=int, help="Of TPE and the Gaussian process, whose asks take long.  [default: as many]"
    )
    parser.add_argument("--markdown", action="store_true", help="Print the table of the README.")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--playback",
        type=Path,
        help="A CSV file of a sweep of parallel training (playback.py), in the place of landscapes.",
    )
    parser.add_argument("--workers", help="autofit alone, with so many trials at once: 1,2,4.")
    options = parser.parse_args()
    if options.playback:
        play_back(options)
        return
    searchers = options.only.split(",")
    if unknown := [name for name in searchers if not known(name)]:
        sys.exit(f"error: no searcher {unknown[0]!r}\n  hint: {', '.join(SEARCHERS)}; autofit - PART [- PART...]")
    ceilings = tuple(parse_size(part) for part in options.ceilings.split(",")) if options.ceilings else ()
    _CELLS.extend(cells(options.landscapes, tuple(float(part) for part in options.fractions.split(",")), ceilings))
    if not _CELLS:
        sys.exit(f"no landscape in {options.landscapes}")
    if options.ablate:
        searchers = ["autofit", *(f"autofit - {part}" for part in ABLATIONS)]
    for cell in _CELLS:
        fitting = sum(cell.land.fits(plan, cell.limit_bytes) for plan in cell.land.runs)
        print(
            f"{cell.name}: {len(cell.land.runs)} plans, {fitting} fit {size(cell.limit_bytes)}, "
            f"noise {cell.land.noise:.1%}",
            flush=True,
        )
    if options.workers:
        several_at_once(options)
        return
    seeds = seeds_of(options, searchers)
    jobs = [
        (place, name, seed)
        for place, name in itertools.product(range(len(_CELLS)), searchers)
        for seed in range(seeds[name])
    ]
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        runs = pool.map(_one, jobs, chunksize=1)
    words = ("trials", "seconds", "found", *(f"at {look}" for look in LOOKS), "end", "OOM", "ran")
    print(" " * 34 + "".join(f"{word:>9}" for word in words))
    by_cell, by_land, overall = tell(runs, searchers)
    if options.markdown:
        print(markdown(overall))
    if options.json and options.json != "-":
        Path(options.json).write_text(
            json.dumps({"searchers": overall, "landscapes": by_land, "cells": by_cell}, indent=1) + "\n"
        )
    if options.json:
        print(json.dumps({"searchers": overall}))


def known(searcher: str) -> bool:
    """Whether there is such a searcher; of autofit, one or several parts may be taken away."""
    name, *ablations = searcher.split(" - ")
    return name in SEARCHERS and (not ablations or (name == "autofit" and set(ablations) <= set(ABLATIONS)))


def seeds_of(options: argparse.Namespace, searchers: list[str]) -> dict[str, int]:
    """How many seeds each searcher gets."""
    slow = options.slow_seeds or options.seeds
    return {name: slow if name in {"tpe", "gp"} else options.seeds for name in searchers}


def play_back(options: argparse.Namespace) -> None:
    """Play a published sweep; the sums are the last line, as JSON, and are written to a file where one is given."""
    from playback import MOST, playback

    searchers = [name for name in options.only.split(",") if name in MOST]
    try:
        found = playback(options.playback, seeds=seeds_of(options, searchers), searchers=searchers, jobs=options.jobs)
    except InputError as error:
        sys.exit(f"error: {error}\n  hint: {error.hint}")
    if options.json and options.json != "-":
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


Sums = dict[str, dict[str, dict[str, Any]]]
"""By cell or landscape, and by searcher."""


def tell(runs: list[dict[str, Any]], searchers: list[str]) -> tuple[Sums, Sums, dict[str, dict[str, Any]]]:
    """Print a line for each searcher and cell; the same as numbers: by cell, by landscape, and over all of them."""

    def told(name: str, names: list[str]) -> dict[str, dict[str, Any]]:
        print(name)
        found = {}
        for searcher in searchers:
            found[searcher] = summary([run for run in runs if run["cell"] in names and run["searcher"] == searcher])
            print(line(searcher, found[searcher]), flush=True)
        return found

    by_cell = {cell.name: told(cell.name, [cell.name]) for cell in _CELLS}
    lands = {cell.land_name: [other.name for other in _CELLS if other.land is cell.land] for cell in _CELLS}
    by_land = {name: told(f"{name}, under every ceiling", names) for name, names in lands.items()}
    overall = {searcher: summary([run for run in runs if run["searcher"] == searcher]) for searcher in searchers}
    for searcher, found in overall.items():
        mine = [by_cell[cell.name][searcher] for cell in _CELLS]
        found["worst_median_trials_to_find"] = (
            None if any(one["median_trials_to_find"] is None for one in mine)
            else max(one["median_trials_to_find"] for one in mine)
        )  # fmt: skip
        found["worst_median_final_regret"] = max(one["final_regret"] for one in mine)
    print("all of them")
    for searcher, found in overall.items():
        print(line(searcher, found))
    return by_cell, by_land, overall


def markdown(overall: dict[str, dict[str, Any]]) -> str:
    """The table of the README: over all landscapes and ceilings."""
    heads = ("searcher", "found", "trials", "seconds", "behind at 12 trials", "at its end", "out of memory")
    rows = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, found in overall.items():
        trials, seconds = found["median_trials_to_find"], found["median_seconds_to_find"]
        rows.append(
            f"| `{name}` | {found['found']:.0%} | {'-' if trials is None else f'{trials:g}'} | "
            f"{'-' if seconds is None else f'{seconds:.0f}'} | {found['regret_at_12']:.1%} | "
            f"{found['final_regret']:.1%} | {found['out_of_memory']:.0%} |"
        )
    return "\n".join(rows)


def line(name: str, found: dict[str, Any]) -> str:
    """One searcher, for people."""

    def shown(value: float | None, form: str) -> str:
        return "never" if value is None else format(value, form)

    numbers = [
        shown(found["median_trials_to_find"], "g"),
        shown(found["median_seconds_to_find"], ".0f"),
        format(found["found"], ".0%"),
        *(format(found[f"regret_at_{look}"], ".1%") for look in LOOKS),
        format(found["final_regret"], ".1%"),
        format(found["out_of_memory"], ".1%"),
        format(found["median_trials"], ".0f"),
    ]
    return f"  {name:32}" + "".join(f"{number:>9}" for number in numbers)


if __name__ == "__main__":
    main()
