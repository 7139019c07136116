"""Seconds follow the slower of arithmetic, memory and host; sums of a trace say the same, plan by plan."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.costmodel.seconds import roofline
from autofit.costmodel.seconds.roofline import (
    HOST_SECONDS_PER_OPERATOR,
    KINDS,
    WORK,
    Totals,
    amounts,
    nominal_seconds,
    step_seconds,
)
from autofit.machine.gpu_catalogue import find

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


def seconds(card, operators):
    """Of one run of the operators, each judged by itself."""
    device = sum(float(roofline._device_seconds(card, Totals.of([one]))) for one in operators)
    return max(device, len(operators) * HOST_SECONDS_PER_OPERATOR)


def layers_of(operators, plans):
    """The same totals for each of some plans."""
    one = Totals.of(operators)
    return Totals(
        flops=np.tile(one.flops, (plans, 1)),
        moved_bytes=np.tile(one.moved_bytes, (plans, 1)),
        operators=np.tile(one.operators, plans),
    )


def layers(batches):
    """Totals of a layer, a row for each micro-batch."""
    every = [Totals.of(layer(1024 * int(batch))) for batch in batches]
    return Totals(
        flops=np.array([one.flops for one in every]),
        moved_bytes=np.array([one.moved_bytes for one in every]),
        operators=np.array([one.operators for one in every]),
    )


@given(OPERATORS)
def test_sums_are_a_lower_bound(operators):
    summed = step_seconds(CARD, micro_step=Totals.of(operators), optimizer_step=NOTHING, accumulation=1)
    assert summed <= seconds(CARD, operators) * (1 + 1e-9)


@given(OPERATORS.filter(bool))
def test_sums_of_one_operator_repeated_are_exact(operators):
    one = operators[:1] * 7
    summed = step_seconds(CARD, micro_step=Totals.of(one), optimizer_step=NOTHING, accumulation=1)
    assert summed == pytest.approx(seconds(CARD, one))


def test_plans_are_judged_each_like_alone():
    step = Totals.of([(1e9, 16e9, "other")])
    batches, times = np.array([1, 2, 4, 8]), np.array([8, 4, 2, 1])
    together = step_seconds(CARD, micro_step=layers(batches), optimizer_step=step, accumulation=times)
    alone = [
        step_seconds(CARD, micro_step=Totals.of(layer(1024 * int(b))), optimizer_step=step, accumulation=int(t))
        for b, t in zip(batches, times, strict=True)
    ]
    assert together.shape == (4,)
    assert together == pytest.approx(np.array(alone))
    assert (np.diff(together) <= 1e-12).all(), "the same samples in fewer, larger pieces are no slower"


def test_what_a_step_is_made_of():
    operators = [(4e9, 1e6, "matmul bf16"), (2e9, 2e6, "attention"), (0.0, 3e6, "other"), (0.0, 5e6, "transfer")]
    step = Totals.of([(0.0, 7e6, "other"), (1e9, 1e6, "matmul fp32")])
    found = amounts(micro_step=layers_of(operators, 2), optimizer_step=step, accumulation=np.array([3, 1]))
    assert found.shape == (2, len(WORK))
    by_name = dict(zip(WORK, found[0], strict=True))
    assert by_name["matmul bf16"] == 12e9
    assert by_name["matmul fp32"] == 1e9
    assert by_name["attention"] == 6e9
    assert by_name["memory"] == 3 * 6e6 + 8e6
    assert by_name["transfer"] == 15e6
    assert by_name["operators"] == 3 * 4 + 2
    assert found[1][WORK.index("matmul bf16")] == 4e9


@pytest.mark.parametrize("card", [CARD, None])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_every_part_of_a_step_takes_some_time(card, on_cpu):
    nominal = nominal_seconds(card, on_cpu=on_cpu, threads=4)
    assert nominal.shape == (len(WORK),)
    assert (nominal > 0).all()
    assert nominal[WORK.index("operators")] == HOST_SECONDS_PER_OPERATOR


def test_the_parts_of_a_step_are_about_the_step():
    operators = layer(8192)
    micro, nothing = layers_of(operators, 1), NOTHING
    parts = amounts(micro_step=micro, optimizer_step=nothing, accumulation=np.array([4]))
    summed = float((parts * nominal_seconds(CARD, on_cpu=False)).sum())
    rooted = float(step_seconds(CARD, micro_step=micro, optimizer_step=nothing, accumulation=4)[0])
    assert rooted <= summed < 3 * rooted
