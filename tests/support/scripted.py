"""What tests of users' scripts need: a tiny model in a folder, the scripts in ``tests/data/scripts``, a command."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "data" / "scripts"
SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def tiny_bert(folder):
    """A config of BERT and weights of two classes."""
    from transformers import AutoModelForSequenceClassification, BertConfig

    model = AutoModelForSequenceClassification.from_config(BertConfig(**SIZES, architectures=["BertForMaskedLM"]))
    model.save_pretrained(folder)
    return folder


def autofit(folder, *words, seconds=280):
    """Run the command in a folder, with one thread: those of several tests would wait for one another."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "autofit", *map(str, words)],
        cwd=folder, capture_output=True, text=True, timeout=seconds, env=environment, check=False,
    )  # fmt: skip
