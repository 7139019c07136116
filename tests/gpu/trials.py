"""One plan, twice: a trial on the device and its trace; what each says of the caching allocator."""

import dataclasses
import json
from dataclasses import dataclass

from autofit.commands.model_source import fetch, modeling_module
from autofit.commands.request import Request
from autofit.commands.scripts.request import script_facts
from autofit.contract.outcome import Measured
from autofit.contract.plan import Plan
from autofit.costmodel.forecast import workspaces
from autofit.costmodel.memory import allocator
from autofit.costmodel.memory.requests import requests
from autofit.costmodel.tracing.trace_store import Traces, evaluated_rows
from autofit.system.forking.server import ForkServer
from autofit.system.units import GIB
from autofit.training.runner import ProcessRunner
from autofit.training.timing import Effort
from tests.gpu.card import facts_on_card

PLAIN = Plan(
    {
        "parallel": "none",
        "sync_each_batch": "off",
        "micro_batch": 8,
        "accumulation": 1,
        "precision": "bf16",
        "attention": "default",
        "kernels": "none",
        "checkpointing": "off",
        "adapter": "none",
        "quantization": "none",
        "optimizer": "adamw",
        "offload": "none",
        "compile": "off",
        "batching": "pad",
        "loader": "default",
    }
)
TWO_STEPS = Effort(fidelity="whole", min_steps=2, max_steps=2, seconds=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Bytes of one plan; errors are relative, and positive where the trace says more.

    Attributes:
        allocated: The device's ``max_memory_allocated``.
        traced_allocated: The same, replayed from the trace: a block may be up to 1 MiB larger than its tensor.
        traced_tensors: What the trace's tensors ask for at its peak.
        reserved: The device's ``max_memory_reserved``.
        traced_reserved: The same, replayed from the trace.
        outside: On the device outside of the allocator.
        at: Phase, segment and operator of the traced peak.
        by_category: What the traced peak is made of.
    """

    allocated: int
    traced_allocated: int
    traced_tensors: int
    reserved: int
    traced_reserved: int
    outside: int
    at: tuple[str, str, str]
    by_category: dict[str, int]

    @property
    def allocated_error(self) -> float:
        return self.traced_allocated / self.allocated - 1

    @property
    def reserved_error(self) -> float:
        return self.traced_reserved / self.reserved - 1


class Bench:
    """One model on this device: its trials and its traces."""

    def __init__(self, folder, config, *, most_bytes=24 * GIB, seq_len=512):
        self.folder, self.most_bytes, self.seq_len = folder, most_bytes, seq_len
        source = folder / "source.json"
        source.write_text(json.dumps(config))
        self.config = fetch(str(source), folder / "model")
        modules = modeling_module(self.config)
        self.device = ForkServer(folder / "device.log", "cuda", modules)
        self.tracer = ForkServer(folder / "tracer.log", "cpu", modules)
        self.number = 0
        self.evaluated = 0  # rows at once, where they are more than usual
        self._facts = {}

    def facts(self, global_batch):
        if global_batch not in self._facts:
            self._facts[global_batch] = facts_on_card(
                self.device, self.config, most_bytes=self.most_bytes, global_batch=global_batch, seq_len=self.seq_len
            )
        return self._facts[global_batch]

    def facts_for(self, plan):
        return self.facts(int(plan["micro_batch"]) * int(plan["accumulation"])).evaluating(self.evaluated)

    def trial(self, plan, *, limit_seconds=200):
        """The outcome of a trial of two optimizer steps."""
        self.number += 1
        runner = ProcessRunner(self.folder / "trials", self.facts_for(plan), self.config, self.device)
        return runner.run(self.number, plan, TWO_STEPS, purpose="search", limit_seconds=limit_seconds).outcome

    def traced(self, plan):
        """What the trace says a plan needs, and its parts; the reason where it can't be traced."""
        facts = self.facts_for(plan)
        elsewhere = dataclasses.replace(facts.hardware, host_total_bytes=1 << 50, host_free_bytes=1 << 50)
        facts = dataclasses.replace(facts, hardware=elsewhere)
        traces = Traces(facts, self.config, lambda: self.tracer, self.folder)
        traces.prepare([plan])
        need, parts = traces.need(plan), traces.parts(plan)
        return (need, parts) if need and parts else traces.untraced(plan) or "no trace"

    def compare(self, plan, outcome):
        """A measured outcome beside its trace; the reason, in words, where there is no trace."""
        assert isinstance(outcome, Measured), outcome
        traced = self.traced(plan)
        if isinstance(traced, str):
            return traced
        need, parts = traced
        facts = self.facts_for(plan)
        events, sizes, streams = requests(
            *parts,
            rows=int(plan["micro_batch"]),
            accumulation=int(plan["accumulation"]),
            evaluated_rows=evaluated_rows(plan, facts),
            workspaces=workspaces(facts.hardware.capability),
        )
        replayed = allocator.replay(events, sizes, streams)
        return Compared(
            allocated=outcome.allocated_bytes,
            traced_allocated=replayed.peak_allocated_bytes,
            traced_tensors=need.peak_bytes + sum(workspaces(facts.hardware.capability)),
            reserved=outcome.reserved_bytes,
            traced_reserved=replayed.peak_reserved_bytes,
            outside=outcome.outside_bytes,
            at=(need.phase, need.segment, need.operator),
            by_category=dict(need.by_category),
        )

    def close(self):
        self.device.close()
        self.tracer.close()


class ScriptBench(Bench):
    """A user's script on this device: its trials and its traces."""

    def __init__(self, folder, script, arguments, *, most_bytes=24 * GIB):
        self.folder, self.config, self.number, self.evaluated = folder, folder / "model", 0, 0
        self.device = ForkServer(folder / "device.log", "cuda", ())
        self.tracer = ForkServer(folder / "tracer.log", "cpu", ())
        request = Request(
            model=str(script), device="cuda", global_batch=None, arguments=arguments, memory_limit=str(most_bytes)
        )
        self.script = script_facts(folder, request, "cuda", self.device, lambda _: None)

    def facts(self, global_batch):
        return dataclasses.replace(
            self.script, workload=dataclasses.replace(self.script.workload, global_batch=global_batch)
        )
