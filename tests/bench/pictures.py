"""Pictures of the README and its pages: a real tune as a terminal shows it, its report, the contest of the searchers.

    python tests/bench/pictures.py tune .github/pictures/tune.svg [--printed FILE] [-- OPTION ...]
    python tests/bench/pictures.py contest .github/pictures/contest.svg [--json tests/bench/search_bench.DATE.json]
    python tests/bench/pictures.py report .github/pictures --report autofit-out/report.html

``tune`` runs ``autofit tune demo`` with these options in a folder of its own and draws what it printed, or what such a
run has printed to a file (stdout and stderr together). ``contest`` draws figures that ``search_bench.py --json`` wrote;
it measures nothing. ``report`` needs Chromium.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

from rich.console import Console
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.browser import photograph

HERE = Path(__file__).resolve().parent
NAMES = {
    "autofit": "autofit",
    "tpe": "Optuna's TPE, constrained",
    "gp": "Optuna's GP, constrained",
    "random": "random",
    "grid": "every plan",
    "accelerate": "find_executable_batch_size",
    "lightning_power": "Lightning's finder, by powers",
    "lightning_binary": "Lightning's finder, binary",
    "deepspeed": "DeepSpeed's fast mode",
}
WIDTH, LABEL, BAR, ROW = 860, 240, 300, 30


def drawn_terminal(title: str, printed: str) -> str:
    """What a command printed, in a terminal's window, as SVG."""
    console = Console(record=True, width=116, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(printed), soft_wrap=False)
    return console.export_svg(title=title)


def run_tune(options: list[str]) -> str:
    """All that ``autofit tune demo`` prints, without the folder's own name."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "COLUMNS": "116"}
        command = [sys.executable, "-m", "autofit.cli", "tune", "demo", *options]
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True
        )
        return done.stdout.decode().replace(folder, "").rstrip()


def drawn_contest(searchers: dict[str, dict[str, float | None]]) -> str:
    """Of each searcher how often it found the best plan, after how many trials, and what it lost to memory."""
    rows = [(words, searchers[name]) for name, words in NAMES.items() if name in searchers]
    height = 62 + ROW * len(rows)
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            'font-family="system-ui, sans-serif" font-size="14">'
        ),
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff" rx="6"/>',
        '<g fill="#57606a" font-size="12">',
        f'<text x="{LABEL}" y="30">found the best plan that fits (share of runs)</text>',
        f'<text x="{LABEL + BAR + 150}" y="22" text-anchor="end">trials until half</text>',
        f'<text x="{LABEL + BAR + 150}" y="36" text-anchor="end">had found it</text>',
        f'<text x="{WIDTH - 20}" y="22" text-anchor="end">trials that ran</text>',
        f'<text x="{WIDTH - 20}" y="36" text-anchor="end">out of memory</text>',
        "</g>",
    ]
    for place, (words, figures) in enumerate(rows):
        y = 48 + ROW * place
        found, trials, lost = (figures[key] for key in ("found", "median_trials_to_find", "out_of_memory"))
        colour = "#1a7f37" if place == 0 else "#8c959f"
        bar = max(1.0, BAR * float(found or 0.0))
        middle = y + ROW / 2
        lines += [
            f'<text x="{LABEL - 10}" y="{middle + 5}" text-anchor="end" fill="#1f2328">{escape(words)}</text>',
            f'<rect x="{LABEL}" y="{y + 4}" width="{bar:.0f}" height="{ROW - 8}" fill="{colour}"/>',
            f'<text x="{LABEL + bar + 6:.0f}" y="{middle + 5}" fill="#1f2328">{100 * float(found or 0):.0f} %</text>',
            (
                f'<text x="{LABEL + BAR + 150}" y="{middle + 5}" text-anchor="end" fill="#1f2328">'
                f"{'-' if trials is None else f'{trials:.0f}'}</text>"
            ),
            (
                f'<text x="{WIDTH - 20}" y="{middle + 5}" text-anchor="end" fill="#1f2328">'
                f"{100 * float(lost or 0):.0f} %</text>"
            ),
        ]
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "contest", "report"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", type=Path, default=max(HERE.glob("search_bench.2*.json")))
    parser.add_argument("--printed", type=Path, help="what a tune of the demo printed, instead of running one")
    parser.add_argument("--report", type=Path, default=Path("autofit-out/report.html"))
    parser.add_argument("options", nargs="*", help="of autofit tune demo, after --")
    given = parser.parse_args()
    if given.what == "report":
        for name, width, dark in (("desk", 1200, False), ("dark", 1200, True), ("phone", 390, False)):
            photograph(given.report, given.file / f"report-{name}.png", width, dark=dark, height=1500)
        return
    if given.what == "tune":
        words = ["autofit tune demo", *given.options]
        printed = given.printed.read_text("utf-8") if given.printed else run_tune(given.options)
        drawn = drawn_terminal(" ".join(words), f"$ {' '.join(words)}\n{printed.rstrip()}")
    else:
        drawn = drawn_contest(json.loads(given.json.read_text("utf-8"))["searchers"])
    given.file.parent.mkdir(parents=True, exist_ok=True)
    given.file.write_text(drawn, "utf-8")


if __name__ == "__main__":
    main()
