"""From tapes to what a plan needs: the peak, its phase, where it goes; and the work of a step.

A plan's run is put together from its parts (``m`` rows, ``a`` micro-steps to an optimizer step)::

    weights ──────────────────────────────────────────────────────────────────────────────
    state            ┌────────────────────────────────────────────────────────────────────
    gradients    ┌───┘ ┌──────────────────┐ ┌──────
    micro-steps  ▟█▙▟█▙ step  ▟█▙▟█▙▟█▙ step

so its peak is the largest of: load; a micro-step without gradients, or, where ``a`` is above one, one that finds them
there, both beside the state; the optimizer's step; a Trainer's evaluation step beside the state, which makes all logits
where the training makes a part of them at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autofit.contract.outcome import Phase
from autofit.contract.trace import Ints
from autofit.costmodel.memory.parts import TRACED_MICRO_STEPS, MicroPart, OptimizerPart
from autofit.costmodel.tracing.timeline import CATEGORIES, Category, Floats, Tape

_WEIGHTS, _STATE, _BATCH, _COMMUNICATION = (
    CATEGORIES.index(name) for name in ("weights", "state", "batch", "communication")
)


_SURELY_BELOW = 0.95
"""Of a training's peak: an evaluation that takes no more by its trace stays below it on a card, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a plan needs on the device, predicted.

    Attributes:
        peak_bytes: Of the tensors alone, as ``torch.cuda.max_memory_allocated`` counts them.
        phase: When the peak is.
        segment: Which part of the phase, see :mod:`autofit.costmodel.tracing.timeline`.
        operator: What was being computed.
        by_category: The bytes that make up the peak.
        elsewhere_bytes: What the plan puts on the host, or into memory that the driver moves, at most.
        bare_bytes: Weights, gradients and state: what no micro-batch gets below.
    """

    peak_bytes: int
    phase: Phase
    segment: str
    operator: str
    by_category: Mapping[Category, int]
    elsewhere_bytes: int
    bare_bytes: int


def need(
    micro: MicroPart, optimizer: OptimizerPart, *, rows: int, accumulation: int, waiting: bool, evaluated_rows: int = 0
) -> Need:
    """What one plan needs.

    Args:
        micro: Its micro-steps.
        optimizer: Its optimizer.
        rows: The micro-batch.
        accumulation: Micro-steps to an optimizer step.
        waiting: Whether the batches of all of them lie on the device from the beginning, as a Trainer has it.
        evaluated_rows: Of an evaluation step.
    """
    weights, held, of_micro = float(micro.weights.sum()), micro.held_bytes, micro.tape_of(accumulation)
    state = optimizer.state_bytes
    queue = micro.batch_bytes_per_row() * rows * max(0, accumulation - TRACED_MICRO_STEPS) if waiting else 0.0
    peaks, moments = micro.peaks(np.array([float(rows)]), adding=accumulation > 1)
    beside = {_WEIGHTS: weights, _STATE: state, _BATCH: queue, _COMMUNICATION: held - weights}
    step = optimizer.tape.live(0)
    at_step = int(step.argmax())
    in_micro = float(peaks[0]) + state + queue
    bare = weights + state + optimizer.gradient_bytes
    evaluated, events = micro.evaluation_peaks(np.array([float(evaluated_rows)]))
    done = _done_batches(micro, rows, accumulation) if waiting else 0.0
    in_evaluation = float(evaluated[0]) + state + done
    if micro.evaluation is not None and in_evaluation > max(in_micro, float(step[at_step]) + queue):
        tape, moment, total = micro.evaluation, int(events[0]), held + in_evaluation
        parts, beside[_BATCH] = tape.by_category(moment, evaluated_rows), done
    elif in_micro >= float(step[at_step]) + queue:
        tape, moment, total = of_micro, int(moments[0]), held + in_micro
        parts = tape.by_category(moment, rows)
    else:
        tape, moment, total = optimizer.tape, at_step, held + float(step[at_step]) + queue
        parts = tape.by_category(moment)
        beside[_STATE] = 0.0
    for category, bytes_beside in beside.items():
        parts[category] += bytes_beside
    segment = "evaluation" if tape is micro.evaluation else tape.segment_at(moment).rpartition(":")[2]
    return Need(
        peak_bytes=round(total),
        phase="optimizer" if tape is optimizer.tape else phase_of(segment),
        segment=segment,
        operator=operator_at(tape, moment),
        by_category={
            name: round(part) for name, part in zip(CATEGORIES, parts, strict=True) if part >= 1 and name != "elsewhere"
        },
        elsewhere_bytes=micro.host_bytes
        + optimizer.elsewhere_bytes
        + round(float(micro.tape.live_elsewhere(rows).max())),
        bare_bytes=round(bare),
    )


def peaks(
    micro: MicroPart,
    optimizer: OptimizerPart,
    rows: Ints,
    accumulation: Ints,
    *,
    waiting: bool,
    evaluated_rows: Ints | None = None,
) -> Floats:
    """:attr:`Need.peak_bytes` of many plans that share their parts."""
    in_micro = _micro_peaks(micro, rows, accumulation) + optimizer.state_bytes
    trained = _queue(micro, rows, accumulation, waiting=waiting) + np.maximum(in_micro, optimizer.peak_bytes)
    if micro.evaluation is not None and evaluated_rows is not None:
        evaluated, _ = micro.evaluation_peaks(evaluated_rows.astype(np.float64))
        done = _done_batches(micro, rows, accumulation) * waiting
        trained = np.maximum(trained, evaluated + optimizer.state_bytes + done)
    return micro.held_bytes + trained


def evaluable_rows(
    micro: MicroPart,
    optimizer: OptimizerPart,
    rows: Ints,
    accumulation: Ints,
    *,
    waiting: bool,
    most: int,
    if_asked: int = 0,
) -> Ints:
    """Of many plans that share their parts the rows that an evaluation may take at once and stay below the training.

    A power of two up to ``most``, which is one; 0 where none stays below, or no evaluation is traced. There is room for
    ``if_asked`` bytes of each row beside what was traced.
    """
    if micro.evaluation is None or not most:
        return np.zeros(len(rows), dtype=np.int64)
    sizes = 2 ** np.arange(most.bit_length())
    evaluated = micro.held_bytes + optimizer.state_bytes + micro.evaluation_peaks(sizes.astype(np.float64))[0]
    evaluated += if_asked * sizes
    beside = _done_batches(micro, rows, accumulation) * waiting
    room = _SURELY_BELOW * peaks(micro, optimizer, rows, accumulation, waiting=waiting) - beside
    found: Ints = np.where(evaluated <= room[:, None], sizes, 0).max(axis=1)
    return found


def host_offload_peaks(micro: MicroPart, held_bytes: float, rows: Ints, accumulation: Ints, *, waiting: bool) -> Floats:
    """The same where weights, gradients and state wait on the host, but for ``held_bytes``; no more than about."""
    in_micro = _micro_peaks(micro.without("gradients", "copies"), rows, accumulation)
    return held_bytes + _queue(micro, rows, accumulation, waiting=waiting) + in_micro


def _micro_peaks(micro: MicroPart, rows: Ints, accumulation: Ints) -> Floats:
    wide = rows.astype(np.float64)
    fresh, _ = micro.peaks(wide, adding=False)
    adding, _ = micro.peaks(wide, adding=True)
    return np.where(accumulation > 1, adding, fresh)


def _done_batches(micro: MicroPart, rows: Any, accumulation: Any) -> Any:
    """Bytes of the batches of the optimizer step before an evaluation, which a Trainer holds until the next one."""
    return rows * accumulation * micro.batch_bytes_per_row()


def _queue(micro: MicroPart, rows: Ints, accumulation: Ints, *, waiting: bool) -> Floats:
    """Bytes of the batches that wait on the device."""
    waits = np.maximum(0, accumulation - TRACED_MICRO_STEPS) * waiting
    waiting_rows: Floats = (rows * waits).astype(np.float64)
    return waiting_rows * micro.batch_bytes_per_row()


def phase_of(segment: str) -> Phase:
    """The phase of a step that a segment of a micro-step belongs to."""
    if segment in {"head", "pre", "rest", "begin", "evaluation"} or segment.startswith("F"):
        return "forward"
    return "optimizer" if segment == "step" else "backward"


def operator_at(tape: Tape, moment: int) -> str:
    """Name of the operator that made the block of an event, such as ``aten._log_softmax_backward_data``."""
    event = int(tape.events[moment])
    name: str = tape.names[int(tape.ops[event if event >= 0 else ~event])]
    return name.removesuffix(".default")
