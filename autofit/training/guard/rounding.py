"""Monte Carlo arithmetic: the same training with its matrix products rounded at random to a shorter mantissa.

How far a result moves when its operands are rounded at random is how far an honest implementation in that format may
lie from the float32 one. Parker, "Monte Carlo Arithmetic" (UCLA CSD-970002, 1997); Denis et al., "Verificarlo" (arXiv
1509.01347). Rounded are the float32 operands and results of matrix products, convolutions and fused attention, forward
and backward, which are what autocast runs in 16 bits and what TF32 shortens.

An operand ``x`` becomes one of its two neighbours of that mantissa, the nearer one more probably. The direction is a
hash of ``x`` and of a seed and not a new random number: a format rounds a value the same way each time, so that errors
of a weight do not average out over tokens and micro-steps. The mean square error is twice that of rounding to nearest.

Optimizer state in fewer than 32 bits is rounded at random between steps, as block-wise dynamic codes are spaced: in
blocks of 256, relative to the block's largest value, with one bit less for each decade below it (Dettmers et al.,
arXiv 2110.02861).

PyTorch's LayerNorm for a CPU adds the gradients of its weights up in its rows' own format, a term at a time (2.13): of
8,192 rows in bfloat16 a quarter of a bias' gradient is lost. Where a plan runs it so, that kernel gives them here, too.

Not covered: elementwise operators that autocast runs in 16 bits, and the smaller range of float16 and float8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MANTISSA = 23
"""Bits of float32's, without the leading one."""
_BLOCK, _LEAST_STATE = 256, 4096
"""Elements that share a scale; those of a parameter below which its state stays in 32 bits (bitsandbytes, torchao)."""
_PIECE = 1 << 22
_PRODUCTS = (
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "convolution", "convolution_backward",
    "_grouped_mm", "mkldnn_linear", "_scaled_dot_product", "_flash_attention", "_efficient_attention",
)  # fmt: skip
"""Operators, or the beginnings of their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """What is rounded at random.

    Attributes:
        product_bits: Of the mantissa, in operands and results of matrix products.
        state_bits: In all, of a number of the optimizer's state between its steps.
        seed: Of the directions.
        norm_dtype: Of the rows that LayerNorm's kernel for a CPU gets.
    """

    product_bits: int
    state_bits: int
    seed: int
    norm_dtype: str = "float32"


@contextlib.contextmanager
def rounded(rounding: Rounding) -> Iterator[None]:
    """Round the products of this process, and its optimizers' state, for a while."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def shorten(optimizer: Any, *_: Any) -> None:
        for state in optimizer.state.values():
            for value in state.values():
                if getattr(value, "ndim", 0) > 0 and value.numel() >= _LEAST_STATE:
                    value.copy_(coded_at_random(value, rounding.state_bits, rounding.seed))

    with contextlib.ExitStack() as stack:
        if rounding.state_bits < 32:
            stack.callback(register_optimizer_step_post_hook(shorten).remove)
        stack.enter_context(_product_mode(rounding))
        yield


def coded_at_random(tensor: torch.Tensor, bits: int, seed: int) -> torch.Tensor:
    """A tensor whose values are those of a dynamic code of so many bits, the upper or the lower one by chance."""
    import torch

    generator = torch.Generator(tensor.device).manual_seed(seed)
    flat = torch.nn.functional.pad(tensor.detach().reshape(-1), (0, -tensor.numel() % _BLOCK)).view(-1, _BLOCK)
    scale = flat.abs().amax(1, keepdim=True).clamp_min(torch.finfo(flat.dtype).tiny)
    share = flat / scale
    decade = torch.floor(-torch.log10(share.abs().clamp_min(10.0**-bits))).clamp_(0, bits - 2)
    spacing = 0.9 * 10.0**-decade / 2.0 ** (bits - 2 - decade)
    code = torch.floor(share / spacing + torch.rand(share.shape, generator=generator, device=share.device))
    return (code * spacing * scale).view(-1)[: tensor.numel()].view_as(tensor)


def rounded_at_random(tensor: torch.Tensor, bits: int, seed: int) -> torch.Tensor:
    """A float32 tensor whose values have so many bits of mantissa; a hash of each value says up or down."""
    import torch

    out = tensor.detach().clone()
    mask = (1 << (MANTISSA - bits)) - 1
    flat = out.as_strided((out.numel(),), (1,), out.storage_offset()).view(torch.int32)
    for piece in flat.split(_PIECE):  # type: ignore[no-untyped-call]
        noise = piece * 1540483477
        noise += 97 * seed + 1
        noise ^= noise >> 15
        noise *= 668265263
        noise ^= noise >> 13
        noise &= mask
        piece.add_(noise).bitwise_and_(~mask)
    return out


def _product_mode(rounding: Rounding) -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    def shorten(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or value.numel() == 0:
            return value
        return rounded_at_random(value, rounding.product_bits, rounding.seed)

    class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            name = func.overloadpacket.__name__
            if name == "native_layer_norm_backward" and rounding.norm_dtype != "float32":
                return _with_sums_in(getattr(torch, rounding.norm_dtype), func, args)
            if not name.startswith(_PRODUCTS):
                return func(*args, **(kwargs or {}))
            attention, backward = "attention" in name, "backward" in name
            # behind them stand masks, sums of exponentials and the like
            operands = 4 if attention and backward else 3
            kwargs, written = kwargs or {}, _written(func, args, kwargs or {})
            ids = {id(one) for one in written}
            args = (*(one if id(one) in ids else shorten(one) for one in args[:operands]), *args[operands:])
            result = func(*args, **kwargs)
            for one in written:  # where its caller looks for it
                one.copy_(shorten(one))
            if written:
                return result
            if not isinstance(result, tuple | list):
                return shorten(result)
            results = 1 if attention and not backward else 3
            return (*(shorten(one) for one in result[:results]), *result[results:])

    return Products()  # type: ignore[no-untyped-call]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes its result into: ``addmm_``'s first, ``mm``'s ``out``."""
    if not func._schema.is_mutable:  # noqa: SLF001 - public in C++
        return []
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs  # noqa: SLF001
    writes = (one for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write)  # noqa: SLF001
    return [given[one.name] for one in writes if one.name in given]


def _with_sums_in(dtype: Any, backward: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The backward pass of LayerNorm, with the gradients of its weights as the kernel adds them up in a format."""
    gradient, rows, *rest = args
    summed = backward(gradient.to(dtype), rows.to(dtype), *rest)[1:]
    return backward(*args)[0], *summed
