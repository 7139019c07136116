"""What matters of a model: whether the loss of a row depends on the others."""

import pytest
import torch
import transformers
from torch import nn

from autofit.machine.model import depends_on_rows


@pytest.mark.parametrize(
    ("layer", "depends"),
    [
        (nn.BatchNorm1d(4), True),
        (nn.BatchNorm1d(4, track_running_stats=False), True),
        (nn.InstanceNorm1d(4), False),
        (nn.LayerNorm(4), False),
    ],
)
def test_norms_over_a_micro_batch_are_told_whatever_they_keep(layer, depends):
    assert bool(depends_on_rows(nn.Sequential(nn.Linear(4, 4), layer))) is depends


@pytest.mark.parametrize(
    ("name", "depends"),
    [
        ("CohereForCausalLM", False),
        ("Cohere2ForCausalLM", False),
        ("CLIPModel", True),
        ("ClapModel", True),
        ("AlignModel", True),
    ],
)
def test_logits_are_contrastive_where_their_scale_is_trained(name, depends):
    """Cohere's models scale theirs by a number of the config; they were held to one micro-batch."""
    kind = getattr(transformers, name)
    with torch.device("meta"):
        model = kind(kind.config_class())
    assert bool(depends_on_rows(model)) is depends
