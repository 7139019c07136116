"""A profile for a person: the table by kind of work, and what binds below it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autofit.commands.profile import Profile
from autofit.output.plan_words import plan_words
from autofit.system import units

_FAR_SLOWER = 10.0
"""Times an answer's step: a profiler alone makes a step a few times as long, and more where steps are tiny."""


def table(found: Profile) -> RenderableType:
    """The table, the sentence, and where the files are."""
    where = found.breakdown
    rows = Table(box=None, pad_edge=False)
    rows.add_column("kind of work", no_wrap=True, min_width=38)
    for name in ("ms a step", "share", "calls"):
        rows.add_column(name, justify="right", no_wrap=True, min_width=9 if name == "ms a step" else 6)
    rows.add_column("most of it", overflow="ellipsis", no_wrap=True)
    for row in where.rows:
        seen = where.binds is not None or row.seconds > 0
        rows.add_row(
            Text(row.words),
            f"{row.seconds * 1e3:,.2f}" if seen else "not seen",
            f"{row.share:.1%}" if seen else "",
            f"{row.calls:,.0f}" if row.calls else "",
            Text(", ".join(name.removeprefix("aten::")[:26] for name in row.largest[:2])),
        )
    rows.add_row("whole step", f"{where.step_seconds * 1e3:,.2f}", "100.0%", "", "")
    slowed = where.step_seconds / found.promised_seconds
    busy = "; was the machine busy? Then profile again" if slowed > _FAR_SLOWER else ""
    lines = [
        f"{where.sentence}.",
        f"a step under the profiler takes {slowed:.2f} times the answer's {found.promised_seconds * 1e3:,.2f} ms{busy}",
        f"peak memory {units.size(found.peak_bytes)}",
        *(f"note: {words}" for words in found.notes),
        f"trace:  {found.trace} (open it at https://ui.perfetto.dev)",
        f"memory: {found.memory}",
    ]
    return Group(Text(f"where a step goes: {plan_words(found.plan)}\n"), rows, Text(), *(Text(line) for line in lines))
