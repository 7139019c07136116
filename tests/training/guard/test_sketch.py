"""Sketches: distances of tensors out of a few numbers."""

import math

import pytest
import torch

from autofit.training.guard import sketch as sketches
from autofit.training.guard.sketch import SIZE, distance, minus, sketch


@pytest.fixture
def noise():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


@pytest.mark.parametrize("shape", [(4096,), (64, 128), (3, 5, 7, 11)])
def test_a_norm_is_known_to_a_third(noise, shape):
    """Three standard deviations of a sketch of this size."""
    tensor = noise(*shape)
    assert math.hypot(*sketch(tensor, "a")) == pytest.approx(float(tensor.norm()), rel=3 / math.sqrt(2 * SIZE))


def test_a_difference_is_that_of_the_sketches(noise):
    one, change = noise(64, 64), 1e-4 * noise(64, 64)
    both = sketch(one, "a"), sketch(one + change, "a")
    assert distance(*both) == pytest.approx(math.hypot(*sketch(change, "a")), rel=1e-2)
    assert minus(both[1], both[0]) == pytest.approx(sketch(change, "a"), abs=1e-5)


def test_equal_columns_and_rows_do_not_add_up():
    """A gradient is often an outer product: signs that repeat would sum it up coherently."""
    tensor = torch.outer(torch.ones(256), torch.arange(1.0, 65.0))
    assert math.hypot(*sketch(tensor, "a")) == pytest.approx(float(tensor.norm()), rel=0.5)


def test_pieces_make_no_difference(noise, monkeypatch):
    tensor = noise(1000)
    whole = sketch(tensor, "a")
    monkeypatch.setattr(sketches, "_PIECE", 64)
    assert sketch(tensor, "a") == pytest.approx(whole)


def test_each_parameter_has_its_own_signs(noise):
    tensor = noise(100)
    assert sketch(tensor, "a") != sketch(tensor, "b")
    assert sketch(tensor[::2].contiguous(), "a") == sketch(tensor[::2], "a")
    assert sketch(tensor.bfloat16(), "a") == pytest.approx(sketch(tensor, "a"), abs=0.3)
