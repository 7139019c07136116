"""Models that read images and texts: what is said of their configs, and the example that trains them as it stands."""

import dataclasses
import importlib.util
import json
import random
from pathlib import Path

import pytest

from autofit.commands.facts import remarks
from autofit.output.document import read_document
from autofit.system.errors import ModelError
from autofit.training.tasks.choose import describe_model
from tests.support.scripted import SIZES, autofit, word_tokenizer
from tests.support.synthetic import cpu_facts
from tests.support.tiny import write_config

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_image_text.py"
TEXT = {**SIZES, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256}
VISION = {
    **{name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")},
    "image_size": 56,
    "patch_size": 14,
}
GEMMA = {"model_type": "gemma3", "text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4}


def test_a_model_that_reads_images_too_is_told_of(tmp_path):
    found = describe_model("gemma", write_config(tmp_path, GEMMA), trust_remote_code=False)
    assert (found["task"], found["unread"]) == ("causal-lm", ("images",))
    *_, said = remarks(16, dataclasses.replace(cpu_facts().model, unread=("images",)), "cpu")
    assert "reads images, too, and the rows here are texts without: what it has for images is held in memory" in said


def test_a_model_of_images_and_texts_alone_is_referred_to_a_script(tmp_path):
    clip = {**VISION, "model_type": "clip_vision_model"}
    config = {"model_type": "llava", "text_config": {**TEXT, "model_type": "llama"}, "vision_config": clip}
    with pytest.raises(ModelError, match="images and their texts, and its config does not tell how large") as caught:
        describe_model("llava", write_config(tmp_path, config), trust_remote_code=False)
    assert "examples/train_image_text.py" in caught.value.hint


@pytest.fixture
def folder(tmp_path):
    """A tiny Gemma 3, its processor, and some images with what is said of them."""
    if importlib.util.find_spec("PIL") is None:
        pytest.skip("needs pillow")
    import transformers
    from PIL import Image

    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<eos>"}
    images = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    names = [*special.values(), *images.values(), "user", "assistant", *(f"w{number}" for number in range(80))]
    tokenizer = word_tokenizer(
        names, **special, extra_special_tokens=images, additional_special_tokens=[*images.values()]
    )
    template = (
        "{% for m in messages %}{{ m['role'] }} {% for c in m['content'] %}"
        "{{ '<boi>' if c['type'] == 'image' else c['text'] }} {% endfor %}{% endfor %}"
    )
    processor = transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessorPil(size={"height": 56, "width": 56}),
        tokenizer,
        chat_template=template,
        image_seq_length=4,
    )
    tokens = {"image_token_id": 3, "boi_token_index": 4, "eoi_token_index": 5, "pad_token_id": 1, "eos_token_id": 2}
    named = {"architectures": ["Gemma3ForConditionalGeneration"]}
    config = transformers.Gemma3Config(**{**GEMMA, **tokens, **named, "text_config": {**TEXT, "pad_token_id": 1}})
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "gemma")
    processor.save_pretrained(tmp_path / "gemma")
    data = tmp_path / "data"
    data.mkdir()
    drawn, rows = random.Random(0), []
    for number in range(16):
        Image.frombytes("RGB", (40, 30), drawn.randbytes(3 * 40 * 30)).save(data / f"{number}.png")
        answer = " ".join(drawn.choices(names[8:], k=drawn.randint(2, 12)))
        rows.append({"image": f"{number}.png", "question": "w1 w2", "answer": answer})
    (data / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return tmp_path


@pytest.mark.slow
def test_a_model_of_images_and_texts_is_tuned_by_the_example(folder):
    words = ("--model", "gemma", "--data", "data", "--batch-size", 2, "--accumulation", 2, "--max-steps", 3)
    done = autofit(
        folder, "tune", EXAMPLE, "--device", "cpu", "--output", "out", "--trials", 2, "--no-guard",
        "--fix", "precision=fp32", "--fix", "loader=default", "--", *words,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    document = read_document(folder / "out")
    assert document.workload.global_batch == 4
    assert document.model.architecture == "Gemma3ForConditionalGeneration"
    assert "pixel_values" in document.workload.script.batch
    done = autofit(folder, "run", "out", EXAMPLE, "--", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'train_loss'" in done.stdout


@pytest.mark.slow
def test_the_example_draws_images_where_none_are_given(folder):
    done = autofit(
        folder, "estimate", EXAMPLE, "--memory", "8GiB", "--fix", "precision=fp32", "--fix", "checkpointing=off",
        "--", "--model", "gemma", "--image-size", 40, 30, "--words", 9,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "script on rows of" in done.stdout
