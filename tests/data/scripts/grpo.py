"""A user's script: TRL's GRPOTrainer, or its RLOOTrainer, on prompts of words, a small Llama made on the spot.

Its argument is JSON: fields of its config; and ``trainer``, ``GRPO`` or ``RLOO``, ``lora``, the rank of an adapter,
``count``, the prompts of the data, ``told``, a file that the words of each prompt that is rewarded are written to.
"""

import json
import random
import sys
from pathlib import Path

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

given = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
kind, lora, count, words = given.pop("trainer", "GRPO"), given.pop("lora", None), given.pop("count", 64), 200
told = given.pop("told", None)
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
numbers = random.Random(0)
prompts = [" ".join(f"w{numbers.randrange(words - 3)}" for _ in range(numbers.randint(4, 40))) for _ in range(count)]


def even(prompts, completions, **_):
    """Rewards completions of many words that are even."""
    if told is not None:
        with Path(told).open("a", encoding="utf-8") as file:
            file.write(json.dumps([len(one.split()) for one in prompts]) + "\n")
    return [float(sum(word[-1:] in "02468" for word in one.split())) for one in completions]


arguments = {"output_dir": "out", "report_to": "none", "max_completion_length": 16, "num_generations": 4}
trainer = getattr(trl, f"{kind}Trainer")(
    model=model,
    reward_funcs=even,
    args=getattr(trl, f"{kind}Config")(**{**arguments, **given}),
    train_dataset=Dataset.from_list([{"prompt": one, "answer": "w1 " * 30} for one in prompts]),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=lora, target_modules="all-linear") if lora else None,
)
trainer.train()
