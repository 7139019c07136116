"""Traces of small models, against whole traces and against real tensors."""

import contextlib
import dataclasses
import importlib
import itertools
import os
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
import torch.utils.checkpoint
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _foreach_utils

from autofit.costmodel.seconds.roofline import KINDS
from autofit.costmodel.tracing import fake_run, trace_job
from autofit.costmodel.tracing.emulation import cuda, cuda_kernels
from autofit.costmodel.tracing.emulation.cuda import like_cuda
from autofit.costmodel.tracing.fake_run import prime_micro_batch
from autofit.costmodel.tracing.layers import PERIODS, Layers, find_layers, find_list, period_of, wrapped_in_part
from autofit.costmodel.tracing.longer_tape import lengthen
from autofit.costmodel.tracing.recorder import Recorder
from autofit.costmodel.tracing.timeline import CATEGORIES
from autofit.costmodel.tracing.trace_request import kernels_of, traced_plan
from autofit.registry import technique, techniques
from tests.support.cases import some_slow
from tests.support.traced import CONFIGS, PLAIN, Lab, every_choice, facts_of, like_a_process_of_its_own

THREE = ("llama", "gpt2", "gemma2")
MIB = 2**20


@pytest.fixture(scope="module")
def labs(tmp_path_factory):
    """A lab for each model and machine, with what it has traced already."""
    made = {}
    # the first run of a process makes a few scalars more, which libraries keep
    Lab(tmp_path_factory.mktemp("first"), "llama").micro_steps(PLAIN)

    def lab(config, **options):
        key = (config, *sorted(options.items()))
        if key not in made:
            made[key] = Lab(tmp_path_factory.mktemp(config), config, **options)
        return made[key]

    return lab


# -- fewer layers -------------------------------------------------------------------------------------------------


def test_the_middle_periods_are_left_out():
    layers = Layers(path="layers", count=12, before=1, period=2)
    assert layers.copies == 2
    assert layers.kept() == [0, 1, 2, 3, 4, 9, 10, 11]
    assert len(layers.kept()) == layers.count - layers.copies * layers.period


WRAPPED = [
    ("llama", {"adapter": "lora:r=16", "kernels": "chunked_ce"}),
    ("llama", {"adapter": "dora:r=8", "checkpointing": "every_2"}),
    ("llama", {"adapter": "lora:r=16", "quantization": "nf4", "precision": "bf16"}),
    ("llama", {"adapter": "lora:r=16", "quantization": "int8"}),
    ("deepseek_v3", {"adapter": "lora:r=4", "quantization": "nf4"}),
    ("mixtral", {"adapter": "lora:r=4", "quantization": "nf4"}),
    ("gpt2", {"adapter": "lora:r=4", "quantization": "nf4"}),
    ("gpt2", {"adapter": "lora:r=4"}),
    ("gemma2", {"adapter": "lora:r=4", "checkpointing": "full"}),
    ("mixtral", {"adapter": "lora:r=4"}),
    ("deepseek_v3", {"adapter": "lora:r=4"}),
]


@pytest.mark.parametrize(("config", "values"), WRAPPED, ids=str)
def test_a_model_that_is_wrapped_in_part_has_the_weights_of_one_that_is_wrapped_whole(labs, config, values):
    lab, plan, found = labs(config, device="cuda"), PLAIN.replaced(**values), []
    for whole in (True, False):
        one = fake_run.FromConfig(plan, lab.facts, lab.folder, lab.folder, whole=whole)
        with like_a_process_of_its_own(), one.prepared():
            found.append(one.model(fake=True))
    whole, part = found
    assert find_layers(part, period_of(plan)) == find_layers(whole, period_of(plan))
    for tensors in ("named_parameters", "named_buffers"):
        first, second = (
            [(name, one.shape, one.dtype, one.requires_grad) for name, one in getattr(model, tensors)()]
            for model in found
        )
        assert first == second
    assert [name for name, _ in whole.named_modules()] == [name for name, _ in part.named_modules()]


def test_a_trace_quantizes_the_layers_that_it_runs(labs, monkeypatch):
    loading = importlib.import_module("autofit.strategies.quantization.loading")
    lab, filled, fill = labs("llama", device="cuda"), [], loading._fill_4bit
    monkeypatch.setattr(loading, "_fill_4bit", lambda *given, **how: filled.append(fill(*given, **how)))
    plan = PLAIN.replaced(adapter="lora:r=16", quantization="nf4")
    one = fake_run.FromConfig(plan, lab.facts, lab.folder, lab.folder)
    with like_a_process_of_its_own(), one.prepared():
        layers = find_list(one.model(fake=True))[1]
    assert len(filled) == 7 * (PERIODS + 1)
    assert len(layers) == 9


def test_copies_stand_for_the_layers_that_no_trace_runs():
    layers = [torch.nn.Linear(4, 4, device="meta") for _ in range(9)]
    model, wrapped = torch.nn.Sequential(torch.nn.ModuleList(layers)), []
    found = wrapped_in_part(model, [lambda one: wrapped.extend(one[0]) or one], 1)
    assert wrapped == [*layers[:3], *layers[8:]]
    assert len(found[0]) == 9
    assert len({id(one) for one in found.parameters()}) == 18


def test_a_model_whose_layers_share_weights_is_wrapped_whole():
    layers = [torch.nn.Linear(4, 4, device="meta") for _ in range(9)]
    for one in layers:
        one.weight = layers[0].weight
    assert wrapped_in_part(torch.nn.Sequential(torch.nn.ModuleList(layers)), [], 1) is None


class Block(torch.nn.Module):
    """A layer of some width."""

    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, 4, device="meta")


@pytest.mark.parametrize(
    ("widths", "found", "multiple"),
    [
        ("aaaaaa", (0, 1), 1),
        ("abababab", (0, 2), 1),
        ("baaaaaaaa", (1, 1), 1),
        ("aaaaaaaab", None, 1),  # the last one is another
        ("abcabcabcabcabc", (0, 3), 1),
        ("aaa", None, 1),  # nothing is left out of three
        ("abcdefgh", None, 1),
        ("aaaaaaaa", (0, 2), 2),
        ("aaaaaa", None, 2),
        ("abababab", (0, 2), 2),
        ("b" + 16 * "a", (1, 4), 4),
        ("aaaaab" * 7, (0, 6), 2),
        ("aaaaab" * 7, None, 4),
        ("aaaaab" * 8, (0, 12), 4),
    ],
)
def test_how_the_kinds_of_layers_repeat(widths, found, multiple):
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(Block(ord(width)) for width in widths)
    layers = find_layers(model, multiple)
    assert (layers and (layers.before, layers.period)) == found


LENGTHENED = [
    *((config, device, precision, "off") for config in THREE for device in ("cpu", "cuda") for precision in ("bf16",)),
    ("llama", "cuda", "fp32", "full"),
    ("gpt2", "cpu", "fp32", "full"),
    ("gpt2", "cuda", "bf16", "full"),
    ("gemma2", "cuda", "bf16", "full"),
    ("llama", "cuda", "bf16", "selective"),
    ("llama", "cuda", "bf16", "full_offload"),
    ("gpt2", "cpu", "fp32", "selective"),
    ("llama", "cpu", "bf16", "every_2"),
    ("gemma2", "cuda", "bf16", "every_2"),
    ("deep", "cuda", "bf16", "every_2"),
    ("deep", "cuda", "bf16", "every_4"),
    ("deep", "cpu", "fp32", "every_4"),
    ("llama", "cpu", "bf16_weights", "off"),
    ("mixtral", "cuda", "bf16", "off"),
    ("mixtral", "cpu", "fp32", "off"),
    ("deepseek_v3", "cuda", "bf16", "off"),
    ("deepseek_v3", "cpu", "bf16_weights", "full"),
]

LENGTHENED_BY_DEFAULT = [
    ("llama", "cuda", "bf16", "off"),
    ("gpt2", "cpu", "fp32", "selective"),
    ("llama", "cpu", "bf16", "every_2"),
    ("mixtral", "cuda", "bf16", "off"),
]


def like_the_whole(lab, plan, rows=5):
    """Check that a lengthened trace needs and does what that of the whole model does."""
    traced = lab.micro_steps(plan)
    assert traced.copies >= 1
    assert len({name for name in traced.tape.segments if name.startswith("0:F")}) == PERIODS
    tape = lengthen(traced.tape, traced.copies)
    whole = lab.micro_steps(plan, whole=True)
    assert whole.copies == 0
    assert whole.weights == traced.weights
    long, short = tape.live(rows), whole.tape.live(rows)
    assert long.max() == pytest.approx(short.max(), rel=1e-6)
    # frees that follow one another may stand in another order; after every allocation as much lives
    np.testing.assert_array_equal(tape.events >= 0, whole.tape.events >= 0)
    made = whole.tape.events >= 0
    np.testing.assert_allclose(long[made], short[made], rtol=1e-6)
    for name in ("work", "work_per_row"):
        np.testing.assert_allclose(getattr(tape, name).sum(axis=0), getattr(whole.tape, name).sum(axis=0))
    evaluated = lengthen(traced.evaluation, traced.copies).live(rows).max()
    assert evaluated == pytest.approx(whole.evaluation.live(rows).max(), rel=1e-6)


@pytest.mark.parametrize("case", some_slow(LENGTHENED, lambda case: case in LENGTHENED_BY_DEFAULT, ids="-".join))
def test_a_lengthened_trace_is_that_of_the_whole_model(labs, case):
    config, device, precision, checkpointing = case
    like_the_whole(
        labs(config, device=device), PLAIN.replaced(micro_batch=2, precision=precision, checkpointing=checkpointing)
    )


ADAPTED = [
    ("llama", "cuda", {"precision": "bf16"}),
    ("llama", "cuda", {"precision": "bf16_weights", "offload": "activations"}),
    ("llama", "cuda", {"precision": "bf16", "quantization": "nf4", "checkpointing": "full"}),
    ("gpt2", "cpu", {"quantization": "nf4"}),
    ("gemma2", "cuda", {"precision": "bf16", "checkpointing": "full"}),
]


@pytest.mark.parametrize(
    "case", some_slow(ADAPTED, lambda case: case[0] == "gpt2", ids=lambda case: f"{case[0]}-{case[1]}")
)
def test_a_lengthened_trace_with_an_adapter_is_that_of_the_whole_model(labs, case):
    """The first layer is like the others but for what is below it: nothing that is trained."""
    config, device, values = case
    like_the_whole(labs(config, device=device), PLAIN.replaced(micro_batch=2, adapter="lora:r=16", **values))


def test_the_rows_of_a_trace_tell_themselves_from_every_other_size():
    model = torch.nn.Linear(101, 103, device="meta")
    model.register_buffer("table", torch.ones(107 * 109, device="meta"))
    rows = prime_micro_batch(model, 114)  # 113 is one less
    assert rows not in {101, 103, 107, 109, 113}
    assert all(rows % divisor for divisor in range(2, rows))


# -- evaluation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", some_slow(["chunked_ce", "none"], lambda kernels: kernels == "chunked_ce"))
def test_an_evaluation_step_needs_what_it_needs_on_real_tensors(labs, kernels):
    lab = labs("llama")
    plan = PLAIN.replaced(micro_batch=3, precision="bf16", checkpointing="full", kernels=kernels)
    traced = lab.micro_steps(plan)
    tape = lengthen(traced.evaluation, traced.copies)
    real = lab.micro_steps(plan, fake=False).evaluation
    assert tape.live(3).max() == pytest.approx(real.live(0).max(), rel=1e-3)


@pytest.mark.parametrize(("parallel", "whole"), [("none", False), ("fsdp", True)])
def test_an_evaluation_makes_all_logits_only_where_the_output_layer_is_split(tmp_path, parallel, whole):
    lab = Lab(tmp_path, CONFIGS["llama"] | {"vocab_size": 20_000}, device="cuda")
    split = dataclasses.replace(lab.facts.model, layer_classes=("LlamaDecoderLayer",))
    lab.facts = dataclasses.replace(lab.facts, model=split)
    offload = "parameters" if whole else "none"
    plan = PLAIN.replaced(micro_batch=4, checkpointing="full", kernels="chunked_ce", parallel=parallel, offload=offload)
    logits = 4 * lab.facts.workload.seq_len * 20_000 * 4
    peak = lab.micro(plan).evaluation.live(4).max()
    assert bool(peak >= 2 * logits) is whole
    assert whole or peak < logits


def test_a_loop_evaluates_by_itself(labs):
    assert labs("llama", launch_path="loop").micro_steps(PLAIN).evaluation is None


# -- real tensors -------------------------------------------------------------------------------------------------


def covering(values, possible, seed=0):
    """Rows of values, of the possible ones, in which every pair of values that can meet stands at least once."""
    rng = random.Random(seed)
    names = list(values)
    missing = {
        (one, a, other, b)
        for one, other in itertools.combinations(names, 2)
        for a in values[one]
        for b in values[other]
    }

    def pairs(row):
        return {(one, row[one], other, row[other]) for one, other in itertools.combinations(names, 2)}

    rows = []
    while missing:
        one, a, other, b = rng.choice(sorted(missing, key=str))
        seeded = {one: a, other: b}
        drawn = [{name: rng.choice(options) for name, options in values.items()} | seeded for _ in range(60)]
        drawn = [row for row in drawn if possible(row)]
        if not drawn:
            missing.discard((one, a, other, b))
            continue
        best = max(drawn, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        rows.append(best)
    return rows


FACTS = {path: facts_of("llama", launch_path=path) for path in ("trainer", "loop")}
QUANTIZATIONS = {path: every_choice(facts)["quantization"] for path, facts in FACTS.items()}


def can_be(row):
    """Whether the techniques let a row be."""
    value, path = row["quantization"], row["launch_path"]
    return value in QUANTIZATIONS[path] and technique("quantization").conflict(value, row, FACTS[path]) is None


COMBINATIONS = covering(
    {
        "precision": ["fp32", "bf16", "bf16_weights"],
        "attention": ["default", "eager"],
        "kernels": ["none", "chunked_ce"],
        "checkpointing": ["off", "full", "every_2", "every_4", "selective"],
        "adapter": ["none", "lora:r=16", "rslora:r=16", "dora:r=16", "ia3"],
        "quantization": ["none", "nf4", "int8"],
        "optimizer": ["adamw", "adamw_8bit", "adafactor", "sgd", "lion", "lion_8bit", "ademamix", "ademamix_8bit"],
        "accumulation": [1, 2, 4],
        "micro_batch": [1, 5, 8],
        "launch_path": ["trainer", "loop"],
    },
    can_be,
)


FOREIGN = {
    "adamw_torchao_8bit": "torchao",
    "adamw_torchao_4bit": "torchao",
    "adamw_torchao_8bit_stochastic": "torchao",
    "adamw_torchao_4bit_stochastic": "torchao",
    "galore_adamw": "galore-torch",
    "galore_adafactor": "galore-torch",
    "apollo_adamw": "apollo-torch",
    "lomo": "lomo-optim",
    "schedule_free_adamw": "schedulefree",
    "schedule_free_radam": "schedulefree",
    "stable_adamw": "torch-optimi",
}
"""Optimizers of packages that are seldom installed, and are tested where they are."""


def test_the_combinations_are_all_that_a_cpu_can_have(labs):
    offered = every_choice(labs("llama").facts)
    assert offered.pop("parallel") == offered.pop("offload") == ["none"]
    assert offered.pop("sync_each_batch") == ["off"]
    assert offered.pop("loader") == ["default"]
    assert offered.pop("batching") == ["pad"]
    offered["optimizer"] = [value for value in offered["optimizer"] if value not in FOREIGN]
    assert offered.pop("compile") == ["off", "model"]
    for name, values in offered.items():
        assert {row[name] for row in COMBINATIONS} == set(values)


VALUES = {pair for row in COMBINATIONS for pair in row.items()}
EACH_VALUE = next(n for n in range(len(COMBINATIONS)) if {p for row in COMBINATIONS[:n] for p in row.items()} == VALUES)
"""So many combinations hold every value; the rest, which hold every pair of them, are run by hand."""


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number,
            id="-".join(map(str, row.values())),
            marks=[pytest.mark.slow] * (number > 0) + [pytest.mark.by_hand] * (number >= EACH_VALUE),
        )
        for number, row in enumerate(COMBINATIONS)
    ],
)
def test_a_trace_needs_what_real_tensors_need(labs, number):
    row = dict(COMBINATIONS[number])
    lab = labs(THREE[number % len(THREE)], launch_path=row.pop("launch_path"))
    choices = every_choice(lab.facts)
    for name, value in row.items():
        if value not in choices.get(name, [value]):
            row[name] = PLAIN[name]
    plan = PLAIN.replaced(**row)
    tape = lab.real(plan)
    live = tape.live(0)
    need = lab.need(plan)
    # random rows to draw from are on the CPU, too: a whole global batch of them in a trace, which has rows enough
    pool = 8 * lab.facts.workload.global_batch * lab.facts.workload.seq_len + 1024
    assert need.peak_bytes == pytest.approx(live.max(), rel=0.02, abs=pool)
    assert sum(need.by_category.values()) == pytest.approx(need.peak_bytes, abs=len(CATEGORIES))


@pytest.mark.slow
def test_without_logits_their_memory_is_gone(tmp_path):
    """As much as a sixteenth of them is there at a time, and no copy of any."""
    lab = Lab(tmp_path, {**CONFIGS["llama"], "vocab_size": 4000}, device="cuda", seq_len=128, launch_path="loop")
    for precision in ("fp32", "bf16", "bf16_weights"):
        plan = PLAIN.replaced(micro_batch=8, precision=precision)
        whole, chunked = lab.need(plan), lab.need(plan.replaced(kernels="chunked_ce"))
        logits_bytes = 4 * 8 * 128 * lab.facts.model.vocab_size
        assert whole.by_category["logits"] > 2 * logits_bytes
        assert chunked.by_category["logits"] < logits_bytes
        assert chunked.peak_bytes < whole.peak_bytes - logits_bytes


def test_a_score_for_every_pair_of_tokens_is_seen(labs):
    lab, plan = labs("llama"), PLAIN.replaced(micro_batch=8)
    fused, eager = lab.need(plan), lab.need(plan.replaced(attention="eager"))
    layers, heads, positions = 6, 4, lab.facts.workload.seq_len
    assert eager.peak_bytes > fused.peak_bytes + 4 * 8 * layers * heads * positions**2


@pytest.mark.parametrize("precision", ["fp32", "bf16_weights"])
@pytest.mark.parametrize("optimizer", [name for name in FOREIGN if name != "lomo"])
def test_a_trace_of_a_foreign_optimizer_needs_what_real_tensors_need(labs, optimizer, precision):
    lab = labs("llama" if optimizer.startswith(("galore", "apollo")) else "gpt2")
    if FOREIGN[optimizer] not in lab.facts.packages:
        pytest.skip(f"{FOREIGN[optimizer]} is not installed")
    plan = PLAIN.replaced(optimizer=optimizer, precision=precision)
    assert lab.need(plan).peak_bytes == pytest.approx(lab.real(plan).live(0).max(), rel=0.02)


# -- what a value is traced as ------------------------------------------------------------------------------------


def peak_of(part, rows):
    return part.tape.live(rows).max()


def claims(lab):
    """Values that are traced as another one of their technique, by the part."""
    for one in techniques():
        if one.name == "compile":  # fake tensors can't be compiled: that it keeps what plain code keeps is a belief
            continue
        values = every_choice(lab.facts).get(one.name, [1, 2, 3])
        for value, part in itertools.product(values, ("micro_steps", "optimizer")):
            if one.traced_as(value, part) not in {None, value}:
                yield one.name, value, part


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "device"),
    [("llama", "cuda"), *(pytest.param("gpt2", device, marks=pytest.mark.by_hand) for device in ("cpu", "cuda"))],
)
def test_a_value_needs_what_the_one_that_it_is_traced_as_needs(labs, config, device):
    lab, seen = labs(config, device=device), 0
    for name, value, part in claims(lab):
        for launch_path in ("trainer", "loop") if name in {"optimizer", "offload"} else ("trainer",):
            lab = labs(config, device=device, launch_path=launch_path)
            own = traced_plan(PLAIN.replaced(micro_batch=2), part).replaced(**{name: value})
            if name == "quantization":
                own = own.replaced(adapter="lora:r=16")
            if part == "micro_steps":
                mine, other = lab.micro(own, as_it_is=True), lab.micro(own)
            else:
                mine, other = lab.optimizer(own, as_it_is=True), lab.optimizer(own)
            for rows in (1, 8):
                # rows that wait, and the tables of 8-bit optimizers, are there from the beginning
                assert peak_of(mine, rows) == pytest.approx(peak_of(other, rows), abs=4096), (name, value, part)
            seen += 1
    assert seen >= 8


def alike(mine, other, rows=8):
    """Whether two tapes have the same blocks, in the same order."""
    same = np.array_equal(mine.events, other.events) and np.array_equal(mine.bytes_at(rows), other.bytes_at(rows))
    return same and [mine.names[one] for one in mine.ops] == [other.names[one] for one in other.ops]


EVALUATED_ALIKE = [
    {"checkpointing": "full"},
    {"checkpointing": "selective"},
    {"checkpointing": "full_offload"},
    {"checkpointing": "every_2"},
    {"offload": "activations"},
    {"precision": "bf16", "kernels": "chunked_ce", "checkpointing": "full"},
    {"precision": "bf16", "adapter": "lora:r=16", "quantization": "nf4", "checkpointing": "full"},
]


@pytest.mark.parametrize("values", EVALUATED_ALIKE, ids=str)
def test_an_evaluation_is_that_of_the_plan_that_it_is_traced_as(labs, values):
    lab = labs("llama", device="cuda")
    plan = PLAIN.replaced(micro_batch=2, **values)
    other = traced_plan(plan, "evaluation")
    assert other != plan
    assert alike(lab.micro(plan, as_it_is=True).evaluation, lab.micro(other, as_it_is=True).evaluation)


def test_an_evaluation_is_traced_once(labs, monkeypatch):
    lab, evaluated = labs("gpt2", device="cuda"), []
    monkeypatch.setattr(fake_run.FromConfig, "run", watched(fake_run.FromConfig.run, evaluated))
    plans, known = [PLAIN.replaced(micro_batch=2, checkpointing=value) for value in ("off", "full")], trace_job.Known()
    with like_a_process_of_its_own():
        first, second = (trace_job.micro_part(one, lab.facts, lab.folder, lab.folder, known=known) for one in plans)
    assert evaluated == [True, False]
    assert first.evaluation is second.evaluation
    assert alike(second.tape, lab.micro(plans[1], as_it_is=True).tape)


def watched(run, evaluated):
    def running(source, *args, **kwargs):
        evaluated.append(source.evaluates)
        return run(source, *args, **kwargs)

    return running


# -- CUDA's habits ------------------------------------------------------------------------------------------------


def saved_by(program):
    """Dtypes and numbers of elements of what a program keeps for its backward pass."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((t.dtype, t.numel())) or t, lambda t: t):
        program()
    return saved


@pytest.fixture
def rows():
    """A few rows of bfloat16."""
    return torch.ones(4, 8, dtype=torch.bfloat16, requires_grad=True)


IN_FLOAT32 = {
    "interpolate": lambda t: F.interpolate(t[None, None], scale_factor=2, mode="bilinear"),
    "layer_norm": lambda t: F.layer_norm(t, (8,)),
    "softmax": lambda t: F.softmax(t, dim=-1),
    "cross_entropy": lambda t: F.cross_entropy(t, torch.zeros(4, dtype=torch.long)),
    "pow": lambda t: t.pow(2),
    "operator": lambda t: t**2,
    "rsqrt": torch.rsqrt,
    "sum": lambda t: t.sum(-1),
    "cumsum": lambda t: t.cumsum(-1),
    "exp": torch.exp,
    "module": torch.nn.LayerNorm(8),
}


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_autocast_computes_as_cuda_does(rows, name):
    with torch.autocast("cpu", torch.bfloat16), like_cuda():
        assert IN_FLOAT32[name](rows).dtype == torch.float32
        assert (rows @ rows.t()).dtype == torch.bfloat16
        assert F.gelu(rows).dtype == torch.bfloat16
    with like_cuda():
        assert F.softmax(rows, dim=-1).dtype == torch.bfloat16  # without autocast nothing is changed


def test_all_that_autocast_computes_in_float32_is_known():
    """By the header of the torch that is installed."""
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    lists = re.findall(r"#define AT_FORALL_FP32(?:_SET_OPT_DTYPE)?\(_\)(.*?)\n\n", header, re.DOTALL)
    listed = {name for one in lists for name in re.findall(r"_\((\w+)", one)}
    assert len(lists) == 2
    assert listed - {"native_layer_norm"} <= cuda._FLOAT32 | cuda._TO_FLOAT32


@pytest.mark.parametrize("name", ["layer_norm", "pow", "exp"])
def test_a_cpu_would_not(rows, name):
    with torch.autocast("cpu", torch.bfloat16):
        assert IN_FLOAT32[name](rows).dtype == torch.bfloat16


def test_dropout_keeps_a_mask_of_booleans():
    given = torch.ones(64, 64, requires_grad=True)
    layer = torch.nn.Dropout(0.5)
    assert (torch.bool, 4096) not in saved_by(lambda: layer(given))
    with like_cuda():
        assert saved_by(lambda: layer(given)) == [(torch.bool, 4096)]
        dropped = layer(given)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    dropped.sum().backward()
    assert given.grad.equal(dropped)


def test_dropout_that_is_off_does_nothing():
    given = torch.ones(4)
    with like_cuda():
        assert F.dropout(given, 0.0) is given
        assert F.dropout(given, 0.5, training=False) is given
        assert torch.nn.Dropout(0.5).eval()(given) is given


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_dropout_keeps_no_square(dtype):
    query = torch.ones(2, 2, 128, 16, dtype=dtype, requires_grad=True)

    def attend():
        return F.scaled_dot_product_attention(query, query, query, dropout_p=0.1, is_causal=True)

    square = 2 * 2 * 128 * 128
    assert max(count for _, count in saved_by(attend)) == square
    with like_cuda():
        assert max(count for _, count in saved_by(attend)) == query.numel()


@pytest.mark.parametrize(("dtype", "groups"), [(torch.bfloat16, 1), (torch.bfloat16, 2), (torch.float32, 1)])
def test_attentions_backward_pass_has_accumulators(dtype, groups):
    batch, heads, length, width = 2, 4, 100, 24
    query = torch.ones(batch, heads, length, width, dtype=dtype, requires_grad=True)
    key = torch.ones(batch, heads // groups, length, width, dtype=dtype, requires_grad=True)
    with Recorder(fake=False, stand_ins=cuda_kernels.kernel_stand_ins()) as recorder:
        recorder.mark("0:F0")
        result = F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
        recorder.mark("0:B0")
        result.sum().backward()
    tape = recorder.tape(since=2)
    held = sorted(tape.sizes[tape.ops == tape.names.index("attention's accumulators")])
    copied = dtype.itemsize * query.numel()  # the gradient of a sum is not contiguous
    if dtype == torch.float32:  # two blocks of 64 rows, one of 64 columns, and 16 bytes to count them
        wanted = [copied, 4 * batch * heads * length, batch * heads * 2 * (4 * 64 * 64 + 16)]
    else:
        # nor does the result, which is laid out as the query, have its heads beside one another
        wanted = [copied, copied, 4 * batch * heads * 128, 4 * batch * 128 * heads * 32]
        if groups > 1:
            wanted += [2 * batch * length * heads * width] * 2
    assert held == sorted(wanted)


@pytest.mark.parametrize(
    ("dtype", "key_heads", "value_width", "masked", "capability", "kernel"),
    [
        (torch.bfloat16, 4, 16, False, (8, 0), "FlashAttention"),
        (torch.bfloat16, 2, 16, False, (8, 0), "FlashAttention"),
        (torch.bfloat16, 4, 16, True, (8, 0), "FlashAttention"),  # that of the CPU, of the same sizes
        (torch.bfloat16, 2, 16, True, (8, 0), None),
        (torch.bfloat16, 4, 8, False, (8, 0), "EfficientAttention"),
        (torch.bfloat16, 2, 16, False, (7, 5), None),
        (torch.float32, 4, 16, False, (8, 0), "FlashAttention"),
        (torch.float32, 2, 16, False, (8, 0), None),
    ],
)
def test_attention_takes_the_kernel_that_cuda_chooses(dtype, key_heads, value_width, masked, capability, kernel):
    query = torch.ones(2, 4, 8, 16, dtype=dtype, requires_grad=True)
    key, value = (torch.ones(2, key_heads, 8, width, dtype=dtype) for width in (16, value_width))
    mask = torch.ones(8, 8, dtype=torch.bool) if masked else None
    with FakeTensorMode(allow_non_fake_inputs=True), like_cuda(capability):
        out = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=key_heads != 4)
    assert out.shape == (2, 4, 8, value_width)
    ran = out.grad_fn.name().removeprefix("ScaledDotProduct")
    assert ran.startswith(kernel) if kernel else "Attention" not in ran, ran


def test_the_memory_efficient_kernel_lays_heads_side_by_side():
    query = torch.ones(2, 4, 49, 8, requires_grad=True)
    recorder = Recorder(stand_ins=cuda_kernels.kernel_stand_ins())
    with FakeTensorMode(allow_non_fake_inputs=True), like_cuda(), recorder:
        recorder.mark("0:F0")
        out = F.scaled_dot_product_attention(query, query, query)
        assert out.transpose(1, 2).is_contiguous()
    assert sorted(recorder.tape(since=1).sizes) == [4 * 2 * 4 * 64, 4 * query.numel()], "64 sums for 49 rows"


@pytest.mark.parametrize(("dtype", "length"), [(torch.bfloat16, 16), (torch.float32, 12)])
def test_a_mask_that_is_learned_takes_no_scores(dtype, length):
    """T5's, one for all rows; where its rows are no multiple of 8 long, a padded copy is added."""
    query = torch.ones(2, 4, length, 8, dtype=dtype, requires_grad=True)
    mask = torch.ones(1, 4, length, length, requires_grad=True)
    kept = []
    with FakeTensorMode(allow_non_fake_inputs=True), like_cuda(), torch.autocast("cpu", dtype, dtype != torch.float32):
        with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
            out = F.scaled_dot_product_attention(query, query, query, mask)
        out.sum().backward()
    bytes_kept = max(one.untyped_storage().nbytes() for one in kept)
    assert bytes_kept == 4 * length * 16 * dtype.itemsize
    assert mask.grad.shape == mask.shape


def test_clipping_takes_partial_norms_of_the_largest_gradient_for_each():
    recorder = Recorder(stand_ins=cuda_kernels.kernel_stand_ins())
    with FakeTensorMode(allow_non_fake_inputs=True), like_cuda(), recorder:
        recorder.mark("0:step")
        torch.nn.utils.get_total_norm([torch.empty(shape) for shape in ((600, 1000), (10,))])
    tape = recorder.tape(since=1)
    assert tape.sizes[tape.ops == tape.names.index("partial norms")].tolist() == [4 * 2 * 10]  # 600,000 / 65,536


@pytest.mark.parametrize(
    ("shape", "dims", "sums"),
    [
        ((1024, 1024), [0], 1024 * 16 * 128),  # 8 MiB were taken for as much in float32
        ((8, 512, 768), [0, 1], 768 * 64 * 128),
        ((1024, 1024), [1], 0),
        ((1024, 1024), None, 0),
        ((100, 1024), [0], 0),
        ((4096, 1), [0], 0),
    ],
)
def test_a_sum_over_rows_splits_them_over_blocks(shape, dims, sums):
    assert cuda_kernels.partial_sums(torch.ones(shape), dims) == (sums, sums)


def test_a_package_that_asks_for_multiprocessors_is_told_those_of_a_card_of_that_kind():
    told = [cuda_kernels.device_properties(one).multi_processor_count for one in ((7, 5), (8, 0), (8, 6), (9, 0))]
    assert told == [80, 132, 142, 132]


def test_partial_sums_grow_with_the_rows_of_a_trace():
    """Up to as many blocks as run at once, which a trace of many rows may exceed."""
    few, many = torch.ones(8, 512, 768), torch.ones(101, 512, 768)
    growing, most = cuda_kernels.partial_sums(many, [0, 1], rows=101)
    assert growing * 8 == cuda_kernels.partial_sums(few, [0, 1])[0] * 101
    assert most == cuda_kernels.partial_sums(many, [0, 1])[0] < growing
    fewer_threads = cuda_kernels.partial_sums(many, [0, 1], rows=101, threads=80 * 2048)[1]
    assert fewer_threads == pytest.approx(most * 80 / 132, rel=0.02)


def test_a_block_that_stops_growing_is_no_larger_at_more_rows():
    given = torch.ones(101, 512, 768)
    with Recorder(fake=False, rows=101, stand_ins=cuda_kernels.kernel_stand_ins()) as recorder:
        given.sum((0, 1))
    tape = recorder.tape()
    sums = tape.ops == tape.names.index("partial sums")
    few, many, more = (float(tape.bytes_at(rows)[sums][0]) for rows in (1, 100, 200))
    assert few < many == more == 4 * cuda_kernels.partial_sums(given, [0, 1])[0]


def test_partial_sums_and_products_live_while_their_kernel_runs():
    given = torch.ones(1024, 1024)
    with Recorder(fake=False, stand_ins=cuda_kernels.kernel_stand_ins()) as recorder:
        given.sum(0)
        torch.ops.aten._softmax_backward_data(given, given, -1, torch.float32)
    tape = recorder.tape()
    held = {name: int(tape.sizes[tape.ops == place].max()) for place, name in enumerate(tape.names)}
    assert held["partial sums"] == 8 * MIB
    assert held["gradient times softmax"] == 4 * MIB


def held_by(program, **options):
    """Names and bytes of what a program's kernels hold, in order."""
    with Recorder(fake=False, stand_ins=cuda_kernels.kernel_stand_ins(**options)) as recorder:
        program()
    tape = recorder.tape()
    return [(tape.names[op], int(size)) for op, size in zip(tape.ops, tape.sizes, strict=True)]


def test_dropout_makes_its_mask_before_its_output():
    given = torch.ones(4, 1024)
    assert [size for _, size in held_by(lambda: torch.native_dropout(given, 0.1, True))][-2:] == [4096, 16384]


def test_attention_of_few_rows_is_computed_in_parts():
    """An H100 ran 12 heads of 512 rows in two parts, and 16 heads of 2048 rows at once."""
    few, many = (torch.ones(1, heads, rows, 64, dtype=torch.bfloat16) for heads, rows in ((12, 512), (16, 2048)))
    parts = [size for name, size in held_by(lambda: F.scaled_dot_product_attention(few, few, few)) if "parts" in name]
    assert parts == [2 * 12 * 512 * 4, 2 * 12 * 512 * 4 * 64]
    assert not any("parts" in name for name, _ in held_by(lambda: F.scaled_dot_product_attention(many, many, many)))


def test_an_embeddings_gradient_takes_rows_for_parts_of_a_tokens_places():
    def backward(places):
        embedding.weight.grad = None
        embedding(torch.zeros(places, dtype=torch.long)).sum().backward()

    embedding = torch.nn.Embedding(1000, 64)
    many, few = ([s for name, s in held_by(lambda n=n: backward(n)) if "embedding's" in name] for n in (4096, 1024))
    assert many == [(409 + 1000) * 64 * 4]
    assert few == []


def test_a_mask_is_added_to_the_scores_in_place():
    query, mask = torch.ones(2, 4, 64, 16), torch.ones(64, 64)
    with FakeTensorMode(allow_non_fake_inputs=True), Recorder() as recorder, like_cuda():
        F.scaled_dot_product_attention(query, query[:, :2], query[:, :2], mask, enable_gqa=True)
    tape = recorder.tape()
    scores = [tape.names[op] for op, size in zip(tape.ops, tape.sizes, strict=True) if size == 4 * 2 * 4 * 64 * 64]
    assert not any("add" in name for name in scores), scores


@pytest.mark.parametrize(
    ("capability", "same_as"),
    [(None, (8, 0)), ((7, 5), (7, 5)), ((8, 9), (8, 6)), ((9, 0), (9, 0)), ((12, 0), (8, 6)), ((7, 0), (7, 5))],
)
def test_cards_whose_kernels_take_the_same_share_their_traces(capability, same_as):
    assert kernels_of(capability) == same_as


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_gradient_that_is_not_contiguous_is_copied_for_a_norm(contiguous):
    given = torch.ones(8, 64, requires_grad=True)
    with Recorder(fake=False, stand_ins=cuda_kernels.kernel_stand_ins()) as recorder:
        recorder.mark("0:F0")
        result = F.layer_norm(given, (64,))
        recorder.mark("0:B0")
        result.backward(torch.ones(8, 64) if contiguous else torch.ones(()).expand(8, 64))
    names = recorder.tape(since=2).names
    assert ("a gradient made contiguous" in names) is not contiguous


def test_checkpointed_layers_recompute_with_the_same_habits():
    given = torch.ones(4, 64, requires_grad=True)
    seen = []

    def layer(tensor):
        normed = F.layer_norm(tensor.bfloat16(), (64,))
        seen.append(normed.dtype)
        return F.dropout(normed, 0.5)  # a mask of another dtype would be refused when it is made again

    with torch.autocast("cpu", torch.bfloat16), like_cuda():
        torch.utils.checkpoint.checkpoint(layer, given, use_reentrant=False).sum().backward()
    assert seen == [torch.float32] * 2


def test_habits_are_left_behind():
    from transformers import modeling_utils

    before = torch.utils.checkpoint.checkpoint, modeling_utils.checkpoint
    devices = _foreach_utils._get_foreach_kernels_supported_devices()
    with contextlib.suppress(ZeroDivisionError), like_cuda():
        assert "cpu" in _foreach_utils._get_foreach_kernels_supported_devices()
        assert modeling_utils.checkpoint is not before[1]
        raise ZeroDivisionError
    assert (torch.utils.checkpoint.checkpoint, modeling_utils.checkpoint) == before
    assert _foreach_utils._get_foreach_kernels_supported_devices() == devices


# -- what waits elsewhere -----------------------------------------------------------------------------------------

WIDE = {**CONFIGS["llama"], "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 5, "vocab_size": 500}
"""Wide enough for matrices that bitsandbytes pages, of more than 100 000 elements."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("wide"), WIDE, device="cuda", seq_len=512)


@pytest.fixture(scope="module")
def shapes(wide):
    """Shapes of the parameters, embeddings first."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(wide.folder))
    embeddings = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    return [(p.numel(), id(p) in embeddings) for p in model.parameters()]


@pytest.mark.slow
def test_optimizers_hold_their_state(wide, shapes):
    count = sum(number for number, _ in shapes)
    one = technique("optimizer")
    states = {
        name: wide.optimizer(PLAIN.replaced(optimizer=name))
        for name in every_choice(wide.facts)["optimizer"]
        if one.traced_as(name, "optimizer") is not None
    }
    assert states["adamw"].state_bytes == pytest.approx(8 * count, rel=1e-3)
    assert states["sgd"].state_bytes == pytest.approx(4 * count, rel=1e-3)
    assert states["adafactor"].state_bytes < 0.02 * 4 * count
    # bitsandbytes: 8 bits from 4096 elements on, but embeddings in 32; two float32 for a block of 256
    bits8 = sum(8 * n if embedding or n < 4096 else 2 * n + 8 * -(-n // 256) for n, embedding in shapes)
    assert states["adamw_8bit"].state_bytes == pytest.approx(bits8, rel=2e-3)
    assert states["paged_adamw"].state_bytes + states["paged_adamw"].elsewhere_bytes == pytest.approx(8 * count)
    for name, moments in (("lion", 1), ("ademamix", 3)):
        assert states[name].state_bytes == pytest.approx(4 * moments * count, rel=1e-3)
        own8 = sum(
            4 * moments * n if embedding or n < 4096 else moments * (n + 4 * -(-n // 256)) for n, embedding in shapes
        )
        assert states[f"{name}_8bit"].state_bytes == pytest.approx(own8, rel=2e-3)
        paged = states[f"paged_{name}_8bit"]
        assert paged.elsewhere_bytes > 0
        assert paged.state_bytes + paged.elsewhere_bytes == pytest.approx(own8, rel=2e-3)
    if "torchao" in wide.facts.packages:  # quantized where blocks of 256 fill a parameter, embeddings too
        for bits in (4, 8):
            quantized = [n for n, _ in shapes if n >= 4096 and n % 256 == 0]
            ao = sum(2 * (n * bits // 8 + n // 64 + 4 * 2**bits) for n in quantized)
            ao += 8 * (count - sum(quantized))
            assert states[f"adamw_torchao_{bits}bit"].state_bytes == pytest.approx(ao, rel=2e-3)
    assert {part.elsewhere_bytes for name, part in states.items() if "paged" not in name} == {0}


def test_paged_state_lies_elsewhere(wide, shapes):
    own, paged = (wide.optimizer(PLAIN.replaced(optimizer=name)) for name in ("adamw_8bit", "paged_adamw_8bit"))
    moved = sum(n * (8 if embedding else 2) for n, embedding in shapes if n >= 1e5)
    assert moved > 0
    assert paged.elsewhere_bytes == moved
    assert paged.state_bytes == own.state_bytes - moved
    assert peak_of(paged, 0) <= peak_of(own, 0) - moved * 0.99


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
def test_state_on_the_host(wide, optimizer):
    plan = PLAIN.replaced(optimizer=optimizer)
    own, host = wide.optimizer(plan), wide.optimizer(plan.replaced(offload="optimizer"))
    assert own.elsewhere_bytes == 0
    assert host.elsewhere_bytes + host.state_bytes == own.state_bytes
    assert host.state_bytes <= 16 * 64  # step counts
    need, less = wide.need(plan.replaced(micro_batch=8)), wide.need(plan.replaced(micro_batch=8, offload="optimizer"))
    assert need.phase != "optimizer"
    assert less.peak_bytes == need.peak_bytes - host.elsewhere_bytes
    assert less.elsewhere_bytes == host.elsewhere_bytes


def test_state_comes_in_a_chunk_at_a_time(wide, monkeypatch):
    """With chunks, less than the whole state is on the device while the optimizer steps."""
    from functools import partial

    offload = next(one for one in techniques() if one.name == "offload")
    module = __import__("sys").modules[type(offload).__module__]
    plan = PLAIN.replaced(offload="optimizer")
    whole = wide.optimizer_steps(plan).live(0).max()
    monkeypatch.setattr(module, "keep_state_on_host", partial(module.keep_state_on_host, chunk_bytes=MIB))
    chunked = wide.optimizer_steps(plan)
    state = wide.optimizer(PLAIN).state_bytes
    assert chunked.live(0).max() < whole - 0.7 * state
    assert chunked.live_elsewhere(0).max() == pytest.approx(state, rel=1e-3)


def test_activations_on_the_host(wide):
    plan, rows = PLAIN.replaced(micro_batch=4), 4.0
    own, host = wide.micro(plan), wide.micro(plan.replaced(offload="activations"))
    outside = host.tape.live_elsewhere(rows)
    assert own.tape.live_elsewhere(rows).max() == 0
    need, less = wide.need(plan), wide.need(plan.replaced(offload="activations"))
    assert less.elsewhere_bytes == outside.max() > 0
    assert outside[-1] == pytest.approx(0)
    assert less.by_category.get("activations", 0) < need.by_category["activations"]
    # all of it goes out in the forward pass and comes back in the backward pass
    tape = host.tape
    moved = (tape.work + tape.work_per_row * rows)[:, KINDS.index("transfer"), 1]
    head = tape.segments.index("0:headB")
    assert moved[:head].sum() == outside.max()
    assert moved[head : tape.segments.index("0:step")].sum() == outside.max()
    # what two operators save waits there twice
    before, after = (part.tape.starts[part.tape.segments.index("0:headB")] - 1 for part in (own, host))
    fewer = own.tape.live(rows)[before] - host.tape.live(rows)[after]
    assert 0.5 * outside.max() < fewer <= outside.max()


@pytest.mark.parametrize("launch_path", ["trainer", "loop"])
def test_a_trace_puts_back_the_environment_and_the_state_of_accelerate(tmp_path, launch_path):
    lab = Lab(tmp_path, "llama", launch_path=launch_path)
    states = [state._shared_state for state in (AcceleratorState, GradientState, PartialState)]
    before = dict(os.environ), [dict(state) for state in states]
    fake_run.micro_steps(PLAIN, lab.facts, config=lab.folder, folder=lab.folder)
    assert (dict(os.environ), [dict(state) for state in states]) == before
