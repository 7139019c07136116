"""A launch of an answer's files, once: here, or on machines of a cluster."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from autofit.commands.scripts.named import shared
from autofit.contract.outcome import OUTCOME, Crashed, Outcome, TimedOut
from autofit.machine.nvml import on_device
from autofit.machine.select import hardware_lock, missing_cuda
from autofit.output.document import MODEL_FOLDER, Document
from autofit.output.emit import YAML
from autofit.system import strict_json
from autofit.system.errors import InputError, MachineError
from autofit.system.files import LEDGER, LEDGER_FILE, helper_environment, put_back
from autofit.system.locks import scratch_folder
from autofit.system.processes import bound_to_this, end_group
from autofit.system.redact import redacted
from autofit.training.joined import outcome_of_ranks
from autofit.training.launch_environment import USE_CPU

if TYPE_CHECKING:
    from autofit.cluster.launch import Launchers

Launch = Callable[[], tuple[tuple[str, ...], Outcome]]
"""Launches once; returns the command, and what it measured or how it failed."""
_SCRIPT = Path(__file__).with_name("verify_script.py")
_LONGEST_SECONDS = 3600.0
_LOADING_SECONDS, _PATIENCE = 300.0, 100.0
"""A launch of several ranks, one of which may hang, has so long to load, and so many times as long for its steps."""


def check_one_machine(document: Document, folder: Path, what: str, hint: str) -> None:
    """Refuse an answer for several machines where a command uses this one alone.

    Raises:
        InputError: It is such an answer.
    """
    nodes = document.workload.nodes
    if nodes > 1:
        raise InputError(f"{folder} is for {nodes} machines, and {what} on this one alone", hint=hint)


@contextlib.contextmanager
def launching(
    folder: Path, steps: int, document: Document, on: str | None, say: Callable[[str], None]
) -> Iterator[Launch]:
    """What launches once, here or on a cluster."""
    if on is None:

        def here() -> tuple[tuple[str, ...], Outcome]:
            with hardware_lock(document.hardware):
                return launch_here(folder, steps, document, on_its_device(document, say))

        yield here
        return
    from autofit.cluster.launch import launchers

    work = document.workload
    script = None if work.script is None else shared(work.script.typed[0])
    held = launchers(
        on, document.hardware.device, processes=work.processes, machines=work.nodes, shared=script, note=say
    )
    with held as found:
        yield functools.partial(launch_there, found, folder, steps, document)


def on_its_device(document: Document, say: Callable[[str], None]) -> dict[str, str]:
    """What a launch is told: of one process the card that was tuned on, alone; of several on CPUs that they are."""
    hardware = document.hardware
    if document.workload.processes > 1:
        return USE_CPU if hardware.device == "cpu" else {}
    if hardware.device != "cuda" or not hardware.uuid:
        return {}
    try:
        with on_device(hardware.uuid):
            return {"CUDA_VISIBLE_DEVICES": hardware.uuid}
    except MachineError as error:
        say(f"the {hardware.name} that was tuned on is not here, the first device takes its place: {error.message}")
        return {}


def launch_here(
    folder: Path, steps: int, document: Document, shown: Mapping[str, str]
) -> tuple[tuple[str, ...], Outcome]:
    """One ``accelerate launch``, with some more environment; all that it has started ends with it.

    Raises:
        MachineError: There is no CUDA device, and the answer is for one; or ``accelerate launch`` can't be started.
    """
    name = document.hardware.name
    if document.hardware.device == "cuda" and (missing := missing_cuda()) is not None:
        raise MachineError(f"the plan is for {name}: {missing}", hint=f"verify it on a machine with {name}")
    limit_seconds = _limit_seconds(steps, document)
    with scratch_folder("verify") as scratch:
        result = scratch / "outcome.json"
        command = (
            sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch",
            "--config_file", str(folder.absolute() / YAML),  # what begins with - were an option
            str(_SCRIPT), str(folder.absolute()), str(result), str(steps),
        )  # fmt: skip
        ledger = scratch / LEDGER_FILE
        environment = helper_environment({**os.environ, **shown, LEDGER: str(ledger)})
        log = scratch / "log"
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    bound_to_this(command, signal.SIGKILL),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise MachineError(f"accelerate launch can't be started: {error}") from error
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit_seconds)
        finally:
            end_group(process)
            put_back(ledger)
        tail = redacted(log.read_text("utf-8", "replace").strip()[-4000:])
        return command, _outcome(scratch, document, status, tail, limit_seconds)


def launch_there(held: Launchers, folder: Path, steps: int, document: Document) -> tuple[tuple[str, ...], Outcome]:
    """One ``accelerate launch`` on each of some machines of a cluster."""
    limit_seconds = _limit_seconds(steps, document)
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in (*folder.iterdir(), *(folder / MODEL_FOLDER).iterdir())
        if path.is_file()
    }
    found, first = held.launch(files, _SCRIPT, [str(steps)], limit_seconds)
    with scratch_folder("verify") as scratch:
        for one in (found[first], *found):  # the oldest failure tells
            for name, content in one.results.items():
                if not (scratch / name).exists():
                    (scratch / name).write_bytes(content)
        outcome = _outcome(scratch, document, found[first].status, found[first].log_tail, limit_seconds)
    return ("accelerate", "launch", "--config_file", str(folder.absolute() / YAML), str(_SCRIPT)), outcome


def _limit_seconds(steps: int, document: Document) -> float:
    patience = _PATIENCE * steps * document.promise.step_seconds
    alone = document.workload.processes == 1
    return _LONGEST_SECONDS if alone else min(_LONGEST_SECONDS, _LOADING_SECONDS + patience)


def _outcome(results: Path, document: Document, status: int | None, tail: str, limit_seconds: float) -> Outcome:
    """What a launch has left in a folder; in other words how it ended. A status of ``None``: it took too long."""
    if status is None:
        return TimedOut(limit_seconds=limit_seconds, phase="launch")
    try:
        if document.workload.processes > 1:
            return outcome_of_ranks(results, document.workload.processes)
        return _read(results)
    except (OSError, ValueError):
        return Crashed(reason=f"the launch ended with status {status}: {_last_words(tail)}", log_tail=tail)


def _last_words(tail: str) -> str:
    """The last line that a launched script wrote: behind it Accelerate tells, with a traceback, that it ended."""
    lines = [line for line in tail.splitlines() if not line.startswith("hint: ")]
    if lines and lines[-1].startswith("subprocess.CalledProcessError"):
        behind = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
        lines = lines[: behind[-1]] if behind and behind[-1] else lines
    return lines[-1] if lines else "no output"


def _read(results: Path) -> Outcome:
    outcome: Outcome = strict_json.read(OUTCOME, (results / "outcome.json").read_bytes())
    return outcome
