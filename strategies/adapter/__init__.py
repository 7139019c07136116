"""Adapter: small matrices beside frozen weights are trained, and nothing else.

- ``lora:r=16``: two matrices of rank 16 beside every linear layer, applied as ``y + scaling * B(A(x))``. Hu et al.
  (arXiv 2106.09685).
- ``rslora:r=16``: the same, scaled by ``alpha / sqrt(r)`` instead of ``alpha / r``. Kalajdzievski (arXiv 2312.03732).
- ``dora:r=16``: LoRA of the weights' direction, and a trained magnitude. Liu et al. (arXiv 2402.09353).
- ``ia3``: one trained factor for each output of a linear layer. Liu et al. (arXiv 2205.05638).

Any rank can be asked for, and more after colons: ``lora:r=8:alpha=8:dropout=0.05:targets=q_proj+v_proj``. Alpha is
twice the rank unless given, dropout none, and the targets are all linear layers but the head. A head that is learned
anew (a classifier's) is trained whole beside the adapter (PEFT's ``modules_to_save``).

Saves: gradients and optimizer state of the frozen weights, which are 12 of the 16 bytes a parameter of plain AdamW
training, and the product that makes each weight's gradient. Costs: small products beside each large one, with
activations of their own; another method, that wants a learning rate of its own (about ten times as high), which autofit
does not tune.

PEFT keeps adapters of 16-bit weights in float32 (``autocast_adapter_dtype``), and so does this; the frozen weights
have the dtype that the precision says. Under autocast layers of LoRA that are given one input keep it once, in 16 bits,
where PEFT makes a copy for each. Checkpointing is non-reentrant, so the inputs need no gradients.

On Mixtral and its kin PEFT counts experts and their router as linear layers: the stacked weights of the experts get
adapters too, those of an expert's two first weights as one of twice the rank; neither DoRA nor dropout.

Sources: the papers above; ``peft.get_peft_model``. Not covered: stacked weights of experts that PEFT does not know;
adapters under tensor parallelism; other learning rates for B than for A; merging the adapter into the weights.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from autofit.contract.emission import Emission
from autofit.contract.technique import Choice, Held, Kind, Part, Prior, Technique

from .peft_layers import SHARED, adapt, adapter_on, weights_added
from .wanted import LORA, RANK, Wanted, read, wanted_by

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from autofit.contract.facts import Facts, Model
    from autofit.contract.observation import Ran, Seen
    from autofit.contract.plan import Value
    from autofit.contract.recipe import Recipe

_SAID = {
    f"lora:r={RANK}": f"two matrices of rank {RANK} beside each linear layer are trained",
    f"rslora:r={RANK}": "LoRA with another scale: as fast, and as large",
    f"dora:r={RANK}": "LoRA and a trained magnitude: slower, for the norm of each weight is computed anew",
    "ia3": "a factor for each output is trained: smaller than LoRA, and seldom better",
}
"""What is said of each value that is listed."""
_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""What PEFT calls their stacked weights and their router: ``_MOE_TARGET_MODULE_MAPPING``."""
_TOGETHER = ("gate_proj", "up_proj"), ("w1", "w3")
"""Those that are one weight, so that PEFT takes both or none: ``_MOE_FUSED_TARGETS``."""
_NOT_FUSED = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), False)
"""Axolotl's Triton kernels for LoRA, which it switches on where nothing is said of them (0.19)."""
_AS_FILED = (
    "LLaMA-Factory keeps the frozen weights in the dtype that their files say, mostly bfloat16, not in float32: less "
    "memory, and other rounding"
)
"""LLaMA-Factory 0.9.5: ``load_model``; ``init_adapter`` turns what is trained to float32."""
_IN_FLOAT32 = {"fp32", "tf32"}
_TWICE_CAST = "PEFT turns the inputs of its layers to float32 and back there: more memory and more time"
_EXPERTS_LEFT = "experts may get no adapter: their stacked weights are no linear layers there"


class Adapter(Technique):
    """What is trained beside frozen weights."""

    name = "adapter"
    baseline = "none"
    packages = {"peft": "0.18"}
    ways = {"full": "none", "LoRA": f"lora:r={RANK}"}

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        return tuple(self.choice(value, facts) for value in ("none", *_SAID))

    def choice(self, value: Value, facts: Facts) -> Choice:
        if value == "none":
            return Choice("none", Kind.EXACT, "offered", "every weight is trained")
        wanted = wanted_by(value)
        if reason := self._missing(wanted, facts):
            return Choice(value, Kind.METHOD, "withheld", reason)
        listed = f"{wanted.method}:r={RANK}" if wanted.rank else wanted.method
        said = _SAID[listed] if value == listed else f"{_SAID[listed]} (here with settings of its own)"
        return Choice(value, Kind.METHOD, "offered" if wanted.method == "lora" else "on_request", said)

    def _missing(self, wanted: Wanted, facts: Facts) -> str | None:
        """Why an adapter can't be had."""
        model, products = facts.model, sum(count for _, _, count in facts.model.products)
        if 0 < products <= len(model.new_modules):
            return f"{model.architecture} has no linear layers but those that are learned anew"
        return self.lacks(facts, "peft") or _refused(wanted, model)

    def parse(self, text: str, facts: Facts) -> Value:
        """Any rank, and the other settings after colons; written in one way only.

        Raises:
            InputError: There is no such adapter, or not here.
        """
        wanted = read(text)
        if wanted is None:
            return super().parse(text, facts)
        return self.allow(self.choice(wanted.words(), facts), facts)

    def knows(self, value: object, facts: Facts) -> bool:
        return super().knows(value, facts) or (isinstance(value, str) and read(value) is not None)

    def suggest(self, value: Value, facts: Facts) -> str:
        return f"write it like adapter=lora:r={RANK} or adapter=lora:r=8:alpha=16:targets=q_proj+v_proj"

    def conflict(self, value: Value, others: Mapping[str, Value], facts: Facts) -> str | None:
        return self.not_tried_split(value, others, {"none"})

    def apply(self, value: Value, recipe: Recipe) -> None:
        if value != "none":
            model = recipe.facts.model
            told: dict[str, Any] = {"task": model.task, "whole": model.new_modules, "around": model.read_directly}
            wrap = functools.partial(adapt, wanted_by(value), **told)
            recipe.model_wraps.append(wrap)

    def in_script(self, model: nn.Module) -> str | None:
        """The kind of PEFT's adapter, and its rank; of AdaLoRA's the one that it begins with."""
        configs: dict[str, Any] = getattr(model, "peft_config", None) or {}
        if not configs:
            return None
        one = next(iter(configs.values()))
        rank = getattr(one, "init_r", getattr(one, "r", None))  # AdaLoRA's config has both, and makes nothing of r
        kind = str(getattr(one.peft_type, "value", one.peft_type))
        return f"{kind} r={rank}" if isinstance(rank, int) else kind

    def trains_alone(self, model: nn.Module) -> bool:
        if self.in_script(model) is None:
            return False
        added = {id(one) for one in weights_added(model)}
        trained = [one for one in model.parameters() if one.requires_grad]
        return bool(trained) and all(id(one) in added for one in trained)

    def held(self, facts: Facts) -> Held | None:
        script = facts.workload.script
        if script is None:
            return None
        if script.adapter:
            return Held(self.baseline, f"the script's own adapter is trained: {script.adapter}", by_script=True)
        return Held(
            self.baseline, "put an adapter on in the script, by peft: it knows which heads stay trained", firm=True
        )

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        if value == "none":
            return Emission()
        wanted = wanted_by(value)
        return Emission(
            script=("train an adapter: model = setup.model(...)",),
            elsewhere=_elsewhere(wanted, facts.model),
            otherwise=_otherwise(wanted, plan, facts) if wanted.rank else {},
        )

    def traced_as(self, value: Value, part: Part) -> Value | None:
        if value == "none":
            return value
        wanted = wanted_by(value)
        method = "lora" if wanted.method == "rslora" else wanted.method
        dropout = wanted.dropout if part != "optimizer" else 0.0
        return dataclasses.replace(wanted, method=method, alpha=2 * wanted.rank, dropout=dropout).words()

    def observe(self, ran: Ran) -> Seen:
        """The adapter in words, the names of the modules that it is on, and how many numbers are frozen."""
        adapter, modules = adapter_on(ran.model)
        frozen = sum(one.numel() for one in ran.model.parameters() if not one.requires_grad)
        return {"adapter": adapter, "modules": modules, "frozen_parameters": frozen}

    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        adapter, modules = seen.get("adapter"), seen.get("modules", [])
        if value == "none":
            return f"the model has an adapter: {adapter}" if adapter else None
        wanted = wanted_by(value)
        if adapter != wanted.seen_as():
            return f"the model's adapter is {adapter or 'none'}, not {wanted.seen_as()}"
        if wanted.targets and set(wanted.targets) != set(modules):
            return f"the adapter is on {'+'.join(modules)}, not on {'+'.join(wanted.targets)}"
        if seen.get("frozen_parameters") == 0:
            return "the weights are not frozen: every parameter is trained"
        return None

    def changes(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> str | None:
        if value == "none":
            return None
        wanted = wanted_by(value)
        where = f"on {', '.join(wanted.targets)}" if wanted.targets else "on every linear layer"
        if (around := _passed_by(facts.model)) and not wanted.targets:
            where += f" but {', '.join(around)} (the model reads their weights itself)"
        what = f"of rank {wanted.rank} {where}" if wanted.rank else where
        method, heads = LORA.get(wanted.method, "(IA)3 factors"), facts.model.new_modules
        beside = f" and {', '.join(heads)}, whole," if heads else ""
        trained = f"Only an adapter{beside} {'are' if heads else 'is'} trained, {method} {what}"
        stacked = facts.model.has_experts and not facts.model.lora_on_experts and not wanted.targets
        experts = " Stacked weights of experts are no linear layers, and get none." if stacked else ""
        return f"{trained}; all other weights are frozen: tune the learning rate anew.{experts}"

    def prior(self, value: Value, facts: Facts) -> Prior:
        """A third of the products makes the weights' gradients; adapters add small ones that use a device badly."""
        if value == "none":
            return Prior(time=(0.0, 0.01), memory=(0.0, 0.01))
        slow = 0.3 if str(value).startswith("dora") else 0.0
        return Prior(time=(-0.1 + slow, 0.15), memory=(-0.9, 0.4))


def _elsewhere(wanted: Wanted, model: Model) -> dict[str, dict[str, Any]]:
    """The adapter in the words of other projects; (IA)3 has none there."""
    if not wanted.rank:
        return {}
    flags = {"rslora": "use_rslora", "dora": "use_dora"}
    peft = {
        "r": wanted.rank,
        "lora_alpha": wanted.alpha,
        "lora_dropout": wanted.dropout,
        "target_modules": list(wanted.targets) or "all-linear",
        **({flags[wanted.method]: True} if wanted.method in flags else {}),
        **({"exclude_modules": "|".join(model.read_directly)} if model.read_directly else {}),
    }
    where = {"lora_target_modules": list(wanted.targets)} if wanted.targets else {"lora_target_linear": True}
    common = {"lora_alpha": wanted.alpha, "lora_dropout": wanted.dropout}
    axolotl = {"rslora": {"peft_use_rslora": True}, "dora": {"peft_use_dora": True}}.get(wanted.method, {})
    factory = {flags[wanted.method]: True} if wanted.method in flags else {}
    return {
        "sft": {"peft_config": peft},
        "axolotl": {"adapter": "lora", "lora_r": wanted.rank, **common, **where, **axolotl, **_NOT_FUSED},
        "llamafactory": {
            "finetuning_type": "lora",
            "lora_rank": wanted.rank,
            **common,
            "lora_target": ",".join(wanted.targets) or "all",
            **factory,
        },
    }


def _otherwise(wanted: Wanted, plan: Mapping[str, Value], facts: Facts) -> dict[str, str]:
    """What other projects do otherwise, in words."""
    experts = [_EXPERTS_LEFT] if facts.model.lora_on_experts and not wanted.targets else []
    around = [] if wanted.targets else _passed_by(facts.model)
    passed = [f"{' and '.join(around)} get an adapter, too, and do not train it"] if around else []
    in_float32 = plan.get("quantization", "none") == "none" and plan.get("precision") != "bf16_weights"
    plain = plan.get("quantization", "none") == "none" and plan.get("precision") not in _IN_FLOAT32
    cast = [_TWICE_CAST] if plain and wanted.method in SHARED else []
    said = {
        "sft": [f"unless setup.model puts it on, {one}" for one in cast],
        "axolotl": [*cast, *experts, *passed],
        "llamafactory": [*([_AS_FILED] if in_float32 else []), *cast, *experts, *passed],
    }
    return {name: "; ".join(words) for name, words in said.items() if words}


def _passed_by(model: Model) -> list[str]:
    """The names of the linear layers that a model passes by, and reads the weights of."""
    return sorted({path.rpartition(".")[2] for path in model.read_directly})


def _refused(wanted: Wanted, model: Model) -> str | None:
    """Why PEFT does not put the adapter on its targets in a model of this kind."""
    kind, targets = model.model_type, set(wanted.targets)
    if around := sorted(targets.intersection(_passed_by(model))):
        return f"{kind} reads the weights of its {' and '.join(around)} itself: an adapter there is not trained"
    if wanted.method == "ia3":
        return None
    halves = next((pair for pair in _TOGETHER if len(targets & {*pair}) == 1), None)
    if model.lora_on_experts and halves:
        return f"{' and '.join(halves)} of {kind}'s experts are one weight: PEFT puts an adapter on both or none"
    what = "DoRA" if wanted.method == "dora" else "LoRA with dropout" if wanted.dropout else None
    if what and model.lora_on_experts and (not targets or targets & _EXPERTS):
        others = f"adapter={dataclasses.replace(wanted, targets=('q_proj', 'v_proj')).words()}"
        return f"PEFT puts no {what} on the experts of {kind}: ask for other layers, as {others}"
    return None
