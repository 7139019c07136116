"""Attention by cuDNN's kernel: when it is taken, and what it makes, against what an H100 did."""

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch._subclasses.fake_tensor import FakeTensorMode

from autofit.costmodel.tracing.emulation import cudnn
from autofit.costmodel.tracing.emulation.cuda import like_cuda
from autofit.costmodel.tracing.emulation.cuda_kernels import fused_attention, kernel_stand_ins
from autofit.costmodel.tracing.recorder import Recorder
from autofit.costmodel.tracing.trace_request import groups_experts, kernels_of

HOPPER, BLACKWELL = (9, 0), (10, 0)
UNIT = 512  # the allocator rounds up to it


def recorded(rows=None, batch=1, heads=16, key_heads=None, length=512, width=64, values=None, *, of_a_sum=False):
    """The recorder of both passes in bfloat16, the first event of each pass, and the kernel's name."""
    recorder = Recorder(stand_ins=kernel_stand_ins(HOPPER), rows=rows)
    with FakeTensorMode(allow_non_fake_inputs=True), recorder, like_cuda(HOPPER):
        shapes = [(batch, heads, length, width)]
        shapes += [(batch, key_heads or heads, length, one) for one in (width, values or width)]
        given = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        recorder.mark("0:F0")
        begin = len(recorder.events)
        out = F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=bool(key_heads))
        turn = len(recorder.events)
        gradient = out.new_empty(()).expand(out.shape) if of_a_sum else torch.empty_like(out)
        backward = len(recorder.events)
        gradients = torch.autograd.grad(out, given, gradient, retain_graph=True)
        end = len(recorder.events)
        assert [one.shape for one in gradients] == [one.shape for one in given]
    return recorder, ((begin, turn), (backward, end)), out.grad_fn.name()


def made_and_peak(recorder, begin, end):
    """What stays of the blocks between two events, and their peak, rounded as the allocator does."""
    steps = [
        -(-recorder.sizes[event if event >= 0 else ~event] // UNIT) * UNIT * (1 if event >= 0 else -1)
        for event in recorder.events[begin:end]
    ]
    return sum(steps), max(itertools.accumulate(steps))


@pytest.mark.parametrize(
    ("shape", "forward", "backward"),
    [
        ({"of_a_sum": True}, (1082368, 1082880), (3145728, 6324736)),
        ({"heads": 96, "length": 1024, "of_a_sum": True}, (12977152, 12977664), (37748736, 75891200)),
        ({"heads": 32, "length": 2048, "width": 128, "of_a_sum": True}, (17040384, 17040896), (50331648, 100925952)),
        ({"heads": 8, "length": 2048, "width": 256, "of_a_sum": True}, (8455168, 8455680), (25165824, 50397696)),
        ({"heads": 24, "length": 500, "of_a_sum": True}, (1585152, 1585664), (4608000, 9264640)),
        ({"heads": 128, "key_heads": 32, "length": 2048}, (34604032, 34604544), (50331648, 185598464)),
        ({"heads": 112, "key_heads": 16, "length": 1024}, (15139840, 15140352), (18874368, 78053888)),
        ({"heads": 64, "key_heads": 16, "length": 2048, "width": 128}, (34079744, 34080256), (50331648, 185074176)),
    ],
)
def test_it_makes_and_takes_what_it_did_on_an_h100(monkeypatch, shape, forward, backward):
    """What stays and the peak of each pass: an H100 80GB HBM3, torch 2.11, cuDNN 9.19, 2026-11-26.

    By ``tests/bench/record_operators.py``; the grouped ones are of a Llama 1B, a Qwen2.5 0.5B and a Llama 8B.
    """
    monkeypatch.setattr(cudnn, "_WIDE_BY_VERSION", False)
    recorder, passes, kernel = recorded(**shape)
    assert "Cudnn" in kernel
    assert [made_and_peak(recorder, *one) for one in passes] == [forward, backward]


def test_seeds_come_first_and_the_workspace_last():
    """As in PyTorch's ``_cudnn_attention_forward`` and ``run_cudnn_SDP_fprop``: each then takes the same free block."""
    recorder, (forward, backward), _ = recorded(values=32, of_a_sum=True)
    rows, row = 16 * 512, 2 * 16 * 512
    wanted = [8, 8, row * 32, 4 * rows, 256]
    assert [recorder.sizes[one] for one in recorder.events[slice(*forward)] if one >= 0] == wanted
    wanted = [row * 64, row * 64, row * 32, row * 32, 4 * rows * 65 + 256]
    assert [recorder.sizes[one] for one in recorder.events[slice(*backward)] if one >= 0] == wanted


def test_a_plans_own_bytes_do_not_grow_with_the_rows():
    recorder, *_ = recorded(rows=101, batch=101, heads=2, length=8, width=8)
    tape = recorder.tape()
    workspaces = tape.ops == tape.names.index("attention's workspace")
    assert tape.bytes_at(1)[workspaces].tolist() == [256, 4 * 2 * 8 * 9 + 256]
    assert tape.bytes_at(10)[workspaces].tolist() == [256, 10 * 4 * 2 * 8 * 9 + 256]


def test_without_a_gradient_no_number_of_a_row_is_kept():
    recorder = Recorder(stand_ins=kernel_stand_ins(HOPPER))
    with FakeTensorMode(allow_non_fake_inputs=True), recorder, like_cuda(HOPPER):
        query = torch.empty(1, 2, 16, 64, dtype=torch.bfloat16)
        begin = len(recorder.events)
        F.scaled_dot_product_attention(query, query, query)
        made = [recorder.sizes[one] for one in recorder.events[begin:] if one >= 0]
    assert [size for size in made if size] == [8, 8, 2 * query.numel(), 256]


def kernel_of(
    widths=(64, 64), key_heads=4, lengths=(32, 32), mask=None, dropout=0.0, dtype=torch.bfloat16, trains=True,
    capability=HOPPER,
):  # fmt: skip
    rows, columns = lengths
    query = torch.empty(2, 4, rows, widths[0], dtype=dtype, requires_grad=trains)
    key, value = (torch.empty(2, key_heads, columns, width, dtype=dtype) for width in widths)
    return fused_attention(query, key, value, mask, dtype=dtype, capability=capability, dropout=dropout)


LEARNED = torch.empty(1, 4, 32, 32, requires_grad=True)


@pytest.mark.parametrize(
    ("call", "by_version"),
    [
        ({}, "ccc"),
        ({"capability": BLACKWELL}, "ccc"),
        ({"capability": (8, 0)}, "fff"),
        ({"capability": (8, 6)}, "fff"),
        ({"dtype": torch.float16}, "ccc"),
        ({"dtype": torch.float32}, "eee"),
        ({"key_heads": 1}, "ccc"),
        ({"widths": (96, 64)}, "ccc"),
        ({"widths": (100, 100)}, "fff"),
        ({"widths": (160, 160)}, "ccf"),
        ({"widths": (192, 128)}, "ccc"),
        ({"widths": (192, 128), "capability": BLACKWELL}, "ccc"),
        ({"widths": (128, 192)}, "cce"),
        ({"widths": (256, 256)}, "ccc"),
        ({"widths": (256, 256), "capability": BLACKWELL}, "ffc"),
        ({"widths": (224, 224), "trains": False, "capability": BLACKWELL}, "ffc"),
        ({"lengths": (32, 1)}, "fff"),
        ({"lengths": (1, 32)}, "ccc"),
        ({"lengths": (1, 32), "dropout": 0.5}, "fff"),
        ({"dropout": 0.1}, "cff"),
        ({"dropout": 0.125}, "ccc"),
        ({"mask": torch.empty(32, 32)}, "ccc"),
        ({"mask": torch.empty(2, 1, 1, 32)}, "ccc"),
        ({"mask": torch.empty(2, 32, 32)}, "eee"),
        ({"mask": torch.empty(3, 1, 32, 32)}, "eee"),
        ({"mask": LEARNED}, "eee"),
    ],
)
def test_it_is_taken_where_pytorch_takes_it(monkeypatch, call, by_version):
    """In PyTorch 2.11, 2.12 to 2.13, and from 2.14 on: cuDNN's, FlashAttention or the memory-efficient kernel.

    So said ``torch.backends.cuda.can_use_cudnn_attention`` and ``torch._fused_sdp_choice`` of 2.11 to 2.13, 2.14.1 and
    2.15 on emulated cards.
    """
    for (any_dropout, wide), kernel in zip(((True, False), (False, False), (False, True)), by_version, strict=True):
        monkeypatch.setattr(cudnn, "_ANY_DROPOUT", any_dropout)
        monkeypatch.setattr(cudnn, "_WIDE_BY_VERSION", wide)
        assert kernel_of(**call)[0] == kernel


def test_who_forbids_it_gets_flash_attention():
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        assert kernel_of() == "flash"
    torch.use_deterministic_algorithms(True)
    try:
        assert kernel_of() == "flash"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("capability", "first", "last"),
    [((9, 0), (9, 0), (8, 0)), ((10, 3), (10, 0), (8, 0)), ((8, 0), (8, 0), (8, 0)), ((11, 0), (8, 0), (8, 0)),
     ((12, 0), (8, 6), (8, 6)), ((8, 9), (8, 6), (8, 6)), (None, (8, 0), (8, 0))],
)  # fmt: skip
def test_the_environment_may_put_it_last(monkeypatch, capability, first, last):
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    assert kernels_of(capability) == first
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert kernels_of(capability) == last
    assert groups_experts(capability) == (first >= (9, 0))  # whatever attention does
