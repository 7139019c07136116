"""Traces on demand: which ones are made, which are found, and what is said where there is none."""

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import autofit
from autofit.costmodel.memory.parts import MicroPart, OptimizerPart, pack
from autofit.costmodel.tracing import trace_store
from autofit.costmodel.tracing.trace_request import traced_plan
from autofit.costmodel.tracing.trace_store import TRACES, Traces, cache_folder
from autofit.registry import techniques
from tests.support.layered import Layered, Writer
from tests.support.tiny import write_config
from tests.support.traced import CONFIGS, PLAIN, facts_of


def canned(part):
    """A part as a tracer writes it."""
    if part == "micro_steps":
        return pack(MicroPart(tape=Layered().tape(4), weights=np.array([100])), None)
    writer = Writer()
    writer.mark("0:step")
    writer.new(7, 0, "state")
    return pack(None, OptimizerPart(tape=writer.tape(), elsewhere_bytes=3))


class Tracer:
    """Stands where the fork server stands: answers with canned parts, and counts what it was asked for."""

    def __init__(self, *, fail=(), silent=False, seconds=0.0, room=99):
        self.asked, self.fail, self.silent, self.seconds, self.room = [], fail, silent, seconds, room

    def __call__(self):
        return self

    @contextlib.contextmanager
    def ask(self, folder, job, *, kill_after_seconds):
        assert folder.is_dir()
        assert kill_after_seconds >= 60
        failed = {}
        time.sleep(self.seconds)
        for request in job.requests:
            self.asked.append((request.part, request.plan))
            if request.part in self.fail:
                failed[request.file] = "its trace failed: no such thing"
            elif not self.silent:
                self.room -= 1
                target = Path(job.folder if self.room >= 0 else job.spare)
                target.mkdir(exist_ok=True)
                np.savez_compressed(target / request.file, **canned(request.part))
        yield None if self.silent else {"failed": failed}


@pytest.fixture
def lab(tmp_path):
    """Makes traces of one config with a cache that is always the same folder."""
    config = write_config(tmp_path / "config", CONFIGS["llama"])

    def make(server, *, facts=None, cache=tmp_path / "cache", config=config):
        return Traces(facts or facts_of("llama"), config, server, tmp_path, cache)

    return make


def test_plans_share_their_parts(lab):
    tracer = Tracer()
    found = lab(tracer)
    plans = [
        PLAIN.replaced(micro_batch=rows, accumulation=8 // rows, optimizer=optimizer, checkpointing=checkpointing)
        for rows in (2, 4, 8)
        for optimizer in ("adamw", "sgd")
        for checkpointing in ("off", "full")
    ]
    words = []
    found.prepare(plans, words.append)
    assert sorted(part for part, _ in tracer.asked) == ["micro_steps"] * 2 + ["optimizer"] * 2
    assert words == ["tracing 4 parts of a step"]
    assert found.made == 4
    assert all(found.need(plan) and not found.untraced(plan) for plan in plans)
    assert found.need(plans[0]) != found.need(plans[-1])
    found.prepare(plans, words.append)
    assert len(tracer.asked) == 4


def test_how_many_are_made_is_told_meanwhile(lab, monkeypatch):
    monkeypatch.setattr(trace_store, "_TOLD_EVERY_SECONDS", 0.005)
    words = []
    lab(Tracer(seconds=0.2)).prepare([PLAIN], words.append)
    assert words[0] == "tracing 2 parts of a step"
    assert "0 of 2 parts traced" in words
    assert len(words) == len(set(words)), "what has not changed is not told again"


def test_many_rows_stand_for_one_where_it_was_not_traced(lab):
    many, alone = (PLAIN.replaced(micro_batch=rows) for rows in (2, 1))
    found = lab(Tracer())
    found.prepare([many])
    assert found.parts(alone) == found.parts(many)
    assert found.untraced(alone) is None
    tracer = Tracer()
    found = lab(tracer)
    found.prepare([many, alone])
    assert [(part, plan["micro_batch"]) for part, plan in tracer.asked] == [("micro_steps", 1)]
    assert found.parts(alone)[0] is not found.parts(many)[0]


def test_what_is_kept_is_not_made_again(lab):
    lab(Tracer()).prepare([PLAIN])

    def nobody():
        raise AssertionError("a process was asked for")

    again = lab(nobody)
    again.prepare([PLAIN], nobody)
    assert again.need(PLAIN).elsewhere_bytes == 3
    assert again.made == 0


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_file_that_was_cut_off_is_made_again(lab, tmp_path, length):
    lab(Tracer()).prepare([PLAIN])
    for file in (tmp_path / "cache").iterdir():
        whole = file.read_bytes()
        file.write_bytes(whole[: length % len(whole)])
    tracer = Tracer()
    found = lab(tracer)
    found.prepare([PLAIN])
    assert len(tracer.asked) == found.made == 2
    assert found.need(PLAIN) is not None


@pytest.mark.parametrize("content", [b"no archive", b"\x80\x04N.", b"PK\x05\x06" + bytes(18)])
def test_a_file_that_is_something_else_is_made_again(lab, tmp_path, content):
    lab(Tracer()).prepare([PLAIN])
    for file in (tmp_path / "cache").iterdir():
        file.write_bytes(content)
    tracer = Tracer()
    lab(tracer).prepare([PLAIN])
    assert len(tracer.asked) == 2


def with_workload(**changes):
    facts = facts_of("llama")
    return dataclasses.replace(facts, workload=dataclasses.replace(facts.workload, **changes))


OTHERS = {
    "longer": with_workload(seq_len=65),
    "loop": with_workload(launch_path="loop"),
    "device": facts_of("llama", device="cuda"),
    "version": dataclasses.replace(facts_of("llama"), packages={**facts_of("llama").packages, "torch": "9.9"}),
    "more packages": dataclasses.replace(facts_of("llama"), packages={**facts_of("llama").packages, "more": "1"}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_facts_are_other_traces(lab, name):
    lab(Tracer()).prepare([PLAIN])
    tracer = Tracer()
    lab(tracer, facts=OTHERS[name]).prepare([PLAIN])
    assert len(tracer.asked) == 2


@pytest.mark.parametrize("facts", [with_workload(limit_bytes=1), with_workload(seed=3)], ids=["limit", "seed"])
def test_facts_that_no_trace_depends_on(lab, facts):
    lab(Tracer()).prepare([PLAIN])
    tracer = Tracer()
    lab(tracer, facts=facts).prepare([PLAIN])
    assert not tracer.asked


def test_another_config_or_its_code_is_another_trace(lab, tmp_path):
    lab(Tracer()).prepare([PLAIN])
    for folder, code, count in (("same", None, 0), ("wider", None, 2), ("coded", "x = 1", 2), ("recoded", "x = 2", 2)):
        changes = {"intermediate_size": 96} if folder == "wider" else {}
        config = write_config(tmp_path / folder, CONFIGS["llama"], **changes)
        if code:
            (config / "modeling.py").write_text(code, "utf-8")
        tracer = Tracer()
        lab(tracer, config=config).prepare([PLAIN])
        assert len(tracer.asked) == count, folder


def test_another_source_is_another_trace(lab, monkeypatch):
    lab(Tracer()).prepare([PLAIN])
    monkeypatch.setattr(trace_store, "source_hash", lambda: "changed")
    tracer = Tracer()
    lab(tracer).prepare([PLAIN])
    assert len(tracer.asked) == 2


def test_the_key_of_a_trace_holds_every_source_file_in_every_folder(monkeypatch, tmp_path):
    files = {path for folder in trace_store.source_folders() for path in folder.rglob("*.py")}
    assert {Path(autofit.__file__), Path(trace_store.__file__)} <= files
    assert {Path(sys.modules[type(one).__module__].__file__) for one in techniques()} <= files
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    monkeypatch.setattr(trace_store, "source_folders", lambda: (tmp_path,))
    (deep / "one.py").write_text("x = 1")
    before = trace_store.source_hash.__wrapped__()
    (deep / "one.py").write_text("x = 2")
    changed = trace_store.source_hash.__wrapped__()
    (deep / "one.py").rename(tmp_path / "a" / "one.py")
    assert len({before, changed, trace_store.source_hash.__wrapped__()}) == 3


def test_without_a_cache_a_trace_lasts_as_long_as_the_run(tmp_path):
    config = write_config(tmp_path / "config", CONFIGS["llama"])
    for _ in range(2):
        scratch = tmp_path / "scratch"
        scratch.mkdir(exist_ok=True)
        tracer = Tracer()
        found = Traces(facts_of("llama"), config, tracer, scratch)
        found.prepare([PLAIN])
        assert len(tracer.asked) == 2
        assert {file.parent.name for file in scratch.rglob("*.npz")} == {TRACES}  # beside nothing of a user's
        shutil.rmtree(scratch)


def test_the_cache_is_where_caches_are(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "autofit" / "traces"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == Path("~/.cache/autofit/traces").expanduser()


# -- no trace -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "offload"), [("zero2", "optimizer"), ("zero3", "parameters")])
def test_what_can_not_be_traced_has_a_reason(lab, value, offload):
    found, plan = lab(Tracer()), PLAIN.replaced(parallel=value, offload=offload)
    found.prepare([plan])
    assert found.untraced(plan) == f"parallel={value} can't be traced"
    assert found.need(plan) is None
    assert traced_plan(plan, "micro_steps") is None
    on_device = plan.replaced(offload="none")
    assert traced_plan(on_device, "micro_steps")["parallel"] == traced_plan(on_device, "optimizer")["parallel"] == value


def test_plans_that_ask_for_the_same_memory_are_alike(lab):
    found, plan = lab(Tracer()), PLAIN.replaced(precision="bf16", micro_batch=4)

    def alike(one, **hardware):
        return found.alike(one, dataclasses.replace(facts, hardware=dataclasses.replace(facts.hardware, **hardware)))

    facts = found.facts
    assert alike(plan) == alike(plan.replaced(precision="fp16"))
    others = ({"precision": "fp32"}, {"micro_batch": 8}, {"accumulation": 2}, {"optimizer": "adamw_8bit"})
    assert len({alike(plan), *(alike(plan.replaced(**one)) for one in others)}) == 1 + len(others)
    assert alike(plan, capability=(9, 0)) != alike(plan, capability=(8, 9)), "cuBLAS holds other workspaces there"


def test_a_failed_trace_has_its_reason_and_is_not_tried_again(lab):
    tracer = Tracer(fail={"micro_steps"})
    found = lab(tracer)
    found.prepare([PLAIN])
    assert found.untraced(PLAIN) == "its trace failed: no such thing"
    assert found.need(PLAIN) is None
    assert found.made == 1
    found.prepare([PLAIN])
    assert len(tracer.asked) == 2
    again = Tracer()
    lab(again).prepare([PLAIN])  # the next run tries again, but only that
    assert [part for part, _ in again.asked] == ["micro_steps"]


def test_traces_that_took_too_long_have_a_reason(lab):
    found = lab(Tracer(silent=True))
    found.prepare([PLAIN])
    assert found.untraced(PLAIN) == "its trace took too long or was killed"


def test_without_a_cache_that_can_be_written_traces_are_kept_for_the_run(lab, tmp_path):
    (tmp_path / "file").write_text("in the way", "utf-8")
    said = []
    found = lab(Tracer(), cache=tmp_path / "file" / "traces")
    found.prepare([PLAIN], said.append)
    assert found.untraced(PLAIN) is None
    assert found.made == 2
    told, *_ = said
    assert told == f"traces are kept for this run only: {tmp_path}/file/traces can't be written: Not a directory"


def test_traces_that_the_cache_has_no_room_for_are_kept_for_the_run(lab, tmp_path):
    said = []
    found = lab(Tracer(room=1))
    found.prepare([PLAIN], said.append)
    assert (found.untraced(PLAIN), found.made) == (None, 2)
    assert said[-1] == (
        f"some traces are kept for this run only: {tmp_path}/cache takes no more of them: is its disk full?"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_cache_that_can_be_read_alone_is_left(lab, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    found = lab(Tracer(), cache=tmp_path / "locked")
    found.prepare([PLAIN])
    assert found.made == 2


# -- in processes -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_traces_are_made_in_processes_and_kept(lab, server, tmp_path):
    found = lab(lambda: server)
    plans = [PLAIN, PLAIN.replaced(optimizer="adamw_8bit", checkpointing="full", micro_batch=4)]
    found.prepare(plans)
    assert (found.failed, found.made) == ({}, 4)
    first, second = (found.need(plan) for plan in plans)
    assert first.peak_bytes > first.bare_bytes > second.bare_bytes
    assert sorted(file.suffix for file in (tmp_path / "cache").iterdir()) == [".npz"] * 4
    assert not list(tmp_path.glob(".ask-*"))

    again = lab(lambda: pytest.fail("a process was asked for"))
    again.prepare(plans)
    assert [again.need(plan) for plan in plans] == [first, second]


def test_a_model_that_raises_gives_a_reason(server, tmp_path):
    # three heads of keys can't be shared by four of queries
    config = write_config(tmp_path / "config", CONFIGS["llama"], num_key_value_heads=3)
    found = Traces(facts_of("llama"), config, lambda: server, tmp_path, tmp_path / "cache")
    found.prepare([PLAIN])
    reason = found.untraced(PLAIN)
    assert reason is not None
    assert reason.startswith("its trace failed: RuntimeError: ")
    assert "\n" not in reason
    assert found.need(PLAIN) is None
    assert found.made == 1  # the optimizer's step does not run the model
    assert json.loads((config / "config.json").read_text("utf-8"))["num_key_value_heads"] == 3
