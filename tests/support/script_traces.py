"""Traces of users' scripts beside the same steps on real tensors."""

import contextlib
from pathlib import Path

from autofit.commands.request import Request
from autofit.commands.scripts.request import script_facts
from autofit.costmodel.scripts import loop_snapshot, loop_source, snapshot
from autofit.costmodel.tracing import fake_run
from autofit.costmodel.tracing.layers import Marks, TraceDone
from autofit.costmodel.tracing.trace_request import TraceRequest, TraceRequests
from autofit.costmodel.tracing.trace_store import Traces
from autofit.training.scripts.leave import Enough


def facts_of_script(server, folder, script, *arguments):
    """What a script would train, on the CPU, with 8 GiB."""
    request = Request(
        model=str(script), device="cpu", global_batch=None, arguments=tuple(map(str, arguments)), memory_limit="8GiB"
    )
    return script_facts(folder, request, "cpu", server, lambda _: None)


def traces_of(server, folder, facts, plans):
    """Traces of some plans, none of which may fail."""
    traces = Traces(facts, folder / "model", lambda: server, folder, folder / "traces")
    traces.prepare(plans)
    return traces


class _Real(snapshot.Snapshot):
    """The same run with real tensors, whole steps and the plan's own rows."""

    def _trace(self, request, source):
        model = source.model(fake=False)
        source.take_rows(grows=False)
        with fake_run._recording(source.recipe, fake=False) as recorder:
            marks = Marks(source.recipe, recorder, accumulation=request.plan["accumulation"], steps=2)
            with contextlib.suppress(StopIteration):
                source.run(model, marks, fake=False)
        (self.folder / "live").write_text(str(int(recorder.tape().live(0).max())))


class _RealLoop(loop_snapshot.LoopSnapshot):
    """The same of a plain loop, which steps its own optimizer."""

    def _batches(self, number, own):
        if number != self.script.loader:
            yield from own
            return
        source = loop_source.LoopSource(
            self.recipe,
            self.script,
            optimizers=self.accelerator._optimizers,
            models=self.models,
            loader=self.loader,
            moved=[],
        )
        source.take_rows(grows=False)
        recorder = self.stack.enter_context(fake_run._recording(source.recipe, fake=False))
        marks = Marks(source.recipe, recorder, accumulation=self.request.plan["accumulation"], steps=2)
        source.stand_ready(source.prepared_model, marks, source.optimizers, fake=False)
        self.steps = fake_run.Stepping(source.prepared_model, marks)
        try:
            while True:
                yield source.fresh(None)
                if marks.accumulated == marks.accumulation:
                    marks.step_end()
                    marks.accumulated = 0
        except TraceDone:
            (self.folder / "live").write_text(str(int(recorder.tape().live(0).max())))
            raise Enough(0) from None


def real_peak(folder, facts, plan):
    """Bytes of all tensors at the peak of two optimizer steps of a plan with an accumulation of two."""
    here = folder / "real"
    here.mkdir()
    request = TraceRequest(part="micro_steps", plan=plan, file="real.npz")
    job = TraceRequests(facts=facts, config=str(folder / "model"), requests=(request,), folder=str(here))
    kind = _Real if facts.workload.script.trainer else _RealLoop
    code = snapshot.in_child(lambda: kind(job, (request,), here).run())
    assert code == 0, [path.read_text() for path in here.glob("failed-*")]
    return int(Path(here / "live").read_text())
