"""The jobs of the cost model: parts of plans are traced on fake tensors; the device is timed."""

from __future__ import annotations

import json
import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from autofit.contract.facts import Facts
from autofit.costmodel.tracing.trace_request import TraceRequests
from autofit.machine.meters import warm_up_threads
from autofit.system.files import write_atomically
from autofit.system.job import error_words


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob(TraceRequests):
    """Trace parts of plans."""

    RESULT: ClassVar[str] = "traced.json"
    kind: Literal["trace"] = "trace"

    def run(self, folder: Path) -> None:
        """Leave each trace in the file that its request names, and why others failed."""
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything is imported that asks for the device, and forked
        if self.facts.workload.script is not None:
            from autofit.costmodel.scripts.trace_script import trace_script as trace
        else:
            from autofit.costmodel.tracing.trace_job import trace_all as trace

        write_atomically(folder / self.RESULT, json.dumps({"failed": trace(self, folder)}))


@dataclass(frozen=True, slots=True, kw_only=True)
class RatesJob:
    """Time what the device does in a second."""

    RESULT: ClassVar[str] = "rates.json"
    kind: Literal["rates"] = "rates"
    facts: Facts

    def run(self, folder: Path) -> None:
        """Leave the rates, or why they can't be had."""
        write_atomically(folder / self.RESULT, json.dumps(_timed(self), indent=1, allow_nan=False))


def _timed(job: RatesJob) -> dict[str, Any]:
    """The rates as JSON; ``{"error": words}`` where the device can't."""
    import torch

    from autofit.costmodel import device_rates

    torch.set_num_threads(job.facts.hardware.threads)
    try:
        warm_up_threads()
        overhead = device_rates.kernel_overhead_bytes(job.facts)  # before anything else is computed in here
        return {"kernel_overhead_bytes": overhead, "rates": device_rates.rates_of(job.facts)}
    except Exception as error:  # noqa: BLE001 - a driver, a kernel that is missing
        traceback.print_exc()
        return {"error": error_words(error)}
