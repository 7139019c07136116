"""What a recorder writes down of each operator: its kind, shape, arithmetic and bytes, each shape once a segment."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.utils.flop_counter import flop_registry

from autofit.costmodel.seconds.collectives import CollectiveKind, collective
from autofit.costmodel.seconds.operator_time import COLUMNS, Arithmetic, Layout, Operator, TimedKind, row_of
from autofit.costmodel.tracing.timeline import Floats
from autofit.costmodel.tracing.work import counts_twice

_CODES = 4
"""Columns that are no sizes."""
_MOVED = COLUMNS.index("moved_bytes")
_ARITHMETICS: dict[torch.dtype, Arithmetic] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_KINDS: tuple[tuple[TimedKind, tuple[str, ...]], ...] = (
    ("nothing", ("empty", "new_empty", "detach", "alias", "_local_scalar_dense", "set_", "resize_", "record_stream")),
    ("attention", ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")),
    ("quantized", ("optimizer_update_8bit",)),
    ("optimizer", ("_foreach_", "_fused_", "optimizer_update")),
    ("elementwise", ("normal",)),
    ("norm", ("native_layer_norm", "native_group_norm", "native_batch_norm", "cudnn_batch_norm", "rms_norm")),
    ("softmax", ("_softmax", "_log_softmax", "softmax")),
    ("gather", ("embedding", "index", "gather", "scatter", "take", "put", "nll_loss", "sort", "topk", "nonzero")),
    ("reduction", (
        "sum", "mean", "amax", "amin", "max", "min", "var", "std", "norm", "linalg_vector_norm", "argmax", "cumsum",
        "logsumexp", "any", "all", "prod",
    )),
    ("copy", ("_to_copy", "clone", "copy", "cat", "stack", "contiguous", "constant_pad")),
    ("dequantize", ("dequantize",)),
)  # fmt: skip
"""By how an operator's name begins; the first that fits. All else is elementwise."""
_NOT_FOREACH = ("_fused_rms_norm", "_fused_layer_norm", "_fused_dropout", "_fused_sdp")
_GATHERS = ("embedding", "index_select", "index", "gather", "take")
_OVERWRITES = frozenset({"copy_", "_foreach_copy_"})
_KEPT = frozenset({"grads"})
"""Written by no kernel, though the schema of the fused optimizers says so: only a gradient scaler's are."""
_WRITES_ONLY = frozenset({
    "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "zeros", "ones", "full", "arange", "zeros_like", "ones_like",
    "full_like", "new_zeros", "new_ones", "new_full", "rand_like", "randn_like",
})  # fmt: skip
_IMAGES = 4
"""Dimensions of images, and of what convolves them."""
_PICKS = ("nll_loss",)
"""Reads of its first tensor only what its second points at; what it makes it writes."""


class OperatorTable:
    """Operators of a run by segment.

    Args:
        rows: The micro-batch, if sizes that it divides grow with it.
    """

    def __init__(self, rows: int | None) -> None:
        self.rows = rows
        self._index: dict[tuple[float, ...], int] = {}
        self._calls: dict[tuple[int, int], float] = {}

    def add(self, segment: int, one: Operator, moved: Sequence[float], calls: float = 1.0) -> None:
        """Write down an operator, and the bytes of each tensor that make up its ``moved_bytes``."""
        self.call(segment, self.index_of(one, moved), calls)

    def index_of(self, one: Operator, moved: Sequence[float]) -> int:
        """The row of an operator; a new one where it has none."""
        fixed = float(sum(size for size in moved if not self.rows or size % self.rows))
        return self._index.setdefault((*row_of(one), fixed), len(self._index))

    def call(self, segment: int, index: int, calls: float = 1.0) -> None:
        """The operator of a row is called in a segment."""
        self._calls[segment, index] = self._calls.get((segment, index), 0.0) + calls

    def repeat(self, segment: int, later: int) -> None:
        """What was called in a segment is called in a later one."""
        for (place, index), calls in [*self._calls.items()]:
            if place == segment:
                self.call(later, index, calls)

    def arrays(self, since: int, past: int) -> tuple[Floats, Floats, Floats]:
        """Rows at zero and what a row of the micro-batch adds; and calls from ``since`` on, see :attr:`Tape.calls`."""
        found = np.array(list(self._index), dtype=np.float64).reshape(-1, len(COLUMNS) + 1)
        sizes, fixed = found[:, :-1], found[:, -1]
        per_row = np.zeros_like(sizes)
        if self.rows is not None:
            grows = (sizes % self.rows == 0) & (sizes > 0)
            grows[:, :_CODES] = False
            per_row = np.where(grows, sizes / self.rows, 0.0)
            # a sum of what grows and what does not, such as of activations and weights
            per_row[:, _MOVED] = (sizes[:, _MOVED] - fixed) / self.rows
            sizes = np.where(grows, 0.0, sizes)
            sizes[:, _MOVED] = fixed
        calls = [(place - since, index, n, 0) for (place, index), n in self._calls.items() if since <= place < past]
        called = np.array(calls, dtype=np.float64).reshape(-1, 4)
        if self.rows is not None:  # what does not grow and is called as often as there are rows: once for each
            fixed = np.all(per_row == 0, axis=1)[called[:, 1].astype(np.int64)]
            each = fixed & (called[:, 2] % self.rows == 0)
            called[:, 3] = np.where(each, called[:, 2] / self.rows, 0.0)
            called[:, 2] = np.where(each, 0.0, called[:, 2])
        return sizes, per_row, called


_COLLECTIVES: dict[str, CollectiveKind] = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "permute",
}
"""By PyTorch's names of their operators, the functional ones below; a ring alone sends all to all, to one each."""


def collective_of(func: Any, args: tuple[Any, ...], outputs: list[Any], *, waits: bool) -> Operator | None:
    """What a collective sends, within which group, and whether the next operator waits for it.

    ``None`` for what sends no tensors, such as a wait.
    """
    kind = _COLLECTIVES.get(func._schema.name.rpartition("::")[2])
    if kind is None:
        return None
    group = _group(args) if func.namespace == "c10d" else _named([one for one in args if isinstance(one, str)][-1])
    ranks = dist.get_process_group_ranks(group)
    tensors = [one for value in (*args, *outputs) for one in _each(value)]
    payload = max(one.nbytes for one in tensors)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return collective(kind, float(payload), len(ranks), stride, waits=waits)


def _named(name: Any) -> Any:
    """The process group that a functional collective names in its last argument."""
    return c10d._resolve_process_group(name)  # type: ignore[attr-defined]


def _group(args: tuple[Any, ...]) -> Any:
    """The process group among the arguments of an operator; the reduction is an object, too."""
    for one in args:
        if isinstance(one, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):
                return dist.ProcessGroup.unbox(one)
    return dist.group.WORLD


def operator_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Any], flops: float
) -> tuple[Operator, list[float]]:
    """What an operator is, from what it was called with and what it made; and the bytes of each tensor it moves."""
    moved = _moved_by(func, args, kwargs, outputs)
    one = _operator_of(func, args, kwargs, outputs, flops)
    return (one, []) if one.kind == "nothing" else (replace(one, moved_bytes=sum(moved)), moved)


def calls_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Any], flops: float, *, groups: bool
) -> tuple[Operator, list[float], float]:
    """As :func:`operator_of`, and how often the device does it: experts are multiplied one after the other.

    Those in bfloat16 are one kernel where ``groups``: on cards of compute capability 9.x and 10.x. Source:
    ``_grouped_mm_cuda`` in ``GroupedBlas.cpp`` (torch 2.13).
    """
    one, moved = operator_of(func, args, kwargs, outputs, flops)
    if func is not torch.ops.aten._grouped_mm.default or (groups and one.arithmetic == "bf16") or one.batch == 0:
        return one, moved, 1.0
    count = one.batch
    each = replace(one, batch=1.0, flops=one.flops / count, moved_bytes=one.moved_bytes / count)
    return each, [size / count for size in moved], count


def is_convolutional(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether networks of convolutions alone have such an operator: a batch norm, a depthwise convolution of images."""
    if func is torch.ops.aten.convolution.default:
        return args[1].dim() == _IMAGES and int(args[-1]) > 1
    return "batch_norm" in func._schema.name


def _moved_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Any]) -> list[float]:
    tensors = [one for value in (*args, *kwargs.values()) for one in _each(value)]
    return _moved(func, args, tensors, [one for one in outputs if isinstance(one, torch.Tensor)])


def _operator_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Any], flops: float
) -> Operator:
    name = func._schema.name.rpartition("::")[2]
    kind = _kind(name, func)
    tensors = [one for value in args for one in _each(value)] + [
        one for value in kwargs.values() for one in _each(value)
    ]
    made = [one for one in outputs if isinstance(one, torch.Tensor)]
    first = tensors[0] if tensors else made[0] if made else None
    floating = next((one for one in (*tensors, *made) if one.dtype.is_floating_point), first)
    arithmetic: Arithmetic = "fp32" if floating is None else _ARITHMETICS.get(floating.dtype, "fp32")
    backward = "backward" in name
    if kind == "nothing" or first is None:
        return Operator(kind="nothing")
    if kind == "product":
        factors = [one for value in args for one in _each(value)]  # not what the result is written to
        batch, m, n, k, layout = _product(name, factors, made)
        if batch * m * n * k == 0:
            return Operator(kind="nothing")
        if "addmm" in name:
            arithmetic = _ARITHMETICS.get(factors[1].dtype, "fp32")  # what is added may have another type
        return Operator(
            kind=kind, arithmetic=arithmetic, layout=layout, backward=backward, flops=flops,
            batch=batch, m=m, n=n, k=k,
        )  # fmt: skip
    if kind == "attention":
        query, key = (tensors[1], tensors[2]) if backward else (tensors[0], tensors[1])
        batch, heads, m, width = query.shape
        return Operator(
            kind=kind, arithmetic=arithmetic, layout="tt" if "efficient" in name else "nn", backward=backward,
            flops=flops if counts_twice(func, args, kwargs, m, key.shape[-2]) else 2 * flops,
            batch=batch * heads, m=m, n=key.shape[-2], k=width,
        )  # fmt: skip
    n = float(max((one.numel() for one in (made or tensors)), default=0))
    m = 1.0
    if kind in {"norm", "softmax", "reduction"}:
        widest = max(tensors, key=torch.Tensor.numel)
        n = _width(name, args, widest)
        m = widest.numel() / max(n, 1.0)
    return Operator(kind=kind, arithmetic=arithmetic, backward=backward, flops=flops, m=m, n=n)


def _kind(name: str, func: Any) -> TimedKind:
    if func._overloadpacket in flop_registry or name == "_grouped_mm":
        return "attention" if "attention" in name else "product"
    for kind, beginnings in _KINDS:
        if name.startswith(beginnings) and not (kind == "optimizer" and name.startswith(_NOT_FOREACH)):
            return kind
    if "rms_norm" in name or "layer_norm" in name:
        return "norm"
    return "elementwise"


def _each(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (list, tuple)) else (value,)
    return [one for one in values if isinstance(one, torch.Tensor)]


def _held(tensor: torch.Tensor) -> float:
    """Bytes of a tensor; of one that is expanded, those behind it."""
    return float(min(tensor.nbytes, tensor.untyped_storage().nbytes()))


def _moved(func: Any, args: tuple[Any, ...], tensors: list[torch.Tensor], made: list[torch.Tensor]) -> list[float]:
    """Bytes of each tensor read or written; of a table whose rows are chosen by index, those rows alone."""
    name = func._schema.name.rpartition("::")[2]
    read, written = tensors, made
    if func._schema.is_mutable:
        writable = [
            value
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name not in _KEPT
        ]
        written = [one for value in writable for one in _each(value)]
    if name in _WRITES_ONLY:
        read = []
    elif name in _OVERWRITES:
        read = tensors[1:]
    elif name.startswith(_PICKS):
        read = tensors[-1:]
    elif name.startswith(_GATHERS) and read:
        read = sorted(read, key=_held)[:-1] + made
    return [_held(one) for one in (*read, *written)]


def _product(
    name: str, tensors: list[torch.Tensor], made: list[torch.Tensor]
) -> tuple[float, float, float, float, Layout]:
    if "convolution" in name:
        result, weight = (tensors[0], tensors[2]) if "backward" in name else (made[0], tensors[1])
        inner = weight.numel() / weight.shape[0]
        return 1.0, result.numel() / result.shape[1], float(result.shape[1]), inner, "nt"
    if name == "_grouped_mm":
        return _of_experts(tensors[0], tensors[1], made[0])
    pair = [one for one in tensors if one.dim() >= 2][-2:]  # a bias stands before them
    if len(pair) < 2:
        return 0.0, 0.0, 0.0, 0.0, "nn"
    left, right = pair
    batch = left.shape[0] if left.dim() == 3 else 1
    return float(batch), float(left.shape[-2]), float(right.shape[-1]), float(left.shape[-1]), _layout(left, right)


def _of_experts(
    left: torch.Tensor, right: torch.Tensor, made: torch.Tensor
) -> tuple[float, float, float, float, Layout]:
    """Products of all experts, which the rows, the columns or what is summed over are divided among, each alike."""
    experts = next(one.shape[0] for one in (left, right, made) if one.dim() == 3)
    m, n, k = float(left.shape[-2]), float(right.shape[-1]), float(left.shape[-1])
    if left.dim() == right.dim() == 2:
        k /= experts
    elif left.dim() == 2:
        m /= experts
    elif right.dim() == 2:
        n /= experts
    return float(experts), m, n, k, _layout(left, right)


def _layout(left: torch.Tensor, right: torch.Tensor) -> Layout:
    return f"{_side(left)}{_side(right)}"  # type: ignore[return-value]


def _side(tensor: torch.Tensor) -> str:
    return "t" if tensor.stride(-2) == 1 and tensor.stride(-1) != 1 else "n"


def _width(name: str, args: tuple[Any, ...], widest: torch.Tensor) -> float:
    """Elements of a row of what is normalized or summed; of a batch norm a channel's, of a group norm a group's."""
    if "batch_norm" in name:
        return widest.numel() / widest.shape[1]
    if "group_norm" in name:
        _, channels, each, groups = [one for one in args if isinstance(one, int)][:4]
        return channels * each / groups
    if "layer_norm" in name or "rms_norm" in name:
        shape = next(
            (value for value in args if isinstance(value, (list, tuple)) and value and isinstance(value[0], int)), None
        )
        if shape is not None:
            return float(np.prod(shape))
    return float(widest.shape[-1]) if widest.dim() else 1.0
