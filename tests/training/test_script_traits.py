"""What is told of the model that a script trains."""

from types import SimpleNamespace

import torch
from transformers import LlamaConfig

from autofit.machine.model import describe_module
from autofit.training.scripts.traits import traits


class Around(torch.nn.Module):
    """As a model of sentence-transformers: it has the config of the model inside it, and is none of transformers."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.config = LlamaConfig()


def test_a_module_around_a_model_of_transformers_is_the_users_own():
    rows = SimpleNamespace(rows=2, looked_at=2, longest_size=4, sizes={}, tokens=None, counts=(), spread=(), longest=())
    found = traits(SimpleNamespace(said={}, loaded=False), Around(), rows, 1.0)
    assert found["config"] == {}
    assert found["script"]["loads"] == {}
    assert describe_module("train.py", found["model"])["architecture"] == "Around"
