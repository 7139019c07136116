"""Texts: next and masked tokens, and classes of texts, of tokens and of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autofit.training.tasks.inputs import INPUTS, tokens
from autofit.training.tasks.kind import Kind, Spec
from autofit.training.tasks.seq2seq import name_start

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""A label that no loss is taken of (``torch.nn.CrossEntropyLoss``)."""
CHOICES = 4
"""Answers to choose from, as in SWAG and RACE."""
_MASKED_EVERY = 7
"""About 15 % of the tokens are masked, as in BERT (arXiv 1810.04805)."""


def classes(spec: Spec, rows: int, generator: torch.Generator) -> torch.Tensor:
    """A class for each row; numbers where the config asks for a regression, some of the classes for several at once."""
    import torch

    count = int(getattr(spec.config, "num_labels", 2))
    problem = getattr(spec.config, "problem_type", None)
    if problem == "multi_label_classification":
        return torch.randint(0, 2, (rows, count), generator=generator).float()
    if problem == "regression" or (problem is None and count == 1):
        return torch.randn((rows, count) if count > 1 else (rows,), generator=generator)
    return torch.randint(0, count, (rows,), generator=generator)


def _of_each_token(spec: Spec, rows: int, generator: torch.Generator) -> torch.Tensor:
    import torch

    return torch.randint(0, int(spec.config.num_labels), (rows, spec.length), generator=generator)


def _masked(spec: Spec, rows: int, generator: torch.Generator) -> torch.Tensor:
    """The true tokens at as many places of each row, and nothing to learn at the others."""
    made = tokens(spec, rows, spec.length, generator=generator)
    kept = made[:, ::_MASKED_EVERY].clone()
    made.fill_(IGNORED)
    made[:, ::_MASKED_EVERY] = kept
    return made


def _choices(spec: Spec, rows: int, generator: torch.Generator) -> torch.Tensor:
    made: torch.Tensor = INPUTS["input_ids"](spec, rows * CHOICES, generator)
    return made.view(rows, CHOICES, spec.length)


def _choice(_spec: Spec, rows: int, generator: torch.Generator) -> torch.Tensor:
    import torch

    return torch.randint(0, CHOICES, (rows,), generator=generator)


def _position(spec: Spec, rows: int, generator: torch.Generator) -> torch.Tensor:
    import torch

    return torch.randint(0, spec.length, (rows,), generator=generator)


def _name_padding(model: Any) -> None:
    """Classifying more than one row, a model looks for each row's last token that is no padding, and has to know it."""
    config = model.config.get_text_config()
    if getattr(config, "pad_token_id", None) is None:
        end = getattr(config, "eos_token_id", None)
        model.config.pad_token_id = config.pad_token_id = end[0] if isinstance(end, list) else end or 0
    name_start(model)


def _any_tokens(spec: Spec, rows: int, generator: torch.Generator) -> torch.Tensor:
    import torch

    if spec.few is None:
        return torch.randint(0, spec.vocabulary, (rows, spec.length), generator=generator)
    used = torch.randint(0, spec.vocabulary, (spec.few,), generator=generator)
    return used[torch.randint(0, spec.few, (rows, spec.length), generator=generator)]


KINDS = (
    Kind(
        name="causal-lm",
        auto="AutoModelForCausalLM",
        trained_on="next-token prediction",
        arguments=("input_ids", "labels"),
        makers={"input_ids": _any_tokens},
    ),
    Kind(
        name="masked-lm",
        auto="AutoModelForMaskedLM",
        trained_on="the prediction of masked tokens",
        makers={"labels": _masked},
    ),
    Kind(
        name="sequence-classification",
        new_head=True,
        auto="AutoModelForSequenceClassification",
        trained_on="classes of texts",
        makers={"labels": classes},
        prepare=_name_padding,
    ),
    Kind(
        name="token-classification",
        new_head=True,
        auto="AutoModelForTokenClassification",
        trained_on="a class for each token",
        makers={"labels": _of_each_token},
    ),
    Kind(
        name="question-answering",
        new_head=True,
        auto="AutoModelForQuestionAnswering",
        trained_on="where an answer begins and ends",
        arguments=("input_ids", "start_positions", "end_positions"),
        makers={"start_positions": _position, "end_positions": _position},
        prepare=name_start,
    ),
    Kind(
        name="multiple-choice",
        new_head=True,
        auto="AutoModelForMultipleChoice",
        trained_on=f"the right one of {CHOICES} texts",
        makers={"input_ids": _choices, "labels": _choice},
        tokens=CHOICES,
    ),
)
