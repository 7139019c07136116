"""autofit finds the fastest training configuration that fits, by short real training steps.

Importing it is light: torch, transformers and Optuna are imported when they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autofit._version import __version__

__all__ = [
    "AutofitError",
    "Plan",
    "Promise",
    "Result",
    "Setup",
    "__version__",
    "estimate",
    "load",
    "profile",
    "tune",
    "verify",
]

if TYPE_CHECKING:
    from autofit.commands.estimates.estimate import estimate
    from autofit.commands.profile import profile
    from autofit.commands.tune import tune
    from autofit.commands.verify import verify
    from autofit.contract.outcome import Promise
    from autofit.contract.plan import Plan
    from autofit.output.result import Result
    from autofit.output.setup import Setup, load
    from autofit.system.errors import AutofitError

_MODULE_OF = {
    "AutofitError": "autofit.system.errors",
    "Plan": "autofit.contract.plan",
    "Promise": "autofit.contract.outcome",
    "Result": "autofit.output.result",
    "Setup": "autofit.output.setup",
    "estimate": "autofit.commands.estimates.estimate",
    "load": "autofit.output.setup",
    "profile": "autofit.commands.profile",
    "tune": "autofit.commands.tune",
    "verify": "autofit.commands.verify",
}
_CALLS = {"estimate", "profile", "tune", "verify"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'autofit' has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module(_MODULE_OF[name]), name)
    if name in _CALLS:
        from autofit.commands.shell.python_calls import for_python

        found = for_python(found)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
