"""Seconds follow the slower of arithmetic, memory and host; sums of a trace say the same, plan by plan."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit import roofline
from autofit.catalogue import find
from autofit.errors import InputError
from autofit.roofline import KINDS, Affine, Totals, mfu, seconds, step_seconds

CARD = find("RTX 4090")
TERA, GIGA = 1e12, 1e9
OPERATORS = st.lists(
    st.tuples(st.floats(0, 1e15, allow_nan=False), st.floats(0, 1e12, allow_nan=False), st.sampled_from(KINDS)),
    max_size=30,
)
NOTHING = Totals.of([])


def layer(tokens):
    """A micro-step of one linear layer of 4096 x 4096 in bf16, and something elementwise."""
    width = 4096
    return [
        (6.0 * tokens * width * width, 2.0 * (width * width + 2 * tokens * width), "matmul bf16"),
        (8.0 * tokens * width, 12.0 * tokens * width, "other"),
    ]


def test_a_large_product_is_bound_by_arithmetic():
    took = seconds(CARD, [(100 * TERA, 1 * GIGA, "matmul bf16")])
    assert took == pytest.approx(100 * TERA / (CARD.bf16 * roofline.MATMUL_SHARE))


def test_a_copy_is_bound_by_memory():
    took = seconds(CARD, [(0.0, 10 * GIGA, "other")])
    assert took == pytest.approx(10 * GIGA / (CARD.bandwidth_bytes_per_second * roofline.BANDWIDTH_SHARE))


def test_many_small_operators_are_bound_by_the_host():
    took = seconds(CARD, [(1.0, 1.0, "other")] * 1000)
    assert took == pytest.approx(1000 * roofline.HOST_SECONDS_PER_OPERATOR)


def test_host_and_device_are_compared_over_the_whole_step():
    large, small = (100 * TERA, 1.0, "matmul bf16"), (1.0, 1.0, "other")
    assert seconds(CARD, [large] + [small] * 1000) == pytest.approx(seconds(CARD, [large]), rel=1e-6)


def test_nothing_takes_no_time():
    assert seconds(CARD, []) == 0.0
    assert step_seconds(CARD, micro_step=NOTHING, optimizer_step=NOTHING, accumulation=1) == 0.0


def test_an_unknown_kind_is_a_mistake():
    with pytest.raises(KeyError, match="matmul fp4"):
        seconds(CARD, [(1.0, 1.0, "matmul fp4")])


def test_lower_precision_is_no_slower():
    took = {kind: seconds(CARD, [(10 * TERA, 1.0, kind)]) for kind in KINDS}
    assert took["matmul fp32"] >= took["matmul tf32"] > took["matmul bf16"] == took["matmul fp16"]
    assert took["attention"] > took["matmul bf16"]


def test_what_a_card_lacks_runs_at_the_rate_of_fp32():
    turing, pascal = find("T4"), find("1080 Ti")
    products = [(TERA, 1.0, kind) for kind in ("matmul fp32", "matmul bf16", "matmul tf32")]
    assert len({seconds(turing, [one]) for one in products}) == 1
    assert seconds(turing, [(TERA, 1.0, "matmul fp16")]) < seconds(turing, products[:1])
    assert seconds(pascal, [(TERA, 1.0, "matmul fp16")]) == seconds(pascal, products[:1])


def test_a_faster_card_is_faster():
    work = layer(8192)
    order = ["T4", "RTX 3090", "RTX 4090", "A100 80GB", "H100", "B200"]
    took = [seconds(find(name), work) for name in order]
    assert took == sorted(took, reverse=True)


@given(OPERATORS)
def test_sums_are_a_lower_bound(operators):
    summed = step_seconds(CARD, micro_step=Totals.of(operators), optimizer_step=NOTHING, accumulation=1)
    assert summed <= seconds(CARD, operators) * (1 + 1e-9)


@given(OPERATORS.filter(bool))
def test_sums_of_one_operator_repeated_are_exact(operators):
    one = operators[:1] * 7
    summed = step_seconds(CARD, micro_step=Totals.of(one), optimizer_step=NOTHING, accumulation=1)
    assert summed == pytest.approx(seconds(CARD, one))


def test_a_line_through_two_traces_gives_the_third():
    line = Affine.through(Totals.of(layer(1024)), 1, Totals.of(layer(4096)), 4)
    third = line.at(16)
    wanted = Totals.of(layer(16 * 1024))
    assert third.flops == pytest.approx(wanted.flops)
    assert third.moved_bytes == pytest.approx(wanted.moved_bytes)
    assert third.operators == pytest.approx(wanted.operators)


def test_plans_are_judged_each_like_alone():
    line = Affine.through(Totals.of(layer(1024)), 1, Totals.of(layer(4096)), 4)
    step = Totals.of([(1e9, 16e9, "other")])
    batches, times = np.array([1, 2, 4, 8]), np.array([8, 4, 2, 1])
    together = step_seconds(CARD, micro_step=line.at(batches), optimizer_step=step, accumulation=times)
    alone = [
        step_seconds(CARD, micro_step=line.at(int(b)), optimizer_step=step, accumulation=int(t))
        for b, t in zip(batches, times, strict=True)
    ]
    assert together.shape == (4,)
    assert together == pytest.approx(np.array(alone))
    assert (np.diff(together) <= 1e-12).all(), "the same samples in fewer, larger pieces are no slower"


def test_a_hundred_thousand_plans_are_quick():
    line = Affine.through(Totals.of(layer(1024)), 1, Totals.of(layer(4096)), 4)
    batches = np.tile(np.arange(1, 101), 1000)
    began = time.perf_counter()
    took = step_seconds(CARD, micro_step=line.at(batches), optimizer_step=NOTHING, accumulation=batches[::-1])
    assert took.shape == (100_000,)
    assert time.perf_counter() - began < 2.0


def test_mfu_is_the_share_of_the_peak():
    assert mfu(CARD.bf16 * 0.4, 1.0, CARD, "bf16") == pytest.approx(0.4)
    with pytest.raises(InputError, match="bf16"):
        mfu(1.0, 1.0, find("T4"), "bf16")
