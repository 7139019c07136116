"""Rows of different lengths: where which batching is offered, what is written, what it does, and what it gains."""

import importlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification, BertConfig, Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler

from autofit import space
from autofit.contract.outcome import Measured
from autofit.contract.plan import Plan
from autofit.contract.script import Script
from autofit.contract.technique import Kind
from autofit.output.document import read_document
from autofit.registry import by_script, converted, recipe_of, technique
from autofit.system.errors import InputError
from autofit.training.expected_rows import Tokens, usual_steps, without_padding
from autofit.training.row_order import Wanted, order
from autofit.training.runner import ProcessRunner
from autofit.training.scripts.rows import why_ungrouped
from autofit.training.scripts.watched import keep_evaluated_order, wrap_model
from autofit.training.timing import Effort
from autofit.training.world import World
from tests.support.ragged import FREE, SKEWED, apart, collated, free_model, learned, ragged, told
from tests.support.scripted import SCRIPTS, SIZES, autofit, tiny_bert
from tests.support.synthetic import cpu_facts, cuda_facts
from tests.support.tiny import PLAIN, describe, write_config

BATCHING = technique("batching")
LABELLED = dict.fromkeys(("input_ids", "attention_mask", "labels"), (4, 30))
ALL = frozenset(Kind)
ON = PLAIN.replaced(micro_batch=2, accumulation=2, batching="pad_to_multiple")


def script_facts(facts=cuda_facts, **changed):
    given = {
        "trainer": "Trainer", "longest": 60, "mean_length": 20.0, "tokens_a_row": 10.0, "places": (1, 2),
        "longest_places": (2,), "batch": {"input_ids": (4, 30), "attention_mask": (4, 30), "labels": (4,)}, **changed,
    }  # fmt: skip
    path = "trainer" if given["trainer"] else "loop"
    script = Script(path="train.py", sha256="", micro_batch=4, accumulation=2, **given)
    return facts(global_batch=8, seq_len=30, script=script, launch_path=path)


def statuses(facts):
    return {choice.value: choice.status for choice in BATCHING.choices(facts)}


# --- where it is offered --------------------------------------------------------------------------------------------


def test_where_rows_are_alike_there_is_nothing_to_batch_and_the_space_is_as_it_was():
    for facts in (cuda_facts(global_batch=8), script_facts(mean_length=59.0), script_facts(tokens_a_row=None)):
        found = statuses(facts)
        assert found.pop("pad") == "offered"
        assert set(found.values()) == {"withheld"}
        assert {plan["batching"] for plan in space.build(facts, ALL).plans} == {"pad"}
        plan = space.build(facts, ALL).plans[0]
        assert "train_sampling_strategy" not in recipe_of(plan, facts).emission.training_args
    assert "--lengths" in BATCHING.choice("group_by_length", cuda_facts()).reason


@pytest.mark.parametrize("facts", [told(cuda_facts(global_batch=8)), script_facts()])
def test_where_rows_differ_an_exact_value_is_tried_and_another_order_only_where_it_may_be(facts):
    found = statuses(facts)
    own = facts.workload.script is None
    assert found == {
        "pad": "offered", "pad_to_multiple": "offered", "group_by_length": "offered",
        "padding_free": "on_request" if own else "withheld", "packing": "offered" if own else "withheld",
    }  # fmt: skip
    assert {plan["batching"] for plan in space.build(facts).plans} == {"pad", "pad_to_multiple"}
    everything = space.build(facts, ALL).plans
    assert {plan["batching"] for plan in everything} - {"packing"} == {"pad", "pad_to_multiple", "group_by_length"}
    assert all(plan["micro_batch"] > 1 for plan in everything if plan["batching"] == "group_by_length")
    assert BATCHING.changes("group_by_length", {}, facts)


def test_a_cpu_pads_to_a_multiple_on_request():
    assert statuses(told(cpu_facts()))["pad_to_multiple"] == "on_request"


@pytest.mark.parametrize(
    ("facts", "value", "why"),
    [
        (told(cuda_facts(launch_path="loop")), "group_by_length", "sampler is its own"),
        (script_facts(trainer=""), "group_by_length", "sampler is its own"),
        (script_facts(ungrouped="KTOTrainer chooses its rows itself"), "group_by_length", "KTOTrainer"),
        (script_facts(batch={"input_ids": (4, 30)}), "pad_to_multiple", "no mask"),
        (script_facts(generated=16), "pad_to_multiple", "its Trainer pads prompts and completions itself"),
        (script_facts(batch={"input_ids": (4, 30), "attention_mask": (4, 30), "bbox": (4, 30, 4)}), "pad_to_multiple",
         "bbox"),
        (told(replace(cuda_facts(), model=replace(cuda_facts().model, position_rows=130)), (8, 130)), "pad_to_multiple",
         "would have 136"),
        (told(replace(cuda_facts(), model=replace(cuda_facts().model, model_type="opt"))), "padding_free", "not known"),
        (script_facts(), "padding_free", "no label for each token"),
        (script_facts(trainer="SFTTrainer", batch=LABELLED), "padding_free", "SFTTrainer may read"),
        (script_facts(trainer="", batch=LABELLED), "padding_free", "a loop may read"),
        (script_facts(), "packing", "no label for each token"),
        (script_facts(trainer="DPOTrainer", batch=LABELLED), "packing", "DPOTrainer may read"),
        (script_facts(trainer="SFTTrainer", batch=LABELLED, ungrouped="its data set is a stream"), "packing", "stream"),
    ],
)  # fmt: skip
def test_what_can_not_be_had_says_why(facts, value, why):
    assert BATCHING.choice(value, facts).status == "withheld"
    with pytest.raises(InputError, match=why):
        BATCHING.parse(value, facts)


def test_an_older_plan_pads():
    old = Plan({name: value for name, value in PLAIN.items() if name != "batching"})
    assert converted(old) == PLAIN


# --- what is written ------------------------------------------------------------------------------------------------


def test_a_trainer_reads_the_order_as_an_argument_and_a_collator_is_put_into_the_script():
    facts = told(cpu_facts(global_batch=4))
    for value, strategy, lines in (("pad", "random", 0), ("group_by_length", "group_by_length", 0),
                                   ("pad_to_multiple", "random", 1)):  # fmt: skip
        recipe = recipe_of(PLAIN.replaced(micro_batch=2, accumulation=2, batching=value), facts)
        assert recipe.emission.training_args["train_sampling_strategy"] == strategy
        assert len([line for line in recipe.emission.script if "setup.collator" in line]) == lines
    script = script_facts(own={"train_sampling_strategy": "sequential"})
    assert BATCHING.emit("pad", PLAIN, script).training_args == {"train_sampling_strategy": "sequential"}
    assert not BATCHING.emit("pad_to_multiple", PLAIN, script).script, "autofit run puts it in"


def test_a_script_that_groups_its_rows_itself_is_left_alone():
    facts = script_facts(own={"train_sampling_strategy": "group_by_length"})
    assert BATCHING.changes("group_by_length", {}, facts) is None
    assert by_script(BATCHING, facts)
    assert BATCHING.own(facts) == "group_by_length"
    assert {plan["batching"] for plan in space.build(facts, ALL).plans} == {"group_by_length"}


# --- what it does ---------------------------------------------------------------------------------------------------


def padded_by(recipe, model, batch):
    for wrap in recipe.model_wraps:
        wrap(model)
    return recipe.collator(lambda given: {name: tensor.clone() for name, tensor in given.items()})(batch)


@pytest.mark.parametrize("kind", ["bert", "roberta", "llama", "gpt2"])
@pytest.mark.parametrize("left", [False, True])
def test_rows_that_are_padded_on_are_trained_on_as_they_were(kind, left):
    """The same loss and the same gradients, by the model's own mask: of encoders and of decoders."""
    from transformers import AutoModelForCausalLM

    sizes = {**SIZES, "pad_token_id": 1 if kind == "roberta" else 0, "attention_probs_dropout_prob": 0.0}
    sizes |= {"hidden_dropout_prob": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    auto = AutoModelForMaskedLM if "bert" in kind else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(kind, **sizes)).train()
    recipe = recipe_of(ON, told(cpu_facts(global_batch=4)))
    batch = collated(ragged(5, 11, 3), left=left)
    batch["input_ids"][batch["attention_mask"] == 0] = sizes["pad_token_id"]
    longer = padded_by(recipe, model, batch)
    assert longer["input_ids"].shape == longer["attention_mask"].shape == longer["labels"].shape == (3, 16)
    assert (longer["input_ids"][:, 11:] == sizes["pad_token_id"]).all()

    def learned(given):
        model.zero_grad()
        loss = model(**given).loss
        loss.backward()
        return float(loss.detach()), torch.cat(
            [one.grad.flatten() for one in model.parameters() if one.grad is not None]
        )

    loss, gradient = learned(batch)
    again, other = learned(longer)
    assert again == pytest.approx(loss, rel=1e-5)
    assert torch.allclose(other, gradient, atol=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", importlib.import_module("autofit.strategies.batching")._JOINED)
def test_joined_rows_are_trained_on_as_padded_ones_are(kind, attention):
    """The same loss and the same gradients; each row by itself is what they are held against, too."""
    rows = ragged(5, 31, 17, 1, 12)
    batch = collated(rows)
    try:
        (model, recipe), (plain, _) = free_model(kind, attention), free_model(kind, attention, PLAIN)
    except ValueError as error:
        pytest.skip(str(error))
    loss, gradient = learned(model, batch)
    assert recipe.state["batching"] == {"joined": 1, "padded": 0}
    assert BATCHING.in_effect("padding_free", recipe.state["batching"], recipe.facts) is None
    count = (batch["labels"][:, 1:] != -100).sum()
    alone = [learned(plain, {**collated([row]), "num_items_in_batch": count}) for row in rows if len(row) > 1]
    assert torch.allclose(loss, sum(one for one, _ in alone), rtol=1e-6)
    assert apart(gradient, sum(one for _, one in alone)) < 1e-6
    padded, other = learned(plain, batch)
    if attention == "sdpa":  # a sliding window leaves padding without a key, and eager scores of none are not finite
        assert torch.allclose(loss, padded, rtol=1e-6)
        assert apart(gradient, other) < 1e-6


@pytest.mark.parametrize(
    "values", [{"kernels": "chunked_ce"}, {"checkpointing": "full"}, {"adapter": "lora:r=4"}], ids=str
)
def test_joined_rows_go_with_other_techniques(values):
    """Held against the same plan with padding."""
    batch = collated(ragged(5, 31, 17, 1))
    (model, recipe), (plain, _) = (
        free_model("llama", plan=plan.replaced(**values)) for plan in (FREE, FREE.replaced(batching="pad"))
    )
    for (name, one), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        with torch.no_grad():
            one.copy_(torch.randn_like(one) * 0.05 if "lora" in name else one)
            other.copy_(one)
    (loss, gradient), (padded, other) = learned(model, batch), learned(plain, batch)
    assert recipe.state["batching"] == {"joined": 1, "padded": 0}
    assert torch.allclose(loss, padded, rtol=1e-5)
    assert apart(gradient, other) < 1e-6


def test_an_evaluation_and_a_batch_that_can_not_be_joined_exactly_keep_their_padding():
    model, recipe = free_model("llama")
    batch = collated(ragged(5, 11, 3))
    model.eval()
    assert model(**batch).logits.shape[:2] == (3, 11)
    assert recipe.state["batching"] == {"joined": 0, "padded": 0}
    model.train()
    assert model(**batch).logits.shape[:2] == (1, 19)
    learns_of_padding = {**batch, "labels": torch.ones_like(batch["labels"])}
    holes = {**batch, "attention_mask": batch["attention_mask"].clone().index_fill_(1, torch.tensor([1]), 0)}
    positions = {**batch, "position_ids": torch.arange(11).expand(3, 11)}
    unlabelled = {name: one for name, one in batch.items() if name != "labels"}
    for other in (collated(ragged(5, 11, 3), left=True), learns_of_padding, holes, positions, unlabelled):
        assert model(**other).logits.shape[:2] == (3, 11)
    assert recipe.state["batching"] == {"joined": 1, "padded": 5}
    assert "5 micro-batches" in BATCHING.in_effect("padding_free", recipe.state["batching"], recipe.facts)
    assert "no micro-batch" in BATCHING.in_effect("padding_free", {"joined": 0, "padded": 5}, recipe.facts)


def test_rows_are_joined_on_request_and_where_there_are_several():
    facts = told(cuda_facts(global_batch=8))
    knobs = space.parse_knobs((), ("batching=pad,padding_free",), facts)
    found = [plan for plan in space.build(facts, given=knobs).plans if plan["batching"] == "padding_free"]
    assert found
    assert all(plan["micro_batch"] > 1 and plan["compile"] == "off" for plan in found)
    assert BATCHING.traced_as("padding_free", "micro_steps") is None
    assert "setup.model" in " ".join(BATCHING.emit("padding_free", FREE, facts).script)


def test_a_batch_without_a_mask_of_its_tokens_stays_and_that_is_seen():
    recipe = recipe_of(ON, told(cpu_facts(global_batch=4)))
    ids = torch.ones(2, 5, dtype=torch.long)
    for batch in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": torch.ones(2, 1, 5, 5)}):
        assert padded_by(recipe, SimpleNamespace(config=None), batch)["input_ids"].shape == (2, 5)
    assert "no multiple" in BATCHING.in_effect("pad_to_multiple", {"micro_steps": 2, "multiples": 0}, cpu_facts())


def test_padding_behind_the_last_token_is_no_other_batch():
    short = collated(ragged(5, 3))
    longer = {name: torch.nn.functional.pad(one, (0, 3), value=0) for name, one in short.items()}
    for name, tensor in without_padding(longer).items():
        assert torch.equal(tensor, short[name])
    assert without_padding([1, 2]) == [1, 2]


@pytest.mark.parametrize(
    ("value", "seen", "why"),
    [
        ("group_by_length", {"sampler": "LengthGroupedSampler"}, None),
        ("group_by_length", {"sampler": "RandomSampler"}, "RandomSampler"),
        ("pad", {"sampler": "LengthGroupedSampler"}, "grouped"),
        ("pad", {"sampler": "RandomSampler", "pads_on": False, "micro_steps": 4, "multiples": 4}, None),
        ("pad", {"pads_on": True}, "multiple of 8"),
        ("pad_to_multiple", {"pads_on": True, "micro_steps": 4, "multiples": 4}, None),
        ("pad_to_multiple", {"pads_on": False, "micro_steps": 4, "multiples": 4}, "none that pads on"),
        ("pad_to_multiple", {"micro_steps": 4, "multiples": 3}, "1 of 4"),
    ],
)
def test_what_was_ignored_is_told(value, seen, why):
    found = BATCHING.in_effect(value, seen, told(cpu_facts()))
    assert found is None if why is None else why in found


# --- which rows are measured ----------------------------------------------------------------------------------------


def asked(micro_batch, accumulation, *, micro_steps=None, steps=6):
    return Wanted(
        micro_batch=micro_batch, accumulation=accumulation, micro_steps=micro_steps or accumulation, warm_up=2,
        steps=steps, longest=(7, 8), places=range(100),
    )  # fmt: skip


def test_measured_are_micro_batches_that_the_sampler_makes_from_the_short_to_the_long():
    lengths = [1 + (place * 37) % 400 for place in range(4000)]
    sampler, kept = LengthGroupedSampler(8, lengths=lengths), []
    drawn = [*order(sampler, asked(4, 4, micro_steps=3), kept.append)]
    assert drawn[:24] == [7, 8] * 12, "the longest in the warm-up"
    assert sampler.batch_size == 16, "of whole steps, of which three micro-steps are run"
    found = kept[0]
    epoch = [*sampler]
    assert len(epoch) == 4000
    sizes = [4 * max(lengths[place] for place in drawn[at : at + 4]) for at in range(24, len(drawn), 4)]
    assert sizes == [one for step in found.places for one in step]
    rows = [lengths[place] for place in drawn[24:]]
    within = [max(rows[at : at + 4]) - min(rows[at : at + 4]) for at in range(0, len(rows), 4)]
    assert max(within) <= 8, "of 400: rows of a micro-batch are alike"
    thirds = [sum(low <= size / 4 < high for size in sizes) for low, high in ((0, 134), (134, 267), (267, 401))]
    assert thirds == [6, 6, 6]
    assert found.usual == pytest.approx(4 * 200.5, rel=0.02)


def test_fewer_rows_than_a_micro_batch_come_again():
    found = order(LengthGroupedSampler(8, lengths=[3, 5]), asked(4, 2))
    assert {*found} <= {0, 1, 7, 8}


def clock_of(facts, timed, seconds, **changed):
    return SimpleNamespace(
        recipe=SimpleNamespace(facts=facts, micro_batch=4, accumulation=1, unpadded=False), accumulation=1, done=0,
        timed=timed, world=World(),
        effort=Effort(), step_tokens=[], step_places=[], usual_places=None, padding=None,
        waited_steps=lambda: seconds, **changed,
    )  # fmt: skip


@pytest.mark.parametrize("timed", [[2, 3, 4], [2, 3, 4, 5, 6, 7]])
def test_a_few_steps_tell_the_speed_of_an_epoch(timed):
    """A step takes 50 ms and 1 ms a place: seconds a token of the timed ones come to those of the whole epoch."""
    facts = told(cpu_facts(global_batch=4), SKEWED)
    lengths = [SKEWED[int(place / 2000 * len(SKEWED))] for place in range(2000)]
    kept = []
    drawn = [*order(LengthGroupedSampler(4, lengths=lengths), asked(4, 1), kept.append)][8:]
    steps = [drawn[at : at + 4] for at in range(0, 24, 4)]
    places = [4 * max(lengths[row] for row in step) for step in steps]
    seconds = tuple(0.05 + 0.001 * one for one in places[: len(timed)])
    clock = clock_of(facts, timed, seconds)
    tokens = Tokens(clock)
    tokens.take(kept[0])
    for done, step in zip(range(2, 8), steps, strict=True):
        clock.done = done
        tokens.count(collated(ragged(*(lengths[row] for row in step))))
    tokens.tell()
    found, usual = usual_steps(clock)
    assert found == pytest.approx([0.05 + 0.001 * kept[0].usual] * len(timed))
    assert usual == pytest.approx(sum(lengths) / 2000)
    assert clock.padding == pytest.approx(1 - 4 * usual / kept[0].usual)
    assert 0 <= clock.padding < 0.1


# --- a script's Trainer ---------------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset):
    def __init__(self, name="input_ids"):
        self.name = name

    def __len__(self):
        return 64

    def __getitem__(self, place):
        if place >= 64:
            raise IndexError(place)
        return {self.name: torch.ones(1 + place, dtype=torch.long), "labels": 0}


class Endless(Rows):
    def __getitem__(self, place):
        return super().__getitem__(place % 64)


def trainer_of(tmp_path, kind=Trainer, data=None, **arguments):
    from transformers import TrainingArguments

    given = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True, **arguments)
    model = AutoModelForSequenceClassification.from_config(BertConfig(**SIZES))
    return kind(model=model, args=given, train_dataset=data or Rows(), eval_dataset=Rows())


def test_why_a_trainer_can_not_group_its_rows(tmp_path):
    class Own(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return None

    plain = trainer_of(tmp_path)
    assert why_ungrouped(plain, Rows(), 1e-4) is None
    assert "chooses its rows itself" in why_ungrouped(trainer_of(tmp_path, Own), Rows(), None)
    assert "no input_ids" in why_ungrouped(plain, Rows("pixels"), None)
    assert "for ever" in why_ungrouped(plain, Endless(), None)
    assert "all 64 rows" in why_ungrouped(plain, Rows(), 2.0)
    assert "no number of rows" in why_ungrouped(plain, iter([1]), None)


def test_an_evaluation_keeps_the_order_of_the_script(tmp_path):
    """A Trainer would sort the rows that it evaluates, too."""
    trainer = trainer_of(tmp_path, train_sampling_strategy="group_by_length")
    assert isinstance(trainer._get_eval_sampler(Rows()), LengthGroupedSampler)
    keep_evaluated_order(trainer, SimpleNamespace(facts=script_facts()))
    assert [*trainer._get_eval_sampler(Rows())] == [*range(64)]
    assert isinstance(trainer._get_train_sampler(), LengthGroupedSampler)


def test_a_collator_is_put_around_the_script_s_own(tmp_path):
    trainer = trainer_of(tmp_path)

    def own(rows):
        return {**collated([row["input_ids"] for row in rows]), "labels": torch.zeros(len(rows), dtype=torch.long)}

    trainer.data_collator = own
    plan = PLAIN.replaced(micro_batch=4, accumulation=2, batching="pad_to_multiple")
    wrap_model(trainer, recipe_of(plan, script_facts(cpu_facts)))
    widths = {batch["input_ids"].shape[1] for batch in trainer.get_train_dataloader()}
    assert widths
    assert all(width % 8 == 0 for width in widths)


# --- what really happens --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def facts(server, tmp_path_factory):
    folder = write_config(tmp_path_factory.mktemp("batching") / "tiny", max_position_embeddings=128)
    found = describe(server, folder, seq_len=128, global_batch=8)
    return folder, told(found, tuple(length - 1 for length in SKEWED), told_rows=2000, seq_len=127)


@pytest.mark.parametrize("value", ["pad", "pad_to_multiple", "group_by_length"])
def test_what_is_chosen_is_what_happens(server, tmp_path, facts, value):
    folder, found = facts
    runner = ProcessRunner(tmp_path / "trials", found, folder, server)
    plan = PLAIN.replaced(micro_batch=4, accumulation=2, batching=value)
    outcome = runner.run(0, plan, Effort(), purpose="final", limit_seconds=120.0).outcome
    assert isinstance(outcome, Measured), outcome
    seen = outcome.evidence.of("batching")
    assert seen["sampler"] == ("LengthGroupedSampler" if value == "group_by_length" else "RandomSampler")
    assert seen["pads_on"] == (value == "pad_to_multiple")
    assert outcome.evidence.seq_len == (128 if value == "pad_to_multiple" else 127), "the longest in the warm-up"
    for other in ("pad", "pad_to_multiple", "group_by_length"):
        assert (BATCHING.in_effect(other, seen, found) is None) == (other == value)
    if value == "group_by_length":
        assert outcome.padding < 0.15
    else:
        assert outcome.padding > 0.3


def measured(folder):
    """The answer in a folder, and what was measured of each value."""
    found = read_document(folder)
    best = {}
    for one in found.trials:
        if isinstance(one.outcome, Measured):
            best.setdefault(one.plan["batching"], []).append(one.outcome)
    return found, best


@pytest.mark.slow
@pytest.mark.serial
def test_rows_of_skewed_lengths_are_grouped_where_that_may_be_and_the_launch_keeps_it(tmp_path):
    """A twelfth of the rows makes most of the padding: grouped, more tokens without padding are trained on a second."""
    write_config(tmp_path / "tiny", max_position_embeddings=256, hidden_size=128, intermediate_size=512)
    lengths = [24] * 550 + [32] * 350 + [256] * 100
    (tmp_path / "lengths").write_text("\n".join(map(str, lengths)))
    held = [f"--fix={one}" for one in ("checkpointing=off", "attention=default", "precision=fp32", "optimizer=adamw",
                                       "kernels=none", "micro_batch=8")]  # fmt: skip
    words = ("--device", "cpu", "--lengths", "lengths", "--global-batch", 16, "--output", "out", *held)
    done = autofit(
        tmp_path, "tune", "tiny", *words, "--among=batching=pad,group_by_length", "--trials", 4, "--no-guard"
    )
    assert done.returncode == 0, done.stderr
    found, seen = measured(tmp_path / "out")
    assert found.plan["batching"] == "group_by_length"
    rates = {value: max(one.tokens_per_second for one in outcomes) for value, outcomes in seen.items()}
    assert rates["group_by_length"] > 1.3 * rates["pad"], rates
    assert max(one.padding for one in seen["group_by_length"]) < 0.1 < min(one.padding for one in seen["pad"])
    written = json.loads((tmp_path / "out" / "training_args.json").read_text())
    assert written["train_sampling_strategy"] == "group_by_length"
    assert "about the same length" in " ".join(done.stdout.split())
    verified = json.loads(autofit(tmp_path, "verify", "out", "--json").stdout)
    assert verified["outcome"]["kind"] == "measured"
    assert verified["outcome"]["evidence"]["techniques"]["batching"]["sampler"] == "LengthGroupedSampler"
    assert verified["speed_ratio"] > 0.7, verified["broken"]


@pytest.mark.slow
@pytest.mark.by_hand
def test_rows_are_joined_in_a_tune_its_guard_and_its_launch(tmp_path):
    write_config(tmp_path / "tiny", max_position_embeddings=256, hidden_size=128, intermediate_size=512)
    (tmp_path / "lengths").write_text("\n".join(map(str, [24] * 550 + [32] * 350 + [256] * 100)))
    held = [f"--fix={one}" for one in ("checkpointing=off", "attention=default", "precision=fp32", "optimizer=adamw",
                                       "kernels=none", "micro_batch=8", "compile=off")]  # fmt: skip
    words = ("--device", "cpu", "--lengths", "lengths", "--global-batch", 16, "--output", "out", *held)
    done = autofit(tmp_path, "tune", "tiny", *words, "--fix=batching=padding_free", "--trials", 1)
    assert done.returncode == 0, done.stderr
    found, seen = measured(tmp_path / "out")
    assert found.guard.verdict == "same", found.guard
    for one in seen["padding_free"]:
        assert one.evidence.of("batching")["joined"] >= 4
        assert one.evidence.of("micro_batch")["rows"] == 8
        assert one.padding == pytest.approx(0)
    assert "is padding" not in done.stdout
    verified = json.loads(autofit(tmp_path, "verify", "out", "--json", "--tolerance", 0.95).stdout)
    assert verified["outcome"]["kind"] == "measured", verified["broken"]
    assert verified["outcome"]["evidence"]["techniques"]["batching"]["padded"] == 0


@pytest.mark.slow
@pytest.mark.by_hand
@pytest.mark.parametrize("value", ["group_by_length", "pad_to_multiple"])
def test_a_script_is_batched_without_a_line_changed(tmp_path, value):
    tiny_bert(tmp_path / "tiny")
    script, behind = SCRIPTS / "classify.py", ("--", "--model", "tiny", "--rows", 400, "--skewed")
    held = [f"--fix={one}" for one in ("checkpointing=off", "attention=default", "precision=fp32", "optimizer=adamw",
                                       "micro_batch=4", f"batching={value}")]  # fmt: skip
    done = autofit(tmp_path, "tune", script, "--device", "cpu", "--output", "out", "--trials", 1, *held, *behind)
    assert done.returncode == 0, done.stderr
    _, seen = measured(tmp_path / "out")
    evidence = seen[value][0].evidence.of("batching")
    assert evidence["pads_on"] == (value == "pad_to_multiple")
    assert evidence["sampler"] == ("LengthGroupedSampler" if value == "group_by_length" else "RandomSampler")
    if value == "pad_to_multiple":
        assert "other rows" not in done.stdout + done.stderr
    ran = autofit(tmp_path, "run", "out", script, *behind)
    assert "trained" in ran.stdout, ran.stderr
    verified = json.loads(autofit(tmp_path, "verify", "out", "--json", "--tolerance", 0.95).stdout)
    assert verified["outcome"]["kind"] == "measured", verified["broken"]
