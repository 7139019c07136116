"""What the ranks of one training tell each other while they are measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The processes of one training, this one among them.

    Attributes:
        size: How many there are.
    """

    size: int = 1

    def agrees(self, yes: bool) -> bool:
        """Whether any rank says yes: ranks that stopped after different steps would wait for one another."""
        return yes if self.size == 1 else self._reduced(float(yes), "MAX") > 0

    def mean(self, number: float) -> float:
        """The mean of what each rank has."""
        return number if self.size == 1 else self._reduced(number, "SUM") / self.size

    def _reduced(self, number: float, how: str) -> float:
        import torch
        from torch import distributed

        if not distributed.is_initialized():  # a world of one, by mistake; its evidence says so
            return number
        on_cuda = "nccl" in distributed.get_backend()
        held = torch.tensor([number], dtype=torch.float64, device="cuda" if on_cuda else "cpu")
        distributed.all_reduce(held, op=getattr(distributed.ReduceOp, how))
        return float(held.item())
