"""Measurements that others published, predicted without a device.

The whole table is run by ``tests/bench/estimate_bench.py``; these few stand for its kinds.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from published import bert, fake, litgpt, litgpt_rows, nanotron, predict, rows
from published.litgpt_configs import config_of
from published.rows import Row
from published.world_rows import WorldRow

from autofit.system.units import MIB

RESOURCE = "github Lightning-AI/litgpt@2685705 tutorials/resource-tables.md"
HUB = "github Lightning-AI/litgpt@2685705 config_hub/finetune/README.md + "
ALLOCATED = "decimal GB, torch.cuda.max_memory_allocated/1e9"
ALL = "; ".join(f"lora_{name}=true" for name in ("query", "key", "value", "projection", "mlp", "head"))


def row(model, measured, **told):
    """A row as the table has it."""
    common = {
        "params": "", "batch": "1", "seqlen": "512 (max)", "precision": "bf16-true", "optimizer": "AdamW",
        "method": "LoRA", "rank": "8 (q,v)", "checkpointing": "off", "attention": "", "other": "tier=A",
        "gpu": "1x A100", "unit_note": ALLOCATED, "source": RESOURCE,
    }  # fmt: skip
    return Row(model=model, measured_gb=str(measured), **{**common, **told})


pytestmark = pytest.mark.slow
ROWS = [
    row("phi-1.5", 4.82, seqlen="longest Alpaca sample = 1044 tok"),
    row("Llama 2", 14.14, params="7 B / trainable 4,194,304", seqlen="1304 tok", precision="bf16-true + bnb.nf4"),
    row("Llama 2", 22.55, params="13 B / trainable 6,553,600", seqlen="1304 tok", precision="bf16-true + bnb.nf4-dq"),
    row("Llama 2", 25.51, params="7 B", seqlen="1304 tok", method="LLaMA-Adapter v2", rank=""),
    row("falcon-7b", 16.69, rank="32", source=HUB + "falcon-7b/lora.yaml"),
    row("phi-2", 14.27, batch="4", precision="bf16-true + bnb.nf4", method="QLoRA", rank="8", other=ALL + "; tier=A",
        source=HUB + "phi-2/qlora.yaml"),
    row("llama-3.2-1b", 5.53, batch="2", precision="bf16-true + bnb.nf4", method="QLoRA", rank="32",
        source=HUB + "llama-3.2-1B/qlora.yaml"),
]  # fmt: skip


@pytest.mark.parametrize("published", ROWS, ids=lambda one: f"{one.model} {one.method} {one.precision}")
def test_a_published_peak_is_predicted(published):
    prediction = predict.predict(published)
    assert prediction.kind == "scored", prediction.reason
    assert prediction.predicted_bytes == pytest.approx(published.measured_bytes, rel=0.01)


def test_layers_that_are_copied_weigh_what_layers_that_are_traced_weigh():
    run = litgpt_rows.run_of(row("phi-1.5", 1.0, seqlen="1044 tok"))
    whole = fake.run(lambda: litgpt.build(run), lambda model, watch: litgpt.steps(run, model, watch), shorten=False)
    assert litgpt.predict(run).allocated_bytes == pytest.approx(fake.peak_of(whole).allocated_bytes, rel=1e-3)


def test_a_model_is_found_by_the_words_of_a_table():
    assert config_of("Llama 2", "13 B / trainable 6,553,600").n_layer == 40
    assert config_of("StableLM Alpha", "3 B / trainable 2,097,152").name == "stablelm-base-alpha-3b"
    assert config_of("mistral-7b-v0.2").n_query_groups == 8
    assert config_of("meta-llama/Llama-3.2-3B").n_layer == 28
    assert config_of("no such model") is None


def test_what_is_not_expressed_says_why():
    full = row(
        "llama-3.2-3b", 16.51, batch="4", method="full", rank="", gpu="1xA10G", source=HUB + "llama-3.2-3B/full.yaml"
    )
    sharded = predict.predict(full)
    assert sharded.kind == "none"
    assert "do not fit the card" in sharded.reason
    unknown = predict.predict(row("some model", 1.0, source="a blog", unit_note="GB as printed, metric not stated"))
    assert unknown.reason == "which counter was read is not stated"


@pytest.mark.parametrize(
    ("batch", "accumulation", "optimizer", "measured"),
    [(4, 1, "adamw", 14949), (4, 1, "adam8bit", 13085), (1, 4, "adamw", 8681)],
)
def test_state_in_8_bits_and_smaller_micro_batches_save_what_was_published(batch, accumulation, optimizer, measured):
    run = bert.Run(
        batch=batch, rows=512, accumulation=accumulation, mixed=False, checkpointing=False, optimizer=optimizer
    )
    assert bert.predict(run) == pytest.approx(measured * MIB, rel=0.01)


SWEPT = {
    "model": "llama-1.34B", "layers": "16", "hidden": "2048", "heads": "32", "kv_heads": "32", "intermediate": "8192",
    "vocab": "131072", "tied": "True", "seq_len": "4096", "gpus": "64", "micro_batch": "1", "grad_accum": "4",
    "dp": "64", "pp": "1", "tp": "1", "zero_stage": "1", "memory_gib": "23.76", "status": "measured",
    "source": "github vinjn/nanotron-ultrascale-playbook@924e4d0b88 assets/data/benchmarks/banner.html",
}  # fmt: skip


TUNED = {
    "model": "Llama-2-7B", "gpu": "RTX 3090", "gpus": "2", "parallelism": "FSDP full shard", "micro_batch": "4",
    "seq_len": "512", "memory_gib": "11.22", "memory_metric": "GiB reserved per GPU",
    "note": "QLoRA; length by the page text, not in this table",
    "source": "github AnswerDotAI/fsdp_qlora@05ed9f2 benchmarks_03_2024.md",
}  # fmt: skip


PRETRAINED = {
    "model": "see page", "gpu": "A100 40GB", "gpus": "8", "parallelism": "Replicated", "compile": "Eager",
    "memory_gib": "32.04", "memory_metric": "GB max allocated",
    "source": "github Lightning-AI/litgpt@26857050fe extensions/thunder/README.md",
}  # fmt: skip


WHOLE = {"zero_stage": "0", "grad_accum": "2", "memory_gib": "50.16", "micro_batch": "2"}
AT_ONCE = {"dp": "128", "gpus": "128", "grad_accum": "1", "micro_batch": "2", "memory_gib": "30.8"}


@pytest.mark.parametrize(
    ("told", "near"),
    [
        (SWEPT, 0.001),
        ({**SWEPT, **AT_ONCE}, 0.001),
        ({**SWEPT, **WHOLE}, 0.003),
        pytest.param(TUNED, 0.02, marks=pytest.mark.by_hand),
        (PRETRAINED, 0.01),
    ],
    ids=["nanotron", "nanotron without accumulation", "nanotron with DDP", "fsdp_qlora", "litgpt"],
)
def test_a_rank_of_a_published_world_is_predicted(told, near):
    row = WorldRow(told=told)
    prediction = predict.predict(row)
    assert prediction.kind == "scored", prediction.reason
    assert prediction.predicted_bytes == pytest.approx(row.measured_bytes, rel=near)


@pytest.mark.parametrize(
    ("whose", "told", "why"),
    [
        (SWEPT, {"tp": "8"}, "two modes"),
        (SWEPT, {"pp": "2"}, "of one stage"),
        (SWEPT, {"status": "failed"}, "it failed"),
        (SWEPT, {"memory_gib": ""}, "speed alone"),
        (SWEPT, {"layers": "?"}, "not stated: layers"),
        (SWEPT, {"source": "a blog", "parallelism": "FSDP"}, "no model of this program"),
        (TUNED, {"micro_batch": ""}, "not stated: micro_batch"),
        (TUNED, {"model": "Falcon-7B"}, "none of the page's"),
        (TUNED, {"note": "full"}, "none of the page's"),
        (TUNED, {"memory_metric": "GiB"}, "not what is reserved"),
        (PRETRAINED, {"compile": "Thunder"}, "fuses"),
        (PRETRAINED, {"parallelism": "Fully-sharded ZeRO 3"}, "FSDP"),
    ],
)
def test_a_row_of_a_world_that_is_not_expressed_says_why(whose, told, why):
    assert why in predict.predict(WorldRow(told={**whose, **told})).reason


def test_a_bucket_is_closed_by_the_parameter_that_fills_it():
    layer = [2048, 6291456 * 2, 4194304, 2048, 33554432, 16777216]
    assert nanotron.bucket_numels([268435456, *layer, 2048]) == [
        2048 + 16777216, 33554432, 2048 + 4194304 + 6291456 * 2, 2048 + 268435456,
    ]  # fmt: skip
    assert nanotron.bucket_numels([8, 4194304]) == [4194304, 8]


def test_a_table_is_read_by_its_columns(tmp_path):
    (tmp_path / "worlds.csv").write_text("model,gpus,memory_gib,micro_batch\nm,8,1.5,2\n", "utf-8")
    (tmp_path / "speeds.csv").write_text("model,speed\nm,8\n", "utf-8")
    (row,) = rows.read(tmp_path)
    assert (row.gpu, row.batch, row.measured_bytes) == ("8x ", "2x", 1.5 * 1024**3)
    with pytest.raises(ValueError, match="its columns are not those"):
        rows.read(tmp_path / "speeds.csv")
