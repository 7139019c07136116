"""A real tune of a model of each family, and a launch of what it wrote."""

import json

import pytest

import autofit
from autofit.commands.verify import verify
from autofit.contract.outcome import Measured
from tests.support.families import ASKED_LENGTHS, CONFIGS
from tests.support.tiny import CPU_PRECISIONS

pytestmark = pytest.mark.slow

HELD = {"optimizer": "adamw", "attention": "default", "kernels": "none", "offload": "none", "checkpointing": "off"}
"""Each value more is a trace or two of the model."""


BY_HAND = [
    pytest.param(name, marks=pytest.mark.by_hand) for name in ("clip", "segformer", "t5", "vit", "wav2vec2", "whisper")
]


@pytest.mark.parametrize("name", ["bert-classes", *BY_HAND])
def test_a_model_of_each_family_is_tuned_and_launched(name, tmp_path):
    task, config = CONFIGS[name]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config), "utf-8")
    folder = tmp_path / "out"
    asked = {"device": "cpu", "trials": 3, "global_batch": 4, "seq_len": ASKED_LENGTHS.get(name)}
    autofit.tune(str(tmp_path / "model"), output=folder, **asked, fix=HELD, among={"precision": CPU_PRECISIONS})
    setup = autofit.load(folder)
    assert setup.document.model.task == task
    assert type(setup.model()).__name__ == config["architectures"][0]
    found = verify(folder, steps=2, tolerance=0.95)
    assert isinstance(found.outcome, Measured)
    assert not found.broken
