"""A call from Python: objects for models, arguments in errors, short representations."""

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import autofit
from autofit.commands.shell.python_calls import as_source, for_python, in_arguments
from autofit.output.document import DOCUMENT, DOCUMENT_FILE
from autofit.output.result import Result
from autofit.output.setup import read_setup
from autofit.system.errors import InputError, MachineError
from autofit.system.strict_json import dump_json
from tests.output.test_report import HOSTILE, document
from tests.support.tiny import REPOSITORY

CONFIG = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64,
}  # fmt: skip


def test_a_config_and_a_model_object_become_a_folder_the_same_each_time():
    config = LlamaConfig(**CONFIG)
    first = as_source(config)
    assert first == as_source(LlamaConfig(**CONFIG))
    assert Path(first).name.startswith("LlamaConfig-"), "what the answer calls the model"
    assert json.loads(Path(first, "config.json").read_text("utf-8"))["hidden_size"] == 32
    model = as_source(AutoModelForCausalLM.from_config(config))
    assert json.loads(Path(model, "config.json").read_text("utf-8"))["architectures"] == ["LlamaForCausalLM"]
    assert as_source("demo") == as_source(Path("demo")) == "demo"
    with pytest.raises(InputError, match="model is a int"):
        as_source(3)


def test_errors_name_the_argument_and_not_the_option():
    with pytest.raises(InputError, match=r"^global_batch=0 is out of range"):
        autofit.tune("demo", global_batch=0)
    with pytest.raises(InputError, match=r"^steps=1 is out of range"):
        autofit.verify("nowhere", steps=1)


@pytest.mark.parametrize(
    ("call", "given", "words"),
    [
        ("load", {"folder": None}, "folder is a NoneType"),
        ("verify", {"folder": 5}, "folder is a int"),
        ("profile", {"folder": b"out"}, "folder is a bytes"),
        ("tune", {"model": "demo", "output": 5}, "output is a int"),
        ("estimate", {"model": "demo", "gpu": 4090}, "gpu is a int"),
        ("estimate", {"model": "demo", "memory": ["24GiB"]}, "memory is a list"),
        ("estimate", {"model": "demo", "memory": True}, "memory is a bool"),
        ("estimate", {"model": "demo", "gpu": "H100", "gpus": True}, "gpus is a bool"),
        ("tune", {"model": "demo", "global_batch": True}, "global_batch is a bool"),
        ("tune", {"model": "train.py", "arguments": "--epochs 3"}, "arguments is a str"),
        ("tune", {"model": "demo", "arguments": 5}, "arguments is a int"),
        ("verify", {"folder": "out", "tolerance": "0.1"}, "tolerance is a str"),
        ("tune", {"model": "demo", "resume": "no"}, "resume is a str"),
        ("tune", {"model": "demo", "wait": None}, "wait is a NoneType"),
        ("estimate", {"model": "demo", "gpu": "H100", "cache": "no"}, "cache is a str"),
        ("load", {"folder": "out", "any_hardware": "no"}, "any_hardware is a str"),
        ("tune", {"model": "demo", "output": ""}, "output is empty"),
        ("estimate", {"model": "demo", "gpu": "H100", "output": ""}, "output is empty"),
        ("load", {"folder": ""}, "folder is empty"),
        ("verify", {"folder": ""}, "folder is empty"),
        ("profile", {"folder": ""}, "folder is empty"),
    ],
)
def test_an_argument_of_another_type_is_told(call, given, words):
    with pytest.raises(InputError) as caught:
        getattr(autofit, call)(**given)
    assert caught.value.message == words
    assert caught.value.hint


@pytest.mark.parametrize(
    ("call", "argument", "value"),
    [
        ("tune", "memory_limit", "much"),
        ("tune", "memory_limit", "120%"),
        ("tune", "allow", "magic"),
        ("tune", "timeout", "soon"),
        ("estimate", "gpu", "4091"),
        ("estimate", "gpu", "A100"),
        ("estimate", "gpu", "0x 4090"),
        ("estimate", "memory", "much"),
    ],
)
def test_a_text_that_can_not_be_read_is_told_with_its_argument(call, argument, value):
    with pytest.raises(InputError) as caught:
        getattr(autofit, call)("demo", **{argument: value})
    assert caught.value.message.startswith(f"{argument}={value!r} ")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0, -1, 0.0])
def test_a_memory_that_is_none_is_told(value):
    with pytest.raises(InputError, match="is not a size") as caught:
        autofit.estimate("demo", memory=value)
    assert caught.value.hint


def test_a_number_of_numpy_is_a_number():
    taken = for_python(lambda steps, share: (steps, share))(np.int64(8), share=np.float32(0.5))
    assert taken == (8, 0.5)
    assert [type(one) for one in taken] == [int, float]


class Logged:
    """What takes the place of stderr in programs that keep a log of it."""

    def write(self, words):
        pass


@pytest.mark.parametrize("stream", [None, Logged(), io.StringIO()], ids=["none", "logged", "closed"])
def test_a_stderr_of_somebodys_own_is_no_terminal(monkeypatch, stream):
    if isinstance(stream, io.StringIO):
        stream.close()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert for_python(lambda events=None: events)() is None


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ('name it, like --gpu "RTX 3090" or --memory 24GiB', 'name it, like gpu="RTX 3090" or memory="24GiB"'),
        ("write it like --fix precision=fp32.", 'write it like fix="precision=fp32".'),
        ("--allow exact,numeric,method, or --on auto", 'allow="exact,numeric,method", or on auto'),
        ("--gpus 8 --nodes 2 are 16 cards; --no-guard, --json", "gpus=8 nodes=2 are 16 cards; guard=False, --json"),
        ("--processes 2.", "processes=2."),
        ("give it more (--resume)", "give it more (resume=True)"),
    ],
)
def test_what_an_option_is_given_is_written_as_python_does(words, wanted):
    assert (
        in_arguments(words, {"gpu", "memory", "fix", "allow", "on", "gpus", "nodes", "guard", "resume", "processes"})
        == wanted
    )


def test_an_error_that_points_to_another_call_names_its_argument(tmp_path):
    (tmp_path / "request.json").write_text("{}")
    with pytest.raises(InputError, match=r"holds no autofit\.json") as caught:
        autofit.verify(tmp_path)
    assert caught.value.hint == "its tune has found no answer yet: go on with it by resume=True"
    with pytest.raises(InputError) as error:
        autofit.tune("demo", seq_len="x")
    assert "--" not in str(error.value)


def test_an_answer_is_short_in_python_and_a_table_in_a_notebook():
    doc = document()
    result = Result(folder=Path("out"), document=replace(doc, changes=(HOSTILE,)))
    assert len(repr(result)) < 500
    assert "uncertain" not in repr(result)
    scattered = replace(doc.promise, step_seconds_spread=2 * doc.promise.step_seconds)
    assert "(uncertain: runs of this plan gave" in repr(replace(result, document=replace(doc, promise=scattered)))
    shown = result._repr_html_()
    assert "accelerate launch --config_file out/accelerate.yaml" in shown
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown


def test_an_answer_is_found_after_a_change_of_folder(tmp_path, monkeypatch):
    """A notebook may go elsewhere: of a relative path transformers would think that it is a hub id."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / DOCUMENT_FILE).write_text(dump_json(DOCUMENT, replace(document(), versions={})))
    monkeypatch.chdir(tmp_path)
    result = for_python(lambda: Result(folder=Path("out"), document=document()))()
    setup = read_setup("out")
    assert result.folder == setup.folder == tmp_path / "out"


def test_streams_that_are_closed_are_opened_for_a_call_too():
    """Else a socket of the fork server would get such a number, and its log be written into it."""
    code = (
        "import os\nfrom autofit.commands.shell.python_calls import for_python\nos.closerange(0, 3)\n"
        "for_python(lambda: None)()\nos._exit(10 * len({os.fstat(number).st_rdev for number in range(3)}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 10


def test_a_call_from_a_folder_that_is_gone(tmp_path, monkeypatch):
    lost = tmp_path / "gone"
    lost.mkdir()
    monkeypatch.chdir(lost)
    lost.rmdir()
    with pytest.raises(MachineError, match=r"^the current folder is gone"):
        for_python(lambda: None)()


def test_a_module_that_is_none_of_transformers_is_referred_to_a_function():
    with pytest.raises(InputError, match=r"^model is a Linear") as caught:
        autofit.tune(torch.nn.Linear(2, 2))
    assert "my.nets:make" in caught.value.hint
