"""Parallel: how several processes train one model, each on a device of its own.

- ``none``: one process. Where a launch starts several, each would train for itself, so it is withheld.
- ``ddp``: every process holds the whole model and trains on rows of its own; gradients are averaged while the backward
  pass runs (PyTorch's DistributedDataParallel). Saves nothing; costs a copy of the gradients in buckets, and their
  all-reduce. Li et al. (arXiv 2006.15704).
- ``fsdp``, ``fsdp:noreshard``, ``hsdp:RxS``: each holds a share of it; see ``fsdp.py`` beside this file.

All of class ``exact``: the global batch stays. What each process saw is checked, since Accelerate leaves out in silence
what it can't do: under the launcher's ``MULTI_GPU`` on a machine without CUDA two processes make two worlds of one,
unless ``cpu=True`` is said in the script.

Sources: ``accelerate.Accelerator.prepare_model``; ``accelerate/state.py`` (1.15). Carried by the Accelerate YAML
(``distributed_type``, ``num_processes``).
Not covered: several machines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofit.contract.emission import Emission
from autofit.contract.layout import layout_of
from autofit.contract.technique import Choice, Kind, Prior, Technique

from . import fsdp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autofit.contract.facts import Facts
    from autofit.contract.observation import Ran, Seen
    from autofit.contract.plan import Value

_WRAPPED = {"MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "NO": "none"}
"""Plain values by what Accelerate says that it is."""
_OFFLOADED = {"fsdp2", "zero2", "zero3"}


class Parallel(Technique):
    """How several processes train one model."""

    name = "parallel"
    baseline = "none"

    def baseline_for(self, facts: Facts) -> Value:
        return "none" if facts.workload.processes == 1 else "ddp"

    def choices(self, facts: Facts) -> tuple[Choice, ...]:
        count = facts.workload.processes
        alone = count == 1
        each = f"each of {count} processes would train for itself"
        several = f"{count} processes hold the whole model each, and average gradients"
        return (
            Choice("none", Kind.EXACT, "offered" if alone else "withheld", "one process" if alone else each),
            Choice(
                "ddp",
                Kind.EXACT,
                "withheld" if alone else "offered",
                "one process has nobody to share the rows with" if alone else several,
            ),
            *fsdp.choices(facts),
        )

    def knows(self, value: object, facts: Facts) -> bool:
        """Any layout of FSDP2 for these processes, also one that is not listed."""
        sharded = fsdp.is_sharded(value) and layout_of(str(value), facts.workload.processes) is not None
        return sharded or super().knows(value, facts)

    def emit(self, value: Value, plan: Mapping[str, Value], facts: Facts) -> Emission:
        if plan["offload"] in _OFFLOADED:  # whose engine is the type
            return Emission()
        if fsdp.is_sharded(value):
            return Emission(accelerate=fsdp.written(str(value), facts))
        # on a machine without CUDA, too, the launcher starts several processes for this type only
        return Emission(accelerate={"distributed_type": "MULTI_GPU" if value == "ddp" else "NO"})

    def converted(self, plan: Mapping[str, Value]) -> Mapping[str, Value]:
        return plan if self.name in plan else {self.name: self.baseline, **plan}

    def observe(self, ran: Ran) -> Seen:
        return {"engine": ran.engine, "processes": getattr(ran.accelerator, "num_processes", 1)}

    def in_effect(self, value: Value, seen: Seen, facts: Facts) -> str | None:
        wanted, found = facts.workload.processes, seen.get("processes", 1)
        if found != wanted:
            return f"{found} process(es) trained together, not {wanted}"
        if fsdp.is_sharded(value) and seen.get("engine") != "FSDP2":
            return f"the model runs under {seen.get('engine')}, not FSDP2"
        if value == "ddp" and _WRAPPED.get(str(seen.get("engine")), "") != value:
            return f"the model runs under {seen.get('engine')}, not DistributedDataParallel"
        return None

    def prior(self, value: Value, facts: Facts) -> Prior:
        if value == self.baseline_for(facts):
            return Prior(time=(0.0, 0.01), memory=(0.0, 0.01))
        if fsdp.is_sharded(value):
            return Prior(time=(0.15, 0.3), memory=(-0.8, 0.4))
        return Prior(time=(0.1, 0.3), memory=(0.1, 0.3))
