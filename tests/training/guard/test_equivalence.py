"""The guard of the training: plans that train as the float32 baseline does pass, and defects are refused."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from autofit.commands.request import Request, Search
from autofit.commands.shell.explanations import no_winner
from autofit.commands.tunes import course
from autofit.commands.tunes.backend import DeviceBackend
from autofit.contract.outcome import Trial
from autofit.contract.script import Script
from autofit.contract.technique import Kind
from autofit.output.plan_words import plan_words
from autofit.registry import recipe_of
from autofit.search.events import Silent
from autofit.search.loop import Campaign
from autofit.search.trial_log import TrialLog
from autofit.space import Space
from autofit.system.strict_json import dump_json
from autofit.training.guard import equivalence, loss_curve
from autofit.training.guard.equivalence import Guard, Guards, how_many, judge, kind_of, references, rounding_of
from autofit.training.guard.loss_curve import CURVE, NOT_FINITE, OUT_OF_MEMORY, Curve, of_ranks, without_dropout
from autofit.training.guard.rounding import Rounding
from tests.support.cases import some_slow
from tests.support.faulty import FAULT
from tests.support.guard_cases import Bench, defects, honest
from tests.support.synthetic import cpu_facts, cuda_facts, measured
from tests.support.tiny import CONFIGS, MIB, PLAIN, describe, write_config

FULL = PLAIN.replaced(micro_batch=2, accumulation=2, checkpointing="full")
BF16 = FULL.replaced(precision="bf16")


# --- a sample of tests/bench/guard_bench.py, by real processes --------------------------------------------------------

PASSED = {
    ("bert", "bf16"), ("bert", "all"), ("llama", "exact kernels"), ("llama", "fp16"), ("gpt2", "8-bit"),
    ("mixtral", "bf16, small reference"),
}  # fmt: skip
REFUSED = {
    "the loss is not divided by the accumulation": "bf16",
    "a micro-batch is dropped": "bf16",
    "a layer is frozen": "bf16",
    "a weight's gradient has the other sign": "bf16",
    "nothing is clipped": "bf16",
    "the learning rate is 1.3 times as high": "bf16",
    "gradients are never set to zero": "bf16",
    "attention sees what comes later": "bf16",
    "weights are bfloat16 without a float32 copy": "bf16",
    "a weight's gradient is halved": "exact",
    "labels are shifted by one": "exact",
    "norms and biases are stuck at bfloat16": "exact",
    "weights decay, and norms with them": "exact",
}
QUICK = {"a micro-batch is dropped", "a layer is frozen"}


@pytest.fixture(scope="module")
def bench(server, tmp_path_factory):
    return Bench(folder=tmp_path_factory.mktemp("bench"), server=server)


@pytest.mark.parametrize(
    "case",
    some_slow(
        [one for one in honest() if (one.architecture, one.name) in PASSED],
        lambda one: one.name == "fp16",
        ids=lambda one: one.words(),
    ),
)
def test_an_honest_plan_passes(bench, case):
    found, comparisons = bench.look(case)
    assert found.verdict == "same", found.words
    assert max(one.ratio for one in comparisons) < 0.7, "with room to spare"
    assert found.losses[-1] < found.losses[0] - 0.1, "the rows can be learned"


@pytest.mark.parametrize(
    "case",
    some_slow(
        [one for one in defects() if one.architecture == "llama" and REFUSED.get(one.defect) == one.name],
        lambda one: one.defect in QUICK,
        ids=lambda one: one.words(),
    ),
)
def test_a_defect_is_refused(bench, case):
    found, _ = bench.look(case)
    assert found.verdict == "other", found.words
    assert found.words


# --- the guard of a tune, by real processes ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def facts(server, tmp_path_factory):
    return describe(server, write_config(tmp_path_factory.mktemp("guarded") / "model"))


@pytest.fixture
def look(server, facts, tmp_path):
    """``look(plan)``; ``fault`` is run in each process."""

    def run(plan, *, config="llama", fault="", limit_bytes=None, **values):
        here = facts
        if limit_bytes is not None:
            here = replace(here, workload=replace(here.workload, limit_bytes=limit_bytes))
        folder = write_config(tmp_path / "model", {**CONFIGS.get(config, {}), **values})
        if fault:
            (folder / FAULT).write_text(fault, "utf-8")
        shown = measured([0.01], 100 * MIB, here)
        found = Guards(tmp_path, here, folder, server).look(plan, shown, spent_seconds=1000.0, left_seconds=None)
        assert not list(tmp_path.glob(".ask-*")), "nothing is left behind"
        return found

    return run


@pytest.mark.slow
def test_the_winner_is_compared_with_the_baseline_of_its_own_split(look):
    found = look(BF16)
    assert found.verdict == "same", found.words
    assert found.difference < found.bound < 0.02
    assert len(found.losses) == len(found.reference_losses) == equivalence.MOST_STEPS
    assert dict(found.reference) == dict(PLAIN.replaced(micro_batch=2, accumulation=2))


@pytest.mark.slow
@pytest.mark.by_hand
def test_a_compiled_plan_trains_the_same(look):
    found = look(PLAIN.replaced(micro_batch=2, accumulation=2, compile="regions"))
    assert found.verdict == "same", found.words


@pytest.mark.slow
def test_dropout_is_left_out(look):
    """GPT-2 has it in its config, and its rows would fall otherwise in another split of the batch."""
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 128, "n_positions": 32}
    found = look(FULL, config="", **{**gpt2, "attn_pdrop": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.3})
    assert found.verdict == "same", found.words


@pytest.mark.slow
def test_another_method_only_has_to_stay_finite(look):
    found = look(FULL.replaced(optimizer="sgd"))
    assert found.verdict == "method"
    assert found.bound is None
    assert found.difference > 0.02


def test_the_baseline_plan_stands_alone(look):
    found = look(PLAIN)
    assert (found.verdict, found.reference_losses) == ("alone", ())
    assert "baseline plan itself" in found.words


def test_a_ceiling_that_holds_neither_gives_no_verdict(look):
    found = look(FULL, limit_bytes=1 * MIB)
    assert found.verdict == "unknown"
    assert OUT_OF_MEMORY in found.words


def test_a_crash_is_told_in_words(look):
    found = look(FULL, fault="raise RuntimeError('nobody knows why')")
    assert found.verdict == "unknown"


# --- which reference, how many steps, which verdict ------------------------------------------------------------------


class Played(Guards):
    """Guards whose curves are given."""

    def __init__(self, curves):
        super().__init__(None, cpu_facts(global_batch=4), None, None)
        self.curves, self.asked = curves, []

    def _train(self, plan, steps, limit_seconds, rounding):
        self.asked.append((plan, rounding, limit_seconds))
        return self.curves(plan)

    def see(self, plan, left_seconds=None):
        shown = measured([1.0], 100 * MIB, self.facts)
        return self.look(plan, shown, spent_seconds=20.0, left_seconds=left_seconds)


GOOD = Curve(
    losses=(4.0, 3.0, 2.0),
    norms=(1.0, 1.0, 0.5),
    gradients={"a": (3.0, 0.0), "b": (0.0, 4.0)},
    updates={"a": (1.0, 0.0), "b": (0.0, 1.0)},
)


def test_where_the_reference_does_not_fit_a_smaller_one_stands_for_it():
    first, second = references(BF16, cpu_facts(global_batch=4))
    guards = Played(lambda plan: Curve(failed=OUT_OF_MEMORY) if plan == first else GOOD)
    found = guards.see(BF16)
    asked = [BF16, first, second, second]
    assert [plan for plan, *_ in guards.asked] == asked
    assert [rounding for _, rounding, _ in guards.asked] == [None, None, None, rounding_of(BF16, guards.facts)]
    assert (second["micro_batch"], second["accumulation"], second["checkpointing"]) == (1, 4, "full")
    assert (found.verdict, found.reference) == ("same", second)
    guards.see(BF16)
    assert len(guards.asked) == len(asked), "what is known is not run again"


def test_without_any_reference_only_the_winner_is_looked_at():
    found = Played(lambda plan: GOOD if plan == BF16 else Curve(failed=OUT_OF_MEMORY)).see(BF16)
    assert (found.verdict, found.reference, found.losses) == ("alone", None, GOOD.losses)
    assert "no baseline plan fits" in found.words


def test_a_reference_that_took_too_long_is_not_said_not_to_fit():
    found = Played(lambda plan: GOOD if plan == BF16 else Curve(failed="it took too long")).see(BF16)
    assert (found.verdict, found.reference) == ("alone", None)
    assert "fits" not in found.words
    assert found.words.endswith("it took too long")


@pytest.mark.parametrize(
    ("theirs", "verdict", "words"),
    [
        ({"rows": (7, 8)}, "same", "rounding"),
        ({"rows": (7, 9)}, "unknown", "other rows than the baseline plan"),
        ({"rows": (7, 8), "began": {"a": (2.0, 0.0)}}, "unknown", "other weights each time"),
    ],
)
def test_trainings_of_a_script_that_began_otherwise_are_not_compared(theirs, verdict, words):
    mine = replace(GOOD, rows=(7, 8), began={"a": (1.0, 0.0)})
    other = replace(mine, **theirs)
    found = Played(lambda plan: mine if plan == BF16 else other).see(BF16)
    assert found.verdict == verdict
    assert words in found.words


def test_a_script_whose_rows_change_is_told_from_a_plan_that_changes_them():
    """The baseline plan is trained twice."""
    drawn = iter(range(9))
    found = Played(lambda _: replace(GOOD, rows=(next(drawn), 8))).see(BF16)
    assert (found.verdict, "other rows each time it is run" in found.words) == ("unknown", True)


def test_it_takes_no_more_time_than_is_left():
    guards = Played(lambda _: GOOD)
    guards.see(BF16, left_seconds=30.0)
    assert all(20.0 <= limit <= 30.0 for _, _, limit in guards.asked)
    guards = Played(lambda _: GOOD)
    found = guards.see(BF16, left_seconds=0.0)
    assert (guards.asked, found.verdict) == ([], "unknown")
    assert "the time is spent; --resume with a longer --timeout" in found.words
    found = Played(lambda _: Curve(failed=equivalence._LATE)).see(BF16, left_seconds=30.0)
    assert "the time is spent; --resume with a longer --timeout" in found.words
    found = Played(lambda _: Curve(failed=equivalence._LATE)).see(BF16)
    assert found.words.endswith("it took too long; --resume compares them once more")


def test_it_takes_about_a_tenth_of_the_time_that_was_spent():
    assert how_many(0.01, 600.0) == equivalence.MOST_STEPS
    assert how_many(30.0, 600.0) == equivalence.LEAST_STEPS
    assert how_many(1.5, 600.0) == 4


def test_the_arithmetic_follows_the_format_of_the_plan():
    here = cpu_facts(global_batch=4)
    assert rounding_of(FULL, here) == Rounding(product_bits=20, state_bits=32, seed=1)
    assert rounding_of(BF16, here) == Rounding(product_bits=7, state_bits=32, seed=1, norm_dtype="bfloat16")
    assert rounding_of(BF16, cuda_facts(global_batch=4)) == Rounding(product_bits=7, state_bits=32, seed=1)
    assert rounding_of(FULL.replaced(optimizer="adamw_8bit"), here).state_bits == 8
    assert rounding_of(BF16.replaced(optimizer="sgd"), here) is None


def test_the_class_is_that_of_the_loosest_value():
    here = cpu_facts(global_batch=4)
    assert kind_of(PLAIN, here) == kind_of(FULL, here) == Kind.EXACT
    assert kind_of(BF16, here) == Kind.NUMERIC
    assert kind_of(BF16.replaced(optimizer="sgd"), here) == Kind.METHOD


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"losses": (4.0, 3.0, 2.01)}, "the loss of step 3 differs from the float32 baseline's by 0.5 %"),
        ({"gradients": {"a": (3.0, 0.0), "b": (0.0, 2.0)}}, "the gradient of b differs"),
        ({"updates": {"a": (1.0, 0.0), "b": (0.0, 0.0)}}, "the update of all parameters differs"),
        ({"gradients": {"a": (3.0, 0.0)}}, "a parameter has no gradient, such as b"),
        (
            {"norms": (2.0, 1.0, 0.5)},
            "the norm of the clipped gradients differs from the float32 baseline's by 100 %",
        ),
        ({"failed": NOT_FINITE}, "not finite in optimizer step 4"),
        ({"losses": (4.0, 9.0, 2.0)}, "grew from 4 to 9"),
    ],
)
def test_what_is_refused_says_why(changes, words):
    found = judge(FULL, cpu_facts(global_batch=4), replace(GOOD, **changes), PLAIN, GOOD, rounded=GOOD)
    assert found.verdict == "other"
    assert words in found.words


@pytest.mark.parametrize(("left", "verdict"), [(0.0, "unknown"), (0.05, "unknown"), (0.5, "same"), (1.0, "same")])
def test_where_rounding_leaves_nothing_of_the_gradient_nothing_is_told(left, verdict):
    """Its own distance is the tolerance: whatever a plan trained would be within it."""
    rounded = replace(GOOD, gradients={"a": (left * 3.0, 0.0), "b": (0.0, left * 4.0)})
    found = judge(FULL, cpu_facts(global_batch=4), GOOD, PLAIN, GOOD, rounded=rounded)
    assert found.verdict == verdict
    assert ("rounding to its format alone moves the gradient by" in found.words) == (verdict == "unknown")


@pytest.mark.parametrize("plan", [FULL, FULL.replaced(optimizer="sgd")], ids=["exact", "method"])
def test_ranks_that_train_apart_are_refused(plan):
    """The first rank's curve alone is the baseline's."""
    apart = replace(GOOD, updates={"a": (1.3, 0.0), "b": (0.0, 1.3)})
    found = judge(plan, cpu_facts(global_batch=4), of_ranks([GOOD, GOOD, apart]), PLAIN, GOOD, rounded=GOOD)
    assert found.verdict == "other"
    assert found.words == "the update of all parameters differs between its ranks by 30 % of its norm"


def test_each_rank_is_held_against_the_baseline():
    """Less than they may be apart."""
    near = replace(GOOD, gradients={"a": (3.0, 0.0), "b": (0.0, 4.01)})
    found = judge(FULL, cpu_facts(global_batch=4), of_ranks([GOOD, near]), PLAIN, GOOD, rounded=GOOD)
    assert (found.verdict, "the gradient of b" in found.words) == ("other", True)


def test_of_ranks_that_trained_alike_one_curve_is_kept():
    apart = replace(GOOD, losses=(1.0,))
    assert of_ranks([GOOD, GOOD]) == GOOD
    two = [of_ranks([GOOD, apart]), of_ranks([GOOD, GOOD])]
    assert of_ranks(two) == replace(GOOD, others=(apart,))
    assert CURVE.validate_json(dump_json(CURVE, of_ranks(two))) == of_ranks(two)


def test_rows_of_ranks_are_those_of_one_process():
    first, second = replace(GOOD, rows=(1, 3, 5)), replace(GOOD, rows=(2, 4, 6))
    assert of_ranks([first, second]) == replace(GOOD, rows=(1, 2, 3, 4, 5, 6))


def test_losses_in_16_bits_are_added_up_without_rounding(facts):
    listener = loss_curve.listener_of(recipe_of(PLAIN, facts), 3, SimpleNamespace(check=lambda: None))
    listener._model = torch.nn.Linear(1, 1)
    for _ in range(PLAIN["accumulation"]):
        listener.backward_end(torch.tensor(1.0078125, dtype=torch.bfloat16))
    assert (float(listener._loss), listener.loss_error) == (4.03125, 2.0**-7)


@pytest.mark.parametrize(
    ("skipped", "why"), [(0, "its training ended after 2 optimizer steps, and 3 are compared"), (1, "overflowed")]
)
def test_a_training_that_ends_before_enough_was_seen_says_so(facts, skipped, why):
    def train():
        for _ in range(skipped):
            listener.step_skipped()
            step()
        for _ in range(2):
            step()

    def step():
        listener.backward_end(torch.tensor(1.0))
        listener.step_end()

    checks = SimpleNamespace(check=lambda: None, settle=lambda: None)
    listener = loss_curve.listener_of(recipe_of(PLAIN, facts), 3, checks)
    listener._model = torch.nn.Linear(1, 1)
    assert why in loss_curve.written(listener, train).failed


def test_what_an_engine_keeps_is_not_compared():
    unseen = replace(GOOD, gradients={}, updates={}, norms=(0.0, 0.0, 0.0))
    assert judge(FULL, cpu_facts(global_batch=4), unseen, PLAIN, GOOD, rounded=GOOD).verdict == "same"


# --- in a tune ------------------------------------------------------------------------------------------------------


@pytest.fixture
def guarded(tmp_path):
    """``guarded(verdicts)``: the decision, the tune and the plans that were looked at, among three that fit."""
    here = cpu_facts(global_batch=4)
    plans = (BF16, FULL, PLAIN)

    def run(verdicts, timeout_seconds=None):
        one = course.Course(
            tmp_path, Request(model="demo"), Search(timeout_seconds=timeout_seconds), Silent(), DeviceBackend()
        )
        trials = TrialLog(
            Trial(
                number=number, plan=plan, outcome=measured([1.0 + number] * 3, MIB, here), wall_seconds=1.0,
                purpose="final",
            )
            for number, plan in enumerate(plans)
        )  # fmt: skip
        campaign = Campaign(facts=here, space=Space({}, plans, {}), runner=None, trials=trials, left=lambda: 0.0)
        seen = []

        def look(plan, *_, **__):
            seen.append(plan)
            return Guard(verdict=verdicts[len(seen) - 1], words="a reason")

        return one._guarded(campaign.decide(), campaign, look), one, seen, campaign

    return run


def test_a_winner_that_differs_from_the_baseline_is_refused_and_the_next_one_taken(guarded):
    decision, one, seen, _ = guarded(["other", "same"])
    assert decision.plan == FULL
    assert seen == [BF16, FULL]
    assert one.guard.verdict == "same"
    assert f"refused, though it was the fastest: {plan_words(BF16)}: a reason" in one.notes
    assert f"Refused: {BF16.words()} does not train like the float32 baseline: a reason." in decision.reason


def test_where_all_are_refused_there_is_no_winner(guarded):
    decision, _, seen, campaign = guarded(["other"] * 3)
    assert decision is None
    assert len(seen) == course.MOST_GUARDS
    error = no_winner(campaign.trials, campaign.refused, cpu_facts(), None, forecast=None, trials_folder=None)
    assert "float32 baseline" in error.message
    assert "--no-guard" in error.hint


def test_no_verdict_refuses_nobody(guarded):
    decision, one, _, _ = guarded(["unknown"])
    assert decision.plan == BF16
    assert any("not compared" in note for note in one.notes)


def test_when_the_time_is_spent_nothing_is_compared(guarded):
    decision, one, seen, _ = guarded([], timeout_seconds=1e-9)
    assert (decision.plan, seen, one.guard) == (BF16, [], None)
    assert any("time is spent" in note for note in one.notes)


# --- the rows and the config ----------------------------------------------------------------------------------------


def test_a_config_without_dropout(tmp_path):
    config = write_config(tmp_path / "in", attention_dropout=0.1, text_config={"resid_pdrop": 0.2, "name": "dropout"})
    copy = without_dropout(config, tmp_path / "out")
    values = json.loads((copy / "config.json").read_text("utf-8"))
    assert values["attention_dropout"] == 0
    assert values["text_config"] == {"resid_pdrop": 0.0, "name": "dropout"}


def test_a_config_without_other_random_changes(tmp_path):
    """Switch's router is given noise, and wav2vec 2.0 sounds with parts masked: they hang on the split of the batch."""
    drawn = {"router_jitter_noise": 0.01, "mask_time_prob": 0.05, "mask_feature_prob": 0.1}
    kept = {"mask_time_length": 10, "normalize_router_prob_before_dropping": True}  # NLLB-MoE's refuses a number
    copy = without_dropout(write_config(tmp_path / "in", **drawn, **kept), tmp_path / "out")
    values = json.loads((copy / "config.json").read_text("utf-8"))
    assert [values[name] for name in drawn] == [0, 0, 0]
    assert [values[name] for name in kept] == [10, True]


def test_rows_that_can_be_learned(facts):
    filled = recipe_of(PLAIN, facts)
    rows = loss_curve.learnable_rows(filled, 32, SimpleNamespace(config=None))
    assert len(rows) == 32
    assert len({int(token) for row in range(32) for token in rows[row]["input_ids"]}) <= loss_curve._TOKENS
    assert rows[0]["input_ids"].tolist() == rows[4]["input_ids"].tolist(), "a pool of one global batch"


@pytest.mark.parametrize(
    ("rows", "own", "trained", "words"),
    [
        (None, 8, [], "was not looked at: rows are drawn anew"),
        (64, 8, [2, 8, 8], "in micro-batches of 2 rows was not looked at: it took too long"),
        (64, 32, [2, 8, 8], "was not looked at: it took too long"),
        (64, 12, [2, 4, 4], "was not looked at: it took too long"),
        (64, 2, [], None),
    ],
)
def test_a_split_that_is_not_compared_with_the_scripts_own_is_told(rows, own, trained, words):
    """A loss that compares the rows of a micro-batch is another one there, and nothing says that it is not."""
    seen = []
    script = Script(
        path="factory.py", sha256="", factory="nets:make", trainer="FactoryTrainer", micro_batch=own, accumulation=1,
        rows=rows,
    )  # fmt: skip

    def train(plan, _rounding):
        seen.append(plan["micro_batch"])
        return Curve(failed="it took too long")

    split = PLAIN.replaced(micro_batch=2, accumulation=4)
    found = equivalence.split_words(split, cpu_facts(global_batch=8, script=script), train)
    assert seen == trained
    assert found is None if words is None else words in found
