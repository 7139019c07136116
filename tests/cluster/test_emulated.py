"""A tune over three machines with emulated cards, one of them killed in the middle.

By hand, in an emulated environment that has Ray: ``python -m tests.hollow -- python -m pytest -n 0 -m "" THIS``.
"""

import importlib.util
import os

import pytest

import autofit
from autofit.contract.outcome import Measured
from autofit.registry import techniques
from tests.support.machines import Killer, local_cluster, nothing_is_left

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("HOLLOW_CARD" not in os.environ, reason="runs under python -m tests.hollow"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray"),
]

SEARCHED = {"micro_batch", "accumulation", "parallel"}
HELD = [f"{one.name}={one.baseline}" for one in techniques() if one.name not in SEARCHED]


def other_processes():
    """Processes that hold memory of a card, but for this one."""
    import pynvml

    pynvml.nvmlInit()
    cards = [pynvml.nvmlDeviceGetHandleByIndex(card) for card in range(pynvml.nvmlDeviceGetCount())]
    held = [one.pid for card in cards for one in pynvml.nvmlDeviceGetComputeRunningProcesses(card)]
    return [pid for pid in held if pid != os.getpid()]


@pytest.mark.parametrize(("cards", "processes", "machines"), [(1, 1, 1), (1, 2, 2), (2, 4, 2)])
def test_a_machine_that_is_killed_costs_its_trial_and_nothing_else(cards, processes, machines, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HOLLOW_GPUS", str(3 * cards))
    monkeypatch.setenv("HOLLOW_STATE", str(tmp_path / "state"))
    asked = {
        "device": "cuda", "seq_len": 64, "global_batch": 16, "trials": 4, "processes": processes, "nodes": machines,
        "memory_limit": "8GiB", "guard": False, "among": {"micro_batch": [1, 4, 16 // processes]},
        "fix": [*HELD, f"parallel={'ddp' if processes > 1 else 'none'}"],
    }  # fmt: skip
    with local_cluster() as local:
        for place in range(3):
            seen = ",".join(str(place * cards + card) for card in range(cards))
            local.joins(f"machine-{place}", {"CUDA_VISIBLE_DEVICES": seen}, num_gpus=cards)
        killer = Killer(local, at=1)
        found = autofit.tune("demo", output=tmp_path / "out", on=local.address, events=killer, **asked)
        nothing_is_left()
    assert " was lost with its host on " in " ".join(killer.notes)
    assert {type(one.outcome) for one in found.document.trials} == {Measured}
    assert found.plan["micro_batch"] == 16 // processes
    assert other_processes() == []
