"""The columns of a table of measurements, read generally: what a row says of its run, never which row it is."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Metric = Literal["allocated", "reserved", "nvml", "unknown"]
GIB = 1024**3


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


def read(path: Path) -> list[Row]:
    """The rows of a file."""
    with path.open(encoding="utf-8", newline="") as file:
        names = Row.__dataclass_fields__
        return [Row(**{name: (raw.get(name) or "").strip() for name in names}) for raw in csv.DictReader(file)]
