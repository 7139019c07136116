"""FSDP2: each process holds a share of the weights, gradients and optimizer state, and gathers a layer when it runs.

- ``fsdp``: a layer's weights are freed behind its forward pass and gathered again for its backward pass (ZeRO-3).
- ``fsdp:noreshard``: they stay from forward to backward pass: fewer gathers, whole 16-bit weights in between.
- ``hsdp:RxS``: shares over S processes, and R such groups that average their gradients: few bytes between machines.

Source: ``torch.distributed.fsdp.fully_shard``; Zhao et al. (arXiv 2304.11277); ``accelerate/utils/fsdp_utils.py`` of
1.15. Carried by the Accelerate YAML (``fsdp_config``, ``parallelism_config``). Frozen 4-bit weights are kept in 16-bit
storage (``bnb_4bit_quant_storage``): Accelerate leaves integers out of the shares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autofit.contract.layout import layout_of
from autofit.contract.technique import Choice, Kind, divisors

if TYPE_CHECKING:
    from autofit.contract.facts import Facts

SHARDED = ("fsdp", "hsdp")
_WORLD = 4
"""Processes from which groups of several that each share the model can be made."""


def is_sharded(value: object) -> bool:
    """Whether a value of ``parallel`` shards by FSDP2."""
    return str(value).startswith(SHARDED)


def choices(facts: Facts) -> tuple[Choice, ...]:
    """FSDP2's values for a world, each with its reason."""
    work = facts.workload
    found = {
        "fsdp": "each process holds a share of weights, gradients and state, and gathers a layer when it runs",
        "fsdp:noreshard": "the same, and gathered weights stay until the backward pass: fewer gathers, more memory",
    }
    for replicas in _replicas(work.processes, work.nodes):
        shards = work.processes // replicas
        found[f"hsdp:{replicas}x{shards}"] = f"shares over {shards} processes, in {replicas} groups of them"
    reason = _withheld(facts)
    return tuple(
        Choice(value, Kind.EXACT, "withheld" if reason else "offered", reason or said) for value, said in found.items()
    )


def _replicas(processes: int, nodes: int) -> list[int]:
    """Groups worth a look: each in one machine where there are several, else two halves."""
    if processes < _WORLD:
        return []
    wanted = nodes if nodes > 1 else 2
    return [size for size in divisors(processes) if size == wanted and 1 < size < processes]


def _withheld(facts: Facts) -> str | None:
    if facts.workload.processes == 1:
        return "one process has nobody to share the model with"
    if facts.hardware.device == "cpu":
        return "Accelerate shards on accelerators only: under an FSDP YAML a CPU trains by DDP"
    if not facts.model.layer_classes:
        return f"{facts.model.architecture} names no layer to shard by"
    return None


def written(value: str, facts: Facts) -> dict[str, Any]:
    """Keys of the Accelerate YAML."""
    keys: dict[str, Any] = {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_offload_params": False,
            "fsdp_reshard_after_forward": value != "fsdp:noreshard",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": ",".join(facts.model.layer_classes),
            "fsdp_state_dict_type": "FULL_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_activation_checkpointing": False,
        },
    }
    layout = layout_of(value, facts.workload.processes)
    if layout is not None and layout.replicate > 1:
        keys["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": layout.replicate,
            "parallelism_config_dp_shard_size": layout.shard,
            "parallelism_config_tp_size": 1,
            "parallelism_config_cp_size": 1,
            "parallelism_config_sp_size": 1,
        }
    return keys
