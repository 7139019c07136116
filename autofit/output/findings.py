"""What was found beside the winner: smaller ceilings, what each value is good for, what the loader takes."""

from __future__ import annotations

import math

from autofit.contract.outcome import Measured
from autofit.costmodel.evaluation import held_at_the_micro_batch, most_rows
from autofit.output.document import Document
from autofit.output.plan_words import plan_words
from autofit.output.standings import standings
from autofit.output.text import number, one_line, percent, plural
from autofit.registry import recipe_of, techniques
from autofit.search.decision import pool
from autofit.search.tradeoffs import Contribution
from autofit.system.units import duration, size


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
    doubt = "others disturbed the plan without it, so " if measured else ""
    unknown = "" if one.speed_ratio is not None else f"; {doubt}what it does for the speed is not known"
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
    return f"{said}: more processors or rows prepared beforehand make it faster, and no faster device."


def evaluation(document: Document) -> list[tuple[str, str]]:
    """How many rows a Trainer evaluates at once, and why not more, below a heading; nothing where others say so."""
    facts = document.facts
    if facts.workload.script is not None or facts.workload.launch_path != "trainer":
        return []
    rows = int(recipe_of(document.plan, facts).emission.training_args["per_device_eval_batch_size"])
    fast = "more would hardly be faster" if rows >= most_rows(facts) else None
    why = held_at_the_micro_batch(facts) or fast or "twice as many might need more memory than the training itself"
    return [("Evaluation", f"A Trainer evaluates {plural(rows, 'row')} at once (per_device_eval_batch_size): {why}.")]


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
    """What the short training of the winner showed, in a line, or that there was none; ``None`` of an estimate."""
    found = document.guard
    if found is None:
        return "It was not compared with the float32 baseline." if document.estimated is None else None
    words = one_line(found.words, 400)
    return f"{words[:1].upper()}{words[1:]}. It took {duration(found.seconds)}."
