"""``--lengths FILE``: how long a model's rows will be, told by somebody who has the data."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from autofit.contract.facts import Facts, Model
from autofit.system.errors import InputError

MOST = 500
_HINT = "write the tokens of each row, a whole number on each line, or a JSON list of them"


def told_lengths(path: str) -> list[int]:
    """All lengths in a file, the shortest first.

    Raises:
        InputError: It can't be read, or holds something else than lengths.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"--lengths {path!r} can't be read: {error}", hint=_HINT) from None
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else text.split()
    except ValueError as error:
        raise InputError(f"--lengths {path!r} is no JSON list: {error}", hint=_HINT) from None
    lengths = sorted(_length(one, place, path) for place, one in enumerate(found, 1))
    if not lengths:
        raise InputError(f"--lengths {path!r} holds no lengths", hint=_HINT)
    return lengths


def read_lengths(path: str) -> list[int]:
    """The lengths in a file, the shortest first; of more than 500 as many that stand for them, the longest among them.

    Raises:
        InputError: It can't be read, or holds something else than lengths.
    """
    lengths = told_lengths(path)
    if len(lengths) <= MOST:
        return lengths
    return [*(lengths[int((one + 0.5) / (MOST - 1) * len(lengths))] for one in range(MOST - 1)), lengths[-1]]


def _length(given: object, place: int, path: str) -> int:
    text = str(given).strip()
    if isinstance(given, bool | float) or not (text.isascii() and text.isdigit()) or not 0 < int(text[:10]) < 10**9:
        raise InputError(f"--lengths {path!r}: number {place} is {text[:40]!r}, which is no length", hint=_HINT)
    return int(text)


def check_lengths(path: str | None, processes: int | None) -> None:
    """Refuse a file that holds no lengths, or a training that can't be timed with them.

    Raises:
        InputError: There is such a thing.
    """
    if path is None:
        return
    read_lengths(path)
    if (processes or 1) > 1:
        raise InputError("--lengths: rows of different lengths are timed on one process", hint="--processes 1")


def lengths_of(
    path: str, seq_len: int | None, longest: int, model: Model, say: Callable[[str], None]
) -> tuple[int, tuple[int, ...]]:
    """The length of the longest row, and the lengths of all, no more than that.

    Args:
        path: Of the file.
        seq_len: What was asked for: longer rows are cut, as a tokenizer does.
        longest: What the model takes at most.
        model: Reads tokens.
        say: Told how many rows are cut.

    Raises:
        InputError: The file holds no lengths, or the model reads none.
    """
    if model.length.unit != "tokens" or model.sample != "row" or not model.sample_tokens:
        raise InputError(f"--lengths: a row of {model.task} is not so many tokens alone", hint="leave it out")
    found = read_lengths(path)
    at_most = max(2, min(seq_len or found[-1], longest))
    cut = sum(one > at_most for one in found)
    if cut:
        say(f"{cut / len(found):.1%} of the rows in {path} are longer than {at_most} tokens, and are cut there")
    return at_most, tuple(max(2, min(one, at_most)) for one in found)


def longest_row(model: Model) -> int:
    """Tokens of the longest row that the model takes."""
    return min(model.max_positions or 10**8, model.position_rows or 10**8)


def check_same_lengths(path: str | None, seq_len: int | None, facts: Facts, folder: Path) -> None:
    """Refuse to go on in a folder with a file of the same name that holds other lengths.

    Raises:
        InputError: It does, or it can't be read.
    """
    if path is None:
        return
    work = facts.workload
    now = lengths_of(path, seq_len, longest_row(facts.model), facts.model, lambda _: None)
    if (*now, len(told_lengths(path))) != (work.seq_len, tuple(work.lengths), work.told_rows):
        raise InputError(
            f"the lengths in {path} have changed since {folder} was begun",
            hint="measurements would not compare: put the file back as it was, or choose another --output",
        )


def lengths_words(lengths: Sequence[int]) -> str:
    """How long rows are, in words."""
    mean, middle = sum(lengths) / len(lengths), lengths[len(lengths) // 2]
    return (
        f"rows have {mean:,.0f} tokens in the mean, {middle:,} in the middle, {lengths[-1]:,} at most: fit is judged "
        "on the longest, and what counts is tokens/s without padding on the rows to be expected"
    )
