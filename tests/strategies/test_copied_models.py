"""A copy of a model that a plan has set up computes with its own weights: an average of them, or one kept as it was."""

import copy

import pytest
import torch

from tests.support.ragged import FREE, collated, free_model, ragged

PLAIN = FREE.replaced(batching="pad")


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    "values",
    [
        {"batching": "padding_free"},
        {"offload": "activations"},
        {"batching": "padding_free", "offload": "activations", "adapter": "lora:r=4"},
        {"batching": "padding_free", "kernels": "chunked_ce", "checkpointing": "full"},
    ],
    ids="+".join,
)
def test_a_copy_computes_with_its_own_weights(values, trains):
    batch = collated(ragged(5, 11, 3))
    model, _ = free_model("llama", plan=PLAIN.replaced(**values))
    wanted, _ = free_model("llama", plan=PLAIN)
    copied = copy.deepcopy(model).train(trains)
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    theirs, ours = wanted.train(trains)(**batch).loss, copied(**batch).loss
    assert torch.allclose(ours, theirs, rtol=1e-5)
    ours.backward()
    assert all(one.grad is None for one in model.parameters())
    assert any(one.grad is not None for one in copied.parameters())
