"""Small programs on real tensors: what the recorder writes of them."""

import contextlib
import os
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.distributed._functional_collectives import all_gather_tensor

from autofit.contract import placement
from autofit.costmodel.scripts.known_values import KnownValues
from autofit.costmodel.seconds.operator_time import TIMED_KINDS, Operators
from autofit.costmodel.seconds.roofline import KINDS
from autofit.costmodel.tracing import work
from autofit.costmodel.tracing.emulation.fake_kernels import BALANCED, lists_of_tensors, without_values
from autofit.costmodel.tracing.emulation.fake_mode import FakeMode
from autofit.costmodel.tracing.emulation.sharded import fake_world
from autofit.costmodel.tracing.operator_table import operator_of
from autofit.costmodel.tracing.recorder import BY_BYTES, CONVOLVES, Recorder
from autofit.costmodel.tracing.timeline import CATEGORIES
from autofit.system.errors import ModelError

KIB = 1024


@contextlib.contextmanager
def recording(**options):
    with Recorder(fake=False, **options) as recorder:
        recorder.mark("0:F0")
        yield recorder


def kinds_of(tape):
    """Category by bytes, for blocks whose sizes differ."""
    return {int(size): CATEGORIES[category] for size, category in zip(tape.sizes, tape.categories, strict=True)}


def test_a_tensor_is_a_block_from_the_operator_that_made_it_to_its_last_holder():
    with recording() as recorder:
        made = torch.ones(4, KIB)
        other = made
        del made
        second = torch.zeros(KIB)
        del other, second
    tape = recorder.tape(since=1)
    assert tape.events.tolist() == [0, 1, ~0, ~1]
    assert tape.sizes.tolist() == [16 * KIB, 4 * KIB]
    assert [tape.names[op] for op in tape.ops] == ["aten.ones.default", "aten.zeros.default"]
    assert tape.live(1).tolist() == [16 * KIB, 20 * KIB, 4 * KIB, 0]


def test_views_are_no_blocks_and_hold_their_base():
    with recording() as recorder:
        base = torch.ones(4, KIB)
        views = [base.view(KIB, 4), base.t(), base[1], base.expand(2, 4, KIB), base.detach(), base.unbind(0)[2]]
        del base
        assert not [event for event in recorder.events if event < 0]
        views.clear()
    assert recorder.tape(since=1).events.tolist() == [0, ~0]


def test_in_place_is_no_block():
    with recording() as recorder:
        made = torch.ones(KIB)
        made.add_(1).mul_(2)
        made[3:5].fill_(4.0)
        torch.mul(made, 2, out=made)
        made.copy_(made)
    assert recorder.tape(since=1).sizes.tolist() == [4 * KIB]


def test_a_block_is_as_large_as_its_storage():
    with recording() as recorder:
        kept = [torch.empty(3, KIB, dtype=dtype) for dtype in (torch.bool, torch.bfloat16, torch.int64)]
        kept += [torch.empty_strided((2, 2), (KIB, 1)), torch.empty(0)]
    assert recorder.tape(since=1).sizes.tolist() == [3 * KIB, 6 * KIB, 24 * KIB, 4 * KIB + 8, 0]


def test_what_autograd_keeps_is_seen():
    with recording() as recorder:
        leaf = torch.ones(KIB, requires_grad=True)
        result = (leaf.exp() * 1).sum()  # exp keeps its result for the backward pass, the product's is gone
        assert recorder.tape().live(0)[-1] == 8 * KIB + 4
    with recording() as recorder:
        leaf = torch.ones(KIB, requires_grad=True)
        result = leaf.exp().sum()
        result.backward()
        del result
    assert recorder.tape(since=1).live(0)[-1] == 8 * KIB  # the leaf, and its gradient


def test_what_autocast_makes_is_seen():
    weight = torch.nn.Linear(64, 64, bias=False)
    with recording() as recorder:
        recorder.call(weight.parameters(), "weights")
        recorder.mark("0:F1")
        rows = torch.ones(8, 64)
        with torch.autocast("cpu", torch.bfloat16):
            weight(rows)
            inside = recorder.tape(since=2)
    assert kinds_of(inside)[64 * 64 * 2] == "copies"  # kept as long as autocast
    assert kinds_of(inside)[8 * 64 * 2] == "temporaries"


def test_frees_that_follow_one_another_stand_in_the_order_of_their_blocks():
    def run(order):
        with recording() as recorder:
            held = {name: torch.empty(size * KIB) for size, name in enumerate("abc", 1)}
            for name in order:
                del held[name]
            kept = torch.empty(1)
            del kept
        return recorder.tape(since=1)

    assert run("cab").events.tolist() == run("abc").events.tolist() == [0, 1, 2, ~0, ~1, ~2, 3, ~3]


def test_frees_are_not_ordered_across_segments():
    with recording() as recorder:
        first, second = torch.empty(1), torch.empty(1)
        del second
        recorder.mark("0:F1")
        del first
    tape = recorder.tape(since=1)
    assert tape.events.tolist() == [0, 1, ~1, ~0]
    assert [tape.segment_at(moment) for moment in range(4)] == ["0:F0"] * 3 + ["0:F1"]


def test_a_tape_may_begin_late_and_leaves_out_what_lived_before():
    with recording() as recorder:
        before = torch.empty(KIB)
        recorder.mark("0:F1")
        inside = torch.empty(2 * KIB)
        del before
        recorder.mark("0:F2")
        del inside
    tape = recorder.tape(since=2)
    assert tape.events.tolist() == [0, ~0]
    assert tape.sizes.tolist() == [8 * KIB]
    assert (tape.segments, tape.starts.tolist()) == (("0:F1", "0:F2"), [0, 1])


def test_nothing_is_written_after_the_end():
    with recording() as recorder:
        kept = torch.empty(KIB)
        recorder.close()
        more = torch.empty(KIB)
        del kept, more
    assert recorder.tape(since=1).events.tolist() == [0]


def test_what_a_kernel_holds_lives_as_long_as_it_runs():
    with recording() as recorder:
        with recorder.holding(KIB, 2 * KIB, name="accumulators"):
            made = torch.empty(KIB)
        assert made.numel() == KIB
    tape = recorder.tape(since=1)
    assert tape.events.tolist() == [0, 1, 2, ~0, ~1]
    assert tape.live(0).tolist() == [KIB, 3 * KIB, 7 * KIB, 6 * KIB, 4 * KIB]
    assert tape.names[tape.ops[1]] == "accumulators"


def test_what_grows_up_to_a_share_or_is_there_after_some_rows():
    rows = 101
    with recording(rows=rows) as recorder:
        with recorder.up_to(0.5):
            grows, fixed = torch.empty(rows, KIB), torch.empty(KIB)
            with recorder.holding(8 * KIB, name="from the fourth row on", after=3):
                pass
        beyond = torch.empty(rows, KIB)
    assert grows.numel() == beyond.numel() > fixed.numel()
    tape = recorder.tape(since=1)
    assert tape.bytes_at(3).tolist() == [3 * 4 * KIB, 4 * KIB, 0, 3 * 4 * KIB]
    assert tape.bytes_at(4).tolist() == [4 * 4 * KIB, 4 * KIB, 8 * KIB, 4 * 4 * KIB]
    assert tape.bytes_at(rows).tolist() == [rows * 2 * KIB, 4 * KIB, 8 * KIB, rows * 4 * KIB]


def test_a_kernel_that_fails_holds_nothing_any_more():
    with recording() as recorder, contextlib.suppress(ZeroDivisionError), recorder.holding(KIB, name="held"):
        raise ZeroDivisionError
    assert recorder.tape(since=1).events.tolist() == [0, ~0]


def test_what_is_made_elsewhere_is_counted_apart():
    with recording() as recorder:
        with recorder.elsewhere():
            host = torch.empty(3 * KIB)
            gone = torch.empty(5 * KIB)
        device = torch.empty(KIB)
        del gone
        assert recorder.lies_elsewhere(host)
        assert recorder.lies_elsewhere(host.view(3, KIB))
        assert not recorder.lies_elsewhere(device)
        assert not recorder.lies_elsewhere(torch.empty(1))
    tape = recorder.tape(since=1)
    assert tape.live(1).tolist() == [0, 0, 4 * KIB, 4 * KIB, 4 * KIB + 4, 4 * KIB]
    assert tape.live_elsewhere(1).tolist() == [12 * KIB, 32 * KIB, 32 * KIB, *[12 * KIB] * 3]


def test_what_waits_on_the_host_comes_back_laid_out_as_it_was():
    with FakeMode() as mode, Recorder(mode=mode) as recorder:
        side = placement.Traced(recorder)
        given = torch.empty(2, 3, 4, 5).transpose(1, 2)
        assert side.to_device(side.to_host(given), given.device).stride() == given.stride()


def test_what_the_run_says_of_tensors_stands():
    weight, outside = torch.ones(KIB), torch.ones(2 * KIB)
    with recording() as recorder:
        recorder.call([weight, None, weight.view(2, -1)], "weights")
        batch = torch.ones(3 * KIB)
        recorder.call([batch], "batch")
        recorder.call([outside], "gradients")
    assert kinds_of(recorder.tape(since=1)) == {4 * KIB: "weights", 8 * KIB: "gradients", 12 * KIB: "batch"}


def test_the_rest_is_read_off_from_when_a_block_was_made_and_freed():
    with recording() as recorder:
        kept, passing = torch.empty(1 * KIB), torch.empty(2 * KIB)
        del passing
        recorder.mark("0:head")
        logits = torch.empty(3 * KIB)
        recorder.mark("0:headB")
        loss = torch.empty(4 * KIB)
        recorder.mark("0:B0")
        back = torch.empty(5 * KIB)
        del kept, logits, loss
        recorder.mark("0:step")
        del back
        state, work = torch.empty(6 * KIB), torch.empty(7 * KIB)
        del work
        recorder.mark("1:F0")
        stays = torch.empty(8 * KIB)
    assert state.numel() + stays.numel() == 14 * KIB
    assert kinds_of(recorder.tape(since=1)) == {
        4 * KIB: "activations",
        8 * KIB: "temporaries",
        12 * KIB: "logits",
        16 * KIB: "logits",
        20 * KIB: "temporaries",
        24 * KIB: "state",
        28 * KIB: "temporaries",
        32 * KIB: "temporaries",
    }


def test_stand_ins_are_asked_in_the_operators_place():
    asked = []

    def smaller(recorder, func, args, kwargs):
        asked.append((recorder, func, len(args), kwargs))
        return torch.empty(KIB)

    with recording(stand_ins={torch.ops.aten.exp.default: smaller}) as recorder:
        result = torch.ones(4, KIB).exp()
    assert result.shape == (KIB,)
    assert asked == [(recorder, torch.ops.aten.exp.default, 1, {})]
    tape = recorder.tape(since=1)
    assert tape.names[tape.ops[1]] == "aten.exp.default"
    assert tape.sizes[1] == 4 * KIB


def test_a_kernel_that_is_not_launched_moves_each_of_its_tensors_once():
    rows, fixed = torch.empty(101, 8, device="meta"), torch.empty(64, device="meta")
    with Recorder(rows=101) as recorder:
        recorder.mark("0:F0")
        recorder.launched((rows, fixed, rows, 64, None, torch.float32))
    tape = recorder.tape(since=1)
    recorder.launched((rows,))  # nothing is written after the end
    assert recorder.notes == {BY_BYTES}
    assert tape.work[0, KINDS.index("other")].tolist() == [0, fixed.nbytes, 1]
    assert tape.work_per_row[0, KINDS.index("other")].tolist() == [0, rows.nbytes / 101, 0]


def test_what_keeps_the_host_busy_counts_as_operators():
    with recording() as recorder:
        torch.ones(4)
        recorder.busies_host(2.5)
    tape = recorder.tape(since=1)
    recorder.busies_host(100.0)  # nothing is written after the end
    assert tape.work.sum(axis=(0, 1))[2] == 3.5
    assert recorder.tape(since=1).work.sum(axis=(0, 1))[2] == 3.5


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.int64, 1), (torch.bool, False)]
)
@pytest.mark.parametrize("closed", [False, True])
def test_a_fake_tensor_has_one_as_its_value(dtype, value, closed):
    with FakeTensorMode(), Recorder() as recorder:
        tensor = torch.empty((), dtype=dtype)
        if closed:
            recorder.close()
        assert tensor.item() == value
        assert type(tensor.item()) is type(value)


@pytest.mark.parametrize("mode", [FakeTensorMode, FakeMode])
def test_what_is_computed_of_plain_numbers_alone_keeps_its_value(mode):
    """Longformer's number of chunks: ``torch.div`` of two sizes makes a tensor, which is a size again."""
    with (fake := mode()), Recorder(mode=fake if mode is FakeMode else None) as recorder:
        recorder.mark("0:F0")
        chunks = torch.div(1024, 128, rounding_mode="trunc")
        assert torch.empty(4, chunks - 1).shape == (4, 7)
        assert torch.empty(4, chunks + 1).shape == (4, 9)
        assert (chunks * torch.empty((), dtype=torch.int64)).item() == 1, "one of the two is not known"


def test_a_real_tensor_keeps_its_value():
    with recording():
        assert torch.full((), 7.0).item() == 7.0


# -- rows ---------------------------------------------------------------------------------------------------------


def test_what_a_telling_number_of_rows_divides_grows_with_the_rows():
    rows = 101
    with Recorder(fake=False, rows=rows) as recorder:
        recorder.mark("0:F0")
        weight, batch = torch.ones(16, 8), torch.ones(rows, 16)
        result = batch @ weight
        fixed = weight @ weight.t()
    assert result.numel() + fixed.numel() == 8 * rows + 256
    tape = recorder.tape(since=1)
    assert tape.sizes.tolist() == [512, 0, 0, 1024]
    assert tape.per_row.tolist() == [0, 64, 32, 0]
    assert tape.bytes_at(3).tolist() == [512, 192, 96, 1024]
    product = KINDS.index("matmul fp32")
    assert tape.work[0, product].tolist() == [2 * 16 * 8 * 16, 512 + 2 * 512 + 1024, 2]
    assert tape.work_per_row[0, product].tolist() == [2 * 16 * 8, 64 + 32, 0]


# -- work ---------------------------------------------------------------------------------------------------------


def work_of(program, *tensors):
    """Work of a program by kind, as (FLOPs, bytes, calls)."""
    with recording() as recorder:
        result = program(*tensors)
    del result
    rows = recorder.tape(since=1).work[0]
    return {kind: tuple(row) for kind, row in zip(KINDS, rows, strict=True) if any(row)}


def test_products():
    left, right = torch.ones(6, 10), torch.ones(10, 14)
    assert work_of(torch.mm, left, right) == {"matmul fp32": (2 * 6 * 10 * 14, 4 * (60 + 140 + 84), 1)}
    batch = torch.ones(3, 6, 10, dtype=torch.bfloat16), torch.ones(3, 10, 14, dtype=torch.bfloat16)
    assert work_of(torch.bmm, *batch) == {"matmul bf16": (3 * 2 * 6 * 10 * 14, 2 * 3 * (60 + 140 + 84), 1)}
    half = torch.ones(6, 10, dtype=torch.float16), torch.ones(10, 14, dtype=torch.float16)
    assert work_of(torch.mm, *half)["matmul fp16"][0] == 2 * 6 * 10 * 14
    bias = work_of(torch.addmm, torch.ones(14), left, right)
    assert bias == {"matmul fp32": (2 * 6 * 10 * 14, 4 * (14 + 60 + 140 + 84), 1)}


def test_a_product_that_is_added_to_a_tensor_of_another_type_is_one_of_its_factors():
    """As Liger's loss adds up a gradient of the head in float32."""
    left, right = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((6, 10), (10, 14)))
    total = torch.empty(6, 14, device="meta")
    func, args, kwargs = torch.ops.aten.addmm.dtype_out, (total, left, right, torch.float32), {"out": total}
    kind, flops, _ = work.work_of(func, args, kwargs, total, [total])
    assert (kind, flops) == ("matmul bf16", 2 * 6 * 10 * 14)
    one, _ = operator_of(func, args, kwargs, [total], flops)
    assert (one.arithmetic, one.m, one.n, one.k) == ("bf16", 6, 14, 10)


@pytest.mark.parametrize("fake", [True, False])
def test_a_product_is_added_to_the_tensor_that_is_given_for_the_result(fake):
    with FakeMode() if fake else contextlib.nullcontext() as mode, Recorder(fake=fake, mode=mode) as recorder:
        total, left, right = torch.zeros(6, 14), torch.ones(6, 10), torch.ones(10, 14)
        recorder.mark("0:B0")
        assert torch.addmm(total, left, right, out=total) is total
    tape = recorder.tape(since=1)
    assert not tape.sizes.size
    assert tape.work[0][KINDS.index("matmul fp32")][0] == 2 * 6 * 10 * 14
    assert fake or bool((total == 10).all())


def test_a_linear_layer_costs_three_products():
    layer = torch.nn.Linear(10, 14, bias=False)
    rows = torch.ones(6, 10, requires_grad=True)
    found = work_of(lambda: layer(rows).sum().backward())
    assert found["matmul fp32"][0] == 3 * 2 * 6 * 10 * 14


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("made", [torch.nn.Conv1d, torch.nn.ConvTranspose1d])
def test_a_convolution_costs_three_products_of_each_group(made, groups):
    layer = made(8, 8, 3, groups=groups, bias=False, padding=1)
    rows = torch.ones(2, 8, 20, requires_grad=True)
    with FakeMode():  # a processor has kernels of its own
        found = work_of(lambda: layer(rows).sum().backward())
    assert found["matmul fp32"][0] == 3 * 2 * (2 * 20) * 3 * 8 * 8 / groups


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, "matmul fp32"), (torch.bfloat16, "attention")])
def test_attention(dtype, kind):
    batch, heads, rows, width = 2, 3, 16, 8
    shape = (batch, heads, rows, width)
    query, key, value = (torch.ones(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    square = 2 * batch * heads * rows * rows * width
    forward = work_of(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True))
    assert forward[kind][0] == 2 * square
    both = work_of(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward())
    assert both[kind][0] == (2 + 5) * square


def test_a_block_of_a_ring_does_as_much_as_a_causal_kernel_of_twice_its_square(monkeypatch):
    """Nothing of it is left out; other attention between texts of two lengths, of one process, is what it is."""
    query = torch.empty(2, 4, 64, 16, requires_grad=True)
    block = torch.empty(2, 4, 32, 16, requires_grad=True)

    def flops():
        both = work_of(lambda: F.scaled_dot_product_attention(query, block, block).sum().backward())
        return max(found[0] for found in both.values())

    alone = flops()
    assert alone == (2 + 5) * 2 * 2 * 4 * 64 * 32 * 16
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert flops() == 2 * alone


def test_the_rest_moves_bytes():
    tensor = torch.ones(KIB)
    assert work_of(torch.exp, tensor) == {"other": (0, 8 * KIB, 1)}
    assert work_of(lambda: tensor.exp().view(2, -1).t()) == {"other": (0, 8 * KIB, 1)}  # views cost nothing
    assert work_of(lambda: tensor.add_(1))["other"][2] == 1  # no block, but work
    many = [torch.ones(KIB) for _ in range(3)]
    assert work_of(lambda: torch._foreach_exp(many)) == {"other": (0, 6 * 4 * KIB, 1)}
    assert work_of(lambda: torch._foreach_mul_(many, 2))["other"][2] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [False, True])
def test_grouped_products_do_what_the_products_of_their_experts_do(dtype, groups):
    """Forward, and backward for the rows and for the weights; PyTorch's own counter leaves them out."""
    rows, wide, narrow, experts = 24, 32, 16, 4
    recorder = Recorder(fake=True, stand_ins=without_values(), groups=groups)
    with FakeTensorMode(), recorder:
        recorder.mark("0:F0")
        given, weights = torch.empty(rows, wide, dtype=dtype), torch.empty(experts, wide, narrow, dtype=dtype)
        offsets = torch.empty(experts, dtype=torch.int32)
        out = torch._grouped_mm(given, weights, offs=offsets)
        back = torch._grouped_mm(out, weights.transpose(1, 2), offs=offsets)
        slope = torch._grouped_mm(given.t(), out, offs=offsets)
        assert [tuple(one.shape) for one in (out, back, slope)] == [
            (rows, narrow),
            (rows, wide),
            (experts, wide, narrow),
        ]
    tape = recorder.tape(since=1)
    at_once = groups and dtype == torch.bfloat16
    calls = 1 if at_once else experts
    kind = KINDS.index("matmul bf16" if dtype == torch.bfloat16 else "matmul fp32")
    assert tape.work[0, kind, 0] == 3 * 2 * rows * wide * narrow
    assert tape.work[0, kind, 2] == 3 * calls
    found, products = Operators.from_rows(tape.operators[1:]), tape.calls[1:]  # the first is what makes the tensors
    assert products[:, 2].tolist() == [calls] * 3
    assert found.batch.tolist() == [experts / calls] * 3
    one = rows / experts  # rows of an expert
    shapes = [[*shape] for shape in zip(found.m, found.n, found.k, strict=True)]
    assert shapes == [[one, narrow, wide], [one, wide, narrow], [wide, narrow, one]]
    assert (found.batch * found.m * found.n * found.k * 2 == found.flops).all()
    size = dtype.itemsize * (rows * wide + rows * narrow + experts * wide * narrow)
    assert found.moved_bytes.tolist() == [(size + 4 * experts) / calls] * 3


@pytest.mark.parametrize(
    ("norm", "width", "notes"),
    [
        (torch.nn.BatchNorm2d(6), 5 * 8 * 3, {CONVOLVES}),
        (torch.nn.BatchNorm1d(6), 5 * 24, {CONVOLVES}),
        (torch.nn.GroupNorm(2, 6), 3 * 8 * 3, set()),
        (torch.nn.LayerNorm((8, 3)), 8 * 3, set()),
    ],
)
def test_what_is_normalized_together_is_a_row(norm, width, notes):
    """An image's width was taken for it: batch norms were told thirty times as slow as they are."""
    images = torch.randn(5, 6, 24, requires_grad=True)
    with recording() as recorder:
        given = images if isinstance(norm, torch.nn.BatchNorm1d) else images.view(5, 6, 8, 3)
        norm(given).sum().backward()
    found = Operators.from_rows(recorder.tape(since=1).operators)
    mine = found.kind == TIMED_KINDS.index("norm")
    assert found.n[mine].tolist() == [width] * 2  # forward and backward
    assert found.m[mine].tolist() == [images.numel() / width] * 2
    assert recorder.notes == notes


@pytest.mark.parametrize(
    ("layer", "notes"),
    [
        (torch.nn.Conv2d(3, 8, 4, stride=4), set()),  # patches
        (torch.nn.Conv2d(3, 6, 3, groups=3), {CONVOLVES}),
        (torch.nn.Conv1d(4, 4, 3, groups=4), set()),  # Mamba's
    ],
)
def test_a_network_of_convolutions_is_told_from_one_that_has_some(layer, notes):
    with recording() as recorder:
        layer(torch.randn(2, layer.in_channels, *[16] * len(layer.kernel_size)))
    assert recorder.notes == notes


def test_labels_that_are_looked_for_are_no_experts():
    recorder = Recorder(fake=True, stand_ins=without_values())
    with FakeTensorMode(), recorder:
        labels = torch.zeros(4, dtype=torch.int64)
        assert (labels >= 0).nonzero().shape == (4, 1)  # as DeBERTa's loss does
        assert not recorder.notes
        (torch.zeros(2, 6) > 0).nonzero()
        assert recorder.notes == {BALANCED}


def test_a_trace_says_where_it_answers_for_values_that_it_has_not():
    """All are finite and none is special; Longformer's classifier, which has special tokens, is told so."""
    recorder = Recorder(fake=True, stand_ins=without_values())
    with FakeTensorMode(), recorder:
        values = torch.zeros(4)
        assert torch.isfinite(values).all()
        assert torch.isfinite(values.sum())  # of a loss
        assert not torch.isnan(values.sum())
        assert not torch.isinf(values.sum())
        assert not values[0] > 0.5  # a layer that is dropped now and then
        assert not recorder.notes
        assert not (values > 0).any().item()
    assert recorder.guessed
    (note,) = recorder.notes
    assert re.match(r"test_recorder.py, line \d+, asks whether any of a batch's values is special", note)


def test_a_script_is_told_the_same_of_values_that_are_not_known():
    recorder = Recorder(fake=True, stand_ins=without_values())
    with FakeTensorMode(), recorder, KnownValues(recorder):
        values = torch.empty(4)
        assert torch.isfinite(values).all()
        assert torch.isfinite(values.sum())
        assert not values[0] > 0.5
        assert values.sum().item() == 1
        assert not recorder.notes
        assert not (values > 0).any()
    assert recorder.guessed
    (note,) = recorder.notes
    assert re.match(r"test_recorder.py, line \d+, asks whether any of a batch's values is special", note)


def test_one_number_that_is_drawn_for_each_row_is_known_but_decides_nothing():
    recorder, schedule = Recorder(fake=True, stand_ins=without_values()), torch.arange(10).flip(0)
    with FakeMode(), recorder, KnownValues(recorder):
        drawn = torch.normal(mean=0.0, std=1.0, size=(4,)).sigmoid()
        places = (drawn * 10).long()
        found = [(schedule == one).nonzero().item() for one in schedule[places]]
        assert schedule[found].shape == (4,)
        assert set(found) <= set(range(10))
        assert not (drawn < 2.0).any(), "a condition does not hold, as of what is not known"
        assert drawn[0].item() == 1
        with pytest.raises(ModelError, match="only a run on real weights tells"):
            torch.randint(0, 10, (4,))[0].item()  # which may be the size of a picture
        assert torch.rand([]).item() == torch.rand(1).item() == 1


def test_of_rows_that_differ_conditions_are_known_and_numbers_are_not():
    recorder, mode = Recorder(fake=True, stand_ins=without_values()), FakeMode()
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    with mode, recorder, KnownValues(recorder) as known:
        fake = torch.empty(2, 3, dtype=torch.int64)
        known.tell(fake, mask, mixed=True)
        assert (fake == 1).any()
        assert not (fake == 1).all()
        assert torch.tensor([3, 4]).max().item() == 4, "of no row"
        for asked in (lambda: fake.sum().item(), lambda: int((fake == 1).sum(1).max()), fake[0, 0].item):
            with pytest.raises(ModelError, match="only a run on real weights tells"):
                asked()
        for places in (lambda: fake[fake == 1], fake.unique):
            with pytest.raises(DynamicOutputShapeException):
                places()
    assert not recorder.guessed


def test_fractions_of_a_batch_are_known_until_something_is_drawn_into_them():
    recorder, real = Recorder(fake=True, stand_ins=without_values()), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    with FakeMode(), recorder, KnownValues(recorder) as known:
        labels = torch.empty(2, 2)
        known.tell(labels, real)
        assert (labels > 0.5).any()
        assert labels.sum().item() == 2
        assert not recorder.guessed
        labels.sub_(1.0)
        assert not (labels > 0.5).any()
        assert real.sum() == 2, "the script's batch, which the next micro-step takes, too"
        assert not recorder.guessed
        torch.linalg.qr(labels.half())  # the CPU has none of float16
        labels.normal_()
        assert not (labels > 0.5).any()
    assert recorder.guessed


def test_several_tensors_whose_sizes_depend_on_known_values_are_known():
    recorder, real, mode = Recorder(fake=True, stand_ins=without_values()), torch.tensor([0, 4, 4, 9]), FakeTensorMode()
    ends = mode.from_tensor(real)
    with mode, recorder, KnownValues(recorder) as known:
        known.tell(ends, real)
        once, counts = torch.unique_consecutive(ends, return_counts=True)
        assert once.shape == (3,)
        assert counts.max().item() == 2


def test_a_model_that_goes_from_image_to_image_is_told_of_its_batch():
    """As Qwen's and SmolVLM are: how large each image is, and which ones only pad a row."""
    recorder, sizes = Recorder(fake=True, stand_ins=without_values()), torch.tensor([[1, 2, 4], [1, 2, 4], [1, 4, 4]])
    with FakeTensorMode(), recorder, lists_of_tensors(), KnownValues(recorder) as known:
        grid, images = torch.empty(3, 3, dtype=torch.int64), torch.empty(3, 2, 8, 8)
        known.tell(grid, sizes)
        assert torch.tensor([size.prod() for size in grid]).tolist() == [8, 8, 16]
        padding = (images == 0.0).sum(dim=(-1, -2, -3)) == images[0].numel()
        assert images[~padding].shape == images.shape
        assert (~padding).view(3, 1).sum(1).tolist() == [1, 1, 1]


@pytest.mark.parametrize("rows", [None, 101])
def test_what_is_done_for_each_row_grows_with_them(rows):
    """Blocks that are there together grow, those that follow one another are one; calls and work grow."""
    with Recorder(fake=True, rows=rows, mode=(mode := FakeMode())) as recorder, mode:
        weight, images = torch.empty(16, 16), [torch.empty(4, 16) for _ in range(101)]
        recorder.mark("0:F0")
        kept = [one @ weight for one in images]
        for one in kept:
            one.clone()
    tape = recorder.tape(since=1)
    three = rows and 3
    assert tape.live(three or 0).max() == pytest.approx((three or 101) * 256 + 256)
    calls = tape.calls[:, 2] + tape.calls[:, 3] * (three or 0)
    products = tape.operators[tape.calls[:, 1].astype(int), 0] == TIMED_KINDS.index("product")
    assert calls[products].tolist() == [three or 101]
    work = (tape.work + tape.work_per_row * (three or 0)).sum(axis=(0, 1))
    assert work[[0, 2]].tolist() == [2 * 4 * 16 * 16 * (three or 101), 2 * (three or 101)]


def test_who_waits_for_a_collective_gets_what_it_made():
    """``wait_tensor`` gives back its argument, where its fake kernel makes another tensor."""
    recorder = Recorder(fake=True, stand_ins=without_values())
    with mock.patch.dict(os.environ), fake_world(2), FakeTensorMode(), recorder:
        recorder.mark("0:F0")
        part = torch.empty(3, KIB)
        whole = all_gather_tensor(part, gather_dim=0, group=torch.distributed.group.WORLD) + 1
    assert whole.shape == (6, KIB)
    assert recorder.tape(since=1).sizes.tolist() == [12 * KIB, 24 * KIB, 24 * KIB]


def test_what_an_operator_moves_grows_with_the_rows_tensor_by_tensor():
    with Recorder(fake=False, rows=101) as recorder:
        recorder.mark("0:F0")
        weight, batch = torch.ones(16, 8), torch.ones(101, 16)
        batch @ weight
    tape = recorder.tape(since=1)
    at_three = Operators.from_rows(tape.operators + 3 * tape.operators_per_row)
    product = at_three.kind == TIMED_KINDS.index("product")
    assert at_three.moved_bytes[product].tolist() == [4 * (3 * 16 + 16 * 8 + 3 * 8)]
    assert at_three.m[product].tolist() == [3]


@pytest.mark.parametrize("fake", [True, False])
def test_gradients_are_added_in_place_where_autograd_holds_the_first_alone(fake):
    """As they are without a dispatch mode; a view has its base beside it, and is not added to."""
    added = {}
    for name, forward in {"fresh": torch.sin, "view": lambda y: y.t().contiguous()}.items():
        with FakeTensorMode() if fake else contextlib.nullcontext(), Recorder(fake=fake) as recorder:
            given = torch.ones(8, 8, requires_grad=True)
            made = given * 2
            recorder.mark("0:B0")
            (made.cos().sum() + forward(made).sum()).backward()
        tape = recorder.tape(since=1)
        added[name] = [tape.names[op] for op in tape.ops[tape.sizes == 4 * 8 * 8]].count("aten.add.Tensor")
        assert fake or given.grad.allclose(2 * (1 if name == "view" else made.cos()) - 2 * made.sin())
    assert added == {"fresh": 0, "view": 1}
