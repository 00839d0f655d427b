"""Preprocessing declared as data, with the same numbers on every side."""

from typing import Literal

from frostline.core.config import check_type
from frostline.core.errors import SettingError
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
    "text",
)

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)


def imagenet(size: int, augment: bool = False, *, value_range: tuple[float, float] | None = None) -> Preprocess:
    """What networks trained on ImageNet expect, as torchvision does it.

    Args:
        size: side of the network's input; the shorter side is scaled to 8/7 of it (256 for 224).
        augment: True cuts out a random part and flips at random, anew each epoch, in place of the middle.
        value_range: values of grey images with more than 8 bits a pixel, such as X-rays, that become black and white,
            as ``(0, 65535)``; see ``Decode``.
    """
    decode = Decode(value_range=value_range)
    return Preprocess(steps=(decode, *_geometry(size, augment), _scaled(_IMAGENET_MEAN, _IMAGENET_STD)))


def efficientnet_lite(size: int) -> Preprocess:
    """What EfficientNet-lite expects: bicubic, the middle 7/8, pixels as ``(x - 127) / 128``."""
    normalise = Normalize(mean=(127.0,) * 3, std=(128.0,) * 3)
    return Preprocess(steps=(Decode(), Resize(size * 8 // 7, "bicubic"), CenterCrop(size), normalise))


def array(shape: tuple[int, ...], dtype: Literal["float32", "int64"] = "float32") -> Preprocess:
    """What networks take that were trained on rows of numbers, spectra or volumes: an array as it is kept.

    Samples are ``.npy`` files in class folders or tars, or such bytes in a column of Parquet files; NumPy's ``save``
    writes them. Every sample has the same shape. Stored numbers of any type become float32; whole ones may stay whole.

    Args:
        shape: shape of every sample, without the batch.
        dtype: type of the numbers that the network takes, ``float32`` or ``int64``.

    Raises:
        SettingError: The shape or the type makes no sense, or there are too many numbers.
    """
    return Preprocess(steps=(ReadArray(shape, dtype),))


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
    """What networks for sound expect: a log-mel spectrogram ``[1, n_mels, frames]``, or the wave ``[samples]``.

    Sounds are WAV, FLAC or OGG files in class folders or tars, or such bytes in a column of Parquet files. Channels are
    averaged, other rates resampled (soxr), and every sound is cut to one length or padded with silence behind it. A
    spectrogram is ``log(MelSpectrogram(wave) + 1e-6)`` with torchaudio's ``MelSpectrogram``, to 1e-4.

    Args:
        seconds: length of every sample in seconds; longer sounds are cut, shorter ones get silence behind.
        sample_rate: samples a second; sounds of other rates are resampled.
        features: ``log_mel`` for a spectrogram, or ``waveform``.
        n_mels: number of mel bands of a spectrogram.
        n_fft: samples of a frame of a spectrogram, 25 ms by default.
        hop_length: samples from one frame of a spectrogram to the next, 10 ms by default.
        normalize: bring a waveform to mean 0 and variance 1, as Wav2Vec2's feature extractor does.

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
    """What networks for text expect: token ids and attention mask, ``int64[2, max_length]``.

    They are those of a fast tokenizer of transformers with ``padding="max_length"`` and ``truncation=True``.

    Args:
        tokenizer: path of a ``tokenizer.json``, a ``tokenizers.Tokenizer``, or a fast tokenizer of transformers.
        max_length: number of tokens that every text is padded or cut to.
        names: arguments of the network's ``forward`` that take the ids and the mask.

    Raises:
        SettingError: The tokenizer is of none of these kinds, is broken, has no token to pad with or is too large, the
            ``tokenizers`` package is not installed, or another argument makes no sense.
    """
    step = Tokenize("0" * 64, max_length, names)
    content = fit_length(tokenizer, step.max_length)
    return Preprocess(steps=(Tokenize(content_digest(content), max_length, step.names),), tokenizer=content)


def named_inputs(**parts: Preprocess) -> Preprocess:
    """What networks with several inputs expect, such as CLIP: each input made of a part of the sample of its own.

    The data set says which column holds which part: ``Dataset(url, column={"pixel_values": "image", ...})``. A sample
    travels as one array of 64-bit numbers, which its method ``unpack`` takes apart where no network does.

    Args:
        **parts: preprocessing of each part, by the argument of the network's ``forward`` that takes it; a text by the
            one that takes its token ids, and its mask by the second of its ``names``.

    Raises:
        SettingError: There are fewer than two parts or more than eight, two have one name, texts have several
            tokenizers, or a part is none.
    """
    for name, part in parts.items():
        check_type(name, part, Preprocess)
        if part.places:
            raise SettingError(f"{name} takes a preprocessing of one part, and this one has several")
    step = NamedInputs(tuple(parts), tuple(part.steps for part in parts.values()))
    content = next((part.tokenizer for part in parts.values() if part.tokens is not None), b"")
    return Preprocess(steps=(step,), tokenizer=content)


def _geometry(size: int, augment: bool) -> tuple[Step, ...]:
    if augment:
        return RandomResizedCrop(size), RandomHorizontalFlip(0.5)
    return Resize(size * 8 // 7), CenterCrop(size)


def _scaled(mean: tuple[float, ...], std: tuple[float, ...]) -> Normalize:
    return Normalize(mean=tuple(255 * value for value in mean), std=tuple(255 * value for value in std))
