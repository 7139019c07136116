"""A causal language model trained on texts of very different lengths.

Lengths are log-normal about 40 tokens, and the longest fill the model: as chats and reviews do. ``--full`` pads all of
them to the longest, as a tokenizer does with ``padding="max_length"``.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--rows", type=int, default=256)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=4)
parser.add_argument("--full", action="store_true")
parser.add_argument("--told", help="A file for what the training took: tokens, seconds, bytes at their most.")
options = parser.parse_args()
config = AutoConfig.from_pretrained(options.model)
longest = config.max_position_embeddings
numbers = torch.Generator().manual_seed(0)
spread = torch.randn(options.rows, generator=numbers).mul(0.9).add(3.7).exp()
lengths = [min(longest, max(4, int(one))) for one in spread]
texts = [torch.randint(1, config.vocab_size, (one,), generator=numbers) for one in lengths]


def collate(rows):
    width = longest if options.full else max(len(row["input_ids"]) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row["input_ids"], (0, width - len(row["input_ids"]))) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


class Told(TrainerCallback):
    """Writes down the seconds of a training, and the most bytes that it has held."""

    def __init__(self):
        self.before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the most that was held is counted from here

    def on_train_begin(self, args, state, control, **_):
        self.began = time.perf_counter()

    def on_train_end(self, args, state, control, **_):
        seconds = time.perf_counter() - self.began
        on_gpu = torch.cuda.is_available()
        held = torch.cuda.max_memory_reserved() if on_gpu else memory("VmHWM") - self.before
        told = {"tokens": sum(lengths), "seconds": seconds, "peak_bytes": held, "micro_batch": args.train_batch_size}
        Path(options.told).write_text(json.dumps(told))


def memory(name):
    """Bytes of this process, by their name in its status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    arguments = TrainingArguments(
        output_dir="finetuned",
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        num_train_epochs=1,
        report_to="none",
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
    )
    callbacks = [Told()] if options.told else []
    Trainer(
        model=AutoModelForCausalLM.from_pretrained(options.model),
        args=arguments,
        train_dataset=[{"input_ids": one} for one in texts],
        data_collator=collate,
        callbacks=callbacks,
    ).train()
