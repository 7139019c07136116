"""The rows of a script: as long as its collator makes them, the longest wherever they lie, the usual ones timed."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from autofit.contract.script import Script
from autofit.system.statistics import median
from autofit.training.expected_rows import Tokens, usual_steps
from autofit.training.row_order import Wanted, expected, order
from autofit.training.scripts import rows
from autofit.training.scripts.loading import loading_of, rows_an_epoch
from autofit.training.scripts.traits import longest_batch
from tests.support.synthetic import cpu_facts


def padded(given):
    """Texts and answers, each padded by itself."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([torch.ones(row["text"], dtype=torch.long) for row in given], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": ids,
        "labels": pad([torch.ones(row["answer"]) for row in given], batch_first=True),
    }


def script_of(**changed):
    return Script(path="t.py", sha256="", trainer="Trainer", micro_batch=2, accumulation=1, **changed)


def asked(script, *, a_step, warm_up, steps, micro_batch=2, ranks=1, rank=0):
    """Rows as a measurement of the script wants them."""
    return Wanted(
        micro_batch=micro_batch,
        accumulation=a_step // micro_batch // ranks,
        micro_steps=a_step // micro_batch // ranks,
        ranks=ranks,
        rank=rank,
        warm_up=warm_up,
        steps=steps,
        longest=script.longest_places,
        places=script.places,
    )


def test_rows_are_as_long_as_the_collator_makes_them():
    """The longest text and the longest answer are two rows: together they make the largest micro-batch."""
    data = [{"text": 5, "answer": 5, "unused": list(range(place))} for place in range(40)]
    data[3], data[7] = {"text": 50, "answer": 1}, {"text": 1, "answer": 60}
    found = rows.sample_of(data, padded)
    assert set(found.longest[:2]) == {3, 7}
    largest = max(
        sum(part.numel() for part in padded([data[a], data[b]]).values())
        for a, b in itertools.combinations(range(len(data)), 2)
    )
    assert sum(part.numel() for part in padded([data[place] for place in found.longest[:2]]).values()) == largest
    assert found.tokens == (38 * 5 + 50 + 1) / 40
    assert found.looked_at == found.rows == 40


def test_the_longest_row_of_a_large_data_set_is_found():
    data = [[1] * 4] * 20_000
    data[12_345] = [1] * 400
    found = rows.sample_of(data, torch.tensor)
    assert (found.longest[0], found.longest_size, found.looked_at) == (12_345, 400, 20_000)


def test_the_longest_row_of_a_table_is_found_without_reading_rows():
    datasets = pytest.importorskip("datasets")
    lengths = [3] * 5000
    lengths[4321] = 90
    table = datasets.Dataset.from_dict({"input_ids": [[1] * length for length in lengths]})
    turned = table.select(range(4999, -1, -1))
    for data, place in ((table, 4321), (turned, 5000 - 1 - 4321)):
        found = rows.sample_of(data, lambda given: {"input_ids": torch.tensor([row["input_ids"] for row in given])})
        assert (found.longest[0], found.longest_size, found.looked_at) == (place, 90, 5000)
        assert found.tokens == pytest.approx(3.0, abs=0.2)


def test_a_collator_that_wants_more_rows_leaves_them_as_they_lie():
    def pairs(_given):
        raise ValueError("give me two")

    found = rows.sample_of([{"x": [1.0] * place} for place in range(1, 9)], pairs)
    assert (found.longest[0], found.longest_size, found.tokens) == (7, 8, None)


def test_a_data_set_without_a_length_is_not_looked_at():
    assert rows.sample_of(iter([1, 2]), None) == rows.Sample(rows=None)


def test_each_warm_up_step_takes_the_longest_and_then_come_the_expected():
    script = script_of(places=tuple(range(100)), longest_places=(500, 400, 300))
    drawn = list(order(RandomSampler(range(1000)), asked(script, a_step=2, warm_up=2, steps=3)))
    assert drawn[:4] == [500, 400, 500, 400]
    assert all(low < 50 <= high for low, high in (sorted(drawn[at : at + 2]) for at in (4, 6, 8)))
    own = list(order(SequentialSampler(range(7)), asked(script, a_step=2, warm_up=1, steps=4)))
    assert own == [500, 400, 0, 1, 2, 3, 4, 5, 6, 0]


class Loads:
    """A Trainer that makes its loader itself, as those of sentence-transformers: of that sampler of micro-batches."""

    def __init__(self, batches, data, collate=torch.tensor):
        self.loader = DataLoader(data, batch_sampler=batches, collate_fn=collate)

    def _get_train_sampler(self, dataset=None):
        raise AssertionError("nobody asks")

    def get_train_dataloader(self):
        return Accelerator(cpu=True).prepare(self.loader)


class OfOne(BatchSampler):
    """Micro-batches of the one half of the rows, then of the other, as of two data sets in one."""

    def __iter__(self):
        yield from ([one, one + 1] for one in (0, 2, 5, 7))


def test_a_loader_of_the_trainers_own_has_the_longest_rows_first():
    data = list(range(100))
    script = script_of(places=tuple(range(100)), longest_places=(99, 98, 97))
    wants = asked(script, a_step=4, warm_up=1, steps=2)
    drawn = Loads(BatchSampler(RandomSampler(data), 2, drop_last=False), data)
    rows.take_in_order(drawn, wants, Tokens(None))
    batches = [one.tolist() for one in drawn.get_train_dataloader()]
    assert batches[:2] == [[99, 98], [97, 99]]
    assert [low < 50 <= high for low, *_, high in (sorted(one + two) for one, two in (batches[2:4], batches[4:]))]
    assert len(batches) == 3 * 2
    alike = Loads(BatchSampler(RandomSampler(data), 2, drop_last=False), data)
    rows.take_the_same(alike, asked(script, a_step=4, warm_up=1, steps=2))
    batches = [one.tolist() for one in alike.get_train_dataloader()]
    assert batches[:2] == batches[2:]


def test_a_sampler_that_makes_the_micro_batches_keeps_them_the_largest_first():
    data = list(range(10))
    script = script_of(places=tuple(range(10)), longest_places=(8, 7))
    wants = asked(script, a_step=4, warm_up=1, steps=3)
    makes = OfOne(data, 2, drop_last=False)
    own = Loads(makes, data)
    rows.take_in_order(own, wants, Tokens(None))
    batches = [one.tolist() for one in own.get_train_dataloader()]
    assert batches[:2] == [[8, 7], [6, 5]]
    assert batches[2:] == [[0, 1], [2, 3], [5, 6], [7, 8], [0, 1], [2, 3]], "no epoch ends within a step"
    of_ranks = BatchSamplerShard(makes, num_processes=2, process_index=1)
    shared = Loads(of_ranks, data)
    shared.get_train_dataloader = lambda: shared.loader
    rows.take_in_order(shared, dataclasses.replace(wants, ranks=2, rank=1, micro_steps=1), Tokens(None))
    assert next(iter(shared.get_train_dataloader())).tolist() == [6, 5]


def test_rows_that_a_collator_takes_with_their_like_alone_are_looked_at_so():
    def collate(given):
        assert len({len(row) > 4 for row in given}) == 1, "rows of two data sets"
        return {"input_ids": torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in given])}

    data = [[1] * (place + 1 if place < 5 else 20 - place) for place in range(9)]
    loader = DataLoader(data, batch_sampler=OfOne(data, 2, drop_last=False), collate_fn=collate)
    found = rows.of_one_batch(rows.sample_of(data, collate), loader)
    assert found.longest == (5, 6)
    assert longest_batch(loader, found, 4)["input_ids"].shape == (15, 4)
    assert loading_of(loader, 2)["rows_per_second"]


def test_several_ranks_take_the_rows_of_one_process_in_turn():
    """As Accelerate hands out the micro-batches of a sampler: each rank has the longest and the usual ones."""
    script = script_of(places=tuple(range(100)), longest_places=tuple(range(500, 508)))
    alone = list(order(RandomSampler(range(1000)), asked(script, a_step=8, warm_up=1, steps=2)))
    together = asked(script, a_step=8, warm_up=1, steps=2, ranks=2)
    drawn = list(order(RandomSampler(range(1000)), together))
    assert (drawn, together.a_step, together.micro_steps) == (alone, 8, 2)
    batches = BatchSampler(drawn, 2, drop_last=False)
    shares = [[*BatchSamplerShard(batches, num_processes=2, process_index=rank)] for rank in (0, 1)]
    assert [share[0] for share in shares] == [[500, 501], [502, 503]]
    assert sorted(place for share in shares for one in share for place in one) == sorted(alone)


def test_a_rank_knows_the_sizes_of_its_own_micro_batches():
    lengths = [*range(1, 41)]
    script = script_of(places=tuple(range(40)), longest_places=(39, 38))

    def drawn(**which):
        told = []
        sampler = LengthGroupedSampler(2, lengths=lengths, generator=torch.Generator().manual_seed(0))
        places = [*order(sampler, asked(script, a_step=8, warm_up=0, steps=2, **which), told.append)]
        return places, told[0].places

    (places, sizes), (same, others) = drawn(ranks=2), drawn(ranks=2, rank=1)
    assert places == same
    made = [max(lengths[place] for place in places[at : at + 2]) * 2 for at in range(0, len(places), 2)]
    assert [size for step in sizes for size in step] == made[0::2]
    assert [size for step in others for size in step] == made[1::2]


@pytest.mark.parametrize("a_step", [4, 16])
def test_few_steps_see_what_many_would(a_step):
    """Tokens of three steps, of skewed lengths: half as far off as of rows at random, or less."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(500, generator=generator).mul(0.7).exp().mul(100).long().sort().values
    mean, count = float(lengths.float().mean()), 3 * a_step
    seen = float(lengths[expected(range(500), a_step, 3)].float().mean())
    drawn = lengths[torch.randint(0, 500, (200, count), generator=generator)].float().mean(1)
    assert abs(seen / mean - 1) < 0.5 * median((drawn / mean - 1).abs().tolist()) + 0.02


@pytest.mark.parametrize("micro_batch", [2, 8])
def test_a_few_steps_tell_what_an_epoch_of_skewed_rows_is_like(micro_batch):
    """No micro-batch of three epochs is larger than the first one of the warm-up; padding is as in an epoch."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.empty(2000).exponential_(1 / 40, generator=generator).long() + 4
    data = [{"text": int(length), "answer": 1} for length in lengths]
    # a row has two numbers, whatever it says: only the collator knows its length
    found = rows.sample_of(data, padded)
    script = script_of(places=found.spread, longest_places=found.longest)
    steps = 4
    drawn = list(order(RandomSampler(data), asked(script, a_step=32, warm_up=1, steps=steps)))

    def micro_batches(places):
        taken = [lengths[list(places[at : at + micro_batch])] for at in range(0, len(places), micro_batch)]
        return [(int(one.max()) * len(one), int(one.sum())) for one in taken]

    def padding(batches):
        return 1 - sum(tokens for _, tokens in batches) / sum(places for places, _ in batches)

    epochs = [one for _ in range(3) for one in micro_batches(torch.randperm(2000, generator=generator).tolist())]
    worst = micro_batches(drawn[:32])[0][0]
    assert worst >= 0.9 * max(places for places, _ in epochs), "of 500 rows of 2,000 that were looked at"
    assert padding(micro_batches(drawn[32:])) == pytest.approx(padding(epochs), abs=0.06)


def test_tokens_and_padding_of_the_timed_steps_are_counted():
    recipe, world = SimpleNamespace(unpadded=False), SimpleNamespace(mean=lambda mine: (mine + 20.0) / 2)
    clock = SimpleNamespace(done=0, timed=[1], step_tokens=[], padding=None, recipe=recipe, world=world)
    tokens = Tokens(clock)
    tokens.count(padded([{"text": 9, "answer": 1}]))
    clock.done = 1
    tokens.count(padded([{"text": 2, "answer": 1}, {"text": 6, "answer": 1}]))
    tokens.count(padded([{"text": 90, "answer": 1}]), training=False)
    tokens.tell()
    assert clock.step_tokens == [14.0], "the mean over the ranks, another of which had 20"
    assert clock.padding == pytest.approx(4 / 12)


def test_steps_of_short_and_long_rows_are_told_as_steps_of_usual_ones():
    """Steps take a second a token: those of rows twice as long as usual are twice as long, and none is the median."""
    facts = cpu_facts(script=script_of(tokens_a_row=10.0))
    clock = SimpleNamespace(
        recipe=SimpleNamespace(facts=facts, micro_batch=2),
        accumulation=1,
        step_tokens=[5.0, 5.0, 80.0],
        usual_places=None,
        waited_steps=lambda: (5.0, 5.0, 80.0),
    )
    assert usual_steps(clock) == (pytest.approx((20.0, 20.0, 20.0)), 10.0)
    clock.step_tokens = []
    assert usual_steps(clock)[0] == (5.0, 5.0, 80.0)


def test_the_length_of_rows_that_are_joined_is_that_of_one():
    assert script_of(batch={"input_ids": (2, 64)}).tokens == 64
    assert script_of(batch={"input_ids": (1, 128)}).tokens == 64, "two rows of TRL's packing, in a batch of one"
    assert script_of(batch={"input_ids": (4, 64)}).tokens == 64, "of DPO: two texts a row"
    assert script_of(batch={"pixel_values": (2, 3, 8, 8)}).tokens is None


class Unsized(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("loader", "given"),
    [
        (DataLoader(range(10), batch_size=2), 10),
        (DataLoader(range(9), batch_size=2), 9),
        (DataLoader(range(9), batch_size=2, drop_last=True), 8),
        (DataLoader(range(9), batch_size=2, sampler=[0] * 40), 40),
        (DataLoader(range(9), batch_sampler=[[0, 1, 2, 3], [4]]), 9),
        (DataLoader(Unsized(), batch_size=2), None),
    ],
)
def test_an_epoch_has_the_rows_that_its_loader_gives(loader, given):
    assert rows_an_epoch(loader, 2) == given


@pytest.mark.parametrize(
    ("told", "rows"),
    [
        ({"steps": 30, "epochs_rows": 99.0}, 240),
        ({"epochs_rows": 1200.0}, 1200),
        ({"epochs_rows": 132.0, "epochs": 2.0}, 132),
        ({"epochs_rows": 64 * 0.3, "epochs": 0.3}, 24),
        ({"epochs_rows": 66 * 1.5, "epochs": 1.5}, 66 + 5 * 8),
        ({"epochs_rows": 5 * 0.1, "epochs": 0.1}, 5),
        ({}, None),
    ],
)
def test_a_scripts_own_training_has_the_rows_of_its_steps_or_of_its_epochs(told, rows):
    assert script_of(**told).training_rows(8) == rows


@pytest.mark.parametrize(
    ("told", "share"),
    [
        ({"rows": 9, "longest": 10, "mean_length": 6.0}, 0.6),
        ({"rows": 9, "longest": 10, "mean_length": 9.5}, 1),
        ({"longest": 10, "mean_length": 6.0}, 1),
        ({}, 1),
    ],
)
def test_rows_that_hardly_differ_are_all_as_long(told, share):
    assert script_of(**told).mean_share == share
