"""Rows of the lengths in a file: read or refused in a line, padded as a script's, and what is timed is the usual."""

import random
from dataclasses import replace

import pytest
from click.testing import CliRunner

from autofit.cli import main
from autofit.commands.lengths import MOST, lengths_of, read_lengths
from autofit.contract.outcome import Measured
from autofit.costmodel.tracing import trace_job
from autofit.costmodel.tracing.trace_store import ground_of
from autofit.system.errors import InputError
from autofit.training.runner import ProcessRunner
from autofit.training.tasks.rows import task_rows
from autofit.training.timing import Effort
from tests.support.synthetic import cpu_facts
from tests.support.tiny import PLAIN, describe, write_config
from tests.support.traced import facts_of, like_a_process_of_its_own


def test_lengths_are_read_from_lines_or_json_and_many_are_thinned_out(tmp_path):
    (tmp_path / "lines").write_text("7\n3\n\n5 9\n")
    (tmp_path / "list.json").write_text("[7, 3, 5, 9]")
    assert read_lengths(str(tmp_path / "lines")) == read_lengths(str(tmp_path / "list.json")) == [3, 5, 7, 9]
    numbers = random.Random(0)
    many = [int(numbers.expovariate(0.01)) + 1 for _ in range(20_000)]
    (tmp_path / "many").write_text("\n".join(map(str, many)))
    few = read_lengths(str(tmp_path / "many"))
    assert (len(few), few[-1]) == (MOST, max(many))
    assert sum(few) / MOST == pytest.approx(sum(many) / len(many), rel=0.02)


@pytest.mark.parametrize(
    ("text", "why"),
    [(None, "can't be read"), ("", "holds no lengths"), ("12\nten\n", "number 2 is 'ten'"), ("[1, 2", "no JSON list"),
     ("[1.5]", "number 1 is '1.5'"), ("0", "number 1 is '0'"), ("-4", "'-4'"), ("[true]", "'True'")],
)  # fmt: skip
def test_what_is_no_file_of_lengths_is_refused(tmp_path, text, why):
    path = tmp_path / "lengths"
    if text is not None:
        path.write_text(text)
    done = CliRunner().invoke(main, ["tune", "demo", "--lengths", str(path), "--output", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert why in done.stderr
    assert not (tmp_path / "out").exists()


def test_rows_longer_than_asked_for_are_cut_and_images_have_no_lengths(tmp_path):
    (tmp_path / "lengths").write_text("1 8 40 90")
    said, model = [], cpu_facts().model
    assert lengths_of(str(tmp_path / "lengths"), 32, 64, model, said.append) == (32, (2, 8, 32, 32))
    assert "50.0% of the rows" in said[0]
    assert lengths_of(str(tmp_path / "lengths"), None, 64, model, said.append)[0] == 64
    images = replace(model, task="image-classification", sample="image", sample_tokens=0)
    with pytest.raises(InputError, match="image-classification"):
        lengths_of(str(tmp_path / "lengths"), None, 64, images, said.append)


@pytest.fixture(scope="module")
def facts(server, tmp_path_factory):
    folder = write_config(tmp_path_factory.mktemp("lengths") / "tiny", max_position_embeddings=64)
    found = describe(server, folder, seq_len=64, global_batch=4)
    return folder, replace(found, workload=replace(found.workload, lengths=(4,) * 9 + (64,)))


def test_batches_are_padded_with_a_mask_and_the_longest_come_first(facts):
    from transformers import AutoConfig

    folder, found = facts
    rows = task_rows(found, AutoConfig.from_pretrained(folder), 16, differ=True)
    lengths = [len(rows[place]["input_ids"]) for place in range(17)]
    assert lengths == [4] * 15 + [64, 64], "the shortest first, and the longest behind the last"
    batch = rows.collate([rows[0], rows[16]])
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape == (2, 64)
    assert batch["attention_mask"].sum(1).tolist() == [4, 64]
    assert (batch["labels"][0, 4:] == -100).all()
    whole = task_rows(found, AutoConfig.from_pretrained(folder), 16)
    assert {len(whole[place]["input_ids"]) for place in range(16)} == {64}


@pytest.mark.parametrize("launch_path", ["trainer", pytest.param("loop", marks=pytest.mark.slow)])
def test_a_trial_holds_the_longest_rows_and_is_timed_on_the_usual_ones(server, tmp_path, facts, launch_path):
    folder, found = facts
    found = replace(found, workload=replace(found.workload, launch_path=launch_path))
    runner = ProcessRunner(tmp_path / "trials", found, folder, server)
    plan = PLAIN.replaced(micro_batch=2, accumulation=2)
    outcome = runner.run(0, plan, Effort(), purpose="search", limit_seconds=120.0).outcome
    assert isinstance(outcome, Measured), outcome
    assert outcome.evidence.seq_len == 64, "in the warm-up"
    assert outcome.evidence.padding_mask
    assert outcome.tokens_per_second == pytest.approx(outcome.samples_per_second * 10, rel=1e-3)
    assert 0 < outcome.padding < 0.9


@pytest.mark.slow
def test_a_trace_is_of_the_longest_rows_with_their_mask(tmp_path):
    config = write_config(tmp_path / "tiny")
    plain = facts_of("llama", seq_len=32)
    told = replace(plain, workload=replace(plain.workload, lengths=(4, 8, 32)))
    assert ground_of(plain, config) != ground_of(told, config)
    plan, peaks = PLAIN.replaced(micro_batch=2, accumulation=2), []
    with like_a_process_of_its_own():
        for facts in (plain, told):
            part = trace_job.micro_part(plan, facts, config, tmp_path)
            trace_job.optimizer_part(plan, facts, config, tmp_path)
            peaks.append(float(part.tape.live(2).max()))
    assert peaks[0] < peaks[1] < 1.3 * peaks[0]
