"""Whether a script's loss is a sum over the rows of its micro-batch: then its gradients grow with the micro-batch."""

from __future__ import annotations

from typing import Any

_SUMS = (
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
    return _SUMS if _sums(getattr(loss, "grad_fn", None), rows) else None


def _sums(node: Any, rows: int | None) -> bool:
    if node is None:
        return False
    if hasattr(node, "_saved_reduction"):
        return bool(node._saved_reduction == _SUM)  # noqa: SLF001 - PyTorch tells it nowhere else
    if node.name() == "SumBackward0":
        return rows != 1 and bool(node._saved_self_sym_sizes[:1] == (rows,))  # noqa: SLF001 - nor this
    terms = [one for one, _ in node.next_functions if one is not None]
    return node.name() in _THROUGH and bool(terms) and all(_sums(one, rows) for one in terms)
