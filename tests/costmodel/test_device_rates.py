"""The device is timed before the first trial: which kinds of work, on what shapes, and what the search makes of it."""

import dataclasses

import numpy as np
import pytest
import torch

from autofit import space
from autofit.commands import facts as facts_of
from autofit.costmodel import device_rates, forecast
from autofit.costmodel.jobs import RatesJob, _timed
from autofit.costmodel.seconds.roofline import WORK, nominal_seconds
from autofit.search.sampler import AutofitSampler
from autofit.search.surrogate.peak_model import traced_posterior
from autofit.search.surrogate.posterior import surrogate
from autofit.system.errors import MachineError
from autofit.system.units import MIB
from autofit.training.tasks.choose import describe_model
from tests.support.synthetic import cpu_facts, cuda_facts, model
from tests.support.tiny import CONFIGS, write_config

BF16 = WORK.index("matmul bf16")
SMALL = model(hidden_size=32, vocab_size=64, products=((32, 32, 8), (32, 64, 4), (64, 32, 2), (32, 128, 1)))


def small(**changes):
    facts = cpu_facts(seq_len=16, global_batch=8)
    hardware = dataclasses.replace(facts.hardware, threads=1, **changes)
    return dataclasses.replace(facts, model=SMALL, hardware=hardware)


def test_every_kind_of_work_that_the_device_has_is_timed():
    found = device_rates.rates_of(small())
    assert set(found) == {"matmul fp32", "matmul bf16", "attention", "memory", "operators"}
    assert all(np.isfinite(rate) and rate > 0 for rate in found.values())
    only = device_rates.rates_of(small(precisions=("fp32",)))
    assert set(only) == {"matmul fp32", "attention", "memory", "operators"}


def test_a_slower_product_has_a_lower_rate(monkeypatch):
    def took(*asked):
        return 2.0 if torch.bfloat16 in asked else 0.5

    monkeypatch.setattr(device_rates, "_product_seconds", took)
    facts = small()
    found, tokens = device_rates.rates_of(facts), device_rates.tokens_of(facts, 160)
    assert tokens == 32
    assert found["matmul fp32"] == 4 * found["matmul bf16"]
    heaviest = sorted((a * b * n for a, b, n in SMALL.products), reverse=True)[:4]
    assert found["matmul fp32"] == pytest.approx(6 * tokens * sum(heaviest) / (0.5 * (8 + 4 + 2 + 1)))


def test_linear_layers_are_counted_also_where_their_weight_lies_the_other_way_round(tmp_path):
    llama = describe_model("llama", write_config(tmp_path / "llama", CONFIGS["llama"]), trust_remote_code=False)
    assert sorted(map(tuple, llama["products"])) == [(32, 32, 8), (32, 64, 4), (32, 128, 1), (64, 32, 2)]
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 40, "n_positions": 24}
    gpt2 = describe_model(
        "gpt2", write_config(tmp_path / "gpt2", {"model_type": "gpt2"}, **sizes), trust_remote_code=False
    )
    assert sorted(map(tuple, gpt2["products"])) == [(16, 16, 1), (16, 40, 1), (16, 48, 1), (16, 64, 1), (64, 16, 1)]


def test_what_a_set_of_products_takes_is_bounded():
    large = ((8192, 28672, 160), (28672, 8192, 80), (8192, 8192, 160), (8192, 128256, 1))
    facts = dataclasses.replace(cpu_facts(seq_len=4096, global_batch=64), model=model(products=large))
    assert 16 <= device_rates.tokens_of(facts, 8192 + 28672) < 32
    assert all(wide * narrow <= 1 << 26 and wide <= narrow for wide, narrow, _ in device_rates.shapes_of(facts))
    head = dataclasses.replace(facts, model=model(products=((2048, 128256, 1), (5120, 13824, 80))))
    assert device_rates.shapes_of(head) == [(5120, 13107, 80), (2048, 32768, 1)]
    assert device_rates.tokens_of(small(), 160) == 32, "a quarter of the batch"
    tight = dataclasses.replace(small(), workload=dataclasses.replace(small().workload, limit_bytes=1 * MIB))
    assert device_rates.tokens_of(tight, 1500) == 21
    assert device_rates.tokens_of(tight, 50) == 32
    assert device_rates.tokens_of(tight, 5000) == 16
    assert device_rates.shapes_of(cuda_facts()) == [(1024, 4096, 1)], "what a model of an older recording counts as"


def test_kernels_take_memory_on_a_cpu_alone():
    assert device_rates.kernel_overhead_bytes(cuda_facts()) == {}
    found = device_rates.kernel_overhead_bytes(small())
    assert set(found) == {"matmul bf16"}
    assert 0 <= found["matmul bf16"] < 200 * MIB
    assert device_rates.kernel_overhead_bytes(small(precisions=("fp32",))) == {}


def test_a_device_that_can_not_is_told_in_words(monkeypatch):
    def refuse(_):
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(device_rates, "rates_of", refuse)
    assert _timed(RatesJob(facts=small())) == {"error": "RuntimeError: no kernel image"}


class Server:
    """Answers as a helper process does."""

    def __init__(self, answer):
        self.answer = answer

    def ask(self, folder, job, **_):
        assert job.kind == "rates"
        server = self

        class Given:
            def __enter__(self):
                if isinstance(server.answer, Exception):
                    raise server.answer
                return server.answer

            def __exit__(self, *_):
                pass

        return Given()


def test_the_facts_take_what_was_timed_and_a_tune_does_without(tmp_path):
    said = []
    facts = facts_of.with_rates(
        tmp_path, small(), Server({"rates": {"memory": 2e10}, "kernel_overhead_bytes": {"matmul bf16": 5}}), said.append
    )
    assert facts.rates == {"memory": 2e10}
    assert facts.kernel_overhead_bytes == {"matmul bf16": 5}
    assert not said
    for answer, why in (({"error": "no kernel"}, "no kernel"), (None, "took too long")):
        assert facts_of.with_rates(tmp_path, small(), Server(answer), said.append).rates == {}
        assert why in said[-1]
    assert facts_of.with_rates(tmp_path, small(), Server(MachineError("a helper was killed")), said.append).rates == {}
    assert said[-1] == "the device was not timed before the first trial: a helper was killed"


def test_rates_stand_in_the_place_of_what_is_usual():
    usual = nominal_seconds(None, on_cpu=True, threads=2)
    timed = nominal_seconds(None, on_cpu=True, threads=2, rates={"matmul bf16": 5e11, "memory": 0.0, "warp": 3.0})
    assert timed[BF16] == 1 / 5e11
    timed[BF16] = usual[BF16]
    assert (timed == usual).all(), "what is not known, and what can't be, changes nothing"


FACTS = dataclasses.replace(
    cpu_facts(), rates={"matmul fp32": 1e11, "matmul bf16": 1e11}, kernel_overhead_bytes={"matmul bf16": 64 * MIB}
)
SPACE = space.build(FACTS)
IN_BF16 = np.array([str(plan["precision"]).startswith("bf16") for plan in SPACE.plans])


def cast(facts):
    """Every plan has the same work, in its own precision, and needs the same."""
    count = len(SPACE.plans)
    work = np.zeros((count, len(WORK)))
    work[:, 0], work[:, BF16] = np.where(IN_BF16, 0.0, 1e11), np.where(IN_BF16, 1e11, 0.0)
    return forecast.Forecast(
        tensor_bytes=np.full(count, 100.0 * MIB),
        seconds=np.full(count, np.nan),
        work=work,
        nominal=forecast.nominal_of(facts, None),
        known_card=False,
        timed=bool(facts.rates),
        approximate=np.zeros(count, dtype=bool),
        peak_prior=forecast.peak_prior(facts.hardware),
        kernel_overhead_bytes=forecast.kernel_overhead_bytes(facts, work),
        activation_bytes=np.zeros(count),
    )


@pytest.mark.parametrize(("rate", "begins"), [(1e13, True), (1e8, False)])
def test_the_search_begins_with_the_precision_that_is_fast_here(rate, begins):
    facts = dataclasses.replace(FACTS, rates={**FACTS.rates, "matmul bf16": rate})
    sampler = AutofitSampler(SPACE, limit_bytes=1 << 50, forecast=cast(facts))
    assert IN_BF16[sampler.suggest(()).plan] == begins


def test_what_is_timed_is_believed_more_than_what_is_usual():
    timed, usual = (surrogate(SPACE, cast(facts)).time for facts in (FACTS, dataclasses.replace(FACTS, rates={})))
    assert (timed.parts_std < usual.parts_std).all()


def test_kernels_count_in_what_a_plan_needs():
    known = cast(FACTS)
    assert set(known.kernel_overhead_bytes[IN_BF16]) == {64.0 * MIB}
    assert set(known.kernel_overhead_bytes[~IN_BF16]) == {0.0}
    assert (known.device_bytes[IN_BF16] - known.device_bytes[~IN_BF16][0] == 64 * MIB).all()
    kernel = surrogate(SPACE, known).peak_residual
    before = traced_posterior(known, kernel, observed=np.array([], dtype=int), peaks=np.array([]), noise=np.array([]))
    assert np.allclose(before.mean, known.device_bytes)
    seen = np.flatnonzero(IN_BF16)[:2]
    after = traced_posterior(known, kernel, observed=seen, peaks=known.device_bytes[seen], noise=np.full(2, 0.4))
    assert np.allclose(after.mean, known.device_bytes), "as it was expected: nothing is learned"
    assert after.scatter == pytest.approx(0.0, abs=1e-9)
