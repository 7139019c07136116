"""Rows of several lengths, and models that take them joined."""

from dataclasses import replace

import torch
from transformers import AutoConfig

from autofit.registry import recipe_of
from tests.support.synthetic import cpu_facts
from tests.support.tiny import PLAIN

SKEWED = (16,) * 60 + (24,) * 25 + (40,) * 10 + (128,) * 5


def told(facts, lengths=SKEWED, **changed):
    work = {"lengths": lengths, "told_rows": 5000, "seq_len": lengths[-1], **changed}
    return replace(facts, workload=replace(facts.workload, **work))


def ragged(*lengths, vocabulary=100):
    numbers = torch.Generator().manual_seed(0)
    return [torch.randint(4, vocabulary, (length,), generator=numbers) for length in lengths]


def collated(rows, *, left=False):
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for place, row in enumerate(rows):
        at = slice(width - len(row), width) if left else slice(0, len(row))
        ids[place, at], mask[place, at], labels[place, at] = row, 1, row
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


SIZES_OF = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
             "resid_pdrop": 0.0},
    "gpt_neox": {"attention_dropout": 0.0, "hidden_dropout": 0.0},
    "phi3": {"pad_token_id": 0},
    "mistral": {"sliding_window": 8},
    "qwen3": {"head_dim": 16},
    "smollm3": {"pad_token_id": 0},
    "starcoder2": {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0},
}  # fmt: skip
FREE = PLAIN.replaced(micro_batch=4, accumulation=2, batching="padding_free")


def free_model(kind, attention="sdpa", plan=FREE):
    """A model that leaves padding out, and the recipe that makes it do so."""
    from transformers import AutoModelForCausalLM

    sizes = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64, "bos_token_id": 1,
        "eos_token_id": 2, **SIZES_OF.get(kind, {}),
    }  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().train()
    model.config.use_cache = False
    recipe = recipe_of(plan, told(cpu_facts(global_batch=8)))
    for wrap in recipe.model_wraps:
        model = wrap(model)
    return model, recipe


def learned(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


def apart(one, other):
    """How far two gradients are apart, as a share of the first."""
    return float((one - other).norm() / one.norm())
