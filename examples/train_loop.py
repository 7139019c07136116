"""Fine-tune with a plain Accelerate loop, by the files that `autofit tune` wrote.

    accelerate launch --config_file OUT/accelerate.yaml examples/train_loop.py OUT

An Accelerate YAML has no field for micro-batch, accumulation, optimizer or checkpointing; `autofit.load` carries them.
Tune with `--launch-path loop`, so that what is promised is what such a loop does. Without `--model` the weights are
random and so is the text, so that the example runs anywhere.
"""

import argparse
import sys

import torch
from torch.utils.data import DataLoader
from transformers import default_data_collator

import autofit

parser = argparse.ArgumentParser()
parser.add_argument("folder", help="output folder of autofit tune")
parser.add_argument("--model", help="pretrained model: a hub id or a folder; random weights without it")
parser.add_argument("--max-steps", type=int, default=4)
parser.add_argument("--learning-rate", type=float, default=5e-5)
options = parser.parse_args()

setup = autofit.load(options.folder)
task = setup.document.model.task
if task not in {"causal-lm", "masked-lm", "seq2seq-lm", "script"}:  # setup.model says what to do with a script's
    sys.exit(f"the answer in {setup.folder} is for {task}, and the rows here are tokens: put rows of your own there")
accelerator = setup.accelerator()
model = setup.model(options.model)
optimizer = setup.optimizer(model, learning_rate=options.learning_rate)

# your data set here: anything that yields input_ids and labels
work = setup.document.workload
tokens = torch.randint(0, setup.document.model.vocab_size, (work.global_batch * options.max_steps, work.seq_len))
rows = [{"input_ids": row, "labels": row} for row in tokens]
watch = setup.watch(model)
loader = DataLoader(
    setup.dataset(rows, default_data_collator),  # only a plan with a value of `batching` needs this and the collator
    batch_size=setup.micro_batch,
    shuffle=True,
    collate_fn=setup.collator(default_data_collator),
)

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
steps = 0
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        steps += 1
        accelerator.print(f"step {steps}: loss {loss.item():.3f}")
for sentence in watch.ignored(optimizer, accelerator, steps):
    accelerator.print(f"ignored: {sentence}")
accelerator.print(f"plan: {setup.plan.words()}")
accelerator.print(f"trained {steps} steps of {setup.micro_batch} x {setup.accumulation} rows a process")
