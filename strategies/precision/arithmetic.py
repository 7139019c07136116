"""What a plan computes in and keeps its weights in, beside what a script of the user's says of both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofit.contract.layout import engine_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autofit.contract.facts import Facts
    from autofit.contract.plan import Value

AUTOCAST = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
"""Accelerate's word for the autocast of a value; else there is none."""
COMPUTES = {
    "fp32": "float32",
    "tf32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "bf16_weights": "bfloat16",
    "fp16_weights": "float16",
    "fp8": "bfloat16",  # what a float8 product gives
}
"""The dtype of a product's result."""
WEIGHTS = {"bf16_weights": "bfloat16", "fp16_weights": "float16"}
"""In how the weights are kept; else in float32."""


def trains_an_adapter(plan: Mapping[str, Value], facts: Facts) -> bool:
    """Whether all that is trained is an adapter, which PEFT keeps in float32, and no head whole."""
    script = facts.workload.script
    if script is not None:
        return script.trains_adapter
    return plan.get("adapter", "none") != "none" and not facts.model.new_modules


def has_own_adapter(facts: Facts) -> bool:
    """Whether a script trains an adapter alone, over weights that it loads in float32."""
    script = facts.workload.script
    return script is not None and script.trains_adapter and loaded_as(facts) == "float32"


def loaded_as(facts: Facts) -> str:
    """The dtype that a script loads its model in; float32 where there is none."""
    script = facts.workload.script
    return "float32" if script is None else script.weights_dtype


def beside_quantized(facts: Facts) -> str | None:
    """The dtype of a script's other weights, where it quantizes some; else ``None``."""
    script = facts.workload.script
    return None if script is None or script.quantization is None else script.weights_dtype


def in_a_loop(facts: Facts) -> bool:
    """Whether a script trains in a loop of its own, where it may cast weights as its Accelerator's precision is."""
    script = facts.workload.script
    return script is not None and not script.trainer


def computes(value: Value, facts: Facts) -> str:
    """The dtype of products under the value."""
    over = own_autocast(value, facts)
    return COMPUTES[str(value) if over == "no" else over]


def autocast(value: Value, plan: Mapping[str, Value], facts: Facts) -> str:
    """Accelerate's word for it. Over 16-bit weights that a script loads, its own, but where they are split.

    Accelerate turns weights that FSDP2 splits and that are trained to float32 under autocast, none of a model with
    packed ones; DeepSpeed keeps a copy of them.
    """
    if value == "bf16_weights" and trains_an_adapter(plan, facts) and loaded_as(facts) == "float32":
        return "bf16"
    engine = engine_of(plan.get("parallel", "none"))
    kept = engine in {"none", "ddp"} or (engine == "fsdp" and beside_quantized(facts) is not None)
    if value in WEIGHTS and kept:
        return own_autocast(value, facts)
    return AUTOCAST.get(str(value), "no")


def own_autocast(value: Value, facts: Facts) -> str:
    """What a script that loads 16-bit weights asks for; over float16 ones that are loaded as bfloat16, bfloat16."""
    if value not in WEIGHTS:
        return "no"
    if _says(facts, "bf16"):
        return "bf16"
    on_cpu = facts.hardware.device == "cpu"  # where a Trainer leaves it out
    if on_cpu or loaded_as(facts) != "float16" or not _says(facts, "fp16"):
        return "no"
    return "bf16" if value == "bf16_weights" else "fp16"


def _says(facts: Facts, name: str) -> bool:
    """Whether a script that loads its model in 16 bits asks for it."""
    script = facts.workload.script
    return script is not None and loaded_as(facts) != "float32" and bool(script.own.get(name))


def tf32_argument(value: Value, facts: Facts) -> bool | None:
    """What ``TrainingArguments`` are told of TF32; nothing where saying no would break the loss."""
    if value in WEIGHTS and "tf32" in facts.hardware.precisions and _says(facts, "tf32"):
        return True
    return None if value != "tf32" and facts.model.task == "ctc" else value == "tf32"
