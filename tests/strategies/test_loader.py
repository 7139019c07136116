"""Worker processes of a script's loader: where they are offered, what is written, and what cures a slow one."""

import json
from dataclasses import replace

import pytest

from autofit import space
from autofit.contract.plan import Plan
from autofit.contract.script import Loading, Script
from autofit.output.document import read_document
from autofit.registry import converted, recipe_of, technique
from autofit.system.errors import InputError
from tests.support.scripted import SCRIPTS, autofit, tiny_bert
from tests.support.synthetic import cpu_facts, cuda_facts
from tests.support.tiny import PLAIN

LOADER = technique("loader")
SLOW = SCRIPTS / "slow_rows.py"
RATES = ((0, 50.0), (1, 50.0), (2, 99.0), (4, 190.0), (8, 200.0))


def facts_of(facts=cuda_facts, trainer="Trainer", **loading):
    given = {"cores": 16, "rows_per_second": RATES, **loading}
    script = Script(
        path="train.py", sha256="", trainer=trainer, micro_batch=4, accumulation=2, loading=Loading(**given)
    )  # fmt: skip
    return facts(global_batch=8, script=script)


def offered(facts):
    return {one.value for one in LOADER.choices(facts) if one.status == "offered"}


def test_the_fewest_workers_that_load_nearly_the_most_rows_are_offered():
    assert offered(facts_of()) == {"default", "workers_4"}
    assert offered(facts_of(cpu_facts)) == {"default", "workers_1", "workers_4"}
    assert offered(facts_of(cores=2)) == {"default", "workers_2"}
    assert offered(facts_of(workers=4)) == {"default", "workers_8"}
    plans = space.build(facts_of()).plans
    assert {plan["loader"] for plan in plans} == {"default", "workers_4"}


def test_no_workers_are_tried_where_a_loader_can_not_bind():
    facts = facts_of(rows_per_second=((0, 4e4),))
    assert offered(facts) == {"default"}
    large = replace(facts, model=replace(facts.model, parameters=70 * 10**9))
    seconds = 2 * 70e9 * large.workload.seq_len / 2.5e15
    script = replace(large.workload.script, loading=Loading(cores=16, rows_per_second=((0, 40 / seconds), (2, 1e9))))
    assert offered(replace(large, workload=replace(large.workload, script=script))) == {"default"}
    script = replace(script, loading=Loading(cores=16, rows_per_second=((0, 5 / seconds), (2, 1e9))))
    assert offered(replace(large, workload=replace(large.workload, script=script))) == {"default", "workers_2"}


@pytest.mark.parametrize(
    ("loading", "value", "why"),
    [
        ({"cores": 2}, "workers_4", "2 processor"),
        ({"worker_bytes": 2**50}, "workers_1", "of the host's memory"),
        ({"fixed": "its data set is read in order"}, "workers_2", "read in order"),
        ({"workers": 2}, "workers_2", "the script's own loader has as many"),
    ],
)
def test_what_can_not_be_had_says_why(loading, value, why):
    facts = facts_of(**loading)
    assert LOADER.choice(value, facts).status == "withheld"
    with pytest.raises(InputError, match=why):
        LOADER.parse(value, facts)
    with pytest.raises(InputError, match=why):
        LOADER.parse(f"{value}:prefetch=4", facts)


def test_workers_of_every_process_hold_the_hosts_memory():
    facts = facts_of(cores=16, worker_bytes=2**30)
    one = replace(facts, workload=replace(facts.workload, host_limit_bytes=7 * 2**30))
    assert LOADER.choice("workers_4", one).status != "withheld"
    both = replace(one, workload=replace(one.workload, processes=2))
    assert "they would hold 8.0 GiB" in LOADER.choice("workers_4", both).reason


def test_a_model_alone_has_no_loader_to_tune():
    assert offered(cuda_facts()) == {"default"}
    assert "tune the training script" in LOADER.choice("workers_2", cuda_facts()).reason
    assert (
        recipe_of(PLAIN.replaced(loader="default"), cuda_facts(global_batch=4))
        .emission.training_args.keys()
        .isdisjoint({"dataloader_num_workers"})
    )
    old = Plan({name: value for name, value in PLAIN.items() if name != "loader"})
    assert converted(old) == PLAIN


def test_a_trainer_reads_it_as_arguments_and_a_loop_where_it_prepares():
    facts = facts_of(workers=1, prefetch=3, persistent=True)
    plan = space.build(facts).plans[0]
    own = recipe_of(plan.replaced(loader="default"), facts)
    assert [own.emission.training_args[f"dataloader_{name}"] for name in ("num_workers", "prefetch_factor")] == [1, 3]
    assert own.loader_arguments == {}
    eight = recipe_of(plan.replaced(loader="workers_8:prefetch=4"), facts)
    assert {name: value for name, value in eight.emission.training_args.items() if "dataloader" in name} == {
        "dataloader_num_workers": 8,
        "dataloader_prefetch_factor": 4,
        "dataloader_persistent_workers": True,
        "dataloader_pin_memory": True,
    }
    fresh = recipe_of(plan.replaced(loader="workers_8"), facts_of())
    assert fresh.emission.training_args["dataloader_persistent_workers"] is False, "the data set may change"
    loop = recipe_of(plan.replaced(loader="workers_2"), facts_of(trainer=""))
    assert "dataloader_num_workers" not in loop.emission.training_args
    assert loop.loader_arguments["num_workers"] == 2


@pytest.mark.parametrize(
    ("value", "seen", "why"),
    [
        ("workers_2", {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": False, "processes": 2}, None),
        ("workers_2", {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": False}, None),
        ("workers_2", {"num_workers": 0, "prefetch_factor": None, "processes": 0}, "num_workers=0, not 2"),
        ("workers_2", {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": False, "processes": 1}, "1 of 2"),
        ("default", {"num_workers": 3, "processes": 3}, None),
    ],
)
def test_what_was_ignored_is_told(value, seen, why):
    found = LOADER.in_effect(value, seen, facts_of())
    assert found is None if why is None else why in found


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("loop", [False, pytest.param(True, marks=pytest.mark.by_hand)])
def test_a_slow_loader_is_found_cured_and_told(tmp_path, loop):
    """Each row takes 20 ms to make, a step some milliseconds: two workers make nearly twice the speed."""
    tiny_bert(tmp_path / "tiny")
    held = [f"--fix={one}" for one in ("checkpointing=off", "attention=default", "precision=fp32", "optimizer=adamw")]
    words = ("--output", "out", "--device", "cpu", "--among=loader=default,workers_2", "--fix=micro_batch=4", *held)
    behind = ("--", "--model", "tiny", *["--loop"] * loop)
    done = autofit(tmp_path, "tune", SLOW, "--trials", 2, *words, *behind)
    assert done.returncode == 0, done.stderr
    found = read_document(tmp_path / "out")
    assert found.plan["loader"] == "workers_2"
    own = min(one.outcome.loader_seconds for one in found.trials if one.plan["loader"] == "default")
    assert 0.08 <= own < 0.2, "four rows of 20 ms"
    rate = max(one.outcome.samples_per_second for one in found.trials if one.plan["loader"] == "default")
    assert rate < 50, "a row every 20 ms at most"
    assert found.promise.samples_per_second > 1.5 * rate
    assert "waits" in done.stderr
    assert " ".join(done.stdout.split()).index("The script's loader takes") < done.stdout.index("Promise")
    written = json.loads((tmp_path / "out" / "training_args.json").read_text())
    assert written.get("dataloader_num_workers") == (None if loop else 2)
    ran = autofit(tmp_path, "run", "out", SLOW, *behind)
    assert "workers 2" in ran.stdout, ran.stderr
    verified = json.loads(autofit(tmp_path, "verify", "out", "--json").stdout)
    assert verified["speed_ratio"] > 0.7, verified["broken"]
