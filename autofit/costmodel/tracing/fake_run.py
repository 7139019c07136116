"""The trace: the recipe of a plan run under fake tensors, without a device and without weights.

A real ``transformers.Trainer`` (or the plain loop) takes its steps, but its tensors have shapes only. What they would
hold is written to a :class:`~autofit.costmodel.tracing.timeline.Tape`. Two traces make a plan:

- the **micro-steps** of one accumulation, with three periods of the repeated layers and a telling number of rows;
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
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autofit.contract import placement
from autofit.contract.emission import Emission
from autofit.contract.plan import Plan
from autofit.costmodel.tracing.cuda_emulation import attention_stand_ins, like_cuda
from autofit.costmodel.tracing.fake_kernels import without_values
from autofit.costmodel.tracing.recorder import Recorder
from autofit.costmodel.tracing.timeline import Tape
from autofit.registry import recipe_of, techniques
from autofit.training import loops
from autofit.training.launch_environment import launch_environment, write_yaml
from autofit.training.timing import Effort

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.contract.recipe import Recipe

PERIODS = 3
_LEAST_LAYERS = 4
_PRIMES = (
    101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157,
    163, 167, 173, 179, 181, 191, 193, 197, 199, 1009,
)  # fmt: skip
_SIXTEEN = {"fp16": "bf16"}
"""A CPU has no fp16 autocast in a Trainer; bf16 has the same sizes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The repeated layers of a model.

    Attributes:
        path: Name of the module list.
        count: Layers in the whole model.
        before: Layers at the beginning that are not repeated.
        period: Layers after which the kinds repeat.
    """

    path: str
    count: int
    before: int
    period: int

    @property
    def copies(self) -> int:
        """Whole periods that a trace may leave out."""
        return (self.count - self.before) // self.period - PERIODS

    def kept(self) -> list[int]:
        """Indices of the layers that are traced: the middle periods are left out."""
        first = self.before + (PERIODS - 1) * self.period
        return [*range(first), *range(first + self.copies * self.period, self.count)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MicroSteps:
    """What a trace of micro-steps gives.

    Attributes:
        tape: Segments are named ``0:F1`` for the first micro-step, ``1:F1`` for one that adds to gradients.
        copies: Periods that are missing in it.
        weights: Bytes of each parameter and buffer of the whole model.
        notes: What was assumed, in words.
    """

    tape: Tape
    copies: int
    weights: tuple[int, ...]
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSteps:
    """What a trace of two optimizer steps gives.

    Attributes:
        tape: Each step's gradients are made in segment ``0:headB``, and the step is ``0:step``.
        elsewhere_bytes: Of the optimizer, on the host or in managed memory.
    """

    tape: Tape
    elsewhere_bytes: int


class Marks:
    """Stands where a trial has its clock: tells the recorder where a segment begins."""

    on_cuda = False
    in_parts = False

    def __init__(
        self, recipe: Recipe, recorder: Recorder, *, accumulation: int, steps: int, only_micro_steps: bool = False
    ) -> None:
        self.only_micro_steps = only_micro_steps
        self.recipe = recipe
        self.recorder = recorder
        self.accumulation = accumulation
        self.effort = Effort(warm_up=steps, min_steps=0, max_steps=0)
        self.done = 0
        self.accumulated = 0
        self.backward = False
        self.parameters: list[nn.Parameter] = []

    def mark(self, name: str) -> None:
        """A segment of the micro-step begins."""
        self.recorder.mark(f"{self.accumulated}:{name}")

    def step_begin(self) -> None:
        """An optimizer step begins."""
        self.accumulated = 0

    def forward_begin(self) -> None:
        """A micro-step begins."""
        self.backward = False
        self.mark("pre")

    def forward_end(self) -> None:
        """The loss is there."""
        self.backward = True
        self.mark("headB")

    def backward_end(self, loss: torch.Tensor) -> None:
        """The gradients of a micro-step are there."""
        self.backward = False
        self.recorder.call((parameter.grad for parameter in self.parameters), "gradients")
        self.mark("step")
        self.accumulated += 1
        if self.only_micro_steps and self.accumulated == self.accumulation:
            self.recorder.close()
            raise _Enough

    def step_skipped(self) -> None:
        """Nothing to do."""

    def step_end(self) -> bool:
        """An optimizer step is done."""
        self.done += 1
        if self.done == self.effort.warm_up:
            self.recorder.close()
        return self.done >= self.effort.warm_up


class _Enough(Exception):  # noqa: N818 - nothing is wrong
    """The trace has seen what it came for."""


# -- the model ----------------------------------------------------------------------------------------------------


def find_layers(model: nn.Module, multiple: int = 1) -> Layers | None:
    """The longest list of layers, and how its kinds repeat; ``None`` where nothing can be left out.

    Args:
        model: The whole model.
        multiple: The period is one of this number, since the plan treats layers otherwise that are no further apart.
    """
    found: tuple[str, nn.ModuleList] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and (found is None or len(module) > len(found[1])):
            found = name, module
    if found is None or len(found[1]) < _LEAST_LAYERS:
        return None
    kinds = [_kind(layer, _declared(model, index)) for index, layer in enumerate(found[1])]
    count = len(kinds)
    # below an adapter's first layer nothing is trained: it keeps less than those above it
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    for before in range(int(frozen), count):
        for period in range(multiple, (count - before) // (PERIODS + 1) + 1, multiple):
            if all(kinds[i] == kinds[i + period] for i in range(before, count - period)):
                return Layers(path=found[0], count=count, before=before, period=period)
    return None


def _declared(model: nn.Module, index: int) -> object:
    """What the config says of one layer, such as ``sliding_attention``."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    said = []
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type"):
        values = getattr(config, name, None)
        if isinstance(values, (list, tuple)) and index < len(values):
            said.append(values[index])
    return tuple(said)


def _kind(layer: nn.Module, declared: object) -> object:
    """Equal for layers that do the same: their modules, their own settings, their parameters."""
    modules = tuple((name, type(module).__qualname__) for name, module in layer.named_modules())
    parameters = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    return modules, parameters, declared


def period_of(plan: Plan) -> int:
    """After how many layers what the plan does to them repeats."""
    return math.lcm(*(one.period(plan[one.name]) for one in techniques()))


def shorten(model: nn.Module, layers: Layers) -> None:
    """Take the middle layers out."""
    whole = model.get_submodule(layers.path)
    assert isinstance(whole, nn.ModuleList)
    kept = nn.ModuleList([whole[index] for index in layers.kept()])
    owner, _, name = layers.path.rpartition(".")
    setattr(model.get_submodule(owner), name, kept)


def telling_rows(model: nn.Module, seq_len: int) -> int:
    """A prime that divides no other size: a tensor whose bytes it divides grows with the rows."""
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    sizes |= {seq_len - 1, seq_len, seq_len + 1}
    return next(prime for prime in _PRIMES if all(size % prime or not size for size in sizes))


def make_fake(model: nn.Module) -> None:
    """Put a fake tensor in the place of every parameter and buffer; shared ones stay shared."""
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


def bytes_of(model: nn.Module) -> tuple[int, ...]:
    """Bytes of each storage of parameters and buffers."""
    seen = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    return tuple(seen.values())


def watch_layers(model: nn.Module, layers: Layers, marks: Marks) -> None:
    """Mark where each period's forward and backward begins; ``model`` is shortened already."""
    kept: list[Any] = list(cast("nn.ModuleList", model.get_submodule(layers.path)))
    begins = {layers.before + period * layers.period: f"F{period}" for period in range(PERIODS)}
    ends = {layers.before + (period + 1) * layers.period - 1: f"B{period}" for period in range(PERIODS)}
    past, last = layers.before + PERIODS * layers.period, len(kept) - 1
    if past <= last:
        begins[past], ends[last] = "rest", "restB"
    for index, name in begins.items():
        kept[index].register_forward_pre_hook(_before_layer(marks, name), with_kwargs=True)
    for index, name in ends.items():
        kept[index].register_forward_hook(_after_layer(marks, name, head=index == last))


def _before_layer(marks: Marks, name: str) -> Callable[..., None]:
    """A hook that marks where a layer's forward begins, and below the lowest one where its backward ends."""

    def mark(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if marks.backward:  # recomputed
            return
        marks.mark(name)
        if name == "F0":
            held = (t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor))
            _mark_gradient(next(held, None), marks, "preB")

    return mark


def _after_layer(marks: Marks, name: str, *, head: bool) -> Callable[..., None]:
    """A hook that marks where a layer's backward begins, and above the highest one the head."""

    def mark(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if marks.backward:
            return
        _mark_gradient(output[0] if isinstance(output, (tuple, list)) else output, marks, name)
        if head:
            marks.mark("head")

    return mark


def _mark_gradient(tensor: Any, marks: Marks, name: str) -> None:
    """Mark when the gradient of a tensor is there."""
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
        tensor.register_hook(lambda _: marks.mark(name))  # type: ignore[no-untyped-call]


# -- the run ------------------------------------------------------------------------------------------------------


def micro_steps(
    plan: Plan, facts: Facts, *, config: Path, folder: Path, fake: bool = True, whole: bool = False
) -> MicroSteps:
    """Trace one accumulation of the plan; two micro-steps stand for any number above one.

    Args:
        plan: Its accumulation is not looked at. Where tensors are fake, a micro-batch above one stands for any such.
        facts: ``hardware.device`` says whose habits are traced.
        config: Folder that holds the ``config.json``.
        folder: Where a Trainer may write.
        fake: ``False`` runs it on real tensors of the CPU, for comparison.
        whole: Keep every layer.
    """
    with _prepared(plan, facts, folder) as recipe:
        model = recipe.model(None, config=config, device="meta" if fake else "cpu")
        weights = bytes_of(model)
        layers = find_layers(model, period_of(plan)) if fake and not whole else None
        if layers is not None:
            shorten(model, layers)
        rows = telling_rows(model, facts.workload.seq_len) if fake and recipe.micro_batch > 1 else None
        recipe.micro_batch = rows or recipe.micro_batch
        with _recording(recipe, fake=fake, rows=rows) as recorder:
            marks = Marks(recipe, recorder, accumulation=2, steps=1, only_micro_steps=True)
            if layers is not None:
                watch_layers(model, layers, marks)
            with contextlib.suppress(_Enough):
                _run(recipe, model, marks, folder, fake=fake)
        tape = recorder.tape(since=1)
    copies = layers.copies if layers else 0
    return MicroSteps(tape=tape, copies=copies, weights=weights, notes=tuple(sorted(recorder.notes)))


def optimizer_steps(plan: Plan, facts: Facts, *, config: Path, folder: Path, fake: bool = True) -> OptimizerSteps:
    """Trace two optimizer steps of the plan, with every parameter and given gradients."""
    with _prepared(plan, facts, folder) as recipe:
        model = recipe.model(None, config=config, device="meta" if fake else "cpu")
        model.forward = _given_gradients(model)
        with _recording(recipe, fake=fake) as recorder:
            marks = Marks(recipe, recorder, accumulation=1, steps=2)
            _run(recipe, model, marks, folder, fake=fake)
        tape = recorder.tape(since=1)
    return OptimizerSteps(tape=tape, elsewhere_bytes=round(float(tape.live_elsewhere(0).max())))


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


@contextlib.contextmanager
def _prepared(plan: Plan, facts: Facts, folder: Path) -> Iterator[Recipe]:
    """The recipe as it can run on a CPU, in the environment of its launch, without pauses for garbage."""
    recipe = recipe_of(plan, facts)
    recipe.emission = on_cpu(recipe.emission)
    recipe.mixed_precision = _SIXTEEN.get(recipe.mixed_precision, recipe.mixed_precision)
    config_file = folder / "traced.yaml"
    write_yaml(config_file, dict(recipe.emission.accelerate))
    os.environ.update(launch_environment(config_file))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    collect, gc.collect = gc.collect, lambda *_: 0
    gc.disable()
    try:
        yield recipe
    finally:
        gc.collect = collect
        gc.enable()


def on_cpu(emission: Emission) -> Emission:
    """What a plan writes, for a process on the CPU whose tensors have the same sizes."""
    mixed = emission.accelerate.get("mixed_precision", "no")
    arguments = dict(emission.training_args)
    arguments.update(use_cpu=True, tf32=None, fp16=False, bf16=bool(arguments.get("bf16") or arguments.get("fp16")))
    accelerate = {name: value for name, value in emission.accelerate.items() if name != "gpu_ids"}
    accelerate.update(use_cpu=True, mixed_precision=_SIXTEEN.get(mixed, mixed))
    return Emission(accelerate=accelerate, training_args=arguments, script=emission.script)


@contextlib.contextmanager
def _recording(recipe: Recipe, *, fake: bool, rows: int | None = None) -> Iterator[Recorder]:
    """A recorder, and around it what stands in for the device and for the techniques' own kernels."""
    on_cuda = recipe.facts.hardware.device == "cuda"
    stand_ins = {**(without_values() if fake else {}), **(attention_stand_ins() if on_cuda else {})}
    recorder = Recorder(stand_ins=stand_ins, fake=fake, rows=rows)
    with contextlib.ExitStack() as stack:
        for one in techniques():
            stack.enter_context(one.stand_in(recipe.plan[one.name], recipe.facts, recorder))
        if fake:
            stack.enter_context(not_packed())
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(recorder)
        if on_cuda:
            stack.enter_context(placement.use(placement.Traced(recorder)))
            stack.enter_context(like_cuda())
        yield recorder


@contextlib.contextmanager
def not_packed() -> Iterator[None]:
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
    rows = recipe.micro_batch * marks.accumulation * marks.effort.warm_up
    on_cpu_itself = recipe.facts.hardware.device == "cpu"
    dataset = None if on_cpu_itself else loops.random_rows(recipe, rows)  # of the host, where there is a device
    recorder.mark("begin")
    dataset = dataset or loops.random_rows(recipe, rows)
    model.register_forward_pre_hook(_call_batch(recorder), with_kwargs=True)
    marks.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if recipe.facts.workload.launch_path == "trainer":
        args = recipe.training_arguments(**loops.untuned(marks, folder))
        args.per_device_train_batch_size = recipe.micro_batch
        args.gradient_accumulation_steps = marks.accumulation
        args.train_sampling_strategy = "sequential"  # to shuffle rows without values is dear
        optimizer = recipe.optimizer(model, output_dir=str(folder)) if recipe.optimizer_wraps else None
        loops.run_trainer(marks, args, model, optimizer, dataset=dataset)
    else:
        accelerator = recipe.accelerator(gradient_accumulation_steps=marks.accumulation)
        optimizer = recipe.optimizer(model, output_dir=str(folder))
        loops.run_loop(marks, accelerator, model, optimizer, dataset=dataset)


def _call_batch(recorder: Recorder) -> Callable[..., None]:
    """A hook that tells the recorder which tensors are the batch."""

    def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        held = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.dim() == 2]
        recorder.call(held, "batch")

    return call
