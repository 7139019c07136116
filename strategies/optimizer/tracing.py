"""What stands in for an optimizer's kernels while a trace runs."""

from __future__ import annotations

import contextlib
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from autofit.contract.trace import TraceRecorder

    from .rows import Row

_LEAST_PAGED = 1e5  # bitsandbytes.optim.optimizer.Optimizer8bit.get_state_buffer


def replacements(row: Row, recorder: TraceRecorder, *, on_cuda: bool) -> list[tuple[Any, str, Any]]:
    """What is replaced while a trace runs: (owner, attribute, stand-in)."""
    replaced: list[tuple[Any, str, Any]] = []
    if "bitsandbytes" in row.packages:
        replaced += _bitsandbytes(recorder, paged=row.paged and on_cuda)
    if "torchao" in row.packages:
        replaced += _torchao()
    if "apollo-torch" in row.packages:
        projector = import_module("apollo_torch.random_projector")
        replaced.append((projector, "next_seed", lambda seed, *_: seed + 1))  # it reads numbers off a tensor
    if "torch-optimi" in row.packages and on_cuda:
        # one Triton kernel a parameter, in place
        replaced.append((import_module("optimi.stableadamw"), "stableadamw", lambda **_: None))
    return replaced


def _bitsandbytes(recorder: TraceRecorder, *, paged: bool) -> list[tuple[Any, str, Any]]:
    """Bitsandbytes looks at a table's values when it is made, and takes paged memory from the driver."""
    import torch
    from bitsandbytes import functional
    from bitsandbytes.optim.ademamix import AdEMAMix
    from bitsandbytes.optim.optimizer import GlobalOptimManager, Optimizer8bit

    GlobalOptimManager.get_instance().initialize()  # type: ignore[no-untyped-call]  # of a trace before this one

    maps = {signed: functional.create_dynamic_map(signed=signed) for signed in (True, False)}  # type: ignore[no-untyped-call]

    def place(p: torch.Tensor) -> AbstractContextManager[None]:
        return recorder.elsewhere() if paged and p.numel() >= _LEAST_PAGED else contextlib.nullcontext()

    def state(_: object, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with place(p):
            return torch.zeros_like(p, dtype=dtype)

    def two_states(_: object, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with place(p):
            return torch.zeros((2, *p.shape), dtype=dtype)

    def prefetch(self: Any, p: torch.Tensor) -> None:
        held = [tensor for name, tensor in self.state[p].items() if name in {"state1", "state2"}]
        # in, and out again
        recorder.transfer(2 * sum(tensor.nbytes for tensor in held if recorder.lies_elsewhere(tensor)))

    return [
        (functional, "create_dynamic_map", lambda signed=True, *_: maps[signed].clone()),
        (Optimizer8bit, "get_state_buffer", state),
        (AdEMAMix, "_get_state_double_buffer", two_states),
        (Optimizer8bit, "prefetch_state", prefetch),
        (torch.cuda, "synchronize", lambda *_: None),
    ]


def _torchao() -> list[tuple[Any, str, Any]]:
    """Torchao wraps tensors for its state and compiles its step, and fake tensors can go through neither.

    What the compiled code makes for itself is made here: both moments in float32, and with 4 bits also their codes,
    unpacked and as 64-bit numbers. Source: what PyTorch 2.13 compiles for a CPU.
    """
    import torch

    adam = import_module("torchao.optim.adam")

    def state_of(bits: int) -> Any:
        def state(p: torch.Tensor, _: bool, block_size: int) -> SimpleNamespace:
            count = p.numel()
            kept = SimpleNamespace(
                codes=torch.zeros(count * bits // 8, dtype=torch.uint8),
                scale=torch.zeros(count // block_size),
                qmap=torch.zeros(2**bits),
            )
            kept.to = lambda _: kept
            return kept

        return staticmethod(state)

    def step(p: torch.Tensor, *others: Any) -> None:
        made = []
        for moment in others[2:4]:
            if not hasattr(moment, "codes"):
                continue
            if moment.codes.numel() < p.numel():
                made += [torch.empty_like(p, dtype=dtype) for dtype in (torch.uint8, torch.int64)]
            made.append(torch.empty_like(p, dtype=torch.float32))

    not_compiled = SimpleNamespace(**{**vars(torch), "compile": lambda function, **_: function})
    return [
        (adam.AdamW8bit, "_subclass_zeros", state_of(8)),
        (adam.AdamW4bit, "_subclass_zeros", state_of(4)),
        (adam, "single_param_adam", step),
        (adam, "torch", not_compiled),
        (adam, "Tensor", object),  # so that the learning rate stays a number: schedulers copy it with its value
    ]
