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
    "liger": plan(4, precision="bf16", kernels="liger_fused_ce", attention="flash_attention_3"),
    "galore": plan(4, precision="bf16_weights", optimizer="galore_adamw", kernels="liger"),
    "zero3": plan(4, precision="bf16", parallel="zero3", offload="optimizer", adapter="lora:r=16"),
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
    told = "liger_kernel_config, which no flag says" in comments(export(doc, "cli", folder="out"), "cli")
    assert told == (wanted["liger_kernel_config"] is not None)


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
        by_itself = {("parallel", "cli"), ("parallel", "axolotl")}
        if doc.plan[technique] == wanted and (technique, target) not in by_itself:
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


@pytest.mark.parametrize("target", ["sft", "axolotl", "llamafactory"])
def test_what_plain_peft_takes_more_under_autocast_is_told(target):
    told = "turns the inputs of its layers to float32 and back"
    for values, there in (({"precision": "bf16_weights"}, True), ({"precision": "bf16"}, True), ({}, False)):
        assert (told in given(target, adapter="lora:r=8", **values)[1]) == there
    assert told not in given(target, adapter="dora:r=8", precision="bf16")[1]
    assert told not in given(target, adapter="lora:r=8", precision="bf16", quantization="nf4")[1]


def test_an_unknown_target_is_refused():
    with pytest.raises(InputError, match="'axolotls' is not known") as error:
        export(answer("full"), "axolotls", folder="out")
    assert "axolotl" in error.value.hint


def given(target, processes=1, model=None, **values):
    """What is exported of a plan, and what is said with it."""
    one = plan(4, **values)
    doc = document(trials=[(one, measured(51.9, 15.8))], winner=one)
    doc = replace(doc, workload=replace(doc.workload, processes=processes), model=replace(doc.model, **(model or {})))
    found = export(doc, target, folder="out")
    return found.settings, comments(found, target)


def test_axolotl_is_known_to_load_weights_in_16_bits():
    for precision, told in (("bf16", True), ("fp32", False)):
        assert ("loads the float32 weights in bf16" in given("axolotl", precision=precision)[1]) == told
    assert "fails in the first step: PyTorch scales no loss" in given("axolotl", precision="fp16")[1]
    said = given("axolotl", precision="fp16", adapter="lora:r=8")[1]
    assert "in fp16, which is another training" in said
    assert "fails" not in said
    assert "float32 weights" not in given("axolotl", 2, precision="bf16", parallel="zero2")[1], "DeepSpeed has a copy"


def test_axolotl_trains_as_a_trainer_does():
    """Its own: a cosine after a warm-up, kernels for LoRA, 256 batches ready, rows padded to 64 tokens."""
    settings, _ = given("axolotl", adapter="lora:r=8")
    assert (settings["lr_scheduler"], settings["warmup_steps"]) == ("linear", 0)
    assert (settings["dataloader_num_workers"], settings["pad_to_sequence_len"]) == (0, False)
    assert {name: value for name, value in settings.items() if name.endswith("_kernel")} == dict.fromkeys(
        ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), False
    )
    assert "bfloat16 autocast besides" in given("axolotl", precision="bf16_weights")[1]
    assert given("axolotl", optimizer="galore_adamw")[0]["optim_target_modules"] == "all_linear"
    settings, said = given("axolotl", checkpointing="every_2")  # which its transformers knows
    assert settings["gradient_checkpointing_kwargs"]["every_n_layers"] == 2
    assert "n-th layer" not in said


@pytest.mark.parametrize("accumulation", [1, 8])
def test_axolotl_is_known_to_weigh_each_micro_batch_the_same(accumulation):
    """Its trainer turns off what divides by the tokens of all micro-batches of a step."""
    told = "Axolotl weighs each micro-batch the same" in given("axolotl", accumulation=accumulation)[1]
    assert told == (accumulation > 1)
    assert "weighs each micro-batch" not in given("llamafactory", accumulation=accumulation)[1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_llamafactory_is_known_to_refuse_bfloat16_weights_on_a_cpu(device):
    one = plan(4, precision="bf16_weights")
    doc = document(trials=[(one, measured(51.9, 15.8))], winner=one)
    doc = replace(doc, hardware=replace(doc.hardware, device=device))
    said = comments(export(doc, "llamafactory", folder="out"), "llamafactory")
    assert ("refuses bfloat16 weights (pure_bf16) on a CPU" in said) == (device == "cpu")


@pytest.mark.parametrize(("kernels", "count"), [("liger", 5), ("liger_fused_ce", 1)])
def test_ligers_kernels_are_asked_for_by_name(kernels, count):
    settings, said = given("axolotl", kernels=kernels)
    assert settings["plugins"] == ["axolotl.integrations.liger.LigerPlugin"]
    asked = [name for name in settings if name.startswith("liger_")]
    assert ("liger_fused_linear_cross_entropy" in asked, len(asked), "Liger" in said) == (True, count, False)
    settings, said = given("llamafactory", kernels=kernels)
    assert settings["enable_liger_kernel"] is True
    assert ("takes all of Liger's kernels" in said) == (kernels == "liger_fused_ce")
    said = given("llamafactory", kernels=kernels, model={"model_type": "olmo3"})[1]
    assert "LLaMA-Factory has no kernels of Liger for olmo3" in said


def test_trls_own_loss_is_told_and_no_other_is_asked_for_beside_it():
    for kernels in ("none", "chunked_ce", "liger", "liger_fused_ce"):
        settings, said = given("sft", kernels=kernels)
        assert "SFTTrainer takes the loss itself" in said
        assert "setup.model" not in said
        assert settings["use_liger_kernel"] == (kernels == "liger")
        assert settings["liger_kernel_config"] is None
        assert (settings.get("loss_type") == "nll") == kernels.endswith("_ce")


def test_trl_loads_weights_as_the_plan_has_them():
    for precision, dtype in (("bf16", "float32"), ("bf16_weights", "bfloat16")):
        assert given("sft", precision=precision)[0]["model_init_kwargs"] == {"dtype": dtype}
    settings, said = given("sft", precision="bf16", adapter="lora:r=8", quantization="nf4")
    assert "SFTTrainer turns the adapter's weights to bfloat16" in said
    assert "model_init_kwargs" not in settings, "setup.model loads it"


def test_a_script_is_told_to_load_float32_weights():
    """By itself ``from_pretrained`` takes the checkpoint's dtype."""
    for target in ("python", "cli"):
        assert "dtype='float32'" in given(target, precision="bf16")[1]
        assert "dtype='float32'" not in given(target, precision="bf16_weights")[1]
        assert "dtype='float32'" not in given(target, precision="bf16", kernels="chunked_ce")[1], "setup.model does"


def test_llamafactory_is_told_the_attention_and_its_other_weights_are_told():
    assert given("llamafactory", model={"model_type": "gemma2"})[0]["flash_attn"] == "sdpa"
    settings, said = given("llamafactory", precision="bf16", attention="flash_attention_3")
    assert "flash_attn" not in settings
    assert "attention=flash_attention_3: there is no setting for it" in said
    frozen = "keeps the frozen weights in the dtype that their files say"
    for values, told in (({}, False), ({"adapter": "lora:r=8"}, True)):
        assert (frozen in given("llamafactory", precision="bf16", **values)[1]) == told
        assert (frozen in given("llamafactory", precision="bf16_weights", **values)[1]) is False
    assert "these have to say bfloat16" in given("llamafactory", precision="bf16_weights")[1]
    nf4 = {"adapter": "lora:r=8", "quantization": "nf4"}
    for target, words in (("axolotl", "the 16 bits that Axolotl"), ("llamafactory", "the dtype that its files say")):
        assert words in given(target, precision="bf16", **nf4)[1]


@pytest.mark.parametrize("target", ["axolotl", "llamafactory"])
@pytest.mark.parametrize("way", [{"adapter": "ia3"}, {"adapter": "lora:r=8", "quantization": "int8_torchao"}])
def test_a_way_of_training_that_a_project_has_no_setting_for_is_refused(target, way):
    """It would train all weights, or load them whole."""
    with pytest.raises(InputError, match=r"it has no setting for .*, and would train otherwise") as error:
        given(target, **way)
    assert error.value.hint == "--to sft"
    assert "setup.model" in given("sft", **way)[1]


@pytest.mark.parametrize("target", ["axolotl", "llamafactory"])
def test_experts_without_an_adapter_are_told(target):
    model = {"lora_on_experts": True}
    assert "experts may get no adapter" in given(target, adapter="lora:r=8", model=model)[1]
    assert "experts may" not in given(target, adapter="lora:r=8:targets=q_proj", model=model)[1]
    assert "experts may" not in given(target, adapter="lora:r=8")[1]


def test_axolotl_is_given_fsdp_by_its_own_settings():
    """By the YAML alone it loads the whole model onto each card."""
    settings, said = given("axolotl", 8, parallel="hsdp:2x4")
    assert (settings["fsdp_version"], settings["dp_replicate_size"], settings["dp_shard_size"]) == (2, 2, 4)
    assert settings["fsdp_config"] == {
        "offload_params": False,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": "Qwen2DecoderLayer",
        "state_dict_type": "FULL_STATE_DICT",
        "cpu_ram_efficient_loading": True,
        "activation_checkpointing": False,
    }
    assert "accelerate.yaml" not in said
    assert "the number of processes, 8" in said
    assert "each process weighs its tokens by themselves" in said
    quantized = given("axolotl", 2, parallel="fsdp", adapter="lora:r=8", quantization="nf4")[0]
    assert quantized["fsdp_config"]["cpu_ram_efficient_loading"] is False, "it refuses to load 4 bits so"
    assert "--launcher torchrun" in given("axolotl", parallel="fsdp", offload="parameters")[1]
    said = given("llamafactory", 2, parallel="fsdp")[1]
    assert "accelerate.yaml -m llamafactory.launcher CONFIG" in said
    assert "set fsdp_cpu_ram_efficient_loading: true in that file" in said


@pytest.mark.parametrize("target", ["axolotl", "llamafactory"])
def test_zero_is_given_as_deepspeeds_own_config(target):
    """By the YAML alone both load a model before they know of ZeRO-3, and Axolotl fails."""
    settings, said = given(target, 2, precision="bf16", parallel="zero3", offload="optimizer")
    assert settings["deepspeed"] == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "train_batch_size": 64,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "none"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    assert "accelerate.yaml" not in said
    assert ("FORCE_TORCHRUN=1" in said) == (target == "llamafactory")


def test_the_number_of_processes_is_told_where_a_launcher_takes_all_cards():
    for target in ("axolotl", "llamafactory", "sft"):
        assert "CUDA_VISIBLE_DEVICES=0 shows it one" in given(target)[1]
        assert "CUDA_VISIBLE_DEVICES" not in given(target, 2, parallel="ddp")[1]
    assert "accelerate.yaml -m axolotl.cli.train CONFIG" in given("axolotl", 2, parallel="ddp")[1]


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
    carried = value == "pad" or (value == "pad_to_multiple" and target in {"sft", "axolotl"})
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
    assert sft.lacking[0] == by_yaml
    line, same, _weights = python.lacking
    assert (line.endswith("context parallelism reads no attention mask"), same) == (True, by_yaml)
