"""Each fault of the catalogue once; ``tests/bench/fault_bench.py`` does it several times over and makes the table."""

import contextlib

import pytest

from .faults import FAULTS, Impossible, Place, survives

QUICK = {
    "trial: SIGKILL",
    "trial: children left behind",
    "device out of memory: the optimizer's step",
    "journal: garbage in the middle",
    "disk full: a trial's folder",
}
"""What a run without ``slow`` sees of them."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with contextlib.closing(Place(tmp_path_factory.mktemp("faults"))) as made:
        yield made


@pytest.mark.parametrize(
    "one",
    [pytest.param(one, id=one.name, marks=() if one.name in QUICK else pytest.mark.slow) for one in FAULTS],
)
def test_it_is_survived(place, one, fault_table):
    row = {"fault": one.name, "injected": one.injected, "survived": "no", "sees": ""}
    fault_table.append(row)
    try:
        found = survives(place, one)
    except Impossible as reason:
        row["survived"] = f"not injected: {reason}"
        pytest.skip(str(reason))
    row["survived"], row["sees"] = "yes", found["sees"]


def test_there_are_thirty_kinds_at_least():
    assert len({one.name for one in FAULTS}) == len(FAULTS) >= 30
