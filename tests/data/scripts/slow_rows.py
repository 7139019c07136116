"""A script whose rows take long to make: each waits 20 ms, as if it were read from afar; by a Trainer or a loop."""

import argparse
import time

import torch
from accelerate import Accelerator
from transformers import AutoModelForMaskedLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--seconds", type=float, default=0.02)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--loop", action="store_true")
options = parser.parse_args()


class Slow(torch.utils.data.Dataset):
    """Rows of 16 random tokens."""

    def __len__(self):
        return 64

    def __getitem__(self, place):
        time.sleep(options.seconds)
        ids = torch.randint(1, 100, (16,), generator=torch.Generator().manual_seed(place))
        return {"input_ids": ids, "labels": ids.clone()}


def loop(model):
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = torch.utils.data.DataLoader(Slow(), batch_size=options.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    print("workers", loader.num_workers)


if __name__ == "__main__":
    tiny = AutoModelForMaskedLM.from_pretrained(options.model)
    if options.loop:
        loop(tiny)
    else:
        arguments = TrainingArguments(
            output_dir="slow", per_device_train_batch_size=options.batch, num_train_epochs=1, report_to="none",
            save_strategy="no", use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        Trainer(model=tiny, args=arguments, train_dataset=Slow()).train()
        print("workers", arguments.dataloader_num_workers)
