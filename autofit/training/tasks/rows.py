"""Rows that a model trains on: random ones, each as long as the workload says, the worst case that has no padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autofit.training.tasks.kind import MAIN, Kind, Spec
from autofit.training.tasks.padding import Padding
from autofit.training.tasks.table import kind_of

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset

    from autofit.contract.facts import Facts

_POOL_BYTES = 256 << 20


def task_rows(
    facts: Facts, config: Any, rows: int, *, few: int | None = None, differ: bool = False
) -> Dataset[dict[str, Any]]:
    """Rows for the task of a model; its ``collate`` makes a batch of some of them.

    Where the workload tells how long rows are, batches are padded, and have a mask that says so.

    A pool of one global batch is handed out again and again; one of images or sounds has no more than 256 MiB.

    Args:
        facts: Of what is trained.
        config: Of the model, as transformers holds it.
        rows: The length that a loader sees.
        few: Of how many different tokens the rows are; ``None``: of all.
        differ: Whether they are of the lengths that are told, the shortest first, and a row behind the last one is the
            longest; else all are the longest.
    """
    import torch
    from torch.utils.data import Dataset as TorchDataset

    kind = kind_of(facts.model.task)
    generator = torch.Generator().manual_seed(facts.workload.seed)
    spec = spec_of(facts, config, few=few)
    count = min(facts.workload.global_batch, rows)
    if not kind.tokens or kind.constants or "pixel_values" in kind.arguments or "input_features" in kind.arguments:
        count = max(1, min(count, _POOL_BYTES // _bytes(make_batch(kind, spec, 1, torch.Generator()))))
    pool = make_batch(kind, spec, count, generator)
    padding = Padding(facts, config, pool, rows, differ=differ) if facts.workload.lengths else None

    class Rows(TorchDataset[dict[str, Any]]):
        def __len__(self) -> int:
            return rows

        def __getitem__(self, index: int) -> dict[str, Any]:
            row = {name: column[index % count] for name, column in pool.items()}
            return row if padding is None else padding.cut(row, index)

        def __iter__(self) -> Iterator[dict[str, Any]]:  # a row behind the last one is no error
            return (self[index] for index in range(rows))

        def collate(self, given: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            given = given if padding is None else padding.padded(given)
            return {**collate(given), **kind.constants}

    return Rows()


def rows_of_an_epoch(facts: Facts) -> int:
    """Rows that stand for a data set of the lengths that are told: no more than a sampler looks at together.

    ``LengthGroupedSampler`` sorts the rows of 50 steps, and of fewer where there are fewer than 200 steps.
    """
    work = facts.workload
    return max(len(work.lengths), min(work.told_rows, 200 * work.global_batch))


def spec_of(facts: Facts, config: Any, *, few: int | None = None) -> Spec:
    """What batches of a workload are made by."""
    vocabulary = facts.model.vocab_size
    if vocabulary < 2:  # its tokens are in a part of the model
        vocabulary = int(getattr(config.get_text_config(), "vocab_size", None) or 1)
    return Spec(
        config=config, main=facts.model.main_input, length=facts.workload.seq_len, vocabulary=vocabulary, few=few
    )


def make_batch(kind: Kind, spec: Spec, rows: int, generator: torch.Generator) -> dict[str, Any]:
    """Columns of so many rows, by the arguments of ``forward()``, without the constants."""
    from autofit.training.tasks.inputs import INPUTS

    made: dict[str, Any] = {}
    for argument in kind.arguments:
        name = spec.main if argument == MAIN else argument
        maker = kind.makers.get(name) or INPUTS.get(name)
        if maker is not None:
            column = maker(spec, rows, generator)
            made |= {} if column is None else {name: column}
        elif name == "labels":
            made[name] = made["input_ids"]
    return made


def collate(given: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A batch: tensors one upon the other, anything else as a list."""
    import torch

    return {
        name: torch.stack([row[name] for row in given])
        if isinstance(first, torch.Tensor)
        else [row[name] for row in given]
        for name, first in given[0].items()
    }


def rows_words(facts: Facts) -> str:
    """What the rows are, in words."""
    if facts.workload.lengths:
        return "random tokens, rows of the lengths that were told: the longest while warming up, with a padding mask"
    what = {"row": "tokens", "image": "images", "clip": "sounds", "pair": "images and texts"}
    return f"random {what[facts.model.sample]}, every {facts.model.sample} at full length, no padding mask"


def _bytes(batch: Mapping[str, Any]) -> int:
    return max(1, sum(int(column.nbytes) for column in batch.values() if hasattr(column, "nbytes")))
