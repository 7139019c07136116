"""Traces of users' scripts against the same steps on real tensors."""

import dataclasses
import json
import textwrap
from pathlib import Path

import numpy as np
import pytest

from autofit import space
from autofit.contract.plan import Plan
from autofit.costmodel.tracing.trace_store import ground_of
from autofit.registry import recipe_of
from tests.support.script_traces import facts_of_script, real_peak, traces_of
from tests.support.scripted import SCRIPTS, preference_data, tiny_bert, tiny_llama
from tests.support.synthetic import cuda_facts
from tests.support.traced import PLAIN

pytestmark = pytest.mark.slow
OWN = ("--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 2, "--max_length", 64)


@pytest.fixture
def folder(tmp_path):
    tiny_bert(tmp_path / "tiny")
    return tmp_path


def plans_of(facts, precision="fp32", rows=4):
    """A plan of each checkpointing, of so many rows twice."""
    found: dict[object, Plan] = {}
    for plan in space.build(facts).plans:
        if (plan["micro_batch"], plan["accumulation"], plan["precision"]) == (rows, 2, precision):
            found.setdefault(plan["checkpointing"], plan)
    return list(found.values())


def near(server, folder, facts, precision="fp32", rows=4):
    """Every plan's peak by its trace is what real tensors need."""
    plans = plans_of(facts, precision, rows)
    assert plans
    traces = traces_of(server, folder, facts, plans)
    assert not traces.failed
    for number, plan in enumerate(plans):
        here = folder / f"plan-{number}"
        here.mkdir()
        (here / "model").symlink_to(folder / "model")
        assert traces.need(plan).peak_bytes == pytest.approx(real_peak(here, facts, plan), rel=0.02), plan


def test_a_trace_of_a_script_needs_what_real_tensors_need(server, folder):
    near(server, folder, facts_of_script(server, folder, SCRIPTS / "classify.py", "--model", folder / "tiny"))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("token", marks=pytest.mark.by_hand),
        "causal",
        "image",
        "seq2seq",
        "contrastive",
        "choice",
        "image_text",
        "image_stacked",
        pytest.param("image_windows", marks=pytest.mark.by_hand),
        "image_among",
    ],
)
def test_a_trace_of_a_family_needs_what_real_tensors_need(server, folder, family):
    near(server, folder, facts_of_script(server, folder, SCRIPTS / "families.py", "--family", family))


def test_a_trace_of_a_script_s_adapter_over_16_bit_weights_needs_what_real_tensors_need(server, folder):
    """Under autocast, whatever the script asks for: its adapter stays in float32."""
    facts = facts_of_script(server, folder, SCRIPTS / "families.py", "--family", "causal", "--lora")
    assert facts.workload.script.trains_adapter
    if "bf16" not in facts.hardware.precisions:
        pytest.skip("no bf16 here")
    near(server, folder, facts, "bf16_weights")


@pytest.mark.parametrize("how", [("--nested",), ("--kind", "fp4"), ("--kind", "int8")])
def test_a_trace_of_a_script_with_quantized_weights_needs_what_real_tensors_need(server, folder, how):
    """With its layers recomputed, as its model has it by itself, and without."""
    tiny_llama(folder)
    facts = facts_of_script(server, folder, SCRIPTS / "qlora.py", "--model", folder / "llama", *how)
    assert {plan["checkpointing"] for plan in plans_of(facts)} >= {"off", "full"}
    near(server, folder, facts)


@pytest.mark.parametrize(
    ("how", "precision"), [pytest.param((), "fp32", marks=pytest.mark.by_hand), ((), "bf16"), (("--by-hand",), "fp32")]
)
def test_a_trace_of_a_plain_loop_needs_what_real_tensors_need(server, folder, how, precision):
    facts = facts_of_script(server, folder, SCRIPTS / "loop.py", "--model", folder / "tiny", *how)
    if precision not in facts.hardware.precisions:
        pytest.skip(f"no {precision} here")
    near(server, folder, facts, precision)


OWN_LOOP = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(12)])
teacher = torch.nn.Linear(64, 512).requires_grad_(False)
TEACHER
loader = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters()), loader)
seen = 0
for (rows,) in loader:
    with accelerator.accumulate(model):
        found = model(rows)
        loss = LOSS
        seen += loss.item()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""


def own_loop(folder, loss, teacher="teacher.to(accelerator.device)"):
    script = folder / "own_loop.py"
    script.write_text(OWN_LOOP.replace("LOSS", loss).replace("TEACHER", teacher))
    return script


def test_the_loss_of_a_loop_and_what_lies_beside_its_model_count(server, folder):
    script = own_loop(folder, "(teacher(found) - teacher(rows)).exp().mean()")
    near(server, folder, facts_of_script(server, folder, script))


TWO_MODELS = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2)
encoder = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(12)])
teacher = torch.nn.Linear(64, 64)
loader = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=4)
OPTIMIZERS
encoder, net, teacher, loader = accelerator.prepare(encoder, net, teacher, loader)
optimizers = [accelerator.prepare(one) for one in optimizers]
for (rows,) in loader:
    with accelerator.accumulate(encoder, net):
        with torch.no_grad():
            wanted = teacher(rows)
        accelerator.backward((net(encoder(rows)) - wanted).square().mean())
        for one in optimizers:
            one.step()
        for one in optimizers:
            one.zero_grad()
"""
ONE_OPTIMIZER = "optimizers = [torch.optim.Adam([*encoder.parameters(), *net.parameters()])]"
TWO_OPTIMIZERS = (
    "optimizers = [torch.optim.Adam(encoder.parameters()), torch.optim.SGD(net.parameters(), momentum=0.9)]"
)


@pytest.mark.parametrize("optimizers", [ONE_OPTIMIZER, TWO_OPTIMIZERS])
def test_models_and_optimizers_that_a_loop_trains_together_all_count(server, folder, optimizers):
    """The one of which most is trained is tuned; one that is only asked is no other's."""
    script = folder / "two.py"
    script.write_text(TWO_MODELS.replace("OPTIMIZERS", optimizers))
    facts = facts_of_script(server, folder, script)
    found = facts.workload.script
    assert (found.model, found.beside) == (1, (("Sequential", 4 * 65 * 64), ("Linear", 65 * 64)))
    assert facts.model.parameters == 12 * 65 * 64
    near(server, folder, facts)


def test_a_loop_that_searches_a_schedule_for_drawn_timesteps_is_traced(server, folder):
    """As diffusers' scripts for flow matching do, with ``torch.normal`` and ``get_sigmas``."""
    script = own_loop(folder, "((found - noise) ** 2).mean()", "")
    drawn = """u = torch.normal(mean=0.0, std=1.0, size=(rows.shape[0],), device="cpu").sigmoid()
        timesteps = schedule[(u * 100).long()]
        places = [(schedule == one).nonzero().item() for one in timesteps]
        noise = torch.randn_like(rows) * sigmas[places].flatten().unsqueeze(-1)
        found = model(rows)"""
    text = script.read_text().replace("found = model(rows)", drawn)
    tables = "schedule, sigmas = torch.linspace(100, 1, 100), torch.linspace(1, 0, 100)\nseen = 0"
    script.write_text(text.replace("seen = 0", tables))
    near(server, folder, facts_of_script(server, folder, script))


def test_a_loop_that_profiles_its_steps_is_traced(server, folder):
    script = own_loop(folder, "found.exp().mean()", "")
    before, looped, loop = script.read_text().partition("for (rows,)")
    made = "torch.profiler.profile(schedule=torch.profiler.schedule(wait=0, warmup=1, active=1))"
    within = textwrap.indent(f"{looped}{loop}    profiler.step()\n", "    ")
    script.write_text(f"{before}with {made} as profiler:\n{within}")
    near(server, folder, facts_of_script(server, folder, script))


def test_tensors_that_a_loop_puts_onto_its_device_count(server, folder):
    """Averages of the weights, such as those of diffusers' ``EMAModel``, are no module's."""
    peaks = []
    for averages in ["", "averages = [torch.zeros(2**18).to(accelerator.device) for _ in range(4)]\n"]:
        script = own_loop(folder, "found.exp().mean()", f"{averages}model.to(accelerator.device)")
        facts = facts_of_script(server, folder, script)
        plan = plans_of(facts)[0]
        need = traces_of(server, folder, facts, [plan]).need(plan)
        assert need is not None
        peaks.append(need.peak_bytes)
    assert peaks[1] - peaks[0] == pytest.approx(2**22, rel=0.01)


def test_an_optimizer_of_a_loop_makes_no_state_of_layers_that_the_loss_does_not_use(server, folder):
    script = own_loop(folder, "model[:4](rows).exp().mean()", "")
    script.write_text(script.read_text().replace("found = model(rows)", "pass"))
    near(server, folder, facts_of_script(server, folder, script))


def test_what_of_a_loop_cant_be_traced_is_told(server, folder):
    script = own_loop(folder, "found.new_zeros(int(found.argmax(-1).sum()) + 1).exp().sum() + found.mean()", "")
    facts = facts_of_script(server, folder, script)
    plans = plans_of(facts)[:1]
    traces = traces_of(server, folder, facts, plans)
    assert "only a run on real weights tells" in traces.untraced(plans[0])
    assert traces.need(plans[0]) is None


@pytest.mark.parametrize(
    ("name", "model", "data"),
    [("sft", "llama", "texts"), pytest.param("reward", "reward", "pairs", marks=pytest.mark.by_hand)],
)
def test_a_trace_of_a_trainer_of_trl_needs_what_real_tensors_need(server, tmp_path, name, model, data):
    script = Path(pytest.importorskip("trl").__file__).parent / "scripts" / f"{name}.py"
    tiny_llama(tmp_path)
    preference_data(tmp_path)
    words = (
        "--model_name_or_path",
        tmp_path / model,
        "--dataset_name",
        tmp_path / data,
        "--output_dir",
        tmp_path,
        *OWN,
    )
    near(server, tmp_path, facts_of_script(server, tmp_path, script, *words))


def sft(server, folder, **given):
    """Facts of an SFT by TRL of so many rows twice, of 64 tokens each."""
    pytest.importorskip("trl")
    given = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, **given}
    return facts_of_script(server, folder, SCRIPTS / "sft.py", json.dumps(given))


def test_what_is_generated_at_once_counts_beside_a_small_micro_batch(server, tmp_path):
    """It is as much in any split; where vLLM generates it is none of the training's."""
    pytest.importorskip("trl")
    given = {"gradient_accumulation_steps": 128, "per_device_train_batch_size": 8, "max_completion_length": 80}
    facts = facts_of_script(server, tmp_path, SCRIPTS / "grpo.py", json.dumps(given))
    one = PLAIN.replaced(micro_batch=1, accumulation=1024, checkpointing="full")
    two = one.replaced(micro_batch=2, accumulation=512)
    traces = traces_of(server, tmp_path, facts, [one, two])
    assert not traces.failed
    layers, heads, width, tokens, rows = 4, 1, 16, 40 + 80, 1024
    keys_and_values = 2 * layers * heads * width * tokens * rows * 4
    parameters = 4 * facts.model.parameters
    for plan in (one, two):
        need = traces.need(plan)
        assert need.segment == "evaluation"
        assert 1.1 < (need.peak_bytes - 3 * parameters) / keys_and_values < 1.3, "weights and AdamW's state are there"
    shared = dataclasses.replace(facts, workload=dataclasses.replace(facts.workload, processes=2, global_batch=2048))
    both = one.replaced(parallel="ddp")
    found = traces_of(server, tmp_path, shared, [both]).need(both)
    assert (found.segment, found.peak_bytes) == ("evaluation", pytest.approx(need.peak_bytes, rel=0.05)), "a rank's own"
    script = dataclasses.replace(facts.workload.script, engine="vLLM")
    facts = dataclasses.replace(facts, workload=dataclasses.replace(facts.workload, script=script))
    assert traces_of(server, tmp_path, facts, [one]).need(one).segment != "evaluation"


@pytest.mark.parametrize(
    "given",
    [
        {},
        pytest.param({"lora": 4, "beta": 0.1, "num_iterations": 2}, marks=pytest.mark.by_hand),
        {"trainer": "RLOO", "beta": 0.0},
        pytest.param({"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"}, marks=pytest.mark.by_hand),
    ],
)
def test_a_trace_of_a_trainer_that_generates_needs_what_training_on_real_completions_needs(server, tmp_path, given):
    pytest.importorskip("trl")
    split = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    near(server, tmp_path, facts_of_script(server, tmp_path, SCRIPTS / "grpo.py", json.dumps({**split, **given})))


@pytest.mark.parametrize(
    ("rows", "precision", "given"),
    [
        (4, "fp32", {"lora": 4, "answers": True}),
        (100, "fp32", {"lora": 4}),  # two tiles of tokens
        pytest.param(100, "bf16", {}, marks=pytest.mark.by_hand),
        pytest.param(4, "bf16", {"lora": 4, "words": 40_000}, marks=pytest.mark.by_hand),  # two tiles of the vocabulary
        pytest.param(4, "fp32", {"lora": 4, "packing": True, "packing_strategy": "wrapped"}, marks=pytest.mark.by_hand),
        pytest.param(4, "fp32", {"lora": 4, "loss_type": "dft"}, marks=pytest.mark.by_hand),
    ],
)
def test_a_trace_of_tokens_in_tiles_needs_what_real_tensors_need(server, tmp_path, rows, precision, given):
    facts = sft(server, tmp_path, **given, per_device_train_batch_size=rows, count=4 * rows)
    if precision not in facts.hardware.precisions:
        pytest.skip(f"no {precision} here")
    near(server, tmp_path, facts, precision, rows)


def test_on_a_card_a_tile_is_one_buffer_of_the_tokens_that_have_a_label(server, tmp_path):
    facts = sft(server, tmp_path, lora=4, answers=True)
    card = dataclasses.replace(facts.hardware, device="cuda", capability=(8, 0))
    facts = dataclasses.replace(facts, hardware=card)
    (plan, *_) = plans_of(facts)
    traces = traces_of(server, tmp_path, facts, [plan])
    assert not traces.failed
    tape = traces.parts(plan)[0].tape
    width, a_row = 4 * 32_768, 64 - 8  # the first eight words are asked
    of_buffers = np.flatnonzero(np.isfinite(tape.most) & (tape.per_row == a_row * width))
    assert len(of_buffers) == 4  # of each micro-step's forward and backward pass
    assert np.allclose(tape.most[of_buffers], 4096 * width)
    assert traces.need(plan).peak_bytes > 4 * a_row * width


def test_rows_that_trl_joins_without_padding_cant_be_traced(server, tmp_path):
    facts = sft(server, tmp_path, lora=4, packing=True)
    plans = plans_of(facts)[:1]
    traces = traces_of(server, tmp_path, facts, plans)
    assert "the script's batches don't grow with their rows: cu_seq_lens_q" in traces.untraced(plans[0])


LOSS = """
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return outputs.loss + LOSS
"""
TRAINER = (SCRIPTS / "classify.py").read_text().replace("trainer = Trainer(", "trainer = Own(")


def own_loss(folder, loss):
    script = folder / "own.py"
    text = TRAINER.replace('if __name__ == "__main__":', f"class Own(Trainer):{LOSS.replace('LOSS', loss)}\n\nif True:")
    script.write_text(text)
    return script


def test_the_loss_of_the_script_counts_and_may_look_at_its_batch(server, folder):
    kept = "outputs.logits.new_zeros(2 * inputs['attention_mask'].sum().item(), 4096).exp().mean() * outputs.loss"
    script = own_loss(folder, kept)
    facts = facts_of_script(server, folder, script, "--model", folder / "tiny")
    near(server, folder, facts)
    grounds = ground_of(facts, folder / "model")
    script.write_text(script.read_text() + "\n# another\n")
    changed = facts_of_script(server, folder, script, "--model", folder / "tiny")
    assert ground_of(changed, folder / "model") != grounds


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        ("outputs.logits.new_zeros(outputs.logits.argmax(-1).sum().item()).sum()", "only a run on real weights tells"),
        ("outputs.logits.new_zeros(min(8, len(outputs.logits)), 1 << 20).exp().sum()", "does not grow evenly"),
    ],
)
def test_what_cant_be_traced_is_told(server, folder, loss, why):
    facts = facts_of_script(server, folder, own_loss(folder, loss), "--model", folder / "tiny")
    plans = plans_of(facts)[:1]
    traces = traces_of(server, folder, facts, plans)
    assert why in traces.untraced(plans[0])
    assert traces.need(plans[0]) is None


TWO_TEXTS = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

SIZES = {"hidden_size": 32, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}

class Own(Trainer):
    def compute_loss(self, model, inputs, **_):
        loss = model(inputs["first"], labels=inputs["labels"]).loss
        if (inputs["second"] > 0).any():
            loss = loss + model(inputs["second"], labels=inputs["labels"]).loss
        return loss

def collated(rows):
    first, second = (torch.nn.utils.rnn.pad_sequence([row[at] for row in rows], batch_first=True) for at in (0, 1))
    return {"first": first, "second": second, "labels": torch.zeros(len(rows), dtype=torch.long)}

rows = [(torch.ones(8 + row, dtype=torch.long), torch.ones(71 - row, dtype=torch.long)) for row in range(64)]
model = BertForSequenceClassification(BertConfig(vocab_size=64, **SIZES))
own = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "remove_unused_columns": False}
arguments = TrainingArguments("x", **own)
Own(model, arguments, train_dataset=rows, data_collator=collated).train()
"""


def test_what_a_loss_does_where_a_batch_holds_something_counts_of_rows_that_differ_too(server, folder):
    """The longest rows of two texts are not the same, so that a micro-batch of them is one of several rows."""
    script = folder / "two.py"
    script.write_text(TWO_TEXTS)
    near(server, folder, facts_of_script(server, folder, script))


def test_a_script_with_threads_runs_anew_for_each_trace(server, folder):
    script = folder / "threads.py"
    begin = "import threading, time, pathlib\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    begin += f"with pathlib.Path({str(folder / 'runs')!r}).open('a') as runs:\n    runs.write('.')\n"
    script.write_text(begin + (SCRIPTS / "classify.py").read_text())
    facts = facts_of_script(server, folder, script, "--model", folder / "tiny")
    plan, already = plans_of(facts)[0], len((folder / "runs").read_text())
    traces = traces_of(server, folder, facts, [plan])
    assert (traces.made, traces.failed) == (2, {})
    assert len((folder / "runs").read_text()) - already == 1 + 2


def test_a_script_of_two_processes_is_traced_where_each_has_the_whole_model(server, folder):
    alone = facts_of_script(server, folder, SCRIPTS / "classify.py", "--model", folder / "tiny")
    facts = dataclasses.replace(alone, workload=dataclasses.replace(alone.workload, processes=2))
    plan = plans_of(alone)[0]
    traces = traces_of(server, folder, alone, [plan])
    several = traces_of(server, folder, facts, [plan.replaced(parallel="ddp")])
    assert not several.failed
    weights = traces.parts(plan)[0].weights.sum()
    more = several.need(plan.replaced(parallel="ddp")).peak_bytes - traces.need(plan).peak_bytes
    assert more == pytest.approx(weights, rel=0.1), "buckets for the gradients"


GROUPED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=100, num_hidden_layers=6))
rows = [{"input_ids": torch.full((48,), place + 1)} for place in range(16)]


def collate(rows):
    ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


arguments = TrainingArguments("out", per_device_train_batch_size=4, report_to="none", remove_unused_columns=False)
Trainer(model, arguments, train_dataset=rows, data_collator=collate).train()
"""


GROUPED_LOOP = """
from accelerate import Accelerator
from transformers import get_scheduler

model.config.use_cache = False
accelerator = Accelerator(gradient_accumulation_steps=2)
loader = torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=8)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
model.train()
for _ in range(8):
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
"""
GROUPED_LOOP = GROUPED.split("arguments =", maxsplit=1)[0] + GROUPED_LOOP
TEXTS = {"trainer": GROUPED, "loop": GROUPED_LOOP}


def on_cards(facts, processes):
    """The same on so many GPUs."""
    workload = dataclasses.replace(facts.workload, processes=processes)
    return dataclasses.replace(facts, hardware=cuda_facts().hardware, workload=workload)


def grouped_facts(server, folder, text=GROUPED):
    script = folder / "grouped.py"
    script.write_text(text)
    return facts_of_script(server, folder, script)


@pytest.mark.parametrize(
    ("path", "parallel", "processes", "precision"),
    [
        ("trainer", "none", 1, "fp32"),
        ("trainer", "fsdp", 2, "bf16"),
        pytest.param("trainer", "fsdp:noreshard", 2, "fp32", marks=pytest.mark.by_hand),
        pytest.param("trainer", "hsdp:2x2", 4, "fp32", marks=pytest.mark.by_hand),
        ("trainer", "zero1", 2, "bf16"),
        pytest.param("trainer", "zero3", 2, "bf16", marks=pytest.mark.by_hand),
        ("loop", "none", 1, "bf16"),
        ("loop", "fsdp", 2, "bf16"),
        ("loop", "hsdp:2x2", 4, "fp32"),
    ],
)
def test_a_script_on_gpus_needs_what_the_model_of_its_config_needs(
    server, tmp_path, path, parallel, processes, precision
):
    """With masks that hide nothing, and weights that are split."""
    if parallel.startswith("zero"):
        pytest.importorskip("deepspeed")
    facts = on_cards(grouped_facts(server, tmp_path, TEXTS[path]), processes)
    model = dataclasses.replace(facts.model, task="causal-lm")
    alike = dataclasses.replace(facts.workload, script=None, seq_len=48, launch_path=path)
    plan = PLAIN.replaced(parallel=parallel, precision=precision, micro_batch=4)
    plans = [plan.replaced(accumulation=micro_steps) for micro_steps in (1, 2)]
    of_script = traces_of(server, tmp_path, facts, plans)
    of_config = traces_of(server, tmp_path, dataclasses.replace(facts, model=model, workload=alike), plans)
    assert not of_script.failed | of_config.failed
    for one in plans:
        said, meant = of_script.need(one), of_config.need(one)
        assert said.peak_bytes == pytest.approx(meant.peak_bytes, abs=1 << 14), one


def test_a_trainers_own_autocast_of_a_gpu_is_traced_as_the_plans(server, tmp_path):
    """Its precision is no plan's then, and PyTorch leaves it out where there is no GPU."""
    plan, needs = PLAIN.replaced(precision="bf16", micro_batch=4), []
    own = GROUPED.replace("arguments =", "forward = torch.autocast('cuda', torch.bfloat16)(model.forward)\narguments =")
    for text in (GROUPED, own.replace("arguments =", "model.forward = forward\narguments =")):
        facts = on_cards(grouped_facts(server, tmp_path, text), 1)
        traces = traces_of(server, tmp_path, facts, [plan])
        assert not traces.failed
        needs.append(traces.need(plan).peak_bytes)
    assert facts.workload.script.autocast == {"cuda": "bfloat16"}
    assert recipe_of(plan, facts).mixed_precision == "no"
    assert needs[1] == pytest.approx(needs[0], rel=0.01)


QUANTIZED = """
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

kept = {"bnb_4bit_quant_storage": torch.bfloat16, "bnb_4bit_compute_dtype": torch.bfloat16}
packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, **kept)
model = AutoModelForCausalLM.from_pretrained("PLAIN", quantization_config=packed, dtype=torch.float32)
model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
"""
QUANTIZED = GROUPED.replace("rows = [", QUANTIZED + "rows = [")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_script_with_weights_in_4_bits_needs_what_the_model_of_its_config_needs(server, tmp_path, parallel):
    exec(GROUPED.split("rows =", maxsplit=1)[0], made := {})
    made["model"].save_pretrained(tmp_path / "plain")
    facts = on_cards(grouped_facts(server, tmp_path, QUANTIZED.replace("PLAIN", str(tmp_path / "plain"))), 2)
    model = dataclasses.replace(facts.model, task="causal-lm")
    alike = dataclasses.replace(facts.workload, script=None, seq_len=48)
    plan = PLAIN.replaced(parallel=parallel, precision="bf16", micro_batch=4)
    same = plan.replaced(adapter="lora:r=4", quantization="nf4")
    of_script = traces_of(server, tmp_path, facts, [plan])
    of_config = traces_of(server, tmp_path, dataclasses.replace(facts, model=model, workload=alike), [same])
    assert not of_script.failed | of_config.failed
    said, meant = of_script.need(plan), of_config.need(same)
    assert said.peak_bytes == pytest.approx(meant.peak_bytes, abs=1 << 14)
    assert said.by_category == pytest.approx(meant.by_category, abs=1 << 14)


@pytest.mark.parametrize(("path", "precision"), [("trainer", "fp32"), ("loop", "bf16")])
def test_rows_with_and_without_padding_need_what_takes_more(server, tmp_path, path, precision):
    """A mask keeps grouped heads from one kernel, and lets others run without."""
    text = TEXTS[path].replace("ones_like(ids)", "ones_like(ids) * (ids != 0)")
    text = text.replace("torch.stack([row", "torch.nn.utils.rnn.pad_sequence([row").replace(
        "in rows])", "in rows], True)"
    )
    plan, needs = PLAIN.replaced(precision=precision, micro_batch=4), []
    for length in ("48", "48 - place", "48 if place < 12 else 24"):
        facts = on_cards(grouped_facts(server, tmp_path, text.replace("(48,)", f"({length},)")), 1)
        traces = traces_of(server, tmp_path, facts, [plan])
        assert not traces.failed
        needs.append(traces.need(plan).peak_bytes)
    without, padded, both = needs
    assert without != padded
    assert both == max(without, padded)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("trainer.teacher = torch.nn.Linear(8, 8)", "another model (Linear) beside the one whose weights"),
        ("trainer.create_optimizer()", "an optimizer that is made before the weights are split"),
    ],
)
def test_what_of_a_step_whose_weights_are_split_cant_be_traced_is_told(server, tmp_path, line, why):
    text = GROUPED.replace("Trainer(model, arg", "trainer = Trainer(model, arg").replace("te).train()", "te)")
    facts = on_cards(grouped_facts(server, tmp_path, f"{text}{line}\ntrainer.train()\n"), 2)
    traces = traces_of(server, tmp_path, facts, [PLAIN.replaced(parallel="fsdp", precision="bf16", micro_batch=4)])
    assert why in " ".join(traces.failed.values())


def test_a_loop_in_which_a_model_generates_is_not_traced(server, tmp_path):
    """It would ask a tensor without values whether it has come to its end, for ever."""
    line = "with accelerator.accumulate(model):"
    text = GROUPED_LOOP.replace(line, f"model.generate(batch['input_ids'], max_new_tokens=2)\n        {line}")
    traces = traces_of(server, tmp_path, grouped_facts(server, tmp_path, text), [PLAIN.replaced(micro_batch=4)])
    assert all("its loop has a model generate" in one for one in traces.failed.values())
    assert traces.failed


def test_a_loop_that_steps_its_optimizers_by_turns_is_not_traced(server, folder):
    text = TWO_MODELS.replace("OPTIMIZERS", TWO_OPTIMIZERS).replace(
        "(rows,) in loader", "place, (rows,) in enumerate(loader)"
    )
    script = folder / "turns.py"
    script.write_text(text.replace("for one in optimizers:\n            one.step()", "optimizers[place % 2].step()"))
    facts = facts_of_script(server, folder, script)
    plan = plans_of(facts)[0]
    assert "steps its optimizers by turns" in traces_of(server, folder, facts, [plan]).untraced(plan)


def test_a_loop_that_prepares_its_loader_after_its_model_is_not_traced_where_the_weights_are_split(server, tmp_path):
    prepared = "accelerator.prepare(model, optimizer, schedule)\nloader = accelerator.prepare(loader)\n"
    text = GROUPED_LOOP.replace("model, optimizer, loader, schedule =", "model, optimizer, schedule =")
    text = text.replace("accelerator.prepare(model, optimizer, loader, schedule)\n", prepared)
    facts = on_cards(grouped_facts(server, tmp_path, text), 2)
    plan = PLAIN.replaced(parallel="fsdp", precision="bf16", micro_batch=4)
    traces = traces_of(server, tmp_path, facts, [plan, plan.replaced(parallel="ddp")])
    assert "a loop that prepares its loader after its model isn't traced" in traces.untraced(plan)
    assert traces.untraced(plan.replaced(parallel="ddp")) is None


def test_the_state_of_a_scripts_own_optimizer_counts_on_several_processes(server, folder):
    script = folder / "own_optimizer.py"
    text = (SCRIPTS / "classify.py").read_text()
    own = "optimizers=(torch.optim.Adam(model.parameters()), None), data_collator="
    script.write_text(text.replace("data_collator=", own))
    alone = facts_of_script(server, folder, script, "--model", folder / "tiny")
    facts = dataclasses.replace(alone, workload=dataclasses.replace(alone.workload, processes=2))
    plan = plans_of(alone)[0]
    of_one = traces_of(server, folder, alone, [plan]).parts(plan)[1].state_bytes
    of_two = traces_of(server, folder, facts, [plan.replaced(parallel="ddp")]).parts(plan.replaced(parallel="ddp"))
    assert of_two[1].state_bytes == of_one > 0
