"""Several trials at once: no plan twice, the answer of one worker in less time, failures looked at twice."""

import threading

import optuna
import pytest

from autofit import space
from autofit.contract.outcome import Crashed, Trial
from autofit.search.loop import Campaign
from autofit.search.recordings.landscape import Landscape as Recording
from autofit.search.recordings.replay import Replay, ReplayWorkers
from autofit.search.samplers import make_sampler
from autofit.search.searcher import Searcher
from autofit.search.study import quiet_optuna
from autofit.search.surrogate.observation import Observation
from autofit.search.surrogate.pending import told_as_predicted
from autofit.search.surrogate.posterior import posterior, surrogate
from autofit.search.workers import Threads
from autofit.system.errors import MachineError
from tests.support.synthetic import GIB, Landscape, cpu_facts
from tests.support.tiny import LANDSCAPES

FACTS = cpu_facts(limit_bytes=16 * GIB)
SPACE = space.build(FACTS)
LAND = Landscape(facts=FACTS, row_bytes=0.05 * GIB)


def searched(workers, runner, facts, plans, forecast=None, most=40, **options):
    with quiet_optuna():
        sampler = make_sampler("autofit", plans, facts, 0, forecast)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        limit = facts.workload.limit_bytes
        searcher = Searcher(plans, study, sampler="autofit", limit_bytes=limit, forecast=forecast)
        one = Campaign(facts=facts, space=plans, runner=runner, workers=workers, **options)
        one.search(searcher, most)
    return one, study


@pytest.mark.parametrize("count", [1, 4])
def test_several_workers_ask_for_different_plans_and_find_one_as_fast_sooner(count):
    land = Recording.read(LANDSCAPES / "llama.jsonl.gz")
    workers = ReplayWorkers(count)
    one, study = searched(workers, Replay(land), land.facts, land.space, land.forecast)
    plans = [trial.plan for trial in one.trials]
    assert len(plans) == len(set(plans))
    assert land.seconds(one.best().plan) < 1.05 * land.seconds(land.best(one.limit_bytes))
    assert workers.busy_seconds == pytest.approx(sum(trial.wall_seconds for trial in one.trials))
    assert workers.clock_seconds < workers.busy_seconds / (0.6 * count)
    assert all(held.state.is_finished() for held in study.trials), "the study holds all of them, as told"


class Gate:
    """A runner that waits until as many trials run as there are workers, and whose first one crashes."""

    def __init__(self, count, fails=()):
        self.barrier = threading.Barrier(count, timeout=30)
        self.fails = set(fails)

    def run(self, number, plan, effort, *, purpose, limit_seconds):
        if number < 2:
            self.barrier.wait()
        outcome = Crashed(reason="killed by SIGKILL after load") if number in self.fails else LAND.outcome(plan)
        return Trial(number=number, plan=plan, outcome=outcome, wall_seconds=1.0, purpose=purpose)


def test_threads_run_trials_at_once_and_one_that_crashed_is_repeated():
    notes, workers = [], Threads(lambda: 2)
    one, _ = searched(workers, Gate(2, fails=[0]), FACTS, SPACE, most=6, note=notes.append)
    assert len({trial.plan for trial in one.trials}) == 6
    assert sorted(trial.number for trial in one.trials) == list(range(7))
    crashed = next(trial for trial in one.trials if trial.number == 0)
    assert sum(trial.plan == crashed.plan for trial in one.trials) == 2
    assert any("trial 0 crashed" in note for note in notes)
    workers.close()


def test_an_error_of_the_machine_in_a_thread_ends_the_search():
    class Broken:
        def run(self, *_, **__):
            raise MachineError("the disk is full")

    with pytest.raises(MachineError, match="disk is full"):
        searched(Threads(lambda: 2), Broken(), FACTS, SPACE)


def test_a_plan_that_runs_counts_as_the_model_expects_it():
    model, limit = surrogate(SPACE), FACTS.workload.limit_bytes
    runs = [Observation(plan=0, result="measured", seconds=0.1, peak_bytes=GIB, needed_bytes=GIB)]
    pending = Observation(plan=5, result="running")
    assert told_as_predicted(model, [pending], limit) == [pending], "nothing is known yet"
    before = posterior(model, runs, limit)
    told = told_as_predicted(model, [*runs, pending], limit)
    after = posterior(model, told, limit)
    assert told[1].result == "measured"
    assert after.time == pytest.approx(before.time, abs=0.02), "nothing was learned of the machine"
    assert after.time_std[5] < 0.2 * before.time_std[5]
