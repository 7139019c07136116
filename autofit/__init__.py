"""autofit finds the fastest training configuration that fits, by short real training steps.

Importing it is light: torch, transformers and Optuna are imported when they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["AutofitError", "Plan", "Promise", "Result", "Setup", "__version__", "load", "tune"]

if TYPE_CHECKING:
    from autofit.commands.tune import tune
    from autofit.contract.outcome import Promise
    from autofit.contract.plan import Plan
    from autofit.output.result import Result
    from autofit.output.setup import Setup, load
    from autofit.system.errors import AutofitError

_HOME = {
    "AutofitError": "autofit.system.errors",
    "Plan": "autofit.contract.plan",
    "Promise": "autofit.contract.outcome",
    "Result": "autofit.output.result",
    "Setup": "autofit.output.setup",
    "load": "autofit.output.setup",
    "tune": "autofit.commands.tune",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autofit' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
