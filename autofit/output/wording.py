"""What a document says, in words and numbers, whatever it is laid out in: the terminal and the page say the same."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from autofit.contract.layout import data_parallel
from autofit.contract.outcome import (
    Measured,
    Promise,
    Trial,
)
from autofit.output.document import Document, Offer
from autofit.output.plan_words import SPLIT
from autofit.output.text import as_word, count, number, percent, plural, with_spread
from autofit.registry import loaded_rows, recipe_of
from autofit.system.statistics import median
from autofit.system.units import duration

KINDS = {
    "measured": "measured",
    "crashed": "crashed",
    "unsupported": "unsupported",
    "diverged": "diverged",
    "timed_out": "timed out",
    "out_of_memory": "out of memory",
}
"""What may become of a trial, in words; what a reader least expects comes first among the failures."""


ESTIMATED = "estimated, not measured"


def tally(document: Document) -> str:
    """``12 trials: 9 measured, 3 out of memory``."""
    counts: Counter[str] = Counter(trial.outcome.kind for trial in document.trials)
    parts = ", ".join(f"{counts[kind]} {word}" for kind, word in KINDS.items() if counts[kind])
    return f"{plural(len(document.trials), 'trial')}: {parts or 'none kept'}"


def product(document: Document) -> str:
    """The promise of the global batch, in numbers: ``8 x 4 x 1 = 32``."""
    work = document.workload
    factors = [*(str(document.plan[name]) for name in SPLIT), str(data_parallel(document.plan, work))]
    joined = loaded_rows(document.plan, document.facts)
    packed = "" if joined == document.plan["micro_batch"] else f" rows, a micro-batch of which is {joined} packed ones"
    return f"{' x '.join(factors)} = {work.global_batch}{packed}"


def chosen(document: Document) -> list[Offer]:
    """The winner's value of each technique, with its class and what it does; empty words where none were kept."""
    known = {(offer.technique, offer.value): offer for offer in document.offers}
    none = {"kind": "", "status": "", "reason": ""}
    return [
        known.get((name, value)) or Offer(technique=name, value=value, **none) for name, value in document.plan.items()
    ]


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
        nodes = document.workload.nodes
        each = "--machine-rank counts them from 0, --main-process-ip is the address of the first"
        several = [f"Launch it on each of the {nodes} machines: {each}."] if nodes > 1 else []
        return ["nothing: `autofit run` puts the plan into it", *several]
    weights = [] if loads(document.script) or not in_float32(document) else [IN_FLOAT32]
    if not document.script and not loops:
        return weights
    said = any("autofit.load(" in sentence for sentence in document.script)
    opening = [] if said else [f"read the plan, once: setup = autofit.load({str(folder)!r})"]
    return [*opening, *weights, *document.script]


IN_FLOAT32 = (
    "load the model with float32 weights: from_pretrained(..., dtype='float32'); by itself it takes the checkpoint's "
    "dtype from transformers 5 on"
)


def in_float32(document: Document) -> bool:
    """Whether the plan's weights are float32, whatever it computes in."""
    return recipe_of(document.plan, document.facts).weights_dtype == "float32"


def loads(sentences: Iterable[str]) -> bool:
    """Whether one of them has the model made by :func:`autofit.load`."""
    return any("setup.model" in sentence for sentence in sentences)


def launch_commands(document: Document, folder: str | Path) -> list[list[str]]:
    """The commands that train by the emitted files and that check the promise, word by word and unquoted."""
    shown = as_word(Path(folder))
    script, several = document.workload.script, document.workload.nodes > 1
    there = ["--on", "auto"] if several else []
    if script is not None:
        what, *behind = script.typed
        place = ["--machine-rank", "0", "--main-process-ip", "ADDRESS"] if several else []
        run = ["autofit", "run", shown, what, *place, *(["--", *behind] if behind else [])]
        return [run, ["autofit", "verify", shown, *there]]
    launch = ["accelerate", "launch", "--config_file", f"{shown}/accelerate.yaml"]
    if several:
        launch += ["--machine_rank", "0", "--main_process_ip", "ADDRESS"]
    launch.append("your_script.py")
    if document.promise.launch_path == "trainer":
        launch.append(f"{shown}/training_args.json")
    return [launch, ["autofit", "verify", shown, *there]]


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
        said += " of both its texts" if document.model.sample_tokens > 1 else ""
        shares = _padding(document)
        said += f"; {percent(median(shares))} of a micro-batch is padding, not counted" if any(shares) else ""
    doubt = uncertain(document)
    return f"{said} ({doubt})" if doubt else said


def uncertain(document: Document) -> str:
    """That runs of the winner differ too much for a spread, in words; empty where they don't."""
    if document.estimated is not None:
        return ""
    return scattered(document.promise, _runs(document), "this plan")


def scattered(seen: Promise | Measured, runs: Sequence[Measured], plan: str) -> str:
    """That a plan's runs differ too much for a spread, in words; empty where they don't.

    Args:
        seen: All of them together.
        runs: Each of them.
        plan: What it is called.
    """
    relative = seen.step_seconds_spread / seen.step_seconds
    if relative <= _UNCERTAIN:
        return ""
    speeds = [one.samples_per_second for one in runs]
    if len(speeds) > 1:
        return f"uncertain: runs of {plan} gave {number(min(speeds))} to {number(max(speeds))} samples/s"
    return f"uncertain: runs of {plan} took up to {1 + relative:.1f} times as long"


def changes(document: Document) -> list[str]:
    """What the winner changes in the training, a sentence each; one that says so where it changes nothing."""
    script, rows = document.workload.script, document.plan["micro_batch"]
    unseen = script is not None and document.guard is None and rows != script.micro_batch
    if document.changes:
        doubt = f"Whether the script's loss is the same in micro-batches of {rows} rows was not looked at."
        return [*([doubt] if unseen else []), *document.changes]
    if unseen:
        return [f"nothing, if the script's loss is the same in micro-batches of {rows} rows: that was not looked at"]
    return ["nothing: the training is that of a baseline plan"]


def training_words(document: Document) -> list[str]:
    """``1B tokens take 5.200 hours at this speed``, and what they cost; empty where nothing is known of it."""
    asked = document.training
    if asked is None:
        return []
    if asked.rows is not None:
        besides = document.workload.besides
        own = f"the script's own training, {plural(round(asked.rows), 'row')}, besides {besides}"
        said, costs = f"{own}, takes {duration(asked.hours * 3600)} at this speed", "costs"
    else:
        assert asked.tokens is not None
        said, costs = f"{count(asked.tokens)} tokens take {number(asked.hours)} hours at this speed", "cost"
    if asked.cost is None or asked.price is None:
        return [said]
    return [f"{said}, and {costs} {number(asked.cost)} at {number(asked.price)} an hour"]


def _padding(document: Document) -> list[float]:
    """The share of padding in a micro-batch of the winner, of each of its trials."""
    return [one.padding for one in _runs(document) if one.padding is not None]


def _runs(document: Document) -> list[Measured]:
    """All that was measured of the winner."""
    found = (one.outcome for one in document.trials if one.plan == document.plan)
    return [one for one in found if isinstance(one, Measured)]


def task_words(document: Document) -> str:
    """What the model is trained for: ``seq2seq-lm (a text out of a text)``."""
    model = document.model
    return "the script's" if model.task == "script" else f"{model.task} ({model.trained_on})"


def promised_step(document: Document) -> str:
    """The promised time of an optimizer step: ``776.7 ± 5.8 ms``, or ``~776.7 ms`` where it is estimated."""
    said = step(document.promise)
    if document.estimated is None:
        return said
    figure, *_, unit = said.split(" ")
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
        on = "the link between them" if document.workload.processes > 1 else "the host, where the optimizer steps"
        said = f"How far the speed is off is not known: it depends on {on}"
    return (
        f"Estimated, not measured: no training step was run. {said}; autofit verify tells whether it holds, on a "
        f"machine with {document.hardware.name}."
    )


def predicted_speed(trial: Trial) -> str:
    """What was predicted before the trial, with its range: ``12.1 (10.6 to 13.8)``; nothing where nothing was.

    Without it where that is not known: ``~12.1``.
    """
    told = trial.predicted_speed
    if told is None:
        return ""
    said = number(told.samples_per_second)
    return f"{said} ({number(told.low)} to {number(told.high)})" if told.low else f"~{said}"


def step(of: Promise | Measured) -> str:
    """The time of one optimizer step, with its spread where that says something: ``776.7 ± 5.8 ms``."""
    factor, unit = (1000, "ms") if of.step_seconds < 1 else (1, "s")
    if of.step_seconds_spread > _UNCERTAIN * of.step_seconds:
        return f"{number(of.step_seconds * factor)} {unit}"
    return f"{with_spread(of.step_seconds * factor, of.step_seconds_spread * factor)} {unit}"
