"""Tells a trace what the Python of recomputation takes of the host."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from autofit.contract.technique import replacing

from .kept import KeptOutputs

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.utils.checkpoint import CheckpointPolicy

    from autofit.contract.trace import TraceRecorder

_HOST_A_REGION, _HOST_A_SAVED_TENSOR, _HOST_A_SEEN_OPERATOR = 35.0, 2.5, 4.0
"""What the Python of a checkpointed region takes of the host, in operators: for the region itself, for each tensor that
autograd would save, and for each operator that a selective one looks at, there and back. Measured with tiny models on
a CPU core (tests/bench/host_bench.py): 26 to 44, 1.9 to 3.2 and 3.2 to 4.7."""


def counting(recorder: TraceRecorder) -> AbstractContextManager[None]:
    """Tell a trace what the Python of checkpointed regions takes of the host.

    PyTorch has no public place to look at it: where its own class is gone, nothing is told of what autograd saves.
    """
    import torch.utils.checkpoint as home

    hooks, policy = getattr(home, "_checkpoint_hook", None), KeptOutputs.policy

    def told_policy(self: KeptOutputs, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not context.is_recompute:
            recorder.busies_host(_HOST_A_SEEN_OPERATOR)
        return policy(self, context, op, *args, **kwargs)

    if hooks is None:
        return replacing([(KeptOutputs, "policy", told_policy)])

    class Told(hooks):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            recorder.busies_host(_HOST_A_REGION)
            pack = self.pack_hook

            def told_pack(tensor: torch.Tensor) -> Any:
                recorder.busies_host(_HOST_A_SAVED_TENSOR)
                return pack(tensor)

            self.pack_hook: Callable[..., Any] = told_pack

    return replacing([(KeptOutputs, "policy", told_policy), (home, "_checkpoint_hook", Told)])
