"""Which task a config is for, and whether the batch of that task fits the model's ``forward()``."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
from pathlib import Path
from typing import Any

from autofit.contract.facts import Task, predicts_next_token
from autofit.contract.recipe import without_drawing
from autofit.machine.model import beside_the_base, describe_built, has_plain_head
from autofit.system.errors import ModelError
from autofit.training.tasks.inputs import INPUTS
from autofit.training.tasks.kind import MAIN, Kind, Spec
from autofit.training.tasks.loss_scale import leaves_undivided
from autofit.training.tasks.table import TASKS

_FIRST = ("causal-lm", "seq2seq-lm")
"""Looked for first: what a class does that is in several lists of transformers."""
_SHORT_TOKENS = 8
_PATCHES = "spatial_shapes"
"""What a class is told the rows and columns of an image's patches by, which its processor has cut (SigLIP 2)."""
_BESIDE_TEXTS = {
    "get_image_features": ("images", ("pixel_values",)),
    "get_audio_features": ("sounds", ("input_features", "input_values")),
}
"""What a class reads that has such a method, in words, and the arguments of ``forward()`` that it may lie in."""


def describe_model(name: str, config: Path, *, trust_remote_code: bool, task: Task | None = None) -> dict[str, Any]:
    """Sizes and abilities of the model that a ``config.json`` describes, for a task; built without storage.

    Args:
        name: What the user calls the model.
        config: Its folder.
        trust_remote_code: Whether the model's own code may run.
        task: What it is to be trained for, whatever its config names; ``None``: what its config names.

    Returns:
        The fields of :class:`autofit.contract.facts.Model`.

    Raises:
        ModelError: The model's type has no model for the task, its ``forward()`` lacks an argument that the task
            needs, or the config names a model for a task that is not known.
        Exception: transformers can't read the config or build the model.
    """
    from transformers import AutoConfig

    settings = AutoConfig.from_pretrained(config, trust_remote_code=trust_remote_code)
    kind = task_of(name, settings, task, trust_remote_code=trust_remote_code)
    model = _built(kind, settings, trust_remote_code=trust_remote_code)
    lacking = [called for module, called in kind.packages.items() if importlib.util.find_spec(module) is None]
    if lacking:
        raise ModelError(
            f"{name!r}: the loss of {type(model).__name__} needs {' and '.join(lacking)}, which is not installed",
            hint=f"pip install {' '.join(lacking)}",
        )
    main = str(getattr(model, "main_input_name", "input_ids"))
    check_arguments(name, model, kind, main)
    built = describe_built(name, settings, model)
    most = kind.most(settings)
    if most is not None:
        built["position_rows"] = min(most, built["position_rows"] or most)
    return {
        **built,
        "task": kind.name,
        "auto": kind.auto,
        "trained_on": kind.trained_on,
        "main_input": main,
        "sample": kind.sample,
        "sample_tokens": kind.tokens,
        "length": dataclasses.asdict(kind.length(settings, main)),
        "depends_on_rows": kind.depends_on_rows or built["depends_on_rows"],
        "undivided": leaves_undivided(model, kind, _small(kind, settings, main, int(built["vocab_size"]))),
        "trust_remote_code": trust_remote_code,
        "plain_head": kind.name == "causal-lm" and has_plain_head(model),
        "new_modules": beside_the_base(model) if kind.new_head else (),
        "unread": _unread(model, {main, *kind.arguments}),
    }


def _unread(model: Any, handed: set[str]) -> tuple[str, ...]:
    """What a model's class reads beside the arguments that it is handed, in words."""
    return tuple(
        words
        for method, (words, arguments) in _BESIDE_TEXTS.items()
        if hasattr(model, method) and handed.isdisjoint(arguments)
    )


def _built(kind: Kind, settings: Any, *, trust_remote_code: bool) -> Any:
    """The model of a config for a task, without storage."""
    import torch
    import transformers

    with torch.device("meta"), without_drawing():
        return getattr(transformers, kind.auto).from_config(settings, trust_remote_code=trust_remote_code)


def _small(kind: Kind, settings: Any, main: str, vocabulary: int) -> Spec:
    """Rows as short as the model takes them: their shapes alone are looked at."""
    length = kind.length(settings, main).usual or _SHORT_TOKENS
    if vocabulary < 2:  # its tokens are in a part of the model
        vocabulary = int(getattr(settings.get_text_config(), "vocab_size", None) or 1)
    return Spec(config=settings, main=main, length=length, vocabulary=vocabulary)


def task_of(name: str, settings: Any, task: Task | None, *, trust_remote_code: bool) -> Kind:
    """The task that was asked for, or that the config names.

    A base model such as ``LlamaModel`` has no task of its own, nor has a config that names no class: it is trained for
    the first task that its type has a model for.

    Raises:
        ModelError: There is none.
    """
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    named = tuple(settings.architectures or ())
    what = f"{name!r} is a config of {' and '.join(named) or f'the type {settings.model_type}'}"
    own = getattr(settings, "auto_map", None) or {} if trust_remote_code else {}
    here = [kind for kind in _in_order() if kind.auto in own or type(settings) in _mapping(kind.auto)]
    if task is not None:
        kind = TASKS[task]
        if kind in here:
            return kind
        listed = ", ".join(one.name for one in here if _takes(name, settings, one, trust_remote_code=trust_remote_code))
        raise ModelError(
            f"{what}, and transformers has no model of the type {settings.model_type} for --task {task}",
            hint=f"its tasks: {listed}" if listed else "autofit tunes the training of models for the tasks of --task",
        )
    script = "give the script that trains it: autofit tune train.py"
    if images := type(settings) in _mapping("AutoModelForImageTextToText"):
        script += "; examples/train_image_text.py is one"
    if images and not here:
        why = "which is trained on images and their texts, and its config does not tell how large they are"
        raise ModelError(f"{what}, {why}", hint=script)
    if not here:
        raise ModelError(
            f"{what}, and autofit knows no task that transformers has a model of the type {settings.model_type} for",
            hint=f"the tasks that it knows: {', '.join(TASKS)}; a script of yours can be tuned: autofit tune train.py",
        )
    classes = {kind.name: {own.get(kind.auto, "").rpartition(".")[2], *_classes(kind, settings)} for kind in here}
    first = [next((kind for kind in here if one in classes[kind.name]), None) for one in named]
    found = {kind.name: kind for kind in first if kind is not None}
    if len(found) > 1:
        raise ModelError(f"{what}, which are models for different tasks", hint=f"--task says which: {', '.join(found)}")
    if found:
        return next(iter(found.values()))
    bases = {base for entry in MODEL_MAPPING_NAMES.values() for base in ((entry,) if isinstance(entry, str) else entry)}
    causal = TASKS["causal-lm"]
    if causal in here and any(map(predicts_next_token, named)):
        return causal
    if not named or any(one in bases and one.endswith("Model") for one in named):
        return here[0]
    listed = ", ".join(kind.name for kind in here if _takes(name, settings, kind, trust_remote_code=trust_remote_code))
    raise ModelError(
        f"{what}, which is a model for no task that autofit knows",
        hint=f"--task takes another model of its type, with another loss: {listed}; or {script}" if listed else script,
    )


def _takes(name: str, settings: Any, kind: Kind, *, trust_remote_code: bool) -> bool:
    """Whether the model of a config for a task can be built, and takes what the task hands it."""
    with contextlib.suppress(Exception):
        model = _built(kind, settings, trust_remote_code=trust_remote_code)
        check_arguments(name, model, kind, str(getattr(model, "main_input_name", "input_ids")))
        return True
    return False


def check_arguments(name: str, model: Any, kind: Kind, main: str) -> None:
    """Refuse a model whose ``forward()`` does not take what the task hands it, or reads what the task does not make.

    Raises:
        ModelError: It lacks an argument.
    """
    taken = inspect.signature(model.forward).parameters
    asked = [main if argument == MAIN else argument for argument in kind.arguments]
    hint = "give the script that trains it: autofit tune train.py"
    for argument in asked:
        if argument not in taken:
            raise ModelError(
                f"{name!r}: forward() of {type(model).__name__} takes no {argument!r}, "
                f"which --task {kind.name} hands it",
                hint=hint,
            )
    if _PATCHES in taken and _PATCHES not in asked:
        raise ModelError(
            f"{name!r}: {type(model).__name__} reads patches of images, and their rows and columns ({_PATCHES}), "
            f"which --task {kind.name} can't make",
            hint=hint,
        )
    made = {*kind.makers, *INPUTS}
    for argument in (main, *asked):
        if argument not in made and argument not in {"labels", *kind.constants}:
            raise ModelError(
                f"{name!r}: {type(model).__name__} reads {argument!r}, which --task {kind.name} can't make", hint=hint
            )
    if main not in asked:
        raise ModelError(
            f"{name!r}: {type(model).__name__} reads {main!r}, which --task {kind.name} does not hand it", hint=hint
        )


def _in_order() -> list[Kind]:
    return sorted(TASKS.values(), key=lambda kind: kind.name not in _FIRST)


def _mapping(auto: str) -> Any:
    import transformers

    return getattr(transformers, auto)._model_mapping  # noqa: SLF001 - transformers has no other list of them


def _classes(kind: Kind, settings: Any) -> set[str]:
    """The classes that transformers has for a task and a config."""
    mapping = _mapping(kind.auto)
    if type(settings) not in mapping:
        return set()
    found = mapping[type(settings)]
    return {one.__name__ for one in (found if isinstance(found, tuple | list) else (found,))}
