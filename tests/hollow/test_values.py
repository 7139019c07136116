"""What the host reads from an emulated card in a training step is what a card would give, or is known to be hollow."""

import ctypes
import gc
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.machine.describe import describe_hardware

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("HOLLOW_CARD" not in os.environ, reason="runs under python -m tests.hollow"),
]
READS = {"_local_scalar_dense", "equal", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select"}
"""Operators whose answer, or whose shape, the host takes from the device."""

SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 2000}
LLAMA = {**SMALL, "intermediate_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 512}
MODELS = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "gpt2": {"n_embd": 256, "n_layer": 2, "n_head": 4, "vocab_size": 2000},
    "gemma2": {**LLAMA, "head_dim": 64},
    "opt": {**SMALL, "ffn_dim": 512, "word_embed_proj_dim": 256},
    "qwen3_moe": {**LLAMA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64},
    "mixtral": {**LLAMA, "num_local_experts": 4},
    "t5": {
        "d_model": 256,
        "d_kv": 64,
        "d_ff": 512,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 2000,
        "decoder_start_token_id": 0,
    },
    "bert": {**SMALL, "intermediate_size": 512},
}
HOLLOW_READS = {"clip_grad.py", "grad_scaler.py"}
"""Files that may read what kernels would have computed: the gradients' norm, and whether one is infinite."""


class Reads(TorchDispatchMode):
    """Notes each host read of a device value: who reads, what, and whether it is what a card would give."""

    def __init__(self):
        super().__init__()
        self.rows = []
        library = ctypes.CDLL("libhollow_values.so")
        self.is_true = library.hollow_is_true
        self.is_true.argtypes, self.is_true.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_bool

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        to_host = name in {"_to_copy", "copy_"} and result.is_cpu and any(t.is_cuda for t in tensors(args))
        if name in READS or to_host:
            true = all(self.is_true(t.data_ptr(), span(t)) for t in tensors(args) if t.is_cuda)
            read = result if not isinstance(result, torch.Tensor) else list(result.shape)
            self.rows.append((caller(), name, read, true))
        return result


def tensors(args):
    return [each for each in args if isinstance(each, torch.Tensor)]


def span(tensor):
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def caller():
    """The file and line, outside of this one and of torch's own, that asked."""
    frames = [
        f
        for f in traceback.extract_stack()
        if "/torch/_" not in f.filename and "/torch/utils/" not in f.filename and f.filename != __file__
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"


def model_of(kind):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model(kind, **MODELS[kind])
    auto = {"t5": AutoModelForSeq2SeqLM, "bert": AutoModelForMaskedLM}.get(kind, AutoModelForCausalLM)
    with torch.device("cuda"):
        return auto.from_config(config)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_the_host_reads_what_a_card_would_give(kind, padded, capsys):
    model = model_of(kind).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    ids = torch.randint(0, 2000, (4, 128))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 100:] = 0
    with Reads() as reads:
        batch = {"input_ids": ids.cuda(), "attention_mask": mask.cuda(), "labels": ids.cuda()}
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
    with capsys.disabled():
        for row in dict.fromkeys(map(str, reads.rows)):
            print("   ", kind, row)
    assert optimizer.state, "the step was taken"
    hollow = [row for row in reads.rows if not row[-1] and row[0].partition(":")[0] not in HOLLOW_READS]
    assert not hollow
    assert all(not torch.is_tensor(read) or read.isfinite() for _, _, read, _ in reads.rows)


def test_what_is_computed_from_small_integers_is_true():
    positions = torch.arange(512, device="cuda").expand(4, -1)
    assert positions.diff(dim=-1).eq(1).all().item()
    lengths = torch.tensor([3, 0, 5], device="cuda")
    assert torch.repeat_interleave(lengths).tolist() == [0, 0, 0, 2, 2, 2, 2, 2]
    assert lengths.nonzero().flatten().tolist() == [0, 2]
    assert lengths.cumsum(0).tolist() == [3, 3, 8]
    mask = torch.ones(4, 512, dtype=torch.bool, device="cuda").tril()
    assert mask.sum().item() == 10
    lengths[1] = 7
    assert torch.equal(lengths, torch.tensor([3, 7, 5], device="cuda"))


def test_the_users_random_numbers_are_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    torch.randint(0, 9, (100,), device="cuda")
    assert torch.equal(torch.rand(3), expected)


def test_what_comes_from_large_tensors_is_hollow_and_finite():
    stale = torch.full((1024,), -100, device="cuda")
    del stale  # the next allocation gets its memory, and these bytes are no number as floating point
    large = torch.randn(2048, 2048, device="cuda")
    assert (large @ large).sum().item() == 0
    assert not large.isnan().any().item()
    assert large.argmax().item() == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64], ids=str)
def test_nothing_is_left_of_what_a_small_block_held(dtype):
    """Inductor allocates without an operator, and no kernel of Triton's writes the loss that the host reads there."""
    torch.empty(1, device="cuda")
    before = torch.full((8,), 8176, device="cuda", dtype=dtype)
    place = before.data_ptr()
    del before
    after = torch._C._dynamo.guards._empty_strided_cuda((8,), (1,), dtype)
    assert after.data_ptr() == place
    hollow_is_true = Reads().is_true
    assert not hollow_is_true(place, after.nbytes)
    assert after.tolist() == [0] * 8


def test_bits_of_many_hollow_numbers_are_not_mixed():
    """The guard rounds every operand of a product at random, which would keep this machine's processors for minutes."""
    many = torch.randn(512, 1024, device="cuda").view(torch.int32)
    noise = many * 3 + 5
    noise ^= noise >> 15
    assert noise.eq(0).all().item()
    assert (many[:4] + 5).ne(0).any().item(), "few are computed"


def test_an_index_out_of_range_fails_as_a_kernel_does():
    code = "import torch; torch.zeros(4, device='cuda')[torch.tensor([7], device='cuda')].sum().item()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "device-side assert triggered" in done.stderr


def test_what_is_computed_from_hollow_numbers_is_finite():
    sums = torch.randn(512, 4096, device="cuda").sum(1)
    assert (sums.log() - 1).sum().isfinite().item()
    assert (1 / sums).sum().isfinite().item()


@pytest.mark.parametrize(("heads", "rows", "width", "made", "peak"), [
    (16, 512, 64, (1082368, 3145728), (1082880, 6324736)),
    (24, 500, 64, (1585152, 4608000), (1585664, 9264640)),
    (8, 2048, 256, (8455168, 25165824), (8455680, 50397696)),
])  # fmt: skip
def test_cudnns_attention_makes_and_takes_what_it_did_on_an_h100(heads, rows, width, made, peak):
    """Forward and backward, of the gradient of a sum; an H100 80GB HBM3, torch 2.11, cuDNN 9.19, 2026-11-26."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("measured on 9.0")
    shape = (1, heads, rows, width)
    given = [torch.empty(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    out, *forward = bytes_of(lambda: torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True))
    assert "Cudnn" in out.grad_fn.name()
    gradient = out.new_empty(()).expand(shape)
    _, *backward = bytes_of(lambda: torch.autograd.grad(out, given, gradient, retain_graph=True))
    assert [forward, backward] == [list(pair) for pair in zip(made, peak, strict=True)]


def bytes_of(call):
    """What a call returns, makes, and holds at its peak."""
    gc.collect()  # what an earlier case has left would go meanwhile
    time.sleep(0.3)  # and what autograd's thread has handed over, which it lets go of once it has Python's lock
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    return result, torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cudnns_convolutions_take_the_bytes_of_their_tensors(dtype):
    """Of one dimension, of each channel by itself, of two; cuDNN's normalization takes none either."""
    sound = torch.ones(2, 64, 100, device="cuda", dtype=dtype, requires_grad=True)
    picture = torch.ones(2, 3, 64, 64, device="cuda", dtype=dtype, requires_grad=True)
    for layer, rows in (
        (torch.nn.Conv1d(64, 32, 4), sound),
        (torch.nn.Conv1d(64, 64, 4, groups=64), sound),
        (torch.nn.ConvTranspose1d(64, 32, 4), sound),
        (torch.nn.Conv2d(3, 32, 4, stride=4), picture),
        (torch.nn.BatchNorm2d(3), picture),
    ):
        layer.to("cuda", dtype)
        before = torch.cuda.memory_allocated()
        made = layer(rows)
        assert torch.cuda.memory_allocated() - before <= made.nbytes + 4096, layer
        made.sum().backward()
        assert rows.grad.shape == rows.shape
        assert all(parameter.grad is not None for parameter in layer.parameters())


def test_cudnns_loss_of_alignments_runs_and_its_recurrent_layers_say_that_they_do_not():
    scores = torch.zeros(20, 2, 8, device="cuda", requires_grad=True)
    words, lengths = torch.ones(8, dtype=torch.int), (torch.tensor([20, 20]), torch.tensor([4, 4]))
    torch.nn.functional.ctc_loss(scores.log_softmax(-1), words, *lengths).backward()
    assert scores.grad.shape == scores.shape
    with pytest.raises(RuntimeError, match="cuDNN error"):
        torch.nn.LSTM(8, 8).cuda()(torch.ones(3, 2, 8, device="cuda"))


@pytest.mark.parametrize("rows", [[512, 256], [256, 512], [3, 512, 64]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_values_have_the_shapes_that_a_card_would_give(rows, dtype):
    given = torch.ones(rows, device="cuda", dtype=dtype)
    found = torch.linalg.svd(given, full_matrices=False)
    wanted = torch.linalg.svd(torch.empty(rows, device="meta", dtype=dtype), full_matrices=False)
    assert [(part.shape, part.dtype) for part in found] == [(part.shape, part.dtype) for part in wanted]
    assert all(part.is_cuda for part in found)


@pytest.mark.parametrize("function", [torch.erfinv, torch.special.i0e, torch.special.zeta])
def test_a_kernel_that_is_compiled_at_run_time_runs_and_stays_nowhere(function):
    """PyTorch has NVRTC compile some, by version, and keeps what comes of it for the next process."""
    given = torch.ones(300, 400, device="cuda")
    made = function(given, given) if function is torch.special.zeta else function(given)
    torch.cuda.synchronize()
    assert (made.shape, made.dtype) == (given.shape, given.dtype)
    assert os.environ["USE_PYTORCH_KERNEL_CACHE"] == "0"


def test_the_cache_of_a_card_is_its_own():
    """Inductor clears it between runs of a kernel that it times, with a buffer of that size."""
    properties = torch.cuda.get_device_properties(0)
    expected = int(os.environ["HOLLOW_CARD"].split(":")[9])
    assert properties.L2_cache_size == expected
    assert describe_hardware("cuda")["l2_bytes"] == expected


def test_addresses_fall_as_a_drivers_do():
    """PyTorch 2.11 takes the lowest of equal blocks; large ones begin at multiples of 32 MiB, as the model has it."""
    code = (
        "import torch; blocks = [torch.empty(30 << 20, dtype=torch.uint8, device='cuda') for _ in range(4)]\n"
        "print(*(block.data_ptr() for block in blocks))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    places = [int(place) for place in done.stdout.split()]
    assert places == sorted(places, reverse=True)
    assert all(place % (32 << 20) == 0 for place in places)
