"""Several answers side by side: what was asked, what won, and in what they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autofit.output import wording
from autofit.output.document import Document
from autofit.output.plan_words import chosen_words
from autofit.output.text import clean, count, number, percent, times
from autofit.system.units import size


def comparison(documents: Mapping[str, Document]) -> Group:
    """A column for each answer; a row is shown where the answers differ, the promise always.

    Args:
        documents: Each answer by the folder that it is in.
    """
    answers = list(documents.values())
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    for _ in answers:
        table.add_column(overflow="fold")
    table.add_row("", *(Text(clean(folder), style="bold", overflow="fold") for folder in documents))
    same = []
    for name, cells in _question(answers):
        if len(set(cells)) > 1:
            table.add_row(name, *map(_text, cells))
        else:
            same.append(cells[0] if name == "rows" else f"{name} {cells[0]}")
    table.add_row()
    for name, cells in (*_promise(answers), *_plan(answers)):
        table.add_row(name, *map(_text, cells))
    parts: list[RenderableType] = [table, Text()]
    if same:
        parts.append(_text(f"the same for all: {', '.join(same)}"))
    if any(len(set(cells)) > 1 for name, cells in _question(answers) if name in _MATTERS):
        parts.append(_text("the questions differ: the speeds are no comparison of plans alone"))
    return Group(*parts)


_MATTERS = {"model", "device", "processes", "task", "rows", "global batch", "launch path"}


def _question(answers: Sequence[Document]) -> list[tuple[str, list[str]]]:
    """What was asked, a row a matter, a cell an answer."""
    versions = sorted({name for one in answers for name in one.versions})
    return [
        ("model", [f"{one.model.name} ({count(one.model.parameters)} parameters)" for one in answers]),
        ("device", [one.hardware.name for one in answers]),
        ("processes", [str(one.workload.processes) for one in answers]),
        ("ceiling", [size(one.promise.limit_bytes) for one in answers]),
        ("task", [wording.task_words(one) for one in answers]),
        ("rows", [one.model.rows_of(one.workload.seq_len) for one in answers]),
        ("global batch", [str(one.workload.global_batch) for one in answers]),
        ("launch path", [one.workload.launch_path for one in answers]),
        *((name, [one.versions.get(name, "none") for one in answers]) for name in versions),
    ]


def _promise(answers: Sequence[Document]) -> list[tuple[str, list[str]]]:
    """The promised speed and memory; speed also as a multiple of the first answer's."""
    first = answers[0].promise.samples_per_second
    marked = (
        [("the figures are", [wording.standing(one) for one in answers])]
        if any(one.estimated for one in answers)
        else []
    )
    return [
        *marked,
        ("samples/s", [wording.speed(one) for one in answers]),
        ("of the first", [times(one.promise.samples_per_second / first) for one in answers]),
        *_tokens(answers),
        ("step", [wording.promised_step(one) for one in answers]),
        (
            "peak memory",
            [
                f"{size(one.promise.peak_bytes)} ({percent(one.promise.peak_bytes / one.promise.limit_bytes)})"
                for one in answers
            ],
        ),
        ("batch", [wording.product(one) for one in answers]),
    ]


def _tokens(answers: Sequence[Document]) -> list[tuple[str, list[str]]]:
    """The promised tokens/s, where samples are texts in one of the answers."""
    cells = [number(one.promise.tokens_per_second) if one.model.sample_tokens else "none" for one in answers]
    return [("tokens/s", cells)] if any(one.model.sample_tokens for one in answers) else []


def _plan(answers: Sequence[Document]) -> list[tuple[str, list[str]]]:
    """The plans: in short, and value by value where they differ."""
    names = dict.fromkeys(name for one in answers for name in one.plan)
    rows = {name: [str(one.plan[name]) if name in one.plan else "none" for one in answers] for name in names}
    differing = [(name, cells) for name, cells in rows.items() if len(set(cells)) > 1]
    return [("plan", [chosen_words(one.plan) or "the baseline plan" for one in answers]), *differing]


def _text(words: str) -> Text:
    return Text(clean(words), overflow="fold")
