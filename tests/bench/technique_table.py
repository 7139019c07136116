"""What each value was seen to save, to cost and to win, on the recorded landscapes; the evidence for what is searched.

    python tests/bench/technique_table.py [--landscapes FOLDER] [--json]

*Time* and *memory*: the median over all pairs of plans that differ in this value alone, against the baseline value;
below 1 is better. *Wins*: the most that the best plan with the value is ahead of the best one without it, at any
ceiling of 10 to 100 % of what the naive plan needs; *alone* where nothing else fits. A win counts from the landscape's
noise on.
The last line with `--json` is one JSON object.
"""

import argparse
import json
import math
from pathlib import Path

from autofit.contract.outcome import Measured
from autofit.registry import techniques
from autofit.search.recordings.landscape import Landscape, needed
from autofit.system.statistics import median

FOLDER = Path(__file__).resolve().parents[1] / "data" / "landscapes"
SHARES = [share / 100 for share in range(10, 101)]
PLAIN = {one.name: one.baseline for one in techniques()}
SPLIT = {"micro_batch", "accumulation"}


def peak(land, plan):
    """The most that any run of a plan needed; infinite where one failed."""
    runs = [run.outcome for run in land.of(plan)]
    return max((needed(one) if isinstance(one, Measured) else math.inf for one in runs), default=math.inf)


def naive_bytes(land):
    """What the baseline plan with the whole batch at once needs."""
    plain = [plan for plan in land.runs if all(plan[name] == PLAIN[name] for name in plan if name not in SPLIT)]
    return peak(land, max(plain, key=lambda plan: plan["micro_batch"]))


def rows_of(land, name):
    """One row for each value of a landscape that is not the baseline."""
    cost = [(plan, land.seconds(plan), peak(land, plan)) for plan in land.runs]
    known = {plan: (seconds, held) for plan, seconds, held in cost}
    ceilings = [share * naive_bytes(land) for share in SHARES]
    best = [min((row for row in cost if row[2] <= limit), key=lambda row: row[1], default=None) for limit in ceilings]
    found = []
    for knob, values in land.space.domains.items():
        for value in values if knob not in SPLIT else ():
            if value == PLAIN[knob]:
                continue
            twins = [
                (seconds / known[twin][0], held / known[twin][1])
                for plan, (seconds, held) in known.items()
                if plan[knob] == value and (twin := plan.replaced(**{knob: PLAIN[knob]})) in known
                if math.isfinite(held + known[twin][1])
            ]
            wins = [
                (min((row[1] for row in cost if row[2] <= limit and row[0][knob] != value), default=math.inf)
                 / winner[1] - 1, share)
                for limit, winner, share in zip(ceilings, best, SHARES, strict=True)
                if winner is not None and winner[0][knob] == value
            ]  # fmt: skip
            ahead, share = max(wins, default=(0.0, None))
            found.append({
                "technique": knob,
                "value": value,
                "landscape": name,
                "pairs": len(twins),
                "time": round(median([one for one, _ in twins]), 3) if twins else None,
                "memory": round(median([one for _, one in twins]), 3) if twins else None,
                "ahead": None if math.isinf(ahead) else round(ahead, 4),
                "at": share,
                "wins": bool(ahead > max(land.noise, 0.01)),
            })  # fmt: skip
    return found


def read(folder=FOLDER):
    """Every row of every landscape."""
    rows = []
    for path in sorted(folder.glob("*.jsonl.gz")):
        rows += rows_of(Landscape.read(path), path.name.removesuffix(".jsonl.gz"))
    return rows


def markdown(rows):
    """The rows as a table."""
    lines = ["| technique | value | landscape | pairs | time | memory | wins | at a ceiling of |", f"|{'---|' * 8}"]
    for row in rows:
        by = "alone" if row["ahead"] is None else f"{row['ahead']:+.1%}"
        won, at = (by, f"{row['at']:.0%}") if row["wins"] else ("-", "")
        lines.append(
            f"| `{row['technique']}` | `{row['value']}` | {row['landscape']} | {row['pairs']} | {row['time']} | "
            f"{row['memory']} | {won} | {at} |"
        )
    return "\n".join(lines)


def main():
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--landscapes", type=Path, default=FOLDER)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = read(options.landscapes)
    print(json.dumps({"rows": rows}) if options.json else markdown(rows))


if __name__ == "__main__":
    main()
