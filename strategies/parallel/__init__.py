"""Parallel: how several processes train one model, each on a device of its own.

- ``none``: one process. Where a launch starts several, each would train for itself, so it is withheld.
- ``ddp``: every process holds the whole model and trains on rows of its own; gradients are averaged while the backward
  pass runs (PyTorch's DistributedDataParallel). Saves nothing; costs a copy of the gradients in buckets, and their
  all-reduce. Li et al. (arXiv 2006.15704).
- ``fsdp``: weights, gradients and optimizer state are split over all processes (PyTorch's fully sharded data parallel,
  version 2); a layer is gathered when it runs, forward and backward. Zhao et al. (arXiv 2304.11277).
- ``fsdp:noreshard``: the same, and a layer that was gathered for the forward pass stays so until the backward pass:
  one gather less, all weights at once.
- ``hsdp:RxS``: R copies of the model, each split over S processes: gathers stay inside S, gradients are averaged
  over R.
- ``tpNxfsdpM``: N processes share the products of each micro-batch, M such groups train on rows of their own:
  :mod:`.tensor`. By ``--fix`` or ``--among``, since no speed of it was measured yet.
- ``cpNxfsdpM``: N processes share the tokens of each row, M such groups train on rows of their own, FSDP2 splits the
  weights over all: :mod:`.context`. By ``--fix`` or ``--among``, too.
- ``zero1``, ``zero2``, ``zero3``: DeepSpeed's, where it is installed: the optimizer's state is split, the gradients too
  (2), the weights too (3). Rajbhandari et al. (arXiv 1910.02054).

One process uses ``fsdp``, ``zero2`` and ``zero3`` to keep weights and state on the host (``offload``).
All of class ``exact``: the global batch stays. What each process saw is checked, since Accelerate leaves out in silence
what it can't do: under the launcher's ``MULTI_GPU`` on a machine without CUDA two processes make two worlds of one,
unless ``cpu=True`` is said in the script, and under its ``FSDP`` a CPU trains as ``ddp``.

Sources: ``accelerate.Accelerator.prepare_model``, ``accelerate/state.py``, ``accelerate/utils/fsdp_utils.py`` (1.15).
Carried by the Accelerate YAML; tensor parallelism by ``setup.model(...)``, too.
A trace runs DeepSpeed's own engine (:mod:`.zero`). Not covered: its settings of buckets.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from autofit.contract.emission import Emission
from autofit.contract.layout import context_ranks, engine_of, layout_of, why_not_context, why_not_split
from autofit.contract.technique import Choice, Kind, Part, Prior, Status, Technique, divisors, replacing

from . import context, tensor, zero
from .emitted import ENGINES, accelerate_keys, differs_elsewhere, settings_elsewhere

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from torch import nn

    from autofit.contract.facts import Facts
    from autofit.contract.observation import Hooks, Ran, Read, Seen
    from autofit.contract.plan import Value
    from autofit.contract.recipe import Recipe
    from autofit.contract.trace import TraceRecorder

_ENGINES = {"MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "NO": "none", "FSDP2": "fsdp", "DEEPSPEED": "deepspeed"}
"""Engines by what Accelerate calls them."""
_BEFORE = {"fsdp2": ("fsdp", "parameters"), "zero2": ("zero2", "optimizer"), "zero3": ("zero3", "parameters")}
"""``parallel`` and ``offload`` of what was a value of ``offload`` alone."""


class Parallel(Technique):
    """How several processes train one model."""

    name = "parallel"
    baseline = "none"
    packages = {"deepspeed": ""}

    def baseline_for(self, facts: Facts) -> Value:
        return "none" if facts.workload.processes == 1 else "ddp"

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        count = facts.workload.processes
        found = _of_one_process() if count == 1 else _of_several(facts)
        lacking = self.lacks(facts, "deepspeed")
        return tuple(
            Choice(value, Kind.EXACT, "withheld" if why_not else _status(value), why_not or reason)
            for value, reason, never in found
            for why_not in [never or _refused(str(value), facts, lacking)]
        )

    def knows(self, value: object, facts: Facts) -> bool:
        """Any layout of FSDP2 for these processes, also one that is not listed."""
        name = str(value)
        hybrid = name.startswith("hsdp") and layout_of(name, facts.workload.processes) is not None
        return hybrid or super().knows(value, facts)

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        script = (tensor.LINE,) if engine_of(value) == "tensor" else ()
        elsewhere: Mapping[str, Mapping[str, Any]] = settings_elsewhere(value, plan, facts)
        if (shared := context_ranks(value)) > 1:
            multiple = 2 * shared
            script, elsewhere = (context.LINE.format(multiple),), {"sft": {"pad_to_multiple_of": multiple}}
        return Emission(
            accelerate=accelerate_keys(value, plan, facts),
            decides=ENGINES,
            script=script,
            elsewhere=elsewhere,
            otherwise=differs_elsewhere(value, plan, facts),
        )

    def apply(self, value: Value, recipe: Recipe) -> None:
        if engine_of(value) == "tensor":
            tensor.apply(value, recipe)

    def converted(self, plan: Mapping[str, Value]) -> Mapping[str, Value]:
        if self.name in plan:
            return plan
        value, offload = _BEFORE.get(str(plan.get("offload")), (self.baseline, plan.get("offload")))
        return {self.name: value, **plan} | ({} if offload is None else {"offload": offload})

    def stand_in(self, value: Value, facts: Facts, recorder: TraceRecorder) -> AbstractContextManager[None]:
        if engine_of(value) == "deepspeed":
            return replacing(zero.on_cpu())
        return replacing(context.on_cpu()) if context_ranks(value) > 1 else contextlib.nullcontext()

    def traced_in(self, plan: Mapping[str, Value]) -> bool:
        return engine_of(plan[self.name]) != "deepspeed" or plan["offload"] == "none"

    def traced_as(self, value: Value, part: Part) -> Value | None:
        # an optimizer has its share of the weights, whenever they are gathered and whoever has the tokens
        alike = value == "fsdp:noreshard" or context_ranks(value) > 1
        return "fsdp" if part == "optimizer" and alike else value

    def watch(self, model: nn.Module, recipe: Recipe, hooks: Hooks) -> Read:
        """Of processes that share each product or each row, see that they train on the same rows."""
        if context_ranks(recipe.plan[self.name]) > 1:
            given = context.watched(model, hooks)
            return lambda ran: {**self.observe(ran), **context.split(ran, given)}
        if engine_of(recipe.plan[self.name]) != "tensor":
            return self.observe
        first = tensor.watched(model, hooks)
        return lambda ran: {**self.observe(ran), **tensor.split(ran.model, first)}

    def observe(self, ran: Ran) -> Seen:
        plugin = getattr(getattr(ran.accelerator, "state", None), "deepspeed_plugin", None)
        return {
            "engine": ran.engine,
            "processes": getattr(ran.accelerator, "num_processes", 1),
            "zero_stage": getattr(plugin, "zero_stage", None),
            **(_sharding(ran.model) if ran.engine == "FSDP2" else {}),
        }

    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        wanted, found = facts.workload.processes, seen.get("processes", 1)
        if found != wanted:
            return f"{found} process(es) trained together, not {wanted}"
        engine, runs = engine_of(value), str(seen.get("engine"))
        if engine == "tensor" and runs == "MULTI_GPU":  # of its own accord Accelerate wraps nothing then
            return tensor.not_split(value, seen, facts)
        if _ENGINES.get(runs) != engine:
            return f"the model runs under {runs}, not {_NAMES[engine]}"
        if engine == "deepspeed" and seen.get("zero_stage") != int(str(value)[-1]):
            return f"DeepSpeed runs stage {seen.get('zero_stage')}"
        if engine == "fsdp":
            parted = context.not_split(value, seen, facts) if context_ranks(value) > 1 else None
            return parted or _not_sharded(str(value), seen, facts)
        return None

    def changes(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> str | None:
        """Of processes that share rows, what a Trainer's evaluation makes of them (tried with transformers 5.23)."""
        shared = context_ranks(value)
        if facts.workload.launch_path != "trainer":
            return None
        if shared > 1:
            return f"A Trainer evaluates {shared} parts of each row: {context.METRICS}."
        layout = layout_of(value, facts.workload.processes)
        if layout is None or layout.tensor == 1:
            return None
        return f"A Trainer hands each row {layout.tensor} times to compute_metrics, but for some of the last batch's."

    def prior(self, value: Value, facts: Facts) -> Prior:
        """Weights that are gathered cost time in proportion to their bytes; how much of it hides is not known."""
        if value == self.baseline_for(facts):
            return Prior(time=(0.0, 0.01), memory=(0.0, 0.01))
        if facts.workload.processes == 1:
            return Prior(time=(0.0, 0.01), memory=(0.0, 0.01))  # `offload` says what it costs
        return {
            "fsdp": Prior(time=(0.2, 0.3), memory=(-0.8, 0.4)),
            "fsdp:noreshard": Prior(time=(0.1, 0.3), memory=(-0.6, 0.4)),
            "zero1": Prior(time=(0.05, 0.3), memory=(-0.3, 0.3)),
            "zero2": Prior(time=(0.1, 0.3), memory=(-0.5, 0.3)),
        }.get(str(value), Prior(time=(0.2, 0.3), memory=(-0.7, 0.4)))


_NAMES = {
    "none": "no engine",
    "ddp": "DistributedDataParallel",
    "fsdp": "fully sharded data parallel",
    "deepspeed": "DeepSpeed",
    "tensor": "tensor parallelism",
}


def _status(value: Value) -> Status:
    """Tensor and context parallelism have to be asked for."""
    return "on_request" if engine_of(value) == "tensor" or context_ranks(value) > 1 else "offered"


def _of_one_process() -> list[tuple[Value, str, str | None]]:
    """Values, what each is, and why it can't be had whatever the machine."""
    nobody = "one process has nobody to share with"
    return [
        ("none", "one process", None),
        ("ddp", "", nobody),
        ("fsdp", "one process, whose weights wait on the host (offload=parameters)", None),
        ("fsdp:noreshard", "", nobody),
        ("zero1", "", nobody),
        ("zero2", "one process, whose optimizer waits on the host (offload=optimizer)", None),
        ("zero3", "one process, whose weights wait on the host (offload=parameters)", None),
    ]


def _of_several(facts: Facts) -> list[tuple[Value, str, str | None]]:
    """Values, what each is, and why it can't be had whatever the machine."""
    count, nodes = facts.workload.processes, facts.workload.nodes
    here = count // nodes
    found: list[tuple[Value, str, str | None]] = [
        ("none", "", f"each of {count} processes would train for itself"),
        ("ddp", f"{count} processes hold the whole model each, and average gradients", None),
        ("fsdp", f"weights, gradients and state are split over {count} processes", None),
        ("fsdp:noreshard", f"split over {count} processes, and gathered once for both passes", None),
    ]
    for copies in _copies(count, nodes):
        shard = count // copies
        found.append((f"hsdp:{copies}x{shard}", f"{copies} copies, each split over {shard} processes", None))
    found += [(f"zero{stage}", f"DeepSpeed's stage {stage} over {count} processes", None) for stage in (1, 2, 3)]
    for ranks in divisors(here)[1:]:
        groups = count // ranks
        shared = f"{ranks} processes share each product, and {groups} such group(s) have rows of their own"
        found.append((f"tp{ranks}xfsdp{groups}", shared, why_not_split(facts, ranks)))
        parted = f"{ranks} processes share the tokens of each row, and {groups} such group(s) have rows of their own"
        found.append((f"cp{ranks}xfsdp{groups}", parted, why_not_context(facts, ranks)))
    return found


def _copies(processes: int, nodes: int) -> list[int]:
    """Copies of the model worth a look: each in one machine where there are several, else two."""
    wanted = nodes if nodes > 1 else 2
    return [wanted] if processes % wanted == 0 and processes // wanted > 1 else []


def _refused(value: str, facts: Facts, lacking: str | None) -> str | None:
    """Why the machine or the model can't do with a value."""
    engine, on_cpu = engine_of(value), facts.hardware.device == "cpu"
    script = facts.workload.script
    if engine not in {"none", "ddp"} and script is not None and script.beside:
        return f"Accelerate splits one model, and the script prepares {script.beside[0][0]} beside it"
    if engine == "fsdp":
        if on_cpu:
            return "Accelerate leaves FSDP out on a CPU, and trains as ddp"
        no_layers = None if facts.model.layer_classes else f"{facts.model.architecture} names no layer to shard by"
        return facts.model.unsharded or no_layers
    if engine == "deepspeed":
        own_loop = script is not None and not script.trainer
        clips = "DeepSpeed clips gradients as its config says, and not as the script's loop does" if own_loop else None
        return "Accelerate leaves DeepSpeed out on a CPU, and trains as ddp" if on_cpu else clips or lacking
    return None


def _sharding(model: nn.Module) -> Seen:
    """How FSDP2 has split a model: sizes of the mesh, over how many ranks, and which units are freed between passes."""
    whole = local = 0
    mesh: tuple[int, ...] = ()
    for parameter in model.parameters():
        part: Any = parameter
        if hasattr(part, "to_local"):
            mesh = max(mesh, tuple(part.device_mesh.shape), key=len)
            whole, local = whole + part.numel(), local + part.to_local().numel()
    units: list[Any] = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    groups = [group for unit in units if (group := unit._get_fsdp_state()._fsdp_param_group) is not None]  # noqa: SLF001
    return {
        "mesh": list(mesh),
        "shards": round(whole / local) if local else 0,
        "units": len(units),
        "freed_units": sum(bool(group._reshard_after_forward) for group in groups),  # noqa: SLF001
    }


def _not_sharded(value: str, seen: Seen, facts: Facts) -> str | None:
    """Why weights are not split as a value of FSDP says."""
    layout = layout_of(value, facts.workload.processes)
    wanted = 1 if layout is None else layout.shard * layout.context
    if seen.get("shards") != wanted:
        return f"the weights are split over {seen.get('shards')} processes, not {wanted}"
    if layout is not None and layout.replicate > 1 and seen.get("mesh") != [layout.replicate, layout.shard]:
        return f"the processes form a mesh of {seen.get('mesh')}, not {[layout.replicate, layout.shard]}"
    freed = int(seen.get("freed_units", 0))
    if wanted > 1 and (freed > 0) != (value != "fsdp:noreshard"):
        return f"{freed} of {seen.get('units')} units give their weights back after the forward pass"
    return None
