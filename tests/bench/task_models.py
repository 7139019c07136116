"""Models of every family of tasks, in the sizes in which they are published, with fewer layers.

Each has a short name, the length of its rows in the unit of its task, and its config. A family is the task of its
class (``autofit/training/tasks``). ``EACH_TASK`` is what each is tried with.
"""

_LABELS = {"id2label": {str(i): f"label {i}" for i in range(10)}, "label2id": {f"label {i}": i for i in range(10)}}
_TWO = {"id2label": {"0": "begin", "1": "end"}, "label2id": {"begin": 0, "end": 1}}
_ONE = {"id2label": {"0": "reward"}, "label2id": {"reward": 0}}
_WIDTH = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": 6}
_BERT = {"model_type": "bert", **_WIDTH, "vocab_size": 30522, "max_position_embeddings": 512}
_ROBERTA = {**_BERT, "model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514, "pad_token_id": 1}
_DEBERTA = {
    **_BERT, "model_type": "deberta-v2", "vocab_size": 128100, "relative_attention": True, "position_buckets": 256,
    "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "pad_token_id": 0,
    "position_biased_input": False, "max_relative_positions": -1, "type_vocab_size": 0,
}  # fmt: skip
_DISTILBERT = {
    "model_type": "distilbert", "dim": 768, "n_heads": 12, "hidden_dim": 3072, "n_layers": 6, "vocab_size": 30522,
    "max_position_embeddings": 512,
}  # fmt: skip
_LLAMA = {
    "model_type": "llama", "hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 32000,
    "intermediate_size": 2048, "num_hidden_layers": 8, "max_position_embeddings": 1024, "pad_token_id": 0,
}  # fmt: skip
_TWO_STACKS = {
    "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12, "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "d_model": 768,
}  # fmt: skip
_VIT = {"model_type": "vit", **_WIDTH, "image_size": 224, "patch_size": 16, **_LABELS}
_WAVE = {
    **_WIDTH, "vocab_size": 32, "conv_dim": [512] * 7, "conv_stride": [5, 2, 2, 2, 2, 2, 2], "mask_time_prob": 0.05,
    "conv_kernel": [10, 3, 3, 3, 3, 2, 2], "num_conv_pos_embeddings": 128, "num_conv_pos_embedding_groups": 16,
    "feat_extract_norm": "group", "layerdrop": 0.0, **_LABELS,
}  # fmt: skip
_DETR = {
    "model_type": "detr", "d_model": 256, "encoder_layers": 3, "decoder_layers": 3, "num_queries": 100, **_LABELS,
    "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
    "backbone_config": {"model_type": "resnet", "depths": [3, 4, 6, 3], "out_features": ["stage4"]},
}  # fmt: skip


def _of(architecture, length, config, **others):
    return length, {"architectures": [architecture], **config, **others}


TASK_MODELS = {
    "bert-masked": _of("BertForMaskedLM", 512, _BERT),
    "roberta-classes": _of("RobertaForSequenceClassification", 512, _ROBERTA, **_LABELS),
    "llama-reward": _of("LlamaForSequenceClassification", 512, _LLAMA, **_ONE),
    "deberta-tokens": _of("DebertaV2ForTokenClassification", 512, _DEBERTA, **_LABELS),
    "distilbert-tokens": _of("DistilBertForTokenClassification", 512, _DISTILBERT, **_LABELS),
    "bert-answers": _of("BertForQuestionAnswering", 384, _BERT, **_TWO),
    "roberta-choices": _of("RobertaForMultipleChoice", 128, _ROBERTA),
    "t5": _of(
        "T5ForConditionalGeneration",
        512,
        {"model_type": "t5", "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 6, "num_heads": 12},
        vocab_size=32128,
        decoder_start_token_id=0,
    ),
    "bart": _of(
        "BartForConditionalGeneration",
        512,
        {"model_type": "bart", **_TWO_STACKS, "vocab_size": 50265, "max_position_embeddings": 1024},
    ),
    "vit": _of("ViTForImageClassification", 224, _VIT),
    "resnet": _of("ResNetForImageClassification", 224, {"model_type": "resnet", "depths": [3, 4, 6, 3], **_LABELS}),
    "swin": _of(
        "SwinForImageClassification",
        224,
        {"model_type": "swin", "embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24], **_LABELS},
    ),
    "convnext": _of("ConvNextForImageClassification", 224, {"model_type": "convnext", **_LABELS}),
    "segformer": _of("SegformerForSemanticSegmentation", 512, {"model_type": "segformer", **_LABELS}),
    "beit": _of(
        "BeitForSemanticSegmentation",
        224,
        {**_VIT, "model_type": "beit"},
        num_hidden_layers=12,
        out_indices=[3, 5, 7, 11],
        use_auxiliary_head=True,
    ),
    "detr": _of("DetrForObjectDetection", 480, _DETR),
    "wav2vec2": _of("Wav2Vec2ForCTC", 160000, {"model_type": "wav2vec2", **_WAVE}),
    "wav2vec2-classes": _of("Wav2Vec2ForSequenceClassification", 160000, {"model_type": "wav2vec2", **_WAVE}),
    "ast": _of(
        "ASTForAudioClassification",
        1024,
        {"model_type": "audio-spectrogram-transformer", **_WIDTH, "max_length": 1024, "num_mel_bins": 128, **_LABELS},
    ),
    "whisper": _of(
        "WhisperForConditionalGeneration",
        128,
        {
            "model_type": "whisper",
            **_TWO_STACKS,
            "num_mel_bins": 80,
            "vocab_size": 51865,
            "begin_suppress_tokens": None,
        },
        max_source_positions=1500,
        max_target_positions=448,
    ),
    "clip": _of(
        "CLIPModel",
        77,
        {"model_type": "clip", "projection_dim": 512},
        text_config={"num_hidden_layers": 6},
        vision_config={"num_hidden_layers": 6, "image_size": 224, "patch_size": 32},
    ),
    "siglip": _of(
        "SiglipModel",
        64,
        {"model_type": "siglip"},
        text_config={**_WIDTH, "vocab_size": 50000, "max_position_embeddings": 64},
        vision_config={**_WIDTH, "image_size": 224, "patch_size": 16},
    ),
}

EACH_TASK = (
    {},
    {"precision": "fp32", "micro_batch": 4, "accumulation": 2},
    {"checkpointing": "full"},
    {"evaluation": 32},
    {"adapter": "lora:r=16", "precision": "fp16"},
    {"micro_batch": 1, "optimizer": "adamw_8bit"},
)
"""``evaluation``: rows that a Trainer evaluates at once, which is no technique's value but a winner's."""
