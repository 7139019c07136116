"""What a choice writes, by the file that carries it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """What a choice writes, by the file that carries it.

    Attributes:
        accelerate: Keys of the Accelerate YAML.
        training_args: Fields of ``TrainingArguments``; the false ones too.
        script: What no argument can carry and the script must do through ``autofit.load``, in words.
        elsewhere: The same for ``autofit export``: by target (``sft``, ``axolotl``, ``llamafactory``), the settings of
            that project's own that do what ``script`` says, or what the Accelerate YAML does; a target that is missing
            can't.
        otherwise: By the same targets, what differs there from the plan all the same, in words.
    """

    accelerate: Mapping[str, Any] = field(default_factory=dict)
    training_args: Mapping[str, Any] = field(default_factory=dict)
    script: tuple[str, ...] = ()
    elsewhere: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    otherwise: Mapping[str, str] = field(default_factory=dict)
