"""What plans need on a card that is not here, from the config to the table."""

import io
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

import autofit
from autofit import cli, space
from autofit.commands.estimates import estimate, plans
from autofit.commands.estimates.answer import ESTIMATE, Estimate, bar, table
from autofit.commands.estimates.estimate import check_fits
from autofit.commands.estimates.other_card import counted_cards, elsewhere, on_other_card
from autofit.commands.estimates.plans import cause
from autofit.commands.estimates.screen import screen
from autofit.commands.estimates.ways import Way, _smallest_of, _untried, held_by_way, not_outdone, spaces_by_way
from autofit.commands.request import Request, Search
from autofit.contract.plan import Plan
from autofit.contract.script import Script
from autofit.contract.technique import Kind
from autofit.costmodel import families
from autofit.costmodel import forecast as forecasts
from autofit.costmodel.forecast import MARGIN, context_bytes, workspace_bytes
from autofit.costmodel.memory import peak
from autofit.costmodel.tracing import trace_store
from autofit.costmodel.tracing.timeline import CATEGORIES
from autofit.machine.gpu_catalogue import find
from autofit.output.document import read_document
from autofit.output.wording import estimate_words
from autofit.registry import techniques
from autofit.search.decision import changed_values
from autofit.system.errors import InputError, ModelError, NothingFits
from autofit.system.units import GIB, MIB
from tests.support.replay import Lent
from tests.support.synthetic import cpu_facts, cuda_facts
from tests.support.tiny import REPOSITORY

HELD = ("precision=fp32", "optimizer=adamw", "offload=none", "kernels=none", "attention=default", "compile=off")
WITHOUT_OFFLOAD = (*(knob for knob in HELD if knob != "offload=none"), "checkpointing=off")
"""The same, but for what waits on the host."""
SMALL = {"seq_len": 32, "global_batch": 8}


@pytest.fixture
def ask(server, monkeypatch):
    """``autofit.commands.estimates.estimate.estimate`` with one server for all tests."""
    started = []

    def lend(*_, **__):
        started.append(1)
        return Lent(server)

    monkeypatch.setattr(estimate, "ForkServer", lend)

    def invoke(model="demo", **options):
        return estimate.estimate(model, **{**SMALL, **options})

    invoke.started = started
    return invoke


@pytest.mark.parametrize(("share", "left"), [(0.0, 24 * GIB), (0.25, 18 * GIB)])
def test_what_vllm_takes_of_a_card_is_not_a_trainings(share, left):
    script = Script(
        path="t.py", sha256="", trainer="GRPOTrainer", micro_batch=1, accumulation=1, generated=1, engine_share=share
    )
    found = on_other_card(cpu_facts(script=script), None, 24 * GIB)
    assert (found.workload.limit_bytes, found.hardware.total_bytes) == (left, 24 * GIB)


@pytest.mark.slow
def test_the_demo_on_a_card_by_its_name(ask):
    found = ask(gpu="4090")
    assert found.card == "RTX 4090"
    assert found.plans
    assert all(one.verdict == "fits" for one in found.plans)
    speeds = [one.samples_per_second for one in found.plans]
    assert speeds == sorted(speeds, reverse=True)
    for one in found.plans:
        assert sum(one.need.by_category.values()) == pytest.approx(one.need.peak_bytes, rel=1e-6)
        outside = context_bytes((8, 9)) + workspace_bytes((8, 9))
        assert one.device_bytes >= one.need.peak_bytes + outside
        assert one.plan["micro_batch"] * one.plan["accumulation"] == SMALL["global_batch"]
    assert not any("offload=parameters" in why for why in found.untraced)


@pytest.mark.usefixtures("ask")
@pytest.mark.slow
def test_the_function_of_the_package_takes_values():
    found = autofit.estimate(
        "demo",
        gpu="4090",
        fix={"precision": "bf16", "micro_batch": 2, "kernels": "none", "compile": "off"},
        among={"optimizer": ["adamw", "sgd"]},
        allow=["exact", "numeric"],
        **SMALL,
    )
    assert found.recommended in [one.plan for one in found.plans]
    for one in found.plans:
        assert (one.plan["precision"], one.plan["micro_batch"]) == ("bf16", 2)
        assert one.plan["optimizer"] in {"adamw", "sgd"}
        assert one.samples_per_second > 0
    with pytest.raises(InputError, match="'precison' is not a knob"):
        autofit.estimate("demo", gpu="4090", fix={"precison": "bf16"}, **SMALL)


def test_only_a_size_gives_no_speed_and_the_margin_decides(ask):
    roomy = ask(
        memory="8GiB",
        fix=("precision=bf16", "optimizer=adamw", "offload=none", "checkpointing=off", "kernels=none", "compile=off"),
    )
    (one,) = roomy.plans
    assert one.samples_per_second is None
    assert one.plan["micro_batch"] == SMALL["global_batch"]
    held = tuple(f"{name}={value}" for name, value in one.plan.items() if name != "accumulation")
    just = ask(memory=round(one.device_bytes * (1 + MARGIN)) + MIB, fix=held)
    assert [kind.verdict for kind in just.plans] == ["fits"]
    tight = ask(memory=one.device_bytes + MIB, fix=held)
    assert [kind.verdict for kind in tight.plans] == ["tight"]
    short = ask(memory=one.device_bytes - MIB, fix=held)
    assert [kind.verdict for kind in short.plans] == ["too large"]


@pytest.mark.slow
def test_kinds_that_need_and_give_the_same_are_shown_once(ask):
    among = ("precision=bf16,fp16",)
    fix = ("optimizer=adamw", "offload=none", "checkpointing=off", "kernels=none")
    short, whole = (ask(gpu="4090", among=among, fix=fix, most=most) for most in (12, None))
    assert [one.plan["precision"] for one in short.plans] == ["bf16"]
    assert {one.plan["precision"] for one in whole.plans} == {"bf16", "fp16"}
    assert short.kinds == whole.kinds == len(whole.plans)


@pytest.mark.slow
def test_what_is_recommended_is_the_simplest_of_the_fast_ones(ask):
    found = ask(gpu="4090", seq_len=128, global_batch=32)
    best = found.plans[0].samples_per_second
    near = [one.plan for one in found.plans if one.verdict == "fits" and one.samples_per_second > best / 1.03]
    assert found.recommended in near
    assert changed_values(found.recommended) == min(map(changed_values, near))


def test_what_can_not_be_estimated_is_no_verdict_on_the_card():
    found = SimpleNamespace(plans=(), ways=(), untraced=("parallel=zero3 can't be traced",))
    with pytest.raises(ModelError, match="nothing can be estimated: parallel=zero3 can't be traced") as caught:
        estimate.check_fits(found)
    assert "larger card" not in caught.value.hint


def test_a_screen_without_an_estimate_does_not_say_that_nothing_fits():
    way = Way(name="full", fastest=None, smallest=None, stops="no estimate: parallel=zero3 can't be traced")
    said = {"model": "tiny", "task": "causal-lm", "rows": "rows of 8 tokens", "card": "RTX 4090", "notes": ()}
    numbers = {"parameters": 1, "memory_bytes": GIB, "seq_len": 8, "global_batch": 8, "margin": MARGIN, "seconds": 1.0}
    none = {"plans": (), "recommended": None, "counted": 0, "kinds": 0, "untraced": ()}
    text = shown(Estimate(**said, **numbers, **none, ways=(way,)))
    assert "no estimate: parallel=zero3 can't be traced" in text
    assert "nothing fits" not in text


def test_a_card_that_is_not_here_has_the_cache_of_its_datasheet():
    asked, model = Request(model="demo"), cuda_facts().model
    card = find("A100 SXM 80 GB")
    assert elsewhere(asked, model, card, card.memory_bytes).hardware.l2_bytes == 40 * MIB
    assert elsewhere(asked, model, None, 24 * GIB).hardware.l2_bytes == 0


@pytest.mark.slow
def test_a_smaller_card_takes_a_smaller_micro_batch(ask):
    fix = ("precision=fp32", "optimizer=adamw", "offload=none", "checkpointing=off", "kernels=none")
    big = ask(memory="8GiB", fix=fix, seq_len=128, global_batch=32).plans[0]
    small = ask(memory=big.device_bytes - 40 * MIB, fix=fix, seq_len=128, global_batch=32).plans[0]
    assert small.verdict == "fits"
    assert 1 <= small.plan["micro_batch"] < big.plan["micro_batch"]


@pytest.mark.slow
def test_what_is_kept_needs_no_process(ask):
    first = ask(memory="8GiB")
    before = list(ask.started)
    server_asked = []

    class Never:
        def start(self):
            server_asked.append("start")

        def ask(self, *_, **__):
            server_asked.append("ask")
            raise AssertionError

        def rest(self):
            server_asked.append("rest")

        def close(self):
            pass

    def forecast(*_):
        server_asked.append("forecast")
        return inputs(*_)

    inputs = forecasts._inputs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "ForkServer", lambda *_, **__: Never())
        patch.setattr(forecasts, "_inputs", forecast)
        second = estimate.estimate("demo", memory="8GiB", **SMALL)
    assert before
    assert server_asked[:2] == ["rest", "forecast"], "what it loads meanwhile takes a core"
    assert not {"start", "ask"} & {*server_asked}
    assert second.plans == first.plans


@pytest.mark.slow
def test_host_memory_is_shown_where_a_plan_takes_some(ask):
    found = ask(
        memory="8GiB",
        fix=(
            "offload=optimizer",
            "optimizer=adamw",
            "precision=fp32",
            "checkpointing=off",
            "kernels=none",
            "compile=off",
        ),
    )
    (one,) = found.plans
    parameters = 4 * found.parameters
    assert one.need.elsewhere_bytes == pytest.approx(2 * parameters, rel=0.02)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": "24"}, "--memory 24 is 24 bytes"),
        ({"gpu": "4090", "memory": "24GiB"}, "both say"),
        ({"gpu": "a card of mine"}, "no card that is known"),
        ({"gpu": "H100,4090"}, "names several cards, and this is an estimate of one"),
        ({"memory": "a lot"}, "not a size"),
        ({"gpu": "4090", "seq_len": 1}, "out of range"),
        ({"gpu": "4090", "fix": ("precision=fp7",)}, "no value"),
        ({"gpu": "GTX 1080", "fix": ("precision=bf16",)}, "can't be had"),
    ],
)
def test_bad_input_is_refused(ask, options, words):
    with pytest.raises(InputError, match=words):
        ask(**options)


def run(server, monkeypatch, *words):
    monkeypatch.setattr(estimate, "ForkServer", lambda *_, **__: Lent(server))
    return CliRunner().invoke(cli.main, ["estimate", *words], prog_name="autofit")


@pytest.mark.slow
def test_the_command_prints_a_table_or_json(server, monkeypatch):
    held = [f"--fix={text}" for text in HELD[1:]]
    small = ["demo", "--seq-len", "32", "--global-batch", "8", *held]
    shown = run(server, monkeypatch, *small, "--gpu", "T4", "--all")
    assert shown.exit_code == 0
    assert "T4" in shown.stdout
    assert "where it goes" in shown.stdout
    assert "peak of the first" in shown.stdout
    told = run(server, monkeypatch, *small, "--gpu", "T4", "--json", "--all")
    found = ESTIMATE.validate_json(told.stdout)
    assert found.kinds >= len(found.plans) > 0
    assert json.loads(told.stdout)["plans"][0]["need"]["by_category"]


@pytest.mark.slow
def test_nothing_fits_ends_with_three(server, monkeypatch):
    held = [f"--fix={text}" for text in HELD]
    small = ["demo", "--seq-len", "32", "--global-batch", "8", "--memory", "100MiB"]
    ended = run(server, monkeypatch, *small, *held)
    assert ended.exit_code == 3
    assert "nothing fits in 100 MiB" in ended.stdout
    assert "--seq-len" not in ended.stderr
    assert "no plan fits" in ended.stderr
    assert "Traceback" not in ended.output


@pytest.mark.slow
def test_the_bar_is_as_long_as_the_need(ask):
    one = ask(memory="8GiB").plans[0]
    whole = bar(one, one.need.peak_bytes).plain
    half = bar(one, 2 * one.need.peak_bytes).plain
    twice = bar(one, one.need.peak_bytes // 2).plain
    letters = [sum(mark.isalpha() for mark in text) for text in (half, whole, twice)]
    assert letters[1] == pytest.approx(2 * letters[0], abs=1)
    assert letters[2] == pytest.approx(2 * letters[1], abs=1)
    assert "▏" in twice[:-1]
    tiny = bar(one, 1000 * one.need.peak_bytes).plain
    assert len(tiny) == len(half)
    assert sum(mark.isalpha() for mark in tiny) == 1, "what is there is seen"


@pytest.mark.slow
def test_a_notebook_shows_it_once(ask, monkeypatch):
    """rich displays by itself what it prints in a notebook."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *_: pytest.fail("shown beside what is returned"))
    assert ask(memory="8GiB", fix=HELD, **SMALL)._repr_html_().startswith("<pre>")


@pytest.mark.slow
def test_rows_that_the_model_does_not_know_are_said(ask):
    config = REPOSITORY / "autofit" / "commands" / "demo.json"
    longest = json.loads(config.read_text("utf-8"))["max_position_embeddings"]
    fix = ("precision=fp32", "kernels=none", "checkpointing=off", "optimizer=adamw", "offload=none")
    assert not any("longer than" in note for note in ask("demo", memory="8GiB", seq_len=longest, fix=fix).notes)
    said = ask("demo", memory="8GiB", seq_len=2 * longest, fix=fix).notes
    assert any(f"longer than the {longest}" in note for note in said)


@pytest.mark.slow
def test_of_a_card_that_is_not_known_precisions_of_one_size_are_told_once(ask):
    found = ask(memory="8GiB", most=None)
    assert {one.plan["precision"] for one in found.plans} == {"fp32", "bf16"}
    asked = ask(memory="8GiB", fix=("precision=fp16", "optimizer=adamw", "offload=none"))
    assert {one.plan["precision"] for one in asked.plans} == {"fp16"}


@pytest.mark.slow
def test_the_table_says_what_would_save_the_logits(ask):
    found = ask("demo", memory="8GiB", seq_len=128, global_batch=32, fix=("kernels=none",))
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(found))
    text = console.export_text()
    assert str(found.counted) in text
    logits = next(one for one in found.plans if one.need.segment in {"head", "headB"})
    assert "fused linear cross-entropy" in cause(logits)


@pytest.mark.slow
def test_a_model_s_facts_come_back_under_its_name(ask):
    ask(memory="8GiB")
    kept = list(trace_store.cache_folder().glob("*.json"))
    assert kept
    again = ask(memory="8GiB")
    assert again.model == "demo"


@pytest.mark.slow
def test_peaks_of_many_agree_with_each_need(server, tmp_path):
    """The fast way and the slow way to a plan's peak."""
    from autofit.commands import facts as facts_of
    from autofit.commands import request
    from autofit.commands.model_source import fetch

    config = fetch("demo", tmp_path / "model")
    facts = facts_of.read_facts(tmp_path, request.Request(model="demo", **SMALL), "cpu", server, print)
    made = trace_store.Traces(facts, config, lambda: server, tmp_path, trace_store.cache_folder())
    plan = Plan(
        {one.name: one.baseline for one in techniques()}
        | {"micro_batch": 2, "accumulation": 4, "checkpointing": "full"}
    )
    made.prepare([plan])
    parts = made.parts(plan)
    rows, accumulation = np.array([2, 4, 8]), np.array([4, 2, 1])
    fast = peak.peaks(*parts, rows, accumulation, waiting=True)
    slow = [
        made.need(plan.replaced(micro_batch=int(r), accumulation=int(a))).peak_bytes
        for r, a in zip(rows, accumulation, strict=True)
    ]
    assert fast == pytest.approx(slow, rel=1e-6)
    assert len(CATEGORIES) == 10
    assert max(slow) < GIB


SEVEN = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.slow
def test_seven_billion_parameters_fit_8_gib_quantized_and_80_gib_as_they_are(ask, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SEVEN))
    held = ("precision=bf16_weights", "optimizer=adamw", "offload=none", "kernels=none", "compile=off")
    asked = {"seq_len": 1024, "global_batch": 8, "allow": "exact,numeric,method", "fix": held}
    asked["among"] = ("checkpointing=off,full",)
    small, large = (ask(str(config), memory=size, **asked) for size in ("8GiB", "80GiB"))
    knobs = ("quantization", "adapter", "checkpointing")
    assert [small.recommended[name] for name in knobs] == ["nf4", "lora:r=16", "full"]
    assert {one.plan["quantization"] for one in small.plans if one.verdict == "fits"} == {"nf4"}
    assert (large.recommended["quantization"], large.recommended["checkpointing"]) == ("none", "off")
    assert large.plans[0].device_bytes > 2 * small.plans[0].device_bytes
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(small))
    text = " ".join(console.export_text().split())
    assert "recommended: " in text
    assert "rounded to 4 bits" in text
    assert ask(str(config), memory="3GiB", **asked).recommended is None


# --- ways of training -------------------------------------------------------------------------------------------------


def shown(found):
    console = Console(width=100, file=io.StringIO(), color_system=None)
    console.print(screen(found))
    return console.file.getvalue()


def test_the_smallest_plan_is_the_one_that_runs_on_the_smallest_card():
    tensors = np.array([100.0, 120.0, 110.0, 400.0])  # with what is to spare
    cards = [130, 115, 140, 390]  # as the allocator's replay says
    asked = []

    def judged(place, at_most):
        asked.append((place, at_most))
        fits = at_most is None or cards[place] <= at_most
        return SimpleNamespace(place=place, device_bytes=cards[place]) if fits else None

    assert _smallest_of([0, 1, 2, 3], tensors, judged).place == 1
    assert asked == [(0, None), (2, 129), (1, 129)], "a plan whose tensors alone are larger is not replayed"


def test_weights_that_are_too_large_are_told_what_was_not_tried():
    facts = cuda_facts(global_batch=4)
    said = _untried(space.build(facts, frozenset({Kind.EXACT, Kind.NUMERIC})), facts)
    assert said == "; not tried: weights in 16 bits (--fix precision=bf16_weights, class method)"
    assert _untried(space.build(facts, frozenset(Kind)), facts) == ""
    old = replace(facts, hardware=replace(facts.hardware, precisions=("fp32",)))
    assert _untried(space.build(old, frozenset({Kind.EXACT, Kind.NUMERIC})), old) == ""


def test_of_large_steps_of_an_adapter_an_estimate_looks_at_16_bit_weights_alone():
    """No other is faster or smaller; where a plan can't have them, and where they are asked for, the others stay."""
    small = cuda_facts(global_batch=4)
    usual = frozenset({Kind.EXACT, Kind.NUMERIC})

    def large(facts):
        return replace(facts, model=replace(facts.model, parameters=8 * 10**9))

    def seen(facts, given=None, allowed=usual):
        ways = spaces_by_way(facts, given or {}, allowed)
        return {name: {plan["precision"] for plan in plans.plans} for name, plans in ways.items()}

    facts = large(small)
    assert seen(facts) == {"full": {"tf32", "bf16"}, "LoRA": {"bf16_weights"}, "QLoRA": {"bf16_weights"}}
    assert seen(small)["full"] == {"fp32", "tf32", "bf16"}
    assert seen(small)["LoRA"] == {"fp32", "tf32", "bf16_weights"}, "there the host may set the pace"
    assert seen(facts, {"precision": ("fp32", "bf16_weights")})["LoRA"] == {"fp32", "bf16_weights"}
    assert seen(facts, allowed=frozenset({Kind.EXACT}))["LoRA"] == {"fp32"}
    old = replace(facts, hardware=replace(facts.hardware, precisions=("fp32",)))
    assert seen(old)["LoRA"] == {"fp32"}
    many = replace(facts, workload=replace(facts.workload, processes=2))
    zero = spaces_by_way(many, {"parallel": ("zero2", "ddp")}, usual)["LoRA"].plans
    assert {plan["precision"] for plan in zero if plan["parallel"] == "ddp"} == {"bf16_weights"}
    assert "bf16" in {plan["precision"] for plan in zero if plan["parallel"] == "zero2"}, "ZeRO has a copy of its own"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 4])
def test_what_fsdp_gathers_of_a_large_model_is_smaller_and_faster_in_16_bits(processes, ask, tmp_path, monkeypatch):
    """So an estimate looks at no plans of other precisions there, but where they are asked for."""
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 50304, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    seen = []

    def keep(plans, traces, facts, *args, **known):
        seen.append((plans.plans, forecasts.forecast(plans, traces, facts, *args, **known), facts))
        return seen[-1][1]

    monkeypatch.setattr(estimate, "forecast", keep)
    among = ("parallel=fsdp", "optimizer=adamw", "kernels=none,chunked_ce")
    ask(str(tmp_path), gpu="H100 SXM", gpus=processes, seq_len=512, global_batch=32 * processes, among=among, most=1)
    [(every, cast, facts)] = seen
    at = {plan: place for place, plan in enumerate(every)}
    outdone = [plan for plan in every if plan["precision"] == "tf32"]
    assert len(outdone) >= 20
    for plan in outdone:
        there, here = at[plan.replaced(precision="bf16")], at[plan]
        assert cast.predicted_bytes[there] < cast.predicted_bytes[here], plan.words()
        assert cast.seconds[there] < cast.seconds[here], plan.words()
        assert cast.seconds[here] <= cast.seconds[at[plan.replaced(precision="fp32")]]
    usual = frozenset({Kind.EXACT, Kind.NUMERIC})
    left = not_outdone(facts, usual, {"parallel": ("ddp", "fsdp", "hsdp:2x2") if processes > 1 else ("none", "fsdp")})
    told = {(plan["parallel"], plan["precision"]) for plan in left.plans}
    assert {precision for parallel, precision in told if parallel == "fsdp"} == {"bf16"}
    assert {precision for parallel, precision in told if parallel != "fsdp"} == {"tf32", "bf16"}


@pytest.mark.slow
def test_each_way_of_training_shows_its_fastest_and_its_smallest(ask):
    found = ask(gpu="4090", fix=HELD, ways=True, most=1, seq_len=128)
    assert [way.name for way in found.ways] == ["full", "LoRA", "QLoRA"]
    full, lora, qlora = found.ways
    assert (full.fastest.plan["adapter"], full.fastest.plan["quantization"]) == ("none", "none")
    assert (lora.fastest.plan["adapter"], lora.fastest.plan["quantization"]) == ("lora:r=16", "none")
    assert (qlora.fastest.plan["adapter"], qlora.fastest.plan["quantization"]) == ("lora:r=16", "nf4")
    for way in found.ways:
        assert way.fastest.verdict == "fits"
        assert way.smallest.device_bytes <= way.fastest.device_bytes
        assert way.smallest.samples_per_second <= way.fastest.samples_per_second * 1.03
    text = shown(found)
    assert "--per_device_train_batch_size" in text
    measure = " ".join(text.replace("\\\n", " ").split()).partition("Measure it on the card: autofit tune demo ")[2]
    assert "--fix adapter=none --fix quantization=none" in measure
    assert all(f"--fix {held}" in measure for held in HELD), "the same question"
    assert len(text.splitlines()) <= 24


@pytest.mark.parametrize(
    ("request_", "settings", "knobs", "words"),
    [
        ({}, {}, {"precision": ("bf16",)}, ()),
        ({}, {}, {"micro_batch": (4, 8), "adapter": ("none", "dora:r=16")}, ("--among", "micro_batch=4,8")),
        ({}, {"allowed": "exact,numeric,method"}, {}, ("--allow", "exact,numeric,method")),
        (
            {"task": "masked-lm", "launch_path": "loop", "trust_remote_code": True},
            {"allowed": "exact"},
            {},
            ("--allow", "exact", "--task", "masked-lm", "--launch-path", "loop", "--trust-remote-code"),
        ),
    ],
)
def test_a_tune_that_an_estimate_tells_of_has_the_same_plans(request_, settings, knobs, words):
    assert estimate._asked(Request(model="demo", **request_), Search(**settings), knobs) == words


@pytest.mark.slow
def test_what_is_foreseen_of_all_ways_together_is_what_each_says_alone(ask, monkeypatch):
    asked = {"gpu": "4090", "fix": HELD, "ways": True, "seq_len": 128}
    monkeypatch.setattr(families, "_MANY", 1)
    together = ask(**asked)
    monkeypatch.setattr(estimate, "foresee", lambda *_, **__: {})
    assert replace(ask(**asked), seconds=0) == replace(together, seconds=0)


@pytest.mark.slow
def test_what_no_trace_shows_is_counted_once(ask, monkeypatch):
    """A plan that a way shows is also in the list, where its allocations are not replayed again."""
    asked = {"gpu": "4090", "fix": HELD, "ways": True, "seq_len": 128}
    before = {one.plan: one for one in ask(**asked).plans}
    monkeypatch.setattr(plans, "untraced_bytes", lambda *_: GIB)
    found = ask(**asked)
    listed = {one.plan: one for one in found.plans}
    shared = [one for way in found.ways for one in (way.fastest, way.smallest) if one.plan in listed]
    assert shared
    for one in [*shared, *found.plans]:
        assert one.device_bytes == listed[one.plan].device_bytes == before[one.plan].device_bytes + GIB
        assert sum(one.need.by_category.values()) == pytest.approx(one.need.peak_bytes)


@pytest.mark.slow
def test_how_far_the_speed_of_a_plan_that_steps_on_the_host_is_off_is_not_told(ask, tmp_path):
    waits = ("parallel=fsdp", "sync_each_batch=on", "accumulation=2", "offload=parameters")
    notes = [" ".join(ask(gpu="4090", fix=(*WITHOUT_OFFLOAD, *more)).notes) for more in (waits, ("offload=none",))]
    assert ["steps on the host" in one for one in notes] == [True, False]
    ask(gpu="4090", fix=(*WITHOUT_OFFLOAD, *waits), output=tmp_path / "out")
    document = read_document(tmp_path / "out")
    assert document.estimated.low == 0
    assert "it depends on the host, where the optimizer steps" in estimate_words(document)


@pytest.mark.slow
def test_of_several_cards_the_host_memory_is_each_one_s_and_what_no_argument_carries_is_said(ask):
    sharded = ("parallel=fsdp", "sync_each_batch=on", "accumulation=2", "offload=parameters", "adapter=none")
    found = ask(gpu="4090", gpus=2, fix=(*WITHOUT_OFFLOAD, *sharded), ways=True, most=1, seq_len=128)
    text = " ".join(shown(found).split())
    assert "2 cards, each RTX 4090: " in text
    assert " fsdp sync_each_batch fp32 offload parameters" in text
    assert " on the host for each card)" in text
    assert "no argument carries parallel=fsdp: --output DIR writes the recommended plan's accelerate.yaml" in text


@pytest.mark.slow
def test_what_is_to_paste_says_what_setup_is(ask, tmp_path):
    chunked = tuple(one.replace("kernels=none", "kernels=chunked_ce") for one in HELD)
    alone, written = (
        " ".join(shown(ask(gpu="4090", fix=chunked, ways=True, most=1, output=folder)).split())
        for folder in (None, tmp_path / "out")
    )
    assert "model = setup.model(...)" in alone
    assert "where a line says setup: setup = autofit.load(DIR), of what --output DIR writes" in alone
    assert "where a line says setup: setup = autofit.load('" in written
    plain = ask(gpu="4090", fix=HELD, ways=True, most=1)
    assert "setup" not in shown(plain)
    loop = shown(replace(plain, asked=("--launch-path", "loop")))
    assert "a plain loop reads the plan: setup = autofit.load(DIR), of what --output DIR writes" in loop
    assert "--per_device_train_batch_size" not in loop


@pytest.mark.slow
def test_a_way_that_can_not_fit_says_what_stops_it_and_no_shorter_sequence_is_hinted(ask):
    found = ask(memory="560MiB", fix=HELD, ways=True, most=1)
    assert [way.fastest for way in found.ways] == [None] * 3
    assert re.search("weights and gradients alone are .*; not tried: weights in 16 bits", found.ways[0].stops)
    assert "nothing fits in 560 MiB" in shown(found)
    with pytest.raises(NothingFits) as error:
        check_fits(found)
    assert re.search(r"a card with \S+ \wiB, or --allow exact,numeric,method$", error.value.hint)
    with pytest.raises(NothingFits) as error:
        check_fits(replace(found, asked=("--allow", "exact,numeric,method")))
    assert re.search(r"a card with \S+ \wiB$", error.value.hint)


@pytest.mark.slow
def test_an_evaluation_that_does_not_fit_where_the_training_does_is_told_as_one(ask):
    """FSDP2 holds the output layer's weight while it runs alone, so that all logits are made at once."""
    held = ("kernels=chunked_ce", "checkpointing=full", "precision=bf16", "optimizer=adamw", "adapter=none")
    asked = {"gpu": "4090", "memory": None, "fix": held, "ways": True, "most": 1, "seq_len": 300_000, "global_batch": 1}
    (way,) = ask(**asked).ways
    assert way.fastest.plan["parallel"] == "none"
    asked["fix"] = (*held, "offload=parameters")
    (way,) = ask(**asked).ways
    assert " in an evaluation (--launch-path loop counts none), of which logits take " in way.stops
    assert cause(way.smallest).startswith("in an evaluation, at ")
    (way,) = ask(**asked, launch_path="loop").ways
    assert way.fastest is not None


@pytest.mark.slow
def test_who_holds_an_adapter_has_one_way(ask):
    found = ask(gpu="4090", fix=(*HELD, "adapter=lora:r=8"), ways=True, most=1, seq_len=144)
    (way,) = found.ways
    assert way.name == "as asked"
    assert way.fastest.plan["adapter"].startswith("lora:r=8")
    text = shown(found)
    assert "train an adapter" in text
    assert "rows of 144 tokens are longer than the 128 the model was made for" in text
    spread = " ".join(shown(replace(found, processes=2, nodes=2)).replace("\\", "").split())
    assert "--processes 2 --nodes 2 --on ray://HOST" in spread


def test_a_number_of_cards_may_stand_with_the_name():
    assert counted_cards("2x 4090", None) == ("4090", 2)
    assert counted_cards("8xH100", 8) == ("H100", 8)
    assert counted_cards("RTX 4090", 4) == ("RTX 4090", 4)
    assert counted_cards(None, None) == (None, None)
    with pytest.raises(InputError, match="says 4 cards and --gpus says 2"):
        counted_cards("4 x A100-80GB", 2)


def test_a_way_holds_what_tells_it_apart_and_leaves_the_rest():
    facts = cpu_facts()
    held = held_by_way(facts, {"precision": ("fp32",)})
    assert list(held) == ["full", "LoRA", "QLoRA"]
    assert held["full"] == {"precision": ("fp32",), "adapter": ("none",), "quantization": ("none",)}
    assert held["LoRA"]["quantization"] == ("none",)
    assert held["QLoRA"] == {"precision": ("fp32",), "adapter": ("none", "lora:r=16"), "quantization": ("nf4",)}
    assert held_by_way(facts, {"adapter": ("none",)}) == {"as asked": {"adapter": ("none",)}}
    without = held_by_way(replace(facts, packages={}), {})
    assert "peft is not installed" in without["LoRA"]
    bare = replace(facts.model, products=((8, 2, 1),), new_modules=("classifier",))
    withheld = held_by_way(replace(facts, model=bare), {})
    assert "no linear layers but those that are learned anew" in withheld["LoRA"]
    assert withheld["QLoRA"] == withheld["LoRA"]
