"""A user's own script: tuned as it stands, run with the plan, verified; and every way in which that can't be done."""

import contextlib
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import AutoConfig, LlamaForCausalLM

from autofit import space
from autofit.cli import main
from autofit.commands.facts import DEFAULT_CEILING
from autofit.commands.request import Request
from autofit.commands.scripts import request as scripts
from autofit.commands.scripts.request import _workload, script_facts, script_notes
from autofit.contract.script import Loading, Script
from autofit.output.document import read_document
from autofit.registry import recipe_of
from autofit.system.errors import InputError
from autofit.system.units import GIB
from autofit.training.jobs import DescribeScriptJob
from autofit.training.runner import ProcessRunner
from autofit.training.scripts import rows
from autofit.training.timing import Effort
from tests.support.cases import slow_but
from tests.support.scripted import SCRIPTS, autofit, preference_data, tiny_bert, tiny_llama
from tests.support.synthetic import cpu_facts
from tests.support.tiny import CPU_PRECISIONS

CLASSIFY = SCRIPTS / "classify.py"
ONE_CORE = {"OMP_NUM_THREADS": "1"}
LOOP = SCRIPTS / "loop.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("scripts")
    tiny_bert(made / "tiny")
    return made


@pytest.fixture
def described(server, tmp_path):
    """``described(text, *arguments)``: what a script of that text would train, or why it can't be tuned."""

    def describe(script, *arguments, call=1):
        if not hasattr(script, "read_text"):
            path = tmp_path / "train.py"
            path.write_text(script)
            script = path
        job = DescribeScriptJob(path=str(script), arguments=tuple(map(str, arguments)), call=call)
        with server.ask(tmp_path, job) as answer:
            return answer

    return describe


def test_a_script_is_described_by_what_it_would_train(described, folder, tmp_path):
    found = described(CLASSIFY, "--model", folder / "tiny", "--output", tmp_path / "mine")
    script, model = found["script"], found["model"]
    assert (script["micro_batch"], script["accumulation"], script["trainer"]) == (4, 2, "Trainer")
    assert model["architecture"] == "BertForSequenceClassification"
    assert script["batch"]["labels"] == [4]
    assert script["batch"]["input_ids"] == [4, 32]  # the longest rows
    assert script["rows"] == 64
    assert script["mean_length"] < script["longest"] == 2 * 32 + 1, "as collated: tokens, a mask, a label"
    assert 16 < script["tokens_a_row"] < 20
    assert len(script["places"]) == 64
    assert script["own"]["optim"].endswith("adamw_torch_fused") or "ADAMW" in script["own"]["optim"].upper()
    assert not (tmp_path / "mine").exists()
    assert found["config"]["num_labels" if "num_labels" in found["config"] else "id2label"]


HEAD = "from transformers import Trainer, TrainingArguments, BertConfig, BertForSequenceClassification as Model\n"
GENERATING = """from transformers import GenerationMixin
class Generating(Trainer):
    def training_step(self, model, inputs, *arguments):
        return GenerationMixin.generate(model, **inputs)
Trainer = Generating"""
BAD = {
    "": "ended without training",
    "import sys; sys.exit(3)": "ended before it trained (exit 3)",
    "import argparse; argparse.ArgumentParser().parse_args()": "ended before it trained (exit 2): train.py: error: "
    "unrecognized arguments: --unknown",
    "1 / 0": "failed before it trained (line 1): ZeroDivisionError",
    "input('how many? ')": "reads from stdin",
    "import json, sys; json.load(sys.stdin.buffer)": "reads from stdin",
    "import os; os.environ['CUDA_VISIBLE_DEVICES'] = '1'": "sets CUDA_VISIBLE_DEVICES itself",
    "arguments = None": "makes its Trainer without arguments (a Trainer)",
    "model.half()": "trains weights in float16",
    "model.double()": "model is in float64",
    "model.half(); model.classifier.float(); model.bert.embeddings.requires_grad_(False)": "in float16",
    "import torch; torch.optim.SGD(torch.nn.Linear(1, 1).parameters()).step()": "in a loop without Accelerate",
    "arguments.fsdp = 'full_shard'": "asks for DeepSpeed or FSDP",
    "arguments.generation_batch_size = 8": "Trainer generates the rows that it trains on",
    "arguments.use_vllm = True": "Trainer generates the rows that it trains on",
    GENERATING: "Generating generates the rows that it trains on",
}


@pytest.mark.parametrize("line", BAD)
def test_a_script_that_cant_be_tuned_is_told_in_one_line(described, line):
    text = HEAD + "model, arguments = Model(BertConfig(num_hidden_layers=1, hidden_size=24)), TrainingArguments('x')\n"
    trains = any(word in line for word in ("CUDA", "arguments", "half", "double")) and "argparse" not in line
    end = "\nTrainer(model, arguments, train_dataset=[{'input_ids': [1, 2], 'labels': 0}]).train()" if trains else ""
    found = described((text if trains else "") + line + end, "--unknown")
    assert BAD[line] in found["error"], found
    assert found["hint"]
    assert "\n" not in found["error"]


def test_arrays_that_are_written_with_random_weights_are_told(described, tmp_path):
    """Else its training would read them again, as embeddings of its own model."""
    tiny_bert(tmp_path / "tiny")
    text = f"""
{HEAD}import numpy, os, tempfile
os.chdir({str(tmp_path)!r})
numpy.save("before.npy", [1])
model = Model.from_pretrained("tiny")
for name in ("embedded.npy", "cache-123.arrow", "log.txt"):
    with open(name, "wb") as file:
        file.write(b"made by the model")
open("gone.npy", "wb").close()
os.remove("gone.npy")
open("embedded.npy", "rb").close()
Trainer(model, TrainingArguments("x"), train_dataset=[{{'input_ids': [1, 2], 'labels': 0}}]).train()
"""
    script = described(text)["script"]
    assert script["wrote"] == [str(tmp_path / "embedded.npy")]
    facts = cpu_facts()
    own = Script(path="train.py", sha256="", trainer="Trainer", micro_batch=4, accumulation=2, wrote=("a.npy",))
    told = script_notes(dataclasses.replace(facts, workload=dataclasses.replace(facts.workload, script=own)))
    assert any("wrote a.npy while its models had random weights: delete it before you train" in one for one in told)


@pytest.mark.slow
def test_an_accumulation_that_is_said_for_accelerate_is_the_scripts_own(described):
    text = HEAD + "model = Model(BertConfig(num_hidden_layers=1, hidden_size=24))\n"
    text += "steps = {'gradient_accumulation_kwargs': {'num_steps': 2}}\n"
    text += "arguments = TrainingArguments('x', per_device_train_batch_size=2, accelerator_config=steps)\n"
    text += "Trainer(model, arguments, train_dataset=[{'input_ids': [1, 2], 'labels': 0}] * 8).train()"
    script = described(text)["script"]
    assert (script["micro_batch"], script["accumulation"]) == (2, 2)


def test_an_accumulation_that_is_set_after_the_trainer_is_made_is_the_scripts_own(described):
    text = HEAD + "model = Model(BertConfig(num_hidden_layers=1, hidden_size=24))\n"
    text += (
        "trainer = Trainer(model, TrainingArguments('x'), train_dataset=[{'input_ids': [1, 2], 'labels': 0}] * 32)\n"
    )
    text += "trainer.args.gradient_accumulation_steps, trainer.args.per_device_train_batch_size = 2, 4\ntrainer.train()"
    script = described(text)["script"]
    assert (script["micro_batch"], script["accumulation"]) == (8, 2)  # a Trainer keeps the rows that it was made with
    assert script["own_split"] == "the script sets gradient_accumulation_steps after its Trainer is made"


@pytest.mark.parametrize("name", ["optim", "optim_args"])
def test_an_optimizer_that_is_said_after_the_trainer_is_made_is_the_scripts_own(described, name):
    text = HEAD + "model = Model(BertConfig(num_hidden_layers=1, hidden_size=24))\n"
    text += (
        "trainer = Trainer(model, TrainingArguments('x'), train_dataset=[{'input_ids': [1, 2], 'labels': 0}] * 32)\n"
    )
    text += f"trainer.args.{name} = 'adafactor'\ntrainer.train()"
    script = described(text)["script"]
    assert (script["own_optimizer"], script["own_split"]) == (True, None)


@pytest.mark.parametrize(
    ("searched", "refused"),
    [
        ("'learning_rate': t.suggest_float('learning_rate', 1e-4, 1e-3)", None),
        (
            "'per_device_train_batch_size': t.suggest_categorical('per_device_train_batch_size', [8])",
            "the script's hyperparameter search sets per_device_train_batch_size, and so does a plan",
        ),
    ],
)
def test_a_search_for_the_batch_is_no_training_of_a_plan(described, searched, refused):
    """What it sets would go with the plan's accumulation, whether or not it is what there was."""
    text = HEAD + "def init(trial): return Model(BertConfig(num_hidden_layers=1, hidden_size=24))\n"
    text += "rows = [{'input_ids': [1, 2], 'labels': 0}] * 32\n"
    text += "trainer = Trainer(None, TrainingArguments('x'), model_init=init, train_dataset=rows, eval_dataset=rows)\n"
    text += f"trainer.hyperparameter_search(lambda t: {{{searched}}}, backend='optuna', n_trials=2)"
    answer = described(text)
    assert answer.get("error") == refused
    assert refused or answer["script"]["micro_batch"] == 8


def test_a_loader_of_its_own_says_whether_an_epoch_leaves_out_rows(described):
    text = (
        HEAD
        + "from torch.utils.data import DataLoader\nmodel = Model(BertConfig(num_hidden_layers=1, hidden_size=24))\n"
    )
    text += "class Own(Trainer):\n    def get_train_dataloader(self):\n"
    text += "        rows = dict(batch_size=self.args.train_batch_size, collate_fn=self.data_collator)\n"
    text += "        return DataLoader(self.train_dataset, drop_last=True, **rows)\n"
    text += "Own(model, TrainingArguments('x'), train_dataset=[{'input_ids': [1, 2], 'labels': 0}] * 35).train()"
    script = described(text)["script"]
    assert (script["own"]["dataloader_drop_last"], script["own_split"]) == (True, None)
    assert (script["epochs_rows"], script["epochs"]) == (3 * 32, 3)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("import os; os.environ['LOCAL_RANK']", "LOCAL_RANK is what torchrun sets"),
        ("import torch.distributed as one; one.init_process_group('gloo')", "RANK is what torchrun sets"),
        ("{}['LOCAL']", "does it run with these arguments by itself?"),
    ],
)
def test_a_script_that_wants_a_launcher_is_told_that_there_is_none(described, line, wanted):
    assert described(line)["hint"].startswith(wanted)


def test_a_module_of_a_package_is_told_how_it_can_be_tuned(described, tmp_path):
    script = tmp_path / "mine" / "training" / "train.py"
    script.parent.mkdir(parents=True)
    for place in script.parents[:2]:
        (place / "__init__.py").touch()
    script.write_text("from . import rows")
    line = "import runpy; runpy.run_module('mine.training.train', run_name='__main__')"
    assert described(script)["hint"].endswith(line)
    script.write_text("from . import __name__\n1 / 0")
    assert "ZeroDivisionError" in described(line)["error"], "that line runs it"


@pytest.mark.slow
def test_what_the_script_does_itself_is_seen(described, folder):
    lines = (
        HEAD + "import torch\n"
        f"model = Model.from_pretrained({str(folder / 'tiny')!r}, attn_implementation='eager', dtype=torch.bfloat16)\n"
        "rows = [{'input_ids': [1, 2, 3], 'labels': 0}] * 4\n"
        "arguments = TrainingArguments('x', per_device_train_batch_size=2)\n"
        "first = Trainer(model, arguments, train_dataset=rows)\n"
        "first.train()\n"
        "own = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "Trainer(model, arguments, train_dataset=rows, optimizers=(own, None)).train()\n"
    )
    first, second = described(lines)["script"], described(lines, call=2)["script"]
    assert first["loads"] == {"attn_implementation": "eager"}
    assert first["weights_dtype"] == "bfloat16"
    assert (first["own_optimizer"], second["own_optimizer"]) == (False, True)
    assert first["micro_batch"] == 2


def test_a_model_that_its_class_makes_attends_as_it_does(described):
    """No plan can ask it for another attention: a trial of one would be refused."""
    found = described(
        HEAD + "arguments = TrainingArguments('x', per_device_train_batch_size=2)\n"
        "model = Model(BertConfig(num_hidden_layers=1, hidden_size=24))\n"
        "Trainer(model, arguments, train_dataset=[{'input_ids': [1, 2, 3], 'labels': 0}] * 4).train()\n"
    )
    assert found["script"]["loads"] == {"attn_implementation": "sdpa"}


@pytest.mark.parametrize(
    ("method", "autocast", "found"),
    slow_but(
        {"loss"},
        {
            "loss": ("compute_loss", "torch.autocast('cuda', torch.bfloat16)", {"cuda": "bfloat16"}),
            "step": ("training_step", "torch.autocast('cuda')", {"cuda": "float16"}),
            "model": ("forward", "torch.autocast('cpu')", {"cpu": "bfloat16", "cuda": "float16"}),
            "off": ("compute_loss", "torch.autocast('cuda', enabled=False)", {}),
            "accelerate": ("compute_loss", "Accelerator(cpu=True).autocast()", {}),
        },
    ),
)
def test_the_autocast_that_a_trainer_calls_its_layers_in_is_told(described, method, autocast, found):
    """Its loss asks a teacher first, and what it gets for a value, in one case for one that only a real run tells."""
    of_model = method == "forward"
    owner = "Model" if of_model else "Trainer"
    asked = "len(inputs['labels'].nonzero())" if method == "training_step" else "not inputs['input_ids'].sum().item()"
    text = (
        HEAD + "import torch\nfrom accelerate import Accelerator\n"
        f"class Own({owner}):\n    {method} = {autocast}({owner}.{method})\n"
        f"class Taught({'Trainer' if of_model else 'Own'}):\n"
        "    def compute_loss(self, model, inputs, *args, **kwargs):\n"
        f"        if teacher(**inputs).loss > 9 or {asked}:\n            return None\n"
        "        return super().compute_loss(model, inputs, *args, **kwargs)\n"
        f"model = {'Own' if of_model else 'Model'}(BertConfig(num_hidden_layers=1, hidden_size=24))\n"
        "teacher, arguments = Model(model.config), TrainingArguments('x', per_device_train_batch_size=4)\n"
        "Taught(model, arguments, train_dataset=[{'input_ids': [2, 4, 6], 'labels': 0}] * 4).train()\n"
    )
    assert described(text)["script"]["autocast"] == found


@pytest.mark.slow
def test_a_loss_that_takes_rows_together_is_described(described):
    found = described(
        HEAD + "class Ranking(Model):\n    __module__ = 'sentence_transformers.losses'\n"
        "loss = Ranking(BertConfig(num_hidden_layers=1, hidden_size=24))\n"
        "class Pairs(Trainer):\n    __module__, loss = 'sentence_transformers.trainer', loss\n"
        "arguments = TrainingArguments('x', per_device_train_batch_size=2)\n"
        "Pairs(loss, arguments, train_dataset=[{'input_ids': [1, 2, 3], 'labels': 0}] * 4).train()\n"
    )
    assert found["script"]["depends_on_rows"] == "its Ranking takes the rows of a micro-batch together"


@pytest.mark.slow
def test_a_call_that_is_never_made_is_told(described):
    text = (
        HEAD + "arguments = TrainingArguments('x', per_device_train_batch_size=2)\n"
        "model = Model(BertConfig(num_hidden_layers=1, hidden_size=24))\n"
        "trainer = Trainer(model, arguments, train_dataset=[{'input_ids': [1, 2, 3], 'labels': 0}] * 4)\n"
        "trainer.train()\ntrainer.train()\n"
    )
    assert described(text, call=2)["script"]["trainer"] == "Trainer"
    found = described(text, call=3)
    assert (found["error"], found["hint"]) == ("train.py calls train() 2 times", "no --call 3 is there")


def test_a_module_that_is_none_of_transformers_is_described(described):
    found = described(
        "import torch\nfrom accelerate import Accelerator\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2))\n"
        "loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(24, 8)), batch_size=6)\n"
        "accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision='bf16')\n"
        "model, loader, optimizer = accelerator.prepare(model, loader, torch.optim.AdamW(model.parameters()))\n"
        "for (rows,) in loader:\n"
        "    with accelerator.accumulate(model):\n"
        "        accelerator.backward(model(rows).square().mean())\n"
        "        optimizer.step()\n"
    )
    script, model = found["script"], found["model"]
    assert (script["micro_batch"], script["accumulation"], script["rows"]) == (6, 2, 24)
    assert script["own"] == {"dataloader_drop_last": False, "bf16": True, "fp16": False, "tf32": False}
    assert "BatchNorm" in script["depends_on_rows"]
    assert (model["architecture"], model["model_type"], model["parameters"]) == ("Sequential", "", 210)
    assert found["config"] == {}


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_plain_loop_is_described(described, folder, by_hand):
    script = described(LOOP, "--model", folder / "tiny", *["--by-hand"] * by_hand)["script"]
    assert (script["micro_batch"], script["accumulation"], script["trainer"]) == (4, 2, "")
    assert ("accelerator.accumulate" in (script["own_split"] or "")) == by_hand
    assert script["own_optimizer"]
    assert script["batch"]["input_ids"] == [4, 32]
    assert script["rows"] == 64


@pytest.mark.parametrize("script", [pytest.param(CLASSIFY, marks=pytest.mark.slow), LOOP])
def test_a_plan_that_breaks_the_ceiling_is_out_of_memory(server, folder, tmp_path, script):
    request = Request(
        model=str(script),
        device="cpu",
        global_batch=None,
        arguments=("--model", str(folder / "tiny")),
        memory_limit="64KiB",
    )
    facts = script_facts(tmp_path, request, "cpu", server, lambda _: None)
    plan = space.build(facts).smallest()
    runner = ProcessRunner(tmp_path / "trials", facts, tmp_path / "model", server)
    trial = runner.run(0, plan, Effort(min_steps=2, max_steps=2), purpose="search", limit_seconds=60.0)
    assert trial.outcome.kind == "out_of_memory", trial.outcome


@pytest.mark.parametrize(("steps", "kind"), [(6, "measured"), pytest.param(1, "unsupported", marks=pytest.mark.slow)])
def test_a_loop_that_ends_early_is_measured_by_what_it_did_and_writes_nothing(server, folder, tmp_path, steps, kind):
    """Its weights are random there: nothing may be written over what was trained before."""
    trained = tmp_path / "trained"
    trained.mkdir()
    arguments = ("--model", str(folder / "tiny"), "--steps", str(steps), "--output", str(trained))
    request = Request(model=str(LOOP), device="cpu", global_batch=None, arguments=arguments, memory_limit="8GiB")
    facts = script_facts(tmp_path, request, "cpu", server, lambda _: None)
    runner = ProcessRunner(tmp_path / "trials", facts, tmp_path / "model", server)
    effort = Effort(min_steps=20, max_steps=20)
    outcome = runner.run(0, space.build(facts).own(facts), effort, purpose="search", limit_seconds=60.0).outcome
    assert outcome.kind == kind, outcome
    if kind == "measured":
        assert outcome.evidence.of("accumulation")["micro_steps"] == 2
    else:
        assert "its loop ends after 1 optimizer steps:" in outcome.reason
    assert not [*trained.iterdir()]


TRACKED = """
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from torch.utils.data import DataLoader

class Own(GeneralTracker):
    name, requires_logging_directory, tracker = "own", False, property(lambda self: self)

    def __init__(self):
        super().__init__()
        self.run = type("Run", (), {"dir": "x", "log": lambda *_: None})()

accelerator = Accelerator(cpu=True, log_with=Own())
accelerator.init_trackers("run")
model = torch.nn.Linear(4, 1)
model, loader, optimizer = accelerator.prepare(
    model, DataLoader([torch.ones(4)] * 8, batch_size=2), torch.optim.SGD(model.parameters(), lr=0.1)
)
own = accelerator.get_tracker("own", unwrap=True)
accelerator.trackers[0].tracker.run.log({"begun": len(accelerator.trackers)})
own.run.log({"directory": own.run.dir})
for batch in loader:
    accelerator.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_loop_that_asks_for_its_trackers_gets_idle_ones(described):
    assert described(TRACKED)["script"]["micro_batch"] == 2


@pytest.mark.slow
def test_a_loop_that_resumes_is_measured_from_the_longest_rows_on(server, folder, tmp_path):
    """What it skips would else be the rows that a measurement puts first, or all of them."""
    arguments = ("--model", str(folder / "tiny"), "--skip", "12")
    request = Request(model=str(LOOP), device="cpu", global_batch=None, arguments=arguments, memory_limit="8GiB")
    facts = script_facts(tmp_path, request, "cpu", server, lambda _: None)
    runner = ProcessRunner(tmp_path / "trials", facts, tmp_path / "model", server)
    effort = Effort(min_steps=2, max_steps=2)
    outcome = runner.run(0, space.build(facts).own(facts), effort, purpose="search", limit_seconds=60.0).outcome
    assert outcome.kind == "measured", outcome


def test_what_a_script_holds_is_no_plans_to_change():
    script = Script(
        path="train.py", sha256="", trainer="Trainer", micro_batch=4, accumulation=2, weights_dtype="bfloat16",
        own={"optim": "adafactor"}, adapter="LORA r=4", depends_on_rows="its BatchNorm layers",
    )  # fmt: skip
    facts = cpu_facts(global_batch=8, script=script)
    plans = space.build(facts).plans
    held = {
        "micro_batch": 4,
        "accumulation": 2,
        "precision": "bf16_weights",
        "optimizer": "adafactor",
        "adapter": "none",
    }
    assert all(plan[name] == value for plan in plans for name, value in held.items())
    free = space.build(facts, given={"micro_batch": (8,), "precision": ("fp32",)}).plans
    assert {(plan["micro_batch"], plan["precision"]) for plan in free} == {(8, "fp32")}
    with pytest.raises(InputError, match="adapter=ia3 can't be had with this script"):
        space.build(facts, given={"adapter": ("ia3",)})
    emitted = recipe_of(plans[0], facts).emission.training_args
    assert emitted["per_device_train_batch_size"] == 4
    assert not [note for note in script_notes(facts) if "evaluates" in note]
    evaluates = cpu_facts(global_batch=8, script=dataclasses.replace(script, evaluated_rows=16))
    assert not [note for note in script_notes(evaluates) if "evaluates" in note], "it is tried beside the winner"
    notes = script_notes(evaluates, tried=False)
    assert "it evaluates 16 rows at once: that is not measured, nor held against the ceiling" in notes
    assert "use_liger_kernel" not in emitted


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("trainer = Trainer(model)\ntrainer.train()\nmodel.train()", False),
        ("trainer = SFTTrainer(model)\ntrainer.train()\ntrainer.train()", True),
        ("for fold in range(5):\n    if fold:\n        trl.SFTTrainer(model).train()", True),
        ("def fit(rows):\n    Trainer(rows).train()\nfit(1)", False),
        ("def fit(rows):\n    Trainer(rows).train()\nfit(1)\nfit(2)", True),
        ("def fit(rows):\n    Trainer(rows).train()\nfor fold in range(5):\n    fit(fold)", True),
        ("def fit():\n    Trainer().train()\ndef _mp_fn(index):\n    fit()\nfit()", False),
        ("def epoch():\n    for batch in loader:\n        model.train()", False),
        ("no python", False),
    ],
)
def test_a_script_that_trains_several_times_is_told_which_is_tuned(tmp_path, text, told):
    (tmp_path / "train.py").write_text(text)
    path = str(tmp_path / "train.py")
    script = Script(path=path, sha256="", trainer="Trainer", micro_batch=4, accumulation=1)

    def said(**changed):
        return "--call N" in " ".join(script_notes(cpu_facts(script=dataclasses.replace(script, **changed))))

    assert said() is told
    assert not said(call=2)
    assert not said(path=str(tmp_path / "gone.py"))


def test_a_slow_data_set_is_looked_at_all_over_and_that_is_told(monkeypatch):
    """Rows lie sorted by length, and take so long that the time is up after a hundred of them."""
    now = [0.0]
    monkeypatch.setattr(rows.time, "monotonic", lambda: now[0])

    class Slow:
        def __len__(self):
            return 10_000

        def __getitem__(self, place):
            now[0] += rows.SAMPLING_SECONDS / 100
            return {"input_ids": [0] * (place // 20)}

    seen = rows.sample_of(Slow(), None)
    assert 45 <= seen.looked_at <= 55
    assert seen.longest_size > 450
    script = Script(
        path="train.py", sha256="", trainer="Trainer", micro_batch=8, accumulation=1, weights_dtype="float32",
        rows=10_000, sampled=seen.looked_at, longest=seen.longest_size, mean_length=250.0,
    )  # fmt: skip
    said = " ".join(script_notes(cpu_facts(global_batch=8, script=script)))
    assert f"{seen.looked_at} of its 10,000 rows were looked at" in said


def test_a_data_set_smaller_than_a_step_is_refused():
    """No optimizer step would take as many rows as the answer says."""
    request, hardware = Request(model="train.py", global_batch=None, memory_limit="1GiB"), cpu_facts().hardware
    script = Script(path="train.py", sha256="", trainer="Trainer", micro_batch=4, accumulation=2, rows=7)

    def rows(asked=None, **changed):
        one, told = dataclasses.replace(script, **changed), dataclasses.replace(request, global_batch=asked)
        return _workload(told, one, hardware, lambda _: None).global_batch

    with pytest.raises(InputError, match="has 7 rows, and an optimizer step is to take 8"):
        rows()
    assert rows(4) == 4
    assert rows(rows=8) == rows(rows=None) == 8
    loading = Loading(workers=0, cores=1, fixed="its loader makes its micro-batches itself")
    assert rows(loading=loading) == 8, "what it numbers may be batches"


def test_what_vllm_takes_beside_a_training_is_not_the_trainings():
    """A ceiling that is asked for is that of the training."""
    hardware = dataclasses.replace(cpu_facts().hardware, total_bytes=10 * GIB, free_bytes=8 * GIB)
    script = Script(
        path="t.py", sha256="", trainer="GRPOTrainer", micro_batch=4, accumulation=2,
        generated=16, engine="vLLM on 50% of the card", engine_share=0.5,
    )  # fmt: skip
    request, said = Request(model="t.py", global_batch=None), []

    def limit(share=0.5, **asked):
        said.clear()
        one = dataclasses.replace(script, engine_share=share)
        return _workload(dataclasses.replace(request, **asked), one, hardware, said.append).limit_bytes

    free = int(8 * GIB * DEFAULT_CEILING)
    assert limit() == free - 5 * GIB
    assert said == ["the ceiling of the training is 2.36 GiB: vLLM on 50% of the card takes 5.00 GiB"]
    assert limit(share=0.0) == free
    assert not said
    assert limit(memory_limit="4GiB") == 4 * GIB
    assert not said
    assert limit(memory_limit="6GiB") == 6 * GIB
    assert "are more than there is" in said[0]
    with pytest.raises(InputError, match=r"9\.00 GiB, which leaves nothing of 7\.36 GiB"):
        limit(share=0.9)


def test_options_that_are_the_scripts_own_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")

    def said(*words):
        done = CliRunner().invoke(main, [str(word) for word in words])
        assert done.exit_code == 2
        assert done.stdout == ""
        return done.stderr

    refused = {"--seq-len": 9, "--task": "causal-lm", "--launch-path": "loop", "--call": 0}
    for option, value in refused.items():
        assert said("tune", "train.py", option, value).startswith(f"error: {option}")
    assert "--trust-remote-code" in said("tune", "train.py", "--trust-remote-code")
    assert "no script" in said("tune", "nowhere.py")
    assert "is no script" in said("tune", "demo", "--call", 2)
    assert "is no script" in said("tune", "demo", "--", "--epochs", 3)
    assert "autofit.json" in said("run", tmp_path, "train.py")


def test_each_of_several_processes_takes_what_the_script_says_of_a_device():
    request = Request(model="train.py", global_batch=None, memory_limit="1GiB", processes=2)
    hardware = cpu_facts().hardware
    script = Script(path="train.py", sha256="", trainer="Trainer", micro_batch=4, accumulation=2, rows=100)
    alone = _workload(dataclasses.replace(request, processes=None), script, hardware, lambda _: None)
    work = _workload(request, script, hardware, lambda _: None)
    assert (alone.global_batch, alone.processes, work.global_batch, work.processes) == (8, 1, 16, 2)
    assert work.host_limit_bytes == alone.host_limit_bytes // 2
    assert "4 x 2 x 2 processes = 16 rows" in script_notes(dataclasses.replace(cpu_facts(), workload=work))[0]
    held = dataclasses.replace(script, depends_on_rows="rows are held against one another")
    with pytest.raises(InputError, match="micro-batches of 4 rows on 2 processes") as caught:
        _workload(dataclasses.replace(request, global_batch=12), held, hardware, lambda _: None)
    assert caught.value.hint == "give a multiple of 8"
    shared = dataclasses.replace(script, own={"split_batches": True})
    with pytest.raises(InputError, match="asks for split_batches, so processes share each of its batches"):
        _workload(request, shared, hardware, lambda _: None)
    assert _workload(dataclasses.replace(request, processes=None), shared, hardware, lambda _: None).global_batch == 8


@pytest.mark.parametrize("split", [True, False])
def test_a_loader_whose_batches_processes_share_is_described(described, split):
    arguments = f"TrainingArguments('x', accelerator_config={{'split_batches': {split}}})"
    text = HEAD + f"model, arguments = Model(BertConfig(num_hidden_layers=1, hidden_size=24)), {arguments}\n"
    text += "Trainer(model, arguments, train_dataset=[{'input_ids': [1, 2], 'labels': 0}] * 8).train()"
    assert described(text)["script"]["own"].get("split_batches", False) is split


@pytest.mark.slow
def test_a_script_is_tuned_run_and_verified_on_two_processes(folder):
    arguments = ("--", "--model", "tiny", "--output", "mine")
    precision = f"precision={CPU_PRECISIONS[-1]}"
    names = ("micro_batch=8", "checkpointing=full", "attention=default", precision, "optimizer=adamw")
    held = (f"--fix={one}" for one in names)
    command = ("tune", CLASSIFY, "--output", "both", "--device", "cpu", "--processes", 2, "--trials", 1, *held)
    done = autofit(folder, *command, *arguments)
    assert done.returncode == 0, done.stderr
    found = read_document(folder / "both")
    assert (found.workload.global_batch, found.plan["accumulation"], found.plan["parallel"]) == (16, 1, "ddp")
    assert found.guard.verdict == "same", found.guard.words
    verified = autofit(folder, "verify", "both", "--json", "--tolerance", "0.95")
    assert verified.returncode == 0, verified.stderr
    trained = autofit(folder, "run", "both", CLASSIFY, *arguments[:-1], "trained")
    assert trained.returncode == 0, trained.stderr
    assert "took no effect" not in trained.stderr


@pytest.mark.slow
def test_a_script_is_tuned_run_and_verified(folder):
    arguments = ("--", "--model", "tiny", "--output", "mine")
    held = ("--fix=micro_batch=8", "--among=checkpointing=off,full", "--fix=attention=default", "--fix=precision=fp32")
    done = autofit(folder, "tune", CLASSIFY, "--output", "out", "--device", "cpu", "--trials", 2, *held, *arguments)
    assert done.returncode == 0, done.stderr
    found = read_document(folder / "out")
    script = found.workload.script
    assert (script.micro_batch, script.accumulation) == (4, 2)
    assert found.workload.global_batch == 8
    assert found.plan["micro_batch"] == 8
    assert found.promise.tokens_per_second < 33 * found.promise.samples_per_second
    assert "autofit run out" in done.stdout
    assert not (folder / "mine").exists()
    assert any("are forked from the script where it begins to train" in words for words in found.notes)
    assert not [*(folder / "out" / "trials").glob("kept/*")], "what a snapshot has written goes with the tune"
    assert found.workload.evaluated_rows == 8, "as many as it evaluates itself, which fit"
    assert "per_device_eval_batch_size" not in json.loads((folder / "out" / "training_args.json").read_text())
    verified = autofit(folder, "verify", "out", "--json", "--tolerance", "0.95")
    assert verified.returncode == 0, verified.stderr
    launched = json.loads(verified.stdout)
    assert launched["outcome"]["kind"] == "measured"
    (folder / "elsewhere").mkdir()
    lost = autofit(folder / "elsewhere", "verify", "../out")
    assert lost.returncode == 4
    assert "the launch broke the promise: crashed: OSError" in lost.stderr, "the script's own error"
    assert "Call it where you tuned" in lost.stderr
    assert "not the text that was tuned" not in verified.stderr
    ran = autofit(folder, "run", "out", CLASSIFY, *arguments)
    assert ran.returncode == 0, ran.stderr
    assert "micro-batch 8 1" in ran.stdout
    assert "took no effect" not in ran.stderr
    assert "not the text that was tuned" not in ran.stderr
    assert (folder / "mine" / "config.json").exists()
    (folder / "never.py").write_text("print('no training here')")
    never = autofit(folder, "run", "out", "never.py")
    assert never.returncode == 2, never.stderr
    assert "never.py ended without training by a transformers Trainer: the plan was put" in never.stderr
    assert "Traceback" not in never.stderr


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_plain_loop_is_tuned_run_and_verified(folder, processes):
    output = f"looped{processes}"
    held = ("--fix=micro_batch=8", "--fix=checkpointing=off", "--fix=attention=default", "--fix=precision=fp32")
    command = ("--output", output, "--device", "cpu", "--trials", 1, *held)
    several = ("--processes", 2) if processes > 1 else ()
    done = autofit(folder, "tune", LOOP, *command, *several, "--", "--model", "tiny")
    assert done.returncode == 0, done.stderr
    found = read_document(folder / output)
    assert found.promise.launch_path == "loop"
    assert any("until it trains, in each trial" in words for words in found.notes)
    assert (found.workload.global_batch, found.workload.processes) == (8 * processes, processes)
    ran = autofit(folder, "run", output, LOOP, "--", "--model", "tiny")
    assert ran.returncode == 0, ran.stderr
    steps = 8 // processes  # the script asserts that its loader's length is that of its own micro-batches
    assert ran.stdout.count(f" {steps} steps {steps}") == processes
    assert ran.stderr.count("a step takes 8 x 1 rows") == 1
    verified = autofit(folder, "verify", output, "--json", "--tolerance", "0.95")
    assert verified.returncode == 0, verified.stderr
    launched = json.loads(verified.stdout)
    assert launched["outcome"]["kind"] == "measured"


BESIDE = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=4)
torch.manual_seed(0)
encoder, net = torch.nn.Linear(64, 64), torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(12)])
loader = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=2)
optimizers = [torch.optim.AdamW(encoder.parameters()), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)]
encoder, loader = accelerator.prepare(encoder, loader)
net, *optimizers = accelerator.prepare(net, *optimizers)
for epoch in range(2):
    for (rows,) in loader:
        with accelerator.accumulate(encoder, net):
            accelerator.backward((net(encoder(rows)) - rows).square().mean())
            for one in optimizers:
                one.step()
                one.zero_grad()
sums = torch.tensor([sum(one.double().sum() for one in each.parameters()) for each in (encoder, net)])
assert (accelerator.gather(sums[None]) == sums).all()
if accelerator.is_main_process:
    print("sums", *sums.tolist(), "on", accelerator.num_processes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_loop_that_trains_two_models_by_two_optimizers_is_tuned_verified_and_run(folder, processes):
    """On one process to the digits of the plain script, on two alike on both; the larger model is tuned."""
    script = folder / "beside.py"
    script.write_text(BESIDE)
    held = ("--fix=micro_batch=2", "--fix=precision=fp32", "--fix=loader=default")
    command = ("--output", f"beside{processes}", "--device", "cpu", "--trials", 1, *held)
    several = ("--processes", 2) if processes > 1 else ()
    done = autofit(folder, "tune", script, *command, *several)
    assert done.returncode == 0, done.stderr
    found = read_document(folder / f"beside{processes}")
    assert (found.model.parameters, found.workload.script.beside) == (12 * 65 * 64, (("Linear", 65 * 64),))
    assert any(
        "it prepares a Linear (4.160 thousand parameters) beside the Sequential, which" in s for s in found.notes
    )
    verified = autofit(folder, "verify", f"beside{processes}", "--tolerance", "0.95")
    assert verified.returncode == 0, verified.stderr
    ran = autofit(folder, "run", f"beside{processes}", script)
    assert ran.returncode == 0, ran.stderr
    sums = [line for line in ran.stdout.splitlines() if line.startswith("sums")]
    assert [line.split()[-1] for line in sums] == [str(processes)], ran.stdout
    if processes == 1:
        plain = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, timeout=280, check=True, env=os.environ | ONE_CORE
        )
        assert sums == plain.stdout.splitlines()


CASTS = """
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
here = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
model[0].requires_grad_(False).to(here)
loader = DataLoader(TensorDataset(torch.randn(64, 64), torch.randint(0, 8, (64,))), batch_size=4)
trained = [one for one in model.parameters() if one.requires_grad]
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(trained), loader)
for rows, wanted in loader:
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.cross_entropy(model(rows), wanted))
        optimizer.step()
        optimizer.zero_grad()
print("computed in", model[0].weight.dtype)
"""


@pytest.mark.slow
def test_a_loop_that_casts_what_it_does_not_train_is_tuned_in_16_bits(folder):
    """As diffusers' scripts do, by what their Accelerator says."""
    script = folder / "casts.py"
    script.write_text(CASTS)
    held = ("--fix=micro_batch=4", "--fix=precision=bf16", "--fix=loader=default", "--fix=checkpointing=off")
    done = autofit(folder, "tune", script, "--output", "casts", "--device", "cpu", "--trials", 1, *held)
    if "would emulate bfloat16" in done.stderr:
        pytest.skip("no bfloat16 here")
    assert done.returncode == 0, done.stderr
    assert "bfloat16 autocast; weights and optimizer state stay float32 but where the script casts them" in " ".join(
        done.stdout.split()
    )
    ran = autofit(folder, "run", "casts", script)
    assert (ran.returncode, "computed in torch.bfloat16" in ran.stdout) == (0, True), ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "kind", "others"),
    [
        (("--nested",), "nf4 twice", "float32"),
        (("--as-loaded", "--dtype", "float16", "--kind", "int8"), "int8", "float16"),
    ],
)
def test_a_script_that_quantizes_weights_itself_is_tuned_verified_and_run(folder, how, kind, others):
    tiny_llama(folder)
    out = f"packed-{how[-1].strip('-')}"
    LlamaForCausalLM(AutoConfig.from_pretrained(folder / "llama")).save_pretrained(folder / "llama")
    script, words = SCRIPTS / "qlora.py", ("--", "--model", "llama", *how)
    precision = {"float32": "fp32", "float16": "fp16_weights"}[others]
    held = ("--fix=micro_batch=8", "--fix=checkpointing=off", "--fix=attention=default", f"--fix=precision={precision}")
    done = autofit(folder, "tune", script, "--output", out, "--device", "cpu", "--trials", 1, *held, *words)
    assert done.returncode == 0, done.stderr
    found = read_document(folder / out)
    own = found.workload.script
    assert (own.adapter, own.quantization, own.weights_dtype) == ("LORA r=4", kind, others)
    assert own.checkpointing == ("switched on" if others == "float32" else None)
    assert found.guard.verdict == ("alone" if others == "float32" else "method"), found.guard.words
    assert any("are forked from the script where it begins to train" in words for words in found.notes)
    verified = autofit(folder, "verify", out, "--tolerance", "0.95")
    assert verified.returncode == 0, verified.stderr
    ran = autofit(folder, "run", out, script, *words)
    assert ran.returncode == 0, ran.stderr
    assert "took no effect" not in ran.stderr
    assert "recomputes False" in ran.stdout, "the plan keeps what the script by itself recomputes"


@pytest.mark.slow
@pytest.mark.parametrize(("script", "arguments"), [(CLASSIFY, ("--output", "mine")), (LOOP, ())])
def test_a_module_that_has_changed_since_the_tune_is_told(folder, script, arguments):
    own, module = folder / f"of_{script.name}", folder / f"beside_{script.stem}.py"
    own.write_text(f"import {module.stem}\n{script.read_text()}")
    module.write_text("rows = 1\n")
    out, words = own.stem, ("--", "--model", "tiny", *arguments)
    held = ("--fix=micro_batch=8", "--fix=checkpointing=off", "--fix=attention=default", "--fix=precision=fp32")
    done = autofit(folder, "tune", own, "--output", out, "--device", "cpu", "--trials", 1, *held, *words)
    assert done.returncode == 0, done.stderr
    for changed in (False, True):
        if changed:
            module.write_text("rows = 2\n")
        verified = autofit(folder, "verify", out, "--tolerance", "0.95")
        ran = autofit(folder, "run", out, own, *words)
        for one in (verified, ran):
            assert one.returncode == 0, one.stderr
            assert (
                one.stderr.count(f"{module.stem}, which {own.name} imports, is not the text that was tuned") == changed
            )
            assert f"{own.name} is not the text" not in one.stderr


@pytest.mark.slow
@pytest.mark.by_hand
def test_a_public_script_of_trl_is_tuned_and_run(folder):
    script = Path(pytest.importorskip("trl").__file__).parent / "scripts" / "sft.py"
    tiny_llama(folder)
    preference_data(folder)
    arguments = (
        "--model_name_or_path", "llama", "--dataset_name", "texts", "--output_dir", "sft", "--use_cpu",
        "--per_device_train_batch_size", 4, "--max_steps", 3, "--save_strategy", "no",
    )  # fmt: skip
    held = ("--fix=micro_batch=2", "--fix=checkpointing=full", "--fix=attention=default", "--fix=precision=fp32")
    words = ("--output", "chatted", "--device", "cpu", "--trials", 1, *held, "--", *arguments)
    done = autofit(folder, "tune", script, *words)
    assert done.returncode == 0, done.stderr
    found = read_document(folder / "chatted")
    assert found.workload.script.trainer == "SFTTrainer"
    assert (found.plan["micro_batch"], found.plan["accumulation"]) == (2, 2)
    assert not (folder / "sft").exists()
    ran = autofit(folder, "run", "chatted", script, "--", *arguments)
    assert ran.returncode == 0, ran.stderr
    assert "took no effect" not in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "given"),
    [("GRPO", {"lora": 4, "beta": 0.1}), pytest.param("RLOO", {"beta": 0.0}, marks=pytest.mark.by_hand)],
)
def test_a_trainer_that_generates_is_tuned_verified_and_run(folder, name, given):
    """Its training on completions that are there is timed and compared; and a plan splits what it generates at once."""
    pytest.importorskip("trl")
    own = {"trainer": name, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2}
    rewarded = folder.with_name(f"{folder.name}-rewarded-{name}")  # beside the script it would be undone
    arguments = json.dumps({**own, **given, "use_cpu": True, "bf16": False, "told": str(rewarded)})
    held = ("--fix=micro_batch=8", "--fix=checkpointing=full", "--fix=precision=fp32")
    out, script = f"generated-{name}", SCRIPTS / "grpo.py"
    done = autofit(folder, "tune", script, "--output", out, "--device", "cpu", "--trials", 2, *held, "--", arguments)
    assert done.returncode == 0, done.stderr
    found = read_document(folder / out)
    assert (found.workload.script.trainer, found.workload.script.generated) == (f"{name}Trainer", 16)
    assert (found.plan["micro_batch"], found.plan["accumulation"]) == (8, 1)
    assert found.workload.seq_len == 40 + 16, "of the longest prompt"
    assert found.guard.verdict == "same", found.guard
    assert found.guard.split is None
    tolerance = float(re.search(r"tolerance ([0-9.e-]+) %", found.guard.words)[1])
    assert tolerance < 1, "in float32; with more nothing is compared"
    first, second, *later = map(json.loads, rewarded.read_text("utf-8").splitlines())
    assert first == second == [40] * 8, "the longest prompts while it warms up, each as often as it has completions"
    assert all(min(one) < max(one) < 40 for one in later[:3]), "and those to be expected while it is timed"
    told = [one for one in found.notes if one.startswith("generating 8 completions of 16 tokens took ")]
    assert told, "as many as before: a whole optimizer step's"
    assert not any("not forecast" in one for one in found.notes)
    verified = autofit(folder, "verify", out, "--tolerance", "0.95")
    assert verified.returncode == 0, verified.stderr
    ran = autofit(folder, "run", out, script, "--", arguments)
    assert ran.returncode == 0, ran.stderr
    assert "took no effect" not in ran.stderr


@pytest.mark.slow
def test_a_trainer_for_which_vllm_generates_is_tuned_and_verified_without_it(folder):
    """It need not be there: its completions are, and the Trainer weighs them by a pass of its own."""
    pytest.importorskip("trl")
    own = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2, "use_vllm": True}
    rewarded = folder.with_name(f"{folder.name}-rewarded-vllm")
    arguments = json.dumps({**own, "lora": 4, "use_cpu": True, "bf16": False, "told": str(rewarded)})
    held = ("--fix=micro_batch=8", "--fix=checkpointing=full", "--fix=precision=fp32", "--memory-limit=4GiB")
    script = SCRIPTS / "grpo.py"
    done = autofit(folder, "tune", script, "--output", "vllm", "--device", "cpu", "--trials", 2, *held, "--", arguments)
    assert done.returncode == 0, done.stderr
    found = read_document(folder / "vllm")
    assert found.workload.script.engine_share > 0
    assert found.workload.limit_bytes == 4 * GIB
    assert (found.plan["micro_batch"], found.plan["accumulation"]) == (8, 1)
    assert found.guard.verdict == "same", found.guard
    assert float(re.search(r"tolerance ([0-9.e-]+) %", found.guard.words)[1]) < 1
    assert [one for one in found.notes if one.startswith("8 completions of 16 tokens were there at once")]
    assert rewarded.read_text("utf-8").splitlines()[0] == json.dumps([40] * 8)
    verified = autofit(folder, "verify", "vllm", "--tolerance", "0.95")
    assert verified.returncode == 0, verified.stderr


@pytest.mark.slow
def test_a_script_is_estimated_on_a_card_that_is_not_here(folder, tmp_path):
    behind = ("--", "--model", folder / "tiny", "--batch", 2, "--output", tmp_path / "mine")
    found = json.loads(autofit(tmp_path, "estimate", CLASSIFY, "--gpu", "RTX 4090", "--json", *behind).stdout)
    assert (found["task"], found["global_batch"], found["seq_len"]) == ("script", 4, 32)
    assert {plan["plan"]["micro_batch"] * plan["plan"]["accumulation"] for plan in found["plans"]} == {4}
    assert {plan["verdict"] for plan in found["plans"]} == {"fits"}
    (weights,) = {plan["need"]["by_category"]["weights"] for plan in found["plans"]}
    assert 4 * found["parameters"] <= weights < 4.1 * found["parameters"]  # and some buffers
    assert any("the script's own batch is 2 x 2 = 4 rows" in note for note in found["notes"])
    assert any(note.endswith("fit is judged on the longest, and samples/s are theirs") for note in found["notes"])
    assert any(note.startswith("its own training, 64 rows, takes ~") for note in found["notes"])
    assert not (tmp_path / "mine").exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_script_is_estimated_on_several_cards(folder, tmp_path):
    """Each process takes what the script says of a device, and half of what FSDP splits."""
    command = ("estimate", CLASSIFY, "--gpu", "RTX 4090", "--gpus", 2, "--all", "--json")
    held = (
        "--fix",
        "precision=fp32",
        "--fix",
        "checkpointing=off",
        "--fix",
        "attention=default",
        "--fix",
        "optimizer=adamw",
    )
    behind = ("--", "--model", folder / "tiny", "--batch", 2)
    found = json.loads(autofit(tmp_path, *command, *held, *behind).stdout)
    assert (found["processes"], found["global_batch"], found["untraced"]) == (2, 8, [])
    machines = json.loads(autofit(tmp_path, *command, *held, "--nodes", 2, *behind).stdout)
    assert (machines["processes"], machines["nodes"], machines["global_batch"]) == (4, 2, 16)
    weights = {one["plan"]["parallel"]: one["need"]["by_category"]["weights"] for one in found["plans"]}
    assert {"ddp", "fsdp"} <= weights.keys()
    assert weights["fsdp"] < 0.7 * weights["ddp"]


@pytest.mark.slow
def test_kinds_of_card_are_compared_by_a_script_s_own_training(folder, tmp_path):
    """Its epoch has 64 rows; tokens that are asked about are those without padding."""
    command = ("estimate", CLASSIFY, "--gpu", "RTX 4090,H100", "--price", "4090=0.4/h", "--json")
    behind = ("--", "--model", folder / "tiny")
    own = json.loads(autofit(tmp_path, *command, *behind).stdout)
    assert (own["tokens"], own["unit"], own["cheapest"]) == (64, "rows", "RTX 4090")
    for row in own["cards"]:
        assert row["hours"] == pytest.approx(64 / row["samples_per_second"] / 3600)
    assert any("less by the padding that is saved" in note for note in own["notes"])
    asked = json.loads(autofit(tmp_path, *command, "--tokens", "1e6", *behind).stdout)
    assert (asked["tokens"], asked["unit"]) == (1e6, "tokens")
    for row, before in zip(asked["cards"], own["cards"], strict=True):
        assert row["samples_per_second"] == before["samples_per_second"]
        assert 4 < row["tokens_per_second"] / row["samples_per_second"] < 32
        assert row["hours"] == pytest.approx(1e6 / row["tokens_per_second"] / 3600)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--gpu", "4090", "--output", "out"), "those of a tune"),
        (("--gpu", "4090", "--seq-len", "64"), "the length of its rows is the script's"),
    ],
)
def test_what_an_estimate_of_a_script_can_t_be_asked_for(options, words):
    ended = CliRunner().invoke(main, ["estimate", str(CLASSIFY), *options])
    assert (ended.exit_code, words in ended.output) == (2, True), ended.output


@pytest.mark.parametrize("options", [("--gpu", "4090"), ("--gpu", "4090,H100")])
@pytest.mark.parametrize("behind", [("--", "--epochs", "3"), ("--call", "2")])
def test_an_estimate_of_a_model_takes_nothing_of_a_scripts(options, behind):
    ended = CliRunner().invoke(main, ["estimate", "demo", *options, *behind])
    assert (ended.exit_code, "is no script" in ended.output) == (2, True), ended.output


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, None),
        ({"script": {"seconds": 9.0, "sampled": 3, "longest_places": (1,)}}, None),
        ({"script": {"mean_length": 10.5}}, None),
        ({"script": {"batch": {"input_ids": (4, 99)}}}, "longest rows are others"),
        ({"script": {"mean_length": 14.0}}, "rows are longer in the mean"),
        ({"script": {"mean_length": 8.0}}, "rows are shorter in the mean"),
        ({"script": {"rows": 9, "micro_batch": 1}}, "micro_batch, rows"),
        ({"model": {"parameters": 7}}, "parameters"),
        ({"config": {"layers": 4, "scale": math.nan}}, "layers"),
    ],
)
def test_a_script_that_trains_something_else_is_not_gone_on_with(tmp_path, monkeypatch, changed, told):
    """Its text is the same, and what it reads is not: trials of two models would decide."""
    (tmp_path / "train.py").write_text("")
    own = {"trainer": "Trainer", "micro_batch": 4, "accumulation": 2, "mean_length": 10.0}
    script = Script(path="train.py", sha256="0" * 64, **own)
    facts = cpu_facts()
    facts = dataclasses.replace(facts, workload=dataclasses.replace(facts.workload, script=script))
    config = {"layers": 2, "scale": math.nan, "_name_or_path": "/a/folder"}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    found = (
        dataclasses.replace(script, **changed.get("script", {})),
        dataclasses.replace(facts.model, **changed.get("model", {})),
        {**config, "_name_or_path": "/another", **changed.get("config", {})},
    )
    monkeypatch.setattr(scripts, "_described", lambda *_: found)
    said = []
    request = Request(model=str(tmp_path / "train.py"))
    refused = told is not None and "rows are" not in told
    noted = []
    with pytest.raises(InputError, match=told) if refused else contextlib.nullcontext():
        noted = scripts.check_same_training(tmp_path, request, facts, None, said.append)
    assert len(said) == 1
    assert [told in words for words in noted] == [True] * bool(told and not refused)
