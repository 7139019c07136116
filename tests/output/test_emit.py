"""The emitted files: whole or absent, taken by the libraries that read them, and the same when read back."""

import copy
import functools
import json
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.trainer_pt_utils import AcceleratorConfig

import autofit
from autofit import registry, space
from autofit.contract.plan import Plan
from autofit.contract.technique import Kind
from autofit.machine.packages import installed
from autofit.output import result
from autofit.output.document import DOCUMENT, DOCUMENT_FILE, MODEL_FOLDER, check_config, document_schema, read_document
from autofit.output.emit import ARGUMENTS, ASIDE, REPORT, YAML, check_files, emit
from autofit.output.setup import Setup, load
from autofit.search.decision import changed_values, decide
from autofit.system.errors import EmissionError, InputError, MachineError, ModelError
from autofit.system.strict_json import dump_json
from autofit.training.guard.equivalence import Guard
from autofit.training.scripts.plain_loop.patches import COUNTS
from tests.support.synthetic import GIB, Landscape, cpu_facts, cuda_facts
from tests.support.tiny import write_config
from tests.support.traced import like_a_process_of_its_own

SCHEMA = Path(autofit.__file__).parent / "output" / "autofit.schema.json"
NAMES = [YAML, ARGUMENTS, REPORT, DOCUMENT_FILE]
CPU = replace(cpu_facts(global_batch=8, limit_bytes=32 * GIB), packages=installed())
CUDA = replace(cuda_facts(global_batch=8), packages={**installed(), "deepspeed": "0.18.0", "bitsandbytes": "0.49.0"})


def a_plan(facts, **wanted):
    """The simplest plan with these values."""
    given_values = {name: (value,) for name, value in wanted.items()}
    plans = space.build(facts, frozenset(Kind), given_values).plans
    return min(plans, key=lambda plan: (changed_values(plan), plan["accumulation"]))


def a_document(plan, facts, guard=None):
    """The answer of a tune in which this plan won."""
    land = Landscape(facts=facts, row_bytes=1e6)
    trials = [land.trial(plan, 0), land.trial(plan, 1, "final")]
    decision = decide(trials, facts.workload.limit_bytes)
    return result.compose(decision, facts, trials, notes=["a ‘note’"], seconds=3.0, guard=guard)


def test_that_another_split_is_another_training_is_told_among_what_changes():
    plan = a_plan(CPU, micro_batch=8, precision="bf16")
    held = Guard(verdict="same", words="rounding", split="its micro-batch of 8 rows is another training")
    plain, split = (a_document(plan, CPU, guard).changes for guard in (None, held))
    assert split == ("Its micro-batch of 8 rows is another training.", *plain)


def test_what_a_run_has_shown_to_be_another_training_is_told_among_what_changes():
    plan = a_plan(CPU, micro_batch=8)
    trial = Landscape(facts=CPU, row_bytes=1e6).trial(plan, 0)
    noted = replace(trial, outcome=replace(trial.outcome, notes=("rows", COUNTS)))
    decision = decide([noted], CPU.workload.limit_bytes)
    told = result.compose(decision, CPU, [noted], notes=(), seconds=1.0).changes
    assert told[0] == f"T{COUNTS[1:]}."
    assert not any("rows" in one for one in told[1:])


def output_folder(path):
    (path / MODEL_FOLDER).mkdir(parents=True)
    (path / MODEL_FOLDER / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


def written(folder, facts=CPU, check=check_files, **wanted):
    found = a_document(a_plan(facts, **wanted), facts)
    emit(found, folder, "<html>", check)
    return found


def loaded(tmp_path):
    """What ``autofit.load`` makes of a folder with an answer and the model's config."""
    folder = output_folder(tmp_path / "out")
    write_config(folder / MODEL_FOLDER)
    written(folder)
    return autofit.load(folder, any_hardware=True)


def held(folder):
    return {name: (folder / name).read_bytes() for name in NAMES}


def arguments(folder):
    return json.loads((folder / ARGUMENTS).read_text())


def settings_of(folder):
    return yaml.safe_load((folder / YAML).read_text())


PLANS = {
    "plain": (CPU, {}),
    "bf16 and checkpointing": (CPU, {"precision": "bf16", "checkpointing": "full"}),
    "8-bit": (CPU, {"optimizer": "adamw_8bit", "micro_batch": 2}),
    "sgd": (CPU, {"optimizer": "sgd"}),
    "bf16 weights by a loop": (
        replace(CPU, workload=replace(CPU.workload, launch_path="loop")),
        {"precision": "bf16_weights", "optimizer": "adafactor"},
    ),
    "fsdp2": (CUDA, {"parallel": "fsdp", "offload": "parameters", "precision": "fp32"}),
    "zero2": (CUDA, {"parallel": "zero2", "offload": "optimizer", "precision": "fp32"}),
    "zero3": (CUDA, {"parallel": "zero3", "offload": "parameters", "precision": "fp32", "checkpointing": "full"}),
    "state on the host": (CUDA, {"offload": "optimizer"}),
}


@pytest.mark.parametrize(("facts", "wanted"), PLANS.values(), ids=PLANS)
def test_the_files_of_a_plan_are_taken_by_their_readers(tmp_path, facts, wanted):
    folder = output_folder(tmp_path / "out")
    if facts is CUDA:  # load() would say that deepspeed is not installed here
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            found = written(folder, facts, **wanted)
            setup = load(folder)
    else:
        found = written(folder, facts, **wanted)
        setup = autofit.load(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*NAMES, MODEL_FOLDER])
    emission = registry.recipe_of(found.plan, facts).emission
    assert settings_of(folder) == emission.accelerate
    assert arguments(folder) == emission.training_args
    assert (setup.plan, setup.promise) == (found.plan, found.promise)
    assert setup.micro_batch * setup.accumulation == 8
    assert setup.recipe.emission.training_args == emission.training_args
    assert (folder / REPORT).read_text() == "<html>"


def test_every_tuned_field_is_written_also_the_false_ones(tmp_path):
    folder = output_folder(tmp_path / "out")
    written(folder)
    fields = arguments(folder)
    assert (fields["bf16"], fields["fp16"], fields["tf32"]) == (False, False, False)
    name = "activation_checkpointing" if "activation_checkpointing" in fields else "gradient_checkpointing"
    assert fields[name] is False
    assert fields["optim"] == "adamw_torch_fused"
    assert fields["use_cpu"] is True
    assert (fields["per_device_train_batch_size"], fields["gradient_accumulation_steps"]) == (8, 1)
    assert fields["per_device_eval_batch_size"] == 8
    assert "prediction_loss_only" not in fields, "it would leave out a script's own metrics"


def test_full_precision_is_written_as_a_word(tmp_path):
    """YAML reads a bare ``no`` as false, and a missing key would take the launcher's own default."""
    folder = output_folder(tmp_path / "out")
    written(folder)
    assert "mixed_precision: 'no'" in (folder / YAML).read_text()
    assert settings_of(folder)["mixed_precision"] == "no"
    written(folder, precision="bf16")
    assert settings_of(folder)["mixed_precision"] == "bf16"
    assert arguments(folder)["bf16"] is True


def corrupt_yaml(folder, **changes):
    (folder / YAML).write_text(yaml.safe_dump({**settings_of(folder), **changes}))


def corrupt_arguments(folder, **changes):
    (folder / ARGUMENTS).write_text(json.dumps({**arguments(folder), **changes}))


CORRUPTIONS = {
    "an unknown key": lambda folder: corrupt_yaml(folder, micro_batch=2),
    "an unknown key below": lambda folder: corrupt_yaml(folder, fsdp_config={"fsdp_verison": 2}),
    "an unknown key of deepspeed": lambda folder: corrupt_yaml(folder, deepspeed_config={"zero_stages": 2}),
    "no mapping": lambda folder: (folder / YAML).write_text("- 1\n"),
    "no YAML": lambda folder: (folder / YAML).write_text("a: [1\n"),
    "a cut off YAML": lambda folder: (folder / YAML).write_text(""),
    "a missing YAML": lambda folder: (folder / YAML).unlink(),
    "an unknown argument": lambda folder: corrupt_arguments(folder, micro_batch=2),
    "a strange value": lambda folder: corrupt_arguments(folder, optim="adamw_torch_fuzed"),
    "no list": lambda folder: (folder / ARGUMENTS).write_text("[1]"),
    "no JSON": lambda folder: (folder / ARGUMENTS).write_text('{"bf16": '),
    "missing arguments": lambda folder: (folder / ARGUMENTS).unlink(),
    "what comes back changed": lambda folder: corrupt_arguments(folder, report_to="none"),
}


@pytest.mark.parametrize("spoil", CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_a_spoiled_file_is_refused(tmp_path, spoil):
    folder = output_folder(tmp_path / "out")
    written(folder)
    check_files(folder)
    spoil(folder)
    with pytest.raises(EmissionError) as caught:
        check_files(folder)
    assert YAML in caught.value.message or ARGUMENTS in caught.value.message or "refused" in caught.value.message


def test_a_spoiled_document_is_refused(tmp_path):
    folder = output_folder(tmp_path / "out")
    written(folder)
    (folder / DOCUMENT_FILE).write_text("{}")
    with pytest.raises(EmissionError, match="format None"):
        check_files(folder)


def test_nothing_is_half_written_where_a_file_is_refused(tmp_path):
    folder = output_folder(tmp_path / "out")

    def refuse(aside):
        assert sorted(path.name for path in aside.iterdir()) == sorted([*NAMES, MODEL_FOLDER])
        raise EmissionError("refused")

    with pytest.raises(EmissionError):
        written(folder, check=refuse)
    assert not any((folder / name).exists() for name in NAMES)
    written(folder)
    before = held(folder)
    with pytest.raises(EmissionError):
        written(folder, check=refuse, precision="bf16")
    assert held(folder) == before
    written(folder, precision="bf16")
    assert held(folder) != before
    assert not (folder / ASIDE).exists()


def test_what_is_left_of_an_earlier_try_does_not_matter(tmp_path):
    folder = output_folder(tmp_path / "out")
    (folder / ASIDE / MODEL_FOLDER).mkdir(parents=True)
    (folder / ASIDE / "torn").write_text("{")
    written(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*NAMES, MODEL_FOLDER])


def test_a_folder_that_cant_be_written_is_the_machines_fault(tmp_path):
    with pytest.raises(MachineError):
        written(tmp_path / "none")


# --- the document ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("facts", "wanted"), PLANS.values(), ids=PLANS)
def test_a_document_comes_back_as_it_was_and_is_valid(tmp_path, facts, wanted):
    found = a_document(a_plan(facts, **wanted), facts)
    text = dump_json(DOCUMENT, found)
    (tmp_path / DOCUMENT_FILE).write_text(text)
    back = read_document(tmp_path)
    assert back == found
    assert dump_json(DOCUMENT, back) == text
    assert back.facts == facts
    jsonschema.validate(json.loads(text), json.loads(SCHEMA.read_text()))


def test_the_schema_is_the_one_that_ships():
    """Written anew where the document changes: ``autofit schema > autofit/output/autofit.schema.json``."""
    assert json.loads(SCHEMA.read_text("utf-8")) == json.loads(json.dumps(document_schema()))
    jsonschema.Draft202012Validator.check_schema(document_schema())


def test_the_schema_says_no():
    good = json.loads(dump_json(DOCUMENT, a_document(a_plan(CPU), CPU)))
    schema = json.loads(SCHEMA.read_text())
    for change in (
        {"format": 1},
        {"plan": {"micro_batch": 1.5}},
        {"promise": {}},
        {"trials": [{}]},
        {"reason": None},
        {"more": 1},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**good, **change}, schema)


BAD_DOCUMENTS = {
    "none": (None, "holds no autofit.json"),
    "empty": ("", "can't be read"),
    "null": ("null", "can't be read: it holds null"),
    "torn": ('{"format": 2, "plan"', "can't be read"),
    "binary": ("\x00\x01", "can't be read"),
    "deep": ("[" * 100_000, "can't be read"),
    "a list": ("[]", "can't be read: it holds []"),
    "of tomorrow": ('{"format": 3}', "format 3, this version reads 2"),
    "a word for a format": ('{"format": "1"}', "format '1'"),
    "without a plan": ('{"format": 2}', "is not valid at"),
}


@pytest.mark.parametrize("place", ["", "model", "promise", "workload"])
def test_a_document_with_an_unknown_key_is_refused(tmp_path, place):
    good = json.loads(dump_json(DOCUMENT, a_document(a_plan(CPU), CPU)))
    (good[place] if place else good)["brought"] = 1
    (tmp_path / DOCUMENT_FILE).write_text(json.dumps(good))
    with pytest.raises(InputError, match="brought is not a known key"):
        read_document(tmp_path)


@pytest.mark.parametrize(("text", "words"), BAD_DOCUMENTS.values(), ids=BAD_DOCUMENTS)
def test_a_document_that_is_none_is_refused_in_words(tmp_path, text, words):
    if text is not None:
        (tmp_path / DOCUMENT_FILE).write_text(text)
    with pytest.raises(InputError) as caught:
        autofit.load(tmp_path)
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_a_document_that_was_edited_is_refused_where_it_was(tmp_path):
    good = json.loads(dump_json(DOCUMENT, a_document(a_plan(CPU), CPU)))
    good["trials"][1]["outcome"]["step_seconds"] = -1
    (tmp_path / DOCUMENT_FILE).write_text(json.dumps(good))
    with pytest.raises(InputError, match=r"not valid at trials\.1\.outcome.*step_seconds"):
        read_document(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "huge"])
def test_what_may_have_no_end_is_not_read(tmp_path, kind):
    path = tmp_path / DOCUMENT_FILE
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(InputError, match=r"it is no file|has 1,099,511,627,776 bytes"):
        read_document(tmp_path)


def test_a_config_that_was_changed_since_is_not_what_was_tuned(tmp_path, monkeypatch):
    folder = output_folder(tmp_path / "out")
    monkeypatch.setattr(result, "emit", lambda document, folder, report, _: emit(document, folder, report, check_files))
    found = result.write_result(a_document(a_plan(CPU), CPU), folder, server=None).document
    assert found == read_document(folder)
    check_config(found, folder)
    (folder / MODEL_FOLDER / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(InputError, match="its files were changed since"):
        autofit.load(folder, any_hardware=True).model()
    check_config(replace(found, config_sha256=None), folder)  # an older version's


def test_a_plan_of_another_version_is_refused(tmp_path):
    found = a_document(a_plan(CPU), CPU)
    less = {name: value for name, value in found.plan.items() if name != "offload"}
    for plan in (Plan(less), Plan({**found.plan, "telepathy": "on"})):
        (tmp_path / DOCUMENT_FILE).write_text(dump_json(DOCUMENT, replace(found, plan=plan)))
        with pytest.raises(InputError, match="not a plan of this version") as caught:
            autofit.load(tmp_path)
        assert "tune again" in caught.value.hint


def test_a_value_that_no_technique_knows_names_the_file(tmp_path):
    found = a_document(a_plan(CPU), CPU)
    other = replace(found, plan=found.plan.replaced(precision="int3"))
    (tmp_path / DOCUMENT_FILE).write_text(dump_json(DOCUMENT, other))
    with pytest.raises(InputError, match=r"autofit\.json is not valid: precision has no value 'int3'") as caught:
        read_document(tmp_path)
    assert "fp32, bf16" in caught.value.hint


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=100) | st.from_regex(r'\{"format": 2(, "plan": \{("[a-z]": [0-9]+)?\})?\}').map(str.encode))
def test_any_file_is_a_document_or_an_input_error(tmp_path, content):
    (tmp_path / DOCUMENT_FILE).write_bytes(content)
    with pytest.raises(InputError):
        read_document(tmp_path)


def test_other_versions_are_warned_of_where_they_matter(tmp_path):
    folder = output_folder(tmp_path / "out")
    found = a_document(a_plan(CPU), CPU)
    for versions, warned in (
        ({**CPU.packages, "torch": "1.0.0"}, "torch 1.0.0 ->"),
        ({**CPU.packages, "no-such-package": "3.1"}, "no-such-package 3.1 -> none"),
        ({**CPU.packages, "torch": CPU.packages["torch"] + ".post9"}, None),
    ):
        (folder / DOCUMENT_FILE).write_text(dump_json(DOCUMENT, replace(found, versions=versions)))
        if warned:
            with pytest.warns(UserWarning, match=warned):
                autofit.load(folder)
        else:
            autofit.load(folder)


# --- the arguments in Python ----------------------------------------------------------------------------------------


def test_tuned_arguments_are_not_given_twice(tmp_path):
    folder = output_folder(tmp_path / "out")
    written(folder, optimizer="sgd", precision="bf16")
    setup = autofit.load(folder, any_hardware=True)
    args = setup.training_arguments(output_dir=str(tmp_path / "run"), learning_rate=0.1, report_to="none")
    assert args.learning_rate == 0.1
    assert args.per_device_train_batch_size == 8
    assert (args.optim, args.optim_args, args.bf16) == ("sgd", "momentum=0.9", True)
    with pytest.raises(InputError, match="bf16, optim: set by autofit") as caught:
        setup.training_arguments(bf16=False, optim="adamw_torch", learning_rate=0.1)
    assert "--fix" in caught.value.hint
    for former in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):  # heeded by transformers in no case
        with pytest.raises(InputError, match=f"{former}: set by autofit"):
            setup.training_arguments(**{former: True})


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("gradient_accumulation_steps", 2),
        ("mixed_precision", "bf16"),
        ("gradient_accumulation_plugin", GradientAccumulationPlugin(num_steps=2)),
        ("gradient_accumulation_plugin", GradientAccumulationPlugin(num_steps=4, sync_each_batch=True)),
        ("cpu", False),
        ("dynamo_backend", "inductor"),
        ("fsdp_plugin", FullyShardedDataParallelPlugin(fsdp_version=2)),
        ("dataloader_config", DataLoaderConfiguration(split_batches=True)),
    ],
)
def test_what_the_plan_says_of_an_accelerator_is_not_given_twice(tmp_path, name, given):
    folder = output_folder(tmp_path / "out")
    written(folder, accumulation=4)
    with pytest.raises(InputError, match=rf"{name}.*: set by autofit"):
        autofit.load(folder, any_hardware=True).accelerator(**{name: given})


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_plans_precision_is_not_switched_off_beside_it(tmp_path, precision):
    folder = output_folder(tmp_path / "out")
    written(folder, precision=precision)
    setup = autofit.load(folder, any_hardware=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    if precision == "bf16":
        with pytest.raises(InputError, match="switches off the precision that is set by autofit"):
            setup.accelerator(kwargs_handlers=[AutocastKwargs(enabled=False)])
    setup.accelerator(kwargs_handlers=[AutocastKwargs(enabled=precision == "bf16", cache_enabled=False)])
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("auto_find_batch_size", True),
        ("fsdp", "full_shard"),
        ("deepspeed", {"zero_optimization": {"stage": 2}}),
        ("accelerator_config", {"gradient_accumulation_kwargs": {"num_steps": 4}}),
        ("accelerator_config", AcceleratorConfig(split_batches=True)),
    ],
)
def test_arguments_that_train_by_another_plan_are_not_given(tmp_path, name, given):
    folder = output_folder(tmp_path / "out")
    written(folder)
    setup = autofit.load(folder, any_hardware=True)
    with pytest.raises(InputError, match=rf"{name}.*: set by autofit"):
        setup.training_arguments(output_dir=str(tmp_path / "run"), **{name: given})


def test_what_no_plan_decides_is_given_in_the_same_settings(tmp_path):
    folder = output_folder(tmp_path / "out")
    written(folder)
    setup = autofit.load(folder, any_hardware=True)
    args = setup.training_arguments(output_dir=str(tmp_path / "run"), accelerator_config={"even_batches": False})
    assert args.accelerator_config.even_batches is False
    with like_a_process_of_its_own():
        given = DataLoaderConfiguration(even_batches=False)
        assert setup.accelerator(dataloader_config=given, log_with=None).even_batches is False


def test_what_no_argument_is_called_is_told_with_the_nearest_name(tmp_path):
    folder = output_folder(tmp_path / "out")
    written(folder)
    setup = autofit.load(folder, any_hardware=True)
    for call in (setup.training_arguments, functools.partial(setup.optimizer, torch.nn.Linear(1, 1))):
        with pytest.raises(InputError, match="TrainingArguments has no argument learning_rat") as caught:
            call(learning_rat=0.1)
        assert caught.value.hint == "did you mean learning_rate?"
    with pytest.raises(InputError, match="TrainingArguments has no argument lr") as caught:
        setup.training_arguments(lr=0.1)
    assert caught.value.hint == "help(TrainingArguments) tells its arguments"
    with pytest.raises(InputError, match="Accelerator has no argument logwith") as caught:
        setup.accelerator(logwith="wandb")
    assert caught.value.hint == "did you mean log_with?"


@pytest.mark.parametrize("call", [Setup.optimizer, Setup.watch])
def test_what_is_no_model_is_told(tmp_path, call):
    folder = output_folder(tmp_path / "out")
    written(folder)
    with pytest.raises(InputError, match=r"setup\.(optimizer|watch) was given a str") as caught:
        call(autofit.load(folder, any_hardware=True), "Qwen/Qwen2.5-0.5B")
    assert "setup.model" in caught.value.hint


def test_the_environment_does_not_stand_over_the_plans_accumulation(tmp_path, monkeypatch):
    folder = output_folder(tmp_path / "out")
    written(folder, accumulation=4)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    with like_a_process_of_its_own():
        assert autofit.load(folder, any_hardware=True).accelerator().gradient_accumulation_steps == 4


@pytest.mark.parametrize(
    "train", [Setup.model, Setup.accelerator, lambda setup: setup.training_arguments(output_dir="run")]
)
def test_an_answer_is_read_anywhere_and_trained_on_its_own_number_of_processes(tmp_path, monkeypatch, train):
    folder = output_folder(tmp_path / "out")
    written(folder)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="an optimizer step would take 16 rows, not 8"):
        setup = autofit.load(folder, any_hardware=True)
    assert setup.plan
    with pytest.raises(InputError, match="an optimizer step would take 16 rows, not 8"):
        train(setup)


def test_who_loads_an_answer_for_another_world_is_told_of_it(tmp_path, monkeypatch):
    folder = output_folder(tmp_path / "out")
    written(folder)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        autofit.load(folder)
        assert not told
        monkeypatch.setenv("WORLD_SIZE", "2")
        autofit.load(folder)
    (words,) = (str(one.message) for one in told)
    assert words.startswith("a training by this process runs on 2 processes, and the answer in ")
    assert "is for 1 process: an optimizer step would take 16 rows, not 8" in words


def test_a_folder_without_weights_is_no_pretrained_model(tmp_path):
    folder = output_folder(tmp_path / "out")
    written(folder)
    setup = autofit.load(folder, any_hardware=True)
    for source in (folder / MODEL_FOLDER, "./no-such-model"):
        with pytest.raises(ModelError, match="can't be loaded") as caught:
            setup.model(source)
        assert "trained weights" in caught.value.hint
    with pytest.raises(ModelError, match=r"config.json' is a file, not a folder with trained weights"):
        setup.model(folder / MODEL_FOLDER / "config.json")


def test_a_model_or_nothing_is_no_place_of_weights(tmp_path):
    setup = loaded(tmp_path)
    with pytest.raises(InputError, match=r"setup\.model was given a LlamaForCausalLM") as caught:
        setup.model(setup.model())
    assert "trained weights" in caught.value.hint


def test_a_folder_that_is_gone_since_it_was_read_is_told(tmp_path):
    setup = loaded(tmp_path)
    setup.model().save_pretrained(tmp_path / "trained")
    shutil.rmtree(setup.folder)
    for source in (None, tmp_path / "trained"):
        with pytest.raises(InputError, match=r"has no config\.json any more"):
            setup.model(source)


def test_weights_of_other_shapes_are_told_with_the_argument_that_learns_them_anew(tmp_path):
    setup = loaded(tmp_path)
    setup.model().save_pretrained(tmp_path / "trained")
    given = {"vocab_size": 96}
    with pytest.raises(ModelError, match="some of its weights have other shapes") as caught:
        setup.model(tmp_path / "trained", **given)
    assert "ignore_mismatched_sizes=True" in caught.value.hint
    assert setup.model(tmp_path / "trained", ignore_mismatched_sizes=True, **given).config.vocab_size == 96


def test_weights_that_are_broken_are_told(tmp_path):
    folder = output_folder(tmp_path / "out")
    written(folder)
    setup = autofit.load(folder, any_hardware=True)
    broken, bare = tmp_path / "broken", tmp_path / "bare"
    shutil.copytree(folder / MODEL_FOLDER, broken)
    bare.mkdir()
    for one in (broken, bare):
        (one / "model.safetensors").write_bytes(b"\xff" * 100)
    for source, words in ((broken, "header too large"), (bare, "Unrecognized model")):
        with pytest.raises(ModelError, match=f"can't be loaded: .*{words}") as caught:
            setup.model(source)
        assert "trained weights" in caught.value.hint


def test_weights_of_another_size_than_what_was_tuned_are_told(tmp_path):
    setup = loaded(tmp_path)
    tuned = setup.model()
    for name, grown in (("same", 0), ("larger", 64)):
        config = copy.deepcopy(tuned.config)
        config.intermediate_size += grown
        type(tuned)(config).save_pretrained(tmp_path / name)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        setup.model(tmp_path / "same")
        assert not told
        setup.model(tmp_path / "larger")
    (words,) = (str(one.message) for one in told)
    assert "larger' is another model than " in words
    assert f"(intermediate_size {tuned.config.intermediate_size + 64}, not {tuned.config.intermediate_size})" in words


def test_a_model_is_loaded_with_what_no_plan_sets(tmp_path):
    """``from_pretrained`` takes the classes of one's own data; ``setup.model`` took none."""
    setup = loaded(tmp_path)
    setup.model().save_pretrained(tmp_path / "trained")
    assert setup.model(tmp_path / "trained", id2label={0: "no", 1: "yes", 2: "perhaps"}).config.num_labels == 3
    for others, words in (({"dtype": "auto"}, "dtype: set"), ({"attn_implementation": "eager"}, "attn_impl")):
        with pytest.raises(InputError, match=words):
            setup.model(tmp_path / "trained", **others)
    with pytest.raises(InputError, match="num_labels: for a pretrained model"):
        setup.model(num_labels=3)


def test_the_result_is_copied_without_its_trials(tmp_path):
    folder = output_folder(tmp_path / "out")
    found = written(folder)
    (folder / "trials").mkdir()
    target = result.Result(folder=folder, document=found).save(tmp_path / "else" / "where")
    assert sorted(path.name for path in target.iterdir()) == sorted([*NAMES, MODEL_FOLDER])
    assert held(target) == held(folder)
    assert result.Result(folder=folder, document=found).save(f"{folder}/../{folder.name}").samefile(folder)
    assert held(target) == held(folder), "it was there already"
    shutil.rmtree(folder)
    assert autofit.load(target).plan == found.plan


@pytest.mark.slow
def test_the_launcher_takes_the_yaml_as_it_is(tmp_path):
    folder = output_folder(tmp_path / "out")
    written(folder, precision="bf16")
    script = (
        "import sys; from pathlib import Path; from autofit.training.launch_environment import launch_environment\n"
        "found = launch_environment(Path(sys.argv[1]))\n"
        "print(found['ACCELERATE_MIXED_PRECISION'], found['ACCELERATE_USE_CPU'])"
    )
    command = [sys.executable, "-c", script, str(folder / YAML)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["bf16", "True"]
