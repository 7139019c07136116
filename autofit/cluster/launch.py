"""One launch on machines of a cluster: a launcher on each, which make one world."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.cluster.host import Files, as_outside_ray, passing_folder, write_files
from autofit.cluster.nodes import Cluster, Note, connected, last_line
from autofit.cluster.shared import Shared
from autofit.cluster.together import answers
from autofit.contract.facts import Device
from autofit.system.errors import MachineError
from autofit.system.files import helper_environment
from autofit.system.processes import bound_to_this, end_group
from autofit.system.redact import redacted
from autofit.training.ranks import free_port

_ANSWER, _RESULT = "answer", "result"
_TAIL_BYTES = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a launcher ended.

    Attributes:
        status: Its exit status; ``None`` where it took too long.
        log_tail: The end of what it printed.
        results: The files that its ranks have left.
    """

    status: int | None
    log_tail: str
    results: Files


class Launcher:
    """Runs ``accelerate launch`` on its machine, as a person there would; a script in the folder that it is run in."""

    def __init__(self, shared: Shared | None = None) -> None:
        as_outside_ray()
        if shared is not None:
            os.chdir(shared.folder)
        self._stack = contextlib.ExitStack()
        self.folder = passing_folder(self._stack)
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def port(self) -> int:
        """A port of this machine that launchers of others can be told to come to."""
        return free_port("")

    def launch(self, files: Files, place: Sequence[str], script: Path, words: Sequence[str], seconds: float) -> Ended:
        """Launch a script, and wait for its end.

        Args:
            files: Of the answer's folder.
            place: Options that say which machine of the world this is.
            script: Of autofit's own, told the answer's folder and a file for its result.
            words: What it is told besides.
            seconds: After which all is killed.
        """
        answer, results = self.folder / _ANSWER, self.folder / _RESULT
        results.mkdir(parents=True, exist_ok=True)
        write_files(answer, files)
        command = (
            sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch",
            "--config_file", str(answer / "accelerate.yaml"), *place,
            str(script), str(answer), str(results / "outcome.json"), *words,
        )  # fmt: skip
        log, status = self.folder / "log", None
        with log.open("wb") as output:
            self._process = process = subprocess.Popen(
                bound_to_this(command, signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=helper_environment(dict(os.environ)),
                start_new_session=True,
            )
        try:
            if self._stopped:
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(seconds)
        finally:
            end_group(process)
        tail = redacted(log.read_text("utf-8", "replace").strip()[-_TAIL_BYTES:])
        left = {path.name: path.read_bytes() for path in results.glob("*.json")}
        return Ended(status=status, log_tail=tail, results=left)

    def stop(self) -> None:
        """End the launch."""
        self._stopped = True
        if self._process is not None:
            end_group(self._process)

    def close(self) -> None:
        """Leave nothing."""
        self.stop()
        self._stack.close()


@dataclass(slots=True, kw_only=True)
class Launchers:
    """The machines that a launch is spread over, each with a :class:`Launcher`."""

    cluster: Cluster
    address: str
    names: tuple[str, ...]
    actors: tuple[Any, ...]

    @connected()
    def launch(self, files: Files, script: Path, words: Sequence[str], seconds: float) -> tuple[list[Ended], int]:
        """Launch on all machines; what each says, and the place of the one that failed first, else 0.

        Raises:
            MachineError: A machine was lost.
        """
        ray, count = self.cluster.ray, len(self.actors)
        try:
            place = [
                "--main_process_ip",
                self.address,
                "--main_process_port",
                str(ray.get(self.actors[0].port.remote())),
            ]
            spread = [["--machine_rank", str(rank), *place] for rank in range(count)] if count > 1 else [[]]
            asked = [
                actor.launch.remote(files, options, script, list(words), seconds)
                for actor, options in zip(self.actors, spread, strict=True)
            ]
            found, failed = answers(asked, self.actors, _failed, self.cluster)
        except ray.exceptions.RayError as error:
            raise MachineError(
                f"a machine was lost while the launch ran ({' and '.join(self.names)}): {last_line(error)}",
                hint="verify again",
            ) from error
        return found, failed or 0


@contextlib.contextmanager
def launchers(
    address: str, device: Device, *, processes: int, machines: int, shared: Shared | None, note: Note
) -> Iterator[Launchers]:
    """Launchers on machines of a cluster, which are held until the end.

    Raises:
        MachineError: There is no such cluster, or it has not as many equal machines with free cards.
    """
    cluster = Cluster(address, shared)
    with contextlib.ExitStack() as stack:
        cluster.connect()
        stack.callback(cluster.close)
        each = processes // machines
        ready = [node for node in cluster.nodes(device, note) if device == "cpu" or node.cards >= each]
        if len(ready) < machines:
            needed = f"{machines} machine{'s' * (machines > 1)}"
            raise MachineError(
                f"--on {address}: the answer is for {needed} with {each} process{'es' * (each > 1)} on each, and "
                f"{len(ready)} of the cluster can be used",
                hint="`ray status` lists them",
            )
        nodes = ready[:machines]
        bundles = [cluster.bundle(node, device, each) for node in nodes]
        group = stack.enter_context(cluster.group(nodes, bundles))
        if group is None:
            raise MachineError(
                f"--on {address}: others of the cluster hold the cards of {' and '.join(one.name for one in nodes)}",
                hint="`ray status` shows who uses what",
            )
        actors = []
        for place, bundle in enumerate(bundles):
            actors.append(cluster.host(Launcher, group, place, bundle, shared))
            stack.callback(_end, cluster, actors[-1])
        yield Launchers(
            cluster=cluster, address=nodes[0].address, names=tuple(one.name for one in nodes), actors=tuple(actors)
        )


def _end(cluster: Cluster, actor: Any) -> None:
    with contextlib.suppress(Exception):  # it may be gone
        cluster.ray.get(actor.close.remote(), timeout=15.0)
    with contextlib.suppress(Exception):
        cluster.ray.kill(actor)


def _failed(one: Ended) -> bool:
    return one.status != 0
