"""A process sees the emulated cards that CUDA_VISIBLE_DEVICES names, and counts its memory on them."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("HOLLOW_CARD" not in os.environ, reason="runs under python -m tests.hollow"),
]

PROGRAM = """
import json
import pynvml
import torch

devices = range(torch.cuda.device_count())
held = [torch.empty(2**30 * (device + 1), dtype=torch.uint8, device=device) for device in devices]
pynvml.nvmlInit()
cards = [pynvml.nvmlDeviceGetHandleByIndex(card) for card in range(pynvml.nvmlDeviceGetCount())]
print(json.dumps({
    "seen": [str(torch.cuda.get_device_properties(device).uuid)[-1] for device in devices],
    "held": [(total - free) // 2**30 for free, total in map(torch.cuda.mem_get_info, devices)],
    "shown": [pynvml.nvmlDeviceGetMemoryInfo(card).used // 2**30 for card in cards],
}))
"""


@pytest.mark.parametrize(
    ("visible", "seen", "shown"),
    [
        (None, "012", [1, 2, 3]),
        ("2,0", "20", [2, 0, 1]),
        ("GPU-5e5e5e5e-5e5e-5e5e-5e5e-5e5e5e5e5e01", "1", [0, 1, 0]),
        ("1,7,0", "1", [0, 1, 0]),
        ("", "", [0, 0, 0]),
    ],
)
def test_visible_cards(visible, seen, shown, tmp_path):
    environment = os.environ | {"HOLLOW_GPUS": "3", "HOLLOW_STATE": str(tmp_path / "state")}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "".join(found["seen"]) == seen
    assert found["held"] == [device + 1 for device in range(len(seen))]
    assert found["shown"] == shown
