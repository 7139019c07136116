"""The job of tracing: which requests go together, and what is left of a trace."""

import errno
import gc
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from autofit.contract.recipe import without_drawing
from autofit.costmodel.tracing import trace_job
from autofit.costmodel.tracing.trace_job import _in_groups, save, telling
from autofit.costmodel.tracing.trace_request import TraceRequest, TraceRequests
from tests.support.traced import PLAIN


@pytest.mark.parametrize(("adapters", "groups"), [(["none", "lora:r=8", "lora:r=16"], [2] * 6), (["none"], [1] * 4)])
def test_plans_with_one_evaluation_are_traced_by_one_process_where_there_are_many(adapters, groups):
    every = itertools.product(["fp32", "bf16"], adapters, ["off", "full"])
    plans = [PLAIN.replaced(precision=one, adapter=two, checkpointing=three) for one, two, three in every]
    requests = [TraceRequest(part="micro_steps", plan=plan, file=f"{at}.npz") for at, plan in enumerate(plans)]
    found = _in_groups(reversed(requests), 2)
    assert [len(group) for group in found] == groups
    assert {one.file for group in found for one in group} == {one.file for one in requests}
    for group in found:
        assert len({(one.plan["precision"], one.plan["adapter"]) for one in group}) == 1


def test_optimizers_are_traced_behind_the_micro_steps_that_tell_what_gets_no_gradient():
    every = itertools.product(["fp32", "bf16"], ["none", "lora:r=8", "lora:r=16"])
    plans = [PLAIN.replaced(precision=one, adapter=two, micro_batch=2) for one, two in every]
    requests = [TraceRequest(part="micro_steps", plan=plan, file=f"{at}.npz") for at, plan in enumerate(plans)]
    steps = [PLAIN.replaced(adapter=adapter, optimizer="adamw_8bit") for adapter in ("none", "lora:r=8")]
    requests += [TraceRequest(part="optimizer", plan=plan, file=f"{plan.words()}.npz") for plan in steps]
    found = _in_groups(requests, 2)
    assert sorted(map(len, found)) == [1, 1, 1, 1, 2, 2]
    for micro, step in (group for group in found if len(group) == 2):
        assert (micro.part, step.part) == ("micro_steps", "optimizer")
        assert micro.plan == telling(step.plan).replaced(optimizer=micro.plan["optimizer"])
    assert [len(group) for group in _in_groups(requests, 8)] == [1] * 8, "on more cores none waits for another"


def test_a_plan_is_traced_behind_the_one_whose_first_micro_step_is_like_its_only_one():
    every = itertools.product(["off", "on"], ["parameters", "none"])
    plans = [PLAIN.replaced(parallel="fsdp", sync_each_batch=one, offload=two) for one, two in every]
    (group,) = _in_groups(
        (TraceRequest(part="micro_steps", plan=plan, file=f"{plan.words()}.npz") for plan in plans), 2
    )
    found = [(one.plan["sync_each_batch"], one.plan["offload"]) for one in group]
    assert found == [("on", "none"), ("on", "parameters"), ("off", "none"), ("off", "parameters")]


def test_what_is_written_for_a_trace_goes_with_its_job(tmp_path, monkeypatch):
    seen = tmp_path.with_name("seen")

    def written(_plan, _facts, _config, scratch, **_):
        (scratch / "written").touch()
        seen.write_text(str(scratch))
        raise ZeroDivisionError("it is killed there")

    monkeypatch.setattr(trace_job, "micro_part", written)
    requests = (TraceRequest(part="micro_steps", plan=PLAIN, file="a.npz"),)
    failed = trace_job.trace_all(
        TraceRequests(facts=None, config="", requests=requests, folder=str(tmp_path)), tmp_path
    )
    assert "it is killed there" in failed["a.npz"]
    scratch = Path(seen.read_text())
    assert scratch.parent == tmp_path
    assert not scratch.exists()


def test_garbage_is_collected_where_there_is_much_of_it(tmp_path, monkeypatch):
    told = tmp_path / "told"

    def say(word):
        with told.open("a") as file:
            file.write(f"{word} ")

    held = itertools.chain([0], itertools.repeat(trace_job._GARBAGE_BYTES + 1))
    monkeypatch.setattr(trace_job, "_trace", lambda *_: say(f"traced:{gc.isenabled()}"))
    monkeypatch.setattr(trace_job, "status", lambda: {"VmRSS": next(held)})
    monkeypatch.setattr(gc, "collect", lambda: say("collected"))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    requests = tuple(TraceRequest(part="micro_steps", plan=PLAIN, file=f"{name}.npz") for name in "ab")
    assert not trace_job.trace_all(
        TraceRequests(facts=None, config="", requests=requests, folder=str(tmp_path)), tmp_path
    )
    assert told.read_text().split() == ["traced:False", "collected", "traced:False"]


def test_a_trace_that_a_full_disk_has_no_room_for_goes_elsewhere(tmp_path, monkeypatch):
    full, spare = tmp_path / "full", tmp_path / "spare"
    full.mkdir()
    spare.mkdir()
    write_array = np.lib.format.write_array

    def write(file, *values, **options):
        if list(full.iterdir()):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_array(file, *values, **options)

    monkeypatch.setattr(np.lib.format, "write_array", write)
    request = TraceRequest(part="optimizer", plan=PLAIN, file="one.npz")
    job = TraceRequests(facts=None, config="", requests=(request,), folder=str(full), spare=str(spare))
    save(job, request, {"alone": np.array(7)})
    assert (list(full.iterdir()), list(spare.iterdir())) == ([], [spare / "one.npz"])
    assert job.is_made(request)


def test_a_trace_is_read_as_it_was_written(tmp_path):
    arrays = {"events": np.arange(5, dtype=np.int32), "names": np.array(["a", "bc"]), "alone": np.array(7)}
    request = TraceRequest(part="optimizer", plan=PLAIN, file="one.npz")
    save(TraceRequests(facts=None, config="", requests=(request,), folder=str(tmp_path)), request, arrays)
    with np.load(tmp_path / "one.npz", allow_pickle=False) as read:
        assert {name: (read[name].dtype, read[name].tolist()) for name in read} == {
            name: (array.dtype, array.tolist()) for name, array in arrays.items()
        }
    assert [path.name for path in tmp_path.iterdir()] == ["one.npz"]


def test_modules_draw_no_weights_on_a_device_without_memory():
    with torch.device("meta"), without_drawing():
        assert nn.Linear(3, 4).weight.shape == (4, 3)
    torch.manual_seed(0)
    drawn = nn.Linear(3, 4).weight
    torch.manual_seed(0)
    assert torch.equal(drawn, nn.Linear(3, 4).weight)
    assert drawn.any()
