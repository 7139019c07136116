"""Published sweeps of parallel training, played back: a searcher asks for a plan, and its row answers.

A *landscape* is all rows of a file that share the model, the sequence length, the global batch and the GPUs; its
space is the file's own columns: data-, pipeline- and tensor-parallel size, ZeRO stage, micro-batch; accumulation
follows from the batch. The searcher sees the model's shape and the card, and never a figure of a row: what a plan
needs and takes is first expected by the laws below, in the place of traces, and then corrected by its trials, by the
same models as in any tune.

**Bytes** of a stage (nanotron: bf16 weights, float32 gradients, master weights and Adam states in float32, which
ZeRO-1 shares among the data-parallel ranks; no recomputation; 1F1B keeps up to as many micro-batches in flight as
stages follow). A layer keeps 20 hidden and 8 feed-forward sizes of bytes a token, the loss 8 bytes for each logit and 4
more while the one before is let go; what the sequence-parallel tensor parallelism gathers is whole on each rank.

**Seconds**: each micro-step of the slowest stage takes the longer of the device's and the host's time; 1F1B runs
``accumulation + stages - 1`` of them; then the gradients are exchanged. The device's is arithmetic, and the
collectives of tensor parallelism at the speed of the links inside a node or between nodes; the host's grows with the
layers, with the collectives that it issues, and with what a stage waits for its neighbours. Without ZeRO the exchange
overlaps with the backward pass, but in a pipeline it costs as if each micro-step made one (seen in the published
sweep; why is not told there).
"""

import csv
import math
import multiprocessing
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from autofit.contract.outcome import Crashed, Measured, Outcome, OutOfMemory, Trial
from autofit.contract.plan import Plan
from autofit.contract.technique import Prior
from autofit.costmodel.forecast import Forecast, PeakPrior
from autofit.machine.gpu_catalogue import Card, find
from autofit.search.sampler import AutofitSampler
from autofit.search.searcher import Searcher
from autofit.search.study import quiet_optuna
from autofit.space import Space
from autofit.system.errors import InputError
from autofit.system.units import GIB, MIB

COLUMNS = (
    "model", "layers", "hidden", "heads", "kv_heads", "intermediate", "vocab", "tied", "seq_len", "gpus", "gpu",
    "micro_batch", "grad_accum", "dp", "pp", "tp", "zero_stage", "global_batch", "tokens_per_s", "memory_gib", "status",
)  # fmt: skip
KNOBS = {"dp": "dp", "pp": "pp", "tp": "tp", "zero": "zero_stage", "micro_batch": "micro_batch"}
"""The columns that a searcher chooses; accumulation follows."""
CARDS_A_NODE = 8
LEAST_PLANS = 10
"""Fewer rows make no search."""
CLOSE = 0.02
MOST = {"autofit": 40, "random": 1000, "tpe": 80}
"""Trials of each searcher; autofit mostly stops by itself."""
SHARE = 0.92
"""Of the card's memory: the ceiling, as a tune takes it by default."""

ARITHMETIC, LINK, NETWORK = 0.4, 0.9, 0.3
"""Shares of the peak rates that whole steps reach: tensor cores; links inside a node; the network between nodes."""
LAYER_SECONDS, STAGE_SECONDS = 0.002, 0.017
"""Of the host: a layer's collectives, for each doubling of the ranks; a stage's waiting, for each tensor-parallel rank.
All five are rounded fits to sweeps of two small Llamas on at most 128 H100; each is corrected by a search's trials."""
LINK_BYTES = {(9, 0): 450e9, (8, 0): 300e9}
"""NVLink, a card and direction: H100 and A100 SXM datasheets."""
NETWORK_BYTES = {(9, 0): 50e9, (8, 0): 25e9}
"""A card's share of the network of a DGX: 400 and 200 Gbit/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder, by its sizes."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    tied: bool

    @property
    def layer_parameters(self) -> int:
        """Of one layer: attention, and a gated feed-forward part."""
        attention = 2 * self.hidden**2 * (self.heads + self.kv_heads) // self.heads
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    def stages(self, count: int) -> list[int]:
        """Layers of each pipeline stage: as even as nanotron makes them, the output layer counted by its weights."""
        head = self.vocab * self.hidden / self.layer_parameters
        target, found, place = (self.layers + head) / count, [0] * count, 0
        for layer in range(1, self.layers + 1):
            found[place] += 1
            if layer >= target * (place + 1) and place < count - 1:
                place += 1
        return found

    def stage_parameters(self, stages: list[int], place: int) -> int:
        """Of a stage: its layers, the embedding on the first and the output layer on the last."""
        table = self.vocab * self.hidden
        tables = (place == 0) + (place == len(stages) - 1 and not (self.tied and len(stages) == 1))
        return self.layer_parameters * stages[place] + tables * table


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a row says of its plan; no seconds where it failed."""

    seconds: float | None = None
    memory_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One landscape."""

    name: str
    shape: Shape
    card: Card
    seq_len: int
    global_batch: int
    answers: Mapping[Plan, Answer]

    @property
    def limit_bytes(self) -> int:
        """The ceiling."""
        return int(SHARE * self.card.memory_bytes)

    @property
    def best(self) -> float:
        """Seconds of a step of the fastest plan."""
        return min(one.seconds for one in self.answers.values() if one.seconds is not None)

    def regret(self, plan: Plan | None) -> float:
        """How much slower a plan is than the best, as a share of its speed."""
        seconds = None if plan is None else self.answers[plan].seconds
        return 1.0 if seconds is None else 1 - self.best / seconds

    # -- the laws ---------------------------------------------------------------------------------------------------

    def need_bytes(self, plan: Plan) -> float:
        """What the fullest stage needs."""
        sizes, ranks = self.shape, int(plan["tp"])
        rows, accumulation, pipeline = (int(plan[name]) for name in ("micro_batch", "accumulation", "pp"))
        stages, tokens = sizes.stages(pipeline), rows * self.seq_len
        sharing = int(plan["dp"]) if plan["zero"] else 1
        a_layer = (20 * sizes.hidden + 8 * sizes.intermediate) / ranks + (3 * sizes.hidden if ranks > 1 else 0)
        logits = tokens * sizes.vocab * (8 + 4 * (accumulation > 1)) / ranks
        return max(
            sizes.stage_parameters(stages, place) / ranks * (2 + 4 + 3 + 12 / sharing)
            + tokens * stages[place] * a_layer * min(pipeline - place, accumulation)
            + 10 * tokens * sizes.hidden
            + logits * (place == pipeline - 1)
            for place in range(pipeline)
        )

    def step_parts(self, plan: Plan) -> list[float]:
        """Seconds of a step: arithmetic, tensor parallelism, what the host adds, gradients, micro-steps, the rest."""
        sizes, capability = self.shape, self.card.capability or (8, 0)
        link, network = LINK * LINK_BYTES.get(capability, 32e9), NETWORK * NETWORK_BYTES.get(capability, 12.5e9)
        data, pipeline, ranks = (int(plan[name]) for name in ("dp", "pp", "tp"))
        rows, accumulation = int(plan["micro_batch"]), int(plan["accumulation"])
        stages, tokens = sizes.stages(pipeline), rows * self.seq_len
        micro_steps = accumulation + pipeline - 1
        flops = [6 * tokens * layers * (sizes.layer_parameters + self.seq_len * sizes.hidden) for layers in stages]
        flops[-1] += 6 * tokens * sizes.vocab * sizes.hidden
        arithmetic = max(flops) / ranks / (ARITHMETIC * self.card.rate("bf16"))
        gathered = max(stages) * 8 * tokens * sizes.hidden * 2 * (ranks - 1) / ranks
        collectives = gathered / (link if ranks <= CARDS_A_NODE else CARDS_A_NODE * network)
        host = max(stages) * LAYER_SECONDS * math.log2(2 * ranks) + STAGE_SECONDS * ranks * (pipeline > 1)
        device = arithmetic + collectives
        waited = (device**4 + host**4) ** 0.25 - device
        gradients = max(sizes.stage_parameters(stages, place) for place in range(pipeline)) / ranks
        moved = gradients * (6 if plan["zero"] else 8) * (data - 1) / data
        inside = data * ranks <= CARDS_A_NODE
        exchange = moved / link if inside else moved / network * min(ranks, CARDS_A_NODE) / CARDS_A_NODE
        if not plan["zero"]:
            exchange = max(0.1 * exchange, exchange - 2 / 3 * device) if pipeline == 1 else accumulation * exchange
        return [
            micro_steps * arithmetic,
            micro_steps * collectives,
            micro_steps * waited,
            exchange,
            0.001 * micro_steps,
            0.05,
        ]

    # -- what the searcher gets ---------------------------------------------------------------------------------------

    def space(self) -> Space:
        """The file's own columns."""
        return space_of(tuple(self.answers))

    def forecast(self, space: Space) -> Forecast:
        """The laws in the place of traces."""
        count = len(space.plans)
        needs = np.array([self.need_bytes(plan) for plan in space.plans])
        work = np.array([self.step_parts(plan) for plan in space.plans]) / self.global_batch
        return Forecast(
            tensor_bytes=needs,
            seconds=work.sum(axis=1),
            work=work,
            nominal=np.ones(work.shape[1]),
            known_card=True,
            timed=False,
            approximate=np.zeros(count, dtype=bool),
            peak_prior=PeakPrior(
                offset_bytes=0.0, offset_std=512 * MIB, slope=1.0, slope_std=0.1, residual=0.1, scatter_bytes=512 * MIB,
                value_bytes=256 * MIB, value_share=0.05, heap_share=0.0, heap_share_std=0.0,
            ),
            kernel_overhead_bytes=np.zeros(count),
            activation_bytes=np.zeros(count),
        )  # fmt: skip

    def trial(self, number: int, plan: Plan) -> Trial:
        """The row's answer; one that failed ran out of memory where its need is above the ceiling."""
        answer = self.answers[plan]
        if answer.seconds is not None:
            outcome: Outcome = self._measured(answer.seconds, answer.memory_bytes)
        elif self.need_bytes(plan) > self.limit_bytes:
            limit = self.limit_bytes
            outcome = OutOfMemory(where="device", phase="backward", limit_bytes=limit, peak_bytes=limit)
        else:
            outcome = Crashed(reason="failed, for a reason that is not told")
        return Trial(number=number, plan=plan, outcome=outcome, wall_seconds=0.0, purpose="search")

    def _measured(self, seconds: float, memory_bytes: int) -> Measured:
        held = min(memory_bytes, self.limit_bytes)
        return Measured(
            step_seconds=seconds, step_seconds_spread=0.04 * seconds, samples_per_second=self.global_batch / seconds,
            tokens_per_second=self.global_batch * self.seq_len / seconds, peak_bytes=held, allocated_bytes=held,
            reserved_bytes=held, outside_bytes=0, host_bytes=0, limit_bytes=self.limit_bytes, fidelity="whole",
            steps=(seconds,), training_seconds=seconds, loss=1.0,
        )  # fmt: skip


def space_of(plans: tuple[Plan, ...]) -> Space:
    """All that is known of plans without their laws: their values."""
    domains = {name: tuple(sorted({plan[name] for plan in plans})) for name in plans[0]}
    counted = Prior(time=(0.0, 0.0), memory=(0.0, 0.1))  # the laws say what each value does
    priors = {name: dict.fromkeys(values, counted) for name, values in domains.items()}
    return Space(domains=domains, plans=plans, priors=priors)


# -- the file ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> tuple[list[Sweep], dict[str, int]]:
    """The landscapes of a file, and how many rows are left out, by reason.

    Raises:
        InputError: The file can't be read, lacks a column, or holds no landscape.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            rows = [] if missing else list(reader)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be read: {error}", hint="give a CSV file of a sweep") from error
    if missing:
        raise InputError(f"{path} lacks the columns {', '.join(missing)}", hint="one row is one plan of a sweep")
    left_out: Counter[str] = Counter()
    groups: defaultdict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        if int(row["micro_batch"]) * int(row["grad_accum"]) * int(row["dp"]) != int(row["global_batch"]):
            left_out["micro-batch x accumulation x data-parallel ranks is not the global batch"] += 1
            continue
        groups[tuple(row[name] for name in ("model", "gpu", "gpus", "seq_len", "global_batch"))].append(row)
    found = []
    for key, members in groups.items():
        answers = answers_of(members)
        left_out["repeats a plan"] += len(members) - len(answers)
        if len(answers) < LEAST_PLANS or not any(one.seconds for one in answers.values()):
            left_out[f"fewer than {LEAST_PLANS} plans of that batch"] += len(answers)
            continue
        found.append(sweep_of(key, members[0], answers))
    if not found:
        raise InputError(
            f"{path} holds no landscape", hint=f"{LEAST_PLANS} plans of one model, batch and world make one"
        )
    return sorted(found, key=lambda one: one.name), {why: count for why, count in left_out.items() if count}


def answers_of(rows: list[dict[str, str]]) -> dict[Plan, Answer]:
    """What the rows say of each plan; the median where it was measured more than once."""
    by_plan: defaultdict[Plan, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        values = {name: int(row[column]) for name, column in KNOBS.items()}
        by_plan[Plan({**values, "accumulation": int(row["grad_accum"])})].append(row)
    found = {}
    for plan, same in by_plan.items():
        good = [row for row in same if row["status"] == "measured" and float(row["tokens_per_s"] or 0) > 0]
        if not good:
            found[plan] = Answer()
            continue
        tokens = int(good[0]["global_batch"]) * int(good[0]["seq_len"])
        found[plan] = Answer(
            seconds=statistics.median(tokens / float(row["tokens_per_s"]) for row in good),
            memory_bytes=int(max(float(row["memory_gib"] or 0) for row in good) * GIB),
        )
    return found


def sweep_of(key: tuple[str, ...], row: Mapping[str, str], answers: Mapping[Plan, Answer]) -> Sweep:
    """The landscape of some rows."""
    sizes = {name: int(row[name]) for name in ("layers", "hidden", "heads", "kv_heads", "intermediate", "vocab")}
    model, gpu, gpus, seq_len, global_batch = key
    return Sweep(
        name=f"{model} on {gpus} {gpu}, {global_batch} rows of {seq_len}",
        shape=Shape(**sizes, tied=row["tied"].strip().lower() == "true"),
        card=find(gpu),
        seq_len=int(seq_len),
        global_batch=int(global_batch),
        answers=answers,
    )


# -- the search ---------------------------------------------------------------------------------------------------


def play(sweep: Sweep, name: str, seed: int) -> Iterator[tuple[Trial, Plan | None]]:
    """Each trial of a searcher, and the fastest plan after it."""
    plans = every_plan(sweep, seed) if name == "random" else asked(sweep, name, seed)
    best: tuple[float, Plan | None] = (math.inf, None)
    trial = None
    for number in range(MOST[name]):
        try:
            trial = sweep.trial(number, plans.send(trial))
        except StopIteration:
            return
        if isinstance(trial.outcome, Measured):
            best = min(best, (trial.outcome.step_seconds, trial.plan), key=lambda pair: pair[0])
        yield trial, best[1]


def every_plan(sweep: Sweep, seed: int) -> Generator[Plan, Trial | None]:
    """Each plan once, in an order drawn by the seed."""
    plans = list(sweep.answers)
    random.Random(seed).shuffle(plans)
    while plans:
        yield plans.pop()


def asked(sweep: Sweep, name: str, seed: int) -> Generator[Plan, Trial | None]:
    """What a searcher asks for, and is told of."""
    limit_bytes, forecast = sweep.limit_bytes, None
    shown = {plan if name == "autofit" else joint(plan): plan for plan in sweep.answers}
    space = space_of(tuple(shown))
    sampler: optuna.samplers.BaseSampler = optuna.samplers.TPESampler(seed=seed)
    if name == "autofit":
        forecast = sweep.forecast(space)
        sampler = AutofitSampler(space, limit_bytes=limit_bytes, seed=seed, forecast=forecast)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    searcher = Searcher(space, study, sampler=name, limit_bytes=limit_bytes, seed=seed, forecast=forecast)
    while (plan := searcher.ask()) is not None:
        trial = yield shown[plan]
        if trial is not None:
            searcher.tell(replace(trial, plan=plan))


def joint(plan: Plan) -> Plan:
    """A plan whose parallel sizes are one value, as in a tune: proposed each by itself they are often no world's."""
    sizes = "x".join(f"{name}{plan[name]}" for name in ("dp", "pp", "tp"))
    return Plan({"parallel": sizes, **{name: plan[name] for name in ("zero", "micro_batch", "accumulation")}})


def run(sweep: Sweep, name: str, seed: int) -> dict[str, Any]:
    """One search: when it found a plan within 2 % of the best, what it ended with, and what failed."""
    found, ended = math.inf, 1.0
    kinds: list[str] = []
    with quiet_optuna():
        for trial, best in play(sweep, name, seed):
            kinds.append(trial.outcome.kind)
            ended = sweep.regret(best)
            found = min(found, len(kinds) if ended <= CLOSE else math.inf)
    return {
        "landscape": sweep.name,
        "searcher": name,
        "seed": seed,
        "trials_to_find": found,
        "final_regret": ended,
        "trials": len(kinds),
        "out_of_memory": kinds.count("out_of_memory"),
        "failed_otherwise": kinds.count("crashed"),
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all landscapes and seeds.

    ``found`` is the share of runs that end within 2 % of the best; ``trials_to_90_percent`` the trials after which
    90 % of the runs had found it, ``None`` where they never do; ``failed_share`` is of trials, those that ran out of
    memory and the others apart.
    """
    trials = sum(one["trials"] for one in runs)
    needed = sorted(one["trials_to_find"] for one in runs)[math.ceil(0.9 * len(runs)) - 1]
    memory, otherwise = (sum(one[name] for one in runs) / trials for name in ("out_of_memory", "failed_otherwise"))
    return {
        "found": round(sum(one["final_regret"] <= CLOSE for one in runs) / len(runs), 4),
        "found_after_8": round(sum(one["trials_to_find"] <= 8 for one in runs) / len(runs), 4),
        "trials_to_90_percent": needed if math.isfinite(needed) else None,
        "median_trials": statistics.median(one["trials"] for one in runs),
        "failed_share": round(memory + otherwise, 4),
        "failed_of_memory": round(memory, 4),
        "failed_otherwise": round(otherwise, 4),
    }


_SWEEPS: list[Sweep] = []


def _run(job: tuple[int, str, int]) -> dict[str, Any]:
    place, name, seed = job
    return run(_SWEEPS[place], name, seed)


def playback(path: Path, *, seeds: Mapping[str, int], searchers: Sequence[str], jobs: int) -> dict[str, Any]:
    """Play every landscape of a file, with so many seeds of each searcher; print a line for each, and return the sums.

    Raises:
        InputError: See :func:`read`; or a searcher that is not known here.
    """
    unknown = [name for name in searchers if name not in MOST]
    if unknown:
        raise InputError(f"no searcher {unknown[0]!r} plays sweeps", hint=f"known: {', '.join(MOST)}")
    sweeps, left_out = read(path)
    _SWEEPS[:] = sweeps
    jobs_of = [(place, name, seed) for name in searchers for place in range(len(sweeps)) for seed in range(seeds[name])]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        runs = pool.map(_run, jobs_of, chunksize=1)
    for why, count in left_out.items():
        print(f"left out, {count} rows: {why}")
    by_searcher = {}
    for name in searchers:
        mine = [one for one in runs if one["searcher"] == name]
        by_searcher[name] = {"runs": len(mine), **summary(mine)}
        for sweep in sweeps:
            here = summary([one for one in mine if one["landscape"] == sweep.name])
            print(f"{name:8} {sweep.name}: {len(sweep.answers)} plans, {_words(here)}")
        print(f"{name:8} all of them: {_words(by_searcher[name])}")
    first, *others = searchers
    return {
        "landscapes": len(sweeps),
        "left_out": left_out,
        **by_searcher[first],
        **{name: by_searcher[name] for name in others},
    }


def _words(found: Mapping[str, Any]) -> str:
    """One line of the table."""
    after = found["trials_to_90_percent"]
    return (
        f"found {found['found']:.0%}, after 8 trials {found['found_after_8']:.0%}, 90 % after "
        f"{'-' if after is None else after}, trials {found['median_trials']:g}, "
        f"out of memory {found['failed_of_memory']:.1%}, failed otherwise {found['failed_otherwise']:.1%}"
    )
