"""What the device does in a second, timed as a tune times it, against what its datasheet says."""

import contextlib
import dataclasses
import json

import pytest

from autofit.commands import facts as facts_of
from autofit.commands.model_source import fetch, modeling_module
from autofit.machine import gpu_catalogue
from autofit.system.forking.server import ForkServer
from tests.gpu.card import facts_on_card
from tests.gpu.models import LLAMA_1B


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """Of this device, with its rates, for a model whose products fill it."""
    folder = tmp_path_factory.mktemp("rates")
    (folder / "source.json").write_text(json.dumps(LLAMA_1B))
    config = fetch(str(folder / "source.json"), folder / "model")
    said = []
    with contextlib.closing(ForkServer(folder / "server.log", "cuda", modeling_module(config))) as server:
        plain = facts_on_card(server, config)
        plain = dataclasses.replace(plain, workload=dataclasses.replace(plain.workload, seq_len=2048, global_batch=32))
        found = facts_of.with_rates(folder, plain, server, said.append)
    print(json.dumps(dict(found.rates)))
    assert not said
    return found


def test_every_precision_and_the_bus_are_timed(facts):
    matmuls = {f"matmul {precision}" for precision in facts.hardware.precisions}
    assert set(facts.rates) == {*matmuls, "attention", "memory", "transfer", "operators"}
    assert facts.kernel_overhead_bytes == {}, "the context is what the first trial tells"


@pytest.mark.speed
def test_sixteen_bits_are_faster_than_thirty_two(facts):
    half = facts.rates.get("matmul bf16") or facts.rates["matmul fp16"]
    assert half > 1.5 * facts.rates["matmul fp32"]
    assert 1e4 < facts.rates["operators"] < 1e7


@pytest.mark.speed
def test_no_rate_is_above_the_datasheet(facts):
    card = gpu_catalogue.matching(facts.hardware.name, facts.hardware.total_bytes)
    if card is None:
        pytest.skip("the catalogue does not know this card")
    peaks = {f"matmul {name}": card.peak(name) for name in facts.hardware.precisions}
    for kind, peak in {**peaks, "memory": card.bandwidth_bytes_per_second}.items():
        if peak:
            assert 0.1 * peak < facts.rates[kind] < 1.1 * peak, kind
