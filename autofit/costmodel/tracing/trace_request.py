"""What is asked of a trace, and which cards it serves."""

from __future__ import annotations

from dataclasses import dataclass

from autofit.contract.facts import Facts
from autofit.contract.plan import Plan
from autofit.contract.technique import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One trace: which part of a plan's step, and the file that takes it."""

    part: Part
    plan: Plan
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequests:
    """Traces of one model.

    Attributes:
        facts: Of the model, the rows and the card.
        config: The folder of the model's config.
        requests: The traces.
        folder: Where their files go.
    """

    facts: Facts
    config: str
    requests: tuple[TraceRequest, ...]
    folder: str


def kernels_of(capability: tuple[int, int] | None) -> tuple[int, int]:
    """The capability that stands for all whose kernels take the same memory; an A100's where it is not told.

    Below 8.0 there is no FlashAttention; some have less shared memory, and the kernels smaller tiles.
    """
    if capability is None or capability in {(8, 0), (8, 7)} or (9, 0) <= capability < (12, 0):
        return (8, 0)
    return (7, 5) if capability < (8, 0) else (8, 6)
