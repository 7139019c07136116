"""The facts of a question: what a process of its own tells of the model and the device, the rows and the ceiling."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from autofit.commands.lengths import lengths_of, lengths_words, longest_row, told_lengths
from autofit.commands.request import DEFAULT_GLOBAL_BATCH, Request
from autofit.contract.facts import Device, Facts, Hardware, Model, Workload
from autofit.costmodel.jobs import RatesJob
from autofit.machine.describe import given_threads
from autofit.machine.jobs import HardwareJob
from autofit.machine.packages import installed, unsupported
from autofit.machine.select import unusable
from autofit.output.document import MODEL_FOLDER
from autofit.output.text import plural
from autofit.system import units
from autofit.system.errors import InputError, MachineError, ModelError
from autofit.system.forking.server import ForkServer
from autofit.training.tasks.jobs import DescribeJob

DEFAULT_CEILING = 0.92


def read_facts(
    folder: Path, request: Request, device: Literal["cuda", "cpu"], server: ForkServer, say: Callable[[str], None]
) -> Facts:
    """Ask a process of its own about the model and the device.

    Raises:
        ModelError: No model for the task can be built from the config.
        MachineError: The device is there and can't be used.
    """
    processes = (request.processes or 1) // (request.nodes or 1)
    job = DescribeJob(
        name=request.model,
        config=str((folder / MODEL_FOLDER).resolve()),
        device=device,
        trust_remote_code=request.trust_remote_code,
        task=request.task,
        processes=processes,
    )
    with server.ask(folder, job, early=True) as answer:
        if answer is None:
            raise ModelError(
                f"{request.model!r} could not be built in a minute", hint="are the sizes in its config right?"
            )
        model, hardware = described(answer, request.model, device)
    hardware = shared_by(hardware, processes)
    for words in unused_cards(request, hardware):
        say(words)
    return Facts(model=model, hardware=hardware, workload=workload(request, model, hardware, say), packages=installed())


def with_rates(folder: Path, facts: Facts, server: ForkServer, say: Callable[[str], None]) -> Facts:
    """The facts with what the device does in a second, which a process of its own has timed.

    A tune does without where that fails; what can't be done at all is told by what comes next.
    """
    found: dict[str, Any] = {"error": "it took too long"}
    try:
        with server.ask(folder, RatesJob(facts=facts)) as answer:
            found = found if answer is None else answer
    except MachineError as error:
        found = {"error": error.message}
    if "error" in found:
        say(f"the device was not timed before the first trial: {found['error']}")
        return facts
    return replace(facts, rates=found["rates"], kernel_overhead_bytes=found["kernel_overhead_bytes"])


def device_facts(folder: Path, device: Device, processes: int, server: ForkServer) -> Hardware:
    """What each of some processes of this machine has of its hardware, read by a process of its own.

    Raises:
        InputError: There are fewer GPUs than processes.
        MachineError: The device is there and can't be used.
    """
    with server.ask(folder, HardwareJob(device=device, processes=processes)) as answer:
        if answer is None or "hardware" not in answer:
            raise unusable(device, "it does not answer" if answer is None else answer["device"])
        return shared_by(TypeAdapter(Hardware).validate_python(answer["hardware"]), processes)


def same_hardware(folder: Path, facts: Facts, server: ForkServer) -> Facts:
    """The facts of an earlier tune in the folder, with the devices that are here.

    Raises:
        InputError: They are of another kind: what was measured then and what would be measured now do not compare.
        MachineError: The device can't be used.
    """
    then, work = facts.hardware, facts.workload
    now = device_facts(folder, then.device, work.processes // work.nodes, server)
    then_words, now_words = _comparable(then), _comparable(now)
    if then_words != now_words:
        raise InputError(
            f"{folder} was begun on {then_words}, and this is {now_words}",
            hint="measurements would not compare: go on where it was begun, or choose another --output",
        )
    return replace(facts, hardware=replace(then, uuid=now.uuid, visible_id=now.visible_id, beside=now.beside))


def _comparable(hardware: Hardware) -> str:
    """In words, what has to be the same of two machines for their measurements to compare."""
    memory = f" with {hardware.total_bytes / units.GIB:.0f} GiB" if hardware.device == "cuda" else ""
    driver = f", driver {hardware.driver}" if hardware.driver else ""
    return f"{hardware.name}{memory}, {plural(hardware.threads, 'thread')} a process{driver}"


def described(answer: Mapping[str, Any], name: str, device: Device) -> tuple[Model, Hardware]:
    """What a process of its own told of the model and the device.

    Raises:
        ModelError: No model for the task can be built from the config.
        MachineError: The device is there and can't be used.
    """
    if "hint" in answer:
        raise ModelError(answer["error"], hint=answer["hint"])
    if "error" in answer:
        raise ModelError(
            f"no model can be built from the config of {name!r}: {answer['error']}",
            hint="check its config.json; is the architecture one that the installed transformers knows?",
        )
    if "device" in answer:
        raise unusable(device, answer["device"])
    return (
        TypeAdapter(Model).validate_python(answer["model"]),
        TypeAdapter(Hardware).validate_python(answer["hardware"]),
    )


def row_length(seq_len: int | None, model: Model) -> int:
    """The length of a row: what was asked for, or what is usual.

    Raises:
        InputError: The model can't be run on so many.
    """
    if seq_len not in {None, model.usual_seq_len} and model.length.fixed:
        raise InputError(
            f"--seq-len {seq_len}: {model.architecture} takes no other length: {model.length.fixed}",
            hint="leave it out",
        )
    if seq_len is not None and model.position_rows is not None and seq_len > model.position_rows:
        raise InputError(
            f"--seq-len {seq_len}: {model.architecture} has learned positions for rows of {model.position_rows} tokens "
            "and can't be run on longer ones",
            hint=f"--seq-len {model.position_rows} or less",
        )
    return seq_len or model.usual_seq_len


def lacking_kernels(model: Model, device: Device) -> list[str]:
    """That the model's layers run in plain PyTorch on a GPU, for want of packages that have kernels for them."""
    lacking = model.lacking_kernels if device == "cuda" else ()
    there = installed() if lacking else {}
    broken = [name for name in lacking if name in there]
    missing = [name for name in lacking if name not in broken]
    why = [f"{', '.join(missing)}: not installed (pip install {' '.join(missing)})"] if missing else []
    why += [f"{', '.join(broken)}: installed, but the import fails"] if broken else []
    plain = f"layers of {model.architecture} run in plain PyTorch, slower and in more memory than with kernels of"
    return [f"{plain} {'; '.join(why)}"] if why else []


def remarks(seq_len: int, model: Model, device: Device) -> list[str]:
    """What is not as one would expect of the model on the device, and of what is installed, a sentence each."""
    said = unsupported(installed())
    if model.length.unit == "tokens" and model.max_positions and seq_len > model.max_positions:
        said.append(f"{model.rows_of(seq_len)} are longer than the {model.max_positions} the model was made for")
    if model.architecture not in model.named:
        what = f"is of {' and '.join(model.named)}" if model.named else "names no architecture"
        said.append(
            f"the config {what}: it is trained as {model.architecture}, on {model.trained_on}; --task chooses another"
        )
    if model.unread:
        what = " and ".join(model.unread)
        said.append(
            f"{model.architecture} reads {what}, too, and the rows here are texts without: what it has for {what} is "
            "held in memory and not run; a script that trains on them can be tuned: autofit tune train.py"
        )
    return said + lacking_kernels(model, device)


def unused_cards(request: Request, hardware: Hardware) -> list[str]:
    """That there are GPUs which nobody asked for."""
    if hardware.device != "cuda" or request.processes is not None or hardware.count == 1:
        return []
    return [f"{hardware.count} GPUs are here, and one is trained on: --processes {hardware.count} uses them all"]


def shared_by(hardware: Hardware, processes: int) -> Hardware:
    """What each of some processes has of the hardware.

    On the CPU they share its memory and, as ``accelerate launch`` deals them out, its threads.

    Raises:
        InputError: There are fewer GPUs than processes.
    """
    if hardware.device == "cuda":
        shown = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
        count = min(hardware.count, len(shown)) if shown else hardware.count
        if processes > count:
            raise InputError(
                f"--processes {processes}: {count} GPU{'s' * (count > 1)} can be seen here, and each process needs one "
                "of its own",
                hint=f"--processes {count} or less; what does CUDA_VISIBLE_DEVICES hide?",
            )
        return hardware
    return replace(
        hardware,
        total_bytes=hardware.total_bytes // processes,
        free_bytes=hardware.free_bytes // processes,
        threads=given_threads() or max(1, hardware.threads // processes),
    )


def workload(request: Request, model: Model, hardware: Hardware, say: Callable[[str], None]) -> Workload:
    """The sizes and ceilings of the training.

    Raises:
        InputError: The ceiling is more than the device has.
    """
    lengths: tuple[int, ...] = ()
    told_rows = 0
    if request.lengths is None:
        seq_len = row_length(request.seq_len, model)
    else:
        seq_len, lengths = lengths_of(request.lengths, request.seq_len, longest_row(model), model, say)
        told_rows = len(told_lengths(request.lengths))
        say(lengths_words(lengths))
    for words in remarks(seq_len, model, hardware.device):
        say(words)
    here = (request.processes or 1) // (request.nodes or 1)
    return Workload(
        seq_len=seq_len,
        global_batch=request.global_batch or DEFAULT_GLOBAL_BATCH,
        processes=request.processes or 1,
        nodes=request.nodes or 1,
        limit_bytes=ceiling(request, hardware, say),
        host_limit_bytes=int(hardware.host_free_bytes * DEFAULT_CEILING) // here,
        launch_path=request.launch_path,
        seed=request.seed,
        lengths=lengths,
        told_rows=told_rows,
    )


def ceiling(request: Request, hardware: Hardware, say: Callable[[str], None]) -> int:
    """Bytes that a plan may hold on the device.

    Raises:
        InputError: The ceiling is more than the device has.
    """
    limit = units.parse_limit(request.memory_limit or f"{DEFAULT_CEILING * 100:g}%", hardware.free_bytes)
    if limit > hardware.total_bytes:
        raise InputError(
            f"--memory-limit {request.memory_limit} is {units.size(limit)}, more than the "
            f"{units.size(hardware.total_bytes)} of {hardware.name}",
            hint="give a smaller one",
        )
    if limit > hardware.free_bytes:
        say(f"the ceiling of {units.size(limit)} is above the {units.size(hardware.free_bytes)} that are free now")
    return limit
