"""The seconds that each operator of a step takes on a card that is not here.

An operator's seconds are the roofline's bound, the slower of its arithmetic and its traffic, over an efficiency that is
a smooth function of what decides it. ``time_coefficients.json`` holds the coefficients of each kind.

No torch in here: operators are arrays, one row an operator.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from autofit.costmodel.seconds import kernel_laws
from autofit.costmodel.seconds.kernel_laws import Coefficients, Figures, Products
from autofit.system.errors import InputError

if TYPE_CHECKING:
    from autofit.contract.trace import Ints
    from autofit.costmodel.seconds.roofline import Numbers
    from autofit.machine.gpu_catalogue import Card

TimedKind = Literal[
    "product", "attention", "elementwise", "norm", "softmax", "reduction", "gather", "copy", "optimizer", "dequantize",
    "transfer", "nothing", "collective", "quantized",
]  # fmt: skip
"""``product`` is a matrix product or a convolution; ``attention`` a fused kernel; ``gather`` reads or writes rows by
index; ``copy`` changes dtype or layout; ``optimizer`` updates lists of parameters in one launch or a few; ``transfer``
goes over the bus; ``nothing`` launches no kernel; ``collective`` goes over the links to other ranks beside all else:
:mod:`autofit.costmodel.seconds.collectives`; ``quantized`` updates a parameter whose state has 8 bits."""
TIMED_KINDS: tuple[TimedKind, ...] = get_args(TimedKind)
_FUSIBLE = [TIMED_KINDS.index(kind) for kind in ("elementwise", "norm", "reduction", "copy", "nothing")]
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
        layout: Of a product. Of ``attention`` ``tt`` is PyTorch's memory-efficient kernel, all else a faster one.
        backward: Whether it belongs to the backward pass (of ``attention``, ``norm`` and ``softmax``: another kernel).
        flops: Floating-point operations; 0 where they don't count. Of ``attention`` those of the whole square where
            half of it is left out (causal), else twice as many.
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

    @classmethod
    def joined(cls, several: Sequence[Self]) -> Self:
        """All of several, one behind the other."""
        return cls(
            **{field.name: np.concatenate([getattr(one, field.name) for one in several]) for field in fields(cls)}
        )

    def __len__(self) -> int:
        return len(self.kind)

    def at(self, places: Ints) -> Operators:
        """Some of them."""
        return Operators(**{field.name: getattr(self, field.name)[places] for field in fields(self)})

    def computed_in(self, *, tf32: bool = False, fp16: bool = False) -> Operators:
        """The same where float32 products are made in TF32, or what was traced in bfloat16 is made in float16."""
        codes = self.arithmetic.copy()
        if tf32:
            codes[(codes == ARITHMETICS.index("fp32")) & (self.kind == TIMED_KINDS.index("product"))] = 1
        if fp16:
            codes[codes == ARITHMETICS.index("bf16")] = ARITHMETICS.index("fp16")
        return replace(self, arithmetic=codes)

    def fused(self, share: float) -> Operators:
        """The same where a compiler leaves out a share of the calls that go element by element, or launch nothing."""
        if not share:
            return self
        return replace(self, calls=np.where(np.isin(self.kind, _FUSIBLE), 1 - share, 1.0) * self.calls)


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
    text = resources.files("autofit.costmodel.seconds").joinpath("time_coefficients.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def seconds(operators: Operators, card: Card, found: Mapping[str, Any] | None = None) -> Prediction:
    """What each operator takes on a card, never less than :func:`bound_seconds`.

    Args:
        operators: Of shape ``(operators,)``.
        card: With its SMs and clocks.
        found: What a fit found; what ships by default.

    Raises:
        InputError: The catalogue lacks a figure of the card that the laws need.
    """
    found = coefficients() if found is None else found
    device = device_seconds(operators, figures_of(operators, card), found["fit"])
    spread = found["log_std"]["seen" if card.name in found["cards"] else "unseen"]
    group = groups_of(operators)
    return Prediction(
        seconds=np.maximum(device, bound_seconds(operators, card)),
        log_std=np.array([spread.get(name, spread["other"]) for name in group.tolist()], dtype=np.float64),
    )


def groups_of(operators: Operators) -> npt.NDArray[np.str_]:
    """The group of each operator that has an error of its own: its kind, and of a product whether it is batched."""
    names = np.array(TIMED_KINDS)[operators.kind]
    product = operators.kind == TIMED_KINDS.index("product")
    return np.where(product, np.where(operators.batch > 1, "bmm", "linear"), names)


def device_seconds(
    operators: Operators, figures: Figures, fit: Mapping[str, Coefficients], *, pause: float = 0.0
) -> Numbers:
    """What each operator takes by the laws, on a card whose figures stand beside each.

    Args:
        operators: Of shape ``(operators,)``.
        figures: Of the same shape.
        fit: Coefficients of each law.
        pause: Seconds that the device is idle after each operator, which let it run faster at its power cap.
    """
    found = np.zeros(len(operators))
    memory = fit["memory"]
    size = np.where(np.isin(operators.arithmetic, _HALVES), 2.0, 4.0)
    for kind in np.unique(operators.kind).tolist():
        name = TIMED_KINDS[kind]
        places = np.flatnonzero(operators.kind == kind)
        own, card = operators.at(places), figures.at(places)
        if name == "product":
            shapes = Products(
                batch=own.batch, m=own.m, n=own.n, k=own.k, size=size[places],
                aligned_bytes=_aligned_bytes(own, size[places]),
            )  # fmt: skip
            found[places] = kernel_laws.product_seconds(card, fit["product"], memory, shapes, pause=pause)
        elif name in {"norm", "softmax"}:
            found[places] = kernel_laws.streaming_seconds(
                card, fit[name], memory, moved_bytes=own.moved_bytes, m=own.m, n=own.n,
                backward=own.backward.astype(np.float64),
            )  # fmt: skip
        elif name == "attention":
            found[places] = kernel_laws.attention_seconds(
                card, fit["attention"], memory, flops=own.flops, moved_bytes=own.moved_bytes, batch=own.batch, m=own.m,
                n=own.n, width=own.k, backward=own.backward > 0, efficient=own.layout == LAYOUTS.index("tt"),
                full=own.arithmetic == ARITHMETICS.index("fp32"),
            )  # fmt: skip
        elif name == "quantized":
            found[places] = kernel_laws.quantized_seconds(card, fit[name], memory, moved_bytes=own.moved_bytes, n=own.n)
        elif name == "transfer":
            found[places] = own.moved_bytes / (card.bus * np.exp(fit["passes"][name]))
        elif name not in {"nothing", "collective"}:
            passes = np.exp(fit["passes"].get(name, 0.0))
            found[places] = passes * kernel_laws.memory_seconds(card, memory, own.moved_bytes)
    launched = ~np.isin(operators.kind, _UNLAUNCHED)
    return np.asarray(found + launched * np.exp(fit["memory"]["start"]))


def _aligned_bytes(products: Operators, size: Numbers) -> Numbers:
    """The largest power of two, of 16 at most, that divides the rows of both factors and of the result, in bytes."""
    left = np.where(np.isin(products.layout, (LAYOUTS.index("tn"), LAYOUTS.index("tt"))), products.m, products.k)
    right = np.where(np.isin(products.layout, (LAYOUTS.index("nt"), LAYOUTS.index("tt"))), products.k, products.n)
    rows = np.stack([left, right, products.n]) * size
    divides = [np.all(np.mod(rows, power) == 0, axis=0) for power in (16, 8, 4)]
    return np.select(divides, [16.0, 8.0, 4.0], 2.0)


def bound_seconds(operators: Operators, card: Card) -> Numbers:
    """The roofline: no operator is faster than its arithmetic at the peak rate and its bytes at the bandwidth."""
    peaks = np.array([card.rate(name) for name in ARITHMETICS])
    works = ~np.isin(operators.kind, [TIMED_KINDS.index("nothing"), TIMED_KINDS.index("collective")])
    bus = operators.kind == TIMED_KINDS.index("transfer")
    bandwidth = np.where(bus, card.bus_bytes_per_second, card.bandwidth_bytes_per_second)
    # a causal kernel leaves out half of the square that its FLOPs are counted over
    flops = operators.flops * np.where(operators.kind == TIMED_KINDS.index("attention"), 0.5, 1.0)
    bound = np.maximum(flops / peaks[operators.arithmetic], operators.moved_bytes / bandwidth)
    return np.asarray(works * bound)


def figures_of(operators: Operators, card: Card) -> Figures:
    """The card's figures beside each operator.

    Raises:
        InputError: The catalogue lacks one.
    """
    lacking = [name for name in ("capability", "sms", "l2_bytes", "boost_hz", "watts") if getattr(card, name) is None]
    if lacking:
        raise InputError(
            f"seconds on {card.name} can't be predicted: the catalogue has no {', '.join(lacking)} for it",
            hint="add them to autofit/machine/cards.json, or ask about another card",
        )
    assert card.capability is not None
    assert card.sms is not None
    assert card.l2_bytes is not None
    assert card.boost_hz is not None
    assert card.watts is not None
    peaks = np.array([card.rate(name) for name in ARITHMETICS])
    tensor = np.array([float(name != "fp32" and bool(card.peak(name))) for name in ARITHMETICS])
    each = np.ones(len(operators))
    return Figures(
        sms=card.sms * each,
        peak=peaks[operators.arithmetic],
        bandwidth=card.bandwidth_bytes_per_second * each,
        bus=card.bus_bytes_per_second * each,
        stacked=float(card.capability[1] == 0 and card.capability[0] < 12) * each,
        l2=card.l2_bytes * each,
        hz=card.boost_hz * each,
        watts=card.watts * each,
        generation=card.capability[0] * each,
        efficiency=_efficiency(card.capability) * each,
        tensor=tensor[operators.arithmetic],
    )


_UNLAUNCHED = tuple(TIMED_KINDS.index(kind) for kind in ("nothing", "transfer", "collective"))
_HALVES = (ARITHMETICS.index("bf16"), ARITHMETICS.index("fp16"))
_EFFICIENCY: dict[tuple[int, int], float] = {
    (6, 0): 1.0, (6, 1): 1.0, (7, 0): 1.0, (7, 5): 1.0, (8, 0): 2.6, (8, 6): 1.8, (8, 9): 3.6, (9, 0): 3.6,
    (10, 0): 6.0, (12, 0): 3.8,
}  # fmt: skip
"""FLOP of a joule next to TSMC's 16 and 12 nm, by compute capability. Not fitted. Checked is that TSMC says 30 % less
power for 5 nm (of which 4N is a kind) than for 7 nm (tsmc.com, 5nm Technology): the step from 2.6 to 3.6. Not checked:
60 to 65 % less for 7 nm than for 16 nm, and that Samsung's 8 nm lies between. A B200 has more: its best products on
tensor cores, some 1,750 TFLOP/s, need it."""


def _efficiency(capability: tuple[int, int]) -> float:
    """Of the newest generation that is known and not newer; of one older than all, of the oldest."""
    known = [one for one in _EFFICIENCY if one <= capability] or [min(_EFFICIENCY)]
    return _EFFICIENCY[max(known)]
