"""A row -> a prediction with what it may be held against, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from . import bert, litgpt, litgpt_rows, world_rows
from .rows import Row
from .world_rows import WorldRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is said of a row.

    Attributes:
        kind: ``scored``: held against the measurement on both sides. ``bound``: must not lie above it. ``fits``: held
            against a label of what fits or fails. ``none``: no prediction.
        predicted_bytes: In the row's own metric.
        reason: Why it is not scored.
        group: What the report puts together.
    """

    kind: Literal["scored", "bound", "fits", "none"]
    predicted_bytes: float | None = None
    reason: str = ""
    group: str = ""


def predict(row: Row | WorldRow) -> Prediction:
    """The first reader that knows the row answers for it."""
    if isinstance(row, WorldRow):
        return _world(row)
    for knows, answer in _READERS:
        if knows(row):
            return answer(row)
    return Prediction(kind="none", reason=_why_not(row), group=_source(row))


def _world(row: WorldRow) -> Prediction:
    group = "nanotron's sweeps" if row.is_nanotron else row.get("source").replace("github ", "").partition("@")[0]
    run = world_rows.run_of(row)
    if isinstance(run, str):
        return Prediction(kind="none", reason=run, group=group)
    return Prediction(kind="scored", predicted_bytes=world_rows.predict(run), group=group)


def _litgpt(row: Row) -> Prediction:
    group = "LitGPT resource tables" if "resource" in row.source else "LitGPT config hub"
    run = litgpt_rows.run_of(row)
    if isinstance(run, str):
        return Prediction(kind="none", reason=run, group=group)
    peak = litgpt.predict(run)
    if row.measured_bytes is None:
        return Prediction(
            kind="fits", predicted_bytes=peak.allocated_bytes, reason="a label of what fits, no figure", group=group
        )
    return Prediction(kind="scored", predicted_bytes=peak.allocated_bytes, group=group)


def _bert(row: Row) -> Prediction:
    group = "HF page, bert-large"
    run = bert.run_of(row)
    if isinstance(run, str):
        return Prediction(kind="none", reason=run, group=group)
    return Prediction(kind="scored", predicted_bytes=bert.predict(run), group=group)


def _source(row: Row) -> str:
    words = row.source.replace("github ", "").split("@")[0].split()
    return words[0].rstrip(",") if words else "unknown"


_REASONS: tuple[tuple[Callable[[Row], bool], str], ...] = (
    (lambda row: row.measured_bytes is None or row.tier == "F", "a label of what fits, no figure"),
    (lambda row: row.tier == "C", "tier C: what was run is not stated well enough"),
    (
        lambda row: "fsdp_qlora" in row.source,
        "reserved memory of FSDP 1, whose streams delay frees: what is cached depends on when the device gets there",
    ),
    (
        lambda row: "image-gen" in row.source or "flux" in row.model.lower(),
        "a diffusion transformer: no model of diffusers' training script",
    ),
    (
        lambda row: "peft" in row.source and row.metric == "reserved",
        "reserved over a run of variable lengths whose longest padded batch is not recorded: no figure to meet",
    ),
    (
        lambda row: "unsloth" in row.source,
        "lengths vary with the data set, and which counter was read is not stated",
    ),
    (lambda row: "torchtune" in row.source, "torchtune's models and recipes, in part compiled: no model of them"),
    (
        lambda row: "torchao" in row.source or "pytorch/ao" in row.source,
        "recipes of torchtitan or torchtune with torchao's optimizers or float8: no model of them",
    ),
    (lambda row: row.metric == "unknown", "which counter was read is not stated"),
    (
        lambda row: row.metric == "reserved" and not row.fixed_length,
        "reserved at variable lengths: depends on their order, which is not recorded",
    ),
)


def _why_not(row: Row) -> str:
    """In general words, the first that holds."""
    return next((why for holds, why in _REASONS if holds(row)), f"no model of this program ({row.method})")


_READERS: tuple[tuple[Callable[[Row], bool], Callable[[Row], Prediction]], ...] = (
    (litgpt_rows.is_one, _litgpt),
    (bert.is_one, _bert),
)
