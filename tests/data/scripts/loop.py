"""A plain loop with Accelerate as people write it: masked language modelling on rows of 4 to 32 tokens."""

import argparse
import math
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoModelForMaskedLM, get_linear_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--steps", type=int, help="Leave the loop after so many optimizer steps.")
parser.add_argument("--skip", type=int, default=0, help="Micro-batches that were trained before.")
parser.add_argument("--output", help="Save the model, and how it went, to a folder.")
parser.add_argument("--by-hand", action="store_true", help="Count micro-steps without accelerator.accumulate.")


def rows():
    numbers = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 33, (64,), generator=numbers).tolist()
    return [{"input_ids": torch.randint(1, 100, (length,), generator=numbers)} for length in lengths]


def collate(batch):
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in batch], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def main():
    options = parser.parse_args()
    by_hand = options.by_hand
    accelerator = Accelerator(gradient_accumulation_steps=1 if by_hand else options.accumulate)
    model = AutoModelForMaskedLM.from_pretrained(options.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = torch.utils.data.DataLoader(rows(), batch_size=options.batch, shuffle=True, collate_fn=collate)
    steps = math.ceil(len(loader) / accelerator.num_processes / options.accumulate)
    schedule = get_linear_schedule_with_warmup(optimizer, 1, steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    assert math.ceil(len(loader) / options.accumulate) == steps
    if options.skip:
        loader = accelerator.skip_first_batches(loader, options.skip)
    model.train()
    done = micro_steps = 0
    for batch in loader:
        micro_steps += 1
        if by_hand:
            accelerator.backward(model(**batch).loss / options.accumulate)
            if micro_steps % options.accumulate == 0:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                done += 1
            continue
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        done += accelerator.sync_gradients
        if done == options.steps:
            break
    if options.output:
        accelerator.wait_for_everyone()
        accelerator.unwrap_model(model).save_pretrained(options.output)
        Path(options.output, "results.txt").write_text(f"{done} steps")
    print("micro-steps", micro_steps, "steps", done)


if __name__ == "__main__":
    main()
