"""The job that loads emitted files back with the libraries that will read them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from autofit.system.errors import EmissionError
from autofit.system.files import write_atomically


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckJob:
    """Load emitted files back."""

    RESULT: ClassVar[str] = "check.json"
    kind: Literal["check"] = "check"
    folder: str

    def run(self, folder: Path) -> None:
        """Leave why a file was refused, or nothing."""
        write_atomically(folder / self.RESULT, json.dumps({"error": _refusal(self)}))


def _refusal(job: CheckJob) -> str | None:
    """Why an emitted file was refused, or ``None``."""
    from autofit.output.emit import check_files  # not with the job, which every process that does one imports

    try:
        check_files(Path(job.folder))
    except EmissionError as error:
        return str(error)
    return None
