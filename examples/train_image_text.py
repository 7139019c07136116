"""Fine-tune an image-text model (Qwen-VL, Gemma 3, LLaVA, SmolVLM...) on images and what is said of them.

    autofit tune examples/train_image_text.py --output OUT -- --model Qwen/Qwen2.5-VL-3B-Instruct --data DIR
    autofit run OUT examples/train_image_text.py -- --model Qwen/Qwen2.5-VL-3B-Instruct --data DIR

No line of it is autofit's: a script is tuned as it stands. DIR holds images and a `rows.jsonl` of
`{"image": "cat.png", "question": "What is it?", "answer": "A cat."}`. Without `--data` images and texts are random, so
that a question such as "does it fit, and how fast is it?" needs no data: `--image-size` and `--words` say how large
they are.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="a hub id, or a folder with the model and its processor")
parser.add_argument("--data", type=Path, help="folder of images and their rows.jsonl; random ones without it")
parser.add_argument("--image-size", type=int, nargs=2, default=(640, 480), metavar=("WIDTH", "HEIGHT"))
parser.add_argument("--words", type=int, default=64, help="of an answer, where it is random")
parser.add_argument("--output-dir", default="trainer_output")
parser.add_argument("--max-steps", type=int, default=-1)
parser.add_argument("--batch-size", type=int, default=1, help="rows of a micro-batch")
parser.add_argument("--accumulation", type=int, default=16, help="micro-batches of an optimizer step")
parser.add_argument("--learning-rate", type=float, default=1e-5)
parser.add_argument("--bf16", action="store_true")
options = parser.parse_args()

processor = AutoProcessor.from_pretrained(options.model)
model = AutoModelForImageTextToText.from_pretrained(options.model)
IGNORED = -100


class Folder(torch.utils.data.Dataset):
    """The rows of a folder; each image is read when it is its turn."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text("utf-8").splitlines() if line]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        return {**row, "image": Image.open(self.folder / row["image"]).convert("RGB")}


class Random(torch.utils.data.Dataset):
    """As many rows as are asked for, all of one size."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Any]:
        width, height = options.image_size
        drawn = random.Random(index)
        image = Image.frombytes("RGB", (width, height), drawn.randbytes(3 * width * height))
        ids = [drawn.choice(WORDS) for _ in range(options.words)]
        return {"image": image, "question": "What is it?", "answer": processor.tokenizer.decode(ids)}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch of the processor; no loss is taken of what is no text."""
    talks = [
        [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["question"]}]},
            {"role": "assistant", "content": [{"type": "text", "text": row["answer"]}]},
        ]
        for row in rows
    ]
    texts = [processor.apply_chat_template(talk) for talk in talks]
    batch = processor(text=texts, images=[[row["image"]] for row in rows], padding=True, return_tensors="pt")
    labels = batch["input_ids"].clone()
    labels[torch.isin(labels, NO_TEXT)] = IGNORED
    return {**batch, "labels": labels}


special = set(processor.tokenizer.all_special_ids)
WORDS = [one for one in range(len(processor.tokenizer)) if one not in special]
images = {getattr(model.config, name, None) for name in ("image_token_id", "image_token_index", "video_token_id")}
NO_TEXT = torch.tensor(sorted({processor.tokenizer.pad_token_id, *images} - {None}))

Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=options.output_dir,
        max_steps=options.max_steps,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulation,
        learning_rate=options.learning_rate,
        bf16=options.bf16,
        logging_steps=1,
        save_strategy="no",
        remove_unused_columns=False,
        report_to=[],
    ),
    train_dataset=Random() if options.data is None else Folder(options.data),
    data_collator=collate,
).train()
