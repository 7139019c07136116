"""The report says what the document says, in 80 columns and in a page that trusts nobody."""

import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from autofit.contract.facts import Facts, Hardware, Model, Workload
from autofit.contract.outcome import (
    Crashed,
    Diverged,
    Evidence,
    Measured,
    OutOfMemory,
    PredictedSpeed,
    Promise,
    TimedOut,
    Trial,
    Unsupported,
)
from autofit.contract.plan import Plan
from autofit.contract.script import Script
from autofit.output import findings, standings, wording
from autofit.output.document import DOCUMENT, Document, Estimated, Offer
from autofit.output.plan_words import outcome_words
from autofit.output.reports import charts
from autofit.output.reports.report import html, summary
from autofit.output.text import number, one_line, parameters, percent
from autofit.registry import changes, recipe_of, techniques
from autofit.search import decision
from autofit.search.tradeoffs import Contribution
from autofit.space import offers
from autofit.system.strict_json import dump_json
from autofit.system.units import GIB, MIB
from autofit.training.guard.equivalence import Guard

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>'
STEERING = "\x1b[2J\x1b[31m[bold red]\u202egnp.exe"

MODEL = Model(
    name="Qwen/Qwen2.5-0.5B",
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    parameters=494_032_768,
    layers=24,
    hidden_size=896,
    vocab_size=151_936,
    max_positions=32_768,
    supports_checkpointing=True,
    layer_classes=("Qwen2DecoderLayer",),
)
GPU = Hardware(
    device="cuda",
    name="NVIDIA GeForce RTX 4090",
    total_bytes=24 * GIB,
    free_bytes=23 * GIB,
    others_bytes=512 * MIB,
    host_total_bytes=64 * GIB,
    host_free_bytes=50 * GIB,
    precisions=("fp32", "tf32", "bf16", "fp16"),
    capability=(8, 9),
    threads=8,
    driver="580.65",
)
CPU = Hardware(
    device="cpu",
    name="AMD EPYC 9554",
    total_bytes=24 * GIB,
    free_bytes=20 * GIB,
    host_total_bytes=24 * GIB,
    host_free_bytes=20 * GIB,
    precisions=("fp32", "bf16"),
    threads=2,
)
VERSIONS = {
    "python": "3.11.9",
    "torch": "2.11.0",
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "bitsandbytes": "0.49",
}


def plan(micro_batch, **others):
    plain = {one.name: one.baseline for one in techniques()}
    return Plan({**plain, "micro_batch": micro_batch, "accumulation": 32 // micro_batch, **others})


def measured(rate, peak_gib, *, relative=0.0075, device="cuda", limit_bytes=22 * GIB, **others):
    step, peak = 32 / rate, int(peak_gib * GIB)
    on_gpu = device == "cuda"
    given = {
        "step_seconds": step,
        "step_seconds_spread": step * relative,
        "samples_per_second": rate,
        "tokens_per_second": rate * 1024,
        "peak_bytes": peak,
        "allocated_bytes": int(peak * 0.86) if on_gpu else peak,
        "reserved_bytes": int(peak * 1.12) if on_gpu else peak,
        "outside_bytes": 590 * MIB if on_gpu else 0,
        "host_bytes": 1300 * MIB,
        "limit_bytes": limit_bytes,
        "fidelity": "parts",
        "steps": (step, step * 1.01, step * 0.99),
        "training_seconds": 5.0,
        "loss": 12.0,
    }
    return Measured(**{**given, **others})


def out_of_memory(phase="backward", *, limit_bytes=22 * GIB):
    return OutOfMemory(
        where="device",
        phase=phase,
        limit_bytes=limit_bytes,
        peak_bytes=limit_bytes - 40 * MIB,
        requested_bytes=594 * MIB,
    )


WINNER = plan(8, precision="bf16")
TRIALS = [
    (plan(1), measured(11.4, 8.9)),
    (plan(4), measured(16.9, 13.6)),
    (plan(8), measured(16.2, 20.1)),
    (plan(16), out_of_memory()),
    (plan(1, precision="bf16"), measured(19.7, 8.4)),
    (plan(4, precision="bf16"), measured(46.1, 11.2)),
    (WINNER, measured(51.9, 15.8)),
    (plan(16, precision="bf16"), out_of_memory("forward")),
    (plan(16, precision="bf16", checkpointing="full"), measured(40.3, 16.9)),
    (plan(8, precision="bf16", optimizer="adamw_8bit"), measured(50.2, 13.1)),
    (plan(16, precision="bf16", optimizer="adamw_8bit"), measured(51.2, 20.9)),
    (plan(8, precision="fp16"), Diverged(loss="nan", step=2)),
    (plan(8, precision="tf32"), measured(28.8, 20.1)),
    (
        plan(32, precision="bf16", checkpointing="full", offload="activations"),
        TimedOut(limit_seconds=120, phase="backward"),
    ),
    (
        plan(8, precision="bf16", parallel="zero2", offload="optimizer"),
        Unsupported(reason="the model runs under none, not deepspeed"),
    ),
    (
        plan(8, precision="bf16", parallel="fsdp", offload="parameters"),
        Crashed(reason="RuntimeError: no process group", log_tail="Traceback\n  File <worker>\nRuntimeError"),
    ),
    (plan(4, precision="bf16", optimizer="paged_adamw_8bit"), measured(44.0, 8.6)),
    (plan(2, precision="bf16", optimizer="adamw_8bit", checkpointing="full"), measured(24.8, 4.9)),
    (WINNER, measured(51.6, 15.8, fidelity="whole", mfu=0.41)),
    (plan(8, precision="bf16", optimizer="adamw_8bit"), measured(50.4, 13.1, fidelity="whole")),
    (WINNER, measured(52.0, 15.8, fidelity="whole", mfu=0.42)),
    (plan(8, precision="bf16", optimizer="adamw_8bit"), measured(50.1, 13.1, fidelity="whole")),
]


def document(
    trials=TRIALS, *, winner=WINNER, hardware=GPU, name=MODEL.name, limit_bytes=22 * GIB, path="trainer", **others
):
    """A document as ``autofit tune`` leaves it: the last of the winner's runs is its promise."""
    model = replace(MODEL, name=name)
    work = Workload(seq_len=1024, global_batch=32, limit_bytes=limit_bytes, host_limit_bytes=40 * GIB, launch_path=path)
    facts = Facts(model=model, hardware=hardware, workload=work, packages=VERSIONS)
    best = [run for one, run in trials if one == winner and isinstance(run, Measured)][-1]
    first_final = next((i for i, (_, run) in enumerate(trials) if getattr(run, "fidelity", "") == "whole"), len(trials))
    given = {
        "autofit": "0.1.0",
        "created": "2026-01-01T12:00:00Z",
        "model": model,
        "workload": work,
        "hardware": hardware,
        "versions": VERSIONS,
        "plan": winner,
        "promise": Promise(
            launch_path=path,
            **{
                key: getattr(best, key)
                for key in (
                    "samples_per_second", "tokens_per_second", "step_seconds", "step_seconds_spread",
                    "peak_bytes", "allocated_bytes", "reserved_bytes", "outside_bytes", "limit_bytes", "mfu",
                )
            },
        ),
        "reason": "The fastest of the finalists: 52.0 samples/s, 3.6 % above the next, which is more than the noise.",
        "changes": tuple(changes(winner, facts)),
        "script": (),
        "offers": tuple(
            Offer(technique=name, value=one.value, kind=one.kind.value, status=one.status, reason=one.reason)
            for name, one in offers(facts)
        ),
        "trials": tuple(
            Trial(number=i, plan=one, outcome=run, wall_seconds=8.5, purpose="final" if i >= first_final else "search")
            for i, (one, run) in enumerate(trials)
        ),
        "notes": ("Weights are random; every row was 1024 tokens long and had no padding.",),
        "seconds": 198.0,
        "training_share": 0.61,
        "median_trial_seconds": 8.5,
    }  # fmt: skip
    return Document(**{**given, **others})


def terminal(doc, folder="autofit-out", width=80):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(summary(doc, folder=folder))
    return console.file.getvalue()


def words(text):
    """The text's words without its line breaks."""
    return " ".join(text.split())


class Page(HTMLParser):
    """The tags, the attributes and the words of a page; open tags must be closed in order."""

    void = frozenset({"meta", "link", "br", "wbr"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.said, self.open = set(), [], [], []
        self.feed(text)
        self.close()
        assert not self.open
        self.words = words(" ".join(self.said))

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.said.append(data)


ON_CPU = {
    "trials": [
        (plan(1), measured(1.2, 0.61, device="cpu", limit_bytes=18 * GIB)),
        (plan(2), measured(1.5, 0.74, device="cpu", limit_bytes=18 * GIB)),
        (plan(8), measured(1.4, 1.9, device="cpu", limit_bytes=18 * GIB)),
    ],
    "winner": plan(2),
    "hardware": CPU,
    "limit_bytes": 18 * GIB,
}
DOCUMENTS = {
    "cuda": {},
    "cpu": ON_CPU,
    "one trial": {"trials": [(WINNER, measured(51.9, 15.8))]},
    "one baseline trial": {"trials": [(plan(4), measured(16.9, 13.6))], "winner": plan(4)},
    "zero spread": {"trials": [(WINNER, measured(51.9, 15.8, relative=0.0))]},
    "hostile": {"name": HOSTILE + STEERING, "reason": HOSTILE, "notes": (HOSTILE,), "created": HOSTILE},
    "unknown technique": {
        "trials": [(WINNER.replaced(attention="sdpa"), measured(1.0, 1.0))],
        "winner": WINNER.replaced(attention="sdpa"),
        "changes": (),
    },
    "no offers": {"offers": (), "notes": (), "changes": (), "trials": TRIALS[6:7]},
    "a loop": {"path": "loop", "script": ("keep activations on the host: model = setup.model(...)",)},
    "long words": {"name": "a-very-long-name" * 12, "reason": "word" * 60, "script": ("x" * 200,)},
}


@pytest.mark.parametrize(
    ("values", "told"),
    [({}, True), ({"precision": "bf16_weights"}, False), ({"kernels": "chunked_ce"}, False)],
)
def test_a_script_is_told_to_load_float32_weights_where_the_plan_does_not(values, told):
    """By itself ``from_pretrained`` takes the checkpoint's dtype; ``setup.model`` takes the plan's."""
    one = plan(8, **{"precision": "bf16", **values})
    doc = document(trials=[(one, measured(51.9, 15.8))], winner=one)
    doc = replace(doc, script=recipe_of(one, doc.facts).emission.script)
    assert (wording.IN_FLOAT32 in wording.script_lines(doc, "out")) is told


def test_a_narrow_terminal_breaks_no_techniques_name_apart():
    text = terminal(document(), width=40)
    assert max(map(len, text.splitlines())) <= 40
    for name in document().plan:
        assert re.search(rf"^ +{name} ", text, re.MULTILINE), name
    assert re.search(r"^ +precision .* numeric ", text, re.MULTILINE)


@pytest.mark.parametrize("name", DOCUMENTS)
class TestEveryDocument:
    def test_terminal_keeps_to_80_columns(self, name):
        text = terminal(document(**DOCUMENTS[name]))
        assert max(map(len, text.splitlines())) <= 80
        assert "\x1b" not in text
        assert "\u202e" not in text

    def test_both_give_the_promise_and_the_global_batch(self, name):
        doc = document(**DOCUMENTS[name])
        for said in (words(terminal(doc)), Page(html(doc, folder="autofit-out")).words):
            assert "micro-batch x accumulation x processes = global batch: " in said
            micro_batch, accumulation = doc.plan["micro_batch"], doc.plan["accumulation"]
            assert f"{micro_batch} x {accumulation} x 1 = 32" in said
            assert number(doc.promise.samples_per_second) in said
            assert percent(doc.promise.peak_bytes / doc.promise.limit_bytes) in said

    def test_page_needs_nothing_and_runs_nothing(self, name):
        text = html(document(**DOCUMENTS[name]), folder="autofit-out")
        page = Page(text)
        assert text.startswith("<!doctype html>")
        assert not page.tags & {"script", "img", "iframe", "object", "a", "base", "form"}
        assert not re.search(r"https?:|url\(|@import|//[a-z]", text)
        for attribute, value in page.attributes:
            assert not attribute.startswith("on")
            assert attribute not in {"src", "href"} or value == "data:,"

    def test_survives_the_way_through_json(self, name):
        doc = document(**DOCUMENTS[name])
        again = DOCUMENT.validate_json(dump_json(DOCUMENT, doc))
        assert terminal(again) == terminal(doc)
        assert html(again, folder="x") == html(doc, folder="x")


class TestSummary:
    def test_says_what_a_person_needs(self):
        said = words(terminal(document()))
        for wanted in (
            "Qwen/Qwen2.5-0.5B 494.0 million parameters, 24 layers, Qwen2ForCausalLM",
            "NVIDIA GeForce RTX 4090, ceiling 22.00 GiB",
            "precision bf16 numeric the device multiplies bfloat16 itself",
            "52.00 ± 0.39 samples/s, 53,248 tokens/s",
            "615.4 ± 4.6 ms for a whole optimizer step",
            "72 % of the ceiling",
            "15.80 GiB of 22.00 GiB",
            "reserved 17.70 GiB",
            "outside 590 MiB",
            "42 % of the device's peak FLOPs (MFU)",
            "Forward and backward run under bfloat16 autocast",
            "load the model with float32 weights: from_pretrained(..., dtype='float32')",
            "3 min 18 s for 22 trials (median 8.5 s each); 61 % of the time went into training steps.",
            "22 trials: 16 measured, 1 crashed, 1 unsupported, 1 diverged, 1 timed out, 2 out of memory",
            "Weights are random",
            "All of it, with charts: autofit-out/report.html",
        ):
            assert wanted in said

    def test_the_words_of_a_text_out_of_a_text_say_that_both_are_counted(self):
        one = document()
        assert wording.pace(replace(one, model=replace(one.model, sample_tokens=2))).endswith(
            "53,248 tokens/s of both its texts"
        )

    def test_what_a_value_is_good_for_is_told_as_far_as_it_is_known(self):
        about = {"technique": "precision", "value": "bf16", "plain": "fp32"}
        found = (
            Contribution(**about, evidence="measured", speed_ratio=1.5, saved_bytes=GIB),
            Contribution(**about, evidence="measured", saved_bytes=-GIB),
            Contribution(**about, evidence="estimated", speed_ratio=1.5, spread=0.1),
            Contribution(**about, evidence="estimated", saved_bytes=GIB),
            Contribution(**about, evidence="none"),
        )
        assert [one.partition(": ")[2] for one in findings.contributed(document(contributions=found))] == [
            "1.50 times the speed, and without it the peak is 1.00 GiB more (measured).",
            (
                "without it the peak is 1.00 GiB less (measured; others disturbed the plan without it, so what it does "
                "for the speed is not known)."
            ),
            "about 1.50 times the speed, give or take 10 % (estimated).",
            "without it the peak is about 1.00 GiB more (estimated; what it does for the speed is not known).",
            "the plan without it was not measured, and no estimate tells enough of it.",
        ]

    def test_failures_say_why(self):
        said = words(terminal(document(TRIALS[:1] + TRIALS[6:8] + TRIALS[11:12] + TRIALS[13:16]), width=200))
        for why in (
            "out of memory on the device in forward: 21.96 GiB held of 22.00 GiB, 594 MiB more wanted",
            "diverged: the loss was nan at step 2",
            "timed out in backward, after 2 min 0 s",
            "unsupported: the model runs under none, not deepspeed",
            "crashed: RuntimeError: no process group",
        ):
            assert why in said

    def test_commands_can_be_pasted(self):
        text = terminal(document(), folder="out dir")
        assert "accelerate launch --config_file 'out dir/accelerate.yaml' your_script.py" in words(text)
        assert "'out dir/training_args.json'" in text
        assert "autofit verify 'out dir'" in text

    def test_a_loop_reads_the_plan_itself(self):
        text = words(terminal(document(**DOCUMENTS["a loop"]), width=120))
        assert "--config_file autofit-out/accelerate.yaml your_script.py Check" in text
        assert "setup = autofit.load('autofit-out') - keep activations on the host" in text

    def test_runs_that_differ_by_more_than_half_are_said_to(self):
        busy = [(WINNER, measured(51.9, 15.8, relative=1.5))]
        text = words(terminal(document(trials=busy)))
        assert "51.90 samples/s, 53,146 tokens/s (uncertain: runs of this plan took up to 2.5 times as long)" in text
        assert "step 616.6 ms for a whole optimizer step" in text
        both = [(WINNER, measured(6.15, 15.8, relative=1.5)), *busy]
        assert "(uncertain: runs of this plan gave 6.150 to 51.90 samples/s)" in words(
            terminal(document(trials=both), width=200)
        )
        shown = html(document(trials=busy), folder="out")
        assert "uncertain: runs of this plan took up to 2.5 times as long" in shown
        assert "± " not in shown[shown.index("One optimizer step") : shown.index("Peak memory")]

    def test_zero_spread_is_shown_as_such(self):
        assert "51.90 ± 0.00 samples/s" in terminal(document(**DOCUMENTS["zero spread"]))

    def test_a_cpu_has_one_kind_of_memory(self):
        text = terminal(document(**ON_CPU))
        assert "reserved" not in text
        assert "resident memory above that of an idle process" in words(text)

    def test_markup_is_no_markup(self):
        assert "[bold red]" in terminal(document(name="[bold red]x"))

    def test_what_is_left_out_is_counted(self):
        many = [*TRIALS, *((plan(2, optimizer=f"other{i}"), measured(5.0, 5.0)) for i in range(9))]
        assert "11 measured plans more and 1 failed trial more in report.html" in words(terminal(document(many)))


class TestComparison:
    def test_with_the_fastest_and_the_largest_plain_plan(self):
        ratio, said = standings.against_baseline(document())
        assert ratio == pytest.approx(52.0 / 16.9)
        assert "(4 x 8 fp32) makes 16.90 samples/s" in said[0]
        assert "3.08 times" in said[0]
        assert "(8 x 4 fp32) makes 16.20 samples/s" in said[1]

    def test_a_plain_winner(self):
        ratio, said = standings.against_baseline(document(**ON_CPU))
        assert ratio is None
        assert "baseline plan itself" in said[0]

    def test_with_what_a_script_does_by_itself(self):
        shown = document()
        assert standings.against_script(shown) == (None, None)
        script = Script(path="train.py", sha256="", trainer="Trainer", micro_batch=4, accumulation=8)
        scripted = replace(shown, workload=replace(shown.workload, script=script))
        ratio, said = standings.against_script(scripted)
        assert ratio == pytest.approx(52.0 / 16.9)
        assert "(4 x 8 fp32) makes 16.90 samples/s" in said
        itself = replace(script, micro_batch=8, accumulation=4, own={"bf16": True})
        won = replace(shown, workload=replace(shown.workload, script=itself))
        assert standings.against_script(won) == (None, "The winner is what the script does by itself.")

    def test_a_plan_whose_runs_scatter_is_compared_with_a_doubt(self):
        calm = [(WINNER, measured(51.9, 15.8)), (plan(4), measured(17.0, 15.0))]
        assert standings.compared(document(calm))[1].endswith("times the fastest baseline plan")
        near = document([calm[0], (plan(4), measured(50.0, 15.0, relative=0.04))])
        assert standings.compared(near)[1].endswith("times the fastest baseline plan (within the noise)")
        wild = document([*calm, (plan(4), measured(6.0, 15.0))])
        other, said = standings.compared(wild)
        assert other.plan == plan(4)
        assert said.endswith("(uncertain: runs of that plan gave 6.000 to 17.00 samples/s)")
        assert other.doubt in standings.against_baseline(wild)[1][0]
        assert other.doubt in words(terminal(wild))
        assert other.doubt in html(wild, folder="autofit-out")

    def test_plain_plans_that_failed_and_none_at_all(self):
        only = [(WINNER, measured(51.9, 15.8))]
        assert "No baseline plan was tried" in standings.against_baseline(document(only))[1][0]
        tried = document([*only, (plan(16), out_of_memory())])
        assert "1 baseline trial, and none was measured" in standings.against_baseline(tried)[1][0]


class TestStandings:
    def test_winner_first_then_the_fastest_each_by_all_of_its_runs(self):
        ranked = standings.standings(document())
        assert [one.is_winner for one in ranked][:2] == [True, False]
        assert ranked[0].samples_per_second == 52.0
        assert ranked[0].runs == 3
        rates = [one.samples_per_second for one in ranked[1:]]
        assert rates == sorted(rates, reverse=True)
        bnb = next(one for one in ranked if one.plan == plan(8, precision="bf16", optimizer="adamw_8bit"))
        runs = [trial.outcome for trial in document().trials if trial.plan == bnb.plan]
        assert len(runs) == bnb.runs > 1
        assert bnb.samples_per_second == decision.pool(runs).samples_per_second == pytest.approx(50.25, rel=1e-4)

    def test_pareto_front(self):
        front = charts.pareto(standings.standings(document()))
        assert [round(one.peak_bytes / GIB, 1) for one in front] == [4.9, 8.6, 11.2, 13.1, 15.8]


class TestPage:
    def test_hostile_words_come_out_escaped(self):
        text = html(document(**DOCUMENTS["hostile"]), folder=HOSTILE)
        assert "<script" not in text
        assert "&lt;script&gt;" in text
        assert "<img" not in text
        assert "\x1b" not in text
        assert "\u202e" not in text

    def test_holds_every_trial_every_offer_and_the_versions(self):
        doc = document()
        said = Page(html(doc, folder="out dir")).words
        for trial in doc.trials:
            assert outcome_words(trial.outcome) in said
        for offer in doc.offers:
            assert offer.reason in said
        for package, version in VERSIONS.items():
            assert f"{package} {version}" in said
        assert "File <worker>" in said
        assert "3 min 18 s for 22 trials" in said
        assert "Weights are random" in said
        assert "accelerate launch --config_file 'out dir/accelerate.yaml'" in said
        assert "3.08 times the speed of the fastest plan" in said

    def test_a_dot_for_each_measured_trial_inside_the_chart(self):
        doc = document()
        drawn = charts.scatter(doc)
        assert len(drawn.points) == 16
        assert {point.role for point in drawn.points} == {"winner", "baseline", "other"}
        for point in drawn.points:
            assert charts.LEFT <= point.x <= charts.RIGHT
            assert charts.TOP <= point.y <= charts.BOTTOM
        assert drawn.ceiling_x == charts.RIGHT
        assert html(doc, folder="x").count("<circle class=") == 16 + 1

    def test_a_far_ceiling_does_not_squeeze_the_points(self):
        drawn = charts.scatter(document(**ON_CPU))
        assert drawn.ceiling_x is None
        assert [label.text for label in drawn.labels] == ["winner"]
        assert drawn.ceiling == "ceiling 18.00 GiB"
        assert max(point.x for point in drawn.points) > (charts.LEFT + charts.RIGHT) / 2
        assert "beyond this chart" in html(document(**ON_CPU), folder="x")


@pytest.mark.parametrize("end", [0.0004, 1.0, 7.3, 22.0, 99.9, 123456.0])
def test_ticks_are_few_and_round(end):
    found = charts.ticks(end)
    assert 2 <= len(found) <= 6
    assert found[0] == 0
    assert found[-1] <= end * (1 + 1e-9)


def test_small_words():
    assert number(0.01234) == "0.01234"
    assert number(0) == "0.00"
    assert percent(0.004) == "0.4 %"
    assert parameters(7_241_732_096) == "7.242 billion parameters"
    assert parameters(12) == "12 parameters"
    assert one_line("a\n  b" + "c" * 30, 10) == "a bcccccc…"
    assert wording.shell_lines(["autofit", "verify", "my folder"], width=16) == [
        "autofit verify \\",
        "    'my folder'",
    ]


def compiled(rate, warm_up_seconds, **others):
    evidence = Evidence(compiled_graphs=1)
    return measured(rate, 15.0, warm_up_seconds=warm_up_seconds, evidence=evidence, **others)


class TestPayback:
    """A compiled winner: the steps that compiling takes, against what it saves of each."""

    winner = plan(8, precision="bf16", compile="model")

    def test_it_is_told_after_how_many_steps(self):
        others = [(WINNER, measured(40.0, 15.8)), (WINNER.replaced(compile="regions"), compiled(48.0, 20.0))]
        doc = document(
            [*others, (self.winner, compiled(50.0, 61.28)), (self.winner, compiled(50.0, 5.0))], winner=self.winner
        )
        said = findings.payback(doc)
        assert "take 1 min 0 s longer" in said
        assert "pays back after 375 optimizer steps" in said, "60 s over 0.8 s - 0.64 s"
        assert said in words(terminal(doc, width=500))
        assert said in " ".join(Page(html(doc, folder="x")).said)

    def test_it_may_never_pay_back(self):
        doc = document([(WINNER, measured(51.0, 15.8)), (self.winner, compiled(50.0, 60.0))], winner=self.winner)
        assert "never pays back" in findings.payback(doc)

    def test_without_another_plan_nobody_knows(self):
        doc = document([(self.winner, compiled(50.0, 60.0))], winner=self.winner)
        assert "is not known" in findings.payback(doc)

    def test_another_winner_has_nothing_to_pay_back(self):
        assert findings.payback(document()) is None
        assert "pays back" not in terminal(document())


class TestAttended:
    """What was asked for, and the kernel that really ran."""

    @pytest.mark.parametrize(
        ("kernels", "wanted"),
        [
            (["flash"], "Asked for was sdpa, and what ran is flash (PyTorch's own)."),
            (["math"], "math is the slow one"),
            (["flash_attn"], "another package's"),
            ([], "made of plain operators (sdpa)"),
        ],
    )
    def test_the_kernel_is_told(self, kernels, wanted):
        evidence = Evidence(techniques={"attention": {"implementation": "sdpa", "kernels": kernels}})
        doc = document([(WINNER, measured(50.0, 15.8, evidence=evidence))])
        ((title, said),) = findings.findings(doc)
        assert title == "Which attention ran"
        assert wanted in said
        assert said in words(terminal(doc, width=500))
        assert said in " ".join(Page(html(doc, folder="x")).said)

    def test_what_was_not_seen_is_not_told(self):
        evidence = Evidence(techniques={"attention": {"implementation": "sdpa", "kernels": None}})
        doc = document([(WINNER, measured(50.0, 15.8, evidence=evidence))])
        assert findings.findings(doc) == []
        assert "Which attention ran" not in terminal(doc)


class TestGuard:
    """The short training of the winner."""

    guard = Guard(
        verdict="same",
        words="it trains like the float32 baseline",
        reference=plan(8),
        losses=(4.0, 3.0, 2.5),
        reference_losses=(4.0, 3.01, 2.49),
        bound=0.02,
        difference=0.004,
        seconds=12.0,
    )

    def test_a_line_in_the_terminal_and_two_curves_on_the_page(self):
        doc = document(guard=self.guard)
        line = "It trains like the float32 baseline. It took 12.0 s."
        assert line in words(terminal(doc))
        page = html(doc, folder="x")
        assert line in " ".join(Page(page).said)
        drawn = charts.losses(doc)
        assert drawn.winner in page
        assert drawn.reference in page
        assert drawn.winner.count("L") == drawn.reference.count("L") == 2
        assert [tick.label for tick in drawn.x_ticks] == ["1", "2", "3"]
        assert all(charts.TOP <= tick.at <= charts.BOTTOM for tick in drawn.y_ticks)

    def test_without_a_reference_there_is_one_curve(self):
        drawn = charts.losses(document(guard=replace(self.guard, reference=None, reference_losses=())))
        assert drawn.winner
        assert not drawn.reference

    def test_losses_that_do_not_move_are_drawn_too(self):
        assert charts.losses(document(guard=replace(self.guard, losses=(2.0, 2.0), reference_losses=()))).winner

    def test_a_tune_without_a_guard_says_so_and_an_estimate_has_none(self):
        assert charts.losses(document()) is None
        line = "It was not compared with the float32 baseline."
        assert line in words(terminal(document()))
        assert line in " ".join(Page(html(document(), folder="x")).said)
        assert findings.guarded(replace(document(), estimated=Estimated(low=1.0, high=2.0))) is None

    def test_an_old_document_has_none(self):
        raw = DOCUMENT.dump_python(document(guard=self.guard), mode="json")
        assert DOCUMENT.validate_python(raw).guard == self.guard
        del raw["guard"]
        assert DOCUMENT.validate_python(raw).guard is None


def test_the_table_of_trials_has_what_was_predicted_beside_what_was_measured():
    doc = document()
    told = PredictedSpeed(samples_per_second=48.1, low=42.3, high=54.7)
    first, *others = doc.trials
    first = replace(first, predicted_speed=told, predicted_bytes=round(7.25 * GIB))
    page = Page(html(replace(doc, trials=(first, *others)), folder="autofit-out"))
    assert page.words.count("48.10 (42.30 to 54.70)") == 1
    assert page.words.count("7.25 GiB") == 1
    first = replace(first, predicted_speed=replace(told, low=0.0))
    page = Page(html(replace(doc, trials=(first, *others)), folder="autofit-out"))
    assert page.words.count("~48.10") == 1, "how far off is not known"
