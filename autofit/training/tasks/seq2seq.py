"""A text out of a text: both rows are of the same length, which is the most that either may have."""

from __future__ import annotations

from autofit.training.tasks.inputs import INPUTS
from autofit.training.tasks.kind import Kind

KINDS = (
    Kind(
        name="seq2seq-lm",
        auto="AutoModelForSeq2SeqLM",
        trained_on="a text out of a text, both of the same length",
        makers={"labels": INPUTS["input_ids"]},  # the model makes its decoder's input of it
        tokens=2,
        generates=True,
    ),
)
