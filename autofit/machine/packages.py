"""The packages whose versions an answer holds for, and which of them are installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

from packaging.version import Version

from autofit.registry import techniques
from autofit.system.other_kernels import DISTRIBUTIONS

_ALWAYS = ("torch", "transformers", "accelerate", "optuna", "trl")
SUPPORTED = {"torch": ("2.11", "2.15"), "transformers": ("5.17", "5.24")}
"""The first and the last minor version that this one is made for, as the README says; of others the first alone is
known, and pip sees to that."""


def packages() -> tuple[str, ...]:
    """Distributions that autofit stands on, and those that a technique names."""
    return tuple(dict.fromkeys([*_ALWAYS, *(name for one in techniques() for name in one.packages)]))


def unsupported(versions: Mapping[str, str]) -> list[str]:
    """The packages of a version that this one is not made for, a sentence each."""
    return [
        f"{name} {versions[name]} is none of the versions that this one is made for, {first} to {last}: it may fail, "
        "or find what does not hold"
        for name, (first, last) in SUPPORTED.items()
        if name in versions
        and not Version(first).release <= Version(versions[name]).release[:2] <= Version(last).release
    ]


def installed() -> dict[str, str]:
    """The installed ones of them, and of those that models take kernels from, with their versions."""
    found = {}
    for name in (*packages(), *DISTRIBUTIONS.values()):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
