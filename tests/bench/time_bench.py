"""Predicted seconds against measured ones: kernels and whole steps, on every card that the catalogue knows.

    python tests/bench/time_bench.py --rows DIR [--folds 5] [--vs] [--each FILE.csv] [--pictures DIR] [--json]

It uses the coefficients that ship; ``--folds`` fits anew, each card predicted by a fit that has not seen it, and takes
minutes. ``--vs`` adds the plain roofline (75 % of the peak, 80 % of the bandwidth) on the same rows. A table by source,
card and operator goes to stderr (with ``--json``) or stdout; what can't be expressed is counted with its reason. The
last line with ``--json`` is one JSON object. Errors are ``predicted / measured - 1``.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
from autofit.costmodel import operator_time, roofline  # noqa: E402 - the checkout is found first
from autofit.system.errors import InputError  # noqa: E402
from tests.bench import fit_time_model, time_pictures  # noqa: E402
from tests.bench.time_rows import Rows, read_kernels  # noqa: E402


def predictions(rows: Rows, count: int | None) -> tuple[Any, Any]:
    """Predicted seconds and standard deviations of their logarithm, of shape ``(rows,)``.

    Args:
        rows: What was measured.
        count: Folds by card; ``None`` takes what ships.
    """
    if count is None:
        return _predicted(rows, operator_time.coefficients())
    seconds, spread = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    for _, others, held in fit_time_model.folds(rows, count):
        found = fit_time_model.found(rows.where(others).thinned(fit_time_model.MOST))
        seconds[held], spread[held] = _predicted(rows.where(held), found)
    return seconds, spread


def _predicted(rows: Rows, found: dict[str, Any]) -> tuple[Any, Any]:
    seen = np.isin(rows.card, found["cards"])
    stds = found["log_std"]
    spread = np.array(
        [
            stds["seen" if known else "unseen"].get(group, stds["unseen"]["other"])
            for group, known in zip(rows.group.tolist(), seen.tolist(), strict=True)
        ]
    )
    return fit_time_model.predicted(rows, found["fit"]), spread


def plain_roofline(rows: Rows) -> Any:
    """Seconds by fixed shares of the datasheet's rates."""
    arithmetic = rows.operators.flops / (rows.figures.peak * roofline.MATMUL_SHARE)
    return np.maximum(arithmetic, rows.operators.moved_bytes / (rows.figures.bandwidth * roofline.BANDWIDTH_SHARE))


def summary(predicted: Any, measured: Any, spread: Any = None) -> dict[str, float]:
    """How far predictions are off, and the share that the 80 % interval holds."""
    error = predicted / measured - 1
    said = {
        "rows": len(error),
        "median_absolute_error": round(float(np.median(np.abs(error))), 4),
        "p90_absolute_error": round(float(np.quantile(np.abs(error), 0.9)), 4),
        "median_error": round(float(np.median(error)), 4),
    }
    if spread is not None:
        inside = np.abs(np.log(measured / predicted)) <= fit_time_model.EIGHTY * spread
        said["interval_coverage"] = round(float(inside.mean()), 4)
    return said


def kernels(rows: Rows, *, folds: int | None, versus: bool) -> tuple[dict[str, Any], Any, Any]:
    """What is said of kernels; predicted seconds and their spread beside it."""
    predicted, spread = predictions(rows, folds)
    said: dict[str, Any] = summary(predicted, rows.seconds, spread)
    for name, keys in (("by_operator", rows.op), ("by_card", rows.card), ("by_source", rows.source)):
        said[name] = {
            key: summary(predicted[keys == key], rows.seconds[keys == key], spread[keys == key])
            for key in sorted(set(keys.tolist()))
        }
    if versus:
        said["plain_roofline"] = summary(plain_roofline(rows), rows.seconds)
    return said, predicted, spread


def table(rows: Rows, predicted: Any, say: Any) -> None:
    """One line for each source, card and operator."""
    say(f"{'source':<12} {'card':<22} {'operator':<26} {'rows':>7} {'predicted':>10} {'measured':>10} "
        f"{'error':>7} {'median':>7} {'p90':>7}")  # fmt: skip
    keys = sorted(set(zip(rows.source.tolist(), rows.card.tolist(), rows.op.tolist(), strict=True)))
    for source, card, op in keys:
        at = (rows.source == source) & (rows.card == card) & (rows.op == op)
        own = summary(predicted[at], rows.seconds[at])
        say(f"{source:<12} {card:<22} {op:<26} {own['rows']:>7} {1e3 * np.median(predicted[at]):>8.3g}ms "
            f"{1e3 * np.median(rows.seconds[at]):>8.3g}ms {own['median_error']:>+7.1%} "
            f"{own['median_absolute_error']:>7.1%} {own['p90_absolute_error']:>7.1%}")  # fmt: skip


def write_each(path: Path, rows: Rows, predicted: Any, spread: Any) -> None:
    """Every row, as CSV: what was predicted, what was measured."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["source", "line", "card", "operator", "predicted_s", "measured_s", "error", "log_std"])
        for at in range(len(rows)):
            error = predicted[at] / rows.seconds[at] - 1
            writer.writerow([
                rows.source[at], int(rows.line[at]), rows.card[at], rows.op[at], f"{predicted[at]:.6g}",
                f"{rows.seconds[at]:.6g}", f"{error:.4f}", spread[at],
            ])  # fmt: skip


def main() -> int:
    """Read, predict, say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True, help="folder of the measured rows")
    parser.add_argument("--folds", type=int, help="fit anew, with the cards in so many groups, each held out once")
    parser.add_argument("--vs", action="store_true", help="the plain roofline on the same rows")
    parser.add_argument("--each", type=Path, help="write every row to this CSV file")
    parser.add_argument("--pictures", type=Path, help="draw predicted against measured into this folder")
    parser.add_argument("--only", choices=["kernels", "steps"], help="half of the bench")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    say = functools.partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
    said: dict[str, Any] = {"unexpressed": {}}
    if args.only != "steps":
        try:
            rows, unexpressed = read_kernels(args.rows)
        except InputError as error:
            say(f"kernels: {error}")
        else:
            said["kernels"], predicted, spread = kernels(rows, folds=args.folds, versus=args.vs)
            said["interval_coverage"] = said["kernels"]["interval_coverage"]
            said["unexpressed"] = dict(unexpressed)
            table(rows, predicted, say)
            if args.each:
                write_each(args.each, rows, predicted, spread)
            if args.pictures:
                time_pictures.draw(args.pictures, rows, predicted)
    if args.only != "kernels" and importlib.util.find_spec("tests.bench.time_bench_steps"):
        _steps(args, said, say)
    for reason, count in Counter(said["unexpressed"]).most_common():
        say(f"not expressed: {count} rows, {reason}")
    if args.json:
        print(json.dumps(said))
    else:
        say(json.dumps({key: value for key, value in said.items() if key != "unexpressed"}, indent=1))
    return 0


def _steps(args: argparse.Namespace, said: dict[str, Any], say: Any) -> None:
    """The half about whole steps adds its keys."""
    found = importlib.import_module("tests.bench.time_bench_steps").run(
        args.rows, folds=args.folds, vs=args.vs, say=say
    )
    said["unexpressed"].update(found.pop("unexpressed", {}))
    covered = found.pop("interval_coverage", None)
    if covered is not None:
        said["interval_coverage"] = {"kernels": said.get("interval_coverage"), "steps": covered}
    said.update(found)


if __name__ == "__main__":
    sys.exit(main())
