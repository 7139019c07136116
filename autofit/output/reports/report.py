"""A document for people: a summary for the terminal, and one page of HTML that needs nothing beside it.

Names, reasons and logs come from outside. The terminal gets them as text without markup or control characters,
the page gets them escaped, under a policy that forbids scripts and anything from elsewhere.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autofit.contract.outcome import Measured, Trial
from autofit.output import findings, standings, wording
from autofit.output.document import Document, Offer
from autofit.output.exports.export import comments, export
from autofit.output.plan_words import SPLIT, SPLIT_WORDS, chosen_words, outcome_words, plan_words
from autofit.output.reports import charts
from autofit.output.text import clean, command_line, number, one_line, parameters, percent, plural
from autofit.system.units import duration, size

if TYPE_CHECKING:
    from jinja2 import Template

PAGE = "report.html"
_TEMPLATE = "report.html.j2"
_BAR_CELLS = 30
_SHOWN_PLANS, _SHOWN_FAILURES = 10, 5


def summary(document: Document, *, folder: str | Path) -> Group:
    """What a person wants to know at the end of a tune, for 80 columns and for no colours.

    Args:
        document: What the tune found.
        folder: Where its files are, as the user calls it; it goes into the commands.
    """
    launch, verify = wording.launch_commands(document, folder)
    measured = document.estimated is None
    script = wording.script_lines(document, folder) or ["nothing beyond reading training_args.json"]
    own = [said for said in (standings.against_script(document)[1],) if said is not None]
    sections: list[tuple[str, RenderableType]] = [
        ("The winner", Group(_split(document), _text(""), _plan_table(document))),
        ("The promise" if measured else "The estimate", _promise_table(document)),
        ("What it changes in the training", _bullets(wording.changes(document))),
        ("What your script must do", _bullets(script)),
        ("Why this plan", Group(_text(document.reason), *_bulleted(findings.contributed(document)))),
        *([("Against baseline plans", _bullets([*own, *standings.against_baseline(document)[1]]))] if measured else []),
        *([("The trials", _trials(document))] if measured else []),
        ("What it cost", _text(wording.cost(document))),
    ]
    smaller = findings.ceilings(document)
    if smaller:
        sections.insert(-2, ("With less memory", _bullets(smaller)))
    guarded, payback = findings.guarded(document), findings.payback(document)
    waits = findings.waiting(document)
    for title, finding in [*findings.findings(document), *findings.evaluation(document)]:
        sections.insert(0 if finding == waits else -2, (title, _text(finding)))
    if payback:
        sections.insert(-2, ("When compiling pays back", _text(payback)))
    if guarded:
        sections.insert(-2, ("Does it train like the float32 baseline?", _text(guarded)))
    if document.notes:
        sections.append(("Notes", _bullets(document.notes)))
    return Group(
        _header(document),
        *(_section(title, body) for title, body in sections),
        *_commands("Launch it", launch),
        *_commands("Check the promise" if measured else "Check the estimate", verify),
        Padding(_text(f"All of it, with charts: {Path(folder) / PAGE}", overflow="fold"), (1, 0, 0, 0)),
    )


def _commands(title: str, words: list[str]) -> list[Text]:
    """A section with a command, whose lines are as long as they need to be."""
    lines = (command_line(f"  {line}") for line in wording.shell_lines(words))
    return [Text(), Text(title, style="bold"), *lines]


@functools.cache
def _page() -> Template:
    """The page's template, compiled once."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_finalize
    )
    environment.filters.update(size=size, duration=duration, percent=percent, number=number, plan_words=plan_words)
    return environment.from_string(files("autofit.output.reports").joinpath(_TEMPLATE).read_text(encoding="utf-8"))


def html(document: Document, *, folder: str | Path) -> str:
    """The whole report as one page: no script, nothing loaded from elsewhere, light or dark as the reader has it.

    Args:
        document: What the tune found.
        folder: Where its files are, as the user calls it; it goes into the commands.
    """
    ranked = standings.standings(document)
    ratio, comparison = standings.against_baseline(document)
    own, said = standings.against_script(document)
    return _page().render(
        document=document,
        wording=wording,
        outcome_words=outcome_words,
        parameters=parameters,
        plural=plural,
        split_words=SPLIT_WORDS,
        split=list(zip((*SPLIT, "processes"), wording.product(document).split(" = ")[0].split(" x "), strict=True)),
        ratio=ratio,
        own=own,
        other=standings.compared(document)[0],
        comparison=[*([said] if said else []), *comparison],
        scatter=charts.scatter(document) if document.trials else None,
        losses=charts.losses(document),
        contributed=findings.contributed(document),
        ceilings=findings.ceilings(document),
        guarded=findings.guarded(document),
        payback=findings.payback(document),
        told=[*findings.findings(document), *findings.evaluation(document)],
        chart=charts,
        baseline_plan=next((one.plan for one in ranked if one.is_baseline), None),
        best_first=_best_first(document),
        fastest=max(one.samples_per_second for one in _runs(document)) if _runs(document) else 1.0,
        offers=_by_technique(document.offers),
        script=wording.script_lines(document, folder),
        python=_python(document, folder),
        commands=["\n".join(wording.shell_lines(words)) for words in wording.launch_commands(document, folder)],
    )


def notebook(document: Document, *, folder: str | Path) -> str:
    """The answer as a fragment of HTML for a notebook; every word is escaped."""
    promise = document.promise
    share = percent(promise.peak_bytes / promise.limit_bytes)
    rows = [
        *([("figures", wording.ESTIMATED)] if document.estimated else []),
        ("plan", chosen_words(document.plan) or "the baseline plan"),
        ("batch", f"{SPLIT_WORDS}: {wording.product(document)}"),
        ("speed", wording.pace(document)),
        *(("training", words) for words in wording.training_words(document)),
        ("peak memory", f"{size(promise.peak_bytes)}, {share} of the ceiling of {size(promise.limit_bytes)}"),
        *(("changes", sentence) for sentence in document.changes),
        ("launch", shlex.join(wording.launch_commands(document, folder)[0])),
    ]
    cells = "".join(f"<tr><th>{escape(clean(name))}</th><td>{escape(clean(said))}</td></tr>" for name, said in rows)
    title = f"{document.model.name} on {document.hardware.name}"
    return f"<table><caption>{escape(clean(title))}</caption>{cells}</table>"


def _python(document: Document, folder: str | Path) -> str:
    """The plan as Python, below what its arguments can't carry."""
    found = export(document, "python", folder=folder)
    return "\n".join(part for part in (comments(found, "python"), found.text.rstrip()) if part)


def _header(document: Document) -> Text:
    model, hardware, work = document.model, document.hardware, document.workload
    text = _text(model.name, style="bold")
    text.append(f"\n{parameters(model.parameters)}, {model.layers} layers, {clean(model.architecture)}")
    text.append(f"\n{clean(hardware.name)}, ceiling {size(work.limit_bytes)}")
    if document.estimated is not None:
        text.append(f"\n{wording.estimate_words(document)}")
    text.append(f"\ntask {wording.task_words(document)}")
    text.append(f"\n{model.rows_of(work.seq_len)}, global batch {work.global_batch}, {wording.path_words(document)}")
    return text


def _split(document: Document) -> Text:
    """The promise of the global batch."""
    return _text(f"{SPLIT_WORDS}: ").append(wording.product(document), style="bold")


def _plan_table(document: Document) -> Table:
    table = _table("technique", "value", "class", "what it does")
    table.columns[0].no_wrap = table.columns[2].no_wrap = True  # a narrow terminal breaks no name apart
    for offer in wording.chosen(document):
        table.add_row(*(_text(str(word)) for word in (offer.technique, offer.value, offer.kind, offer.reason)))
    return table


def _promise_table(document: Document) -> Table:
    promise = document.promise
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("speed", wording.pace(document))
    for words in wording.training_words(document):
        table.add_row("training", words)
    table.add_row("step", f"{wording.promised_step(document)} for a whole optimizer step")
    share = promise.peak_bytes / promise.limit_bytes
    filled = min(_BAR_CELLS, max(1, round(_BAR_CELLS * share)))
    bar = Text("█" * filled, style="green").append("░" * (_BAR_CELLS - filled), style="dim")
    table.add_row("peak memory", bar.append(f" {percent(share)} of the ceiling", style="none"))
    table.add_row("", f"{size(promise.peak_bytes)} of {size(promise.limit_bytes)}; {wording.peak_words(document)}")
    for name, count, meaning in wording.memory_parts(document):
        table.add_row("", f"{name} {size(count)}: {meaning}")
    if promise.mfu is not None:
        table.add_row("utilisation", f"{percent(promise.mfu)} of the device's peak FLOPs (MFU)")
    return table


def _trials(document: Document) -> Group:
    """The plans that ran, best first, then what failed and why; a handful of each."""
    ranked, failed = standings.standings(document), standings.failures(document)
    table = _table("", "plan", "samples/s", "peak")
    table.columns[2].justify = "right"
    for one in ranked[:_SHOWN_PLANS]:
        table.add_row(
            ">" if one.is_winner else "",
            _text(plan_words(one.plan)),
            number(one.samples_per_second),
            f"{size(one.peak_bytes)} ({percent(one.peak_bytes / document.promise.limit_bytes)})",
        )
    why = [f"{plan_words(trial.plan)}: {one_line(outcome_words(trial.outcome))}" for trial in failed[:_SHOWN_FAILURES]]
    left = max(0, len(ranked) - _SHOWN_PLANS), max(0, len(failed) - _SHOWN_FAILURES)
    words = [
        f"{plural(count, noun)} more"
        for count, noun in zip(left, ("measured plan", "failed trial"), strict=True)
        if count
    ]
    rest = f"; {' and '.join(words)} in {PAGE}" if words else ""
    failures: list[RenderableType] = [_bullets(why), _text("")] if why else []
    return Group(table, _text(""), *failures, _text(wording.tally(document) + rest))


def _table(*titles: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _section(title: str, body: RenderableType) -> Padding:
    return Padding(Group(Text(title, style="bold"), Padding(body, (0, 0, 0, 2))), (1, 0, 0, 0))


def _bullets(sentences: Iterable[str]) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column()
    table.add_column(overflow="fold")
    for sentence in sentences:
        table.add_row("-", _text(sentence))
    return table


def _bulleted(sentences: list[str]) -> list[RenderableType]:
    """Bullets below a text, if there are any."""
    return [_text(""), _bullets(sentences)] if sentences else []


def _text(words: str, **how: Any) -> Text:
    return Text(clean(words), **{"overflow": "fold", **how})


def _finalize(value: object) -> object:
    """What a template prints: text without control characters; markup of its own passes."""
    return clean(value) if type(value) is str else value


def _runs(document: Document) -> list[Measured]:
    return [trial.outcome for trial in document.trials if isinstance(trial.outcome, Measured)]


def _best_first(document: Document) -> list[Trial]:
    """Every trial: the fastest first, then the failures."""
    measured = [
        (trial.outcome.samples_per_second, trial) for trial in document.trials if isinstance(trial.outcome, Measured)
    ]
    return [trial for _, trial in sorted(measured, key=lambda pair: (-pair[0], pair[1].number))] + standings.failures(
        document
    )


def _by_technique(offers: Iterable[Offer]) -> dict[str, list[Offer]]:
    grouped: dict[str, list[Offer]] = {}
    for offer in offers:
        grouped.setdefault(offer.technique, []).append(offer)
    return grouped
