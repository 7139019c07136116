"""A diagnosis for a person: one or two lines a technique, or every value with its reason."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autofit.commands.doctor import Diagnosis
from autofit.output.document import Offer
from autofit.output.plan_words import SPLIT
from autofit.output.text import clean
from autofit.system import units

SCREEN_LINES = 30
_HERE = {"offered": "yes", "on_request": "on request", "withheld": "no"}


def screen(found: Diagnosis) -> Group:
    """The machine and its techniques on one screen; the batch split, which is arithmetic, is left out."""
    techniques = {name: offers for name, offers in _by_technique(found.choices).items() if name not in SPLIT}
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(no_wrap=True, style="bold", width=max(map(len, techniques), default=0))
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for name, offers in techniques.items():
        for place, line in enumerate(_technique_lines(offers)):
            table.add_row("" if place else name, _text(line))
    said = "* of class method: --allow exact,numeric,method. On request: --fix KNOB=VALUE. Every value: --all"
    return Group(*_machine(found), Text(), table, Text(said))


def everything(found: Diagnosis) -> Group:
    """The machine, and every value of every technique with its class and its reason."""
    table = Table(box=None, pad_edge=False)
    for heading in ("technique", "value", "class", "here", "why"):
        table.add_column(heading, overflow="fold")
    for one in found.choices:
        cells = (one.technique, one.value, one.kind, _HERE[one.status], one.reason)
        table.add_row(*(_text(str(cell)) for cell in cells))
    return Group(*_machine(found), table)


def _machine(found: Diagnosis) -> list[RenderableType]:
    hardware = found.hardware
    lines = [
        f"autofit {found.autofit} on {hardware.name} ({hardware.device})",
        f"memory: {units.size(hardware.free_bytes)} free of {units.size(hardware.total_bytes)}",
        f"computes: {', '.join(hardware.precisions)}; {hardware.threads} CPU thread(s) a process",
        *found.warnings,
    ]
    if found.cuda:
        lines.append(f"no CUDA device: {found.cuda}")
    lines.append("packages: " + ", ".join(f"{name} {version}" for name, version in found.packages.items()))
    lines.append("not installed: " + (", ".join(found.missing) or "none"))
    return [_text(line) for line in lines]


def _technique_lines(offers: Sequence[Offer]) -> list[str]:
    """What a tune searches, what has to be asked for, and what can't be had here, each with its reason."""
    values: defaultdict[str, list[str]] = defaultdict(list)
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for one in offers:
        values[one.status].append(f"{one.value}*" if one.kind == "method" else str(one.value))
        if one.status == "withheld":
            reasons[one.reason].append(str(one.value))
    asked = f"; on request: {', '.join(values['on_request'])}" if values["on_request"] else ""
    here = f"{', '.join(values['offered']) or 'nothing'}{asked}"
    if not reasons:
        return [here]
    withheld = "not here: " + "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())
    alone = len(values["offered"]) == 1 and not asked
    return [f"{here}; {withheld}"] if alone else [here, withheld]


def _by_technique(offers: Iterable[Offer]) -> dict[str, list[Offer]]:
    grouped: defaultdict[str, list[Offer]] = defaultdict(list)
    for one in offers:
        grouped[one.technique].append(one)
    return grouped


def _text(words: str) -> Text:
    return Text(" ".join(clean(words).split()))
