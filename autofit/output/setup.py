"""``autofit.load(DIR)``: the emitted files as objects, for the user's own script."""

from __future__ import annotations

import dataclasses
import os
import shlex
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.machine.packages import installed
from autofit.machine.same_machine import check_same_machine, other_world
from autofit.output.document import MODEL_FOLDER, check_config, read_document
from autofit.registry import by_script, recipe_of, techniques
from autofit.system.errors import InputError, ModelError
from autofit.training.scripts.leave import refuse_two_plans

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedModel, TrainingArguments

    from autofit.contract.outcome import Promise
    from autofit.contract.plan import Plan
    from autofit.contract.recipe import Recipe
    from autofit.output.document import Document


_WEIGHTS = "it is to be a hub id, or a folder with trained weights; without it the weights are random"
_WHOLE = "give the whole folder that `autofit tune` wrote"
_ANEW = "ignore_mismatched_sizes"
"""The argument of ``from_pretrained`` that its error names where a weight is of another shape than the model's."""
_OTHER_SHAPES = f"setup.model(SOURCE, {_ANEW}=True) learns those anew, such as a head of other classes (num_labels)"
_OTHERS = "setup.model(SOURCE, num_labels=7) takes what no plan sets; tune again with --fix to hold a value of a plan"
_PLANNED = {
    "dtype", "torch_dtype", "attn_implementation", "trust_remote_code", "quantization_config", "distributed_config",
    "tp_plan", "device_map", "output_loading_info",
}  # fmt: skip
"""Arguments of ``from_pretrained`` that a plan sets or rules out, or after which no model alone comes back."""
_SIZES = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size")


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Setup:
    """What a tune found, ready to be used in a script.

    Attributes:
        folder: Where the emitted files are.
        document: The whole ``autofit.json``.
        recipe: How the plan loads, wraps and trains a model with the installed versions.
        any_hardware: Whether another card than the answer's may be trained on.
    """

    folder: Path
    document: Document
    recipe: Recipe
    any_hardware: bool = False

    def __repr__(self) -> str:
        return f"Setup({self.plan.words()}, in {str(self.folder)!r})"

    @property
    def plan(self) -> Plan:
        """The winner's value of each technique."""
        return self.document.plan

    @property
    def promise(self) -> Promise:
        """What training will do."""
        return self.document.promise

    @property
    def micro_batch(self) -> int:
        """Rows for a plain loop's ``DataLoader``."""
        return self.recipe.loaded_rows

    @property
    def accumulation(self) -> int:
        """Micro-batches to an optimizer step."""
        return self.recipe.accumulation

    @property
    def wraps_optimizer(self) -> bool:
        """Whether a Trainer has to be given ``setup.optimizer(model)``, since no argument can name it."""
        return bool(self.recipe.optimizer_wraps)

    def model(self, source: str | Path | None = None, **others: Any) -> PreTrainedModel:
        """The model with everything that no argument can carry: weights' dtype, offload, wrappers.

        Warns where it has other sizes than the one that was tuned.

        Args:
            source: A pretrained model's id or folder; without it, random weights of the tuned config.
            others: Arguments of ``from_pretrained`` that no plan sets, such as ``num_labels`` of a head that is learned
                anew, ``revision`` or ``token``.

        Raises:
            ModelError: No weights can be loaded from there, or the answer is of a script, which builds its own
                model.
            InputError: The config was changed since or is gone, ``source`` is no id and no path, one of ``others`` is
                what the plan says, or this training runs on another number of processes than the answer is for.
            MachineError: It runs on another kind of device, or on another card.
        """
        from safetensors import SafetensorError

        self.check()
        script = self.document.workload.script
        if script is not None:
            raise ModelError(
                f"the answer in {self.folder} was tuned with a script, which builds its own model",
                hint=f"autofit run {shlex.quote(str(self.folder))} {Path(script.typed[0]).name} -- ARGS trains with it",
            )
        if source is not None and not isinstance(source, (str, os.PathLike)):
            raise InputError(f"setup.model was given a {type(source).__name__}", hint=_WEIGHTS)
        if not (self.folder / MODEL_FOLDER / "config.json").is_file():
            raise InputError(f"{self.folder / MODEL_FOLDER} has no config.json any more", hint=_WHOLE)
        if source is not None and Path(source).is_file():
            raise ModelError(f"{str(source)!r} is a file, not a folder with trained weights", hint=_WEIGHTS)
        if clash := sorted(others if source is None else _PLANNED & others.keys()):
            why = "for a pretrained model, and none is named" if source is None else "set by autofit"
            raise InputError(f"{', '.join(clash)}: {why}, so it can't be given", hint=_OTHERS)
        if source is None:
            check_config(self.document, self.folder)
        try:
            built = self.recipe.model(source, config=self.folder / MODEL_FOLDER, others=others)
        except (OSError, ValueError, SafetensorError, RuntimeError) as error:
            mismatched = _ANEW in str(error)
            if source is None or (isinstance(error, RuntimeError) and not mismatched):
                raise
            why = next(iter(str(error).splitlines()), type(error).__name__)
            raise ModelError(
                f"{str(source)!r} can't be loaded: {'some of its weights have other shapes' if mismatched else why}",
                hint=_OTHER_SHAPES if mismatched else _WEIGHTS,
            ) from error
        if source is not None:
            self._tell_other_sizes(built, source)
        return built

    def _tell_other_sizes(self, built: PreTrainedModel, source: str | Path) -> None:
        """Warn where a model has other sizes than the one that was tuned; its vocabulary may have grown."""
        from transformers import AutoConfig

        model = self.document.model
        tuned = AutoConfig.from_pretrained(self.folder / MODEL_FOLDER, trust_remote_code=model.trust_remote_code)
        both = {name: (getattr(built.config, name, None), getattr(tuned, name, None)) for name in _SIZES}
        differing = [f"{name} {mine}, not {theirs}" for name, (mine, theirs) in both.items() if mine != theirs]
        if differing:
            warnings.warn(
                f"{str(source)!r} is another model than {model.name}, which was tuned ({', '.join(differing)}): its "
                "speed and memory are others, tune it",
                stacklevel=3,
            )

    def dataset(self, own: Any, collator: Callable[..., Any] | None = None) -> Any:
        """The rows to train on, as the plan says: packed ones under ``batching=packing``, else as they are.

        Args:
            own: The script's own, with a length.
            collator: The script's own, which makes a batch of its rows; a Trainer's default where none is given.

        Raises:
            InputError: Its rows can't be packed.
        """
        from transformers import default_data_collator

        return self.recipe.dataset(own, collator or default_data_collator)

    def collator(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """What makes a batch of rows, as the plan says: a data collator for a Trainer, or for a loop's ``DataLoader``.

        Args:
            own: The script's own.
        """
        return self.recipe.collator(own)

    def optimizer(self, model: PreTrainedModel, **others: Any) -> torch.optim.Optimizer:
        """The optimizer that the plan names, as a Trainer builds it.

        Args:
            model: From :meth:`model`.
            others: Untuned fields of ``TrainingArguments``, such as ``learning_rate`` and ``weight_decay``.

        Raises:
            InputError: ``model`` is no model; or one of ``others`` is what the plan says, or no such field.
        """
        _check_model(model, "optimizer")
        return self.recipe.optimizer(model, **others)

    def watch(self, model: PreTrainedModel) -> Watch:
        """Watch a training, to tell afterwards whether every knob took effect.

        Raises:
            InputError: ``model`` is no model.
        """
        _check_model(model, "watch")
        return Watch(self, model)

    def accelerator(self, **others: Any) -> Accelerator:
        """An ``Accelerator`` with the plan's accumulation and precision, and ``others`` for the rest.

        Raises:
            AutofitError: As for :meth:`model`, of the processes and the device.
            InputError: One of ``others`` is what the plan says, or no argument of an ``Accelerator``.
        """
        from accelerate import Accelerator
        from accelerate.utils import AutocastKwargs

        self.check()
        instead = "tune again with --fix to hold a value, or make an Accelerator of your own"
        plugin = others.get("gradient_accumulation_plugin")
        planned = self.accumulation, self.recipe.sync_each_batch
        if plugin is not None and (plugin.num_steps, plugin.sync_each_batch) != planned:
            said = f"gradient_accumulation_plugin={plugin}"
            raise InputError(f"{said}: set by autofit, so it can't be given again", hint=instead)
        casts = [one for one in others.get("kwargs_handlers") or () if isinstance(one, AutocastKwargs)]
        if self.recipe.mixed_precision != "no" and not all(one.enabled for one in casts):
            raise InputError(f"kwargs_handlers={casts} switches off the precision that is set by autofit", hint=instead)
        self.recipe.emission.check_beside(others, Accelerator, instead)
        return self.recipe.accelerator(**others)

    def training_arguments(self, **others: Any) -> TrainingArguments:
        """``TrainingArguments`` with every tuned field, and ``others`` for the rest.

        Raises:
            AutofitError: As for :meth:`model`, of the processes and the device.
            InputError: One of ``others`` is what the plan says, or no field.
        """
        self.check()
        return self.recipe.training_arguments(**others)

    def check(self) -> None:
        """Refuse to train where the answer does not hold.

        Raises:
            AutofitError: As for :meth:`model`, of the processes and the device.
        """
        check_same_machine(self.recipe.facts, self.folder, any_hardware=self.any_hardware)


def _check_model(model: object, of: str) -> None:
    from torch import nn

    if not isinstance(model, nn.Module):
        raise InputError(
            f"setup.{of} was given a {type(model).__name__}", hint="give it the model that setup.model(...) made"
        )


class Watch:
    """Watches a training through forward hooks, and tells which knobs it ignored.

    Passes of an evaluation, in ``model.eval()`` or without gradients, are left out.

    Args:
        setup: What was to be used.
        model: The model before it is prepared or given to a Trainer.
    """

    def __init__(self, setup: Setup, model: PreTrainedModel) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        from autofit.training.observer import Observer

        self.setup = setup
        self._observer = Observer(model, setup.recipe)
        self._counted: dict[int, int] = {}
        self._gaps: dict[int, list[int]] = {}
        self._on_step = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Keep how many micro-batches went into an optimizer's step."""
        now, key = self._observer.micro_steps, id(optimizer)
        self._gaps.setdefault(key, []).append(now - self._counted.get(key, 0))
        self._counted[key] = now

    def _accumulation(self, optimizer: torch.optim.Optimizer, steps: int) -> int | None:
        """Micro-batches in an optimizer step: what most steps had, since an epoch may end with fewer.

        Of an optimizer that is none of PyTorch's it is the mean; ``None`` in a graph, where hooks do not count.
        """
        from autofit.training.observer import unwrapped

        if not self._observer.micro_steps:
            return None
        gaps = Counter(self._gaps.get(id(unwrapped(optimizer)), ()))
        if gaps:
            return max(gaps, key=lambda gap: (gaps[gap], gap))
        return round(self._observer.micro_steps / steps) if steps else None

    def ignored(
        self, optimizer: torch.optim.Optimizer, accelerator: Accelerator, steps: int, *, rows: int | None = None
    ) -> list[str]:
        """The knobs that did not take effect, a sentence each; empty where all did.

        Args:
            optimizer: The one that stepped, such as ``trainer.optimizer``.
            accelerator: The one that prepared it, such as ``trainer.accelerator``.
            steps: Optimizer steps that were made since the watch began.
            rows: Of a micro-batch, where they are not the first dimension of what the model is given.
        """
        self._observer.close()
        self._on_step.remove()
        if steps and not self._observer.micro_steps and not self._observer.in_graph:
            reason = "the watched model ran no forward pass with gradients: was another trained?"
            return [f"every knob: {reason}"]
        if rows is not None:
            self._observer.rows = rows
        seen = self._observer.evidence(optimizer, accelerator, self._accumulation(optimizer, steps))
        plan, facts = self.setup.plan, self.setup.recipe.facts
        found = [
            (one.name, one.in_effect(plan[one.name], seen.of(one.name), facts))
            for one in techniques()
            if not by_script(one, facts)
        ]
        return [f"{name}={plan[name]}: {reason}" for name, reason in found if reason]


def load(folder: str | Path, *, any_hardware: bool = False) -> Setup:
    """Read an output folder of ``autofit tune``, or of ``autofit estimate``.

    Warns where the plan is estimated and not measured, where a package differs from the one that the answer was found
    with, and where this training runs on another number of processes than the answer is for.

    Args:
        folder: What ``--output`` was.
        any_hardware: Let a training use another card than the answer's; never another number of processes.

    Raises:
        InputError: The folder holds no valid ``autofit.json``, or ``any_hardware`` is neither True nor False.
        Refused: The script is launched by ``autofit run``, which puts a plan into it, or is being tuned.
    """
    if not isinstance(any_hardware, bool):
        raise InputError(f"any_hardware is a {type(any_hardware).__name__}", hint="give True or False")
    refuse_two_plans()
    setup = read_setup(folder, any_hardware=any_hardware)
    other = other_world(setup.document.facts, folder)
    if other is not None:
        warnings.warn(f"a training by this process {other}", stacklevel=2)
    return setup


def read_setup(folder: str | Path, *, any_hardware: bool = False) -> Setup:
    """The same without a warning about the number of processes: for callers that check it, or do not train."""
    found = read_document(folder)
    if found.estimated is not None:
        warnings.warn(
            f"the plan in {folder} is estimated for {found.hardware.name}, not measured: `autofit verify` tells on "
            "that card whether it holds",
            stacklevel=3,
        )
    now = installed()
    differing = [
        f"{name} {then} -> {now.get(name, 'none')}"
        for name, then in found.versions.items()
        if _minor(now.get(name, "")) != _minor(then)
    ]
    if differing:
        warnings.warn(
            f"{folder} was tuned with other versions ({', '.join(differing)}): tune again, or check it by "
            "`autofit verify`",
            stacklevel=3,
        )
    facts = dataclasses.replace(found.facts, packages=now)
    # a script may go elsewhere before it asks for the model, and what is no folder there were a hub id
    return Setup(
        folder=Path(folder).absolute(), document=found, recipe=recipe_of(found.plan, facts), any_hardware=any_hardware
    )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
