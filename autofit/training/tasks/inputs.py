"""The inputs of models, by the names that the arguments of ``forward()`` have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autofit.contract.facts import Length
from autofit.training.tasks.kind import Maker, Spec

if TYPE_CHECKING:
    import torch

_USUAL_PIXELS = 224
"""Of a model whose config names no size: what the processors of ResNet, ConvNeXt and most others make."""
_USUAL_SECONDS = 10
_SAMPLES_A_SECOND = 16_000
_FRAMES_A_SECOND = 100


def part(config: Any, name: str) -> Any:
    """The part of a config that is a model of its own, such as ``vision_config``; the config itself without one."""
    return getattr(config, name, None) or config


def tokens(spec: Spec, *shape: int, generator: torch.Generator) -> torch.Tensor:
    """Random ids of the vocabulary, of that shape, and none of those that mean more than a word to the model.

    A padding token would be counted as no token, and a second end of a text would make two of it.
    """
    import torch

    special = special_ids(spec.config)
    usable = torch.tensor([one for one in range(min(spec.vocabulary, 1 << 20)) if one not in special] or [0])
    if spec.few is not None:
        usable = usable[torch.randint(0, len(usable), (spec.few,), generator=generator)]
    return usable[torch.randint(0, len(usable), shape, generator=generator)]


def special_ids(config: Any) -> set[int]:
    """Ids that a config gives a meaning of their own: ``pad_token_id``, ``image_token_index``..."""
    found: set[int] = set()
    for one in (config, config.get_text_config()):
        for name, value in vars(one).items():
            if name.endswith(("_token_id", "_token_index")):
                found |= {each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)}
    return found


def _input_ids(spec: Spec, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Rows of tokens; where the config names an end of a text, each ends with one."""
    made = tokens(spec, rows, spec.length, generator=generator)
    end = getattr(spec.config.get_text_config(), "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < spec.vocabulary:
        made[..., -1] = end
    return made


def image_side(config: Any) -> tuple[int, int]:
    """Height and width of the images that a config is for; of none that names no size, what is usual."""
    size = getattr(part(config, "vision_config"), "image_size", None)
    if isinstance(size, dict):
        size = (size.get("height", _USUAL_PIXELS), size.get("width", _USUAL_PIXELS))
    if isinstance(size, list | tuple) and len(size) == 2:
        return int(size[0]), int(size[1])
    return (int(size), int(size)) if isinstance(size, int) and size > 0 else (_USUAL_PIXELS, _USUAL_PIXELS)


def names_image_size(config: Any) -> bool:
    """Whether the config says how large its images are."""
    return bool(getattr(part(config, "vision_config"), "image_size", None))


def image_shape(spec: Spec) -> tuple[int, int, int]:
    """Channels, height and width."""
    channels = int(getattr(part(spec.config, "vision_config"), "num_channels", 3))
    if names_image_size(spec.config):
        return channels, *image_side(spec.config)
    return channels, spec.length, spec.length


def image_length(config: Any, _main: str) -> Length:
    """The length of an image: pixels on its longer side."""
    height, width = image_side(config)
    fixed = None
    if names_image_size(config):
        fixed = f"its images have {height} x {width} pixels, by its config"
    return Length(unit="pixels", usual=max(height, width), fixed=fixed)


def _pixel_values(spec: Spec, rows: int, generator: torch.Generator) -> torch.Tensor:
    import torch

    return torch.randn((rows, *image_shape(spec)), generator=generator)


def sound_shape(spec: Spec) -> tuple[int, ...]:
    """A clip: its samples, or the features of each of its frames, in the order of the model's class."""
    config, name = spec.config, spec.main
    if name == "input_values":
        if _is_spectrogram(config):
            return (spec.length, int(config.num_mel_bins))
        return (spec.length,)
    if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        return (int(config.num_mel_bins), 2 * int(config.max_source_positions))  # Whisper's: 30 seconds, always
    width = next(
        (
            int(value)
            for one in ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins")
            if isinstance(value := getattr(part(config, "encoder_config"), one, None), int)
        ),
        80,
    )
    return (sound_frames(config) or spec.length, width)


def sound_frames(config: Any) -> int | None:
    """Frames of a clip where they are no matter of the length: Speech2Text's longest."""
    longest = getattr(config, "max_source_positions", None)
    return int(longest) if isinstance(longest, int) else None


def _is_spectrogram(config: Any) -> bool:
    """Whether ``input_values`` are frames of features, of a fixed number: the Audio Spectrogram Transformer's."""
    return hasattr(config, "num_mel_bins") and hasattr(config, "max_length")


def sound_length(config: Any, main: str) -> Length:
    """The length of a clip that is classified or transcribed frame by frame."""
    if main == "input_values":
        if _is_spectrogram(config):
            frames = int(config.max_length)
            return Length(unit="frames", usual=frames, fixed=f"its clips have {frames} frames, by its config")
        return Length(unit="samples", usual=_USUAL_SECONDS * _SAMPLES_A_SECOND)
    longest = sound_frames(config)
    if longest is not None:
        frames = 2 * longest if hasattr(config, "num_mel_bins") else longest
        return Length(unit="frames", usual=frames, fixed=f"its clips have {frames} frames, by its config")
    return Length(unit="frames", usual=_USUAL_SECONDS * _FRAMES_A_SECOND)


def _sound(spec: Spec, rows: int, generator: torch.Generator) -> torch.Tensor:
    import torch

    return torch.randn((rows, *sound_shape(spec)), generator=generator)


INPUTS: Mapping[str, Maker] = {
    "input_ids": _input_ids,
    "pixel_values": _pixel_values,
    "input_values": _sound,
    "input_features": _sound,
}
