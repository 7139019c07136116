"""Kernels that models of transformers take from other packages: which packages, and a run that launches none of them.

Where such a package is not installed, transformers runs the layer in plain PyTorch instead: right, and much slower.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_TAKEN = re.compile(r'use_kernel_func_from_hub_with_fallback\(\s*"\w+",\s*"(\w+)"')
"""Source: ``transformers.integrations.hub_kernels`` of 5.17 to 5.24."""
DISTRIBUTIONS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}
"""By the names that they are imported by."""


def packages_of(module: str) -> frozenset[str]:
    """The packages whose kernels a model's module runs where they are installed, by the names of their imports."""
    try:
        spec = find_spec(module)
        text = "" if spec is None or spec.origin is None else Path(spec.origin).read_text("utf-8")
    except (ImportError, OSError, ValueError):
        return frozenset()
    return frozenset(_TAKEN.findall(text))


@contextlib.contextmanager
def without_launches(tell: Callable[[tuple[Any, ...]], None] = lambda _: None) -> Iterator[None]:
    """Launch no kernel of Triton's in here: where tensors have no values, there is nothing for it to compute.

    The Python around a kernel makes its tensors, so that a run without the kernel still holds all memory. It may choose
    the device of a tensor first, which is none of CUDA's here.

    Args:
        tell: Told of each that would be launched, with its arguments by place and by name.

    Source: ``triton.runtime.jit.KernelInterface``, below which autotuners and heuristics stand, too (3.7).
    """
    interface: Any = getattr(sys.modules.get("triton.runtime.jit"), "KernelInterface", None)
    if interface is None:
        yield
        return
    device: Any = sys.modules["torch"].cuda.device
    before = interface.__getitem__, device.__enter__, device.__exit__

    def launch(kernel: Any, _grid: object) -> Callable[..., None]:
        if getattr(kernel, "configs", None):  # an autotuner, which is asked what it has chosen
            kernel.best_config = kernel.configs[0]
        return lambda *args, **kwargs: tell((*args, *kwargs.values()))

    interface.__getitem__ = launch
    device.__enter__ = device.__exit__ = lambda *_: None
    try:
        yield
    finally:
        interface.__getitem__, device.__enter__, device.__exit__ = before
