"""How far a plan's curve may lie from the baseline's: the formulas of the tolerance, worked out by hand."""

import math
from dataclasses import replace

import pytest

from autofit.training.guard.loss_curve import Curve
from autofit.training.guard.tolerance import APART, LEAST, C, compare, missing, ranks_apart

BASELINE = Curve(
    losses=(4.0, 3.0, 2.0),
    norms=(1.0, 1.0, 1.0),
    raw_norms=(5.0, 4.0, 3.0),
    gradients={"matrix": (3.0, 0.0), "bias": (0.0, 4.0)},  # 5 in all
    vectors=frozenset({"bias"}),
    updates={"matrix": (0.6, 0.0), "bias": (0.0, 0.8)},  # 1 in all
)
ROUNDED = replace(
    BASELINE,
    losses=(4.0, 3.01, 2.0),
    raw_norms=(5.1, 4.0, 3.0),
    gradients={"matrix": (3.03, 0.0), "bias": (0.0, 4.04)},  # 0.05 away: 1 %
    updates={"matrix": (0.6, 0.012), "bias": (0.016, 0.8)},  # 0.02 away: 2 %
)
E, E_U = 0.01, 0.02


def found(plan=BASELINE, rounded=ROUNDED, *, single=True):
    return {one.what: one for one in compare(plan, BASELINE, rounded, single=single)}


def tolerance(what, **options):
    return found(**options)[what].tolerance


def test_the_whole_gradient_may_differ_by_some_spreads():
    assert tolerance("the gradient of all parameters") == pytest.approx(C * E)
    assert tolerance("the update of all parameters") == pytest.approx(C * E_U)


@pytest.mark.parametrize(("name", "spread", "norm", "share"), [("matrix", 0.03, 3, 1 / 20), ("bias", 0.04, 4, 1 / 2)])
def test_a_gradient_may_differ_by_its_spread_its_share_and_a_part_of_the_whole(name, spread, norm, share):
    wanted = C * (spread + E * norm + share * E * 5) / 5
    assert tolerance(f"the gradient of {name}") == pytest.approx(wanted)


def test_an_update_may_differ_by_the_signs_that_rounding_flips():
    allowed = C * (0.03 + E * 3 + E * 5 / 20)
    wanted = C * (0.012 + E_U * 0.6) + math.sqrt(allowed / 3) * 0.6
    assert tolerance("the update of matrix") == pytest.approx(wanted)
    assert tolerance("the update of bias") == pytest.approx(C * (0.016 + E_U * 0.8) + 0.8 / 2)


def test_a_weight_that_does_not_move_is_outside():
    still = replace(BASELINE, updates={"matrix": (0.0, 0.0), "bias": (0.0, 0.8)})
    assert found(still)["the update of matrix"].ratio > 1


def test_the_loss_that_comes_nearest_to_its_tolerance_is_shown():
    one = found(replace(BASELINE, losses=(4.0, 3.0, 2.03)))["the loss of step 3"]
    assert one.difference == pytest.approx(0.015)
    assert one.tolerance == pytest.approx((C * 0.01 + E / 10 * 2 + E_U * 2) / 2)


def test_norms_may_differ_by_their_largest_spread():
    assert tolerance("the norm of the gradients") == pytest.approx(C * (0.02 + E))
    assert tolerance("the norm of the clipped gradients") == pytest.approx(C * E)


def test_where_nothing_is_rounded_the_order_of_a_sum_may_still_differ():
    assert tolerance("the gradient of all parameters", rounded=BASELINE) == C * LEAST


def test_with_experts_single_parameters_are_not_compared():
    assert not {what for what in found(single=False) if "matrix" in what or "bias" in what}
    assert "the gradient of all parameters" in found(single=False)


def test_a_difference_that_is_no_number_is_outside():
    broken = replace(BASELINE, gradients={"matrix": (math.nan, 0.0), "bias": (0.0, 4.0)})
    assert found(broken)["the gradient of all parameters"].ratio == math.inf


@pytest.mark.parametrize(
    ("gradients", "lacking"),
    [
        (BASELINE.gradients, []),
        ({"bias": (0.0, 4.0)}, ["matrix"]),
        ({"matrix": (3.0, 0.0), "bias": (0.0, 0.0)}, ["bias"]),
        ({}, []),  # an engine keeps them
        ({"wrapped.matrix": (3.0, 0.0)}, []),  # under other names
    ],
    ids=["alike", "absent", "zero", "unseen", "renamed"],
)
def test_parameters_without_a_gradient(gradients, lacking):
    assert missing(replace(BASELINE, gradients=gradients), BASELINE) == lacking


def test_a_gradient_that_is_nothing_but_noise_may_be_zero():
    noisy = replace(BASELINE, gradients={**BASELINE.gradients, "key": (1e-7, 0.0)})
    zero = replace(BASELINE, gradients={**BASELINE.gradients, "key": (0.0, 0.0)})
    assert missing(zero, noisy) == []


def test_losses_of_nothing_agree_and_any_other_is_outside():
    nothing = replace(BASELINE, losses=(0.0, 0.0, 0.0))
    (same,) = (one for one in compare(nothing, nothing, nothing, single=True) if "loss" in one.what)
    assert same.ratio == 0
    some = replace(nothing, losses=(0.0, 0.0, 1e-3))
    (other,) = (one for one in compare(some, nothing, nothing, single=True) if "loss" in one.what)
    assert other.ratio > 1


def test_a_loss_that_an_engine_tells_in_16_bits_may_be_rounded():
    """FSDP2 returns it in bfloat16 under mixed precision."""
    told = replace(BASELINE, losses=(4.0, 3.0, 2.007))
    assert found(told)["the loss of step 3"].ratio > 0
    wide = found(replace(told, loss_error=2.0**-7))["the loss of step 3"].tolerance
    assert wide == pytest.approx(found(told)["the loss of step 3"].tolerance + 2.0**-7)


def test_what_ranks_have_in_common_must_not_be_apart():
    assert list(ranks_apart(BASELINE)) == []
    near, far = (replace(BASELINE, updates={"matrix": (0.6, by), "bias": (0.0, 0.8)}) for by in (0.001, 0.1))
    ratios = {one.what: one.ratio for one in ranks_apart(replace(BASELINE, others=(near,)))}
    assert ratios == {"the gradient of all parameters": 0, "the update of all parameters": pytest.approx(0.001 / APART)}
    worst = max(ranks_apart(replace(BASELINE, others=(near, far))), key=lambda one: one.ratio)
    assert (worst.what, worst.difference) == ("the update of all parameters", pytest.approx(0.1))
