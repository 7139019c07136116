"""Model FLOPs utilisation: what is counted, over which peak; and the steps that no card can be so fast at."""

import dataclasses

import pytest

from autofit.contract.outcome import Crashed, Measured, Trial
from autofit.costmodel.seconds.operator_time import TIMED_KINDS
from autofit.costmodel.seconds.utilisation import Utilisation
from autofit.machine import gpu_catalogue
from autofit.search import decision, loop
from autofit.search.loop import Campaign
from autofit.space import Space
from tests.support.synthetic import Landscape, measured
from tests.support.traced import CONFIGS, GIB, PLAIN, Lab

H100 = gpu_catalogue.find("H100 SXM")
T4 = gpu_catalogue.find("T4")
CONFIG, SEQ_LEN, ROWS = CONFIGS["llama"], 256, 8
BF16 = PLAIN.replaced(micro_batch=ROWS, accumulation=4, precision="bf16")
FP32 = BF16.replaced(precision="fp32")
FULL = BF16.replaced(checkpointing="full")
NO_PLANS = Space(plans=(), domains={}, priors={})


class MadeTraces:
    """Traces in this process, each when it is asked for."""

    def __init__(self, lab):
        self.lab = lab

    def prepare(self, plans):
        assert not list(plans)

    def parts(self, plan):
        return None if plan["offload"] != "none" else (self.lab.micro(plan), self.lab.optimizer(plan))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("utilisation"), CONFIG, device="cuda", seq_len=SEQ_LEN, global_batch=4 * ROWS)


def rated(lab, plan, seconds, card=H100):
    utilisation = Utilisation(NO_PLANS, MadeTraces(lab), lab.facts, card)
    return utilisation.rated(plan, measured([seconds] * 4, GIB, lab.facts))


def model_flops(rows):
    """By hand: twice the matrices' weights forward and twice that backward, and attention over the whole square."""
    hidden, wide, layers = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["num_hidden_layers"]
    shared = CONFIG["num_key_value_heads"] / CONFIG["num_attention_heads"]
    matrices = layers * (hidden * hidden * (2 + 2 * shared) + 3 * hidden * wide) + hidden * CONFIG["vocab_size"]
    return rows * SEQ_LEN * (6 * matrices + 2 * 6 * layers * hidden * SEQ_LEN)


@pytest.mark.parametrize("checkpointing", ["off", "full"])
def test_the_model_s_flops_over_the_step_and_the_dense_peak(lab, checkpointing):
    """What is computed twice does not count."""
    seconds = 1e-3
    found = rated(lab, BF16.replaced(checkpointing=checkpointing), seconds)
    assert found.mfu == pytest.approx(model_flops(4 * ROWS) / (H100.bf16 * seconds), rel=1e-3)


@pytest.mark.parametrize(("precision", "peak"), [("fp32", H100.fp32), ("tf32", H100.tf32), ("fp16", H100.fp16)])
def test_the_peak_is_that_of_the_plan_s_arithmetic(lab, precision, peak):
    """In fp32 no fused kernel takes this model's shared key heads, so that no scores are made again."""
    found = rated(lab, BF16.replaced(precision=precision), 1e-2)
    assert found.mfu == pytest.approx(model_flops(4 * ROWS) / (peak * 1e-2), rel=1e-3)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A model each of whose heads has keys of its own, which fused attention takes in fp32, too."""
    config = {**CONFIG, "num_key_value_heads": CONFIG["num_attention_heads"]}
    return Lab(tmp_path_factory.mktemp("alone"), config, device="cuda", seq_len=SEQ_LEN, global_batch=4 * ROWS)


@pytest.mark.parametrize(("precision", "peak"), [("fp32", H100.fp32), ("bf16", H100.bf16)])
def test_what_fused_attention_makes_again_counts_in_no_precision(alone, precision, peak):
    hidden, shared = CONFIG["hidden_size"], CONFIG["num_key_value_heads"] / CONFIG["num_attention_heads"]
    more = 6 * 4 * ROWS * SEQ_LEN * CONFIG["num_hidden_layers"] * hidden * hidden * (2 - 2 * shared)
    found = rated(alone, BF16.replaced(precision=precision), 1e-1)
    assert found.mfu == pytest.approx((model_flops(4 * ROWS) + more) / (peak * 1e-1), rel=1e-3)


def test_causal_attention_in_fp32_may_be_faster_than_its_square_at_the_peak(alone):
    """It computes half of the square, on tensor cores."""
    every = alone.micro(FP32).operators(ROWS)
    assert TIMED_KINDS.index("attention") in every.kind
    products = 4 * (every.calls * every.flops)[every.kind == TIMED_KINDS.index("product")].sum() / H100.fp32
    assert isinstance(rated(alone, FP32, 1.05 * products), Measured)
    assert isinstance(rated(alone, FP32, 0.85 * products), Crashed)


def test_less_that_is_trained_needs_less(lab):
    whole, adapted = (rated(lab, BF16.replaced(adapter=adapter), 1e-3) for adapter in ("none", "lora:r=4"))
    assert 0.5 < adapted.mfu / whole.mfu < 1


def test_nothing_is_said_of_what_is_not_known(lab):
    outcome = measured([1e-9] * 4, GIB, lab.facts)
    assert rated(lab, BF16, 1e-9, card=None) == outcome, "a CPU, or a card that is not in the catalogue"
    assert rated(lab, BF16.replaced(offload="parameters"), 1e-9) == outcome, "what can't be traced"
    assert rated(lab, BF16, 1.0, card=T4).mfu is None, "no bfloat16 there"


def test_steps_that_the_card_can_not_be_so_fast_at_are_refused(lab):
    """Recomputed layers take their time too: what is possible without them is not with them.

    A causal kernel leaves half of its square out, and a card may run above its clock.
    """
    least = model_flops(4 * ROWS) / H100.bf16
    assert isinstance(rated(lab, BF16, 0.85 * least), Measured)
    assert isinstance(rated(lab, BF16, 0.6 * least), Crashed)
    found = rated(lab, FULL, 0.85 * least)
    assert isinstance(found, Crashed)
    assert "the peak rates of H100 SXM 80 GB allow no less than" in found.reason
    assert isinstance(rated(lab, FULL, 1.2 * least), Measured)


class FalseClock:
    """Plays a landscape, in which one plan is timed a thousand times too fast."""

    def __init__(self, land, wrong, utilisation):
        self.land, self.wrong, self.utilisation = land, wrong, utilisation

    def run(self, number, plan, effort, *, purpose, limit_seconds):
        outcome = self.land.outcome(plan, number)
        if plan == self.wrong:
            short = outcome.step_seconds * 1e-6
            outcome = measured([short] * 6, outcome.peak_bytes, self.land.facts)
        outcome = self.utilisation.rated(plan, outcome)
        return Trial(number=number, plan=plan, outcome=outcome, wall_seconds=1.0, purpose=purpose)


def test_what_is_too_fast_never_wins(lab):
    plans = (BF16, FULL, BF16.replaced(precision="fp32"))
    land = Landscape(facts=lab.facts, row_bytes=0.05 * GIB)
    runner = FalseClock(land, FULL, Utilisation(NO_PLANS, MadeTraces(lab), lab.facts, H100))
    space = dataclasses.replace(NO_PLANS, plans=plans)
    campaign = Campaign(facts=lab.facts, space=space, runner=runner)
    for plan in plans:
        campaign.run(plan, loop.FINAL, "search")
    found = campaign.playoff()
    assert found.plan == BF16
    assert found.measured.mfu is not None
    refused = [trial.outcome for trial in campaign.trials if trial.plan == FULL]
    assert {one.kind for one in refused} == {"crashed"}
    assert decision.decide([trial for trial in campaign.trials if trial.plan == FULL], 64 * GIB) is None
