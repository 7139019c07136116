"""A value is in the search by default only where something recorded shows that it wins; here is what shows it."""

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from technique_table import PLAIN, SPLIT, read

from autofit.registry import techniques
from autofit.search.recordings.landscape import Landscape
from tests.support.synthetic import cpu_facts, cuda_facts, model
from tests.support.tiny import LANDSCAPES

PACKAGES = dict.fromkeys(
    ("peft", "bitsandbytes", "torchao", "deepspeed", "triton", "flash-attn", "flash-attn-3", "liger-kernel"), "1.0"
)
ELSEWHERE = {
    ("precision", "bf16"): "the fastest of five architectures in tests/bench/tune_bench.2026-11-21.json",
    ("precision", "bf16_weights"): "half of what float32 weights need: LitGPT's bf16-true in tests/bench/published",
    ("adapter", "lora:r=16"): "published, and traced, in tests/bench/anchors.2026-11-21.json",
    ("quantization", "nf4"): "the only plans of 7B in 8 GiB, in tests/bench/anchors.2026-11-21.json",
}
"""Shown by another record than a landscape."""
NOT_RECORDED = {
    ("precision", "tf32"), ("precision", "fp16"),
    ("attention", "sdpa"), ("attention", "flash_attention_2"), ("attention", "flash_attention_3"),
    ("kernels", "liger"),
    ("optimizer", "paged_adamw_8bit"),
    ("offload", "activations"), ("offload", "optimizer"), ("offload", "parameters"),
    ("parallel", "fsdp"), ("parallel", "zero2"), ("parallel", "zero3"), ("sync_each_batch", "on"),
    ("compile", "regions"), ("compile", "model"),
}  # fmt: skip
"""Nothing but a GPU can show it, or no model on a CPU has the choice: in the search by what was published."""


@pytest.fixture(scope="module")
def rows():
    return read()


def statuses(facts):
    """What is said of each value that is not the baseline."""
    return {
        (one.name, choice.value): choice.status
        for one in techniques()
        for choice in one.choices(facts)
        if one.name not in SPLIT and choice.value != PLAIN[one.name]
    }


def machines():
    everywhere = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
    on_cpu, on_cuda = cpu_facts(global_batch=12), cuda_facts(global_batch=12)
    for attention in ("sdpa", "eager"):
        known = model(attention=attention, attentions=everywhere, plain_head=True, liger=True)
        hardware = dataclasses.replace(on_cpu.hardware, precisions=("fp32", "bf16"))
        yield dataclasses.replace(on_cpu, model=known, hardware=hardware, packages=PACKAGES)
        for capability in ((7, 0), (8, 0), (9, 0)):
            precisions = ("fp32", "fp16") if capability < (8, 0) else ("fp32", "tf32", "bf16", "fp16")
            hardware = dataclasses.replace(on_cuda.hardware, capability=capability, precisions=precisions)
            yield dataclasses.replace(on_cuda, model=known, hardware=hardware, packages=PACKAGES)


def test_what_is_searched_was_seen_to_win(rows):
    won = {(row["technique"], row["value"]) for row in rows if row["wins"]}
    searched = {value for facts in machines() for value, status in statuses(facts).items() if status == "offered"}
    assert searched - won - ELSEWHERE.keys() - NOT_RECORDED == set(), "searched, and nothing shows that it wins"
    assert not (won & NOT_RECORDED), "it was recorded"
    assert NOT_RECORDED | ELSEWHERE.keys() <= searched, "no longer searched"


def test_what_was_seen_to_win_is_searched(rows):
    won = {(row["technique"], row["value"]) for row in rows if row["wins"]}
    on_cpu = [statuses(facts) for facts in machines() if facts.hardware.device == "cpu"]
    searched = {value for found in on_cpu for value, status in found.items() if status == "offered"}
    assert won <= searched


def test_every_landscape_has_its_rows(rows):
    folder = LANDSCAPES
    assert {row["landscape"] for row in rows} == {path.name.split(".")[0] for path in folder.glob("*.jsonl.gz")}
    for row in rows:
        assert row["pairs"] > 50
        assert 0.5 < row["time"] < 5
        assert 0.3 < row["memory"] < 2


def test_a_win_is_the_best_plan_with_a_value_against_the_best_without(rows):
    """By hand, for one of them."""
    land = Landscape.read(LANDSCAPES / "llama.jsonl.gz")
    row = next(
        row
        for row in rows
        if (row["landscape"], row["technique"], row["value"]) == ("llama", "checkpointing", "every_2")
    )
    naive = land.best(1 << 50).replaced(
        micro_batch=12, accumulation=1, precision="fp32", kernels="none", checkpointing="off", optimizer="adamw"
    )
    limit = row["at"] * max(run.outcome.allocated_bytes + run.outcome.outside_bytes for run in land.of(naive))
    best = land.best(limit)
    assert best["checkpointing"] == "every_2"
    others = [plan for plan in land.runs if plan["checkpointing"] != "every_2" and land.fits(plan, limit)]
    assert min(map(land.seconds, others)) / land.seconds(best) - 1 == pytest.approx(row["ahead"], abs=1e-3)
