"""A tune ends in one screen; what people paste is whole."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from autofit.commands.shell.terminal import data_console
from autofit.contract.outcome import Measured
from autofit.contract.script import Loading, Script
from autofit.output import findings
from autofit.output.document import Training
from autofit.output.reports.brief import SCREEN_LINES, brief
from autofit.output.reports.report import summary
from autofit.output.text import number
from autofit.training.guard.equivalence import Guard
from tests.output.test_report import DOCUMENTS, WINNER, document, measured, plan, words


def screen(doc, folder="autofit-out", width=80):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(brief(doc, folder=folder))
    return console.file.getvalue()


@pytest.mark.parametrize("name", sorted(set(DOCUMENTS) - {"long words", "hostile"}))
def test_one_screen_says_what_won_what_is_promised_and_how_to_launch_it(name):
    doc = document(**DOCUMENTS[name])
    text = screen(doc)
    assert len(text.splitlines()) <= SCREEN_LINES
    assert max(map(len, text.splitlines())) <= 80
    said = words(text)
    split = f"{doc.plan['micro_batch']} x {doc.plan['accumulation']} x 1 = 32"
    for wanted in (split, number(doc.promise.samples_per_second), "accelerate launch --config_file autofit-out/"):
        assert wanted in said
    for change in doc.changes:
        assert change in said


@pytest.mark.parametrize("name", ["long words", "hostile"])
def test_words_from_elsewhere_steer_nothing(name):
    text = screen(document(**DOCUMENTS[name]))
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert "\u202e" not in text


@pytest.mark.parametrize("show", [brief, summary])
def test_a_command_is_not_broken_within_a_word_however_long_it_is(show, capsys):
    folder = "/scratch/" + "a-long-name-" * 12
    data_console().print(show(document(), folder=folder))
    said = capsys.readouterr().out
    assert f"{folder}/accelerate.yaml" in said
    assert f"{folder}/training_args.json" in said
    assert re.search(rf"autofit verify(?: \\\n +| ){folder}\n", said)


@pytest.mark.parametrize(
    ("guard", "said"),
    [
        (None, "Unchecked its training was not compared with the float32 baseline's"),
        (Guard(verdict="unknown", words="it took too long"), "float32 baseline's: it took too long"),
        (Guard(verdict="alone", words="no baseline fits"), "float32 baseline's: no baseline fits"),
        (Guard(verdict="same", words="it agrees", reference=document().plan), None),
        (Guard(verdict="method", words="another method", reference=document().plan), None),
        (Guard(verdict="alone", words="it is the baseline", reference=document().plan), None),
    ],
)
def test_a_winner_whose_training_was_not_compared_is_told(guard, said):
    text = words(screen(document(guard=guard)))
    assert said in text if said else "Unchecked" not in text


def test_many_changes_are_counted():
    doc = document(changes=tuple(f"change {place}" for place in range(9)), notes=("one", "two"))
    said = words(screen(doc))
    assert "change 2 and 6 more: see the report" in said
    assert "2 notes in the report" in said


def test_a_loss_that_nobody_looked_at_in_other_micro_batches_is_not_said_to_be_the_same():
    doc = document(guard=None, changes=())
    own = int(doc.plan["micro_batch"])
    for rows, said in ((own, "nothing: the training is that of a baseline plan"), (2 * own, "that was not looked at")):
        script = Script(path="train.py", sha256="", trainer="Trainer", micro_batch=rows, accumulation=1)
        scripted = replace(doc, workload=replace(doc.workload, script=script))
        assert said in words(screen(scripted))
        changed = words(screen(replace(scripted, changes=("It computes in bfloat16.",))))
        assert "It computes in bfloat16." in changed
        assert ("was not looked at" in changed) == (rows != own)


def test_a_script_is_told_how_long_its_own_training_takes():
    doc = document(**DOCUMENTS["cuda"])
    script = Script(path="t.py", sha256="", trainer="Trainer", micro_batch=8, accumulation=4, epochs_rows=7200.0)
    how = {"workload": replace(doc.workload, script=script), "tokens": None, "price": 3.6}
    training = Training.at(samples_per_second=2.0, tokens_per_second=9.0, **how)
    assert training == Training(rows=7200.0, hours=1.0, price=3.6, cost=3.6)
    said = words(screen(replace(doc, training=training)))
    assert "script's own training, 7,200 rows, besides evaluating and saving, takes 1 h 0 min at this speed" in said
    assert "and costs 3.600 at 3.600 an hour" in said
    generates = replace(doc, workload=replace(doc.workload, script=replace(script, generated=16)), training=training)
    assert "7,200 rows, besides generating, evaluating and saving, takes" in words(screen(generates))
    asked = Training.at(samples_per_second=2.0, tokens_per_second=9.0, **(how | {"tokens": 32400.0}))
    assert asked == Training(tokens=32400.0, hours=1.0, price=3.6, cost=3.6)
    unknown = replace(script, epochs_rows=None)
    how |= {"workload": replace(doc.workload, script=unknown), "price": None}
    assert Training.at(samples_per_second=2.0, tokens_per_second=9.0, **how) is None


@pytest.mark.parametrize(
    "note", ["the script's evaluation does not fit under the ceiling: x", "the script evaluates 2 rows"]
)
def test_a_scripts_evaluation_that_does_not_fit_is_on_the_screen(note):
    assert f"Evaluation {note}" in words(screen(replace(document(), notes=("another", note))))


def test_the_speed_is_compared_with_the_fastest_baseline_plan():
    assert "3.08 times the fastest baseline plan" in words(screen(document()))
    wild = document([(WINNER, measured(51.9, 15.8)), (plan(4), measured(17.0, 15.0)), (plan(4), measured(6.0, 15.0))])
    assert "fastest baseline plan (uncertain: runs of that plan gave 6.000 to 17.00 samples/s)" in words(screen(wild))


def test_a_loader_that_binds_is_said_first():
    loading = Loading(rows_per_second=((0, 40.0),))
    script = Script(path="train.py", sha256="", trainer="Trainer", micro_batch=8, accumulation=4, loading=loading)
    doc = document()
    trials = tuple(
        replace(one, outcome=replace(one.outcome, loader_seconds=0.9 * one.outcome.step_seconds))
        if isinstance(one.outcome, Measured)
        else one
        for one in doc.trials
    )
    doc = replace(doc, workload=replace(doc.workload, script=script), trials=trials)
    said = words(screen(doc))
    assert "The script's loader takes 800 ms for the rows of a step" in said
    assert "no faster device" in said
    assert said.index("Loader") < said.index("Winner")
    assert findings.findings(doc)[0][1] == findings.waiting(doc)
    assert findings.waiting(replace(doc, trials=document().trials)) is None


def test_a_folder_with_spaces_can_be_pasted():
    said = words(screen(document(), folder="my out", width=120))
    for command in ("verify", "report"):
        assert f"autofit {command} 'my out'" in said


def test_a_folder_that_begins_with_a_dash_is_no_option():
    said = words(screen(document(), folder="-x", width=120))
    for command in ("autofit verify", "autofit report", "accelerate launch --config_file"):
        assert f"{command} ./-x" in said
