"""Gradients that are sent in each micro-step: where it is offered, what is written, and what a trace sees of it."""

from dataclasses import fields, replace

import numpy as np
import pytest

from autofit import space
from autofit.contract.plan import Plan
from autofit.costmodel.seconds import collectives
from autofit.costmodel.tracing import fake_run, trace_job
from autofit.registry import converted, recipe_of, technique
from tests.support.synthetic import cpu_facts, cuda_facts
from tests.support.tiny import CONFIGS, PLAIN, write_config
from tests.support.traced import like_a_process_of_its_own, sharded_facts

SYNC = technique("sync_each_batch")


def test_it_is_planned_where_fsdp_accumulates():
    plans = space.build(cuda_facts(global_batch=32, processes=4)).plans
    mine = [plan for plan in plans if plan["sync_each_batch"] == "on"]
    assert {plan["parallel"] for plan in mine} == {"fsdp", "fsdp:noreshard", "hsdp:2x2"}
    assert 1 not in {plan["accumulation"] for plan in mine}
    assert not any(SYNC.conflict("off", plan, cuda_facts(processes=4)) for plan in plans)


def test_one_process_has_it_where_its_parameters_wait_on_the_host():
    plans = space.build(cuda_facts(global_batch=32)).plans
    mine = [plan for plan in plans if plan["sync_each_batch"] == "on"]
    assert {(plan["parallel"], plan["offload"]) for plan in mine} == {("fsdp", "parameters")}
    assert len(mine) == sum(plan["parallel"] == "fsdp" and plan["accumulation"] > 1 for plan in plans) / 2
    written = recipe_of(mine[0], cuda_facts(global_batch=32)).emission.training_args
    assert written["accelerator_config"] == {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    plain = recipe_of(PLAIN.replaced(accumulation=8), cuda_facts()).emission.training_args
    assert "accelerator_config" not in plain, "nobody reads it"


def test_in_a_table_of_plans_it_says_its_name():
    assert (SYNC.word("on"), SYNC.word("off")) == ("sync_each_batch", None)


@pytest.mark.parametrize("facts", [cpu_facts(), cpu_facts(processes=2)])
def test_where_it_can_not_be_had_it_says_why(facts):
    assert "CPU" in SYNC.choice("on", facts).reason
    assert {plan["sync_each_batch"] for plan in space.build(facts).plans} == {"off"}


@pytest.mark.parametrize("launch_path", ["trainer", "loop"])
def test_it_is_written_where_a_trainer_reads_it_and_given_to_a_loop(launch_path):
    facts = cuda_facts(global_batch=32, processes=4)
    facts = replace(facts, workload=replace(facts.workload, launch_path=launch_path))
    plan = PLAIN.replaced(parallel="fsdp", accumulation=8)
    on, off = (recipe_of(plan.replaced(sync_each_batch=value), facts) for value in ("on", "off"))
    for recipe, value in ((on, True), (off, False)):
        written = recipe.emission.training_args["accelerator_config"]
        assert written == {"gradient_accumulation_kwargs": {"sync_each_batch": value}}
    assert (on.sync_each_batch, off.sync_each_batch) == (True, False)


def test_an_accelerator_of_a_loop_has_it():
    recipe = recipe_of(PLAIN.replaced(accumulation=4), cpu_facts())
    recipe.sync_each_batch = True
    with like_a_process_of_its_own():
        accelerator = recipe.accelerator()
        assert accelerator.gradient_accumulation_steps == 4
        assert accelerator.gradient_state.plugin_kwargs["sync_each_batch"] is True


def test_a_plan_of_an_earlier_version_has_it_off():
    old = Plan({name: value for name, value in PLAIN.items() if name != "sync_each_batch"})
    assert converted(old) == PLAIN


@pytest.mark.parametrize(
    ("value", "seen", "why"),
    [
        ("on", {"micro_steps": 8, "deferred": 0}, None),
        ("on", {"micro_steps": 8, "deferred": 4}, "4 of 8 micro-steps kept their gradients whole"),
        ("on", {}, "no micro-step"),
        ("off", {"micro_steps": 8, "deferred": 4}, None),
        ("off", {"micro_steps": 8, "deferred": 0}, "each of 8 micro-steps"),
        ("off", {"micro_steps": 0, "deferred": 0}, None),
    ],
)
def test_what_was_ignored_is_told(value, seen, why):
    found = SYNC.in_effect(value, seen, cuda_facts(processes=4))
    assert found is None if why is None else why in found


@pytest.mark.parametrize(
    ("launch_path", "values"),
    [
        ("trainer", {"parallel": "fsdp"}),
        pytest.param("loop", {"parallel": "hsdp:2x4", "precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param(
            "trainer", {"parallel": "cp2xfsdp4", "adapter": "lora:r=8", "precision": "bf16"}, marks=pytest.mark.slow
        ),
        pytest.param("loop", {"parallel": "fsdp:noreshard", "checkpointing": "full"}, marks=pytest.mark.slow),
        pytest.param("trainer", {"parallel": "fsdp", "offload": "parameters"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_only_micro_step_is_like_the_first_of_those_that_send(tmp_path, monkeypatch, launch_path, values):
    write_config(tmp_path, CONFIGS["llama"])
    plan, facts, run = PLAIN.replaced(micro_batch=2, **values), sharded_facts(8, launch_path), []
    traced = fake_run.micro_steps
    monkeypatch.setattr(fake_run, "micro_steps", lambda *a, **k: run.append(k["accumulation"]) or traced(*a, **k))

    def part(value, known=None):
        with like_a_process_of_its_own():
            one = plan.replaced(sync_each_batch=value)
            return trace_job.micro_part(one, facts, tmp_path, tmp_path, known=known)

    known = trace_job.Known()
    part("on", known)
    derived = part("off", known)
    assert run == [2, 2]
    by_itself = part("off")
    assert run[2:] == [2, 1]
    for rows in (1, 5):
        mine, other = (one.exchanges(1, rows) for one in (derived, by_itself))
        assert all(np.array_equal(getattr(mine, one.name), getattr(other, one.name)) for one in fields(mine))
        ends = [one.alone.live(rows)[one.alone.starts[1] - 1 :].tolist() for one in (derived, by_itself)]
        assert ends[0] == ends[1], "from the first forward pass on"


@pytest.mark.slow
def test_the_trace_sees_what_it_saves_and_what_it_sends(tmp_path):
    write_config(tmp_path, CONFIGS["llama"])
    facts = sharded_facts(8)

    def traced(value):
        plan = PLAIN.replaced(parallel="fsdp", micro_batch=2, sync_each_batch=value)
        with like_a_process_of_its_own():
            micro = trace_job.micro_part(plan, facts, tmp_path, tmp_path)
        sent = collectives.collectives_of(micro.exchanges(4))
        reduced = sent.n == collectives.COLLECTIVES.index("reduce_scatter")
        end = int(micro.tape.starts[micro.tape.segments.index("1:pre")])
        return float(micro.tape.live(2)[end - 1]), float(sent.calls[reduced] @ sent.moved_bytes[reduced])

    (each, each_sent), (last, last_sent) = traced("on"), traced("off")
    assert each_sent == pytest.approx(4 * last_sent)
    assert each < 0.5 * last, "no whole gradients after the first micro-step"


@pytest.mark.slow
def test_alone_a_process_keeps_no_gradients_on_the_device(tmp_path):
    """Between micro-steps they wait where the parameters do."""
    write_config(tmp_path, CONFIGS["llama"])
    facts = sharded_facts(1)

    def held(value):
        plan = PLAIN.replaced(parallel="fsdp", offload="parameters", micro_batch=2, sync_each_batch=value)
        with like_a_process_of_its_own():
            micro = trace_job.micro_part(plan, facts, tmp_path, tmp_path)
        end = int(micro.tape.starts[micro.tape.segments.index("1:pre")])
        return float(micro.tape.live(2)[end - 1]), sum(micro.weights), micro.host_bytes

    (each, _, host), (last, _, _) = held("on"), held("off")
    assert last - each == pytest.approx(host, rel=0.01)
