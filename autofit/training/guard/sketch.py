"""Sketches of tensors: a few numbers each, from which the distance of two tensors is estimated without storing them.

A count sketch (Charikar, Chen and Farach-Colton, 2002): each element is added to one of :data:`SIZE` sums under a
random sign. Sums and signs come from a hash of the element's place and the parameter's name, so that they are the same
on every device and in every process. A sketch is linear, and the squared norm of a sketch has the tensor's squared
norm as its mean and at most ``2 / SIZE`` as its relative variance when no single element dominates: a norm is known to
an eighth. Costs one pass over the tensor, a few megabytes, and :data:`SIZE` numbers a parameter.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SIZE = 32
_PIECE = 1 << 20

Sketch = tuple[float, ...]
"""Of ``SIZE`` numbers."""


def sketch(tensor: torch.Tensor, name: str) -> Sketch:
    """The sketch of a tensor of any shape and device, under a parameter's name."""
    import torch

    flat = tensor.detach().reshape(-1)
    sums = torch.zeros(SIZE, dtype=torch.float64, device=flat.device)
    seed = zlib.crc32(name.encode()) << 31
    for begin in range(0, flat.numel(), _PIECE):
        piece = flat[begin : begin + _PIECE]
        code = torch.arange(begin, begin + piece.numel(), device=flat.device)
        code += seed
        for factor in (-7046029254386353131, -4658895280553007687):  # of splitmix64's kind: odd, and high bits move
            code *= factor
            code ^= code >> 29
        signed = piece.double() * ((code & 1) * 2 - 1)
        sums.index_add_(0, (code >> 8) & (SIZE - 1), signed)
    return tuple(sums.tolist())


def minus(one: Sequence[float], other: Sequence[float]) -> Sketch:
    """The sketch of the difference of two tensors."""
    return tuple(a - b for a, b in zip(one, other, strict=True))


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """The estimated norm of the difference of two tensors."""
    return math.dist(one, other)
