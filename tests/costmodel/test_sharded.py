"""Traces of sharded plans: one rank of a fake world."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.integrations import deepspeed as noted

from autofit.contract import layout as contract_layout
from autofit.contract.emission import Emission
from autofit.costmodel.memory.allocator import replay
from autofit.costmodel.memory.parts import pack
from autofit.costmodel.seconds.collectives import COLLECTIVES, step_collectives
from autofit.costmodel.tracing import fake_run, source, trace_job
from autofit.costmodel.tracing.emulation import zero
from autofit.costmodel.tracing.emulation.sharded import FakeReducer
from autofit.costmodel.tracing.longer_tape import lengthen
from autofit.costmodel.tracing.recorder import Recorder
from autofit.costmodel.tracing.shard_layout import Layout, layout_of, local_bytes
from autofit.costmodel.tracing.timeline import CATEGORIES, Tape
from autofit.registry import recipe_of, technique
from tests.support.tiny import write_config
from tests.support.traced import CONFIGS, PLAIN, facts_of, like_a_process_of_its_own, sharded_facts

MIXED = PLAIN.replaced(precision="bf16", micro_batch=2)
FSDP = {
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_activation_checkpointing": False,
    },
}
DDP = {"distributed_type": "MULTI_GPU"}


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Traces a plan in a world of some processes, under an engine."""
    write_config(tmp_path, CONFIGS["llama"])

    class World:
        folder = tmp_path

        def __init__(self, processes, written):
            plain = facts_of("llama", device="cuda")
            workload = dataclasses.replace(plain.workload, processes=processes, global_batch=64 * processes)
            self.facts = dataclasses.replace(plain, workload=workload)
            self.written = written
            for module in (fake_run, source, trace_job):
                monkeypatch.setattr(module, "recipe_of", self.recipe)

        def recipe(self, plan, facts):
            recipe = recipe_of(plan, facts)
            accelerate = {**recipe.emission.accelerate, **self.written}
            recipe.emission = Emission(accelerate=accelerate, training_args=recipe.emission.training_args)
            return recipe

        def micro_steps(self, plan=MIXED, **options):
            with like_a_process_of_its_own():
                return fake_run.micro_steps(plan, self.facts, config=tmp_path, folder=tmp_path, **options)

        def micro_part(self, plan=MIXED):
            with like_a_process_of_its_own():
                return trace_job.micro_part(plan, self.facts, tmp_path, tmp_path)

        def optimizer_part(self, plan=MIXED):
            with like_a_process_of_its_own():
                return trace_job.optimizer_part(plan, self.facts, tmp_path, tmp_path)

    return World


@pytest.mark.parametrize(
    ("given", "copied"),
    [
        ({}, False),
        ({"find_unused_parameters": True}, True),
        ({"find_unused_parameters": True, "static_graph": True}, False),
    ],
)
def test_ddp_that_finds_unused_parameters_hands_on_copies_of_what_the_model_returns(given, copied):
    class Model(torch.nn.Module):
        def forward(self, rows):
            return {"logits": rows, "cache": None}

    rows = torch.ones(2)
    outputs = FakeReducer(Model(), **given)(rows)
    assert (outputs["logits"] is not rows) == copied
    assert torch.equal(outputs["logits"], rows)
    assert outputs["cache"] is None


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_layers_that_are_copied_weigh_what_layers_that_are_traced_weigh(world, accumulation):
    eight = world(8, FSDP)
    few, whole = (eight.micro_steps(accumulation=accumulation, whole=whole) for whole in (False, True))
    assert few.copies > 0
    assert whole.copies == 0
    assert lengthen(few.tape, few.copies).live(4).max() == whole.tape.live(4).max()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 8])
def test_a_rank_holds_its_share_of_weights_state_and_gradients(world, processes):
    one = world(processes, FSDP)
    micro, optimizer = one.micro_part(), one.optimizer_part()
    share = micro.weights.sum()
    assert share == pytest.approx(world(1, {}).micro_part().weights.sum() / processes, rel=0.02)
    assert optimizer.state_bytes == pytest.approx(2 * share, rel=0.01)
    left = micro.tape_of(1).by_category(len(micro.tape_of(1).events) - 1)
    assert left[CATEGORIES.index("gradients")] == pytest.approx(share, rel=0.01)


@pytest.mark.slow
def test_the_shares_are_those_that_fsdp2_makes(world, monkeypatch):
    five = world(5, FSDP)  # divides no dimension
    seen = []
    step_begin = fake_run.Marks.step_begin

    def listening(marks):
        step_begin(marks)
        seen.append(sorted(one._local_tensor.untyped_storage().nbytes() for one in marks.sharded.parameters()))

    monkeypatch.setattr(fake_run.Marks, "step_begin", listening)
    five.micro_steps(whole=True)
    with source.prepared(MIXED, five.facts, five.folder) as recipe:
        model = recipe.model(None, config=five.folder, device="meta")
        said = local_bytes(model, layout_of(recipe))
    assert seen[0] == sorted(said[: len(seen[0])])  # parameters come before buffers


@pytest.mark.slow
def test_gradients_wait_whole_between_micro_steps_unless_each_is_synchronised(world):
    eight = world(8, FSDP)
    micro = eight.micro_part()
    rows = np.array([2.0])
    (alone,), _ = micro.peaks(rows, adding=False)
    (several,), _ = micro.peaks(rows, adding=True)
    whole_gradients = world(1, {}).micro_part().weights.sum() / 2  # in 16 bits
    assert several - alone == pytest.approx(whole_gradients, rel=0.2)


@pytest.mark.slow
def test_the_first_backward_pass_after_an_evaluation_gathers_the_head_once_more(world, monkeypatch):
    """FSDP2 takes a forward pass that no backward pass followed for one that it follows."""
    two, following, forward_begin = world(2, FSDP), fake_run.following, fake_run.Marks.forward_begin

    def highest(of=lambda tape: tape):
        tape = of(two.micro_steps(accumulation=1).tape)
        first = tape.segments.index("0:preB")
        return tape.live(2)[tape.starts[first] : [*tape.starts, None][first + 1]].max()

    def evaluating(marks):
        rows = torch.zeros(2, two.facts.workload.seq_len, dtype=torch.long)
        with torch.no_grad():
            marks.sharded(input_ids=rows)
        forward_begin(marks)

    said, usual = highest(), highest(Tape.after_a_step)
    monkeypatch.setattr(fake_run, "following", lambda recorder, **_: following(recorder, evaluates=False))
    plain = highest()
    assert plain == usual
    monkeypatch.setattr(fake_run.Marks, "forward_begin", evaluating)
    assert said == highest()
    head = CONFIGS["llama"]["vocab_size"] * CONFIGS["llama"]["hidden_size"] * 2
    assert said - plain == pytest.approx(head, rel=0.01)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_what_an_engine_makes_before_its_first_step_is_held_and_what_that_leaves_is_state(stage, mixed_precision):
    recorder = Recorder(fake=False)
    with recorder:
        weight, dataset = torch.zeros(1000), torch.zeros(77)
        recorder.call([weight], "weights")
        recorder.mark("begin")
        copy = weight.bfloat16()
        flat, batch = torch.cat([copy]), torch.zeros(50)
        recorder.call([batch], "batch")
        del weight, copy
        recorder.mark("0:pre")
        recorder.mark("0:headB")
        state = torch.zeros_like(flat, dtype=torch.float32)
        recorder.mark("begin")
        logits = torch.zeros(9)
    marks = SimpleNamespace(recorder=recorder, since=4)
    found = zero.held(marks, Layout(engine=True, zero=stage), SimpleNamespace(mixed_precision=mixed_precision))
    assert found.weights == (2000,)
    if stage == 3:
        assert found.loading is None
    else:
        sizes = [found.loading.sizes[event] for event in found.loading.events if event >= 0]
        assert sizes == ([4000] if mixed_precision == "no" else []) + [2000, 2000]
        assert replay(*found.loading).allocated_bytes == 2048
    tape = zero.state(marks)
    assert (tape.live(0).tolist(), tape.segments) == ([4000], ("0:step", "1:step"))
    assert len(dataset) + len(state) + len(logits) == 1086


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_is_traced_with_its_own_engine(world, stage):
    """Weights in 16 bits, or a share of them, beside a share in 32 bits and one of the state; and a whole bucket."""
    pytest.importorskip("deepspeed")
    eight, plan, product = world(8, {}), MIXED.replaced(parallel=f"zero{stage}"), torch.nn.functional.linear
    micro, optimizer = eight.micro_part(plan), eight.optimizer_part(plan)
    assert torch.nn.functional.linear is product, "left behind for the next trace"
    assert noted._hf_deepspeed_config_weak_ref is None, "the same: it lives as long as garbage is not collected"
    whole, bucket = world(1, {}).micro_part().weights.sum(), 2 * 500_000_000
    share, gathered = whole / 8, whole / 2
    if stage == 3:  # the bucket is always there, and a buffer for gradients; all weights stay gathered from then on
        assert micro.loading is None
        assert micro.weights.sum() - bucket == pytest.approx(2 * share, rel=0.05)
        assert optimizer.state_bytes == pytest.approx(2 * share + gathered, rel=0.05)
    else:
        assert micro.weights.sum() == pytest.approx(gathered + share, rel=0.05)
        assert optimizer.state_bytes == pytest.approx(2 * share, rel=0.05)
        loaded = replay(*micro.loading)
        assert loaded.rounded_bytes > whole, "flattened beside the weights as they come"
        assert loaded.allocated_bytes == pytest.approx(micro.weights.sum(), rel=0.1)
        assert micro.peaks(np.array([2.0]), adding=False)[0] > bucket
    sent = step_collectives(micro, plan["parallel"], eight.facts.workload, 1, half=True)
    gathers = sent.n == COLLECTIVES.index("all_gather")
    assert sent.calls[gathers] @ sent.moved_bytes[gathers] == pytest.approx(gathered, rel=0.05)
    late = step_collectives(micro, plan["parallel"], eight.facts.workload, 4, half=True)
    assert late.calls.sum() > sent.calls.sum() or stage == 1


@pytest.mark.slow
def test_ddp_keeps_whole_weights_and_a_copy_of_the_gradients(world):
    two, one = world(2, DDP).micro_part(), world(1, {}).micro_part()
    assert two.weights.tolist() == one.weights.tolist()
    trained = sum(size for size in one.weights)
    assert two.buckets_bytes == pytest.approx(trained, rel=0.01)
    beside = one.peaks(np.array([4.0]), adding=True)[0]  # less copies of the loss
    assert two.peaks(np.array([4.0]), adding=True)[0] == pytest.approx(beside, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_offloaded_shares_of_weights_state_and_gradients_wait_on_the_host(world, processes):
    kept, offloaded = (
        world(processes, FSDP),
        {**FSDP, "fsdp_config": {**FSDP["fsdp_config"], "fsdp_offload_params": True}},
    )
    here, share = kept.micro_part(), kept.micro_part().weights.sum()
    state = kept.optimizer_part().state_bytes
    there = world(processes, offloaded)
    micro, optimizer = there.micro_part(), there.optimizer_part()
    assert micro.weights.sum() < 0.01 * share
    assert optimizer.peak_bytes == 0
    assert micro.host_bytes == pytest.approx(share, rel=0.01)
    assert optimizer.elsewhere_bytes >= state
    assert micro.held_bytes < here.held_bytes


@pytest.mark.parametrize("parallel", ["fsdp", pytest.param("fsdp:noreshard", marks=pytest.mark.slow)])
def test_shares_that_wait_on_the_host_need_no_run_of_their_own(tmp_path, monkeypatch, parallel):
    write_config(tmp_path, CONFIGS["llama"])
    facts = sharded_facts(8)
    kept = PLAIN.replaced(micro_batch=2, precision="bf16", parallel=parallel)
    plans, runs = (kept, kept.replaced(offload="parameters")), []
    for name in ("micro_steps", "optimizer_steps"):
        run = getattr(fake_run, name)
        monkeypatch.setattr(fake_run, name, lambda *a, run=run, **k: runs.append(run) or run(*a, **k))

    def traced(plan, known):
        with like_a_process_of_its_own():
            micro = trace_job.micro_part(plan, facts, tmp_path, tmp_path, known=known)
            steps = trace_job.optimizer_part(plan, facts, tmp_path, tmp_path, unused=frozenset(), known=known)
            return {**pack(None, steps), **{f"micro {name}": array for name, array in pack(micro, None).items()}}

    known = trace_job.Known(plans=plans)
    traced(kept, known)
    ran = len(runs)
    mine = traced(plans[1], known)
    assert len(runs) == ran
    alone = traced(plans[1], trace_job.Known())
    assert len(runs) == 2 * ran
    assert mine.keys() == alone.keys()
    assert [name for name in mine if not np.array_equal(mine[name], alone[name])] == []


@pytest.fixture
def split(tmp_path):
    """Traces of a plan of tensor parallelism."""
    write_config(tmp_path, CONFIGS["llama"])

    def facts_for(processes):
        plain = facts_of("llama", device="cuda")
        workload = dataclasses.replace(plain.workload, processes=processes, global_batch=64)
        return dataclasses.replace(plain, workload=workload)

    return tmp_path, facts_for


@pytest.mark.slow
@pytest.mark.parametrize("value", ["tp2xfsdp1", "tp2xfsdp2", "tp2xfsdp4"])
def test_a_rank_of_tensor_parallelism_holds_its_part_of_weights_state_and_gradients(split, value):
    folder, facts_for = split
    layout = contract_layout.layout_of(value, int(value[2]) * int(value[-1]))
    facts, plan = facts_for(layout.world), MIXED.replaced(parallel=value)
    with like_a_process_of_its_own():
        micro = trace_job.micro_part(plan, facts, folder, folder)
    with like_a_process_of_its_own():
        optimizer = trace_job.optimizer_part(plan, facts, folder, folder)
    share = micro.weights.sum()
    assert optimizer.state_bytes == pytest.approx(2 * share, rel=0.01)
    left = micro.tape_of(1).by_category(len(micro.tape_of(1).events) - 1)
    # transformers leaves the gradient of a table whose rows are split whole in each process, until FSDP splits it
    table = 4 * facts.model.vocab_size * facts.model.hidden_size
    more = table - table / layout.tensor if layout.shard == 1 else 0
    assert left[CATEGORIES.index("gradients")] == pytest.approx(share + more, rel=0.01)
    few, sent = (micro.exchanges(1, rows) for rows in (2.0, 4.0))
    grow = (sent.m == layout.tensor) & (sent.n == COLLECTIVES.index("all_reduce")) & (sent.k == 1)
    activations = grow & (sent.moved_bytes >= 4 * facts.workload.seq_len * facts.model.hidden_size * 2)
    assert sent.moved_bytes[activations].sum() == 2 * few.moved_bytes[activations].sum()
    assert np.sum(sent.calls[(sent.m == layout.tensor) & (sent.n == COLLECTIVES.index("all_reduce"))]) > 4


@pytest.mark.slow
def test_a_table_that_is_the_output_layer_too_is_split_once(split):
    folder, facts_for = split
    facts, weights = facts_for(2), []
    for tied in (True, False):
        write_config(folder, {**CONFIGS["llama"], "tie_word_embeddings": tied})
        with like_a_process_of_its_own():
            found = trace_job.micro_part(MIXED.replaced(parallel="tp2xfsdp1"), facts, folder, folder)
        weights.append(found.weights.sum())
    assert weights[1] - weights[0] == 4 * facts.model.vocab_size * facts.model.hidden_size / 2


@pytest.mark.slow
@pytest.mark.parametrize("value", ["cp2xfsdp1", "cp2xfsdp2"])
def test_a_rank_of_context_parallelism_has_its_part_of_the_tokens_and_passes_keys_and_values_on(split, value):
    folder, facts_for = split
    layout = contract_layout.layout_of(value, int(value[2]) * int(value[-1]))
    facts = facts_for(layout.world)
    model = dataclasses.replace(facts.model, layer_classes=("LlamaDecoderLayer",))
    facts, found = dataclasses.replace(facts, model=model), {}
    for name in (value, "fsdp"):
        with like_a_process_of_its_own():
            found[name] = trace_job.micro_part(MIXED.replaced(parallel=name), facts, folder, folder)
    micro, whole = found[value], found["fsdp"]
    assert micro.weights.tolist() == whole.weights.tolist()
    with like_a_process_of_its_own():
        optimizer = trace_job.optimizer_part(MIXED.replaced(parallel=value), facts, folder, folder)
    assert optimizer.state_bytes == pytest.approx(2 * micro.weights.sum(), rel=0.01)
    assert technique("parallel").traced_as(value, "optimizer") == "fsdp"
    rows = np.array([16.0, 32.0])
    grows, all_grows = (np.diff(one.peaks(rows, adding=False)[0])[0] for one in (micro, whole))
    assert grows == pytest.approx(all_grows / 2, rel=0.1)
    few, sent = (micro.exchanges(1, each) for each in (2.0, 4.0))
    waits = (sent.batch > 1) & (sent.m == layout.context)
    assert sent.moved_bytes[waits].sum() == 2 * few.moved_bytes[waits].sum() > 0
    calls = {kind: sent.calls[waits & (sent.n == COLLECTIVES.index(kind))].sum() for kind in ("all_gather", "permute")}
    assert calls == {"all_gather": 2 * facts.model.layers, "permute": layout.context * facts.model.layers}
    # rank 0's keys and values of both passes, gathered in 16 bits; their gradients, in 32 bits, one rank's at a time
    assert len(set(sent.moved_bytes[waits & (sent.moved_bytes > 1000)])) == 1
