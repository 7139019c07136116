"""The baseline plan that a winner is compared with: measured where the search did not, and only where it fits."""

import pytest

from autofit import space
from autofit.contract.outcome import Trial
from autofit.search import decision
from autofit.search.loop import BASELINES, Campaign
from tests.search.test_searcher import in_memory
from tests.support.synthetic import GIB, Landscape, cpu_facts

MOST = 40


def is_baseline(plan):
    return not decision.changed_values(plan)


class Played:
    """A runner on a synthetic landscape, which keeps what it was asked."""

    def __init__(self, land):
        self.land, self.efforts = land, []

    def run(self, number, plan, effort, *, purpose, limit_seconds):
        assert limit_seconds > 0
        self.efforts.append(effort)
        return Trial(
            number=number, plan=plan, outcome=self.land.outcome(plan, number), wall_seconds=1.0, purpose=purpose
        )


def searched(limit_gib, seed=0, *, most=MOST, plans=None, left=None, **shape):
    """A campaign whose search has ended, and its searcher."""
    facts = cpu_facts(limit_bytes=limit_gib * GIB)
    shape = {"overhead_seconds": 0.4, "row_seconds": 0.4, "row_bytes": 0.4 * GIB, "seed": seed, **shape}
    plans = plans or space.build(facts)
    searcher = in_memory(facts, plans, seed)
    campaign = Campaign(facts=facts, space=plans, runner=Played(Landscape(facts=facts, **shape)), left=left or _always)
    campaign.search(searcher, most)
    return campaign, searcher


def _always():
    return None


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("limit_gib", [12, 16])
def test_the_winner_has_something_to_be_compared_with(limit_gib, seed):
    campaign, searcher = searched(limit_gib, seed)
    before = len(campaign.trials)
    campaign.baseline(searcher, MOST)
    extra = campaign.trials[before:]
    assert len(extra) <= BASELINES
    assert all(is_baseline(trial.plan) and trial.purpose == "search" for trial in extra)
    assert all(effort.hopeless_seconds == 0 for effort in campaign.runner.efforts[before:]), "measured to its end"
    land = campaign.runner.land
    fitting = [plan for plan in campaign.space.plans if is_baseline(plan) and land.fits(plan)]
    tried = [trial.plan for trial in campaign.trials if trial.plan in fitting]
    best = min(map(land.step_seconds, fitting))
    assert min(map(land.step_seconds, tried)) <= 1.25 * best, "of the baseline plans a fast one"
    assert len({trial.plan for trial in campaign.trials}) == len(campaign.trials)


def test_it_is_measured_once():
    campaign, searcher = searched(16)
    for _ in range(3):
        campaign.baseline(searcher, MOST)
    plain = [trial for trial in campaign.trials if is_baseline(trial.plan)]
    assert plain
    count = len(campaign.trials)
    campaign.baseline(searcher, MOST)
    assert len(campaign.trials) == count


@pytest.mark.parametrize("seed", range(8))
def test_where_no_plain_plan_fits_little_is_spent_on_it(seed):
    campaign, searcher = searched(8, seed)
    land, before = campaign.runner.land, len(campaign.trials)
    assert not any(land.fits(plan) for plan in campaign.space.plans if is_baseline(plan))
    decided = decision.decide(campaign.trials, campaign.limit_bytes)
    assert decided is not None
    campaign.baseline(searcher, MOST)
    assert len(campaign.trials) <= before + BASELINES
    assert decision.decide(campaign.trials, campaign.limit_bytes).plan == decided.plan


def test_it_counts_among_the_trials_that_were_allowed():
    campaign, searcher = searched(16, most=4)
    assert len(campaign.trials) == 4
    campaign.baseline(searcher, 4)
    assert len(campaign.trials) == 4


def test_it_leaves_time_for_the_playoff():
    campaign, searcher = searched(16)
    campaign.left = lambda: 3.0
    before = len(campaign.trials)
    campaign.baseline(searcher, MOST)
    assert len(campaign.trials) == before


def test_there_is_none_where_no_plan_is_plain():
    facts = cpu_facts(limit_bytes=16 * GIB)
    plans = space.build(facts, given={"checkpointing": ("full",)})
    campaign, searcher = searched(16, plans=plans)
    before = len(campaign.trials)
    campaign.baseline(searcher, MOST)
    assert len(campaign.trials) == before


def test_nothing_is_compared_where_nothing_was_measured():
    facts = cpu_facts(limit_bytes=16 * GIB)
    plans = space.build(facts)
    assert in_memory(facts, plans).fastest_untried([plan for plan in plans.plans if is_baseline(plan)]) is None
