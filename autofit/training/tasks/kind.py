"""What a task is: the class that builds its models, the arguments that ``forward()`` is handed, and its words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autofit.contract.facts import Length, Task

if TYPE_CHECKING:
    import torch

Column = Any
"""One argument of many rows: a tensor whose first dimension is the rows, or a list with an entry for each; ``None``
where a model is not given it."""

MAIN = "main input"
"""Stands for whatever the model's class calls its main input (``main_input_name``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a batch is made by.

    Attributes:
        config: Of the model, as transformers holds it.
        main: The model's ``main_input_name``.
        length: Of a row, in the task's unit.
        vocabulary: Rows of the model's table of tokens; 1 where it reads none.
        few: Of how many different tokens the rows are; ``None``: of all.
    """

    config: Any
    main: str
    length: int
    vocabulary: int
    few: int | None = None


Maker = Callable[[Spec, int, "torch.Generator"], Column]
"""Makes one argument of so many rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A task.

    Attributes:
        name: What ``--task`` calls it.
        auto: The Auto class of transformers that builds its models.
        trained_on: What its models learn, in words.
        arguments: Of ``forward()``, in order: each is made by ``makers``, or by the table of inputs.
        makers: The arguments that are this task's own, by name; ``labels`` that nothing makes are the tokens again.
        constants: Arguments that are the same for every batch.
        sample: What a row is, in a word.
        length: What the length of a row counts, of a config and a main input.
        most: The longest row that a model takes, by its config, where its positions alone don't tell.
        tokens: Rows of tokens that make a sample; 0 where it is no text.
        new_head: Whether the modules beside the base model are learned anew: pretrained weights have none for them.
        packages: That its loss needs, beside transformers: modules, and how pip calls them.
        generates: Whether its models are often evaluated by what they generate (``predict_with_generate``).
        depends_on_rows: Why the loss of a row depends on the others of its micro-batch; ``None`` where the task does
            not make it do so.
        sums: Whether the loss is a sum over the rows, by the config: then gradients that add up are right.
        untraced: Why no trace on fake tensors stands for a step; ``None`` where one does.
        prepare: Given the model before it trains: what a user's script sets on its config.
    """

    name: Task
    auto: str
    trained_on: str
    arguments: tuple[str, ...] = (MAIN, "labels")
    makers: Mapping[str, Maker] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    sample: str = "row"
    length: Callable[[Any, str], Length] = lambda _config, _main: Length()
    most: Callable[[Any], int | None] = lambda _config: None
    tokens: int = 1
    new_head: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)
    generates: bool = False
    depends_on_rows: str | None = None
    sums: Callable[[Any], bool] = lambda _config: False
    untraced: str | None = None
    prepare: Callable[[Any], None] = lambda _: None
