"""Operators that fake tensors can't go through, or not without values: what they make, by their shapes alone."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from autofit.contract.technique import replacing

if TYPE_CHECKING:
    from autofit.costmodel.tracing.recorder import Recorder, StandIn

BALANCED = "every expert is assumed to get its equal share of the tokens"


def without_values() -> dict[Any, StandIn]:
    """Stand-ins for a trace on any device."""
    ops = torch.ops.aten
    return {
        ops._grouped_mm.default: _grouped_mm,
        ops.stack.default: _stack,
        ops.nonzero.default: _Nonzero(),
        ops.masked_select.default: _masked_select,
        ops.index.Tensor: _index,
        ops._ctc_loss.Tensor: _ctc_loss,
        ops._ctc_loss_backward.Tensor: _ctc_loss_backward,
        torch.ops._c10d_functional.wait_tensor.default: _wait_tensor,
        torch.ops.c10d._allgather_base_.default: (sent := _Sent()),
        torch.ops.c10d._reduce_scatter_base_.default: sent,
    }


def lists_of_tensors() -> contextlib.AbstractContextManager[None]:
    """``torch.tensor`` takes lists in which tensors of one number stand, whose values it reads past every mode."""
    make = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        listed = isinstance(data, list | tuple)
        return make(tree_map_only(FakeTensor, torch.Tensor.item, data) if listed else data, *args, **kwargs)

    return replacing([(torch, "tensor", tensor)])


def _wait_tensor(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """What a collective made; the fake kernel of PyTorch 2.13 makes another of its size."""
    return args[0]  # type: ignore[no-any-return]


class _Sent:
    """A collective of a fake process group, which sends nothing: what it gives to wait for is the same each time."""

    def __init__(self) -> None:
        self.work: Any = None

    def __call__(self, recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.work is None:
            _, self.work = func(*args, **kwargs)
        return args[0], self.work


def _stack(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """One row many times: a batch, whose rows would be looked at one by one."""
    tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first = tensors[0]
    if dim != 0 or any(one is not first for one in tensors) or not first.is_contiguous():
        return recorder.run(func, args, kwargs)[0]  # type: ignore[no-any-return]
    return first.new_empty(len(tensors), *first.shape)  # type: ignore[no-any-return]


def _grouped_mm(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Grouped products in any dtype; the fake kernel of PyTorch 2.13 knows bfloat16 only.

    ``(S, K) x (E, K, N) -> (S, N)`` for the rows of all experts, and ``(K, S) x (S, N) -> (E, K, N)`` for the gradient
    of their weights. The number of rows is that of all chosen experts together, however they are chosen.
    """
    left, right = args[0], args[1]
    offsets = args[2] if len(args) > 2 else kwargs["offs"]
    shape: tuple[int, ...]
    if left.dim() == 2 and right.dim() == 2:
        shape = (offsets.shape[0], left.shape[0], right.shape[1])
    elif left.dim() == 2:
        shape = (left.shape[0], right.shape[-1])
    else:
        shape = (*left.shape[:-1], right.shape[-1])
    return torch.empty(shape, dtype=kwargs.get("out_dtype") or left.dtype)


def _masked_select(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Where a mask is true, said to be everywhere: the labels of speech, of which none is padding."""
    return torch.empty(args[0].numel(), dtype=args[0].dtype)


def _index(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """In a backward pass the gradient of what was put where a mask is true, said to be everywhere.

    So are features of speech masked (SpecAugment). In a forward pass it would say too much of a loss.
    """
    if not torch.is_grad_enabled():
        places = (
            [one.new_empty(one.numel(), dtype=torch.int64)] * one.dim() if _is_mask(one) else [one] for one in args[1]
        )
        args = (args[0], [one for each in places for one in each])
    return recorder.run(func, args, kwargs)[0]  # type: ignore[no-any-return]


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool


def _ctc_loss(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Of scores ``(T, N, C)`` a loss for each clip and the table of its alignments, ``(N, T, 2 L + 1)``.

    Said of labels of equal length. Source: ``ctc_loss_gpu_template`` in PyTorch's ``LossCTC.cu``.
    """
    scores, labels = args[0], args[1]
    frames, clips = scores.shape[0], scores.shape[1]
    longest = labels.numel() // clips
    return scores.new_empty(clips), scores.new_empty(clips, frames, 2 * longest + 1)


def _ctc_loss_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The gradient of the scores, made beside a second table of alignments."""
    scores, alignments = args[1], args[6]
    with recorder.holding(alignments.nbytes, name="_ctc_loss_backward"):
        return torch.empty_like(scores)


class _Nonzero:
    """Where a mask is true: which experts were hit, or labels given (all), and by which tokens; said to be balanced.

    Source: the loop over experts in transformers' models that have no grouped products.
    """

    def __init__(self) -> None:
        self.experts = 1

    def __call__(self, recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        mask = args[0]
        if mask.dim() == 1:
            self.experts = max(1, mask.shape[0])
            found = self.experts
        else:
            recorder.notes.add(BALANCED)
            found = -(-mask.numel() // self.experts)
        return torch.empty(found, mask.dim(), dtype=torch.int64)
