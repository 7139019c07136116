"""What another micro-batch than a script's own does at the end of an epoch."""

from dataclasses import replace

import pytest

from autofit.contract.script import Script
from autofit.registry import technique
from tests.support.synthetic import cpu_facts

CPU = cpu_facts(global_batch=8)


def said(rows, value, processes=1, **given):
    script = Script(
        path="train.py", sha256="", **{"trainer": "", "micro_batch": 2, "accumulation": 4, **given}, rows=rows
    )
    work = replace(CPU.workload, script=script, processes=processes)
    return technique("micro_batch").changes(value, {}, replace(CPU, workload=work))


@pytest.mark.parametrize(
    ("rows", "value", "given", "words"),
    [
        (70, 4, {}, "An epoch's last optimizer step, of 6 rows, weighs them otherwise"),
        (70, 2, {}, None),
        (64, 4, {}, None),
        (None, 4, {}, "The data set tells no number of rows: where an epoch's last optimizer step takes fewer"),
        (None, 2, {}, None),
        (None, 4, {"trainer": "Trainer"}, None),
        (None, 4, {"batch": {"labels": (2, 9)}}, "Rows of different lengths weigh"),
        (64, 4, {"weighs": True}, "counts one row for more than another"),
        (64, 2, {"weighs": True}, None),
        (70, 4, {"trainer": "Trainer"}, None),
        (70, 4, {"trainer": "Trainer", "undivided": True}, "weighs them otherwise"),
        (70, 4, {"trainer": "Trainer", "averages": True}, "weighs them otherwise"),
        (64, 4, {"trainer": "Trainer", "averages": True}, None),
        (70, 8, {"trainer": "Trainer", "own": {"dataloader_drop_last": True}}, "leaves out 6 rows"),
        (64, 8, {"trainer": "Trainer", "own": {"dataloader_drop_last": True}}, None),
        (64, 4, {"batch": {"labels": (2, 9)}, "longest": 9, "mean_length": 5.0}, "Rows of different lengths weigh"),
        (70, 4, {"batch": {"labels": (2, 9)}, "longest": 9, "mean_length": 5.0}, "of each. An epoch's last"),
        (
            64,
            4,
            {
                "trainer": "ORPOTrainer",
                "averages": True,
                "batch": {"chosen_labels": (2, 9)},
                "longest": 9,
                "mean_length": 5.0,
            },
            "Rows of different lengths weigh",
        ),
        (64, 4, {"batch": {"labels": (2,)}, "longest": 9, "mean_length": 5.0}, None),
    ],
)
def test_what_the_end_of_an_epoch_is_under_another_micro_batch_is_told(rows, value, given, words):
    found = said(rows, value, **given)
    assert found is None if words is None else words in found


@pytest.mark.parametrize(
    ("rows", "own", "words"),
    [
        (104, {"dataloader_drop_last": True}, "leaves out 8 rows that make no whole micro-batch, and 0 by"),
        (112, {"dataloader_drop_last": True}, None),
        (107, {}, "takes 5 of its first rows again, so that each process has as many, and 1 by the script's own"),
        (105, {"accelerator": "of one"}, "takes 7 of its first rows again, so that each process has as many, and 3"),
        (110, {}, None),
    ],
)
def test_the_end_of_an_epoch_is_that_of_all_processes(rows, own, words):
    found = said(rows, 8, processes=2, trainer="Trainer", own=own)
    assert found is None if words is None else words in found


def test_without_a_script_an_epoch_has_no_end():
    assert technique("micro_batch").changes(4, {}, CPU) is None
