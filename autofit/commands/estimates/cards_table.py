"""Several cards for a person: the table, and what they do in words below it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autofit.commands.estimates.answer import amount
from autofit.commands.estimates.cards import CardsEstimate, OnCard
from autofit.output.plan_words import chosen_words
from autofit.output.text import count, plural
from autofit.system import units


def cards_table(found: CardsEstimate) -> RenderableType:
    """The cards as a table, what they do in words below it."""
    head = (
        f"{found.model}: {count(found.parameters)} parameters, {found.task} on {found.rows}, global batch "
        f"{found.global_batch}; hours for {count(found.tokens)} {found.unit}"
    )
    head += " of both its texts" * (found.sample_tokens > 1)
    table = Table(box=None, pad_edge=False)
    table.add_column("card", no_wrap=True)
    table.add_column("plan", overflow="fold", min_width=24)
    text = found.unit == "tokens"  # else a sample is what is counted
    for name in ("rows x acc.", "needs", "samples/s", *(["tokens/s"] * text), "MFU", "hours"):
        table.add_column(name, justify="right", no_wrap=True)
    priced = any(row.cost is not None for row in found.cards)
    if priced:
        table.add_column("cost", justify="right", no_wrap=True)
    each = f"{found.cards_together}x " if found.cards_together > 1 else ""
    for row in found.cards:
        table.add_row(*_cells(row, each + row.card, priced=priced, text=text))
    parts: list[RenderableType] = [Text(head), Text(), table, Text()]
    if found.fastest is not None and len(found.cards) > 1:
        words = f"fastest: {found.fastest}"
        parts.append(Text(words if found.cheapest is None else f"{words}; cheapest: {found.cheapest}"))
    parts += [Text(note) for note in found.notes]
    parts.append(Text(f"{plural(len(found.cards), 'kind')} of card in {units.duration(found.seconds)}"))
    return Group(*parts)


def _cells(row: OnCard, name: str, *, priced: bool, text: bool) -> list[RenderableType]:
    if row.plan is None or row.device_bytes is None:
        return [name, Text("no plan can be traced")]
    size = f"{row.plan['micro_batch']} x {row.plan['accumulation']}"
    needs = f"{units.size(row.device_bytes)} of {units.size(row.memory_bytes)}"
    if row.hours is None:
        why = "no plan fits; the smallest: " if row.verdict == "too large" else "speed is not known: "
        return [name, Text(why + chosen_words(row.plan), style="red"), size, needs]
    cells: list[RenderableType] = [
        name,
        Text(chosen_words(row.plan)),
        size,
        Text(f"{needs}, tight", style="yellow") if row.verdict == "tight" else needs,
        f"~{_three(row.samples_per_second)}",
        *([f"~{_three(row.tokens_per_second)}"] if text else []),
        _mfu(row),
        f"~{_three(row.hours)}",
    ]
    if priced:
        cells.append("" if row.cost is None else f"~{_three(row.cost)}")
    return cells


def _mfu(row: OnCard) -> str:
    if row.mfu is None:
        return ""
    if not row.low or row.high is None:
        return f"~{row.mfu:.0%}"
    most = max(row.mfu, 1.0)
    return f"{row.mfu:.0%} ({row.mfu * row.low:.0%} to {min(row.mfu * row.high, most):.0%})"


def _three(value: float | None) -> str:
    """Three digits."""
    assert value is not None
    return amount(value)
