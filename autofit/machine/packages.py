"""The packages whose versions an answer holds for, and which of them are installed."""

from __future__ import annotations

from importlib import metadata

from autofit.registry import techniques
from autofit.system.other_kernels import DISTRIBUTIONS

_ALWAYS = ("torch", "transformers", "accelerate", "optuna", "trl")


def packages() -> tuple[str, ...]:
    """Distributions that autofit stands on, those that a technique names, and those that models take kernels from."""
    named = (name for one in techniques() for name in one.packages)
    return tuple(dict.fromkeys([*_ALWAYS, *named, *DISTRIBUTIONS.values()]))


def installed() -> dict[str, str]:
    """The installed ones of them, with their versions."""
    found = {}
    for name in packages():
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
