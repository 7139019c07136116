"""Gaussian process regression over plans."""

import numpy as np
import pytest

from autofit.search.surrogate.gp import Kernel, predict
from autofit.search.surrogate.observation import Observation, undisturbed


@pytest.fixture
def kernel():
    places = np.arange(8.0)
    return Kernel(
        features=np.column_stack([0.1 * np.ones(8), 0.1 * (places % 2)]),
        family=np.arange(8),
        rows=np.ones(8),
        family_std=0.05,
        curve_std=0.0,
    )


def stds(kernel, scatter, **how):
    observed = np.arange(4)
    values = scatter * np.array([1.0, -1.0, -1.0, 1.0])
    _, std = predict(kernel, np.zeros(8), observed=observed, values=values, noise=np.full(4, 0.01), **how)
    return std[4:]


def test_observations_that_scatter_more_than_the_prior_says_widen_what_is_not_known(kernel):
    usual = stds(kernel, 0.05)
    assert stds(kernel, 0.05, prior_residuals=2.0) == pytest.approx(usual)
    assert (stds(kernel, 1.0, prior_residuals=2.0) > 5 * usual).all()


def test_without_prior_residuals_the_scatter_says_nothing(kernel):
    assert stds(kernel, 1.0) == pytest.approx(stds(kernel, 0.05))


def test_a_disturbed_measurement_says_nothing_once_its_plan_was_measured_again():
    disturbed, again = (Observation(plan=3, result="measured", seconds=1.0, noise=noise) for noise in (0.5, 0.01))
    alone = Observation(plan=4, result="measured", seconds=1.0, noise=0.5)
    assert undisturbed([disturbed, again, alone]) == [again, alone]
    assert undisturbed([disturbed, alone]) == [disturbed, alone]
