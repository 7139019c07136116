"""A row of a table of runs on several cards -> the program that its columns describe, or why there is none.

A table of this form has the columns ``gpus`` and ``memory_gib``; which of the others it has differs. The program that
was run is told by the source alone. nanotron's sweeps give every size of the model and of the world, and leave one
thing out: in which mode tensors were parallel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from . import fsdp_qlora, litgpt_pretrain, nanotron

GIB = 1024**3
_SHAPE = ("layers", "hidden", "heads", "kv_heads", "intermediate", "vocab", "seq_len", "micro_batch", "grad_accum")
_WORLD = ("dp", "tp", "pp", "zero_stage")
_MODELS: Mapping[str, Mapping[str, str]] = {
    "llama-1.34B": {
        "layers": "16", "hidden": "2048", "heads": "32", "kv_heads": "32", "intermediate": "8192", "vocab": "131072",
        "tied": "True",
    },
    "llama-3.57B": {
        "layers": "28", "hidden": "3072", "heads": "32", "kv_heads": "32", "intermediate": "8192", "vocab": "131072",
        "tied": "True",
    },
}  # fmt: skip
"""Shapes that ``scripts/scaling_benchmarks.py`` of nanotron gives to the models of its sweeps (``model_configs``)."""


@dataclass(frozen=True, kw_only=True)  # no slots: cached properties
class WorldRow:
    """One row; ``told`` holds its columns as they came."""

    told: Mapping[str, str]

    def get(self, name: str) -> str:
        """A column, without spaces around; empty where the table has none."""
        return (self.told.get(name) or "").strip()

    @cached_property
    def sizes(self) -> Mapping[str, str]:
        """The model's sizes, of the columns or of the model's name, and those of the world."""
        named = _MODELS.get(self.get("model"), {}) if not self.get("layers") else {}
        found = {**self.told, **named}
        if "DDP" in self.get("parallelism").upper() and not self.get("dp"):
            found |= {"dp": self.get("gpus"), "tp": "1", "pp": "1", "zero_stage": "0"}
            found["grad_accum"] = self.get("grad_accum") or "2"  # two stand for any number above one
        return found

    @property
    def model(self) -> str:
        """Its name."""
        return self.get("model")

    @property
    def gpu(self) -> str:
        """Card and count."""
        return f"{self.get('gpus')}x {self.get('gpu')}"

    @property
    def batch(self) -> str:
        """Rows of a micro-batch, and micro-batches."""
        return f"{self.get('micro_batch')}x{self.get('grad_accum')}"

    @property
    def longest(self) -> str:
        """Tokens of a row."""
        return self.get("seq_len")

    seqlen = longest

    @property
    def precision(self) -> str:
        """As the table says."""
        return self.get("precision")

    @property
    def optimizer(self) -> str:
        """As the table says."""
        return self.get("optimizer")

    @property
    def method(self) -> str:
        """How the world shares the work."""
        sizes = " ".join(f"{name}{self.get(name)}" for name in _WORLD if self.get(name))
        return self.get("parallelism") or sizes

    rank = ""
    tier = ""

    @property
    def metric(self) -> str:
        """Which counter was read; nanotron's column is ``max_memory_reserved``, see :mod:`published.nanotron`."""
        said = self.get("memory_metric").lower()
        if "reserved" in said or (not said and self.is_nanotron):
            return "reserved"
        return "allocated" if "allocated" in said or "active" in said else "unknown"

    @property
    def measured_gb(self) -> str:
        """The figure as it came."""
        return self.get("memory_gib") or self.get("outcome") or self.get("status")

    @property
    def measured_bytes(self) -> float | None:
        """Bytes; ``None`` where there is no figure."""
        try:
            value = float(self.get("memory_gib"))
        except ValueError:
            return None
        decimal = re.match(r"GB\b", self.get("memory_metric"))
        return value * (1e9 if decimal else GIB)

    @property
    def is_nanotron(self) -> bool:
        """Whether nanotron ran it."""
        return "nanotron" in self.get("source").lower()


Program = nanotron.Run | fsdp_qlora.Run | litgpt_pretrain.Run


def run_of(row: WorldRow) -> Program | str:
    """What was run, or why that is not known."""
    if row.get("status") == "failed" or row.get("outcome"):
        return "it failed: for lack of memory, or for another reason that is not told"
    if row.measured_bytes is None:
        return "speed alone: no memory in the row"
    reader = next((reader for name, reader in _READERS.items() if name in row.get("source").lower()), _why_not)
    return reader(row)


def predict(run: Program) -> int:
    """What its counter would say."""
    if isinstance(run, litgpt_pretrain.Run):
        return litgpt_pretrain.allocated_bytes(run)
    return nanotron.reserved_bytes(run) if isinstance(run, nanotron.Run) else fsdp_qlora.reserved_bytes(run)


def _nanotron(row: WorldRow) -> nanotron.Run | str:
    sizes = row.sizes
    missing = [name for name in (*_SHAPE, *_WORLD) if not str(sizes.get(name, "")).strip().isdigit()]
    if missing:
        return f"not stated: {', '.join(missing)}"
    number = {name: int(sizes[name]) for name in (*_SHAPE, *_WORLD)}
    if number["pp"] > 1:
        return "pipeline parallel: the memory is of one stage, and which one is not stated"
    if number["tp"] > 1:
        return (
            "tensor parallel: the sweep ran two modes (all-reduce, and reduce-scatter with split rows), whose memory "
            "differs by up to a half, and which one a row is of is not recorded"
        )
    return nanotron.Run(
        layers=number["layers"], hidden=number["hidden"], heads=number["heads"], kv_heads=number["kv_heads"],
        intermediate=number["intermediate"], vocab=number["vocab"], tied=str(sizes.get("tied", "")) == "True",
        rows=number["seq_len"], batch=number["micro_batch"], accumulation=number["grad_accum"], dp=number["dp"],
        tp=number["tp"], zero=number["zero_stage"],
    )  # fmt: skip


def _fsdp_qlora(row: WorldRow) -> fsdp_qlora.Run | str:
    name = re.sub(r"[^a-z0-9]", "", row.get("model").lower().partition("(")[0])
    kind = re.match(r"Q?LoRA\b", row.get("note"))
    sharing = {"FSDP full shard": True, "DDP": False}.get(row.get("parallelism"))
    number = {name: row.get(name).replace(",", "") for name in ("gpus", "micro_batch", "seq_len")}
    missing = [name for name, said in number.items() if not said.isdigit()]
    if missing:
        return f"not stated: {', '.join(missing)}"
    if name not in fsdp_qlora.SHAPES or kind is None or sharing is None or row.metric != "reserved":
        return "its model, method or sharding is none of the page's, or its memory is not what is reserved"
    by_text = "length by the page text" in row.get("note")
    return fsdp_qlora.Run(
        shape=fsdp_qlora.SHAPES[name], batch=int(number["micro_batch"]), ranks=int(number["gpus"]),
        rows=fsdp_qlora.ROWS_BY_TEXT if by_text else int(number["seq_len"]),
        four_bit=kind[0] == "QLoRA", shard=sharing, offload=row.get("offload") == "True", card=row.get("gpu"),
    )  # fmt: skip


def _thunder(row: WorldRow) -> litgpt_pretrain.Run | str:
    if row.get("compile") != "Eager":
        return "compiled by Thunder: no model of what it fuses"
    if row.metric != "allocated" or not row.get("gpus").isdigit():
        return "not stated: gpus, or which counter was read"
    if row.get("parallelism") not in {"-", "Replicated"}:
        return "FSDP without checkpointing: no model of it"
    return litgpt_pretrain.default_run(int(row.get("gpus")))


_READERS: Mapping[str, Callable[[WorldRow], Program | str]] = {
    "nanotron": _nanotron, "fsdp_qlora": _fsdp_qlora, "thunder": _thunder,
}  # fmt: skip
_REASONS = (
    ("InternEvo", "whole GB, and which counter was read is not stated"),
    ("torchtune", "the recipe (packed length, optimizer, offload) is on other pages"),
    ("pytorch/ao", "torchtitan's reserved memory, compiled or in float8: no model of it"),
    ("ColossalAI", "Gemini and its chunk manager: no model of it; the batch is in the note"),
    ("DeepSpeed", "DeepSpeed's own partitions and buckets: no model of the version that ran"),
    ("ms-swift", "Megatron-LM or DeepSpeed through ms-swift, with options that are not in the table"),
)


def _why_not(row: WorldRow) -> str:
    source = row.get("source").lower()
    found = next((why for name, why in _REASONS if name.lower() in source), None)
    return found or f"no model of this program ({row.get('parallelism') or 'not stated'})"
