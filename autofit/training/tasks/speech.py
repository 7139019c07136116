"""Sounds: their classes, and their texts, aligned (CTC) or written by a decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autofit.contract.facts import Length
from autofit.training.tasks.inputs import sound_length, sound_shape, tokens
from autofit.training.tasks.kind import MAIN, Kind, Spec
from autofit.training.tasks.seq2seq import name_start
from autofit.training.tasks.text import classes

if TYPE_CHECKING:
    import torch

_USUAL_TARGET = 128


def _transcript(spec: Spec, rows: int, generator: torch.Generator) -> torch.Tensor:
    """No longer than a quarter of the frames, since a letter takes one, and two like letters one more between them."""
    return tokens(_with_own_vocabulary(spec), rows, max(1, _frames(spec) // 4), generator=generator)


def _mask(spec: Spec, rows: int, _generator: torch.Generator) -> torch.Tensor | None:
    """Which frames are a clip's own: all of them. Processors of samples leave it out where none is padded."""
    import torch

    return None if spec.main == "input_values" else torch.ones((rows, sound_shape(spec)[0]), dtype=torch.long)


def _with_own_vocabulary(spec: Spec) -> Spec:
    import dataclasses

    return dataclasses.replace(spec, vocabulary=int(spec.config.get_text_config().vocab_size))


def _frames(spec: Spec) -> int:
    """Frames that an encoder makes of a clip: by its convolutions, or by the factor that it says it makes fewer."""
    config, length = spec.config, spec.length
    if spec.main == "input_values":
        for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
            length = (length - kernel) // stride + 1
        return length
    if getattr(config, "add_adapter", False):
        length //= config.adapter_stride**config.num_adapter_layers
    return length // int(getattr(getattr(config, "encoder_config", config), "subsampling_factor", 1))


def _most(config: Any) -> int | None:
    return getattr(config, "max_target_positions", None)


def _target_length(config: Any, _main: str) -> Length:
    """The length is that of the text; the clip's is the model's own."""
    return Length(usual=min(_USUAL_TARGET, _most(config) or _USUAL_TARGET))


def _target(spec: Spec, rows: int, generator: torch.Generator) -> torch.Tensor:
    return tokens(_with_own_vocabulary(spec), rows, spec.length, generator=generator)


KINDS = (
    Kind(
        name="audio-classification",
        new_head=True,
        auto="AutoModelForAudioClassification",
        trained_on="classes of sounds",
        makers={"labels": classes},
        sample="clip",
        length=sound_length,
        tokens=0,
    ),
    Kind(
        name="ctc",
        sums=lambda config: getattr(config, "ctc_loss_reduction", "mean") == "sum",
        new_head=True,
        auto="AutoModelForCTC",
        trained_on="texts of sounds, aligned by CTC",
        arguments=(MAIN, "attention_mask", "labels"),
        makers={"attention_mask": _mask, "labels": _transcript},
        sample="clip",
        length=sound_length,
        tokens=0,
    ),
    Kind(
        name="speech-seq2seq",
        auto="AutoModelForSpeechSeq2Seq",
        trained_on="texts of sounds, written by a decoder",
        arguments=("input_features", "labels"),
        makers={"labels": _target},
        sample="clip",
        length=_target_length,
        most=_most,
        generates=True,
        prepare=name_start,
    ),
)
