"""A user's script: TRL's ``SFTTrainer`` with what a tune wrote.

Its arguments are the tune's folder, then ``packing``, ``lora`` or none.

The last line that it prints is JSON: what was ignored, and what the arguments and the model turned out to be.
"""

import json
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import autofit

STEPS, LENGTH = 2, 32
folder, *ways = sys.argv[1:]
setup = autofit.load(folder)
fields = json.loads((Path(folder) / "training_args.json").read_text("utf-8"))
arguments = {
    **fields,
    "output_dir": tempfile.mkdtemp(),
    "max_steps": STEPS,
    "report_to": "none",
    "save_strategy": "no",
    "packing": "packing" in ways,
    "max_length": LENGTH,
}
words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "<pad>": 2}, unk_token="<unk>"))
model = setup.model()
watch = setup.watch(model)
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(**arguments),
    train_dataset=Dataset.from_list([{"input_ids": [5 + (i + k) % 90 for k in range(LENGTH)]} for i in range(64)]),
    processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>"),
    peft_config=LoraConfig(r=4, target_modules=["q_proj"]) if "lora" in ways else None,
)
trainer.train()
args = trainer.args
told = {
    "ignored": watch.ignored(trainer.optimizer, trainer.accelerator, STEPS),
    "bf16": args.bf16,
    "checkpointing": args.activation_checkpointing,
    "rows": args.per_device_train_batch_size,
    "steps": trainer.state.global_step,
}
print(json.dumps(told))
