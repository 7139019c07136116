"""Reads the operators that ``record_operators.py`` timed, each alone, on a card of ours."""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autofit.contract.trace import Ints
from autofit.costmodel.seconds import step_time
from autofit.costmodel.seconds.operator_time import (
    ARITHMETICS,
    COLUMNS,
    LAYOUTS,
    TIMED_KINDS,
    Operators,
    bound_seconds,
    device_seconds,
    figures_of,
    groups_of,
)  # fmt: skip
from autofit.costmodel.seconds.roofline import Numbers
from tests.bench.time_rows import Rows, card_or_none

FOLDER = Path(__file__).resolve().parents[1] / "data" / "operator_times"
OWN_CARD = "H100 SXM 80 GB"
FILES = {OWN_CARD: ("h100_operators.csv.gz", "h100_steps.csv")}
"""Operators and whole steps, by the card's name in the catalogue."""
_BUSY = 0.75
"""Where the host issues a step's operators in this share of its seconds, the card is what takes them."""
EMPTY_PAIR_SECONDS = 1.25e-6
"""Between two events with nothing between them, on that H100."""
PAUSE_SECONDS = 1.5e-4
"""The device only waits so long before each operator, and does not heat up."""
MOST = 30
"""Rows of each operator and arithmetic that are fitted to."""
_CODES = {"kind": TIMED_KINDS, "arithmetic": ARITHMETICS, "layout": LAYOUTS}


def read_own(card: str, folder: Path = FOLDER) -> Rows:
    """Every operator that was timed on a card, kernels by themselves and those of training steps.

    ``op`` is the program's name, a tab and the operator's.
    """
    with gzip.open(folder / FILES[card][0], "rt", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    found = card_or_none(card)
    assert found is not None
    values = [
        [_CODES[name].index(line[name]) if name in _CODES else float(line[name]) for name in COLUMNS] for line in lines
    ]
    operators = Operators.from_rows(np.array(values), np.array([float(line["calls"]) for line in lines]))
    return Rows(
        source=np.full(len(lines), "own", dtype="<U12"),
        line=np.arange(len(lines)),
        op=np.array([f"{line['program']}\t{line['op']}" for line in lines]),
        group=groups_of(operators),
        card=np.full(len(lines), card, dtype="<U40"),
        operators=operators,
        figures=figures_of(operators, found),
        bound=bound_seconds(operators, found),
        seconds=np.maximum(np.array([float(line["seconds"]) for line in lines]) - EMPTY_PAIR_SECONDS, 1e-6),
    )


def predicted(rows: Rows, fit: Mapping[str, Mapping[str, float]]) -> Numbers:
    """Seconds of each, timed as they were."""
    return np.maximum(device_seconds(rows.operators, rows.figures, fit, pause=PAUSE_SECONDS), rows.bound)


def to_fit(card: str) -> Rows:
    """Those that laws are fitted to, at most :data:`MOST` of each operator and arithmetic.

    Flash attention is left out, since PyTorch takes cuDNN's there, and so are products that are a loop over experts.
    """
    rows = read_own(card)
    names = np.char.partition(rows.op, "\t")[:, 2]
    left_out = np.char.find(names, "flash_attention") >= 0
    left_out |= names == "_grouped_mm"
    rows = rows.where(~left_out)
    alike: defaultdict[tuple[str, str, int], list[int]] = defaultdict(list)
    keys = zip(rows.group.tolist(), names[~left_out].tolist(), rows.operators.arithmetic.tolist(), strict=True)
    for place, key in enumerate(keys):
        alike[key].append(place)
    kept = (its if len(its) <= MOST else [its[k * len(its) // MOST] for k in range(MOST)] for its in alike.values())
    return rows.where(np.array(sorted(place for its in kept for place in its)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnSteps:
    """Whole steps that kept a card busy; arrays of shape ``(steps,)`` but for the operators.

    Attributes:
        programs: Their names.
        seconds: Measured.
        rows: Operators of all of them.
        step: Which step each operator is of.
    """

    programs: list[str]
    seconds: Numbers
    rows: Rows
    step: Ints

    def predicted(self, fit: Mapping[str, Mapping[str, float]]) -> Numbers:
        """Seconds of each on the device."""
        operators = self.rows.operators
        alone = np.maximum(device_seconds(operators, self.rows.figures, fit), self.rows.bound)
        seconds, kernels = (
            np.bincount(self.step, each, len(self.programs)) for each in (operators.calls * alone, operators.calls)
        )
        return step_time.on_device(seconds, kernels, np.zeros(len(self.programs)), fit["step"])


def steps_of(card: str, folder: Path = FOLDER) -> OwnSteps:
    """The whole steps of a card whose operators were timed, and that did not wait for the host."""
    with (folder / FILES[card][1]).open(encoding="utf-8") as file:
        found = {
            line["program"]: float(line["step_seconds"])
            for line in csv.DictReader(file)
            if float(line["operators"]) and float(line["issued_seconds"]) < _BUSY * float(line["step_seconds"])
        }
    rows = read_own(card, folder)
    names = np.char.partition(rows.op, "\t")[:, 0]
    rows, names = rows.where(np.isin(names, list(found))), names[np.isin(names, list(found))]
    programs = list(found)
    return OwnSteps(
        programs=programs,
        seconds=np.array(list(found.values())),
        rows=rows,
        step=np.array([programs.index(name) for name in names.tolist()]),
    )
