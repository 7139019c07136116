"""What is told of the model that a script trains."""

import copy
import importlib
import json
import os
import re
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from autofit.contract.script import Script
from autofit.machine.model import describe_module
from autofit.training.scripts.described import _makes_its_optimizer
from autofit.training.scripts.leave import Refused
from autofit.training.scripts.loading import ignores_workers
from autofit.training.scripts.random_weights import cache_tables_apart, random_model, take_reference_of_few
from autofit.training.scripts.traits import changes_since, loss_takes_rows_together, own_split, traits
from autofit.training.scripts.written import Written
from tests.support.scripted import SCRIPTS


def test_tables_that_a_script_computes_with_random_weights_are_none_of_its_trainings(tmp_path, monkeypatch):
    """As embeddings of its texts, which diffusers' script for SDXL caches by its arguments."""
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"x": [1, 2]}).save_to_disk(tmp_path / "rows")
    rows = datasets.load_from_disk(tmp_path / "rows")
    names = {"new_fingerprint": "of_arguments"}, {"cache_file_name": str(tmp_path / "named.arrow")}
    for one in ("map", "from_file"):
        monkeypatch.setattr(datasets.Dataset, one, vars(datasets.Dataset)[one])
    cache_tables_apart()
    for name in names:
        assert rows.map(lambda _: {"y": 0}, **name)["y"][:] == [0, 0]
        assert rows.map(lambda _: {"y": 2}, **name)["y"][:] == [0, 0], "a trial makes it once"
    assert datasets.Dataset.from_file(str(tmp_path / "named.arrow"))["y"][:] == [0, 0], "TRL reads it by its name"
    monkeypatch.undo()
    for name in names:
        assert rows.map(lambda _: {"y": 1}, **name)["y"][:] == [1, 1]


@pytest.mark.parametrize("rows", [12, 100])
def test_a_reference_is_asked_of_few_rows_before_a_measured_training(monkeypatch, rows):
    """Of all of them it takes longer than the trials: each makes its Trainer, and the description on the CPU."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    model, tokenizer = importlib.import_module("word_llama").word_llama(20)
    asked: list[int] = []
    kind, told = trl.DPOTrainer, trl.DPOTrainer.compute_ref_log_probs
    monkeypatch.setattr(
        kind, "compute_ref_log_probs", lambda *given: asked.append(len(given[2]["input_ids"]) // 2) or told(*given)
    )
    monkeypatch.setattr(kind, "_precompute_ref_logps", kind._precompute_ref_logps)
    for _ in range(2):
        take_reference_of_few(kind)
    table = [{"prompt": "w1 ", "chosen": " ".join(["w2"] * (1 + n % 9)), "rejected": "w3 w4"} for n in range(rows)]
    args = trl.DPOConfig(
        output_dir="out", report_to="none", use_cpu=True, bf16=False, max_length=8, per_device_train_batch_size=4,
        precompute_ref_log_probs=True,
    )  # fmt: skip
    table = datasets.Dataset.from_list(table)
    trainer = kind(model, copy.deepcopy(model), args, train_dataset=table, processing_class=tokenizer)
    found = trainer.train_dataset
    assert sum(asked) == min(rows, 16)
    assert len(found) == rows
    tokens = [min(7, len(one)) for one in found["chosen_ids"]]  # of 8, one is the prompt
    each = [one / count for one, count in zip(found["ref_chosen_logps"], tokens, strict=True)]
    assert all(-5 < one < -2 for one in each)
    assert (max(each) - min(each) < 1e-6) == (rows > 16), "the mean of each token, where not all were asked"


@pytest.mark.parametrize("said_in", ["its own file", "the model's config", "an argument"])
def test_a_model_with_random_weights_generates_as_its_checkpoint_does(tmp_path, said_in):
    """Its beams and tokens are what an evaluation that generates holds; and a script may look at them."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)).save_pretrained(tmp_path)
    told = {"num_beams": 4, "max_length": 142, "is_multilingual": True}
    if said_in == "the model's config":  # as older checkpoints have it
        (tmp_path / "generation_config.json").unlink()
        config = tmp_path / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "num_beams": 4, "max_length": 142}))
    else:
        (tmp_path / "generation_config.json").write_text(json.dumps(told))
    given = {"generation_config": GenerationConfig(num_beams=2)} if said_in == "an argument" else {}
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, **given).generation_config
    build = LlamaForCausalLM._from_config
    made = random_model(LlamaForCausalLM, str(tmp_path), dict(given), build, draws=True).generation_config
    assert made.to_dict() == loaded.to_dict()
    assert made.num_beams == (2 if given else 4)


class Around(torch.nn.Module):
    """As a model of sentence-transformers: it has the config of the model inside it, and is none of transformers."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.config = LlamaConfig()


def test_a_module_around_a_model_of_transformers_is_the_users_own():
    rows = SimpleNamespace(rows=2, looked_at=2, longest_size=4, sizes={}, tokens=None, counts=(), spread=(), longest=())
    found = traits(SimpleNamespace(said={}, loaded=False, written=Written()), Around(), rows, 1.0)
    assert found["config"] == {}
    assert found["script"]["loads"] == {}
    assert describe_module("train.py", found["model"])["architecture"] == "Around"


@pytest.mark.slow
def test_of_a_script_its_own_text_is_told_apart_from_that_of_its_modules(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    script = Script(
        path=str(tmp_path / "train.py"),
        sha256=sha256(b"").hexdigest(),
        trainer="Trainer",
        micro_batch=1,
        accumulation=1,
    )
    assert changes_since(script) == []
    (tmp_path / "beside_it.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("beside_it")
    changed, gone = {"beside_it": "0" * 64}, {"not_imported_yet": "0" * 64}
    (other,) = changes_since(replace(script, modules=changed | gone))
    assert other.startswith("beside_it, which train.py imports, is not the text that was tuned")
    assert changes_since(replace(script, modules={"beside_it": sha256(b"").hexdigest()})) == []
    (tmp_path / "train.py").write_text("import torch")
    (own,) = changes_since(script)
    assert own.startswith("train.py is not the text that was tuned")
    (tmp_path / "train.py").unlink()
    assert changes_since(script) == []


def test_float16_is_for_frozen_weights_and_small_others_may_be_in_any():
    """As the factors of a Fourier layer, which are complex."""
    half, complexes = torch.nn.Linear(9, 9).half().requires_grad_(False), torch.nn.Linear(2, 2, dtype=torch.complex64)
    rows = SimpleNamespace(rows=1, looked_at=1, longest_size=9, sizes={}, tokens=9, counts=(), spread=(), longest=(1,))

    def told(*parts):
        model = torch.nn.Sequential(*parts)
        patches = SimpleNamespace(said={}, loaded=False, written=Written())
        return traits(patches, model, rows, 1.0)["script"]["weights_dtype"]

    assert told(torch.nn.Linear(9, 9), complexes) == "float32"
    assert told(half, torch.nn.Linear(2, 2)) == "float16"
    for parts in ([half], [half, torch.nn.Linear(2, 2).half()], [torch.nn.Linear(9, 9), torch.nn.Linear(2, 2).half()]):
        with pytest.raises(Refused, match="weights in float16, which lose almost every update"):
            told(*parts)


def test_of_a_prompt_that_is_trained_beside_a_model_dtype_and_size_are_told():
    """It lies in no layer of the model: over one in float16, "the script trains weights in float16" was said of it."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)).half()
    prompted = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    rows = SimpleNamespace(rows=1, looked_at=1, longest_size=9, sizes={}, tokens=9, counts=(), spread=(), longest=(1,))
    found = traits(SimpleNamespace(said={}, loaded=True, written=Written()), prompted, rows, 1.0)
    assert found["script"]["weights_dtype"] == "float16"
    assert found["parameters"] == base.num_parameters() + 4 * 8
    prompted.half()
    with pytest.raises(Refused, match="weights in float16, which lose almost every update"):
        traits(SimpleNamespace(said={}, loaded=True, written=Written()), prompted, rows, 1.0)


def test_a_file_is_opened_also_where_its_path_can_not_be_noted(tmp_path, monkeypatch):
    class InBytes:
        def __fspath__(self):
            return os.fsencode(tmp_path / "a.npy")

    written = Written()
    written.begin()
    open(InBytes(), "wb").close()  # noqa: PTH123 - as a script may
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileNotFoundError, match=r"b\.npy"):
        open("b.npy", "wb").close()  # noqa: PTH123
    open(tmp_path / "c.npy", "wb").close()  # noqa: PTH123
    monkeypatch.undo()
    assert written.arrays() == (str(tmp_path / "c.npy"),)


def of_package(name, *, within="losses", bases=(torch.nn.Module,), **holds):
    """A class as sentence-transformers has it, and one of it."""
    one = type(name, bases, {"__module__": f"sentence_transformers.{within}.{name.lower()}"})()
    for key, value in holds.items():
        setattr(one, key, value)
    return one


MEAN, RANKING = (
    of_package("CosineSimilarityLoss", loss_fct=torch.nn.MSELoss()),
    of_package("MultipleNegativesRankingLoss"),
)
TOGETHER = "its MultipleNegativesRankingLoss takes the rows of a micro-batch together"


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (MEAN, None),
        (RANKING, TOGETHER),
        (of_package("MatryoshkaLoss", loss=MEAN), None),
        (of_package("Matryoshka2dLoss", loss=of_package("MatryoshkaLoss", loss=RANKING)), TOGETHER),
        ({"pairs": MEAN, "triplets": of_package("TripletLoss")}, None),
        ({"pairs": MEAN, "triplets": RANKING}, TOGETHER),
        (of_package("ContrastiveLoss", size_average=False), "its ContrastiveLoss takes"),
        (of_package("MSELoss", loss_fct=torch.nn.MSELoss(reduction="sum")), "its MSELoss takes"),
        (of_package("SoftmaxLoss", loss_fct=torch.nn.functional.cross_entropy), "its SoftmaxLoss takes"),
        (
            of_package("CrossEntropyLoss", ce_loss=torch.nn.CrossEntropyLoss(torch.ones(2))),
            "its CrossEntropyLoss",
        ),
        (torch.nn.MSELoss(), "its MSELoss may take the rows of a micro-batch together"),
    ],
)
def test_a_loss_of_sentence_transformers_that_is_no_mean_over_rows_is_told(loss, why):
    trainer = of_package("SentenceTransformerTrainer", within="trainer", bases=(SimpleNamespace,), loss=loss)
    for one in (trainer, type("Own", (type(trainer),), {})(loss=loss)):
        found = loss_takes_rows_together(one)
        assert found == why or found.startswith(why)


def test_the_loss_of_another_trainer_is_not_looked_at():
    assert loss_takes_rows_together(SimpleNamespace(loss=RANKING)) is None


@pytest.mark.parametrize(
    ("holds", "why"),
    [
        ({"train_dataset": {"pairs": [], "triplets": []}}, "the rows of a micro-batch are of one of its data sets"),
        (
            {"args": SimpleNamespace(batch_sampler="no_duplicates")},
            "its batch_sampler (no_duplicates) chooses the rows of a micro-batch",
        ),
        ({"args": SimpleNamespace(batch_sampler="batch_sampler"), "train_dataset": []}, None),
    ],
)
def test_micro_batches_that_a_sampler_of_sentence_transformers_makes_are_told(holds, why):
    trainer = of_package("SentenceTransformerTrainer", within="trainer", bases=(SimpleNamespace,), loss=MEAN, **holds)
    assert loss_takes_rows_together(trainer) == why


@pytest.mark.parametrize(
    ("holds", "why"),
    [
        ({"calculate_KL": True}, "the KL divergence in its loss is that of the rows of a micro-batch"),
        ({"calculate_KL": False}, None),
        (
            {"top_entropy_quantile": 0.5},
            "its loss takes the tokens of a micro-batch together (top_entropy_quantile)",
        ),
        ({"top_entropy_quantile": 1.0}, None),
        ({"loss_types": ["sft", "aot_unpaired"]}, "its loss (aot_unpaired) sorts the rows of a micro-batch"),
        ({"loss_types": ["sigmoid"]}, None),
    ],
)
def test_a_loss_of_trl_that_takes_rows_together_is_told(holds, why):
    kind = type("Own", (type("KTOTrainer", (SimpleNamespace,), {"__module__": "trl.trainer.kto_trainer"}),), {})
    assert loss_takes_rows_together(kind(**holds)) == why


class Own(Trainer):
    rows = None

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=self.rows or self.args.train_batch_size)


class Own8(Own):
    rows = 8


class Own16(Own):
    rows = 16


class Grows(TrainerCallback):
    def on_epoch_begin(self, args, state, control, **_):
        args.gradient_accumulation_steps *= 2


class Sets(TrainerCallback):
    def on_epoch_begin(self, args, state, control, **_):
        setattr(args, "per_device_train_batch_size", 2)  # noqa: B010 - as a script may write it


class Reads(TrainerCallback):
    def on_epoch_begin(self, args, state, control, **_):
        assert args.gradient_accumulation_steps == 1


class Substep(TrainerCallback):
    def on_substep_end(self, args, state, control, model=None, **_):
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)


class WarmsUp(Trainer):
    seen = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.seen += 1
        weight = min(1.0, self.seen / 100)
        return model(**inputs).loss * weight


class Ramp:
    """A weight that grows with each call."""

    calls = 0

    def __call__(self):
        self.calls += 1
        return min(1.0, self.calls / 100)


class WarmsUpElsewhere(Trainer):
    ramp = Ramp()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss * self.weight()

    def weight(self):
        return 2.0 * self.ramp()


class LogsElsewhere(Trainer):
    seen = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        self.tell(loss)
        return loss

    def tell(self, loss):
        self.seen += 1
        if self.seen % 10 == 0:
            self.log({"loss": loss.item()})


class Freezes(Trainer):
    seen = 0

    def training_step(self, model, inputs, num_items_in_batch=None):
        Freezes.seen += 1
        if Freezes.seen > 10:
            model.weight.requires_grad_(False)
        return super().training_step(model, inputs, num_items_in_batch)


class Logs(Trainer):
    seen = 0
    mean = 0.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        outputs.loss = outputs.loss * 0.5
        self.seen += 1
        self.mean = 0.9 * self.mean + 0.1 * outputs.loss.item()
        if self.seen % 10 == 0:
            self.log({"mean": self.mean})
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Batches(Trainer):
    def create_scheduler(self, num_training_steps, optimizer=None):
        return super().create_scheduler(len(self.train_dataset) // self.args.per_device_train_batch_size, optimizer)


class Steps(Trainer):
    def create_scheduler(self, num_training_steps, optimizer=None):
        batches = len(self.get_train_dataloader())
        return super().create_scheduler(batches // self.args.gradient_accumulation_steps, optimizer)


class Warms(Trainer):
    def create_scheduler(self, num_training_steps, optimizer=None):
        return super().create_scheduler(num_training_steps + 10, optimizer)


@pytest.mark.parametrize(
    ("kind", "callback", "why"),
    [
        (Trainer, Reads(), None),
        (Steps, Reads(), None),
        (Warms, Reads(), None),
        (
            Batches, Reads(),
            "its Batches.create_scheduler() goes by the rows of a micro-batch, or by how many a step takes",
        ),
        (Logs, Reads(), None),
        (Trainer, Substep(), "its Substep acts after each micro-batch (on_substep_end)"),
        (LogsElsewhere, Reads(), None),
        (
            WarmsUpElsewhere, Reads(),
            "its WarmsUpElsewhere.compute_loss() goes by what it keeps of the micro-batches before",
        ),
        (WarmsUp, Reads(), "its WarmsUp.compute_loss() goes by what it keeps of the micro-batches before"),
        (Freezes, Reads(), "its Freezes.training_step() goes by what it keeps of the micro-batches before"),
        (Trainer, Grows(), "its Grows sets gradient_accumulation_steps while it trains"),
        (Trainer, Sets(), "its Sets sets per_device_train_batch_size while it trains"),
        (Own, Reads(), None),
        (Own8, Reads(), "the loader of its Own8 makes micro-batches of 8 rows, whatever its arguments say"),
    ],
)  # fmt: skip
def test_a_trainer_that_says_itself_how_many_rows_it_takes_keeps_its_split(kind, callback, why, tmp_path):
    trainer = made(kind, callback, tmp_path)
    assert without_line(own_split(trainer, trainer.get_train_dataloader(), (), untold=False)) == why
    told = own_split(trainer, trainer.get_train_dataloader(), (), untold=True)
    assert without_line(told) == (
        why or "whether its loss is divided by the accumulation can't be told, so another split may be another training"
    )


def without_line(told):
    return told and re.sub(r" \(line \d+\)$", "", told)


def test_a_loader_whose_rows_are_not_those_of_the_arguments_is_refused(tmp_path):
    trainer = made(Own16, Reads(), tmp_path)
    with pytest.raises(Refused) as caught:
        own_split(trainer, trainer.get_train_dataloader(), (), untold=False)
    assert caught.value.message.endswith("Own16 makes micro-batches of 16 rows, and its arguments say 8")


def made(kind, callback, folder):
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", per_device_train_batch_size=8)
    rows = [{"x": torch.ones(1)}] * 32
    return kind(model=torch.nn.Linear(1, 1), args=args, train_dataset=rows, callbacks=[callback])


def test_a_gradient_that_is_taken_in_each_backward_pass_is_not_accumulated(tmp_path):
    trainer = made(Trainer, Reads(), tmp_path)
    trainer.model.weight.register_post_accumulate_grad_hook(lambda _: None)
    assert "in each backward pass" in own_split(trainer, trainer.get_train_dataloader(), (), untold=False)


class LayerByLayer(Trainer):
    @staticmethod
    def get_optimizer_cls_and_kwargs(args, model=None):  # as transformers 5.23 has it where galore-torch is installed
        if args.gradient_accumulation_steps != 1:
            raise ValueError("Layerwise galore_adamw_layerwise does not support gradient accumulation!")
        return Trainer.get_optimizer_cls_and_kwargs(args, model)


def test_a_layer_wise_optimizer_keeps_its_split(tmp_path):
    trainer = made(LayerByLayer, Reads(), tmp_path)
    assert "in each backward pass" in own_split(trainer, trainer.get_train_dataloader(), (), untold=False)
    assert trainer.args.gradient_accumulation_steps == 1


class Chooses(Trainer):
    @staticmethod
    def get_optimizer_cls_and_kwargs(args, _model=None):
        return torch.optim.RAdam, {"lr": args.learning_rate}


@pytest.mark.parametrize(
    ("kind", "name", "makes"),
    [
        (Trainer, None, False),
        (Trainer, "optimizer", True),
        (Trainer, "create_optimizer", True),
        (Chooses, None, True),
    ],
)
def test_an_optimizer_that_no_argument_says_is_the_scripts_own(kind, name, makes, tmp_path):
    trainer = made(kind, Reads(), tmp_path)
    own = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    if name is not None:  # it is set after the Trainer is made
        setattr(trainer, name, own if name == "optimizer" else lambda: own)
    assert _makes_its_optimizer(trainer, {}) is makes


class Asks(Own):
    def get_train_dataloader(self):
        workers = self.args.dataloader_num_workers
        return DataLoader(self.train_dataset, batch_size=self.args.train_batch_size, num_workers=workers)


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Trainer, None), (Asks, None), (Own, "its Own makes its loader itself, without dataloader_num_workers")],
)
def test_a_loader_that_takes_no_number_of_workers_keeps_its_own(kind, why, tmp_path):
    trainer = made(kind, Reads(), tmp_path)
    assert ignores_workers(trainer, trainer.get_train_dataloader()) == why
    assert trainer.args.dataloader_num_workers == 0
