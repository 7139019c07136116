"""Training arguments as words of a command line, for scripts that read them by ``HfArgumentParser``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

NO_FLAG = frozenset({"liger_kernel_config"})
"""Fields that ``HfArgumentParser`` reads from no word: it takes their type, a mapping, for what makes one of it."""


def flags(arguments: Mapping[str, Any], *, short: bool = False) -> list[str]:
    """``--name=value`` words, unquoted; arguments without a value are left out, since ``None`` can't be written.

    So are those of :data:`NO_FLAG`.

    Args:
        arguments: Fields of ``TrainingArguments``.
        short: Leave out what is false or empty, too: that is what a plain script has anyway.

    >>> flags({"bf16": True, "tf32": False, "optim": "adamw_torch", "optim_args": None})
    ['--bf16=true', '--tf32=false', '--optim=adamw_torch']
    """
    words = []
    for name, value in arguments.items():
        if value is None or name in NO_FLAG or (short and not value):
            continue
        text = json.dumps(value) if isinstance(value, bool | dict | list) else str(value)
        words.append(f"--{name}={text}")
    return words
