"""What is asked of a trace, and which cards it serves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from autofit.contract.facts import Facts
from autofit.contract.plan import Plan, Value
from autofit.contract.technique import Part
from autofit.registry import technique

_CUDNN_LAST = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
"""PyTorch reads it."""
_DATA_CENTRE = {9, 10}
"""Major capabilities of the H100, B200 and their like, for which PyTorch has kernels that no other card runs."""


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
        spare: Where those go that ``folder`` has no room for; empty for nowhere.
    """

    facts: Facts
    config: str
    requests: tuple[TraceRequest, ...]
    folder: str
    spare: str = ""

    def is_made(self, request: TraceRequest) -> bool:
        """Whether the file of a request is there."""
        return any((Path(one) / request.file).exists() for one in (self.folder, self.spare) if one)


def traced_plan(plan: Plan, part: Part) -> Plan | None:
    """The plan whose trace serves this one; ``None`` where a technique can't be traced."""
    values: dict[str, Value] = {}
    for name, value in plan.items():
        one = technique(name)
        traced = one.traced_as(value, part)
        if traced is None or not one.traced_in(plan):
            return None
        values[name] = traced
    return Plan(values)


def run_plan(plan: Plan) -> Plan:
    """The plan whose micro-steps make the same tensors in the same order."""
    return Plan({name: technique(name).runs_as(value) for name, value in plan.items()})


def alone_plan(plan: Plan) -> Plan:
    """The plan whose first micro-step makes the same tensors as one of this plan that is the only one of its step."""
    return Plan({name: technique(name).alone_as(value) for name, value in plan.items()})


def kernels_of(capability: tuple[int, int] | None) -> tuple[int, int]:
    """The capability that stands for all whose kernels take the same memory; an A100's where it is not told.

    Below 8.0 there is no FlashAttention; some have less shared memory, and the kernels smaller tiles. On 9.x and 10.x
    PyTorch prefers cuDNN's attention, unless the environment says otherwise.
    """
    if capability is not None and capability[0] in _DATA_CENTRE and os.environ.get(_CUDNN_LAST) != "1":
        return (capability[0], 0)
    if capability is None or capability in {(8, 0), (8, 7)} or (9, 0) <= capability < (12, 0):
        return (8, 0)
    return (7, 5) if capability < (8, 0) else (8, 6)


def groups_experts(capability: tuple[int, int] | None) -> bool:
    """Whether PyTorch multiplies experts in bfloat16 all at once there, and not one after the other."""
    return capability is not None and capability[0] in _DATA_CENTRE
