"""Every task, by its name."""

from __future__ import annotations

from collections.abc import Mapping

from autofit.training.tasks import contrastive, seq2seq, speech, text, vision
from autofit.training.tasks.kind import Kind

TASKS: Mapping[str, Kind] = {
    kind.name: kind for family in (text, seq2seq, vision, speech, contrastive) for kind in family.KINDS
}
"""In the order in which a class is looked for: BART's conditional generation is in two lists of transformers."""


def kind_of(task: str) -> Kind:
    """A task by its name, as facts have it."""
    return TASKS[task]
