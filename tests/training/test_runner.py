import dataclasses
import json
import os
import shutil
import textwrap
import time

import pytest

from autofit.contract.outcome import OUTCOME, TRIAL, Crashed, Diverged, Measured, OutOfMemory, TimedOut, Unsupported
from autofit.output.plan_words import outcome_words
from autofit.registry import recipe_of
from autofit.system.errors import InputError, MachineError
from autofit.system.strict_json import dump_json
from autofit.training import jobs
from autofit.training.measure import RECOMPILED, clock_of
from autofit.training.runner import ProcessRunner, finished, log_tail, memory_kills, training_seconds, trial_folder
from autofit.training.timing import PARTS, Effort
from autofit.worker import JOBS
from tests.support.cases import some_slow
from tests.support.synthetic import cpu_facts
from tests.support.tiny import CONFIGS, GIB, MIB, PLAIN, describe, write_config

QUICK = Effort(min_steps=2, max_steps=2)
PATHS = ("trainer", "loop")


@pytest.fixture(scope="module")
def facts_of(server, tmp_path_factory):
    """Facts by config and by what is changed in it, each described once."""
    known = {}

    def find(name="llama", *, launch_path="trainer", seq_len=32, global_batch=4, limit_bytes=4 * GIB, **changes):
        key = (name, *sorted(changes.items()))
        if key not in known:
            config = write_config(tmp_path_factory.mktemp(name), CONFIGS[name], **changes)
            known[key] = config, describe(server, config)
        config, facts = known[key]
        work = dataclasses.replace(
            facts.workload,
            launch_path=launch_path,
            seq_len=seq_len,
            global_batch=global_batch,
            limit_bytes=limit_bytes,
            host_limit_bytes=limit_bytes,
        )
        return config, dataclasses.replace(facts, workload=work)

    return find


@pytest.fixture
def try_plan(server, tmp_path, facts_of):
    """Runs one plan for real."""

    def run(*, effort=QUICK, limit_seconds=300.0, number=0, config="llama", plan=None, **given):
        knobs = plan or {}
        folder, facts = facts_of(config, **given)
        runner = ProcessRunner(tmp_path / "trials", facts, folder, server)
        return runner.run(number, PLAIN.replaced(**knobs), effort, purpose="search", limit_seconds=limit_seconds)

    return run


@pytest.fixture
def try_fault(server, tmp_path, facts_of):
    """Runs a trial whose process does something else than its work."""

    def run(fault, *, limit_seconds=300.0, name="trials", plan=None):
        described, facts = facts_of()
        config = tmp_path / "faulty-model"
        shutil.copytree(described, config, dirs_exist_ok=True)
        (config / "fault.py").write_text(textwrap.dedent(fault), "utf-8")
        runner = ProcessRunner(tmp_path / name, facts, config, server)
        tried = PLAIN.replaced(**plan or {})
        return runner.run(0, tried, QUICK, purpose="search", limit_seconds=limit_seconds)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["load", "forward", "backward", "optimizer"])
def test_the_phase_in_which_a_device_runs_out_is_told(try_fault, phase):
    found = try_fault(f"""
        import torch
        def act():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a capacity")
        at({phase!r}, act, 0)
        honest(folder)
    """).outcome
    assert isinstance(found, OutOfMemory), found
    assert (found.where, found.phase, found.requested_bytes) == ("device", phase, 256 * MIB)


# what a trial measures


@pytest.mark.parametrize("launch_path", PATHS)
def test_a_measured_outcome_is_sane(try_plan, facts_of, launch_path):
    wide = {"vocab_size": 16384, "hidden_size": 64, "launch_path": launch_path}
    effort = Effort(warm_up=2, min_steps=3, max_steps=3)
    trial = try_plan(plan={"micro_batch": 2, "accumulation": 2}, effort=effort, **wide)
    facts = facts_of(**wide)[1]
    found = trial.outcome
    assert isinstance(found, Measured), found
    assert len(found.steps) == 3
    assert sorted(found.steps)[1] == found.step_seconds > 0
    assert found.samples_per_second == pytest.approx(4 / found.step_seconds)
    assert found.tokens_per_second == pytest.approx(4 * 32 / found.step_seconds)
    assert sum(found.steps) < found.training_seconds < trial.wall_seconds
    assert training_seconds(trial) == found.training_seconds
    # weights, gradients and the two moments of AdamW, and a dozen copies of the logits (2 bytes a parameter each), of
    # which a heap keeps some more or less; not what the process itself holds, which is over 100 bytes a parameter
    assert 15.5 * facts.model.parameters < found.peak_bytes < 60 * facts.model.parameters
    assert found.peak_bytes == found.allocated_bytes == found.reserved_bytes == found.host_bytes
    assert found.outside_bytes == 0
    assert found.limit_bytes == 4 * GIB
    assert found.loss == pytest.approx(9.7, abs=0.5)  # the logarithm of the vocabulary, as for any untrained model
    assert trial.purpose == "search"


@pytest.mark.parametrize("launch_path", some_slow(PATHS, lambda path: path == "loop"))
@pytest.mark.parametrize(
    ("micro_batch", "accumulation", "fidelity", "shown"),
    [
        (1, 12, "parts", "parts"),
        (12 // PARTS, PARTS, "parts", "whole"),
        (12, 1, "parts", "whole"),
        (1, 12, "whole", "whole"),
    ],
)
def test_a_long_accumulation_is_measured_in_parts(try_plan, launch_path, micro_batch, accumulation, fidelity, shown):
    effort = dataclasses.replace(QUICK, fidelity=fidelity)
    plan = {"micro_batch": micro_batch, "accumulation": accumulation}
    found = try_plan(plan=plan, effort=effort, global_batch=12, launch_path=launch_path).outcome
    assert isinstance(found, Measured), found
    assert found.fidelity == shown
    assert found.evidence.of("accumulation") == {"micro_steps": None if shown == "parts" else accumulation}
    assert found.evidence.of("micro_batch") == {"rows": micro_batch}
    assert found.loss == pytest.approx(4.85, abs=0.3)  # however many micro-steps it was added up from


PLANS = {
    "plain": {},
    "bf16": {"precision": "bf16"},
    "checkpointing": {"checkpointing": "full"},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
    "sgd": {"optimizer": "sgd"},
    "adafactor": {"optimizer": "adafactor"},
    "bf16_weights": {"precision": "bf16_weights"},
    "lora_in_16_bits": {"precision": "bf16_weights", "adapter": "lora:r=4"},
    "everything": {"precision": "bf16", "checkpointing": "full", "optimizer": "adamw_8bit"},
}


@pytest.mark.parametrize("launch_path", PATHS)
@pytest.mark.parametrize("name", some_slow(PLANS, lambda name: name in {"plain", "everything"}))
def test_every_knob_takes_effect_on_both_launch_paths(try_plan, name, launch_path):
    plan = {"micro_batch": 2, "accumulation": 2, **PLANS[name]}
    found = try_plan(plan=plan, vocab_size=1024, launch_path=launch_path).outcome
    assert isinstance(found, Measured), found
    seen = found.evidence.of
    precision, optimizer = plan.get("precision", "fp32"), plan.get("optimizer", "adamw")
    assert (seen("micro_batch"), seen("accumulation")) == ({"rows": 2}, {"micro_steps": 2})
    assert (found.evidence.seq_len, found.evidence.padding_mask) == (32, False)
    assert seen("precision")["compute_dtype"] == ("float32" if precision == "fp32" else "bfloat16")
    assert seen("precision")["weights_dtype"] == ("bfloat16" if precision == "bf16_weights" else "float32")
    if "adapter" in plan:
        assert seen("precision")["trained_dtype"] == "float32"
    assert seen("checkpointing")["layer_forwards"] == (2 if plan.get("checkpointing") == "full" else 1)
    assert seen("optimizer")["class"].rsplit(".")[0] == {
        "adamw": "torch", "sgd": "torch", "adamw_8bit": "bitsandbytes", "adafactor": "transformers"
    }[optimizer]  # fmt: skip
    assert ("uint8" in seen("optimizer")["state_dtypes"]) == (optimizer == "adamw_8bit")
    assert seen("offload")["parameter_devices"] == ["cpu"]
    assert seen("parallel") == {"engine": "NO", "processes": 1, "zero_stage": None}


@pytest.mark.parametrize("launch_path", some_slow(PATHS, lambda path: path == "trainer"))
@pytest.mark.parametrize(
    "config", some_slow([name for name in CONFIGS if name != "llama"], lambda config: config != "gpt_neox")
)
def test_every_architecture_is_measured(try_plan, config, launch_path):
    plan = {"micro_batch": 2, "accumulation": 2}
    found = try_plan(plan=plan, config=config, launch_path=launch_path).outcome
    assert isinstance(found, Measured), found
    assert found.evidence.of("checkpointing")["layer_forwards"] == 1
    assert found.evidence.of("precision")["compute_dtype"] == "float32"


@pytest.mark.parametrize(("value", "again"), [("full", 2), ("every_2", 1), ("selective", 2)])
@pytest.mark.parametrize(
    "config", some_slow([name for name in CONFIGS if name != "llama"], lambda config: config == "mixtral")
)
def test_checkpointing_is_seen_on_every_architecture(try_plan, config, value, again):
    found = try_plan(plan={"checkpointing": value, "precision": "bf16"}, config=config).outcome
    assert isinstance(found, Measured), found
    assert found.evidence.of("checkpointing")["layer_forwards"] == 2
    seen = found.evidence.of("checkpointing")
    assert (seen["layers"], seen["layers_recomputed"]) == (2, again)
    assert found.evidence.of("precision")["compute_dtype"] == "bfloat16"


def test_a_hopeless_plan_is_left_early(try_plan):
    effort = Effort(min_steps=8, max_steps=8, hopeless_seconds=1e-9)
    assert len(try_plan(effort=effort).outcome.steps) == 2


# what a trial refuses


WIDE = {"vocab_size": 65536, "hidden_size": 64, "seq_len": 4, "global_batch": 1}
WEIGHTS = 2 * 65536 * 64 * 4


@pytest.mark.parametrize("launch_path", PATHS)
@pytest.mark.parametrize(
    ("limit_bytes", "phase"),
    [
        (WEIGHTS // 2, "forward"),  # the first look is after it
        (WEIGHTS * 3 // 2, "backward"),  # gradients are as large as the weights
        (WEIGHTS * 3, "optimizer"),  # and so is each of AdamW's two moments
    ],
)
def test_a_broken_ceiling_is_out_of_memory_in_its_phase(try_plan, launch_path, limit_bytes, phase):
    plan = {"accumulation": 1}
    trial = try_plan(plan=plan, **WIDE, limit_bytes=limit_bytes, launch_path=launch_path)
    found = trial.outcome
    assert isinstance(found, OutOfMemory), found
    assert (found.where, found.phase) == ("device", phase)
    assert found.limit_bytes == limit_bytes < found.peak_bytes < 3 * limit_bytes
    assert training_seconds(trial) == found.training_seconds


def test_the_same_plan_fits_under_a_ceiling_that_holds_it(try_plan):
    found = try_plan(plan={"accumulation": 1}, **WIDE, limit_bytes=WEIGHTS * 6).outcome
    assert isinstance(found, Measured), found
    assert WEIGHTS * 4 < found.peak_bytes < found.limit_bytes


def test_a_giant_allocation_is_refused_before_the_machine_runs_out(try_plan):
    long = {"seq_len": 4096, "max_position_embeddings": 4096, "vocab_size": 32768}
    found = try_plan(plan={"micro_batch": 4, "accumulation": 1}, **long, limit_bytes=64 * MIB).outcome
    assert isinstance(found, OutOfMemory), found
    assert (found.where, found.phase) == ("device", "forward")
    assert found.requested_bytes == 4 * 4096 * 32768 * 4  # the logits
    assert found.peak_bytes > found.requested_bytes
    assert found.limit_bytes == 64 * MIB


@pytest.mark.parametrize("launch_path", PATHS)
def test_a_loss_that_is_no_number_is_told(try_plan, launch_path):
    found = try_plan(rms_norm_eps=-1e9, launch_path=launch_path).outcome
    assert isinstance(found, Diverged), found
    assert (found.loss, found.step) == ("nan", 0)
    assert found.training_seconds > 0


@pytest.mark.parametrize("launch_path", PATHS)
def test_a_knob_that_is_ignored_is_no_measurement(try_plan, launch_path):
    # 8-bit state is kept for tensors of 4096 elements and more
    found = try_plan(plan={"optimizer": "adamw_8bit"}, vocab_size=64, launch_path=launch_path).outcome
    assert isinstance(found, Unsupported), found
    assert found.reason.startswith("optimizer=adamw_8bit did not take effect: no 8-bit state")


def test_a_missing_package_is_unsupported(try_fault):
    found = try_fault("""
        from autofit.training import jobs
        def missing(*_, **__): raise ModuleNotFoundError("No module named 'fast_kernels'")
        jobs.run_recipe = missing
        honest(folder)
    """).outcome
    assert found == Unsupported(reason="a package is missing or broken: No module named 'fast_kernels'")


# how a trial dies


def test_an_unknown_error_is_shown(try_fault):
    found = try_fault("""
        from autofit.training import jobs
        def broken(*_, **__): raise ArithmeticError("the abacus is broken\\nsecond line")
        jobs.run_recipe = broken
        honest(folder)
    """).outcome
    assert isinstance(found, Crashed)
    assert found.reason == "ArithmeticError: the abacus is broken"
    assert "Traceback" in found.log_tail
    assert "in broken" in found.log_tail
    assert "second line" in found.log_tail


def test_memory_that_runs_out_outside_the_allocator_is_told(try_fault):
    found = try_fault("""
        from autofit.training import jobs
        def full(*_, **__): raise MemoryError
        jobs.run_recipe = full
        honest(folder)
    """).outcome
    assert isinstance(found, OutOfMemory)
    assert (found.where, found.phase, found.requested_bytes) == ("device", "load", None)


def test_addresses_that_run_out_are_not_the_devices_memory(try_fault):
    found = try_fault("""
        import psutil, resource, torch
        from autofit.training import jobs
        def full(*_, **__):
            held = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (held + 2**28, resource.RLIM_INFINITY))
            torch.empty(2**30, dtype=torch.uint8)
        jobs.run_recipe = full
        honest(folder)
    """).outcome
    assert isinstance(found, OutOfMemory)
    assert (found.where, found.requested_bytes, found.external_pressure) == ("host", 2**30, False)
    assert found.limit_bytes - 2**28 <= found.peak_bytes <= found.limit_bytes


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM"])
def test_a_killed_trial_has_crashed_of_its_signal(try_fault, name):
    found = try_fault(f"""
        import os, signal, sys
        (folder / "progress").write_text("step 1")
        print("famous last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.{name})
    """).outcome
    assert found == Crashed(reason=f"killed by {name} after step 1", log_tail="famous last words")


@pytest.mark.parametrize(("kills", "kind"), [((3, 3), "crashed"), ((3, 4), "out_of_memory")])
def test_a_kill_by_the_kernel_for_memory_is_told_apart(try_fault, monkeypatch, kills, kind):
    counts = iter(kills)
    monkeypatch.setattr("autofit.training.runner.memory_kills", lambda: next(counts))
    found = try_fault("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").outcome
    assert found.kind == kind
    if kind == "out_of_memory":
        assert found.where == "device"  # the host's memory is the CPU's own
        assert found.peak_bytes >= found.limit_bytes


def test_kills_are_counted_where_the_kernel_tells():
    assert memory_kills() >= 0


def test_a_trial_that_just_ends_has_crashed(try_fault):
    found = try_fault("import os, sys; print('x' * 9000 + 'the end', file=sys.stderr, flush=True); os._exit(3)").outcome
    assert isinstance(found, Crashed)
    assert found.reason == "ended with status 3 after start"
    assert found.log_tail.endswith("xxxthe end")
    assert len(found.log_tail) <= 4000


def test_a_torn_outcome_is_a_crash(try_fault):
    found = try_fault("(folder / 'outcome.json').write_text('{\"kind\": \"measu')").outcome
    assert isinstance(found, Crashed)
    assert found.reason == "ended with status 0 after start"


def test_an_outcome_that_was_written_counts_whatever_comes_after(try_fault):
    assert isinstance(try_fault("honest(folder); import os; os.abort()").outcome, Measured)
    verdict = Unsupported(reason="its own words")
    hangs = f"(folder / 'outcome.json').write_text({dump_json(OUTCOME, verdict)!r}); import time; time.sleep(1000)"
    assert try_fault(hangs, limit_seconds=1.0, name="hangs").outcome == verdict


def test_a_trial_that_takes_too_long_has_timed_out(try_fault):
    began = time.monotonic()
    trial = try_fault("(folder / 'progress').write_text('step 7'); import time; time.sleep(1000)", limit_seconds=1.0)
    assert trial.outcome == TimedOut(limit_seconds=1.0, phase="step 7")
    assert 1.0 <= trial.wall_seconds <= time.monotonic() - began
    assert training_seconds(trial) == 0.0


@pytest.mark.slow
def test_a_real_trial_that_takes_too_long_tells_how_far_it_came(try_plan):
    effort = Effort(min_steps=10**6, max_steps=10**6, seconds=10**6)
    found = try_plan(plan={"micro_batch": 4, "accumulation": 1}, effort=effort, limit_seconds=6.0).outcome
    assert isinstance(found, TimedOut)
    assert found.phase == "load" or found.phase.startswith("step ")


@pytest.mark.slow
def test_a_compiler_that_takes_too_long_is_told(try_fault):
    slow = """
        import time
        from torch._inductor import compile_fx
        compile_fx.compile_fx = lambda *_, **__: time.sleep(1000)
        honest(folder)
    """
    for limit_seconds in (8.0, 60.0):  # the second where others leave little of the processors
        found = try_fault(slow, plan={"compile": "model"}, limit_seconds=limit_seconds).outcome
        assert isinstance(found, TimedOut)
        assert found.phase in {"start", "load", "compiling"}
        if found.phase == "compiling":
            break
    assert found == TimedOut(limit_seconds=limit_seconds, phase="compiling")
    assert outcome_words(found).startswith("timed out in compiling, after ")


@pytest.mark.slow
def test_what_is_compiled_after_the_warm_up_is_counted_and_told(try_fault):
    """The compiler forgets what it has made, once, behind the first timed step."""
    forgets = """
        import torch
        from autofit.training.timing import Clock
        from torch._inductor import compile_fx
        compile_fx.compile_fx = lambda graph, *_, **__: graph
        ended = Clock.step_end
        def step_end(self):
            enough = ended(self)
            if self.done == 3:
                torch._dynamo.reset_code_caches()
            return enough
        Clock.step_end = {step_end}
        honest(folder)
    """
    steady = try_fault(forgets.format(step_end="ended"), plan={"compile": "model"}, name="steady").outcome
    assert isinstance(steady, Measured), steady
    made, notes = steady.evidence.compiled_graphs, steady.notes
    assert made > 0 == steady.evidence.recompiles
    again = try_fault(forgets.format(step_end="step_end"), plan={"compile": "model"}, name="again").outcome
    assert isinstance(again, Measured), again
    assert (again.evidence.compiled_graphs, again.evidence.recompiles) == (made, made)
    assert again.notes == (*notes, RECOMPILED.format(made))


# its folder


def test_the_folder_holds_the_trial(try_plan, tmp_path):
    trial = try_plan(number=3)
    folder = tmp_path / "trials" / "00003"
    assert folder == trial_folder(tmp_path / "trials", 3)
    assert {entry.name for entry in folder.iterdir()} == {
        "accelerate.yaml", "job.json", "outcome.json", "progress", "stderr.log", "stdout.log", "trial.json"
    }  # fmt: skip
    job = JOBS.validate_json((folder / "job.json").read_bytes())
    assert (job.plan, job.effort) == (trial.plan, QUICK)
    assert OUTCOME.validate_json((folder / "outcome.json").read_bytes()) == trial.outcome
    assert TRIAL.validate_json((folder / "trial.json").read_bytes()) == trial
    assert list(finished(tmp_path / "trials")) == [trial]


def test_a_trial_that_was_cut_off_is_run_again_from_nothing(try_plan, tmp_path):
    folder = trial_folder(tmp_path / "trials", 0)
    folder.mkdir(parents=True)
    (folder / "outcome.json").write_text(dump_json(OUTCOME, Crashed(reason="of long ago")))
    (folder / "rest").mkdir()
    (folder / "stderr.log").write_text("of long ago")
    assert list(finished(tmp_path / "trials")) == []
    trial = try_plan(number=0)
    assert isinstance(trial.outcome, Measured)
    assert not (folder / "rest").exists()
    assert "of long ago" not in (folder / "stderr.log").read_text()
    assert list(finished(tmp_path / "trials")) == [trial]


@pytest.mark.slow
def test_quantized_weights_are_kept_for_the_trials_after_it(try_plan, tmp_path):
    knobs = {"adapter": "lora:r=4", "quantization": "nf4"}

    def kept():
        return {file: file.stat().st_mtime_ns for file in (tmp_path / "trials" / "kept").iterdir()}

    first = try_plan(number=0, plan=knobs)
    files = kept()
    assert files
    second = try_plan(number=1, plan={**knobs, "micro_batch": 2, "accumulation": 2})
    assert kept() == files
    assert list(finished(tmp_path / "trials")) == [first, second]
    assert all(isinstance(trial.outcome, Measured) for trial in (first, second)), (first, second)


def test_what_is_rated_stands_in_the_trial_s_file(server, tmp_path, facts_of):
    config, facts = facts_of()
    refused = Crashed(reason="faster than the device")
    for number, rated in enumerate((lambda _, outcome: dataclasses.replace(outcome, mfu=0.5), lambda *_: refused)):
        runner = ProcessRunner(tmp_path / "trials", facts, config, server, rated=rated)
        runner.run(number, PLAIN, QUICK, purpose="search", limit_seconds=300)
    first, second = (trial.outcome for trial in finished(tmp_path / "trials"))
    assert first.mfu == 0.5
    assert second == refused


def test_a_folder_that_can_not_be_written_is_the_machine_s_fault(server, tmp_path, facts_of):
    config, facts = facts_of()
    (tmp_path / "trials").write_text("a file")
    runner = ProcessRunner(tmp_path / "trials", facts, config, server)
    with pytest.raises(MachineError, match="can't be written"):
        runner.run(0, PLAIN, QUICK, purpose="search", limit_seconds=60)


def test_what_can_not_be_read_has_not_finished(try_fault, tmp_path):
    good = try_fault("import os; os._exit(1)")
    folder = tmp_path / "trials"
    written = (folder / "00000" / "trial.json").read_text()
    for name, text in {
        "00001": written,  # of another number
        "00002": written[: len(written) // 2],
        "00003": "",
        "00004": json.dumps({**json.loads(written), "number": 4, "outcome": {"kind": "unheard-of"}}),
        "00005": json.dumps({**json.loads(written), "number": 5}),
    }.items():
        (folder / name).mkdir()
        (folder / name / "trial.json").write_text(text)
    (folder / "00006").mkdir()
    (folder / "00007").write_text("a file")
    (folder / "notes").mkdir()
    (folder / "00008").mkdir()
    (folder / "00008" / "trial.json").write_bytes(b"\xff\xfe")
    assert list(finished(folder)) == [good, dataclasses.replace(good, number=5)]


def test_a_file_in_the_place_of_the_trials_is_refused(tmp_path):
    (tmp_path / "trials").write_text("")
    with pytest.raises(InputError, match="trials, which holds a tune's trials, can't be read: Not a directory") as said:
        list(finished(tmp_path / "trials"))
    assert said.value.hint == "put it back as it was, or choose another --output"


def test_a_trial_of_another_version_is_refused(tmp_path):
    (tmp_path / "00001").mkdir()
    trial = {"number": 1, "plan": {}, "outcome": {"kind": "unsupported", "reason": "x"}, "wall_seconds": 1.0}
    (tmp_path / "00001" / "trial.json").write_text(json.dumps({**trial, "squeezed": True}))
    with pytest.raises(InputError, match="another version: squeezed is not a known key"):
        list(finished(tmp_path))


def test_no_trials_have_finished_where_there_is_no_folder(tmp_path):
    assert list(finished(tmp_path / "none")) == []


def test_a_log_that_is_missing_is_empty(tmp_path):
    assert log_tail(tmp_path) == ""


def test_an_engine_is_told_of_fewer_micro_steps_where_these_stand_for_more(monkeypatch):
    """DeepSpeed counts them itself, and a Trainer refuses another number than its own."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    recipe = recipe_of(PLAIN.replaced(micro_batch=4, accumulation=8), cpu_facts(global_batch=32))
    told = []
    for fidelity in ("whole", "parts"):
        clock = clock_of(recipe, Effort(fidelity=fidelity), meter=None)
        jobs._tell_micro_steps(clock)
        told.append(os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"])
    assert told == ["8", "3"]
    monkeypatch.delenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    jobs._tell_micro_steps(clock)
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in os.environ, "no engine counts"
