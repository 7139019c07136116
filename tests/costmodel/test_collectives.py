"""The seconds of collectives: bounds of the law, what hides, and what a traced step sends."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from autofit.costmodel.seconds import collectives
from autofit.costmodel.seconds.collectives import COLLECTIVES, collective, exposed, links_of, seconds
from autofit.costmodel.seconds.operator_time import COLUMNS, Operators
from autofit.costmodel.tracing import trace_job
from autofit.machine import gpu_catalogue
from tests.support.tiny import write_config
from tests.support.traced import CONFIGS, PLAIN, facts_of, like_a_process_of_its_own, sharded_facts

A100 = gpu_catalogue.find("A100 SXM 80 GB")
GIB = float(1 << 30)


def took(kind, payload, ranks, nodes=1, stride=1, card=A100):
    links = links_of(card, processes=max(ranks, ranks * stride), nodes=nodes)
    return float(seconds(Operators.of([collective(kind, payload, ranks, stride)]), links)[0])


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_no_collective_beats_its_link_by_more_than_a_switch_that_adds(kind):
    wire = (2 if kind == "all_reduce" else 1) * 7 / 8 * GIB
    assert took(kind, GIB, 8) > wire / A100.nvlink_bytes_per_second
    assert took(kind, GIB, 8) < took(kind, 2 * GIB, 8) < 2.5 * took(kind, GIB, 8)
    assert took(kind, GIB, 8) < took(kind, GIB, 16, nodes=2) < took(kind, GIB, 64, nodes=8)
    assert took(kind, 1.0, 8) > 1e-5  # what every rank waits for


def test_cards_without_nvlink_talk_over_their_bus():
    assert took("all_reduce", GIB, 2, card=gpu_catalogue.find("RTX 4090")) > 5 * took("all_reduce", GIB, 2)


def test_copies_in_one_machine_need_no_network_and_those_in_several_share_it():
    alone = took("all_reduce", GIB, 2, nodes=1, stride=4)
    assert alone == pytest.approx(took("all_reduce", GIB, 2), rel=1e-6)
    assert took("all_reduce", GIB, 2, nodes=2, stride=8) > 2 * alone


def test_what_is_longer_than_what_it_runs_beside_stays():
    whole, once = np.array([4.0]), np.array([1])
    unhidden = collectives.coefficients()["fit"]["unhidden"]
    assert exposed(np.array([1.0]), whole, "fsdp", once) == pytest.approx(unhidden)
    assert exposed(np.array([9.0]), whole, "fsdp", once) == pytest.approx(5 + 4 * unhidden)
    # DDP sends beside the backward pass of the last micro-step alone
    assert exposed(np.array([1.0]), whole, "ddp", np.array([8])) > exposed(np.array([1.0]), whole, "ddp", once)


def test_deepspeed_sends_gradients_and_weights():
    """As it is known, where no trace has it; else as it is traced."""
    none = Operators.from_rows(np.zeros((0, len(COLUMNS))), np.zeros(0))
    micro = SimpleNamespace(weights=np.array([4 * 10**9]), exchanges=lambda *_: none)
    work = dataclasses.replace(facts_of("llama").workload, processes=4)

    def sent(stage, accumulation):
        found = collectives.step_collectives(micro, f"zero{stage}", work, accumulation, half=True)
        return float(found.calls @ found.moved_bytes) / 2e9

    assert [sent(stage, 1) for stage in (1, 2, 3)] == [2, 2, 3]  # each in 16 bits
    assert [sent(stage, 4) for stage in (1, 2, 3)] == [2, 5, 12]
    traced = Operators.of([collective("all_gather", 6e9, 4)])
    micro.exchanges = lambda *_: traced
    assert sent(3, 4) == 3


@pytest.mark.slow
def test_the_trace_of_a_sharded_step_holds_its_collectives(tmp_path):
    write_config(tmp_path, CONFIGS["llama"])
    facts = sharded_facts(4)

    def sent(parallel, *accumulations):
        plan = PLAIN.replaced(parallel=parallel, precision="bf16", micro_batch=2)
        with like_a_process_of_its_own():
            micro = trace_job.micro_part(plan, facts, tmp_path, tmp_path)
        payloads = []
        for accumulation in accumulations:
            found = collectives.collectives_of(micro.exchanges(accumulation))
            payloads.append({})
            for code, ranks, stride in {*zip(found.n, found.m, found.k, strict=True)}:
                mine = (found.n == code) & (found.m == ranks) & (found.k == stride)
                key = COLLECTIVES[int(code)], int(ranks), int(stride)
                payloads[-1][key] = float(found.calls[mine] @ found.moved_bytes[mine])
        return payloads

    # everything is gathered twice but for the last unit; what is reduced is everything, in the last micro-step alone
    once, thrice = sent("fsdp", 1, 3)
    whole = once["reduce_scatter", 4, 1]
    assert 1.9 * whole < once["all_gather", 4, 1] < 2 * whole
    assert thrice == {("all_gather", 4, 1): 3 * once["all_gather", 4, 1], ("reduce_scatter", 4, 1): whole}
    assert sent("fsdp:noreshard", 1) == [{("all_gather", 4, 1): whole, ("reduce_scatter", 4, 1): whole}]
    (hybrid,) = sent("hsdp:2x2", 1)
    assert hybrid == {
        ("all_gather", 2, 1): once["all_gather", 4, 1],
        ("reduce_scatter", 2, 1): whole,
        ("all_reduce", 2, 2): whole / 2,
    }
