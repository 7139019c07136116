"""Where a tune measures with ``--on``: on the machines of a Ray cluster, several trials at once."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from autofit.cluster.host import read_files
from autofit.cluster.nodes import Cluster
from autofit.cluster.remote import ClusterRunner, ClusterServer
from autofit.cluster.shared import Shared
from autofit.cluster.slots import Slots
from autofit.commands.tunes.backend import DeviceBackend, DeviceName, Note
from autofit.contract.facts import Facts
from autofit.contract.outcome import PredictedSpeed, Trial
from autofit.contract.plan import Plan
from autofit.search.workers import Threads, Workers
from autofit.system.forking.server import ForkServer
from autofit.training.runner import Rated, Runner


class ClusterBackend(DeviceBackend):
    """The machines of a Ray cluster; plans are traced, and files are checked, on this one.

    Args:
        address: ``local``, ``auto``, ``HOST:PORT`` or ``ray://HOST[:PORT]``.
        processes: Of a trial.
        machines: Over which each trial is spread.
        shared: Of a script that is tuned.
    """

    def __init__(self, address: str, processes: int = 1, machines: int = 1, shared: Shared | None = None) -> None:
        self._processes, self._machines = processes, machines
        self._cluster = Cluster(address, shared)
        self._slots: Slots | None = None
        self._note: Note = lambda _: None

    def device(self, asked: str, note: Note) -> DeviceName:
        """The device for ``auto``, ``cuda`` or ``cpu``: a GPU where a machine of the cluster has one."""
        self._note = note
        self._cluster.connect()
        found = self._cluster.device(asked)
        if found == "cpu" and asked == "auto":
            note("no machine of the cluster has a GPU that Ray knows of: the CPUs are used")
        return found

    def server(self, log: Path, device: DeviceName, modules: tuple[str, ...]) -> ForkServer:
        """The fork servers of the machines; the tune closes them."""
        self._slots = Slots(
            self._cluster, device, modules, self._note, processes=self._processes, machines=self._machines
        )
        return ClusterServer(log, self._slots, modules)

    def same_hardware(self, folder: Path, facts: Facts, server: ForkServer) -> Facts:
        """The facts as they are: each machine's host holds its device against them."""
        return facts

    def lock(self, facts: Facts) -> contextlib.AbstractContextManager[None]:
        """Nothing: each machine's host holds the locks of its devices."""
        return contextlib.nullcontext()

    def warnings(self, facts: Facts, folder: Path) -> Sequence[str]:
        """Nothing: each machine's host tells its own."""
        return ()

    def runner(
        self,
        folder: Path,
        facts: Facts,
        config: Path,
        server: ForkServer,
        predicted: dict[Plan, int],
        *,
        known: Sequence[Trial],
        note: Note,
        rated: Rated,
        speeds: Mapping[Plan, PredictedSpeed],
    ) -> Runner:
        """Runs each trial on a slot of the cluster."""
        assert self._slots is not None
        self._slots.open(facts, read_files(config))
        return ClusterRunner(folder, facts, self._slots, predicted, known=known, note=note, rated=rated, speeds=speeds)

    def workers(self) -> Workers:
        """As many trials at once as there are slots."""
        slots = self._slots
        assert slots is not None
        return Threads(lambda: slots.count)
