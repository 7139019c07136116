"""Each fault of the catalogue once: those of a trial's process in a trial, the others in a whole tune.

Whole tunes are slow; where one takes too long even for these, ``--all-faults`` runs it, too.
``tests/bench/fault_bench.py`` runs them all in whole tunes, several times over, and makes the table.
"""

import contextlib
import dataclasses
from operator import attrgetter

import psutil
import pytest

from autofit import space
from autofit.contract.outcome import Measured
from autofit.search.loop import Campaign
from autofit.search.trial_log import TrialLog
from autofit.training.runner import ProcessRunner
from autofit.training.timing import Effort
from tests.faults.injection import FAULTS, Impossible, OtherAnswer, Place, survives
from tests.support.cases import some_slow
from tests.support.tiny import GIB, PLAIN, describe, write_config

EVERY_DAY = {
    "the process that starts trials dies",
    "disk full: a trial's folder",
    "output folder deleted",
    "journal: garbage in the middle",
    "SIGINT twice",
    "the clock is set back",
}
"""Injected into whole tunes where nothing else is asked for; tests/commands/test_interrupt.py has the signals."""
IN_TRIALS = [one for one in FAULTS if one.code is not None]
IN_TUNES = [one for one in FAULTS if one.code is None and not one.of_scripts]
QUICK = Effort(min_steps=2, max_steps=2)


@pytest.fixture
def row(fault_table):
    """A row of the table at the end of the tests' output."""

    def add(one):
        made = {"fault": one.name, "survived": "no", "sees": ""}
        fault_table.append(made)
        return made

    return add


@pytest.fixture(scope="module")
def workshop(server, tmp_path_factory):
    """A model of its own, whose trials can be told to fail."""
    config = write_config(tmp_path_factory.mktemp("model"), vocab_size=1024)
    facts = describe(server, config, limit_bytes=GIB)
    return config, facts, space.build(facts)


@pytest.mark.parametrize(
    "one", some_slow(IN_TRIALS, lambda one: one.name.endswith(("RLIMIT_AS", "backward")), ids=attrgetter("name"))
)
def test_a_trial_s_fault_is_an_outcome_and_the_trial_is_repeated(one, workshop, server, tmp_path, row):
    config, facts, plans = workshop
    told, notes, trials = row(one), [], TrialLog()
    script = config / "fault.py"
    runner = ProcessRunner(tmp_path / "trials", facts, config, server, known=trials, note=notes.append)

    class Once:
        def run(self, number, plan, effort, *, purpose, limit_seconds):
            if number == 0:
                script.write_text(one.code)
                limit_seconds = 5.0 if "hangs" in one.name else limit_seconds
            try:
                return runner.run(number, plan, effort, purpose=purpose, limit_seconds=limit_seconds)
            finally:
                script.unlink(missing_ok=True)

    campaign = Campaign(facts=facts, space=plans, runner=Once(), trials=trials, note=notes.append)
    campaign.repeats = 99  # a busy neighbour is another matter
    plan = PLAIN.replaced(micro_batch=4, accumulation=1)
    last = campaign.run(plan, QUICK, "search")
    assert isinstance(trials[0].outcome, one.kind), trials[0].outcome
    assert isinstance(last.outcome, Measured), last.outcome
    assert last.number == 1
    assert campaign.decide().plan == plan
    assert notes[0].endswith(": re-measuring")
    assert psutil.Process(server._process.pid).children(recursive=True) == []
    told["survived"], told["sees"] = "yes", notes[0]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with contextlib.closing(Place(tmp_path_factory.mktemp("faults"))) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("one", [pytest.param(one, id=one.name) for one in IN_TUNES])
def test_a_tune_survives(one, row, request):
    told = row(one)
    if one.name not in EVERY_DAY and not request.config.getoption("--all-faults"):
        told["survived"] = "-"
        told["sees"] = "not injected today: --all-faults does"
        pytest.skip("a whole tune more: --all-faults")
    place = request.getfixturevalue("place")
    try:
        try:
            found = survives(place, one)
        except OtherAnswer:  # by others' work on the processors, if it is not so again
            found = survives(place, one)
    except Impossible as reason:
        told["survived"], told["sees"] = "-", f"can't be injected here: {reason}"
        pytest.skip(str(reason))
    told["survived"], told["sees"] = "yes", found["sees"]


def test_there_are_thirty_kinds_at_least():
    assert len({one.name for one in FAULTS}) == len(FAULTS) >= 30
    assert {one.name for one in IN_TUNES} >= EVERY_DAY
    assert all(dataclasses.asdict(one)["injected"] for one in FAULTS)
