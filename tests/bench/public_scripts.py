"""What transformers' own example scripts ask for: tiny models with tokenizers and processors, data files, metrics.

The scripts are read from a checkout of transformers (``examples/pytorch``); nothing of them is kept here. They need
``evaluate``, ``torchvision``, ``librosa`` and ``torchcodec`` beside what autofit needs, by their family.
"""

import json
import random
from pathlib import Path

from tests.support.scripted import SIZES, WORDS

SPECIAL = {
    "pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "cls_token": "<cls>",
    "sep_token": "<sep>", "mask_token": "<mask>",
}  # fmt: skip
PIXELS = {"height": 32, "width": 32}
VISION = {**{name: SIZES[name] for name in SIZES if name not in {"vocab_size", "max_position_embeddings"}}}
IMAGES = {**VISION, "image_size": 32, "patch_size": 8}
SOUNDS = {
    **VISION, "conv_dim": [16, 16], "conv_kernel": [10, 8], "conv_stride": [5, 4], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "vocab_size": 32,
}  # fmt: skip
METRICS = (
    "accuracy",
    "mse",
    "seqeval",
    "squad",
    "squad_v2",
    "rouge",
    "sacrebleu",
    "mean_iou",
    "wer",
    "cer",
    "xnli",
    "f1",
)
RATE = 16000


def models(folder):
    """A folder for each model, with what reads its rows."""
    import transformers as hf

    tokens, vocabulary = tokenizer()
    text = {**SIZES, "vocab_size": vocabulary, "max_position_embeddings": 128, "pad_token_id": 0}
    small = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": vocabulary}
    starts = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 3}
    read = {
        "bert": hf.AutoModelForMaskedLM.from_config(hf.BertConfig(**text)),
        "roberta": hf.AutoModelForMaskedLM.from_config(hf.RobertaConfig(**text)),
        "gpt2": hf.AutoModelForCausalLM.from_config(
            hf.GPT2Config(
                n_embd=32, n_layer=2, n_head=2, n_positions=128, vocab_size=vocabulary, bos_token_id=2, eos_token_id=3
            )
        ),
        "t5": hf.AutoModelForSeq2SeqLM.from_config(hf.T5Config(**small, d_kv=16, **starts)),
        "bart": hf.AutoModelForSeq2SeqLM.from_config(
            hf.BartConfig(
                d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
                encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=vocabulary, max_position_embeddings=128, **starts,
            )
        ),
        "xlnet": hf.XLNetLMHeadModel(
            hf.XLNetConfig(d_model=32, n_layer=2, n_head=2, d_inner=64, vocab_size=vocabulary)
        ),
    }  # fmt: skip
    for name, model in read.items():
        model.save_pretrained(folder / name)
        tokens.save_pretrained(folder / name)
    seen = {
        "vit": hf.AutoModelForImageClassification.from_config(hf.ViTConfig(**IMAGES)),
        "mae": hf.ViTMAEForPreTraining(
            hf.ViTMAEConfig(
                **IMAGES, decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=2,
                decoder_intermediate_size=64,
            )
        ),
        "beit": hf.AutoModelForSemanticSegmentation.from_config(
            hf.BeitConfig(
                **{**IMAGES, "num_hidden_layers": 4}, use_auxiliary_head=False, out_indices=[1, 2, 3, 4], vocab_size=32
            )
        ),
        "yolos": hf.AutoModelForObjectDetection.from_config(
            hf.YolosConfig(**{**VISION, "image_size": [64, 64], "patch_size": 8}, num_detection_tokens=5)
        ),
    }  # fmt: skip
    processor = hf.ViTImageProcessor(size=PIXELS)
    for name, model in seen.items():
        model.save_pretrained(folder / name)
        (hf.YolosImageProcessor() if name == "yolos" else processor).save_pretrained(folder / name)
    clip = hf.CLIPModel(
        hf.CLIPConfig(
            text_config={**text, "eos_token_id": 3, "bos_token_id": 2}, vision_config=IMAGES, projection_dim=16
        )
    )
    clip.save_pretrained(folder / "clip")
    tokens.save_pretrained(folder / "clip")
    hf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=PIXELS).save_pretrained(folder / "clip")
    heard = hf.Wav2Vec2ForPreTraining(
        hf.Wav2Vec2Config(**{**SOUNDS, "num_codevectors_per_group": 8, "codevector_dim": 16, "proj_codevector_dim": 16})
    )
    heard.save_pretrained(folder / "wav2vec2")
    hf.Wav2Vec2FeatureExtractor(sampling_rate=RATE, return_attention_mask=True).save_pretrained(folder / "wav2vec2")
    home = kept(folder / "hub", "models--made--wav2vec2")
    for file in (folder / "wav2vec2").iterdir():
        (home / file.name).symlink_to(file)


def kept(home, name):
    """The folder of a repository that huggingface_hub finds in its cache without a network."""
    made = home / "hub" / name
    for place in ("refs", "snapshots/made"):
        (made / place).mkdir(parents=True)
    (made / "refs" / "main").write_text("made")
    return made / "snapshots" / "made"


def tokenizer():
    """A tokenizer of words that frames a text as BERT's does, and the size of its vocabulary."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: number for number, word in enumerate((*SPECIAL.values(), *WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    frame = [("<cls>", vocabulary["<cls>"]), ("<sep>", vocabulary["<sep>"])]
    words.post_processor = processors.TemplateProcessing("<cls> $A <sep>", "<cls> $A <sep> $B:1 <sep>:1", frame)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=128, **SPECIAL)
    return made, len(vocabulary)


def lines(path, rows):
    """Write rows, an object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def data(folder, rows=48):
    """Files of text, pictures and sounds, and metrics that need no network."""
    numbers = random.Random(0)

    def say(low, high):
        return " ".join(numbers.choices(WORDS, k=numbers.randint(low, high)))

    def tagged():
        words = say(4, 30).split()
        return {"tokens": words, "ner_tags": [numbers.choice(("O", "B-A", "B-B")) for _ in words]}

    def asked():
        text = say(10, 40)
        word = text.split()[3]
        answers = {"text": [word], "answer_start": [text.index(word)]}
        return {"id": str(numbers.random()), "title": "", "context": text, "question": say(4, 4), "answers": answers}

    def ended():
        endings = {f"ending{place}": say(3, 9) for place in range(4)}
        return {"sent1": say(4, 12), "sent2": say(2, 4), **endings, "label": numbers.randrange(4)}

    makers = {
        "classes": lambda: {"sentence": say(4, 40), "label": numbers.randrange(2)},
        "tags": tagged,
        "choices": ended,
        "summaries": lambda: {"text": say(10, 40), "summary": say(3, 8)},
        "translations": lambda: {"translation": {"en": say(4, 30), "ro": say(4, 30)}},
    }
    for name, make in makers.items():
        for part in ("train", "validation"):
            lines(folder / f"{name}-{part}.json", [make() for _ in range(rows)])
    for part in ("train", "validation"):
        (folder / f"questions-{part}.json").write_text(json.dumps({"data": [asked() for _ in range(rows)]}))
        (folder / f"text-{part}.txt").write_text("".join(say(20, 60) + "\n" for _ in range(4 * rows)))
    (folder / "nltk" / "tokenizers" / "punkt").mkdir(parents=True)
    pictures(folder, rows)
    sounds(folder, rows)
    for name in METRICS:
        (folder / name).mkdir()
        (folder / name / f"{name}.py").write_text(
            "import collections\nimport datasets\nimport evaluate\n\n\nclass Metric(evaluate.Metric):\n"
            "    def _info(self):\n"
            "        kinds = {name: datasets.Value('int64') for name in ('predictions', 'references')}\n"
            "        return evaluate.MetricInfo(description='', citation='', features=datasets.Features(kinds))\n\n"
            "    def add_batch(self, **_):\n        '''Nothing.'''\n\n"
            "    def compute(self, **_):\n        '''Nothing.'''\n        return collections.defaultdict(float)\n"
        )


def pictures(folder, rows):
    """Folders of pictures by class, with captions, with a map of classes, and with boxes."""
    import datasets
    import numpy as np
    from PIL import Image

    numbers = np.random.default_rng(0)
    captions, maps, boxes = [], [], []
    for place in range(rows):
        home = folder / "pictures" / ("cat", "dog")[place % 2]
        home.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(numbers.integers(0, 255, (40, 48, 3), dtype=np.uint8))
        picture.save(home / f"{place}.png")
        captions.append({"image_path": str(home / f"{place}.png"), "caption": " ".join(WORDS[place : place + 7])})
        maps.append({"image": picture, "label": Image.fromarray(numbers.integers(0, 2, (40, 48), dtype=np.uint8))})
        objects = {"id": [place], "area": [100.0], "bbox": [[4.0, 4.0, 10.0, 10.0]], "category": [place % 2]}
        boxes.append({"image_id": place, "image": picture, "width": 48, "height": 40, "objects": objects})
    lines(folder / "captions.json", captions)
    feature = datasets.Image()
    (folder / "maps").mkdir()
    kinds = datasets.Features(image=feature, label=feature)
    datasets.Dataset.from_list(maps, features=kinds).to_parquet(folder / "maps" / "train.parquet")
    classes = json.dumps({"0": "sky", "1": "sea"})
    (kept(folder / "hub", "datasets--maps") / "id2label.json").write_text(classes)
    (folder / "boxes").mkdir()
    whole = datasets.Value("int64")
    listed = {
        "id": datasets.List(whole), "area": datasets.List(datasets.Value("float32")),
        "bbox": datasets.List(datasets.List(datasets.Value("float32"))),
        "category": datasets.List(datasets.ClassLabel(names=["cat", "dog"])),
    }  # fmt: skip
    kinds = datasets.Features(image_id=whole, image=feature, width=whole, height=whole, objects=listed)
    for part in ("train", "test"):
        datasets.Dataset.from_list(boxes, features=kinds).to_parquet(folder / "boxes" / f"{part}.parquet")


def sounds(folder, rows):
    """Clips of up to two seconds, each with a text and a class."""
    import datasets
    import numpy as np
    import soundfile

    numbers = np.random.default_rng(0)
    kinds = datasets.Features(
        audio=datasets.Audio(sampling_rate=RATE),
        text=datasets.Value("string"),
        label=datasets.ClassLabel(names=["no", "yes"]),
    )
    (folder / "clips").mkdir()
    (folder / "speech").mkdir()
    clips = []
    for place in range(rows):
        clip = numbers.normal(0, 0.1, int(numbers.integers(RATE // 2, 2 * RATE))).astype("float32")
        soundfile.write(folder / "clips" / f"{place}.wav", clip, RATE)
        clips.append({"audio": str(folder / "clips" / f"{place}.wav"), "text": "hello world", "label": place % 2})
    datasets.Dataset.from_list(clips, features=kinds).to_parquet(folder / "speech" / "train.parquet")


def scripts(checkout: Path):
    """Name, script and arguments of each example that this page's data can feed."""
    home = checkout / "examples" / "pytorch"
    train = (
        "--do_train", "--output_dir", "trained", "--use_cpu", "--report_to", "none",
        "--per_device_train_batch_size", "4",
    )  # fmt: skip
    loop = ("--per_device_train_batch_size", "4", "--output_dir", "trained", "--num_train_epochs", "1")

    def files(name, ending="json"):
        return "--train_file", f"{name}-train.{ending}", "--validation_file", f"{name}-validation.{ending}"

    def model(name):
        return "--model_name_or_path", name

    drop = ("--remove_unused_columns", "False")
    tongues = ("--source_lang", "en", "--target_lang", "ro", "--max_source_length", "64", "--max_target_length", "32")
    said_back = ("--val_max_target_length", "16", "--num_beams", "1")
    windows = ("--max_seq_length", "96", "--doc_stride", "32")
    short = ("--max_source_length", "64", "--max_target_length", "32")
    said = ("--train_split_name", "train", "--eval_split_name", "train", "--text_column_name", "text")
    pairs = {
        "text-classification/run_glue": (*model("bert"), *files("classes"), *train),
        "text-classification/run_classification": (
            *model("bert"), *files("classes"), "--text_column_names", "sentence", "--label_column_name", "label",
            *train,
        ),
        "token-classification/run_ner": (*model("roberta"), *files("tags"), *train),
        "question-answering/run_qa": (*model("bert"), *files("questions"), *windows, *train),
        "question-answering/run_seq2seq_qa": (
            *model("t5"), *files("questions"), *windows, "--answer_column", "answers", *train,
        ),
        "multiple-choice/run_swag": (*model("bert"), *files("choices"), *train),
        "summarization/run_summarization": (*model("t5"), *files("summaries"), *short, *train),
        "translation/run_translation": (*model("bart"), *files("translations"), *tongues, *train),
        "language-modeling/run_mlm": (*model("roberta"), *files("text", "txt"), "--max_seq_length", "64", *train),
        "language-modeling/run_clm": (*model("gpt2"), *files("text", "txt"), "--block_size", "64", *train),
        "language-modeling/run_fim": (*model("gpt2"), *files("text", "txt"), "--block_size", "64", *train),
        "language-modeling/run_plm": (*model("xlnet"), *files("text", "txt"), "--max_seq_length", "64", *train),
        "image-classification/run_image_classification": (
            *model("vit"), "--train_dir", "pictures", "--label_column_name", "label", *drop, *train,
        ),
        "image-pretraining/run_mim": (
            "--model_type", "vit", "--config_name_or_path", "vit", "--image_processor_name", "vit", "--dataset_name",
            "pictures", "--mask_patch_size", "8", "--patch_size", "8", "--image_size", "32", "--encoder_stride", "8",
            *drop, *train,
        ),
        "image-pretraining/run_mae": (*model("mae"), "--dataset_name", "pictures", *drop, *train),
        "semantic-segmentation/run_semantic_segmentation": (*model("beit"), "--dataset_name", "maps", *drop, *train),
        "object-detection/run_object_detection": (
            *model("yolos"), "--dataset_name", "boxes", "--image_square_size", "64", "--ignore_mismatched_sizes",
            *drop, "--eval_do_concat_batches", "False", *train,
        ),
        "contrastive-image-text/run_clip": (
            *model("clip"), "--train_file", "captions.json", "--max_seq_length", "16", *drop, *train,
        ),
        "audio-classification/run_audio_classification": (
            *model("wav2vec2"), "--dataset_name", "speech", "--train_split_name", "train", "--eval_split_name", "train",
            "--max_length_seconds", "1", "--attention_mask", "False", *drop, *train,
        ),
        "speech-recognition/run_speech_recognition_ctc": (
            *model("made/wav2vec2"), "--tokenizer_name_or_path", "bert", "--dataset_name", "speech", *said, *train,
        ),
        "text-classification/run_glue_no_trainer": (*model("bert"), *files("classes"), *loop),
        "token-classification/run_ner_no_trainer": (*model("roberta"), *files("tags"), *loop),
        "question-answering/run_qa_no_trainer": (*model("bert"), *files("questions"), *windows, *loop),
        "multiple-choice/run_swag_no_trainer": (*model("bert"), *files("choices"), *loop),
        "language-modeling/run_clm_no_trainer": (*model("gpt2"), *files("text", "txt"), "--block_size", "64", *loop),
        "language-modeling/run_mlm_no_trainer": (
            *model("roberta"), *files("text", "txt"), "--max_seq_length", "64", *loop,
        ),
        "summarization/run_summarization_no_trainer": (*model("t5"), *files("summaries"), *short, *said_back, *loop),
        "translation/run_translation_no_trainer": (
            *model("bart"), *files("translations"), *tongues[:4], *short, *said_back, *loop,
        ),
        "image-classification/run_image_classification_no_trainer": (
            *model("vit"), "--dataset_name", "pictures", "--label_column_name", "label", *loop,
        ),
    }  # fmt: skip
    for name, arguments in pairs.items():
        if (home / f"{name}.py").exists():
            yield f"transformers {name.split('/')[1].removeprefix('run_')}", home / f"{name}.py", arguments
