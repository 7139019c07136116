"""Which passes of a model its hooks are called for."""

import torch

from autofit.contract.observation import Hooks


def test_a_model_that_trains_in_eval_mode_is_seen_until_one_in_its_own_mode_is():
    """As ``from_pretrained`` leaves it: a loop may never call ``train()``."""
    model = torch.nn.Linear(2, 2).eval()
    seen = []
    Hooks(model).after(model, lambda *_: seen.append(model.training))
    for training, gradients in ((False, True), (False, False), (True, True), (False, True)):
        with torch.set_grad_enabled(gradients):
            model.train(training)(torch.ones(1, 2))
    assert seen == [False, True]


def test_layers_that_a_model_inside_runs_to_generate_are_no_part_of_training():
    """Below an adapter: the outer model's forward pass has begun with gradients, and is over."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    seen = []
    Hooks(model).after(model[0], lambda *_: seen.append(torch.is_grad_enabled()))
    with torch.no_grad():
        model[0](torch.ones(1, 2))
    model(torch.ones(1, 2))
    with torch.no_grad():
        model[0](torch.ones(1, 2))
    assert seen == [True]
    model[0](torch.ones(1, 2))
    assert seen == [True, True], "a loss may ask a layer by itself"
