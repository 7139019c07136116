"""What CUDA does otherwise than the CPU, put in its place while a trace runs on a fake CPU.

============================  =====================================================================================
autocast                      CUDA computes more operators in float32 than the CPU does: its own list is followed
dropout                       one fused kernel that keeps a mask of a byte an element
attention                     fused also with dropout; the scores are made where no fused kernel takes the call
autocast, asked for           without a device, PyTorch answers for CUDA
for-each kernels              the default of optimizers and of gradient clipping
============================  =====================================================================================

Sources: ``torch/docs/source/amp.md`` and ``aten/src/ATen/autocast_mode.h`` (lists); ``aten/src/ATen/native/
Dropout.cpp``. Each has a test on a device that compares it with the real one. What kernels take for themselves:
:mod:`autofit.costmodel.tracing.emulation.cuda_kernels`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_map_only
from transformers import modeling_utils

from autofit.costmodel.tracing.emulation import cudnn
from autofit.costmodel.tracing.emulation.cuda_kernels import SIXTEEN as _SIXTEEN
from autofit.costmodel.tracing.emulation.cuda_kernels import fused_attention

_FLOAT32 = frozenset({
    "cross_entropy", "cross_entropy_loss",
    "acos", "asin", "cosh", "cosine_embedding_loss", "cdist", "cosine_similarity", "dist", "erfinv", "exp", "expm1",
    "group_norm", "hinge_embedding_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10", "log_softmax", "log1p",
    "log2", "margin_ranking_loss", "mse_loss", "multilabel_margin_loss", "multi_margin_loss", "nll_loss", "norm",
    "normalize", "pdist", "poisson_nll_loss", "pow", "reciprocal", "rsqrt", "sinh", "smooth_l1_loss",
    "soft_margin_loss", "softmax", "softmin", "softplus", "renorm", "tan", "triplet_margin_loss", "__pow__",
    "__rpow__", "__rtruediv__", "rms_norm", "logsumexp", "binary_cross_entropy_with_logits", "nll_loss2d",
    "huber_loss", "frobenius_norm", "nuclear_norm", "interpolate", "upsample", "upsample_nearest", "upsample_bilinear",
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
})  # fmt: skip
"""What autocast computes in float32 on CUDA, by the names that Python has for it (``ATen/autocast_mode.h``)."""
_TO_FLOAT32 = frozenset({"sum", "prod", "cumsum", "cumprod", "linalg_vector_norm", "linalg_matrix_norm"})
"""Given sixteen bits, their result is float32, and no copy of their input is kept."""
_ALIGNED = 8
"""Numbers; ``preprocess_mask`` in ``aten/src/ATen/native/transformers/attention.cpp``."""
_AMPERE = (8, 0)
_DROPOUTS = (F.dropout, torch.dropout)


class CudaFunctions(TorchFunctionMode):
    """Calls of PyTorch's functions, as a CUDA device would answer them.

    Args:
        capability: Of :func:`~autofit.costmodel.tracing.trace_request.kernels_of`.
    """

    def __init__(self, capability: tuple[int, int] = _AMPERE) -> None:
        super().__init__()
        self.capability = capability

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one call."""
        name = _habit(func)
        if name is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(self.capability, *args, **kwargs)
        if func is F.cross_entropy and torch.is_autocast_enabled("cpu") and _plain_cross_entropy(*args, **kwargs):
            with torch.autocast("cpu", enabled=False):
                return _cross_entropy(*args, **kwargs)
        sums = name in _TO_FLOAT32 and torch.is_autocast_enabled("cpu") and kwargs.get("dtype") is None
        if sums and args and args[0].dtype in _SIXTEEN:
            kwargs["dtype"] = torch.float32
        averages = kwargs.get("mode") == "area"  # of which autocast knows nothing
        if name in _FLOAT32 and torch.is_autocast_enabled("cpu") and not averages:
            args, kwargs = tree_map_only(torch.Tensor, _float32, (args, kwargs))
            with torch.autocast("cpu", enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@functools.cache
def _habit(func: Any) -> str | None:
    """The name of a function that CUDA may answer otherwise; ``None`` for most."""
    name: str = getattr(func, "__name__", "")
    own = (*_DROPOUTS, F.scaled_dot_product_attention, F.cross_entropy)
    return name if name in _FLOAT32 or name in _TO_FLOAT32 or func in own else None


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


def _attention(  # noqa: PLR0917 - PyTorch's own order
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """By the kernel that CUDA chooses; the fused ones keep a seed where dropout has a mask."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    fused = fused_attention(query, key, value, attn_mask, dtype=dtype, capability=capability, dropout=dropout_p)
    if fused is None:
        return attention_by_scores(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if fused == "cudnn":
        query, key, value = (each.to(dtype) for each in (query, key, value))
        return cudnn.attention(query, key, value, attn_mask, is_causal=is_causal, scale=options.get("scale"))
    learned = attn_mask is not None and attn_mask.requires_grad
    if value.shape[-1] != query.shape[-1] or learned:  # which the CPU's fused kernel does not do
        query, key, value = (each.to(dtype) for each in (query, key, value))
        mask = _added(attn_mask, dtype).expand(*query.shape[:3], key.shape[2]) if attn_mask is not None else None
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        result: torch.Tensor = efficient(query, key, value, mask, True, 0.0, is_causal, scale=options.get("scale"))[0]
        return result
    return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, **options)


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as the memory-efficient kernel adds it: its rows are padded where they are no multiple of 8 long."""
    added = mask.to(dtype) if mask.is_floating_point() else torch.zeros_like(mask, dtype=dtype)
    length = added.shape[-1]
    return F.pad(added, (0, -length % _ALIGNED))[..., :length] if length % _ALIGNED else added


def attention_by_scores(*args: Any, **options: Any) -> torch.Tensor:
    """Attention that makes its scores; the recorder knows it by its name, and that the mask is added in place."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **options)


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
def like_cuda(capability: tuple[int, int] = _AMPERE) -> Iterator[None]:
    """Behave like a CUDA device of this compute capability, as far as the sizes of tensors go."""
    supported, checkpoint = _foreach_utils._get_foreach_kernels_supported_devices, torch.utils.checkpoint.checkpoint
    both = (_foreach_utils, optimizers)
    types = [module._foreach_supported_types for module in both]
    for module, before in zip(both, types, strict=True):
        vars(module)["_get_foreach_kernels_supported_devices"] = lambda: [*supported(), "cpu"]
        vars(module)["_foreach_supported_types"] = [*before, FakeTensor]

    @functools.wraps(checkpoint)
    def checkpoint_with_habits(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # autograd recomputes from where function modes are off
        return checkpoint(_with_habits(function, capability), *args, **kwargs)

    torch.utils.checkpoint.checkpoint = checkpoint_with_habits
    vars(modeling_utils)["checkpoint"] = checkpoint_with_habits
    asked = torch.is_autocast_enabled
    vars(torch)["is_autocast_enabled"] = lambda device="cpu": asked(device)
    try:
        with CudaFunctions(capability):
            yield
    finally:
        for module, before in zip(both, types, strict=True):
            vars(module)["_get_foreach_kernels_supported_devices"] = supported
            vars(module)["_foreach_supported_types"] = before
        vars(torch)["is_autocast_enabled"] = asked
        torch.utils.checkpoint.checkpoint = vars(modeling_utils)["checkpoint"] = checkpoint


def _with_habits(forward: Callable[..., Any], capability: tuple[int, int]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def with_habits(*args: Any, **kwargs: Any) -> Any:
        active = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if any(isinstance(mode, CudaFunctions) for mode in active):
            return forward(*args, **kwargs)
        with CudaFunctions(capability):
            return forward(*args, **kwargs)

    return with_habits
