"""Predicted seconds against those of a landscape that a device was measured for.

    python tests/bench/landscape_seconds.py tests/data/device_landscapes/h200_qwen2.jsonl.gz [--json]

The predictions are those that the file holds; ``record_landscape.py --retrace FILE --output FILE`` puts today's there.
A plan that was measured several times counts with its median.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
from autofit.contract.plan import Plan  # noqa: E402 - the checkout is found first
from autofit.search.recordings.landscape import Landscape  # noqa: E402
from tests.bench.whole_steps.score import p90  # noqa: E402


def held(land: Landscape) -> list[tuple[Plan, float, float]]:
    """Each plan with the seconds of its step, measured and predicted."""
    rows = land.facts.workload.global_batch
    timed = ((plan, land.seconds(plan), runs[0].traced_seconds) for plan, runs in land.runs.items())
    found = [(plan, measured, traced * rows) for plan, measured, traced in timed if math.isfinite(measured) and traced]
    return sorted(found, key=lambda one: one[1])


def figures(found: list[tuple[Plan, float, float]]) -> dict[str, Any]:
    """Errors, order, and by how much the plan that the prediction chooses is slower than the best."""
    measured, predicted = (np.array([one[column] for one in found]) for column in (1, 2))
    error = np.abs(predicted / measured - 1)
    one, other = np.triu_indices(len(found), 1)
    agree = np.sign(measured[one] - measured[other]) * np.sign(predicted[one] - predicted[other])
    return {
        "plans": len(found),
        "median_absolute_error": round(float(np.median(error)), 4),
        "p90_absolute_error": round(p90(error.tolist()), 4),
        "rank_correlation": round(float(agree.mean()), 4),
        "choice_regret": round(float(measured[predicted.argmin()] / measured.min() - 1), 4),
    }


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("landscape", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    land = Landscape.read(options.landscape)
    found = held(land)
    if not found:
        sys.exit(f"{options.landscape}: no plan has both seconds")
    if not options.json:
        differ = [name for name in land.space.domains if len(land.space.domains[name]) > 1]
        for plan, measured, predicted in found:
            words = "  ".join(f"{plan[name]!s:>10}" for name in differ)
            print(f"{words}  {measured:8.3f} s  {predicted:8.3f} s  {predicted / measured - 1:+5.0%}")
    print(json.dumps(figures(found)))


if __name__ == "__main__":
    main()
