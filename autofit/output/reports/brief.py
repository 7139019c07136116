"""A document on one screen: the winner, the promise, what it changes, and the lines that launch it."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autofit.output import findings, standings, wording
from autofit.output.document import Document
from autofit.output.emit import REPORT
from autofit.output.plan_words import SPLIT_WORDS, chosen_words
from autofit.output.text import as_word, clean, command_line, one_line, percent, plural
from autofit.system.units import duration, size

SCREEN_LINES = 24
_MOST_SENTENCES = 4


def brief(document: Document, *, folder: str | Path) -> Group:
    """What a person needs at the end of a tune, for one screen of 80 columns; the report has the rest.

    Args:
        document: What the tune found.
        folder: Where its files are, as the user calls it; it goes into the commands.
    """
    work = document.workload
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    waits = findings.waiting(document)
    if waits is not None:
        table.add_row("Loader", _text(waits))
    table.add_row("Winner", _text(chosen_words(document.plan) or "the baseline plan"))
    table.add_row("", _text(f"{SPLIT_WORDS}: {wording.product(document)}"))
    for title, sentences in (("Promise", _promise(document)), ("Changes", _changes(document))):
        for place, sentence in enumerate(sentences):
            table.add_row("" if place else title, _text(sentence))
    for note in document.notes:
        if note.startswith(("the script's evaluation", "the script evaluates")):  # no promise of memory holds without
            table.add_row("Evaluation", _text(note))
    unchecked = _unchecked(document)
    if unchecked is not None:
        table.add_row("Unchecked", _text(unchecked))
    where = f"{clean(document.hardware.name)}, {document.model.rows_of(work.seq_len)}, {wording.path_words(document)}"
    parts: list[RenderableType] = [_text(f"{document.model.name} on {where}"), Text(), table, Text()]
    script = wording.script_lines(document, folder)
    if script:
        parts += [Text("Your script", style="bold"), *(_text(f"  - {one_line(line, 150)}") for line in script), Text()]
    launch, verify = (wording.shell_lines(words) for words in wording.launch_commands(document, folder))
    parts += [Text("Launch", style="bold"), *(command_line(f"  {line}") for line in (*launch, *verify))]
    parts.append(_text(f"  All of it: {Path(folder) / REPORT}, or autofit report {shlex.quote(as_word(folder))}"))
    took = f"{plural(len(document.trials), 'trial')} in {duration(document.seconds)}"
    notes = f"; {plural(len(document.notes), 'note')} in the report" if document.notes else ""
    return Group(*parts, _text(f"  {took}{notes}", style="dim"))


def _promise(document: Document) -> list[str]:
    """The promised speed and memory, and the speed beside a search over the batch size alone."""
    promise = document.promise
    _, beside = standings.compared(document)
    share = percent(promise.peak_bytes / promise.limit_bytes)
    rows = document.workload.evaluated_rows
    evaluated = f", evaluating {rows} rows at once" if rows else ""
    return [
        f"{wording.pace(document)}{f'; {beside}' if beside else ''}",
        *wording.training_words(document),
        f"peak memory {size(promise.peak_bytes)}, {share} of the ceiling of {size(promise.limit_bytes)}{evaluated}",
    ]


def _changes(document: Document) -> list[str]:
    """What the winner changes in the training; of many sentences the first."""
    said = wording.changes(document)
    if len(said) <= _MOST_SENTENCES:
        return said
    return [*said[: _MOST_SENTENCES - 1], f"and {len(said) - _MOST_SENTENCES + 1} more: see the report"]


def _unchecked(document: Document) -> str | None:
    """Why nothing is known of the winner's training but its speed; ``None`` where it was held against a baseline's."""
    guard = document.guard
    if document.estimated is not None:
        return None
    if guard is not None and (guard.verdict in {"same", "method"} or guard.reference == document.plan):
        return None
    why = "" if guard is None else f": {guard.words}"
    return f"its training was not compared with the float32 baseline's{one_line(why, 150)}"


def _text(words: str, **how: str) -> Text:
    return Text(clean(words), overflow="fold", **how)  # type: ignore[arg-type]
