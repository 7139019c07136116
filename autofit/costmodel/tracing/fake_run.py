"""Runs the recipe of a plan under fake tensors, without a device and without weights, and records its allocations.

A real ``transformers.Trainer`` (or the plain loop) takes its steps, but its tensors have shapes only. What they would
hold is written to a :class:`~autofit.costmodel.tracing.timeline.Tape`. Two traces make a plan:

- the **micro-steps** of one accumulation, with three periods of the repeated layers and a prime number of rows;
- the **optimizer's step**, with every parameter of the model and gradients that are given: it does not depend on the
  micro-batch. What the loss does not use gets no gradient, and so an optimizer makes no state of it.

Fake CUDA tensors abort on a build without CUDA, so everything is on a fake CPU, and what CUDA does otherwise is put in
its place by :mod:`autofit.costmodel.tracing.emulation.cuda`. Only imported in processes that have torch loaded and
may be thrown away.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from autofit.contract import placement
from autofit.contract.plan import Plan
from autofit.contract.technique import replacing
from autofit.costmodel.tracing import shard_layout
from autofit.costmodel.tracing.emulation import zero
from autofit.costmodel.tracing.emulation.cuda import like_cuda
from autofit.costmodel.tracing.emulation.cuda_kernels import device_properties, kernel_stand_ins
from autofit.costmodel.tracing.emulation.fake_kernels import lists_of_tensors, without_values
from autofit.costmodel.tracing.emulation.fake_mode import FakeMode
from autofit.costmodel.tracing.emulation.sharded import following
from autofit.costmodel.tracing.emulation.tiled_loss import tiled_loss
from autofit.costmodel.tracing.layers import Marks, find_layers, period_of, shorten, watch_layers
from autofit.costmodel.tracing.recorder import Recorder
from autofit.costmodel.tracing.shard_layout import Held, Layout, cut, layout_of
from autofit.costmodel.tracing.source import FromConfig, Source
from autofit.costmodel.tracing.timeline import Tape, UnlikeError
from autofit.costmodel.tracing.trace_request import groups_experts, kernels_of
from autofit.registry import recipe_of, techniques
from autofit.system.errors import AutofitError, ModelError
from autofit.system.other_kernels import without_launches

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.contract.recipe import Recipe

_PRIMES = (
    101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157,
    163, 167, 173, 179, 181, 191, 193, 197, 199, 1009,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MicroSteps(Held):
    """What a trace of micro-steps gives.

    Attributes:
        tape: Segments are named ``0:F1`` for the first micro-step, ``1:F1`` for one that adds to gradients.
        evaluation: One evaluation step with as many rows; ``None`` on the ``loop`` path, where the script evaluates.
        copies: Periods that are missing in it.
        notes: What was assumed, in words.
        gathers_late: Whether a micro-step that is followed by another leaves whole gradients on every rank.
        unused: The trainable parameters of the whole model that got no gradient, by name; none where that hangs on
            values that are not known.
        guessed: Whether it may hang on such.
        alike: What the models of other plans hold whose micro-steps are the same.
    """

    tape: Tape
    evaluation: Tape | None
    copies: int
    unused: frozenset[str] = frozenset()
    guessed: bool = False
    notes: tuple[str, ...] = ()
    gathers_late: bool = False
    alike: dict[Plan, Held] = dataclasses.field(default_factory=dict)


def prime_micro_batch(model: nn.Module, seq_len: int) -> int:
    """A prime that divides no other size: a tensor whose bytes it divides grows with the rows."""
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    sizes |= {seq_len - 1, seq_len, seq_len + 1}
    return next(prime for prime in _PRIMES if all(size % prime or not size for size in sizes))


# -- the run ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Stepping:
    """Micro-steps while they are taken.

    Attributes:
        model: Takes them.
        marks: Are told of each of their parts, and raise ``TraceDone`` at the end of the last.
        found: What the trace gives; there once all is over.
    """

    model: Any
    marks: Marks
    found: MicroSteps | None = None


def micro_steps(
    plan: Plan, facts: Facts, *, config: Path, folder: Path, source: Source | None = None, fake: bool = True, **how: Any
) -> MicroSteps:
    """Trace one accumulation of the plan; two micro-steps stand for any number above one.

    Args:
        plan: Its accumulation is not looked at. Where tensors are fake, a micro-batch above one stands for any such.
        facts: ``hardware.device`` says whose habits are traced.
        config: Folder that holds the ``config.json``.
        folder: Where a Trainer may write.
        source: What trains; the model of the config on random rows where none is given.
        fake: ``False`` runs it on real tensors of the CPU, for comparison.
        how: See :func:`stepping`.

    Raises:
        ModelError: No trace stands for a step of the model's task, or for the source's rows.
    """
    asked = {"whole": how.get("whole", False), "accumulation": how.get("accumulation", 2)}
    source = source or FromConfig(plan, facts, config, folder, **asked)
    with stepping(plan, facts, source, fake=fake, **how) as steps:
        source.run(steps.model, steps.marks, fake=fake)
    assert steps.found is not None
    return steps.found


@contextlib.contextmanager
def stepping(
    plan: Plan,
    facts: Facts,
    source: Source,
    *,
    fake: bool = True,
    whole: bool = False,
    accumulation: int = 2,
    any_rows: bool = True,
    evaluates: bool = True,
    alike: Collection[Plan] = (),
) -> Iterator[Stepping]:
    """What stands around the micro-steps of a trace, for a source that does not take them by itself.

    Args:
        plan: As for :func:`micro_steps`.
        facts: The same.
        source: What trains.
        fake: As for :func:`micro_steps`.
        whole: Keep every layer.
        accumulation: Micro-steps to trace.
        any_rows: Whether the trace is to hold for any number of rows above one; else for the plan's alone.
        evaluates: Whether an evaluation step is traced too, if one belongs to the training.
        alike: Plans whose micro-steps are the same: what their models hold is told, too.

    Raises:
        UnlikeError: The model needs the layers that were left out.
    """
    source.evaluates &= evaluates
    with source.prepared() as recipe:
        layout = layout_of(recipe_of(plan, facts))
        model = source.model(fake=fake)
        layouts = (layout_of(recipe_of(one, facts)) for one in (plan, *alike))
        holds, *others = shard_layout.held(model, layouts, source.beside)
        shortened = fake and not whole and not source.beside and not layout.zero
        layers = find_layers(model, period_of(plan)) if shortened else None
        names = [name for name, _ in model.named_parameters()]
        if layers is not None:
            shorten(model, layers)
        many = fake and any_rows and recipe.micro_batch > 1
        rows = prime_micro_batch(model, facts.workload.seq_len) if many else None
        recipe.micro_batch = rows or recipe.micro_batch
        source.take_rows(grows=rows is not None)
        with _recording(recipe, fake=fake, rows=rows) as recorder:
            count = zero.STEPS if layout.zero else 1
            marks = Marks(recipe, recorder, accumulation=accumulation, steps=count, only_micro_steps=True)
            marks.sharded = model if layout.engine else None
            if layers is not None:
                watch_layers(model, layers, marks)
            steps = Stepping(model, marks)
            try:
                yield steps
            except Exception as error:
                if layers is None or isinstance(error, AutofitError):
                    raise
                raise UnlikeError("the model needs the layers that were left out") from error
            _see_split(model, layout_of(recipe), source.beside)
        # between micro-steps a script may ask what it runs; and an engine of its own takes the gradients away
        guessed = bool(layout.zero) or (marks.guessed if isinstance(source, FromConfig) else recorder.guessed)
        bare = set() if guessed else {name for name, one in _trained(model) if one.grad is None}
        tape = recorder.tape(since=marks.since, until=marks.past)
        evaluation = recorder.tape(since=marks.past) if marks.past and source.evaluates else None
        holds = zero.held(marks, layout, recipe) if layout.zero else holds
    steps.found = MicroSteps(
        tape=_without_shares(tape, layout),
        evaluation=evaluation,
        copies=layers.copies if layers else 0,
        notes=tuple(sorted(recorder.notes)),
        gathers_late=layout.gathers_late,
        unused=frozenset(name for name in names if (layers.traced_name(name) if layers else name) in bare),
        guessed=guessed,
        alike=dict(zip(alike, others, strict=True)),
        **{one.name: getattr(holds, one.name) for one in dataclasses.fields(holds)},
    )


def unused(
    plan: Plan, facts: Facts, *, config: Path, folder: Path, source: Source | None = None, **how: Any
) -> frozenset[str]:
    """The trainable parameters that a micro-step gives no gradient; the arguments are those of :func:`micro_steps`.

    Neither DDP, which has a Trainer find unused parameters, nor FSDP2 gives them one: ``global_unused`` in
    ``reducer.cpp``, ``reduce_scatter_unused_params`` of ``FSDPParamGroup``. So it is asked of one process.
    """
    if layout_of(recipe_of(plan, facts)).zero:  # its flat shares have a state whoever has a gradient
        return frozenset()
    source = source or FromConfig(plan, facts, config, folder, alone=True)
    how = {"accumulation": 1, "any_rows": False, "evaluates": False, **how}
    return micro_steps(plan, facts, config=config, folder=folder, source=source, **how).unused


def optimizer_steps(
    plan: Plan,
    facts: Facts,
    *,
    config: Path,
    folder: Path,
    fake: bool = True,
    source: Source | None = None,
    unused: frozenset[str] = frozenset(),
) -> Tape:
    """Trace two optimizer steps of the plan, with given gradients of every parameter but the ``unused``.

    Each step's gradients are made in segment ``0:headB``, and the step is ``0:step``. Of a sharded plan each parameter
    is as large as its shard: optimizers treat a shard as they would a parameter. Shares that wait on the host are
    traced as if they were on the device.
    """
    layout = layout_of(recipe_of(plan, facts))
    if layout.zero:
        source = source or FromConfig(plan, facts, config, folder)
        with stepping(plan, facts, source, accumulation=1, any_rows=False, evaluates=False) as steps:
            source.run(steps.model, steps.marks, fake=True)
        return zero.state(steps.marks)
    source = source or FromConfig(plan, facts, config, folder, alone=True)
    with source.prepared() as recipe:
        model = source.model(fake=fake)
        wholes = _names_of(model, cut(model, layout))
        source.take_rows(grows=False, given=True)
        model.forward = _given_gradients(model, wholes, unused)
        with _recording(recipe, fake=fake) as recorder:
            marks = Marks(recipe, recorder, accumulation=1, steps=2)
            source.run(model, marks, fake=fake)
        return recorder.tape(since=1)


def _see_split(model: nn.Module, layout: Layout, beside: Collection[nn.Module]) -> None:
    """See that the model was split as the plan says.

    Raises:
        ModelError: It was not; or another one lies beside it, which may be split or whole.
    """
    if not layout.splits:
        return
    if beside:
        kind = type(next(iter(beside))).__name__
        raise ModelError(f"a step with another model ({kind}) beside the one whose weights are split can't be traced")
    # a unit that is gathered has whole parameters
    split = any(isinstance(one, FSDPModule) for one in model.modules())
    if not layout.zero and not split and not any(isinstance(one, DTensor) for one in model.parameters()):
        raise ModelError("the step did not split the weights over the processes, though the plan says so")


def _without_shares(tape: Tape, layout: Layout) -> Tape:
    """Without the weights, which are counted of every layer, and without what the host holds."""
    if not layout.engine:
        return tape
    return tape.without("weights", "gradients") if layout.on_host else tape.without("weights")


def _names_of(model: nn.Module, by_id: dict[int, int]) -> dict[str, int]:
    """Numbers by the name of a parameter, which outlives it: fake ones take its place."""
    return {name: by_id[id(one)] for name, one in model.named_parameters() if id(one) in by_id}


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The trainable parameters, by name."""
    return ((name, one) for name, one in model.named_parameters() if one.requires_grad)


def _given_gradients(model: nn.Module, wholes: dict[str, int], unused: frozenset[str]) -> Callable[..., Any]:
    """A forward pass that gives the trainable parameters a gradient and costs nothing else.

    Args:
        model: The model.
        wholes: How many numbers lie behind the gradient of a parameter, where they are more than it has.
        unused: The names of those that get none.
    """
    from transformers.modeling_outputs import CausalLMOutput

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, *_: Any) -> None:
            for name, parameter in _trained(model):
                if name in wholes and name not in unused:
                    held = torch.empty(wholes[name], dtype=parameter.dtype)
                    parameter.grad = held[: parameter.numel()].view(parameter.shape)
                elif name not in unused:
                    parameter.grad = torch.empty_like(parameter)

    def forward(*_: Any, **__: Any) -> CausalLMOutput:
        loss = Given.apply(torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
        return CausalLMOutput(loss=loss)

    return forward


@contextlib.contextmanager
def _recording(recipe: Recipe, *, fake: bool, rows: int | None = None) -> Iterator[Recorder]:
    """A recorder, and around it what stands in for the device and for the techniques' own kernels."""
    card = recipe.facts.hardware
    on_cuda, capability = card.device == "cuda", kernels_of(card.capability)
    stand_ins = {**(without_values() if fake else {}), **(kernel_stand_ins(capability) if on_cuda else {})}
    mode = FakeMode() if fake else None
    groups = on_cuda and groups_experts(card.capability)
    recorder = Recorder(stand_ins=stand_ins, fake=fake, mode=mode, rows=rows, groups=groups)
    with contextlib.ExitStack() as stack:
        for one in techniques():
            stack.enter_context(one.stand_in(recipe.plan[one.name], recipe.facts, recorder))
        if mode is not None:
            stack.enter_context(without_packing(gaps=layout_of(recipe).context > 1))
            stack.enter_context(_without_profiling())
            stack.enter_context(lists_of_tensors())
            stack.enter_context(mode)
        if layout_of(recipe).engine:
            work = recipe.facts.workload
            evaluates = work.launch_path == "trainer" if work.script is None else work.script.evaluated_rows > 0
            stack.enter_context(following(recorder, evaluates=evaluates))
        stack.enter_context(recorder)
        if fake:
            stack.enter_context(tiled_loss(recorder, on_cuda=on_cuda))
            stack.enter_context(without_launches(recorder.launched))
        if on_cuda:
            stack.enter_context(placement.use(placement.Traced(recorder)))
            stack.enter_context(like_cuda(capability))
            properties = device_properties(capability)
            stack.enter_context(replacing([(torch.cuda, "get_device_properties", lambda *_: properties)]))
        yield recorder


def _without_profiling() -> contextlib.AbstractContextManager[None]:
    """No names for a profiler, which FSDP2 and optimizers give by operators: a fifth of a sharded trace."""
    record = torch.autograd.profiler.record_function
    return replacing([(record, "__enter__", lambda self: self), (record, "__exit__", lambda *_: None)])


@contextlib.contextmanager
def without_packing(*, gaps: bool = False) -> Iterator[None]:
    """Say what transformers can't see in positions without values: that a row is one sequence.

    Otherwise it makes a mask of every pair of tokens, and attention takes another kernel. So it does where a rank has
    parts of each row, with gaps between them; that mask is dropped before attention.
    """
    from transformers import masking_utils

    find = masking_utils.find_packed_sequence_indices

    def find_none(position_ids: torch.Tensor) -> torch.Tensor | None:
        found: torch.Tensor | None = find(position_ids)  # for the tensors that it makes, too
        return found if gaps else None

    masking_utils.find_packed_sequence_indices = find_none
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find
