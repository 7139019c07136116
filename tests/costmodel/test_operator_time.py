"""Seconds of operators: never below the limit, never less for more work, the same figures from the same rows."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autofit.costmodel.seconds.operator_time import (
    ARITHMETICS,
    TIMED_KINDS,
    Operator,
    Operators,
    bound_seconds,
    coefficients,
    seconds,
)
from autofit.costmodel.tracing.operator_table import operator_of as traced_operator
from autofit.costmodel.tracing.recorder import Recorder
from autofit.costmodel.tracing.work import work_of
from autofit.machine.gpu_catalogue import cards, find
from autofit.system.errors import InputError
from tests.bench import fit_time_model, own_operators
from tests.bench.time_rows import operator_of, read_kernels

ROWS = Path(__file__).parents[1] / "data" / "operator_times"
KNOWN = [card for card in cards() if card.capability is not None]
CARDS = [find(name) for name in ("P4", "V100 PCIe 32 GB", "T4", "A100 PCIe 40 GB", "L4", "H100 SXM 80 GB", "4090")]


@pytest.fixture(scope="module")
def kept():
    """The rows that the shipped coefficients were fitted to."""
    rows, unexpressed = read_kernels(ROWS)
    assert not unexpressed
    return rows


def product(m, n, k, *, batch=1, arithmetic="fp32"):
    size = 4 if arithmetic in {"fp32", "tf32"} else 2
    moved = size * batch * (m * k + k * n + m * n)
    return Operator(
        kind="product",
        arithmetic=arithmetic,
        flops=2 * batch * m * n * k,
        moved_bytes=moved,
        batch=batch,
        m=m,
        n=n,
        k=k,
    )


def streaming(kind, m, n):
    return Operator(kind=kind, moved_bytes=8.0 * m * n, m=m, n=n)


def attention(batch, length, width, *, backward=False):
    flops = (10 if backward else 4) * batch * length * length * width
    return Operator(
        kind="attention", arithmetic="bf16", backward=backward, flops=flops, moved_bytes=8.0 * batch * length * width,
        batch=batch, m=length, n=length, k=width,
    )  # fmt: skip


SIZES = np.unique(np.geomspace(1, 20000, 60).astype(int)).tolist()
LADDERS = {
    "rows": [product(size, 512, 512) for size in SIZES],
    "columns": [product(300, size, 512) for size in SIZES],
    "k loop": [product(300, 512, size) for size in SIZES],
    "batch": [product(100, 80, 60, batch=size) for size in SIZES[1:]],
    "tensor cores": [product(size, 1024, 1024, arithmetic="bf16") for size in SIZES],
    "norm": [streaming("norm", size, 700) for size in SIZES],
    "width of a norm": [streaming("norm", 500, size) for size in SIZES],
    "softmax": [streaming("softmax", 500, size) for size in SIZES],
    "elementwise": [streaming("elementwise", size, 100) for size in SIZES],
    "attention": [attention(16, size, 64) for size in SIZES],
    "heads": [attention(size, 512, 64, backward=True) for size in SIZES],
}


@pytest.mark.parametrize("ladder", LADDERS)
def test_more_work_never_takes_less_time(ladder):
    for card in CARDS:
        found = seconds(Operators.of(LADDERS[ladder]), card).seconds
        assert (np.diff(found) >= -1e-9 * found[1:]).all(), card.name


def test_nothing_is_faster_than_the_card_allows_nor_without_an_end():
    operators = Operators.of([one for ladder in LADDERS.values() for one in ladder])
    for card in KNOWN:
        found = seconds(operators, card)
        assert (found.seconds >= bound_seconds(operators, card)).all(), card.name
        assert np.isfinite(found.seconds).all()
        assert (found.log_std > 0).all()


def test_a_large_product_comes_near_the_peak_but_where_power_is_short():
    big = Operators.of([product(8192, 8192, 8192), product(8192, 8192, 8192, arithmetic="bf16")])
    for name, least, most in [("A100 SXM 80 GB", 0.7, 0.95), ("H100 SXM 80 GB", 0.6, 0.95)]:
        share = bound_seconds(big, find(name)) / seconds(big, find(name)).seconds
        assert (share >= least).all()
        assert (share <= most).all()
    starved = bound_seconds(big, find("T4")) / seconds(big, find("T4")).seconds
    assert starved[0] < 0.5, "70 W do not keep 40 SMs at their boost clock"


SIDES = st.integers(1, 60_000)


@given(
    sides=st.tuples(SIDES, SIDES, SIDES), more=st.sampled_from([(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)]),
    batch=st.integers(1, 512), arithmetic=st.sampled_from(ARITHMETICS), card=st.sampled_from(KNOWN),
)  # fmt: skip
def test_any_product_on_any_card_takes_longer_where_it_is_larger(sides, more, batch, arithmetic, card):
    """But for rows that are no whole vectors on Hopper's tensor cores: there longer ones may win."""
    if card.capability >= (9, 0) and arithmetic != "fp32":
        sides = tuple(8 * -(-side // 8) for side in sides)
    large = tuple(side * times for side, times in zip(sides, more, strict=True))
    both = Operators.of([product(*size, batch=batch, arithmetic=arithmetic) for size in (sides, large)])
    told = seconds(both, card)
    assert told.seconds[1] >= told.seconds[0]
    assert (told.seconds >= bound_seconds(both, card)).all()
    assert np.isfinite(told.seconds).all()
    assert (np.isfinite(told.log_std) & (told.log_std > 0)).all()


def test_rows_that_are_no_whole_vectors_are_slow_on_hopper_alone():
    """Measured on an H100: GPT-2's 50,257 columns 93 to 150 TFLOP/s, 2,052 columns 200, their neighbours 700."""
    sizes = (50264, 50257, 2056, 2052)
    wide = Operators.of([product(8192, n, 2048, arithmetic="bf16") for n in sizes])
    for name, slower in (("H100 SXM 80 GB", True), ("A100 SXM 80 GB", False)):
        padded, odd, aligned, unaligned = seconds(wide, find(name)).seconds
        assert (odd > 4 * padded) == (unaligned > 2 * aligned) == slower
    full = seconds(Operators.of([product(8192, n, 2048) for n in sizes[:2]]), find("H100 SXM 80 GB")).seconds
    assert full[1] < 1.01 * full[0], "float32 is not multiplied on tensor cores"


def test_attention_takes_half_of_a_square_and_its_slower_kernel_longer():
    one = attention(64, 2048, 128)
    square = dataclasses.replace(one, flops=2 * one.flops)
    slower = dataclasses.replace(one, layout="tt")
    found = seconds(Operators.of([one, square, slower]), find("H100 SXM 80 GB")).seconds
    assert found[1] == pytest.approx(2 * found[0], rel=0.1)
    assert found[2] > 2 * found[0]


def test_the_operators_of_an_h100_are_predicted_as_well_as_the_page_says():
    """Each program's operators together, within the tenth that the page tells."""
    found = own_operators.steps_of(own_operators.OWN_CARD)
    fit = coefficients()["fit"]
    assert len(found.programs) >= 6
    assert np.abs(np.log(found.predicted(fit) / found.seconds)).max() < 0.2
    rows = own_operators.read_own(own_operators.OWN_CARD)
    state = rows.where(rows.group == "quantized")
    assert own_operators.predicted(state, fit) == pytest.approx(state.seconds, rel=0.2)


def test_a_card_with_a_larger_cache_or_more_power_is_no_slower():
    card = find("T4")
    operators = Operators.of([one for ladder in LADDERS.values() for one in ladder])
    before = seconds(operators, card).seconds
    for better in ({"l2_bytes": 4 * card.l2_bytes}, {"watts": 2 * card.watts}):
        after = seconds(operators, dataclasses.replace(card, **better)).seconds
        assert (after <= before * (1 + 1e-9)).all(), better


def test_a_card_whose_figures_are_missing_is_refused():
    card = next(card for card in cards() if card.capability is None)
    with pytest.raises(InputError, match="the catalogue has no capability, sms"):
        seconds(Operators.of([product(8, 8, 8)]), card)
    with pytest.raises(InputError, match="the catalogue has no watts"):
        seconds(Operators.of([product(8, 8, 8)]), dataclasses.replace(find("T4"), watts=None))


def test_a_card_that_the_fit_has_not_seen_has_the_wider_interval():
    one = Operators.of([product(512, 512, 512)])
    assert seconds(one, find("L4")).log_std > seconds(one, find("T4")).log_std


def test_what_launches_nothing_takes_no_time():
    assert seconds(Operators.of([Operator(kind="nothing")]), find("T4")).seconds == 0


def test_an_empty_list_of_operators_is_none():
    assert len(seconds(Operators.of([]), find("T4")).seconds) == 0


def test_every_card_of_nvidia_has_the_figures():
    for card in KNOWN:
        assert card.sms
        assert card.l2_bytes
        assert card.boost_hz
        assert card.watts
        lanes = card.fp32 / (2 * card.sms * card.boost_hz)
        assert round(lanes) in {64, 128} or abs(lanes / 128 - 1) < 0.02, card.name


@pytest.mark.slow
def test_the_shipped_coefficients_are_those_of_the_kept_rows(kept):
    """Of one stage that is quick: the whole fit is the same program."""
    rows = kept
    shipped = coefficients()
    assert sorted(set(rows.card.tolist())) == shipped["cards"]
    assert len(rows.thinned(fit_time_model.MOST)) == shipped["rows"]
    elementwise = rows.where(rows.group == "elementwise")
    fit = fit_time_model.fitted(elementwise)
    assert fit["memory"] == shipped["fit"]["memory"]
    assert fit == fit_time_model.fitted(elementwise), "the same rows give the same digits"


def test_the_kept_rows_are_predicted_as_well_as_the_page_says(kept):
    rows = kept.thinned(150)
    found = coefficients()
    error = np.abs(fit_time_model.predicted(rows, found["fit"]) / rows.seconds - 1)
    assert np.median(error) < 0.10
    assert np.quantile(error, 0.9) < 0.35


@pytest.mark.slow
def test_the_fit_finds_the_coefficients_that_made_the_rows(kept):
    rows = kept.where(kept.group == "elementwise").thinned(20)
    truth = {part: dict(its) for part, its in coefficients()["fit"].items()}
    truth["memory"] |= {"hbm": float(np.log(0.6)), "gddr": float(np.log(0.5))}
    made = dataclasses.replace(rows, seconds=fit_time_model.predicted(rows, truth))
    fit = fit_time_model.fitted(made)
    assert fit["memory"]["hbm"] == pytest.approx(np.log(0.6), abs=0.01)
    assert fit["memory"]["gddr"] == pytest.approx(np.log(0.5), abs=0.01)


@pytest.mark.slow
def test_folds_hold_each_card_out_once(kept):
    rows = kept.thinned(3)
    held = []
    for cards_out, others, mine in fit_time_model.folds(rows, 3):
        assert not set(rows.card[others]) & set(cards_out)
        held.extend(mine.tolist())
    assert sorted(held) == list(range(len(rows)))


def test_a_row_says_why_it_cannot_be_expressed():
    assert "no law of it" in operator_of({"op": "conv", "B": "1", "H": "2", "latency_ms": "1"})
    assert "a size is missing" in operator_of({"op": "linear", "B": "", "M": "x", "N": "1", "K": "1"})
    summed = operator_of({"op": "bmm", "B": "2", "M": "3", "N": "5", "K": "7"})
    assert (summed.m, summed.k, summed.n) == (3, 5, 7), "N is what is summed over"


def test_a_folder_without_rows_is_refused(tmp_path):
    with pytest.raises(InputError, match="has neither"):
        read_kernels(tmp_path)


def test_a_trace_keeps_shapes_layouts_and_bytes():
    left, weight = torch.ones(6, 8), torch.ones(4, 8)
    with Recorder(fake=False) as recorder:
        recorder.mark("step")
        out = left @ weight.T
        torch.bmm(torch.ones(2, 3, 5), torch.ones(2, 5, 7))
        out.add_(1.0)
        torch.softmax(out, dim=-1)
    tape = recorder.tape(since=1)
    found = {}
    for _, index, calls, _ in tape.calls:
        row = tape.operators[int(index)]
        found.setdefault(TIMED_KINDS[int(row[0])], []).append((calls, row))
    products = [row for _, row in found["product"]]
    assert [tuple(row[6:]) for row in products] == [(1, 6, 4, 8), (2, 3, 7, 5)]
    assert [int(row[2]) for row in products] == [1, 0], "the weight stands transposed"
    assert found["softmax"][0][1][5] == 2 * 4 * 24
    assert 2 * 4 * 24 in {row[5] for _, row in found["elementwise"]}, "read and written once, in place"


def moved_by(func, *args, **kwargs):
    """Kind, bytes and FLOPs of an operator on tensors without values."""
    made = func(*args, **kwargs)
    outputs = [made] if isinstance(made, torch.Tensor) else list(made)
    flops = work_of(func, args, kwargs, made, outputs)[1]
    return traced_operator(func, args, kwargs, outputs, flops)[0]


def test_what_only_writes_reads_nothing_and_a_loss_reads_what_it_picks():
    ops, logits = torch.ops.aten, torch.empty(64, 1000, device="meta")
    target, weight = torch.empty(64, dtype=torch.int64, device="meta"), None
    assert moved_by(ops.zeros_like.default, logits).moved_bytes == logits.nbytes
    assert moved_by(ops.nll_loss_forward.default, logits, target, weight, 1, -100).moved_bytes < 2 * target.nbytes
    gradient = torch.empty((), device="meta")
    backward = (gradient, logits, target, weight, 1, -100, torch.empty((), device="meta"))
    assert moved_by(ops.nll_loss_backward.default, *backward).moved_bytes == pytest.approx(logits.nbytes, rel=0.01)


def test_a_square_that_no_mask_halves_counts_twice():
    ops = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    query = torch.empty(2, 4, 128, 64)
    causal, full = (moved_by(ops, query, query, query, 0.0, skips) for skips in (True, False))
    assert full.flops == 2 * causal.flops == 2 * 4 * 2 * 4 * 128 * 128 * 64


def test_tf32_and_fp16_are_what_a_plan_computes_in():
    operators = Operators.of([product(8, 8, 8), product(8, 8, 8, arithmetic="bf16"), streaming("norm", 4, 4)])
    names = [ARITHMETICS[code] for code in operators.computed_in(tf32=True, fp16=True).arithmetic]
    assert names == ["tf32", "fp16", "fp32"]


def test_the_laws_need_no_torch():
    code = "import sys; import autofit.costmodel.seconds.operator_time; print(json.dumps('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", f"import json; {code}"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False
