"""An estimate on one screen: each way of training in two lines, and the arguments of the first that fits."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autofit.commands.estimates.answer import Estimate, amount, heading, written
from autofit.commands.estimates.plans import AS_FAST, Estimated
from autofit.commands.estimates.ways import AS_ASKED, Way
from autofit.output.exports.flags import flags
from autofit.output.plan_words import chosen_words
from autofit.output.text import clean, command_line, one_line
from autofit.output.wording import shell_lines
from autofit.system import units

_WIDTH = 100
_MOST_NOTES = 2
_LOOP = "loop"
"""In what was asked: by a plain loop (``--launch-path``)."""


def screen(found: Estimate) -> Group:
    """For each way of training the fastest that fits, the smallest and what stops the rest; then what to paste."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    for style in ("bold", "", "", "", ""):
        rows.add_column(style=style, overflow="fold")
    for column in (3, 4):
        rows.columns[column].justify = "right"
        rows.columns[column].no_wrap = True
    for way in found.ways:
        _add(rows, way, found.processes)
    parts: list[RenderableType] = [Text(clean(heading(found))), *(Text(clean(said)) for said in found.remarks)]
    parts += [Text(), rows, Text()]
    best = first_fitting(found)
    if best is not None and best.fastest is not None:
        parts += _to_paste(best, best.fastest, found)
    elif any(way.smallest is not None for way in found.ways):
        parts.append(Text(f"nothing fits in {units.size(found.memory_bytes)}"))
    others = [note for note in found.notes if note not in found.remarks]
    parts += [Text(one_line(note, 2 * _WIDTH), style="dim") for note in others[-_MOST_NOTES:]]
    parts += written(found)
    parts.append(Text(f"every kind of plan: --all; {units.duration(found.seconds)}", style="dim"))
    return Group(*parts)


def first_fitting(found: Estimate) -> Way | None:
    """The first way that fits: they are listed by how much of the model they train."""
    return next((way for way in found.ways if way.fastest is not None), None)


def _add(rows: Table, way: Way, processes: int) -> None:
    """The lines of one way."""
    name = "" if way.name == AS_ASKED else way.name
    if way.fastest is not None:
        rows.add_row(name, "fastest", *_cells(way.fastest, processes))
        name = ""
    if way.smallest is not None and way.fastest is not None and way.smallest.plan != way.fastest.plan:
        rows.add_row(name, "smallest", *_cells(way.smallest, processes))
    if way.fastest is None:
        rows.add_row(name, "no", Text(clean(way.stops)), "", "")
    else:
        rows.add_row("", "", Text(clean(way.stops), style="dim"), "", "")


def _cells(one: Estimated, processes: int) -> tuple[RenderableType, str, str]:
    split = f"{one.plan['micro_batch']} x {one.plan['accumulation']}"
    each = " for each card" if processes > 1 else ""
    waiting = f" (and {units.size(one.need.elsewhere_bytes)} on the host{each})" if one.need.elsewhere_bytes else ""
    return (
        Text(f"{split} {chosen_words(one.plan)}{waiting}"),
        units.size(one.device_bytes),
        f"~{amount(one.samples_per_second)} samples/s" if one.samples_per_second else "",
    )


def _to_paste(way: Way, one: Estimated, found: Estimate) -> list[RenderableType]:
    """The arguments of a plan, what they can't carry, and how to measure it."""
    named = "what was asked" if way.name == AS_ASKED else way.name
    loops = _LOOP in found.asked  # which reads no arguments of a Trainer
    lines = [] if loops else shell_lines(flags(one.training_args, short=True), width=_WIDTH - 2)
    measure = [f"{name}={value}" for name, value in one.plan.items() if name in found.telling]
    held = [word for text in measure for word in ("--fix", text)]
    held += [*found.asked, "--seq-len", str(found.seq_len), "--global-batch", str(found.global_batch)]
    if found.processes > 1:
        held += ["--processes", str(found.processes)]
    if found.nodes > 1:
        held += ["--nodes", str(found.nodes), "--on", "ray://HOST"]
    measured = shell_lines(["autofit", "tune", found.model, *held], width=80)
    return [
        Text(f"To paste, {named} at its fastest (the simplest plan within {100 * AS_FAST:.0f} % of it):", style="bold"),
        *(command_line(f"  {line}") for line in lines),
        *_launched(one, found),
        *(Text(f"  and: {clean(said)}") for said in one.script),
        *_set_up(one, found),
        command_line("Measure it on the card: " + "\n".join(measured)),
        Text(),
    ]


def _launched(one: Estimated, found: Estimate) -> list[Text]:
    """By what file the values are launched that no argument carries; nothing where the arguments are all."""
    if not one.by_yaml:
        return []
    if _is_written(one, found):
        file = f"launch by {found.folder}/accelerate.yaml"
    else:
        file = "--output DIR writes the recommended plan's accelerate.yaml"
    return [Text(clean(f"  no argument carries {', '.join(one.by_yaml)}: {file}"))]


def _set_up(one: Estimated, found: Estimate) -> list[Text]:
    """What ``setup`` is in the lines for the script; nothing where they don't say it, and it is no plain loop."""
    loops = _LOOP in found.asked
    if not loops and not any("setup." in said for said in one.script):
        return []
    written = _is_written(one, found)
    read = f"autofit.load({str(found.folder)!r})" if written else "autofit.load(DIR), of what --output DIR writes"
    return [Text(clean(f"  {'a plain loop reads the plan' if loops else 'where a line says setup'}: setup = {read}"))]


def _is_written(one: Estimated, found: Estimate) -> bool:
    return found.folder is not None and found.recommended == one.plan
