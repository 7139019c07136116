"""What a trace trains: the model of a config on random rows of its task, or another source of a model and its steps.

A recipe is made ready for a process without a device: on a CPU whose tensors have the same sizes, in the environment of
its launch.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from autofit.contract.emission import Emission
from autofit.contract.plan import Plan
from autofit.contract.recipe import without_drawing
from autofit.costmodel.tracing.emulation.sharded import fake_world
from autofit.costmodel.tracing.layers import Marks, TraceDone, period_of, wrapped_in_part
from autofit.costmodel.tracing.recorder import Recorder
from autofit.costmodel.tracing.shard_layout import (
    accumulating,
    layout_of,
    on_device,
    one_process,
    without_engine,
)
from autofit.registry import recipe_of
from autofit.system.errors import ModelError
from autofit.training import loops
from autofit.training.launch_environment import launch_environment
from autofit.training.tasks.table import kind_of

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.contract.recipe import Recipe

_FP16_AS_BF16 = {"fp16": "bf16"}
"""A CPU has no fp16 autocast in a Trainer; bf16 has the same sizes."""


class Source(Protocol):
    """What a trace trains: a model and how it takes its steps."""

    evaluates: bool
    """Whether an evaluation step is run after the micro-steps, and traced."""
    beside: list[nn.Module]
    """Further models that lie on the device and are not trained; known after :meth:`model`."""

    def prepared(self) -> contextlib.AbstractContextManager[Recipe]:
        """The recipe as it can run here, in the environment of its launch."""

    def model(self, *, fake: bool) -> Any:
        """The model, wrapped as the plan says; its tensors may be real ones."""

    def take_rows(self, *, grows: bool, given: bool = False) -> None:
        """Make ready a micro-batch of as many rows as the recipe says.

        Args:
            grows: The number of rows is a prime, which every tensor of the micro-batch has to grow with.
            given: The gradients are given, and no loss is computed.

        Raises:
            ModelError: No trace stands for such rows.
        """

    def run(self, model: Any, marks: Marks, *, fake: bool) -> None:
        """Train until the marks say enough; the model and its optimizer stand ready when segment 1 begins."""


class FromConfig:
    """The model of a config on random rows of its task.

    Args:
        plan: The plan.
        facts: What it is for.
        config: Folder that holds the ``config.json``.
        folder: Where a Trainer may write.
        alone: Without the others of its world.
        whole: Wrap every layer, also those that no trace runs.
        accumulation: Micro-steps to an optimizer step that an engine is told of.
    """

    def __init__(
        self,
        plan: Plan,
        facts: Facts,
        config: Path,
        folder: Path,
        *,
        alone: bool = False,
        whole: bool = False,
        accumulation: int = 1,
    ) -> None:
        self.plan, self.facts, self.config, self.folder = plan, facts, config, folder
        self.alone, self.whole, self.accumulation = alone, whole, accumulation
        self.evaluates = facts.workload.launch_path == "trainer"  # else the script evaluates
        self.beside: list[nn.Module] = []

    @contextlib.contextmanager
    def prepared(self) -> Iterator[Recipe]:
        """The recipe as it can run here."""
        plan, facts, folder = self.plan, self.facts, self.folder
        with prepared(plan, facts, folder, alone=self.alone, accumulation=self.accumulation) as self.recipe:
            yield self.recipe

    def model(self, *, fake: bool) -> Any:
        """The model, of which fake tensors need no storage."""
        untraced = kind_of(self.facts.model.task).untraced
        if fake and not self.alone and untraced is not None:
            raise ModelError(untraced)
        build, wraps = functools.partial(self.recipe.model, None, config=self.config), self.recipe.model_wraps
        if fake and wraps and not self.whole:
            quantized = self.recipe.random_model  # that, too, is left to the layers that are run
            self.recipe.model_wraps, self.recipe.random_model = [], None

            def quantize(model: Any) -> Any:
                with torch.device("meta"), without_drawing():
                    return model if quantized is None else quantized(lambda: model)

            try:
                found = wrapped_in_part(build(device="meta"), [quantize, *wraps], period_of(self.plan))
            finally:
                self.recipe.model_wraps, self.recipe.random_model = wraps, quantized
            if found is not None:
                return found
        return build(device="meta" if fake else "cpu")

    def take_rows(self, *, grows: bool, given: bool = False) -> None:
        """Rows are made as they are wanted."""

    def run(self, model: Any, marks: Marks, *, fake: bool) -> None:
        """Train until the marks say enough."""
        train(self.recipe, model, marks, self.folder, fake=fake, evaluates=self.evaluates)


@contextlib.contextmanager
def prepared(plan: Plan, facts: Facts, folder: Path, *, alone: bool = False, accumulation: int = 1) -> Iterator[Recipe]:
    """The recipe as it can run on a CPU, in the environment of its launch; alone, without the others of its world."""
    recipe = recipe_of(plan, facts)
    engine = layout_of(recipe).engine and not alone
    if alone:
        recipe.facts = one_process(facts)
        recipe.emission = without_engine(recipe.emission)
        recipe.spread = None
    recipe.emission = on_cpu(accumulating(on_device(recipe.emission), accumulation), engine=engine)
    recipe.mixed_precision = _FP16_AS_BF16.get(recipe.mixed_precision, recipe.mixed_precision)
    config_file = folder / "traced.json"  # as Accelerate takes it, too; YAML is read slowly
    config_file.write_text(json.dumps(recipe.emission.accelerate), encoding="utf-8")
    with _launched(config_file), _without_garbage_collection(), contextlib.ExitStack() as stack:
        if engine:
            stack.enter_context(fake_world(facts.workload.processes))
        yield recipe


@contextlib.contextmanager
def _launched(config_file: Path) -> Iterator[None]:
    """The environment and Accelerate's state as in a process that its launcher starts; put back afterwards."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    states: list[dict[str, Any]] = [state._shared_state for state in (AcceleratorState, GradientState, PartialState)]
    before = [dict(state) for state in states]
    environment, launched = dict(os.environ), launch_environment(config_file)
    try:
        for state in states:
            state.clear()
        os.environ.update(launched, CUDA_VISIBLE_DEVICES="")
        yield
    finally:
        for state, held in zip(states, before, strict=True):
            state.clear()
            state.update(held)
        os.environ.clear()
        os.environ.update(environment)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """No pauses for garbage: a trace makes much of it, and its process ends soon."""
    collect, enabled = gc.collect, gc.isenabled()
    gc.collect = lambda *_: 0
    gc.disable()
    try:
        yield
    finally:
        gc.collect = collect
        if enabled:
            gc.enable()


def on_cpu(emission: Emission, *, engine: bool = False) -> Emission:
    """What a plan writes, for a process on the CPU whose tensors have the same sizes.

    Where an engine runs the model, Accelerate is left to believe that it is on GPUs: on CPUs it leaves engines out.
    """
    mixed = emission.accelerate.get("mixed_precision", "no")
    arguments = dict(emission.training_args)
    arguments.update(
        use_cpu=not engine,
        dataloader_pin_memory=False,
        tf32=None,
        fp16=False,
        bf16=bool(arguments.get("bf16") or arguments.get("fp16")),
    )
    accelerate = {name: value for name, value in emission.accelerate.items() if name != "gpu_ids"}
    accelerate.update(use_cpu=not engine, mixed_precision=_FP16_AS_BF16.get(mixed, mixed))
    return Emission(accelerate=accelerate, training_args=arguments, script=emission.script)


def train(recipe: Recipe, model: Any, marks: Marks, folder: Path, *, fake: bool, evaluates: bool = False) -> None:
    """Train until the marks say enough; the model and its optimizer stand ready when segment 1 begins."""
    recorder = marks.recorder
    if fake:
        with torch._C.DisableTorchFunction():  # nothing that CUDA would do otherwise
            make_fake(model)
        if recipe.spread is not None:
            model = recipe.spread(model)
        model.to = lambda *_, **__: model  # it is where it should be, and fake parameters can't be moved
    recorder.call([*model.parameters(), *model.buffers()], "weights")
    rows = recipe.micro_batch * marks.accumulation * marks.effort.warm_up * recipe.facts.workload.processes
    on_cpu_itself = recipe.facts.hardware.device == "cpu"
    dataset = None if on_cpu_itself else _rows(recipe, model, rows, fake=fake)  # of the host, where there is a device
    recorder.mark("begin")
    dataset = dataset or _rows(recipe, model, rows, fake=fake)
    model.register_forward_pre_hook(call_batch(recorder), with_kwargs=True)
    marks.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if recipe.facts.workload.launch_path == "trainer":
        if fake and not layout_of(recipe).engine:
            marks.repeat_first(model)
        args = recipe.training_arguments(**loops.untuned(marks, folder))
        args.per_device_train_batch_size = args.per_device_eval_batch_size = recipe.micro_batch
        args.gradient_accumulation_steps = marks.accumulation
        args.train_sampling_strategy = "sequential"  # to shuffle rows without values is dear
        optimizer = recipe.optimizer(model, output_dir=str(folder)) if recipe.optimizer_wraps else None
        trainers: list[Any] = []
        with contextlib.suppress(TraceDone):
            loops.run_trainer(marks, args, model, optimizer, dataset=dataset, begin=trainers.append)
        if marks.past is not None and evaluates:
            loops.evaluate_once(trainers[0])
    else:
        accelerator = recipe.accelerator(gradient_accumulation_steps=marks.accumulation)
        optimizer = recipe.optimizer(model, output_dir=str(folder))
        with contextlib.suppress(TraceDone):
            loops.run_loop(marks, accelerator, model, optimizer, dataset=dataset)


def _rows(recipe: Recipe, model: Any, rows: int, *, fake: bool) -> Dataset[Any]:
    """Random rows; without values the same tensors each time, unless rows differ in length."""
    dataset = loops.random_rows(recipe, model, rows)
    return _Alike(dataset) if fake and not recipe.facts.workload.lengths else dataset


class _Alike(Dataset[Any]):
    """The first row of a dataset as every row."""

    def __init__(self, rows: Any) -> None:
        self.row, self.count, self.collate = rows[0], len(rows), rows.collate

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, _: int) -> Any:
        return self.row


def call_batch(recorder: Recorder) -> Callable[..., None]:
    """A hook that tells the recorder which tensors are the batch."""

    def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        held = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim()]
        recorder.call(held, "batch")

    return call


def make_fake(model: nn.Module) -> dict[int, torch.Tensor]:
    """Put a fake tensor in the place of every parameter and buffer; shared ones stay shared.

    Returns:
        The fake tensors, by the ``id`` of those that they stand for.
    """
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in tables:
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                    trainable = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if trainable else fake
                held[name] = made[id(tensor)]
    return made
