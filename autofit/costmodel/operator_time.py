"""The seconds that each operator of a step takes on a card that is not here.

An operator's seconds are the roofline's bound, the slower of its arithmetic and its traffic, over an efficiency that is
a smooth function of what decides it. ``time_coefficients.json`` holds the coefficients of each kind.

No torch in here: operators are arrays, one row an operator.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np

from autofit.system.errors import InputError

if TYPE_CHECKING:
    from autofit.contract.trace import Ints
    from autofit.costmodel.roofline import Numbers
    from autofit.machine.gpu_catalogue import Card

TimedKind = Literal[
    "product", "attention", "elementwise", "norm", "softmax", "reduction", "gather", "copy", "optimizer", "dequantize",
    "transfer", "nothing",
]  # fmt: skip
"""``product`` is a matrix product or a convolution; ``attention`` a fused kernel; ``gather`` reads or writes rows by
index; ``copy`` changes dtype or layout; ``optimizer`` updates lists of parameters in one launch or a few; ``transfer``
goes over the bus; ``nothing`` launches no kernel."""
TIMED_KINDS: tuple[TimedKind, ...] = get_args(TimedKind)
Arithmetic = Literal["fp32", "tf32", "bf16", "fp16"]
ARITHMETICS: tuple[Arithmetic, ...] = get_args(Arithmetic)
Layout = Literal["nn", "nt", "tn", "tt"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
"""Of the two factors of a product, row-major: ``n`` as it stands, ``t`` transposed. ``x @ w.T`` is ``nt``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator.

    Attributes:
        kind: What it does.
        arithmetic: Of a product, what it multiplies in; of others, the dtype of its first tensor.
        layout: Of a product.
        backward: Whether it belongs to the backward pass (of ``attention``, ``norm`` and ``softmax``: another kernel).
        flops: Floating-point operations; 0 where they don't count.
        moved_bytes: Read and written, each tensor once.
        batch, m, n, k: Of a product, ``batch`` times ``(m, k) x (k, n)``. Of attention, heads times batch, rows of the
            query, rows of the key, width of a head. Of ``norm``, ``softmax`` and ``reduction``, ``m`` rows of ``n``
            elements. Of others ``n`` elements written.
    """

    kind: TimedKind
    arithmetic: Arithmetic = "fp32"
    layout: Layout = "nn"
    backward: bool = False
    flops: float = 0.0
    moved_bytes: float = 0.0
    batch: float = 1.0
    m: float = 1.0
    n: float = 1.0
    k: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operators:
    """Operators as arrays of shape ``(operators,)``; fields are those of :class:`Operator`.

    Attributes:
        kind, arithmetic, layout: Indices into :data:`TIMED_KINDS`, :data:`ARITHMETICS` and :data:`LAYOUTS`.
        backward: 0 or 1.
        calls: How often each is called.
    """

    kind: Ints
    arithmetic: Ints
    layout: Ints
    backward: Ints
    flops: Numbers
    moved_bytes: Numbers
    batch: Numbers
    m: Numbers
    n: Numbers
    k: Numbers
    calls: Numbers

    @classmethod
    def of(cls, operators: Iterable[Operator]) -> Self:
        """Each of them, called once."""
        return cls.from_rows(np.array([row_of(one) for one in operators], dtype=np.float64).reshape(-1, len(COLUMNS)))

    @classmethod
    def from_rows(cls, rows: Numbers, calls: Numbers | None = None) -> Self:
        """From an array of shape ``(operators, len(COLUMNS))``."""
        columns: dict[str, Any] = {
            name: column.astype(np.int64) if name in _CODES else column
            for name, column in zip(COLUMNS, rows.T, strict=True)
        }
        return cls(**columns, calls=np.ones(len(rows)) if calls is None else calls)

    def __len__(self) -> int:
        return len(self.kind)

    def computed_in(self, *, tf32: bool = False, fp16: bool = False) -> Operators:
        """The same where float32 products are made in TF32, or what was traced in bfloat16 is made in float16."""
        codes = self.arithmetic.copy()
        if tf32:
            codes[(codes == ARITHMETICS.index("fp32")) & (self.kind == TIMED_KINDS.index("product"))] = 1
        if fp16:
            codes[codes == ARITHMETICS.index("bf16")] = ARITHMETICS.index("fp16")
        return replace(self, arithmetic=codes)


_CODES = ("kind", "arithmetic", "layout", "backward")
COLUMNS = tuple(field.name for field in fields(Operator))


def row_of(one: Operator) -> tuple[float, ...]:
    """An operator as numbers, in the order of :data:`COLUMNS`."""
    return (
        TIMED_KINDS.index(one.kind),
        ARITHMETICS.index(one.arithmetic),
        LAYOUTS.index(one.layout),
        float(one.backward),
        one.flops,
        one.moved_bytes,
        one.batch,
        one.m,
        one.n,
        one.k,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """What one call of each operator takes; arrays of shape ``(operators,)``.

    Attributes:
        seconds: On the device, while it has work to do: no launch from an idle host.
        log_std: Standard deviation of the natural logarithm of measured over predicted.
    """

    seconds: Numbers
    log_std: Numbers


@functools.cache
def coefficients() -> dict[str, Any]:
    """Those that ship, made by ``tests/bench/fit_time_model.py``."""
    text = resources.files("autofit.costmodel").joinpath("time_coefficients.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def seconds(operators: Operators, card: Card, fit: dict[str, Any] | None = None) -> Prediction:
    """What each operator takes on a card.

    Args:
        operators: Of shape ``(operators,)``.
        card: With its SMs and clocks.
        fit: Coefficients; those that ship by default.

    Raises:
        InputError: The catalogue lacks a figure of the card that the laws need.
    """
    _check(card)
    fit = coefficients() if fit is None else fit
    share = np.array([float(fit["share"][kind]) for kind in TIMED_KINDS])[operators.kind]
    spread = np.array([float(fit["log_std"][kind]) for kind in TIMED_KINDS])[operators.kind]
    bound = bound_seconds(operators, card)
    return Prediction(seconds=bound / share, log_std=spread)


def bound_seconds(operators: Operators, card: Card) -> Numbers:
    """The roofline: no operator is faster than its arithmetic at the peak rate and its bytes at the bandwidth."""
    peaks = np.array([card.rate(name) for name in ARITHMETICS])
    flops = np.where(operators.kind == TIMED_KINDS.index("nothing"), 0.0, operators.flops)
    moved = np.where(operators.kind == TIMED_KINDS.index("nothing"), 0.0, operators.moved_bytes)
    bus = operators.kind == TIMED_KINDS.index("transfer")
    bandwidth = np.where(bus, BUS_BYTES_PER_SECOND, card.bandwidth_bytes_per_second)
    return np.asarray(np.maximum(flops / peaks[operators.arithmetic], moved / bandwidth))


def _check(card: Card) -> None:
    lacking = [name for name in ("sms", "l2_bytes", "boost_hz", "watts") if getattr(card, name) is None]
    if lacking:
        raise InputError(
            f"seconds on {card.name} can't be predicted: the catalogue has no {', '.join(lacking)} for it",
            hint="add them to autofit/machine/cards.json, or ask about another card",
        )


BUS_BYTES_PER_SECOND = 3.1e10
"""PCIe 4.0 x16; the share below is of this."""
