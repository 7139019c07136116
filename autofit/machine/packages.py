"""The packages whose versions an answer holds for, and which of them are installed."""

from __future__ import annotations

from importlib import metadata

from autofit.registry import techniques
from autofit.system.other_kernels import DISTRIBUTIONS

_ALWAYS = ("torch", "transformers", "accelerate", "optuna", "trl")


def packages() -> tuple[str, ...]:
    """Distributions that autofit stands on, and those that a technique names."""
    return tuple(dict.fromkeys([*_ALWAYS, *(name for one in techniques() for name in one.packages)]))


def installed() -> dict[str, str]:
    """The installed ones of them, and of those that models take kernels from, with their versions."""
    found = {}
    for name in (*packages(), *DISTRIBUTIONS.values()):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
