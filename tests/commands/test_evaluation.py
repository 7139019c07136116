"""The evaluation batch of a winner: tried beside it, written everywhere, and told with its reason."""

import dataclasses
import json
import re
from dataclasses import replace

import pytest

import autofit
from autofit.commands.tunes.evaluation import evaluating, scripts_own
from autofit.commands.verify import VERIFICATION
from autofit.contract.outcome import Crashed, Measured
from autofit.contract.script import Script
from autofit.costmodel.evaluation import most_rows
from autofit.output import findings
from autofit.output.document import read_document
from autofit.output.exports.export import export
from autofit.output.reports import report
from autofit.registry import recipe_of
from autofit.search.decision import Decision
from autofit.system.units import GIB
from autofit.training.scripts.watched import evaluate_longest
from autofit.training.tasks.table import kind_of
from tests.commands.test_launch import command
from tests.output.test_brief import screen
from tests.output.test_report import MODEL, WINNER, document, measured, out_of_memory, terminal, words
from tests.support.tiny import MIB, write_config

FACTS = document().facts


def tried(outcomes, rows):
    """What comes of an evaluation of so many rows, where the runs of the winner come to these outcomes."""
    asked, found = [], iter(outcomes)

    def run(facts):
        asked.append(recipe_of(WINNER, facts).emission.training_args["per_device_eval_batch_size"])
        return next(found)

    decision = Decision(plan=WINNER, measured=measured(50, 15.8), reason="", runners_up=())
    return asked, evaluating(decision, FACTS, rows, run)


def test_a_run_with_the_evaluation_that_holds_no_more_decides():
    asked, (seen, rows, said) = tried([measured(40, 15.9)], 32)
    assert (asked, rows, said) == ([32], 32, [])
    assert seen.peak_bytes == measured(1, 15.9).peak_bytes, "what a launch holds is promised"
    assert seen.samples_per_second == 50, "one step says nothing of the speed"


def test_an_evaluation_that_takes_more_than_the_training_is_halved_and_told():
    asked, (seen, rows, said) = tried([out_of_memory(), measured(40, 17.5), measured(40, 15.8)], 64)
    assert (asked, rows) == ([64, 32, 16], 16)
    assert seen.peak_bytes == measured(1, 15.8).peak_bytes
    assert [words.split(" ")[4] for words in said] == ["64", "32"]
    assert "it takes " in said[1]
    assert ", and training " in said[1]
    assert "out of memory on the device in backward" in said[0]


@pytest.mark.parametrize("outcome", [out_of_memory(), measured(40, 17.5)])
def test_where_nothing_above_the_usual_rows_fits_they_stay(outcome):
    asked, (seen, rows, said) = tried([outcome] * 9, 4)
    assert (asked, rows, len(said)) == ([4, 2], 0, 2), "its logits allow one"
    assert seen == measured(50, 15.8)
    assert tried([], 1)[0] == []


SCRIPT = Script(
    path="train.py", sha256="", trainer="Trainer", micro_batch=4, accumulation=1, own={"per_device_eval_batch_size": 8},
    evaluated_rows=8,
)  # fmt: skip
CEILING = FACTS.workload.limit_bytes / GIB


@pytest.mark.parametrize(
    ("outcomes", "rows", "written", "said"),
    [
        ([measured(40, CEILING)], 8, None, None),
        (
            [out_of_memory(), measured(40, CEILING + 1), measured(40, 15.9)],
            2,
            2,
            "evaluates 2 rows at once, and not 8: ",
        ),
        ([out_of_memory()] * 4, 0, None, "does not fit under the ceiling: 1 row beside the winner: out of memory"),
        ([Crashed(reason="its metric fails")], 0, None, "nor held against the ceiling: 8 rows beside the winner: "),
    ],
)
def test_a_script_evaluates_its_own_rows_or_fewer_where_they_break_the_ceiling(outcomes, rows, written, said):
    facts = replace(FACTS, workload=replace(FACTS.workload, script=SCRIPT))
    assert scripts_own(facts) == 8
    decision = Decision(plan=WINNER, measured=measured(50, 15.8), reason="", runners_up=())
    found = iter(outcomes)
    seen, kept, words = evaluating(decision, facts, 8, lambda _: next(found))
    assert (kept, next(found, None)) == (rows, None)
    assert recipe_of(WINNER, facts.evaluating(kept)).emission.training_args.get("per_device_eval_batch_size") == written
    assert (said in words[0]) if said else not words
    assert seen.peak_bytes == (outcomes[-1].peak_bytes if rows else decision.measured.peak_bytes)


class Kept:
    """What a script's Trainer joins while it evaluates: the rows of each tensor that comes of it."""

    def __init__(self, monkeypatch):
        from transformers import trainer_pt_utils

        self.rows, join = [], trainer_pt_utils.nested_concat

        def joined(*given, **how):
            found = join(*given, **how)
            self.rows.append(tuple(found.shape))
            return found

        monkeypatch.setattr(trainer_pt_utils, "nested_concat", joined)


def test_what_metrics_read_of_all_rows_is_held_as_an_evaluation_does(tmp_path, monkeypatch):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    rows = [{"input_ids": torch.ones(length, dtype=torch.long)} for length in (3, 9, 5, 4, 7)]

    def collate(given):
        ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in given], batch_first=True)
        return {"input_ids": ids, "labels": ids}

    def trainer(**given):
        arguments = TrainingArguments(
            str(tmp_path), use_cpu=True, per_device_eval_batch_size=2, report_to="none", eval_accumulation_steps=1
        )
        return Trainer(LlamaForCausalLM(config), arguments, data_collator=collate, eval_dataset=rows, **given)

    metrics = {"compute_metrics": lambda found: {"rows": len(found.predictions)}}
    kept = Kept(monkeypatch)
    evaluated = trainer(**metrics)
    assert evaluated.evaluate()["eval_rows"] == 5
    whole = {shape for shape in kept.rows if shape[0] == 5 and len(shape) > 1}  # and not the losses
    kept.rows.clear()
    evaluate_longest(evaluated, 2)
    assert evaluated.model.training
    assert set(kept.rows) == {(5, 9, 32), (5, 9)} == whole
    kept.rows.clear()
    several = trainer(**metrics)
    several.args.eval_accumulation_steps = None
    with monkeypatch.context() as patched:
        patched.setattr(type(several.accelerator), "num_processes", 2)
        evaluate_longest(several, 2)
    assert set(kept.rows) == whole, "each of two processes keeps what both predict"
    kept.rows.clear()
    evaluate_longest(trainer(), 2)
    assert not kept.rows, "the loss alone is kept"
    assert evaluated.evaluate()["eval_rows"] == 5, "it evaluates by itself again"


def test_rows_are_evaluated_as_a_trainer_does_it_while_it_trains(tmp_path):
    """TRL's prepare a data set that they are handed then anew, or refuse to (``precompute_ref_log_probs``)."""
    import torch
    from transformers import Trainer, TrainingArguments

    seen = []

    class Prepares(Trainer):
        def evaluate(self, eval_dataset=None, *args, **kwargs):
            assert eval_dataset is None or isinstance(eval_dataset, str), "rows that are prepared already"
            return super().evaluate(eval_dataset, *args, **kwargs)

        def prediction_step(self, model, inputs, *_, **__):
            seen.append(len(inputs["x"]))
            return torch.zeros(()), None, None

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", remove_unused_columns=False)
    rows = [{"x": torch.ones(1)}] * 3
    for given in (rows, {"one": rows, "other": rows * 2}):
        evaluate_longest(Prepares(torch.nn.Linear(1, 1), arguments, eval_dataset=given), 2)
    assert seen == [2, 2] * 3


@pytest.mark.slow
def test_an_evaluation_generates_as_long_a_text_as_it_will(tmp_path, monkeypatch):
    import torch
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    asked = []
    model = T5ForConditionalGeneration(config)
    generate = model.generate
    monkeypatch.setattr(
        model, "generate", lambda *given, **how: asked.append(how["max_length"]) or generate(*given, **how)
    )
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", predict_with_generate=True, generation_max_length=7
    )
    rows = [{"input_ids": torch.ones(5, dtype=torch.long), "labels": torch.ones(4, dtype=torch.long)}] * 3
    trainer = Seq2SeqTrainer(model, arguments, eval_dataset=rows, compute_metrics=lambda _: {})
    evaluate_longest(trainer, 2)
    assert asked == [7, 7]


def evaluated(rows=0, **changes):
    doc = document(**changes)
    work = doc.facts.evaluating(rows).workload
    return document(**{**changes, "workload": work})


def told(doc):
    (only,) = findings.evaluation(doc)
    return only[1]


def test_the_report_and_the_screen_tell_the_evaluation_batch_and_why_it_is_no_larger():
    few, many = evaluated(8), evaluated(16)
    assert most_rows(few.facts) == 16
    assert told(few).startswith("A Trainer evaluates 8 rows at once (per_device_eval_batch_size): ")
    assert "might need more memory than the training" in told(few)
    assert told(many).endswith("more would hardly be faster.")
    assert told(evaluated()).startswith("A Trainer evaluates 1 row at once")
    for shown in (words(terminal(many)), report.html(many, folder="out")):
        assert told(many) in shown
    assert "evaluating 16 rows at once" in words(screen(many))
    assert "evaluating" not in words(screen(evaluated()))
    assert findings.evaluation(document(path="loop")) == []


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ("seq2seq-lm", "what generation takes (predict_with_generate) is not known"),
        ("speech-seq2seq", "what generation takes (predict_with_generate) is not known"),
        ("contrastive", "its contrastive loss compares the rows"),
    ],
)
def test_what_generates_or_compares_rows_stays_at_the_micro_batch(task, why):
    depends = kind_of(task).depends_on_rows
    doc = document(model=dataclasses.replace(MODEL, task=task, vocab_size=1000, depends_on_rows=depends))
    assert most_rows(doc.facts) == 0
    assert told(doc).startswith(f"A Trainer evaluates {WINNER['micro_batch']} rows at once")
    assert why in told(doc)


@pytest.mark.slow
def test_a_tune_writes_more_rows_than_it_trains_on_and_a_launch_evaluates_them_under_the_ceiling(tmp_path):
    write_config(tmp_path / "tiny", vocab_size=4096, hidden_size=256, intermediate_size=512)
    held = ("micro_batch=1", "precision=fp32", "optimizer=adamw", "attention=default", "kernels=none")
    words = ("--global-batch", 4, "--trials", 1, "--no-guard", "--device", "cpu", *(f"--fix={one}" for one in held))
    done = command(tmp_path, "autofit.cli", "tune", "tiny", "--output", "out", *words)
    assert done.returncode == 0, done.stderr
    found, written = read_document(tmp_path / "out"), json.loads((tmp_path / "out/training_args.json").read_text())
    rows = written["per_device_eval_batch_size"]
    assert rows == found.workload.evaluated_rows > written["per_device_train_batch_size"] == 1
    assert f"evaluating {rows} rows at once" in " ".join(done.stdout.split())
    trained = max(one.outcome.peak_bytes for one in found.trials)
    assert found.promise.peak_bytes <= 1.05 * trained
    for target in ("python", "cli", "sft"):
        assert str(rows) in re.findall(r"eval_batch_size\W+(\d+)", export(found, target, folder="out").text)
    assert autofit.load(tmp_path / "out").recipe.emission.training_args["per_device_eval_batch_size"] == rows
    done = command(tmp_path, "autofit.cli", "verify", "out", "--json", "--tolerance", "0.95")
    launched = VERIFICATION.validate_json(done.stdout).outcome
    assert isinstance(launched, Measured)
    assert launched.peak_bytes < 1.25 * found.promise.peak_bytes + 8 * MIB
