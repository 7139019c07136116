"""Monte Carlo arithmetic: what is rounded, and by how much."""

import contextlib
from dataclasses import replace

import pytest
import torch

from autofit.training.guard.rounding import Rounding, coded_at_random, rounded, rounded_at_random

BF16 = Rounding(product_bits=7, state_bits=32, seed=1)


@pytest.fixture
def noise():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


@pytest.mark.parametrize(("bits", "dtype"), [(7, torch.bfloat16), (10, torch.float16)])
def test_a_rounded_value_is_a_neighbour_of_that_format(noise, bits, dtype):
    values = noise(10_000)
    found = rounded_at_random(values, bits, seed=1)
    assert torch.equal(found, found.to(dtype).float()), "the format holds it"
    assert ((found - values).abs() < values.abs() * 2.0**-bits).all()
    assert float((found - values).mean()) == pytest.approx(0.0, abs=3 * 2.0**-bits / 100), "up and down alike"
    nearest = (values.to(dtype).float() - values).square().mean()
    assert float((found - values).square().mean() / nearest) == pytest.approx(2.0, rel=0.1)


def test_the_same_value_is_rounded_the_same_way(noise):
    values = noise(1000)
    assert torch.equal(rounded_at_random(values, 7, 1), rounded_at_random(values.clone(), 7, 1))
    assert not torch.equal(rounded_at_random(values, 7, 1), rounded_at_random(values, 7, 2))


def test_special_values_stay_and_strides_too():
    values = torch.tensor([[0.0, float("inf")], [-float("inf"), 1.0]]).t()
    found = rounded_at_random(values, 7, 1)
    assert torch.equal(found, values)
    assert found.stride() == values.stride()


def test_products_are_rounded_forward_and_backward_and_nothing_else(noise):
    weight, rows = noise(64, 64).requires_grad_(), noise(32, 64)
    exact = rows @ weight
    exact.square().sum().backward()
    gradient, weight.grad = weight.grad, None
    with rounded(BF16):
        found = rows @ weight
        assert torch.equal(rows * 3 + 1, rows.mul(3).add(1))
        assert torch.equal(torch.exp(rows), rows.exp())
        found.square().sum().backward()
    for one, other in ((found.detach(), exact.detach()), (weight.grad, gradient)):
        assert 2e-3 < float((one - other).norm() / other.norm()) < 2e-2
    assert torch.equal(rows @ weight, exact), "it ends with the block"


def test_attention_is_rounded_but_not_its_mask(noise):
    query, key, value = (noise(1, 2, 8, 16) for _ in range(3))
    mask = torch.full((8, 8), torch.finfo(torch.float32).min).triu(1)[None, None]
    attention = torch.nn.functional.scaled_dot_product_attention
    exact = attention(query, key, value, attn_mask=mask)
    with rounded(BF16):
        found = attention(query, key, value, attn_mask=mask)
    assert torch.isfinite(found).all()
    assert 1e-3 < float((found - exact).norm() / exact.norm()) < 3e-2


def test_state_has_few_levels_between_steps(noise):
    weight = torch.nn.Parameter(noise(64, 64))
    small = torch.nn.Parameter(noise(8))
    optimizer = torch.optim.AdamW([weight, small], fused=True)
    with rounded(Rounding(product_bits=20, state_bits=8, seed=1)):
        weight.grad, small.grad = noise(64, 64), noise(8)
        optimizer.step()
    moment = optimizer.state[weight]["exp_avg"]
    wanted = 0.1 * weight.grad
    assert moment[:4].unique().numel() < 200, "those of a block"
    assert 1e-3 < float((moment - wanted).norm() / wanted.norm()) < 3e-2
    assert torch.allclose(optimizer.state[small]["exp_avg"], 0.1 * small.grad), "small ones stay in 32 bits"


def test_codes_are_coarse_where_values_are_small():
    values = torch.tensor([1.0, 0.5, 1e-3, 1e-9]).repeat(64)
    found = coded_at_random(values, 8, seed=1)
    assert torch.allclose(found[::4], values[::4], atol=0.02)
    assert float((found[1::4] - 0.5).abs().max()) < 0.02
    assert 0 < float((found[2::4] - 1e-3).abs().max()) < 1e-3
    assert torch.equal(found[3::4], torch.zeros(64))


def test_layer_norm_adds_its_gradients_up_as_its_kernel_for_a_cpu_does(noise):
    rows, outwards = noise(8192, 16), noise(8192, 16) * 1e-3 + 1e-4

    def gradients(dtype="float32", rounding=None):
        norm, given = torch.nn.LayerNorm(16), rows.clone().to(getattr(torch, dtype)).detach().requires_grad_()
        with rounded(rounding) if rounding else contextlib.nullcontext():
            torch.nn.functional.layer_norm(given, (16,), norm.weight, norm.bias).backward(outwards.to(given.dtype))
        return given.grad.float(), norm.weight.grad, norm.bias.grad

    def apart(one, other):
        return float((one - other).norm() / other.norm())

    exact, real = gradients(), gradients("bfloat16")
    found = gradients(rounding=replace(BF16, norm_dtype="bfloat16"))
    assert apart(real[2], exact[2]) > 0.01, "the kernel loses a part of it: the more, the fewer threads share the rows"
    assert apart(found[2], real[2]) < 1e-6
    assert apart(found[1], real[1]) < 0.5 * apart(real[1], exact[1])
    assert torch.equal(found[0], exact[0]), "what goes further back is not its fault"
    assert torch.equal(gradients(rounding=BF16)[2], exact[2])


def test_a_product_that_is_written_in_place_is_rounded_where_it_is_written(noise):
    """TRL adds up gradients of its loss so, a chunk of the tokens at a time: in a copy they would be lost."""
    one, other = noise(8, 8), noise(8, 8)
    whole, into, view = torch.zeros(8, 8), torch.empty(8, 8), torch.zeros(16, 8)
    exact = one @ other
    with rounded(BF16):
        result = whole.addmm_(one, other)
        view[8:].addmm_(one, other)
        torch.mm(one, other, out=into)
        expected = one @ other
    assert result is whole
    assert not torch.equal(expected, exact)
    for found in (whole, view[8:], into):
        assert torch.equal(found, expected)
    assert not view[:8].any()
