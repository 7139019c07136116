"""``autofit tune``: checks what is asked, holds the output folder, and runs the course of the tune."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from autofit.commands.request import (
    Request,
    Search,
    as_classes,
    as_knobs,
    batch_of,
    check_request,
    validated,
)
from autofit.commands.scripts.named import shared
from autofit.commands.shell.tune_config import write_config
from autofit.commands.tunes.backend import Backend, DeviceBackend
from autofit.commands.tunes.course import Course
from autofit.commands.tunes.output_folder import (
    BEGUN,
    LOCK,
    names_before,
    remove_leftovers,
    remove_unstarted_output,
)
from autofit.contract.facts import LaunchPath, Task
from autofit.costmodel.tracing.trace_store import TRACES
from autofit.output.document import DOCUMENT_FILE, REQUEST
from autofit.output.result import Result
from autofit.search.events import Events, Silent
from autofit.system import units
from autofit.system.errors import CantWrite, Stopped, of_option
from autofit.system.files import usable_folder
from autofit.system.locks import held


def tune(
    model: str,
    *,
    output: str | Path | None = None,
    device: str = "auto",
    processes: int | None = None,
    nodes: int | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    memory_limit: str | int | None = None,
    trials: int = 40,
    timeout: str | float | None = None,
    allow: str | Sequence[str] = "exact,numeric",
    fix: Mapping[str, object] | Sequence[str] = (),
    among: Mapping[str, object] | Sequence[str] = (),
    sampler: str = "autofit",
    launch_path: LaunchPath = "trainer",
    task: Task | None = None,
    lengths: str | Path | None = None,
    trust_remote_code: bool = False,
    storage: str | None = None,
    record: str | Path | None = None,
    resume: bool = False,
    seed: int = 0,
    guard: bool = True,
    arguments: Sequence[str] = (),
    call: int = 1,
    wait: bool = False,
    on: str | None = None,
    tokens: str | float | None = None,
    price: str | float | None = None,
    events: Events | None = None,
    backend: Backend | None = None,
) -> Result:
    """Find the fastest training configuration that fits.

    Args:
        model: Hub id, folder or file with a ``config.json``, or ``demo``; or the path of a training script, or
            ``package.module:function``, which makes a module, its batches and its loss.
        output: Folder for the answer and the trials; a temporary one by default.
        device: ``auto``, ``cuda`` or ``cpu``.
        processes: Of the whole training, one on each GPU; by default one.
        nodes: Machines of the cluster (``on``) that they are spread over, as many on each; by default one.
        seq_len: Tokens in a row; by default the lesser of 1024 and the model's longest.
        global_batch: Rows to an optimizer step; by default 32, or what the script takes.
        memory_limit: The ceiling: bytes, a size (``"22GiB"``) or a share of what is free (``"90%"``); by default
            92 % of what is free.
        trials: No more plans than these before the playoff; what is measured once more comes on top.
        timeout: No longer than this: seconds, or words such as ``"10m"``.
        allow: Classes of techniques that may be used: ``exact``, ``numeric``, ``method``.
        fix: A value for each knob that is held: ``{"precision": "bf16"}``, or ``["precision=bf16"]``.
        among: The values that a knob is restricted to: ``{"micro_batch": [1, 2]}``, or ``["micro_batch=1,2"]``.
        sampler: ``autofit``, ``tpe``, ``gp``, ``random`` or ``grid``.
        launch_path: ``trainer`` or ``loop``: how the training will be run.
        task: What the model is to be trained for; by default what its config names.
        lengths: File with the tokens of each row, or of a sample of them; by default all are as long as ``seq_len``.
        trust_remote_code: Whether the model's own code may run.
        storage: URL of an Optuna storage, instead of the journal in the output folder.
        record: File that gets a line of JSON for each trial.
        resume: Go on with what the output folder holds.
        seed: Of the search and of the random tokens.
        guard: Reject a winner whose losses or gradients in a few steps differ from a float32 baseline's.
        arguments: What stands behind the script on its command line.
        call: Which of the script's calls of ``train()`` is tuned.
        wait: Wait for a device that another tune holds, instead of giving up.
        on: Measure several trials at once: on the cards of this machine (``local``), or on the machines of a Ray
            cluster (``auto``, ``HOST:PORT`` or ``ray://HOST[:PORT]``).
        tokens: Tell how long a training on so many takes with the winner; 1e9 where a ``price`` is given alone.
        price: Of an hour of all devices of the training, such as ``"2.5/h"``: tell what that training costs.
        events: Told of what happens.
        backend: Where to measure; by default this machine's device.

    Raises:
        InputError: An argument or the model can't be used.
        NothingFits: Every plan that was tried breaks the ceiling.
        MachineError: The machine stands in the way, or no plan got as far as to be measured.
        Interrupted: Ctrl-C; the best so far is written, if there is one.
    """
    request = validated(
        Request,
        {
            "model": str(model),
            "device": device,
            "processes": processes,
            "nodes": nodes,
            "seq_len": seq_len,
            "global_batch": batch_of(str(model), global_batch),
            "memory_limit": None if memory_limit is None else str(memory_limit),
            "launch_path": launch_path,
            "trust_remote_code": trust_remote_code,
            "seed": seed,
            "task": task,
            "lengths": None if lengths is None else str(lengths),
            "arguments": tuple(arguments),
            "call": call,
        },
    )
    with of_option("--timeout"):
        seconds = units.parse_duration(timeout) if isinstance(timeout, str) else timeout
    settings = validated(
        Search,
        {
            "trials": trials,
            "timeout_seconds": seconds,
            "allowed": as_classes(allow),
            "fix": as_knobs(fix),
            "among": as_knobs(among),
            "sampler": sampler,
            "storage": storage,
            "record": record or None,
            "guard": guard,
            "on": on,
            "tokens": None if tokens is None else units.parse_tokens(tokens),
            "price": None if price is None else units.parse_price(str(price)),
        },
    )
    check_request(request, settings)
    folder = Path(output) if output else Path(tempfile.mkdtemp(prefix="autofit-"))
    there = names_before(folder)
    fresh, before = not output or there is None, there or frozenset()
    usable_folder(folder)
    teller = events or Silent()
    with held(folder / LOCK, f"another tune is writing {folder}", "give each tune its own --output"):
        if before & BEGUN:
            remove_leftovers(folder)
        try:
            found = Course(folder, request, settings, teller, backend or _backend(request, settings), wait).run(
                resume=resume
            )
        except Stopped:
            if (folder / DOCUMENT_FILE).exists():  # the best so far is an answer too
                write_config(folder, request, settings)
            raise
        except CantWrite as error:
            error.hint = f"{error.hint}{_how_to_go_on(folder)}"
            raise
        else:
            write_config(folder, request, settings)
            shutil.rmtree(folder / TRACES, ignore_errors=True)  # a tune that was stopped goes on with them
            return found
        finally:
            teller.close()
            if not (folder / REQUEST).exists():
                remove_unstarted_output(folder, whole=fresh, but=before)


def _how_to_go_on(folder: Path) -> str:
    """What ``--resume`` does where something in the folder can't be written, to be put behind a hint."""
    if not folder.exists():
        return "; --resume begins anew without it"
    return "; --resume goes on with what was measured" if (folder / REQUEST).exists() else ""


def _backend(request: Request, settings: Search) -> Backend:
    """Where to measure."""
    if settings.on is None:
        return DeviceBackend()
    from autofit.commands.tunes.on_cluster import ClusterBackend

    there = shared(request.model, request.arguments) if request.is_script else None
    return ClusterBackend(settings.on, request.processes or 1, request.nodes or 1, there)
