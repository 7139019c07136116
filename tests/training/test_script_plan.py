"""A plan put into a user's own script for its real training: into which of its Trainers, and what is told."""

import dataclasses
import io
import json
import multiprocessing
import os
from types import SimpleNamespace

import accelerate
import peft
import pytest
import torch
import transformers

from autofit.contract.recipe import quick_random_weights
from autofit.contract.script import Loading, Script
from autofit.machine.meters import status
from autofit.registry import recipe_of
from autofit.system.errors import InputError
from autofit.system.units import MIB
from autofit.training.scripts.described import asks_otherwise
from autofit.training.scripts.entry import train_with
from autofit.training.scripts.leave import Refused
from autofit.training.scripts.patches import Made, Patches, _given, _set_all
from autofit.training.scripts.watched import keep_scale, watch
from tests.support.synthetic import cpu_facts
from tests.support.tiny import PLAIN

_ = transformers.Trainer  # what it imports, before processes are forked
OWN = {"optim": "adamw_torch_fused", "train_sampling_strategy": "random", "bf16": False}
SCRIPT = """
import json, pathlib, sys
import torch
from transformers import Trainer, TrainingArguments

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels=0.0):
        return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}

rows = [{"x": torch.ones(4), "labels": torch.tensor(0.0)} for _ in range(32)]
seen = []
class Other(Net):
    pass

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from rows

class Own(Trainer):
    pass

class Wraps(Trainer):
    def __init__(self, model, *args, **kwargs):
        super().__init__(Net(), *args, **kwargs)

Wraps.__name__ = "Trainer"

for rows_at_once, accumulation, optimizer, *others in json.loads(sys.argv[1]):
    arguments = TrainingArguments(
        sys.argv[2], per_device_train_batch_size=rows_at_once, gradient_accumulation_steps=accumulation,
        optim=optimizer, max_steps=2,
        auto_find_batch_size="finds" in others, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
    )
    kind = Own if "Own" in others else Wraps if "wraps" in others else Trainer
    model = Other() if {"Other", "wraps"} & set(others) else Net()
    loss = (lambda out, labels, num_items_in_batch=None: out["loss"]) if "loss" in others else None
    data = Stream() if "stream" in others else rows
    trainer = kind(model, arguments, train_dataset=data, eval_dataset=Stream(), compute_loss_func=loss)
    if "sets" in others:
        trainer.args.gradient_accumulation_steps = accumulation
    if "predicts" not in others:
        trainer.train()
    if "again" in others:  # of the same arguments
        arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps = 2, 1
        trainer = kind(Net(), arguments, train_dataset=data)
        trainer.train()
    if "evaluates" in others:
        seen.append(sum(len(one["x"]) for one in trainer.get_eval_dataloader()))
    asked = trainer.args
    seen.append([asked.per_device_train_batch_size, asked.gradient_accumulation_steps, str(asked.optim.value)])
    seen[-1].append(asked.mixed_precision)
    del arguments, trainer, asked  # whose place in memory the next ones may take
pathlib.Path(sys.argv[3]).write_text(json.dumps(seen))
"""
LOOP = """
import sys
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=int(sys.argv[2]))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader([torch.ones(4)] * 32, batch_size=int(sys.argv[1]))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).mean())
        optimizer.step()
"""


def trained(recipe, path, words, around=lambda _trainer, train, _own: train()):
    """What was said of a training, in a process of its own: the patches stay."""
    receives, sends = multiprocessing.Pipe(duplex=False)

    def run():
        torch.set_num_threads(1)
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"  # as the launch of a plan says
        said = []
        try:
            train_with(recipe, str(path), words, environment={}, around=around, say=said.append)
        except InputError as error:
            said = error.message
        sends.send(said)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(120)
    assert process.exitcode == 0
    said = receives.recv()
    if isinstance(said, str):
        raise InputError(said)
    return said


def plan(values=None, **changed):
    facts, own = cpu_facts(global_batch=8), OWN | {"compute_loss_func": "none", "train_dataset": "read by number"}
    script = Script(path="train.py", sha256="", micro_batch=4, accumulation=2, trainer="Trainer", own=own, **changed)
    facts = dataclasses.replace(
        facts,
        workload=dataclasses.replace(facts.workload, script=script),
        model=dataclasses.replace(facts.model, architecture="Net"),
    )
    return recipe_of(PLAIN.replaced(**{"micro_batch": 8, "accumulation": 1, **(values or {})}), facts), script


def run(tmp_path, recipe, *trainings):
    """The split and optimizer of each training, and what was said."""
    script, found = tmp_path / "train.py", tmp_path / "found"
    script.write_text(SCRIPT)
    entered = tmp_path / "entered"

    def around(_trainer, train, own):
        with entered.open("a") as file:
            file.write(f"{own['per_device_train_batch_size']} ")
        return train()

    said = trained(recipe, script, (json.dumps(trainings), str(tmp_path / "out"), str(found)), around)
    return json.loads(found.read_text()), said, entered.read_text().split()


@pytest.mark.parametrize(("architecture", "told"), [("LlamaForCausalLM", True), ("Net", False)])
def test_a_plan_of_a_config_is_put_into_a_model_of_that_class_alone(tmp_path, architecture, told):
    facts = cpu_facts(global_batch=8)
    facts = dataclasses.replace(facts, model=dataclasses.replace(facts.model, architecture=architecture))
    (tmp_path / "train.py").write_text(SCRIPT)
    words = (json.dumps([(4, 2, OWN["optim"], "Other")]), str(tmp_path), str(tmp_path / "seen"))
    recipe = recipe_of(PLAIN.replaced(micro_batch=8, accumulation=1), facts)
    if told:
        with pytest.raises(InputError, match="trains a Other, and the plan was found for LlamaForCausalLM"):
            trained(recipe, tmp_path / "train.py", words)
    else:
        trained(recipe, tmp_path / "train.py", words)
        assert json.loads((tmp_path / "seen").read_text())[0][:2] == [8, 1]


@pytest.mark.slow
def test_every_training_like_the_tuned_one_gets_the_plan_and_no_other(tmp_path):
    recipe, _ = plan()
    like, other = [4, 2, "adamw_torch_fused"], [4, 4, "sgd"]
    seen, said, around = run(tmp_path, recipe, like, other, like, other)
    planned = [8, 1, recipe.emission.training_args["optim"], "bf16"]
    assert seen == [planned, [*other, "no"], planned, [*other, "no"]]
    assert around == ["4", "4"]
    words = "asks for rows a step on each device of 16, not 8, optim sgd, not adamw_torch_fused"
    assert said == [f"another Trainer of the script {words}: the plan is not put into it"] * 2


@pytest.mark.slow
def test_the_second_training_is_meant_where_that_one_was_tuned(tmp_path):
    recipe, _ = plan(call=2)
    seen, said, _ = run(tmp_path, recipe, [2, 2, "sgd"], [4, 2, "adamw_torch_fused"])
    assert [one[:2] for one in seen] == [[2, 2], [8, 1]]
    assert len(said) == 1


@pytest.mark.slow
def test_other_arguments_of_the_only_training_are_told(tmp_path):
    recipe, _ = plan()
    seen, said, _ = run(tmp_path, recipe, [4, 2, "sgd"])
    assert seen[0][:2] == [8, 1]
    assert said == ["the script asks for optim sgd, not adamw_torch_fused, as it was tuned: it trains as the plan says"]


def test_another_batch_of_the_only_training_is_another_training(tmp_path):
    recipe, _ = plan()
    with pytest.raises(InputError, match="rows a step on each device of 16, not 8, as it was tuned: whether"):
        run(tmp_path, recipe, [8, 2, "adamw_torch_fused"])


@pytest.mark.slow
def test_a_checkpoints_micro_batch_does_not_stand_over_the_plans(tmp_path):
    """A Trainer that looks for the batch which fits takes that of the checkpoint it goes on from."""
    recipe, _ = plan()
    script, words = tmp_path / "train.py", json.dumps([(4, 2, "adamw_torch_fused", "finds")])
    script.write_text(SCRIPT)

    def around(trainer, train, _own):
        assert trainer.args.auto_find_batch_size is False
        return train()

    assert trained(recipe, script, (words, str(tmp_path / "out"), str(tmp_path / "found")), around) == []


@pytest.mark.slow
def test_arguments_that_are_set_anew_for_a_second_trainer_are_asked_for(tmp_path):
    recipe, _ = plan()
    found, (said,), entered = run(tmp_path, recipe, (4, 2, "adamw_torch_fused", "again"))
    assert found == [[2, 1, "adamw_torch_fused", "no"]]
    assert "asks for rows a step on each device of 2, not 8: the plan is not put into it" in said
    assert entered == ["4"]


def test_an_accumulation_that_is_set_after_the_trainer_is_made_does_not_stand_over_the_plans(tmp_path):
    recipe, _ = plan()
    with pytest.raises(
        InputError, match="sets gradient_accumulation_steps to 2 after its Trainer is made, and the plan"
    ):
        run(tmp_path, recipe, (4, 2, "adamw_torch_fused", "sets"))
    as_asked, _ = plan({"micro_batch": 4, "accumulation": 2})
    found, said, _ = run(tmp_path, as_asked, (4, 2, "adamw_torch_fused", "sets"))
    assert (found[0][:2], said) == ([4, 2], [])


@dataclasses.dataclass
class OwnArguments(transformers.TrainingArguments):
    """As scripts have them: what is made of what is given, by the class itself."""

    smoothing: dataclasses.InitVar[float] = 0.1
    base_rate: float = 0.5

    def __post_init__(self, smoothing):
        super().__post_init__()
        self.smoothed = smoothing
        self.learning_rate = self.base_rate = self.base_rate * self.per_device_train_batch_size


def test_what_a_script_has_made_of_its_arguments_is_not_made_anew_with_a_plan(tmp_path):
    given = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    arguments = OwnArguments(**given, per_device_train_batch_size=4, smoothing=0.3)
    arguments.temperature = 2.0
    _set_all(arguments, {"per_device_train_batch_size": 8, "bf16": True, "optim": "adamw_torch"})
    kept = (arguments.learning_rate, arguments.base_rate, arguments.smoothed, arguments.temperature)
    assert kept == (2.0, 2.0, 0.3, 2.0)
    assert arguments.train_batch_size == 8
    assert (arguments.mixed_precision, arguments.optim) == (
        "bf16",
        transformers.training_args.OptimizerNames.ADAMW_TORCH,
    )


@pytest.mark.slow
def test_another_model_or_trainer_is_another_training(tmp_path):
    """Its loss may be divided where that of the tuned one is not."""
    recipe, _ = plan(undivided=True)
    like = [4, 2, "adamw_torch_fused"]
    seen, said, _ = run(tmp_path, recipe, like, [*like, "Other"], [*like, "Own"])
    assert [one[:2] for one in seen] == [[8, 1], [4, 2], [4, 2]]
    asks, left = "another Trainer of the script asks for", "the plan is not put into it"
    assert said == [f"{asks} model Other, not Net: {left}", f"{asks} Trainer Own, not Trainer: {left}"]
    with pytest.raises(InputError, match="asks for model Other, not Net, as it was tuned: whether the plan trains"):
        run(tmp_path, recipe, [*like, "Other"])
    # one that only predicts comes first, and one puts its model inside of another
    seen, said, _ = run(tmp_path, recipe, [8, 1, "sgd", "Other", "predicts"], [*like, "wraps"], [*like, "Other"])
    assert [one[:2] for one in seen] == [[8, 1], [8, 1], [4, 2]]
    assert said == [f"{asks} model Other, not Net: {left}"]


@pytest.mark.slow
def test_another_loss_or_a_stream_is_another_training(tmp_path):
    recipe, _ = plan()
    like = [4, 2, "adamw_torch_fused"]
    seen, said, _ = run(tmp_path, recipe, like, [*like, "loss"], [*like, "stream"])
    assert [one[:2] for one in seen] == [[8, 1], [4, 2], [4, 2]]
    assert "asks for compute_loss_func <lambda>, not none: the plan" in said[0]
    assert "asks for train_dataset read in order, not read by number: the plan" in said[1]
    with pytest.raises(InputError, match="asks for compute_loss_func <lambda>, not none"):
        run(tmp_path, recipe, [*like, "loss"])


@pytest.mark.slow
def test_workers_of_the_plan_do_not_each_read_a_stream_that_is_evaluated(tmp_path):
    recipe, _ = plan({"loader": "workers_2"}, loading=Loading(cores=2))
    seen, *_ = run(tmp_path, recipe, [4, 2, "adamw_torch_fused", "evaluates"])
    assert seen[0] == 32


@pytest.mark.parametrize(
    ("own", "planned", "left", "times"),
    [
        ((8, 1), (2, 4), 5, 1 / 3),  # one micro-batch of its own, three of the plan's
        ((2, 4), (8, 1), 5, 3.0),
        ((4, 2), (2, 4), 4, 1 / 2),
        ((2, 4), (4, 2), 8, 2.0),
    ],
)
@pytest.mark.parametrize("resumes", [False, True])
def test_an_epochs_last_rows_weigh_as_much_as_in_the_scripts_own_micro_batches(own, planned, left, times, resumes):
    def batches(rows):
        sizes = [min(planned[0], rows - done) for done in range(0, rows, planned[0])]
        return [{"x": torch.ones(size, 3)} for size in sizes], None

    trainer = SimpleNamespace(
        args=SimpleNamespace(per_device_train_batch_size=planned[0], gradient_accumulation_steps=planned[1]),
        compute_loss=lambda *_: 1.0,
        get_batch_samples=batches,
    )
    keep_scale(trainer, own[1], countable=resumes)
    model = SimpleNamespace(training=True)
    if not resumes:  # or a checkpoint was saved before these
        trainer.get_batch_samples(8)
        assert trainer.compute_loss(model, {}) == own[1] / planned[1]
    trainer.get_batch_samples(left)
    assert trainer.compute_loss(model, {}) == pytest.approx(times)


def test_what_a_trainer_is_given_is_found_however_its_class_takes_it(tmp_path):
    class HandsOn(transformers.Trainer):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)

    arguments, model = transformers.TrainingArguments(str(tmp_path), use_cpu=True), torch.nn.Linear(2, 2)
    for kind in (transformers.Trainer, HandsOn):
        for words, names in (((model, arguments), {}), ((model,), {"args": arguments}), ((), {"model": model})):
            found = _given(kind, None, *words, data_collator=len, **names)
            assert found["model"] is model
            assert found.get("args") is (None if "model" in names else arguments)
            assert found["data_collator"] is len


def test_where_weights_are_random_nothing_is_written_over_trained_ones(tmp_path):
    """Whatever is trained: a script may save before its training, or between two of them."""

    def run():
        Patches(train=lambda _trainer, _train: None).install()
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9))
        arguments = transformers.TrainingArguments(str(tmp_path / "trained"), use_cpu=True, report_to="none")
        transformers.Trainer(model, arguments).save_model(str(tmp_path / "trained"))
        model.save_pretrained(tmp_path / "trained")
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)).save_pretrained(
            tmp_path / "trained"
        )
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        torch.save(torch.ones(3), memory := io.BytesIO())
        memory.seek(0)
        assert torch.load(memory).tolist() == [1, 1, 1], "a copy in memory is no file"

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("measured", [True, False])
def test_a_measured_training_goes_on_from_no_checkpoint(measured):
    """Its step may be the training's last one, and its weights are of another plan's wraps."""

    def run():
        def train(_trainer, resume_from_checkpoint=None, trial=None):
            return resume_from_checkpoint, trial

        transformers.Trainer.train = train
        Patches(train=lambda _trainer, train: train(), random_weights=measured).install()
        trainer, read = object.__new__(transformers.Trainer), None if measured else "out/checkpoint-30"
        assert trainer.train(resume_from_checkpoint="out/checkpoint-30", trial=1) == (read, 1)
        assert trainer.train("out/checkpoint-30", 1) == (read, 1)
        assert trainer.train() == (None, None)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(120)
    assert process.exitcode == 0


def test_a_profiler_of_the_script_is_idle_where_it_is_measured_alone(tmp_path):
    def run():
        own = torch.profiler.profile
        Patches(train=lambda _trainer, _train: None, random_weights=False).install()
        assert torch.profiler.profile is own
        Patches(train=lambda _trainer, _train: None).install()
        ready = []
        said = {"activities": ["cpu"], "schedule_option": {"wait": 0, "warmup": 1, "active": 1}}
        kept = accelerate.utils.ProfileKwargs(**said, on_trace_ready=ready.append, output_trace_dir=str(tmp_path))
        with accelerate.Accelerator(cpu=True, kwargs_handlers=[kept]).profile() as profiler:
            for _ in range(4):
                profiler.step()
        profiler.export_stacks(str(tmp_path / "stacks"))
        profiler.key_averages().table(sort_by="self_cpu_time_total")
        assert (profiler.step_num, ready, isinstance(profiler, own)) == (4, [], True)
        torch.cuda.memory._record_memory_history(max_entries=9)
        torch.cuda.memory._dump_snapshot(str(tmp_path / "memory.pickle"))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert not [*tmp_path.iterdir()]


def test_a_model_that_a_script_makes_to_train_it_gets_the_weights_that_it_gets_without_a_plan():
    """A trial repeats random numbers, to be there sooner: rows of a table of embeddings would begin alike."""

    class Own(transformers.PreTrainedModel):
        config_class = transformers.PreTrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.table = torch.nn.Embedding(4200, 512)
            self.post_init()

        def _init_weights(self, module):
            if module is self.table:
                module.weight.data.normal_()

    def run():
        torch.set_num_threads(1)  # a fork of a process that has computed has none of its threads

        def made():
            torch.manual_seed(0)
            return Own._from_config(transformers.PreTrainedConfig()).table.weight

        own = made()
        Patches(train=lambda _trainer, _train: None, random_weights=False).install()
        assert torch.equal(made(), own)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(120)
    assert process.exitcode == 0


def test_a_script_that_looks_for_the_batch_which_fits_fails_where_the_plans_does_not():
    """Else a trial that runs out of memory goes on with less, or prepares its model again and is refused for that."""

    def run():
        Patches(train=lambda _trainer, _train: None).install()

        @accelerate.utils.find_executable_batch_size(starting_batch_size=8)
        def trains(batch_size):
            raise torch.OutOfMemoryError(f"CUDA out of memory. {batch_size} rows")

        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            trains()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(120)
    assert process.exitcode == 0


def test_what_the_plan_leaves_alone_is_no_other_training():
    recipe, _ = plan()
    asked = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, **OWN, "eval_strategy": "epoch"}

    def differs(tuned, **changed):
        made = Made(arguments={**asked, **changed}, given={"model": None})
        return asks_otherwise(made, transformers.Trainer, None, recipe.facts, tuned)

    assert differs({"optim": "adamw_torch"}) == {}, "the same rows, split in another way"
    assert differs({"optim": "adamw_torch"}, bf16=True) == {}
    assert differs({"bf16": False}, bf16=True) == {"bf16": "bf16 True, not False"}


def test_a_greatest_length_of_completions_that_was_not_measured_is_told():
    recipe, script = plan()
    script = dataclasses.replace(script, generated=16)
    facts = dataclasses.replace(recipe.facts, workload=dataclasses.replace(recipe.facts.workload, script=script))
    asked = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, **OWN}
    for length, told in ((16, {}), (32, {"max_completion_length": "max_completion_length 32, not 16"})):
        made = Made(arguments={**asked, "max_completion_length": length}, given={"model": None})
        assert asks_otherwise(made, transformers.Trainer, None, facts, {}) == told


@pytest.mark.parametrize("words", [("4", "2"), ("2", "4"), ("16", "1")])
def test_a_loop_that_asks_for_another_batch_is_refused(tmp_path, words):
    """It makes its own schedule, of its own number of steps."""
    recipe, script = plan()
    script = dataclasses.replace(script, trainer="")
    facts = dataclasses.replace(recipe.facts, workload=dataclasses.replace(recipe.facts.workload, script=script))
    recipe, path = dataclasses.replace(recipe, facts=facts), tmp_path / "loop.py"
    path.write_text(LOOP)
    if words == ("16", "1"):
        with pytest.raises(InputError, match="asks for 16 rows a step on each device; it was tuned with 8"):
            trained(recipe, path, words)
    else:
        (said,) = trained(recipe, path, words)
        assert f"a step takes 8 x 1 rows, the script's own {words[0]} x {words[1]}" in said


def test_where_nothing_is_trained_large_weights_take_no_memory(tmp_path):
    config = transformers.GPT2Config(n_layer=1, n_embd=1024, n_head=4, vocab_size=150_000)
    config.save_pretrained(tmp_path)

    def run():
        Patches(train=lambda _trainer, _train: None, draws=False).install()
        before = status()["VmRSS"]
        read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for model, kind in ((read, torch.float32), (made, torch.bfloat16)):
            assert {one.dtype for one in model.parameters()} == {kind}
            assert not model.transformer.wte.weight.any()
            assert model.transformer.h[0].ln_1.weight.all(), "small ones are as ever"
        assert status()["VmRSS"] - before < 64 * MIB, "of 614 and 307 MB of embeddings, and 46 and 23 MB of a layer"

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(120)
    assert process.exitcode == 0


def test_large_weights_of_a_trial_repeat_a_tile_in_which_no_two_rows_are_alike():
    config = transformers.GPT2Config(n_layer=1, n_embd=512, n_head=4, vocab_size=6000)
    with quick_random_weights():
        made = transformers.AutoModelForCausalLM.from_config(config)
    rows, tile = made.transformer.wte.weight.detach(), 1_048_573
    flat = rows.view(-1)
    assert torch.equal(flat[:tile], flat[tile : 2 * tile])
    assert torch.equal(flat[2 * tile :], flat[: flat.numel() - 2 * tile])
    assert rows.std().item() == pytest.approx(config.initializer_range, rel=0.01)
    assert rows.unique(dim=0).shape == rows.shape


def test_a_step_in_which_a_model_generates_is_refused_while_it_is_measured():
    """Its rows would be others than those whose speed is told; elsewhere a script may show what it has learned."""
    own = transformers.GenerationMixin.generate

    class Distils(SimpleNamespace):
        def training_step(self):
            return transformers.GenerationMixin.generate(None)

    trainer = Distils(compute_loss=None, pop_callback=lambda _: None, add_callback=lambda _: None)
    watch(trainer, SimpleNamespace())
    with pytest.raises(Refused, match="the script's Distils generates the rows"):
        trainer.training_step()
    assert transformers.GenerationMixin.generate is own
