"""Activation checkpointing: keep each layer's input only, and compute the rest again in the backward pass.

Saves: the activations inside the layers, most of what a long sequence needs. Costs: one more forward pass, about
a third of the step where matrix products rule, less where they do not.

Non-reentrant (``use_reentrant=False``): works with frozen inputs and adapters, and stops the recomputation as
soon as the backward pass has what it needs. Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost"
(arXiv 1604.06174); ``torch.utils.checkpoint``. transformers calls the argument ``activation_checkpointing`` from
5.23 on and ``gradient_checkpointing`` before.

Not covered: every k-th layer; selective recomputation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofit.technique import Choice, Emission, Kind, Part, Prior, Technique

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from autofit.facts import Facts
    from autofit.plan import Evidence, Value
    from autofit.recipe import Recipe

NEW_NAME_SINCE = (5, 23)


class Checkpointing(Technique):
    """Recompute the activations inside the layers."""

    name = "checkpointing"
    plain = "off"

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        model = facts.model
        if model.supports_checkpointing:
            full = Choice("full", Kind.EXACT, "offered", f"every one of the {model.layers} layers is recomputed")
        else:
            full = Choice("full", Kind.EXACT, "withheld", f"{model.architecture} does not support it")
        return (Choice("off", Kind.EXACT, "offered", "keep every activation"), full)

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        installed = tuple(int(part) for part in facts.packages.get("transformers", "0.0").split(".")[:2])
        name = "activation_checkpointing" if installed >= NEW_NAME_SINCE else "gradient_checkpointing"
        return Emission(training_args={name: value == "full", f"{name}_kwargs": {"use_reentrant": False}})

    def apply(self, value: Value, recipe: Recipe) -> None:
        if value == "full" and recipe.facts.workload.launch_path == "loop":
            recipe.model_wraps.append(_enable)

    def traced_as(self, value: Value, part: Part) -> Value | None:
        return value if part == "micro_steps" else self.plain

    def in_effect(self, value: Value, evidence: Evidence, facts: Facts) -> str | None:
        if evidence.layer_forwards is None:
            return None
        if (evidence.layer_forwards > 1) != (value == "full"):
            return f"a layer ran forward {evidence.layer_forwards} time(s) in a micro-step"
        return None

    def prior(self, value: Value, facts: Facts) -> Prior:
        """One forward more on top of a forward and a backward that costs two: 4/3 at most."""
        if value == "full":
            return Prior(time=(0.25, 0.08), memory=(-0.5, 0.4))
        return Prior(time=(0.0, 0.01), memory=(0.0, 0.01))


def _enable(model: PreTrainedModel) -> PreTrainedModel:
    """Switch it on by hand, where no Trainer reads the argument."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return model
