"""A training that would take another global batch, another kind of device or another card is refused."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import accelerate
import pytest
import torch

from autofit.machine.describe import cpu_name
from autofit.machine.same_machine import check_same_machine, world_size
from autofit.system.errors import InputError, MachineError
from tests.support.synthetic import GIB, cpu_facts, cuda_facts

OUT = Path("out")
HERE = replace(cpu_facts(global_batch=16), hardware=replace(cpu_facts().hardware, name=cpu_name()))
CARD = cuda_facts(global_batch=16)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher and no Accelerate state of another test."""
    for name in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(accelerate.PartialState, "_shared_state", {})


@pytest.fixture
def cards(monkeypatch):
    """Shows this process some CUDA devices."""

    def show(name=CARD.hardware.name, memory=CARD.hardware.total_bytes, count=1):
        properties = SimpleNamespace(name=name, total_memory=memory)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    return show


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
@pytest.mark.parametrize("any_hardware", [False, True])
def test_another_number_of_processes_is_refused_on_any_hardware(monkeypatch, name, any_hardware):
    monkeypatch.setenv(name, "2")
    assert world_size() == 2
    with pytest.raises(InputError, match="runs on 2 processes, and the answer in out is for 1 process: ") as caught:
        check_same_machine(HERE, OUT, any_hardware=any_hardware)
    assert "an optimizer step would take 32 rows, not 16" in caught.value.message
    assert "\n" not in caught.value.message
    assert "accelerate launch --config_file out/accelerate.yaml" in caught.value.hint
    for_two = replace(HERE, workload=replace(HERE.workload, processes=2))
    check_same_machine(for_two, OUT, any_hardware=any_hardware)
    monkeypatch.delenv(name)
    with pytest.raises(InputError, match="an optimizer step would take 8 rows, not 16"):
        check_same_machine(for_two, OUT, any_hardware=any_hardware)


def test_torch_distributed_is_asked_before_the_launcher(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    assert world_size() == 4


def test_a_trainer_that_would_split_over_two_devices_is_refused(cards):
    cards(count=2)
    with pytest.raises(InputError, match=r"DataParallel.* 32 rows, not 16") as caught:
        check_same_machine(CARD, OUT, any_hardware=True)
    assert "CUDA_VISIBLE_DEVICES" in caught.value.hint
    check_same_machine(replace(CARD, workload=replace(CARD.workload, launch_path="loop")), OUT, any_hardware=True)


@pytest.mark.parametrize("any_hardware", [False, True])
def test_another_kind_of_device_is_refused(monkeypatch, any_hardware):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MachineError, match=r"runs on cpu, and the answer in out is for cuda"):
        check_same_machine(CARD, OUT, any_hardware=any_hardware)
    accelerate.PartialState._shared_state["device"] = torch.device("cuda", 0)
    with pytest.raises(MachineError, match=r"runs on cuda, and the answer in out is for cpu"):
        check_same_machine(HERE, OUT, any_hardware=any_hardware)


@pytest.mark.parametrize(("name", "memory"), [("NVIDIA T4", CARD.hardware.total_bytes), (CARD.hardware.name, GIB)])
def test_another_card_is_refused_unless_any_will_do(cards, name, memory):
    cards(name, memory)
    with pytest.raises(MachineError, match=f"runs on {name} with .* is for {CARD.hardware.name}") as caught:
        check_same_machine(CARD, OUT, any_hardware=False)
    assert "any_hardware=True" in caught.value.hint
    check_same_machine(CARD, OUT, any_hardware=True)


def test_the_same_card_passes(cards):
    cards(memory=CARD.hardware.total_bytes - 2**20)
    check_same_machine(CARD, OUT, any_hardware=False)


def test_another_processor_is_warned_of():
    with pytest.warns(UserWarning, match="out was tuned on Synthetic CPU, and this is"):
        check_same_machine(cpu_facts(), OUT, any_hardware=False)
    check_same_machine(cpu_facts(), OUT, any_hardware=True)
    check_same_machine(HERE, OUT, any_hardware=False)
