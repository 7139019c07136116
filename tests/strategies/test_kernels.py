"""The chunked loss against the plain one, on operators and on whole models; and who may have it."""

import copy
import importlib
import types
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from accelerate.utils import convert_outputs_to_fp32
from accelerate.utils.other import compile_regions
from packaging.version import Version
from torch._dynamo.testing import CompileCounter
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from autofit import space
from autofit.machine import model as described
from autofit.registry import technique
from tests.support.synthetic import cuda_facts, model
from tests.support.tiny import CONFIGS

KERNELS = technique("kernels")
kernels = importlib.import_module("autofit.strategies.kernels")
chunked_loss = importlib.import_module("autofit.strategies.kernels.chunked_loss")


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("positions", [1, 7, 16, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sum_and_gradients_are_those_of_the_plain_loss(dtype, positions, bias):
    torch.manual_seed(0)
    given = [leaf(3, positions, 24, dtype=dtype), leaf(50, 24, dtype=dtype)]
    given += [leaf(50, dtype=dtype)] if bias else []
    targets = torch.randint(0, 50, (3, positions))
    targets[0, :3] = -100

    logits = F.linear(*given)
    wanted = F.cross_entropy(logits.float().view(-1, 50), targets.view(-1), reduction="sum")
    gradients = torch.autograd.grad(wanted * 0.3, given)
    found = chunked_loss.chunked_cross_entropy(given[0], given[1], given[2] if bias else None, targets)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    tolerance = {"rtol": 2e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for ours, theirs in zip(torch.autograd.grad(found * 0.3, given), gradients, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, **tolerance)


def test_sum_and_gradients_are_those_of_pytorchs_own():
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("of PyTorch 2.13 on")
    torch.manual_seed(0)
    given, targets = [leaf(2, 40, 16), leaf(90, 16)], torch.randint(0, 90, (2, 40))
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=16)
    wanted = F.linear_cross_entropy(given[0].view(-1, 16), given[1], targets.view(-1), reduction="sum", options=options)
    gradients = torch.autograd.grad(wanted, given)
    found = chunked_loss.chunked_cross_entropy(*given, None, targets)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(found, given), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-5)


def test_autocast_computes_in_16_bits_and_gives_gradients_of_the_weights_dtype():
    torch.manual_seed(0)
    given, targets = [leaf(2, 32, 16), leaf(64, 16)], torch.randint(0, 64, (2, 32))
    with torch.autocast("cpu", torch.bfloat16):
        wanted = F.cross_entropy(F.linear(*given).float().view(-1, 64), targets.view(-1), reduction="sum")
        found = chunked_loss.chunked_cross_entropy(*given, None, targets)
    exact = chunked_loss.chunked_cross_entropy(*given, None, targets)
    assert found.dtype == torch.float32
    assert abs(found - wanted) < 0.1 * abs(exact - wanted)
    for ours, theirs in zip(torch.autograd.grad(found, given), torch.autograd.grad(wanted, given), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=5e-2)


def test_what_is_frozen_gets_no_gradient():
    hidden, weight, targets = leaf(2, 8, 4), torch.randn(9, 4), torch.randint(0, 9, (2, 8))
    chunked_loss.chunked_cross_entropy(hidden, weight, None, targets).backward()
    assert weight.grad is None
    assert hidden.grad.abs().sum() > 0


def test_it_is_gone_back_through_once():
    hidden, weight = leaf(2, 8, 4), leaf(9, 4)
    total = chunked_loss.chunked_cross_entropy(hidden, weight, None, torch.zeros(2, 8, dtype=torch.long))
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        total.backward()


# -- whole models ---------------------------------------------------------------------------------------------------


def pair(config="llama", **changes):
    """A model and its copy with a chunked loss, both in training."""
    values = {**CONFIGS[config], **changes}
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).train()
    return plain, chunked_loss.chunk_loss(copy.deepcopy(plain), chunked_loss.ChunkedLoss())


def batch(padded=True):
    torch.manual_seed(1)
    ids = torch.randint(0, 128, (3, 20))
    labels = ids.clone()
    if padded:
        labels[1, 12:] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("count", [None, 37, torch.tensor(37)], ids=["mean", "int", "tensor"])
@pytest.mark.parametrize(("config", "tied"), [("llama", True), ("llama", False), ("qwen2", True), ("gpt_neox", False)])
def test_a_model_trains_as_before(config, tied, count):
    plain, chunked = pair(config, tie_word_embeddings=tied)
    given = batch() | ({} if count is None else {"num_items_in_batch": count})
    one, other = plain(**given), chunked(**given)
    torch.testing.assert_close(other.loss, one.loss, rtol=1e-5, atol=1e-6)
    assert one.logits is not None
    assert other.logits is None
    for side in (one, other):
        side.loss.backward()
    for ours, theirs in zip(chunked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_targets_that_are_shifted_already_and_another_index_to_ignore():
    plain, chunked = pair()
    given = batch(padded=False)
    shifted = F.pad(given["labels"], (0, 1), value=7)[:, 1:].contiguous()
    for more in ({"shift_labels": shifted, "ignore_index": 7}, {"ignore_index": 5}):
        torch.testing.assert_close(chunked(**given, **more).loss, plain(**given, **more).loss, rtol=1e-5, atol=1e-6)


def test_logits_are_there_where_they_are_asked_for():
    plain, chunked = pair()
    given = batch()
    for model_ in (plain, chunked):
        assert model_(input_ids=given["input_ids"]).logits.shape == (3, 20, 128)
        assert model_(**given, logits_to_keep=20).logits.shape == (3, 20, 128)
        output = model_.eval()(**given)
        assert output.logits.shape == (3, 20, 128)
        assert output.logits.requires_grad
        assert torch.isfinite(output.loss)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_a_model_whose_vocabulary_has_grown_takes_its_loss(tied, trains):
    plain, chunked = (one.train(trains) for one in pair(tie_word_embeddings=tied))
    for one in (plain, chunked):
        one.resize_token_embeddings(136, mean_resizing=False)
    chunked.load_state_dict(plain.state_dict())
    with torch.no_grad():
        one, other = plain(**batch()), chunked(**batch())
    torch.testing.assert_close(other.loss, one.loss, rtol=1e-5, atol=1e-6)
    assert trains or torch.equal(other.logits.clone(), one.logits)


def test_a_copy_of_a_model_is_evaluated_by_its_own_output_layer():
    """As of an average of the weights, or a model that is kept as it was."""
    plain, chunked = pair()
    copied = copy.deepcopy(chunked).eval()
    with torch.no_grad():
        for one in (*plain.parameters(), *copied.parameters()):
            one.mul_(1.5)
        wanted, given = plain.eval()(**batch()), copied(**batch())
    torch.testing.assert_close(given.loss, wanted.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(given.logits.clone(), wanted.logits)


@pytest.fixture
def heads(monkeypatch):
    """How often an output layer has made its logits."""
    made, forward = [], torch.nn.Linear.forward

    def counted(self, given):
        made.extend([self] * (self.out_features == 128))
        return forward(self, given)

    monkeypatch.setattr(torch.nn.Linear, "forward", counted)
    return made


@pytest.mark.parametrize("autocasts", [False, True])
def test_an_evaluation_makes_its_logits_when_they_are_read(heads, autocasts):
    plain, chunked = (one.eval() for one in pair())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        one, other = plain(**batch()), chunked(**batch())
    assert heads == [plain.lm_head]
    torch.testing.assert_close(other.loss, one.loss.to(other.loss), rtol=1e-2 if autocasts else 1e-5, atol=1e-6)
    logits, wanted = other.logits, one.logits.float()
    assert (logits.shape, logits.dtype, logits.requires_grad) == (wanted.shape, torch.float32, False)
    assert convert_outputs_to_fp32(lambda: other)().logits is logits  # as Accelerate hands an output on
    assert heads == [plain.lm_head]
    for read in (torch.Tensor.detach, lambda it: it[:, 1:].argmax(-1), torch.Tensor.cpu, lambda it: it * 2):
        torch.testing.assert_close(read(logits), read(wanted), rtol=0, atol=0)
    assert (logits.numpy() == wanted.numpy()).all()
    assert logits.tolist() == wanted.tolist()
    assert logits.data.sum() == wanted.sum()
    assert repr(logits) == repr(wanted)
    assert heads == [plain.lm_head, chunked.lm_head]


def test_logits_that_are_read_after_a_step_are_refused():
    _, chunked = pair()
    with torch.no_grad():
        logits = chunked.eval()(**batch()).logits
        chunked.lm_head.weight.add_(1)
        with pytest.raises(RuntimeError, match="after the weights had changed"):
            logits.argmax(-1)


@pytest.mark.parametrize("metrics", [False, True])
def test_a_trainer_evaluates_as_before(tmp_path, heads, metrics):
    found = []
    for one in pair():
        seen = []

        def of(predictions, seen=seen):
            seen.append(torch.from_numpy(predictions.predictions))
            return {"tokens": predictions.predictions.shape[-1]}

        heads.clear()
        rows = [{name: value[row] for name, value in batch().items()} for row in range(3)]
        args = TrainingArguments(str(tmp_path), use_cpu=True, bf16=True, report_to="none", per_device_eval_batch_size=2)
        trainer = Trainer(one, args, eval_dataset=rows, compute_metrics=of if metrics else None)
        found.append((trainer.evaluate()["eval_loss"], seen, len(heads)))
    (one, seen, by_plain), (other, seen_too, by_chunked) = found
    assert other == pytest.approx(one, rel=1e-2)
    assert (by_plain, by_chunked) == (2, 2 * metrics)
    for mine, theirs in zip(seen_too, seen, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


def test_an_evaluation_makes_its_logits_where_the_output_layer_may_be_split_afterwards(heads):
    plain, _ = pair()
    whole = chunked_loss.chunk_loss(plain, chunked_loss.ChunkedLoss(), evaluates=False).eval()
    with torch.no_grad():
        output = whole(**batch())
    assert heads == [whole.lm_head]
    assert type(output.logits) is torch.Tensor


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # what follows a break is asked for its gradient
def test_a_compiled_model_is_one_graph():
    """All but the loss; how often PyTorch tells of the break there hangs on what ``forward()`` is wrapped in."""
    plain, chunked = pair()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(chunked, backend="eager")
    for _ in range(2):
        output = compiled(**batch())
    torch.testing.assert_close(output.loss, plain(**batch()).loss, rtol=1e-5, atol=1e-6)
    output.loss.backward()
    assert chunked.lm_head.weight.grad.abs().sum() > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.skipif(
    Version(version("accelerate")) < Version("1.15"), reason="its copy of a model calls the model's own layers"
)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # what follows a break is asked for its gradient
@pytest.mark.parametrize("precision", [pytest.param("no", marks=pytest.mark.slow), "bf16"])
def test_the_layers_of_a_model_are_compiled_and_not_those_that_it_was_copied_from(precision):
    plain, chunked = pair()
    if precision == "bf16":  # as Accelerate prepares a model
        for one in (plain, chunked):
            forward = torch.autocast("cpu", torch.bfloat16)(one.forward.__func__)
            one.forward = types.MethodType(convert_outputs_to_fp32(types.MethodType(forward, one).__func__), one)
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = compile_regions(chunked.train(), backend=counter)
    compiled(**batch()).loss.backward()
    plain.train()(**batch()).loss.backward()
    assert counter.frame_count > 0
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(chunked.get_parameter(name).grad, weight.grad, rtol=0.03, atol=2e-3)


def test_a_sharded_model_trains_as_before(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        gradients = []
        for one in pair(tie_word_embeddings=True):
            mesh = init_device_mesh("cpu", (1,))
            for layer in one.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(one, mesh=mesh)
            one(**batch()).loss.backward()
            gradients.append([parameter.grad.full_tensor() for parameter in one.parameters()])
    finally:
        dist.destroy_process_group()
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_model_that_does_more_to_its_logits_is_never_trained_wrong():
    _, capped = pair("gemma2")
    with pytest.raises(RuntimeError, match="does more to its logits"):
        capped(**batch())


def test_a_trainer_still_knows_that_the_model_averages_by_itself():
    import inspect

    plain, chunked = pair()
    assert inspect.signature(chunked.forward) == inspect.signature(plain.forward)


@pytest.mark.parametrize(
    ("values", "unmade"),
    [
        ({"kernels": "chunked_ce"}, True),
        ({"kernels": "chunked_ce", "parallel": "ddp"}, True),
        ({"kernels": "chunked_ce", "parallel": "fsdp"}, False),
        ({"kernels": "none"}, False),
    ],
)
def test_a_metric_finds_room_for_the_logits_of_the_evaluation_batch(values, unmade):
    facts = cuda_facts()
    wanted = 6 * facts.workload.seq_len * facts.model.vocab_size * unmade
    assert KERNELS.bytes_if_asked(values["kernels"], values, facts) == wanted


# -- who may have it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        ({"model_type": "llama"}, True),
        ({"model_type": "gpt2"}, True),
        ({"model_type": "mixtral"}, True),
        ({"model_type": "phi"}, True),  # a bias
        ({"model_type": "gemma2"}, False),  # a cap
        ({"model_type": "gemma2", "final_logit_softcapping": None}, True),
        ({"model_type": "granite"}, False),  # a factor
        ({"model_type": "cohere"}, False),
        ({"model_type": "bamba", "num_hidden_layers": 2}, True),
        ({"model_type": "bamba", "num_hidden_layers": 2, "z_loss_coefficient": 0.01}, False),  # more of its logits
        ({"model_type": "bart"}, False),  # a loss of its own
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_what_a_class_does_to_its_logits_is_seen(config, plain):
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert described.has_plain_head(built) is plain


def test_ligers_types_are_read_off_its_source(tmp_path, monkeypatch):
    assert "llama" not in described._ligers_types() or importlib.util.find_spec("liger_kernel")
    folder = tmp_path / "liger_kernel" / "transformers"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    assert described._ligers_types() == ()
    (folder / "monkey_patch.py").write_text('MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": f, "qwen2": g}')
    assert described._ligers_types() == ("llama", "qwen2")


def test_ligers_functions_are_seen_in_a_model():
    small = {name: value for name, value in CONFIGS["llama"].items() if name != "model_type"}
    patched = LlamaForCausalLM(LlamaConfig(**small))
    assert kernels._liger_modules(patched) == []

    def of(module):
        def forward(self): ...

        forward.__module__ = module
        return forward

    patched.forward = types.MethodType(of("liger_kernel.transformers.model.llama"), patched)
    assert kernels._liger_modules(patched) == ["liger_kernel.transformers.model.llama"]
    patched.model.norm.forward = types.MethodType(of("liger_kernel.transformers.rms_norm"), patched.model.norm)
    assert len(kernels._liger_modules(patched)) == 2
    patched.forward = convert_outputs_to_fp32(patched.forward)  # as Accelerate does where it autocasts
    assert len(kernels._liger_modules(patched)) == 2


@pytest.mark.parametrize(
    ("modules", "chunked", "logits", "found"),
    [
        ((), 0, True, "none"),
        ((), 4, False, "chunked_ce"),
        (("model.llama",), 0, False, "liger_fused_ce"),
        (("model.llama", "rms_norm"), 0, False, "liger"),
        ((), 4, True, None),
        (("model.llama",), 0, True, None),
    ],
)
def test_only_what_was_seen_is_in_effect(modules, chunked, logits, found):
    facts = cuda_facts()
    evidence = {
        "liger_modules": [f"liger_kernel.transformers.{name}" for name in modules],
        "chunked_losses": chunked,
        "whole_logits": logits,
    }
    values = [choice.value for choice in KERNELS.choices(facts)]
    held = [value for value in values if KERNELS.in_effect(value, evidence, facts) is None]
    assert held == ([] if found is None else [found])


def test_liger_is_withheld_with_what_is_missing():
    facts = cuda_facts()

    def said(**changes):
        now = replace(facts, **changes)
        return {c.value: c.reason for c in KERNELS.choices(now) if c.status == "withheld"}.get("liger")

    both = {**facts.packages, "liger-kernel": "0.8.5", "triton": "3.7.0"}
    assert said() == "liger-kernel is not installed: pip install liger-kernel"
    assert said(packages=both) == "Liger does not know llama"
    assert said(packages=both, model=model(liger=True)) is None


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({"compile": "model", "precision": "bf16", "adapter": "none"}, True),
        ({"compile": "cuda_graphs", "precision": "fp16", "adapter": "none"}, True),
        ({"compile": "regions", "precision": "bf16", "adapter": "none"}, False),
        ({"compile": "model", "precision": "tf32", "adapter": "none"}, False),
        ({"compile": "model", "precision": "bf16", "adapter": "lora:r=16"}, False),
    ],
)
def test_ligers_loss_is_not_compiled_where_its_gradient_is_wider_than_its_products(changed, refused):
    whole = changed.pop("compile")
    compiling = technique("compile")
    assert bool(compiling.conflict(whole, {**changed, "kernels": "liger_fused_ce"}, cuda_facts())) is refused
    assert compiling.conflict(whole, {**changed, "kernels": "chunked_ce"}, cuda_facts()) is None


@pytest.mark.parametrize(
    ("release", "changed", "refused"),
    [
        ("1.14.0", {"kernels": "chunked_ce"}, True),
        ("1.14.0", {"precision": "bf16"}, True),
        ("1.14.0", {}, False),
        ("1.14.0", {"compile": "model", "kernels": "chunked_ce"}, False),
        ("1.15.0", {"precision": "bf16", "kernels": "chunked_ce"}, False),
    ],
)
def test_layers_that_the_models_forward_pass_would_not_call_are_not_compiled(release, changed, refused):
    others = {"compile": "regions", "kernels": "none", "precision": "tf32", **changed}
    facts = replace(cuda_facts(), packages={"accelerate": release})
    said = technique("compile").conflict(others.pop("compile"), others, facts)
    assert ("before 1.15" in (said or "")) is refused


@pytest.mark.parametrize("value", ["regions", "model"])
@pytest.mark.parametrize(("torch_version", "refused"), [("2.13.0", False), ("2.15.0", True)])
def test_ligers_kernels_are_not_compiled_where_dynamo_fails_on_them(value, torch_version, refused):
    facts = replace(cuda_facts(), packages={"torch": torch_version})
    said = technique("compile").conflict(value, {"kernels": "liger", "precision": "tf32"}, facts)
    assert ("Dynamo" in (said or "")) is refused


def test_a_space_has_no_plan_that_compiles_ligers_loss_in_vain():
    base = cuda_facts()
    packages = {**base.packages, "liger-kernel": "0.8.5", "triton": "3.7.0"}
    facts = replace(base, packages=packages, model=replace(base.model, liger=True))
    knobs = space.parse_knobs(("kernels=liger", "precision=bf16"), ("compile=off,model",), facts)
    found = space.build(facts, space.parse_allowed("exact,numeric"), knobs)
    assert found.domains["compile"] == ("off",)


@pytest.mark.parametrize(
    ("parallel", "whole", "refused"), [("ddp", "model", True), ("ddp", "regions", False), ("none", "model", False)]
)
def test_ligers_loss_is_not_in_a_graph_that_ddp_cuts(parallel, whole, refused):
    others = {"kernels": "liger", "parallel": parallel, "precision": "tf32", "adapter": "none"}
    assert bool(technique("compile").conflict(whole, others, cuda_facts())) is refused
