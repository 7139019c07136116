"""The snapshots of a script that trials are forked from, one for each way in which plans have its model loaded."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from autofit.machine.describe import host_memory
from autofit.registry import recipe_of
from autofit.system.errors import MachineError
from autofit.system.files import write_atomically, writing
from autofit.system.forking.server import ForkServer
from autofit.system.forking.snapshot import Snapshot, Unforkable
from autofit.system.job import JOB
from autofit.system.strict_json import dump_json
from autofit.system.tensor_cache import CACHE_FOLDER
from autofit.system.units import duration, size
from autofit.training.jobs import SNAPSHOT_JOB, SnapshotJob
from autofit.training.scripts.patches import said_where_loaded

if TYPE_CHECKING:
    from autofit.contract.facts import Facts
    from autofit.contract.plan import Plan


def snapshots_of(folder: Path, facts: Facts, server: ForkServer, note: Callable[[str], None]) -> Snapshots | None:
    """The snapshots of what is tuned; ``None`` where trials can't be forked from one. The arguments are theirs."""
    script = facts.workload.script
    forks = script is not None and script.trainer and facts.workload.processes == 1
    return Snapshots(folder, facts, server, note) if forks else None


class Snapshots:
    """Makes snapshots of a script, keeps them, and tells whether trials are forked from them.

    Args:
        folder: ``trials/`` of the output folder.
        facts: What is tuned: a script that trains by a Trainer in one process.
        server: Makes them, and ends them when it is closed.
        note: Told of what the report is to say.
    """

    def __init__(self, folder: Path, facts: Facts, server: ForkServer, note: Callable[[str], None]) -> None:
        self.folder, self.facts, self.server, self.note = folder, facts, server, note
        self._made: dict[str, Snapshot] = {}
        self._over = False

    def of(self, plan: Plan, *, kill_after_seconds: float) -> Snapshot | None:
        """The snapshot that a trial of a plan is forked from, made where there is none; ``None`` where it can't be."""
        if self._over:
            return None
        said = said_where_loaded(recipe_of(plan, self.facts))
        if said not in self._made:
            try:
                self._made[said] = self._make(plan, kill_after_seconds)
            except Unforkable as error:
                self.give_up(str(error))
                return None
        return self._made[said]

    def give_up(self, why: str) -> None:
        """Have each trial run the script from here on, and say why."""
        self._over = True
        begins = "from here on each" if self._made else "each"
        for one in self._made.values():
            one.close()
        self._made.clear()
        script = self.facts.workload.script
        assert script is not None
        self.note(
            f"{begins} trial runs the script from its first line, {duration(script.seconds)} until it trains, and is "
            f"not forked where it begins to: {why}"
        )

    def _make(self, plan: Plan, kill_after_seconds: float) -> Snapshot:
        folder = self.folder / CACHE_FOLDER / f"snapshot-{len(self._made)}"
        with writing(folder):
            folder.mkdir(parents=True)
        write_atomically(folder / JOB, dump_json(SNAPSHOT_JOB, SnapshotJob(plan=plan, facts=self.facts)))
        began = time.monotonic()
        try:
            made = self.server.snapshot(folder.resolve(), kill_after_seconds=kill_after_seconds)
        except MachineError as error:
            raise Unforkable(error.message) from error
        work, free = self.facts.workload, host_memory()[1]
        asked = work.limit_bytes if self.facts.hardware.device == "cpu" else work.host_limit_bytes
        if free < asked:
            made.close()
            raise Unforkable(
                f"beside what it holds then {size(free)} of memory are free, and a trial may need {size(asked)}"
            )
        if not self._made:
            self.note(
                "trials of the search are forked from the script where it begins to train, which took "
                f"{duration(time.monotonic() - began)}, once for each way of loading its model; finalists run all of it"
            )
        return made
