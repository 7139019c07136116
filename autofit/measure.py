"""Training steps, timed: the same code in a trial and in a launch.

On the ``trainer`` path the steps are those of a real ``transformers.Trainer``, on the ``loop`` path those of a plain
Accelerate loop; a :class:`Clock` listens to either. A run on a time line, with accumulation 4::

    load   | warm-up step 1   | warm-up step 2   | timed step               | timed step ...
    model, | f b f b  clip+opt| f b f b  clip+opt| f b f b f b f b  clip+opt| ...
    data   | state is created | first with state |<------ step_seconds ---->|

``parts``: where the accumulation is above three, each step runs three micro-steps only, and the step that they stand
for is added up: first micro-step (gradients are created) + (accumulation - 1) x later ones (gradients are added to) +
clipping and optimizer. ``whole``: every micro-step is run; finalists and launches are measured so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autofit.memory import CeilingBroken, Meter, out_of_memory
from autofit.observe import Observer
from autofit.plan import (
    Diverged,
    Evidence,
    Measured,
    Outcome,
    OutOfMemory,
    Phase,
    Unsupported,
    median,
    spread,
)
from autofit.quiet import CpuShare
from autofit.registry import techniques

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset

    from autofit.recipe import Recipe

PARTS = 3
"""Micro-steps that stand for a longer accumulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured.

    Attributes:
        warm_up: Optimizer steps that are dropped; the state is created in the first, so there are two at least.
        min_steps, max_steps: Timed optimizer steps.
        seconds: After ``min_steps``, stop once the timed steps took this long.
        target: After ``min_steps``, stop once the spread is below this share of the median.
        hopeless_seconds: Stop after two timed steps that are both slower than this; 0 for never.
    """

    fidelity: Literal["parts", "whole"] = "parts"
    warm_up: int = 2
    min_steps: int = 3
    max_steps: int = 10
    seconds: float = 4.0
    target: float = 0.02
    hopeless_seconds: float = 0.0


@dataclass(slots=True)
class Clock:
    """Listens to a training loop: times it, checks memory after each phase, and says when enough was seen."""

    recipe: Recipe
    effort: Effort
    meter: Meter
    accumulation: int
    """Micro-steps that are run for an optimizer step: the plan's, or fewer for ``parts``."""
    on_cuda: bool
    progress: Callable[[str], None] = lambda _: None
    phase: Phase = "load"
    steps: list[float] = field(default_factory=list)
    training_seconds: float = 0.0
    loss: float = math.nan
    done: int = 0
    accumulated: int = 0
    cpu: CpuShare = field(default_factory=CpuShare)
    _started: float = 0.0
    _micro: list[float] = field(default_factory=list)
    _mark: float = 0.0
    _loss: torch.Tensor | None = None

    def _now(self) -> float:
        if self.on_cuda:
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    @property
    def in_parts(self) -> bool:
        """Whether fewer micro-steps are run than the plan says."""
        return self.accumulation != self.recipe.accumulation

    def step_begin(self) -> None:
        """An optimizer step begins."""
        self._started = self._mark = self._now()
        self._micro.clear()

    def forward_begin(self) -> None:
        """A micro-step begins."""
        self.phase = "forward"
        if self.in_parts:
            self._mark = self._now()

    def forward_end(self) -> None:
        """The loss is there."""
        self.meter.check()
        self.phase = "backward"

    def backward_end(self, loss: torch.Tensor) -> None:
        """The gradients of a micro-step are there; ``loss`` is its share of the step's."""
        self.meter.check()
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        if self.in_parts:
            now = self._now()
            self._micro.append(now - self._mark)
            self._mark = now
        else:
            self._micro.append(0.0)
        self.phase = "optimizer"

    def step_end(self) -> bool:
        """An optimizer step is done; returns whether enough was seen."""
        now = self._now()
        self.meter.check()
        self.training_seconds += now - self._started
        self.accumulated = len(self._micro)
        if self._loss is not None:
            self.loss, self._loss = float(self._loss), None
            if not math.isfinite(self.loss):
                raise NotFinite(self.loss, self.done)
        self.done += 1
        if self.done == self.effort.warm_up:
            self.meter.settle()
            self.cpu = CpuShare()
        if self.done > self.effort.warm_up:
            self.steps.append(self._whole(now))
        self.progress(f"step {self.done}")
        return self._enough()

    def _whole(self, now: float) -> float:
        if not self.in_parts:
            return now - self._started
        first, *later = self._micro
        return first + (self.recipe.accumulation - 1) * sum(later) / len(later) + (now - self._mark)

    def _enough(self) -> bool:
        effort, steps = self.effort, self.steps
        if len(steps) >= effort.max_steps:
            return True
        if len(steps) >= 2 and effort.hopeless_seconds and min(steps) > effort.hopeless_seconds:
            return True
        spent = sum(steps) if not self.in_parts else sum(steps) * self.accumulation / self.recipe.accumulation
        if len(steps) >= 2 and spent > 3 * effort.seconds:
            return True
        if len(steps) < effort.min_steps:
            return False
        return spent > effort.seconds or spread(steps) < effort.target * median(steps)


class NotFinite(Exception):  # noqa: N818 - it becomes an outcome
    """The loss is NaN or infinite."""

    def __init__(self, loss: float, step: int) -> None:
        super().__init__(f"loss {loss} in step {step}")
        self.loss = loss
        self.step = step


def random_rows(recipe: Recipe, rows: int) -> Dataset[dict[str, torch.Tensor]]:
    """Rows of random tokens, each as long as the workload's sequence: the worst case, with no padding.

    A pool of one global batch is handed out again and again; ``rows`` is the length that the loader sees.
    """
    import torch
    from torch.utils.data import Dataset as TorchDataset

    work = recipe.facts.workload
    generator = torch.Generator().manual_seed(work.seed)
    pool = torch.randint(
        0, recipe.facts.model.vocab_size, (min(work.global_batch, rows), work.seq_len), generator=generator
    )

    class Rows(TorchDataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return rows

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            row = pool[index % len(pool)]
            return {"input_ids": row, "labels": row}

    return Rows()


def measure(
    recipe: Recipe,
    effort: Effort,
    meter: Meter,
    run: Callable[[Clock], Evidence],
    progress: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Run training steps and turn what happens into an outcome.

    Args:
        recipe: What to run.
        effort: How much of it.
        meter: Counts memory since before the model was built.
        run: Builds everything, trains until the clock says enough, and returns what was seen; see
            :func:`run_trainer` and :func:`run_loop`.
        progress: Told of each step, for whoever waits.

    Raises:
        Exception: Whatever is none of the expected failures.
    """
    facts = recipe.facts
    shortened = effort.fidelity == "parts" and recipe.accumulation > PARTS
    clock = Clock(
        recipe=recipe,
        effort=effort,
        meter=meter,
        accumulation=PARTS if shortened else recipe.accumulation,
        on_cuda=facts.hardware.device == "cuda",
        progress=progress,
    )
    limit = facts.workload.limit_bytes
    try:
        evidence = run(clock)
    except CeilingBroken as broken:
        return OutOfMemory(
            where=broken.where,
            phase=clock.phase,
            limit_bytes=limit if broken.where == "device" else facts.workload.host_limit_bytes,
            peak_bytes=broken.peak_bytes,
            training_seconds=clock.training_seconds,
        )
    except NotFinite as bad:
        return Diverged(loss=str(bad.loss), step=bad.step, training_seconds=clock.training_seconds)
    except Exception as error:
        found = out_of_memory(error)
        if found is None:
            raise
        where, asked = found
        on_cpu = facts.hardware.device == "cpu"
        reading = meter.read()
        held = reading.peak_bytes if where == "device" or on_cpu else reading.host_bytes
        return OutOfMemory(
            where="device" if on_cpu else where,
            phase=clock.phase,
            limit_bytes=limit if where == "device" or on_cpu else facts.workload.host_limit_bytes,
            peak_bytes=held + (asked or 0),
            requested_bytes=asked,
            training_seconds=clock.training_seconds,
        )
    disturbance = clock.cpu.others()
    reading = meter.read()
    if reading.peak_bytes > limit:
        return OutOfMemory(
            where="device",
            phase=clock.phase,
            limit_bytes=limit,
            peak_bytes=reading.peak_bytes,
            training_seconds=clock.training_seconds,
        )
    for one in techniques():
        ignored = one.in_effect(recipe.plan[one.name], evidence, facts)
        if ignored is not None:
            return Unsupported(reason=f"{one.name}={recipe.plan[one.name]} did not take effect: {ignored}")
    seconds = median(clock.steps)
    rows = facts.workload.global_batch
    return Measured(
        step_seconds=seconds,
        step_seconds_spread=spread(clock.steps),
        samples_per_second=rows / seconds,
        tokens_per_second=rows * facts.workload.seq_len / seconds,
        peak_bytes=reading.peak_bytes,
        allocated_bytes=reading.allocated_bytes,
        reserved_bytes=reading.reserved_bytes,
        outside_bytes=reading.outside_bytes,
        host_bytes=reading.host_bytes,
        limit_bytes=limit,
        fidelity="parts" if shortened else "whole",
        steps=tuple(clock.steps),
        training_seconds=clock.training_seconds,
        loss=clock.loss,
        alloc_retries=reading.alloc_retries,
        disturbance=disturbance,
        evidence=evidence,
        notes=("random tokens, every row at full length, no padding mask",),
    )


def run_trainer(clock: Clock, args: Any, model: Any, optimizer: Any = None) -> Evidence:
    """Train by a ``transformers.Trainer`` until the clock says enough.

    Args:
        clock: Listens.
        args: The ``TrainingArguments``, with ``max_steps`` large enough for the clock's effort.
        model: The model, wrapped as the plan says.
        optimizer: Where the plan wraps the optimizer; otherwise Trainer makes it.
    """
    from transformers import Trainer, TrainerCallback

    observer = Observer(model, clock.recipe)
    seen: list[Evidence] = []

    class Listener(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.step_begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if clock.step_end():
                control.should_training_stop = True
            if clock.done == clock.effort.warm_up:
                seen.append(observer.evidence(trainer.optimizer, trainer.accelerator, counted(clock)))
                observer.close()
            return control

    class Listened(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            clock.forward_begin()
            loss = super().compute_loss(*args, **kwargs)
            clock.forward_end()
            return loss

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            clock.backward_end(loss)
            return loss

    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.max_steps
    trainer = Listened(
        model=model,
        args=args,
        train_dataset=random_rows(clock.recipe, rows),
        callbacks=[Listener()],
        optimizers=(optimizer, None),
    )
    trainer.train()
    return seen[0]


def run_loop(clock: Clock, accelerator: Any, model: Any, optimizer: Any, max_grad_norm: float = 1.0) -> Evidence:
    """Train by a plain Accelerate loop until the clock says enough; the loop of ``examples/train_loop.py``.

    Args:
        clock: Listens.
        accelerator: From ``setup.accelerator()``, or the like.
        model: The model, wrapped as the plan says.
        optimizer: Its optimizer.
        max_grad_norm: Gradients are clipped to this norm, as a Trainer does by default.
    """
    from torch.utils.data import DataLoader

    observer = Observer(model, clock.recipe)
    evidence = None
    steps = clock.effort.warm_up + clock.effort.max_steps
    rows = clock.recipe.micro_batch * clock.accumulation * steps
    loader = DataLoader(
        random_rows(clock.recipe, rows),
        batch_size=clock.recipe.micro_batch,
        shuffle=True,
        pin_memory=clock.on_cuda,
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    fresh = True
    for batch in loader:
        if fresh:
            clock.step_begin()
        with accelerator.accumulate(model):
            clock.forward_begin()
            loss = model(**batch).loss
            clock.forward_end()
            accelerator.backward(loss)
            clock.backward_end(loss / clock.accumulation)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        fresh = accelerator.sync_gradients
        if fresh:
            enough = clock.step_end()
            if clock.done == clock.effort.warm_up:
                evidence = observer.evidence(optimizer, accelerator, counted(clock))
                observer.close()
            if enough:
                break
    if evidence is None:
        raise RuntimeError("the loader ended before the warm-up did")
    return evidence


def counted(clock: Clock) -> int | None:
    """Micro-steps that were counted in an optimizer step; nothing where they only stand for more."""
    return None if clock.in_parts else clock.accumulated


def run_recipe(clock: Clock, *, config: Path, folder: Path) -> Evidence:
    """Build all that the recipe says, with random weights, and train on its launch path: what a trial does.

    Args:
        clock: Listens.
        config: Folder that holds the ``config.json``.
        folder: Where a Trainer may write.
    """
    import torch

    recipe = clock.recipe
    torch.manual_seed(recipe.facts.workload.seed)
    sharded = recipe.emission.accelerate["distributed_type"] != "NO"
    device = "cuda" if clock.on_cuda and not sharded else "cpu"
    trainer = recipe.facts.workload.launch_path == "trainer"
    args = None
    if trainer:
        args = recipe.training_arguments(**untuned(clock, folder))
        args.gradient_accumulation_steps = clock.accumulation
    model = recipe.model(None, config=config, device=device)
    if args is not None:
        optimizer = recipe.optimizer(model, output_dir=str(folder)) if recipe.optimizer_wraps else None
        return run_trainer(clock, args, model, optimizer)
    accelerator = recipe.accelerator(gradient_accumulation_steps=clock.accumulation)
    return run_loop(clock, accelerator, model, recipe.optimizer(model, output_dir=str(folder)))


def untuned(clock: Clock, folder: Path) -> dict[str, Any]:
    """Fields of ``TrainingArguments`` that a measurement needs and a plan does not decide."""
    return {
        "output_dir": str(folder),
        "max_steps": clock.effort.warm_up + clock.effort.max_steps,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "seed": clock.recipe.facts.workload.seed,
    }
