"""Three answers side by side."""

import io
from dataclasses import replace

from rich.console import Console

from autofit.output.reports.compare import comparison
from tests.output.test_report import ON_CPU, document, measured, plan


def shown(documents):
    console = Console(width=120, file=io.StringIO(), color_system=None)
    console.print(comparison(documents))
    return console.file.getvalue()


def row(text, name):
    return next(line for line in text.splitlines() if line.startswith(name)).removeprefix(name).split()


def test_the_speed_the_memory_and_the_values_that_differ_stand_side_by_side():
    lean = plan(4, precision="bf16", optimizer="adamw_8bit")
    text = shown({"a": document(), "b": document(winner=lean, trials=[(lean, measured(26.0, 8.0))]), "c": document()})
    assert row(text, "of the first") == ["1.00", "times", "0.50", "times", "1.00", "times"]
    slow = document(winner=lean, trials=[(lean, measured(26.0 / 300, 8.0))])
    assert row(shown({"a": document(), "b": slow}), "of the first")[2:] == ["0.0017", "times"]
    assert row(text, "optimizer") == ["adamw", "adamw_8bit", "adamw"]
    assert row(text, "micro_batch") == ["8", "4", "8"]
    assert "precision " not in text
    assert "the same for all: model Qwen/Qwen2.5-0.5B" in text
    assert "rows rows of" not in text
    assert ", rows of " in " ".join(text.split())
    assert "the questions differ" not in text


def test_other_questions_are_said():
    text = shown({"a": document(), "b": document(**ON_CPU)})
    assert "the questions differ" in text
    assert "AMD EPYC 9554" in text


def test_models_of_one_name_are_told_apart():
    doc = document()
    other = replace(doc, model=replace(doc.model, parameters=2 * doc.model.parameters))
    text = shown({"a": doc, "b": other})
    assert row(text, "model")[1] != row(text, "model")[4]
    assert "the questions differ" in text


def test_another_number_of_processes_is_another_question():
    doc = document()
    other = replace(doc, workload=replace(doc.workload, processes=2))
    assert "the questions differ" in shown({"a": doc, "b": other})


def test_tokens_are_told_of_texts_alone():
    doc = document()
    images = replace(doc, model=replace(doc.model, sample="image", sample_tokens=0))
    assert row(shown({"a": doc, "b": images}), "tokens/s")[1:] == ["none"]
    assert "tokens/s" not in shown({"a": images})
