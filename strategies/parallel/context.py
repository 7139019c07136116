"""Context parallelism: processes that share the tokens of each row, by Accelerate and PyTorch's ring attention.

Each of N processes has two parts of a row, the first and the last of what is left, so that causal attention costs all
of them the same. Its queries meet the keys and values of the others one after another: they are gathered once in each
layer's forward pass and once more in its backward pass, which hands their gradients on around the ring (Liu et al.,
arXiv 2310.01889). Weights, gradients and state are split by FSDP2 over all N x M processes.

Carried by the Accelerate YAML alone. A Trainer shifts the labels and splits the batch, Accelerate drops the masks. The
loss of an evaluation is that of whole rows; ``compute_metrics`` is given logits of parts of them, and labels that are
not theirs: they were split in their place before they are gathered.
Rank 0 is traced: but for the last of N, a rank's positions have a gap, of which transformers makes a mask for packed
rows that nobody reads. FlashAttention alone: the memory-efficient kernel, which float32 takes, knows no groups of
heads, and pads its sums to 32 rows, which the ring cuts elsewhere (torch 2.13 fails).

Sources: ``accelerate.Accelerator._prepare_cp`` and ``maybe_context_parallel`` of 1.15,
``transformers.Trainer._prepare_context_parallel_inputs`` of 5.23,
``torch/distributed/tensor/experimental/_context_parallel/_attention.py`` of 2.13.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, cast

from autofit.contract.layout import context_ranks

if TYPE_CHECKING:
    from torch import nn

    from autofit.contract.facts import Facts
    from autofit.contract.observation import Hooks, Ran, Seen
    from autofit.contract.plan import Value

SETTINGS = {"parallelism_config_cp_backend": "torch", "parallelism_config_cp_comm_strategy": "allgather"}
"""Accelerate's defaults, written since it reads what is not written as a word."""
LINE = "pad rows at their end only, to a multiple of {} tokens: context parallelism reads no attention mask"
METRICS = (
    "its loss is that of whole rows, but leave compute_metrics out, which gets labels that are not the logits' own"
)
_IGNORED = -100
"""The label of a token that no loss is taken of."""


def watched(model: nn.Module, hooks: Hooks) -> list[Any]:
    """A list that gets the tokens of the first row, and what is to follow each of them."""
    first: list[Any] = []

    def keep(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not first:
            first.extend(kwargs[name][0].clone() for name in ("input_ids", "shift_labels") if name in kwargs)

    hooks.before(model, keep)
    return first


def split(ran: Ran, given: list[Any]) -> Seen:
    """How rows are split: over how many processes, how many tokens this one has of each, whether rows are shared."""
    import torch
    from torch import distributed

    mesh = getattr(ran.accelerator, "torch_device_mesh", None)
    found: dict[str, Any] = {"context": 1, "tokens": len(given[0]) if given else 0}
    if mesh is not None and "cp" in mesh.mesh_dim_names:
        found["context"] = mesh["cp"].size()
        if len(given) > 1:
            halves = [(ids[0], after[-1]) for ids, after in zip(*(one.chunk(2) for one in given), strict=True)]
            ends = torch.stack([torch.stack(pair) for pair in halves])
            every = [torch.empty_like(ends) for _ in range(found["context"])]
            distributed.all_gather(every, ends, group=mesh["cp"].get_group())
            found["same_rows"] = continues([one.tolist() for one in every])
    return found


def continues(ends: list[list[list[int]]]) -> bool:
    """Whether the parts of a row that the processes have make one row.

    Args:
        ends: Of the two parts of each process the first token, and the one that is to follow its last.
    """
    parts = [first for first, _ in ends] + [last for _, last in reversed(ends)]
    return all(follows in {token, _IGNORED} for (_, follows), (token, _) in itertools.pairwise(parts))


def not_split(value: Value, seen: Seen, facts: Facts) -> str | None:
    """Why rows are not split as a value says."""
    ranks, length = context_ranks(value), facts.workload.seq_len
    if seen.get("context") != ranks:
        return f"{seen.get('context')} processes share the tokens of each row, not {ranks}"
    if seen.get("tokens") != length // ranks:
        return f"a process has {seen.get('tokens')} tokens of a row, not {length // ranks}"
    if seen.get("same_rows") is False:
        return "processes that share the tokens of each row have parts of different rows"
    return None


def on_cpu() -> list[tuple[Any, str, Any]]:
    """What lets the ring turn on a CPU, whose attention PyTorch's ring does not know: a trace has no other kernel."""
    import torch
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental._context_parallel import _attention

    ops, ring = torch.ops.aten, cast("Any", _attention)
    forward = ops._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001 - as PyTorch's own ring does
    backward = ops._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001

    def turn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mesh, local = args[0].device_mesh, (one.to_local() if isinstance(one, DTensor) else one for one in args)
        given = dict(zip((one.name for one in func._schema.arguments), local, strict=False))  # noqa: SLF001
        given["scale"] = kwargs.get("scale")
        if func is forward:
            found = ring._templated_ring_attention(mesh.get_group(), 2, func, **given)  # noqa: SLF001
        else:
            turned = ring._templated_ring_attention_backward  # noqa: SLF001
            found = turned(mesh.get_group(), 2, func, grad_out_name="grad_out", **given)
        return tuple(DTensor.from_local(one, mesh, [Shard(2)], run_check=False) for one in found)

    return [(ring, "custom_ops", {**ring.custom_ops, forward: turn, backward: turn})]
