"""What CUDA does otherwise than the CPU, put in its place while a trace runs on a fake CPU.

============================  =====================================================================================
autocast                      CUDA computes more operators in float32 than the CPU does: its own list is followed
dropout                       one fused kernel that keeps a mask of a byte an element
attention                     fused also with dropout; the backward pass has float32 accumulators
autocast, asked for           without a device, PyTorch answers for CUDA
for-each kernels              the default of optimizers and of gradient clipping
============================  =====================================================================================

Sources: ``torch/docs/source/amp.md`` and ``aten/src/ATen/autocast_mode.h`` (lists); ``aten/src/ATen/native/
Dropout.cpp``; ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp`` (``mha_bwd``) and
``attention_backward.cu``. Each has a test on a device that compares it with the real one.
Not modelled: cuDNN's attention, which PyTorch may prefer on Hopper.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_map_only
from transformers import modeling_utils

if TYPE_CHECKING:
    from autofit.costmodel.tracing.recorder import Recorder

_FLOAT32 = frozenset({
    "cross_entropy", "cross_entropy_loss",
    "acos", "asin", "cosh", "cosine_embedding_loss", "cdist", "cosine_similarity", "dist", "erfinv", "exp", "expm1",
    "group_norm", "hinge_embedding_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10", "log_softmax", "log1p",
    "log2", "margin_ranking_loss", "mse_loss", "multilabel_margin_loss", "multi_margin_loss", "nll_loss", "norm",
    "normalize", "pdist", "poisson_nll_loss", "pow", "reciprocal", "rsqrt", "sinh", "smooth_l1_loss",
    "soft_margin_loss", "softmax", "softmin", "softplus", "renorm", "tan", "triplet_margin_loss", "__pow__",
    "__rpow__", "__rtruediv__", "rms_norm", "logsumexp", "binary_cross_entropy_with_logits", "nll_loss2d",
})  # fmt: skip
_TO_FLOAT32 = frozenset({"sum", "prod", "cumsum", "cumprod"})
"""Given sixteen bits, their result is float32, and no copy of their input is kept."""
_SIXTEEN = (torch.bfloat16, torch.float16)
_DROPOUTS = (F.dropout, torch.dropout)


class CudaFunctions(TorchFunctionMode):
    """Calls of PyTorch's functions, as a CUDA device would answer them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one call."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in _DROPOUTS:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            # the fused kernels keep a seed, no mask
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        if func is F.cross_entropy and torch.is_autocast_enabled("cpu") and _plain_cross_entropy(*args, **kwargs):
            with torch.autocast("cpu", enabled=False):
                return _cross_entropy(*args, **kwargs)
        if name in _TO_FLOAT32 and torch.is_autocast_enabled("cpu") and args and args[0].dtype in _SIXTEEN:
            if kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float32
            return func(*args, **kwargs)
        if name in _FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(torch.Tensor, _float32, (args, kwargs))
            with torch.autocast("cpu", enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _SIXTEEN else tensor


def _plain_cross_entropy(input: torch.Tensor, target: torch.Tensor, **given: Any) -> bool:  # noqa: A002
    """Of sixteen bits, with classes as targets, and no option but these."""
    options = {"ignore_index", "reduction"}
    return (
        input.dtype in _SIXTEEN
        and not target.is_floating_point()
        and all(name in options or not value for name, value in given.items())
    )


def _cross_entropy(
    input: torch.Tensor,  # noqa: A002 - PyTorch's own name
    target: torch.Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    **_: Any,
) -> torch.Tensor:
    """Under autocast the logarithms keep their sixteen bits; their loss takes a copy in float32."""
    logarithms = torch.log_softmax(input, 0 if input.dim() == 1 else 1, dtype=input.dtype)
    return F.nll_loss(logarithms.float(), target, ignore_index=ignore_index, reduction=reduction)


def _dropout(
    input: torch.Tensor,  # noqa: A002 - PyTorch's own name
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool | None = None,
) -> torch.Tensor:
    """CUDA's fused dropout: the output, and a mask of booleans for the backward pass."""
    on = training if train is None else train
    if not on or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


@contextlib.contextmanager
def like_cuda() -> Iterator[None]:
    """Behave like a CUDA device, as far as the sizes of tensors go."""
    supported, checkpoint = _foreach_utils._get_foreach_kernels_supported_devices, torch.utils.checkpoint.checkpoint
    types = optimizers._foreach_supported_types
    both = (_foreach_utils, optimizers)
    for module in both:
        vars(module)["_get_foreach_kernels_supported_devices"] = lambda: [*supported(), "cpu"]
    vars(optimizers)["_foreach_supported_types"] = [*types, FakeTensor]

    @functools.wraps(checkpoint)
    def checkpoint_with_habits(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # autograd recomputes from where function modes are off
        return checkpoint(_with_habits(function), *args, **kwargs)

    torch.utils.checkpoint.checkpoint = checkpoint_with_habits
    vars(modeling_utils)["checkpoint"] = checkpoint_with_habits
    asked = torch.is_autocast_enabled
    vars(torch)["is_autocast_enabled"] = lambda device="cpu": asked(device)
    try:
        with CudaFunctions():
            yield
    finally:
        for module in both:
            vars(module)["_get_foreach_kernels_supported_devices"] = supported
        vars(optimizers)["_foreach_supported_types"] = types
        vars(torch)["is_autocast_enabled"] = asked
        torch.utils.checkpoint.checkpoint = vars(modeling_utils)["checkpoint"] = checkpoint


def _with_habits(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def with_habits(*args: Any, **kwargs: Any) -> Any:
        active = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if any(isinstance(mode, CudaFunctions) for mode in active):
            return forward(*args, **kwargs)
        with CudaFunctions():
            return forward(*args, **kwargs)

    return with_habits


def attention_stand_ins() -> dict[Any, Any]:
    """What CUDA's fused attention holds beyond the CPU's, which keeps the same for the backward pass."""
    ops = torch.ops.aten
    return {
        ops._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
        ops.native_layer_norm_backward.default: _dense_gradient,
        ops._softmax_backward_data.default: _dense_gradient,
        ops._log_softmax_backward_data.default: _dense_gradient,
    }


def _copied_bytes(gradient: torch.Tensor) -> int:
    """What a kernel takes that reads a dense gradient: a copy of one that is not, such as that of a sum."""
    return 0 if gradient.is_contiguous() else gradient.numel() * gradient.element_size()


def _dense_gradient(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A backward kernel whose results live beside the copy of the gradient that it makes."""
    copied = _copied_bytes(args[0])
    if not copied:
        return func(*args, **kwargs)
    with recorder.holding(copied, name="a gradient made contiguous"):
        results = func(*args, **kwargs)
        for result in results if isinstance(results, tuple) else (results,):
            if result is not None:
                recorder.follow(result, func, args)
    return results


def _attention_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The backward pass with its accumulators, which live as long as it runs.

    16 bits: FlashAttention-2 adds up the query's gradient in float32, padded to blocks of 128 rows and 32 columns,
    keeps one float32 a row, and with grouped queries makes key's and value's gradients for every head first. 32
    bits: the memory-efficient kernel keeps one float32 a row, made of a product as large as the query.
    """
    query, key = args[1], args[2]
    batch, heads, rows, width = query.shape
    padded = -(-rows // 128) * 128
    held = [4 * batch * heads * padded]
    if query.dtype not in _SIXTEEN:  # the product of gradient and result, to be added up a row
        held += [4 * batch * heads * rows * width, 4 * batch * heads * rows]
    if args[0].stride(-1) != 1:
        held.append(_copied_bytes(args[0]))
    if query.dtype in _SIXTEEN:
        held.append(4 * batch * padded * heads * (-(-width // 32) * 32))
    if key.shape[1] != heads:
        held += [key.element_size() * batch * key.shape[2] * heads * width] * 2
    with recorder.holding(*held, name="attention's accumulators"):
        gradients = func(*args, **kwargs)
        for gradient in gradients:
            recorder.follow(gradient, func, args)  # they live beside the accumulators
    return gradients
