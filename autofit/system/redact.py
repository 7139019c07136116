"""Words without tokens and passwords: what is shown, logged or written must hold none."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_NAMES = re.compile(r"(^|_)(TOKEN|API_KEY|SECRET|SECRET_KEY|SECRET_ACCESS_KEY|PASSWORD|PASSWD)$", re.IGNORECASE)
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9_]{8,}")
_IN_URL = re.compile(r"(?<=://)([^\s/@:]*):([^\s/@]+)@")
_SHORTEST = 8
"""Shorter values would blot out common words."""
HIDDEN = "***"


def redacted(text: str) -> str:
    """The text with the values of secret environment variables, hub tokens and passwords in URLs blotted out.

    >>> redacted("postgresql://me:pass@host/studies")
    'postgresql://me:***@host/studies'
    """
    for value in _values(os.environ):
        text = text.replace(value, HIDDEN)
    return _IN_URL.sub(rf"\1:{HIDDEN}@", _HUB_TOKEN.sub(HIDDEN, text))


def harmless(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without secrets, for processes that have no use for them."""
    return {name: value for name, value in environment.items() if not _NAMES.search(name)}


def _values(environment: Mapping[str, str]) -> list[str]:
    found = {value for name, value in environment.items() if _NAMES.search(name) and len(value) >= _SHORTEST}
    return sorted(found, key=len, reverse=True)
