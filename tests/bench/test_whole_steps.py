"""Rows of published steps -> programs, seconds and reasons; and the figures of the bench on made-up predictions."""

import csv

import pytest

from tests.bench.fit_time_model import STEPS
from tests.bench.whole_steps import score, tracing
from tests.bench.whole_steps.cards import card_of
from tests.bench.whole_steps.clock import Seconds
from tests.bench.whole_steps.rows import Step, keep, read
from tests.bench.whole_steps.score import Scored

NEUSIGHT = {
    "gpu": "NVIDIA H100 80GB HBM3", "model": "gpt2_large", "mode": "train", "seq_len": "1024", "batch": "4",
    "variant": "", "e2e_latency": "639.0",
}  # fmt: skip
FOUNDRY = {
    "model": "mpt-1b", "seq_len_T": "2048", "gpus": "8", "gpu_type": "h100_80gb", "micro_batch": "4", "grad_accum": "2",
    "global_batch": "64", "tokens_per_s": "262144", "precision": "bf16", "activation_ckpt": "False",
    "act_cpu_offload": "False", "params": "1.3e9", "d_model": "2048", "n_heads": "16", "n_layers": "24",
    "mlp_ratio": "4", "vocab": "50368", "generation": "3",
}  # fmt: skip
LAMBDA = {
    "set": "v2 (NGC 22-24.x)", "gpu": "RTX 4090", "gpus": "1", "task": "bert_large_squad", "precision": "fp16",
    "batch": "32", "throughput": "64",
}  # fmt: skip
NVIDIA = {
    "framework": "PyTorch", "task": "LanguageModeling/BERT", "variant": "", "gpus": "1", "batch_per_gpu": "8 and 16",
    "hardware": "Fine-tuning NVIDIA DGX-1 With 32G | SQuAD", "section": "DGX-1 (8x V100 32G) > Fine-tuning",
    "accumulation": "", "seq_len": "", "precision": "mixed", "throughput": "52",
}  # fmt: skip
FILES = {
    "neusight_e2e.csv": NEUSIGHT,
    "llmfoundry_rows.csv": FOUNDRY,
    "lambda_throughput.csv": LAMBDA,
    "nvidia_deeplearningexamples.csv": NVIDIA,
}


def written(folder, **changed):
    """A folder that holds one row of each file, or of one file with some cells changed."""
    for name, row in FILES.items():
        if changed and changed["name"] != name:
            continue
        cells = row | {key: value for key, value in changed.items() if key != "name"}
        with (folder / name).open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(cells))
            writer.writeheader()
            writer.writerow(cells)
    return folder


def test_each_file_is_read_into_programs_and_seconds(tmp_path):
    neusight, foundry, lambda_labs, nvidia = read(written(tmp_path))
    assert (neusight.card.name, neusight.rows, neusight.seconds) == ("H100 SXM 80 GB", 4, 0.639)
    assert neusight.program.optimizer == "none"
    assert (foundry.rows, foundry.accumulation, foundry.world) == (4, 2, 8)
    assert foundry.seconds == 64 * 2048 / 262144
    assert dict(foundry.program.shape)["layers"] == 24
    assert foundry.program.low_precision_norm
    assert (lambda_labs.card.name, lambda_labs.seconds, lambda_labs.fp16) == ("RTX 4090", 0.5, True)
    assert (nvidia.card.name, nvidia.rows) == ("V100 SXM2 32 GB", 16)
    assert nvidia.seconds == pytest.approx(16 / 52)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"name": "neusight_e2e.csv", "gpu": "AMD Instinct MI210"}, "an AMD card"),
        ({"name": "neusight_e2e.csv", "model": "mamba"}, "no shape of 'mamba'"),
        ({"name": "neusight_e2e.csv", "variant": "tp4"}, "on several cards"),
        ({"name": "neusight_e2e.csv", "gpu": "NVIDIA H9000"}, "no card 'NVIDIA H9000'"),
        ({"name": "llmfoundry_rows.csv", "gpus": "12"}, "no whole nodes"),
        ({"name": "llmfoundry_rows.csv", "act_cpu_offload": "True"}, "offloaded"),
        ({"name": "llmfoundry_rows.csv", "gpu_type": "MI300X"}, "no capability, sms"),
        ({"name": "llmfoundry_rows.csv", "tokens_per_s": "n/a"}, "can't be read: could not convert"),
        ({"name": "llmfoundry_rows.csv", "tokens_per_s": "inf"}, "no numbers above zero"),
        ({"name": "lambda_throughput.csv", "task": "gnmt"}, "GNMT is not in transformers"),
        ({"name": "lambda_throughput.csv", "task": "new"}, "no program of 'new'"),
        ({"name": "lambda_throughput.csv", "throughput": "0"}, "the run failed"),
        ({"name": "nvidia_deeplearningexamples.csv", "framework": "TensorFlow"}, "TensorFlow's program"),
        (
            {
                "name": "nvidia_deeplearningexamples.csv",
                "hardware": "Pre-training",
                "accumulation": "4",
                "seq_len": "128",
            },
            "batches rows by length",
        ),
    ],
)
def test_a_row_that_is_not_expressed_says_why(tmp_path, changed, reason):
    (step,) = read(written(tmp_path, **changed))
    assert step.program is None
    assert reason in step.reason


def test_what_is_kept_is_read_as_it_was(tmp_path):
    keep(written(tmp_path), tmp_path / "kept")
    assert read(tmp_path / "kept") == read(tmp_path)


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("LambdaCloud V100 16GB", "V100 SXM2 16 GB"),
        ("A100 80GB SXM4", "A100 SXM 80 GB"),
        ("LambdaOD_1x_1xGH200_96GB_192-222-57-0_v2", "GH200 96 GB"),
        ("LambdaOD_test_1xB200_192GB_129-213-83-251_v2", "B200"),
        ("H200_140GB_SXM", "H200 SXM 141 GB"),
        ("RTX A5500", "RTX A5500"),
        ("4090 laptop", None),
        ("something else", None),
    ],
)
def test_cards_are_found_by_what_tables_call_them(name, card):
    found = card_of(name)
    assert (found.name if found else None) == card


def steps(paces, predicted):
    """Steps of one model on one card, with seconds a token as measured and as predicted."""
    return [
        Scored(
            step=Step(
                source="s", model="m", card_name="4090", card=card_of("4090"), configuration=str(place), tokens=1.0,
                seconds=one,
            ),
            predicted=Seconds(seconds=other, log_std=0.1),
        )
        for place, (one, other) in enumerate(zip(paces, predicted, strict=True))
    ]  # fmt: skip


def test_order_choice_and_interval_are_scored():
    found = score.summary(steps([1.0, 1.1, 1.2, 1.4], [1.05, 1.0, 1.2, 1.4]))
    assert found["rank_correlation"] == pytest.approx(4 / 6, abs=1e-4)
    assert found["choice_regret"] == {"groups": 1, "median": 0.1, "worst": 0.1}
    assert found["interval_coverage"] == 1.0
    assert found["steps"]["median_absolute_error"] == 0.025
    few = score.summary(steps([1.0, 1.1, 1.2], [3.0, 2.0, 1.0]))
    assert few["choice_regret"]["groups"] == 0
    assert few["rank_correlation"] == -1
    assert few["interval_coverage"] == pytest.approx(0.0)


def test_a_program_is_traced_and_kept_until_what_it_depends_on_changes(tmp_path, monkeypatch):
    program = next(step.program for step in read(STEPS) if step.program is not None)
    first = tracing.traced(program, tmp_path)
    assert first.calls.sum() > 0
    monkeypatch.setattr(tracing, "_trace", lambda _: pytest.fail("it is kept"))
    again = tracing.traced(program, tmp_path)
    assert (again.operators == first.operators).all()
