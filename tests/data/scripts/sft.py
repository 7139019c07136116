"""A user's script: TRL's SFTTrainer on text of words, a small Llama made on the spot.

Its argument is JSON: fields of SFTConfig; and ``lora``, the rank of an adapter, ``answers``, whether the loss is of the
answers alone, ``words``, of the vocabulary, and ``count``, the rows of the data.
"""

import json
import random
import sys

from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
from word_llama import word_llama

given = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
lora, answers, words = given.pop("lora", None), given.pop("answers", False), given.pop("words", 200)
count = given.pop("count", 64)
model, tokenizer = word_llama(words)
numbers = random.Random(0)
texts = [[f"w{numbers.randrange(words - 3)}" for _ in range(numbers.randint(10, 80))] for _ in range(count)]
rows = [
    {"prompt": " ".join(one[:8]), "completion": " " + " ".join(one[8:])} if answers else {"text": " ".join(one)}
    for one in texts
]
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(**{"output_dir": "out", "report_to": "none", "max_length": 64, **given}),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=lora, target_modules="all-linear") if lora else None,
)
trainer.train()
