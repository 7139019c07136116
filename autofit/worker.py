"""The process of one job: it reads ``job.json`` in its folder and leaves one result file there.

It is forked by :mod:`autofit.system.forking.process`, which has torch and transformers loaded; it may also be
run by itself, as ``python -m autofit.worker FOLDER``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from autofit.costmodel.jobs import RatesJob, TraceJob
from autofit.machine.jobs import HardwareJob
from autofit.output.jobs import CheckJob
from autofit.system.job import JOB, Job
from autofit.training.jobs import SNAPSHOT_JOB, CurveJob, DescribeScriptJob, TrialJob
from autofit.training.profiling.jobs import ProfileJob
from autofit.training.tasks.jobs import DescribeJob

Kinds = Annotated[
    TrialJob | CurveJob | DescribeJob | HardwareJob | DescribeScriptJob | RatesJob | CheckJob | TraceJob | ProfileJob,
    Field(discriminator="kind"),
]
JOBS: TypeAdapter[Job] = TypeAdapter(Kinds)


def main(folder: Path) -> None:
    """Do the job in a folder."""
    JOBS.validate_json((folder / JOB).read_bytes()).run(folder)


def snapshot(folder: Path, next_job: Callable[[], Path]) -> str:
    """Do the snapshot's job in a folder; see :class:`autofit.training.jobs.SnapshotJob`."""
    return SNAPSHOT_JOB.validate_json((folder / JOB).read_bytes()).run(folder, next_job)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
