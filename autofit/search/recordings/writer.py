"""A recording: what plans gave on one device, written line by line.

A file is JSON lines, gzipped where its name ends in ``.gz``. A line with ``facts`` says what the lines below it were
measured for; each of those is one measurement of one plan, with its raw step times::

    {"facts": {...}, "provenance": {...}}
    {"plan": {...}, "outcome": {"kind": "measured", "steps": [...], ...}, "wall_seconds": 1.3, "predicted_bytes": ...}
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from pydantic import TypeAdapter

from autofit.contract.facts import FACTS, Facts
from autofit.contract.outcome import Evidence, Measured, Outcome, Trial
from autofit.contract.plan import Plan
from autofit.costmodel.forecast import Forecast
from autofit.space import Space
from autofit.system.files import writing


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measurement of one plan.

    Attributes:
        at: Seconds since the recording began.
        predicted_bytes: Peak on the device by its trace, before anything was measured.
        traced_bytes: Peak of its tensors by its trace.
        activation_bytes: What its micro-batch would keep for the backward pass without checkpointing, by a trace.
        traced_seconds: Of a sample by roofline, where the card is known.
        work: How much of each of :data:`~autofit.costmodel.seconds.roofline.WORK` a sample is, by the trace.
    """

    plan: Plan
    outcome: Outcome
    wall_seconds: float
    at: float = 0.0
    predicted_bytes: int | None = None
    traced_bytes: int | None = None
    activation_bytes: int | None = None
    traced_seconds: float | None = None
    work: tuple[float, ...] | None = None


RUN: TypeAdapter[Run] = TypeAdapter(Run)
"""Reads and writes a line."""


class Writer:
    """Appends measurements to a file.

    Args:
        path: Made where it is missing.
        facts: What the measurements are of; written first.
        space: The plans.
        cast: What their traces say.
        provenance: Where they come from.

    Raises:
        MachineError: The file can't be written.
    """

    def __init__(
        self,
        path: Path,
        facts: Facts,
        space: Space,
        cast: Forecast | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.began = time.monotonic()
        self.traced = {} if cast is None else traced(space, cast)
        _append(
            path, {"facts": FACTS.dump_python(facts, mode="json", by_alias=True), "provenance": dict(provenance or {})}
        )

    def add(self, trial: Trial) -> None:
        """Write one measurement.

        Raises:
            MachineError: The file can't be written.
        """
        outcome = trial.outcome
        if isinstance(outcome, Measured):  # what each knob was seen to do is the trial's own matter
            outcome = dataclasses.replace(outcome, evidence=Evidence(), notes=())
        run = Run(
            plan=trial.plan,
            outcome=outcome,
            wall_seconds=trial.wall_seconds,
            at=time.monotonic() - self.began,
            **self.traced.get(trial.plan, {}),
        )
        self.write(run)

    def write(self, run: Run) -> None:
        """Write one measurement as it is.

        Raises:
            MachineError: The file can't be written.
        """
        line = RUN.dump_python(run, mode="json", by_alias=True, exclude_none=True)
        line["outcome"].pop("evidence", None)
        _append(self.path, _rounded(line))


def traced(space: Space, cast: Forecast) -> dict[Plan, dict[str, Any]]:
    """What the traces say of each plan, as fields of a :class:`Run`."""
    found, predicted = {}, cast.predicted_bytes
    for place, plan in enumerate(space.plans):
        tensors, seconds, work = cast.tensor_bytes[place], cast.seconds[place], cast.work[place]
        found[plan] = {
            "predicted_bytes": None if math.isnan(predicted[place]) else round(predicted[place]),
            "traced_bytes": None if math.isnan(tensors) else round(tensors),
            "activation_bytes": round(cast.activation_bytes[place]),
            "traced_seconds": None if math.isnan(seconds) else float(seconds),
            "work": None if np.isnan(work).any() else tuple(work.tolist()),
        }
    return found


def _append(path: Path, line: Mapping[str, Any]) -> None:
    text = json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n"
    with writing(path), path.open("ab") as file:
        data = text.encode()
        file.write(gzip.compress(data) if path.suffix == ".gz" else data)


def _rounded(value: Any) -> Any:
    """Numbers to seven digits, which is more than a clock knows."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value


def pack(path: Path, target: Path) -> None:
    """The same landscape as one gzip stream, which is several times smaller than one for each line."""
    with open_recording(path) as file, writing(target), gzip.GzipFile(target, "wb", mtime=0) as packed:
        for line in file:
            packed.write(line)


def open_recording(path: Path) -> IO[bytes]:
    """Open a recording for reading; unpacks it where it is gzipped."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]
