"""A job: what a helper process is told in ``job.json``, and the one result file that it leaves beside it.

Each package that has work for a helper process defines it in its ``jobs.py``; :mod:`autofit.worker` knows every kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import TypeAdapter

from autofit.system.errors import AutofitError
from autofit.system.strict_json import dump_json

JOB = "job.json"


class Job(Protocol):
    """What is to be done, as a frozen dataclass that can be written as JSON."""

    RESULT: ClassVar[str]
    """Name of the file that holds the result."""

    def run(self, folder: Path) -> None:
        """Do it, in the helper process, and leave the result in the folder."""


def job_text(job: Job) -> str:
    """The job as it stands in ``job.json``."""
    adapter: TypeAdapter[Any] = TypeAdapter(type(job))
    return dump_json(adapter, job)


def error_words(error: BaseException) -> str:
    r"""An error in one line: its type and the first line of what it says, and the next where that only introduces it.

    An error of autofit's own is its message. One of ``datasets`` says that a data set can't be made, and its cause why.

    >>> error_words(ValueError("field 'heads':\n    it is 5\n    see the page"))
    "ValueError: field 'heads': it is 5"
    """
    if isinstance(error, AutofitError):
        return error.message
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return f"{type(error).__name__}: no message"
    words = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    told = f"{type(error).__name__}: {words[:500]}"
    if error.__cause__ is not None and type(error).__module__.startswith("datasets."):
        return f"{told.rstrip('.')}, from {error_words(error.__cause__)}"
    return told
