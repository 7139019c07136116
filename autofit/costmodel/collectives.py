"""What collectives cost beside the tensors that they move: memory of NCCL's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autofit.contract.layout import PARALLEL, layout_of

if TYPE_CHECKING:
    from autofit.contract.facts import Workload
    from autofit.contract.plan import Value

_OF_TWO_BYTES, _OF_MORE_BYTES = 544 * 10**6, 688 * 10**6
"""Of a communicator on A100s, channels' buffers included, as ``nvidia-smi`` shows it (NVIDIA/nccl issue 964); it lies
outside PyTorch's allocator. It depends on NCCL's version, the topology and ``NCCL_BUFFSIZE``: to be measured."""


def nccl_bytes(plan: Mapping[str, Value], work: Workload) -> int:
    """Device memory of the plan's communicators: one of the whole world, and one for each further group of a rank."""
    layout = layout_of(plan.get(PARALLEL, "none"), work.processes)
    if layout is None or layout.world == 1:
        return 0
    groups = [layout.world]
    groups += [
        size for size in (layout.replicate, layout.shard, layout.tensor, layout.context) if 1 < size < layout.world
    ]
    return sum(_OF_TWO_BYTES if size == 2 else _OF_MORE_BYTES for size in groups)
