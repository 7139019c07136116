"""What a trace says of kernels, of optimizers and of whole steps, against the device itself.

A small program runs twice: for real on the device, and on fake tensors of a CPU that behaves like CUDA
(:mod:`autofit.costmodel.tracing.emulation.cuda`). The bytes that its tensors asked for at the peak must be the same.
Where the environment's ``AUTOFIT_GPU_CHECKS`` names a file, every comparison leaves a line of JSON there, the ones that
fail too.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from autofit.contract import placement
from autofit.contract.outcome import Measured
from autofit.costmodel.forecast import untraced_bytes
from autofit.costmodel.tracing.emulation import cuda_kernels
from autofit.costmodel.tracing.emulation.cuda import like_cuda
from autofit.costmodel.tracing.emulation.cuda_kernels import kernel_stand_ins
from autofit.costmodel.tracing.emulation.fake_kernels import without_values
from autofit.costmodel.tracing.recorder import Recorder
from autofit.costmodel.tracing.trace_request import kernels_of
from autofit.registry import technique
from autofit.system.other_kernels import without_launches
from autofit.system.units import KIB, MIB
from tests.gpu.card import note
from tests.gpu.models import LLAMA
from tests.gpu.trials import PLAIN, Bench, Compared

NEAR = 0.03
SLACK_BYTES = 64 * KIB  # seeds, scalars, and what is rounded up to 512 bytes


# -- one program, twice -------------------------------------------------------------------------------------------


def measured(make, program):
    """Bytes that a program asks for at its peak on the device, above its inputs; and what it returned."""
    warm = make("cuda")
    program(warm, "cuda")  # workspaces are taken, kernels are loaded
    del warm
    gc.collect()
    held = make("cuda")
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    said = program(held, "cuda")
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before, said


def predicted(make, program, *around):
    """The same of fake tensors; ``around`` are contexts to run in, made with the recorder."""
    card = torch.cuda.get_device_properties(0)
    kernels = kernels_of((card.major, card.minor))
    threads = card.multi_processor_count * card.max_threads_per_multi_processor
    with mock.patch.dict(cuda_kernels._RESIDENT_THREADS, {kernels: threads}):
        recorder = Recorder(stand_ins={**without_values(), **kernel_stand_ins(kernels)})
    with contextlib.ExitStack() as stack:
        for context in around:
            stack.enter_context(context(recorder))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(recorder)
        stack.enter_context(placement.use(placement.Traced(recorder)))
        stack.enter_context(like_cuda(kernels))
        held = make("cpu")
        gc.collect()
        before = alive_bytes(recorder)
        recorder.mark("0:F0")
        program(held, "cpu")
        recorder.close()
    tape = recorder.tape(since=0)
    live, start = tape.live(0), int(tape.starts[1])
    return int(live[start:].max(initial=before)) - before


def alive_bytes(recorder):
    """What lives on the traced device now."""
    return sum(
        recorder.sizes[event] if event >= 0 else -recorder.sizes[~event] for event in recorder.events
    )  # fmt: skip


def check(name, make, program, *around, near=NEAR, slack_bytes=SLACK_BYTES):
    """Both must be the same."""
    real, said = measured(make, program)
    told = predicted(make, program, *around)
    note(name, measured=real, predicted=told, error=round(told / real - 1, 4) if real else None, said=said)
    assert abs(told - real) <= near * real + slack_bytes, f"predicted {told}, measured {real} ({told / real - 1:+.1%})"
    return said


def test_a_plain_product_takes_what_its_tensors_take():
    """Whatever fails here, fails by the harness."""

    def make(device):
        return [torch.randn(2048, 1024, device=device, requires_grad=True) for _ in range(2)]

    def program(held, _device):
        (held[0] @ held[1].t()).relu().sum().backward()

    check("product", make, program)


def test_a_kernel_of_tritons_takes_what_the_python_around_it_makes():
    pytest.importorskip("triton")
    twice = importlib.import_module("tests.gpu.triton_kernel").Twice.apply

    def make(device):
        return [torch.randn(1024, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)]

    def program(held, _device):
        twice(twice(held[0])).sum().backward()

    check("triton kernel", make, program, lambda recorder: without_launches(recorder.launched))


# -- attention ----------------------------------------------------------------------------------------------------

BACKENDS = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
HEADS, ROWS, LENGTH = 8, 4, 1024


def prefers_cudnn():
    return kernels_of(torch.cuda.get_device_capability()) >= (9, 0)


def skip_without_bfloat16(dtype):
    """Skip on a card that has none: no plan computes in it there, and what a trace says of it stands for float16."""
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this card has no bfloat16")


def attention(dtype, width, *, key_heads=HEADS, dropout=0.0, mask=False, backend=None, length=LENGTH):
    """Attention forward and backward; says which kernel ran on the device."""
    skip_without_bfloat16(dtype)

    def make(device):
        shape = (ROWS, length, HEADS, width)
        query = torch.randn(shape, device=device, dtype=dtype)
        pair = [torch.randn(ROWS, length, key_heads, width, device=device, dtype=dtype) for _ in range(2)]
        held = [one.requires_grad_() for one in (query, *pair)]
        if mask:
            held.append(torch.ones(length, length, device=device, dtype=torch.bool).tril()[None, None])
        return held

    def program(held, device):
        query, key, value = (one.transpose(1, 2) for one in held[:3])
        choice = sdpa_kernel(backend) if backend is not None and device == "cuda" else contextlib.nullcontext()
        with choice:
            out = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=held[3] if mask else None,
                dropout_p=dropout,
                is_causal=not mask,
                enable_gqa=key_heads != HEADS,
            )
            kernel = out.grad_fn.name() if out.grad_fn is not None else None
            out.transpose(1, 2).reshape(ROWS, length, -1).sum().backward()
        return kernel

    return make, program


def short(dtype):
    return str(dtype).removeprefix("torch.")


def run_attention(name, make, program, *, may_lack):
    try:
        return check(name, make, program)
    except RuntimeError as error:
        if not may_lack or "No available kernel" not in str(error):
            raise
        note(name, missing=str(error).splitlines()[0])
        pytest.skip("this kernel does not do it")


@pytest.mark.parametrize("width", [64, 96, 128])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        (torch.bfloat16, "default"),
        (torch.bfloat16, "flash"),
        (torch.bfloat16, "cudnn"),
        (torch.float32, "default"),
        (torch.float32, "efficient"),
    ],
    ids=lambda one: one if isinstance(one, str) else short(one),
)
@pytest.mark.filterwarnings("ignore")
def test_attention(dtype, backend, key_heads, dropout, width):
    name = f"attention {short(dtype)} {backend} heads {HEADS}/{key_heads} dropout {dropout} width {width}"
    make, program = attention(dtype, width, key_heads=key_heads, dropout=dropout, backend=BACKENDS[backend])
    kernel = run_attention(name, make, program, may_lack=backend != "default")
    unfused = dtype == torch.float32 and key_heads != HEADS and not cuda_kernels.GROUPED_EFFICIENT
    assert ("ScaledDotProduct" in kernel) is not unfused, kernel


def test_attention_whose_values_are_of_another_width():
    """As DeepSeek's has it: FlashAttention does not do that, and cuDNN's and the memory-efficient kernel do."""
    skip_without_bfloat16(torch.bfloat16)

    def make(device):
        widths = (96, 96, 64)
        return [
            torch.randn(ROWS, HEADS, LENGTH, width, device=device, dtype=torch.bfloat16, requires_grad=True)
            for width in widths
        ]

    def program(held, _device):
        out = F.scaled_dot_product_attention(*held, is_causal=True)
        out.relu().sum().backward()
        return out.grad_fn.name()

    said = check("attention whose values are of another width", make, program)
    assert ("Cudnn" if prefers_cudnn() else "Efficient") in said


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=short)
@pytest.mark.parametrize("backend", ["default", "efficient"])
@pytest.mark.filterwarnings("ignore")
def test_attention_with_a_mask(dtype, backend):
    """As Gemma's sliding windows and packed rows have it; the mask is one for all rows and heads."""
    make, program = attention(dtype, 64, mask=True, backend=BACKENDS[backend])
    name = f"attention {short(dtype)} {backend} with a mask"
    run_attention(name, make, program, may_lack=backend != "default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=short)
@pytest.mark.parametrize("length", [LENGTH, 1004])
def test_attention_with_a_mask_that_is_learned(dtype, length):
    """As T5's is: what it adds for each distance, one mask for all rows, which has a gradient."""
    skip_without_bfloat16(dtype)

    def make(device):
        held = [torch.randn(ROWS, HEADS, length, 64, device=device, dtype=dtype) for _ in range(3)]
        held.append(torch.randn(1, HEADS, length, length, device=device, dtype=dtype))
        return [one.requires_grad_() for one in held]

    def program(held, _device):
        out = F.scaled_dot_product_attention(*held[:3], attn_mask=held[3])
        out.relu().sum().backward()
        return out.grad_fn.name()

    assert "Efficient" in check(f"attention {short(dtype)} with a learned mask, length {length}", make, program)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=short)
def test_attention_of_heads_that_lie_apart(dtype):
    """As Whisper has them; what the memory-efficient kernel gives needs no copy to be put side by side."""
    skip_without_bfloat16(dtype)

    def make(device):
        lengths = (100, 1000, 1000)
        return [torch.randn(ROWS, HEADS, one, 64, device=device, dtype=dtype, requires_grad=True) for one in lengths]

    def program(held, _device):
        out = F.scaled_dot_product_attention(*held)
        out.transpose(1, 2).contiguous().relu().sum().backward()

    check(f"attention {short(dtype)} of heads that lie apart", make, program)


def test_what_waits_on_the_host_comes_back_laid_out_as_it_was():
    """Flash attention would copy what has its heads apart."""
    given, side = torch.empty(2, 3, 4, 5, device="cuda").transpose(1, 2), placement.Cuda()
    assert side.to_device(side.to_host(given), given.device).stride() == given.stride()


@pytest.mark.parametrize("length", [1000, 129])
def test_attention_over_odd_lengths(length):
    make, program = attention(torch.bfloat16, 64, key_heads=2, length=length)
    check(f"attention bfloat16 default length {length}", make, program)


# -- operators ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=short)
def test_dropout_keeps_a_mask_of_bytes(dtype):
    def make(device):
        return torch.randn(4096, 2048, device=device, dtype=dtype, requires_grad=True)

    def program(held, _device):
        F.dropout(held, 0.1, training=True).sum().backward()

    check(f"dropout {short(dtype)}", make, program)


def under_autocast(forward, *shapes):
    """Sixteen-bit inputs through one operator under autocast, forward and backward."""

    def make(device):
        return [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]

    def program(held, device):
        with torch.autocast(device, torch.bfloat16):
            out = forward(*held)
        out.float().sum().backward()

    return make, program


OPERATORS = {
    "layer_norm": (lambda x: F.layer_norm(x, (1024,)), (4096, 1024)),
    "softmax": (lambda x: F.softmax(x, -1), (4096, 1024)),
    "softmax to float32": (lambda x: F.softmax(x, -1, dtype=torch.float32), (4096, 1024)),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.zeros(len(x), device=x.device).long()), (2048, 8192)),
    "cross_entropy of float": (
        lambda x: F.cross_entropy(x.float(), torch.zeros(len(x), device=x.device).long()),
        (2048, 8192),
    ),
    "rms norm by hand": (
        lambda x: (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype),
        (4096, 1024),
    ),
    "pow": (lambda x: x.pow(2), (4096, 1024)),
    "sum": (lambda x: x.sum(-1), (4096, 1024)),
    "gelu": (F.gelu, (4096, 1024)),
    "gelu by tanh": (lambda x: 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * torch.pow(x, 3)))), (4096, 1024)),
    "silu and product": (lambda x, y: F.silu(x) * y, (4096, 1024), (4096, 1024)),
    "cumsum": (lambda x: x.cumsum(-1), (4096, 1024)),
    "softplus": (F.softplus, (4096, 1024)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_under_autocast(name):
    forward, *shapes = OPERATORS[name]
    check(f"autocast {name}", *under_autocast(forward, *shapes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=short)
@pytest.mark.parametrize("shape", [(4096, 768), (1024, 1024), (8192, 3072), (300, 512), (4096, 50), (4096, 12, 64)])
def test_a_sum_over_rows_takes_partial_sums(dtype, shape):
    def make(device):
        return torch.randn(shape, device=device, dtype=dtype)

    def program(held, _device):
        held.sum(0)
        held.mean(0)

    check(f"sum over rows {short(dtype)} {shape}", make, program)


def test_a_softmax_backward_takes_a_product():
    def make(device):
        return torch.randn(4096, 1024, device=device, requires_grad=True)

    def program(held, _device):
        F.softmax(held, -1).relu().sum().backward()

    check("softmax backward", make, program)


def test_autocast_copies_a_weight_once_and_keeps_the_copy():
    def make(device):
        torch.manual_seed(0)
        return torch.nn.Linear(1024, 2048, device=device), torch.randn(512, 1024, device=device)

    def program(held, device):
        layer, x = held
        with torch.autocast(device, torch.bfloat16):
            total = sum(layer(x).float().sum() for _ in range(3))
        total.backward()

    check("autocast weight cache", make, program)


def test_grouped_products_of_experts():
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this PyTorch has none")

    def make(device):
        x = torch.randn(4096, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(8, 512, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
        return x, weight, torch.arange(512, 4097, 512, device=device, dtype=torch.int32)

    def program(held, _device):
        x, weight, offsets = held
        torch._grouped_mm(x, weight, offs=offsets).relu().sum().backward()  # it takes no gradient of stride 0

    check("grouped products", make, program)


# -- optimizers ---------------------------------------------------------------------------------------------------


def network(device, layers=4, width=1024):
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, device=device) for _ in range(layers)))


def given_gradients(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def adafactor(parameters):
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)


OPTIMIZERS = {
    "adamw fused": functools.partial(torch.optim.AdamW, fused=True),
    "adamw for each": functools.partial(torch.optim.AdamW, foreach=True),
    "adamw by default": torch.optim.AdamW,
    "adamw one by one": functools.partial(torch.optim.AdamW, foreach=False),
    "sgd with momentum": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adafactor": adafactor,
}


def steps_of(build):
    """Two steps: the state is made in the first."""

    def make(device):
        model = network(device)
        return model, build(model.parameters())

    def program(held, _device):
        model, optimizer = held
        for _ in range(2):
            given_gradients(model)
            optimizer.step()
            optimizer.zero_grad()

    return make, program


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer(name):
    check(f"optimizer {name}", *steps_of(OPTIMIZERS[name]))


def test_clipping_takes_its_temporaries():
    def make(device):
        model = network(device)
        given_gradients(model)
        return model

    def program(model, _device):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    check("clipping", make, program)


@pytest.mark.parametrize("value", ["adamw_8bit", "paged_adamw_8bit"])
def test_state_in_eight_bits(value):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    kind = bitsandbytes.optim.PagedAdamW8bit if "paged" in value else bitsandbytes.optim.AdamW8bit

    def stand_in(recorder):
        return technique("optimizer").stand_in(value, cuda_facts(), recorder)

    check(f"optimizer {value}", *steps_of(kind), stand_in)


def cuda_facts():
    from tests.support.traced import facts_of

    return facts_of("llama", device="cuda")


# -- offload ------------------------------------------------------------------------------------------------------


def offload():
    technique("offload")  # the door loads the package
    return importlib.import_module("autofit.strategies.offload")


def test_activations_that_wait_on_the_host():
    def make(device):
        model = torch.nn.Sequential(*network(device), torch.nn.GELU())
        return model, torch.randn(8192, 1024, device=device)

    def program(held, _device):
        model, x = held
        keeper = offload().HostActivations()
        with keeper.hooks(model):
            loss = model(x).square().mean()
        loss.backward()

    check("offloaded activations", make, program)


def test_state_that_waits_on_the_host():
    def build(parameters):
        adamw = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
        return offload().keep_state_on_host(adamw, chunk_bytes=4 * MIB)

    check("offloaded state", *steps_of(build))


# -- whole models -------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
MODELS = {
    "llama": LLAMA,
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 512,
        "n_layer": 8,
        "n_head": 8,
        "n_positions": 1024,
        "vocab_size": 32000,
    },
    "gemma2": {
        **SIZES,
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "num_key_value_heads": 4,
        "head_dim": 64,
        "sliding_window": 256,
        "vocab_size": 32000,
        "max_position_embeddings": 1024,
    },
    "qwen3_moe": {
        **SIZES,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": 512,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 1024,
    },
}
PLANS = [
    ("llama", {}),
    ("llama", {"precision": "fp32"}),
    ("llama", {"precision": "bf16_weights", "checkpointing": "full"}),
    ("llama", {"micro_batch": 2, "accumulation": 4, "optimizer": "adamw_8bit"}),
    ("llama", {"kernels": "chunked_ce"}),
    ("llama", {"kernels": "chunked_ce", "precision": "bf16_weights", "checkpointing": "full", "accumulation": 2}),
    ("gpt2", {"attention": "eager"}),
    ("gpt2", {"attention": "eager", "precision": "fp32", "kernels": "chunked_ce"}),
    ("llama", {"offload": "activations"}),
    ("llama", {"micro_batch": 1, "offload": "optimizer", "checkpointing": "full"}),
    ("llama", {"micro_batch": 1, "optimizer": "adafactor"}),
    ("llama", {"checkpointing": "every_2"}),
    ("llama", {"checkpointing": "selective"}),
    ("llama", {"checkpointing": "full_offload"}),
    ("llama", {"adapter": "lora:r=16"}),
    ("llama", {"adapter": "lora:r=16", "precision": "bf16_weights", "checkpointing": "full"}),
    ("llama", {"adapter": "dora:r=16"}),
    ("llama", {"adapter": "lora:r=16", "quantization": "nf4"}),
    ("llama", {"adapter": "lora:r=16", "quantization": "nf4", "precision": "bf16_weights", "checkpointing": "full"}),
    ("llama", {"adapter": "lora:r=16", "quantization": "int8"}),
    ("gpt2", {}),
    ("gpt2", {"adapter": "lora:r=16", "quantization": "nf4"}),
    ("gpt2", {"precision": "fp16", "checkpointing": "full", "accumulation": 2}),
    ("gpt2", {"precision": "fp32", "optimizer": "sgd", "micro_batch": 1}),
    ("gpt2", {"checkpointing": "selective"}),
    ("gemma2", {}),
    ("gemma2", {"precision": "bf16_weights", "accumulation": 2, "micro_batch": 4}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"checkpointing": "full", "precision": "bf16"}),
]


@pytest.fixture(scope="module")
def benches(tmp_path_factory):
    made = {}

    def bench(model):
        if model not in made:
            made[model] = Bench(tmp_path_factory.mktemp(model), MODELS[model])
        return made[model]

    yield bench
    for one in made.values():
        one.close()


@pytest.mark.parametrize(
    ("model", "values"), PLANS, ids=[" ".join([model, *map(str, values.values())]) for model, values in PLANS]
)
def test_a_trial_allocates_what_its_trace_says(benches, model, values):
    bench, plan = benches(model), PLAIN.replaced(**values)
    if "8bit" in str(plan["optimizer"]):
        pytest.importorskip("bitsandbytes")
    facts = bench.facts_for(plan)
    if facts.hardware.capability is None or facts.hardware.capability < (8, 0):
        pytest.skip("no fused attention in 16 bits")
    outcome = bench.trial(plan)
    assert isinstance(outcome, Measured), outcome
    found = bench.compare(plan, outcome)
    assert isinstance(found, Compared), found
    note(f"trial {model} {plan.words()}", **dataclasses.asdict(found), error=round(found.allocated_error, 4))
    told, real = found.traced_allocated, found.allocated
    assert told == pytest.approx(real, rel=NEAR), f"predicted {told}, measured {real} ({found.allocated_error:+.1%})"


@pytest.fixture
def bench_of(tmp_path):
    """Makes the bench of a model for one test."""
    with contextlib.ExitStack() as stack:
        yield lambda sizes: stack.enter_context(contextlib.closing(Bench(tmp_path, {**LLAMA, **sizes})))


def skip_without(plan, facts, *names):
    """Skip where the device has no fused attention in 16 bits, or some techniques withhold their value."""
    if facts.hardware.capability is None or facts.hardware.capability < (8, 0):
        pytest.skip("no fused attention in 16 bits")
    for name in names:
        choice = technique(name).choice(plan[name], facts)
        if choice.status == "withheld":
            pytest.skip(choice.reason)


def test_a_compiled_model_that_recomputes_takes_no_more_than_told(bench_of):
    """The mask that such a graph writes out for each head is in no trace; cuDNN's attention wants none."""
    heads = {"num_attention_heads": 48, "head_dim": 16, "vocab_size": 1024, "num_hidden_layers": 4}
    bench = bench_of(heads)
    plan = PLAIN.replaced(compile="model", checkpointing="full")
    facts = bench.facts_for(plan)
    skip_without(plan, facts, "compile")
    outcome = bench.trial(plan, limit_seconds=500)
    assert isinstance(outcome, Measured), outcome
    found, added = bench.compare(plan, outcome), untraced_bytes(plan, facts)
    assert isinstance(found, Compared), found
    assert found.allocated <= found.traced_allocated + added, found
    assert prefers_cudnn() or found.traced_allocated < found.allocated, found


@pytest.mark.parametrize(
    "values",
    [{"compile": "regions", "adapter": "lora:r=16"}, {"optimizer": "adamw_torchao_8bit", "precision": "bf16_weights"}],
    ids=["regions", "torchao"],
)
def test_timing_kernels_takes_no_more_than_told(bench_of, tmp_path, monkeypatch, values):
    """In the first step, where Inductor's cache is empty."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
    bench = bench_of({**sizes, "vocab_size": 1024})
    plan = PLAIN.replaced(**values, micro_batch=1)
    facts = bench.facts_for(plan)
    skip_without(plan, facts, "compile", "optimizer")
    outcome = bench.trial(plan, limit_seconds=500)
    assert isinstance(outcome, Measured), outcome
    found, added = bench.compare(plan, outcome), untraced_bytes(plan, facts)
    assert isinstance(found, Compared), found
    note(f"timing kernels {plan.words()}", added=added, **dataclasses.asdict(found))
    assert found.allocated <= found.traced_allocated * (1 + NEAR) + added, found
