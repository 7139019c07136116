"""What is put into transformers before a script runs, so that the script trains with a plan and no line of it changes.

Four places: where a model is loaded or built, where the arguments are made, where a Trainer is made (before its
Accelerator), and ``Trainer.train``. The process is the script's alone: nothing is taken back.
Read in transformers 5.23: ``PreTrainedModel.from_pretrained`` and ``_from_config``,
``TrainingArguments.__post_init__``, ``Trainer.__init__``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.contract.recipe import Recipe, keep_flags_alike, large_weights_left_zero, quick_random_weights
from autofit.training.rollouts import check_generation, split_of_generation
from autofit.training.scripts.asked import Asked
from autofit.training.scripts.leave import Refused, ending
from autofit.training.scripts.random_weights import (
    cache_tables_apart,
    made_quantized,
    random_model,
    take_reference_of_few,
)
from autofit.training.scripts.written import Written
from autofit.training.tasks.loss_scale import of_a_library


def keep_files(told: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda nothing: nothing) -> None:
    """Have a script write nothing over what it has trained before: the weights here are random.

    Args:
        told: Given what stands for a function that saves; returns what is called in its place.
    """
    import safetensors.torch
    import torch
    from transformers import PreTrainedModel, Trainer

    models: list[Any] = [PreTrainedModel]
    if "peft" in sys.modules:  # a Trainer imports it where it is installed
        models.append(sys.modules["peft"].PeftModel)
    places: list[tuple[Any, str]] = [
        *((one, name) for one in models for name in ("save_pretrained", "push_to_hub")),
        *((Trainer, name) for name in ("save_model", "push_to_hub")),
        *((safetensors.torch, name) for name in ("save_file", "save_model")),
    ]
    for place, name in places:
        setattr(place, name, told(lambda *_, **__: None))
    save = torch.save

    @functools.wraps(save)
    def into_memory(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, io.BytesIO):
            save(obj, f, *args, **kwargs)

    torch.save = told(into_memory)


def keep_unprofiled() -> None:
    """Have a script's profilers record nothing, call nobody and write nothing: a profiled step is no measure of one."""
    import torch
    from torch.autograd.profiler_util import EventList

    own: Any = torch.profiler.profile

    class Idle(own):  # type: ignore[misc]
        def __init__(self, **given: Any) -> None:
            never = torch.profiler.ProfilerAction.NONE
            super().__init__(**{**given, "schedule": lambda _: never, "on_trace_ready": None})
            self.record_steps = False

        def events(self, *_: Any, **__: Any) -> Any:
            return EventList()  # type: ignore[no-untyped-call]

        key_averages = events

        def export_chrome_trace(self, *_: Any, **__: Any) -> None:
            pass

        export_stacks = export_memory_timeline = export_chrome_trace

    torch.profiler.profile = Idle  # type: ignore[misc]
    for name in ("_record_memory_history", "_dump_snapshot"):  # those of a GPU's memory
        setattr(torch.cuda.memory, name, lambda *_, **__: None)


def keep_what_was_there(trains: Callable[[], bool], told: Callable[[], None]) -> None:
    """Have a script delete nothing while it trains that was there before: what it saves instead is not written.

    Args:
        trains: Whether it trains now.
        told: Called where it would delete such a file or folder.
    """
    began = time.time() - 1.0  # a file system's clock lies some hundredths of a second behind
    for place, name in ((shutil, "rmtree"), (os, "remove"), (os, "unlink")):
        setattr(place, name, _unless_older(getattr(place, name), began, trains, told))


def _unless_older(
    delete: Callable[..., None], began: float, trains: Callable[[], bool], told: Callable[[], None]
) -> Callable[..., None]:
    @functools.wraps(delete)
    def deleted(path: Any, *args: Any, **kwargs: Any) -> None:
        older = False
        if trains() and kwargs.get("dir_fd") is None:  # else it is in a folder that is deleted
            with contextlib.suppress(OSError):
                older = os.lstat(path).st_mtime < began
        if older:
            told()
        else:
            delete(path, *args, **kwargs)

    return deleted


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a script has made a Trainer with.

    Attributes:
        arguments: Fields of its ``TrainingArguments``, as they were before the tuned ones.
        given: What it was given, by name.
    """

    arguments: Mapping[str, Any]
    given: Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class Patches:
    """What a script is run with.

    Attributes:
        train: Called in the place of ``Trainer.train``, with the Trainer and what ``train`` would have done.
        construct: Fields of ``TrainingArguments`` that are set while they are made: where the script may write.
        tuned: Fields that are set before the Trainer takes them, as if the script had given them.
        quiet: Attributes that are set after these, unchecked: what a measurement has no use for.
        environment: Variables that are set again then, since arguments that the script gave may have changed them.
        loads: Given what the script says where it loads a model; returns what is said instead.
        call: Which call of ``train`` is meant; ``None`` for each of a Trainer that :attr:`takes` has chosen.
        skips_earlier: Whether the calls before it are left out.
        rewrites: Whether the arguments of a Trainer are changed.
        takes: Given what a Trainer is made with, and its class; in words why its arguments are not changed.
        leaves: Called with these words where such a Trainer begins to train.
        before_trainer: Called where a Trainer is about to be made, before its arguments are changed.
        random_weights: Whether models get random weights, and no file of weights is read, fetched or written: training
            begins at its first step.
        draws: Whether these are drawn: where nothing is trained, large ones are left zero, and take no memory.
        made: What each Trainer was made with, by its ``id``.
        said: What the script itself said where it loaded its model.
        loaded: Whether it loaded one: a model that its class makes can't be told anything.
        written: The files that it has written since a model of its own got random weights.
        asked: What the arguments of its Trainers ask for by the script itself.
        calls: How many times ``train`` was called.
    """

    train: Callable[[Any, Callable[[], Any]], Any]
    construct: Mapping[str, Any] = field(default_factory=dict)
    tuned: Mapping[str, Any] = field(default_factory=dict)
    quiet: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    loads: Callable[[dict[str, Any]], dict[str, Any]] = dict
    before_trainer: Callable[[], None] = lambda: None
    random_weights: bool = True
    draws: bool = True
    call: int | None = 1
    skips_earlier: bool = True
    rewrites: bool = True
    takes: Callable[[Made, type], str] = lambda *_: ""
    leaves: Callable[[str], None] = lambda _: None
    made: dict[int, Made] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    loaded: bool = False
    written: Written = field(default_factory=Written)
    asked: Asked = field(default_factory=Asked)
    _left: dict[int, str] = field(default_factory=dict)
    calls: int = 0

    def install(self) -> None:
        """Put them in."""
        self._into_models()
        self._into_arguments()
        self._into_trainer()
        self.asked.listen()
        _end_where_memory_does()
        if self.random_weights:
            keep_files()
            keep_unprofiled()
            cache_tables_apart()

    def _loading(self, given: dict[str, Any]) -> dict[str, Any]:
        """What is said where a model is loaded, in place of what the script says."""
        if given.get("quantization_config") is not None:
            made_quantized(given["quantization_config"])
        self.loaded = True
        said = {name: given[name] for name in ("attn_implementation", "dtype", "torch_dtype") if given.get(name)}
        said["dtype"] = said.pop("torch_dtype", said.get("dtype"))
        self.said |= {name: str(value).removeprefix("torch.") for name, value in said.items() if value is not None}
        changed = self.loads(dict(given))
        if "dtype" in changed:
            changed.pop("torch_dtype", None)
        return changed

    def _drawing(self) -> contextlib.AbstractContextManager[None]:
        """Around the making of a model: how its weights come to be, where none are read."""
        if not self.random_weights:
            return contextlib.nullcontext()
        return quick_random_weights() if self.draws else large_weights_left_zero()

    def _into_models(self) -> None:
        from transformers import PreTrainedModel

        owner: Any = PreTrainedModel
        load, build = owner.from_pretrained.__func__, owner._from_config.__func__  # noqa: SLF001 - there is no other

        def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs = self._loading(kwargs)
            if self.random_weights:
                self.written.begin()
                with self._drawing():
                    return random_model(cls, name, kwargs, functools.partial(build, cls), draws=self.draws)
            return load(cls, name, *args, **kwargs)

        def from_config(cls: Any, config: Any, **kwargs: Any) -> Any:
            with self._drawing():
                return build(cls, config, **self._loading(kwargs))

        owner.from_pretrained = classmethod(functools.wraps(load)(from_pretrained))
        built: Any = functools.wraps(build)(from_config)
        owner._from_config = classmethod(built)  # noqa: SLF001 - as above

    def _into_arguments(self) -> None:
        from transformers import TrainingArguments

        owner: Any = TrainingArguments
        finish = owner.__post_init__

        @functools.wraps(finish)
        def post_init(arguments: Any) -> None:
            for name, value in self.construct.items():
                setattr(arguments, name, value)
            finish(arguments)
            keep_flags_alike()

        owner.__post_init__ = post_init

    def _into_trainer(self) -> None:
        from transformers import Trainer

        owner: Any = Trainer
        original = owner.train

        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            self.before_trainer()
            trainer = object.__new__(cls)
            if self.rewrites:
                self._rewrite(trainer, args, kwargs)
            return trainer

        @functools.wraps(original)
        def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            from transformers.trainer_utils import TrainOutput

            self.calls += 1
            if self.call is not None and self.calls < self.call and self.skips_earlier:
                return TrainOutput(0, 0.0, {})
            meant = id(trainer) in self.made if self.call is None else self.calls == self.call
            if id(trainer) in self._left:
                self.leaves(self._left[id(trainer)])
            if self.random_weights:  # no checkpoint is read: its step may be the last one of a measurement, too
                args = (None, *args[1:])[: len(args)]
                kwargs.pop("resume_from_checkpoint", None)
            if not meant:
                return original(trainer, *args, **kwargs)
            if self.random_weights:  # else it is not left before that
                self.asked.search(trainer, *args, **kwargs)
            made = self.made.get(id(trainer))
            if made is not None and (since := self.asked.since(trainer)):
                self.made[id(trainer)] = dataclasses.replace(made, arguments={**made.arguments, **since})
            with ending():
                return self.train(trainer, functools.partial(original, trainer, *args, **kwargs))

        owner.__new__ = staticmethod(new)
        owner.train = train

    def _rewrite(self, trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Change the arguments that a Trainer is about to take, in place: the script may look at them again."""
        try:
            given = _given(type(trainer), trainer, *args, **kwargs)
        except TypeError:
            return  # the Trainer itself will say what is wrong
        arguments = given.get("args")
        if arguments is None:
            raise Refused(
                f"the script makes its Trainer without arguments (a {type(trainer).__name__})",
                "give it args=TrainingArguments(...); where a library sets them later (SetFit), it can't be tuned",
            )
        if getattr(arguments, "deepspeed", None) or getattr(arguments, "fsdp", None):
            raise Refused(
                "the script asks for DeepSpeed or FSDP by its arguments",
                "leave that out: autofit tune train.py --processes N tries the ways to spread a model",
            )
        check_generation(type(trainer), arguments, given, measured=self.random_weights)
        if self.random_weights:
            take_reference_of_few(type(trainer))
        _accumulate_by_arguments(arguments)
        own = self.asked.taken(arguments)
        made_with = Made(arguments=own, given=given)
        self.made.pop(id(trainer), None)
        self._left.pop(id(trainer), None)
        if why := self.takes(made_with, type(trainer)):
            self._left[id(trainer)] = why
            if self.asked.differs(arguments):  # a Trainer before has taken them with the plan
                _set_all(arguments, own)
            arguments.mixed_precision = next((name for name in ("bf16", "fp16") if own[name]), "no")  # not the launch's
            return
        self.made[id(trainer)] = made_with
        os.environ.update(self.environment)
        _set_all(arguments, self.tuned)
        vars(arguments).update(self.quiet)
        self.asked.changed(arguments)


def _set_all(arguments: Any, values: Mapping[str, Any]) -> None:
    """Have arguments be as if made with these values, but for what the script, or a class of its own, sets in them."""
    made = copy.copy(arguments)
    vars(made).pop("_setup_devices", None)  # found anew, by the variables of the launch
    vars(made).update(values, **split_of_generation(arguments, values))
    finishes = (one for one in type(made).__mro__ if "__post_init__" in vars(one) and of_a_library(one))
    vars(next(finishes))["__post_init__"](made)
    vars(arguments).clear()
    vars(arguments).update(vars(made))


def _accumulate_by_arguments(arguments: Any) -> None:
    """Have an accumulation that is said for Accelerate be an argument, as a Trainer itself does later."""
    said = arguments.accelerator_config.gradient_accumulation_kwargs or {}
    if "num_steps" in said and arguments.gradient_accumulation_steps == 1:  # else a Trainer takes neither
        arguments.gradient_accumulation_steps = said.pop("num_steps")


def _end_where_memory_does() -> None:
    """Have ``find_executable_batch_size`` let an error through where memory runs out: the batch is the plan's."""
    from accelerate.utils import memory

    memory.should_reduce_batch_size = lambda _: False


def _given(kind: type, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What a Trainer is given, by name; of what its class takes by ``*args``, arguments and model, by their types."""
    from torch.nn import Module
    from transformers import TrainingArguments

    signature = inspect.signature(getattr(kind, "__init__"))  # noqa: B009 - of a class, which may have its own
    bound = dict(signature.bind_partial(*args, **kwargs).arguments)
    for one in signature.parameters.values():
        if one.kind is one.VAR_POSITIONAL:
            for value in bound.pop(one.name, ()):
                if isinstance(value, TrainingArguments):
                    bound["args"] = value
                elif isinstance(value, Module):
                    bound["model"] = value
        elif one.kind is one.VAR_KEYWORD:
            bound |= bound.pop(one.name, {})
    return bound


def loads_of(recipe: Recipe) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What a recipe says where a model is loaded, over what the script says."""

    def changed(given: dict[str, Any]) -> dict[str, Any]:
        import torch

        script = recipe.facts.workload.script
        changes = {**given, **recipe.model_arguments}
        if script is not None and script.quantization:  # what is packed is unpacked to the dtype that the script says
            return changes
        if given.get("quantization_config") is not None:
            raise Refused(
                "the script loads its model with quantized weights, and the plan is for a training without",
                "tune the script as it is: autofit tune train.py",
            )
        return {**changes, "dtype": getattr(torch, recipe.weights_dtype)}

    return changed


def said_where_loaded(recipe: Recipe) -> str:
    """What a recipe says where a model is loaded, as one word: recipes of the same run a script alike until then."""
    return repr((sorted(recipe.model_arguments.items()), recipe.weights_dtype))
