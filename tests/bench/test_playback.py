"""A sweep of parallel training that was published, played back to a searcher."""

import csv
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from playback import COLUMNS, read, run, summary

from autofit.system.errors import InputError

GPUS, BATCH = 16, 64


def rows(gpus=GPUS, batch=BATCH):
    """A sweep whose seconds are those of a pipeline with bubbles, and whose largest micro-batch fails."""
    found = []
    for dp, pp, tp in itertools.product((1, 2, 4, 8, 16), repeat=3):
        for zero, micro_batch in itertools.product((0, 1), (1, 2, 4, 64)):
            accumulation = batch // (dp * micro_batch)
            if dp * pp * tp != gpus or accumulation * dp * micro_batch != batch or (zero and dp == 1):
                continue
            seconds = (accumulation + pp - 1) * micro_batch * pp / 100 * (1 + 0.1 * tp) / pp + 0.01 * dp
            failed = micro_batch == 64
            found.append({
                "model": "toy", "layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 32, "intermediate": 8192,
                "vocab": 131072, "tied": True, "seq_len": 4096, "gpus": gpus, "gpu": "H100", "micro_batch": micro_batch,
                "grad_accum": accumulation, "dp": dp, "pp": pp, "tp": tp, "zero_stage": zero, "global_batch": batch,
                "tokens_per_s": "" if failed else batch * 4096 / seconds, "memory_gib": "" if failed else 20,
                "status": "failed" if failed else "measured",
            })  # fmt: skip
    return found


def write(path, found, columns=COLUMNS):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(found)
    return path


def test_a_file_is_read_by_its_columns_and_what_is_left_out_is_told(tmp_path):
    good = rows()
    wrong = {**good[0], "global_batch": 65}
    few = {**good[0], "grad_accum": 2 * good[0]["grad_accum"], "global_batch": 2 * BATCH}
    sweeps, left_out = read(write(tmp_path / "sweep.csv", [*good, good[0], wrong, few]))
    assert [len(sweep.answers) for sweep in sweeps] == [len(good)]
    assert sorted(left_out.values()) == [1, 1, 1]


@pytest.mark.parametrize("columns", [COLUMNS[1:], ()])
def test_a_file_without_a_column_is_refused(tmp_path, columns):
    with pytest.raises(InputError, match="lacks the columns model"):
        read(write(tmp_path / "sweep.csv", rows(), columns))


def test_a_file_without_a_landscape_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no landscape"):
        read(write(tmp_path / "sweep.csv", rows()[:3]))


def test_what_a_plan_needs_grows_with_its_rows_and_shrinks_with_what_is_shared(tmp_path):
    (sweep,), _ = read(write(tmp_path / "sweep.csv", rows()))
    plan = next(plan for plan in sweep.answers if (plan["dp"], plan["tp"], plan["micro_batch"]) == (4, 2, 1))
    need = sweep.need_bytes(plan.replaced(zero=0))
    assert sweep.need_bytes(plan.replaced(zero=0, micro_batch=2)) > need > sweep.need_bytes(plan.replaced(zero=1))
    assert sweep.need_bytes(plan.replaced(zero=0, tp=4)) < need
    assert all(part >= 0 for part in sweep.step_parts(plan))


def test_a_row_that_failed_ran_out_of_memory_only_where_its_need_is_above_the_ceiling(tmp_path):
    (sweep,), _ = read(write(tmp_path / "sweep.csv", rows()))
    kinds = {sweep.trial(0, plan).outcome.kind: sweep.need_bytes(plan) > sweep.limit_bytes for plan in sweep.answers}
    assert kinds["out_of_memory"]
    assert kinds.get("crashed", False) is False


def test_autofit_finds_the_best_of_a_sweep_in_fewer_trials_than_chance(tmp_path):
    (sweep,), _ = read(write(tmp_path / "sweep.csv", rows()))
    ours, chance = (summary([run(sweep, name, seed) for seed in range(1)]) for name in ("autofit", "random"))
    assert ours["found"] == chance["found"] == 1.0
    assert ours["trials_to_90_percent"] < chance["trials_to_90_percent"]
    assert ours["failed_of_memory"] == 0.0


@pytest.mark.slow
@pytest.mark.by_hand
def test_the_bench_prints_its_sums_as_json(tmp_path):
    path = write(tmp_path / "sweep.csv", rows())
    command = [sys.executable, str(Path(__file__).parent / "search_bench.py"), "--playback", str(path), "--seeds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["landscapes"] == 1
    assert {"found", "trials_to_90_percent", "failed_share"} <= found.keys() & found["tpe"].keys()
    missing = subprocess.run([*command[:3], str(tmp_path / "none.csv")], capture_output=True, text=True, check=False)
    assert (missing.returncode, "can't be read" in missing.stderr) == (1, True)
