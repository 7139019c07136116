"""Which kind of work an operator or a kernel does, told by its name."""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal[
    "products", "attention", "elementwise", "optimizer", "copies", "collectives", "loader", "host", "unattributed"
]

WORDS: dict[Kind, str] = {
    "products": "matrix products and convolutions",
    "attention": "fused attention",
    "elementwise": "normalization, elementwise, reductions",
    "optimizer": "optimizer step",
    "copies": "copies and casts",
    "collectives": "collectives",
    "loader": "data loader",
    "host": "the host's own: Python and launches",
    "unattributed": "not told apart",
}
"""A row of the table each, in this order."""

_COLLECTIVE = re.compile(r"nccl|gloo|c10d")
_ATTENTION = re.compile(r"attention|flash|fmha|fused_sdp|flex_")
_COPY = re.compile(r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|_?pin_memory|_foreach_copy_)$|memcpy")
_BUS = re.compile(r"memcpy (htod|dtoh)")
_PRODUCT = re.compile(
    r"(^|[:_ ])(mm|bmm|addmm|addbmm|baddbmm|matmul|linear|einsum|mv|addmv|dot)($|[_ (<])|gemm|gemv|nvjet|cutlass"
    r"|convolution|conv[123]d|_mm$|_mm_|wgrad|dgrad"
)


def kind_of(name: str) -> Kind:
    """The kind of an operator (``aten::addmm``) or of a device's kernel (``ampere_bf16_s16816gemm_...``).

    What no name tells is elementwise: by far the most operators are, and they are bound by memory.

    >>> kind_of("aten::addmm"), kind_of("aten::_scaled_dot_product_flash_attention"), kind_of("aten::native_layer_norm")
    ('products', 'attention', 'elementwise')
    >>> kind_of("Memcpy HtoD (Pinned -> Device)"), kind_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL")
    ('copies', 'collectives')
    """
    low = name.lower()
    kinds: tuple[tuple[re.Pattern[str], Kind], ...] = (
        (_COLLECTIVE, "collectives"),
        (_ATTENTION, "attention"),
        (_COPY, "copies"),
        (_PRODUCT, "products"),
    )
    return next((kind for pattern, kind in kinds if pattern.search(low)), "elementwise")


def is_bus(kernel: str) -> bool:
    """Whether a device's event moves bytes between host and device."""
    return _BUS.search(kernel.lower()) is not None


def is_loader(name: str) -> bool:
    """Whether a range is that of a ``DataLoader``, as torch names it."""
    return name.startswith("enumerate(DataLoader")


def is_optimizer(name: str) -> bool:
    """Whether a range is that of an optimizer, as torch names it."""
    return name.startswith(("Optimizer.step#", "Optimizer.zero_grad#"))


def is_operator(name: str) -> bool:
    """Whether a range of the host is an operator (``library::name``) and not bookkeeping of autograd or of Python."""
    return "::" in name and not name.startswith(("autograd::", "torch::autograd"))
