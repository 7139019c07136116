"""Real trials of several ranks on this CPU over gloo: measured, ended by one rank, and held against one process."""

import dataclasses
import json
import shutil
import textwrap

import pytest

from autofit.contract.layout import layout_of
from autofit.contract.outcome import Measured
from autofit.training.guard.equivalence import Guards, judge, references, rounding_of
from autofit.training.runner import ProcessRunner
from autofit.training.timing import Effort
from tests.faults.ranks import FAULTS, end_of
from tests.support.rank_cases import MODULES
from tests.support.servers import running
from tests.support.tiny import GIB, PLAIN, describe, write_config

pytestmark = pytest.mark.slow
DDP = PLAIN.replaced(parallel="ddp", accumulation=2)
QUICK = Effort(fidelity="whole", min_steps=2, max_steps=3)


@pytest.fixture(scope="module")
def facts(server, tmp_path_factory):
    config = write_config(tmp_path_factory.mktemp("llama") / "config")
    found = describe(server, config)
    work = dataclasses.replace(found.workload, processes=2, limit_bytes=GIB, host_limit_bytes=GIB)
    return config, dataclasses.replace(found, workload=work)


@pytest.fixture
def try_plan(server, facts, tmp_path):
    def run(*, launch_path="trainer", fault=None, limit_seconds=300.0, plan=DDP, processes=2, **work):
        config, known = facts
        if fault:
            copy = tmp_path / "faulty"
            shutil.copytree(config, copy, dirs_exist_ok=True)
            (copy / "fault.py").write_text(textwrap.dedent(fault))
            config = copy
        workload = dataclasses.replace(known.workload, launch_path=launch_path, processes=processes, **work)
        runner = ProcessRunner(tmp_path / "trials", dataclasses.replace(known, workload=workload), config, server)
        return runner.run(0, plan, QUICK, purpose="search", limit_seconds=limit_seconds).outcome

    return run


@pytest.fixture(scope="module")
def shimmed(tmp_path_factory):
    """A fork server in which Accelerate takes the CPU for a GPU; the sharding and its collectives are PyTorch's own."""
    with running(tmp_path_factory.mktemp("shimmed"), MODULES) as started:
        yield started


@pytest.mark.parametrize(("launch_path", "processes"), [("trainer", 2), ("loop", 2)])
def test_every_rank_trains_and_the_worst_one_counts(try_plan, tmp_path, launch_path, processes):
    plan = DDP.replaced(accumulation=4 // processes)
    found = try_plan(launch_path=launch_path, processes=processes, plan=plan)
    assert isinstance(found, Measured), found
    ranks = [json.loads((tmp_path / f"trials/00000/rank-{rank}.json").read_text()) for rank in range(processes)]
    assert found.peak_bytes == max(one["peak_bytes"] for one in ranks)
    assert found.step_seconds == max(one["step_seconds"] for one in ranks)
    assert len({len(one["steps"]) for one in ranks}) == 1, "all stop after the same step"
    for one in ranks:
        seen = one["evidence"]["techniques"]
        assert (seen["parallel"]["engine"], seen["parallel"]["processes"]) == ("MULTI_CPU", processes)
        assert seen["accumulation"]["micro_steps"] == plan["accumulation"]


@pytest.mark.serial  # a busy machine may be too slow for the rank that is in order
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("value", "processes"),
    [("ddp", 2), *(pytest.param(value, 4, marks=pytest.mark.by_hand) for value in ("hsdp:2x2", "tp2xfsdp2"))],
)
def test_one_rank_ends_the_trial_in_ten_seconds_and_nothing_is_left(
    shimmed, facts, tmp_path, value, processes, fault, fault_table
):
    act, kind = FAULTS[fault]
    found, seconds, processes_left, ports_left = end_of(shimmed, *facts, tmp_path, value, processes, act)
    assert isinstance(found, kind), found
    words = {
        "killed": f"rank {processes - 1} was killed by SIGKILL",
        "hung": "stood still",
        "out of memory": "backward",
    }
    assert words[fault] in str(found)
    assert seconds < 10
    assert (processes_left, ports_left) == (0, 0)
    told = f"{seconds:.1f} s until the trial had ended; no process and no port is left"
    fault_table.append({"survived": "yes", "fault": f"one of {processes} ranks, {value}: {fault}", "sees": told})


def test_two_worlds_of_one_are_no_measurement(try_plan):
    """What Accelerate makes of the launch where nobody says that it is on the CPU."""
    found = try_plan(
        fault="""
        from accelerate import state
        state.PartialState._prepare_backend = lambda self, cpu=False, sagemaker_dp=False, backend=None: (
            None, state.DistributedType.NO)
        honest(folder)
        """
    )
    assert "1 process(es) trained together, not 2" in found.reason


@pytest.fixture(scope="module")
def alone(server, facts, tmp_path_factory):
    """The curve of one process that several are held against, and that of its rounding."""
    config, known = facts
    reference = next(references(DDP, known))
    assert (reference["parallel"], reference["accumulation"]) == ("none", 4)
    guards = Guards(tmp_path_factory.mktemp("alone"), known, config, server)
    curves = [guards._train(reference, 3, 300.0, how) for how in (None, rounding_of(DDP, known))]
    assert [one.failed for one in curves] == [None] * 2
    return reference, *curves


def test_the_guard_holds_several_ranks_against_one_process(server, facts, alone, tmp_path):
    config, known = facts
    mine = Guards(tmp_path, known, config, server)._train(DDP, 3, 300.0, None)
    assert (mine.failed, mine.others) == (None, ()), "each rank has the same"
    reference, theirs, rounded = alone
    found = judge(DDP, known, mine, reference, theirs, rounded=rounded)
    assert found.verdict == "same", found.words


# --- what Accelerate makes of its YAML, on a CPU that it takes for a GPU ----------------------------------------------


@pytest.mark.parametrize(
    ("value", "processes", "launch_path", "precision"),
    [
        ("fsdp", 2, "trainer", "fp32"),
        ("fsdp:noreshard", 2, "loop", "fp32"),
        ("hsdp:2x2", 4, "trainer", "fp32"),
        ("fsdp", 2, "loop", "bf16"),
    ],
)
def test_a_sharded_plan_trains_and_is_seen_to_be_sharded(
    shimmed, facts, tmp_path, value, processes, launch_path, precision
):
    config, known = facts
    work = dataclasses.replace(known.workload, processes=processes, launch_path=launch_path)
    runner = ProcessRunner(tmp_path / "trials", dataclasses.replace(known, workload=work), config, shimmed)
    plan = PLAIN.replaced(parallel=value, accumulation=4 // processes, precision=precision)
    found = runner.run(0, plan, QUICK, purpose="search", limit_seconds=300).outcome
    assert isinstance(found, Measured), found
    seen = found.evidence.of("parallel")
    assert (seen["engine"], seen["processes"]) == ("FSDP2", processes)
    assert seen["shards"] == 2
    assert (seen["freed_units"] > 0) == (value != "fsdp:noreshard")


@pytest.mark.parametrize("launch_path", ["trainer", "loop"])
def test_an_adapter_over_sharded_16_bit_weights_is_float32(shimmed, facts, tmp_path, launch_path):
    config, known = facts
    work = dataclasses.replace(known.workload, launch_path=launch_path)
    runner = ProcessRunner(tmp_path / "trials", dataclasses.replace(known, workload=work), config, shimmed)
    plan = PLAIN.replaced(parallel="fsdp", accumulation=2, precision="bf16_weights", adapter="lora:r=4")
    found = runner.run(0, plan, QUICK, purpose="search", limit_seconds=300).outcome
    assert isinstance(found, Measured), found
    assert found.evidence.of("parallel")["shards"] == 2
    seen = found.evidence.of("precision")
    assert (seen["weights_dtype"], seen["compute_dtype"]) == ("bfloat16", "bfloat16")
    assert seen["trained_dtype"] == "float32"


@pytest.mark.parametrize("launch_path", ["trainer", "loop"])
def test_gradients_are_sent_in_each_micro_step_and_seen_to_be(shimmed, facts, tmp_path, launch_path):
    config, known = facts
    work = dataclasses.replace(known.workload, launch_path=launch_path)
    runner = ProcessRunner(tmp_path / "trials", dataclasses.replace(known, workload=work), config, shimmed)
    plan = PLAIN.replaced(parallel="fsdp", accumulation=2, precision="fp32")
    sent, kept = (
        runner.run(number, plan.replaced(sync_each_batch=value), QUICK, purpose="search", limit_seconds=300).outcome
        for number, value in enumerate(("on", "off"))
    )
    assert isinstance(sent, Measured), sent
    assert isinstance(kept, Measured), kept
    each, last = (one.evidence.of("sync_each_batch") for one in (sent, kept))
    assert each["deferred"] == 0 < each["micro_steps"]
    assert last["deferred"] == last["micro_steps"] / 2


@pytest.mark.parametrize(
    ("value", "launch_path", "others"),
    [
        ("tp2xfsdp1", "trainer", {}),
        ("tp2xfsdp1", "loop", {"precision": "bf16", "checkpointing": "full"}),
        ("tp2xfsdp2", "trainer", {"precision": "bf16", "checkpointing": "full"}),
        ("tp2xfsdp2", "loop", {"optimizer": "sgd"}),
    ],
)
def test_a_tensor_parallel_plan_trains_and_is_seen_to_be_split(shimmed, facts, tmp_path, value, launch_path, others):
    config, known = facts
    groups = int(value[-1])
    work = dataclasses.replace(known.workload, processes=2 * groups, launch_path=launch_path)
    runner = ProcessRunner(tmp_path / "trials", dataclasses.replace(known, workload=work), config, shimmed)
    plan = PLAIN.replaced(parallel=value, accumulation=4 // groups, **others)
    found = runner.run(0, plan, QUICK, purpose="search", limit_seconds=300).outcome
    assert isinstance(found, Measured), found
    for rank in range(2 * groups):
        one = json.loads((tmp_path / f"trials/00000/rank-{rank}.json").read_text())
        seen = one["evidence"]["techniques"]["parallel"]
        assert (seen["engine"], seen["processes"]) == ("MULTI_GPU", 2 * groups)
        assert (seen["tensor"], seen["fsdp"], seen["same_rows"]) == (2, groups, True)
        assert seen["split_weights"] > 4


@pytest.mark.parametrize(
    ("value", "others"),
    [
        ("cp2xfsdp1", {}),
        ("cp2xfsdp1", {"precision": "bf16", "checkpointing": "full", "sync_each_batch": "on"}),
        ("cp2xfsdp2", {"precision": "bf16_weights", "optimizer": "sgd"}),
        ("cp4xfsdp1", {"precision": "bf16", "kernels": "chunked_ce", "adapter": "lora:r=4"}),
    ],
)
def test_each_rank_of_a_context_parallel_plan_has_its_part_of_the_rows(shimmed, facts, tmp_path, value, others):
    config, known = facts
    layout = layout_of(value, 2 if value == "cp2xfsdp1" else 4)
    work = dataclasses.replace(known.workload, processes=layout.world)
    runner = ProcessRunner(tmp_path / "trials", dataclasses.replace(known, workload=work), config, shimmed)
    plan = PLAIN.replaced(parallel=value, accumulation=4 // layout.shard, **others)
    found = runner.run(0, plan, QUICK, purpose="search", limit_seconds=300).outcome
    assert isinstance(found, Measured), found
    for rank in range(layout.world):
        one = json.loads((tmp_path / f"trials/00000/rank-{rank}.json").read_text())
        seen = one["evidence"]["techniques"]["parallel"]
        assert (seen["engine"], seen["processes"], seen["shards"]) == ("FSDP2", layout.world, layout.world)
        assert (seen["context"], seen["tokens"]) == (layout.context, 32 // layout.context)
        assert seen["same_rows"] is True


def test_an_fsdp_yaml_on_a_cpu_is_ddp_and_is_told(try_plan):
    found = try_plan(plan=DDP.replaced(parallel="fsdp"))
    assert "MULTI_CPU, not fully sharded data parallel" in found.reason


def test_the_guard_passes_a_sharded_plan(shimmed, facts, alone, tmp_path):
    config, known = facts
    plan = DDP.replaced(parallel="cp2xfsdp1", accumulation=4, kernels="chunked_ce")
    reference, theirs, rounded = alone
    assert (next(references(plan, known)), rounding_of(plan, known)) == (reference, rounding_of(DDP, known))
    mine = Guards(tmp_path, known, config, shimmed)._train(plan, 3, 300.0, None)
    assert mine.failed is None
    found = judge(plan, known, mine, reference, theirs, rounded=rounded)
    assert found.verdict == "same", found.words
