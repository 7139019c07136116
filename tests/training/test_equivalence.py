"""The guard of the training: what trains as a plain plan does passes, and what does not is refused."""

import json
from dataclasses import replace

import pytest

from autofit.commands import tune
from autofit.commands.backend import DeviceBackend
from autofit.commands.explanations import no_winner
from autofit.commands.request import Request, Search
from autofit.contract.outcome import Trial
from autofit.contract.technique import Kind
from autofit.registry import recipe_of
from autofit.search.events import Silent
from autofit.search.loop import Campaign
from autofit.search.trial_log import TrialLog
from autofit.space import Space
from autofit.training import equivalence, loss_curve
from autofit.training.equivalence import BOUNDS, Guard, Guards, how_many, judge, kind_of, references
from autofit.training.loss_curve import NOT_FINITE, OUT_OF_MEMORY, Curve, without_dropout
from tests.support.cases import some_slow
from tests.support.faulty import FAULT
from tests.support.synthetic import cpu_facts, measured
from tests.support.tiny import CONFIGS, MIB, PLAIN, describe, write_config

FULL = PLAIN.replaced(micro_batch=2, accumulation=2, checkpointing="full")
BF16 = FULL.replaced(precision="bf16")


# --- curves that really train ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("guarded") / "model")


@pytest.fixture(scope="module")
def facts(server, plain_config):
    return {path: describe(server, plain_config, launch_path=path) for path in ("trainer", "loop")}


@pytest.fixture(scope="module")
def references_of():
    """Curves of references by launch path: no fault reaches them, so that each is trained once."""
    return {"trainer": {}, "loop": {}}


@pytest.fixture
def look(server, facts, tmp_path, references_of):
    """``look(plan)`` by real processes; ``fault`` is run in those of plans that checkpoint."""

    def run(plan, path="trainer", *, config="llama", fault="", guards=None, limit_bytes=None, **values):
        here = facts[path]
        if limit_bytes is not None:
            here = replace(here, workload=replace(here.workload, limit_bytes=limit_bytes))
        folder = write_config(tmp_path / "model", {**CONFIGS.get(config, {}), **values})
        if fault:
            (folder / FAULT).write_text(_BROKEN.format(fault=fault), "utf-8")
        guards = guards or Guards(tmp_path, here, folder, server)
        if fault:
            guards._known.update(references_of[path])
        shown = measured([0.01], 100 * MIB, here)
        found = guards.look(plan, shown, spent_seconds=1000.0, left_seconds=None)
        if fault:
            references_of[path].update({key: curve for key, curve in guards._known.items() if key[0] != plan})
        assert not list(tmp_path.glob(".ask-*")), "nothing is left behind"
        return found

    return run


_BROKEN = """
import json
from autofit.contract.recipe import Recipe
def spoil(change):
    build = Recipe.model
    def model(self, *args, **kwargs):
        made = build(self, *args, **kwargs)
        change(made)
        return made
    Recipe.model = model
if json.loads((folder / "job.json").read_text("utf-8"))["plan"]["checkpointing"] == "full":
    {fault}
honest(folder)
"""
FAULTS = {
    "gradients are scaled": "spoil(lambda m: [p.register_hook(lambda g: g * 0.5) for p in m.parameters()])",
    "a layer's gradient is gone": (
        "spoil(lambda m: m.model.layers[0].mlp.down_proj.weight.register_hook(lambda g: g * 0))"
    ),
    "a layer's gradient is half": (
        "spoil(lambda m: m.model.layers[1].self_attn.v_proj.weight.register_hook(lambda g: g * 0.5))"
    ),
    "a layer does not learn": "spoil(lambda m: m.model.layers[1].mlp.requires_grad_(False))",
    "nothing is clipped": (
        "from accelerate import Accelerator; Accelerator.clip_grad_norm_ = lambda self, ps, n, **_: n"
    ),
    "the optimizer's rate is another": (
        "import torch; step = torch.optim.AdamW.step; "
        "torch.optim.AdamW.step = lambda s, *a: ([g.update(lr=g['lr'] * 1.3) for g in s.param_groups], step(s, *a))[1]"
    ),
}


@pytest.mark.parametrize("path", ["trainer", "loop"])
def test_what_trains_the_same_passes_far_inside_the_bounds(look, path):
    for plan, verdict_bound in ((FULL, BOUNDS[Kind.EXACT]), (BF16, BOUNDS[Kind.NUMERIC])):
        found = look(plan, path)
        assert found.verdict == "same", found.words
        assert found.bound == verdict_bound.loss
        assert found.difference < 0.1 * found.bound
        assert len(found.losses) == len(found.reference_losses) == equivalence.MOST_STEPS
        assert found.losses[-1] < found.losses[0] - 0.2, "the rows can be learned"
        assert dict(found.reference) == dict(PLAIN.replaced(micro_batch=2, accumulation=2))


@pytest.mark.parametrize("path", some_slow(["trainer", "loop"], lambda path: path == "trainer"))
@pytest.mark.parametrize("plan", some_slow([FULL, BF16], lambda plan: plan is FULL, ids=lambda plan: plan["precision"]))
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_what_trains_otherwise_is_refused(look, fault, plan, path):
    if "AdamW.step" in fault and plan is BF16:
        pytest.skip("a little more or less of the rate is within what rounding may do")
    found = look(plan, path, fault=fault)
    assert found.verdict == "other", found.words
    assert found.words


@pytest.mark.slow
def test_a_compiled_plan_trains_the_same(look):
    found = look(PLAIN.replaced(micro_batch=2, accumulation=2, compile="regions"))
    assert found.verdict == "same", found.words


def test_dropout_is_left_out(look):
    """GPT-2 has it in its config, and its rows would fall otherwise in another split of the batch."""
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 128, "n_positions": 32}
    found = look(FULL, config="", **{**gpt2, "attn_pdrop": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.3})
    assert found.verdict == "same", found.words


def test_another_method_only_has_to_stay_finite(look):
    found = look(FULL.replaced(optimizer="sgd"))
    assert found.verdict == "method"
    assert found.bound is None
    assert found.difference > 0.02


def test_the_plain_plan_stands_alone(look):
    found = look(PLAIN)
    assert (found.verdict, found.reference_losses) == ("alone", ())
    assert "plain plan itself" in found.words


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

    def _train(self, plan, steps, limit_seconds):
        self.asked.append((plan, steps, limit_seconds))
        return self.curves(plan)

    def see(self, plan, left_seconds=None):
        shown = measured([1.0], 100 * MIB, self.facts)
        return self.look(plan, shown, spent_seconds=20.0, left_seconds=left_seconds)


GOOD = Curve(losses=(4.0, 3.0, 2.0), norms=(1.0, 1.0, 0.5), gradients={"a": 3.0, "b": 4.0, "c": 1e-5})


def test_where_the_reference_does_not_fit_a_smaller_one_stands_for_it():
    first, second = references(BF16, cpu_facts(global_batch=4))
    guards = Played(lambda plan: Curve(failed=OUT_OF_MEMORY) if plan == first else GOOD)
    found = guards.see(BF16)
    assert [plan for plan, *_ in guards.asked] == [BF16, first, second]
    assert (second["micro_batch"], second["accumulation"], second["checkpointing"]) == (1, 4, "full")
    assert (found.verdict, found.reference) == ("same", second)
    guards.see(BF16)
    assert len(guards.asked) == 3, "what is known is not run again"


def test_without_any_reference_only_the_winner_is_looked_at():
    found = Played(lambda plan: GOOD if plan == BF16 else Curve(failed=OUT_OF_MEMORY)).see(BF16)
    assert (found.verdict, found.reference, found.losses) == ("alone", None, GOOD.losses)
    assert "no plain plan fits" in found.words


def test_it_takes_no_more_time_than_is_left():
    guards = Played(lambda _: GOOD)
    guards.see(BF16, left_seconds=30.0)
    assert all(10.0 <= limit <= 30.0 for _, _, limit in guards.asked)


def test_it_takes_about_a_tenth_of_the_time_that_was_spent():
    assert how_many(0.01, 600.0) == equivalence.MOST_STEPS
    assert how_many(30.0, 600.0) == equivalence.LEAST_STEPS
    assert how_many(3.0, 600.0) == 5


def test_the_class_is_that_of_the_loosest_value():
    here = cpu_facts(global_batch=4)
    assert kind_of(PLAIN, here) == kind_of(FULL, here) == Kind.EXACT
    assert kind_of(BF16, here) == Kind.NUMERIC
    assert kind_of(BF16.replaced(optimizer="sgd"), here) == Kind.METHOD


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"losses": (4.0, 3.0, 2.01)}, "losses differ"),
        ({"gradients": {"a": 3.0, "b": 2.0, "c": 1e-5}}, "norm of its gradients"),
        ({"gradients": {"a": 3.02, "b": 4.0, "c": 1e-5}}, "gradient of a"),
        ({"gradients": {"a": 3.0, "b": 4.0}}, "1 parameters have no gradient, such as c"),
        ({"norms": (2.0, 1.0, 0.5)}, "stepped with gradients of the norm 2 in step 1"),
        ({"failed": NOT_FINITE}, "not finite in optimizer step 4"),
        ({"losses": (4.0, 9.0, 2.0)}, "went from 4 to 9"),
    ],
)
def test_what_is_refused_says_why(changes, words):
    found = judge(FULL, cpu_facts(global_batch=4), replace(GOOD, **changes), PLAIN, GOOD)
    assert found.verdict == "other"
    assert words in found.words


def test_noise_in_what_is_nearly_zero_is_no_reason():
    noisy = replace(GOOD, gradients={**GOOD.gradients, "c": 3e-5})
    assert judge(FULL, cpu_facts(global_batch=4), noisy, PLAIN, GOOD).verdict == "same"
    unseen = replace(GOOD, gradients={}, norms=(0.0, 0.0, 0.0))
    assert judge(FULL, cpu_facts(global_batch=4), unseen, PLAIN, GOOD).verdict == "same"


# --- in a tune ------------------------------------------------------------------------------------------------------


@pytest.fixture
def guarded(tmp_path):
    """``guarded(verdicts)``: the decision, the tune and the plans that were looked at, among three that fit."""
    here = cpu_facts(global_batch=4)
    plans = (BF16, FULL, PLAIN)

    def run(verdicts, timeout_seconds=None):
        one = tune._Tune(
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


def test_a_winner_that_trains_otherwise_is_refused_and_the_next_one_taken(guarded):
    decision, one, seen, _ = guarded(["other", "same"])
    assert decision.plan == FULL
    assert seen == [BF16, FULL]
    assert one.guard.verdict == "same"
    assert any("refused, though it was the fastest" in note for note in one.notes)
    assert f"Refused: {BF16.words()} trains otherwise than a plain plan: a reason." in decision.reason


def test_where_all_are_refused_there_is_no_winner(guarded):
    decision, _, seen, campaign = guarded(["other"] * 3)
    assert decision is None
    assert len(seen) == tune.MOST_GUARDS
    error = no_winner(campaign.trials, campaign.refused, cpu_facts(), None, forecast=None, trials_folder=None)
    assert "trains otherwise" in error.message
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


def test_rows_that_can_be_learned(facts):
    filled = recipe_of(PLAIN, facts["trainer"])
    rows = loss_curve.learnable_rows(filled, 32)
    assert len(rows) == 32
    assert len({int(token) for row in range(32) for token in rows[row]["input_ids"]}) <= loss_curve._TOKENS
    assert rows[0]["input_ids"].tolist() == rows[4]["input_ids"].tolist(), "a pool of one global batch"
