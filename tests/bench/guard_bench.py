"""Does the guard pass every honest plan and refuse every defect? Two tables, and exit code 1 if a verdict is wrong.

``python tests/bench/guard_bench.py --only bert --output FILE``; all cases take half an hour on one core. What the file
holds already is not run again. A row shows the quantity that comes nearest to its tolerance, or lies farthest outside.
``ratio`` is the difference in tolerances. ``--ranks`` looks at plans of several ranks: a defect that the guard passes
is tried, too, since a tune tries a plan before the guard sees it, and the ranks of a trial say what they saw.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autofit.contract.outcome import Unsupported
from autofit.system.forking.server import ForkServer
from tests.support import guard_cases, rank_cases
from tests.support.guard_cases import Bench, Case
from tests.support.tiny import REPOSITORY, SUPPORT, hear_signals

AGREED = {"other", "same"}
REFUSED = {"other", "not in effect"}


def row(bench: Bench, case: Case) -> dict[str, object]:
    """What the guard says of a case."""
    found, comparisons = bench.look(case)
    verdict, words = found.verdict, found.words
    if case.processes > 1 and case.defect and verdict != "other":
        outcome = bench.tried(case)
        if isinstance(outcome, Unsupported):
            verdict, words = "not in effect", outcome.reason
    worst = max(comparisons, key=lambda one: one.ratio, default=None)
    return {
        "plan": case.name,
        "architecture": case.architecture,
        "defect": case.defect,
        "quantity": worst.what if worst and (worst.ratio > 1) == (verdict == "other") and verdict in AGREED else words,
        "difference": worst.difference if worst else None,
        "tolerance": worst.tolerance if worst else None,
        "ratio": worst.ratio if worst else None,
        "verdict": verdict,
        "right": (verdict in REFUSED) if case.defect else (verdict == "same"),
    }


def line(one: dict[str, object]) -> str:
    """A row in words."""
    numbers = "".join(
        f"{'' if one[name] is None else format(one[name], '.2g'):>10}" for name in ("difference", "tolerance", "ratio")
    )
    right = "" if one["right"] else "  WRONG"
    cells = f"{one['architecture']:<10}{one['plan']:<24}{one['defect']:<46}"
    return f"{cells}{numbers}  {one['verdict']:<13}{str(one['quantity'])[:70]}{right}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose architecture, plan or defect match this")
    parser.add_argument("--output", type=Path, help="keep the rows as JSON")
    parser.add_argument("--ranks", action="store_true", help="plans of several ranks, in the place of the others")
    options = parser.parse_args()
    cases = rank_cases if options.ranks else guard_cases
    hear_signals()
    os.environ["PYTHONPATH"] = f"{SUPPORT}{os.pathsep}{REPOSITORY}"
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[dict[str, object]] = []
    if options.output and options.output.exists():
        rows = json.loads(options.output.read_text("utf-8"))
    known = {(one["plan"], one["architecture"], one["defect"]) for one in rows}
    with tempfile.TemporaryDirectory(prefix="guard-") as folder:
        server = ForkServer(Path(folder) / "log", "cpu", rank_cases.MODULES if options.ranks else ("faulty",))
        with contextlib.closing(server):
            server.start()
            bench = Bench(folder=Path(folder), server=server)
            for title, some in {"HONEST PLANS": cases.honest(), "DEFECTS": cases.defects()}.items():
                print(f"\n{title}", flush=True)
                for case in some:
                    key = case.name, case.architecture, case.defect
                    if key in known or not re.search(options.only, case.words()):
                        continue
                    rows.append(row(bench, case))
                    print(line(rows[-1]), flush=True)
                    if options.output:
                        options.output.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    wrong = sum(not one["right"] for one in rows)
    passed = sum(not one["defect"] for one in rows)
    print(f"\n{passed} honest plans, {len(rows) - passed} defects, {wrong} wrong verdicts")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
