"""Send gradients in each micro-step: under FSDP an accumulation otherwise keeps them whole on every process.

Accelerate defers the exchange of gradients to the last micro-step. Under FSDP that saves a reduce-scatter in each of
the others, and leaves a gradient of every weight unsplit on every process meanwhile: of a model of 14 million weights
over 8 processes 63 MiB instead of 14 after the first micro-step, by the trace.

- ``off``: as Accelerate does by itself.
- ``on``: each micro-step adds to the process's own share. Costs a reduce-scatter of all gradients in each micro-step.

Where parameters wait on the host (``offload=parameters``), gradients go there when they are sent: ``off`` keeps all of
them on the device between micro-steps, also of one process.

Class ``exact``: the same sum in another order. Under DDP every process keeps whole gradients anyway, and DeepSpeed's
stage says when they are split.

Sources: ``accelerate.Accelerator.accumulate``, ``transformers.Trainer`` (5.23) and Accelerate's guide of gradient
synchronization. Carried by ``accelerator_config`` of ``TrainingArguments``; in a plain loop by the
``GradientAccumulationPlugin`` of :meth:`autofit.contract.recipe.Recipe.accelerator`. The Accelerate YAML has no field.
Not covered: HSDP's cheaper way, to add up within a copy in each micro-step and over the copies in the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autofit.contract.emission import Emission
from autofit.contract.layout import PARALLEL, engine_of
from autofit.contract.technique import Choice, Held, Kind, Part, Prior, Technique

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from autofit.contract.facts import Facts
    from autofit.contract.observation import Hooks, Ran, Read, Seen
    from autofit.contract.plan import Value
    from autofit.contract.recipe import Recipe


class SyncEachBatch(Technique):
    """Whether gradients are sent in each micro-step."""

    name = "sync_each_batch"
    baseline = "off"

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        off = Choice("off", Kind.EXACT, "offered", "gradients are sent in the last micro-step")
        if facts.hardware.device == "cpu":
            return off, Choice("on", Kind.EXACT, "withheld", "it is FSDP's, which Accelerate leaves out on a CPU")
        return off, Choice("on", Kind.EXACT, "offered", "no whole gradients between micro-steps, under FSDP")

    def conflict(self, value: Value, others: Mapping[str, Value], facts: Facts) -> str | None:
        if value == "off":
            return None
        if engine_of(others[PARALLEL]) != "fsdp":
            return "FSDP alone splits gradients when they are sent, or takes them to the host"
        if others["accumulation"] == 1:
            return "a single micro-step is the last one"
        return None

    def word(self, value: Value) -> str | None:
        return self.name if value == "on" else None

    def traced_as(self, value: Value, part: Part) -> Value | None:
        return value if part == "micro_steps" else self.baseline  # gradients have been sent by then, either way

    def alone_as(self, value: Value) -> Value:
        return "on"  # the only micro-step sends its gradients, either way

    def apply(self, value: Value, recipe: Recipe) -> None:
        recipe.sync_each_batch = value == "on"

    def held(self, facts: Facts) -> Held | None:
        if facts.workload.script is None or facts.workload.processes == 1:
            return None
        return Held(self.baseline, "when a script sends its gradients is left to it", firm=True)

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        work = facts.workload
        if work.script is not None or (work.processes == 1 and engine_of(plan[PARALLEL]) != "fsdp"):
            return Emission()
        sent = {"sync_each_batch": value == "on"}
        return Emission(training_args={"accelerator_config": {"gradient_accumulation_kwargs": sent}})

    def converted(self, plan: Mapping[str, Value]) -> Mapping[str, Value]:
        return plan if self.name in plan else {**plan, self.name: self.baseline}

    def watch(self, model: nn.Module, recipe: Recipe, hooks: Hooks) -> Read:
        """Ask FSDP's units, before each forward pass, whether this micro-step sends its gradients."""
        counted = {"micro_steps": 0, "deferred": 0}

        def count(module: nn.Module, _args: Any, _kwargs: Any) -> None:
            groups = _groups(module)
            if groups:
                counted["micro_steps"] += 1
                counted["deferred"] += not all(group.reduce_grads for group in groups)

        if engine_of(recipe.plan[PARALLEL]) == "fsdp" and recipe.accumulation > 1:
            hooks.before(model, count)
        return lambda _: dict(counted)

    def observe(self, ran: Ran) -> Seen:
        return {}

    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        steps, deferred = seen.get("micro_steps", 0), seen.get("deferred", 0)
        if value == "on" and not steps:
            return "no micro-step of FSDP was seen"
        if value == "on" and deferred:
            return f"{deferred} of {steps} micro-steps kept their gradients whole"
        if value == "off" and steps and not deferred:
            return f"each of {steps} micro-steps sent its gradients"
        return None

    def prior(self, value: Value, facts: Facts) -> Prior:
        """The trace sees both sides; what of the exchange hides is not known beforehand."""
        return Prior(time=(0.05, 0.1), memory=(-0.2, 0.2)) if value == "on" else Prior(time=(0, 0.01), memory=(0, 0.01))


def _groups(model: nn.Module) -> list[Any]:
    """Of each unit of FSDP2, where there are any, the group of its parameters."""
    units: list[Any] = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    found = (unit._get_fsdp_state()._fsdp_param_group for unit in units)  # noqa: SLF001 - there is no other way
    return [group for group in found if group is not None]
