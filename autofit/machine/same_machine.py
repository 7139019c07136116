"""Whether a training runs where its answer holds: as many processes, the same kind of device, the same card."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from typing import TYPE_CHECKING, Any

from autofit.machine import gpu_catalogue
from autofit.machine.describe import cpu_name
from autofit.system.errors import InputError, MachineError
from autofit.system.units import size

if TYPE_CHECKING:
    from pathlib import Path

    from autofit.contract.facts import Facts, Hardware

_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables that tell Accelerate how many processes a launcher has started."""
_SAME_MEMORY = 0.05
"""How much the memory of two cards of one name may differ: a driver reserves a little, a partition is far smaller."""


def check_same_machine(facts: Facts, folder: Path, *, any_hardware: bool) -> None:
    """Refuse to train where the answer's global batch, speed or memory would be others.

    Args:
        facts: Of the answer.
        folder: Of the answer, for the words.
        any_hardware: Let another card or another processor pass.

    Raises:
        InputError: The training runs on another number of processes, so that its global batch would be another.
        MachineError: It runs on another kind of device, or on another card.
    """
    _check_processes(facts, folder)
    _check_device(facts.hardware, folder, any_hardware=any_hardware)


def other_world(facts: Facts, folder: Path | str) -> str | None:
    """That a training here runs on another number of processes than the answer is for, in words; ``None`` if not."""
    work, found = facts.workload, world_size()
    if found == work.processes:
        return None
    here, wanted = (f"{count} process{'es' if count > 1 else ''}" for count in (found, work.processes))
    rows = work.global_batch * found // work.processes
    return (
        f"runs on {here}, and the answer in {folder} is for {wanted}: an optimizer step would take {rows} rows, not "
        f"{work.global_batch}"
    )


def _check_processes(facts: Facts, folder: Path) -> None:
    work, found = facts.workload, world_size()
    other = other_world(facts, folder)
    if other is not None:
        launch = f"`accelerate launch --config_file {shlex.quote(str(folder))}/accelerate.yaml`"
        raise InputError(f"this training {other}", hint=f"{launch} starts as many as the answer is for")
    devices = _replicas(facts) if found == 1 else 1
    if devices > 1:
        raise InputError(
            f"this process sees {devices} devices, over which a Trainer splits by DataParallel, and the answer in "
            f"{folder} is for one: an optimizer step would take {work.global_batch * devices} rows, not "
            f"{work.global_batch}",
            hint="set CUDA_VISIBLE_DEVICES to one device",
        )


def world_size() -> int:
    """Processes of this training: what ``torch.distributed`` says, or else the launcher."""
    distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    given = next((os.environ[name] for name in _WORLD_SIZES if os.environ.get(name)), "1")
    return int(given) if given.isascii() and given.isdigit() else 1


def _replicas(facts: Facts) -> int:
    """Devices that one process of a Trainer would split its batches over."""
    import torch

    if facts.hardware.device == "cpu" or facts.workload.launch_path == "loop":
        return 1
    return torch.cuda.device_count()


def _check_device(wanted: Hardware, folder: Path, *, any_hardware: bool) -> None:
    import torch
    from accelerate import PartialState

    state = PartialState._shared_state  # noqa: SLF001 - making one would decide what the script has to
    here = state["device"].type if state.get("device") is not None else ""
    if not here:
        here = "cuda" if wanted.device == "cuda" and torch.cuda.is_available() else "cpu"
    if here != wanted.device:
        raise MachineError(
            f"this training runs on {here}, and the answer in {folder} is for {wanted.device} ({wanted.name})",
            hint="tune again here, or train there; `autofit report` and `autofit.load` read an answer anywhere",
        )
    if any_hardware:
        return
    if here == "cpu":
        name = cpu_name()
        if name != wanted.name:
            warnings.warn(
                f"{folder} was tuned on {wanted.name}, and this is {name}: its speed and memory may be others",
                stacklevel=4,
            )
        return
    found = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK") or 0))
    memory = int(found.total_memory)
    card = gpu_catalogue.matching(found.name, memory)
    if card is not None and card.name == wanted.name:  # an estimate calls the card as the catalogue does
        return
    if found.name != wanted.name or abs(memory - wanted.total_bytes) > _SAME_MEMORY * wanted.total_bytes:
        raise MachineError(
            f"this training runs on {found.name} with {size(memory)}, and the answer in {folder} is for {wanted.name} "
            f"with {size(wanted.total_bytes)}",
            hint="tune again here; autofit.load(DIR, any_hardware=True) uses it all the same",
        )
