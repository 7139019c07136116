"""What the Accelerate YAML says of each way of training by several processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autofit.contract.layout import context_ranks, engine_of, layout_of

from . import context

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autofit.contract.facts import Facts
    from autofit.contract.plan import Value


_PREFIX = "parallelism_config_"
_MAX_NORM = 1.0
"""Of gradients, a Trainer's default; it refuses another number than its own."""
ENGINES = (
    "fsdp", "fsdp_config", "fsdp_plugin", "deepspeed", "deepspeed_plugin", "deepspeed_plugins", "torch_tp_plugin",
    "megatron_lm_plugin", "parallelism_config",
)  # fmt: skip
"""Arguments of a Trainer and of an ``Accelerator`` that stand over the YAML's engine."""


def accelerate_keys(value: Value, plan: Mapping[str, Value], facts: Facts) -> dict[str, Any]:
    """Keys of the YAML."""
    engine = engine_of(value)
    if engine == "fsdp":
        return {"distributed_type": "FSDP", "fsdp_config": _fsdp(value, plan, facts)} | _mesh(value, facts)
    if engine == "deepspeed":
        return {"distributed_type": "DEEPSPEED", "deepspeed_config": _deepspeed(value, plan, facts)}
    if engine == "tensor":
        return {"distributed_type": "MULTI_GPU"} | _mesh(value, facts)
    # on a machine without CUDA, too, the launcher starts several processes for this type only
    return {"distributed_type": "MULTI_GPU" if engine == "ddp" else "NO"}


def _fsdp(value: Value, plan: Mapping[str, Value], facts: Facts) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_offload_params": plan["offload"] == "parameters",
        "fsdp_reshard_after_forward": value != "fsdp:noreshard",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": ",".join(facts.model.layer_classes),
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_activation_checkpointing": False,
    }


def _mesh(value: Value, facts: Facts) -> dict[str, Any]:
    """The sizes of a mesh; every size is written, since Accelerate reads one that is not as a word."""
    layout = layout_of(value, facts.workload.processes)
    if layout is None or layout.replicate == layout.tensor == layout.context == 1:
        return {}
    sizes = {"dp_replicate": layout.replicate, "dp_shard": layout.shard, "tp": layout.tensor, "cp": layout.context}
    found: dict[str, Any] = {f"{_PREFIX}{name}_size": size for name, size in {**sizes, "sp": 1}.items()}
    return {"parallelism_config": found | (context.SETTINGS if layout.context > 1 else {})}


def _deepspeed(value: Value, plan: Mapping[str, Value], facts: Facts) -> dict[str, Any]:
    script = facts.workload.script
    stage, offload = int(str(value)[-1]), plan["offload"]
    return {
        "zero_stage": stage,
        "offload_optimizer_device": "cpu" if offload in {"optimizer", "parameters"} else "none",
        "offload_param_device": "cpu" if offload == "parameters" else "none",
        "gradient_accumulation_steps": int(plan["accumulation"]),
        "gradient_clipping": float(_MAX_NORM if script is None else script.own.get("max_grad_norm", _MAX_NORM)),
        "zero3_init_flag": False,
        "zero3_save_16bit_model": stage == 3,
    }


def settings_elsewhere(value: Value, plan: Mapping[str, Value], facts: Facts) -> dict[str, dict[str, Any]]:
    """The engine as settings of other projects, which place a model as those say, and not as the YAML does.

    Axolotl 0.19 moves a model whole to each card unless its own ``fsdp_config`` says otherwise; LLaMA-Factory 0.9.5
    does under ZeRO-3 unless ``deepspeed`` is said to it.
    """
    engine, keys = engine_of(value), accelerate_keys(value, plan, facts)
    if engine == "deepspeed":
        config = _deepspeed_config(keys["deepspeed_config"], plan, facts)
        return {"axolotl": {"deepspeed": config}, "llamafactory": {"deepspeed": config}}
    if engine != "fsdp" or context_ranks(value) > 1:
        return {}
    config = {name.removeprefix("fsdp_"): setting for name, setting in keys["fsdp_config"].items()}
    version = config.pop("version")
    config["cpu_ram_efficient_loading"] = plan.get("quantization") != "nf4"  # which it refuses to load so
    sizes = {
        name: keys["parallelism_config"][f"{_PREFIX}{name}"]
        for name in ("dp_replicate_size", "dp_shard_size")
        if "parallelism_config" in keys
    }
    return {"axolotl": {"fsdp_version": version, "fsdp_config": config, **sizes}}


def differs_elsewhere(value: Value, plan: Mapping[str, Value], facts: Facts) -> dict[str, str]:
    """What other projects do otherwise with several processes, in words."""
    found = {}
    layout = layout_of(value, facts.workload.processes)
    if layout is not None and layout.data_parallel > 1:
        found["axolotl"] = "each process weighs its tokens by themselves (Axolotl's average_tokens_across_devices: off)"
    if engine_of(value) == "fsdp" and plan.get("quantization") != "nf4":
        found["llamafactory"] = (
            "set fsdp_cpu_ram_efficient_loading: true in that file, else LLaMA-Factory loads the whole model onto each "
            "card before it is split"
        )
    return found


def _deepspeed_config(given: Mapping[str, Any], plan: Mapping[str, Value], facts: Facts) -> dict[str, Any]:
    """DeepSpeed's own config of what the YAML says."""
    stage, processes = given["zero_stage"], facts.workload.processes
    micro_batch, accumulation = int(plan["micro_batch"]), int(plan["accumulation"])
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": given["offload_optimizer_device"]}}
    if stage == 3:
        zero["offload_param"] = {"device": given["offload_param_device"]}
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    half = {"enabled": True, "auto_cast": True} if plan["precision"] == "fp16" else {"enabled": False}
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro_batch * accumulation * processes,
        "gradient_clipping": given["gradient_clipping"],
        "bf16": {"enabled": plan["precision"] == "bf16"},
        "fp16": half,
        "zero_optimization": zero,
    }
