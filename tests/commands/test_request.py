"""The question: rows that a model can't be run on, and what is said of a model that is not what one would expect."""

import dataclasses
import sys

import pytest
import torch
from pydantic import TypeAdapter
from transformers import AutoConfig, AutoModelForCausalLM

import autofit
from autofit.commands.facts import ceiling, lacking_kernels, read_facts, remarks, row_length, workload
from autofit.commands.request import Request, Search, check_request, keep_request, started_before
from autofit.contract.facts import Model
from autofit.machine.packages import installed
from autofit.output.document import MODEL_FOLDER, REQUEST
from autofit.system.errors import InputError, ModelError
from autofit.training.tasks.choose import describe_model
from tests.support.synthetic import cpu_facts
from tests.support.tiny import write_config

MODEL = cpu_facts().model
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}
LEARNED = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 40, "n_positions": 24},
    "opt": {**SMALL, "word_embed_proj_dim": 16, "ffn_dim": 16, "max_position_embeddings": 24},
    "bert": {**SMALL, "intermediate_size": 16, "max_position_embeddings": 24},
    "roberta": {**SMALL, "intermediate_size": 16, "max_position_embeddings": 26, "is_decoder": True, "pad_token_id": 1},
}


@pytest.mark.parametrize("name", LEARNED)
def test_the_longest_row_of_learned_positions_is_known(tmp_path, name):
    folder = write_config(tmp_path, {"model_type": name, "pad_token_id": None, **LEARNED[name]}, **LEARNED[name])
    found = describe_model(name, folder, trust_remote_code=False)
    assert found["position_rows"] == 24
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    ids = torch.full((1, 24), 5)
    assert model(input_ids=ids).logits.shape[:2] == (1, 24)
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, 25), 5))


@pytest.mark.parametrize("name", ["llama", "bloom", "xglm", "xlnet"])
def test_positions_that_are_computed_have_no_end(tmp_path, name):
    sizes = {"d_model": 16, "n_layer": 1, "n_head": 2, "num_layers": 1, "attention_heads": 2, "ffn_dim": 16}
    folder = write_config(tmp_path, {"model_type": name}, **{**SMALL, "intermediate_size": 16, **sizes})
    found = describe_model(name, folder, trust_remote_code=False)
    assert found["position_rows"] is None
    assert found["max_positions"] is None or found["max_positions"] > 0


def test_rows_that_a_model_can_not_be_run_on_are_refused():
    learned = dataclasses.replace(MODEL, position_rows=512, max_positions=514)
    assert row_length(None, learned) == learned.usual_seq_len == 512
    assert row_length(512, learned) == 512
    assert row_length(16, learned) == 16
    with pytest.raises(InputError, match=r"--seq-len 513: .* for rows of 512 tokens") as caught:
        row_length(513, learned)
    assert caught.value.hint == "--seq-len 512 or less"
    assert row_length(9999, MODEL) == 9999, "positions that are computed go on"
    assert remarks(9999, dataclasses.replace(MODEL, named=(MODEL.architecture,)), "cuda") == [
        f"rows of 9999 tokens are longer than the {MODEL.max_positions} the model was made for"
    ]


def test_a_model_of_another_task_is_said():
    known = dataclasses.replace(MODEL, architecture="BertLMHeadModel", named=())
    (said,) = remarks(16, known, "cpu")
    trained = "it is trained as BertLMHeadModel, on next-token prediction; --task chooses another"
    assert said == f"the config names no architecture: {trained}"
    assert remarks(16, dataclasses.replace(known, named=("BertLMHeadModel", "Other")), "cpu") == []
    (said,) = remarks(16, dataclasses.replace(known, named=("BertForMaskedLM",)), "cpu")
    assert said == f"the config is of BertForMaskedLM: {trained}"


@pytest.mark.parametrize(
    ("there", "device", "said"),
    [
        ({}, "cuda", "of fla, mamba-ssm: not installed (pip install fla mamba-ssm)"),
        ({"fla": "1.7.0"}, "cuda", "of mamba-ssm: not installed (pip install mamba-ssm); fla: installed, but the "),
        ({"fla": "1.7.0", "mamba-ssm": "0.6.0"}, "cuda", "kernels of fla, mamba-ssm: installed, but the import fails"),
        ({}, "cpu", None),
    ],
)
def test_kernels_that_a_gpu_is_to_run_and_lacks_are_said(monkeypatch, there, device, said):
    monkeypatch.setattr("autofit.commands.facts.installed", lambda: there)
    found = lacking_kernels(dataclasses.replace(MODEL, lacking_kernels=("fla", "mamba-ssm")), device)
    assert len(found) == (said is not None)
    assert all(said in one for one in found)
    assert lacking_kernels(MODEL, device) == []


def test_the_packages_that_a_model_lacks_kernels_of_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr("autofit.machine.model.packages_of", lambda _: {"torch", "there_is_none", "fla"})
    monkeypatch.setitem(sys.modules, "fla", None)  # its import fails
    folder = write_config(tmp_path, {"model_type": "llama", **SMALL})
    found = describe_model("llama", folder, trust_remote_code=False)
    assert found["lacking_kernels"] == ("flash-linear-attention", "there_is_none")


SMALL_BERT = {**SMALL, "intermediate_size": 16, "vocab_size": 64}


def described(folder, config, **options):
    """What the describing process would answer."""
    return describe_model("mine", write_config(folder, config), trust_remote_code=False, **options)


@pytest.mark.parametrize(
    ("model_type", "named", "task", "built"),
    [
        ("bert", ("BertForSequenceClassification",), "sequence-classification", "BertLMHeadModel"),
        ("bert", ("BertForMaskedLM",), "masked-lm", "BertLMHeadModel"),
        ("bert", ("BertForMaskedLM", "BertForPreTraining"), "masked-lm", "BertLMHeadModel"),
        ("llama", ("LlamaForSequenceClassification",), "sequence-classification", "LlamaForCausalLM"),
    ],
)
def test_a_config_is_trained_for_what_it_names_unless_another_task_is_asked_for(
    tmp_path, model_type, named, task, built
):
    config = {"model_type": model_type, **SMALL_BERT, "architectures": list(named)}
    found = described(tmp_path, config)
    assert (found["task"], found["architecture"]) == (task, named[0])
    found = described(tmp_path, config, task="causal-lm")
    assert (found["task"], found["architecture"]) == ("causal-lm", built)


def test_a_config_that_names_models_for_different_tasks_is_refused_unless_one_is_asked_for(tmp_path):
    named = ["BertForSequenceClassification", "BertForMaskedLM"]
    config = {"model_type": "bert", **SMALL_BERT, "architectures": named}
    with pytest.raises(ModelError, match="which are models for different tasks") as caught:
        described(tmp_path, config)
    assert caught.value.hint == "--task says which: sequence-classification, masked-lm"
    assert described(tmp_path, config, task="masked-lm")["architecture"] == "BertForMaskedLM"


@pytest.mark.parametrize(
    ("model_type", "named"),
    [
        ("bert", ()),
        ("bert", ("BertModel",)),
        ("bert", ("BertLMHeadModel",)),
        ("llama", ("LlamaModel",)),
        ("llama", ("LlamaForCausalLM",)),
        ("llama", ("MyLlamaForCausalLM",)),
        ("gpt2", ("GPT2LMHeadModel",)),
    ],
)
def test_a_config_of_a_base_model_or_of_none_is_taken_for_a_causal_language_model(tmp_path, model_type, named):
    found = described(tmp_path, {"model_type": model_type, **SMALL_BERT, "architectures": list(named)})
    assert found["named"] == named


@pytest.mark.parametrize("model_type", ["t5", "vit", "distilbert"])
def test_a_task_that_the_type_has_no_model_for_is_refused(tmp_path, model_type):
    with pytest.raises(ModelError, match=f"no model of the type {model_type} for --task causal-lm") as caught:
        described(tmp_path, {"model_type": model_type}, task="causal-lm")
    assert caught.value.hint.startswith("its tasks: ")


def test_a_config_for_no_known_task_is_refused_by_the_tasks_that_its_type_has(server, tmp_path):
    config = {"model_type": "bert", **SMALL_BERT, "architectures": ["BertForPreTraining"]}
    folder = write_config(tmp_path / "model", config)
    asks = Request(model="mine")
    with pytest.raises(ModelError, match="'mine' is a config of BertForPreTraining, which is a model for no") as caught:
        read_facts(tmp_path, asks, "cpu", server, lambda _: None)
    assert "causal-lm, masked-lm, sequence-classification" in caught.value.hint
    assert folder.is_dir()
    asks = dataclasses.replace(asks, task="causal-lm")
    assert read_facts(tmp_path, asks, "cpu", server, lambda _: None).model.architecture == "BertLMHeadModel"


def test_a_model_is_told_whether_and_by_which_layers_accelerate_can_shard_it(tmp_path):
    config = {"model_type": "bert", **SMALL_BERT}
    found = described(tmp_path, {**config, "architectures": ["BertForSequenceClassification"]})
    assert (found["layer_classes"], found["unsharded"]) == (("BertLayer",), None)
    found = described(tmp_path, {**config, "architectures": ["BertForMaskedLM"]})
    assert found["unsharded"].startswith("its cls.predictions holds a weight of its embeddings, too")


@pytest.mark.parametrize("task", [None, "causal-lm"])
def test_no_task_is_hinted_that_would_be_refused(task, tmp_path):
    """BLIP-2's model for contrastive learning has a loss that no argument of forward() asks for."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    parts = dict.fromkeys(("vision_config", "qformer_config"), small)
    text = {"model_type": "opt", "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 16, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "vocab_size": 64}
    config = {"model_type": "blip-2", "architectures": ["Blip2ForConditionalGeneration"], **parts, "text_config": text}
    with pytest.raises(ModelError, match="is a config of Blip2ForConditionalGeneration") as caught:
        described(tmp_path, config, task=task)
    assert "contrastive" not in caught.value.hint


def test_a_model_whose_forward_the_batch_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ModelError, match="PerceiverForMaskedLM reads 'inputs', which --task masked-lm can't make"):
        described(tmp_path, {"model_type": "perceiver", "architectures": ["PerceiverForMaskedLM"]})


def test_a_length_is_refused_where_the_config_has_one(tmp_path):
    found = described(tmp_path, {"model_type": "vit", "image_size": 32, "architectures": ["ViTForImageClassification"]})
    known = TypeAdapter(Model).validate_python(found)
    assert known.rows_of(known.usual_seq_len) == "images of 32 pixels"
    with pytest.raises(InputError, match=r"--seq-len 64: ViTForImageClassification takes .* 32 x 32 pixels"):
        row_length(64, known)
    assert row_length(32, known) == 32, "as an estimate's line for `autofit tune` says it"


def test_a_length_that_is_a_texts_is_not_told_as_a_clips():
    known = cpu_facts().model
    assert known.rows_of(64) == "rows of 64 tokens"
    assert dataclasses.replace(known, sample="clip").rows_of(64) == "clips with texts of 64 tokens"


def test_a_tune_does_not_go_on_with_a_config_that_was_changed_in_its_folder(tmp_path):
    write_config(tmp_path / MODEL_FOLDER)
    facts = dataclasses.replace(cpu_facts(), packages=installed())
    asked = Request(model="some/model")
    keep_request(tmp_path, asked, facts)
    assert started_before(tmp_path, asked, resume=True, say=print).facts == facts
    (tmp_path / MODEL_FOLDER / "config.json").write_text("{}")
    with pytest.raises(InputError, match="model has changed since"):
        started_before(tmp_path, asked, resume=True, say=print)


def test_a_folder_whose_files_are_gone_or_torn_says_which_and_what_to_do(tmp_path):
    write_config(tmp_path / MODEL_FOLDER)
    facts = dataclasses.replace(cpu_facts(), packages=installed())
    asked = Request(model="demo")
    keep_request(tmp_path, asked, facts)
    for text in (None, "null"):
        (tmp_path / MODEL_FOLDER / "config.json").unlink(missing_ok=True)
        if text is not None:
            (tmp_path / MODEL_FOLDER / "config.json").write_text(text)
        with pytest.raises(InputError, match=r"config\.json can't be read: No such file|model has changed") as refused:
            started_before(tmp_path, asked, resume=True, say=print)
        assert "put its files back as they were, or choose another --output" in (refused.value.hint or "")
    for text, why in (("null", "Input should be an object"), ('{"request": {}}', "Field required at request.model")):
        (tmp_path / REQUEST).write_text(text)
        with pytest.raises(InputError, match=rf"request\.json can't be read: {why}"):
            started_before(tmp_path, asked, resume=True, say=print)


def test_a_tune_does_not_go_on_with_a_file_of_lengths_that_holds_others_now(tmp_path):
    write_config(tmp_path / MODEL_FOLDER)
    told = tmp_path / "lengths"
    told.write_text("4 9 16")
    asked, facts = Request(model="some/model", lengths=str(told)), cpu_facts()
    work = workload(asked, facts.model, facts.hardware, lambda _: None)
    facts = dataclasses.replace(facts, workload=work, packages=installed())
    keep_request(tmp_path, asked, facts)
    told.write_text("[16, 9, 4]")
    assert started_before(tmp_path, asked, resume=True, say=print).facts == facts, "the same rows in another form"
    for other in ("4 9 15", "4 9 17", "4 10 16", "4 9", "4 4 9 16"):
        told.write_text(other)
        with pytest.raises(InputError, match=r"the lengths in .* have changed since"):
            started_before(tmp_path, asked, resume=True, say=print)


@pytest.mark.parametrize("command", [autofit.tune, autofit.estimate])
def test_another_task_than_the_supported_ones_is_refused(command):
    with pytest.raises(InputError, match=r"^task='classification': input should be 'causal-lm'"):
        command("demo", task="classification")
    with pytest.raises(InputError) as refused:
        command("demo", task="causallm")
    assert refused.value.hint == "did you mean causal-lm?"


def test_a_ceiling_above_the_device_is_refused_by_the_words_it_was_given_in():
    with pytest.raises(
        InputError, match=r"^--memory-limit 22TB is 20\.01 TiB, more than the 64\.00 GiB of Synthetic CPU"
    ):
        ceiling(Request(model="demo", memory_limit="22TB"), cpu_facts().hardware, lambda _: None)


@pytest.mark.parametrize(
    ("question", "trials", "hint"),
    [
        (Request(model="demo", seq_len=10**9), 1, "from 2 to 100000000"),
        (Request(model="demo", global_batch=10**8), 1, "from 1 to 10000000"),
        (Request(model="demo"), 10**8, "from 1 to 10000000"),
    ],
)
def test_a_number_that_is_too_large_is_told_with_the_largest(question, trials, hint):
    with pytest.raises(InputError, match="is out of range") as caught:
        check_request(question, Search(trials=trials))
    assert hint in caught.value.hint
