"""autofit finds the fastest training configuration that fits, by short real training steps.

Importing it is light: torch, transformers and Optuna are imported when they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["AutofitError", "Plan", "Promise", "Result", "Setup", "__version__", "load", "tune"]

if TYPE_CHECKING:
    from autofit.answer import Result
    from autofit.errors import AutofitError
    from autofit.loading import Setup, load
    from autofit.plan import Plan, Promise
    from autofit.tuning import tune

_HOME = {
    "AutofitError": "autofit.errors",
    "Plan": "autofit.plan",
    "Promise": "autofit.plan",
    "Result": "autofit.answer",
    "Setup": "autofit.loading",
    "load": "autofit.loading",
    "tune": "autofit.tuning",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autofit' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
