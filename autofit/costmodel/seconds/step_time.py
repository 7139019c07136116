"""The seconds of a whole optimizer step on a card that is not here, from the operators that its traces recorded.

The device works off what the host issues, one operator after the other, so that a step takes as long as the slower of
the two::

    device  ▕██ product ██▏█ norm █▏███ attention ███▏...      sum of each operator's seconds by the laws
    host    ▕op▏op▏op▏op▏op▏op▏...                             sum of what each costs Python, autograd and the launch

The laws are those of :mod:`autofit.costmodel.seconds.operator_time`. A card whose figures they need is not all in the
catalogue (AMD's) gets the plain roofline.

Not covered: data loading, collectives (:mod:`autofit.costmodel.seconds.collectives`), what the allocator costs where
memory is short.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from autofit.costmodel.seconds import operator_time, roofline
from autofit.system.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autofit.contract.trace import Ints
    from autofit.costmodel.memory.parts import MicroPart, OptimizerPart
    from autofit.costmodel.seconds.operator_time import Operators
    from autofit.costmodel.seconds.roofline import Numbers
    from autofit.machine.gpu_catalogue import Card

ROOFLINE_LOG_STD = 0.35
"""Standard deviation of the natural logarithm of measured over predicted seconds of a whole step, by the roofline."""
_PLAIN = {"slack": 0.0, "sharded": 0.0, "gap": -math.inf, "host": math.log(roofline.HOST_SECONDS_PER_OPERATOR)}
_NOTHING, _COLLECTIVE = (operator_time.TIMED_KINDS.index(name) for name in ("nothing", "collective"))
T = TypeVar("T", float, "Numbers")
EIGHTY = 1.2816
"""Standard deviations either side that hold four fifths of a normal distribution."""


class StepClock:
    """Predicts steps on one card; what several plans share is worked out once.

    Args:
        card: In the catalogue.
        operators_per_second: What the host beside it issues, where that was timed; hosts differ more than cards do.
    """

    def __init__(self, card: Card, operators_per_second: float | None = None) -> None:
        self.card = card
        self._host_seconds_each = 1 / operators_per_second if operators_per_second else None
        self._device_and_host: dict[tuple[int, int, float, bool, bool], tuple[float, float]] = {}
        self._parts: list[object] = []
        try:
            operator_time.seconds(operator_time.Operators.of([]), card)
        except InputError:
            self.by_laws = False
        else:
            self.by_laws = True

    @property
    def spread(self) -> float:
        """Four trainings of five are at most so many times faster or slower than predicted."""
        return math.exp(EIGHTY * self.log_std)

    @property
    def log_std(self) -> float:
        """Standard deviation of the natural logarithm of measured over predicted."""
        return log_std_of(self.card, operator_time.coefficients()) if self.by_laws else ROOFLINE_LOG_STD

    def step_seconds(
        self,
        micro: MicroPart,
        optimizer: OptimizerPart,
        rows: Ints,
        accumulation: Ints,
        *,
        fused: float = 0.0,
        tf32: bool = False,
        fp16: bool = False,
    ) -> Numbers:
        """Seconds of an optimizer step of each plan, of shape ``(plans,)``.

        Args:
            micro: The micro-steps that the plans share.
            optimizer: Likewise.
            rows: The micro-batch of each plan.
            accumulation: Micro-steps to an optimizer step, of each plan.
            fused: The share of the micro-steps' element-wise operators that a compiler leaves out.
            tf32: Whether float32 products are made in TF32.
            fp16: Whether what was traced in bfloat16 is made in float16.
        """
        step = self._of(optimizer, [0], tf32=tf32, fp16=fp16)
        micros = self._of(micro, rows.tolist(), fused=fused, tf32=tf32, fp16=fp16)
        both = micros * np.asarray(accumulation, dtype=np.float64)[:, None] + step
        return np.asarray(both.max(axis=1))

    def _of(
        self, part: MicroPart | OptimizerPart, rows: list[int], *, fused: float = 0.0, tf32: bool, fp16: bool
    ) -> Numbers:
        """Device and host seconds of one micro-step of each of ``rows``, or with no rows of the optimizer's step."""
        keys = [(id(part), one, fused, tf32, fp16) for one in rows]
        missing = sorted(set(keys) - self._device_and_host.keys())
        if missing:
            self._parts.append(part)  # so that its id stays its own
            found = [
                (part.operators(one) if one else part.operators()).computed_in(tf32=tf32, fp16=fp16).fused(fused)  # type: ignore[call-arg]
                for _, one, *_ in missing
            ]
            on_host = [host_seconds(one, self._host_seconds_each) for one in found]
            both = zip(_each_on_device(found, self.card), on_host, strict=True)
            self._device_and_host.update(zip(missing, both, strict=True))
        return np.array([self._device_and_host[key] for key in keys]).reshape(-1, 2)


def device_seconds(operators: Operators, card: Card) -> float:
    """Of all calls, on a device that always has the next operator in its queue."""
    return _each_on_device([operators], card)[0]


def _each_on_device(several: list[Operators], card: Card) -> list[float]:
    """The same of each of several, whose laws are worked out together."""
    fit = operator_time.coefficients()["fit"].get("step", _PLAIN)
    every = operator_time.seconds(operator_time.Operators.joined(several), card).seconds
    parted = np.split(every, np.cumsum([len(one) for one in several])[:-1])
    return [
        on_device(
            float(one.calls @ taken),
            float(one.calls @ (one.kind != _NOTHING)),
            float((one.kind == _COLLECTIVE).any()),
            fit,
        )
        for one, taken in zip(several, parted, strict=True)
    ]


def host_seconds(operators: Operators, each: float | None = None) -> float:
    """Of all calls, until the last one is issued.

    Args:
        operators: What is called.
        each: Seconds of one, where the host is known; else it is one that keeps up with its card well.
    """
    fit = operator_time.coefficients()["fit"].get("step", _PLAIN)
    return float(operators.calls.sum() * (each or np.exp(fit["host"])))


def log_std_of(card: Card, found: Mapping[str, Any]) -> float:
    """Standard deviation of the natural logarithm of measured over predicted seconds of a whole step, by the laws.

    Args:
        card: Larger where no step on it was fitted to.
        found: What a fit found.
    """
    steps = found.get("steps")
    if steps is None:
        return ROOFLINE_LOG_STD
    return float(steps["log_std"]["seen" if card.name in steps["cards"] else "unseen"])


def on_device(seconds: T, kernels: T, sharded: T, fit: Mapping[str, float]) -> T:
    """Seconds of kernels one behind the other.

    There is a gap after each; a long run on a hot card is slower than a kernel alone, and a rank whose weights are
    gathered meanwhile is slower still.

    Args:
        seconds: Sum over the kernels.
        kernels: How many they are.
        sharded: 1 where weights are gathered while they run, else 0.
        fit: The coefficients ``slack``, ``sharded`` and ``gap``, as logarithms.
    """
    return np.exp(fit["slack"] + fit["sharded"] * sharded) * (seconds + np.exp(fit["gap"]) * kernels)  # type: ignore[no-any-return]


def together(seconds: Numbers, kernels: Numbers, calls: Numbers, sharded: Numbers, fit: Mapping[str, float]) -> Numbers:
    """Seconds of whole steps: the slower of device and host.

    Args:
        seconds: Sums over the kernels of each step.
        kernels: How many they are.
        calls: Operators that the host issues, those without a kernel included.
        sharded: As for :func:`on_device`.
        fit: The coefficients ``slack``, ``sharded``, ``gap`` and ``host``, as logarithms.
    """
    return np.asarray(np.maximum(on_device(seconds, kernels, sharded, fit), np.exp(fit["host"]) * calls))
