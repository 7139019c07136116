"""What a choice writes, by the file that carries it, and what a script may give beside it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.system.errors import InputError, near

_NOW_CALLED = {f"gradient_checkpointing{more}": f"activation_checkpointing{more}" for more in ("", "_kwargs")}
"""Fields that transformers takes by their former names, too, and heeds only where the new ones are not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """What a choice writes, by the file that carries it.

    Attributes:
        accelerate: Keys of the Accelerate YAML.
        training_args: Fields of ``TrainingArguments``; the false ones too.
        decides: Further arguments of ``TrainingArguments`` and ``Accelerator`` that would train by another choice, so
            that a script can't give them; ``accelerator_config.split_batches`` is a part of one.
        script: What no argument can carry and the script must do through ``autofit.load``, in words.
        elsewhere: The same for ``autofit export``: by target (``sft``, ``axolotl``, ``llamafactory``), the settings of
            that project's own that do what ``script`` says, or what the Accelerate YAML does; a target that is missing
            can't.
        otherwise: By the same targets, what differs there from the plan all the same, in words.
    """

    accelerate: Mapping[str, Any] = field(default_factory=dict)
    training_args: Mapping[str, Any] = field(default_factory=dict)
    decides: tuple[str, ...] = ()
    script: tuple[str, ...] = ()
    elsewhere: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    otherwise: Mapping[str, str] = field(default_factory=dict)

    def check_beside(self, others: Mapping[str, Any], of: Callable[..., Any], hint: str) -> None:
        """Refuse what a script can't give beside the plan.

        Args:
            others: What it gives, by name.
            of: What takes them: ``TrainingArguments`` or ``Accelerator``.
            hint: What to do instead, where the plan sets one of them.

        Raises:
            InputError: The plan sets or decides one of them, or ``of`` takes none of that name.
        """
        settled = {*self.accelerate, *self.training_args, *self.decides}
        clash = [name for name in _given(others) if {name, _NOW_CALLED.get(name)} & settled]
        if clash:
            raise InputError(f"{', '.join(sorted(clash))}: set by autofit, so it can't be given again", hint=hint)
        known = inspect.signature(of).parameters
        unknown = sorted(others.keys() - known.keys())
        if unknown:
            raise InputError(
                f"{of.__name__} has no argument {', '.join(unknown)}",
                hint=near(unknown[0], known, f"help({of.__name__}) tells its arguments"),
            )


def _given(others: Mapping[str, Any]) -> Iterator[str]:
    """The names of what is given, and of its parts: a mapping's keys, and the fields of a settings object that are set.

    >>> list(_given({"seed": 1, "accelerator_config": {"split_batches": True}}))
    ['seed', 'accelerator_config', 'accelerator_config.split_batches']
    """
    for name, value in others.items():
        yield str(name)
        parts = value if isinstance(value, Mapping) else _set_fields(value)
        yield from (f"{name}.{part}" for part in _given(parts))


def _set_fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not as they are when nothing is said."""
    if not dataclasses.is_dataclass(value):
        return {}
    return {
        one.name: getattr(value, one.name)
        for one in dataclasses.fields(value)
        if one.init and getattr(value, one.name, one.default) != one.default
    }
