"""A sequence classification as people write it: argparse, a data set of their own, a lambda for a collator."""

import argparse

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--rows", type=int, default=64)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--skewed", action="store_true", help="Most rows are short, a few are twelve times as long.")
parser.add_argument("--output", default="classified")
options = parser.parse_args()


class Reviews(torch.utils.data.Dataset):
    """Rows of 4 to 32 random tokens, each of one of three classes."""

    def __len__(self):
        return options.rows

    def __getitem__(self, place):
        if place >= options.rows:
            raise IndexError(place)
        numbers = torch.Generator().manual_seed(place)
        length = int(torch.randint(4, 33, (), generator=numbers))
        if options.skewed:
            length = min(64, 4 + int(torch.empty(()).exponential_(1 / 7, generator=numbers)))
        return {"input_ids": torch.randint(1, 100, (length,), generator=numbers), "label": place % 3}


def collate(rows):
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([r["label"] for r in rows])}


if __name__ == "__main__":
    config = AutoConfig.from_pretrained(options.model, num_labels=3)
    model = AutoModelForSequenceClassification.from_pretrained(
        options.model, config=config, ignore_mismatched_sizes=True
    )
    arguments = TrainingArguments(
        output_dir=options.output,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        num_train_epochs=1,
        report_to="none",
        save_strategy="epoch",
        eval_strategy="epoch",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Reviews(),
        eval_dataset=Reviews(),
        data_collator=lambda rows: collate(rows),
    )
    print("trained", trainer.train().metrics["train_loss"])
    trainer.save_model()
    print("micro-batch", arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps)
