"""Fits the coefficients of the laws of seconds: operators to measured kernels, then what is left to measured steps.

    python tests/bench/fit_time_model.py

writes all of autofit/costmodel/seconds/time_coefficients.json from the rows in tests/data. Where either kind of rows is
missing, it writes nothing.

The fit is a robust Gauss-Newton on the logarithm of seconds (pseudo-Huber, so that a tenth off counts in full and a
factor of two hardly more), from fixed starting values that a weak prior holds where the rows say nothing. No random
numbers: the rows are thinned by their order. The same rows give the same file to the digit.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autofit.costmodel.seconds import operator_time
from autofit.costmodel.seconds.step_time import EIGHTY
from tests.bench.time_rows import KERNELS, Rows, read_kernels, write_kernels

TARGET = Path(__file__).resolve().parents[2] / "autofit" / "costmodel" / "seconds" / "time_coefficients.json"
DATA = Path(__file__).resolve().parents[1] / "data" / "operator_times"
STEPS = DATA.with_name("step_times")
MOST = 600
"""Rows of each operator on each card that are fitted to."""
_SCALE = 0.12
"""Residuals up to this count as squares, larger ones by their size."""
_PRIOR = 0.05
"""Weight of a coefficient's start, in residuals for a factor of e."""
_ROUND = 4
START: dict[str, dict[str, float]] = {
    "memory": {"hbm": 0.85, "gddr": 0.78, "clocks_per_byte_6": 0.115, "start": 2.4e-6},
    "elementwise": {},
    "norm": {"passes": 1.2, "again": 0.2, "wide": 0.1, "row": 2.0, "element": 0.9},
    "softmax": {"passes": 1.0, "again": 0.3, "wide": 0.9, "row": 0.4, "element": 0.9},
    "product": {
        "whole": 3.0, "simt_share": 1.1, "simt_reuse": 11.0, "simt_flop_per_joule": 75.0, "simt_start": 9.0,
        "kept": 1.5, "passes": 1.3, "again_6": 0.5, "again_7": 1.5, "again_8": 1.5, "row_bytes_6": 1.8e5,
        "tensor_share": 1.0, "tensor_reuse": 12.0, "tensor_flop_per_joule": 450.0, "tensor_start": 96.0,
        "unaligned": 0.3, "odd": 0.55,
    },
    "attention": {
        "forward": 0.75, "backward": 0.6, "width": 16.0, "idle": 0.3, "newer": 0.9, "newer_backward": 0.8,
        "efficient": 0.6, "efficient_newer": 0.3, "forward_full": 0.7, "backward_full": 0.5, "keys": 256.0,
    },
    "quantized": {"element": 7.5},
    "passes": {
        "reduction": 1.1, "gather": 1.5, "copy": 1.2, "optimizer": 1.1, "dequantize": 1.3, "transfer": 0.8,
        "elementwise": 1.0,
    },
    "isolated": {
        "linear": 5.5e-5, "bmm": 3.5e-5, "norm": 4.4e-5, "softmax": 3.3e-5, "elementwise": 8e-6, "pause": 1.5e-4,
    },
}  # fmt: skip
"""Starting values, as they read; ``isolated`` is what a kernel between two events takes beside the kernel itself.

``clocks_per_byte_6`` is that of a P100 PCIe whose Triad makes 551 GB/s (UoB-HPC/performance-portability@c855363673,
benchmarking/2020/babelstream/results/BabelStream-p100_gcc-6.1_cuda.out)."""
_STAGES: tuple[tuple[tuple[str, ...], tuple[tuple[str, str], ...]], ...] = (
    (("elementwise",), (("memory", ""),)),
    (("norm",), (("norm", ""),)),
    (("softmax",), (("softmax", ""),)),
    (("linear", "bmm"), (("product", ""), ("isolated", "pause"))),
)
"""Groups of rows, and the coefficients that are fitted to them; what an earlier stage found is kept."""

FIXED = frozenset({
    ("memory", "clocks_per_byte_6"), ("memory", "start"), ("isolated", "pause"), ("norm", "wide"), ("softmax", "wide"),
})  # fmt: skip
"""What these rows don't tell: one card alone is a Pascal with stacked memory, so that held out nothing would tell of it
(taken is its published STREAM); a kernel's start is not told apart from the host's part (on an H100 the smallest take
2.4 µs, see ``own_operators.py``); no row is wider than 4,096 elements (Liger's rows of PyTorch's cross entropy, 32,000
to 131,072 wide); and the pause between two calls shows only on a card at its power cap (a synchronize and a launch:
some 150 µs)."""

Fit = dict[str, dict[str, float]]


def fitted(rows: Rows, most: int = MOST) -> Fit:
    """Coefficients, as logarithms, from measured kernels."""
    fit: Fit = {part: {name: float(np.log(value)) for name, value in its.items()} for part, its in START.items()}
    for groups, wanted in _STAGES:
        mine = rows.where(np.isin(rows.group, groups)).thinned(most)
        if not len(mine):
            continue
        names = [
            (part, name)
            for part, only in wanted
            for name in fit[part]
            if (not only or name == only) and (part, name) not in FIXED
        ]
        # the host of each card is its own: it is fitted for each, so that it does not pass for the device
        keys = np.char.add(np.char.add(mine.group, "|"), mine.card)
        hosts, host_of = np.unique(keys, return_inverse=True)
        begin = [fit["isolated"][key.partition("|")[0]] for key in hosts.tolist()]
        start = np.array([*(fit[part][name] for part, name in names), *begin])
        measured = np.log(mine.seconds)

        def residuals(values, names=names, mine=mine, measured=measured, host_of=host_of):
            trial = {part: dict(its) for part, its in fit.items()}
            for (part, name), value in zip(names, values, strict=False):
                trial[part][name] = float(value)
            return np.log(predicted(mine, trial, host=np.exp(values[len(names) :])[host_of])) - measured

        values = _minimized(residuals, start)
        for (part, name), value in zip(names, values, strict=False):
            fit[part][name] = round(float(value), _ROUND)
        for group in groups:
            its = sorted(
                v for key, v in zip(hosts.tolist(), values[len(names) :], strict=True) if key.startswith(f"{group}|")
            )
            if its:  # the lower median: what a slow host adds is not the card's
                fit["isolated"][group] = round(float(its[(len(its) - 1) // 2]), _ROUND)
    return {part: {name: round(value, _ROUND) for name, value in its.items()} for part, its in fit.items()}


def found(rows: Rows) -> dict[str, Any]:
    """All that ships: coefficients, and the errors on cards that the fit has seen and on those that it has not."""
    fit = fitted(rows)
    seen = np.log(rows.seconds / predicted(rows, fit))
    unseen = np.full(len(rows), np.nan)
    for _, fit_rows, held in folds(rows, len(set(rows.card))):
        unseen[held] = np.log(rows.seconds[held] / predicted(rows.where(held), fitted(rows.where(fit_rows))))
    return {
        "about": "Made by tests/bench/fit_time_model.py; natural logarithms. See autofit/costmodel/README.md.",
        "cards": sorted(set(rows.card)),
        "rows": len(rows),
        "fit": fit,
        "log_std": {name: _spreads(rows, errors) for name, errors in (("seen", seen), ("unseen", unseen))},
    }


def found_without(folder: Path, cards: Sequence[str]) -> dict[str, Any]:
    """What kernels tell, those of some cards left out: of the folder, or where it holds none of this repository's."""
    own = any((folder / name).exists() for name in KERNELS)
    rows = _kernels(folder if own else DATA)
    return _found_without(folder if own else DATA, tuple(sorted(set(rows.card.tolist()) & set(cards))))


@functools.cache
def _kernels(folder: Path) -> Rows:
    return read_kernels(folder)[0].thinned(MOST)


@functools.cache
def _found_without(folder: Path, cards: tuple[str, ...]) -> dict[str, Any]:
    rows = _kernels(folder)
    return found(rows.where(np.flatnonzero(~np.isin(rows.card, cards))))


def folds(rows: Rows, count: int) -> Iterator[tuple[list[str], Any, Any]]:
    """Cards that are held out, rows to fit to and rows to predict; each card is held out once."""
    cards = sorted(set(rows.card))
    for fold in range(min(count, len(cards))):
        out = cards[fold::count]
        held = np.isin(rows.card, out)
        yield out, np.flatnonzero(~held), np.flatnonzero(held)


_UNMEASURED = 0.4
"""Of kinds that no row is of: as far as published figures of one kernel are apart."""


def _spreads(rows: Rows, errors: Any) -> dict[str, float]:
    """The standard deviation whose 80 % interval holds 80 % of the rows of each group."""
    each = {group: errors[rows.group == group] for group in sorted(set(rows.group.tolist()))}
    return {name: round(float(np.quantile(np.abs(one), 0.8)) / EIGHTY, 3) for name, one in each.items()} | {
        "other": _UNMEASURED
    }


def predicted(rows: Rows, fit: Fit, host: Any = None):
    """Seconds of each row between two events around it, with its host's part where that is known."""
    alone = {name: float(np.exp(value)) for name, value in fit["isolated"].items()}
    device = operator_time.device_seconds(rows.operators, rows.figures, fit, pause=alone["pause"])
    if host is None:
        host = np.array([alone[group] for group in rows.group.tolist()])
    return np.maximum(device, rows.bound) + host


def _minimized(residuals: Callable, start, steps: int = 20):
    """Where the pseudo-Huber loss of some residuals is least: Levenberg's steps, derivatives by differences."""
    x, damping = start.copy(), 1e-2

    def loss(r, x):
        return float(
            np.sum(2 * _SCALE**2 * (np.sqrt(1 + (r / _SCALE) ** 2) - 1)) + np.sum(_PRIOR**2 * (x - start) ** 2)
        )

    r = residuals(x)
    least = loss(r, x)
    for _ in range(steps):
        slope = np.stack([(residuals(x + step) - r) / 1e-4 for step in 1e-4 * np.eye(len(x))], axis=1)
        weight = 1 / np.sqrt(1 + (r / _SCALE) ** 2)
        square = (slope * weight[:, None]).T @ slope + _PRIOR**2 * np.eye(len(x))
        gradient = (slope * weight[:, None]).T @ r + _PRIOR**2 * (x - start)
        for _ in range(6):
            move = np.clip(-np.linalg.solve(square + damping * np.diag(np.diag(square)), gradient), -0.7, 0.7)
            there = residuals(x + move)
            found = loss(there, x + move)
            if found < least:
                break
            damping *= 5
        else:
            break
        gain, x, r, least = least - found, x + move, there, found
        damping = max(damping / 5, 1e-6)
        if gain < 1e-5 * least:
            break
    return x


def main() -> None:
    """Fit, and write the coefficients."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, default=DATA, help="folder of neusight_ops.csv.gz")
    parser.add_argument("--steps", type=Path, default=STEPS, help="folder of the files of whole steps")
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--keep", type=Path, help="write the rows that it was fitted to into this folder")
    args = parser.parse_args()
    rows, _ = read_kernels(args.rows)
    rows = rows.thinned(MOST)
    kernels = found(rows)
    whole = importlib.import_module("tests.bench.whole_steps.bench").fitted(kernels, args.steps)
    args.target.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    if args.keep:
        write_kernels(rows, args.rows, args.keep)


if __name__ == "__main__":
    main()
