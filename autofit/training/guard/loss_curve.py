"""A short training on rows that can be learned, and what is recorded of it: losses, gradients and updates, no times.

The random weights are the same for every plan, and dropout is off, since its random numbers depend on how the rows are
split. Every optimizer step trains on the same rows in the same order, one global batch, so that a step that float16's
loss scaling skips changes nothing: it is left out. So two plans that train the same way give the same curve. Random
tokens would teach nothing: their loss is the logarithm of the vocabulary, whatever the gradients are. The rows here
consist of a few different tokens, and the loss falls from the first step on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from autofit.contract.technique import replacing
from autofit.machine.meters import CeilingBroken, Meter, out_of_memory
from autofit.training.expected_rows import without_padding
from autofit.training.guard.sketch import Sketch, minus, sketch
from autofit.training.loops import Lesson, run_recipe
from autofit.training.tasks.rows import task_rows
from autofit.training.tasks.table import kind_of
from autofit.training.timing import Effort, NotFinite
from autofit.training.world import World

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset
    from transformers import PreTrainedModel

    from autofit.contract.recipe import Recipe

_TOKENS = 16
_RATE, _WIDTH = 1e-3, 512
"""Adam moves every weight by the rate, and a wider layer adds up more of them."""
_DRAWN = ("drop", "jitter", "mask_time_prob", "mask_feature_prob")
"""Parts of the names of a config's numbers that say how much is changed at random: dropout, noise before a router
(Switch, Phi-MoE), parts of a sound that are masked (wav2vec 2.0)."""
_SKIPPED = 8
"""Optimizer steps that loss scaling may skip; each halves the scale, which begins at 65,536."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What a short training left.

    Attributes:
        losses: Of each optimizer step.
        norms: Norm of the gradients that the optimizer stepped with, clipped, for each step; 0 where not seen.
        raw_norms: Norm of all gradients for each step, unscaled and before they are clipped; 0 where not seen.
        gradients: Sketch of each parameter's gradient in the first step, unscaled and before it is clipped; none where
            an engine keeps them.
        vectors: Parameters of one dimension: their gradients are sums over tokens and no matrix products.
        updates: Sketch of how far each parameter moved in all steps; none where an engine keeps the weights.
        began: Sketch of each parameter that is trained, before the first step; none where an engine keeps the weights.
        rows: A checksum of each micro-batch of a script, of all ranks; none where the rows are made for the guard.
        loss_error: How far each loss may lie from what was trained on, as a share of it, since an engine tells it in
            16 bits (FSDP2 casts what a model returns).
        others: Of several ranks, the curves that are not the first one's.
        failed: Why it did not come to its end: ``not finite``, ``out of memory`` or an error in words.
    """

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    raw_norms: tuple[float, ...] = ()
    gradients: dict[str, Sketch] = field(default_factory=dict)
    vectors: frozenset[str] = frozenset()
    updates: dict[str, Sketch] = field(default_factory=dict)
    began: dict[str, Sketch] = field(default_factory=dict)
    rows: tuple[int, ...] = ()
    loss_error: float = 0.0
    others: tuple[Curve, ...] = ()
    failed: str | None = None


CURVE: TypeAdapter[Curve] = TypeAdapter(Curve)
NOT_FINITE = "not finite"
OUT_OF_MEMORY = "out of memory"


@dataclass(slots=True)
class CurveListener:
    """Listens to a training loop and writes the curve."""

    recipe: Recipe
    effort: Effort
    meter: Meter
    steps: int
    accumulation: int
    on_cuda: bool
    world: World = field(default_factory=World)
    beat: Callable[[str], None] = lambda _: None
    in_parts: bool = False
    accumulated: int = 0
    done: int = 0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    raw_norms: list[float] = field(default_factory=list)
    gradients: dict[str, Sketch] = field(default_factory=dict)
    vectors: list[str] = field(default_factory=list)
    updates: dict[str, Sketch] = field(default_factory=dict)
    scale: float = 1.0
    rows: list[int] = field(default_factory=list)
    loss_error: float = 0.0
    _model: Any = None
    began: dict[str, Sketch] = field(default_factory=dict)
    _loss: torch.Tensor | None = None
    _raw_norm: float = 0.0
    _skipped: bool = False
    _squares: dict[int, float] = field(default_factory=dict)

    def begin(self, model: PreTrainedModel) -> None:
        """The model stands: no dropout, and the same random numbers from here on."""
        import torch

        self._model = model
        for module in model.modules():
            if isinstance(module, torch.nn.modules.dropout._DropoutNd):  # noqa: SLF001 - the parent of all kinds
                module.p = 0.0
        self.began = self._weights()
        torch.manual_seed(self.recipe.facts.workload.seed)

    def count(self, inputs: Any) -> None:
        """A micro-batch is trained on next."""
        self.rows.append(checksum(without_padding(inputs)))

    def step_begin(self) -> None:
        """An optimizer step begins."""
        self.accumulated = 0
        self._squares.clear()

    def forward_begin(self) -> None:
        """A micro-step begins."""

    def forward_end(self) -> None:
        """The loss is there."""
        self.meter.check()

    def scaling(self, scaler: Any) -> None:
        """A loss is about to be scaled."""
        self.scale = float(scaler.get_scale())

    def backward_end(self, loss: torch.Tensor) -> None:
        """The gradients of a micro-step are there; ``loss`` is its share of the step's."""
        import torch

        self.meter.check()
        self.beat(f"micro-step {self.accumulated} of step {self.done}")
        self.accumulated += 1
        self.loss_error = torch.finfo(loss.dtype).eps  # rounded as it is told, and as it is divided
        told = loss.detach().double()
        self._loss = told if self._loss is None else self._loss + told
        if self.accumulated == self.accumulation:
            parameters = named_parameters(self._model)
            gradients = {name: whole(one.grad) for name, one in parameters if one.grad is not None}
            self._raw_norm = _finite(math.hypot(*map(_norm, gradients.values())) / self.scale)
            if not self.losses:
                sketches = {name: sketch(one, name) for name, one in gradients.items()}
                self.gradients = {name: tuple(x / self.scale for x in one) for name, one in sketches.items()}
                self.vectors = [name for name, one in gradients.items() if one.ndim < 2]

    def stepping(self, optimizer: Any, *_: Any) -> None:
        """An optimizer, or a part of it, is about to step."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._squares[id(parameter)] = _norm(whole(parameter.grad)) ** 2

    def step_skipped(self) -> None:
        """The scaled gradients overflowed: the same step comes again."""
        self._skipped = True

    def step_end(self) -> bool:
        """An optimizer step is done; returns whether enough was seen."""
        self.meter.check()
        loss = self.world.mean(float(self._loss)) if self._loss is not None else math.nan
        self._loss = None
        if not math.isfinite(loss):
            raise NotFinite(loss, self.done)
        if not self._skipped:
            self.losses.append(loss)
            self.norms.append(_finite(math.sqrt(sum(self._squares.values()))))
            self.raw_norms.append(self._raw_norm)
        self._skipped = False
        self.done += 1
        if self.done == self.effort.warm_up:
            self.meter.settle()
        if len(self.losses) == self.steps:
            self.updates = {
                name: minus(after, self.began[name]) for name, after in self._weights().items() if name in self.began
            }
        return len(self.losses) == self.steps or self.done >= self.effort.warm_up + self.effort.max_steps

    def _weights(self) -> dict[str, Sketch]:
        """Sketches of the weights that are trained, where the model holds them as they are stepped."""
        if self.recipe.emission.accelerate["distributed_type"] == "DEEPSPEED":
            return {}
        parameters = named_parameters(self._model)
        return {name: sketch(whole(one), name) for name, one in parameters if one.requires_grad}


def named_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters under the names that they have where nothing is wrapped."""
    for name, parameter in model.named_parameters():
        yield name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""), parameter


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be sharded."""
    gather = getattr(tensor, "full_tensor", None)
    result: torch.Tensor = tensor.detach() if gather is None else gather().detach()
    return result


def _norm(tensor: torch.Tensor) -> float:
    """Summed up in float32, without a copy."""
    import torch

    return float(torch.linalg.vector_norm(tensor, dtype=torch.float32))


def _finite(number: float) -> float:
    return number if math.isfinite(number) else 0.0


def listener_of(
    recipe: Recipe, steps: int, meter: Meter, beat: Callable[[str], None] = lambda _: None
) -> CurveListener:
    """What listens to so many optimizer steps; float16 may need more, since loss scaling skips some."""
    most = steps + (_SKIPPED if recipe.mixed_precision == "fp16" else 0)
    return CurveListener(
        recipe,
        Effort(fidelity="whole", warm_up=2, max_steps=most - 2),
        meter,
        steps,
        recipe.accumulation,
        recipe.facts.hardware.device == "cuda",
        World(size=recipe.facts.workload.processes),
        beat,
    )


def learning(recipe: Recipe) -> dict[str, Any]:
    """Fields of ``TrainingArguments`` by which a few steps teach something."""
    rate = _RATE * min(1.0, _WIDTH / (recipe.facts.model.hidden_size or _WIDTH))
    return {"learning_rate": rate, "lr_scheduler_type": "constant"}


def record(
    recipe: Recipe,
    steps: int,
    meter: Meter,
    *,
    config: Path,
    folder: Path,
    beat: Callable[[str], None] = lambda _: None,
) -> Curve:
    """Train some optimizer steps and write the curve down.

    Args:
        recipe: What to run.
        steps: Optimizer steps, three at least.
        meter: Holds the ceiling.
        config: Folder that holds the ``config.json``.
        folder: Where a Trainer may write.
        beat: Told of each micro-step, for whoever waits.
    """
    listener = listener_of(recipe, steps, meter, beat)
    rows = recipe.facts.workload.global_batch * (listener.effort.warm_up + listener.effort.max_steps)
    lesson = Lesson(
        begin=listener.begin,
        rows=lambda model: learnable_rows(recipe, rows, model),
        arguments=learning(recipe),
    )
    return written(
        listener, lambda: run_recipe(listener, config=without_dropout(config, folder), folder=folder, lesson=lesson)
    )


def written(listener: CurveListener, train: Callable[[], object]) -> Curve:
    """The curve of a training that tells a listener of its steps."""
    failed = None
    try:
        with _steps_told(listener):
            train()
    except NotFinite:
        failed = NOT_FINITE
    except CeilingBroken:
        failed = OUT_OF_MEMORY
    except Exception as error:
        if out_of_memory(error) is None:
            raise
        failed = OUT_OF_MEMORY
    if failed is None and len(listener.losses) < listener.steps:
        skipped = listener.done > len(listener.losses)
        too_few = f"its training ended after {listener.done} optimizer steps, and {listener.steps} are compared"
        failed = "the scaled gradients overflowed in too many steps" if skipped else too_few
    return Curve(
        losses=tuple(listener.losses),
        norms=tuple(listener.norms),
        raw_norms=tuple(listener.raw_norms),
        gradients=listener.gradients,
        vectors=frozenset(listener.vectors),
        updates=listener.updates,
        began=listener.began,
        rows=tuple(listener.rows),
        loss_error=listener.loss_error,
        failed=failed,
    )


def of_ranks(curves: Sequence[Curve]) -> Curve:
    """The one curve of several ranks, each of which has the whole model before its eyes: the first one's.

    Its rows are those of all ranks, in the order in which one process would take them.

    Args:
        curves: Of each rank, or of each machine's ranks.
    """
    rows = tuple(itertools.chain.from_iterable(zip(*(one.rows for one in curves), strict=False)))
    every = [replace(alike, rows=rows, others=()) for one in curves for alike in (one, *one.others)]
    return replace(every[0], others=tuple(one for one in every if one != every[0]))


def checksum(inputs: Any, before: int = 0) -> int:
    """Of the numbers in a batch, whatever it is made of."""
    import torch

    if isinstance(inputs, torch.Tensor):
        flat = inputs.detach().cpu().contiguous().reshape(-1)
        return zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), before) if flat.numel() else before
    parts = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, list | tuple) else ()
    for part in parts:
        before = checksum(part, before)
    return before


@contextlib.contextmanager
def _steps_told(listener: CurveListener) -> Iterator[None]:
    from torch.amp import GradScaler
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    scale = GradScaler.scale

    def scaled(scaler: Any, *args: Any) -> Any:
        listener.scaling(scaler)
        return scale(scaler, *args)

    handle = register_optimizer_step_pre_hook(listener.stepping)
    try:
        with replacing([(GradScaler, "scale", scaled)]):
            yield
    finally:
        handle.remove()


def learnable_rows(recipe: Recipe, rows: int, model: PreTrainedModel) -> Dataset[Any]:
    """Rows of a few different tokens, a pool of one global batch that is handed out again and again."""
    kind_of(recipe.facts.model.task).prepare(model)
    return task_rows(recipe.facts, model.config, rows, few=_TOKENS)


def without_dropout(config: Path, folder: Path) -> Path:
    """A copy of the model's folder whose config drops nothing out."""
    copy = folder / "model"
    shutil.copytree(config, copy)
    path = copy / "config.json"
    path.write_text(json.dumps(_undropped(json.loads(path.read_text("utf-8"))), indent=1), "utf-8")
    return copy


def _undropped(value: Any) -> Any:
    """The config with 0 for each number whose name says dropout (GPT-2's: ``attn_pdrop``), or another random change."""
    if isinstance(value, list):
        return [_undropped(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        name: type(one)(0)
        if type(one) in {int, float} and any(part in name for part in _DRAWN)  # a switch is no number
        else _undropped(one)
        for name, one in value.items()
    }
