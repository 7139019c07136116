"""Rows of the lengths that somebody has told: cut out of full ones, and padded to the longest of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autofit.contract.facts import Facts

_IGNORED = -100
_TOKENS, _MASK, _LABELS = "input_ids", "attention_mask", "labels"


class Padding:
    """Cuts rows and pads batches of them.

    Args:
        facts: Whose workload tells the lengths.
        config: Of the model; names its padding token.
        pool: Columns of rows at full length; those whose last dimension is as long are cut.
        rows: The length that a loader sees.
        differ: Whether these rows are of the lengths that are told, the shortest first; else all are the longest.
    """

    def __init__(self, facts: Facts, config: Any, pool: Mapping[str, Any], rows: int, *, differ: bool) -> None:
        full, lengths = facts.workload.seq_len, facts.workload.lengths
        self.cut_names = {
            name for name, column in pool.items() if getattr(column, "ndim", 0) > 1 and column.shape[-1] == full
        }
        self.full = full
        self.fill = int(getattr(config.get_text_config(), "pad_token_id", None) or 0)
        self.lengths = [lengths[int(row / rows * len(lengths))] for row in range(rows)] if differ else []

    def cut(self, row: Mapping[str, Any], index: int) -> dict[str, Any]:
        """A row at its own length; its last token, which may end the text, stays the last one.

        A row behind the last one is as long as can be.
        """
        import torch

        length = self.lengths[index] if index < len(self.lengths) else self.full
        cut = {
            name: torch.cat([value[..., : length - 1], value[..., -1:]], -1) if name in self.cut_names else value
            for name, value in row.items()
        }
        return {**cut, _MASK: torch.ones_like(cut[_TOKENS])}

    def padded(self, given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Rows as long as the longest of them: no loss is taken of what is added, and no attention paid to it."""
        from torch.nn.functional import pad

        if _TOKENS not in given[0]:  # a Trainer leaves out what its model does not take
            return [dict(row) for row in given]
        longest = max(int(row[_TOKENS].shape[-1]) for row in given)
        fills = {_MASK: 0, _LABELS: _IGNORED}
        return [
            {
                name: pad(value, (0, longest - value.shape[-1]), value=fills.get(name, self.fill))
                if name in self.cut_names or name == _MASK
                else value
                for name, value in row.items()
            }
            for row in given
        ]
