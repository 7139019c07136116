"""What is observed of a model's layers, on models that use their parts in other ways than most."""

import dataclasses

import pytest
import torch
import transformers

from autofit.machine.model import describe_built
from autofit.registry import recipe_of
from autofit.training.observer import Observer, layer_products
from tests.support.families import CONFIGS, TEXT
from tests.support.synthetic import cpu_facts
from tests.support.tiny import PLAIN


def observed(model, layer, checkpointing, batch, reference=False):
    """How often each layer ran forward in a micro-step; with a pass without gradients before the backward one."""
    facts = cpu_facts(global_batch=4)
    described = dataclasses.replace(facts.model, layer_classes=(layer,), main_input=next(iter(batch)))
    recipe = recipe_of(PLAIN.replaced(checkpointing=checkpointing), dataclasses.replace(facts, model=described))
    observer = Observer(model.train(), recipe)
    if checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for _ in range(2):
        loss = model(**batch).loss
        if reference:
            with torch.no_grad():
                model(**batch)
        loss.backward()
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
def test_a_recomputed_layer_is_seen_behind_a_pass_without_gradients(checkpointing, forwards):
    """As DPO takes its reference from the same model, its adapter switched off, between forward and backward pass."""
    from transformers import BertConfig, BertForTokenClassification

    ids = torch.randint(1, 90, (2, 16))
    batch = {"input_ids": ids, "labels": torch.zeros_like(ids)}
    model = BertForTokenClassification(BertConfig(**TEXT, max_position_embeddings=64))
    found = observed(model, "BertLayer", checkpointing, batch, reference=True)
    assert found == (forwards,) * len(found)


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


class Pairs(torch.nn.Module):
    """A model whose output is a dictionary, as those of sentence-transformers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, rows):
        return {"rows": rows, "embedding": self.last(self.first(rows).relu())}


class Cached(torch.autograd.Function):
    """A loss whose backward pass runs the model again, a part of the rows at a time (GradCache)."""

    @staticmethod
    def forward(context, loss, model, rows):
        context.again = model, rows
        return loss.clone()

    @staticmethod
    def backward(context, _):
        model, rows = context.again
        with torch.enable_grad():
            for part in rows.split(1):
                model(part)["embedding"].sum().backward()
        return torch.ones(()), None, None


def once(model, rows):
    return model(rows)["embedding"].sum()


def three_times(model, rows):
    return sum(model(rows)["embedding"].square().sum() for _ in range(3))


def cached(model, rows):
    with torch.no_grad():
        loss = model(rows)["embedding"].sum()
    return Cached.apply(loss.requires_grad_(), model, rows)


def recomputed(model, rows):
    passes = [once, lambda *given: torch.utils.checkpoint.checkpoint(once, *given, use_reentrant=False)]
    return sum(one(model, rows) for one in (*passes, *passes))


def nested(model, rows):
    """An output that can't be looked into: each forward pass is taken for a micro-step, as there is one."""
    return model(rows)["embedding"].value.sum()


@pytest.mark.parametrize("loss", [once, three_times, cached, recomputed, nested])
def test_a_micro_step_counts_once_however_often_its_loss_runs_the_model(loss):
    model = Pairs().train()
    if loss is nested:
        model.register_forward_hook(lambda _module, _given, output: {"embedding": Inside(output["embedding"])})
    facts = cpu_facts(global_batch=4)
    observer = Observer(model, recipe_of(PLAIN, facts))
    for _ in range(3):
        loss(model, torch.randn(4, 4)).backward()
    assert observer.micro_steps == 3


@dataclasses.dataclass
class Inside:
    value: torch.Tensor


@pytest.mark.parametrize(("checkpointing", "forwards"), [("off", 1), ("full", 2)])
@pytest.mark.filterwarnings("ignore:One of the base layers")  # it has a hook, since most adapters call theirs
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", ["LoraConfig", "ShiraConfig"])
def test_an_adapter_that_multiplies_by_a_weight_without_calling_its_layer_is_seen(kind, checkpointing, forwards):
    """As SHiRA, SuperTuning and FRoD do; the layer inside of LoRA's is called."""
    import peft
    from transformers import BertConfig, BertForTokenClassification

    ids = torch.randint(1, 90, (2, 16))
    model = BertForTokenClassification(BertConfig(**TEXT, max_position_embeddings=64))
    adapted = peft.get_peft_model(model, getattr(peft, kind)(r=2, target_modules=["query", "value"]))
    batch = {"input_ids": ids, "labels": torch.zeros_like(ids)}
    found = observed(adapted, "BertLayer", checkpointing, batch)
    assert found == (forwards,) * model.config.num_hidden_layers


def test_worker_processes_that_ended_with_the_training_are_not_missed():
    """An optimizer without state (SGD, one that steps in the backward pass) has its evidence read once more, later."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    observer = Observer(model, recipe_of(PLAIN, cpu_facts()))
    observer.loader = torch.utils.data.DataLoader([1.0] * 8, num_workers=1)
    running = iter(observer.loader)
    seen = observer.evidence(optimizer, None, 4)
    assert seen.of("loader")["processes"] >= 1
    del running
    assert observer.with_later_state(seen, optimizer, None, 4).of("loader") == seen.of("loader")


def test_a_layer_that_is_never_called_is_not_watched():
    from transformers import AutoConfig, AutoModelForAudioClassification

    config = AutoConfig.for_model(
        "wavlm", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, conv_dim=[8] * 7,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, layerdrop=0.0,
    )  # fmt: skip
    model = AutoModelForAudioClassification.from_config(config)
    direct = describe_built("m", config, model)["read_directly"]
    products = [product for _, product in layer_products(model, (), direct)]
    called = []
    for product in products:
        product.register_forward_hook(lambda module, *_: called.append(module))
    model(torch.randn(1, 8000))
    assert len(products) == 2
    assert called == products


def test_a_router_is_not_what_shows_in_which_precision_a_layer_multiplies():
    """Granite 4's comes first in its layers, and gives float32: no plan in 16 bits "took effect"."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    others = {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16}
    settings = transformers.GraniteMoeHybridConfig(**sizes, **others, num_local_experts=2, num_experts_per_tok=1)
    with torch.device("meta"):
        model = transformers.GraniteMoeHybridForCausalLM(settings)
    assert [type(product).__name__ for _, product in layer_products(model)] == ["Linear"] * 2
