"""What a document says, in words and numbers, whatever it is laid out in: the terminal and the page say the same."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from autofit.contract.layout import data_parallel
from autofit.contract.outcome import (
    Measured,
    Promise,
    Trial,
)
from autofit.contract.plan import Plan
from autofit.output.document import Document, Offer
from autofit.output.plan_words import SPLIT, baseline_values, is_baseline, plan_words
from autofit.output.text import count, number, one_line, percent, plural, with_spread
from autofit.registry import techniques
from autofit.search.decision import pool
from autofit.search.tradeoffs import Contribution
from autofit.system.statistics import median
from autofit.system.units import duration, size

_KINDS = {
    "measured": "measured",
    "crashed": "crashed",
    "unsupported": "unsupported",
    "diverged": "diverged",
    "timed_out": "timed out",
    "out_of_memory": "out of memory",
}  # what a reader least expects comes first among the failures


ESTIMATED = "estimated, not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One plan that ran inside the ceiling, all of its runs together.

    Attributes:
        samples_per_second: The promise's for the winner; else that of all its runs together, as the winner was chosen.
        peak_bytes: The promise's for the winner; else the most of its runs.
        runs: How many times it was measured.
    """

    plan: Plan
    samples_per_second: float
    peak_bytes: int
    runs: int
    is_winner: bool
    is_baseline: bool


def standings(document: Document) -> list[Standing]:
    """The plans that were measured: the winner, then the fastest first."""
    runs: dict[Plan, list[Measured]] = {document.plan: []}
    for trial in document.trials:
        if isinstance(trial.outcome, Measured):
            runs.setdefault(trial.plan, []).append(trial.outcome)
    baseline = baseline_values(document.facts)
    found = []
    for plan, seen in runs.items():
        wins = plan == document.plan
        shown = document.promise if wins else pool(seen)
        found.append(
            Standing(
                plan=plan,
                samples_per_second=shown.samples_per_second,
                peak_bytes=shown.peak_bytes,
                runs=len(seen),
                is_winner=wins,
                is_baseline=is_baseline(plan, baseline),
            )
        )
    return sorted(found, key=lambda one: (not one.is_winner, -one.samples_per_second, one.peak_bytes))


def failures(document: Document) -> list[Trial]:
    """The trials that were not measured, the least expected kinds first."""
    order = list(_KINDS)
    failed = [trial for trial in document.trials if not isinstance(trial.outcome, Measured)]
    return sorted(failed, key=lambda trial: (order.index(trial.outcome.kind), trial.number))


def tally(document: Document) -> str:
    """``12 trials: 9 measured, 3 out of memory``."""
    counts: Counter[str] = Counter(trial.outcome.kind for trial in document.trials)
    parts = ", ".join(f"{counts[kind]} {word}" for kind, word in _KINDS.items() if counts[kind])
    return f"{plural(len(document.trials), 'trial')}: {parts or 'none kept'}"


def product(document: Document) -> str:
    """The promise of the global batch, in numbers: ``8 x 4 x 1 = 32``."""
    work = document.workload
    factors = [*(str(document.plan[name]) for name in SPLIT), str(data_parallel(document.plan, work))]
    return f"{' x '.join(factors)} = {work.global_batch}"


def chosen(document: Document) -> list[Offer]:
    """The winner's value of each technique, with its class and what it does; empty words where none were kept."""
    known = {(offer.technique, offer.value): offer for offer in document.offers}
    none = {"kind": "", "status": "", "reason": ""}
    return [
        known.get((name, value)) or Offer(technique=name, value=value, **none) for name, value in document.plan.items()
    ]


def against_baseline(document: Document) -> tuple[float | None, list[str]]:
    """How the winner compares with the plans of a search over the batch size alone.

    Returns:
        The winner's speed as a multiple of the fastest measured baseline plan's (``None`` where there is no other
        than the winner), and what is to be said, a sentence each.
    """
    if document.estimated is not None:
        return None, ["Nothing was measured: there is no plan to compare with."]
    ranked = standings(document)
    winner, alike = ranked[0], [one for one in ranked if one.is_baseline]
    values = " ".join(f"{name}={value}" for name, value in baseline_values(document.facts).items())
    meaning = f"A baseline plan is what a search over the batch size alone can find: {values}."
    if winner.is_baseline:
        return None, [
            "The winner is a baseline plan itself: nothing but the split of the batch was worth changing.",
            meaning,
        ]
    if not alike:
        failed = sum(is_baseline(trial.plan, baseline_values(document.facts)) for trial in document.trials)
        if failed:
            return None, [f"{plural(failed, 'baseline trial')}, and none was measured inside the ceiling.", meaning]
        return None, ["No baseline plan was tried, so there is none to compare with."]

    def compared(other: Standing) -> str:
        return (
            f"({plan_words(other.plan)}) makes {number(other.samples_per_second)} samples/s with a peak memory of "
            f"{size(other.peak_bytes)}; the winner makes {times(winner, other)} that with {size(winner.peak_bytes)}"
        )

    fastest, largest = alike[0], max(alike, key=lambda one: int(one.plan["micro_batch"]))
    said = [f"The fastest baseline plan {compared(fastest)}."]
    if largest.plan != fastest.plan:
        said.append(f"The baseline plan with the largest micro-batch that fits {compared(largest)}.")
    return winner.samples_per_second / fastest.samples_per_second, [*said, meaning]


def times(one: Standing, other: Standing) -> str:
    """``3.10 times``: the speed of one as a multiple of the other's."""
    return f"{one.samples_per_second / other.samples_per_second:.2f} times"


def memory_parts(document: Document) -> list[tuple[str, int, str]]:
    """What stands beside the peak on CUDA: name, bytes, meaning. Empty on a CPU, where they are all the peak."""
    promise = document.promise
    if document.hardware.device == "cpu":
        return []
    return [
        ("allocated", promise.allocated_bytes, "the tensors alone"),
        ("reserved", promise.reserved_bytes, "what the allocator held, its cache included"),
        ("outside", promise.outside_bytes, "context, workspaces and managed memory outside the allocator"),
    ]


def peak_words(document: Document) -> str:
    """What the peak counts."""
    if document.hardware.device == "cpu":
        return "resident memory above that of an idle process"
    return "what the device must hold, as its driver counts it"


def path_words(document: Document) -> str:
    """What runs the training: the launch path in words."""
    return "trained by a Trainer" if document.promise.launch_path == "trainer" else "trained by a plain loop"


def script_lines(document: Document, folder: str | Path) -> list[str]:
    """What the script must do, and how it comes by ``setup``, a sentence each; empty where arguments carry all."""
    loops = document.promise.launch_path == "loop"
    if document.workload.script is not None:
        return ["nothing: `autofit run` puts the plan into it"]
    if not document.script and not loops:
        return []
    said = any("autofit.load(" in sentence for sentence in document.script)
    opening = [] if said else [f"read the plan, once: setup = autofit.load({str(folder)!r})"]
    return [*opening, *document.script]


def launch_commands(document: Document, folder: str | Path) -> list[list[str]]:
    """The commands that train by the emitted files and that check the promise, word by word and unquoted."""
    at = Path(folder)
    shown = f"./{at}" if str(at).startswith("-") else str(at)  # it is no option
    script = document.workload.script
    if script is not None:
        what, *behind = script.typed
        return [["autofit", "run", shown, what, *(["--", *behind] if behind else [])], ["autofit", "verify", shown]]
    launch = ["accelerate", "launch", "--config_file", f"{shown}/accelerate.yaml"]
    if document.workload.nodes > 1:
        launch += ["--machine_rank", "0", "--main_process_ip", "ADDRESS"]
    launch.append("your_script.py")
    if document.promise.launch_path == "trainer":
        launch.append(f"{shown}/training_args.json")
    return [launch, ["autofit", "verify", shown]]


def shell_lines(words: list[str], width: int = 76) -> list[str]:
    r"""A command on as many lines as it needs, to be pasted as it stands.

    >>> shell_lines(["autofit", "verify", "my folder"], width=16)
    ['autofit verify \\', "    'my folder'"]
    """
    if len(shlex.join(words)) <= width:
        return [shlex.join(words)]
    first, *rest = map(shlex.quote, words)
    lines = [first]
    for word in rest:
        if len(f"{lines[-1]} {word} \\") > width:
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return lines


def cost(document: Document) -> str:
    """What the tune took."""
    if document.estimated is not None:
        return f"{duration(document.seconds)} for the estimate; no training step was run."
    return (
        f"{duration(document.seconds)} for {plural(len(document.trials), 'trial')} "
        f"(median {duration(document.median_trial_seconds)} each); "
        f"{percent(document.training_share)} of the time went into training steps."
    )


def ceilings(document: Document) -> list[str]:
    """What smaller ceilings would give, a sentence each; empty where the winner is the smallest plan that was seen."""
    smaller = [point for point in document.front if point.plan != document.plan]
    return [
        f"With {size(point.peak_bytes)} you would get {number(point.samples_per_second)} samples/s "
        f"({percent(point.samples_per_second / document.promise.samples_per_second)}): {plan_words(point.plan)}."
        for point in smaller
    ]


def contributed(document: Document) -> list[str]:
    """What each value of the winner is good for, a sentence each."""
    return [
        f"{one.technique}={one.value} instead of {one.plain}: {_contribution(one)}." for one in document.contributions
    ]


def _contribution(one: Contribution) -> str:
    if one.evidence == "none":
        return "the plan without it was not measured, and no estimate tells enough of it"
    if one.evidence == "out_of_memory":
        return "without it, the plan breaks the ceiling"
    measured = one.evidence == "measured"
    said = []
    if one.speed_ratio is not None:
        times = f"{one.speed_ratio:.2f} times the speed"
        said.append(times if measured else f"about {times}, give or take {percent(one.spread or 0.0)}")
    if one.saved_bytes is not None:
        more = "more" if one.saved_bytes >= 0 else "less"
        said.append(f"without it the peak is {'' if measured else 'about '}{size(abs(one.saved_bytes))} {more}")
    unknown = "" if one.speed_ratio is not None else "; what it does for the speed is not known"
    return f"{', and '.join(said)} ({one.evidence}{unknown})"


_WARM_UP_STEPS = 2


def payback(document: Document) -> str | None:
    """After how many steps a winner whose code is compiled has paid back what that takes; ``None`` for another."""
    runs = [(trial.plan, trial.outcome) for trial in document.trials if isinstance(trial.outcome, Measured)]
    mine = [run for plan, run in runs if plan == document.plan]
    if not mine or not mine[-1].evidence.compiled_graphs:
        return None
    step_seconds = document.promise.step_seconds
    extra = max(0.0, max(run.warm_up_seconds for run in mine) - _WARM_UP_STEPS * step_seconds)
    said = f"The first steps take {duration(extra)} longer, since code is compiled then"
    compiled = {plan for plan, run in runs if run.evidence.compiled_graphs}
    others = [one for one in standings(document) if one.plan not in compiled]
    if not others:
        return f"{said}; no plan without compiling was measured, so whether that pays back is not known."
    saved = document.workload.global_batch / others[0].samples_per_second - step_seconds
    beside = f"the fastest plan without ({plan_words(others[0].plan)})"
    if saved <= 0:
        return f"{said}; against {beside} that never pays back."
    steps = math.ceil(extra / saved)
    return f"{said}; against {beside} that pays back after {plural(steps, 'optimizer step')}."


_WAITS, _WAITS_LONG = 0.1, 0.25


def waiting(document: Document) -> str | None:
    """How a script's loader compares with its training steps; ``None`` where no plan waited long enough to matter."""
    script = document.workload.script
    runs = [(trial.plan, trial.outcome) for trial in document.trials if isinstance(trial.outcome, Measured)]
    worst = max((run for _, run in runs), key=lambda run: run.loader_seconds / run.step_seconds, default=None)
    if script is None or worst is None or worst.loader_seconds < _WAITS * worst.step_seconds:
        return None
    row_seconds = script.loading.row_seconds(script.loading.workers) if script.loading else None
    alone = row_seconds * document.workload.global_batch if row_seconds else worst.loader_seconds
    mine = pool([run for plan, run in runs if plan == document.plan] or [worst])
    share = mine.loader_seconds / mine.step_seconds
    said = (
        f"The script's loader takes {duration(alone)} for the rows of a step, the step by itself "
        f"{duration(worst.step_seconds - worst.loader_seconds)}; the winner waits {duration(mine.loader_seconds)} of "
        f"{duration(mine.step_seconds)} for its rows"
    )
    if share < _WAITS_LONG:
        return f"{said}."
    return f"{said}: more processors or rows prepared beforehand make it faster, and neither another plan nor device."


def findings(document: Document) -> list[tuple[str, str]]:
    """What was seen of the winner, each a heading and a sentence: of its loader first, then by each technique."""
    runs = [trial.outcome for trial in document.trials if trial.plan == document.plan]
    measured = [run.evidence for run in runs if isinstance(run, Measured)]
    waits = waiting(document)
    said = [] if waits is None else [("What the loader takes", waits)]
    for one in techniques():
        found = [finding for seen in measured if (finding := one.finding(seen.of(one.name)))]
        said += found[-1:]
    return said


def guarded(document: Document) -> str | None:
    """What the short training of the winner showed, in a line; ``None`` where there was none."""
    found = document.guard
    if found is None:
        return None
    words = one_line(found.words, 400)
    return f"{words[:1].upper()}{words[1:]}. It took {duration(found.seconds)}."


_UNCERTAIN = 0.5
"""A spread of the step above which a figure with ``±`` would hold zero, or nearly so."""


def speed(document: Document) -> str:
    """The promised samples/s; its spread is that of the step, in proportion, where that says something.

    An estimate's has a tilde.
    """
    promise = document.promise
    if document.estimated is not None:
        return f"~{number(promise.samples_per_second)}"
    relative = promise.step_seconds_spread / promise.step_seconds
    if relative > _UNCERTAIN:
        return number(promise.samples_per_second)
    return with_spread(promise.samples_per_second, promise.samples_per_second * relative)


def pace(document: Document) -> str:
    """The promised samples/s, and tokens/s where the samples are texts."""
    promise, said = document.promise, f"{speed(document)} samples/s"
    if document.model.sample_tokens:
        said += f", {number(promise.tokens_per_second)} tokens/s"
        shares = _padding(document)
        said += f"; {percent(median(shares))} of a micro-batch is padding, not counted" if any(shares) else ""
    relative = promise.step_seconds_spread / promise.step_seconds
    if document.estimated is None and relative > _UNCERTAIN:
        said += f" (uncertain: runs of this plan took up to {1 + relative:.1f} times as long)"
    return said


def training_words(document: Document) -> list[str]:
    """``1B tokens take 5.200 hours at this speed``, and what they cost; empty where that was not asked."""
    asked = document.training
    if asked is None:
        return []
    said = f"{count(asked.tokens)} tokens take {number(asked.hours)} hours at this speed"
    if asked.cost is None or asked.price is None:
        return [said]
    return [f"{said}, and cost {number(asked.cost)} at {number(asked.price)} an hour"]


def _padding(document: Document) -> list[float]:
    """The share of padding in a micro-batch of the winner, of each of its trials."""
    found = [
        one.outcome.padding
        for one in document.trials
        if one.plan == document.plan and isinstance(one.outcome, Measured)
    ]
    return [one for one in found if one is not None]


def task_words(document: Document) -> str:
    """What the model is trained for: ``seq2seq-lm (a text out of a text)``."""
    model = document.model
    return "the script's" if model.task == "script" else f"{model.task} ({model.trained_on})"


def promised_step(document: Document) -> str:
    """The promised time of an optimizer step: ``776.7 ± 5.8 ms``, or ``~776.7 ms`` where it is estimated."""
    if document.estimated is None:
        return step(document.promise)
    figure, _, unit = step(document.promise).replace("± ", "").split(" ")
    return f"~{figure} {unit}"


def standing(document: Document) -> str:
    """How the figures of an answer came about."""
    return "measured" if document.estimated is None else ESTIMATED


def estimate_words(document: Document) -> str:
    """What an estimate's figures are worth, in a sentence; empty for a tune."""
    if document.estimated is None:
        return ""
    low, high = document.estimated.low, document.estimated.high
    said = f"Of five trainings, four make {low:.2f} to {high:.2f} times the predicted speed"
    if not low:
        said = "How far the speed of several cards is off is not known: it depends on the link between them"
    return (
        f"Estimated, not measured: no training step was run. {said}; autofit verify tells whether it holds, on a "
        f"machine with {document.hardware.name}."
    )


def predicted_speed(trial: Trial) -> str:
    """What was predicted before the trial, with its range: ``12.1 (10.6 to 13.8)``; nothing where nothing was."""
    told = trial.predicted_speed
    return "" if told is None else f"{number(told.samples_per_second)} ({number(told.low)} to {number(told.high)})"


def step(of: Promise | Measured) -> str:
    """The time of one optimizer step with its spread: ``776.7 ± 5.8 ms``."""
    factor, unit = (1000, "ms") if of.step_seconds < 1 else (1, "s")
    return f"{with_spread(of.step_seconds * factor, of.step_seconds_spread * factor)} {unit}"
