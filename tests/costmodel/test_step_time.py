"""Whole steps from the operators of their parts: the slower of device and host, and which card has laws."""

from types import SimpleNamespace

import numpy as np
import pytest

from autofit.costmodel.seconds import step_time
from autofit.costmodel.seconds.operator_time import Operator, Operators
from autofit.costmodel.seconds.step_time import StepClock, device_seconds, host_seconds
from autofit.machine.gpu_catalogue import find


class Part:
    """A part of one product a row; of no size, of what keeps the host alone."""

    def __init__(self, size):
        self.size = size
        self.asked = []

    def operators(self, rows=1):
        self.asked.append(rows)
        if not self.size:
            return Operators.of([Operator(kind="nothing")] * rows)
        one = Operator(
            kind="product", arithmetic="bf16", flops=2.0 * rows * self.size**3, moved_bytes=6.0 * rows * self.size**2,
            m=rows * self.size, n=self.size, k=self.size,
        )  # fmt: skip
        return Operators.of([one])


@pytest.mark.parametrize(("size", "bound"), [(8192, "device"), (0, "host")])
def test_a_step_takes_as_long_as_the_slower_of_device_and_host(size, bound):
    card, micro, step = find("H100"), Part(size), Part(size)
    found = StepClock(card).step_seconds(micro, step, np.array([1, 2]), np.array([3, 1]))
    of = {"device": lambda one: device_seconds(one, card), "host": host_seconds}[bound]
    expected = [3 * of(micro.operators(1)) + of(step.operators()), of(micro.operators(2)) + of(step.operators())]
    assert found == pytest.approx(expected)


def test_a_host_that_was_timed_issues_operators_at_its_own_pace():
    card, micro, step = find("H100"), Part(0), Part(0)
    rows, times = np.array([1, 2]), np.array([3, 1])
    slow = StepClock(card, operators_per_second=1e3).step_seconds(micro, step, rows, times)
    assert slow == pytest.approx([4e-3, 3e-3])  # a call for each row, and one of the optimizer
    large = StepClock(card, operators_per_second=1e3).step_seconds(Part(16384), step, rows, times)
    device_bound = StepClock(card).step_seconds(Part(16384), step, rows, times)
    assert large == pytest.approx(device_bound)


def test_what_a_compiler_fuses_is_left_out_of_the_micro_steps_alone():
    card, rows, once = find("H100"), np.array([1]), np.array([1])
    large = Operator(kind="elementwise", arithmetic="bf16", moved_bytes=1e10, n=1e9)
    chain = SimpleNamespace(operators=lambda *_: Operators.of([large] * 3))
    product = Part(8192)
    clock = StepClock(card)
    for micro, step, share in ((chain, product, 0.5), (product, chain, 1.0), (product, product, 1.0)):
        expected = share * device_seconds(micro.operators(1), card) + device_seconds(step.operators(1), card)
        assert clock.step_seconds(micro, step, rows, once, fused=0.5) == pytest.approx(expected)
        assert clock.step_seconds(micro, step, rows, once)[0] >= expected


def test_what_plans_share_is_worked_out_once():
    micro, step = Part(64), Part(64)
    clock = StepClock(find("H100"))
    clock.step_seconds(micro, step, np.array([1, 2, 1]), np.array([4, 2, 1]))
    clock.step_seconds(micro, step, np.array([2]), np.array([8]))
    assert sorted(micro.asked) == [1, 2]
    assert len(step.asked) == 1


def test_fp16_and_tf32_are_computed_in():
    card, part = find("T4"), Part(8192)
    clock = StepClock(card)
    rows, times = np.array([1]), np.array([1])
    assert clock.step_seconds(part, Part(1), rows, times, fp16=True) < clock.step_seconds(part, Part(1), rows, times)


def test_a_card_without_the_figures_of_the_laws_has_the_roofline_and_its_spread():
    clock = StepClock(find("MI300X"))
    assert not clock.by_laws
    assert clock.log_std == step_time.ROOFLINE_LOG_STD
    assert clock.spread > StepClock(find("H100")).spread > 1
