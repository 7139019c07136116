"""LitGPT's pre-training script of its page on Thunder, as it runs without a compiler: TinyLlama on one card or by DDP.

- ``bf16-true``; what the model returns becomes float32, all of it; the loss is taken at once (``chunk_size=0``).
- Gradients add up over micro-steps, AdamW's step works on all parameters at once.
- ``DistributedDataParallel`` holds buckets beside the gradients.
- Micro-batch, rows and model are the script's defaults; the page's command lines change neither.

Source, Apache-2.0: Lightning-AI/litgpt 26857050 ``extensions/thunder/{pretrain.py,README.md}``; lightning 2.3.0
``fabric/plugins/precision/half.py`` and ``fabric/strategies/ddp.py``. Its FSDP does not checkpoint: no model of it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from . import fake
from .litgpt import ERA_2024_04
from .litgpt_configs import Config, config_of
from .litgpt_model import GPT, Tuning

MICRO_BATCH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the script."""

    config: Config
    ranks: int


def default_run(ranks: int) -> Run:
    """Of the page's command lines."""
    config = config_of("tiny-llama-1.1b")
    assert config is not None
    return Run(config=config, ranks=ranks)


def allocated_bytes(run: Run) -> int:
    """What the script prints as ``Memory used``."""
    return _allocated(Run(config=run.config, ranks=min(run.ranks, 2)))


@functools.cache
def _allocated(run: Run) -> int:
    tape = fake.run(functools.partial(_build, run), functools.partial(_steps, run), shorten=False)
    return fake.peak_of(tape).allocated_bytes


def _build(run: Run) -> GPT:
    with fake.default_dtype(torch.bfloat16):
        return GPT(run.config, tuning=Tuning(method="full"), era=ERA_2024_04).train()


def _steps(run: Run, model: GPT, watch: fake.Watch) -> None:
    """A micro-step and an optimizer step, then two micro-steps and one."""
    model.make_rope(run.config.block_size)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    numel = sum(parameter.numel() for parameter in model.parameters())
    buckets = torch.empty(numel if run.ranks > 1 else 0, dtype=torch.bfloat16)
    for step, last in enumerate((True, False, True)):
        watch.step = step
        watch.mark("pre")
        loss = _loss(run, model)
        watch.mark("headB")
        (loss / 2).backward()
        watch.mark("step")
        if last:
            optimizer.step()
            optimizer.zero_grad()
    del buckets


def _loss(run: Run, model: GPT) -> torch.Tensor:
    ids = torch.empty(MICRO_BATCH, run.config.block_size, dtype=torch.int64)
    with fake.default_dtype(torch.bfloat16):
        logits = model(ids, lm_head_chunk_size=0)
    logits = logits.to(torch.float32)
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), torch.empty_like(ids).reshape(-1))
