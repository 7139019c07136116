"""LitGPT's fine-tuning scripts: what a step computes, what the loop still holds, and what Lightning Fabric adds.

- The precision plugin converts what the model returns to the default type: **logits become float32**, all of them,
  while the 16-bit ones are still held (``HalfPrecision.convert_output``, ``BitsandbytesPrecision.convert_output``).
- The loop's variables live on: the logits of the last micro-step until the model has returned new ones, and the loss
  with its graph until there is a new loss.
- LoRA and the adapters run the head over chunks of 128 rows; full fine-tuning does not, and cuts the loss instead.
- Quantised runs use ``bitsandbytes.optim.PagedAdamW``, whose state is managed memory outside of PyTorch's counters.
- The peak is printed before the final validation.

Source, Apache-2.0: Lightning-AI/litgpt ``finetune/{lora,adapter,full}.py`` and ``chunked_cross_entropy`` at 069f6584
(2023-10), 5895df10 (2024-04), 00af8b0d (2024-09); lightning 2.1.0 and 2.3.3 ``fabric/wrappers.py`` and
``fabric/plugins/precision/{half,bitsandbytes}.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from autofit.costmodel.tracing.timeline import Tape

from . import fake
from .litgpt_configs import Config
from .litgpt_fsdp import Sharding
from .litgpt_model import GPT, Era, Tuning

CHUNK = 128
USUAL_ROWS = 256
"""Of a row behind the first one, where that is the longest: LitGPT's own words for Alpaca are a median of 110 tokens,
and "256 may be a reasonable choice" to cut (``tutorials/oom.md``, ``tutorials/prepare_dataset.md``)."""
ERA_2023_10 = Era(norm="weight times float32", pads_out_of_place=True, sliding_windows=False, first_is_longest=True)
ERA_2024_04 = Era(norm="float32 away first", pads_out_of_place=True, sliding_windows=False, first_is_longest=False)
ERA_2024_07_05 = Era(norm="float32 away first", pads_out_of_place=False, sliding_windows=False, first_is_longest=False)
ERA_2024_07_22 = Era(norm="float32 weight", pads_out_of_place=False, sliding_windows=True, first_is_longest=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a script."""

    config: Config
    tuning: Tuning
    era: Era
    batch: int
    rows: int
    ranks: int = 1
    accumulation: int = 16


def predict(run: Run) -> fake.Peak:
    """What the script prints as ``Memory used``."""
    return fake.peak_of(tape_of(run))


@functools.cache
def tape_of(run: Run) -> Tape:
    """Its first micro-steps."""
    if run.ranks > 1:
        return fake.run(lambda: Sharding(build(run), run.ranks), functools.partial(sharded_steps, run), shorten=False)
    shorten = run.tuning.method != "full"  # the step of every parameter at once can't be continued
    return fake.run(functools.partial(build, run), functools.partial(steps, run), shorten=shorten)


def build(run: Run) -> GPT:
    """``fabric.init_module()``: in the default type of the precision."""
    with fake.default_dtype(torch.bfloat16):
        return GPT(run.config, tuning=run.tuning, era=run.era).train()


def steps(run: Run, model: GPT, watch: fake.Watch) -> None:
    """The loop, as far as memory depends on it."""
    model.make_rope(run.rows)
    optimizer = _optimizer(run, model)
    chunk = 0 if run.tuning.method == "full" else CHUNK
    micro_steps = 1 if run.era.first_is_longest else 3
    for step in range(micro_steps):
        watch.step, watch.backward = step, False
        watch.mark("pre")
        input_ids = torch.empty(run.batch, run.rows, dtype=torch.int64)
        targets = torch.empty(run.batch, run.rows, dtype=torch.int64)
        logits = _converted(_forward(model, input_ids, chunk))
        loss = _loss(logits, targets, chunked=bool(chunk))
        watch.backward = True
        watch.mark("headB")
        (loss / 16).backward()
        watch.mark("step")
        if step == 0:
            optimizer(watch)


def sharded_steps(run: Run, model: Sharding, watch: fake.Watch) -> None:
    """The same on a rank of several: two micro-steps that accumulate, or one, and one that synchronises."""
    model.make_rope(run.rows)
    chunk = 0 if run.tuning.method == "full" else CHUNK
    for step, synchronise in enumerate([True, True] if run.accumulation == 1 else [False, True, False, False]):
        watch.step = step
        watch.mark("pre")
        model.synchronise = synchronise
        rows = run.rows if step == 0 or not run.era.first_is_longest else min(run.rows, USUAL_ROWS)
        input_ids = torch.empty(run.batch, rows, dtype=torch.int64)
        targets = torch.empty(run.batch, rows, dtype=torch.int64)
        logits = _converted(_sharded_forward(model, input_ids, chunk))
        loss = _loss(logits, targets, chunked=bool(chunk))
        watch.mark("headB")
        (loss / run.accumulation).backward()
        model.freed.clear()
        watch.mark("step")
        if synchronise:
            for unit in model.units():
                unit.step()
            trained = sum(unit.trained_share for unit in model.units() if unit.is_trained)
            torch.empty(trained, dtype=torch.bfloat16)  # foreach: the denominators
            for unit in model.units():
                unit.grad_shard = None


def _sharded_forward(model: Sharding, input_ids: torch.Tensor, chunk: int) -> Any:
    with fake.default_dtype(torch.bfloat16):
        return model(input_ids, model.gathered_root(), chunk)


def _loss(logits: Any, targets: torch.Tensor, *, chunked: bool) -> torch.Tensor:
    if not chunked:
        return chunked_cross_entropy(logits[..., :-1, :], targets[..., 1:])
    logits[-1] = logits[-1][..., :-1, :]
    return chunked_cross_entropy(logits, targets[..., 1:])


def _optimizer(run: Run, model: GPT) -> Callable[[fake.Watch], None]:
    """What the first micro-step ends with, so that those behind it have the optimizer's state.

    An adapter's state is there layer by layer; the step of full fine-tuning is run, for what it makes for a moment.
    """
    if run.tuning.four_bit is not None or run.era.first_is_longest:
        return lambda _: None  # paged, or the longest micro-step is over
    if run.tuning.method == "full":
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

        def step(_: fake.Watch) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return step
    state: dict[torch.Tensor, list[torch.Tensor]] = {}

    def hold(part: torch.nn.Module) -> None:
        for parameter in part.parameters():
            if parameter.requires_grad and parameter not in state:
                state[parameter] = [torch.zeros_like(parameter) for _ in range(2)]
                parameter.grad = None

    return lambda watch: watch.in_layers("state", hold)


def _forward(model: GPT, input_ids: torch.Tensor, chunk: int) -> Any:
    with fake.default_dtype(torch.bfloat16):
        return model(input_ids, lm_head_chunk_size=chunk)


def _converted(output: Any) -> Any:
    """``convert_output``: the whole of what came stays until all of it is converted."""
    if isinstance(output, list):
        return [one.to(torch.float32) for one in output]
    return output.to(torch.float32)


def chunked_cross_entropy(logits: Any, targets: torch.Tensor) -> torch.Tensor:
    """The loss; chunk by chunk, so that the backward pass begins with a chunk."""
    if isinstance(logits, list):
        logit_chunks = [one.reshape(-1, one.size(-1)) for one in logits]
        target_chunks = [one.reshape(-1) for one in targets.split(logits[0].size(1), dim=1)]
    else:
        logit_chunks = logits.reshape(-1, logits.size(-1)).split(CHUNK)
        target_chunks = targets.reshape(-1).split(CHUNK)
    losses = [
        F.cross_entropy(logit, target, ignore_index=-1, reduction="none")
        for logit, target in zip(logit_chunks, target_chunks, strict=True)
    ]
    return torch.cat(losses).mean()


@functools.cache
def parameters(config: Config) -> int:
    """How many parameters a model has; the head is not tied."""
    return trained(config, Tuning(method="full"))


@functools.cache
def trained(config: Config, tuning: Tuning) -> int:
    """How many parameters are trained."""
    with torch.device("meta"):
        model = GPT(config, tuning=tuning, era=ERA_2024_04)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
