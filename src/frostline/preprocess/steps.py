"""The steps of a preprocessing as values, and several inputs of a network by name as one array.

The steps of a preprocessing as values: what each does, and which figures make sense.

Several inputs of a network by name: their parts as one record where they are stored, and as one array of 64 bits.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from frostline.core import TensorSpec
from frostline.core.errors import SampleError, SettingError

__all__ = (
    "CHANNELS",
    "MAX_INPUTS",
    "CenterCrop",
    "ColorJitter",
    "Decode",
    "DecodeAudio",
    "InputPlace",
    "Mode",
    "NamedInputs",
    "Normalize",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomStep",
    "ReadArray",
    "Resize",
    "SoleStep",
    "Squeeze",
    "Step",
    "Stored",
    "Tokenize",
    "frame_parts",
    "is_argument",
    "place_inputs",
    "record_bytes",
    "unframe_parts",
    "unpack_inputs",
)


MAX_INPUTS = 8
"""The most parts of a sample."""

_MAX_NAME = 64
_LENGTH = np.dtype("<u4")
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class NamedInputs:
    """Make several inputs of a network, each of a part of its own; always the only step.

    Attributes:
        names: arguments of the network's ``forward``, one for each part; where the part is a text, the argument that
            takes its token ids.
        steps: steps from the encoded part to the input, for each part.
    """

    names: tuple[str, ...]
    steps: tuple[tuple["Step", ...], ...]

    def __post_init__(self) -> None:
        names: object = self.names  # of a stranger, where it comes from JSON
        if not isinstance(names, list | tuple) or not all(map(is_argument, names)):
            raise SettingError("names must be names of arguments, such as pixel_values and input_ids")
        if not 2 <= len(self.names) <= MAX_INPUTS or len(set(self.names)) != len(self.names):
            raise SettingError(f"a sample has from 2 to {MAX_INPUTS} named inputs, each of another name")
        if len(self.steps) != len(self.names):
            raise SettingError("each named input has steps of its own")
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "steps", tuple(map(tuple, self.steps)))

    @property
    def dtype(self) -> str:
        """Type of a sample's numbers, of which floats fill two in one."""
        return "int64"


def is_argument(name: object) -> bool:
    """Whether a value can be the name of an argument of a network's ``forward``."""
    return isinstance(name, str) and len(name) <= _MAX_NAME and name.isidentifier()


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPlace:
    """Where an input lies in a sample's array.

    Attributes:
        name: argument of the network's ``forward``.
        spec: shape and type of the input, without the batch.
        start: first 64-bit number that holds it.
    """

    name: str
    spec: TensorSpec
    start: int

    @property
    def end(self) -> int:
        """The 64-bit number behind the last; floats fill two in one, and the last may be half empty."""
        itemsize = np.dtype(self.spec.dtype).itemsize
        return self.start - (-math.prod(self.spec.shape) * itemsize // _WORD_BYTES)

    def of(self, rows: Any, dtype: Any) -> Any:
        """The input's numbers, as a view of them where that is possible.

        Args:
            rows: batch of samples ``int64[n, ...]``: an array of NumPy, or a tensor of torch.
            dtype: type of the input as NumPy or torch calls it.
        """
        numbers = rows[:, self.start : self.end]
        if self.spec.dtype != "int64":
            numbers = numbers.view(dtype)[:, : math.prod(self.spec.shape)]
        return numbers if len(self.spec.shape) == 1 else numbers.reshape(-1, *self.spec.shape)

    def within(self, row: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """The input's numbers in the array of one sample, to be written to; what they do not fill becomes zero."""
        row[self.end - 1] = 0
        numbers = row[self.start : self.end].view(self.spec.dtype)
        return numbers[: math.prod(self.spec.shape)].reshape(self.spec.shape)


def place_inputs(inputs: Iterable[tuple[str, TensorSpec]]) -> tuple[InputPlace, ...]:
    """Where inputs lie one behind the other."""
    places: list[InputPlace] = []
    for name, spec in inputs:
        places.append(InputPlace(name=name, spec=spec, start=places[-1].end if places else 0))
    return tuple(places)


def unpack_inputs(places: Iterable[InputPlace], rows: Any) -> dict[str, Any]:
    """The inputs of a batch; see ``Preprocess.unpack``."""
    kinds = import_module(type(rows.dtype).__module__.partition(".")[0])  # rows may be of a subclass of anybody's
    return {place.name: place.of(rows, getattr(kinds, place.spec.dtype)) for place in places}


def record_bytes(parts: int) -> int:
    """Bytes of a record beside those of its parts."""
    return parts * _LENGTH.itemsize


def frame_parts(parts: Sequence[bytes | memoryview]) -> bytes:
    """One record of the encoded parts of a sample: their lengths as 32-bit numbers, then the parts."""
    return b"".join([np.array([len(part) for part in parts], _LENGTH).tobytes(), *parts])


def unframe_parts(record: bytes | memoryview, parts: int) -> list[memoryview]:
    """The parts of a record, as views of it.

    Raises:
        SampleError: it has not as many parts.
    """
    view, start = memoryview(record), record_bytes(parts)
    if len(view) < start:
        raise SampleError(f"no record of {parts} parts: it has {len(view)} bytes")
    ends = [start, *(start + np.cumsum(np.frombuffer(view[:start], _LENGTH), dtype=np.int64)).tolist()]
    if ends[-1] != len(view):
        raise SampleError(f"no record of {parts} parts: they take {ends[-1]} bytes, and {len(view)} are there")
    return [view[begin:end] for begin, end in pairwise(ends)]


Filter = Literal["bilinear", "bicubic"]

_MAX_SIDE = 4096
Mode = Literal["RGB", "L", "RGBA"]
CHANNELS: Mapping[Mode, int] = {"RGB": 3, "L": 1, "RGBA": 4}
"""The number of channels of each mode that pixels are decoded to."""
_DTYPES = ("uint8", "fp16")
_MAX_TOKENS = 8192
_MAX_DIMENSIONS = 8
_MAX_LENGTH = 1 << 24
_MAX_NUMBERS = 50_000_000  # as many as there may be pixels
_NUMBERS = ("float32", "int64")
_SAMPLE_RATES = (1_000, 192_000)
_MAX_SECONDS = 600
_MAX_SAMPLES = 1 << 24
_FRAMES = (16, 8192)
_MAX_MELS = 512
_INPUTS = 2
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode the image to pixels of one mode; always the first step.

    Attributes:
        mode: ``RGB``, ``L`` (grey) or ``RGBA`` (with a fourth channel, of how opaque a pixel is, or of near infrared);
            other images are converted to it as Pillow does.
        reduced: decode JPEGs at a half, a quarter or an eighth of their scale, by their own cosine transform, where
            what is left is still as large as the ``Resize`` that follows asks for. Several times less work, and
            slightly other pixels. Other formats are decoded whole.
        orientation: ``exif`` turns images as their EXIF data says, ``stored`` leaves them as they lie there. ``data``,
            the default, does what the data's own reader does, which is known once there is a data set: Hugging Face's
            ``datasets`` turns them, in Parquet and Arrow files with a feature ``Image``; torchvision and others do not.
        value_range: values of grey images with more than 8 bits a pixel that become black and white; those between
            become 8 bits, rounded, and others are cut. None refuses such images, whose scale nobody else can know.
    """

    mode: Mode = "RGB"
    reduced: bool = False
    orientation: Literal["data", "exif", "stored"] = "data"
    value_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, tuple(CHANNELS))
        _flag("reduced", self.reduced)
        _one_of("orientation", self.orientation, ("data", "exif", "stored"))
        if self.value_range is not None:
            object.__setattr__(self, "value_range", _two_numbers(self.value_range))


@dataclass(frozen=True, slots=True)
class Resize:
    """Scale so that the shorter side has ``shorter`` pixels; the longer one is cut to a whole number."""

    shorter: int
    filter: Filter = "bilinear"

    def __post_init__(self) -> None:
        _side("shorter", self.shorter)
        _one_of("filter", self.filter, ("bilinear", "bicubic"))


@dataclass(frozen=True, slots=True)
class Squeeze:
    """Scale the whole image to a square of ``size`` pixels, whatever its proportions; as many of transformers' do."""

    size: int
    filter: Filter = "bilinear"

    def __post_init__(self) -> None:
        _side("size", self.size)
        _one_of("filter", self.filter, ("bilinear", "bicubic"))


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """Cut out the middle square of ``size`` pixels; a smaller image stands on black."""

    size: int

    def __post_init__(self) -> None:
        _side("size", self.size)


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """Cut out a random part and scale it to a square of ``size`` pixels, by torchvision's rule.

    Attributes:
        size: side of the result in pixels.
        min_area: the least share of the image's area that is cut out.
        max_area: the greatest share of it.
        min_ratio: the least width over height of the part.
        max_ratio: the greatest one.
        filter: resampling filter of the scaling.
    """

    size: int
    min_area: float = 0.08
    max_area: float = 1.0
    min_ratio: float = 3 / 4
    max_ratio: float = 4 / 3
    filter: Filter = "bilinear"

    def __post_init__(self) -> None:
        _side("size", self.size)
        _between("min_area", self.min_area, 0.0001, 1)
        _between("max_area", self.max_area, self.min_area, 1)
        _between("min_ratio", self.min_ratio, 0.01, 100)
        _between("max_ratio", self.max_ratio, self.min_ratio, 100)
        _one_of("filter", self.filter, ("bilinear", "bicubic"))


@dataclass(frozen=True, slots=True)
class RandomHorizontalFlip:
    """Mirror left and right with probability ``p``."""

    p: float = 0.5

    def __post_init__(self) -> None:
        _between("p", self.p, 0, 1)


@dataclass(frozen=True, slots=True)
class ColorJitter:
    """Change the colours at random, by torchvision's rule; stands behind a crop.

    Each factor is drawn evenly from ``1 - amount`` (but not below 0) to ``1 + amount``, the turn of the hue from
    ``-hue`` to ``hue``; the four changes are made in an order that is drawn too. An amount of 0 changes nothing.

    Attributes:
        brightness: amount by which pixels are scaled towards or away from black.
        contrast: the same, from the image's mean grey.
        saturation: the same, from its grey image.
        hue: the greatest share of the colour circle, up to 0.5, by which hues are turned; grey images have none.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            _between(name, getattr(self, name), 0, 100)
        _between("hue", self.hue, 0, 0.5)


@dataclass(frozen=True, slots=True)
class Normalize:
    """``(x - mean) / std`` for each channel of pixels from 0 to 255, in float32; always the last step.

    torchvision's figures are for pixels from 0 to 1: multiply them by 255.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            values = getattr(self, name)
            if not isinstance(values, list | tuple) or not 1 <= len(values) <= max(CHANNELS.values()):
                raise SettingError(f"{name} must have a number for each channel")
            object.__setattr__(self, name, tuple(_between(name, value, -1e6, 1e6) for value in values))
        if min(self.std) < 1e-6:
            raise SettingError("std must be above 0")


@dataclass(frozen=True, slots=True)
class Stored:
    """Take the pixels of a ready format as they lie in the store, in place of decoding.

    Nobody needs to write this step: a job on a ready format puts it in the place of the steps that were applied when
    the format was made.

    Attributes:
        side: side of the square, in pixels.
        mode: mode of the decoded pixels, as of ``Decode``.
        dtype: ``uint8``, pixels before ``Normalize``; or ``fp16``, what comes out of it, so that no step is left.
        applied: digest of the steps that were applied, and of the decoder.
    """

    side: int
    mode: Mode
    dtype: Literal["uint8", "fp16"]
    applied: str

    def __post_init__(self) -> None:
        _side("side", self.side)
        _one_of("mode", self.mode, tuple(CHANNELS))
        _one_of("dtype", self.dtype, _DTYPES)
        if not _DIGEST.fullmatch(str(self.applied)):  # a list from JSON is none either
            raise SettingError("applied must be a SHA-256 in hexadecimal digits")


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Turn text into token ids and an attention mask; always the only step, which ``preprocess.text`` makes.

    Attributes:
        tokenizer: SHA-256 of the tokenizer's JSON, in which padding and truncation are set.
        max_length: number of tokens that every text is padded or cut to.
        names: arguments of the network's ``forward`` that take the ids and the mask.
    """

    tokenizer: str
    max_length: int
    names: tuple[str, str] = ("input_ids", "attention_mask")

    def __post_init__(self) -> None:
        if not _DIGEST.fullmatch(str(self.tokenizer)):
            raise SettingError("tokenizer must be a SHA-256 in hexadecimal digits")
        _whole("max_length", self.max_length, _MAX_TOKENS)
        _two_arguments(self.names)
        object.__setattr__(self, "names", tuple(self.names))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what it gives: token ids, and the mask."""
        return 2, self.max_length

    @property
    def dtype(self) -> str:
        """Type of what it gives."""
        return "int64"


@dataclass(frozen=True, slots=True)
class ReadArray:
    """Take the numbers of an array as NumPy keeps it in ``.npy``; always the only step.

    Attributes:
        shape: shape of every sample, without the batch.
        dtype: type of the numbers that the network takes, ``float32`` or ``int64``.
    """

    shape: tuple[int, ...]
    dtype: Literal["float32", "int64"] = "float32"

    def __post_init__(self) -> None:
        _lengths("shape", self.shape)
        if math.prod(self.shape) > _MAX_NUMBERS:
            raise SettingError(f"shape must have up to {_MAX_NUMBERS} numbers, not {math.prod(self.shape)}")
        _one_of("dtype", self.dtype, _NUMBERS)
        object.__setattr__(self, "shape", tuple(self.shape))


@dataclass(frozen=True, slots=True)
class DecodeAudio:
    """Decode a sound to one channel of one rate and length; always the only step, which ``preprocess.audio`` makes.

    Attributes:
        sample_rate: samples a second; sounds of other rates are resampled.
        seconds: length that every sound is cut to, or padded to with silence behind it.
        features: ``log_mel``, a spectrogram ``[1, n_mels, frames]``; or ``waveform``, ``[samples]``.
        n_mels: number of mel bands of a spectrogram.
        n_fft: samples of each of its frames.
        hop_length: samples from one of its frames to the next.
        normalize: bring a waveform to mean 0 and variance 1, before silence is put behind it.
    """

    sample_rate: int
    seconds: float
    features: Literal["log_mel", "waveform"] = "log_mel"
    n_mels: int = 80
    n_fft: int = 400
    hop_length: int = 160
    normalize: bool = False

    def __post_init__(self) -> None:
        _whole("sample_rate", self.sample_rate, _SAMPLE_RATES[1], _SAMPLE_RATES[0])
        object.__setattr__(self, "seconds", _between("seconds", self.seconds, 1e-3, _MAX_SECONDS))
        _one_of("features", self.features, ("log_mel", "waveform"))
        _whole("n_fft", self.n_fft, _FRAMES[1], _FRAMES[0])
        if self.n_fft % 2:
            raise SettingError("n_fft must be even, so that each frame has a middle")
        _whole("hop_length", self.hop_length, self.n_fft)
        _whole("n_mels", self.n_mels, min(_MAX_MELS, self.n_fft // 2 + 1))
        _flag("normalize", self.normalize)
        if self.normalize and self.features != "waveform":
            raise SettingError("normalize is for features='waveform': leave it out for a spectrogram")
        if not 1 <= self.samples <= _MAX_SAMPLES or math.prod(self.shape) > _MAX_NUMBERS:
            raise SettingError("seconds and sample_rate make a sample too long: take less of either")
        if self.features == "log_mel" and self.samples < self.n_fft:
            raise SettingError(f"seconds must make at least one frame of n_fft={self.n_fft} samples")

    @property
    def samples(self) -> int:
        """Samples of a wave."""
        return round(self.seconds * self.sample_rate)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what it gives."""
        if self.features == "waveform":
            return (self.samples,)
        return 1, self.n_mels, 1 + self.samples // self.hop_length

    @property
    def dtype(self) -> str:
        """Type of what it gives."""
        return "float32"


RandomStep = RandomResizedCrop | RandomHorizontalFlip | ColorJitter
# What stands alone, and has the shape and the dtype of what it gives.
SoleStep = Tokenize | ReadArray | DecodeAudio
Step = (
    Decode
    | Stored
    | SoleStep
    | NamedInputs
    | Resize
    | Squeeze
    | CenterCrop
    | RandomResizedCrop
    | RandomHorizontalFlip
    | ColorJitter
    | Normalize
)


def _two_arguments(names: object) -> None:
    if not isinstance(names, list | tuple) or not all(map(is_argument, names)):
        raise SettingError("names must be names of arguments, such as input_ids and attention_mask")
    if len(set(names)) != len(names) or len(names) != _INPUTS:
        raise SettingError("names must be two: of the argument for token ids, and of that for the mask")


def _lengths(name: str, value: object) -> None:
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= _MAX_DIMENSIONS:
        raise SettingError(f"{name} must have from 1 to {_MAX_DIMENSIONS} lengths, such as (16, 3)")
    for length in value:
        _whole(f"every length of {name}", length, _MAX_LENGTH)


def _side(name: str, value: object) -> None:
    _whole(name, value, _MAX_SIDE)


def _whole(name: str, value: object, maximum: int, minimum: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise SettingError(f"{name} must be a whole number from {minimum} to {maximum}")


def _between(name: str, value: object, minimum: float, maximum: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingError(f"{name} must be a number")
    if not minimum <= value <= maximum or not math.isfinite(value):
        raise SettingError(f"{name} must lie from {minimum:g} to {maximum:g}")
    return float(value)


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise SettingError(f"{name} must be true or false")


def _two_numbers(value: object) -> tuple[float, float]:
    numbers = list(value) if isinstance(value, list | tuple) else []
    are_numbers = all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
    if len(numbers) != 2 or not are_numbers or not all(map(math.isfinite, numbers)) or numbers[0] == numbers[1]:
        raise SettingError("value_range is two different numbers: what becomes black and what white, as (0, 65535)")
    return float(numbers[0]), float(numbers[1])


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SettingError(f"{name} must be {' or '.join(known)}")
