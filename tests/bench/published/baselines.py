"""What others would have said of the same rows: three closed formulas.

``accelerate``
    ``accelerate estimate-memory``, "training using Adam": the largest of what ``estimate_training_usage`` of
    ``accelerate/commands/estimate.py`` says, which is called as the command calls it, with the bytes of the model in
    float32 and the precision. For 4 bits it has no figure (-1); there it is four times the weights, the rule it is
    known for. No activations, and every parameter is taken to be trained.
``deepspeed``
    ``estimate_zero2_model_states_mem_needs`` of ``deepspeed/runtime/zero/stage_1_and_2.py``, one device, no offload::

        gpu_mem = 4 * total_params + int(16 * total_params / total_gpus)

``closed``
    Bytes of a parameter as precision and method say, and Korthikanti's activations (arXiv 2205.05198, equation 1),
    ``s*b*h*(34 + 5*a*s/h)`` bytes a layer, or with checkpointing its input, ``2*s*b*h``. A trained parameter: 16 bytes
    in float32 and in mixed precision (4 weight, 4 gradient, 8 Adam), 8 in pure 16 bits; a frozen one 2, in 4 bits 0.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a closed formula asks for."""

    parameters: int
    trained: int
    layers: int
    hidden: int
    heads: int
    batch: int
    rows: int
    precision: str
    mixed: bool
    checkpointing: bool


def estimates(shape: Shape) -> Mapping[str, float]:
    """Bytes that each formula says."""
    return {"accelerate": _accelerate(shape), "deepspeed": _deepspeed(shape), "closed": _closed(shape)}


_EACH = {"float32": 4.0, "float16": 2.0, "int4": 0.5}


def _accelerate(shape: Shape) -> float:
    from accelerate.commands.estimate import estimate_training_usage

    said = max(estimate_training_usage(4 * shape.parameters, "float16" if shape.mixed else shape.precision).values())
    return float(said) if said > 0 else 4.0 * _EACH[shape.precision] * shape.parameters


def _deepspeed(shape: Shape) -> float:
    return 4.0 * shape.parameters + 16.0 * shape.parameters


def _closed(shape: Shape) -> float:
    frozen = max(0, shape.parameters - shape.trained)
    each = 16.0 if shape.precision == "float32" else 8.0
    states = each * shape.trained + _EACH[shape.precision] * frozen
    token = shape.rows * shape.batch * shape.hidden
    layer = 2.0 * token if shape.checkpointing else token * (34 + 5 * shape.heads * shape.rows / shape.hidden)
    return states + layer * shape.layers
