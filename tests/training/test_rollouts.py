"""A Trainer that makes the rows it trains on: a trial generates once, and then trains on random completions."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from autofit.commands.scripts.request import script_notes
from autofit.contract.plan import Plan
from autofit.contract.script import Script
from autofit.registry import baselines, recipe_of
from autofit.training import jobs, rollouts
from autofit.training.measure import PARTS
from autofit.training.row_order import Wanted
from autofit.training.scripts.leave import Refused
from autofit.training.timing import Effort
from tests.support.synthetic import cpu_facts


class GRPOTrainer(SimpleNamespace):
    """Stands for TRL's."""

    __module__ = "trl.trainer.grpo_trainer"

    def _generate_single_turn(self, prompts):
        self.asked.append((len(prompts), self.generation_config.min_new_tokens))
        return [[7] * 5 for _ in prompts], None

    def _tokenize_prompts(self, prompts):
        return [[9] * len(one.split()) for one in prompts], None, {}

    def _generate_and_score_completions(self, prompts):
        found, _ = self._generate_single_turn(prompts)
        return {"advantages": torch.zeros(len(found)), "completions": found}


class Named(GRPOTrainer):
    """A script's own."""

    __module__ = "__main__"


class Tokenizer:
    """Of eight tokens, more than the model has."""

    all_special_ids, added_tokens_decoder, eos_token_id = (0, 1), {3: "<image>"}, 1

    def __len__(self):
        return 8


def trainer_of(kind=GRPOTrainer, *, micro=2, accumulation=2, **changed):
    args = SimpleNamespace(
        per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation, steps_per_generation=accumulation
    )
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=7)))
    given = {
        "args": args,
        "asked": [],
        "model": model,
        "max_completion_length": 5,
        "_tokenizer": Tokenizer(),
        "generation_config": SimpleNamespace(min_new_tokens=None),
        "num_iterations": 1,
        "beta": 0.0,
        "use_vllm": False,
    }
    return kind(**{**given, **changed})


ARGUMENTS = {
    "use_vllm": False,
    "max_completion_length": 16,
    "steps_per_generation": 4,
    "gradient_accumulation_steps": 4,
    "per_device_train_batch_size": 2,
    "num_generations": 4,
    "generation_batch_size": 8,
}


def arguments_of(**changed):
    return SimpleNamespace(**{**ARGUMENTS, **changed})


def test_trainers_of_trl_and_those_that_inherit_from_them_make_their_rows():
    assert rollouts.makes_rows(GRPOTrainer)
    assert rollouts.makes_rows(Named)

    assert not rollouts.makes_rows(type("GRPOTrainer", (), {"__module__": "mine"}))
    assert not rollouts.makes_rows(type("SFTTrainer", (), {"__module__": "trl.trainer.sft_trainer"}))


def test_a_trl_that_generates_in_another_way_is_refused(monkeypatch):
    monkeypatch.setattr(rollouts, "version", lambda _: "1.3.9")
    with pytest.raises(Refused, match="the Named of TRL") as refused:
        rollouts.check_generation(Named, arguments_of(), {}, measured=True)
    assert refused.value.hint == "pip install -U 'trl>=1.4'"
    rollouts.check_generation(Named, arguments_of(), {}, measured=False)


@pytest.mark.parametrize(
    ("changed", "given", "words"),
    [
        ({"use_transformers_continuous_batching": True}, {}, "continuous batching"),
        ({"max_completion_length": None}, {}, "completions of any length"),
        ({}, {"rollout_func": print}, "by its own rollout_func"),
        ({}, {"environment_factory": print}, "by its own environment_factory"),
    ],
)
def test_what_generates_in_another_way_is_refused_where_it_is_measured_and_trains_with_a_plan(changed, given, words):
    with pytest.raises(Refused, match=words):
        rollouts.check_generation(Named, arguments_of(**changed), given, measured=True)
    rollouts.check_generation(Named, arguments_of(**changed), given, measured=False)
    rollouts.check_generation(Named, arguments_of(), {"rollout_func": None}, measured=True)


@pytest.mark.parametrize("measured", [True, False])
def test_another_trainer_that_generates_is_refused_always(measured):
    class OnlineDPOTrainer:
        pass

    with pytest.raises(Refused, match="OnlineDPOTrainer generates the rows"):
        rollouts.check_generation(OnlineDPOTrainer, arguments_of(), {}, measured=measured)
    rollouts.check_generation(OnlineDPOTrainer, SimpleNamespace(), {}, measured=measured)


@pytest.mark.parametrize(
    ("own", "accumulation", "rows", "steps"),
    [
        (4, 1, 8, 1),  # as many optimizer steps as before are trained on what is generated at once
        (4, 8, 1, 8),
        (8, 1, 8, 2),
        (8, 4, 2, 8),
        (4, 1, 1, 4),  # a trace's few rows are no whole group of one prompt
    ],
)
def test_what_is_generated_at_once_is_as_much_as_before(own, accumulation, rows, steps):
    values = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": rows}
    found = rollouts.split_of_generation(arguments_of(steps_per_generation=own), values)
    assert found == {"steps_per_generation": steps, "generation_batch_size": None}
    assert rollouts.split_of_generation(SimpleNamespace(gradient_accumulation_steps=4), values) == {}


def test_a_generation_of_less_than_an_optimizer_step_keeps_its_split():
    assert rollouts.own_split(trainer_of()) is None
    trainer = trainer_of()
    trainer.args.steps_per_generation = 1
    assert rollouts.own_split(trainer) == "it generates 2 completions at once, which are no whole optimizer steps"


def test_a_trial_generates_once_between_two_steps_and_as_much_as_it_may():
    """In its first step there is no state of the optimizer beside what that takes."""
    trainer, told = trainer_of(), []
    generates = rollouts.generate_between(trainer, told.append)
    first, _ = trainer._generate_single_turn([[9]] * 4)
    later, probabilities = trainer._generate_single_turn([[9]] * 6)
    assert not trainer.asked
    generates()
    assert trainer.asked == [(4, 5)], "for the first prompts, with the greatest length for the least"
    assert trainer.generation_config.min_new_tokens is None
    assert probabilities is None
    assert [len(one) for one in first + later] == [5] * 10
    assert {token for one in later for token in one[:-1]} <= {2, 4, 5, 6}, "special tokens mean no text"
    assert {one[-1] for one in later} == {1}, "else a completion counts as cut off"
    assert len(set(map(tuple, later))) > 1
    assert len(told) == 1
    assert told[0].startswith("generating 4 completions of 5 tokens took ")
    assert "the script generates every" not in told[0]


def test_a_trainer_that_generates_in_a_way_of_its_own_is_left_to_it():
    trainer, told = trainer_of(), []
    rollouts.generate_between(trainer, told.append)()
    assert not trainer.asked
    assert told == ["it generates in a way of its own in its steps: their seconds and memory have that in them"]


def test_generations_that_are_trained_on_for_several_steps_are_told():
    trainer, told = trainer_of(num_iterations=2), []
    trainer.args.steps_per_generation = 4
    generates = rollouts.generate_between(trainer, told.append)
    trainer._generate_single_turn([[9]])
    generates()
    assert "the script generates every 4 steps, and computes no reward in the others" in told[0]


class Sampler:
    """TRL's ``RepeatSampler``, as far as it is asked."""

    def __init__(self, prompts, generations, micro_steps):
        self.batch_size, self.mini_repeat_count, self.repeat_count = prompts, generations, micro_steps


def wanted(**changed):
    given = {"micro_batch": 4, "accumulation": 2, "micro_steps": 2, "warm_up": 2, "steps": 3}
    return Wanted(**{**given, "longest": (9, 8), "places": tuple(range(8)), **changed})


def groups_of(trainer, size):
    places = [*trainer._get_train_sampler()]
    return [places[first : first + size] for first in range(0, len(places), size)]


def test_the_longest_prompts_come_first_and_then_those_that_are_to_be_expected():
    """Each prompt as often as it has completions; and the loader asks once for each micro-step."""
    trainer = trainer_of(_get_train_sampler=lambda _: Sampler(prompts=2, generations=4, micro_steps=2))
    rollouts.take_prompts(trainer, wanted())
    found = groups_of(trainer, 8)
    assert found[:4] == [[9] * 4 + [8] * 4] * 4
    later = found[4:]
    assert len(later) >= 2 * 3
    assert later[::2] == later[1::2]
    for one in later:
        assert one[:4] == [one[0]] * 4
        low, high = sorted({one[0], one[4]})
        assert low < 4 <= high, "of the short ones, and of the long ones"


def test_prompts_of_several_steps_come_as_often_as_they_are_generated_for():
    trainer = trainer_of(_get_train_sampler=lambda _: Sampler(prompts=4, generations=4, micro_steps=8))
    rollouts.take_prompts(trainer, wanted(warm_up=4, steps=8))
    found = groups_of(trainer, 16)
    assert [one[0] == 9 for one in found] == [True] * 8 + [False] * (8 * 3)


def test_the_same_prompts_come_in_each_step_where_trainings_are_compared():
    trainer = trainer_of(_get_train_sampler=lambda _: Sampler(prompts=2, generations=4, micro_steps=2))
    rollouts.take_prompts(trainer, wanted(), alike=True)
    found = groups_of(trainer, 8)
    assert len(found) == (2 + 3) * 2
    assert found == [found[0]] * len(found)


def test_prompts_of_a_stream_keep_their_order():
    own = object()
    trainer = trainer_of(_get_train_sampler=own)
    rollouts.take_prompts(trainer, wanted(longest=()))
    assert trainer._get_train_sampler is own


def test_a_prompt_and_its_longest_completion_are_one_row():
    loader = SimpleNamespace(dataset=["a"], batch_sampler=1)
    rows = [{"prompt": "w w w"}, {"prompt": "w"}]
    joined = rollouts.Completed(trainer_of(), loader, joined=True).collate_fn(rows)
    assert {name: tuple(one.shape) for name, one in joined.items()} == {"input_ids": (2, 8), "attention_mask": (2, 8)}
    assert joined["attention_mask"].sum(1).tolist() == [8, 6]
    assert not joined["attention_mask"][1, 0], "prompts are padded at their beginning"
    shapes = {
        name: tuple(one.shape)
        for name, one in rollouts.Completed(trainer_of(beta=0.1, num_iterations=2), loader).collate_fn(rows).items()
    }
    ids = {f"{part}_{what}": (2, size) for part, size in (("prompt", 3), ("completion", 5)) for what in ("ids", "mask")}
    of_tokens = dict.fromkeys(("ref_per_token_logps", "old_per_token_logps"), (2, 5))
    assert shapes == {**ids, **of_tokens, "advantages": (2,), "num_items_in_batch": ()}
    assert "ref_per_token_logps" not in rollouts.Completed(trainer_of(), loader).collate_fn(rows)


@pytest.mark.parametrize(("mode", "shape"), [("sequence_mask", (2, 1)), ("token_truncate", (2, 5)), (None, None)])
def test_a_micro_batch_that_vllm_has_drawn_has_what_weighs_it(mode, shape):
    loader = SimpleNamespace(dataset=None, batch_sampler=None)
    correction = {"vllm_importance_sampling_correction": mode is not None, "vllm_importance_sampling_mode": mode}
    trainer = trainer_of(use_vllm=True, **correction)
    made = rollouts.Completed(trainer, loader).collate_fn([{"prompt": "w"}] * 2)
    ratio = made.get("importance_sampling_ratio")
    assert (None if ratio is None else tuple(ratio.shape)) == shape
    assert ("old_per_token_logps" in made) == (mode is not None)
    assert made["sampling_per_token_logps"].shape == (2, 5)


def test_no_vllm_is_started_to_measure_what_it_generates_for(monkeypatch):
    trl = SimpleNamespace(VLLMGeneration=print)
    monkeypatch.setitem(sys.modules, "trl.trainer.grpo_trainer", trl)
    monkeypatch.setattr(rollouts, "version", lambda _: "1.16.0")
    rollouts.check_generation(Named, arguments_of(use_vllm=True), {}, measured=False)
    rollouts.check_generation(Named, arguments_of(), {}, measured=True)
    assert trl.VLLMGeneration is print, "it trains as it is"
    rollouts.check_generation(Named, arguments_of(use_vllm=True), {}, measured=True)
    engine = trl.VLLMGeneration(mode="server", model=None)
    engine.sync_weights()
    assert engine.vllm_client.get_server_info()["model_config"]["logprobs_mode"] == "processed_logprobs"
    with pytest.raises(Refused, match="vLLM generate before it trains"):
        engine.generate(prompts=[])


def test_what_vllm_generates_is_there_at_once():
    trainer, told = trainer_of(use_vllm=True), []
    del trainer.generation_config  # which TRL makes where the model generates
    generates = rollouts.generate_between(trainer, told.append)
    for _ in range(2):
        completions, probabilities = trainer._generate_single_turn([[9]] * 4)
        assert [len(one) for one in completions] == [len(one) for one in probabilities] == [5] * 4
    generates()
    assert not trainer.asked
    assert [one[:56] for one in told] == ["4 completions of 5 tokens were there at once, as if vLLM"]


def test_completions_that_are_compared_weigh_as_if_the_model_had_drawn_them():
    """By the probabilities of another all may be left out, and nothing would be compared."""

    def score(prompts):
        return {"advantages": torch.zeros(len(prompts)), "importance_sampling_ratio": torch.zeros(len(prompts), 1)}

    trainer = trainer_of(use_vllm=True, _generate_and_score_completions=score)
    rollouts.generate_alike(trainer)
    found = trainer._generate_and_score_completions([[9]] * 4)
    assert found["importance_sampling_ratio"].tolist() == [[1.0]] * 4


@pytest.mark.parametrize(
    ("given", "engine", "share"),
    [
        ({"use_vllm": False, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}, "", 0.0),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_gpu_memory_utilization": 0.3}, "a vLLM server", 0.0),
        (
            {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.2},
            "vLLM on 20% of the card",
            0.2,
        ),
    ],
)
def test_what_generates_is_told_and_how_much_at_once(given, engine, share):
    found = rollouts.at_once({**ARGUMENTS, "vllm_gpu_memory_utilization": 0.2, **given})
    assert found == {"generated_rows": 4 * 2, "engine": engine, "engine_share": share}


@pytest.mark.parametrize(
    ("engine", "share", "tried", "words"),
    [
        ("", 0.0, True, "Each trial generates once, before it is timed"),
        (
            "",
            0.0,
            False,
            "not estimated, its memory is but where the model is split over several",
        ),
        ("a vLLM server", 0.0, True, "No trial starts vLLM"),
        ("vLLM on 30% of the card", 0.3, False, "the card's memory is told without vLLM's share"),
    ],
)
def test_the_figures_of_a_script_that_generates_are_said_to_be_without_that(engine, share, tried, words):
    script = Script(
        path="t.py", sha256="", trainer="GRPOTrainer", micro_batch=2, accumulation=1,
        generated=16, engine=engine, engine_share=share,
    )  # fmt: skip
    facts = cpu_facts()
    notes = script_notes(replace(facts, workload=replace(facts.workload, script=script)), tried=tried)
    (said,) = [one for one in notes if one.startswith("its GRPOTrainer generates")]
    assert "at most 16 tokens for a prompt: samples/s are those of training" in said
    assert words in said
    assert (f" by {engine}" in said) == bool(engine)


@pytest.mark.parametrize(("generated", "micro_steps"), [(0, PARTS), (16, 8)])
def test_a_trial_takes_all_micro_steps_of_a_script_that_generates(tmp_path, generated, micro_steps):
    """Fewer would train on a part of what is generated at once, which takes less memory."""
    script = Script(path="t.py", sha256="", trainer="GRPOTrainer", micro_batch=2, accumulation=8, generated=generated)
    facts = cpu_facts(global_batch=16)
    facts = replace(facts, workload=replace(facts.workload, script=script))
    recipe = recipe_of(Plan(baselines()).replaced(micro_batch=2, accumulation=8), facts)
    job = SimpleNamespace(facts=facts, effort=Effort())
    assert jobs._clock(job, recipe, tmp_path, tmp_path).accumulation == micro_steps
