"""Draws predicted against measured seconds, one picture a group of operators, by hand as SVG without a script."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import numpy as np

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999933", "#888888")  # Paul Tol's bright
_SIZE, _LEFT, _RIGHT, _TOP, _BOTTOM = 300, 56, 150, 26, 44
_MOST = 150
_FONT = 'font-family="sans-serif" font-size="11"'
_STYLE = (
    "<style>text{fill:#555}line{stroke:#999;stroke-width:.5}@media(prefers-color-scheme:dark){text{fill:#bbb}}</style>"
)


def draw(folder: Path, these: Any) -> None:
    """One file ``time-GROUP.svg`` for each group of operators, of at most some hundred points a card.

    Args:
        folder: Where they are written.
        these: Arrays ``group``, ``card``, ``measured`` and ``predicted``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for group in sorted(set(these.group.tolist())):
        at = np.flatnonzero(these.group == group)
        text = _picture(group, these.card[at], these.measured[at], these.predicted[at])
        (folder / f"time-{group}.svg").write_text(text, "utf-8")


def _picture(title: str, cards: Any, measured: Any, predicted: Any) -> str:
    low = np.floor(np.log10(min(measured.min(), predicted.min())))
    high = np.ceil(np.log10(max(measured.max(), predicted.max())))

    def place(seconds: float) -> float:
        return float((np.log10(seconds) - low) / (high - low) * _SIZE)

    middle = _TOP + _SIZE / 2
    width, height = _LEFT + _SIZE + _RIGHT, _TOP + _SIZE + _BOTTOM
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {_FONT} role="img">',
        f"<title>{html.escape(title)}: predicted against measured seconds</title>",
        _STYLE,
        f'<text x="{_LEFT}" y="16" font-size="13">{html.escape(title)}: predicted against measured</text>',
    ]
    for power in range(int(low), int(high) + 1):
        at = (power - low) / (high - low) * _SIZE
        x, y = _LEFT + at, _TOP + _SIZE - at
        label = _label(power)
        out += [
            f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_TOP + _SIZE}"/>',
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + _SIZE}" y2="{y:.1f}"/>',
            f'<text x="{x:.1f}" y="{_TOP + _SIZE + 14}" text-anchor="middle">{label}</text>',
            f'<text x="{_LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">{label}</text>',
        ]
    out += [
        f'<line x1="{_LEFT}" y1="{_TOP + _SIZE}" x2="{_LEFT + _SIZE}" y2="{_TOP}" style="stroke-width:1.2"/>',
        f'<text x="{_LEFT + _SIZE / 2}" y="{height - 10}" text-anchor="middle">measured</text>',
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">predicted</text>',
    ]
    for number, card in enumerate(sorted(set(cards.tolist()))):
        mine = np.flatnonzero(cards == card)
        mine = mine[np.arange(min(_MOST, len(mine))) * len(mine) // min(_MOST, len(mine))]
        colour = COLOURS[number % len(COLOURS)]
        dots = "".join(
            f'<circle cx="{_LEFT + place(measured[at]):.1f}" cy="{_TOP + _SIZE - place(predicted[at]):.1f}" r="1.6"/>'
            for at in mine
        )
        y = _TOP + 14 + 16 * number
        x = _LEFT + _SIZE + 12
        out += [
            f'<g fill="{colour}" fill-opacity=".6">{dots}<circle cx="{x}" cy="{y - 4}" r="4"/></g>',
            f'<text x="{x + 9}" y="{y}">{html.escape(card)}</text>',
        ]
    return "\n".join([*out, "</svg>\n"])


def _label(power: int) -> str:
    units = {0: "1 s", -1: "0.1 s", -2: "10 ms", -3: "1 ms", -4: "0.1 ms", -5: "10 µs", -6: "1 µs", -7: "0.1 µs"}
    return units.get(power, f"1e{power} s")
