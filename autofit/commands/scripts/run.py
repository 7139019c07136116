"""``autofit run DIR SCRIPT -- ARGS``: the user's script, launched unmodified with the plan of an output folder."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from autofit.commands.launching import check_one_machine, on_its_device
from autofit.commands.scripts.named import Named, named
from autofit.output.document import Document, read_document
from autofit.output.emit import YAML, edited_settings
from autofit.system.errors import InputError, MachineError, Terminated
from autofit.system.files import helper_environment
from autofit.system.processes import bound_to_this, end_group
from autofit.training.launch_environment import check_environment
from autofit.training.scripts.leave import NOT_AS_TUNED

_SCRIPT = Path(__file__).with_name("run_script.py")
INTERRUPTED_SECONDS = 30.0
_PORT = 29500
"""On which Accelerate has machines meet where it is told none."""


def run(
    folder: str | Path,
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    machine_rank: int | None = None,
    main_process_ip: str | None = None,
    main_process_port: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Launch a training script by ``accelerate launch``, with the plan put in and nothing measured.

    Args:
        folder: Output folder of ``autofit tune``.
        script: The training script, none of whose lines is changed; or a factory, ``package.module:function``.
        arguments: What stands behind it on its command line.
        machine_rank: Where the answer is for several machines, each of which runs this: the number of this one, from 0.
        main_process_ip: The address of the first of them.
        main_process_port: A port that is free there; by default Accelerate's, 29500.
        say: Called with a line of text where this is not the training that was tuned.

    Returns:
        The script's exit status, of several processes the launch's; a signal's number above 128 where one ended it.

    Raises:
        InputError: There is no such folder or script, or the plan can't be put into a script.
        MachineError: The launch can't be started.
    """
    check_environment()
    folder = Path(folder)
    document = read_document(folder)
    if not (folder / YAML).is_file():
        raise InputError(f"{folder} holds no {YAML}", hint="give the whole folder that `autofit tune` wrote")
    changed = [f"{words}; the script gets the plan" for words in edited_settings(document, folder)]
    place = _place(document, folder, machine_rank, main_process_ip, main_process_port)
    train = named(str(script), arguments)
    if document.promise.launch_path != "trainer" and document.workload.script is None:
        raise InputError(
            f"{folder} is for a plain loop, into which no plan can be put",
            hint="use autofit.load in the script, or tune with --launch-path trainer",
        )
    for words in (*differences(document, train), *changed):
        say(words)
    command = (
        sys.executable, "-m", "autofit.commands.scripts.run_launch",
        "--quiet",  # what the script says of its end is all there is to tell
        "--config_file", str(folder.absolute() / YAML), *place, *_threads(document),
        str(_SCRIPT), str(folder.absolute()), str(train.path), *train.arguments,
    )  # fmt: skip
    environment = helper_environment({**os.environ, **on_its_device(document, say)})
    try:
        process = subprocess.Popen(bound_to_this(command, signal.SIGTERM), env=environment, start_new_session=True)
    except OSError as error:
        raise MachineError(f"accelerate launch can't be started: {error}") from error
    try:
        status = process.wait()
    except KeyboardInterrupt as error:
        by = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
        interrupt(process, by, alone=document.workload.processes == 1)
        raise
    finally:
        end_group(process)
    return status if status >= 0 else 128 - status


def _place(document: Document, folder: Path, rank: int | None, ip: str | None, port: int | None) -> list[str]:
    """Options of ``accelerate launch`` that say which of the answer's machines this is; none for one machine.

    Raises:
        InputError: They are missing, or make no sense.
    """
    nodes = document.workload.nodes
    told = {"--machine_rank": rank, "--main_process_ip": ip, "--main_process_port": port}
    if rank is None or not ip:
        hint = f"run it on each, with --machine-rank 0 to {nodes - 1} and --main-process-ip of the first"
        check_one_machine(document, folder, "run launches", hint)
    if nodes == 1:
        if given := [name.replace("_", "-") for name, value in told.items() if value is not None]:
            raise InputError(f"{', '.join(given)}: {folder} is for one machine", hint="leave them out")
        return []
    assert rank is not None  # refused above
    if not 0 <= rank < nodes:
        raise InputError(f"--machine-rank {rank} is none of {nodes} machines", hint=f"give 0 to {nodes - 1}")
    told["--main_process_port"] = _PORT if port is None else port
    return [str(word) for pair in told.items() for word in pair]


def _threads(document: Document) -> list[str]:
    """The threads that Accelerate gives each process on a CPU; where it is told, it doesn't warn that it was not."""
    cores = psutil.cpu_count(logical=False) or 1
    threads = cores // (document.workload.processes // document.workload.nodes)
    if document.hardware.device != "cpu" or int(os.environ.get("OMP_NUM_THREADS", "0")) or threads < 2:
        return []
    return ["--num_cpu_threads_per_process", str(threads)]


def interrupt(process: subprocess.Popen[bytes], by: signal.Signals, *, alone: bool) -> None:
    """Pass a signal on to a training, and give it time to save what it saves then.

    A training of one process is told alone: its launcher would end at once, and ends after it by itself. Several get
    it from their launcher.
    """
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, subprocess.TimeoutExpired):
        if not alone:
            os.killpg(process.pid, by)
        elif trainings := psutil.Process(process.pid).children():
            for training in trainings:
                training.send_signal(by)
        else:  # it is not begun
            return
        process.wait(INTERRUPTED_SECONDS)


def differences(document: Document, train: Named) -> list[str]:
    """How a training differs from the one that was tuned, a sentence each."""
    tuned = document.workload.script
    if tuned is None:
        return [f"the plan was found for {document.model.name} on random rows, not for {train.name}"]
    said = []
    if train.sha256 != tuned.sha256:
        said.append(NOT_AS_TUNED.format(train.name))
    if train.arguments != tuned.arguments:
        said.append("the script was tuned with other arguments: its speed and memory may be others")
    return said
