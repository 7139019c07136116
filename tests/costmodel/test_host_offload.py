"""Engines that keep weights, gradients and state on the host: DeepSpeed's are not traced, yet something is known of
them; FSDP's is, but for what it copies.
"""

import dataclasses

import numpy as np
import pytest

from autofit import space
from autofit.commands.tunes.backend import predicted_bytes
from autofit.costmodel.forecast import forecast
from autofit.costmodel.tracing.trace_store import Traces, untraceable
from autofit.machine import gpu_catalogue
from autofit.registry import technique
from autofit.search.surrogate.observation import Observation
from autofit.search.surrogate.posterior import peak_posterior, posterior, surrogate
from autofit.space import parse_knobs
from autofit.system.units import MIB
from tests.support.tiny import write_config
from tests.support.traced import CONFIGS, facts_of

ENGINES = ("fsdp", "zero2", "zero3")
UNTRACED = ("zero2", "zero3")
VALUES = dict(zip(ENGINES, ("parameters", "optimizer", "parameters"), strict=True))
WEIGHTS = np.array([4 * 300 * 64, *([4 * 10_000] * 40)])


@pytest.fixture(scope="module")
def facts():
    found = facts_of("llama", device="cuda", global_batch=16)
    model = dataclasses.replace(found.model, layer_classes=("LlamaDecoderLayer",))
    return dataclasses.replace(found, model=model, packages={**found.packages, "deepspeed": "0.18.0"})


@pytest.fixture(scope="module")
def known(server, facts, tmp_path_factory):
    """A space with every engine in it, and what is forecast of it."""
    folder = tmp_path_factory.mktemp("host_offload")
    config = write_config(folder / "config", CONFIGS["llama"])
    knobs = parse_knobs(("kernels=none", "attention=default", "compile=off"), ("optimizer=adamw",), facts)
    plans = space.build(facts, given=knobs)
    card = gpu_catalogue.find("H100 SXM")
    return plans, forecast(plans, Traces(facts, config, lambda: server, folder), facts, card)


def twin(plans, plan):
    return plans.plans.index(plan.replaced(offload="none", parallel="none", sync_each_batch="off"))


@pytest.mark.slow
def test_what_the_engines_leave_on_the_device_is_forecast_roughly(known):
    plans, cast = known
    for place, plan in enumerate(plans.plans):
        assert cast.approximate[place] == (plan["parallel"] in UNTRACED)
        assert cast.tensor_bytes[place] > 0
        if not cast.approximate[place]:
            continue
        plain = twin(plans, plan)
        assert set(untraceable(plan)) <= {"offload", "parallel"}
        assert np.isnan(cast.seconds[place]), "a roofline does not know what is copied meanwhile"
        assert cast.work[place][:5] == pytest.approx(cast.work[plain][:5]), "the arithmetic stays"
        assert cast.work[place][6] > cast.work[plain][6], "what is copied comes on top"
    rough = cast.residual_std_bytes[cast.approximate] / cast.tensor_bytes[cast.approximate]
    assert rough.min() >= 0.1


@pytest.mark.slow
def test_a_trace_of_fsdp_is_given_what_it_copies(known):
    plans, cast = known
    mine = [place for place, plan in enumerate(plans.plans) if plan["parallel"] == "fsdp"]
    assert mine
    for place in mine:
        plain, zero = (
            twin(plans, plans.plans[place]),
            plans.plans.index(plans.plans[place].replaced(parallel="zero3", sync_each_batch="off")),
        )
        copied, sends = cast.work[place][6], plans.plans[place]["sync_each_batch"] == "on"
        assert copied > cast.work[zero][6] * (1 if sends else 0.6) > 0
        assert cast.seconds[place] > cast.seconds[plain] + copied * cast.nominal[6]
        assert cast.tensor_bytes[place] < cast.tensor_bytes[plain]


@pytest.mark.slow
def test_what_a_heap_has_held_does_not_depend_on_checkpointing_or_engine(known):
    plans, cast = known
    rows = np.array([plan["micro_batch"] for plan in plans.plans])
    for precision in plans.domains["precision"]:
        here = [
            plan["precision"] == precision and plan["offload"] != "activations" and plan["parallel"] != "fsdp"
            for plan in plans.plans
        ]  # FSDP casts whole layers, so that autocast keeps no copies of weights
        of_a_row = (cast.activation_bytes / rows)[here]
        assert of_a_row.min() > 0
        assert of_a_row == pytest.approx(of_a_row[0])


@pytest.mark.slow
def test_a_heap_is_forecast_where_every_plan_checkpoints(server, tmp_path):
    """The trace without checkpointing is made for it."""
    facts = facts_of("llama", device="cpu", global_batch=16)
    config = write_config(tmp_path / "config", CONFIGS["llama"])

    def cast(*given):
        plans = space.build(
            facts, given=parse_knobs((*given, "kernels=none", "precision=fp32"), ("optimizer=adamw",), facts)
        )
        found = forecast(plans, Traces(facts, config, lambda: server, tmp_path), facts)
        return {plan: found.activation_bytes[place] for place, plan in enumerate(plans.plans)}

    every, some = cast(), cast("checkpointing=full")
    assert 0 < len(some) < len(every)
    assert some == {plan: every[plan] for plan in some}


@pytest.mark.slow
def test_activations_are_those_of_the_plain_twin(known):
    """What a row adds is the same whoever keeps the weights."""
    plans, cast = known
    held = {"precision": "fp32", "checkpointing": "off", "accumulation": 1, "micro_batch": 16}
    alike = [plan for plan in plans.plans if all(plan[name] == value for name, value in held.items())]
    alike = [plan for plan in alike if plan["parallel"] in ENGINES or plan["offload"] == "none"]
    peaks = {plan["parallel"]: cast.tensor_bytes[plans.plans.index(plan)] for plan in alike}
    fewer = {
        plan["parallel"]: cast.tensor_bytes[plans.plans.index(plan.replaced(micro_batch=8, accumulation=2))]
        for plan in alike
    }
    grown = {engine: peaks[engine] - fewer[engine] for engine in peaks}
    for engine in ENGINES:
        assert grown[engine] == pytest.approx(grown["none"], rel=0.1)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_holds_and_copies(facts, engine):
    offload = technique("offload")
    every = float(WEIGHTS.sum())
    plain = {"precision": "fp32", "parallel": engine}
    found = offload.host_offload(VALUES[engine], plain, facts, WEIGHTS)
    halved = offload.host_offload(VALUES[engine], {**plain, "precision": "bf16"}, facts, WEIGHTS)
    assert halved.held_bytes < found.held_bytes
    assert found.step_bytes >= 7 * every
    if engine == "zero2":
        assert found.held_bytes >= every, "its weights stay on the device"
        assert found.micro_step_bytes == pytest.approx(every), "gradients go down"
    elif engine == "zero3":
        assert found.micro_step_bytes == pytest.approx(3 * every), "weights come up twice, gradients go down"
    else:
        assert found.held_bytes < every
        assert found.micro_step_bytes == pytest.approx(2 * every), "weights come up twice"
        assert found.step_bytes == pytest.approx(8 * every), "gradients go down, and the host steps"
        each = offload.host_offload(VALUES[engine], {**plain, "sync_each_batch": "on"}, facts, WEIGHTS)
        assert each.micro_step_bytes == pytest.approx(6 * every), "they go down each time, and are added up"
        assert each.micro_step_bytes + each.step_bytes == pytest.approx(10 * every), "but for the first"
    assert offload.host_offload("optimizer", {**plain, "parallel": "none"}, facts, WEIGHTS) is None


@pytest.mark.parametrize("engine", ENGINES)
def test_several_ranks_copy_a_share_each(facts, engine):
    work = dataclasses.replace(facts.workload, processes=4)
    several = dataclasses.replace(facts, workload=work)
    plan = {"precision": "fp32", "parallel": engine}
    # FSDP's weights are traced as the shares of a rank
    weights = WEIGHTS // 4 if engine == "fsdp" else WEIGHTS
    one = technique("offload").host_offload(VALUES[engine], plan, facts, WEIGHTS)
    four = technique("offload").host_offload(VALUES[engine], plan, several, weights)
    assert four.micro_step_bytes == pytest.approx(one.micro_step_bytes / 4, rel=1e-3)
    assert four.step_bytes == pytest.approx(one.step_bytes / 4, rel=1e-3)
    assert four.held_bytes == pytest.approx(one.held_bytes, rel=1e-3), "what is gathered is as large"


@pytest.mark.slow
def test_one_measurement_of_an_engine_corrects_its_others(known):
    plans, cast = known
    model = surrogate(plans, cast)
    mine = [place for place, plan in enumerate(plans.plans) if plan["parallel"] == "zero3"]
    others = [place for place, plan in enumerate(plans.plans) if plan["parallel"] == "none"]
    first = mine[0]
    peak = cast.peak_prior.offset_bytes + 1.5 * cast.tensor_bytes[first] + 400 * MIB
    seen = [
        Observation(plan=place, result="measured", seconds=0.1, peak_bytes=at, needed_bytes=at)
        for place, at in [(first, peak), *((place, cast.device_bytes[place]) for place in others[:3])]
    ]
    limit = 64 << 30
    before, after = (peak_posterior(model, some, limit) for some in (seen[1:], seen))
    risen = after.mean / before.mean
    assert risen[mine[1:]].min() > 1.1
    assert risen[others].max() < 1.1
    belief = posterior(model, seen, limit, after)
    assert np.isfinite(belief.peak).all()
    assert np.isfinite(belief.time).all()


@pytest.mark.slow
def test_a_rough_forecast_is_no_prediction(known):
    plans, cast = known
    said = predicted_bytes(plans, cast)
    assert {plan for plan in plans.plans if plan not in said} == {
        plan for plan in plans.plans if plan["parallel"] in UNTRACED
    }
