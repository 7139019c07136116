"""The whole steps of ``time_bench.py``: what is predicted of training steps that others measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.whole_steps import bench


def run(rows_folder: Path, *, folds: int | None, vs: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """What goes under the keys of the final JSON object.

    Args:
        rows_folder: Holds the files of measurements.
        folds: Each card is predicted by a fit that has not seen it; ``None`` uses the coefficients that ship.
        vs: Also the plain roofline, and FLOPs over a flat 40 % of the peak, on the same rows.
        say: Takes each line that is for a person.
    """
    return bench.run(rows_folder, folds=folds, versus=vs, say=say)
