"""A user's script: TRL's GRPOTrainer, or its RLOOTrainer, on prompts of words, a small Llama made on the spot.

Its argument is JSON: fields of its config; and ``trainer``, ``GRPO`` or ``RLOO``, ``lora``, the rank of an adapter,
``count``, the prompts of the data, ``told``, a file that the words of each prompt that is rewarded are written to.
"""

import json
import random
import sys
from pathlib import Path

import trl
from datasets import Dataset
from peft import LoraConfig
from word_llama import word_llama

given = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
kind, lora, count, words = given.pop("trainer", "GRPO"), given.pop("lora", None), given.pop("count", 64), 200
told = given.pop("told", None)
model, tokenizer = word_llama(words)
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
