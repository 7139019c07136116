"""A row of LitGPT's tables -> the run of a script, or why it is none.

Two tables: ``tutorials/resource-tables.md`` (2023-10 and, for the adapters, 2024-01; PyTorch 2.1.0, bitsandbytes
0.41.1) and ``config_hub/finetune/README.md``, whose rows were measured when their YAML was added: 2024-04 for most
(5895df10), 2024-07-05 for Phi-3 (f247be87), from 2024-07-22 on for Gemma 2 (916a84ca, 2b195c7f), Llama 3.1 (fd71063c)
and Llama 3.2 (00af8b0d).

Below the hub's table it says "All runs are single-GPU experiments", so ``4xA10G`` is a machine, not a number of
processes: its rows repeat those of ``1xA10G`` to the last digit. Full fine-tuning is the exception: some of its YAML
say ``devices: 2`` or ``4``, which means FSDP with activation checkpointing.
"""

from __future__ import annotations

import re

from . import litgpt
from .fourbit import FourBit
from .litgpt_configs import Config, config_of
from .litgpt_model import Era, Tuning
from .rows import GIB, Row

_FULL = {
    "gemma-2b": (4, 16), "llama-2-7b": (4, 64), "llama-3-8b": (4, 64), "llama-3.1-8b": (4, 64), "phi-2": (2, 8),
    "stablelm-base-alpha-3b": (2, 8), "tiny-llama": (1, 32), "phi-3-mini": (1, 8), "llama-3.2-1b": (1, 64),
    "llama-3.2-3b": (1, 64),
}  # fmt: skip
"""``devices`` and ``global_batch_size`` of ``config_hub/finetune/*/full.yaml``."""
_CARD_BYTES = {"A10G": 24 * GIB, "A100-SXM4-40GB": 40 * GIB}
_TARGETS = ("query", "key", "value", "projection", "mlp", "head")
_FOLDERS = {"gemma2b": "gemma-2-2b", "phi-3": "phi-3-mini", "gemma2-2b": "gemma-2-2b", "gemma2-9b": "gemma-2-9b"}


def is_one(row: Row) -> bool:
    """Whether LitGPT was measured."""
    return "litgpt" in row.source.lower() or "lit-gpt" in row.source.lower()


def run_of(row: Row) -> litgpt.Run | str:
    """The run, or why there is none."""
    config = _config(row)
    if config is None or row.micro_batch is None or row.longest is None:
        return f"configuration of {row.model!r}, micro-batch or longest row is not known"
    if row.metric != "allocated" and row.measured_bytes is not None:
        return "LitGPT prints allocated memory; this row does not say that it is"
    tuning = _tuning(row)
    if isinstance(tuning, str):
        return tuning
    ranks, accumulation = _ranks(row, config, tuning)
    if ranks == 1 and (reason := _contradicted(row, config, tuning)):
        return reason
    if ranks > 1 and tuning.four_bit is not None:
        return "LitGPT does not shard quantised models"
    return litgpt.Run(
        config=config,
        tuning=tuning,
        era=_era(row, config),
        batch=row.micro_batch,
        rows=row.longest,
        ranks=ranks,
        accumulation=accumulation,
    )


def _config(row: Row) -> Config | None:
    folder = re.search(r"([\w.\-]+)/\w+\.yaml", row.source)
    if folder:
        found = config_of(_FOLDERS.get(folder[1], folder[1]))
        if found is not None:
            return found
    return config_of(row.model, row.params)


def _tuning(row: Row) -> Tuning | str:
    method = row.method.lower()
    four_bit = _four_bit(row)
    if isinstance(four_bit, str):
        return four_bit
    if "adapter" in method:
        return Tuning(method="adapter_v2" if "v2" in method else "adapter", four_bit=four_bit)
    if "lora" in method:
        if row.adapter_rank is None:
            return "LoRA's rank is not stated"
        return Tuning(method="lora", rank=row.adapter_rank, targets=_targets(row), four_bit=four_bit)
    if method == "full":
        return Tuning(method="full")
    return f"no model of the method {row.method!r}"


def _four_bit(row: Row) -> FourBit | str | None:
    """Of the versions that LitGPT allowed then, 0.41 and 0.42, both kept the input."""
    if "bf16-true" not in row.precision and "16-true" not in row.precision:
        return f"no model of the precision {row.precision!r}"
    found = re.search(r"bnb\.([\w\-]+)", row.precision)
    if found is None:
        return None
    if not re.fullmatch(r"(nf4|fp4)(-dq)?", found[1]):
        return f"no model of the quantisation {found[1]!r}"
    return FourBit(double=found[1].endswith("-dq"), keeps_input=True)


def _targets(row: Row) -> frozenset[str]:
    said = {name for name in _TARGETS if re.search(rf"lora_{name}\s*=\s*true", row.other, re.IGNORECASE)}
    if said:
        return frozenset(said)
    short = re.search(r"\(([qkv,]+)\)", row.rank)
    letters = short[1].split(",") if short else ["q", "v"]  # the script's default
    return frozenset({"q": "query", "k": "key", "v": "value"}[one] for one in letters)


def _era(row: Row, config: Config) -> Era:
    if "resource" in row.source or "PyTorch 2.1" in row.other:
        return litgpt.ERA_2023_10
    if config.name.startswith(("llama-3.1", "llama-3.2", "gemma-2-")):
        return litgpt.ERA_2024_07_22
    return litgpt.ERA_2024_07_05 if config.name.startswith("phi-3") else litgpt.ERA_2024_04


def _ranks(row: Row, config: Config, tuning: Tuning) -> tuple[int, int]:
    """How many processes share the model, and micro-steps between optimizer steps."""
    assert row.micro_batch is not None
    if "FSDP" in row.other or "FSDP" in row.checkpointing:
        return row.devices, max(1, 128 // row.micro_batch)
    if tuning.method != "full":
        return 1, 16
    devices, batch = _FULL.get(config.name, (1, 64))
    return devices, max(1, batch // devices // row.micro_batch)


def _contradicted(row: Row, config: Config, tuning: Tuning) -> str:
    """Why full fine-tuning can't have been the run of one process that its YAML describes."""
    if tuning.method != "full":
        return ""
    floor = 4 * 2 * litgpt.parameters(config)
    needs = f"weights, gradients and AdamW's two states are {floor / 1e9:.1f} GB"
    card = next((size for name, size in _CARD_BYTES.items() if name in row.gpu), None)
    if card is not None and floor > card and row.measured_bytes is not None:
        return (
            f"its YAML says one device, but {needs} and do not fit the card: sharded over an unknown number of devices"
        )
    if row.measured_bytes is not None and row.measured_bytes < floor:  # a floor, no prediction of ours
        return (
            f"its YAML says one device, but {needs} and {row.measured_bytes / 1e9:.1f} were measured: sharded over an "
            f"unknown number of devices"
        )
    return ""
