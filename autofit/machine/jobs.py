"""The job that reads the facts of the device, in a process that may load torch."""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from autofit.machine.describe import describe_hardware
from autofit.system.files import write_atomically
from autofit.system.job import error_words


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareJob:
    """Read the facts of the device alone."""

    RESULT: ClassVar[str] = "hardware.json"
    kind: Literal["hardware"] = "hardware"
    device: Literal["cuda", "cpu"]
    processes: int = 1

    def run(self, folder: Path) -> None:
        """Leave ``hardware``; or ``device``, which says why it can't be used."""
        write_atomically(
            folder / self.RESULT, json.dumps(hardware_of(self.device, self.processes), indent=1, allow_nan=False)
        )


def hardware_of(device: str, processes: int = 1) -> dict[str, Any]:
    """The facts of the device that each of some processes has, or why one can't be used."""
    try:
        return {"hardware": describe_hardware(device, processes)}
    except Exception as error:  # noqa: BLE001 - a driver, too
        traceback.print_exc()
        return {"device": error_words(error)}
