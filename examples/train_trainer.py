"""Fine-tune with a transformers Trainer, by the files that `autofit tune` wrote.

    accelerate launch --config_file OUT/accelerate.yaml examples/train_trainer.py OUT/training_args.json

Two lines are autofit's: `autofit.load`, and `setup.model(...)` in place of `from_pretrained(...)`. They carry what no
argument can. Everything else is the Trainer script that you know. Without `--model` the weights are random and so is
the text, so that the example runs anywhere.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments, default_data_collator

import autofit

parser = argparse.ArgumentParser()
parser.add_argument("training_args", type=Path, help="training_args.json of an output folder")
parser.add_argument("--model", help="pretrained model: a hub id or a folder; random weights without it")
parser.add_argument("--output-dir", default="trainer_output")
parser.add_argument("--max-steps", type=int, default=4)
parser.add_argument("--learning-rate", type=float, default=5e-5)
options = parser.parse_args()

setup = autofit.load(options.training_args.parent)
task = setup.document.model.task
if task not in {"causal-lm", "masked-lm", "seq2seq-lm", "script"}:  # setup.model says what to do with a script's
    sys.exit(f"the answer in {setup.folder} is for {task}, and the rows here are tokens: put rows of your own there")
(args,) = HfArgumentParser(TrainingArguments).parse_json_file(options.training_args)
args.output_dir = options.output_dir
args.max_steps = options.max_steps
args.learning_rate = options.learning_rate
args.logging_steps = 1
args.save_strategy = "no"

model = setup.model(options.model)

# your data set here: anything that yields input_ids and labels
work = setup.document.workload
tokens = torch.randint(0, setup.document.model.vocab_size, (work.global_batch * options.max_steps, work.seq_len))
rows = [{"input_ids": row, "labels": row} for row in tokens]

# only a plan that wraps the optimizer (offload=optimizer) needs the last argument
optimizers = (setup.optimizer(model, learning_rate=args.learning_rate), None) if setup.wraps_optimizer else (None, None)
watch = setup.watch(model)
trainer = Trainer(
    model=model,
    args=args,
    # only a plan with a value of `batching` needs these two
    train_dataset=setup.dataset(rows, default_data_collator),
    data_collator=setup.collator(default_data_collator),
    optimizers=optimizers,
)
trainer.train()
for sentence in watch.ignored(trainer.optimizer, trainer.accelerator, trainer.state.global_step):
    print(f"ignored: {sentence}")
print(f"plan: {setup.plan.words()}")
print(f"trained {trainer.state.global_step} steps of {setup.micro_batch} x {setup.accumulation} rows a process")
