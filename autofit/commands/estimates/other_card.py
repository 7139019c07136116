"""The facts of a GPU that is not in this machine, and of a model on it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from autofit.commands.estimates.world import MOST_CARDS
from autofit.commands.facts import read_facts, row_length
from autofit.commands.request import DEFAULT_GLOBAL_BATCH, Request
from autofit.contract.facts import Facts, Hardware, Model, Workload
from autofit.costmodel.tracing.trace_store import model_of, source_hash
from autofit.machine import gpu_catalogue
from autofit.machine.describe import host_memory
from autofit.machine.gpu_catalogue import Card
from autofit.machine.packages import installed
from autofit.system import units
from autofit.system.errors import InputError, MachineError, of_option
from autofit.system.files import write_atomically
from autofit.system.forking.server import ForkServer
from autofit.system.strict_json import dump_json

HOST_BYTES = 1 << 50
"""Of a host that is not here: offload is not refused for it, what it takes is shown."""
_EVERY_PRECISION = ("fp32", "bf16", "fp16")
"""Of a card that is not known, where memory alone is told: TF32 takes what float32 takes."""


def counted_cards(gpu: str | None, gpus: int | None) -> tuple[str | None, int | None]:
    """The name and the number of cards, where the name says the number: ``2x 4090``.

    Raises:
        InputError: The number is out of range, or both say one, and not the same.
    """
    count, name = gpu_catalogue.count_and_name(gpu) if gpu is not None else (1, None)
    if not 1 <= count <= MOST_CARDS:
        raise InputError(f"--gpu {gpu!r} says {count} cards", hint=f"give 1 to {MOST_CARDS} of them, like 2x {name}")
    if count == 1:
        return name, gpus
    if gpus not in {None, count}:
        raise InputError(f"--gpu {gpu!r} says {count} cards and --gpus says {gpus}", hint="give one of them")
    return name, count


def check_one_size(gpu: str | None, memory: str | int | None) -> None:
    """Refuse a card whose size is told twice.

    Raises:
        InputError: It is, by its name and by its memory.
    """
    if gpu is not None and memory is not None:
        raise InputError("--gpu and --memory both say how large the card is", hint="give one of them")


def asked_card(gpu: str | None, memory: str | int | None) -> tuple[Card | None, int | None]:
    """The card that was asked for, and its memory; ``None`` for this machine's own."""
    check_one_size(gpu, memory)
    if gpu is not None:
        if "," in gpu:  # which the command takes elsewhere
            raise InputError(
                f"--gpu {gpu!r} names several cards, and this is an estimate of one",
                hint="ask for one after the other; a table of several is printed by the command, `autofit estimate`",
            )
        with of_option("--gpu"):
            card = gpu_catalogue.find(gpu)
        return card, card.memory_bytes
    if memory is not None:
        units.check_unit(str(memory), "--memory")
        with of_option("--memory"):
            return None, units.parse_size(memory if isinstance(memory, str) else f"{memory:.0f}")
    return None, None


def described_model(folder: Path, config: Path, request: Request, server: ForkServer, cache: Path | None) -> Model:
    """The model's facts, kept on disk beside the traces."""
    adapter = TypeAdapter(Model)
    ground = [source_hash(), installed(), request.trust_remote_code, request.task, model_of(config)]
    key = hashlib.sha256(json.dumps(ground).encode()).hexdigest()[:32]
    path = cache / f"{key}.json" if cache else None
    if path is not None:
        with contextlib.suppress(OSError, ValueError):
            return replace(adapter.validate_json(path.read_bytes()), name=request.model)
    model = read_facts(folder, request, "cpu", server, lambda _: None).model
    if path is not None:
        with contextlib.suppress(MachineError, OSError):  # it is only a cache
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, dump_json(adapter, model))
    return model


def elsewhere(request: Request, model: Model, card: Card | None, memory_bytes: int) -> Facts:
    """The question on a card that is not here."""
    hardware = _hardware(card, memory_bytes)
    return Facts(
        model=model,
        hardware=hardware,
        workload=Workload(
            seq_len=row_length(request.seq_len, model),
            global_batch=request.global_batch or DEFAULT_GLOBAL_BATCH,
            limit_bytes=memory_bytes,
            host_limit_bytes=hardware.host_total_bytes,
            launch_path=request.launch_path,
            seed=request.seed,
        ),
        packages=installed(),
    )


def on_other_card(facts: Facts, card: Card | None, memory_bytes: int) -> Facts:
    """The same question on a card that is not here."""
    hardware, script = _hardware(card, memory_bytes), facts.workload.script
    taken = 0 if script is None else script.engine_bytes(memory_bytes)
    work = replace(facts.workload, limit_bytes=memory_bytes - taken, host_limit_bytes=hardware.host_total_bytes)
    return replace(facts, hardware=hardware, workload=work)


def _hardware(card: Card | None, memory_bytes: int) -> Hardware:
    """A machine with the card, and a host that has enough of everything."""
    host_total, _ = host_memory()
    host = max(host_total, HOST_BYTES)
    return Hardware(
        device="cuda",
        name=card.name if card else f"a card of {units.size(memory_bytes)}",
        total_bytes=memory_bytes,
        free_bytes=memory_bytes,
        host_total_bytes=host,
        host_free_bytes=host,
        precisions=card.precisions() if card else _EVERY_PRECISION,
        capability=card.capability if card else None,
        l2_bytes=(card and card.l2_bytes) or 0,
    )
