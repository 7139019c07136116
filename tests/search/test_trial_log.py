"""One owner adds trials; the others read them as a sequence that grows."""

from collections.abc import MutableSequence, Sequence

from autofit.search.trial_log import TrialLog
from tests.search.test_loop import CRASH, SQUEEZED, tried


def test_a_reader_sees_what_is_added_and_has_no_way_to_add():
    log = TrialLog([tried(CRASH)])
    reader: Sequence = log
    log.add(tried(SQUEEZED, 1))
    assert [trial.number for trial in reader] == [0, 1]
    assert reader[-1].outcome == SQUEEZED
    assert reader[:1] == (tried(CRASH),)
    assert not isinstance(log, MutableSequence)


def test_the_list_it_is_made_of_is_copied():
    known = [tried(CRASH)]
    log = TrialLog(known)
    known.clear()
    assert len(log) == 1
