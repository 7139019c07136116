"""Every fault of ``tests/faults/injection.py``, several times over, and the table of them.

``python tests/bench/fault_bench.py --tries 3 --markdown``; some need root, and say so where they can't be injected.
The last line is one JSON object. ``--script tests/data/scripts/classify.py`` injects them into tunes of a script, whose
trials are forked from one run of it; each trial of ``loop.py`` runs it. ``--ranks`` has one rank of a trial of several
fail, under each layout, on a CPU that Accelerate takes for a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import itertools
import json
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autofit.system.forking.server import ForkServer
from tests.faults import ranks
from tests.faults.injection import FAULTS, Impossible, Place, survives
from tests.support.rank_cases import MODULES
from tests.support.tiny import SUPPORT, describe, hear_signals, write_config


def markdown(rows: list[dict]) -> str:
    """The rows as a table for the README."""
    lines = ["| fault | injected | tries | survived | what the user sees |", "|---|---|---|---|---|"]
    for row in rows:
        words = f"not injected: {row['impossible']}" if "impossible" in row else row["sees"]
        cells = (row["fault"], row["injected"], row["tries"], row["survived"], words)
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def of_tunes(tries: int, only: str, script: Path | None, *, talk: bool) -> list[dict]:
    """A row for each fault that a whole tune has to survive."""
    rows = {}
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        place = Place(Path(folder), script)
        try:
            for number in range(tries):
                for one in FAULTS:
                    if not re.search(only, one.name) or (one.of_scripts and script is None):
                        continue
                    empty = {"fault": one.name, "injected": one.injected, "tries": 0, "survived": 0, "sees": ""}
                    row = rows.setdefault(one.name, {**empty, "same_plan": 0, "seconds": [], "failures": []})
                    try:
                        found = survives(place, one)
                    except Impossible as reason:
                        row["impossible"] = str(reason)
                        continue
                    except Exception as error:  # noqa: BLE001 - the bench goes on with the next
                        row["failures"].append(f"{error!r}"[:1500])
                        traceback.print_exc()
                        found = None
                    row["tries"] += 1
                    if found is not None:
                        row["survived"] += 1
                        row["sees"] = found["sees"].replace(folder, "...")
                        row["same_plan"] += found["same_plan"]
                        row["seconds"].append(found["seconds"])
                    if talk:
                        print(
                            f"{number + 1} {one.name}: {found or row['failures'][-1][:300]}",
                            file=sys.stderr,
                            flush=True,
                        )
        finally:
            place.close()
    return list(rows.values())


def of_ranks(tries: int, only: str) -> list[dict]:
    """A row for each layout and fault of a rank; a line of each is printed as it comes."""
    rows = []
    os.environ |= {"PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        server = ForkServer(Path(folder) / "log", "cpu", MODULES)
        with contextlib.closing(server):
            server.start()
            config = write_config(Path(folder) / "model")
            facts = describe(server, config)
            for (value, processes), fault in itertools.product(ranks.LAYOUTS, ranks.FAULTS):
                if not re.search(only, f"{value} {fault}"):
                    continue
                act, kind = ranks.FAULTS[fault]
                row = {"layout": value, "ranks": processes, "fault": fault, "tries": tries, "as_it_should": 0}
                row |= {"seconds": [], "processes_left": 0, "ports_left": 0, "outcome": ""}
                for _ in range(tries):
                    place = Path(tempfile.mkdtemp(dir=folder))
                    found, seconds, left, ports = ranks.end_of(server, config, facts, place, value, processes, act)
                    row["as_it_should"] += isinstance(found, kind)
                    row["seconds"].append(round(seconds, 1))
                    row["processes_left"] += left
                    row["ports_left"] += ports
                    row["outcome"] = found.kind
                rows.append(row)
                print(row, file=sys.stderr, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--only", default="", help="kinds whose names match this")
    parser.add_argument("--script", type=lambda path: Path(path).resolve(), help="a script to tune")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true", help="no talk")
    parser.add_argument("--ranks", action="store_true", help="one rank of several, in the place of the others")
    parser.add_argument("--table", type=Path, help="only print the table of a result that was kept")
    options = parser.parse_args()
    if options.table is not None:
        print(markdown(json.loads(options.table.read_text("utf-8"))["rows"]))
        return 0
    hear_signals()
    if options.ranks:
        rows = of_ranks(options.tries, options.only)
        at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        print(json.dumps({"bench": "faults of ranks", "at": at, "rows": rows}))
        return 0 if all(one["as_it_should"] == one["tries"] and not one["processes_left"] for one in rows) else 1
    table = of_tunes(options.tries, options.only, options.script, talk=not options.json)
    if options.markdown:
        print(markdown(table))
    whole = [row for row in table if row["tries"] >= options.tries == row["survived"]]
    result = {
        "bench": "faults",
        "tuned": options.script.name if options.script else "a model's config",
        "at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "kinds": len(table),
        "kinds_survived": len(whole),
        "tries": sum(row["tries"] for row in table),
        "survived": sum(row["survived"] for row in table),
        "rows": table,
    }
    print(json.dumps(result))
    return 0 if len(whole) == len(table) else 1


if __name__ == "__main__":
    sys.exit(main())
