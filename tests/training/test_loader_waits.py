"""What a loop waits for its loader is spread over the steps, whole bursts at a time, and nothing hides it."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import DataLoaderShard

from autofit.machine.meters import Reading
from autofit.training import loader_waits, timing
from autofit.training.loader_waits import LoaderWaits
from autofit.training.measure import with_workers
from autofit.training.row_order import in_order
from autofit.training.timing import Clock, Effort
from tests.training.test_timing import NoMeter


def test_the_memory_of_workers_counts_on_the_host_which_is_the_device_of_a_cpu():
    read = Reading(peak_bytes=10, allocated_bytes=8, reserved_bytes=9, outside_bytes=2, host_bytes=10)
    card = with_workers(read, 5, on_cuda=True)
    assert (card.peak_bytes, card.allocated_bytes, card.host_bytes) == (10, 8, 15)
    cpu = with_workers(read, 5, on_cuda=False)
    assert (cpu.peak_bytes, cpu.allocated_bytes, cpu.reserved_bytes, cpu.host_bytes) == (15, 15, 15, 15)
    assert with_workers(read, 0, on_cuda=False) == read


class Rows(torch.utils.data.Dataset):
    """Rows that write down when they are made."""

    def __init__(self, made):
        self.made = made

    def __len__(self):
        return 99

    def __getitem__(self, place):
        self.made.append(place)
        return torch.ones(1)


@pytest.fixture
def run(monkeypatch):
    """``run(loads, effort, waits)``: a clock that has heard steps of a second, given the time of each load."""
    now = [0.0]
    for module in (timing, loader_waits):
        monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    def through(loads, effort, waits, accumulation=1, planned=1):
        clock = Clock(
            recipe=SimpleNamespace(accumulation=planned, slow_start=""),
            effort=effort,
            meter=NoMeter(),
            accumulation=accumulation,
            on_cuda=False,
            waits=waits,
        )
        for load in loads:
            waits.asked()
            now[0] += load
            waits.came(accumulation, inside=False)
            clock.step_begin()
            for _ in range(accumulation):
                clock.forward_begin()
                clock.forward_end()
                now[0] += 1.0 / accumulation
                clock.backward_end(torch.ones(()))
            if clock.step_end():
                break
        return clock

    return through


def test_bursts_are_spread_over_the_steps(run):
    """Four workers of eight seconds: a wait of five in every fourth step, and none in the others."""
    effort = Effort(warm_up=0, min_steps=3, max_steps=5, seconds=100.0)
    clock = run([5, 0, 0, 0] * 3, effort, LoaderWaits(workers=4))
    assert len(clock.steps) == 8, "two whole bursts, though five steps are enough elsewhere"
    assert clock.waited_steps() == pytest.approx([1 + 5 / 4] * 8)


def test_a_row_is_left_to_fetch_when_the_last_timed_step_begins(run):
    """Accelerate hands a micro-batch over when it has fetched the next: without a next one there is no wait."""
    clock = run([], Effort(warm_up=2, max_steps=10), LoaderWaits())
    places = [*range(clock.effort.warm_up + clock.loaded_steps)]
    fetched = []
    loader = DataLoaderShard(Rows(fetched), sampler=in_order(places), device=torch.device("cpu"))
    handed_over = [len(fetched) for _ in loader]
    assert clock.most_steps == 12
    assert handed_over[:12] == [*range(2, 14)], "one more at each"


def test_without_waits_a_measurement_is_as_long_as_ever(run):
    clock = run([0] * 20, Effort(warm_up=0, min_steps=3, max_steps=5), LoaderWaits(workers=4))
    assert clock.waited_steps() == (1.0, 1.0, 1.0)


def test_what_was_loaded_ahead_is_trained_on_untimed(run):
    loads = [0] * 4 + [5, 0] * 6
    effort = Effort(warm_up=0, min_steps=2, max_steps=4)
    waits = LoaderWaits(workers=2, ahead=4, batch_seconds=3.0)
    clock = run(loads, effort, waits)
    assert clock.waited_steps() == pytest.approx([3.5] * 4)
    assert clock.done == 8, "of which the first four were loaded ahead"
    quick = run(loads, effort, LoaderWaits(workers=2, ahead=4, batch_seconds=0.1))
    assert quick.waited_steps() == (1.0, 1.0)


def test_few_micro_steps_stand_for_the_waits_of_many(run):
    effort = Effort(warm_up=0, min_steps=2, max_steps=2)
    clock = run([3.0, 3.0], effort, LoaderWaits(), accumulation=3, planned=30)
    assert clock.waits.batch_wait(3) == pytest.approx(1.0)
    assert clock.waited_steps()[0] == pytest.approx(10.0 + 30.0)
