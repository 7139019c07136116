"""The repeated layers of a model: which of them a trace may leave out, and where each one begins and ends.

:class:`Marks` stands where a trial has its timer. It tells the recorder where a segment of the step begins; see
:mod:`autofit.costmodel.tracing.timeline` for the segments.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import nn

from autofit.contract.plan import Plan
from autofit.costmodel.tracing.repetition import Repetition
from autofit.registry import techniques
from autofit.training.timing import Effort

if TYPE_CHECKING:
    from autofit.contract.recipe import ModelWrap, Recipe
    from autofit.costmodel.tracing.recorder import Recorder

PERIODS = 3
_MIN_LAYERS = 4


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

    def traced_name(self, name: str) -> str:
        """What a parameter of the whole model is called in one without the left-out layers, or the one alike to it."""
        if not name.startswith(f"{self.path}."):
            return name
        number, _, rest = name.removeprefix(f"{self.path}.").partition(".")
        index, middle = int(number), self.before + self.period
        if index >= middle + (1 + self.copies) * self.period:
            index -= self.copies * self.period
        elif index >= middle:
            index = middle + (index - middle) % self.period
        return f"{self.path}.{index}.{rest}"


def find_list(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The longest list of layers, with its name."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda one: len(one[1]), default=None)


def find_layers(model: nn.Module, multiple: int = 1, *, frozen: bool = False) -> Layers | None:
    """The longest list of layers, and how its kinds repeat; ``None`` where nothing can be left out.

    Args:
        model: The whole model.
        multiple: The period is one of this number, since the plan treats layers otherwise that are no further apart.
        frozen: Whether something of it will be frozen, if it is not yet.
    """
    found = find_list(model)
    if found is None or len(found[1]) < _MIN_LAYERS or _numbered(getattr(model, "config", None)):
        return None
    kinds = [_kind(layer, _declared(model, index)) for index, layer in enumerate(found[1])]
    count = len(kinds)
    # below an adapter's first layer nothing is trained: it keeps less than those above it
    frozen = frozen or any(not parameter.requires_grad for parameter in model.parameters())
    for before in range(int(frozen), count):
        for period in range(multiple, (count - before) // (PERIODS + 1) + 1, multiple):
            if all(kinds[i] == kinds[i + period] for i in range(before, count - period)):
                return Layers(path=found[0], count=count, before=before, period=period)
    return None


def _numbered(config: Any) -> bool:
    """Whether a config, or one in it, tells layers apart by their number from the first one on."""
    for each in (config, *getattr(config, "__dict__", {}).values()):
        for name in ("out_indices", "vision_feature_layer", "deepstack_visual_indexes"):
            told = getattr(each, name, None)
            numbers = told if isinstance(told, (list, tuple)) else [told]
            last = getattr(each, "num_hidden_layers", None)
            if any(isinstance(one, int) and one >= 0 and one != last for one in numbers):
                return True
    return False


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

    def kind(module: nn.Module) -> object:  # not by named_modules(), which takes a twentieth of a trace
        parameters = module._parameters.items()
        told = tuple((name, one.shape, one.dtype, one.requires_grad) for name, one in parameters if one is not None)
        children = module._modules.items()
        return type(module).__qualname__, told, tuple((name, kind(one)) for name, one in children if one is not None)

    return kind(layer), declared


def period_of(plan: Plan) -> int:
    """After how many layers what the plan does to them repeats."""
    return math.lcm(*(one.period(plan[one.name]) for one in techniques()))


def shorten(model: nn.Module, layers: Layers) -> None:
    """Take the middle layers out."""
    whole = cast("nn.ModuleList", model.get_submodule(layers.path))
    _put(model, layers.path, [whole[index] for index in layers.kept()])


def _put(model: nn.Module, path: str, layers: Sequence[nn.Module]) -> None:
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, nn.ModuleList(layers))


def wrapped_in_part(model: Any, wraps: Sequence[ModelWrap], multiple: int) -> Any | None:
    """A model on the meta device, wrapped, but for the layers that a trace leaves out: they are copies of wrapped ones.

    To put an adapter on every layer takes longer than to trace those that are traced. Of the others a trace needs the
    names, the kinds and the weights' sizes.

    Args:
        model: The whole model; it is spent.
        wraps: What wraps it, one after the other.
        multiple: As in :func:`find_layers`.

    Returns:
        The model with all layers; ``None`` where it has to be wrapped whole.
    """
    layers = find_layers(model, multiple, frozen=True)
    if layers is None:
        return None
    kept, whole = layers.kept(), list(cast("nn.ModuleList", model.get_submodule(layers.path)))
    shorten(model, layers)
    left_out = [id(one) for index in {*range(len(whole))} - {*kept} for one in _tensors(whole[index])]
    if len({*left_out}) < len(left_out) or not {*left_out}.isdisjoint(map(id, _tensors(model))):
        return None  # layers share weights
    for wrap in wraps:
        model = wrap(model)
    found = find_list(model)
    if found is None or len(found[1]) != len(kept):
        return None
    first = layers.before + (PERIODS - 1) * layers.period
    ran = list(found[1])
    copies = [_copied(ran[first + place], {}) for _ in range(layers.copies) for place in range(layers.period)]
    _put(model, found[0], [*ran[:first], *copies, *ran[first:]])
    after = find_layers(model, multiple)
    return model if after is not None and {*after.kept()} <= {*kept} else None


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _copied(module: nn.Module, made: dict[int, torch.Tensor]) -> nn.Module:
    """A module of the same kind with weights of its own, on the meta device; never run."""

    def own(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is not None and id(tensor) not in made:
            bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            made[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
        return None if tensor is None else made[id(tensor)]

    copy = object.__new__(type(module))
    vars(copy).update(vars(module))
    for name, mine in (("_parameters", module._parameters), ("_buffers", module._buffers)):
        vars(copy)[name] = {key: own(tensor) for key, tensor in mine.items()}
    children = module._modules.items()
    vars(copy)["_modules"] = {key: None if child is None else _copied(child, made) for key, child in children}
    return copy


class Marks:
    """Stands where a trial has its clock: tells the recorder where a segment begins.

    Args:
        recipe: What is traced.
        recorder: Is told.
        accumulation: Micro-steps to an optimizer step.
        steps: Optimizer steps.
        only_micro_steps: Whether the last one ends before its optimizer steps.
    """

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
        self.since = 1
        """Index of the segment that comes before the micro-steps of the last optimizer step."""
        self.past: int | None = None
        """Index of the segment that comes after them."""
        self.guessed = False
        """Whether a micro-step asked a condition of values that are not known; a Trainer asks one between them."""
        self._guessed_before = False
        self.parameters: list[nn.Parameter] = []
        self.sharded: nn.Module | None = None
        self.repetition: Repetition | None = None

    def mark(self, name: str) -> None:
        """A segment of the micro-step begins."""
        self.recorder.mark(f"{self.accumulated}:{name}")

    def step_begin(self) -> None:
        """An optimizer step begins; by now the model is sharded, if it is."""
        self.accumulated = 0
        if self.sharded is not None:
            self.recorder.call(self.sharded.parameters(), "weights")
            self.parameters = [parameter for parameter in self.sharded.parameters() if parameter.requires_grad]

    def forward_begin(self) -> None:
        """A micro-step begins."""
        self.backward = False
        self._guessed_before, self.recorder.guessed = self.recorder.guessed, False
        self.mark("pre")

    def forward_end(self) -> None:
        """The loss is there."""
        self.backward = True
        self.mark("headB")

    def backward_end(self, loss: torch.Tensor) -> None:
        """The gradients of a micro-step are there."""
        self.backward = False
        self.guessed |= self.recorder.guessed
        self.recorder.guessed |= self._guessed_before
        self.recorder.call((parameter.grad for parameter in self.parameters), "gradients")
        self.mark("step")
        self.accumulated += 1
        if self.repetition is not None:
            self.repetition.loss = loss
        last = self.done + 1 == self.effort.warm_up and self.accumulated == self.accumulation
        if self.only_micro_steps and last:
            self._micro_steps_end()

    def _micro_steps_end(self) -> NoReturn:
        self.past = len(self.recorder.segments)
        self.recorder.mark("evaluation")
        raise TraceDone

    def repeat_first(self, model: nn.Module) -> None:
        """Have the second of two micro-steps of a model written from the first one, where it can be."""
        if self.only_micro_steps and self.accumulation == 2:
            self.repetition = Repetition(self.recorder, self.parameters)
            model.register_forward_pre_hook(lambda *_: self._batch_given())

    def _batch_given(self) -> None:
        """The model has its batch."""
        repetition, segments = self.repetition, self.recorder.segments
        if self.accumulated != 1 or repetition is None:
            return
        self.repetition = None
        if repetition.write(segments.index("0:pre"), segments.index("0:step")):
            self.mark("step")
            self.accumulated += 1
            self._micro_steps_end()

    def step_skipped(self) -> None:
        """Nothing to do."""

    def step_end(self) -> bool:
        """An optimizer step is done."""
        self.done += 1
        if self.done == self.effort.warm_up:
            self.recorder.close()
            raise TraceDone
        if self.only_micro_steps:
            self.since = len(self.recorder.segments)
            self.recorder.mark("begin")
        return False


class TraceDone(Exception):  # noqa: N818 - nothing is wrong
    """The trace has seen what it came for."""


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
