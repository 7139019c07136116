"""A tiny model of each family of heads, trained by a Trainer on random rows of the shapes that its forward() takes.

``--wide`` makes its layers as wide as those of published base models.
"""

import argparse

import torch
import transformers
from transformers import Trainer, TrainingArguments
from transformers.data.data_collator import default_data_collator

TEXT = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
IMAGE = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
SPEECH = {
    "vocab_size": 20,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 8],
    "conv_stride": [5, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
T5 = {
    "vocab_size": 100,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}


WIDE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
IMAGE_TOKEN, PATCHES = 99, 16


def config(kind, **sizes):
    return getattr(transformers, f"{kind}Config")(**sizes)


def tokens(numbers, low=4, high=32):
    return torch.randint(1, 100, (int(torch.randint(low, high + 1, (), generator=numbers)),), generator=numbers)


def text(label):
    def row(numbers):
        ids = tokens(numbers)
        return {"input_ids": ids, "labels": ids.clone() if label == "tokens" else torch.tensor(int(ids[0]) % 2)}

    return row


def question(numbers):
    return {"input_ids": tokens(numbers), "start_positions": torch.tensor(1), "end_positions": torch.tensor(2)}


def choices(numbers):
    return {"input_ids": torch.randint(1, 100, (3, 16), generator=numbers), "labels": torch.tensor(1)}


def translation(numbers):
    return {"input_ids": tokens(numbers), "labels": tokens(numbers)}


def image(labels):
    def row(numbers):
        return {"pixel_values": torch.randn(3, 32, 32, generator=numbers), "labels": labels(numbers)}

    return row


def clip(labels):
    def row(numbers):
        length = int(torch.randint(800, 1601, (), generator=numbers))
        return {"input_values": torch.randn(length, generator=numbers), "labels": labels(numbers)}

    return row


def pair(numbers):
    return {
        "input_ids": torch.randint(1, 99, (16,), generator=numbers),
        "pixel_values": torch.randn(3, 32, 32, generator=numbers),
    }


def described_image(numbers):
    """A text about an image, whose patches stand before it."""
    ids = torch.cat([torch.full((PATCHES,), IMAGE_TOKEN), torch.randint(1, 99, (16,), generator=numbers)])
    return {"input_ids": ids, "pixel_values": torch.randn(3, 32, 32, generator=numbers), "labels": ids.clone()}


def image_in_patches(numbers):
    """The same, with the image as its patches, and how many there are, as Qwen's processors make it."""
    row = described_image(numbers)
    patches = torch.randn(4 * PATCHES, 3 * 2 * 4 * 4, generator=numbers)  # four are one token, two are for a film
    grid = torch.tensor([1, 8, 8])
    return {
        **row,
        "pixel_values": patches,
        "image_grid_thw": grid,
        "mm_token_type_ids": (row["input_ids"] == 99).long(),
    }


def image_among_images(numbers):
    """The same, with the image as one of several that a row might have."""
    row = described_image(numbers)
    return {**row, "pixel_values": row["pixel_values"][None]}


def one(numbers):
    return torch.randint(0, 2, (), generator=numbers)


def llava_config():
    """Rows of patches of the vision model's last layer but one, without its class token."""
    return config(
        "Llava",
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**IMAGE, "model_type": "clip_vision_model"},
        image_token_index=IMAGE_TOKEN,
    )


def qwen_config(kind, **vision):
    """Layers of the vision model are told apart by their numbers, and its attention goes from image to image."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    sizes = {"num_heads": 2, "intermediate_size": 64, "out_hidden_size": TEXT["hidden_size"], "patch_size": 4}
    return config(
        kind,
        text_config={**TEXT, "num_key_value_heads": 2, "num_hidden_layers": 4, "rope_parameters": rope},
        vision_config={**sizes, "depth": 4, "hidden_size": 32, **vision},
        image_token_id=IMAGE_TOKEN,
        video_token_id=98,
        vision_start_token_id=97,
        vision_end_token_id=96,
    )


def smolvlm_config():
    return config(
        "SmolVLM",
        text_config={**TEXT, "model_type": "llama"},
        vision_config=IMAGE,
        scale_factor=1,
        image_token_id=IMAGE_TOKEN,
    )


def clip_config():
    text_config = {**TEXT, "eos_token_id": 99, "bos_token_id": 98}
    return config("CLIP", text_config=text_config, vision_config=IMAGE, projection_dim=16)


FAMILIES = {
    "token": (lambda: config("Bert", **TEXT, num_labels=100), "AutoModelForTokenClassification", text("tokens")),
    "masked": (lambda: config("Roberta", **TEXT, pad_token_id=0), "AutoModelForMaskedLM", text("tokens")),
    "causal": (lambda: config("Llama", **TEXT), "AutoModelForCausalLM", text("tokens")),
    "question": (lambda: config("Electra", **TEXT, embedding_size=32), "AutoModelForQuestionAnswering", question),
    "choice": (lambda: config("Bert", **TEXT), "AutoModelForMultipleChoice", choices),
    "seq2seq": (lambda: config("T5", **T5), "AutoModelForSeq2SeqLM", translation),
    "image": (lambda: config("ViT", **IMAGE), "AutoModelForImageClassification", image(one)),
    "convolution": (
        lambda: config("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
        "AutoModelForImageClassification",
        image(one),
    ),
    "segmentation": (
        lambda: config("Beit", **{**IMAGE, "num_hidden_layers": 4}, use_auxiliary_head=False, out_indices=[1, 2, 3, 4]),
        "AutoModelForSemanticSegmentation",
        image(lambda numbers: torch.randint(0, 2, (32, 32), generator=numbers)),
    ),
    "speech": (
        lambda: config("Wav2Vec2", **SPEECH, ctc_zero_infinity=True),
        "AutoModelForCTC",
        clip(lambda numbers: torch.randint(1, 20, (5,), generator=numbers)),
    ),
    "audio": (lambda: config("Wav2Vec2", **SPEECH), "AutoModelForAudioClassification", clip(one)),
    "contrastive": (clip_config, "CLIPModel", pair),
    "image_text": (llava_config, "AutoModelForImageTextToText", described_image),
    "image_stacked": (
        lambda: qwen_config("Qwen3VL", deepstack_visual_indexes=[0, 1], num_position_embeddings=64),
        "AutoModelForImageTextToText",
        image_in_patches,
    ),
    "image_windows": (
        lambda: qwen_config("Qwen2_5_VL", window_size=16, fullatt_block_indexes=[3]),
        "AutoModelForImageTextToText",
        image_in_patches,
    ),
    "image_among": (smolvlm_config, "AutoModelForImageTextToText", image_among_images),
}


def collate(rows):
    """Pad what differs in length: labels by -100, the rest by 0."""
    batch = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if values[0].ndim == 1 and len({len(value) for value in values}) > 1:
            filler = -100 if name == "labels" else 0
            values = torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=filler)
            if name == "input_ids":
                batch["attention_mask"] = (values != 0).long()
            batch[name] = values
        else:
            together = torch.cat if name == "pixel_values" and "image_grid_thw" in rows[0] else torch.stack
            batch[name] = together(values)
    return batch


class Contrastive(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, return_loss=True)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--evaluate", action="store_true", help="Metrics of all predictions after each epoch.")
    parser.add_argument("--output", default="trained")
    options = parser.parse_args()
    if options.wide:
        for sizes in (TEXT, IMAGE, SPEECH):
            sizes.update(WIDE)
    make, auto, row = FAMILIES[options.family]
    settings = make()
    build = getattr(transformers, auto)
    model = build.from_config(settings) if auto.startswith("Auto") else build(settings)
    if options.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    numbers = torch.Generator().manual_seed(0)
    rows = [row(numbers) for _ in range(48)]
    arguments = TrainingArguments(
        output_dir=options.output,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        remove_unused_columns=False,
        report_to="none",
        save_strategy="no",
        eval_strategy="epoch" if options.evaluate else "no",
        use_cpu=not torch.cuda.is_available(),
    )
    kind = Contrastive if options.family == "contrastive" else Trainer
    collator = default_data_collator if options.family == "image" else collate
    evaluated = {"eval_dataset": rows[:20], "compute_metrics": lambda found: {"tensors": len(found.predictions)}}
    given = evaluated if options.evaluate else {}
    kind(model=model, args=arguments, train_dataset=rows, data_collator=collator, **given).train()
    print("micro-batch", arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps)


if __name__ == "__main__":
    main()
