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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
from autofit.costmodel.seconds import operator_time, roofline  # noqa: E402 - the checkout is found first
from autofit.costmodel.seconds.kernel_laws import Figures  # noqa: E402
from autofit.costmodel.seconds.step_time import EIGHTY  # noqa: E402
from autofit.machine.gpu_catalogue import Card  # noqa: E402
from autofit.system.errors import InputError  # noqa: E402
from tests.bench import fit_time_model, time_pictures  # noqa: E402
from tests.bench.time_liger import read_liger  # noqa: E402
from tests.bench.time_rows import Rows, card_or_none, read_kernels  # noqa: E402


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
    return _roofline(rows.operators, rows.figures)


def _roofline(operators: operator_time.Operators, figures: Figures) -> Any:
    arithmetic = operators.flops / (figures.peak * roofline.MATMUL_SHARE)
    return np.maximum(arithmetic, operators.moved_bytes / (figures.bandwidth * roofline.BANDWIDTH_SHARE))


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
        inside = np.abs(np.log(measured / predicted)) <= EIGHTY * spread
        said["interval_coverage"] = round(float(inside.mean()), 4)
    return said


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """Predictions beside measurements; arrays of shape ``(rows,)``, seconds."""

    source: Any
    line: Any
    card: Any
    op: Any
    group: Any
    predicted: Any
    measured: Any
    spread: Any
    roofline: Any

    def and_also(self, other: Compared) -> Compared:
        """Both."""
        return Compared(
            **{name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in Compared.__slots__}
        )


def compared(rows: Rows, count: int | None) -> Compared:
    """Single kernels."""
    predicted, spread = predictions(rows, count)
    return Compared(
        source=rows.source, line=rows.line, card=rows.card, op=rows.op, group=rows.group, predicted=predicted,
        measured=rows.seconds, spread=spread, roofline=plain_roofline(rows),
    )  # fmt: skip


def compared_sums(folder: Path) -> tuple[Compared | None, Counter[str]]:
    """Rows of several kernels each, with what ships: none of these rows was fitted to."""
    lines, unexpressed = read_liger(folder)
    found = []
    cards: dict[str, Card | None] = {}
    for number, line, work in lines:
        device = line.get("gpu_name") or ""
        card = cards.setdefault(device, card_or_none(device))
        if card is None:
            unexpressed[f"{device}: not in the catalogue, or a figure of it is missing"] += 1
            continue
        operators = operator_time.Operators.of(work)
        one = operator_time.seconds(operators, card)
        figures = operator_time.figures_of(operators, card)
        total = one.seconds.sum()
        spread = float((one.seconds * one.log_std).sum() / total)  # the errors of like kernels are alike
        side = "torch" if line["kernel_provider"] in {"torch", "huggingface"} else "liger"
        op = f"{line['kernel_name']} {side} {line['kernel_operation_mode']}"
        plain = _roofline(operators, figures).sum()
        found.append(("liger", number, card.name, op, "liger", total, float(line["y_value_50"]) / 1e3, spread, plain))
    if not found:
        return None, unexpressed
    columns = (np.array(column) for column in zip(*found, strict=True))
    return Compared(**dict(zip(Compared.__slots__, columns, strict=True))), unexpressed


def kernels(these: Compared, *, versus: bool) -> dict[str, Any]:
    """What is said of kernels."""
    said: dict[str, Any] = summary(these.predicted, these.measured, these.spread)
    for name, keys in (("by_operator", these.op), ("by_card", these.card), ("by_source", these.source)):
        said[name] = {
            key: summary(these.predicted[keys == key], these.measured[keys == key], these.spread[keys == key])
            for key in sorted(set(keys.tolist()))
        }
    if versus:
        said["plain_roofline"] = summary(these.roofline, these.measured)
    return said


def table(these: Compared, say: Any) -> None:
    """One line for each source, card and operator."""
    say(f"{'source':<10} {'card':<20} {'operator':<40} {'rows':>6} {'predicted':>10} {'measured':>10} "
        f"{'error':>7} {'median':>7} {'p90':>7}")  # fmt: skip
    keys = sorted(set(zip(these.source.tolist(), these.card.tolist(), these.op.tolist(), strict=True)))
    for source, card, op in keys:
        at = (these.source == source) & (these.card == card) & (these.op == op)
        own = summary(these.predicted[at], these.measured[at])
        say(f"{source:<10} {card:<20} {op:<40} {own['rows']:>6} {1e3 * np.median(these.predicted[at]):>8.3g}ms "
            f"{1e3 * np.median(these.measured[at]):>8.3g}ms {own['median_error']:>+7.1%} "
            f"{own['median_absolute_error']:>7.1%} {own['p90_absolute_error']:>7.1%}")  # fmt: skip


def write_each(path: Path, these: Compared) -> None:
    """Every row, as CSV: what was predicted, what was measured."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["source", "line", "card", "operator", "predicted_s", "measured_s", "error", "log_std"])
        for at in range(len(these.line)):
            predicted, measured = these.predicted[at], these.measured[at]
            writer.writerow([
                these.source[at], int(these.line[at]), these.card[at], these.op[at], f"{predicted:.6g}",
                f"{measured:.6g}", f"{predicted / measured - 1:.4f}", f"{these.spread[at]:.4f}",
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
    if not args.rows.is_dir():
        parser.error(f"--rows {args.rows} is no folder; give the one of the measured rows")
    say = functools.partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
    said: dict[str, Any] = {"unexpressed": {}}
    if args.only != "steps":
        try:
            rows, unexpressed = read_kernels(args.rows)
        except InputError as error:
            say(f"kernels: {error}")
        else:
            these = compared(rows, args.folds)
            sums, others = compared_sums(args.rows)
            these = these if sums is None else these.and_also(sums)
            said["kernels"] = kernels(these, versus=args.vs)
            said["interval_coverage"] = said["kernels"]["interval_coverage"]
            said["unexpressed"] = dict(unexpressed + others)
            table(these, say)
            if args.each:
                write_each(args.each, these)
            if args.pictures:
                time_pictures.draw(args.pictures, these)
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
