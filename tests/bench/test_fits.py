"""The search for the smallest card, on simulated ones; and what is read off a recording."""

import json
import math
import os
import time
import xml.etree.ElementTree as ET
from collections import Counter

import pytest

from autofit.costmodel.memory.allocator import replay, smallest_capacity
from autofit.registry import techniques
from autofit.system.units import GIB, MIB
from tests.bench import fits_picture
from tests.costmodel.test_allocator import training
from tests.gpu import fits


class Device:
    """A device on which a plan runs from some limit on."""

    def __init__(self, edge_bytes, requested_bytes, reserved_bytes):
        self.edge_bytes, self.requested_bytes, self.reserved_bytes = edge_bytes, requested_bytes, reserved_bytes
        self.limits = []

    def __call__(self, limit):
        self.limits.append(limit)
        reserved = self.reserved_bytes if limit is None else min(limit, self.reserved_bytes)
        fits_here = limit is None or limit >= self.edge_bytes
        return {"fits": fits_here, "requested_bytes": self.requested_bytes, "reserved_bytes": reserved}


@pytest.mark.parametrize("predicted", [None, 5 * GIB, 9.9 * GIB, 10 * GIB, 10.01 * GIB, 10.4 * GIB, 12 * GIB, 99 * GIB])
def test_the_edge_is_found_from_any_prediction(predicted):
    device = Device(10 * GIB, 9 * GIB, 13 * GIB)
    edge = fits.search(None if predicted is None else round(predicted), device, most=20)
    assert edge.fails_bytes < device.edge_bytes <= edge.runs_bytes
    assert edge.runs_bytes - edge.fails_bytes <= fits.TOLERANCE * edge.runs_bytes


@pytest.mark.parametrize("off", [-0.004, 0.0, 0.004])
def test_a_good_prediction_costs_few_runs(off):
    device = Device(10 * GIB, 9 * GIB, 13 * GIB)
    fits.search(round(10 * GIB * (1 + off)), device)
    assert device.limits[:2] == [None, round(10 * GIB * (1 + off))]
    assert len(device.limits) <= 5


def test_an_edge_at_the_tensors_or_at_the_reserved_needs_no_other_side():
    low = fits.search(9 * GIB, Device(9 * GIB, 9 * GIB, 13 * GIB), most=20)
    assert low.fails_bytes < 9 * GIB <= low.runs_bytes <= 9 * GIB * 1.005
    high = fits.search(13 * GIB, Device(13 * GIB, 9 * GIB, 13 * GIB), most=20)
    assert high.fails_bytes < 13 * GIB <= high.runs_bytes <= 13 * GIB


def test_the_edge_of_the_allocator_itself_is_found():
    events, sizes = training(layers=6, hidden=1024, tokens=4096, steps=3)
    least = smallest_capacity(events, sizes)

    def run(limit):
        told = replay(events, sizes, capacity_bytes=limit)
        return {"fits": told.fits, "requested_bytes": told.rounded_bytes, "reserved_bytes": told.peak_reserved_bytes}

    edge = fits.search(round(least * 1.03), run, most=20)
    assert edge.fails_bytes < least <= edge.runs_bytes <= least * (1 + 2 * fits.TOLERANCE)


def test_a_crash_and_the_end_of_time_end_the_search():
    device = Device(10 * GIB, 9 * GIB, 13 * GIB)
    edge = fits.search(10 * GIB, device, more=lambda: len(device.limits) < 2)
    assert (len(edge.tries), edge.runs_bytes) == (2, 10 * GIB)
    crashing = fits.search(10 * GIB, lambda limit: {**device(limit), **({"crash": "x"} if limit else {})})
    assert (len(crashing.tries), crashing.runs_bytes) == (2, 13 * GIB)
    whole = fits.search(10 * GIB, lambda _: {"fits": False})
    assert (whole.free, whole.runs_bytes, len(whole.tries)) == (None, None, 1)


@pytest.mark.slow
def test_the_cases_are_plans_that_can_be_had():
    wanted = fits.cases()
    assert len(wanted) >= 40
    assert not [key for key, count in Counter(case.key for case in wanted).items() if count > 1]
    assert {case.model for case in wanted} == fits.MODELS.keys()
    assert {case.allocator for case in wanted} == {"default", "expandable"}
    for case in wanted:
        assert set(case.plan) == {one.name for one in techniques()}
        config = fits.MODELS[case.model]
        assert case.seq_len <= config.get("max_position_embeddings", config.get("n_positions", 0))
        clash = [one.conflict(case.plan[one.name], case.plan, _facts(case)) for one in techniques()]
        assert not any(clash), (case.key, clash)


def _facts(case):
    from autofit.contract.facts import Model

    model = Model(
        name="x",
        architecture="X",
        model_type="x",
        parameters=10**9,
        layers=2,
        hidden_size=64,
        vocab_size=100,
        max_positions=None,
        supports_checkpointing=True,
    )
    return fits.facts_for(model, case.seq_len, case.plan["micro_batch"] * case.plan["accumulation"])


class Forked:
    """Stands in a child's place: dies on a limit of 1, hangs on 2, and is not clean after 3."""

    def __init__(self, case, model, scratch):
        self.pid = os.getpid()

    def run(self, limit):
        if limit == 1:
            os._exit(3)
        if limit == 2:
            time.sleep(60)
        return {"fits": True, "pid": self.pid, "left_bytes": 5 * MIB if limit == 3 else 0}


@pytest.mark.slow
def test_a_process_serves_until_it_is_spoilt(tmp_path):
    process = fits.Process(fits.cases()[0], {}, tmp_path, time.monotonic() + 3, make=Forked)
    first = process.run(None)
    assert first["pid"] not in {os.getpid(), None}
    assert process.run(3)["pid"] == first["pid"]
    assert process.run(None)["pid"] != first["pid"]
    assert process.run(1)["crash"] == "ended: status 768"
    assert process.run(2)["crash"] == "out of time"
    assert (process.forks, process.pid) == (3, None)


def recorded(path, edges):
    """A recording as fits.py writes it: by case, what was predicted and where the edge was, in GiB."""
    for case, (predicted, edge) in zip(fits.cases(), edges, strict=False):
        prediction = {
            "allocated_bytes": round(0.9 * predicted * GIB),
            "capacity_bytes": {"default": round(predicted * GIB), "expandable": round(predicted * GIB)},
            "context_bytes": 512 * MIB,
        }
        free = {
            "fits": edge is not None,
            "allocated_bytes": round(0.9 * (edge or 0) * GIB),
            "requested_bytes": 1,
            "reserved_bytes": 2,
            "outside_bytes": 600 * MIB,
        }
        found = fits.Edge(
            free=free if edge else None, runs_bytes=round(edge * GIB) if edge else None, fails_bytes=1, tries=[free]
        )
        fits.append(path, fits.record_of(case, prediction, found, seconds=1.0))


def test_a_recording_is_read_into_figures_and_a_picture(tmp_path, capsys):
    path, picture = tmp_path / "fits.jsonl", tmp_path / "fits.svg"
    recorded(path, [(10, 10), (10, 10.2), (10, 11), (20, 19.8), (40, 30), (5, None)])
    with path.open("a") as file:
        file.write('{"key": "torn')
    fits_picture.main([str(path), "--margin", "0.05", "--output", str(picture)])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["cases"], said["measured"]) == (6, 5)
    assert said["capacity_median_error"] == pytest.approx(1 - 10 / 10.2, abs=1e-4)
    assert said["capacity_p90_error"] == pytest.approx(1 / 3, abs=1e-4)
    assert said["ran_out"] == [fits.cases()[2].key]
    assert (said["ran_out_with_margin"], said["ran_out_without_margin"], said["refused"]) == (1, 2, 1)
    assert said["outside_bytes_median"] == 600 * MIB
    assert list(said["failed"].values()) == ["out of memory without a limit"]
    drawn = ET.fromstring(picture.read_text())
    space = "{http://www.w3.org/2000/svg}"
    assert len([one for one in drawn.iter(f"{space}title") if "measured" in one.text]) == 5 + 1
    numbers = [float(one.get("cx")) for one in drawn.iter(f"{space}circle")]
    assert all(math.isfinite(number) and 0 <= number <= fits_picture.WIDTH for number in numbers)


def test_what_is_recorded_is_not_run_again(tmp_path, monkeypatch):
    path, predictions = tmp_path / "fits.jsonl", tmp_path / "predictions.jsonl"
    recorded(path, [(10, 10), (5, None)])
    with path.open("a") as file:
        file.write('{"key": "torn')
    for case in fits.cases():
        fits.append(predictions, {"key": case.key, "model": {}})
    ran = []

    def measure(case, prediction, *_):
        ran.append(case.key)
        edge = fits.Edge(free=None, runs_bytes=None, fails_bytes=None, tries=[{"fits": False, "crash": "x"}])
        return fits.record_of(case, prediction, edge, seconds=0.0)

    monkeypatch.setattr(fits, "measure", measure)
    monkeypatch.setattr(fits, "preload", lambda *_: None)
    monkeypatch.setattr("autofit.machine.select.missing_cuda", lambda: None)
    arguments = ["--output", str(path), "--predictions", str(predictions), "--most", "4"]
    for _ in range(2):  # a crash is no answer, and is tried again
        fits.main(arguments)
    assert ran == [case.key for case in fits.cases()[2:4]] * 2
    assert [one["key"] for one in fits.lines(path)[2:]] == ran
