"""What the ranks of one training say together."""

import os

import pytest

from autofit.contract.outcome import OUTCOME, OutOfMemory
from autofit.system.strict_json import dump_json
from autofit.training.joined import joined, outcome_of_ranks
from autofit.training.ranks import result_file
from tests.support.synthetic import cuda_facts, measured, out_of_memory

FACTS = cuda_facts(processes=2)
QUICK_AND_FULL = measured([1.0, 1.0], 9_000, FACTS, host_bytes=10, alloc_retries=0, loss=4.0)
SLOW_AND_EMPTY = measured([2.0, 2.0], 5_000, FACTS, host_bytes=20, alloc_retries=3, loss=6.0)


def left(folder, *outcomes):
    """Results of ranks, the last one written first."""
    for rank, outcome in enumerate(outcomes):
        if outcome is not None:
            path = result_file(folder, rank)
            path.write_text(dump_json(OUTCOME, outcome))
            os.utime(path, ns=(1_000 - rank, 1_000 - rank))
    return outcome_of_ranks(folder, len(outcomes))


@pytest.mark.parametrize("ranks", [(QUICK_AND_FULL, SLOW_AND_EMPTY), (SLOW_AND_EMPTY, QUICK_AND_FULL)])
def test_a_training_is_as_slow_as_its_slowest_rank_and_needs_what_the_worst_one_does(tmp_path, ranks):
    found = joined(ranks)
    assert (found.step_seconds, found.samples_per_second) == (2.0, SLOW_AND_EMPTY.samples_per_second)
    assert (found.peak_bytes, found.allocated_bytes, found.reserved_bytes) == (9_000, 9_000, 9_000)
    assert (found.host_bytes, found.alloc_retries, found.loss) == (20, 3, 5.0)
    assert left(tmp_path, *ranks) == found


def test_a_rank_that_ran_out_of_memory_is_the_outcome_of_all(tmp_path):
    broke = out_of_memory(FACTS)
    assert left(tmp_path, QUICK_AND_FULL, broke) == broke
    assert left(tmp_path, None, broke) == broke


def test_of_several_failures_the_first_one_counts(tmp_path):
    found = left(tmp_path, out_of_memory(FACTS, phase="optimizer"), out_of_memory(FACTS, phase="load"))
    assert isinstance(found, OutOfMemory)
    assert found.phase == "load"


def test_a_rank_that_left_nothing_is_no_measurement(tmp_path):
    with pytest.raises(FileNotFoundError, match="1 of 2 ranks"):
        left(tmp_path, QUICK_AND_FULL, None)
