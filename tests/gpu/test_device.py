"""Trials on a real CUDA device: every offered choice, the ceiling, and what is left behind."""

import dataclasses
import json
from pathlib import Path

import pytest

from autofit import space
from autofit.commands.model_source import fetch, modeling_module
from autofit.contract.facts import Facts
from autofit.contract.outcome import Measured, OutOfMemory, Unsupported
from autofit.contract.plan import Plan
from autofit.machine.nvml import device_used_bytes
from autofit.registry import technique
from autofit.system.forking.server import ForkServer
from autofit.system.units import MIB
from autofit.training.runner import ProcessRunner
from autofit.training.timing import Effort
from tests.gpu import trials
from tests.gpu.card import facts_on_card
from tests.gpu.models import LLAMA

QUICK = Effort(min_steps=2, max_steps=3, seconds=1.0)
PLAIN = trials.PLAIN.replaced(micro_batch=4, accumulation=2)

NO_KNOBS = {"parallel", "sync_each_batch", "micro_batch", "accumulation", "batching", "loader"}
"""Of several cards, or of scripts and their rows."""
KNOBS = tuple(name for name in PLAIN if name not in NO_KNOBS)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A server, the facts of this device, and a runner factory."""
    folder = tmp_path_factory.mktemp("gpu")
    source = folder / "source.json"
    source.write_text(json.dumps(LLAMA))
    config = fetch(str(source), folder / "model")
    server = ForkServer(folder / "server.log", "cuda", modeling_module(config))
    facts = facts_on_card(server, config)
    yield Bench(folder, config, server, facts)
    server.close()


class Bench:
    def __init__(self, folder: Path, config: Path, server: ForkServer, facts: Facts) -> None:
        self.folder, self.config, self.server, self.facts = folder, config, server, facts
        self.number = 0

    def run(self, plan: Plan, **work):
        facts = dataclasses.replace(self.facts, workload=dataclasses.replace(self.facts.workload, **work))
        runner = ProcessRunner(self.folder / "trials", facts, self.config, self.server)
        self.number += 1
        return runner.run(self.number, plan, QUICK, purpose="search", limit_seconds=300).outcome

    def plan(self, **values) -> Plan:
        return PLAIN.replaced(**values)


def values(name):
    """Every value that any machine may offer; what this one withholds is skipped inside the test."""
    return {
        "precision": ["fp32", "tf32", "bf16", "fp16", "bf16_weights", "fp8"],
        "attention": ["default", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"],
        "kernels": ["none", "chunked_ce", "liger_fused_ce", "liger"],
        "checkpointing": ["off", "full", "every_2", "every_4", "selective", "full_offload"],
        "adapter": ["none", "lora:r=16", "rslora:r=16", "dora:r=16", "ia3"],
        "quantization": ["none", "nf4", "int8", "int8_torchao", "int4_torchao"],
        "optimizer": [
            "adamw", "adamw_8bit", "paged_adamw_8bit", "paged_adamw", "adamw_torchao_8bit", "adamw_torchao_4bit",
            "adamw_torchao_8bit_stochastic", "adamw_torchao_4bit_stochastic",
            "adafactor", "sgd", "lion", "lion_8bit", "paged_lion_8bit", "ademamix", "ademamix_8bit",
            "paged_ademamix_8bit", "galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw", "lomo",
            "adalomo", "schedule_free_adamw", "schedule_free_radam", "stable_adamw",
        ],
        "offload": ["none", "activations", "optimizer", "parameters"],
        "compile": ["off", "regions", "model", "model_max_autotune", "cuda_graphs"],
    }[name]  # fmt: skip


def half_precision(facts):
    """The one of 16 bits that the card computes by itself."""
    return "bf16" if "bf16" in facts.hardware.precisions else "fp16"


GRAPHS = {"model_max_autotune", "cuda_graphs"}
"""Their pools are not emulated."""
CHOICES = [
    pytest.param(name, value, marks=pytest.mark.values if value in GRAPHS else ())
    for name in KNOBS
    for value in values(name)
]


@pytest.mark.parametrize("path", ["trainer", "loop"])
@pytest.mark.parametrize(("name", "value"), CHOICES)
def test_every_choice_runs_and_takes_effect(bench, path, name, value):
    facts = dataclasses.replace(bench.facts, workload=dataclasses.replace(bench.facts.workload, launch_path=path))
    choice = next(c for n, c in space.offers(facts) if n == name and c.value == value)
    if choice.status == "withheld":
        pytest.skip(choice.reason)
    more = {"micro_batch": 8, "accumulation": 1} if "lomo" in value else {}  # it can't accumulate
    more |= {"adapter": "lora:r=16"} if name == "quantization" else {}
    more |= {"precision": "bf16_weights"} if "stochastic" in str(value) or value == "int8_torchao" else {}
    more |= {"parallel": "fsdp"} if (name, value) == ("offload", "parameters") else {}
    if name == "compile":
        more |= {"precision": half_precision(facts)}  # Inductor compiles no bf16 for a card that has none
    outcome = bench.run(bench.plan(**more, **{name: value}), launch_path=path)
    assert isinstance(outcome, Measured), outcome
    assert outcome.outside_bytes > 50 * MIB
    assert outcome.allocated_bytes <= outcome.reserved_bytes < outcome.peak_bytes <= outcome.limit_bytes


@pytest.mark.parametrize("kernels", ["chunked_ce", "liger"])
def test_layers_are_compiled_beside_a_loss_of_another_kind(bench, kernels):
    offers = {(name, choice.value): choice for name, choice in space.offers(bench.facts)}
    for wanted in (("kernels", kernels), ("compile", "regions")):
        if offers[wanted].status == "withheld":
            pytest.skip(offers[wanted].reason)
    plan = bench.plan(kernels=kernels, compile="regions", checkpointing="full", precision=half_precision(bench.facts))
    refused = technique("compile").conflict("regions", plan, bench.facts)
    if refused:
        pytest.skip(refused)
    outcome = bench.run(plan)
    assert isinstance(outcome, Measured), outcome


def test_checkpointing_and_offload_save_what_they_are_for(bench):
    big = {"micro_batch": 8, "accumulation": 1}
    plain = bench.run(bench.plan(**big))
    for saving in ({"checkpointing": "full"}, {"checkpointing": "full_offload"}, {"offload": "activations"}):
        saved = bench.run(bench.plan(**big, **saving))
        assert saved.allocated_bytes < 0.8 * plain.allocated_bytes
    small = {"micro_batch": 1, "accumulation": 8}
    state_bytes = 8 * bench.facts.model.parameters
    on_device = bench.run(bench.plan(**small))
    on_host = bench.run(bench.plan(**small, offload="optimizer"))
    assert on_device.allocated_bytes - on_host.allocated_bytes > 0.4 * state_bytes


@pytest.mark.values  # managed memory that nothing is written to takes no room on the host
def test_an_optimizer_that_is_offloaded_keeps_its_state_on_the_host(bench):
    small = {"micro_batch": 1, "accumulation": 8}
    on_device, on_host = (bench.run(bench.plan(**small, **more)) for more in ({}, {"offload": "optimizer"}))
    assert on_host.host_bytes - on_device.host_bytes > 0.8 * 8 * bench.facts.model.parameters


def test_a_tight_ceiling_is_an_out_of_memory_by_the_device_itself(bench):
    roomy = bench.run(bench.plan(micro_batch=8, accumulation=1))
    tight = bench.run(bench.plan(micro_batch=8, accumulation=1), limit_bytes=int(roomy.allocated_bytes * 0.7))
    assert isinstance(tight, OutOfMemory)
    assert tight.where == "device"
    assert tight.phase in {"forward", "backward", "optimizer"}


def test_a_ceiling_below_the_context_is_out_of_memory_too(bench):
    outcome = bench.run(bench.plan(), limit_bytes=64 * MIB)
    assert isinstance(outcome, OutOfMemory | Unsupported)
    assert isinstance(outcome, OutOfMemory)


def test_memory_comes_back_after_every_trial(bench):
    before = device_used_bytes(bench.facts.hardware.uuid)
    bench.run(bench.plan())
    bench.run(bench.plan(micro_batch=8, accumulation=1), limit_bytes=600 * MIB)
    runner = ProcessRunner(bench.folder / "trials", bench.facts, bench.config, bench.server)
    runner.settle()
    assert device_used_bytes(bench.facts.hardware.uuid) <= before + 64 * MIB
