"""The world of an estimate: --gpus and --nodes."""

import dataclasses
import math
import types

import numpy as np
import pytest

from autofit.commands.estimates.estimate import _notes
from autofit.commands.estimates.plans import _slow_host
from autofit.commands.estimates.world import asked_world, range_words
from autofit.contract.plan import Plan
from autofit.costmodel.forecast import Forecast, peak_prior
from autofit.costmodel.seconds.collectives import nccl_bytes
from autofit.costmodel.seconds.roofline import WORK
from autofit.machine import gpu_catalogue
from autofit.registry import baselines
from autofit.system.errors import InputError
from tests.support.traced import facts_of


def test_each_card_of_each_machine_is_a_process():
    facts = asked_world(8, 4, elsewhere=True).of(facts_of("llama", device="cuda"))
    assert (facts.workload.processes, facts.workload.nodes, facts.hardware.count) == (32, 4, 8)
    assert "32 cards, 8 in each of 4 machines" in asked_world(8, 4, elsewhere=True).words()
    assert asked_world(None, None, elsewhere=False).words() == ""


@pytest.mark.parametrize(
    ("gpus", "nodes", "elsewhere", "said"),
    [
        (0, None, True, "--gpus 0 is out of range"),
        (8, -1, True, "--nodes -1 is out of range"),
        (65536, 2, True, "131072 cards"),
        (8, None, False, "need the kind of card"),
    ],
)
def test_what_is_no_world_is_refused(gpus, nodes, elsewhere, said):
    with pytest.raises(InputError, match=said):
        asked_world(gpus, nodes, elsewhere=elsewhere)


def test_the_range_of_one_card_is_not_that_of_several():
    card, nothing = gpu_catalogue.find("H100 SXM"), types.SimpleNamespace(plans=())
    one, two = (asked_world(gpus, None, elsewhere=True) for gpus in (1, 2))
    facts = facts_of("llama", device="cuda")
    alone = _notes(facts, card, nothing, nothing, one, host=False, slow_host=1.0, pace=None)
    several = _notes(two.of(facts), card, nothing, nothing, two, host=True, slow_host=1.0, pace=None)
    assert "four trainings of five lie within" in alone[-1]
    assert "four trainings of five on one card lie within" in several[-1]
    assert "how far the link between cards is off is not known" in several[-1]
    assert ["steps on the host" in one[-1] for one in (alone, several)] == [False, True]
    assert "at a link of" in several[-2], "the screen shows the last two"
    assert max(len(words) for words in several) < 200, "and cuts none of them"


def test_what_a_slow_host_makes_of_the_speeds_is_told_where_it_matters():
    assert "five lie within 0.40 (slow host) to 1.10 times" in range_words(
        1.1, processes=1, on_host=True, slow_host=2.3
    )
    assert "within 0.87 to 1.10" in range_words(1.1, processes=1, on_host=False, slow_host=1.05), "as low says, too"
    assert "within 0.91 to 1.10" in range_words(1.1, processes=1, on_host=False, slow_host=1.0)


def test_beside_a_slow_host_small_steps_take_longer_and_large_ones_do_not():
    facts, plan = facts_of("llama", device="cuda"), Plan(baselines())
    work = np.full((3, len(WORK)), 1000.0)
    cast = Forecast(
        tensor_bytes=np.ones(3),
        seconds=np.array([0.010, 0.100, math.nan]),
        work=work,
        nominal=np.ones(len(WORK)),
        known_card=True,
        timed=False,
        approximate=np.zeros(3, dtype=bool),
        peak_prior=peak_prior(facts.hardware),
        kernel_overhead_bytes=np.zeros(3),
        activation_bytes=np.zeros(3),
    )
    assert _slow_host(0, plan, cast, facts) == pytest.approx(2.0)
    assert _slow_host(1, plan, cast, facts) == 1.0
    assert _slow_host(2, plan, cast, facts) == 1.0
    assert _slow_host(0, plan.replaced(compile="regions"), cast, facts) == 1.0, "what it issues is not known"
    assert _slow_host(0, plan, cast, dataclasses.replace(facts, rates={"operators": 1e5})) == 1.0, "it was timed"


def test_each_group_of_a_rank_has_a_communicator():
    def held(parallel, processes):
        world = asked_world(processes, 1, elsewhere=True).of(facts_of("llama", device="cuda"))
        return nccl_bytes(Plan({"parallel": parallel}), world.workload)

    assert held("none", 1) == 0
    assert held("ddp", 2) < held("ddp", 8) == held("fsdp", 8)
    assert held("hsdp:2x4", 8) > 2 * held("fsdp", 8) - held("ddp", 8) + held("ddp", 2)
