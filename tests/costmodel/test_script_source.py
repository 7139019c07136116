"""What a trace of a script trains on: many rows told by two of them, as the script's own collator makes them."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import BatchEncoding, masking_utils

from autofit.contract.script import Script
from autofit.costmodel.scripts.known_values import KnownValues
from autofit.costmodel.scripts.script_source import _each, longest_rows, paddings
from autofit.costmodel.tracing.emulation.fake_mode import FakeMode
from autofit.costmodel.tracing.recorder import Recorder

ROWS = 101


class Rows(torch.utils.data.Dataset):
    """Rows of 3 to 8 tokens, each with two images."""

    def __len__(self):
        return 6

    def __getitem__(self, place):
        numbers = torch.Generator().manual_seed(place)
        return {"ids": torch.randint(1, 90, (3 + place,), generator=numbers), "images": torch.rand(2, 3, 4)}


def collate(given, kind=dict, **more):
    ids = pad_sequence([row["ids"] for row in given], batch_first=True)
    images = torch.cat([row["images"] for row in given])
    return kind({"ids": ids, "mask": ids != 0, "grid": torch.tensor([[3, 4]] * len(given)), "images": images} | more)


def rows_of(collated):
    script = Script(path="t.py", sha256="", trainer="Trainer", micro_batch=2, accumulation=1, longest_places=(5, 4))
    counted = []

    def counting(given):
        counted.append(len(given))
        return collated(given)

    loader = DataLoader(Rows(), batch_size=2, collate_fn=counting)
    return *longest_rows(loader, script, ROWS, grows=True), counted


class Named(dict):
    """A mapping of a script's own, as loops use that call ``batch.to(device)``."""


class Pair(NamedTuple):
    ids: torch.Tensor
    images: torch.Tensor


@pytest.mark.parametrize("kind", [dict, BatchEncoding, Named])
def test_two_rows_tell_what_many_are(kind):
    found, known, counted = rows_of(lambda given: collate(given, kind, place=torch.tensor(7), of="a"))
    assert known
    assert type(found) is kind
    assert max(counted) < ROWS
    whole = collate([Rows()[5]] * ROWS, place=torch.tensor(7), of="a")
    assert {name: getattr(one, "shape", one) for name, one in found.items()} == {
        name: getattr(one, "shape", one) for name, one in whole.items()
    }
    for name in ("ids", "mask", "grid", "place"):
        assert torch.equal(found[name], whole[name]), name


def test_small_fractions_that_each_row_repeats_are_told_too():
    labels, large = torch.tensor([[0.0, 1.0]]), torch.ones(1, 1 << 17)
    found, *_ = rows_of(
        lambda given: collate(given, labels=labels.repeat(len(given), 1), large=large.repeat(len(given), 1))
    )
    assert torch.equal(found["labels"], labels.repeat(ROWS, 1))
    assert [type(found[name]) is torch.Tensor for name in ("labels", "large", "images")] == [True, False, False]
    assert found["large"].shape == (ROWS, 1 << 17)


def test_a_batch_keeps_its_kind_when_its_tensors_are_made_anew():
    for batch in (Named(ids=torch.ones(2)), Pair(torch.ones(2), torch.ones(3)), [torch.ones(2), (torch.ones(1),)]):
        made = _each(batch, torch.zeros_like)
        assert type(made) is type(batch)
        assert not made[0 if isinstance(made, list | tuple) else "ids"].any()


def test_named_rows_are_told_by_two_of_them():
    found, _, counted = rows_of(lambda given: Pair(collate(given)["ids"], collate(given)["images"]))
    assert max(counted) < ROWS
    assert found.ids.shape == (ROWS, 8)


@pytest.mark.parametrize(
    "collated",
    [
        lambda given: collate(given, names=["a"] * len(given)),
        lambda given: collate(given, square=torch.ones(len(given), len(given))),
        lambda given: collate(given, place=torch.arange(len(given))),
        lambda given: collate(given, spread=1 / (len(given) - 1)),
    ],
    ids=["names", "square", "numbered", "wants two"],
)
def test_rows_that_two_do_not_tell_are_all_collated(collated):
    found, _, counted = rows_of(collated)
    assert max(counted) == ROWS
    assert found["ids"].shape == (ROWS, 8)


@pytest.mark.parametrize(
    ("lengths", "rows", "hidden"),
    [
        ((8, 8, 8), 2, (False,)),
        ((8, 8, 5), 2, (False, True)),
        ((8, 7, 5), 2, (True,)),
        ((8, 7, 5), 1, (False,)),
    ],
)
def test_rows_as_long_as_one_another_have_no_padding_and_have_some_beside_a_shorter_one(lengths, rows, hidden):
    def collated(rows):
        ids = pad_sequence([torch.ones(row) for row in rows], batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}

    loader = DataLoader(list(lengths), batch_size=2, collate_fn=collated)
    script = Script(path="t.py", sha256="", trainer="Trainer", micro_batch=2, accumulation=1)
    script = dataclasses.replace(script, longest_places=(0, 1), places=(2, 1, 0))
    assert paddings(loader, script, rows) == hidden
    assert paddings(loader, dataclasses.replace(script, longest_places=()), rows) == (True,), "it is not known"


@pytest.mark.parametrize("hides", [False, True])
def test_transformers_asks_a_mask_whether_it_hides_anything(monkeypatch, hides):
    monkeypatch.setattr(masking_utils, "is_tracing", masking_utils.is_tracing)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[0, 0] = not hides
    known = KnownValues(Recorder())
    with FakeMode():
        fake, unknown = torch.empty(2, 8, dtype=torch.bool), torch.empty(2, 8, dtype=torch.bool)
        known.tell(fake, mask)
        known.answers_transformers()
        with known:
            assert masking_utils._ignore_causal_mask_sdpa(fake, 8, 8, 0, 0) is not hides
            assert not masking_utils._ignore_causal_mask_sdpa(unknown, 8, 8, 0, 0)
