"""Images and texts that belong together, told from those that do not (CLIP)."""

from __future__ import annotations

from typing import Any

from autofit.contract.facts import Length
from autofit.training.tasks.kind import Kind


def _most(config: Any) -> int | None:
    return getattr(getattr(config, "text_config", config), "max_position_embeddings", None)


def _text_length(config: Any, _main: str) -> Length:
    """The length is that of the text: the image's is the model's own."""
    return Length(usual=_most(config))


KINDS = (
    Kind(
        name="contrastive",
        auto="AutoModelForZeroShotImageClassification",
        trained_on="which image and which text belong together",
        arguments=("input_ids", "pixel_values", "return_loss"),
        constants={"return_loss": True},
        sample="pair",
        length=_text_length,
        most=_most,
        depends_on_rows="its contrastive loss compares the rows of a micro-batch with each other",
    ),
)
