"""The answer of an estimate, and how a person sees it: the table, and the bar of where the memory goes."""

from __future__ import annotations

import io
from dataclasses import dataclass

from pydantic import TypeAdapter
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autofit.commands.estimates.plans import Estimated, cause, why_recommended
from autofit.commands.estimates.ways import Way
from autofit.commands.scripts.request import SCRIPT_TASK
from autofit.contract.plan import Plan
from autofit.costmodel.tracing.timeline import Category
from autofit.output.plan_words import chosen_words
from autofit.output.text import clean, count
from autofit.system import units

_LETTERS: dict[Category, tuple[str, str]] = {
    "weights": ("w", "blue"),
    "copies": ("c", "cyan"),
    "gradients": ("g", "green"),
    "state": ("s", "yellow"),
    "activations": ("a", "magenta"),
    "logits": ("l", "red"),
    "batch": ("b", "white"),
    "temporaries": ("t", "bright_black"),
    "communication": ("n", "bright_blue"),
}
_WIDTH = 20


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Estimate:
    """The answer of ``autofit estimate``.

    Attributes:
        card: The catalogue's name of the card, or of this machine's device.
        memory_bytes: What a process can have of it.
        plans: For each family of plans its largest micro-batch that fits, or its smallest where none does; the ones
            that fit first, the fastest of them first.
        recommended: The simplest of those that fit and are as fast as the fastest, by 3 %; ``None`` where none fits. By
            roofline, with nominal rates on a card that is not in the catalogue.
        task: What the model is trained for.
        rows: The rows, in words.
        counted: Plans that were judged.
        kinds: Families of plans that can be estimated: those that differ in more than the micro-batch.
        untraced: Why some values have no estimate.
        notes: What was assumed.
        remarks: Those of the notes that tell what is not as one would expect of the model.
        processes: Cards that train together, in ``nodes`` machines; ``memory_bytes`` and plans' needs are of each.
        ways: Each way of training (full, LoRA, QLoRA), where they were asked for.
        telling: The knobs that tell the ways apart, and those that the question fixes.
        asked: Other options of the question that a tune needs, too, so that it has the same plans.
        folder: Where the recommended plan's files were written; ``None`` where none were asked for, or nothing fits.
    """

    model: str
    parameters: int
    card: str
    memory_bytes: int
    seq_len: int
    task: str
    rows: str
    global_batch: int
    margin: float
    plans: tuple[Estimated, ...]
    recommended: Plan | None
    counted: int
    kinds: int
    untraced: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float
    remarks: tuple[str, ...] = ()
    processes: int = 1
    nodes: int = 1
    ways: tuple[Way, ...] = ()
    telling: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    folder: str | None = None

    def __repr__(self) -> str:
        best = f"recommended {self.recommended.words()}" if self.recommended else "nothing fits"
        return f"Estimate({self.model} on {self.card}, {units.size(self.memory_bytes)}: {best})"

    def _repr_html_(self) -> str:
        """The estimate as a notebook shows it: what the command line prints."""
        # in a notebook rich would show it a second time
        console = Console(record=True, file=io.StringIO(), width=110, force_jupyter=False)
        console.print(table(self))
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


ESTIMATE: TypeAdapter[Estimate] = TypeAdapter(Estimate)


def table(found: Estimate) -> RenderableType:
    """The estimate as a table with what makes the peak below it."""
    shown = found.plans
    columns = Table(box=None, pad_edge=False)
    columns.add_column("plan", overflow="fold", min_width=30)
    columns.add_column("rows x acc.", justify="right", no_wrap=True)
    columns.add_column("needs", justify="right", no_wrap=True)
    host = any(one.need.elsewhere_bytes for one in shown)
    if host:
        columns.add_column("on the host", justify="right", no_wrap=True)
    columns.add_column("verdict", no_wrap=True)
    fast = any(one.samples_per_second for one in shown)
    if fast:
        columns.add_column("samples/s", justify="right", no_wrap=True)
    columns.add_column("where it goes", no_wrap=True)  # last, since it is what may be cut off
    for one in shown:
        cells: list[RenderableType] = [
            Text(chosen_words(one.plan)),
            f"{one.plan['micro_batch']} x {one.plan['accumulation']}",
            units.size(one.device_bytes),
            Text(one.verdict, style={"fits": "green", "tight": "yellow"}.get(one.verdict, "red")),
        ]
        if host:
            cells.insert(3, units.size(one.need.elsewhere_bytes) if one.need.elsewhere_bytes else "")
        if fast:
            cells.append(f"~{amount(one.samples_per_second)}" if one.samples_per_second else "")
        cells.append(bar(one, found.memory_bytes))
        columns.add_row(*cells)
    legend = Text("  ").join(Text(f"{letter} {name}", style=style) for name, (letter, style) in _LETTERS.items())
    parts: list[RenderableType] = [Text(heading(found))]
    if shown:
        parts += [Text(), columns, Text(), legend]
    hidden = found.kinds - len(shown)
    if hidden:
        parts.append(Text(f"{hidden} more kinds of plan: --all shows them"))
    if shown:
        parts += [
            Text(),
            *_recommended(found),
            Text(f"peak of the first: {cause(shown[0], of_script=found.task == SCRIPT_TASK)}"),
        ]
    if not any(one.verdict == "fits" for one in found.plans) and found.plans:
        smallest = min(found.plans, key=lambda one: one.device_bytes)
        parts.append(Text(f"nothing fits; the smallest needs {units.size(smallest.device_bytes)}"))
    parts += [Text(f"no estimate: {why}") for why in found.untraced]
    parts += [Text(note) for note in found.notes]
    parts += written(found)
    parts.append(Text(f"{found.counted} plans in {units.duration(found.seconds)}"))
    return Group(*parts)


def written(found: Estimate) -> list[Text]:
    """Where the files are, and of which plan."""
    if found.folder is None or found.recommended is None:
        return []
    plan = found.recommended
    words = f"{plan['micro_batch']} x {plan['accumulation']} {chosen_words(plan)}"
    return [Text(clean(f"{found.folder} holds the files of {words}: estimated, not measured"))]


def heading(found: Estimate) -> str:
    """The question, in two lines."""
    cards = f"{found.processes} cards, each {found.card}" if found.processes > 1 else found.card
    return (
        f"{found.model}: {count(found.parameters)} parameters, {found.task} on {found.rows}, global batch "
        f"{found.global_batch}\n{cards}: {units.size(found.memory_bytes)}; a plan fits if the card has "
        f"{found.margin:.0%} more than the plan needs"
    )


def amount(value: float) -> str:
    """Three digits that count, as an estimate has no more.

    >>> amount(6134.2), amount(1_234_567.0), amount(0.35412)
    ('6,130', '1,230,000', '0.354')
    """
    return f"{float(f'{value:.3g}'):,.15g}"


def _recommended(found: Estimate) -> list[Text]:
    """The plan that is recommended, and what it changes in the training."""
    if found.recommended is None:
        return []
    plan = found.recommended
    words = f"recommended: {plan['micro_batch']} x {plan['accumulation']} rows, {chosen_words(plan)}"
    why = why_recommended(plan == found.plans[0].plan)
    changes = next(one.changes for one in found.plans if one.plan == plan)
    return [Text(f"{words} ({why})"), *(Text(f"  {said}") for said in changes)]


def bar(one: Estimated, memory_bytes: int) -> Text:
    """The memory of the card as a bar, filled by what each category takes; what is too much stands behind it."""
    text = Text("▕")
    if 0 < sum(one.need.by_category.values()) * 2 * _WIDTH < memory_bytes:  # not even half a letter
        largest = max(_LETTERS, key=lambda name: one.need.by_category.get(name, 0))
        letter, style = _LETTERS[largest]
        return text.append(letter, style=style).append(" " * (_WIDTH - 1) + "▏")
    filled = 0.0
    drawn = 0
    for category, (letter, style) in _LETTERS.items():
        filled += one.need.by_category.get(category, 0) / max(memory_bytes, 1) * _WIDTH
        upto = min(round(filled), 2 * _WIDTH)
        for place in range(drawn, upto):
            if place == _WIDTH:
                text.append("▏")
            text.append(letter, style=style)
        drawn = max(drawn, upto)
    if drawn < _WIDTH:
        text.append(" " * (_WIDTH - drawn))
    if drawn <= _WIDTH:
        text.append("▏")
    return text
