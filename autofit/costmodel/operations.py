"""The operators of a step, one by one: what each of them reads and writes, as a trace saw it.

A trace keeps how often each distinct operator is called in each segment of the step. Its text holds sizes that grow
with the rows as ``"4096r"`` (4096 for each row of the micro-batch), so that one trace tells the operators at any
micro-batch. No torch in here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autofit.costmodel.roofline import Kind

HOST = "host"
"""Name of what keeps the host and launches no kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor that an operator reads or writes.

    Attributes:
        shape: Of the tensor; of a list of tensors the sum of their numbers.
        dtype: Without ``torch.``, such as ``bfloat16``.
        transposed: Whether the last two dimensions lie the other way round in memory.
    """

    shape: tuple[int, ...]
    dtype: str
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operator, and how often it is called.

    Attributes:
        name: PyTorch's, such as ``aten.mm.default``.
        kind: As the roofline counts it.
        flops: Of one call.
        moved_bytes: Read and written by one call.
        inputs: Tensors that it reads, in the order of its arguments.
        outputs: Tensors that it returns.
        causal: Of attention: whether what comes later is masked.
        tensors: The number of tensors in the longest list that it takes, or 1.
        calls: In the step, or in the segment.
    """

    name: str
    kind: Kind
    flops: float
    moved_bytes: float
    inputs: tuple[Operand, ...] = ()
    outputs: tuple[Operand, ...] = ()
    causal: bool = False
    tensors: int = 1
    calls: float = 1.0


Signature = tuple[object, ...]
"""What a recorder writes of a call: name, kind, operands, causal, tensors."""


def text_of(signature: Signature, work: Sequence[float], rows: int | None) -> str:
    """The text of a distinct operator.

    Args:
        signature: As the recorder made it, with the sizes of the trace.
        work: FLOPs and bytes: those of no rows at all, and those that each row adds.
        rows: The prime micro-batch of the trace; ``None`` where it stands for itself alone.
    """
    name, kind, inputs, outputs, causal, tensors = signature
    grown = [_grown(operands, rows) for operands in (inputs, outputs)]  # type: ignore[arg-type]
    return json.dumps([name, kind, *grown, causal, tensors, list(work)], separators=(",", ":"))


def _grown(operands: Sequence[tuple[tuple[int, ...], str, bool]], rows: int | None) -> list[object]:
    def size(count: int) -> int | str:
        return count if rows is None or not count or count % rows else f"{count // rows}r"

    return [[[size(count) for count in shape], dtype, transposed] for shape, dtype, transposed in operands]


@functools.lru_cache(maxsize=65536)
def operation_of(text: str, rows: int) -> Operation:
    """The operator of a text at a micro-batch."""
    name, kind, inputs, outputs, causal, tensors, work = json.loads(text)
    return Operation(
        name=name,
        kind=kind,
        flops=work[0] + work[2] * rows,
        moved_bytes=work[1] + work[3] * rows,
        inputs=_operands(inputs, rows),
        outputs=_operands(outputs, rows),
        causal=causal,
        tensors=tensors,
    )


def _operands(given: list[tuple[list[int | str], str, bool]], rows: int) -> tuple[Operand, ...]:
    return tuple(
        Operand(
            shape=tuple(int(size[:-1]) * rows if isinstance(size, str) else size for size in shape),
            dtype=dtype,
            transposed=transposed,
        )
        for shape, dtype, transposed in given
    )


def called(texts: Sequence[str], calls: Sequence[float], rows: int) -> tuple[Operation, ...]:
    """The operators that are called at all, each with its number of calls."""
    return tuple(
        replace(operation_of(text, rows), calls=float(count)) for text, count in zip(texts, calls, strict=True) if count
    )
