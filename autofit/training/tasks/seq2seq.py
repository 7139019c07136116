"""A text out of a text: both rows are of the same length, which is the most that either may have."""

from __future__ import annotations

from typing import Any

from autofit.training.tasks.inputs import INPUTS
from autofit.training.tasks.kind import Kind


def name_start(model: Any) -> None:
    """A decoder reads the labels behind a first token, which some configs, such as T5's, leave to the script."""
    config = model.config
    if not getattr(config, "is_encoder_decoder", False):
        return
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id


KINDS = (
    Kind(
        name="seq2seq-lm",
        auto="AutoModelForSeq2SeqLM",
        trained_on="a text out of a text, both of the same length",
        makers={"labels": INPUTS["input_ids"]},  # the model makes its decoder's input of it
        tokens=2,
        generates=True,
        prepare=name_start,
    ),
)
