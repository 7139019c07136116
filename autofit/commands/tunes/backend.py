"""Where a tune measures: this machine's device, or whatever stands for it."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from autofit.commands.facts import read_facts, same_hardware, with_rates
from autofit.commands.request import Request
from autofit.commands.scripts.request import script_facts
from autofit.contract.facts import Facts
from autofit.contract.outcome import PredictedSpeed, Trial
from autofit.contract.plan import Plan
from autofit.costmodel.families import speed_range
from autofit.costmodel.forecast import Forecast, forecast
from autofit.costmodel.seconds.utilisation import Utilisation
from autofit.costmodel.tracing.trace_store import Traces, cache_folder
from autofit.machine import gpu_catalogue, other_processes
from autofit.machine.meters import address_limit
from autofit.machine.select import choose_device, hardware_lock, left_unused
from autofit.search.workers import OneByOne, Workers
from autofit.space import Space
from autofit.system.errors import AutofitError
from autofit.system.forking.server import ForkServer
from autofit.system.units import size
from autofit.training.guard.equivalence import Guards, Look
from autofit.training.runner import ProcessRunner, Rated, Runner, unrated
from autofit.training.scripts.snapshots import snapshots_of

Note = Callable[[str], None]
DeviceName = Literal["cuda", "cpu"]


class Backend(Protocol):
    """What a tune asks of the machine that it measures on. Tests hand in their own."""

    def device(self, asked: str, note: Note) -> DeviceName:
        """The device for ``auto``, ``cuda`` or ``cpu``."""

    def server(self, log: Path, device: DeviceName, modules: tuple[str, ...]) -> ForkServer:
        """The process that forks the jobs; the tune closes it."""

    def facts(self, folder: Path, request: Request, device: DeviceName, server: ForkServer, note: Note) -> Facts:
        """The model, the device, the sizes and the ceilings."""

    def same_hardware(self, folder: Path, facts: Facts, server: ForkServer) -> Facts:
        """The facts of an earlier tune, with the devices that are here; refuses to go on where they are others."""

    def lock(self, facts: Facts) -> contextlib.AbstractContextManager[None]:
        """Held while trials run: two tunes on one device disturb each other."""

    def rates(self, folder: Path, facts: Facts, server: ForkServer, note: Note) -> Facts:
        """The facts with the device's measured rates."""

    def warnings(self, facts: Facts, folder: Path) -> Sequence[str]:
        """What would disturb the measurements now, a sentence each."""

    def forecast(
        self, space: Space, facts: Facts, config: Path, *, server: ForkServer, folder: Path, note: Note, say: Note
    ) -> tuple[Forecast | None, Rated]:
        """What traces say of the plans' memory and FLOPs; ``None`` where they can't be made."""

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
        """Turns plans into outcomes. ``known`` shows the trials so far, and grows."""

    def workers(self) -> Workers:
        """Run the trials of the search: one by one, or several at once."""

    def look(self, folder: Path, facts: Facts, config: Path, server: ForkServer) -> Look | None:
        """Compares the training of a winner with a baseline; ``None`` where nothing is trained."""


class DeviceBackend:
    """This machine: each trial is a process on its device."""

    def device(self, asked: str, note: Note) -> DeviceName:
        """The device for ``auto``, ``cuda`` or ``cpu``."""
        found = choose_device(asked)
        if found == "cpu" and asked == "auto" and (why := left_unused()):
            note(f"an Nvidia GPU is here and is not used, the CPU is: {why}")
        return found

    def server(self, log: Path, device: DeviceName, modules: tuple[str, ...]) -> ForkServer:
        """The process that forks the jobs."""
        return ForkServer(log, device, modules)

    def facts(self, folder: Path, request: Request, device: DeviceName, server: ForkServer, note: Note) -> Facts:
        """The model, the device, the sizes and the ceilings, read by a process of its own."""
        if request.is_script:
            return script_facts(folder, request, device, server, note)
        return read_facts(folder, request, device, server, note)

    def same_hardware(self, folder: Path, facts: Facts, server: ForkServer) -> Facts:
        """The facts of an earlier tune, with the devices that are here."""
        return same_hardware(folder, facts, server)

    def lock(self, facts: Facts) -> contextlib.AbstractContextManager[None]:
        """The device's lock, for all users of the machine."""
        return hardware_lock(facts.hardware)

    def rates(self, folder: Path, facts: Facts, server: ForkServer, note: Note) -> Facts:
        """The facts with the device's measured rates."""
        return with_rates(folder, facts, server, note)

    def warnings(self, facts: Facts, folder: Path) -> Sequence[str]:
        """What would disturb the measurements now."""
        said = other_processes.warnings(facts.hardware, folder)
        if (limit := address_limit()) is None:
            return said
        less = f"a process may have {size(limit)} of addresses here (ulimit -v)"
        return (*said, f"{less}: plans that need more of them fail, whatever the ceiling")

    def forecast(
        self, space: Space, facts: Facts, config: Path, *, server: ForkServer, folder: Path, note: Note, say: Note
    ) -> tuple[Forecast | None, Rated]:
        """What traces say; a tune goes on without them where they fail."""
        hardware = facts.hardware
        card = gpu_catalogue.matching(hardware.name, hardware.total_bytes)
        traces = Traces(facts, config, lambda: server, folder, cache_folder())
        try:
            found = forecast(space, traces, facts, card, say=say)
            # traces are of the longest rows: what the usual ones take of the device's rate is less
            rated = (
                unrated
                if facts.workload.lengths or facts.workload.script is not None
                else Utilisation(space, traces, facts, card).rated
            )
        except AutofitError as error:
            note(f"memory is not forecast: {error.message}")
            return None, unrated
        unknown = bool(np.isnan(found.tensor_bytes).all())
        for why in _told_once(traces.failed.values()):
            note(f"{'memory is not' if unknown else 'the memory of some plans is not'} forecast, trials tell it: {why}")
        return None if unknown else found, rated

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
        """Runs each trial in a process of its own."""
        snapshots = snapshots_of(folder, facts, server, note)
        return ProcessRunner(
            folder, facts, config, server, predicted, known=known, note=note, rated=rated, speeds=speeds,
            snapshots=snapshots,
        )  # fmt: skip

    def workers(self) -> Workers:
        """One trial after another: two on one device would time each other."""
        return OneByOne()

    def look(self, folder: Path, facts: Facts, config: Path, server: ForkServer) -> Look | None:
        """Trains the winner and a baseline for a few steps."""
        script = facts.workload.script
        if script is not None and not script.trainer:
            return None
        return Guards(folder, facts, config, server).look


def predicted_bytes(space: Space, forecast: Forecast | None) -> dict[Plan, int]:
    """Peak bytes of the plans by their traces, where there are any."""
    if forecast is None:
        return {}
    pairs = zip(space.plans, forecast.predicted_bytes.tolist(), strict=True)
    return {plan: round(peak) for plan, peak in pairs if not math.isnan(peak)}


def predicted_speeds(space: Space, facts: Facts, forecast: Forecast | None) -> dict[Plan, PredictedSpeed]:
    """Speed of the plans by their traces, on a known card; with the range that holds four trainings of five."""
    if forecast is None:
        return {}
    found = {}
    for place, (plan, seconds) in enumerate(zip(space.plans, forecast.seconds.tolist(), strict=True)):
        if seconds > 0 and (spread := forecast.spread_of(place)) is not None:
            low, high = speed_range(plan, facts, spread)
            found[plan] = PredictedSpeed(samples_per_second=1 / seconds, low=low / seconds, high=high / seconds)
    return found


def _told_once(reasons: Iterable[str]) -> list[str]:
    """Reasons that differ in their numbers alone are one: the first of them, and how many are like it."""
    alike: dict[str, list[str]] = {}
    for why in sorted(set(reasons)):
        alike.setdefault(re.sub(r"[\d,.]+", "", why), []).append(why)
    return [group[0] + (f" (and {len(group) - 1} like it)" if group[1:] else "") for group in alike.values()]
