"""What PyTorch does in place: it makes no new tensor, on a card as in a trace."""

from __future__ import annotations

import sys
from typing import Any

import torch

from autofit.costmodel.tracing.emulation.fake_mode import of_operator

ATTENTION = "attention_by_scores"
"""Name of the function that calls the attention whose scores are made."""
_AUTOGRAD = "_engine_run_backward"
_HELD_HERE = 2
"""Holders of a storage that one tensor alone has: the tensor, and the object that Python asks it by."""

_WRITING = frozenset({
    "add_", "sub_", "mul_", "div_", "copy_", "zero_", "fill_", "clamp_", "clamp_min_", "clamp_max_", "masked_fill_",
    "lerp_", "addcmul_", "addcdiv_", "sqrt_", "neg_", "normal_", "uniform_", "bernoulli_", "pow_", "rsqrt_",
    "exp_", "scatter_add_",
    "optimizer_update_8bit_blockwise", "optimizer_update_32bit",
})  # fmt: skip


def add(recorder: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sum, in place where PyTorch adds in place but for a dispatch mode.

    Sources: gradients, ``torch/csrc/autograd/input_buffer.cpp`` (``can_accumulate_inplace``); the mask of scores,
    ``aten/src/ATen/native/transformers/attention.cpp`` (``_scaled_dot_product_attention_math``).
    """
    caller = _caller()
    there, added = args[:2]
    if not isinstance(added, torch.Tensor):
        return recorder.run(func, args, kwargs)[0]
    if caller == ATTENTION:
        return torch.ops.aten.alias.default(there)
    if caller == _AUTOGRAD and not torch.is_grad_enabled() and _may_be_added_to(there, added):
        return there if recorder.fake else there.add_(added)
    return recorder.run(func, args, kwargs)[0]


def _caller() -> str:
    """Name of the function in Python that called an operator; what is called in C++ has no frame."""
    try:
        return sys._getframe(3).f_code.co_name  # below this one, the stand-in and the dispatch mode
    except ValueError:  # a device's thread of autograd has no Python below
        return _AUTOGRAD


def _may_be_added_to(there: torch.Tensor, added: torch.Tensor) -> bool:
    """Whether autograd keeps a sum of gradients in the place of the first, which it holds alone."""
    alike = there.shape == added.shape and there.dtype == added.dtype
    alone = torch._C._storage_Use_Count(there.untyped_storage()._cdata) == _HELD_HERE
    return alike and alone and bool(torch.ops.aten.is_non_overlapping_and_dense.default(there))


@of_operator
def only_writes(func: Any) -> bool:
    """Whether an operator does nothing but change values in place, so that a trace need not call it."""
    name = func._schema.name.rpartition("::")[2]
    if name in _WRITING or (name == "addmm" and func._schema.is_mutable):
        return True
    gathered = func.namespace == "fsdp" and not func._schema.returns  # to where FSDP2 wants it
    return gathered or (name.startswith(("_foreach_", "_fused_")) and name.endswith("_"))
