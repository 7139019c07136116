"""The models that the device tests train, with random weights, and what they are to be trained on."""

import dataclasses

from autofit.units import GIB
from tests.tiny import describe


def facts_on_card(server, config, *, most_bytes=12 * GIB, global_batch=8):
    """The facts of a model on this machine's card, under a ceiling that leaves others some of it."""
    facts = describe(server, config, device="cuda", seq_len=512, global_batch=global_batch)
    work = dataclasses.replace(
        facts.workload,
        limit_bytes=min(most_bytes, int(facts.hardware.free_bytes * 0.9)),
        host_limit_bytes=int(facts.hardware.host_free_bytes * 0.8),
    )
    return dataclasses.replace(facts, workload=work)


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 1024,
}

LLAMA_1B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
