"""The contest: autofit without one part or several, and one clear line where there is no such part."""

import subprocess
import sys
from pathlib import Path

import pytest

from autofit.contract.technique import Prior
from autofit.search import sampler as sampling
from autofit.search.recordings.landscape import Landscape
from autofit.search.sampler import AutofitSampler

sys.path.insert(0, str(Path(__file__).parent))

from search_bench import ABLATIONS, ablated, known, without

HERE = Path(__file__).parent
LAND = HERE.parent / "data" / "landscapes" / "llama.jsonl.gz"


def test_parts_are_taken_away_together_and_come_back():
    before = AutofitSampler._few_changes, sampling._STD_FACTOR
    with without(["doubt", "near", "traces"]):
        assert sampling._STD_FACTOR == 1.0
        assert AutofitSampler._few_changes is not before[0]
    assert (AutofitSampler._few_changes, sampling._STD_FACTOR) == before


def test_expected_times_are_taken_away_also_where_nothing_was_traced():
    land = Landscape.read(LAND)
    assert any(prior.time != Prior().time for values in land.space.priors.values() for prior in values.values())
    space, cast = ablated(land.facts, land.space, None, "time priors")
    assert cast is None
    assert {prior.time for values in space.priors.values() for prior in values.values()} == {Prior().time}


@pytest.mark.parametrize("part", ABLATIONS)
def test_every_part_can_be_taken_away(part):
    assert known(f"autofit - {part}")
    assert not known(f"tpe - {part}")


@pytest.mark.slow
def test_the_bench_runs_without_two_parts_and_refuses_an_unknown_one():
    command = [
        sys.executable,
        str(HERE / "search_bench.py"),
        "--seeds",
        "1",
        "--jobs",
        "1",
        "--fractions",
        "1",
        "--only",
    ]
    done = subprocess.run([*command, "autofit - traces - doubt"], capture_output=True, text=True, check=True)
    assert "autofit - traces - doubt" in done.stdout
    wrong = subprocess.run([*command, "autofit - trace"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("error: no searcher 'autofit - trace'")
