"""Optimizer: which one steps, and in how many bytes per parameter it keeps its state.

AdamW and its cheaper arithmetics:

- ``adamw``: AdamW, 8 bytes of state a parameter. Fused where PyTorch has a fused kernel (CUDA, and the CPU): one
  pass over the state, and no temporaries of the size of all parameters as the for-each kernel makes them.
- ``adamw_8bit``: bitsandbytes' AdamW with block-wise 8-bit state, 2 bytes a parameter. A Trainer keeps the state
  of embeddings in 32 bit, and so does this. Dettmers et al., "8-bit Optimizers via Block-wise Quantization"
  (arXiv 2110.02861).
- ``paged_adamw``, ``paged_adamw_8bit``: in CUDA managed memory, which moves to the host when the device is full.
- ``adamw_torchao_8bit``, ``adamw_torchao_4bit``: torchao's AdamW, whose step is compiled for each shape of a
  parameter: the first one takes seconds to minutes. 4 bits: Li et al. (arXiv 2309.01507).
- ``..._stochastic``: the same, with bfloat16 weights rounded up or down by chance in proportion to what is cut off,
  so that small updates are kept on average. Only beside ``precision=bf16_weights``.

Other families (class ``method``):

- ``adafactor``: transformers' own (not PyTorch's), without momentum, ``scale_parameter`` and ``relative_step`` off,
  as a Trainer builds it: its second moment is factored into rows and columns. Shazeer and Stern (arXiv 1804.04235).
- ``sgd``: SGD with momentum 0.9, 4 bytes a parameter. A Trainer's plain ``sgd`` has no momentum: it is asked for
  by ``optim_args``.
- ``lion``, ``lion_8bit``, ``paged_lion_8bit``: the sign of a momentum, 4 bytes or 1. Chen et al. (arXiv 2302.06675).
- ``ademamix``, ``ademamix_8bit``, ``paged_ademamix_8bit``: a second, slow momentum, 12 bytes or 3. Pagliardini et al.
  (arXiv 2409.03137).
- ``galore_adamw``, ``galore_adamw_8bit``, ``galore_adafactor``: state of gradients projected to rank 128 by singular
  vectors, found anew every 200 steps. Zhao et al. (arXiv 2403.03507). ``apollo_adamw``: only the scale of an update
  comes from such state, and the projection is random. Zhu et al. (arXiv 2412.05270).
- ``lomo``, ``adalomo``: each parameter is updated while the backward pass runs, so that no gradients are kept; no
  accumulation, no clipping by norm. Lv et al. (arXiv 2306.09782, 2310.10195).
- ``schedule_free_adamw``, ``schedule_free_radam``: averaged weights in a schedule's place. Defazio et al.
  (arXiv 2405.15682).
- ``stable_adamw``: AdamW with Adafactor's update clipping; with bfloat16 weights it sums by Kahan, which keeps small
  updates at 2 bytes a parameter more. Wortsman et al. (arXiv 2304.13013).

Saves: state, which is half of the 16 bytes a parameter that plain AdamW training holds. Costs: quantizing, projecting
and paging take time in each step; another family costs a new search for its learning rate. Sources: the papers above;
``transformers.trainer_optimizer`` for what each argument builds.

AdamW is the reference (class ``exact``), its state in fewer bits is ``numeric``, another family of optimizers is
``method``: it wants another learning rate, which autofit does not tune.

Not covered: learning rates and schedules; the layer-wise variants of GaLore and APOLLO; what a new projection costs
every 200 steps, which a short trial sees in its warm-up only; how much LOMO needs before it is tried, since a trace
keeps gradients; ``grokadamw``, which takes its state to the host and back in every step. What torchao's compiled step
makes for itself is read off the code that is compiled for a CPU.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autofit.contract.emission import Emission
from autofit.contract.layout import engine_of, layout_of
from autofit.contract.observation import dtype_name
from autofit.contract.technique import Choice, Held, Part, Prior, Technique, replacing

from .rows import MOMENTUM, ROWS, Row
from .tracing import replacements

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    import torch

    from autofit.contract.facts import Facts
    from autofit.contract.observation import Ran, Seen
    from autofit.contract.plan import Value
    from autofit.contract.recipe import Recipe
    from autofit.contract.trace import TraceRecorder


_OF_TRAINER = {"adamw_torch", "adamw_torch_fused"}
"""What a Trainer steps with where nobody asks for another: a script has not chosen it."""


_EVERY_LAYER = "all-linear"
_SHARDED = {"adamw", "sgd"}
"""Optimizers whose kernels take a sharded tensor."""


class Optimizer(Technique):
    """Which optimizer steps."""

    name = "optimizer"
    baseline = "adamw"
    # before 0.50 the optimizers of bitsandbytes don't run without a GPU, and so can't be traced
    packages = {**{name: "" for row in ROWS.values() for name in row.packages}, "bitsandbytes": "0.50"}

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        made = []
        for value, row in ROWS.items():
            why_not = _why_not(row, facts)
            made.append(Choice(value, row.kind, "withheld" if why_not else row.status, why_not or row.reason))
        return tuple(made)

    def conflict(self, value: Value, others: Mapping[str, Value], facts: Facts) -> str | None:
        row = ROWS[str(value)]
        if row.stochastic and others["precision"] != "bf16_weights":
            return f"{value} rounds bfloat16 weights, and {others['precision']} has none"
        if row.in_backward and others["accumulation"] != 1:
            return f"{value} steps in every backward pass, so that gradients can't be accumulated"
        if row.in_backward and others["precision"] == "fp16":
            return f"{value} steps before the gradients of a scaled loss are scaled back"
        if (row.in_backward or row.low_rank) and others.get("adapter", "none") != "none":
            return f"{value} saves on the gradients of all weights, and an adapter leaves few"
        return _where_split(str(value), others.get("parallel", "none"), facts) or self.not_tried_split(
            value, others, _SHARDED
        )

    def apply(self, value: Value, recipe: Recipe) -> None:
        recipe.state_bits = ROWS[str(value)].bits
        if ROWS[str(value)].modes and recipe.facts.workload.launch_path == "loop":
            recipe.optimizer_wraps.append(_in_training)

    def held(self, facts: Facts) -> Held | None:
        script = facts.workload.script
        if script is None:
            return None
        if script.own_optimizer:
            return Held(self.baseline, "the script makes its own optimizer", by_script=True)
        asked, arguments = script.own.get("optim"), script.own.get("optim_args")
        if asked in _OF_TRAINER:
            return None
        for value, row in ROWS.items():
            same_layers = not row.low_rank or script.own.get("optim_target_modules") == _EVERY_LAYER
            if (row.optim, row.args) == (asked, arguments) and same_layers and _why_not(row, facts) is None:
                return Held(value, f"the script asks for {asked}")
        given = f" ({arguments})" if arguments else ""
        return Held(self.baseline, f"the script asks for {asked}{given}", by_script=True)

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        row = ROWS[str(value)]
        lines: tuple[str, ...] = ()
        if row.modes and facts.workload.launch_path == "loop":
            lines = ("setup.optimizer(model) stands in training mode: optimizer.eval() before evaluating or saving",)
        return Emission(
            training_args={
                "optim": row.optim,
                "optim_args": row.args,
                "optim_target_modules": _EVERY_LAYER if row.low_rank else None,
            },
            script=lines,
        )

    def untraced_bytes(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> int:
        """What Inductor holds while it times the kernels of torchao's step, see :mod:`autofit.strategies.compile`."""
        return facts.hardware.l2_bytes if "torchao" in ROWS[str(value)].packages else 0

    def traced_as(self, value: Value, part: Part) -> Value | None:
        if ROWS[str(value)].in_backward:
            return None  # parts of a step are traced one after the other
        return value if part == "optimizer" else self.baseline

    def stand_in(self, value: Value, facts: Facts, recorder: TraceRecorder) -> AbstractContextManager[None]:
        on_cuda = facts.hardware.device == "cuda"
        return replacing(replacements(ROWS[str(value)], recorder, on_cuda=on_cuda))

    def observe(self, ran: Ran) -> Seen:
        real, kind = ran.optimizer, type(ran.optimizer)
        group = real.param_groups[0] if getattr(real, "param_groups", None) else {}
        rounded = getattr(real, "bf16_stochastic_round", None)  # transformers reads a number off its argument
        projected = [one for one in getattr(real, "param_groups", ()) if "rank" in one]
        # torchao's state says what it stands for
        dtypes = {dtype_name(getattr(tensor, "codes", tensor)) for tensor in ran.state_tensors()}
        return {
            "class": f"{kind.__module__}.{kind.__qualname__}",
            "engine": ran.engine,
            "fused": group.get("fused"),
            "momentum": group.get("momentum"),
            "paged": getattr(real, "is_paged", None),
            "projected": sum(len(one["params"]) for one in projected),
            "stochastic": None if rounded is None else bool(rounded),
            "loss_scaled": getattr(ran.accelerator, "scaler", None) is not None,
            "state_dtypes": sorted(dtypes),
        }

    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        if seen.get("engine") == "DEEPSPEED":
            return None  # DeepSpeed steps with an optimizer of its own, which offload checks
        row = ROWS[str(value)]
        if seen.get("class") != row.steps:
            return f"{seen.get('class')} stepped, not {row.steps}"
        dtypes, paged, stochastic = seen.get("state_dtypes", []), seen.get("paged"), seen.get("stochastic")
        fewer = "uint8" in dtypes
        failures = {
            "no step was taken: the gradients of the scaled loss overflowed in each": (
                seen.get("loss_scaled") is True and row.state_bytes > 0 and not dtypes
            ),
            "AdamW stepped without its fused kernel": value == "adamw" and seen.get("fused") is False,
            f"no {row.bits}-bit state: every parameter is too small for it (state is {', '.join(dtypes)})": (
                row.bits < 32 and not fewer
            ),
            f"the state is kept in fewer bits ({', '.join(dtypes)})": row.bits == 32 and fewer,
            f"SGD stepped with momentum {seen.get('momentum')}, not {MOMENTUM}": (
                value == "sgd" and seen.get("momentum") != MOMENTUM
            ),
            f"the state is {'' if paged else 'not '}paged": (paged is not None and paged != row.paged),
            "no gradient was projected: the model has no linear layers of their own": (
                row.low_rank and not seen.get("projected")
            ),
            f"weights were {'' if stochastic else 'not '}rounded by chance": (
                stochastic is not None and stochastic != row.stochastic
            ),
        }
        return next((words for words, failed in failures.items() if failed), None)

    def spends_host(self, value: Value) -> bool:
        return ROWS[str(value)].paged

    def changes(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> str | None:
        held = self.held(facts)
        return None if held is not None and held.value == value else ROWS[str(value)].changes

    def prior(self, value: Value, facts: Facts) -> Prior:
        """State is what an optimizer saves: out of 16 bytes a parameter in all, before activations."""
        saved = ROWS["adamw"].state_bytes - ROWS[str(value)].state_bytes
        memory = math.log(1 - saved / 16) * 0.7
        if value == "adamw":
            return Prior(time=(0.0, 0.01), memory=(0.0, 0.01))
        slower = 0.05 if facts.hardware.device == "cuda" else 0.15
        return Prior(time=(slower, 0.15), memory=(memory, 0.15))


def _where_split(value: str, parallel: Value, facts: Facts) -> str | None:
    """Why an optimizer can't step on weights that several processes have a part of each."""
    engine = engine_of(parallel)
    if engine in {"fsdp", "deepspeed"} and value not in (_SHARDED if engine == "fsdp" else {"adamw"}):
        return f"{value} was not tried on weights that {parallel} has split"
    layout = layout_of(parallel, facts.workload.processes)
    if value == "sgd" and engine == "tensor" and (layout is None or layout.shard == 1):
        # the gradient of a table whose rows are split is whole, and the momentum begins as its copy
        return f"sgd keeps the momentum of a whole vocabulary in each process of {parallel}: no trace has it"
    return None


def _why_not(row: Row, facts: Facts) -> str | None:
    """Why an optimizer can't be had here, or ``None``."""
    if {"galore-torch", "bitsandbytes"} <= set(row.packages):
        return "galore-torch gives bitsandbytes arguments by their places, which are others since 0.50"
    lacking = Optimizer.lacks(facts, *row.packages)
    if lacking is not None:
        return lacking
    reasons = {
        row.needs_cuda: facts.hardware.device == "cpu",
        f"{facts.hardware.name} would emulate the bfloat16 weights that it rounds": (
            row.stochastic and "bf16" not in facts.hardware.precisions
        ),
        "a plain loop does not hand it the learning rate: its accelerator.backward(loss) takes none": (
            row.in_backward and facts.workload.launch_path == "loop"
        ),
        f"the layers of {facts.model.model_type} are Conv1D, whose gradients are not projected": (
            row.low_rank and facts.model.conv1d
        ),
        "it steps before gradients are summed over the processes": row.in_backward and facts.workload.processes > 1,
    }
    return next((words for words, holds in reasons.items() if words and holds), None)


def _in_training(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A Trainer tells it before each micro-step; a plain loop does not."""
    optimizer.train()  # type: ignore[attr-defined]
    return optimizer
