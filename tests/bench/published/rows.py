"""The columns of a table of measurements, read generally: what a row says of its run, never which row it is."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .world_rows import WorldRow

Metric = Literal["allocated", "reserved", "nvml", "unknown"]
GIB = 1024**3
ONE_CARD, SEVERAL_CARDS = ("measured_gb", "unit_note"), ("gpus", "memory_gib")
"""Columns that tell the two forms of a table apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row. Texts stand as they came; what is read from them has a property."""

    model: str
    params: str
    batch: str
    seqlen: str
    precision: str
    optimizer: str
    method: str
    rank: str
    checkpointing: str
    attention: str
    other: str
    gpu: str
    measured_gb: str
    unit_note: str
    source: str

    @property
    def tier(self) -> str:
        """How sure the table is of its own row: ``A`` to ``C``, ``F`` for what only fits or fails."""
        found = re.search(r"tier=(\w)", self.other)
        return found[1] if found else ""

    @property
    def measured_bytes(self) -> float | None:
        """Bytes, by the unit that the note states; ``None`` where there is no number."""
        try:
            value = float(self.measured_gb)
        except ValueError:
            return None
        note = self.unit_note.lower()
        binary = "gib" in note and "decimal" not in note
        return value * (GIB if binary else 1e9)

    @property
    def unit_is_stated(self) -> bool:
        """Whether the note tells GB from GiB."""
        note = self.unit_note.lower()
        return "gib" in note or "decimal" in note

    @property
    def metric(self) -> Metric:
        """Which counter was read."""
        note = self.unit_note.lower()
        if "nvml" in note or "device used" in note:
            return "nvml"
        if "max_memory_allocated" in note or "memory active" in note:
            return "allocated"
        return "reserved" if "reserved" in note else "unknown"

    @property
    def micro_batch(self) -> int | None:
        """Rows of a micro-batch."""
        found = re.search(r"\d+", self.batch)
        return int(found[0]) if found else None

    @property
    def longest(self) -> int | None:
        """Tokens of the longest row: the first number of two digits or more."""
        found = re.search(r"\d{2,}", self.seqlen)
        return int(found[0]) if found else None

    @property
    def fixed_length(self) -> bool:
        """Whether every row is that long, or the counter keeps the longest anyway."""
        said = self.seqlen.strip()
        return said.isdigit() or "packed" in said or (self.metric == "allocated" and self.longest is not None)

    @property
    def adapter_rank(self) -> int | None:
        """Of LoRA."""
        found = re.match(r"\s*(\d+)", self.rank)
        return int(found[1]) if found else None

    @property
    def devices(self) -> int:
        """Devices that one run is spread over, as far as the row says."""
        found = re.match(r"\s*(\d+)\s*x\s*", self.gpu)
        return int(found[1]) if found else 1


def form_of(path: Path) -> type[Row | WorldRow] | None:
    """Which form of row a table has, by its first line."""
    with path.open(encoding="utf-8", newline="") as file:
        columns = set(next(csv.reader(file), []))
    if columns.issuperset(ONE_CARD):
        return Row
    return WorldRow if columns.issuperset(SEVERAL_CARDS) else None


def read(path: Path) -> list[Row | WorldRow]:
    """The rows of a file, or of every table in a folder that has one of the two forms; read by their columns.

    Raises:
        ValueError: A file's columns are those of neither form.
    """
    if path.is_dir():
        tables = sorted(path.glob("*.csv"))
        return [row for table in tables if form_of(table) is not None for row in read(table)]
    form = form_of(path)
    if form is None:
        wanted = " or ".join(", ".join(names) for names in (ONE_CARD, SEVERAL_CARDS))
        raise ValueError(f"{path}: its columns are not those of a table of measured memory ({wanted})")
    with path.open(encoding="utf-8", newline="") as file:
        if form is WorldRow:
            return [WorldRow(told=raw) for raw in csv.DictReader(file)]
        names = Row.__dataclass_fields__
        return [Row(**{name: (raw.get(name) or "").strip() for name in names}) for raw in csv.DictReader(file)]
