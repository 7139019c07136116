"""Gradient accumulation: micro-batches whose gradients are added up before one optimizer step.

Saves: it lets a small micro-batch keep the global batch, and with it the training. Costs: gradients live
through the whole step, and each micro-batch adds to them.

Choices are the exact divisors of a process's share of the global batch, and only the one that completes the
plan's micro-batch is ever planned: the global batch is a promise. A Trainer averages the loss over the tokens of
the whole accumulated batch (``num_items_in_batch``); a plain loop that averages each micro-batch does the same
where all rows are equally long. Of many models the loss does not look at that number, and the Trainer takes it for
divided all the same: the gradients of ``a`` micro-batches are ``a`` times as large. Such a model is told
``accepts_loss_kwargs = False``, and the Trainer divides.

Source: ``gradient_accumulation_steps`` of Trainer; a plain Accelerate loop has to pass it itself, since the
Accelerate YAML carries it on the DeepSpeed path only.
Not covered: rows of different lengths in a plain loop, where a mean of means weighs short rows more.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autofit.contract.emission import Emission
from autofit.contract.layout import data_parallel, data_parallel_sizes
from autofit.contract.technique import Choice, Held, Kind, Part, Technique, divisors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from autofit.contract.facts import Facts
    from autofit.contract.observation import Ran, Seen
    from autofit.contract.plan import Value
    from autofit.contract.recipe import Recipe


def _made(steps: int, share: int) -> str:
    return f"{steps} x {share // steps} rows make the {share} of a process"


def _steps(steps: int) -> str:
    """Where the rows of a process depend on what else the plan has."""
    return f"{steps} micro-batch{'es' * (steps > 1)} to an optimizer step"


_BY_MICRO_BATCH = (
    "Axolotl weighs each micro-batch the same, a Trainer each token: other gradients where micro-batches differ in "
    "trained tokens"
)
"""Axolotl 0.19: ``AxolotlTrainer.__init__`` turns ``model_accepts_loss_kwargs`` off."""


class Accumulation(Technique):
    """Micro-batches to one optimizer step."""

    name = "accumulation"
    baseline = 1

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        shares = [facts.workload.global_batch // ranks for ranks in data_parallel_sizes(facts)]
        found = {steps: share for share in shares for steps in divisors(share)}  # of the largest share last
        why = None if facts.workload.script else facts.depends_on_rows  # a script's own split is the training
        return tuple(
            Choice(steps, Kind.EXACT, "offered", _made(steps, share) if len(shares) == 1 else _steps(steps))
            if why is None or steps == 1
            else Choice(steps, Kind.METHOD, "offered", f"{steps} micro-batches are another training than one: {why}")
            for steps, share in sorted(found.items())
        )

    def suggest(self, value: Value, facts: Facts) -> str:
        known = ", ".join(str(choice.value) for choice in self.choices(facts))
        return f"the global batch of {facts.workload.global_batch} can be split into {known or 'nothing'}"

    def conflict(self, value: Value, others: Mapping[str, Value], facts: Facts) -> str | None:
        work = facts.workload
        rows, ranks = int(others["micro_batch"]), data_parallel(others, work)
        made = rows * int(value) * ranks
        if made == work.global_batch:
            return None
        words = f"micro_batch {rows} x accumulation {value} x {ranks} process(es) is {made}"
        step = rows * ranks
        if work.global_batch % step == 0:
            return f"{words}, not the global batch of {work.global_batch}"
        near = dict.fromkeys((work.global_batch // step * step, math.ceil(work.global_batch / step) * step))
        possible = " or ".join(str(batch) for batch in near if batch)
        return f"{words}, and no accumulation makes the global batch of {work.global_batch}; {possible} can be made"

    def apply(self, value: Value, recipe: Recipe) -> None:
        recipe.accumulation = int(value)
        if _adds_up(value, recipe.facts):
            recipe.model_wraps.append(divided)

    def held(self, facts: Facts) -> Held | None:
        script = facts.workload.script
        if script is None or script.own_split is None:
            return None
        return Held(script.accumulation, script.own_split, firm=True)

    def own(self, facts: Facts) -> Value:
        script = facts.workload.script
        return self.baseline_for(facts) if script is None else script.accumulation

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        line = "have the Trainer divide the loss over the accumulation: model = setup.model(...)"
        return Emission(
            training_args={"gradient_accumulation_steps": int(value)},
            decides=("accelerator_config.gradient_accumulation_kwargs.num_steps",),
            script=(line,) if _adds_up(value, facts) else (),
            otherwise={"axolotl": _BY_MICRO_BATCH} if int(value) > 1 else {},
        )

    def traced_as(self, value: Value, part: Part) -> Value | None:
        return self.baseline  # a trace is continued to any number of rows, and adds to gradients in its second half

    def observe(self, ran: Ran) -> Seen:
        told = getattr(ran.model, "accepts_loss_kwargs", None) is False
        return {"micro_steps": ran.accumulation, **({"divided": True} if told else {})}

    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        counted = seen.get("micro_steps")
        if counted is not None and counted != value:
            return f"{counted} micro-batches went into an optimizer step, not {value}"
        if _adds_up(value, facts) and counted is not None and not seen.get("divided"):
            return f"nobody divides the loss of {facts.model.architecture} by {value}: load it by setup.model(...)"
        return None


def divided(model: PreTrainedModel) -> PreTrainedModel:
    """The model, of which a Trainer knows that it has to divide the loss itself."""
    model.accepts_loss_kwargs = False  # type: ignore[assignment]
    return model


def _adds_up(value: Value, facts: Facts) -> bool:
    """Whether the gradients of an accumulation would add up; a script's own training is left as it is."""
    trainer = facts.workload.launch_path == "trainer" and facts.workload.script is None
    return int(value) > 1 and trainer and facts.model.undivided
