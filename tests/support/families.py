"""Tiny configs of each family of tasks: two of each, by a name."""

import dataclasses
import importlib.util
import json

import pytest
from pydantic import TypeAdapter

from autofit.contract.facts import Model
from autofit.training.tasks.choose import describe_model
from autofit.training.tasks.table import TASKS
from tests.support.synthetic import cpu_facts

TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 96}
_LABELS = {"id2label": {str(i): f"label {i}" for i in range(3)}, "label2id": {f"label {i}": i for i in range(3)}}
_TWO = {"id2label": {"0": "begin", "1": "end"}, "label2id": {"begin": 0, "end": 1}}
_BERT = {"model_type": "bert", **TEXT, "max_position_embeddings": 64, **_LABELS}
_ROBERTA = {"model_type": "roberta", **TEXT, "max_position_embeddings": 66, "pad_token_id": 1, **_LABELS}
_LLAMA = {"model_type": "llama", **TEXT, "num_key_value_heads": 1, "max_position_embeddings": 64, **_LABELS}
_IMAGE = {"image_size": 32, "patch_size": 8, **_LABELS}
_VIT = {"model_type": "vit", **{name: TEXT[name] for name in TEXT if name != "vocab_size"}, **_IMAGE}
_BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
}
_WAVE = {
    **TEXT, "vocab_size": 32, "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8],
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16,
    "mask_time_length": 2, "mask_time_prob": 0.0, "layerdrop": 0.0, **_LABELS,
}  # fmt: skip
_DETR = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 12, **_LABELS, "use_timm_backbone": False,
    "use_pretrained_backbone": False, "backbone": None,
    "backbone_config": {**_BACKBONE, "out_features": ["stage2"]},
}  # fmt: skip
_TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def _of(architecture, config, **others):
    return {"architectures": [architecture], **config, **others}


CONFIGS = {
    "bert-masked": ("masked-lm", _of("BertForMaskedLM", _BERT)),
    "roberta-masked": ("masked-lm", _of("RobertaForMaskedLM", _ROBERTA)),
    "bert-classes": ("sequence-classification", _of("BertForSequenceClassification", _BERT)),
    "llama-classes": ("sequence-classification", _of("LlamaForSequenceClassification", _LLAMA)),
    "bert-tokens": ("token-classification", _of("BertForTokenClassification", _BERT)),
    "roberta-tokens": ("token-classification", _of("RobertaForTokenClassification", _ROBERTA)),
    "bert-answers": ("question-answering", _of("BertForQuestionAnswering", _BERT, **_TWO)),
    "llama-answers": ("question-answering", _of("LlamaForQuestionAnswering", _LLAMA, **_TWO)),
    "bert-choices": ("multiple-choice", _of("BertForMultipleChoice", _BERT)),
    "roberta-choices": ("multiple-choice", _of("RobertaForMultipleChoice", _ROBERTA)),
    "t5": (
        "seq2seq-lm",
        _of(
            "T5ForConditionalGeneration",
            {"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2},
            vocab_size=96,
            decoder_start_token_id=0,
        ),
    ),
    "bart": (
        "seq2seq-lm",
        _of(
            "BartForConditionalGeneration",
            {"model_type": "bart", "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            vocab_size=96,
            max_position_embeddings=64,
        ),
    ),
    "vit": ("image-classification", _of("ViTForImageClassification", _VIT)),
    "resnet": ("image-classification", _of("ResNetForImageClassification", {**_BACKBONE, **_LABELS})),
    "segformer": (
        "semantic-segmentation",
        _of(
            "SegformerForSemanticSegmentation",
            {"model_type": "segformer", "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], **_LABELS},
            num_attention_heads=[1, 1, 2, 2],
            decoder_hidden_size=16,
            mlp_ratios=[2, 2, 2, 2],
            sr_ratios=[2, 2, 1, 1],
        ),
    ),
    "beit": (
        "semantic-segmentation",
        _of(
            "BeitForSemanticSegmentation",
            {**_VIT, "model_type": "beit"},
            num_hidden_layers=4,
            out_indices=[1, 2, 3, 4],
            auxiliary_channels=16,
            use_auxiliary_head=True,
        ),
    ),
    "detr": ("object-detection", _of("DetrForObjectDetection", {"model_type": "detr", **_DETR})),
    "conditional-detr": (
        "object-detection",
        _of("ConditionalDetrForObjectDetection", {"model_type": "conditional_detr", **_DETR}),
    ),
    "wav2vec2": ("ctc", _of("Wav2Vec2ForCTC", {"model_type": "wav2vec2", **_WAVE})),
    "hubert": ("ctc", _of("HubertForCTC", {"model_type": "hubert", **_WAVE})),
    "wav2vec2-classes": (
        "audio-classification",
        _of("Wav2Vec2ForSequenceClassification", {"model_type": "wav2vec2", **_WAVE}),
    ),
    "ast": (
        "audio-classification",
        _of(
            "ASTForAudioClassification",
            {"model_type": "audio-spectrogram-transformer", **_TOWER, "patch_size": 8, **_LABELS},
            max_length=64,
            num_mel_bins=16,
            frequency_stride=8,
            time_stride=8,
        ),
    ),
    "whisper": (
        "speech-seq2seq",
        _of(
            "WhisperForConditionalGeneration",
            {"model_type": "whisper", "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 16},
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            vocab_size=96,
            max_source_positions=40,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
            begin_suppress_tokens=None,
        ),
    ),
    "speech-to-text": (
        "speech-seq2seq",
        _of(
            "Speech2TextForConditionalGeneration",
            {"model_type": "speech_to_text", "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            vocab_size=96,
            max_source_positions=64,
            max_target_positions=32,
            input_feat_per_channel=16,
            conv_channels=32,
        ),
    ),
    "clip": (
        "contrastive",
        _of(
            "CLIPModel",
            {"model_type": "clip", "projection_dim": 16},
            text_config={
                **TEXT,
                "max_position_embeddings": 24,
                "eos_token_id": 95,
                "bos_token_id": 94,
                "pad_token_id": 1,
            },
            vision_config={**_TOWER, "image_size": 32, "patch_size": 8},
        ),
    ),
    "siglip": (
        "contrastive",
        _of(
            "SiglipModel",
            {"model_type": "siglip"},
            text_config={**TEXT, "max_position_embeddings": 24, "projection_size": 32},
            vision_config={**_TOWER, "image_size": 32, "patch_size": 8},
        ),
    ),
}

LENGTHS = {"tokens": 24, "pixels": 64, "samples": 2000, "frames": 40}
ASKED_LENGTHS = {"wav2vec2": LENGTHS["samples"], "segformer": LENGTHS["pixels"], "t5": LENGTHS["tokens"]}
"""Those that a tune is asked for, where what it would choose itself takes long."""


def facts_for(name, folder):
    """What a tune would know of one of the configs, with the model's folder."""
    task, config = CONFIGS[name]
    if any(importlib.util.find_spec(module) is None for module in TASKS[task].packages):
        pytest.skip(f"{task} needs {', '.join(TASKS[task].packages)}")
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    found = describe_model(name, folder, trust_remote_code=False)
    model = TypeAdapter(Model).validate_python(found)
    length = model.usual_seq_len if model.length.fixed else LENGTHS[model.length.unit]
    facts = cpu_facts()
    return dataclasses.replace(
        facts, model=model, workload=dataclasses.replace(facts.workload, seq_len=length, global_batch=4)
    )
