"""The second micro-step of a trace, written from the first.

It runs the same operators on the same shapes. All that differs is what becomes of a gradient: the first one stays, the
second is added to it as soon as it is made, and goes. So the second micro-step need not be run where the first has left
nothing behind but a gradient of each parameter, and its loss.

Source: ``AccumulateGrad::accumulateGrad`` in ``torch/csrc/autograd/functions/accumulate_grad.h``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autofit.costmodel.tracing.recorder import Recorder

_COPIES = frozenset({"aten.clone.default", "aten.new_empty_strided.default", "aten.empty_strided.default"})
"""What makes a gradient that is kept, where it can't stay as it came; the second one needs no copy."""


class Repetition:
    """Sees the first micro-step, and writes the second.

    Args:
        recorder: Has the first, and takes the second.
        parameters: Those that are trained.
    """

    def __init__(self, recorder: Recorder, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.recorder = recorder
        self.parameters = parameters
        self.loss: torch.Tensor | None = None
        self._came: dict[tuple[int, int], list[torch.Tensor]] = {}
        """Parameters whose gradient was there before an event of a segment, by their numbers."""
        hooked = (one.register_post_accumulate_grad_hook(self._has_gradient) for one in parameters)  # type: ignore[no-untyped-call]
        self._hooks = [*hooked]

    def _has_gradient(self, parameter: torch.Tensor) -> None:
        place = len(self.recorder.segments) - 1, len(self.recorder.events)
        self._came.setdefault(place, []).append(parameter)

    def write(self, first: int, past: int) -> bool:
        """Write the segments from ``first`` to below ``past`` again; the first of them has begun, and has nothing yet.

        Returns:
            Whether that is what the second micro-step would do; if not, nothing is written.
        """
        for hook in self._hooks:
            hook.remove()
        gradients = self._gradients()
        blocks = {*(gradients or {}).values()}
        if gradients is None or not self._leaves_only(blocks, first, past):
            return False
        recorder = self.recorder
        copies: dict[int, int] = {}
        bounds = recorder.starts[first : past + 1]
        for segment, begin, end in zip(range(first, past), bounds, bounds[1:], strict=False):
            if segment > first:
                recorder.mark(f"1:{recorder.segments[segment].rpartition(':')[2]}")
            for at in range(begin, end + 1):
                for parameter in self._came.get((segment, at), ()):
                    assert parameter.grad is not None
                    recorder.adds_to(parameter.grad)
                    recorder.end_block(copies[gradients[id(parameter)]])
                if at < end:
                    event = recorder.events[at]
                    if event >= 0:
                        copies[event] = recorder.repeat_block(event, temporary=event in blocks)
                    else:
                        recorder.end_block(copies[~event])
            recorder.repeat_work(segment)
        return True

    def _gradients(self) -> dict[int, int] | None:
        """The block of each gradient by its parameter's ``id``; ``None`` where one is a copy, or has no own block."""
        there = [one for one in self.parameters if one.grad is not None]
        if sorted(map(id, there)) != sorted(id(one) for came in self._came.values() for one in came):
            return None
        recorder, names = self.recorder, [*self.recorder.names]
        found: dict[int, int] = {}
        for one in there:
            assert one.grad is not None
            block = recorder.block_of(one.grad)
            if block is None or recorder.sizes[block] != one.grad.nbytes or names[recorder.ops[block]] in _COPIES:
                return None
            found[id(one)] = block
        return found if len({*found.values()}) == len(found) else None

    def _leaves_only(self, gradients: set[int], first: int, past: int) -> bool:
        """Whether these and the loss are all that is there of what the segments made, and they freed nothing else."""
        recorder = self.recorder
        begin, end, events = recorder.starts[first], recorder.starts[past], recorder.events
        made = {event for event in events[begin:end] if event >= 0}
        freed = {~event for event in events[begin:end] if event < 0}
        left = made - {~event for event in events[begin:] if event < 0}
        if self.loss is not None:
            left -= {recorder.block_of(self.loss)}
        return left == gradients and freed <= made and len(events) == recorder.starts[-1]
