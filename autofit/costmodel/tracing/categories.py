"""What a block of a tape is, where the run did not tell it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autofit.costmodel.tracing.timeline import CATEGORIES

_STATE, _ACTIVATIONS, _LOGITS, _TEMPORARIES = map(CATEGORIES.index, ("state", "activations", "logits", "temporaries"))
_HEAD = frozenset({"head", "loss", "headB"})


def categorized(
    told: Sequence[int], segments: Sequence[str], made_in: Sequence[int], died_in: Mapping[int, int]
) -> list[int]:
    """Categories of blocks, with what was not told read off from when a block was made and freed.

    Args:
        told: Index of each block's category.
        segments: Names of the segments.
        made_in: Index of the segment that made each block.
        died_in: Index of the segment that freed a block, where one did.
    """
    names = [name.rpartition(":")[2] for name in segments]
    backward = [name.endswith("B") or (name[0] == "B" and name[1:].isdigit()) for name in names]
    found = list(told)
    for block, category in enumerate(found):
        if category != _TEMPORARIES:
            continue
        made, died = made_in[block], died_in.get(block, len(names))
        if names[made] in {"begin", "step"} and died == len(names):
            found[block] = _STATE
        elif names[made] in _HEAD:
            found[block] = _LOGITS
        elif not backward[made] and died < len(names) and backward[died] and names[made] != "step":
            found[block] = _ACTIVATIONS
    return found
