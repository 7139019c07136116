"""A forecast counts with the host that a tune has timed, and with what a compiler fuses."""

import dataclasses

import numpy as np
import pytest

from autofit import space
from autofit.costmodel.forecast import forecast
from autofit.costmodel.seconds.roofline import WORK
from autofit.costmodel.tracing.trace_store import Traces
from autofit.machine import gpu_catalogue
from autofit.space import parse_knobs
from tests.support.tiny import write_config
from tests.support.traced import CONFIGS, facts_of

HELD = (
    "kernels=none", "attention=default", "checkpointing=off", "offload=none", "optimizer=adamw", "precision=bf16",
)  # fmt: skip


def test_a_forecast_waits_for_the_host_that_was_timed(server, tmp_path):
    found = facts_of("llama", device="cuda", global_batch=4)
    model = dataclasses.replace(found.model, layer_classes=("LlamaDecoderLayer",))
    facts = dataclasses.replace(found, model=model, packages={**found.packages, "triton": "3.6.0"})
    config = write_config(tmp_path / "config", CONFIGS["llama"])
    plans = space.build(facts, given=parse_knobs(HELD, ("compile=off,regions",), facts))
    traces = Traces(facts, config, lambda: server, tmp_path)
    card = gpu_catalogue.find("H100 SXM")
    usual, slow = (
        forecast(plans, traces, dataclasses.replace(facts, rates=rates), card) for rates in ({}, {"operators": 1e3})
    )
    eager = np.array([plan["compile"] == "off" for plan in plans.plans])
    assert eager.any()
    assert not eager.all()
    issued = slow.work[:, WORK.index("operators")] / 1e3
    assert slow.seconds[eager] == pytest.approx(issued[eager], rel=0.15)
    assert (slow.seconds > 50 * usual.seconds).all(), "8 µs an operator, where nothing was timed"
    for place in np.flatnonzero(eager):
        compiled = plans.plans.index(plans.plans[place].replaced(compile="regions"))
        assert 0.33 * slow.seconds[place] < slow.seconds[compiled] < 0.9 * slow.seconds[place]
