"""Run by Python itself where a program begins that a script starts while it is described: it ends where it would train.

Nothing but Python's own library is imported: the program may be run by a Python that has no autofit.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn


class _BeforeBackward:
    """Finds PyTorch's autograd as Python would, and puts the end of the program in the place of its backward pass."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, _: Any = None) -> ModuleSpec | None:
        if name != "torch.autograd":
            return None
        spec = PathFinder.find_spec(name, path)
        loader: Any = spec.loader if spec else None
        if loader is not None:
            execute = loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                vars(module)["backward"] = _end

            loader.exec_module = executed
        return spec


def _end(*_: Any, **__: Any) -> NoReturn:
    """End this program at once: what it does at its end may be to save its model."""
    with contextlib.suppress(OSError):
        Path(os.environ["AUTOFIT_CHILD_TRAINED"].partition(" ")[2]).touch()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.write("autofit: this program would train now, and is ended: it is not the process that is tuned\n")
        sys.stderr.flush()
    os._exit(1)


def _run_own() -> None:
    """Run the ``sitecustomize`` that this one stands before, if there is any."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [one for one in sys.path if Path(one).resolve() != here]
    this = sys.modules.pop(__name__)
    try:
        import sitecustomize  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, this)


if os.environ.get("AUTOFIT_CHILD_TRAINED"):
    sys.meta_path.insert(0, _BeforeBackward)
_run_own()
