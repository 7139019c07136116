"""Traces of users' scripts beside the same steps on real tensors."""

import contextlib
from pathlib import Path

from autofit.commands.request import Request
from autofit.commands.scripts.request import script_facts
from autofit.costmodel.scripts import snapshot
from autofit.costmodel.tracing import fake_run
from autofit.costmodel.tracing.layers import Marks
from autofit.costmodel.tracing.trace_request import TraceRequest, TraceRequests
from autofit.costmodel.tracing.trace_store import Traces


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


def real_peak(folder, facts, plan):
    """Bytes of all tensors at the peak of two optimizer steps of a plan with an accumulation of two."""
    here = folder / "real"
    here.mkdir()
    request = TraceRequest(part="micro_steps", plan=plan, file="real.npz")
    job = TraceRequests(facts=facts, config=str(folder / "model"), requests=(request,), folder=str(here))
    code = snapshot.in_child(lambda: _Real(job, (request,), here).run())
    assert code == 0, [path.read_text() for path in here.glob("failed-*")]
    return int(Path(here / "live").read_text())
