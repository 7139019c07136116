"""What a script's ``TrainingArguments`` ask for by the script itself, whatever a plan has put into them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.training.scripts.leave import Refused

_ROWS = "per_device_train_batch_size"
_SPLIT = ("gradient_accumulation_steps", _ROWS)
OPTIMIZER = ("optim", "optim_args")
"""Fields that say which optimizer a Trainer makes."""
_HEARD = (*_SPLIT, *OPTIMIZER)


@dataclass(slots=True)
class Asked:
    """The arguments of each Trainer, as the script made them, and what it has set in them since."""

    _known: dict[int, tuple[Any, Mapping[str, Any], Mapping[str, Any]]] = field(default_factory=dict)
    """By its ``id`` an object (kept, so that no other comes to have that), its own values, and what was put in."""
    _set: dict[int, set[str]] = field(default_factory=dict)
    _planned: set[int] = field(default_factory=set)
    """Those into which a plan was put."""

    def listen(self) -> None:
        """Note which fields of a split or an optimizer are set after a Trainer took them, even to what is there.

        A hyperparameter search that sets them is refused: each of its trainings would have another global batch.
        """
        from transformers import Trainer, TrainingArguments

        def set_value(arguments: Any, name: str, value: Any) -> None:
            if name in _HEARD and id(arguments) in self._known:
                self._set[id(arguments)].add(name)
            object.__setattr__(arguments, name, value)

        TrainingArguments.__setattr__ = set_value  # type: ignore[method-assign]
        owner: Any = Trainer
        search = owner._hp_search_setup  # noqa: SLF001 - where a search sets the fields of its next training

        @functools.wraps(search)
        def set_up(trainer: Any, trial: Any) -> None:
            before = self._set.pop(id(trainer.args), set())
            self._set[id(trainer.args)] = set()
            search(trainer, trial)
            names = " and ".join(sorted(self._set[id(trainer.args)]))
            if names and id(trainer.args) in self._planned:
                raise Refused(
                    f"the script's hyperparameter search sets {names}, and so does a plan",
                    "leave that out of its hp_space: each of its trainings takes what the script's arguments say of it",
                )
            self._set[id(trainer.args)] = before

        owner._hp_search_setup = set_up  # noqa: SLF001

    @staticmethod
    def search(trainer: Any, _resume: object = None, trial: Any = None, **_: Any) -> None:
        """Set what a hyperparameter search says, given what ``Trainer.train`` was called with.

        Raises:
            Refused: It sets what a plan does.
        """
        if trial is not None and getattr(trainer, "hp_search_backend", None) is not None:
            trainer._hp_search_setup(trial)  # noqa: SLF001 - train() does so later

    def taken(self, arguments: Any) -> Mapping[str, Any]:
        """What the script asks a Trainer for that takes these: its own values, and those that it has set since."""
        now = _values(arguments)
        if id(arguments) in self._known:
            _, own, put = self._known[id(arguments)]
            again = self._set[id(arguments)]
            now = {name: one if name in again or one != put[name] else own[name] for name, one in now.items()}
        self._known[id(arguments)] = arguments, now, _values(arguments)
        self._set[id(arguments)] = set()
        self._planned.discard(id(arguments))
        return now

    def changed(self, arguments: Any) -> None:
        """Take what they say now for put in by a plan."""
        self._known[id(arguments)] = *self._known[id(arguments)][:2], _values(arguments)
        self._planned.add(id(arguments))

    def differs(self, arguments: Any) -> bool:
        """Whether they say something else than the script asks for."""
        _, own, now = self._known[id(arguments)]
        return dict(own) != now

    def since(self, trainer: Any) -> dict[str, Any]:
        """The fields of a split or an optimizer that were set since a Trainer was made; without what has no effect.

        A Trainer keeps the rows of a micro-batch that it was made with, unless a loader of its own asks again.
        """
        from transformers import Trainer

        again = self._set.get(id(trainer.args), set())
        if type(trainer).get_train_dataloader is Trainer.get_train_dataloader:
            again = again - {_ROWS}
        return {name: getattr(trainer.args, name) for name in _HEARD if name in again}


def _values(arguments: Any) -> dict[str, Any]:
    return {one.name: getattr(arguments, one.name) for one in dataclasses.fields(arguments)}
