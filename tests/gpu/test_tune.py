"""The whole path on a device: tune, then a verified launch."""

import json

from autofit.commands.tune import tune
from autofit.commands.verify import verify
from autofit.system.units import GIB
from tests.gpu.models import LLAMA


def test_a_tune_keeps_its_promise_when_launched(tmp_path):
    source = tmp_path / "config.json"
    source.write_text(json.dumps(LLAMA))
    result = tune(
        str(source), output=tmp_path / "out", seq_len=512, global_batch=16, memory_limit=str(6 * GIB), trials=8
    )
    assert result.promise.peak_bytes <= 6 * GIB
    found = verify(tmp_path / "out")
    assert not found.broken, found
