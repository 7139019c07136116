"""How the processes of a training share the work: the layout that a value of the technique ``parallel`` names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from autofit.contract.plan import Value

if TYPE_CHECKING:
    from autofit.contract.facts import Facts, Workload

PARALLEL = "parallel"
Engine = Literal["none", "ddp", "fsdp", "deepspeed", "tensor"]
_PURE = re.compile(r"none|ddp|fsdp|fsdp:noreshard|zero[123]")
_HYBRID = re.compile(r"hsdp:([1-9]\d{0,5})x([1-9]\d{0,5})")
_MODEL = re.compile(r"(tp|cp)([1-9]\d{0,5})xfsdp([1-9]\d{0,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Processes along each dimension; their product is the world size.

    Attributes:
        replicate: Groups of processes that each hold the whole model between them.
        shard: Processes over which weights, gradients or optimizer state are split.
        tensor: Processes that share the products of one micro-batch.
        context: Processes that share the tokens of one micro-batch.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    context: int = 1

    @property
    def world(self) -> int:
        """All processes."""
        return self.replicate * self.shard * self.tensor * self.context

    @property
    def data_parallel(self) -> int:
        """Processes, or groups of them, that each train on rows of their own."""
        return self.replicate * self.shard


def engine_of(parallel: Value) -> Engine:
    """What runs a value of ``parallel``.

    >>> engine_of("hsdp:2x4")
    'fsdp'
    >>> engine_of("tp2xfsdp4")
    'tensor'
    """
    name = str(parallel)
    if name.startswith("tp"):
        return "tensor"
    if name.startswith("zero"):
        return "deepspeed"
    if "fsdp" in name or name.startswith("hsdp"):
        return "fsdp"
    return "ddp" if name == "ddp" else "none"


def context_ranks(parallel: Value) -> int:
    """Processes that share the tokens of each row.

    >>> context_ranks("cp2xfsdp4"), context_ranks("tp2xfsdp4")
    (2, 1)
    """
    match = _MODEL.fullmatch(str(parallel))
    return int(match[2]) if match and match[1] == "cp" else 1


def layout_of(parallel: Value, processes: int) -> Layout | None:
    """The layout that a value of ``parallel`` names; ``None`` where it is none, or is not for so many processes.

    >>> layout_of("hsdp:2x4", 8)
    Layout(replicate=2, shard=4, tensor=1, context=1)
    >>> layout_of("tp2xfsdp4", 8).data_parallel
    4
    >>> layout_of("hsdp:2x4", 4)
    """
    name = str(parallel)
    found = None
    if _PURE.fullmatch(name):
        sharded = name.startswith(("fsdp", "zero"))
        found = Layout(shard=processes) if sharded else Layout(replicate=processes)
    elif match := _HYBRID.fullmatch(name):
        found = Layout(replicate=int(match[1]), shard=int(match[2]))
    elif match := _MODEL.fullmatch(name):
        ranks, shard = int(match[2]), int(match[3])
        found = Layout(shard=shard, tensor=ranks) if match[1] == "tp" else Layout(shard=shard, context=ranks)
    return found if found is not None and found.world == processes else None


def data_parallel(plan: Mapping[str, Value], work: Workload) -> int:
    """Data-parallel ranks of a plan: micro-batch x accumulation x these = global batch.

    A plan without a layout for this world counts as one of which each process has rows of its own.
    """
    found = layout_of(plan.get(PARALLEL, "none"), work.processes)
    return work.processes if found is None else found.data_parallel


def data_parallel_sizes(facts: Facts) -> list[int]:
    """Data-parallel ranks that some layout of the processes makes and that divide the global batch, the most first."""
    work = facts.workload
    a_machine = work.processes // work.nodes
    shared = [ranks for ranks in range(2, a_machine + 1) if a_machine % ranks == 0]
    ranks = [1, *(one for one in shared if None in {why_not_split(facts, one), why_not_context(facts, one)})]
    return [work.processes // one for one in ranks if work.global_batch % (work.processes // one) == 0]


_TENSOR_FROM = "5.23"
"""Of transformers, whose tensor parallelism was tried."""
_SPLITS = {"colwise", "rowwise", "colwise_gather_output", "embedding_rowwise"}
"""Ways to split a module (``transformers.distributed.tensor_parallel``) that train as one process does."""
_SUMS_ANEW = "replicated_with_grad_allreduce"


def why_not_split(facts: Facts, ranks: int) -> str | None:  # noqa: PLR0911 - a rule each
    """Why so many ranks can't share the products of one micro-batch, in words; ``None`` where they can."""
    model = facts.model
    if facts.hardware.device == "cpu":
        return "Accelerate refuses tensor parallelism on a CPU"
    if lacking := facts.lacks("transformers", _TENSOR_FROM):
        return lacking
    if facts.workload.script is not None:
        return "the script loads its model itself, and tensor parallelism splits it as it is loaded"
    if not model.tensor_split or not model.tensor_sizes:
        return f"{model.architecture} has no plan of tensor parallelism"
    if model.task != "causal-lm":
        return f"tensor parallelism was not tried with {model.task}"
    if _SUMS_ANEW in model.tensor_split:
        # ReplicatedWithGradAllReduce of transformers/distributed/tensor_parallel.py (5.23): its hook sums what has
        # been accumulated, so that each micro-step sums the gradients of those before it once more
        return f"transformers adds the gradients of {model.architecture}'s norms up anew in each micro-step"
    if others := sorted(set(model.tensor_split) - _SPLITS):
        return f"{model.architecture}'s plan splits by {', '.join(others)}, which was not tried"
    uneven = (f"{size} {what}" for what, size in model.tensor_sizes.items() if size % ranks)
    return next((f"{ranks} processes can't share {words} evenly" for words in uneven), None)


_CONTEXT_FROM = {"torch": "2.13", "transformers": "5.23", "accelerate": "1.15"}
"""Of the packages whose context parallelism was tried."""
_FLASH = (8, 0)


def why_not_context(facts: Facts, ranks: int) -> str | None:
    """Why so many ranks can't share the tokens of each row, in words; ``None`` where they can."""
    model, work, card = facts.model, facts.workload, facts.hardware
    lacking = next((why for name, since in _CONTEXT_FROM.items() if (why := facts.lacks(name, since))), None)
    parts = 2 * ranks
    reasons = {
        "PyTorch has no ring attention for a CPU": card.device == "cpu",
        f"the ring takes FlashAttention, which {card.name} is too old for": (card.capability or _FLASH) < _FLASH,
        str(lacking): lacking is not None,
        "rows of a script may be padded, which no mask keeps out of context parallelism": work.script is not None,
        "a Trainer splits the tokens of its rows; a plain loop does not": work.launch_path != "trainer",
        f"context parallelism was not tried with {model.task}": model.task != "causal-lm",
        f"{model.architecture} is not known to be split: all attention has to be causal over whole rows, in modules "
        "named self_attn, with heads of one width, at most 256": not model.context_split,
        f"the loss of {model.architecture} is not transformers' own, which takes shifted labels": not model.plain_head,
        f"{model.architecture} drops attention weights, which was not tried in a ring": model.attention_dropout,
        "rows of several lengths are padded, which no mask keeps out of context parallelism": bool(work.lengths),
        f"{work.seq_len} tokens are not divisible by {parts}: each of {ranks} processes has two parts of a row": (
            work.seq_len % parts != 0
        ),
    }
    return next((why for why, holds in reasons.items() if holds), None)
