"""Training scripts of families that no config names a task of, with models as wide as published ones."""

import importlib.util
import json
import random
from pathlib import Path

from tests.bench.task_models import TASK_MODELS
from tests.support.scripted import SCRIPTS, WORDS, tiny_llama

EACH_SCRIPT = (
    {"precision": "fp32", "micro_batch": 4, "accumulation": 2},
    {"micro_batch": 4, "accumulation": 2},
    {"micro_batch": 4, "accumulation": 2, "checkpointing": "full"},
    {"micro_batch": 8},
)
"""What each is tried with; a script's own optimizer and adapter stay."""
SCRIPT_NAMES = (
    "image-text",
    "masked-loop",
    "masked-loop by hand",
    "reward (TRL)",
    "sft (TRL)",
    "sft LoRA (TRL)",
    "dpo (TRL)",
)


def script_of(name, folder):
    """A script and its arguments, with the data that it reads in a folder."""
    if name == "image-text":
        return SCRIPTS / "families.py", ("--family", "image_text", "--wide")
    if name.startswith("masked-loop"):
        _config(folder / "bert", "bert-masked")
        by_hand = ("--by-hand",) if name.endswith("by hand") else ()
        return SCRIPTS / "loop.py", ("--model", str(folder / "bert"), *by_hand)
    tiny_llama(folder)  # for its tokenizer
    _config(folder / "reward", "llama-reward")
    _config(folder / "llama", "llama-reward", architectures=["LlamaForCausalLM"])
    _texts(folder)
    trl = importlib.util.find_spec("trl")
    assert trl is not None
    words = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--max_length", "256")
    kind = name.partition(" ")[0]
    model, data = "reward" if kind == "reward" else "llama", "texts" if kind == "sft" else "pairs"
    if "LoRA" in name:
        words += ("--use_peft", "--lora_target_modules", "all-linear")
    named = ("--model_name_or_path", str(folder / model), "--dataset_name", str(folder / data))
    return Path(trl.origin).parent / f"scripts/{kind}.py", (*named, "--output_dir", str(folder / "trained"), *words)


def _config(folder, model, **changes):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TASK_MODELS[model][1], **changes}))


def _texts(folder, rows=48):
    """Rows of 50 to 200 words, and pairs of such answers."""
    numbers = random.Random(0)

    def say():
        return " ".join(numbers.choices(WORDS, k=numbers.randint(50, 200)))

    makers = {
        "texts": lambda: {"text": say()},
        "pairs": lambda: {"prompt": "w1 w2", "chosen": say(), "rejected": say()},
    }
    for name, make in makers.items():
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_text("\n".join(json.dumps(make()) for _ in range(rows)))
