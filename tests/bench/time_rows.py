"""Reads measured kernels as operators: files of the names and columns of ``neusight_ops.csv.gz``, wherever they lie."""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autofit.costmodel.seconds.kernel_laws import Figures
from autofit.costmodel.seconds.operator_time import Operator, Operators, bound_seconds, figures_of, groups_of
from autofit.machine.gpu_catalogue import Card
from autofit.system.errors import InputError
from tests.bench.whole_steps.cards import card_of

KERNELS = ("neusight_ops.csv.gz", "neusight_ops.csv")
_BINARY = frozenset({"add", "mul", "div", "pow"})
_UNARY = frozenset({"addu", "mulu", "divu", "powu", "relu", "gelu", "tanh"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Measured kernels; arrays of shape ``(rows,)``.

    Attributes:
        source: Which collection.
        line: Number of the line in its file.
        op: As the file says.
        group: Whose error counts together.
        card: Name in the catalogue.
        operators: What was run.
        figures: Of the card beside each.
        bound: The roofline's seconds.
        seconds: Measured.
    """

    source: Any
    line: Any
    op: Any
    group: Any
    card: Any
    operators: Operators
    figures: Figures
    bound: Any
    seconds: Any

    def __len__(self) -> int:
        return len(self.seconds)

    def where(self, places: Any) -> Rows:
        """Some of them, by place or by a mask."""
        places = np.flatnonzero(places) if np.asarray(places).dtype == np.bool_ else places
        own = {
            name: getattr(self, name)[places] for name in ("source", "line", "op", "group", "card", "bound", "seconds")
        }
        return Rows(**own, operators=self.operators.at(places), figures=self.figures.at(places))

    def thinned(self, most: int) -> Rows:
        """At most so many of each operator on each card, evenly over their order."""
        kept: list[int] = []
        keys = np.char.add(np.char.add(self.op, "|"), self.card)
        for key in dict.fromkeys(keys.tolist()):
            mine = np.flatnonzero(keys == key)
            if len(mine) > most:
                mine = mine[np.arange(most) * len(mine) // most]
            kept.extend(mine.tolist())
        return self.where(np.array(sorted(kept), dtype=np.int64))


def read_kernels(folder: Path) -> tuple[Rows, Counter[str]]:
    """Rows that can be expressed, and reasons why others can't be, counted.

    Raises:
        InputError: The folder has no such file, or the file lacks a column.
    """
    path = next((folder / name for name in KERNELS if (folder / name).exists()), None)
    if path is None:
        raise InputError(f"{folder} has neither {' nor '.join(KERNELS)}", hint="give the folder of the measured rows")
    with _opened(path) as file:
        lines = list(csv.DictReader(file))
    unexpressed: Counter[str] = Counter()
    cards: dict[str, Card | str] = {}
    by_card: dict[str, list[tuple[int, dict[str, str], Operator]]] = {}
    for number, line in enumerate(lines):
        device = line.get("device") or ""
        card = cards.setdefault(device, _card(device))
        if isinstance(card, str):
            unexpressed[card] += 1
            continue
        one = operator_of(line) if _timed(line) else "no latency above zero, or a size is missing"
        if isinstance(one, str):
            unexpressed[one] += 1
            continue
        by_card.setdefault(device, []).append((number, line, one))
    parts = [_rows(cards[device], its) for device, its in by_card.items()]  # type: ignore[arg-type]
    if not parts:
        raise InputError(f"{path} has no row that can be expressed: {dict(unexpressed)}", hint="see the reasons")
    joined = _joined(parts)
    return joined.where(np.argsort(joined.line, kind="stable")), unexpressed


def operator_of(line: dict[str, str]) -> Operator | str:
    """The operator of a line, or why it can't be expressed.

    ``bmm`` multiplies ``(B, M, N) x (B, N, K)`` and ``linear`` ``(M, N) x (N, K)``: N is what is summed over.
    """
    op = line.get("op") or ""
    try:
        if op in {"bmm", "linear"}:
            batch, m, k, n = (float(line[name] or 1) for name in ("B", "M", "N", "K"))
            _above_zero(batch, m, k, n)
            return Operator(
                kind="product", layout="nn" if op == "bmm" else "nt", flops=2 * batch * m * n * k,
                moved_bytes=4 * batch * (m * k + k * n + m * n), batch=batch, m=m, n=n, k=k,
            )  # fmt: skip
        rows, width = float(line["B"]), float(line["H"])
        _above_zero(rows, width)
    except (ValueError, KeyError, TypeError):
        return f"{op}: a size is missing, or no number above zero"
    if op in {"ln", "softmax"}:
        kind = "norm" if op == "ln" else "softmax"
        return Operator(kind=kind, moved_bytes=8 * rows * width, m=rows, n=width)
    if op in _BINARY or op in _UNARY:
        passes = 3 if op in _BINARY else 2
        return Operator(kind="elementwise", moved_bytes=4 * passes * rows * width, n=rows * width)
    return f"operator {op}: no law of it"


def _timed(line: dict[str, str]) -> bool:
    """Whether a line says how long it took."""
    try:
        return 0 < float(line.get("latency_ms") or 0) < math.inf
    except ValueError:
        return False


def _above_zero(*sizes: float) -> None:
    if not all(0 < size < math.inf for size in sizes):
        raise ValueError(f"a size of {sizes}")


def _card(device: str) -> Card | str:
    """The card of a device; of variants with the same name the first that has one."""
    card = card_of(device)
    if card is None:
        return f"{device}: not in the catalogue"
    try:
        figures_of(Operators.of([]), card)
    except InputError as error:
        return f"{device}: {error.message}"
    return card


def card_or_none(device: str) -> Card | None:
    """The card of a device, with all figures that the laws need."""
    card = _card(device)
    return None if isinstance(card, str) else card


def _rows(card: Card, its: list[tuple[int, dict[str, str], Operator]]) -> Rows:
    operators = Operators.of([one for _, _, one in its])
    op = np.array([line["op"] for _, line, _ in its])
    batched = np.where(op == "bmm", "bmm", groups_of(operators))
    return Rows(
        source=np.full(len(its), "neusight", dtype="<U12"),
        line=np.array([number for number, _, _ in its], dtype=np.int64),
        op=op,
        group=batched,
        card=np.full(len(its), card.name, dtype="<U40"),
        operators=operators,
        figures=figures_of(operators, card),
        bound=bound_seconds(operators, card),
        seconds=np.array([float(line["latency_ms"]) / 1e3 for _, line, _ in its]),
    )


def _joined(parts: list[Any]) -> Any:
    """Rows of several cards, or their operators or figures, one after the other."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    kind = type(parts[0])
    return kind(**{name: _joined([getattr(one, name) for one in parts]) for name in kind.__slots__})


def write_kernels(rows: Rows, source: Path, folder: Path) -> None:
    """Copy the lines of some rows, so that anyone can fit anew."""
    path = next(source / name for name in KERNELS if (source / name).exists())
    with _opened(path) as file:
        lines = file.read().splitlines()
    kept = [lines[0], *(lines[1 + int(number)] for number in rows.line)]
    folder.mkdir(parents=True, exist_ok=True)
    # no name and no time in it: the same rows make the same bytes
    with (folder / KERNELS[0]).open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as file:
        file.write(("\n".join(kept) + "\n").encode())


def _opened(path: Path) -> io.TextIOBase:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")  # type: ignore[return-value]
