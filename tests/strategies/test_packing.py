"""Packed rows: which rows are joined, how many a step takes, what is learned of them, and what a tune says of them."""

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from autofit import space
from autofit.commands.estimates import plans
from autofit.contract.outcome import Measured
from autofit.contract.technique import Kind
from autofit.costmodel.memory.requests import Requests
from autofit.output.document import read_document
from autofit.registry import loaded_rows, recipe_of, technique
from autofit.system.errors import InputError
from autofit.training.expected_rows import tokens_of
from autofit.training.runner import ProcessRunner
from autofit.training.timing import Effort
from tests.support.ragged import SKEWED, apart, collated, free_model, learned, ragged, told
from tests.support.scripted import WORDS, autofit, tiny_llama
from tests.support.synthetic import cpu_facts, cuda_facts
from tests.support.tiny import PLAIN, describe, write_config

BATCHING = technique("batching")
PACKED = PLAIN.replaced(micro_batch=8, accumulation=1, batching="packing")
ROOM = 40


def packed_recipe(**changed):
    """The recipe of a packed plan whose rows are of three to forty tokens, and whose packed ones are of forty."""
    lengths = tuple(range(3, ROOM + 1))
    return recipe_of(PACKED.replaced(**changed), told(cpu_facts(global_batch=8), lengths, told_rows=2000))


def data_of(rows):
    """Rows as a data set has them, beside the text that they were made of."""
    return [{"input_ids": row, "labels": row.clone(), "text": "words"} for row in rows]


def collate(given):
    return collated([row["input_ids"] for row in given])


# --- which rows are joined ----------------------------------------------------------------------------------------


def test_rows_are_joined_to_full_ones_and_none_is_cut_or_lost():
    numbers = random.Random(0)
    rows = [torch.full((numbers.choice((3, 5, 9, 30, ROOM)),), place) for place in range(200)]
    made = packed_recipe().dataset(data_of(rows), collate)
    found = [made[place] for place in range(len(made))]
    assert all(len(row["input_ids"]) <= ROOM for row in found)
    assert sum(len(row["input_ids"]) for row in found) == sum(map(len, rows))
    assert sum(len(row["input_ids"]) for row in found) > 0.97 * ROOM * len(found)
    seen = {}
    for row in found:
        assert {*row} == {"input_ids", "labels", "position_ids"}
        for place in row["input_ids"].unique().tolist():
            mine = row["input_ids"] == place
            assert row["position_ids"][mine].tolist() == [*range(len(rows[place]))]
            assert row["labels"][mine].tolist() == [-100, *[place] * (len(rows[place]) - 1)]
            seen[place] = seen.get(place, 0) + 1
    assert seen == dict.fromkeys(range(200), 1)


def test_padding_of_the_rows_themselves_is_left_out_on_either_side():
    for left in (False, True):
        batch = collated(ragged(5, 11, 3), left=left)
        rows = [{name: one[place] for name, one in batch.items()} for place in range(3)]
        made = packed_recipe().dataset(
            rows, lambda given: {name: torch.stack([one[name] for one in given]) for name in given[0]}
        )
        assert [len(made[place]["input_ids"]) for place in range(len(made))] == [19]


@pytest.mark.parametrize(
    ("rows", "make", "why"),
    [
        (data_of(ragged(5, ROOM + 1)), collate, "row 1 has 41 tokens, and packed rows have 40"),
        (data_of(ragged(5)), lambda given: {"input_ids": given[0]["input_ids"][None]}, "without a label for each"),
        ((row for row in data_of(ragged(5))), collate, "a stream"),
    ],
)  # fmt: skip
def test_rows_that_can_not_be_packed_are_refused(rows, make, why):
    with pytest.raises(InputError, match=why):
        packed_recipe().dataset(rows, make)


def test_rows_of_an_evaluation_are_collated_as_ever_and_packed_ones_are_filled_up():
    recipe = packed_recipe()
    own = recipe.collator(collate)
    given = data_of(ragged(5, 11, 3))
    assert own(given)["input_ids"].shape == (3, 11)
    batch = own([recipe.dataset(given, collate)[0]])
    assert {*batch} == {"input_ids", "labels", "position_ids"}
    assert batch["input_ids"].shape == (1, ROOM)
    counted, places = tokens_of(batch)
    assert (int(counted), places) == (19, ROOM)
    long = {name: torch.zeros(ROOM + 1, dtype=torch.long) for name in batch}
    with pytest.raises(InputError, match="longer than it was"):
        own([long])


@pytest.mark.parametrize(
    ("positions", "tokens"),
    [([0, 1, 2, 0, 1], 5), ([0, 1, 0, 0, 0], 2), ([2, 3, 4, 5, 6], 5), ([0, 1, 2, 3, 0], 4), ([0, 0, 0, 1, 2], 3)],
)
def test_tokens_are_counted_by_runs_of_positions(positions, tokens):
    batch = {"input_ids": torch.zeros(2, 5, dtype=torch.long), "position_ids": torch.tensor([positions] * 2)}
    assert int(tokens_of(batch)[0]) == 2 * tokens


# --- what is learned ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "mistral"])
def test_packed_rows_are_trained_on_as_each_by_itself_is(kind, attention):
    rows = ragged(5, 31, 17, 2, 12, 8)
    recipe = packed_recipe()
    model, _ = free_model(kind, attention, PLAIN)
    made = recipe.dataset(data_of(rows), collate)
    assert len(made) < len(rows)
    loss, gradient = learned(model, recipe.collator(collate)([made[place] for place in range(len(made))]))
    count = sum(len(row) - 1 for row in rows)
    alone = [learned(model, {**collated([row]), "num_items_in_batch": torch.tensor(count)}) for row in rows]
    assert torch.allclose(loss, sum(one for one, _ in alone), rtol=1e-6)
    assert apart(gradient, sum(one for _, one in alone)) < 1e-6


# --- where it is offered, and what is said of the global batch --------------------------------------------------------


def test_rows_are_packed_where_another_method_may_be():
    facts = told(cpu_facts(global_batch=32))
    assert all(plan["batching"] != "packing" for plan in space.build(facts).plans)
    plans = [one for one in space.build(facts, frozenset(Kind)).plans if one["batching"] == "packing"]
    assert plans
    mean = sum(SKEWED) / len(SKEWED)
    for plan in plans[:: max(1, len(plans) // 20)]:
        rows = loaded_rows(plan, facts)
        recipe = recipe_of(plan, facts)
        assert recipe.loaded_rows == recipe.emission.training_args["per_device_train_batch_size"] == rows
        assert rows * 128 >= 0.9 * plan["micro_batch"] * mean, "full of as many tokens, but for what can't be filled"
        assert rows * 128 <= 1.2 * plan["micro_batch"] * mean
        assert plan["micro_batch"] * plan["accumulation"] == 32
    said = BATCHING.changes("packing", PLAIN.replaced(micro_batch=32, accumulation=1), facts)
    assert "7 packed rows of 128" in said
    assert f"32 rows have {32 * mean:,.0f}" in said


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"micro_batch": 1}, "no whole number is near enough"),
        ({"micro_batch": 32, "attention": "flash_attention_2"}, "padding_free"),
        ({"micro_batch": 32, "parallel": "ddp"}, "not tried under parallel=ddp"),
    ],
)
def test_a_plan_whose_rows_can_not_be_packed_says_why(values, why):
    plan = PLAIN.replaced(**{"micro_batch": 32, **values})
    assert why in BATCHING.conflict("packing", plan, told(cuda_facts(global_batch=32)))


def test_models_that_do_not_keep_rows_apart_pack_none():
    facts = told(cpu_facts())
    other = replace(facts, model=replace(facts.model, model_type="opt"))
    assert "not known" in BATCHING.choice("packing", other).reason
    assert BATCHING.choice("packing", other).status == "withheld"


# --- trials and tunes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launch_path", ["trainer", "loop"])
def test_packed_rows_are_measured_by_their_tokens(server, tmp_path, launch_path):
    folder = write_config(tmp_path / "tiny", max_position_embeddings=128)
    found = told(describe(server, folder, seq_len=128, global_batch=32), told_rows=2000)
    found = replace(found, workload=replace(found.workload, launch_path=launch_path))
    runner = ProcessRunner(tmp_path / "trials", found, folder, server)
    plan = PACKED.replaced(micro_batch=32)
    outcome = runner.run(0, plan, Effort(), purpose="final", limit_seconds=120.0).outcome
    assert isinstance(outcome, Measured), outcome
    seen = outcome.evidence.of("batching")
    assert seen["packed"] == seen["micro_steps"] > 0
    assert outcome.evidence.of("micro_batch") == {"rows": 7, "joined": 7}
    assert outcome.evidence.seq_len == 128
    assert outcome.padding < 0.06
    mean = sum(SKEWED) / len(SKEWED)
    assert outcome.tokens_per_second == pytest.approx(outcome.samples_per_second * mean)
    assert "not of packed rows" in BATCHING.in_effect("packing", {**seen, "packed": 0}, found)


def skewed_texts(folder):
    """A causal model, its tokenizer, and rows of which some are five times as long as others."""
    numbers = random.Random(0)
    tiny_llama(folder)
    (folder / "skewed").mkdir()
    lines = [
        json.dumps({"text": " ".join(numbers.choices(WORDS, k=numbers.choice((6, 8, 12, 60))))}) for _ in range(400)
    ]
    (folder / "skewed" / "train.jsonl").write_text("\n".join(lines))


CAUSAL = """
import argparse, datasets, transformers

parser = argparse.ArgumentParser()
parser.add_argument("--longer", action="store_true")
options = parser.parse_args()
tokenizer = transformers.AutoTokenizer.from_pretrained("llama")
model = transformers.AutoModelForCausalLM.from_pretrained("llama")
rows = datasets.load_dataset("json", data_files="skewed/train.jsonl", split="train")
rows = rows.map(lambda row: tokenizer(row["text"] * (2 if options.longer else 1), return_token_type_ids=False))
trainer = transformers.Trainer(
    model=model,
    args=transformers.TrainingArguments(
        "trained", per_device_train_batch_size=8, max_steps=3, use_cpu=True, report_to="none", save_strategy="no"
    ),
    train_dataset=rows,
    data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
print("trained on", trainer.args.per_device_train_batch_size, "rows of", trainer.train_dataset[0]["input_ids"].shape)
"""


def test_the_allocator_of_an_estimate_gets_as_many_rows_as_the_model(monkeypatch):
    given = []
    monkeypatch.setattr(
        plans, "requests", lambda *_, rows, **__: given.append(rows) or Requests(*[np.array([], dtype=np.int64)] * 3)
    )
    facts = told(cpu_facts(global_batch=8), tuple(range(3, ROOM + 1)), told_rows=2000)
    plans._smallest_capacity(SimpleNamespace(peak_bytes=0), (None, None), PACKED, facts, None)
    assert given == [loaded_rows(PACKED, facts)]
    assert given[0] < PACKED["micro_batch"]


@pytest.mark.slow
@pytest.mark.by_hand
@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer"])
def test_a_script_is_packed_without_a_line_changed(tmp_path, kind):
    skewed_texts(tmp_path)
    if kind == "Trainer":
        script, behind = tmp_path / "train.py", ("--",)
        script.write_text(CAUSAL)
    else:
        script = Path(pytest.importorskip("trl").__file__).parent / "scripts" / "sft.py"
        rows = ("--per_device_train_batch_size", 8, "--max_length", 128, "--max_steps", 3)
        behind = ("--", "--model_name_or_path", "llama", "--dataset_name", "skewed", "--use_cpu", *rows)
        behind = (*behind, "--output_dir", "trained", "--report_to", "none")
    held = [f"--fix={one}" for one in ("checkpointing=off", "precision=fp32", "optimizer=adamw", "loader=default",
                                       "micro_batch=8", "batching=packing")]  # fmt: skip
    done = autofit(tmp_path, "tune", script, "--device", "cpu", "--output", "out", "--trials", 1, *held, *behind)
    assert done.returncode == 0, done.stderr
    found = read_document(tmp_path / "out")
    assert found.guard.verdict == "method", found.guard
    rows = loaded_rows(found.plan, found.facts)
    assert f"takes {rows} packed rows" in " ".join(found.changes)
    assert found.promise.tokens_per_second > found.promise.samples_per_second
    ran = autofit(tmp_path, "run", "out", script, *behind)
    assert ran.returncode == 0, ran.stderr
    assert "took no effect: batching" not in ran.stderr, ran.stderr
    if kind == "Trainer":
        assert f"trained on {rows} rows of" in ran.stdout
        longer = autofit(tmp_path, "run", "out", script, *behind, "--longer")
        assert longer.returncode != 0
        assert "cut rows to the length that was tuned for" in longer.stderr, longer.stderr
    verified = json.loads(autofit(tmp_path, "verify", "out", "--json", "--tolerance", 0.95).stdout)
    assert verified["outcome"]["kind"] == "measured", verified["broken"]
    seen = verified["outcome"]["evidence"]["techniques"]["batching"]
    assert seen["packed"] == seen["micro_steps"]
    assert verified["outcome"]["padding"] < 0.1


@pytest.mark.slow
@pytest.mark.by_hand
def test_rows_are_packed_in_a_tune_its_files_and_its_launch(tmp_path):
    write_config(tmp_path / "tiny", max_position_embeddings=256, hidden_size=128, intermediate_size=512)
    (tmp_path / "lengths").write_text("\n".join(map(str, [24] * 550 + [32] * 350 + [256] * 100)))
    held = [f"--fix={one}" for one in ("checkpointing=off", "attention=default", "precision=fp32", "optimizer=adamw",
                                       "kernels=none", "micro_batch=32", "batching=packing")]  # fmt: skip
    words = ("--device", "cpu", "--lengths", "lengths", "--global-batch", 32, "--output", "out", "--trials", 1)
    done = autofit(tmp_path, "tune", "tiny", *words, *held)
    assert done.returncode == 0, done.stderr
    found = read_document(tmp_path / "out")
    assert found.guard.verdict == "method", found.guard
    assert any("packed rows of 256" in one for one in found.changes)
    assert "packed rows of 256" in " ".join(done.stdout.split())
    written = json.loads((tmp_path / "out" / "training_args.json").read_text())
    assert written["per_device_train_batch_size"] == loaded_rows(found.plan, found.facts) == 6
    verified = json.loads(autofit(tmp_path, "verify", "out", "--json").stdout)
    assert verified["outcome"]["kind"] == "measured", verified["broken"]
    seen = verified["outcome"]["evidence"]["techniques"]["batching"]
    assert seen["packed"] == seen["micro_steps"]
    assert verified["speed_ratio"] > 0.7, verified["broken"]
