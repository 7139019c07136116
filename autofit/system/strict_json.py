"""JSON as the standard has it: no NaN, no infinity, no number that overflows into one, no text in a number's place."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pydantic import TypeAdapter

Kind = TypeVar("Kind")


def no_constant(text: str) -> Any:
    """Refuse ``NaN`` and ``Infinity``."""
    raise ValueError(f"{text} is no JSON number")


def loads(text: str | bytes, constant: Callable[[str], Any] = no_constant) -> Any:
    """Read JSON.

    Args:
        text: What to read.
        constant: What stands for ``NaN``, ``Infinity`` or ``-Infinity``, which Python writes and JSON does not have.

    Raises:
        ValueError: It is no JSON, is nested too deeply, or holds a number that is not finite or has over 63 bits.
    """
    try:
        return json.loads(text, parse_constant=constant, parse_int=_small_int, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class UnknownKeyError(ValueError):
    """A key that no value of that kind has: another version wrote it, or somebody edited it."""


def read(adapter: TypeAdapter[Kind], text: str | bytes) -> Kind:
    """A value of ours out of JSON that anybody may have edited; a key that it does not have is refused.

    Raises:
        UnknownKeyError: It has a key that is not known.
        ValueError: It is no such JSON, or not of that kind; pydantic's own error is one of these.
    """
    loads(text)
    try:
        return adapter.validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        unknown = [one["loc"] for one in error.errors() if one["type"] == "unexpected_keyword_argument"]
        if not unknown:
            raise
        raise UnknownKeyError(f"{place_of(unknown[0])} is not a known key") from error


def place_of(where: Iterable[object]) -> str:
    """Where in a JSON text pydantic has found an error: its ``loc`` as one word, empty for the whole text."""
    return ".".join(str(part)[:80] for part in where)


def dump_json(adapter: TypeAdapter[Any], value: object) -> str:
    """Indented JSON with only finite numbers in it."""
    return json.dumps(adapter.dump_python(value, mode="json", by_alias=True), indent=1, allow_nan=False) + "\n"


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:20]} is too large a number")
    return number


def _small_int(text: str) -> int:
    number = int(text) if len(text) < 20 else math.inf
    if abs(number) >= 2**63:
        raise ValueError(f"{text[:20]}... is too large a number")
    return int(number)
