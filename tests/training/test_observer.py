"""What is observed of a model's layers, on models that use their parts in other ways than most."""

import dataclasses

import pytest
import torch

from autofit.registry import recipe_of
from autofit.training.observer import Observer
from tests.support.families import CONFIGS, TEXT
from tests.support.synthetic import cpu_facts
from tests.support.tiny import PLAIN


def observed(model, layer, checkpointing, batch):
    """How often each layer ran forward in a micro-step."""
    facts = cpu_facts(global_batch=4)
    described = dataclasses.replace(facts.model, layer_classes=(layer,), main_input=next(iter(batch)))
    recipe = recipe_of(PLAIN.replaced(checkpointing=checkpointing), dataclasses.replace(facts, model=described))
    observer = Observer(model.train(), recipe)
    if checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for _ in range(2):
        model(**batch).loss.backward()
    return observer.ran(None, None, None).layer_forwards


@pytest.mark.parametrize(("checkpointing", "forwards"), [("off", 1), ("full", 2)])
def test_a_product_that_a_layer_uses_twice_is_not_taken_for_a_recomputed_layer(checkpointing, forwards):
    """DeBERTa's query is projected once more for its relative positions (``share_att_key``)."""
    from transformers import DebertaV2Config, DebertaV2ForTokenClassification

    config = DebertaV2Config(
        **TEXT, max_position_embeddings=64, type_vocab_size=0, relative_attention=True, share_att_key=True,
        pos_att_type=["p2c", "c2p"],
    )  # fmt: skip
    ids = torch.randint(1, 90, (2, 16))
    batch = {"input_ids": ids, "labels": torch.zeros_like(ids)}
    model = DebertaV2ForTokenClassification(config)
    assert observed(model, "DebertaV2Layer", checkpointing, batch) == (forwards, forwards)


@pytest.mark.parametrize(("checkpointing", "forwards"), [("off", 1), ("full", 2)])
def test_layers_that_the_loss_does_not_use_are_not_expected_to_be_recomputed(checkpointing, forwards):
    """Of BEiT's 12 layers a segmentation may look at the first 10 alone (``out_indices``)."""
    from transformers import BeitConfig, BeitForSemanticSegmentation

    named = {**CONFIGS["beit"][1], "num_hidden_layers": 6, "out_indices": [1, 2, 3, 4]}
    config = BeitConfig(**{name: value for name, value in named.items() if name != "architectures"})
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.zeros(2, 32, 32, dtype=torch.long)}
    found = observed(BeitForSemanticSegmentation(config), "BeitLayer", checkpointing, batch)
    assert found == (forwards,) * len(found)
    assert 0 < len(found) < 6
