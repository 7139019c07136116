"""How a script's loss is made of the rows of its micro-batch: a sum grows with it, and so do its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any

SUMS = (
    "its loss is a sum over the rows of a micro-batch, and Accelerate divides it by the number of micro-batches alone: "
    "its gradients would grow with the micro-batch"
)
_SUM = 2
"""``torch.nn._reduction.get_enum("sum")``."""
_THROUGH = {"AddBackward0", "SubBackward0", "MulBackward0", "NegBackward0", "ToCopyBackward0"}
"""What makes a sum of sums; what is divided may be a mean."""


def sums_rows(loss: Any, loader: Any) -> str | None:
    """Why the split is the script's own where all terms of its loss are sums over rows that nothing divides, in words.

    A sum of the parameters beside a mean over rows, such as a penalty of their size, is none. Of a loader of single
    rows only PyTorch's own losses tell.

    Args:
        loss: With what it was computed by.
        loader: That gave the rows.
    """
    rows = getattr(loader, "batch_size", None)
    return SUMS if _sums(getattr(loss, "grad_fn", None), rows) else None


def _sums(node: Any, rows: int | None) -> bool:
    if node is None:
        return False
    if hasattr(node, "_saved_reduction"):
        return bool(node._saved_reduction == _SUM)  # noqa: SLF001 - PyTorch tells it nowhere else
    if node.name() == "SumBackward0":
        return rows != 1 and bool(node._saved_self_sym_sizes[:1] == (rows,))  # noqa: SLF001 - nor this
    terms = [one for one, _ in node.next_functions if one is not None]
    return node.name() in _THROUGH and bool(terms) and all(_sums(one, rows) for one in terms)


_CURVED = {
    "Sqrt", "Rsqrt", "Log", "Log1P", "Log2", "Log10", "Exp", "Exp2", "Expm1", "Pow", "Reciprocal", "Abs", "Tanh",
    "Sigmoid", "LogSigmoid", "Softplus", "Norm", "LinalgVectorNorm", "Std", "Var", "Logsumexp", "Prod",
}  # fmt: skip
"""What makes of numbers that rows were put together in another one, which no mean of the rows' own is."""
_OF_TWO = {"Mul", "Div", "Maximum", "Minimum"}
"""What does so where both of its terms are made of rows."""


def takes_rows_together(loss: Any, rows: int | None) -> bool:
    """Whether a loss is a curved function of what its rows were put together in, such as the root of their mean.

    Args:
        loss: With what it was computed by.
        rows: Of a micro-batch; ``None`` tells nothing.
    """
    nodes, seen = [getattr(loss, "grad_fn", None)], set()
    while nodes and rows is not None:
        node = nodes.pop()
        if node is None or node in seen or _shape_of(node) != ():
            continue
        seen.add(node)
        terms = [one for one, _ in node.next_functions if one is not None]
        name = node.name().partition("Backward")[0]
        if (name in _CURVED and _has_rows(node, rows)) or (
            name in _OF_TWO and len(terms) > 1 and all(_has_rows(one, rows) for one in terms)
        ):
            return True
        nodes += terms
    return False


def _has_rows(node: Any, rows: int) -> bool:
    """Whether what a node was computed by is of a micro-batch's rows, and not of parameters alone."""
    nodes, seen = [node], {node}
    while nodes:
        one = nodes.pop()
        if (_shape_of(one) or ())[:1] == (rows,) and one.next_functions:
            return True
        nodes += (new := {then for then, _ in one.next_functions if then is not None} - seen)
        seen |= new
    return False


def _shape_of(node: Any) -> tuple[int, ...] | None:
    """The shape of what a node has given; ``None`` where it doesn't tell."""
    given = getattr(node, "_input_metadata", ())
    return tuple(given[0].shape) if given else None


COMBINED = ((0, 1, 2), (0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2))
"""Which of three parts of a micro-batch a loss is asked of, one after the other; of all of them twice."""


class Judged(Enum):
    """What the loss of several rows is."""

    MEAN = "a mean of the rows' own"
    WEIGHTED = "a mean that counts one row for more than another"
    SUM = "a sum of the rows' own"
    TOGETHER = "neither: it takes rows together"


def unsteady(losses: Sequence[float], rounded: float) -> bool:
    """Whether the loss of the same rows has changed, of values as in :func:`judged`."""
    both, again = losses[0], losses[-1]
    return math.isfinite(both - again) and abs(both - again) > _near(losses, rounded)


def _near(losses: Sequence[float], rounded: float) -> float:
    """How far apart two losses may be that are the same."""
    return 3 * rounded * max(map(abs, losses))


def judged(losses: Sequence[float], rounded: float) -> Judged | None:
    """What a loss is, by its values of parts of a micro-batch.

    Args:
        losses: Of the parts in ``COMBINED``.
        rounded: By how much of itself a loss may differ where it is the same.

    Returns:
        ``None`` where they don't tell: the loss of the same rows is another one each time, or no number.
    """
    both, *parts, ab, bc, ac, again = losses
    a, b, c = parts
    near = _near(losses, rounded)
    if not all(map(math.isfinite, losses)) or not near or abs(both - again) > near:
        return None
    beside = [a + b - ab, b + c - bc, a + c - ac, (a + b + c - both) / 2]  # of a sum, what is added to it
    middle = sum(beside) / len(beside)
    alone = [one for one in parts if abs(one - middle) > 7 * near]  # a single one is all of a mean as of a sum
    if max(abs(one - middle) for one in beside) <= near and alone:
        return Judged.SUM if len(alone) > 1 else None
    pairs = ((ab, (a, b)), (bc, (b, c)), (ac, (a, c)), (both, parts))
    if any(not min(of) - near <= one <= max(of) + near for one, of in pairs):
        return Judged.TOGETHER
    return _weighted(a, b, c, ab=ab, ac=ac, both=both, near=near)


def _weighted(a: float, b: float, c: float, *, ab: float, ac: float, both: float, near: float) -> Judged:
    """Whether parts weigh the same in a mean, and as much among three as among two."""
    apart = min(abs(a - b), abs(a - c), abs(ab - b), abs(ac - c))
    if apart <= 10 * near:
        return Judged.MEAN
    second, third = (ab - a) / (b - ab), (ac - a) / (c - ac)
    expected = (a + second * b + third * c) / (1 + second + third)
    doubt = near * (1 + (max(a, b, c) - min(a, b, c)) / apart)
    if abs(both - expected) > 3 * doubt:
        return Judged.TOGETHER
    return Judged.MEAN if max(abs(second - 1), abs(third - 1)) <= 3 * near / apart else Judged.WEIGHTED
