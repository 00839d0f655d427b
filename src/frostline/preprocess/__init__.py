"""Preprocessing declared as data, with the same numbers on every side."""

from typing import Any, Literal

from frostline.core.config import check_type
from frostline.core.errors import SettingError
from frostline.core.hints import add_hints, hint_for
from frostline.preprocess.apply import Applied
from frostline.preprocess.sounds import LACKS_SOUND, has_sound_packages
from frostline.preprocess.spec import Preprocess
from frostline.preprocess.steps import (
    CenterCrop,
    ColorJitter,
    Decode,
    DecodeAudio,
    NamedInputs,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    ReadArray,
    Resize,
    Squeeze,
    Step,
    Stored,
    Tokenize,
)
from frostline.preprocess.tokens import TextTokenizer, content_digest, fit_length
from frostline.preprocess.transforms import from_transform

__all__ = (
    "PRESETS",
    "Applied",
    "CenterCrop",
    "ColorJitter",
    "Decode",
    "DecodeAudio",
    "NamedInputs",
    "Normalize",
    "Preprocess",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "ReadArray",
    "Resize",
    "Squeeze",
    "Step",
    "Stored",
    "Tokenize",
    "array",
    "audio",
    "efficientnet_lite",
    "from_transform",
    "imagenet",
    "named_inputs",
    "preset_of",
    "text",
)


def __getattr__(name: str) -> Any:
    hint = "" if name[:1] == "_" else hint_for(name, __all__, "preprocess")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted(__all__)


_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)


@add_hints
def imagenet(size: int, augment: bool = False, *, value_range: tuple[float, float] | None = None) -> Preprocess:
    """Preprocessing for networks trained on ImageNet, as torchvision does it: resize, centre crop, normalise.

    Args:
        size: side of the network's input in pixels. The shorter side of the image is scaled to 8/7 of it (256 for 224).
        augment: True takes a random crop and a random horizontal flip instead of the centre, new ones in each epoch.
        value_range: the values that become black and white in grey images with more than 8 bits per pixel, such as
            ``(0, 65535)`` for X-rays; see ``Decode``.
    """
    check_type("augment", augment, bool)
    decode = Decode(value_range=value_range)
    return Preprocess(steps=(decode, *_geometry(size, augment), _scaled(_IMAGENET_MEAN, _IMAGENET_STD)))


def efficientnet_lite(size: int) -> Preprocess:
    """Preprocessing for EfficientNet-lite: bicubic resize, centre crop of 7/8, pixels as ``(x - 127) / 128``."""
    check_type("size", size, int)
    normalise = Normalize(mean=(127.0,) * 3, std=(128.0,) * 3)
    return Preprocess(steps=(Decode(), Resize(size * 8 // 7, "bicubic"), CenterCrop(size), normalise))


PRESETS = {"efficientnet_lite": efficientnet_lite, "imagenet": imagenet}
"""What ``frostline ingest --preprocess NAME:SIDE`` takes."""


def preset_of(preprocess: Preprocess) -> str | None:
    """Name and side of the preset that a preprocessing is, such as ``imagenet:224``; None where it is none."""
    side = preprocess.shape[-1]
    return next((f"{name}:{side}" for name, make in PRESETS.items() if make(side) == preprocess), None)


def array(shape: tuple[int, ...], dtype: Literal["float32", "int64"] = "float32") -> Preprocess:
    """Preprocessing for networks on arrays, such as rows of numbers, spectra or volumes: the stored array, converted.

    Samples are ``.npy`` files, as NumPy's ``save`` writes them, in class folders or tars, or such bytes in a column of
    Parquet files. Every sample has the same shape.

    Args:
        shape: shape of every sample, without the batch dimension.
        dtype: type of the network's input. ``float32`` converts numbers of any type; ``int64`` keeps whole numbers.

    Raises:
        SettingError: The shape or the type makes no sense, or there are too many numbers.
    """
    return Preprocess(steps=(ReadArray(shape, dtype),))


@add_hints
def audio(
    seconds: float,
    *,
    sample_rate: int = 16_000,
    features: Literal["log_mel", "waveform"] = "log_mel",
    n_mels: int = 80,
    n_fft: int = 400,
    hop_length: int = 160,
    normalize: bool = False,
) -> Preprocess:
    """Preprocessing for networks on sound: a log-mel spectrogram ``float32[1, n_mels, frames]``, or a waveform.

    Sounds are WAV, FLAC or OGG files in class folders or tars, or such bytes in a column of Parquet files. Channels are
    averaged, other sample rates are resampled (soxr), and every sound is cut to the same length or padded with silence
    at its end. A spectrogram equals ``log(MelSpectrogram(wave) + 1e-6)`` with torchaudio's ``MelSpectrogram``, within
    1e-4. A waveform is ``float32[samples]``.

    Args:
        seconds: length of every sample in seconds; longer sounds are cut, shorter ones are padded.
        sample_rate: samples per second; sounds of other rates are resampled.
        features: ``log_mel`` for a spectrogram, or ``waveform``.
        n_mels: number of mel bands of a spectrogram.
        n_fft: samples in one frame of a spectrogram; the default is 25 ms.
        hop_length: samples from one frame of a spectrogram to the next; the default is 10 ms.
        normalize: True scales a waveform to mean 0 and variance 1, as Wav2Vec2's feature extractor does.

    Raises:
        SettingError: An argument makes no sense, or the packages ``soundfile`` and ``soxr`` are not installed.
    """
    step = DecodeAudio(sample_rate, seconds, features, n_mels, n_fft, hop_length, normalize)
    if not has_sound_packages():
        raise SettingError(LACKS_SOUND)
    return Preprocess(steps=(step,))


def text(
    tokenizer: TextTokenizer, max_length: int = 128, *, names: tuple[str, str] = ("input_ids", "attention_mask")
) -> Preprocess:
    """Preprocessing for networks on text: token ids and attention mask, ``int64[2, max_length]``.

    They equal those of a fast tokenizer of transformers with ``padding="max_length"`` and ``truncation=True``.

    Args:
        tokenizer: path of a ``tokenizer.json``, a ``tokenizers.Tokenizer``, or a fast tokenizer of transformers.
        max_length: number of tokens that every text is padded or cut to.
        names: names of the arguments of the network's ``forward`` that take the token ids and the attention mask.

    Raises:
        SettingError: The tokenizer is of none of these kinds, is broken, has no token to pad with or is too large, the
            ``tokenizers`` package is not installed, or another argument makes no sense.
    """
    step = Tokenize("0" * 64, max_length, names)
    content = fit_length(tokenizer, step.max_length)
    return Preprocess(steps=(Tokenize(content_digest(content), max_length, step.names),), tokenizer=content)


def named_inputs(**parts: Preprocess) -> Preprocess:
    """Preprocessing for networks with several inputs, such as CLIP: one preprocessing per input.

    The data set says which column holds which input: ``Dataset(url, column={"pixel_values": "image", ...})``. A sample
    is sent as one array of 64-bit numbers; without a network, ``unpack`` of the result takes it apart by name.

    Args:
        **parts: preprocessing of each input, by the name of the ``forward`` argument that takes it. A text has the name
            of the argument for its token ids; the second of its ``names`` takes the attention mask.

    Raises:
        SettingError: An argument is no preprocessing, there are fewer than two parts or more than eight, two have one
            name, or texts have several tokenizers.
    """
    for name, part in parts.items():
        check_type(name, part, Preprocess)
        if part.input_slots:
            raise SettingError(f"{name} takes a preprocessing of one part, and this one has several")
    step = NamedInputs(tuple(parts), tuple(part.steps for part in parts.values()))
    content = next((part.tokenizer for part in parts.values() if part.tokens is not None), b"")
    return Preprocess(steps=(step,), tokenizer=content)


def _geometry(size: int, augment: bool) -> tuple[Step, ...]:
    check_type("size", size, int)
    if augment:
        return RandomResizedCrop(size), RandomHorizontalFlip(0.5)
    return Resize(size * 8 // 7), CenterCrop(size)


def _scaled(mean: tuple[float, ...], std: tuple[float, ...]) -> Normalize:
    return Normalize(mean=tuple(255 * value for value in mean), std=tuple(255 * value for value in std))
