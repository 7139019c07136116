"""Rows of a data set joined to full ones of one length, which are taken apart by their positions."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autofit.contract.layout import PARALLEL
from autofit.contract.technique import InputError

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.contract.plan import Value

_IGNORED = -100
_SIMULATED_ROWS = 5000
_OFF = 0.1
"""By how much of the tokens of a step a packed one may be off."""
_APART_IN_SEVERAL = {"default", "sdpa", "eager"}
"""Attention that keeps packed rows apart where there are several in a micro-batch."""


def packed(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Which rows are joined to one, by their places: the longest first, each where it leaves the least room.

    Args:
        lengths: Tokens of each row, none more than ``room``.
        room: Tokens of a packed row.
    """
    found: list[list[int]] = []
    free: dict[int, list[list[int]]] = {}  # packed rows by the room that they have left
    rooms: list[int] = []  # what there is of it, in order
    for place in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        at = bisect.bisect_left(rooms, lengths[place])
        if at == len(rooms):
            row: list[int] = []
            left = room
            found.append(row)
        else:
            left = rooms[at]
            row = free[left].pop()
            if not free[left]:
                rooms.pop(at)
        row.append(place)
        left -= lengths[place]
        if left > 0:
            if not free.setdefault(left, []):
                bisect.insort(rooms, left)
            free[left].append(row)
    return found


@functools.lru_cache(maxsize=64)
def tokens_of_a_packed_row(lengths: tuple[int, ...], rows: int, room: int) -> float:
    """Tokens of a packed row that are no padding, in the mean over so many rows of these lengths."""
    count = max(len(lengths), min(rows, _SIMULATED_ROWS))
    drawn = [lengths[row * len(lengths) // count] for row in range(count)]
    return sum(drawn) / len(packed(drawn, room))


def lengths_of(facts: Facts) -> tuple[int, ...]:
    """Tokens of the rows that are to be expected, or of a sample of them; none where nothing is known of them."""
    work = facts.workload
    return tuple(work.lengths if work.script is None else work.script.lengths)


def mean_tokens(facts: Facts) -> float:
    """Their mean; where there are none all rows are as long."""
    lengths = lengths_of(facts) or (facts.workload.seq_len,)
    return sum(lengths) / len(lengths)


def packed_share(facts: Facts) -> float:
    """Packed rows that have the tokens of one of the data's, in the mean."""
    work, lengths = facts.workload, lengths_of(facts)
    if not lengths:
        return 1.0
    rows = work.told_rows if work.script is None else work.script.rows or 0
    return mean_tokens(facts) / tokens_of_a_packed_row(lengths, rows, max(work.seq_len, *lengths))


def not_packed(others: Mapping[str, Value], facts: Facts) -> str | None:
    """Why a plan can't take packed rows, in words."""
    if others[PARALLEL] != "none":
        return f"it was not tried under parallel={others[PARALLEL]}"
    if others["attention"] not in _APART_IN_SEVERAL:
        return (
            f"attention={others['attention']} was not seen to keep several packed rows apart: padding_free joins them"
        )
    exact = int(others["micro_batch"]) * packed_share(facts)
    if abs(max(1, round(exact)) / exact - 1) <= _OFF:
        return None
    return f"{others['micro_batch']} rows have the tokens of {exact:.2f} packed ones: no whole number is near enough"


def packed_words(plan: Mapping[str, Value], facts: Facts) -> str:
    """What packing makes of the global batch, in a sentence."""
    work, share = facts.workload, packed_share(facts)
    rows, times = int(plan.get("micro_batch", work.global_batch)), int(plan.get("accumulation", 1))
    taken, usual = max(1, round(rows * share)) * times, rows * times * mean_tokens(facts)
    tokens = taken / share * mean_tokens(facts)
    return (
        f"The global batch is one of tokens: an optimizer step takes {taken} packed rows of {work.seq_len:,}, with "
        f"{tokens:,.0f} tokens that are no padding in the mean, where {rows * times} rows have {usual:,.0f} "
        f"({tokens / usual - 1:+.1%}); which rows are trained on together is another choice."
    )


class Packed:
    """A data set of packed rows, each without padding: tokens, labels, and positions that begin anew at each row.

    Args:
        own: The data set whose rows are joined; a row is what ``collate`` makes of it alone.
        collate: Makes a batch of rows, with labels and a mask that tells padding.
        room: Tokens of a packed row.

    Raises:
        InputError: The data set can't be read by number, or a row can't be joined, or is too long.
    """

    def __init__(self, own: Any, collate: Callable[..., Any], room: int) -> None:
        if not hasattr(own, "__len__") or not hasattr(own, "__getitem__"):
            raise InputError("rows that come as a stream can't be packed", hint="give a data set with a length")
        self.own, self.collate = own, collate
        lengths = [len(self._alone(place)["input_ids"]) for place in range(len(own))]
        longest = max(lengths, default=0)
        if longest > room:
            raise InputError(
                f"row {lengths.index(longest)} has {longest:,} tokens, and packed rows have {room:,}",
                hint="cut rows to the length that was tuned for, or tune for these: --seq-len, --lengths",
            )
        self.joined = packed(lengths, room)

    def __len__(self) -> int:
        return len(self.joined)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A packed row: tensors of shape ``(tokens,)``."""
        import torch

        rows = [self._alone(place) for place in self.joined[index]]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def _alone(self, place: int) -> dict[str, Any]:
        import torch

        row = self.own[place]
        if isinstance(row, Mapping):  # a text beside its tokens is no matter of a batch
            row = {name: value for name, value in row.items() if not isinstance(value, str)}
        batch = self.collate([row])
        ids, labels = batch["input_ids"], batch.get("labels")
        if labels is None or labels.shape != ids.shape:
            raise InputError("rows without a label for each token can't be packed", hint="--fix batching=pad")
        mask = batch.get("attention_mask")
        kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        ids, labels = ids[kept], labels[kept].clone()
        labels[:1] = _IGNORED  # nothing in the row predicts it
        return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(len(ids))}


class Filling:
    """A collator that fills packed rows up to their length; of other rows it is the one inside.

    Args:
        own: Makes a batch of rows that are not packed, such as those of an evaluation.
        room: Tokens of a packed row.
        told: Holds the padding token as ``fill``, once the model is there.
    """

    def __init__(self, own: Callable[..., Any], room: int, told: Mapping[str, int]) -> None:
        self.own, self.room, self.told = own, room, told

    def __getattr__(self, name: str) -> Any:
        if name in {"own", "told"}:
            raise AttributeError(name)
        return getattr(self.own, name)

    def __call__(self, rows: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """A batch of shape ``(rows, room)``. What is added has no label, and each of it is a row by itself."""
        import torch

        fills = {"input_ids": self.told["fill"], "labels": _IGNORED, "position_ids": 0}
        if not rows or not isinstance(rows[0], Mapping) or {*rows[0]} != {*fills}:
            return self.own(rows, *args, **kwargs)
        if max(len(row["input_ids"]) for row in rows) > self.room:
            raise InputError("a row is longer than it was when the rows were packed", hint="--fix batching=pad")
        pad = torch.nn.functional.pad
        return {
            name: torch.stack([pad(row[name], (0, self.room - len(row[name])), value=value) for row in rows])
            for name, value in fills.items()
        }
