"""The one test of the whole family: what every technique must do, whichever it is.

A new technique is tested by being in ``ALL``. The parts below: what is said of each choice on machines of every kind;
what is emitted; how the files lie; and, on tiny models of three architectures that really train on the CPU, that what
is chosen is what happens, that the check would tell if it were not, and that its files are loaded back as it.
Their traces are held against real tensors in ``test_trace.py``; ``bench/launch_matrix.py`` launches them all.
"""

import ast
import copy
import dataclasses
import importlib
import inspect
import itertools
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from autofit import space
from autofit.contract import placement
from autofit.contract.emission import Emission
from autofit.contract.outcome import Measured, TimedOut, Trial
from autofit.contract.plan import Plan
from autofit.contract.technique import Kind
from autofit.costmodel.families import fused_share
from autofit.costmodel.forecast import untraced_bytes
from autofit.machine.model import _attentions
from autofit.machine.packages import installed
from autofit.output import result
from autofit.output.document import MODEL_FOLDER
from autofit.output.emit import ARGUMENTS, YAML, check_files, emit
from autofit.output.reports import report
from autofit.output.setup import load
from autofit.registry import changes, extra_seconds, recipe_of, technique, techniques
from autofit.search.decision import changed_values, decide
from autofit.search.loop import Campaign
from autofit.system.errors import InputError
from autofit.system.units import duration
from autofit.training.measure import RECOMPILED
from autofit.training.observer import compiled_graphs, unwrapped
from autofit.training.runner import ProcessRunner
from autofit.training.timing import Effort
from tests.support.cases import looped
from tests.support.copies import Copies
from tests.support.synthetic import GIB, Landscape, cpu_facts, cuda_facts, model
from tests.support.tiny import describe, write_config
from tests.support.traced import like_a_process_of_its_own

FOLDER = Path(__file__).resolve().parents[2] / "strategies"
EVERY = frozenset(Kind)
BARE = {"torch": "2.13.0", "transformers": "5.23.0", "accelerate": "1.15.0"}
HERE = {**BARE, **installed()}


def cpu(precisions=("fp32",), **packages):
    facts = cpu_facts(global_batch=12)
    return replace(facts, hardware=replace(facts.hardware, precisions=precisions), packages={**HERE, **packages})


def cuda(capability, *, packages=HERE, host_limit_bytes=100 * GIB, launch_path="trainer", **changed):
    precisions = ["fp32"]
    if capability >= (8, 0):
        precisions += ["tf32", "bf16"]
    if capability >= (7, 0):
        precisions.append("fp16")
    facts = cuda_facts(global_batch=12)
    return replace(
        facts,
        model=model(**changed),
        hardware=replace(facts.hardware, capability=capability, precisions=tuple(precisions)),
        workload=replace(facts.workload, host_limit_bytes=host_limit_bytes, launch_path=launch_path),
        packages=packages,
    )


def rows_that_differ(facts):
    return replace(facts, workload=replace(facts.workload, lengths=(8, 8, 9, 30, 64), told_rows=5_000))


EXTRAS = {
    "bitsandbytes": "0.50.0",
    "deepspeed": "0.18.0",
    "peft": "0.18.0",
    "torchao": "0.18.0",
    "triton": "3.5.0",
    **dict.fromkeys(("lomo-optim", "galore-torch", "apollo-torch", "schedulefree", "torch-optimi"), "1.0"),
}
FUSED = {"flash-attn": "2.8.3", "flash-attn-3": "3.0.0", "liger-kernel": "0.8.5", "triton": "3.7.0"}
EVERY_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
FACTS = {
    "cpu": replace(cpu(), packages=BARE),
    "cpu with bfloat16": cpu(("fp32", "bf16"), **EXTRAS),
    "cpu, no layers": replace(cpu(), model=model(layer_classes=(), supports_checkpointing=False)),
    "cuda 6.1": cuda((6, 1), packages=BARE),
    "cuda 7.0": cuda((7, 0), packages={**BARE, "bitsandbytes": "0.50.0"}),
    "cuda 8.0": cuda((8, 0), packages={**BARE, **EXTRAS}),
    "cuda 9.0": cuda((9, 0), packages={**HERE, **EXTRAS}),
    "cuda 9.0, loop": cuda((9, 0), packages={**HERE, **EXTRAS}, launch_path="loop"),
    "cuda 9.0, a strange model": cuda((9, 0), supports_checkpointing=False, layer_classes=(), has_experts=True),
    "cuda 9.0, fused kernels": cuda(
        (9, 0), packages={**BARE, **FUSED}, attentions=EVERY_ATTENTION, plain_head=True, liger=True
    ),
    "cuda 8.0, no kernel knows it": cuda(
        (8, 0), packages={**BARE, **FUSED}, attentions=("eager",), attention="eager", attention_dropout=True
    ),
    "cuda 8.0, a small host": cuda((8, 0), packages={**BARE, **EXTRAS}, host_limit_bytes=GIB),
    "cuda 8.0, older transformers": cuda((8, 0), packages={**BARE, "transformers": "5.17.2"}),
    "cpu, rows that differ": rows_that_differ(cpu()),
    "cuda 8.0, rows that differ": rows_that_differ(cuda((8, 0))),
    "cuda 8.0, rows that differ, loop": rows_that_differ(cuda((8, 0), launch_path="loop")),
    "three processes": replace(cpu(), workload=replace(cpu().workload, processes=3)),
    "a batch that can't be split": replace(cpu(), workload=replace(cpu().workload, processes=5)),
}
each_technique = pytest.mark.parametrize("one", techniques(), ids=lambda one: one.name)
each_machine = looped(facts=FACTS)


@pytest.fixture(scope="module")
def every_plan():
    """The plans of the whole space on a machine, built once for all tests."""
    built = {}

    def plans(facts):
        if id(facts) not in built:  # FACTS keeps them alive
            built[id(facts)] = space.build(facts, EVERY).plans
        return built[id(facts)]

    return plans


def plan_with(one, value, facts):
    """The plan nearest to the plain one that has the value; conflicts apart."""
    plan = {other.name: other.baseline_for(facts) for other in techniques()} | {one.name: value}
    share = facts.workload.global_batch // facts.workload.processes
    if one.name == "accumulation":
        return Plan(plan | {"micro_batch": share // value})
    return Plan(plan | {"accumulation": share // plan["micro_batch"]})


# --- what is said ---------------------------------------------------------------------------------------------------


@each_machine
@each_technique
def test_a_choice_has_a_value_a_class_a_status_and_a_reason(one, facts):
    for choice in one.choices(facts):
        assert type(choice.value) is type(one.baseline)
        assert type(choice.value) in {int, str}
        assert isinstance(choice.kind, Kind)
        assert choice.status in {"offered", "on_request", "withheld"}
        assert choice.reason.strip()
        assert "\n" not in choice.reason
        assert str(choice.value).strip() == str(choice.value)
        assert "," not in str(choice.value), "--among takes values apart at commas"


@each_machine
@each_technique
def test_values_are_unique_and_the_plain_one_is_offered(one, facts):
    choices = one.choices(facts)
    if facts.workload.global_batch % facts.workload.processes and isinstance(one.baseline, int):
        assert choices == ()
        return
    values = [choice.value for choice in choices]
    assert len(set(map(str, values))) == len(values)
    assert [choice.status for choice in choices if choice.value == one.baseline_for(facts)] == ["offered"]
    assert one.choices(facts) == choices, "asked twice, answered twice"


@each_machine
@each_technique
def test_a_value_is_read_back_from_its_words_or_refused_with_the_reason(one, facts):
    for choice in one.choices(facts):
        if choice.status == "withheld":
            with pytest.raises(InputError, match="can't be had here") as caught:
                one.parse(str(choice.value), facts)
            assert choice.reason in caught.value.message
            assert str(one.baseline_for(facts)) in caught.value.hint
        else:
            back = one.parse(str(choice.value), facts)
            assert (back, type(back)) == (choice.value, type(choice.value))


@each_machine
@each_technique
def test_another_value_is_refused(one, facts):
    for text in ("", "nonsense", "-1", "0", "1e3", "999999999", "9" * 40, "true", "Fp32", "²", "a,b"):
        with pytest.raises(InputError) as caught:
            one.parse(text, facts)
        assert one.name in caught.value.message
        assert caught.value.hint


@each_machine
@each_technique
def test_what_it_changes_is_a_sentence(one, facts):
    for choice in one.choices(facts):
        plan = plan_with(one, choice.value, facts)
        said = one.changes(choice.value, plan, facts)
        if said is None:
            assert choice.kind == Kind.EXACT or choice.value == one.baseline_for(facts), (
                "nothing is said of what it changes"
            )
            continue
        assert re.fullmatch(r"[A-Z0-9].*\.", said), said
        assert said in changes(plan, facts)


@each_machine
@each_technique
def test_what_is_expected_of_it_is_finite(one, facts):
    for choice in one.choices(facts):
        prior = one.prior(choice.value, facts)
        for mean, deviation in (prior.time, prior.memory):
            assert math.isfinite(mean)
            assert abs(mean) < 10
            assert 0 < deviation < 10
        if choice.value == one.baseline_for(facts):
            assert (prior.time[0], prior.memory[0]) == (0, 0)


@each_machine
@each_technique
def test_nothing_seen_is_no_crash(one, facts):
    for choice in one.choices(facts):
        for little in ({}, {"engine": "DEEPSPEED"}, {"engine": "fsdp2"}, {"layer_forwards": 0}):
            said = one.in_effect(choice.value, little, facts)
            assert said is None or (said.strip() and "\n" not in said)


@each_machine
@each_technique
def test_a_conflict_has_words(one, facts, every_plan):
    for other in every_plan(facts)[::5] if facts.workload.processes != 5 else ():
        for choice in one.choices(facts):
            said = one.conflict(choice.value, other, facts)
            assert said is None or (said.strip() and "\n" not in said)


class Watched(dict):
    """Keeps the names that were asked for."""

    def __init__(self, plan):
        super().__init__(plan)
        self.asked = set()

    def __getitem__(self, name):
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.asked.add(name)
        return super().get(name, default)


@each_machine
@each_technique
def test_a_conflict_looks_at_the_techniques_before_it_alone(one, facts):
    """The space is built one technique after the other: a conflict with a later one would never be seen."""
    plain = {other.name: other.baseline_for(facts) for other in techniques()}
    names = list(plain)
    before = set(names[: names.index(one.name)])
    for parallel in ("none", "ddp", "fsdp", "zero3", "tp2xfsdp1"):
        for values in ({}, {"offload": "parameters"}, {"kernels": "liger", "precision": "bf16"}):
            plan = Watched({**plain, "parallel": parallel, **values})
            for choice in one.choices(facts):
                one.conflict(choice.value, plan, facts)
            assert plan.asked <= before


# --- what is emitted ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fields():
    """The names that the installed libraries know, by where they are written."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser
    from transformers import TrainingArguments

    return {
        "accelerate": {field.name for field in dataclasses.fields(ClusterConfig)},
        "accelerate, below": set(vars(launch_command_parser().parse_args(["script.py"]))),
        "training_args": {field.name for field in dataclasses.fields(TrainingArguments)},
    }


def leaves(value):
    """Every scalar in a JSON value."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    else:
        yield value


@each_machine
@each_technique
def test_what_is_emitted_is_plain_json_and_never_auto(one, facts):
    for choice in one.choices(facts):
        emission = one.emit(choice.value, plan_with(one, choice.value, facts), facts)
        assert isinstance(emission, Emission)
        for part in (emission.accelerate, emission.training_args):
            plain = dict(part)
            assert json.loads(json.dumps(plain, allow_nan=False)) == plain
            assert "auto" not in {str(leaf).lower() for leaf in leaves(plain)}
        for line in emission.script:
            assert line.strip()
            assert "\n" not in line


@each_machine
@each_technique
def test_every_key_is_one_that_the_installed_libraries_know(one, facts, fields):
    now = replace(facts, packages={**facts.packages, **HERE})
    for choice in one.choices(facts):
        emission = one.emit(choice.value, plan_with(one, choice.value, now), now)
        assert emission.training_args.keys() <= fields["training_args"]
        assert emission.accelerate.keys() <= fields["accelerate"]
        for name, below in emission.accelerate.items():
            if isinstance(below, dict):
                assert below.keys() <= fields["accelerate, below"], name


@each_machine
@each_technique
def test_a_field_that_one_value_writes_every_value_writes(one, facts):
    """What is left out is a default, and defaults differ: SFTConfig switches bf16 and checkpointing on."""
    for choice in one.choices(facts):
        plain = one.emit(one.baseline_for(facts), plan_with(one, one.baseline_for(facts), facts), facts)
        here = one.emit(choice.value, plan_with(one, choice.value, facts), facts)
        assert here.training_args.keys() == plain.training_args.keys()
        assert plain.accelerate.keys() <= here.accelerate.keys()


@each_machine
def test_all_techniques_together_collide_nowhere(facts, every_plan):
    if facts.workload.global_batch % facts.workload.processes:
        return
    for one in techniques():
        for choice in one.choices(facts):
            recipe_of(plan_with(one, choice.value, facts), facts)
    for plan in every_plan(facts)[::11]:
        filled = recipe_of(plan, facts)
        assert filled.micro_batch * filled.accumulation * facts.workload.processes == facts.workload.global_batch
        assert filled.emission.accelerate["mixed_precision"] in {"no", "bf16", "fp16"}
        assert filled.emission.accelerate["distributed_type"] in {"NO", "MULTI_GPU", "FSDP", "DEEPSPEED"}


def test_two_techniques_that_write_one_key_are_a_bug():
    filled = recipe_of(plan_with(technique("offload"), "none", FACTS["cpu"]), FACTS["cpu"])
    with pytest.raises(AssertionError, match="two techniques write training_args"):
        filled.add(Emission(training_args={"optim": "sgd"}))
    with pytest.raises(AssertionError, match="two techniques write accelerate"):
        filled.add(Emission(accelerate={"mixed_precision": "no"}))


# --- how the files lie ----------------------------------------------------------------------------------------------


def files():
    """The techniques by where they lie: a file, or a folder of a family."""
    return sorted(
        {path.stem for path in FOLDER.glob("[!_]*.py")} | {path.parent.name for path in FOLDER.glob("*/__init__.py")}
    )


def test_all_is_every_file_and_every_file_is_one_technique():
    assert sorted(one.name for one in techniques()) == files()
    for one in techniques():
        assert type(one).__module__ == f"autofit.strategies.{one.name}"


def test_all_is_a_literal_tuple():
    tree = ast.parse((FOLDER / "__init__.py").read_text("utf-8"))
    (value,) = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ALL"
    ]
    assert isinstance(value, ast.Tuple)
    assert [ast.unparse(entry) for entry in value.elts] == [f"{type(one).__name__}()" for one in techniques()]


@each_technique
def test_the_docstring_says_what_it_saves_and_costs_and_does_not_cover(one):
    text = inspect.getdoc(inspect.getmodule(type(one)))
    for wanted in (r"\bsaves?\b", r"\bcosts?\b", r"\bsources?\b", r"\bnot covered\b"):
        assert re.search(wanted, text, re.IGNORECASE), wanted
    assert inspect.getdoc(type(one))


@pytest.mark.parametrize("name", files())
def test_a_technique_imports_the_contract_and_no_other_technique(name):
    sources = [FOLDER / f"{name}.py"] if (FOLDER / f"{name}.py").exists() else sorted((FOLDER / name).glob("*.py"))
    for node in itertools.chain.from_iterable(ast.walk(ast.parse(path.read_text("utf-8"))) for path in sources):
        if isinstance(node, ast.ImportFrom):
            inside = node.level == 1 and len(sources) > 1
            names = [] if inside else [f"{'.' * node.level}{node.module or ''}"]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for imported in names:
            assert not imported.startswith((".", "strategies")), imported
            assert imported.split(".")[0] != "autofit" or imported.startswith("autofit.contract"), imported


@pytest.mark.parametrize("facts", [cpu(("fp32", "bf16"), **EXTRAS), FACTS["cpu"]], ids=["all", "bare"])
def test_what_a_cpu_refuses_is_run_on_a_gpu(facts):
    """By the one test there that runs every choice of every technique; a value that is left out there is told here."""
    from tests.gpu.test_device import KNOBS, values

    for one in techniques():
        known = {choice.value for choice in one.choices(facts)}
        refused = {choice.value for choice in one.choices(facts) if choice.status == "withheld"}
        if one.name in KNOBS:
            assert set(values(one.name)) == known
        else:
            assert not refused or one.name in {"parallel", "sync_each_batch", "loader", "batching"}, (
                "of several cards, of scripts, of rows that differ"
            )


# --- what really happens --------------------------------------------------------------------------------------------

_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 128, "max_position_embeddings": 16}
_WIDTHS = {**_SIZES, "hidden_size": 32, "intermediate_size": 128, "num_key_value_heads": 2}


def attentions_of(model_type):
    """What a class attends by, which changes with transformers."""
    with torch.device("meta"):
        found = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type))
    return {"attention": found.config._attn_implementation, "attentions": _attentions(found)}


MODELS = {
    "llama": (
        {"model_type": "llama", **_WIDTHS, "tie_word_embeddings": False},
        {"architecture": "LlamaForCausalLM", "layer_classes": ("LlamaDecoderLayer",), "plain_head": True},
    ),
    "gpt2": (
        {"model_type": "gpt2", "n_embd": 32, "n_inner": 128, "n_layer": 2, "n_head": 2, "vocab_size": 128}
        | {"n_positions": 16},
        {"architecture": "GPT2LMHeadModel", "layer_classes": ("GPT2Block",), "plain_head": True},
    ),
    "gemma2": (
        {"model_type": "gemma2", **_WIDTHS, "head_dim": 16, "sliding_window": 8},
        {"architecture": "Gemma2ForCausalLM", "layer_classes": ("Gemma2DecoderLayer",)} | attentions_of("gemma2"),
    ),
}
"""Configs, and what a tune reads off them: rotary and learned positions, linear layers and Conv1D, capped scores."""
QUICK = Effort(fidelity="whole", min_steps=1, max_steps=1)


def tiny(launch_path, name="llama"):
    facts = cpu_facts(global_batch=4, seq_len=16, limit_bytes=2 * GIB, launch_path=launch_path)
    sizes = {"parameters": 50_000, "layers": 2, "hidden_size": 32, "vocab_size": 128, "max_positions": 16}
    read = model(**sizes, model_type=name, **MODELS[name][1])
    return replace(facts, model=read, packages=installed())


def to_be_had(one, facts):
    return [choice.value for choice in one.choices(facts) if choice.status != "withheld"]


PATHS = ("trainer", "loop")
READ_THE_PATH = {"checkpointing", "kernels", "optimizer"}
"""Techniques whose :meth:`apply` reads the launch path."""


BY_DEFAULT = {"bf16", "nf4", "selective"}


def real():
    """Every value on one model or another, by one launch path or, where its technique reads the path, by both."""
    turn = itertools.count()
    for one in techniques():
        places = {}
        for path, name in itertools.product(PATHS, MODELS):
            for value in to_be_had(one, tiny(path, name)):
                places.setdefault(value, []).append((path, name))
        for value, possible in places.items():
            groups = [[place for place in possible if place[0] == path] for path in PATHS]
            for group in groups if one.name in READ_THE_PATH else [possible]:
                if group:
                    path, name = group[next(turn) % len(group)]
                    yield name, path, one, value


REAL = [
    pytest.param(
        name,
        path,
        one,
        value,
        id=f"{one.name}={value} on {name} by {path}",
        marks=() if value in BY_DEFAULT else [pytest.mark.slow] + [pytest.mark.by_hand] * (value == "regions"),
    )
    for name, path, one, value in real()
]


WITHOUT_CODE = """
import json
from autofit.worker import JOB
if json.loads((folder / JOB).read_text()).get("plan", {}).get("compile", "off") != "off":
    from torch._dynamo.backends.debugging import aot_eager
    from torch._inductor import compile_fx
    compile_fx.compile_fx = lambda graph, inputs, **_: aot_eager(graph, inputs)
honest(folder)
"""
"""Graphs are captured, and run as they are: the code that Inductor makes of them takes a minute for a model.

It is made for the first model here, and for every model in ``bench/launch_matrix.py``.
"""


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    made = {name: write_config(folder / name, config) for name, (config, _) in MODELS.items()}
    for name in list(made)[1:]:
        (made[name] / "fault.py").write_text(WITHOUT_CODE, "utf-8")
    return made


@pytest.fixture(scope="module")
def run(server, configs, tmp_path_factory):
    """Runs a plan as a trial does, each in a process of its own, and each plan once."""
    folder = tmp_path_factory.mktemp("contract")
    known = {}

    def run_once(path, one, value, name="llama"):
        facts = tiny(path, name)
        fitting = space.build(facts, EVERY, {one.name: (value,)}).plans
        plan = min(fitting, key=lambda plan: (changed_values(plan), plan["accumulation"]))
        if (name, path, plan) not in known:
            runner = ProcessRunner(folder / "trials", facts, configs[name], server)
            trial = runner.run(len(known), plan, QUICK, purpose="final", limit_seconds=300)
            known[name, path, plan] = trial
        return known[name, path, plan]

    return run_once


@pytest.mark.parametrize("name", MODELS)
def test_the_models_are_as_a_tune_reads_them(server, configs, name):
    for path in ("trainer", "loop"):
        known = tiny(path, name)
        read = replace(known, model=describe(server, configs[name]).model)
        for one in techniques():
            assert to_be_had(one, read) == to_be_had(one, known), one.name


@pytest.mark.parametrize(("name", "path", "one", "value"), REAL)
def test_what_is_chosen_is_what_happens(run, configs, tmp_path, name, path, one, value):
    """Tried; seen to be in effect, and no other value of the technique; written; loaded back as what was tried."""
    trial, facts = run(path, one, value, name), tiny(path, name)
    outcome = trial.outcome
    assert isinstance(outcome, Measured), outcome
    assert one.in_effect(value, outcome.evidence.of(one.name), facts) is None
    assert math.isfinite(outcome.loss)
    for other in to_be_had(one, facts):
        if other != value:
            assert one.in_effect(other, outcome.evidence.of(one.name), facts), f"{value} would pass for {other}"
    emission, setup = recipe_of(trial.plan, facts).emission, loaded_back(trial, facts, configs[name], tmp_path / "out")
    assert setup.plan == trial.plan
    assert setup.recipe.emission == emission
    assert yaml.safe_load((tmp_path / "out" / YAML).read_text("utf-8")) == emission.accelerate
    assert json.loads((tmp_path / "out" / ARGUMENTS).read_text("utf-8")) == emission.training_args
    with like_a_process_of_its_own():
        net = setup.model()
        optimizer = setup.optimizer(net, output_dir=str(tmp_path))
    sizes = [parameter.numel() for parameter in net.parameters()]
    trained = [parameter.numel() for parameter in net.parameters() if parameter.requires_grad]
    assert (sum(sizes), sum(trained)) == (outcome.evidence.parameters, outcome.evidence.trainable_parameters)
    stepping = type(unwrapped(optimizer))
    assert f"{stepping.__module__}.{stepping.__qualname__}" == outcome.evidence.of("optimizer")["class"]


def loaded_back(trial, facts, config, folder):
    """What a script gets of the files of a tune that this trial has won."""
    shutil.copytree(config, folder / MODEL_FOLDER)
    decision = decide([trial], facts.workload.limit_bytes)
    emit(result.compose(decision, facts, [trial], notes=(), seconds=1.0), folder, "<html>", check_files)
    return load(folder)


def test_rows_are_full_and_unpadded(run):
    for path in ("trainer", "loop"):
        evidence = run(path, technique("micro_batch"), 2).outcome.evidence
        assert evidence.of("micro_batch") == {"rows": 2}
        assert evidence.of("accumulation") == {"micro_steps": 2}
        assert evidence.seq_len == 16
        assert evidence.padding_mask is False


@pytest.mark.slow
def test_checkpointing_recomputes_each_layer_once(run):
    again = {"off": (1, 0), "full": (2, 2), "every_2": (2, 1), "selective": (2, 2)}
    for path in ("trainer", "loop"):
        for value, seen in again.items():
            evidence = run(path, technique("checkpointing"), value).outcome.evidence.of("checkpointing")
            assert (evidence["layer_forwards"], evidence["layers_recomputed"]) == seen
            assert evidence["layers"] == 2
            assert (evidence["kept_outputs"] > 0) == (value == "selective")


@pytest.mark.slow
def test_exact_choices_keep_the_loss_of_the_plain_run(run):
    """The seed is the same, so are the rows; three steps apart only by the order of rounding."""
    for path in ("trainer", "loop"):
        plain = run(path, technique("checkpointing"), "off").outcome.loss
        for value in ("full", "every_2", "selective"):
            assert run(path, technique("checkpointing"), value).outcome.loss == pytest.approx(plain, rel=1e-5)
        assert run(path, technique("optimizer"), "sgd").outcome.loss != plain


# --- the parts that need a GPU, on what a CPU can show of them ------------------------------------------------------


@pytest.fixture
def offload():
    assert technique("offload")
    return importlib.import_module("autofit.strategies.offload")


def network():
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64), torch.nn.LayerNorm(64)
    )


def trained(net, optimizer, steps=3):
    """Parameters after some steps under a schedule, which wraps the optimizer's step as a Trainer's does."""
    import torch

    torch.manual_seed(1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(steps):
        net(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.parametrize("chunk_bytes", [1, 20_000, 1 << 30])
def test_state_kept_on_the_host_steps_as_the_plain_optimizer(offload, chunk_bytes):
    import torch

    plain, chunked = network(), network()

    def adamw(net):
        decayed = [{"params": list(net[0].parameters())}, {"params": list(net[2:].parameters()), "weight_decay": 0.0}]
        return torch.optim.AdamW(decayed, lr=1e-2, weight_decay=0.1, fused=True)

    kept = offload.keep_state_on_host(adamw(chunked), chunk_bytes=chunk_bytes)
    count = {1: 6, 20_000: 4, 1 << 30: 2}[chunk_bytes]
    assert len(kept.param_groups) == count
    assert {group["weight_decay"] for group in kept.param_groups} == {0.1, 0.0}
    wanted = trained(plain, adamw(plain))
    for ours, theirs in zip(trained(chunked, kept), wanted, strict=True):
        assert torch.equal(ours, theirs)
    assert len(kept.param_groups) == count
    assert not torch.equal(wanted[0], next(network().parameters()))


def test_activations_on_the_host_give_the_same_gradients(offload):
    import torch

    def gradients(net, rows, context):
        with context:
            loss = net(rows).square().mean()
        loss.backward()
        return [parameter.grad for parameter in net.parameters()]

    plain, kept = network(), network()
    rows = torch.randn(8192, 64)
    keeper = offload.HostActivations()
    theirs = gradients(plain, rows, torch.enable_grad())
    with placement.use(Copies()):
        ours = gradients(kept, rows, keeper.hooks(kept))
    assert keeper.moved_bytes >= rows.nbytes + 8192 * 256 * 4
    for mine, yours in zip(ours, theirs, strict=True):
        assert torch.equal(mine, yours)


def test_what_is_small_or_a_weight_or_elsewhere_stays(offload):
    import torch

    net = torch.nn.Linear(1024, 512, bias=False)
    keeper = offload.HostActivations()
    keeper.hooks(net)
    weight, large, small = torch.ones(512, 1024), torch.ones(600, 1024), torch.ones(64, 64)
    with placement.use(Copies()):
        assert keeper.pack(weight) is weight
        assert keeper.pack(weight.t()).data_ptr() == weight.data_ptr()
        assert keeper.pack(small) is small
        assert keeper.moved_bytes == 0
        moved = keeper.pack(large)
        assert keeper.moved_bytes == large.nbytes
        assert torch.equal(keeper.unpack(moved), large)
        assert keeper.unpack(moved).data_ptr() != large.data_ptr()
        part = keeper.pack(large[:4])
        assert isinstance(part, tuple), "a small part would keep the whole of a large tensor on the device"
        assert part[1].untyped_storage().nbytes() == large[:4].nbytes
    elsewhere = offload.HostActivations()
    elsewhere.hooks(net)
    assert elsewhere.pack(large) is large


@pytest.mark.parametrize("autocast", [False, True])
def test_an_activation_of_a_weights_shape_goes_to_the_host(offload, autocast):
    """Where a micro-batch has as many tokens as the layer has columns."""
    import torch

    net = torch.nn.Linear(1024, 512, bias=False)
    rows = torch.ones(2, 256, 1024, requires_grad=True)
    keeper = offload.HostActivations()
    casting = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with placement.use(Copies()), casting, keeper.hooks(net):
        net(rows * 2)
    assert keeper.moved_bytes == rows.numel() * (2 if autocast else 4), "the activation, and not the weight"


def test_a_model_with_activations_on_the_host_still_runs(offload):
    import torch

    net = network()
    before = copy.deepcopy(net)(torch.ones(2, 64))
    keeper = offload.HostActivations()
    wrapped = offload.offload_activations(net, keeper)
    assert wrapped is net
    assert torch.equal(wrapped(torch.ones(2, 64)), before)
    assert keeper.moved_bytes == 0
    assert len(list(wrapped.modules())) == 5


# --- a compiler -----------------------------------------------------------------------------------------------------


def offered(facts):
    return {choice.value: (choice.status, choice.reason) for choice in technique("compile").choices(facts)}


@pytest.mark.parametrize(("capability", "status"), [((6, 1), "withheld"), ((7, 0), "offered"), ((8, 0), "on_request")])
def test_fp16_is_searched_where_there_is_no_bf16(capability, status):
    assert technique("precision").choice("fp16", cuda(capability)).status == status


def test_what_can_be_compiled_is_offered_on_cuda_and_on_request_on_a_cpu():
    on_cuda, on_cpu = offered(FACTS["cuda 8.0"]), offered(FACTS["cpu"])
    assert [on_cuda[value][0] for value in ("regions", "model")] == ["offered"] * 2
    assert [on_cuda[value][0] for value in ("model_max_autotune", "cuda_graphs")] == ["on_request"] * 2
    assert [on_cpu[value][0] for value in ("regions", "model")] == ["on_request"] * 2
    assert "minutes" in on_cpu["model"][1]
    assert on_cpu["cuda_graphs"] == ("withheld", "CUDA only")
    assert offered(FACTS["cpu, no layers"])["regions"][0] == "withheld"


@pytest.mark.parametrize(
    ("values", "heads"),
    [
        ({"compile": "model", "checkpointing": "full"}, 12),
        ({"compile": "cuda_graphs", "checkpointing": "every_2"}, 12),
        ({"compile": "model", "checkpointing": "full", "attention": "sdpa"}, 12),
        ({"compile": "model", "checkpointing": "full", "attention": "eager"}, None),  # its trace has the mask
        ({"compile": "model"}, None),
        ({"compile": "regions", "checkpointing": "full"}, None),
        ({"checkpointing": "full"}, None),
    ],
)
def test_a_compiled_model_that_recomputes_holds_a_mask_for_each_head(values, heads):
    facts = FACTS["cuda 8.0"]
    model = replace(facts.model, attention="sdpa", tensor_sizes={"attention heads": 12})
    facts = replace(facts, model=model, workload=replace(facts.workload, seq_len=100))
    baselines = Plan({one.name: one.baseline for one in techniques()})
    plan = baselines.replaced(micro_batch=2, precision="bf16", **values)
    expected = 0 if heads is None else 2 * 100 * 100 * (heads * 2 + 3)
    assert untraced_bytes(plan, facts) == expected
    assert untraced_bytes(plan, replace(facts, hardware=FACTS["cpu"].hardware)) == 0


def test_what_a_compiler_fuses_is_taken_off_the_seconds_of_the_trace_and_nothing_else():
    plain = Plan({one.name: one.baseline for one in techniques()})
    found = {value: fused_share(plain.replaced(compile=value), FACTS["cuda 8.0"]) for value in ("off", "regions")}
    assert found["off"] == 0.0
    assert 0.6 < found["regions"] < 0.77
    assert fused_share(plain.replaced(compile="regions"), FACTS["cpu"]) == 0.0, "nothing is told of a CPU"
    changed = plain.replaced(precision="bf16", checkpointing="full", optimizer="adamw_8bit", adapter="lora:r=16")
    assert fused_share(changed, FACTS["cuda 8.0"]) == 0.0


@pytest.mark.parametrize(
    ("values", "buffers"),
    [
        ({}, 0),
        ({"compile": "regions"}, 1),
        ({"compile": "model"}, 1),
        ({"optimizer": "adamw_torchao_4bit"}, 1),
        ({"optimizer": "adamw_8bit"}, 0),
    ],
)
def test_while_kernels_are_timed_a_buffer_of_the_size_of_the_cache_is_held(values, buffers):
    facts = FACTS["cuda 8.0"]
    facts = replace(facts, hardware=replace(facts.hardware, l2_bytes=40 << 20))
    plan = Plan({one.name: one.baseline for one in techniques()}).replaced(**values)
    assert untraced_bytes(plan, facts) == buffers * (40 << 20)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("cpu", {"compilers": ("cc",)}, "no C++ compiler"),
        ("cuda 8.0", {"compilers": ()}, "no C compiler"),
        ("cuda 8.0", {"capability": (6, 1)}, "too old for Triton"),
        ("cuda 7.0", {}, "triton is not installed"),
    ],
)
def test_without_a_compiler_nothing_is_compiled(name, changes, reason):
    facts = FACTS[name]
    found = offered(replace(facts, hardware=replace(facts.hardware, **changes)))
    assert found.pop("off")[0] == "offered"
    for status, why in found.values():
        assert status == "withheld"
        assert reason in why


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "value"), [("trainer", "regions"), pytest.param("loop", "model", marks=pytest.mark.by_hand)]
)
def test_a_compiled_plan_compiles_in_the_warm_up_alone(run, path, value):
    outcome = run(path, technique("compile"), value).outcome
    seen = outcome.evidence
    told = seen.of("compile")
    assert (told["compiled"], told["mode"], seen.recompiles) == (value, "default", 0)
    assert seen.compiled_graphs >= 1
    assert outcome.warm_up_seconds > outcome.step_seconds
    assert not any("compiled again" in note for note in outcome.notes)
    assert run("loop", technique("compile"), "off").outcome.evidence.compiled_graphs == 0


def test_another_shape_is_another_graph():
    import torch

    twice = torch.compile(lambda x: x + x, backend="eager", dynamic=False)
    before = compiled_graphs()
    for length in (2, 2, 3):
        twice(torch.ones(length))
    assert compiled_graphs() - before == 2


def test_a_mode_that_was_not_used_is_told():
    one, facts = technique("compile"), FACTS["cuda 8.0"]
    seen = {"compiled": "model", "graphs": 2, "mode": "reduce-overhead", "cuda_graphs": True}
    assert one.in_effect("cuda_graphs", seen, facts) is None
    assert "CUDA graph" in one.in_effect("cuda_graphs", {**seen, "cuda_graphs": False}, facts)
    assert "mode" in one.in_effect("model", seen, facts)
    assert "no graph" in one.in_effect("model", {**seen, "graphs": 0}, facts)
    assert "not regions" in one.in_effect("regions", seen, facts)


def test_what_a_trial_costs_beyond_its_steps_is_told_for_compiled_plans():
    facts = FACTS["cuda 8.0"]
    plan = plan_with(technique("compile"), "model", facts)
    assert extra_seconds(plan, facts) > extra_seconds(plan.replaced(compile="regions"), facts) > 0
    assert extra_seconds(plan.replaced(compile="off"), facts) == 0


def test_a_trial_that_compiles_is_given_longer_and_says_what_took_so_long():
    facts, asked = FACTS["cuda 8.0"], []

    class Late:
        def run(self, number, plan, effort, *, purpose, limit_seconds):
            asked.append(limit_seconds)
            late = TimedOut(limit_seconds=limit_seconds, phase="compiling")
            return Trial(number=number, plan=plan, outcome=late, wall_seconds=limit_seconds, purpose=purpose)

    plan = plan_with(technique("compile"), "off", facts)
    campaign = Campaign(facts=facts, space=space.build(facts, EVERY), runner=Late())
    for value in ("off", "regions", "model"):
        campaign.run(plan.replaced(compile=value), QUICK, "search", again=True)
    off, regions, whole = asked
    assert off < regions < whole == off + 3 * extra_seconds(plan.replaced(compile="model"), facts)
    campaign.left = lambda: 100.0
    campaign.run(plan.replaced(compile="model"), QUICK, "search", again=True)
    assert asked[-1] == 100.0
    land = Landscape(facts=facts, row_bytes=1e6)
    trials = [*campaign.trials, land.trial(plan, 4, "final")]
    again = replace(trials[-1].outcome, notes=(RECOMPILED.format(2),))
    trials[-1] = replace(trials[-1], outcome=again)
    decision = decide(trials, facts.workload.limit_bytes)
    page = report.html(result.compose(decision, facts, trials, notes=(), seconds=1.0), folder="out")
    assert f"timed out in compiling, after {duration(whole)}" in page
    assert RECOMPILED.format(2) in page
