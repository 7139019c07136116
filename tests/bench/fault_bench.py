"""Every fault of ``tests/faults/injection.py``, several times over, and the table of them.

``python tests/bench/fault_bench.py --tries 3 --markdown``; some need root, and say so where they can't be injected.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import re
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.faults.injection import FAULTS, Impossible, Place, survives
from tests.support.tiny import hear_signals


def markdown(rows: list[dict]) -> str:
    """The rows as a table for the README."""
    lines = ["| fault | injected | tries | survived | what the user sees |", "|---|---|---|---|---|"]
    for row in rows:
        words = f"not injected: {row['impossible']}" if "impossible" in row else row["sees"]
        cells = (row["fault"], row["injected"], row["tries"], row["survived"], words)
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--only", default="", help="kinds whose names match this")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true", help="no talk")
    parser.add_argument("--table", type=Path, help="only print the table of a result that was kept")
    options = parser.parse_args()
    if options.table is not None:
        print(markdown(json.loads(options.table.read_text("utf-8"))["rows"]))
        return 0
    hear_signals()
    rows = {}
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        place = Place(Path(folder))
        try:
            for number in range(options.tries):
                for one in FAULTS:
                    if not re.search(options.only, one.name):
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
                    if not options.json:
                        print(
                            f"{number + 1} {one.name}: {found or row['failures'][-1][:300]}",
                            file=sys.stderr,
                            flush=True,
                        )
        finally:
            place.close()
    table = list(rows.values())
    if options.markdown:
        print(markdown(table))
    whole = [row for row in table if row["tries"] >= options.tries == row["survived"]]
    result = {
        "bench": "faults",
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
