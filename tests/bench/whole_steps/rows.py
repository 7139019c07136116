"""Files of published measurements -> whole steps: a program, a card, a configuration and seconds, or why there is none.

Files are known by their names and columns, wherever they lie; rows of other cards and models in the same form are read
in the same way. Nothing is known of any single row.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autofit.costmodel.seconds import operator_time
from autofit.machine.gpu_catalogue import Card
from autofit.system.errors import InputError

from .cards import card_of
from .programs import BERT, CAUSAL, Program

SQUAD_LENGTH = 384
"""``max_seq_length`` of ``run_squad.sh`` in NVIDIA's DeepLearningExamples, which Lambda runs too."""
_LOW_PRECISION_NORM_FROM = 3
_METRICS_UNTIL = 1
_CARDS_A_NODE = 8
_NEWER_FROM = 3
"""The generation of llm-foundry's page that ran MPT, from April 2023 on; before it was MosaicGPT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One measured step, or a row that has none.

    Attributes:
        source: Whose table it is.
        model, card_name: In the row's words.
        setting: What configurations of one model on one card have in common (the software).
        configuration: What they differ in.
        card: In the catalogue; ``None`` where the row is not expressed.
        program: ``None`` where the row is not expressed.
        rows: The micro-batch.
        accumulation: Micro-steps to an optimizer step.
        tokens: Tokens (or pictures) of a whole step on one card.
        seconds: Measured, of a whole step.
        tf32: Whether float32 products are made in TF32 where the card can.
        fp16: Whether 16 bits are fp16.
        world: Ranks.
        nodes: Machines that they are in.
        older: Whether its program is older than April 2023.
        reduced_bytes: Of a gradient's element when it is sent; 0 where no collective is counted.
        reason: Why it is not expressed.
    """

    source: str
    model: str
    card_name: str
    setting: str = ""
    configuration: str = ""
    card: Card | None = None
    program: Program | None = None
    rows: int = 0
    accumulation: int = 1
    tokens: float = 0.0
    seconds: float = 0.0
    tf32: bool = False
    fp16: bool = False
    world: int = 1
    nodes: int = 1
    older: bool = False
    reduced_bytes: int = 0
    reason: str = ""


def read(folder: Path) -> list[Step]:
    """Every row of every known file in a folder, expressed or not."""
    return [step for name, reader in _READERS.items() for row in raw_rows(folder / name) for step in _read(reader, row)]


def _read(reader: Callable[[Iterator[dict[str, str]]], Iterator[Step]], row: dict[str, str]) -> list[Step]:
    """A row as its reader takes it; why not where a column is missing, or is no number."""
    try:
        return [_checked(step) for step in reader(iter([row]))]
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        why = f"column {error} is missing" if isinstance(error, KeyError) else str(error)
        return [Step(source=reader.__name__, model=row.get("model", ""), card_name="", reason=f"can't be read: {why}")]


def _checked(step: Step) -> Step:
    """The step, without its program where it has no time, or its card not all figures that the laws need."""
    if step.program is None or step.card is None:
        return step
    reason = ""
    if not (0 < step.seconds < math.inf and 0 < step.tokens < math.inf and step.rows > 0 and step.accumulation > 0):
        reason = "its time or its sizes are no numbers above zero"
    else:
        try:
            operator_time.figures_of(operator_time.Operators.of([]), step.card)
        except InputError as error:
            reason = error.message
    return replace(step, program=None, reason=reason) if reason else step


def keep(folder: Path, target: Path) -> None:
    """Write the rows of a folder that are expressed into another, compressed."""
    target.mkdir(parents=True, exist_ok=True)
    for name, reader in _READERS.items():
        rows = [row for row in raw_rows(folder / name) if any(step.program for step in reader(iter([row])))]
        if not rows:
            continue
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        (target / f"{name}.gz").write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def raw_rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a file, or of the same file compressed; none where there is neither."""
    packed = path.with_name(f"{path.name}.gz")
    if not path.exists() and not packed.exists():
        return
    with (
        path.open(encoding="utf-8", newline="") if path.exists() else gzip.open(packed, "rt", encoding="utf-8") as file
    ):
        for row in csv.DictReader(file):
            yield {name: (value or "").strip() for name, value in row.items() if name is not None}


# -- NeuSight -------------------------------------------------------------------------------------------------------


def neusight(raw: Iterator[dict[str, str]]) -> Iterator[Step]:
    """Forward and backward pass in fp32 without an optimizer, the loss outside of the clock."""
    for row in raw:
        if row["mode"] != "train":
            continue
        common = {"source": "neusight", "model": row["model"], "card_name": row["gpu"], "setting": "fp32"}
        card = card_of(row["gpu"])
        if re.search(r"\bAMD\b|Instinct|MI\d{3}", row["gpu"]):
            yield Step(**common, reason="an AMD card: its kernels are others")
        elif card is None:
            yield Step(**common, reason=f"no card {row['gpu']!r} in the catalogue")
        elif row["variant"]:
            yield Step(**common, reason="on several cards: collectives are part of it")
        elif (program := _neusight_program(row)) is None:
            yield Step(**common, reason=f"no shape of {row['model']!r} in the bench's table")
        else:
            rows, length = int(row["batch"]), int(row["seq_len"])
            yield Step(
                **common,
                configuration=f"rows={rows} length={length}",
                card=card,
                program=program,
                rows=rows,
                tokens=float(rows * length),
                seconds=float(row["e2e_latency"]) / 1000,
            )


def _neusight_program(row: dict[str, str]) -> Program | None:
    name, length = row["model"], int(row["seq_len"])
    if name.startswith("bert_") and name.removeprefix("bert_") in BERT:
        shape = BERT[name.removeprefix("bert_")]
        return Program(family="bert", shape=shape, seq_len=length, precision="fp32", task="pretraining")
    if name in CAUSAL:
        return Program(family="causal", shape=CAUSAL[name], seq_len=length, precision="fp32")
    return None


# -- llm-foundry ------------------------------------------------------------------------------------------------------


def llmfoundry(raw: Iterator[dict[str, str]]) -> Iterator[Step]:
    """One rank of FSDP, on nodes of eight cards."""
    for row in raw:
        ranks = int(row["gpus"])
        common = {
            "source": "llm-foundry",
            "model": row["model"],
            "card_name": row["gpu_type"],
            "setting": f"generation {row['generation']}",
            "older": int(row["generation"]) < _NEWER_FROM,
        }
        card = card_of(row["gpu_type"])
        if ranks > _CARDS_A_NODE and ranks % _CARDS_A_NODE:
            yield Step(**common, reason=f"{ranks} cards are no whole nodes of {_CARDS_A_NODE}")
        elif card is None:
            yield Step(**common, reason=f"no card {row['gpu_type']!r} in the catalogue")
        elif "bf16" not in row["precision"]:
            yield Step(**common, reason=f"precision {row['precision']!r} is not expressed")
        elif row["act_cpu_offload"].lower() == "true":
            yield Step(**common, reason="activations offloaded to the host")
        else:
            rows, times, length = int(row["micro_batch"]), int(row["grad_accum"]), int(row["seq_len_T"])
            whole = int(row["global_batch"])
            yield Step(
                **common,
                configuration=f"rows={rows} accumulation={times} length={length} "
                f"checkpointing={row['activation_ckpt'].lower()} ranks={ranks}",
                card=card,
                program=_llmfoundry_program(row, length, ranks),
                rows=rows,
                accumulation=times,
                tokens=float(whole * length) / ranks,
                seconds=whole * length / float(row["tokens_per_s"]),
                world=ranks,
                nodes=max(1, ranks // _CARDS_A_NODE),
                reduced_bytes=2 if row.get("fsdp_mixed_precision") == "PURE" else 4,
            )


def _llmfoundry_program(row: dict[str, str], length: int, ranks: int) -> Program:
    hidden, layers, vocab = int(row["d_model"]), int(row["n_layers"]), int(row["vocab"])
    ratio = int(float(row["mlp_ratio"]))
    without_bias = vocab * hidden + length * hidden + layers * ((4 + 2 * ratio) * hidden**2 + 2 * hidden) + hidden
    bias = int(float(row["params"]) > without_bias + hidden)
    shape = (("hidden", hidden), ("heads", int(row["n_heads"])), ("layers", layers), ("vocab", vocab),
             ("ratio", ratio), ("bias", bias))  # fmt: skip
    generation = int(row["generation"])
    return Program(
        family="gpt",
        shape=shape,
        seq_len=length,
        precision="half",
        optimizer="sharded_adamw",
        checkpointing=row["activation_ckpt"].lower() == "true",
        low_precision_norm=generation >= _LOW_PRECISION_NORM_FROM,
        metrics=generation <= _METRICS_UNTIL,
        world=ranks,
    )


# -- Lambda -----------------------------------------------------------------------------------------------------------

_NO_PROGRAM = {
    "ssd": "SSD is not in transformers",
    "gnmt": "GNMT is not in transformers",
    "ncf": "NCF is not in transformers",
    "tacotron2": "Tacotron 2 is not in transformers",
    "waveglow": "WaveGlow is not in transformers",
    "transformerxlbase": "Transformer-XL left transformers before version 5",
    "transformerxllarge": "Transformer-XL left transformers before version 5",
}


def lambda_labs(raw: Iterator[dict[str, str]]) -> Iterator[Step]:
    """DeepLearningExamples' PyTorch programs, run by Lambda."""
    for row in raw:
        name, task = row["gpu"], row["task"]
        common = {"source": "lambda", "model": task, "card_name": name, "setting": row["set"].split()[0], "older": True}
        if row["gpus"] != "1":
            yield Step(**common, reason="on several cards: collectives are part of it")
            continue
        card = card_of(name)
        batch = int(float(row["batch"] or 0))
        fp16 = row["precision"] == "fp16"
        program = _lambda_program(task, fp16=fp16)
        if program is None:
            yield Step(**common, reason=_NO_PROGRAM.get(task, f"no program of {task!r}"))
        elif card is None:
            yield Step(**common, reason=f"no card {name!r} in the catalogue")
        elif not batch:
            yield Step(**common, reason="no batch is said")
        elif not float(row["throughput"] or 0):
            yield Step(**common, reason="no throughput: the run failed")
        else:
            yield Step(
                **common,
                configuration=f"rows={batch} precision={row['precision']}",
                card=card,
                program=program,
                rows=batch,
                tokens=float(batch),
                seconds=batch / float(row["throughput"]),
                tf32=True,
                fp16=fp16,
            )


def _lambda_program(task: str, *, fp16: bool) -> Program | None:
    size = re.fullmatch(r"bert_(base|large)_squad", task)
    if size:
        return Program(
            family="bert",
            shape=BERT[size[1]],
            seq_len=SQUAD_LENGTH,
            precision="pure half" if fp16 else "fp32",
            optimizer="fused_adam",
            task="squad",
        )
    return None


# -- NVIDIA -----------------------------------------------------------------------------------------------------------


def nvidia(raw: Iterator[dict[str, str]]) -> Iterator[Step]:
    """DeepLearningExamples' own tables."""
    for row in raw:
        task = row["task"].rpartition("/")[2]
        words = f"{row['hardware']} {row['section']}"
        common = {"source": "nvidia", "model": task, "card_name": named_card(words), "older": True}
        if row["framework"] != "PyTorch":
            yield Step(**common, reason=f"{row['framework']}'s program and kernels")
        elif task != "BERT":
            yield Step(**common, reason=f"no program of {task} here: not in transformers, or a convolutional network")
        elif row["gpus"] != "1":
            yield Step(**common, reason="on several cards, or their number is not said")
        else:
            yield _nvidia_bert(row, common)


def _nvidia_bert(row: dict[str, str], common: dict[str, Any]) -> Step:
    card = card_of(common["card_name"])
    if card is None:
        return Step(**common, reason=f"no card in {row['hardware']!r}")
    fp16 = row["precision"] == "mixed"
    batches = [int(one) for one in re.findall(r"\d+", row["batch_per_gpu"])]
    if not batches or not float(row["throughput"] or 0):
        return Step(**common, reason="no batch or no throughput is said")
    batch = batches[-1 if fp16 else 0]
    squad = "squad" in f"{row['variant']} {row['section']} {row['hardware']}".lower() and not row["seq_len"]
    if not squad:
        return Step(**common, reason="its loader (LDDL) batches rows by length: most are shorter than what is said")
    program = Program(
        family="bert",
        shape=BERT["large"],
        seq_len=SQUAD_LENGTH,
        precision="pure half" if fp16 else "fp32",
        optimizer="fused_adam",
        task="squad",
    )
    return Step(
        **common,
        setting="squad",
        configuration=f"rows={batch} precision={row['precision']}",
        card=card,
        program=program,
        rows=batch,
        tokens=float(batch * SQUAD_LENGTH),
        seconds=batch / float(row["throughput"]),
        tf32=row["precision"] == "tf32",
        fp16=fp16,
    )


def named_card(words: str) -> str:
    """The card in words such as ``NVIDIA DGX-1 (8x V100 32GB)``, or the words."""
    named = re.search(r"(V100|A100|H100|T4)[^|>)]*?(\d\d)\s*GB?\b", words)
    if not named:
        short = re.search(r"\b(T4)\b", words)
        return short[1] if short else words.strip(" |")
    return f"{named[1]} {'SXM2' if named[1] == 'V100' else 'SXM'} {named[2]}GB"


_READERS: dict[str, Callable[[Iterator[dict[str, str]]], Iterator[Step]]] = {
    "neusight_e2e.csv": neusight,
    "llmfoundry_rows.csv": llmfoundry,
    "lambda_throughput.csv": lambda_labs,
    "nvidia_deeplearningexamples.csv": nvidia,
}
