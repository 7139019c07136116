"""Numbers and text for people: rounding, plurals, and nothing that steers a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from rich.text import Text


def clean(text: str) -> str:
    """Text that can't steer a terminal or turn a line around: control and direction characters are replaced."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def as_word(path: str | Path) -> str:
    """A path as a word of a command, unquoted: it is no option, whatever it begins with.

    >>> as_word("out"), as_word("-x")
    ('out', './-x')
    """
    return f"./{path}" if str(path).startswith("-") else str(path)


def command_line(line: str) -> Text:
    """A line of a command as a console prints it: never on two lines, however long it is, since it is to be pasted."""
    from rich.text import Text

    return Text(clean(line), no_wrap=True, overflow="ignore")


def one_line(text: str, limit: int = 160) -> str:
    """The text's words on one line, cut where it is too long for a table."""
    joined = " ".join(clean(text).split())
    return joined if len(joined) <= limit else joined[: limit - 1].rstrip() + "…"


def plural(count: int, noun: str) -> str:
    """``1 trial``, ``2 trials``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def number(value: float) -> str:
    """Four digits that count.

    >>> number(41.2), number(12345.6)
    ('41.20', '12,346')
    """
    return f"{value:,.{_decimals(value)}f}"


def times(ratio: float) -> str:
    """A multiple above zero in two decimals, or as many more as show what it is.

    >>> times(3.1), times(0.00412)
    ('3.10 times', '0.0041 times')
    """
    return f"{ratio:.{max(2, 1 - math.floor(math.log10(ratio)))}f} times"


def with_spread(value: float, spread: float) -> str:
    """A value and the half-width of its interval, to the same place.

    >>> with_spread(41.2, 0.314)
    '41.20 ± 0.31'
    """
    return f"{value:,.{_decimals(value)}f} ± {spread:,.{_decimals(value)}f}"


def percent(share: float) -> str:
    """A share of one in whole percent; a small one is not rounded to nothing."""
    return f"{share * 100:.0f} %" if share >= 0.01 or share <= 0 else f"{share * 100:.1g} %"


def parameters(count: int) -> str:
    """A number of parameters for a person.

    >>> parameters(494_032_768)
    '494.0 million parameters'
    """
    for word, unit in (("billion", 10**9), ("million", 10**6), ("thousand", 10**3)):
        if count >= unit:
            return f"{count / unit:,.{_decimals(count / unit)}f} {word} parameters"
    return f"{count} parameters"


def count(value: float) -> str:
    """A large number in few digits.

    >>> count(8.03e9), count(512)
    ('8.03B', '512')
    """
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:g}"


def _decimals(value: float) -> int:
    return min(6, max(0, 3 - math.floor(math.log10(abs(value))))) if value else 2
