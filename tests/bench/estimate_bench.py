"""Published peak-memory measurements against predictions, without a device.

    python tests/bench/estimate_bench.py --rows FILE.csv|FOLDER [--json] [--vs] [--tier A] [--only TEXT]

Each row is read into the program that was measured, the program is run under fake tensors, and the counter that was
read is worked out from its allocations. Rows whose counter does not depend on what is not recorded are *scored*, on
both sides; the others are listed with a bound or with the reason why they say nothing. The last line of the output is
one JSON object.

``missed``: measured more than 5 % above predicted, so that a card of the predicted size would have run out of memory.
``refused``: predicted more than 15 % above measured, so that a plan that fits would have been turned down.
"""

import argparse
import concurrent.futures
import json
import os
import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

MISSED, REFUSED = 0.05, 0.15


def answer(rows):
    """Predictions of some rows; in a process of its own."""
    import torch
    from published import compare
    from published.predict import Prediction, predict
    from published.world_rows import WorldRow

    torch.set_num_threads(1)
    found = []
    for row in rows:
        try:
            found.append((predict(row), {} if isinstance(row, WorldRow) else compare.estimates_of(row)))
        except Exception as reason:  # noqa: BLE001 - one row that breaks is shown, and the others are still of use
            words = f"broke: {type(reason).__name__}: {reason}"[:200]
            found.append((Prediction(kind="none", reason=words, group="BROKEN"), {}))
    return found


def answers(rows, workers):
    """Predictions of all rows; those of one model go to the same process, which keeps what it traced."""
    together = defaultdict(list)
    for index, row in enumerate(rows):
        together[row.model, row.batch, row.precision, row.method].append(index)
    parts = sorted(together.values(), key=len, reverse=True)
    found = [None] * len(rows)
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        jobs = {pool.submit(answer, [rows[i] for i in part]): part for part in parts}
        for job in concurrent.futures.as_completed(jobs):
            for index, one in zip(jobs[job], job.result(), strict=True):
                found[index] = one
    return found


def error(predicted, measured):
    return predicted / measured - 1


def p90(values):
    """The smallest value that nine tenths do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-9 * len(ordered) // 10) - 1)]


def summary(errors):
    """The four figures of some signed errors."""
    if not errors:
        return {"rows": 0, "median_absolute_error": None, "p90_absolute_error": None, "missed": None, "refused": None}
    sizes = [abs(one) for one in errors]
    return {
        "rows": len(errors),
        "median_absolute_error": round(statistics.median(sizes), 5),
        "p90_absolute_error": round(p90(sizes), 5),
        "missed": round(sum(1 / (1 + one) - 1 > MISSED for one in errors) / len(errors), 5),
        "refused": round(sum(one > REFUSED for one in errors) / len(errors), 5),
    }


def show(groups):
    """Every scored row, by group."""
    for (group, metric), members in sorted(groups.items()):
        print(f"\n== {group}: {metric}, {len(members)} scored")
        for row, prediction, _ in members:
            signed = error(prediction.predicted_bytes, row.measured_bytes)
            words = f"{row.model} {row.method} {row.rank} {row.precision} b{row.batch} s{row.longest} {row.optimizer}"
            print(
                f"  {signed:+7.2%}  predicted {prediction.predicted_bytes / 1e9:7.3f}  measured "
                f"{row.measured_bytes / 1e9:7.3f} GB  tier {row.tier}  {words} [{row.gpu}]"
            )
        shown = summary([error(p.predicted_bytes, r.measured_bytes) for r, p, _ in members])
        print(f"  median {shown['median_absolute_error']:.2%}, p90 {shown['p90_absolute_error']:.2%}")


def show_others(others):
    """What is not scored: bounds, labels, reasons."""
    for kind in ("bound", "fits"):
        members = [(row, p) for row, p in others if p.kind == kind]
        if not members:
            continue
        print(
            f"\n== {'bounds: predicted must not lie above measured' if kind == 'bound' else 'labels'}: {len(members)}"
        )
        for row, prediction in members:
            words = f"{row.model} {row.method} {row.rank} {row.precision} b{row.batch} s{row.seqlen[:20]} [{row.gpu}]"
            print(f"  {verdict(row, prediction):9s} predicted {prediction.predicted_bytes / 1e9:7.3f} GB, measured "
                  f"{row.measured_gb:>7s}  {words}")  # fmt: skip
    reasons = defaultdict(list)
    for row, prediction in others:
        if prediction.kind == "none":
            reasons[prediction.group, prediction.reason].append(row)
    if reasons:
        print(f"\n== no prediction: {sum(map(len, reasons.values()))}")
    for (group, reason), members in sorted(reasons.items()):
        print(f"  {len(members):4d}  {group}: {reason}")


CARDS = {"A10G": 22.2, "40GB": 39.4, "T4": 14.6, "16GB": 15.8, "24GB": 23.6, "80GB": 79.2}
"""GiB of a card as PyTorch prints its total capacity; context and NCCL come out of it."""
CLOSE = 0.05


def verdict(row, prediction):
    """Whether a bound or a label is kept; a label close to the card's edge says nothing."""
    if prediction.kind == "bound":
        return "kept" if prediction.predicted_bytes <= row.measured_bytes * 1.005 else "BROKEN"
    card = next((size for name, size in CARDS.items() if name in row.gpu), None)
    if card is None or row.measured_gb not in {"OOM", "fits"}:
        return "unknown"
    share = prediction.predicted_bytes / (card * 1024**3)
    if abs(share - 1) < CLOSE:
        return "close"
    return "kept" if (share < 1) == (row.measured_gb == "fits") else "BROKEN"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True, help="table of measurements, or a folder of them")
    parser.add_argument(
        "--json",
        action="store_true",
        help="accepted for the caller's sake: the JSON object is the last line in any case",
    )
    parser.add_argument("--vs", action="store_true", help="also what three closed formulas say of the scored rows")
    parser.add_argument("--tier", help="only rows of this tier")
    parser.add_argument("--only", help="only rows that hold this text")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    from published.rows import read

    rows = [row for row in read(options.rows) if options.tier in {None, row.tier}]
    rows = [row for row in rows if not options.only or options.only.lower() in str(row).lower()]
    found = [(row, *one) for row, one in zip(rows, answers(rows, options.workers), strict=True)]
    scored = [one for one in found if one[1].kind == "scored"]
    groups = defaultdict(list)
    for one in scored:
        groups[one[1].group, one[0].metric].append(one)
    show(groups)
    show_others([one[:2] for one in found if one[1].kind != "scored"])
    result = report(scored, found, groups)
    if options.vs:
        result["vs"] = versus(scored)
    print(f"\n{result['rows']} of {len(rows)} rows scored")
    print(json.dumps(result))


def report(scored, found, groups):
    """The JSON object."""
    kinds = [(one[0], one[1]) for one in found]
    result = summary([error(p.predicted_bytes, r.measured_bytes) for r, p, _ in scored])
    result["distinct_runs"] = len({(p.predicted_bytes, row.measured_bytes) for row, p, _ in scored})
    result["tier_a_rows"] = sum(row.tier == "A" for row, *_ in scored)
    result["groups"] = {
        f"{group}: {metric}": summary([error(p.predicted_bytes, r.measured_bytes) for r, p, _ in members])
        for (group, metric), members in sorted(groups.items())
    }
    for kind in ("bound", "fits"):
        said = [verdict(row, p) for row, p in kinds if p.kind == kind]
        result[f"{kind}_rows"], result[f"{kind}_kept"] = len(said), said.count("kept")
    result["without_prediction"] = sum(p.kind == "none" for _, p in kinds)
    return result


def versus(scored):
    """The same figures of the closed formulas, over the rows that all of them answer."""
    both = [(row, p, others) for row, p, others in scored if others]
    result = {"autofit": summary([error(p.predicted_bytes, r.measured_bytes) for r, p, _ in both])}
    for name in both[0][2] if both else ():
        result[name] = summary([error(others[name], row.measured_bytes) for row, _, others in both])
    print("\n== against closed formulas, on the same rows")
    for name, one in result.items():
        print(f"  {name:12s} {one}")
    return result


if __name__ == "__main__":
    main()
