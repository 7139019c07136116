"""What the bench says of a landscape that a real card was measured for."""

from pathlib import Path

from autofit.search.recordings.landscape import Landscape
from tests.bench.landscape_seconds import figures, held

H200 = Path(__file__).resolve().parents[1] / "data" / "device_landscapes" / "h200_qwen2.jsonl.gz"


def test_plans_of_a_card_that_no_law_was_fitted_to_are_told_in_their_order():
    found = held(Landscape.read(H200))
    assert [measured for _, measured, _ in found] == sorted(measured for _, measured, _ in found)
    said = figures(found)
    assert said["plans"] == 36
    assert said["choice_regret"] == 0
    assert said["rank_correlation"] > 0.8
    assert said["median_absolute_error"] < 0.15


def test_order_and_choice_are_those_of_the_figures():
    said = figures([("a", 1.0, 1.2), ("b", 2.0, 1.0), ("c", 4.0, 4.0)])
    assert said == {
        "plans": 3,
        "median_absolute_error": 0.2,
        "p90_absolute_error": 0.5,
        "rank_correlation": 0.3333,
        "choice_regret": 1.0,
    }
