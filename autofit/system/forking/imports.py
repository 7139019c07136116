"""What the fork server imports, so that it takes little time and leaves the device alone."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from importlib.util import find_spec
from typing import Any


def load_bitsandbytes() -> None:
    """Import bitsandbytes where it is installed, and have it compile its functions when they are first called.

    It compiles them when it is imported (0.50), for which PyTorch loads Inductor: a second and 40 MB of each process
    that imports Trainer, and hardly any calls them. Where it or torch can't be imported nothing is said: who needs them
    is told.
    """
    if "bitsandbytes" in sys.modules or not find_spec("bitsandbytes"):
        return
    try:
        import torch
    except ImportError:
        return

    at_once = torch.compile

    def at_first_call(function: Any = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(at_first_call, **options)
        compiled: Any = functools.cache(lambda: at_once(function, **options))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return call

    torch.compile = at_first_call  # type: ignore[assignment]
    teller = logging.getLogger("bitsandbytes")
    level = teller.level
    teller.setLevel(logging.ERROR)  # on a CPU with AVX-512 for bfloat16 it warns of a kernel that hardly anybody calls
    try:
        importlib.import_module("bitsandbytes")
    except Exception:  # noqa: BLE001, S110 - as said above
        pass
    finally:
        torch.compile = at_once
        teller.setLevel(level)


def import_transformers() -> None:
    """Import transformers, which reads its 1600 files of models twice, and each of their lines, for what they give."""
    bounded: Any = functools.lru_cache

    def unbounded(maxsize: Any = 128, typed: bool = False) -> Any:
        if not callable(maxsize):
            return bounded(maxsize, typed)
        if "fetch__all__" in maxsize.__globals__:  # it looks for the last line that begins so
            fetch = maxsize.__globals__["fetch__all__"]
            maxsize.__globals__["fetch__all__"] = lambda text: fetch(text[text.rfind("\n__all__") + 1 :])
        return bounded(None)(maxsize)  # what it keeps are 128 folders of 550

    functools.lru_cache = unbounded
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module("transformers")
    finally:
        functools.lru_cache = bounded


def leave_out(*packages: str) -> None:
    """Have transformers go without some packages, which it loads wherever they are: seconds, and a trace uses none."""
    with contextlib.suppress(ImportError):
        from transformers import utils

        for name in packages:
            if hasattr(utils, f"is_{name}_available"):
                setattr(utils, f"is_{name}_available", lambda: False)


def own_threads() -> None:
    """Make PyTorch's pool of threads anew in a process that was just forked, while it has a single thread.

    The first call after a fork does that, and nothing guards it: where autograd's threads of several devices begin at
    once, all but one find no pool, and abort ("Invalid thread pool!", ``caffe2/utils/threadpool``, torch 2.13).
    """
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "set_num_threads"):
        torch.set_num_threads(torch.get_num_threads())


def device_is_spoilt() -> bool:
    """Whether something that the server has imported has touched the device, so that a forked child can't use it."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda._is_in_bad_fork())  # noqa: SLF001 - PyTorch's own question before it begins
