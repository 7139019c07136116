"""What two users' scripts import: a small Llama made on the spot, and its tokenizer of words."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def word_llama(words):
    """A model of so many words, and its tokenizer: ``w0``, ``w1`` and so on, and three special ones."""
    vocabulary = {
        word: place for place, word in enumerate(("<unk>", "<eos>", "<pad>", *(f"w{n}" for n in range(words - 3))))
    }
    table = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    table.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=table, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=words,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
        )
    )
    return model, tokenizer
