"""What a run of training steps does beside training: it evaluates a batch as a Trainer would."""

import pytest
import torch
from accelerate import Accelerator

from autofit.contract.plan import Plan
from autofit.registry import recipe_of, technique
from autofit.training import loops
from autofit.training.timing import Clock, Effort
from tests.support.tiny import LLAMA, PLAIN, write_config
from tests.support.traced import facts_of, like_a_process_of_its_own


class NoMeter:
    """Counts how often memory is looked at."""

    def __init__(self):
        self.checks = 0

    def check(self):
        self.checks += 1

    def settle(self):
        """Nothing to do."""


@pytest.fixture
def forwards(tmp_path):
    """Runs a plan, and tells of each forward pass whether it trained, and how many rows it had."""

    def run(plan, evaluated_rows=0, **options):
        config = write_config(tmp_path / "config")
        facts = facts_of({**LLAMA, "num_hidden_layers": 2}, seq_len=16, global_batch=8, **options)
        facts = facts.evaluating(evaluated_rows)
        clock = Clock(
            recipe=recipe_of(plan, facts),
            effort=Effort(warm_up=2, min_steps=1, max_steps=1),
            meter=NoMeter(),
            accumulation=plan["accumulation"],
            on_cuda=False,
        )
        seen = []

        def watch(model):
            def before(module, args, kwargs):
                rows = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
                seen.append((module.training, torch.is_grad_enabled(), len(rows)))

            model.register_forward_pre_hook(before, with_kwargs=True)
            return model

        clock.recipe.model_wraps.append(watch)
        with like_a_process_of_its_own():
            loops.run_recipe(clock, config=config, folder=tmp_path)
        return seen, clock

    return run


def test_a_trainer_s_run_evaluates_a_batch_after_its_warm_up(forwards):
    seen, clock = forwards(PLAIN.replaced(micro_batch=4, accumulation=2))
    trained, evaluated = (True, True, 4), (False, False, 4)
    assert seen == [trained] * 4 + [evaluated] + [trained] * 2
    assert clock.meter.checks == 2 * 6 + 3 + 1, "the ceiling is looked at after it, too"


def test_more_rows_are_evaluated_than_trained_where_they_were_found_to_fit(forwards):
    seen, _ = forwards(PLAIN.replaced(micro_batch=4, accumulation=2), evaluated_rows=16)
    assert [rows for training, _, rows in seen if not training] == [16]


def test_a_plain_loop_evaluates_as_its_author_likes(forwards):
    seen, _ = forwards(PLAIN.replaced(micro_batch=4, accumulation=2), launch_path="loop")
    assert seen == [(True, True, 4)] * 6


def test_no_more_rows_are_evaluated_than_trained_or_than_their_logits_allow():
    rows = technique("micro_batch").emit

    def evaluated(micro_batch, **changes):
        facts = facts_of({"model_type": "llama", "n_embd": 64, "n_layer": 4, "vocab_size": 128_256, **changes})
        return rows(micro_batch, Plan({}), facts).training_args["per_device_eval_batch_size"]

    assert evaluated(1) == 1
    assert evaluated(4) == 4
    assert evaluated(64) == 2**29 // (4 * 64 * 128_256)
    assert evaluated(64, vocab_size=10**8) == 1


@pytest.mark.parametrize("launch_path", ["trainer", "loop"])
def test_a_step_that_loss_scaling_skips_is_told(forwards, monkeypatch, launch_path):
    told = []
    monkeypatch.setattr(Accelerator, "optimizer_step_was_skipped", property(lambda _: True))
    monkeypatch.setattr(Clock, "step_skipped", lambda clock: told.append(clock.done))
    forwards(PLAIN.replaced(micro_batch=4, accumulation=2), launch_path=launch_path)
    assert told == [0, 1, 2]
