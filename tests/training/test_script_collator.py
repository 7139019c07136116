"""What a script's collator makes of a row: whether it depends on the other rows, or on the calls before."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data import IterableDataset as Streamed
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForMultipleChoice,
    DataCollatorForPermutationLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    default_data_collator,
)
from transformers.trainer_utils import RemoveColumnsCollator

from autofit.training.jobs import DescribeScriptJob
from autofit.training.scripts.plain_loop import reasons
from autofit.training.scripts.plain_loop.loader import blends_rows, counts_calls

LENGTHS = (12, 12, 9, 9, 7, 4, 3, 3)


@pytest.fixture
def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    words = {name: number for number, name in enumerate(["[PAD]", "[MASK]", *map(str, range(60))])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", mask_token="[MASK]")


def texts(**more):
    draw = random.Random(0)
    return [{"input_ids": [draw.randrange(2, 60) for _ in range(length)], **more} for length in LENGTHS]


def images():
    return [{"pixel_values": torch.randn(3, 4, 4), "labels": torch.tensor(place)} for place in range(6)]


def stacked(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def blends(collate, rows):
    return blends_rows(DataLoader(rows, batch_size=2, collate_fn=collate), [*range(len(rows))])


def mixed_up(rows):
    batch, part = stacked(rows), torch.distributions.Beta(1.0, 1.0).sample()
    images, labels = batch["pixel_values"], torch.nn.functional.one_hot(batch["labels"], 8).float()
    others = torch.randperm(len(rows))
    return {
        "pixel_values": part * images + (1 - part) * images[others],
        "labels": part * labels + (1 - part) * labels[others],
    }


def now_and_then(rows):
    return mixed_up(rows) if random.random() < 0.3 else stacked(rows)


def cut_in(rows):
    batch, at = stacked(rows), np.random.randint(3)  # noqa: NPY002
    batch["pixel_values"][:, :, at:] = batch["pixel_values"].flip(0)[:, :, at:].clone()
    return batch


def standardized(rows):
    batch = stacked(rows)
    return {**batch, "pixel_values": batch["pixel_values"] - batch["pixel_values"].mean(0)}


class ByItself:
    """MixUp by random numbers of its own."""

    def __init__(self):
        self.draw = np.random.default_rng(0)

    def __call__(self, rows):
        batch = stacked(rows)
        others = torch.tensor(self.draw.permutation(len(rows)))
        return {**batch, "pixel_values": batch["pixel_values"] * 0.5 + batch["pixel_values"][others] * 0.5}


@pytest.mark.parametrize("collate", [mixed_up, now_and_then, cut_in, standardized, ByItself()])
def test_a_collator_that_makes_a_row_of_several_is_seen(collate):
    assert blends(collate, images())
    assert blends(RemoveColumnsCollator(collate, ["pixel_values", "labels"]), images())


def test_so_is_one_of_rows_that_come_in_their_order():
    class Rows(Streamed):
        def __iter__(self):
            yield from images()

    assert blends_rows(DataLoader(Rows(), batch_size=2, collate_fn=mixed_up), [])


def augmented(rows):
    for row in rows:
        if random.random() < 0.5:
            row["pixel_values"] = row["pixel_values"].flip(-1)
        row["pixel_values"] = row["pixel_values"] + torch.randn_like(row["pixel_values"])
    return stacked(rows)


def erased(rows):
    """A random part of each, of a number of draws that its values tell."""
    for row in rows:
        while random.random() < row["pixel_values"].sigmoid().mean():
            row["pixel_values"][:, random.randrange(4)] = 0
    return stacked(rows)


def sorted_by_label(rows):
    return augmented(sorted(rows, key=lambda row: -row["labels"]))


def shuffled(rows):
    random.shuffle(rows)
    return stacked(rows)


def resized(rows):
    side = random.choice([2, 3, 4])
    return stacked([{**row, "pixel_values": row["pixel_values"][:, :side, :side]} for row in rows])


def images_of_some(rows):
    """All images of the rows, of which each has another number, below one another."""
    every = [row["pixel_values"].expand(int(row["labels"]) % 3, 3, 4, 4) for row in rows]
    return {"labels": torch.stack([row["labels"] * 0 for row in rows]), "pixel_values": torch.cat(every)}


DRAWN = random.Random(3)


def always_others(rows):
    return {**stacked(rows), "seen": torch.rand(len(rows)) * DRAWN.random()}


@pytest.mark.parametrize(
    "collate",
    [
        stacked, default_data_collator, augmented, erased, sorted_by_label, shuffled, resized, images_of_some,
        always_others, lambda _: 1 / 0, lambda rows: stacked(rows[:1]), lambda rows: rows,
    ],
)  # fmt: skip
def test_one_that_makes_each_row_by_itself_is_none(collate):
    assert not blends(collate, images())


@pytest.mark.parametrize(
    ("kind", "given", "more"),
    [
        (DataCollatorWithPadding, {}, {}),
        (DataCollatorForLanguageModeling, {"mlm": False}, {}),
        (DataCollatorForLanguageModeling, {"mlm": True}, {}),
        (DataCollatorForLanguageModeling, {"mlm": True, "seed": 5}, {}),
        (DataCollatorForLanguageModeling, {"mlm": True, "pad_to_multiple_of": 8}, {}),
        (DataCollatorForPermutationLanguageModeling, {}, {}),
        (DataCollatorForSeq2Seq, {}, {"labels": [3, 4, 5]}),
        (DataCollatorForTokenClassification, {}, {"labels": [1, 0, 1]}),
    ],
)
def test_those_of_transformers_are_none(kind, given, more, tokenizer):
    rows = [{**row, "input_ids": row["input_ids"] * 2} for row in texts(**more)]
    assert not blends(kind(tokenizer, **given), rows)
    assert counts_calls(DataLoader(rows, collate_fn=kind(tokenizer, **given))) is None


def test_nor_are_those_that_join_rows_or_choices(tokenizer):
    assert not blends(DataCollatorWithFlattening(), texts(labels=[1, 2]))
    choices = [{"input_ids": [row["input_ids"]] * 3, "label": 1} for row in texts()]
    assert not blends(DataCollatorForMultipleChoice(tokenizer), choices)


def test_random_numbers_are_as_before():
    rows, collate = images(), ByItself()
    own = collate.draw.bit_generator.state
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert blends(cut_in, rows)
    assert blends(collate, rows)
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002
    assert collate.draw.bit_generator.state == own


class Counts:
    """A curriculum: longer rows with each eight calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, rows):
        self.calls += 1
        keep = 2 + self.calls // 8
        return {name: one[..., :keep] for name, one in stacked(rows).items()}


class Logs(Counts):
    def __call__(self, rows):
        self.calls += 1
        if self.calls == 1:
            print("the first", len(rows))
        return stacked(rows)


class CountsElsewhere(Counts):
    def longer(self):
        self.calls += 1
        return 2 + self.calls // 8

    def rows(self, rows):
        keep = self.longer()
        return {name: one[..., :keep] for name, one in stacked(rows).items()}


def test_a_method_that_goes_by_its_calls_is_told():
    told = "its collator (CountsElsewhere.rows) goes by what it keeps of the micro-batches before (line "
    assert counts_calls(DataLoader(images(), collate_fn=CountsElsewhere().rows)).startswith(told)


def test_one_that_goes_by_its_calls_is_told():
    told = "its collator (Counts.__call__) goes by what it keeps of the micro-batches before (line "
    for collate in (Counts(), RemoveColumnsCollator(Counts(), [])):
        assert counts_calls(DataLoader(images(), collate_fn=collate)).startswith(told)
    for collate in (Logs(), stacked, None, ByItself(), mixed_up):
        assert counts_calls(DataLoader(images(), collate_fn=collate)) is None


TRAINS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments

class Net(nn.Linear):
    def forward(self, rows, labels=None):
        found = super().forward(rows)
        return {"loss": found.square().mean()}

calls = 0

def collate(rows):
    global calls
    calls += 1
    rows = torch.stack([row["rows"] for row in rows])
    COLLATES

data = [{"rows": torch.randn(4)} for _ in range(64)]
model = Net(4, 1)
"""
TRAINER = """
arguments = TrainingArguments("out", use_cpu=True, report_to="none", per_device_train_batch_size=4, max_steps=9)
Trainer(model=model, args=arguments, train_dataset=data, data_collator=collate).train()
"""
LOOP = """
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
loader = DataLoader(data, batch_size=4, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize("trains", [TRAINER, LOOP], ids=["trainer", "loop"])
@pytest.mark.parametrize(
    ("collates", "blended", "counted"),
    [
        ("return {'rows': rows}", False, False),
        ("return {'rows': rows + rows.flip(0)}", True, False),
        ("return {'rows': rows * calls}", False, True),
    ],
)
def test_what_a_scripts_collator_does_holds_its_split(trains, collates, blended, counted, server, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAINS.replace("COLLATES", collates) + trains)
    with server.ask(tmp_path, DescribeScriptJob(path=str(path), arguments=(), call=1)) as answer:
        script = answer["script"]
        told = [script["depends_on_rows"], script["own_split"], script["loading"]["fixed"]]
    assert told[0] == (reasons.BLENDS if blended else None)
    assert [bool(one and one.startswith("its collator (collate)")) for one in told[1:]] == [counted] * 2
