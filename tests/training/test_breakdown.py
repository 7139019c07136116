"""Where the time of a step goes: events as ``torch.profiler`` gives them, of a GPU that is not here."""

from types import SimpleNamespace

import pytest

from autofit.training.profiling.breakdown import breakdown
from autofit.training.profiling.record import thinned

HOST, DEVICE = SimpleNamespace(name="CPU"), SimpleNamespace(name="CUDA")


def event(name, begin, end, *, number=0, on=HOST, under=None, by=0):
    """A range of a profile; times in milliseconds."""
    return SimpleNamespace(
        name=name,
        id=number,
        device_type=on,
        time_range=SimpleNamespace(start=begin * 1e3, end=end * 1e3),
        cpu_parent=under,
        is_async=False,
        is_user_annotation=False,
        linked_correlation_id=by,
        self_cpu_time_total=(end - begin) * 1e3,
    )


def of(found, kind):
    return next((row.seconds * 1e3 for row in found.rows if row.kind == kind), 0.0)


def test_kernels_count_where_they_run_and_waiting_is_the_loaders_or_the_hosts():
    step = event("Optimizer.step#AdamW.step", 50, 60)
    host = [
        event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 10),
        event("aten::mm", 10, 11, number=1),
        event("aten::add", 11, 12, number=2),
        step,
        event("aten::_fused_adamw_", 51, 52, number=3, under=step),
    ]
    kernels = [
        event("nvjet_tst_128x64", 15, 45, on=DEVICE, by=1),
        event("vectorized_elementwise_kernel", 45, 50, on=DEVICE, by=2),
        event("multi_tensor_apply_kernel", 52, 62, on=DEVICE, by=3),
        event("Memcpy HtoD (Pinned -> Device)", 40, 52, on=DEVICE),
        event("ncclDevKernel_AllReduce", 60, 70, on=DEVICE),
    ]
    found = breakdown([*host, *kernels], wall_seconds=0.1, steps=1, on_cuda=True)
    assert of(found, "products") == pytest.approx(30)
    assert of(found, "elementwise") == pytest.approx(5)
    assert of(found, "optimizer") == pytest.approx(10)
    assert of(found, "copies") == pytest.approx(2)  # what no product hides
    assert of(found, "collectives") == pytest.approx(8)
    assert of(found, "loader") == pytest.approx(10)
    assert of(found, "host") == pytest.approx(35)
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    assert found.binds == "host"


def test_operators_of_the_cpu_count_their_own_time():
    step = event("Optimizer.step#AdamW.step", 60, 70)
    events = [event("aten::addmm", 0, 60), step, event("aten::_fused_adamw_", 60, 70, under=step)]
    found = breakdown(events, wall_seconds=0.1, steps=2, on_cuda=False)
    assert of(found, "products") == pytest.approx(30)  # of one of two steps
    assert of(found, "optimizer") == pytest.approx(5)
    assert of(found, "host") == pytest.approx(15)
    assert found.binds == "products"
    assert "60% of a step" in found.sentence


def test_a_gpu_whose_kernels_were_not_seen_is_not_judged_by_its_hosts_operators():
    found = breakdown([event("aten::addmm", 0, 60)], wall_seconds=0.1, steps=1, on_cuda=True)
    assert found.binds is None
    assert "can't be told" in found.sentence
    assert [row.kind for row in found.rows if row.seconds] == ["unattributed"]


def test_a_thinned_time_line_keeps_the_peak():
    points = [(float(at), at if at != 517 else 10**9) for at in range(1000)]
    few = thinned(points, 10)
    assert len(few) == 10
    assert max(held for _, held in few) == 10**9
