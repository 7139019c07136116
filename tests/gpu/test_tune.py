"""The whole path on a device: tune, then a verified launch."""

import json

import pytest

import autofit
from autofit.commands.tune import tune
from autofit.commands.verify import verify
from autofit.contract.outcome import Measured
from autofit.system.units import GIB
from tests.gpu.card import EMULATED
from tests.gpu.models import LLAMA
from tests.support.families import ASKED_LENGTHS, CONFIGS

HELD = {
    "optimizer": "adamw",
    "attention": "default",
    "kernels": "none",
    "offload": "none",
    "checkpointing": "off",
    "compile": "off",
    "adapter": "none",
    "quantization": "none",
}
"""Each value more is a trace or two of the model."""
ANY_SPEED = 0.95
FAMILIES = ("bert-classes", "t5", "vit", "resnet", "segformer", "wav2vec2", "whisper", "clip")


def test_a_tune_keeps_its_promise_when_launched(tmp_path):
    source = tmp_path / "config.json"
    source.write_text(json.dumps(LLAMA))
    result = tune(
        str(source), output=tmp_path / "out", seq_len=512, global_batch=16, memory_limit=str(6 * GIB), trials=8
    )
    assert result.promise.peak_bytes <= 6 * GIB
    found = verify(tmp_path / "out", tolerance=ANY_SPEED if EMULATED else None)
    assert not found.broken, found


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_of_each_family_is_tuned_and_launched(name, tmp_path):
    task, config = CONFIGS[name]
    source = tmp_path / "config.json"
    source.write_text(json.dumps(config), "utf-8")
    folder = tmp_path / "out"
    autofit.tune(
        str(source), output=folder, device="cuda", trials=3, global_batch=4, seq_len=ASKED_LENGTHS.get(name), fix=HELD
    )
    assert autofit.load(folder).document.model.task == task
    found = verify(folder, steps=2, tolerance=ANY_SPEED)
    assert isinstance(found.outcome, Measured)
    assert not found.broken
