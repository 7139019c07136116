"""What this machine can use, and why not the rest."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from autofit import space
from autofit._version import __version__
from autofit.commands.facts import described
from autofit.commands.model_source import DEMO, fetch
from autofit.commands.request import Request, validated
from autofit.contract.facts import Device, Facts, Hardware, Model, Task, Workload
from autofit.machine import other_processes
from autofit.machine.other_processes import Neighbour
from autofit.machine.packages import installed, packages, unsupported
from autofit.machine.select import choose_device, missing_cuda
from autofit.output.document import Offer
from autofit.system.errors import MachineError
from autofit.system.forking.server import ForkServer
from autofit.system.locks import scratch_folder
from autofit.training.tasks.jobs import DescribeJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What the doctor found.

    Attributes:
        cuda: Why there is no CUDA device, or ``None``.
        missing: Packages that techniques could use and that are not installed.
        choices: Every choice with its status: in the search, on request, or withheld.
        techniques: The same in short, as other programs read it: ``technique``, ``choice``, ``class``, ``available``
            (in the search or on request) and ``reason``.
        others: Who else holds memory of the device.
        warnings: What would stand in a tune's way now, in words; of the disk, the one of the working folder.
    """

    autofit: str
    hardware: Hardware
    cuda: str | None
    packages: dict[str, str]
    missing: tuple[str, ...]
    choices: tuple[Offer, ...]
    techniques: tuple[dict[str, int | str | bool], ...]
    others: tuple[Neighbour, ...] = ()
    warnings: tuple[str, ...] = ()


DIAGNOSIS: TypeAdapter[Diagnosis] = TypeAdapter(Diagnosis)


def _described(model: str, device: Device, task: Task | None) -> tuple[Model, Hardware]:
    """What a process of its own tells of the model and of the device."""
    with scratch_folder("doctor") as folder:
        config = fetch(model, folder / "model")
        with contextlib.closing(ForkServer(folder / "log", device)) as server:
            job = DescribeJob(name=model, config=str(config), device=device, trust_remote_code=False, task=task)
            with server.ask(folder, job) as answer:
                if answer is None:
                    raise MachineError(f"the device {device} could not be described in a minute")
                return described(answer, model, device)


def examine(device: str = "auto", model: str = DEMO, task: str | None = None) -> Diagnosis:
    """Look at the machine, and ask every technique what it would offer a model on it.

    Raises:
        InputError: The task is not known.
        MachineError: The wanted device is not there, or can't be used.
        ModelError: The model can't be read.
    """
    wanted = validated(Request, {"model": model, "task": task}).task
    cuda = missing_cuda()
    try:
        known, hardware = _described(model, choose_device(device), wanted)
    except MachineError as error:
        if device != "auto" or cuda is not None:
            raise
        cuda = error.message
        known, hardware = _described(model, "cpu", wanted)
    versions = installed()
    facts = Facts(
        model=known,
        hardware=hardware,
        workload=Workload(
            seq_len=known.usual_seq_len,
            global_batch=32,
            limit_bytes=hardware.free_bytes,
            host_limit_bytes=hardware.host_free_bytes,
        ),
        packages=versions,
    )
    offers = space.offers(facts)
    return Diagnosis(
        autofit=__version__,
        hardware=hardware,
        cuda=cuda,
        packages=versions,
        missing=tuple(name for name in (*packages(), *known.lacking_kernels) if name not in versions),
        choices=tuple(
            Offer(
                technique=name, value=choice.value, kind=choice.kind.value, status=choice.status, reason=choice.reason
            )
            for name, choice in offers
        ),
        techniques=tuple(
            {
                "technique": name,
                "choice": choice.value,
                "class": choice.kind.value,
                "available": choice.status != "withheld",
                "reason": choice.reason,
            }
            for name, choice in offers
        ),
        others=other_processes.neighbours(hardware),
        warnings=(*unsupported(versions), *other_processes.warnings(hardware, Path.cwd())),
    )
