"""Rows of ``liger_kernels.csv`` as operators: losses, norms and gated layers, by PyTorch and by Liger's kernels.

What a row runs is what its kernel computes: PyTorch's side operator by operator, as eager runs it; Liger's side as one
kernel that reads its inputs and writes its outputs.
``do_bench`` empties the L2 cache before each call, so that the host is ahead of the device.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from autofit.costmodel.seconds.operator_time import Arithmetic, Operator

FILE = "liger_kernels.csv"
_TORCH = frozenset({"torch", "huggingface"})
_LIGER = frozenset({"liger", "liger_triton"})
_SIZES: dict[str, tuple[Arithmetic, int]] = {"torch.float32": ("fp32", 4), "torch.bfloat16": ("bf16", 2)}

Line = dict[str, str]
Work = list[Operator]


def read_liger(folder: Path) -> tuple[list[tuple[int, Line, Work]], Counter[str]]:
    """Rows that can be expressed, each with its operators, and reasons why others can't be, counted."""
    path = folder / FILE
    if not path.exists():
        return [], Counter()
    unexpressed: Counter[str] = Counter()
    found: list[tuple[int, Line, Work]] = []
    with path.open(encoding="utf-8", newline="") as file:
        for number, line in enumerate(csv.DictReader(file)):
            if line.get("metric_name") != "speed":
                continue
            if line.get("in_head") != "True":
                unexpressed["Liger: a kernel of an older version"] += 1
                continue
            try:
                work = operators_of(line) if 0 < float(line["y_value_50"]) < math.inf else "Liger: no time"
            except (ValueError, KeyError, TypeError) as error:
                work = f"Liger: a row can't be read: {type(error).__name__}: {error}"
            if isinstance(work, str):
                unexpressed[work] += 1
            else:
                found.append((number, line, work))
    return found, unexpressed


def operators_of(line: Line) -> Work | str:
    """The operators of a row, or why it can't be expressed."""
    kernel, provider, mode = line["kernel_name"], line["kernel_provider"], line["kernel_operation_mode"]
    build = _BUILDERS.get(kernel)
    if build is None:
        return f"Liger: {kernel} has no expression"
    side = "torch" if provider in _TORCH else "liger" if provider in _LIGER else ""
    if not side:
        return f"Liger: provider {provider} has no expression"
    settings = json.loads(line["extra_benchmark_config_str"])
    try:
        settings[line["x_name"]] = float(line["x_value"])
        forward, backward = build(side, settings)
    except (KeyError, ValueError):
        return f"Liger: {kernel} by {line['x_name']} does not say its sizes"
    parts = {"forward": forward, "no-grad-forward": forward, "backward": backward, "full": forward + backward}
    if mode not in parts or (side == "liger" and mode != "forward" and kernel not in _LIGER_BACKWARD):
        return f"Liger: {mode} of {provider}'s {kernel} has no expression"
    return parts[mode]


_LIGER_BACKWARD = frozenset({"swiglu", "geglu"})
"""Liger's other backward passes hold a second kernel, for the weight's gradient, whose grid is its own."""


def _pass(count: float, size: float, passes: float, arithmetic: Arithmetic = "bf16") -> Operator:
    return Operator(kind="elementwise", arithmetic=arithmetic, moved_bytes=count * size * passes, n=count)


def _product(m: float, n: float, k: float, arithmetic: Arithmetic = "bf16") -> Operator:
    size = 2 if arithmetic == "bf16" else 4
    return Operator(
        kind="product", arithmetic=arithmetic, layout="nt", flops=2 * m * n * k,
        moved_bytes=size * (m * k + k * n + m * n), m=m, n=n, k=k,
    )  # fmt: skip


def _rows(kind: str, m: float, n: float, size: float, passes: float, arithmetic: Arithmetic, *, back: bool) -> Operator:
    moved = passes * size * m * n
    return Operator(kind=kind, arithmetic=arithmetic, moved_bytes=moved, m=m, n=n, backward=back)  # type: ignore[arg-type]


def _gated(side: str, given: dict[str, object]) -> tuple[Work, Work]:
    """Two products up, an activation, a product of both, and one product down."""
    tokens = _number(given, "T") * float(given.get("B", given.get("bsz", 1)))  # type: ignore[arg-type]
    hidden, inner = _number(given, "hidden_size"), _number(given, "intermediate_size")
    count = tokens * inner
    arithmetic, size = _dtype(given)
    up, down = _product(tokens, inner, hidden, arithmetic), _product(tokens, hidden, inner, arithmetic)
    if side == "torch":
        forward, backward = [_pass(count, size, 2), _pass(count, size, 3)], [_pass(count, size, 3)] * 3
    else:
        forward, backward = [_pass(count, size, 3)], [_pass(count, size, 5)]
    products = [
        _product(tokens, inner, hidden, arithmetic), _product(hidden, inner, tokens, arithmetic),
        *[_product(tokens, hidden, inner, arithmetic), _product(inner, hidden, tokens, arithmetic)] * 2,
        _pass(tokens * hidden, size, 3),
    ]  # fmt: skip
    return [up, up, *forward, down], [*products, *backward]


def _cross_entropy(side: str, given: dict[str, object]) -> tuple[Work, Work]:
    """Of logits in float32."""
    rows = _number(given, "BT") if "BT" in given else _number(given, "B") * _number(given, "T")
    width = _number(given, "V") if "V" in given else _number(given, "vocab_size")
    return _loss(side, rows, width, "fp32", 4)


def _loss(side: str, rows: float, width: float, arithmetic: Arithmetic, size: float) -> tuple[Work, Work]:
    if side == "liger":  # reads twice and writes the gradient in the logits' place
        return [_pass(rows * width, size, 3, arithmetic)], []
    forward = [_rows("softmax", rows, width, size, 2, arithmetic, back=False)]
    return forward, [
        _pass(rows * width, size, 1, arithmetic),
        _rows("softmax", rows, width, size, 3, arithmetic, back=True),
    ]


def _linear_loss(side: str, given: dict[str, object]) -> tuple[Work, Work]:
    if side == "liger":
        raise KeyError("chunked: its loop over chunks waits for the host")
    rows, hidden, width = (_number(given, name) for name in ("BT", "H", "V"))
    forward, backward = _loss("torch", rows, width, "fp32", 4)
    cast = _pass(rows * width, 6, 1)
    return (
        [_product(rows, width, hidden), cast, *forward],
        [*backward, cast, _product(rows, hidden, width), _product(width, hidden, rows)],
    )


def _norm(side: str, given: dict[str, object]) -> tuple[Work, Work]:
    rows, width = _matrix(given)
    arithmetic, size = _dtype(given)
    forward = [_rows("norm", rows, width, size, 2, arithmetic, back=False)]
    if side == "liger":
        return forward, []
    # gradients of the input and of the weight, a kernel each
    return forward, [_rows("norm", rows, width, size, passes, arithmetic, back=True) for passes in (3, 2)]


def _rms_norm(side: str, given: dict[str, object]) -> tuple[Work, Work]:
    """LlamaRMSNorm: cast, square, mean, scale, cast, weigh."""
    rows, width = _matrix(given)
    arithmetic, size = _dtype(given)
    if side == "liger":
        return [_rows("norm", rows, width, size, 2, arithmetic, back=False)], []
    count = rows * width
    wide = [_pass(count, 4, 2, "fp32"), _pass(count, 4, 1, "fp32"), _pass(count, 4, 2, "fp32")]
    small = [_pass(rows, 4, 2, "fp32")] * 2
    cast = _pass(count, 4 + size, 1)
    forward = [cast, *wide, *small, cast, _pass(count, size, 2)]
    backward = [
        _pass(count, size, 2), _pass(count, size, 3), _pass(count, size, 1), cast, *[_pass(count, 4, 3, "fp32")] * 4,
        *small, cast,
    ]  # fmt: skip
    return forward, backward


def _softmax(_: str, given: dict[str, object]) -> tuple[Work, Work]:
    rows, width = _matrix(given)
    arithmetic, size = _dtype(given)
    forward = [_rows("softmax", rows, width, size, 2, arithmetic, back=False)]
    return forward, [_rows("softmax", rows, width, size, 3, arithmetic, back=True)]


_BUILDERS: dict[str, Callable[[str, dict[str, object]], tuple[Work, Work]]] = {
    "swiglu": _gated,
    "geglu": _gated,
    "cross_entropy": _cross_entropy,
    "fused_linear_cross_entropy": _linear_loss,
    "layer_norm": _norm,
    "rms_norm": _rms_norm,
    "softmax": _softmax,
}


def _matrix(given: dict[str, object]) -> tuple[float, float]:
    rows = next(name for name in ("M", "BT", "T") if name in given) if {"M", "BT", "T"} & set(given) else "M"
    width = next((name for name in ("H", "N", "hidden_size") if name in given), "H")
    return _number(given, rows), _number(given, width)


def _number(given: dict[str, object], name: str) -> float:
    return float(given[name])  # type: ignore[arg-type]


def _dtype(given: dict[str, object]) -> tuple[Arithmetic, int]:
    return _SIZES[str(given["dtype"])]
