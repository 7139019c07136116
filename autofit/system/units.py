"""Sizes, durations, prices and tokens: words to numbers and back."""

from __future__ import annotations

import math
import re

from autofit.system.errors import InputError

KIB, MIB, GIB, TIB, PIB = 2**10, 2**20, 2**30, 2**40, 2**50
_SIZES = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 10**3,
    "m": MIB, "mib": MIB, "mb": 10**6,
    "g": GIB, "gib": GIB, "gb": 10**9,
    "t": TIB, "tib": TIB, "tb": 10**12,
    "p": PIB, "pib": PIB, "pb": 10**15,
}  # fmt: skip
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_PRICE = re.compile(r"\$?(\d+(?:\.\d+)?|\.\d+)(?:\s*/\s*h(?:our)?)?", re.ASCII)
_LONGEST_TOLD = 40
_NUMBER = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([a-z%]*)", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes from ``22GiB``, ``500MB``, ``1.5g`` (binary without the ``b``), or a plain number of bytes.

    Raises:
        InputError: The text is not a size above zero.
    """
    match = _NUMBER.fullmatch(text.strip().lower())
    size = 0.0
    if match and match[2] in _SIZES:
        size = float(match[1]) * _SIZES[match[2]]
    if size < 1:
        raise InputError(f"{text!r} is not a size", hint="write it like 22GiB, 800MiB or 24GB")
    return int(size)


def parse_limit(text: str, free_bytes: int) -> int:
    """Bytes from a size, or from a share of ``free_bytes`` such as ``90%``.

    Raises:
        InputError: Neither a size nor a share between 0 and 100 %.
    """
    match = _NUMBER.fullmatch(text.strip().lower())
    if match and match[2] == "%":
        share = float(match[1])
        if 0 < share <= 100:
            return int(free_bytes * share / 100)
        raise InputError(f"{text!r} is not a share of the free memory", hint="write it like 90%")
    try:
        return parse_size(text)
    except InputError as error:
        raise InputError(
            f"{text!r} is not a memory limit", hint="write a size like 22GiB or a share of the free memory like 90%"
        ) from error


def check_unit(text: str, what: str) -> None:
    """Refuse a number of bytes that was surely meant in another unit; ``what`` is the option that it was given to.

    Raises:
        InputError: A number alone, under 1 MiB, in which no model trains.
    """
    match = _NUMBER.fullmatch(text.strip().lower())
    if match and not match[2] and 1 <= float(match[1]) < MIB:
        number = match[1]
        raise InputError(f"{what} {number} is {number} bytes", hint=f"write {number}GiB, or {number}MiB")


def parse_duration(text: str) -> float:
    """Seconds from ``90``, ``90s``, ``10m`` or ``1.5h``.

    Raises:
        InputError: The text is not a duration above zero.
    """
    match = _NUMBER.fullmatch(text.strip().lower())
    seconds = 0.0
    if match and match[2] in _SECONDS:
        seconds = float(match[1]) * _SECONDS[match[2]]
    if not 0 < seconds < math.inf:
        raise InputError(f"{text!r} is not a duration", hint="write it like 90s, 10m or 1.5h")
    return seconds


_MOST_PRICE = 1e12


def parse_price(text: str) -> float:
    """The price of an hour from ``2.5/h``, ``$2.5/hour`` or ``2.5``, in whatever currency.

    Raises:
        InputError: It is no price, or one above 1e12: what a training costs has to stay a number.
    """
    match = _PRICE.fullmatch(text.strip())
    if match is None or float(match[1]) > _MOST_PRICE:
        said = text if len(text) <= _LONGEST_TOLD else f"{text[:_LONGEST_TOLD]}..."
        raise InputError(f"--price {said!r} is no price of an hour up to {_MOST_PRICE:.0e}", hint="write it like 2.5/h")
    return float(match[1])


_MOST_TOKENS = 1e18


def parse_tokens(given: str | float) -> float:
    """Tokens of a training from ``1e9`` or ``500000000``.

    Raises:
        InputError: They are no number from 1 to 1e18, ten thousand times what any model was trained on.
    """
    try:
        tokens = float(given)
    except (TypeError, ValueError):
        tokens = math.nan
    if not 1 <= tokens <= _MOST_TOKENS:
        raise InputError(
            f"--tokens {given!r} is no number of tokens from 1 to {_MOST_TOKENS:.0e}",
            hint="write it like 1e9 or 500000000",
        )
    return tokens


def size(count: float) -> str:
    """Bytes for a person.

    >>> size(1610612736)
    '1.50 GiB'
    """
    magnitude = abs(count)
    for unit, step in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if magnitude >= step:
            shown = count / step
            return f"{shown:.0f} {unit}" if abs(shown) >= 100 else f"{shown:.{2 if step >= GIB else 1}f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Seconds for a person.

    >>> duration(75)
    '1 min 15 s'
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
