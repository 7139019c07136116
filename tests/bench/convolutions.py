"""Published trainings of ResNet-50 against what the laws say, none of which was fitted to: convolutions, batch norms.

    python tests/bench/convolutions.py --rows DIR [--json]

DIR holds ``lambda_throughput.csv`` and ``nvidia_deeplearningexamples.csv``; rows of one card are taken. They are not
among the whole steps of ``time_bench.py``, since some wait for their loader of pictures: an H200 and a B200 make the
same 3,080 pictures a second in 16 bits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from autofit.machine.gpu_catalogue import Card

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.whole_steps import bench
from tests.bench.whole_steps.cards import card_of
from tests.bench.whole_steps.programs import Program
from tests.bench.whole_steps.rows import Step, named_card, raw_rows

_PIXELS = 224


def main() -> None:
    """Print each row, and the errors of all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, required=True, help="folder of the measured rows")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    asked = parser.parse_args()
    steps = [*_lambda(asked.rows / "lambda_throughput.csv"), *_nvidia(asked.rows / "nvidia_deeplearningexamples.csv")]
    if not steps:
        parser.error(f"{asked.rows} has no training of ResNet-50 on one card")
    traces, broken = bench.traces_of(steps)
    if broken:
        sys.exit(str(broken))
    said = np.array([one.seconds for one in bench.predicted(steps, traces)])
    measured = np.array([one.seconds for one in steps])
    errors = said / measured - 1
    for step, seconds, error in zip(steps, said, errors, strict=True):
        print(
            f"{step.source:7} {step.card_name:24} {step.configuration:18} predicted {step.rows / seconds:6.0f} "
            f"measured {step.rows / step.seconds:6.0f} pictures/s  {error:+.0%}"
        )
    newer = np.array([step.card is not None and (step.card.capability or (0, 0)) >= (9, 0) for step in steps])
    found = {"all": _figures(errors), "before Hopper": _figures(errors[~newer])}
    for name, figures in found.items():
        print(name, figures)
    if asked.json:
        print(json.dumps(found))


def _figures(errors: np.ndarray) -> dict[str, float]:
    """Of predicted over measured seconds less one."""
    least, most = np.quantile(1 / (1 + errors), [0.05, 0.95])
    return {
        "rows": len(errors),
        "median_absolute_error": round(float(np.median(abs(errors))), 3),
        "median_error": round(float(np.median(errors)), 3),
        "took_from": round(float(least), 2),
        "took_to": round(float(most), 2),
    }


def _lambda(path: Path) -> Iterator[Step]:
    for row in raw_rows(path):
        card, rows, pace = card_of(row["gpu"]), int(float(row["batch"] or 0)), float(row["throughput"] or 0)
        if row["task"] == "resnet50" and row["gpus"] == "1" and card is not None and rows and pace:
            yield _step("lambda", card, rows, pace, fp16=row["precision"] == "fp16", tf32=True)


def _nvidia(path: Path) -> Iterator[Step]:
    """Its PyTorch program; how many rows a card takes is not said: 256, and in float32 on a V100 128."""
    for row in raw_rows(path):
        section = row["section"]
        card = card_of(named_card(f"{row['hardware']} {section}"))
        trains = row["task"].endswith("ConvNets") and "ResNet50" in section and "Training" in section
        if not trains or row["framework"] != "PyTorch" or row["gpus"] != "1" or card is None:
            continue
        fp16, tf32 = row["precision"] == "mixed", row["precision"] == "tf32"
        yield _step("nvidia", card, 256 if fp16 or tf32 else 128, float(row["throughput"]), fp16=fp16, tf32=tf32)


def _step(source: str, card: Card, rows: int, pace: float, *, fp16: bool, tf32: bool) -> Step:
    program = Program(
        family="resnet", shape=(("classes", 1000),), seq_len=_PIXELS, precision="amp" if fp16 else "fp32",
        optimizer="sgd",
    )  # fmt: skip
    return Step(
        source=source,
        model="resnet50",
        card_name=card.name,
        configuration=f"{rows} {'fp16' if fp16 else 'tf32' if tf32 else 'fp32'}",
        card=card,
        program=program,
        rows=rows,
        tokens=float(rows),
        seconds=rows / pace,
        tf32=tf32,
        fp16=fp16,
        older=True,
    )


if __name__ == "__main__":
    main()
