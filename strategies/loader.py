"""Loader: how many worker processes make the micro-batches of a user's script, while the device computes.

- ``default``: as the script has it; by default the training's own process loads, and the device waits for it.
- ``workers_4``: four worker processes, each with two micro-batches ahead (``prefetch_factor``), and on CUDA handed over
  in pinned memory. ``workers_4:prefetch=8`` has eight ahead of each. They are started anew for each epoch
  (``persistent_workers`` is left as the script has it): they hold the data set as it is when they start, and many a
  script changes it between epochs.

Saves: the time that a step waits for its rows, where making them takes longer than training on them. Costs: memory of
the host for each worker, processors that a CPU's training or offloaded work needs too, and some seconds to start; a
Trainer starts as many again for an evaluation.

Which numbers are offered: the loader is timed alone, without a training step, when the script is described, with 0, 1,
2, 4, ... workers until more make no more rows. Offered is the smallest number within 10 % of the most rows (on a CPU a
single worker, too, which leaves the other processors to the training), where loading a row takes at least a twentieth
of what a forward pass must take on the fastest device there is. Never more workers than processors, nor than the
host's memory holds.

Of class ``exact``: the same rows in the same order, unless the script changes its data set in the middle of an epoch,
which workers do not see. Where rows are drawn at random while they are made (augmentation), the numbers drawn are
others, as they are with every other seed.

Sources: ``torch.utils.data.DataLoader``; ``dataloader_*`` of ``TrainingArguments``. Figures elsewhere: workers 0, 1, 2,
3, 4 of a slow transform took 5.4, 3.9, 1.3, 0.8, 0.9 s an epoch (ml-engineering, training/performance). Carried by
the arguments of a Trainer; into a plain loop ``autofit run`` puts them where the loader is prepared.

Not covered: data sets that are read in order, of which each worker would read all, unless they share them out
themselves; copies to the device that are not waited for (``non_blocking``); how workers are started.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from autofit.contract.emission import Emission
from autofit.contract.technique import Choice, Kind, Part, Prior, Status, Technique

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autofit.contract.facts import Facts
    from autofit.contract.observation import Ran, Seen
    from autofit.contract.plan import Value
    from autofit.contract.recipe import Recipe
    from autofit.contract.script import Loading

_COUNTS = (1, 2, 4, 8, 16, 32)
_VALUE = re.compile(r"workers_([1-9]\d?)(?::prefetch=([1-9]\d?))?")
_PREFETCH = 2
_AS_GOOD = 0.9
_FASTEST_FLOPS = {"cuda": 2.5e15, "cpu": 1e13}
"""Dense 16-bit products of the fastest device there is (Nvidia B200), and of a large server's processors: no row is
trained on in less than a forward pass takes at these, about two FLOPs a weight and token."""
_MATTERS = 0.05


class _Settings(NamedTuple):
    """Of a loader, by what PyTorch calls them."""

    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory: bool


class Loader(Technique):
    """Worker processes that make a script's micro-batches."""

    name = "loader"
    baseline = "default"

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        script = facts.workload.script
        loading = None if script is None else script.loading
        if loading is None:
            none = "random rows are trained on, which take no time to make: tune the training script itself"
            own = Choice("default", Kind.EXACT, "offered", "as the training script has it")
            return own, *(Choice(f"workers_{n}", Kind.EXACT, "withheld", none) for n in _COUNTS)
        words = f"as the script has it: {_processes(loading.workers)}{_rate_words(loading, loading.workers)}"
        own = Choice("default", Kind.EXACT, "offered", words)
        offered = _worth_trying(loading, facts)

        def choice(count: int) -> Choice:
            why = _withheld(count, loading, facts)
            status: Status = "withheld" if why else "offered" if count in offered else "on_request"
            return Choice(
                f"workers_{count}", Kind.EXACT, status, why or _processes(count) + _rate_words(loading, count)
            )

        return own, *(choice(count) for count in _COUNTS)

    def apply(self, value: Value, recipe: Recipe) -> None:
        if value != self.baseline and recipe.facts.workload.script is not None:
            recipe.loader_arguments |= _settings(value, recipe.facts)._asdict()

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        script = facts.workload.script
        if script is None or script.loading is None or not script.trainer:
            return Emission()
        written = _settings(value, facts)._asdict()
        return Emission(training_args={f"dataloader_{name}": setting for name, setting in written.items()})

    def traced_as(self, value: Value, part: Part) -> Value | None:
        return self.baseline  # nothing of it is on the device

    def converted(self, plan: Mapping[str, Value]) -> Mapping[str, Value]:
        return plan if self.name in plan else {**plan, self.name: self.baseline}

    def knows(self, value: object, facts: Facts) -> bool:
        return value == self.baseline or (isinstance(value, str) and _VALUE.fullmatch(value) is not None)

    def parse(self, text: str, facts: Facts) -> Value:
        found = _VALUE.fullmatch(text)
        if found is None or found[2] is None:
            return super().parse(text, facts)
        super().parse(f"workers_{found[1]}", facts)  # which may be withheld
        return text

    def observe(self, ran: Ran) -> Seen:
        """The settings of the loader that ran, and the worker processes that live."""
        if ran.loader is None:
            return {}
        import multiprocessing

        seen: dict[str, Any] = {name: getattr(ran.loader, name, None) for name in _Settings._fields}
        if getattr(ran.loader, "end_of_dataloader", False):
            return seen  # its workers have ended with the epoch
        return {**seen, "processes": len(multiprocessing.active_children())}

    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        if value == self.baseline or seen.get("num_workers") is None:
            return None
        for name, wanted in _settings(value, facts)._asdict().items():
            if name != "pin_memory" and seen.get(name) != wanted:
                return f"the loader has {name}={seen.get(name)}, not {wanted}: does the script make it itself?"
        wanted = _settings(value, facts).num_workers
        alive = seen.get("processes", wanted)
        return f"{alive} of {wanted} worker processes run" if alive < wanted else None

    def prior(self, value: Value, facts: Facts) -> Prior:
        """What a step waits is not known before one was timed: anything from nothing to nearly all of it."""
        if value == self.baseline:
            return Prior(time=(0.0, 0.01), memory=(0.0, 0.01))
        return Prior(time=(-0.1, 0.4), memory=(0.0, 0.02), extra_seconds=1.0)


def _settings(value: Value, facts: Facts) -> _Settings:
    """What a value sets."""
    script = facts.workload.script
    loading = None if script is None else script.loading
    found = _VALUE.fullmatch(str(value))
    if found is not None:
        kept = loading is not None and loading.persistent
        return _Settings(int(found[1]), int(found[2] or _PREFETCH), kept, facts.hardware.device == "cuda")
    if loading is None:
        return _Settings(0, None, False, True)
    return _Settings(loading.workers, loading.prefetch, loading.persistent, loading.pinned)


def _withheld(count: int, loading: Loading, facts: Facts) -> str | None:
    """Why so many workers can't be had, in words."""
    cores, limit = loading.cores // facts.workload.processes, facts.workload.host_limit_bytes
    if loading.fixed is not None:
        return loading.fixed
    if count == loading.workers:
        return "the script's own loader has as many"
    if count > max(1, cores):
        return f"a process of the training has {max(1, cores)} processor(s) here"
    if count * loading.worker_bytes * facts.workload.processes > limit:
        needed = count * loading.worker_bytes * facts.workload.processes
        return f"they would hold {needed / 2**30:.1f} GiB of the host's memory, {limit / 2**30:.1f} GiB may be used"
    return None


def _worth_trying(loading: Loading, facts: Facts) -> set[int]:
    """The numbers of workers that the search tries."""
    alone = loading.row_seconds(0)
    if alone is None or alone < _MATTERS * _least_row_seconds(facts):
        return set()
    timed = [(count, rate) for count, rate in loading.rows_per_second if not _withheld(count, loading, facts) and count]
    if not timed:
        return set()
    most = max(rate for _, rate in timed)
    best = min(count for count, rate in timed if rate >= _AS_GOOD * most)
    single = {timed[0][0]} if facts.hardware.device == "cpu" else set()
    return {best} | single


def _least_row_seconds(facts: Facts) -> float:
    """What no device undercuts for a row: a forward pass of a dense model; 0 where not all weights meet each token."""
    model = facts.model
    tokens = 0 if model.has_experts or not facts.model.sample_tokens else facts.workload.seq_len
    return 2 * model.parameters * tokens / _FASTEST_FLOPS[facts.hardware.device]


def _processes(workers: int) -> str:
    if not workers:
        return "the training's own process makes the rows"
    return f"{workers} worker process{'es' if workers > 1 else ''} make{'' if workers > 1 else 's'} the rows"


def _rate_words(loading: Loading, workers: int) -> str:
    """The rate that was timed with so many workers, in words; empty where none was."""
    rates = dict(loading.rows_per_second)
    return f", {rates[workers]:,.0f} rows/s by themselves" if workers in rates else ""
