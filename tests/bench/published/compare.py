"""The shape of a row's model for the closed formulas."""

from __future__ import annotations

from collections.abc import Mapping

from . import baselines, bert, litgpt, litgpt_rows
from .rows import Row


def estimates_of(row: Row) -> Mapping[str, float]:
    """What the closed formulas say of a row; empty where it is no run of ours."""
    if litgpt_rows.is_one(row):
        run = litgpt_rows.run_of(row)
        return {} if isinstance(run, str) else baselines.estimates(_litgpt(run))
    if bert.is_one(row):
        one = bert.run_of(row)
        return {} if isinstance(one, str) else baselines.estimates(_bert(one))
    return {}


def _bert(run: bert.Run) -> baselines.Shape:
    return baselines.Shape(
        parameters=bert.PARAMETERS,
        trained=bert.PARAMETERS,
        layers=24,
        hidden=1024,
        heads=16,
        batch=run.batch,
        rows=run.rows,
        precision="float32",
        mixed=run.mixed,
        checkpointing=run.checkpointing,
    )


def _litgpt(run: litgpt.Run) -> baselines.Shape:
    config = run.config
    return baselines.Shape(
        parameters=litgpt.parameters(config),
        trained=litgpt.trained(config, run.tuning),
        layers=config.n_layer,
        hidden=config.n_embd,
        heads=config.n_head,
        batch=run.batch,
        rows=run.rows,
        precision="int4" if run.tuning.four_bit is not None else "float16",
        mixed=False,
        checkpointing=False,
    )
