"""Hugging Face's page on a single GPU (transformers 4.19, spring 2022): bert-large classifies, ``Trainer`` trains.

The model is transformers' own of today with eager attention, which does what that of 2022 did; the loop around it is
written out, because some things were otherwise then:

- ``zero_grad()`` filled gradients with zeros and kept them (``set_to_none=False`` before torch 2.0).
- ``Trainer``'s AdamW was transformers' own (``optim="adamw_hf"``): a loop over parameters with one temporary of a
  parameter's size. Adafactor is still transformers' own. ``bnb.optim.Adam8bit`` had blocks of 2048 values, and 32-bit
  state for parameters below 4096 values.
- ``softmax`` kept its input beside its output up to torch 1.10: pull request 65242 took it out for 1.11, of March 2022.
  The page does not state its version; 1.10 is that of the months in which it was written.
- Checkpointing was the re-entrant one.
- cuBLAS took its workspace itself, so that it is not in PyTorch's counters (torch 1.11).

The page reads NVML after training: the context, 1343 MB, which it states, with the segment of the tensor that made it,
and what the allocator reserved. Not in it: kernels that libraries load at their first use.

Source: ``docs/source/performance.mdx`` @0ad5fe6, ``trainer.py`` and ``optimization.py`` of huggingface/transformers
v4.19.2; ``bitsandbytes/optim/optimizer.py`` 0.26.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from autofit.costmodel.memory import allocator
from autofit.costmodel.tracing.timeline import Tape
from autofit.system.units import MIB

from . import fake
from .rows import Row

CONTEXT_BYTES = 1343 * MIB
"""As the page prints it, integer-divided by 1024**2; the first tensor's segment of 2 MiB is in it."""
_V100 = (7, 0)
PARAMETERS = 335_143_938
_BLOCK, _SMALL = 2048, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the page."""

    batch: int
    rows: int
    accumulation: int
    mixed: bool
    checkpointing: bool
    optimizer: str


def is_one(row: Row) -> bool:
    """Whether it is a row of that page."""
    return "bert-large" in row.model.lower() and "transformers" in row.source and "performance" in row.source


def run_of(row: Row) -> Run | str:
    """The run, or why there is none."""
    if row.micro_batch is None or row.longest is None:
        return "micro-batch or length is not stated"
    name = _optimizer_name(row.optimizer)
    if not name:
        return f"no model of the optimizer {row.optimizer!r}"
    precision = row.precision.lower()
    if not precision.startswith(("fp32", "float32", "tf32", "fp16", "bf16")):
        return f"no model of the precision {row.precision!r}"
    accumulation = re.search(r"grad accum (\d+)", row.other)
    return Run(
        batch=row.micro_batch,
        rows=row.longest,
        accumulation=int(accumulation[1]) if accumulation else 1,
        mixed=precision.startswith(("fp16", "bf16")),
        checkpointing=row.checkpointing.startswith("on"),
        optimizer=name,
    )


def _optimizer_name(said: str) -> str:
    word = said.lower()
    if "8bit" in word or "8-bit" in word:
        return "adam8bit"
    return next((name for name in ("adafactor", "adamw") if name in word), "")


@functools.cache
def predict(run: Run) -> float:
    """Bytes that NVML says after training."""
    tape = tape_of(run)
    replayed = allocator.replay(tape.events, tape.bytes_at(0))
    return CONTEXT_BYTES - 2 * MIB + replayed.peak_reserved_bytes


@functools.cache
def tape_of(run: Run) -> Tape:
    """Two optimizer steps."""
    return fake.run(functools.partial(_build, run), functools.partial(_steps, run), shorten=False, capability=_V100)


def _build(run: Run) -> torch.nn.Module:
    from transformers import AttentionInterface, BertConfig, BertForSequenceClassification

    AttentionInterface.register("eager_of_2022", _attention)
    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager_of_2022",
        use_cache=False,
    )
    model = BertForSequenceClassification(config).train()
    if run.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": True})
    return model


class _Softmax(torch.autograd.Function):
    """That of torch 1.10, which keeps its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        result = torch.softmax(x, dim=-1)
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x, result = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(grad, result, -1, x.dtype)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    *,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """``BertSelfAttention`` of 4.19: the mask is there though nothing is masked, and in the model's type."""
    mask = torch.zeros(query.shape[0], 1, 1, key.shape[2], dtype=torch.float32)
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores = scores / 8.0
    scores = scores + mask
    weights = _Softmax.apply(scores)
    weights = torch.nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).permute(0, 2, 1, 3).contiguous(), None


def _steps(run: Run, model: Any, watch: fake.Watch) -> None:
    parameters = list(model.parameters())
    step = _OPTIMIZERS[run.optimizer](parameters)
    for _ in range(2):
        for _ in range(run.accumulation):
            watch.mark("pre")
            _micro_step(run, model)
        watch.mark("step")
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False)
        step()
        for parameter in parameters:
            parameter.grad.zero_()
        watch.step += 1


def _micro_step(run: Run, model: Any) -> None:
    input_ids = torch.empty(run.batch, run.rows, dtype=torch.int64)
    labels = torch.empty(run.batch, dtype=torch.int64)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16) if run.mixed else contextlib.nullcontext()
    with autocast:
        loss = model(input_ids=input_ids, labels=labels).loss
    (loss / run.accumulation).backward()


def _adamw(parameters: Iterable[torch.Tensor]) -> Callable[[], None]:
    state: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def step() -> None:
        for parameter in parameters:
            if parameter not in state:
                state[parameter] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            first, second = state[parameter]
            first.mul_(0.9).add_(parameter.grad, alpha=0.1)
            second.mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
            parameter.addcdiv_(first, second.sqrt().add_(1e-8), value=-0.1)

    return step


def _adafactor(parameters: Iterable[torch.Tensor]) -> Callable[[], None]:
    from transformers.optimization import Adafactor

    optimizer = Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)
    return optimizer.step


def _adam8bit(parameters: Iterable[torch.Tensor]) -> Callable[[], None]:
    state: dict[torch.Tensor, list[torch.Tensor]] = {}

    @torch.no_grad()
    def step() -> None:
        for parameter in parameters:
            if parameter in state:
                continue
            if parameter.numel() < _SMALL:
                state[parameter] = [torch.zeros_like(parameter, dtype=torch.float32) for _ in range(2)]
                continue
            blocks = -(-parameter.numel() // _BLOCK)
            state[parameter] = [torch.zeros_like(parameter, dtype=torch.uint8) for _ in range(2)]
            state[parameter] += [torch.zeros(blocks, dtype=torch.float32) for _ in range(2)]

    return step


_OPTIMIZERS = {"adamw": _adamw, "adafactor": _adafactor, "adam8bit": _adam8bit}
