"""Quantization: the frozen weights that an adapter is trained on, in fewer bits.

- ``nf4``: four bits a weight, in blocks of 64 whose scales are quantized too: about 0.52 bytes a weight. Each product
  makes a copy of its weight in the dtype that it computes in, and lets go of it. Dettmers et al., "QLoRA"
  (arXiv 2305.14314).
- ``int8``: eight bits a weight and one scale a row. On CUDA the products are of 8-bit integers, but for the columns
  with outliers; on a CPU the weight is copied as above. Dettmers et al., "LLM.int8()" (arXiv 2208.07339).
- ``int8_torchao``: the same bytes, by torchao's ``Int8WeightOnlyConfig``: only the weight is rounded, and what it is
  multiplied with is not. Autograd keeps the copies until the backward pass, so that it saves memory under
  ``checkpointing`` alone. ``int4_torchao`` is known, and withheld: transformers trains no adapter on it.

Saves: 1.5 (nf4) or 1 (int8) of the 2 bytes that a frozen 16-bit weight has, 3.5 or 3 of the 4 of a float32 one. Costs:
making the copies, in the forward and again in the backward pass; the weights lose digits. Random weights have no
outliers, trained ones have some: ``int8`` is a little slower on them than it was measured.

Only linear layers are quantized: embeddings, norms and the head are not, and keep the dtype that the precision says.
That is what scripts for QLoRA get: under ``bf16`` they are float32 (as ``peft.prepare_model_for_kbit_training`` leaves
them) and products compute in bfloat16, under ``bf16_weights`` they are bfloat16.

A script that loads its weights in 4 or 8 bits itself keeps them so: see ``made_in_script``, and ``held``. FSDP2 splits
those that are stored as floats that it does not cast.

One random matrix of each shape is quantized once, kept for the trials after it, and copied to the layers of that shape.

Sources: the papers above; ``bitsandbytes.autograd``; ``transformers.BitsAndBytesConfig``, ``TorchAoConfig``;
``Int8Tensor`` of torchao 0.18. Not covered: stacked weights of experts, which are no linear layers; DoRA and (IA)3 on
quantized weights; ``int8`` in a plain loop; GPTQ and AWQ; a trace of ``int8_torchao``, whose tensors fake ones can't
stand for; the fused 4-bit kernels of bitsandbytes for few tokens, which make no copy: a trace always sees one.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from autofit.contract.emission import Emission
from autofit.contract.layout import engine_of
from autofit.contract.observation import dtype_name
from autofit.contract.technique import Choice, Held, Kind, Part, Prior, Technique

from .loading import (
    keep_as_loaded,
    load_arguments,
    made_as_said,
    quantization_config,
    random_model,
    random_torchao_model,
)
from .tracing import traced_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch import nn
    from transformers import PreTrainedModel

    from autofit.contract.facts import Facts
    from autofit.contract.observation import Ran, Seen
    from autofit.contract.plan import Value
    from autofit.contract.recipe import Recipe
    from autofit.contract.trace import TraceRecorder

_SIXTEEN = {"bf16": "bfloat16", "fp16": "float16"}
_CAST_TO = {**_SIXTEEN, "bf16_weights": "bfloat16"}
"""What FSDP2 casts weights to for a product, by the precision; a script's own autocast may stay over bfloat16 ones."""
_AUTOCAST = {"bf16", "fp16", "fp8"}
_ELSEWHERE: dict[str, dict[str, dict[str, Any]]] = {
    "nf4": {
        "axolotl": {"adapter": "qlora", "load_in_4bit": True},
        "llamafactory": {"quantization_method": "bnb", "quantization_bit": 4, "double_quantization": True},
    },
    "int8": {
        "axolotl": {"load_in_8bit": True},
        "llamafactory": {"quantization_method": "bnb", "quantization_bit": 8},
    },
}
"""Settings of other projects, by value and project."""
_OTHERWISE = {
    "sft": "SFTTrainer turns the adapter's weights to bfloat16, and steps them so: no float32 copy keeps small updates",
    "axolotl": "what is not quantized (embeddings, norms, the output layer) is in the 16 bits that Axolotl computes in",
    "llamafactory": "what is not quantized (embeddings, norms, the output layer) is in the dtype that its files say",
}
"""What they do otherwise. TRL 1.16: ``SFTTrainer.__init__``; Axolotl 0.19: ``ModelLoader._configure_embedding_dtypes``;
LLaMA-Factory 0.9.5: ``load_model``."""
_STORED = ", stored in "
_TORCHAO = {"int8_torchao", "int4_torchao"}


class Quantization(Technique):
    """In how many bits the frozen weights are kept."""

    name = "quantization"
    baseline = "none"
    packages = {"bitsandbytes": "0.50", "peft": "0.18", "torchao": ""}
    ways = {"QLoRA": "nf4"}

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        lacking = _no_adapter(facts) or self.lacks(facts, "bitsandbytes", "peft")

        def choice(value: str, reason: str, *, offered: bool) -> Choice:
            if lacking is not None:
                return Choice(value, Kind.METHOD, "withheld", lacking)
            return Choice(value, Kind.METHOD, "offered" if offered else "on_request", reason)

        on_cpu = facts.hardware.device == "cpu"
        int8 = choice(
            "int8", "one byte a frozen weight, for an adapter: slower than nf4 on most devices", offered=False
        )
        if facts.workload.launch_path == "loop" and lacking is None:
            kept = (
                "bitsandbytes lets go of its layers' inputs with the loss, which a plain loop keeps for a step too long"
            )
            int8 = Choice("int8", Kind.METHOD, "withheld", kept)
        return (
            Choice("none", Kind.EXACT, "offered", "weights are kept in the dtype that the precision says"),
            choice("nf4", "half a byte a frozen weight, for an adapter", offered=not on_cpu),
            int8,
            *_of_torchao(facts),
        )

    def conflict(self, value: Value, others: Mapping[str, Value], facts: Facts) -> str | None:
        adapter = str(others["adapter"])
        if value in _TORCHAO and others["precision"] in _AUTOCAST:
            return "autocast passes torchao's weights by, and what they are multiplied with stays float32"
        parallel = others.get("parallel", "none")
        engine = engine_of(parallel)
        if engine in {"fsdp", "deepspeed"} and value not in ({"none", "nf4"} if engine == "fsdp" else {"none"}):
            return f"Accelerate leaves weights of {value} whole under {parallel}"
        not_tried = self.not_tried_split(value, others, {"none"})
        if engine not in {"none", "ddp"} and (own := _by_script(facts)):
            not_tried = _unsplit(own, str(parallel), str(others["precision"]))
        if not_tried:
            return not_tried
        if value == "none" or "lora" in adapter:
            return None
        if adapter == "none":
            return "quantized weights can't be trained: they need an adapter"
        return f"{adapter.partition(':')[0]} on quantized weights is not covered"

    def apply(self, value: Value, recipe: Recipe) -> None:
        if value == "none":
            return
        compute = _SIXTEEN.get(recipe.mixed_precision, recipe.weights_dtype)
        on_cpu = recipe.facts.hardware.device == "cpu"
        # Accelerate shards 4-bit weights where their storage is a float (fsdp_utils.py: Params4bit)
        storage = compute if engine_of(recipe.plan["parallel"]) == "fsdp" else "uint8"
        kept = recipe.facts.model.unquantized
        given = functools.partial(load_arguments, str(value), compute, on_cpu=on_cpu, storage=storage, kept=kept)
        recipe.load_arguments.append(given)

        def random(plain: Callable[[], PreTrainedModel]) -> PreTrainedModel:
            config = quantization_config(str(value), compute, storage, kept)
            if value in _TORCHAO:
                return random_torchao_model(config, plain, on_cpu=on_cpu, cache=recipe.tensor_cache)
            return random_model(config, plain, on_cpu=on_cpu, cache=recipe.tensor_cache)

        recipe.random_model = random
        if value == "nf4":
            recipe.model_wraps.append(keep_as_loaded)

    def made_in_script(self, said: Any) -> Callable[[Callable[[], PreTrainedModel], bool], PreTrainedModel] | None:
        return made_as_said(said)

    def in_script(self, model: nn.Module) -> str | None:
        """The kind of the first weight in 4 or 8 bits, and the float that 4 bits are stored in, if it is one."""
        for one in model.parameters():
            if (state := getattr(one, "quant_state", None)) is not None:
                return _kind(state) + (f"{_STORED}{dtype_name(one)}" if one.is_floating_point() else "")
            if hasattr(one, "SCB") and one.dtype.itemsize == 1:
                return dtype_name(one)
        return None

    def held(self, facts: Facts) -> Held | None:
        script = facts.workload.script
        if script is None:
            return None
        if own := _by_script(facts):
            return Held(self.baseline, f"the script loads its weights quantized itself ({own})", by_script=True)
        return Held(self.baseline, "weights are quantized by the script, or not at all", firm=True)

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        if value == "none":
            return Emission()
        said = f"load the weights in {value}: model = setup.model(...)"
        elsewhere = _ELSEWHERE.get(str(value), {})
        precision = plan["precision"]
        told = {
            "sft": value in _ELSEWHERE,  # bitsandbytes' alone
            "axolotl": value in _ELSEWHERE and precision in _SIXTEEN,
            "llamafactory": value in _ELSEWHERE and precision != "bf16_weights",
        }
        differs = {name: words for name, words in _OTHERWISE.items() if told[name]}
        return Emission(script=(said,), elsewhere=elsewhere, otherwise=differs)

    def traced_as(self, value: Value, part: Part) -> Value | None:
        if part == "optimizer":
            return self.baseline
        return None if value in _TORCHAO else value

    def stand_in(self, value: Value, facts: Facts, recorder: TraceRecorder) -> AbstractContextManager[None]:
        if (value == "none" and not _by_script(facts)) or value in _TORCHAO:
            return contextlib.nullcontext()
        return traced_layers(recorder, on_cuda=facts.hardware.device == "cuda")

    def observe(self, ran: Ran) -> Seen:
        return {"weight": _quantized(ran.products[0]) if ran.products else None}

    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        wanted = {
            "none": None, "nf4": "nf4 twice", "int8": "int8", "int8_torchao": "Int8Tensor", "int4_torchao": "Int4Tensor"
        }[str(value)]  # fmt: skip
        found = seen.get("weight")
        if found != wanted and not _by_script(facts):
            return f"a linear layer's weight is quantized to {found or 'nothing'}, not {wanted or 'nothing'}"
        return None

    def changes(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> str | None:
        experts = " Experts are no linear layers, and stay as they are." if facts.model.has_experts else ""
        said = {
            "none": None,
            "nf4": "The frozen weights of linear layers are rounded to 4 bits (NF4, double quantization).",
            "int8": "The frozen weights of linear layers are rounded to 8 bits, and so is what they are multiplied "
            "with (LLM.int8).",
            "int8_torchao": "The frozen weights of linear layers are rounded to 8 bits, with one scale a row.",
            "int4_torchao": "The frozen weights of linear layers are rounded to 4 bits, in groups of 128.",
        }[str(value)]
        return said + experts if said else None

    def prior(self, value: Value, facts: Facts) -> Prior:
        """Copies of the weights cost the same whatever the batch, so that large batches hide them."""
        return {
            "none": Prior(time=(0.0, 0.01), memory=(0.0, 0.01)),
            "nf4": Prior(time=(0.15, 0.15), memory=(-0.6, 0.3)),
            "int8": Prior(time=(0.3, 0.25), memory=(-0.4, 0.3)),
            "int8_torchao": Prior(time=(0.2, 0.25), memory=(-0.2, 0.4)),
            "int4_torchao": Prior(time=(0.2, 0.25), memory=(-0.4, 0.4)),
        }[str(value)]


def _quantized(product: nn.Module) -> str | None:
    """How the weight of a linear layer is quantized, in words; ``None`` where it is not."""
    weight: Any = getattr(product, "weight", None)
    state = getattr(weight, "quant_state", None) or getattr(
        product, "quant_state", None
    )  # FSDP2 shards the weight's own
    if state is not None:
        return _kind(state)
    if type(weight).__module__.startswith("torchao."):
        return type(weight).__name__
    return None if weight is None or weight.dtype.is_floating_point else dtype_name(weight)


def _kind(state: Any) -> str:
    """How a weight in 4 bits is quantized; ``twice`` where its scales are, too."""
    return f"{state.quant_type}{' twice' if state.nested else ''}"


def _unsplit(kind: str, parallel: str, precision: str) -> str | None:
    """Why what a script quantizes itself can't go with processes that split it; ``None`` where it can.

    FSDP2 splits floats alone, and casts them to what it computes in, bits that are packed in them too.
    """
    if engine_of(parallel) != "fsdp":
        return f"what the script quantizes itself was not tried under {parallel}"
    kind, _, storage = kind.partition(_STORED)
    if kind == "int8":
        return "FSDP2 leaves weights whole that are stored in int8"
    if not storage:
        storing = "bnb_4bit_quant_storage=torch.bfloat16"
        return f"FSDP2 leaves weights whole that are stored in uint8: load them with {storing}"
    computes = _CAST_TO.get(precision, storage)
    return None if computes == storage else f"FSDP2 would cast weights that are packed in {storage} to {computes}"


def _by_script(facts: Facts) -> str | None:
    """How the user's script quantizes weights itself; ``None`` where it does not, or none is tuned."""
    return facts.workload.script.quantization if facts.workload.script is not None else None


def _no_adapter(facts: Facts) -> str | None:
    """Why no adapter is trained on quantized weights of such a model, whatever is installed."""
    if facts.model.task in {"causal-lm", "script"}:
        return None
    return f"only causal language models are quantized yet, and {facts.model.architecture} is none"


def _of_torchao(facts: Facts) -> tuple[Choice, ...]:
    """Torchao's choices."""
    why = _no_adapter(facts) or Quantization.lacks(facts, "torchao", "peft")
    if facts.model.conv1d:
        why = why or f"the layers of {facts.model.model_type} are Conv1D, which torchao does not quantize"
    int8 = Choice(
        "int8_torchao",
        Kind.METHOD,
        "withheld" if why else "on_request",
        why or "one byte a frozen weight, for an adapter; saves memory beside checkpointing alone",
    )
    untrained = "transformers trains no adapter on torchao's 4-bit weights (its quantizer is not trainable)"
    return int8, Choice("int4_torchao", Kind.METHOD, "withheld", untrained)
