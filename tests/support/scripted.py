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


_ABORTED = "terminate called without an active exception"
"""What one of several processes ends with once in some dozens of launches, after its training, whoever launches it: a
thread of PyTorch's own is left."""


def autofit(folder, *words, seconds=280):
    """Run the command in a folder, with one thread: those of several tests would wait for one another."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "autofit", *map(str, words)],
            cwd=folder, capture_output=True, text=True, timeout=seconds, env=environment, check=False,
        )  # fmt: skip
        if words[0] != "run" or _ABORTED not in done.stderr:
            break
    return done


def word_tokenizer(names, **special):
    """A tokenizer of these words, in this order."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: place for place, word in enumerate(names)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def tiny_llama(folder):
    """A causal language model and a tokenizer of words, with a chat template; and a reward model beside it."""
    import transformers

    special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = word_tokenizer((*special.values(), *WORDS), **special)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    sizes = {**SIZES, "vocab_size": len(tokenizer), "max_position_embeddings": 128, "num_key_value_heads": 2}
    numbers = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    for name, auto, labels in (("llama", "CausalLM", 2), ("reward", "SequenceClassification", 1)):
        config = transformers.LlamaConfig(**sizes, **numbers, num_labels=labels)
        getattr(transformers, f"AutoModelFor{auto}").from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


WORDS = tuple(f"w{number}" for number in range(90))


def preference_data(folder, rows=48):
    """Folders that ``load_dataset`` reads: rows of text, pairs of answers, judged answers."""
    import json
    import random

    numbers = random.Random(0)

    def say(low, high):
        return " ".join(numbers.choices(WORDS, k=numbers.randint(low, high)))

    makers = {
        "texts": lambda: {"text": say(4, 40)},
        "pairs": lambda: {"prompt": say(6, 6), "chosen": say(3, 20), "rejected": say(3, 20)},
        "judged": lambda: {"prompt": say(6, 6), "completion": say(3, 20), "label": numbers.random() < 0.5},
    }
    for name, make in makers.items():
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_text("".join(json.dumps(make()) + "\n" for _ in range(rows)))


def glue(folder, rows=48):
    """What accelerate's text examples ask the hub for, under the same names: a model, pairs of sentences, a metric."""
    import json

    import transformers

    transformers.AutoTokenizer.from_pretrained(folder / "llama").save_pretrained(folder / "bert-base-cased")
    tiny_bert(folder / "bert-base-cased")
    home = folder / "nyu-mll" / "glue"
    home.mkdir(parents=True)
    for split in ("train", "validation"):
        lines = [
            {"sentence1": " ".join(WORDS[: 3 + place % 20]), "sentence2": "w1 w2", "label": place % 2, "idx": place}
            for place in range(rows)
        ]
        (home / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "validation"))
    (home / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")
    (folder / "glue").mkdir()
    (folder / "glue" / "glue.py").write_text(
        "import datasets\nimport evaluate\n\n\nclass Glue(evaluate.Metric):\n"
        "    def _info(self):\n"
        "        kinds = {name: datasets.Value('int64') for name in ('predictions', 'references')}\n"
        "        return evaluate.MetricInfo(description='', citation='', features=datasets.Features(kinds))\n\n"
        "    def _compute(self, predictions, references):\n"
        "        return {'accuracy': sum(p == r for p, r in zip(predictions, references)) / len(predictions)}\n"
    )
