"""Precision: the arithmetic of the forward and backward pass, and the dtype of the weights.

- ``fp32``: everything in float32; TF32 off.
- ``tf32``: float32 tensors, matrix products in TensorFloat-32 (10-bit mantissa). Nvidia Ampere and newer.
- ``bf16``: autocast to bfloat16 over float32 weights. Saves activations, costs a bfloat16 copy of each weight
  while a step lasts. On a small device-memory budget it can need more than fp32 at a small micro-batch.
- ``fp16``: autocast to float16 with dynamic loss scaling, for devices without bfloat16. Where there is bfloat16 it is
  tried on request only: tensor cores multiply both at one rate, and the scaling comes on top.
  Under DeepSpeed both 16-bit precisions are its own: 16-bit weights beside a float32 copy that the optimizer steps.
- ``bf16_weights``: weights, gradients and optimizer state in bfloat16, no autocast, no float32 master copy.
  Beside an adapter they are frozen, and nothing is lost: class ``numeric``, under bfloat16 autocast, which multiplies
  the adapter's float32 weights in 16 bits too.
  Where a script loads its weights so and asks for autocast besides, as those that train an adapter do, it stays.
  Halves the bytes per parameter, and changes the method: with AdamW at a learning rate of 2e-5 about 70 % of the
  weights never moved in 20 steps, since the update is below half a unit in the last place.
- ``fp16_weights``: frozen weights in float16 under an adapter in float32, as a script loads them; never written by a
  plan, since float16 weights that are trained lose almost every update. Autocast is the script's own.
- ``fp8``: the linear layers of the repeated layers multiply in float8 (e4m3 forward, e5m2 for gradients, one scale a
  tensor, found anew each time), the rest under bfloat16 autocast; torchao's ``convert_to_float8_training``. Nvidia Ada
  and newer. Casting and scaling cost more than the products save unless the step is compiled, so it has to be asked
  for. The head and layers whose sizes are no multiples of 16 stay as they are. Micikevicius et al. (arXiv 2209.05433).

What keeps the small updates of bfloat16 weights belongs to the optimizer, and is found there: stochastic rounding
(``adamw_torchao_8bit_stochastic``) and Kahan summation (``stable_adamw``).

Under ``bf16_weights`` the images and sounds that a model is called with are cast, too; what ``generate`` is given is
the caller's to cast.

Offered only where the device computes the precision itself. A Trainer's ``fp16`` on a CPU silently trains in
float32, so it is withheld there; so is bfloat16 on a CPU that would emulate it.

Sources: ``transformers.TrainingArguments`` (``bf16: false`` under an Accelerate YAML that says ``bf16`` trains in
bf16, so ``mixed_precision`` is written always, also ``no``); NVIDIA, "TensorFloat-32 in the A100 GPU". Under PyTorch
2.13 ``tf32: false`` breaks the CTC loss of speech models, so nothing is written there: their convolutions stay in TF32,
as PyTorch has them.
Not covered: a float32 master copy beside bfloat16 weights; a trace of ``fp8``; fp8 in the experts of a mixture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofit.contract.emission import Emission
from autofit.contract.layout import context_ranks, engine_of
from autofit.contract.observation import dtype_name
from autofit.contract.technique import Choice, Held, Kind, Part, Prior, Status, Technique

from .arithmetic import (
    AUTOCAST,
    COMPUTES,
    WEIGHTS,
    autocast,
    beside_quantized,
    computes,
    has_own_adapter,
    in_a_loop,
    loaded_as,
    own_autocast,
    tf32_argument,
    trains_an_adapter,
)
from .elsewhere import otherwise, told
from .float8 import float8_choice, multiply_in_float8
from .held_by_autocast import held_by_autocast
from .main_input import cast_main_input
from .observed import compute_dtype, main_weight, trained_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autofit.contract.facts import Facts
    from autofit.contract.observation import Ran, Seen
    from autofit.contract.plan import Value
    from autofit.contract.recipe import Recipe

_MANTISSA = {"fp32": 23, "tf32": 10, "bf16": 7, "fp16": 10, "bf16_weights": 7, "fp16_weights": 10, "fp8": 2}
"""Bits, without the leading one; of float8 the gradients' (e5m2)."""
_LARGE_STEP = 1e13
"""Weights times tokens of an optimizer step, of which a device takes longer in float32 than a host in any precision: no
fewer than 40 TFLOP, a tenth of a second of an H100 in TF32. In smaller ones the fewer operators without autocast count.
"""
_LARGE_MODEL = 1e9
"""Weights from which on those that FSDP2 gathers in 16 bits take less than in 32: beside those of a small model, the
copies that it makes on the way count, up to 7 % of 162M.
"""
_SPLIT = {"fp32", "tf32", "bf16", "bf16_weights"}
"""What was tried under tensor parallelism; under context parallelism those of 16 bits."""
_REFUSED = {
    ("deepspeed", "bf16_weights"): "DeepSpeed keeps a float32 copy of its own",
    ("deepspeed", "fp8"): "float8 layers were not tried under DeepSpeed",
    ("fsdp", "fp8"): "float8 layers were not tried under FSDP",
    ("deepspeed", "fp16_weights"): "float16 weights were not tried under DeepSpeed",
    ("fsdp", "fp16_weights"): "float16 weights were not tried under FSDP",
}
"""Why an engine can't go with a value."""
_IN_ENGINE = {
    "fsdp": " FSDP gathers all weights in 16 bits: embeddings, norms and the output layer compute in them too, and "
    "gradients are averaged over the processes in them.",
    "deepspeed": " DeepSpeed casts the whole model to 16 bits, embeddings, norms and the output layer too; its float32 "
    "copy is the optimizer's.",
}
"""What an engine makes of autocast. Source: ``set_mixed_precision`` of Accelerate's FSDP plugin (1.15), whose policy is
of one dtype for weights, results and reductions; ``_configure_distributed_model`` of DeepSpeed's engine."""


class Precision(Technique):
    """The arithmetic of a step, and the dtype of the weights."""

    name = "precision"
    baseline = "fp32"
    packages = {"torchao": ""}
    says_itself = True
    saves = {"weights": ("bf16_weights", "weights in 16 bits")}

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        hardware = facts.hardware

        on_cpu = hardware.device == "cpu"
        has_bf16 = "bf16" in hardware.precisions

        def choice(value: str, needs: str, kind: Kind, good: str, bad: str) -> Choice:
            here = needs in hardware.precisions
            if value == "bf16_weights" and facts.model.plain_module:
                return Choice(value, kind, "withheld", "the script makes its module itself, in the dtype that it says")
            if value == "bf16_weights" and (own := beside_quantized(facts)) not in {None, "bfloat16"}:
                return Choice(value, kind, "withheld", f"beside quantized weights the script has others in {own}")
            searched: Status = "on_request" if value == "fp16" and has_bf16 else "offered"
            at_best = Kind.NUMERIC if value == "bf16_weights" else None
            return Choice(value, kind, searched if here else "withheld", good if here else bad, at_best)

        return (
            Choice("fp32", Kind.NUMERIC, "offered", "runs everywhere"),
            choice(
                "tf32", "tf32", Kind.NUMERIC,
                "tensor cores run float32 products in TF32",
                "a CPU has no TF32" if on_cpu else f"{hardware.name} is older than Ampere and has no TF32",
            ),
            choice(
                "bf16", "bf16", Kind.NUMERIC,
                "the device multiplies bfloat16 itself",
                f"{hardware.name} would emulate bfloat16",
            ),
            choice(
                "fp16", "fp16", Kind.NUMERIC,
                "no faster than bfloat16, which needs no scaled loss"
                if has_bf16
                else "the device multiplies float16 itself; the loss is scaled",
                "a Trainer's fp16 on a CPU silently trains in fp32"
                if on_cpu
                else f"{hardware.name} is slow at float16",
            ),
            choice(
                "bf16_weights", "bf16", Kind.METHOD,
                "half the bytes per parameter, and no float32 copy to collect small updates (class numeric beside an "
                "adapter, which stays in float32)",
                f"{hardware.name} would emulate bfloat16",
            ),
            float8_choice(facts, self.lacks(facts, "torchao")),
            *_as_loaded(facts),
        )  # fmt: skip

    def kind(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Kind:
        frozen = value == "bf16_weights" and trains_an_adapter(plan, facts)
        return Kind.NUMERIC if frozen else super().kind(value, plan, facts)

    def outdone_by(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Value | None:
        work, weights, casts = facts.workload, facts.model.parameters, value in AUTOCAST
        large = weights * work.seq_len * work.global_batch / work.processes >= _LARGE_STEP
        if trains_an_adapter(plan, facts):
            return "bf16_weights" if value != "bf16_weights" and (casts or large) else None
        if not large or value not in {"fp32", "tf32"}:
            return None
        gathers = str(plan["parallel"]).startswith("fsdp") and weights >= _LARGE_MODEL
        return "bf16" if gathers else "tf32" if value == "fp32" else None

    def conflict(self, value: Value, others: Mapping[str, Value], facts: Facts) -> str | None:
        parallel = others.get("parallel", "none")
        if context_ranks(parallel) > 1 and value in {"fp32", "tf32"}:
            return f"{parallel} takes FlashAttention, which computes in 16 bits"
        refused = _REFUSED.get((engine_of(parallel), str(value)))
        return refused or self.not_tried_split(value, others, _SPLIT, _SPLIT)

    def apply(self, value: Value, recipe: Recipe) -> None:
        recipe.mixed_precision = autocast(value, recipe.plan, recipe.facts)
        recipe.tf32 = tf32_argument(value, recipe.facts) is True
        recipe.product_bits = _MANTISSA[str(value)]
        if value in WEIGHTS:
            recipe.weights_dtype = WEIGHTS[str(value)]
        if value == "bf16_weights" and recipe.facts.model.main_input != "input_ids":
            recipe.model_wraps.append(cast_main_input)
        if value == "fp8":
            recipe.model_wraps.append(multiply_in_float8)

    def held(self, facts: Facts) -> Held | None:
        loaded = loaded_as(facts)
        held = (
            Held(one, f"the script loads its model in {loaded}") for one, dtype in WEIGHTS.items() if dtype == loaded
        )
        return next(held, None) or held_by_autocast(facts)

    def own(self, facts: Facts) -> Value:
        script = facts.workload.script
        here = [name for name in ("bf16", "fp16", "tf32") if name != "tf32" or name in facts.hardware.precisions]
        said = () if script is None else [name for name in here if script.own.get(name)]
        return super().own(facts) if self.held(facts) or not said else said[0]

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        mixed = autocast(value, plan, facts)
        lines = {
            "bf16_weights": ("load the model with bfloat16 weights: model = setup.model(...)",),
            "fp8": ("multiply linear layers in float8: model = setup.model(...)",),
        }
        return Emission(
            accelerate={"mixed_precision": mixed},
            training_args={"bf16": mixed == "bf16", "fp16": mixed == "fp16", "tf32": tf32_argument(value, facts)},
            script=lines.get(str(value), ()),
            elsewhere=told(value, mixed),
            otherwise=otherwise(value, plan, facts),
        )

    def traced_as(self, value: Value, part: Part) -> Value | None:
        if part != "optimizer":
            if value == "fp8":
                return None
            return {"tf32": "fp32", "fp16": "bf16", "fp16_weights": "bf16_weights"}.get(str(value), value)
        return "bf16_weights" if value in WEIGHTS else "fp32"

    def observe(self, ran: Ran) -> Seen:
        import torch

        return {
            "compute_dtype": compute_dtype(*ran.output),
            "weights_dtype": dtype_name(main_weight(ran.model)),
            "trained_dtype": trained_dtype(ran.model),
            "float8_linears": sum(type(module).__name__ == "Float8Linear" for module in ran.model.modules()),
            "loss_scaled": getattr(ran.accelerator, "scaler", None) is not None,
            "tf32": torch.backends.cuda.matmul.fp32_precision == "tf32" if ran.on_cuda else None,
            "engine": ran.engine,
        }

    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        wanted = computes(value, facts)
        computed, tf32, float8 = seen.get("compute_dtype"), seen.get("tf32"), seen.get("float8_linears", 0)
        if computed is None and facts.model.plain_module and value == "fp32":
            computed = wanted  # it multiplies outside of any layer; that is what it does by itself
        if beside_quantized(facts):  # whose products compute in what it has asked for
            computed = wanted
        if computed not in {wanted, "int8"}:  # 8-bit weights are multiplied as integers
            return f"a linear layer computed in {computed}, not {wanted}"
        if why_not := self._other_weights(value, seen, facts):
            return why_not
        # autocast leaves hardly any float32 product, and bfloat16 weights none: others may have switched the flag then
        judged = value in {"fp32", "tf32"} and "tf32" in facts.hardware.precisions and tf32 is not None
        if judged and tf32 != (value == "tf32"):
            on = "TF32 is on (by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, if that is set)"
            return on if tf32 else "TF32 is off"
        if (float8 > 0) != (value == "fp8"):
            return f"{float8} linear layers multiply in float8"
        if "fp16" in {value, own_autocast(value, facts)} and seen.get("loss_scaled") is False:
            return "the loss is not scaled"
        return None

    def _other_weights(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        """How the weights are not as the value has them, in words."""
        wanted = COMPUTES[str(value)]
        found, kept = seen.get("weights_dtype"), WEIGHTS.get(str(value), "float32")
        if seen.get("engine") == "DEEPSPEED":  # keeps the float32 copy itself, and computes with 16-bit weights
            kept = wanted
        trained = seen.get("trained_dtype")
        if found == kept:
            lossy = value == "bf16_weights" and has_own_adapter(facts) and trained not in {None, "float32"}
            return f"the script's adapter is {trained} under it, too, which loses small updates" if lossy else None
        if found != wanted or not in_a_loop(facts):  # which may cast them itself, as diffusers' scripts do
            return f"the weights are {found}, not {kept}"
        if trained == "float32" or value == self.own(facts):
            return None
        lost = f"under it the script casts what it trains to {trained}, which loses small updates"
        return f"{lost}: it is tried where the script asks for {value} itself"

    def changes(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> str | None:
        script = facts.workload.script
        asked = value == "bf16_weights" and script is not None and script.own.get("bf16")
        lost = " The script's own autocast is off." if asked and autocast(value, plan, facts) == "no" else ""
        cast = " but where the script casts them itself" if in_a_loop(facts) else ""
        under = ", under bfloat16 autocast" * (autocast(value, plan, facts) == "bf16")
        lossy = (
            f"Frozen weights are bfloat16{under}; the adapter's stay float32."
            if trains_an_adapter(plan, facts)
            else "Weights, gradients and optimizer state are bfloat16 without a float32 copy: updates smaller than the "
            "last place of a weight are lost. An adapter's weights stay float32, and lose none."
        )
        said = {
            "fp32": None,
            "tf32": "Matrix products run in TF32: float32 range, 10 bits of mantissa.",
            "bf16": "Forward and backward run under bfloat16 autocast; weights and optimizer state stay "
            f"float32{cast}.",
            "fp16": "Forward and backward run under float16 autocast with dynamic loss scaling; "
            "steps whose gradients overflow are skipped.",
            "bf16_weights": lossy,
            "fp16_weights": "Frozen weights are float16, as the script loads them; what it trains stays float32.",
            "fp8": "Linear layers multiply in float8 with one scale a tensor, the rest runs under bfloat16 autocast; "
            "weights and optimizer state stay float32.",
        }[str(value)]
        engine = _IN_ENGINE.get(engine_of(plan.get("parallel", "none")), "") if value in {"bf16", "fp16"} else ""
        return said and said + engine + lost

    def prior(self, value: Value, facts: Facts) -> Prior:
        """Tensor cores and AMX multiply 16-bit numbers several times faster; what is not a product gains less."""
        return {
            "fp32": Prior(time=(0.0, 0.01), memory=(0.0, 0.01)),
            "tf32": Prior(time=(-0.7, 0.35), memory=(0.0, 0.02)),
            "bf16": Prior(time=(-0.8, 0.6), memory=(-0.1, 0.2)),
            "fp16": Prior(time=(-0.75, 0.6), memory=(-0.1, 0.2)),
            "bf16_weights": Prior(time=(-0.9, 0.6), memory=(-0.6, 0.2)),
            "fp16_weights": Prior(time=(-0.9, 0.6), memory=(-0.6, 0.2)),
            "fp8": Prior(time=(-0.8, 0.8), memory=(-0.1, 0.2)),
        }[str(value)]


def _as_loaded(facts: Facts) -> tuple[Choice, ...]:
    """Float16 weights, where a script loads them: nothing else asks for them."""
    if loaded_as(facts) != "float16":
        return ()
    return (Choice("fp16_weights", Kind.METHOD, "offered", "the script loads them, and trains an adapter in float32"),)
