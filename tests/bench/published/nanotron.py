"""nanotron on one rank of a data- and tensor-parallel world, as the Ultra-Scale Playbook swept it.

Lines in brackets are those of huggingface/nanotron 67c5ebb6 (branch ``nouamane/bench2``, 2024-12-27, Apache-2.0), under
``src/nanotron/``: the branch that has the sweep's script, its configuration and the columns of its table. PyTorch is
2.1 (``run_multinode.sh``: the environment is ``2-1-cu121``), and its allocator has no options. Which commit each row is
of is not recorded; those of stage 0 must be older (``model.p2p``, engine.py:245, is not there under DDP). In 6ac7d733
(2024-12-13) what is told here is the same. FlashAttention's version is not stated either: 2.5.0 or newer.

- Before the model is built, the bandwidth is measured with tensors of 1 GiB (trainer.py:260, 1074). Weights, DDP's
  buckets and small shares are cut from what it leaves; ``empty_cache`` behind the building (trainer.py:451) gives the
  rest back. What is free in the segments that stay is there for activations.
- bfloat16 weights; **float32 gradients** in one buffer, **float32 master weights** in another
  (gradient_accumulator.py:173, 95); AdamW, fused, whose state comes with the first step. With ZeRO-1 master weights and
  state are split over the data-parallel ranks, by parameter; the gradients' buffer is not (helpers.py,
  ``grad_buckets_named_params``).
- **With ZeRO-1 there is no DDP** (trainer.py:797): no buckets, and nothing is flattened. Each micro-batch's bfloat16
  gradients are there until its backward pass has ended, are added to the buffer, and go (gradient_accumulator.py:228);
  the buffer is reduced in its place (trainer.py:532, gradient_accumulator.py:155).
- ZeRO-1 gathers the weights behind each step (zero.py:119): its share flattened, a tensor for each rank, and NCCL's
  own of all of them (distributed.py:201; ``ProcessGroupNCCL::allgather`` flattens a list of outputs). Some are used on
  NCCL's stream, so that they are free only when the device is there: it is, since each step ends in a synchronization
  (trainer.py:609).
- ``DistributedDataParallel``, with stage 0, keeps bfloat16 buckets of 25 MiB and more beside the gradients
  (trainer.py:864), and makes them anew before the forward pass behind the first reduction (PyTorch's
  ``_rebuild_buckets``). Its hook adds them to the float32 buffer and reduces that (gradient_accumulator.py:346, 382).
- A tied head's own weight is made first, and let go (tied_parameters.py:81).
- ``Mem Res (GB)``: ``max_memory_reserved`` after three steps (helpers.py:616, trainer.py:676). That this is the column,
  and not ``Mem Alloc``, follows from the code: ``log_memory`` resets the peaks behind the backward pass of each of the
  first five steps (trainer.py:512, logging.py:259), so that ``max_memory_allocated`` would not depend on the
  micro-batch.

The card's size is not followed. Where cached memory had to be given back on the way, the last step's peak is smaller.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from autofit.costmodel.memory.pools import SMALL_SIZE, UNIT, Segments
from autofit.costmodel.tracing.timeline import Tape
from autofit.system.units import GIB, MIB

from . import fake
from .nanotron_model import BUFFERS, Llama, Mode, Run

__all__ = ["Mode", "Run", "reserved_bytes"]
_STEPS = 3
_WARM_UP = 5
"""Rounds in which the bandwidth's collectives are tried (trainer.py:1116)."""
_FIRST_BUCKET, _BUCKET = MIB, 25 * MIB


def reserved_bytes(run: Run) -> int:
    """``max_memory_reserved`` of the run's first steps; from the third micro-batch on nothing changes."""
    return _reserved(replace(run, accumulation=min(run.accumulation, 3)))


@functools.cache
def _reserved(run: Run) -> int:
    tape = _tape(run)
    probes = _probes(run)
    sizes = [*tape.bytes_at(0), *probes]
    begin, _ = tape.bounds(tape.segments.index("0:pre"))
    cache = _Cache([int(size) for size in sizes])
    cache.allocate_and_free(range(len(sizes) - len(probes), len(sizes)))
    cache.happen(tape.events[:begin])
    cache.empty()
    cache.happen(tape.events[begin:])
    return cache.peak_reserved * UNIT


class _Cache(Segments):
    """PyTorch's allocator, which may be told to give back what is free."""

    def __init__(self, sizes: Sequence[int]) -> None:
        needs = [-(-size // UNIT) for size in sizes]
        super().__init__(needs, [int(need > SMALL_SIZE) for need in needs], None)

    def allocate_and_free(self, blocks: Sequence[int]) -> None:
        """All of them, then none."""
        self.follow([*blocks, *(~block for block in blocks)])

    def happen(self, events: Iterable[int]) -> None:
        """``k`` allocates block ``k``, ``~k`` frees it; nothing is done for one of no bytes."""
        self.follow([event for event in map(int, events) if self.needs[event if event >= 0 else ~event]])

    def empty(self) -> None:
        """``torch.cuda.empty_cache``, and the peak that ``log_memory`` resets."""
        self._give_back()
        self.peak_reserved = self.reserved


def _probes(run: Run) -> list[int]:
    """``measure_bandwidth``'s tensors, of the world and of the node, and what each round of its collectives needs.

    Three of 1 GiB: a clone, and NCCL's flattened inputs and outputs. They are used on NCCL's stream, which the host
    does not wait for, so that each round may have its own; how many there were matters only if the weights need more.
    """
    world = run.dp * run.tp
    shares = [GIB // ranks for ranks in (world, min(8, world)) for _ in range(2)]
    groups = 2
    return [GIB] * 4 + shares + [GIB] * (3 * groups * _WARM_UP)


def _tape(run: Run) -> Tape:
    """Every layer is traced: what a layer leaves free for the next one to take differs from layer to layer."""
    steps = functools.partial(_steps, run)
    return fake.run(functools.partial(_build, run), steps, shorten=False, capability=(9, 0))


def _build(run: Run) -> Llama:
    with fake.default_dtype(torch.bfloat16):
        return Llama(run).train()


def _parameter_numels(run: Run) -> Iterator[int]:
    """Of one rank, in the model's order."""
    head = run.hidden // run.heads
    qkv = (run.heads + 2 * run.kv_heads) * head
    vocabulary = run.vocab * run.hidden // run.tp
    yield vocabulary
    for _ in range(run.layers):
        yield run.hidden
        yield qkv * run.hidden // run.tp
        yield run.hidden * run.hidden // run.tp
        yield run.hidden
        yield 2 * run.intermediate * run.hidden // run.tp
        yield run.intermediate * run.hidden // run.tp
    yield run.hidden
    if not run.tied:
        yield vocabulary


def bucket_numels(numels: Sequence[int]) -> list[int]:
    """Elements of DDP's buckets, from the last parameter on; ``compute_bucket_assignment_by_size`` of PyTorch."""
    buckets, limit, size = [], _FIRST_BUCKET, 0
    for numel in reversed(numels):
        size += numel
        if size * torch.bfloat16.itemsize >= limit:
            buckets.append(size)
            size, limit = 0, _BUCKET
    return [*buckets, size] if size else buckets


def _steps(run: Run, model: Llama, watch: fake.Watch) -> None:
    """The first steps, the first of them without AdamW's state."""
    BUFFERS.clear()
    numels = list(_parameter_numels(run))
    if run.tied:
        torch.empty(run.vocab // run.tp, run.hidden, dtype=torch.bfloat16)
    buckets = _new_buckets(numels) if run.dp > 1 and not run.zero else []
    share = run.dp if run.zero else 1
    shares = [-(-numel // share) for numel in numels]
    held = [torch.empty(sum(numels), dtype=torch.float32), torch.empty(sum(shares), dtype=torch.float32)]
    for turn in range(_STEPS):
        if turn == 1 and buckets:
            buckets.clear()
            buckets = _new_buckets(numels)
        for micro in range(run.accumulation):
            watch.step, watch.backward = turn * run.accumulation + micro, False
            watch.mark("pre")
            ids = torch.empty(run.batch, run.rows, dtype=torch.int64)
            loss = model(ids, torch.empty_like(ids)) / run.accumulation
            watch.backward = True
            watch.mark("headB")
            loss.backward()
            del loss
            watch.mark("step")
            for parameter in model.parameters():
                parameter.grad = None
        if turn == 0:
            held += [torch.empty(numel, dtype=torch.float32) for numel in shares for _ in range(2)]
        if run.zero and run.dp > 1:
            _gather(shares, run.dp)


def _new_buckets(numels: Sequence[int]) -> list[torch.Tensor]:
    return [torch.empty(numel, dtype=torch.bfloat16) for numel in bucket_numels(numels)]


def _gather(shares: Sequence[int], ranks: int) -> None:
    """``_all_gather_params`` (zero.py:217, distributed.py:201)."""
    mine = torch.empty(sum(shares), dtype=torch.bfloat16)
    parts = [torch.empty_like(mine) for _ in range(ranks)]
    flat = torch.empty(ranks * sum(shares), dtype=torch.bfloat16)
    del flat, parts, mine
