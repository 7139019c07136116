"""The job that reads the facts of a model's config and of the device, in a process that may load torch."""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from autofit.contract.facts import Task
from autofit.machine.jobs import hardware_of
from autofit.machine.meters import guarded
from autofit.system.errors import ModelError
from autofit.system.files import write_atomically
from autofit.system.job import error_words
from autofit.system.units import GIB, size
from autofit.training.tasks.choose import describe_model

DESCRIBING_BYTES = 4 * GIB
"""Of the host, for the objects of a model without storage; 61 layers of 384 experts take less than 1 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeJob:
    """Read the facts of a model's config and of the device."""

    RESULT: ClassVar[str] = "facts.json"
    kind: Literal["describe"] = "describe"
    name: str
    config: str
    device: Literal["cuda", "cpu"]
    trust_remote_code: bool
    task: Task | None = None
    processes: int = 1

    def run(self, folder: Path) -> None:
        """Leave the facts, or why they can't be read."""
        write_atomically(folder / self.RESULT, json.dumps(_described(self), indent=1, allow_nan=False))


def _described(job: DescribeJob) -> dict[str, Any]:
    """The facts as JSON; ``{"error": words}`` where the config is wrong, ``{"device": words}`` where the device is.

    A model that is refused has a ``hint`` beside its ``error``.
    """
    from transformers import modeling_utils

    _ = modeling_utils  # what it imports may ask for the device, whose driver takes more than the guard leaves
    try:
        with guarded(DESCRIBING_BYTES):
            model = describe_model(job.name, Path(job.config), trust_remote_code=job.trust_remote_code, task=job.task)
    except ModelError as error:
        return {"error": error.message, "hint": error.hint}
    except MemoryError:
        return {"error": f"its modules alone take more than {size(DESCRIBING_BYTES)} of the host: are its sizes right?"}
    except ImportError as error:
        words = f"no model can be built from the config of {job.name!r}: {error_words(error)}"
        return {"error": words, "hint": "install what it names where autofit is installed"}
    except Exception as error:  # noqa: BLE001 - libraries raise anything on a bad config; the words reach the user
        traceback.print_exc()
        return {"error": error_words(error)}
    return {"model": model, **hardware_of(job.device, job.processes)}
