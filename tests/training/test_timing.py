"""The clock: a step of many micro-steps is added up from three."""

from types import SimpleNamespace

import pytest
import torch

from autofit.training import timing
from autofit.training.timing import Clock, Effort
from autofit.training.world import World


class NoMeter:
    """Memory is not what is looked at."""

    def check(self):
        """Fits."""

    def settle(self):
        """Nothing to do."""


def clock_of(*, accumulation, steps, world=None):
    """Of a trial that takes three micro-steps in the place of so many."""
    return Clock(
        recipe=SimpleNamespace(accumulation=accumulation, slow_start=""),
        effort=Effort(warm_up=0, min_steps=1, max_steps=steps),
        meter=NoMeter(),
        accumulation=3,
        on_cuda=False,
        world=world or World(),
    )


@pytest.mark.parametrize(
    ("ranks", "whole"),
    [
        (1, 5 + 9 * (2 + 3) / 2 + 7),
        (2, 5 + 8 * 2 + 3 + 7),  # the last micro-step of several ranks is the one that exchanges gradients
    ],
)
def test_a_step_of_ten_micro_steps_is_added_up_from_three(monkeypatch, ranks, whole):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(World, "_reduced", lambda _world, number, _how: number)
    clock = clock_of(accumulation=10, steps=1, world=World(size=ranks))
    clock.step_begin()
    for seconds in (5, 2, 3):
        now[0] += 100  # what lies between micro-steps is the data's, not the step's
        clock.forward_begin()
        clock.forward_end()
        now[0] += seconds
        clock.backward_end(torch.ones(()))
    now[0] += 7
    assert clock.step_end()
    assert clock.steps == [whole]


def test_a_step_that_an_epochs_end_cuts_short_is_not_timed():
    """Of one micro-step nothing tells what later ones take; of fewer than the plan's a step is no whole one."""
    clock = clock_of(accumulation=4, steps=2)
    for micro_steps in (3, 1, 2, 3):
        clock.step_begin()
        for _ in range(micro_steps):
            clock.forward_begin()
            clock.forward_end()
            clock.backward_end(torch.ones(()))
        clock.step_end()
    assert clock.timed == [0, 3]
