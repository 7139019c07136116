"""What is exported is taken by the library that reads it, and what is not carried is said."""

import ast
import shlex
from dataclasses import replace

import pytest
import yaml
from transformers import HfArgumentParser, TrainingArguments

from autofit.contract.script import Script
from autofit.machine.packages import installed
from autofit.output.exports.export import TARGETS, comments, export
from autofit.registry import recipe_of
from autofit.system.errors import InputError
from tests.output.test_report import document, measured, plan

PLANS = {
    "full": plan(4, precision="bf16", checkpointing="full"),
    "every_2": plan(2, precision="tf32", checkpointing="every_2"),
    "8bit": plan(8, precision="bf16", optimizer="adamw_8bit", kernels="chunked_ce"),
    "lora": plan(8, precision="bf16_weights", adapter="lora:r=8:alpha=8:targets=q_proj+v_proj"),
    "qlora": plan(8, precision="bf16", adapter="lora:r=16", quantization="nf4", checkpointing="full"),
    "offload": plan(1, precision="bf16", parallel="fsdp", offload="parameters", attention="sdpa"),
}


def answer(name):
    doc = document(trials=[(PLANS[name], measured(51.9, 15.8))], winner=PLANS[name])
    return replace(doc, versions=installed())  # whose arguments the libraries here take


@pytest.mark.parametrize("name", PLANS)
def test_python_and_flags_come_back_as_the_emitted_arguments(name):
    doc = answer(name)
    wanted = dict(recipe_of(doc.plan, doc.facts).emission.training_args)
    call = ast.parse(export(doc, "python", folder="out").text).body[-1].value
    assert {word.arg: ast.literal_eval(word.value) for word in call.keywords} == {"output_dir": "run", **wanted}
    words = shlex.split(export(doc, "cli", folder="out").text.replace("\\\n", ""))
    assert words[:5] == ["accelerate", "launch", "--config_file", "out/accelerate.yaml", "your_script.py"]
    held = [word for word in words[5:] if not word.startswith(("--bf16", "--tf32", "--use_cpu"))]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir=run", "--use_cpu=true", *held]
    )
    assert args.per_device_train_batch_size == doc.plan["micro_batch"]
    assert args.gradient_accumulation_steps == doc.plan["accumulation"]
    assert getattr(args.optim, "value", args.optim) == wanted["optim"]


def test_a_folder_that_begins_with_a_dash_is_no_option():
    assert "--config_file ./-x/accelerate.yaml" in export(answer(next(iter(PLANS))), "cli", folder="-x").text


@pytest.mark.parametrize("name", PLANS)
def test_trl_takes_what_is_exported_for_it(name):
    trl = pytest.importorskip("trl")
    found = export(answer(name), "sft", folder="out")
    given = {**found.settings, "bf16": False, "tf32": False, "use_cpu": True}  # what a CPU refuses
    args = trl.SFTConfig(**given)
    for field, value in given.items():
        came = getattr(args, field)
        if field == "accelerator_config":
            came = {name: getattr(came, name) for name in value}
        assert getattr(came, "value", came) == value, field


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PLANS)
def test_every_value_is_carried_or_said_not_to_be(name, target):
    doc = answer(name)
    found = export(doc, target, folder="out")
    for technique, wanted in (("kernels", "chunked_ce"), ("parallel", "fsdp")):
        if doc.plan[technique] == wanted and (technique, target) != ("parallel", "cli"):
            assert f"{technique}={wanted}" in comments(found, target)
    assert "setup.model" not in comments(found, target) or target in {"python", "cli", "sft"}
    assert "`autofit run` puts it into the script" not in comments(found, target), "there is none"
    if target in {"axolotl", "llamafactory"}:
        assert yaml.safe_load(found.text) == found.settings


def test_an_adapter_is_given_in_each_projects_own_words():
    sft = export(answer("lora"), "sft", folder="out")
    assert "'target_modules': " not in sft.text
    assert "target_modules=['q_proj', 'v_proj']" in sft.text
    assert sft.settings["model_init_kwargs"] == {"dtype": "bfloat16"}
    axolotl = export(answer("qlora"), "axolotl", folder="out").settings
    assert (axolotl["adapter"], axolotl["load_in_4bit"], axolotl["lora_target_linear"]) == ("qlora", True, True)
    factory = export(answer("qlora"), "llamafactory", folder="out").settings
    assert (factory["finetuning_type"], factory["quantization_bit"], factory["lora_target"]) == ("lora", 4, "all")
    assert factory["disable_gradient_checkpointing"] is False


def test_an_unknown_target_is_refused():
    with pytest.raises(InputError, match="'axolotls' is not known") as error:
        export(answer("full"), "axolotls", folder="out")
    assert "axolotl" in error.value.hint


def test_axolotl_is_known_to_load_weights_in_16_bits():
    for values, told in (({"precision": "bf16"}, True), ({"precision": "fp32"}, False)):
        plan = PLANS["full"].replaced(**values)
        doc = document(trials=[(plan, measured(51.9, 15.8))], winner=plan)
        assert ("float32 weights: Axolotl" in comments(export(doc, "axolotl", folder="out"), "axolotl")) == told


def test_flags_stand_behind_a_scripts_own_arguments():
    doc = answer("full")
    script = Script(
        path="train.py", arguments=("--data", "a b"), sha256="", trainer="Trainer", micro_batch=4, accumulation=1
    )
    doc = replace(doc, workload=replace(doc.workload, script=script))
    found = export(doc, "cli", folder="out")
    assert "`autofit run out train.py -- --data 'a b'` trains any" in comments(found, "cli")
    words = shlex.split(found.text.replace("\\\n", ""))
    assert words[3:7] == ["out/accelerate.yaml", "train.py", "--data", "a b"]
    assert all(word.startswith("--") for word in words[7:])
    loop = replace(doc, workload=replace(doc.workload, script=replace(script, trainer="")))
    with pytest.raises(InputError, match="plain loop, which reads no TrainingArguments") as error:
        export(loop, "cli", folder="out")
    assert "`autofit run out train.py -- --data 'a b'`" in error.value.hint
    assert export(loop, "python", folder="out").settings


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("value", ["pad", "pad_to_multiple", "padding_free"])
def test_what_run_alone_puts_into_a_script_is_said_not_to_be_carried(target, value):
    doc = answer("full")
    script = Script(
        path="train.py",
        sha256="",
        trainer="Trainer",
        micro_batch=4,
        accumulation=1,
        longest=90,
        mean_length=40.0,
        longest_places=(3,),
        tokens_a_row=20.0,
    )
    doc = replace(doc, workload=replace(doc.workload, script=script), plan=doc.plan.replaced(batching=value))
    found = export(doc, target, folder="out")
    carried = value == "pad" or (value, target) == ("pad_to_multiple", "sft")
    assert any(one.startswith(f"batching={value}: `autofit run`") for one in found.lacking) is not carried
    assert not any(one.startswith("micro_batch") for one in found.lacking)


@pytest.mark.parametrize("target", ["sft", "axolotl", "llamafactory"])
def test_a_scripts_name_is_no_model(target):
    doc = answer("full")
    script = Script(path="train.py", sha256="", trainer="Trainer", micro_batch=4, accumulation=1, adapter="lora of 8")
    doc = replace(doc, workload=replace(doc.workload, script=script), model=replace(doc.model, name="train.py"))
    if target != "sft":
        with pytest.raises(InputError, match=r"on its model itself \(lora of 8\), without which all weights would be"):
            export(doc, target, folder="out")
        doc = replace(doc, workload=replace(doc.workload, script=replace(script, adapter=None)))
    found = export(doc, target, folder="out")
    assert "what train.py does by itself" in comments(found, target)
    assert ("with an adapter (lora of 8)" in comments(found, target)) == (target == "sft")
    assert "train.py" not in str(found.settings)
    if target == "sft":  # rows that were not seen may be longer
        assert "max_length" not in found.settings
        assert f"its longest row, as tuned, has {doc.workload.seq_len} tokens" in comments(found, target)
    doc = replace(doc, model=replace(doc.model, architecture="BertForSequenceClassification"))
    with pytest.raises(InputError, match="and the script of this answer a BertForSequenceClassification"):
        export(doc, target, folder="out")
    assert export(doc, "python", folder="out").settings


@pytest.mark.parametrize(("undivided", "own", "told"), [(True, 2, True), (True, 8, False), (False, 2, False)])
def test_a_loss_that_nobody_divides_is_told_where_only_run_keeps_its_scale(undivided, own, told):
    doc = answer("full")  # accumulates 8 micro-batches
    script = Script(
        path="t.py", sha256="", trainer="Trainer", micro_batch=32 // own, accumulation=own, undivided=undivided
    )
    doc = replace(doc, workload=replace(doc.workload, script=script))
    for target in ("python", "cli"):
        words = " ".join(export(doc, target, folder="out").lacking)
        assert ("the scale of the gradients" in words) is told
        assert ("multiply the loss by 0.25, or use `autofit run`" in words) is told


def test_what_context_parallelism_asks_of_rows_is_said():
    """It reads no mask, and is launched by a YAML."""
    one = plan(4, precision="bf16", parallel="cp2xfsdp1")
    doc = document(trials=[(one, measured(51.9, 15.8))], winner=one)
    doc = replace(doc, workload=replace(doc.workload, processes=2))
    sft, python = (export(doc, target, folder="out") for target in ("sft", "python"))
    assert sft.settings["pad_to_multiple_of"] == 4
    by_yaml = "parallel=cp2xfsdp1: launch by `accelerate launch --config_file out/accelerate.yaml`"
    assert sft.lacking == (by_yaml,)
    line, same = python.lacking
    assert (line.endswith("context parallelism reads no attention mask"), same) == (True, by_yaml)
