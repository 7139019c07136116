"""Fits the laws of collectives to measured ones, and how much of them hides to whole steps of many cards.

    python tests/bench/fit_collectives.py --rows tests/data/collectives --steps tests/data/step_times

writes autofit/costmodel/seconds/collective_coefficients.json. ``--keep FOLDER`` with the original files' folder as
``--rows`` writes what is fitted to, compressed.

The same minimizer as the operators', no random numbers: the same rows give the same file to the digit.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autofit.costmodel.seconds import collectives
from autofit.costmodel.seconds.collectives import COLLECTIVES, Links, collective
from autofit.costmodel.seconds.operator_time import Operators
from autofit.costmodel.seconds.step_time import EIGHTY
from autofit.machine import gpu_catalogue
from tests.bench.fit_time_model import _minimized
from tests.bench.whole_steps import bench, exchanges
from tests.bench.whole_steps.rows import Step, read

TARGET = Path(__file__).resolve().parents[2] / "autofit" / "costmodel" / "seconds" / "collective_coefficients.json"
NAME = "collectives.csv"
START = {
    "start": 1.4e-5, "ramp": 0.7, "ring": 0.8, "summed": 1.0, "gathered": 0.6, "network": 0.9, "machines": 0.7,
    "unhidden": 0.1,
}  # fmt: skip
"""As they read; they are fitted as logarithms."""
_LARGE_BYTES = 1 << 30
"""A payload that a chart calls large without a figure."""
_CONSISTENT = 0.05
_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measured:
    """Measured collectives of one kind of machine.

    Attributes:
        operators: Of shape ``(rows,)``.
        links: Of that machine.
        seconds: Of the same shape.
    """

    operators: Operators
    links: Links
    seconds: Any


def expressed(row: Mapping[str, str]) -> tuple[str, int, int, str, float, float] | None:
    """Card, ranks, nodes, kind, payload and seconds of a row; ``None`` of one that says too little, or two things."""
    card = re.search(r"\b(V100|A100|H100|H200|B200)\b", row["hardware"])
    if card is None or not row["world"] or row["op"] not in COLLECTIVES:
        return None
    ranks, factor = int(row["world"]), 2.0 if row["op"] == "all_reduce" else 1.0
    share = factor * (ranks - 1) / ranks
    bus, own = float(row["busbw_GBps"]), float(row["algbw_GBps"] or 0)
    if own and abs(bus / own / share - 1) > _CONSISTENT and bus > 0.05 * 100:
        return None
    payload = float(row["payload_bytes"]) if row["payload_bytes"].isdigit() else float(_LARGE_BYTES)
    seconds = float(row["time_us"]) * 1e-6 if row["time_us"] else payload * share / (bus * 1e9)
    return card[1], ranks, int(row["nodes"]), row["op"], payload, seconds


def raw(folder: Path) -> list[dict[str, str]]:
    """The rows of a folder, compressed or not."""
    path = folder / NAME
    text = path.read_text("utf-8") if path.exists() else gzip.decompress((folder / f"{NAME}.gz").read_bytes()).decode()
    return list(csv.DictReader(io.StringIO(text)))


def measured(rows: list[dict[str, str]]) -> list[Measured]:
    """Rows by machine."""
    groups: dict[tuple[str, int, int], list[tuple[str, float, float]]] = {}
    for row in rows:
        if (one := expressed(row)) is not None:
            groups.setdefault(one[:3], []).append(one[3:])
    found = []
    for (name, ranks, nodes), members in groups.items():
        card = next(one for one in gpu_catalogue.cards() if one.name.startswith(name) and one.nvlink_bytes_per_second)
        found.append(
            Measured(
                operators=Operators.of([collective(kind, payload, ranks) for kind, payload, _ in members]),  # type: ignore[arg-type]
                links=collectives.links_of(card, processes=ranks, nodes=nodes),
                seconds=np.array([seconds for _, _, seconds in members]),
            )
        )
    return found


def fitted(groups: list[Measured]) -> dict[str, float]:
    """The coefficients of the laws."""
    names = [name for name in START if name != "unhidden"]

    def with_values(values: Any) -> dict[str, float]:
        return START | {name: float(np.exp(value)) for name, value in zip(names, values, strict=True)}

    def residuals(values: Any) -> Any:
        trial = with_values(values)
        return np.concatenate([_errors(one, trial) for one in groups])

    values = _minimized(residuals, np.log([START[name] for name in names]), 40)
    return _rounded(with_values(values))


def _errors(one: Measured, fit: Mapping[str, float]) -> Any:
    return np.log(collectives.seconds(one.operators, one.links, fit) / one.seconds)


def with_overlap(laws: dict[str, float], steps: list[Step], traces: Mapping[Any, Any]) -> dict[str, float]:
    """The laws, and the share that does not hide, fitted to whole steps of several machines.

    What those of one machine spend on collectives is in the laws of whole steps already.
    """
    several = [step for step in steps if step.nodes > 1]
    if not several:
        return laws
    computed = bench.computed(several, traces)
    truth = np.array([step.seconds for step in several])

    def residuals(values: Any) -> Any:
        trial = laws | {"unhidden": float(np.exp(values[0]))}
        return np.log((computed + exchanges.added(several, computed, trial)) / truth)

    (value,) = _minimized(residuals, np.log([START["unhidden"]]), 40)
    return _rounded(laws | {"unhidden": float(np.exp(value))})


def _rounded(found: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.{_DIGITS}g}") for name, value in found.items()}


def found(rows: Path, steps: Path) -> dict[str, Any]:
    """All that ships."""
    groups = measured(raw(rows))
    laws = fitted(groups)
    errors = np.concatenate([_errors(one, laws) for one in groups])
    whole = [step for step in read(steps) if step.nodes > 1]
    traces, _ = bench.traces_of(whole)
    laws = with_overlap(laws, [step for step in whole if step.program in traces], traces)
    return {
        "about": "Made by tests/bench/fit_collectives.py. See autofit/costmodel/README.md.",
        "rows": len(errors),
        "steps": len(whole),
        "fit": laws,
        "log_std": round(float(np.quantile(np.abs(errors), 0.8)) / EIGHTY, 3),
    }


def keep(folder: Path, target: Path) -> None:
    """Write the rows that are expressed into another folder, compressed."""
    rows = [row for row in raw(folder) if expressed(row) is not None]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    target.mkdir(parents=True, exist_ok=True)
    (target / f"{NAME}.gz").write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def main() -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, required=True, help="folder of collectives.csv, compressed or not")
    parser.add_argument("--steps", type=Path, help="folder of whole steps")
    parser.add_argument("--keep", type=Path, help="write the rows that are expressed here, and fit nothing")
    options = parser.parse_args()
    if options.keep:
        keep(options.rows, options.keep)
        return
    if options.steps is None:
        parser.error("--steps is needed to fit what does not hide")
    TARGET.write_text(json.dumps(found(options.rows, options.steps), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
