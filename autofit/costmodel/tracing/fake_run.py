"""Runs the recipe of a plan under fake tensors, without a device and without weights, and records its allocations.

A real ``transformers.Trainer`` (or the plain loop) takes its steps, but its tensors have shapes only. What they would
hold is written to a :class:`~autofit.costmodel.tracing.timeline.Tape`. Two traces make a plan:

- the **micro-steps** of one accumulation, with three periods of the repeated layers and a prime number of rows;
- the **optimizer's step**, with every parameter of the model and gradients that are given: it does not depend on the
  micro-batch.

Fake CUDA tensors abort on a build without CUDA, so everything is on a fake CPU, and what CUDA does otherwise is put in
its place by :mod:`autofit.costmodel.tracing.cuda_emulation`. Only imported in processes that have torch loaded and
may be thrown away.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from autofit.contract import placement
from autofit.contract.emission import Emission
from autofit.contract.plan import Plan
from autofit.costmodel.tracing.cuda_emulation import like_cuda
from autofit.costmodel.tracing.cuda_kernels import kernel_stand_ins
from autofit.costmodel.tracing.fake_kernels import without_values
from autofit.costmodel.tracing.fake_mode import FakeMode
from autofit.costmodel.tracing.layers import Marks, TraceDone, find_layers, period_of, shorten, watch_layers
from autofit.costmodel.tracing.recorder import Recorder
from autofit.costmodel.tracing.shard_layout import (
    Layout,
    Loading,
    cut,
    layout_of,
    loading,
    local_bytes,
    on_device,
    one_process,
    share_bytes,
    without_engine,
)
from autofit.costmodel.tracing.sharded import fake_world, following
from autofit.costmodel.tracing.timeline import ELSEWHERE, Tape
from autofit.costmodel.tracing.trace_store import kernels_of
from autofit.registry import recipe_of, techniques
from autofit.system.errors import ModelError
from autofit.training import loops
from autofit.training.launch_environment import launch_environment, write_yaml
from autofit.training.tasks.table import kind_of

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.contract.recipe import Recipe

_PRIMES = (
    101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157,
    163, 167, 173, 179, 181, 191, 193, 197, 199, 1009,
)  # fmt: skip
_FP16_AS_BF16 = {"fp16": "bf16"}
"""A CPU has no fp16 autocast in a Trainer; bf16 has the same sizes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MicroSteps:
    """What a trace of micro-steps gives.

    Attributes:
        tape: Segments are named ``0:F1`` for the first micro-step, ``1:F1`` for one that adds to gradients.
        evaluation: One evaluation step with as many rows; ``None`` on the ``loop`` path, where the script evaluates.
        copies: Periods that are missing in it.
        weights: Bytes of each parameter and buffer of the whole model.
        notes: What was assumed, in words.
        buckets_bytes: Of DDP's reducer, of the whole model.
        host_bytes: Of the weights that wait on the host.
        gathers_late: Whether a micro-step that is followed by another leaves whole gradients on every rank.
        loading: How a sharded model gets onto the device.
    """

    tape: Tape
    evaluation: Tape | None
    copies: int
    weights: tuple[int, ...]
    notes: tuple[str, ...] = ()
    buckets_bytes: int = 0
    host_bytes: int = 0
    gathers_late: bool = False
    loading: Loading | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSteps:
    """What a trace of two optimizer steps gives.

    Attributes:
        tape: Each step's gradients are made in segment ``0:headB``, and the step is ``0:step``.
        elsewhere_bytes: Of the optimizer, on the host or in managed memory.
    """

    tape: Tape
    elsewhere_bytes: int


def prime_micro_batch(model: nn.Module, seq_len: int) -> int:
    """A prime that divides no other size: a tensor whose bytes it divides grows with the rows."""
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    sizes |= {seq_len - 1, seq_len, seq_len + 1}
    return next(prime for prime in _PRIMES if all(size % prime or not size for size in sizes))


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


# -- the run ------------------------------------------------------------------------------------------------------


def micro_steps(
    plan: Plan,
    facts: Facts,
    *,
    config: Path,
    folder: Path,
    fake: bool = True,
    whole: bool = False,
    accumulation: int = 2,
    source: Source | None = None,
    any_rows: bool = True,
) -> MicroSteps:
    """Trace one accumulation of the plan; two micro-steps stand for any number above one.

    Args:
        plan: Its accumulation is not looked at. Where tensors are fake, a micro-batch above one stands for any such.
        facts: ``hardware.device`` says whose habits are traced.
        config: Folder that holds the ``config.json``.
        folder: Where a Trainer may write.
        fake: ``False`` runs it on real tensors of the CPU, for comparison.
        whole: Keep every layer.
        accumulation: Micro-steps to trace.
        source: What trains; the model of the config on random rows where none is given.
        any_rows: Whether the trace is to hold for any number of rows above one; else for the plan's alone.

    Raises:
        ModelError: No trace stands for a step of the model's task, or for the source's rows.
    """
    source = source or FromConfig(plan, facts, config, folder)
    with source.prepared() as recipe:
        layout = layout_of(recipe_of(plan, facts))
        model = source.model(fake=fake)
        weights, buckets_bytes = tuple(local_bytes(model, layout)), layout.buckets_bytes(model)
        load = loading(model, layout) if layout.shards > 1 else None
        shares = share_bytes(model, layout) if layout.on_host else {}
        host_bytes = sum(shares.values())
        buckets_bytes += max(shares.values(), default=0)  # one share at a time is brought in to be gathered
        weights += tuple(size for beside in source.beside for size in local_bytes(beside, layout))
        layers = find_layers(model, period_of(plan)) if fake and not whole and not source.beside else None
        if layers is not None:
            shorten(model, layers)
        many = fake and any_rows and recipe.micro_batch > 1
        rows = prime_micro_batch(model, facts.workload.seq_len) if many else None
        recipe.micro_batch = rows or recipe.micro_batch
        source.take_rows(grows=rows is not None)
        with _recording(recipe, fake=fake, rows=rows) as recorder:
            marks = Marks(recipe, recorder, accumulation=accumulation, steps=1, only_micro_steps=True)
            marks.sharded = model if layout.engine else None
            if layers is not None:
                watch_layers(model, layers, marks)
            source.run(model, marks, fake=fake)
        tape = recorder.tape(since=1, until=marks.past)
        evaluation = recorder.tape(since=marks.past) if marks.past and source.evaluates else None
    return MicroSteps(
        tape=_without_shares(tape, layout),
        evaluation=evaluation,
        copies=layers.copies if layers else 0,
        weights=weights,
        notes=tuple(sorted(recorder.notes)),
        buckets_bytes=buckets_bytes,
        host_bytes=host_bytes,
        gathers_late=layout.gathers_late,
        loading=load,
    )


def optimizer_steps(
    plan: Plan, facts: Facts, *, config: Path, folder: Path, fake: bool = True, source: Source | None = None
) -> OptimizerSteps:
    """Trace two optimizer steps of the plan, with every parameter and given gradients.

    Of a sharded plan each parameter is as large as its shard: optimizers treat a shard as they would a parameter.
    """
    source = source or FromConfig(plan, facts, config, folder, alone=True)
    with source.prepared() as recipe:
        model = source.model(fake=fake)
        layout = layout_of(recipe_of(plan, facts))
        cut(model, layout)
        source.take_rows(grows=False, given=True)
        model.forward = _given_gradients(model)
        with _recording(recipe, fake=fake) as recorder:
            marks = Marks(recipe, recorder, accumulation=1, steps=2)
            source.run(model, marks, fake=fake)
        tape = recorder.tape(since=1)
    if layout.on_host:
        tape = dataclasses.replace(tape, categories=np.full_like(tape.categories, ELSEWHERE))
    return OptimizerSteps(tape=tape, elsewhere_bytes=round(float(tape.live_elsewhere(0).max())))


def _without_shares(tape: Tape, layout: Layout) -> Tape:
    """Without the weights, which are counted of every layer, and without what the host holds."""
    if not layout.engine:
        return tape
    return tape.without("weights", "gradients") if layout.on_host else tape.without("weights")


def _given_gradients(model: nn.Module) -> Callable[..., Any]:
    """A forward pass that gives every trainable parameter a gradient and costs nothing else."""
    from transformers.modeling_outputs import CausalLMOutput

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, *_: Any) -> None:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)

    def forward(*_: Any, **__: Any) -> CausalLMOutput:
        loss = Given.apply(torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
        return CausalLMOutput(loss=loss)

    return forward


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
    """

    def __init__(self, plan: Plan, facts: Facts, config: Path, folder: Path, *, alone: bool = False) -> None:
        self.plan, self.facts, self.config, self.folder, self.alone = plan, facts, config, folder, alone
        self.evaluates = _evaluates(facts)
        self.beside: list[nn.Module] = []

    @contextlib.contextmanager
    def prepared(self) -> Iterator[Recipe]:
        """The recipe as it can run here."""
        with prepared(self.plan, self.facts, self.folder, alone=self.alone) as self.recipe:
            yield self.recipe

    def model(self, *, fake: bool) -> Any:
        """The model, of which fake tensors need no storage."""
        untraced = kind_of(self.facts.model.task).untraced
        if fake and not self.alone and untraced is not None:
            raise ModelError(untraced)
        return self.recipe.model(None, config=self.config, device="meta" if fake else "cpu")

    def take_rows(self, *, grows: bool, given: bool = False) -> None:
        """Rows are made as they are wanted."""

    def run(self, model: Any, marks: Marks, *, fake: bool) -> None:
        """Train until the marks say enough."""
        _run(self.recipe, model, marks, self.folder, fake=fake)


@contextlib.contextmanager
def prepared(plan: Plan, facts: Facts, folder: Path, *, alone: bool = False) -> Iterator[Recipe]:
    """The recipe as it can run on a CPU, in the environment of its launch; alone, without the others of its world."""
    recipe = recipe_of(plan, facts)
    engine = layout_of(recipe).engine and not alone
    if alone:
        recipe.facts = one_process(facts)
        recipe.emission = without_engine(recipe.emission)
    recipe.emission = on_cpu(on_device(recipe.emission), engine=engine)
    recipe.mixed_precision = _FP16_AS_BF16.get(recipe.mixed_precision, recipe.mixed_precision)
    config_file = folder / "traced.yaml"
    write_yaml(config_file, dict(recipe.emission.accelerate))
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


@contextlib.contextmanager
def _recording(recipe: Recipe, *, fake: bool, rows: int | None = None) -> Iterator[Recorder]:
    """A recorder, and around it what stands in for the device and for the techniques' own kernels."""
    on_cuda, capability = recipe.facts.hardware.device == "cuda", kernels_of(recipe.facts.hardware.capability)
    stand_ins = {**(without_values() if fake else {}), **(kernel_stand_ins(capability) if on_cuda else {})}
    recorder = Recorder(stand_ins=stand_ins, fake=fake, rows=rows)
    with contextlib.ExitStack() as stack:
        for one in techniques():
            stack.enter_context(one.stand_in(recipe.plan[one.name], recipe.facts, recorder))
        if fake:
            stack.enter_context(without_packing())
            stack.enter_context(FakeMode())
        if layout_of(recipe).engine:
            stack.enter_context(following(recorder))
        stack.enter_context(recorder)
        if on_cuda:
            stack.enter_context(placement.use(placement.Traced(recorder)))
            stack.enter_context(like_cuda(capability))
        yield recorder


@contextlib.contextmanager
def without_packing() -> Iterator[None]:
    """Say what transformers can't see in positions without values: that a row is one sequence.

    Otherwise it makes a mask of every pair of tokens, and attention takes another kernel.
    """
    from transformers import masking_utils

    find = masking_utils.find_packed_sequence_indices

    def find_none(position_ids: torch.Tensor) -> None:
        find(position_ids)  # for the tensors that it makes

    masking_utils.find_packed_sequence_indices = find_none
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


def _run(recipe: Recipe, model: Any, marks: Marks, folder: Path, *, fake: bool) -> None:
    """Train until the marks say enough; the model and its optimizer stand ready when segment 1 begins."""
    recorder = marks.recorder
    if fake:
        make_fake(model)
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
        args = recipe.training_arguments(**loops.untuned(marks, folder))
        args.per_device_train_batch_size = args.per_device_eval_batch_size = recipe.micro_batch
        args.gradient_accumulation_steps = marks.accumulation
        args.train_sampling_strategy = "sequential"  # to shuffle rows without values is dear
        optimizer = recipe.optimizer(model, output_dir=str(folder)) if recipe.optimizer_wraps else None
        trainers: list[Any] = []
        with contextlib.suppress(TraceDone):
            loops.run_trainer(marks, args, model, optimizer, dataset=dataset, begin=trainers.append)
        if marks.past is not None and _evaluates(recipe.facts):
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


def _evaluates(facts: Facts) -> bool:
    """Whether an evaluation step is traced: a Trainer's."""
    return facts.workload.launch_path == "trainer"


def call_batch(recorder: Recorder) -> Callable[..., None]:
    """A hook that tells the recorder which tensors are the batch."""

    def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        held = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim()]
        recorder.call(held, "batch")

    return call
