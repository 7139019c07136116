"""One rank of several is killed, runs out of memory or hangs: what a trial makes of it, and what is left."""

import dataclasses
import shutil
import socket
import textwrap
import time

from autofit.contract.layout import layout_of
from autofit.contract.outcome import Crashed, OutOfMemory, TimedOut
from autofit.training.runner import ProcessRunner
from autofit.training.timing import Effort
from tests.support.tiny import GIB, PLAIN, gone

FAULTS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", Crashed),
    "out of memory": ("raise torch.OutOfMemoryError('CUDA out of memory.')", OutOfMemory),
    "hung": ("time.sleep(3600)", TimedOut),
}
"""What the last rank does in the backward pass of the second step, and what the trial's outcome has to be."""
LAYOUTS = (("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4), ("hsdp:2x2", 4), ("tp2xfsdp1", 2), ("tp2xfsdp2", 4))
EFFORT = Effort(fidelity="whole", min_steps=2, max_steps=3)


def end_of(server, config, facts, folder, value, processes, act):
    """A trial of which the last rank does something.

    Returns:
        Its outcome; the seconds until it had ended; how many processes of ranks and open ports were left after another
        second.
    """
    rows = layout_of(value, processes).data_parallel
    work = dataclasses.replace(
        facts.workload, processes=processes, global_batch=4, limit_bytes=GIB, host_limit_bytes=GIB
    )
    faulty = folder / "config"
    shutil.copytree(config, faulty)
    script = f"""
    import os, signal, time, torch
    def act():
        rank = os.environ["RANK"]
        (folder / f"pid-{{rank}}").write_text(f"{{os.getpid()}} {{os.environ['MASTER_PORT']}}")
        if rank == "{processes - 1}":
            (folder / "when").write_text(str(time.time()))
            {act}
    at("backward", act, 1)
    honest(folder)
    """
    (faulty / "fault.py").write_text(textwrap.dedent(script))
    runner = ProcessRunner(folder / "trials", dataclasses.replace(facts, workload=work), faulty, server)
    plan = PLAIN.replaced(parallel=value, accumulation=4 // rows)
    outcome = runner.run(0, plan, EFFORT, purpose="search", limit_seconds=300.0).outcome
    trial = folder / "trials/00000"
    seconds = time.time() - float((trial / "when").read_text())
    told = [path.read_text().split() for path in trial.glob("pid-*")]
    left = sum(not gone(int(pid), seconds=1) for pid, _ in told)
    return outcome, seconds, left, sum(_listens(int(port)) for port in {port for _, port in told})


def _listens(port):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
