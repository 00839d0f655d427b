"""The steps of a preprocessing as values, and several inputs of a network by name as one array."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from frostline.core import TensorSpec
from frostline.core.declared import Digest, Read, Sized, Within, check_declared
from frostline.core.errors import SampleError, SettingError

__all__ = (
    "CHANNELS",
    "MAX_INPUTS",
    "CenterCrop",
    "ColorJitter",
    "Decode",
    "DecodeAudio",
    "InputSlot",
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


def is_argument(name: object) -> bool:
    """Whether a value can be the name of an argument of a network's ``forward``."""
    return isinstance(name, str) and len(name) <= _MAX_NAME and name.isidentifier()


def _argument(value: object, name: str) -> str:
    if not is_argument(value):
        raise SettingError(f"{name} must be names of arguments, such as pixel_values and input_ids")
    return str(value)


def _parts(value: Iterable[Iterable["Step"]], _: str) -> tuple[tuple["Step", ...], ...]:
    return tuple(map(tuple, value))


_Argument = Annotated[str, Read(_argument, {"type": "string", "minLength": 1, "maxLength": _MAX_NAME})]
_PARTS = {
    "type": "array",
    "items": {"$ref": "#/components/schemas/Preprocess/properties/steps"},
    "minItems": 2,
    "maxItems": MAX_INPUTS,
}


@dataclass(frozen=True, slots=True)
class NamedInputs:
    """Make several inputs of a network, each of a part of its own; always the only step.

    Attributes:
        names: arguments of the network's ``forward``, one for each part; where the part is a text, the argument that
            takes its token ids.
        steps: steps from the encoded part to the input, for each part.
    """

    names: Annotated[tuple[_Argument, ...], Sized(2, MAX_INPUTS)]
    steps: Annotated[tuple[tuple["Step", ...], ...], Read(_parts, _PARTS)]

    def __post_init__(self) -> None:
        check_declared(self)
        if len(set(self.names)) != len(self.names):
            raise SettingError(f"a sample has from 2 to {MAX_INPUTS} named inputs, each of another name")
        if len(self.steps) != len(self.names):
            raise SettingError("each named input has steps of its own")

    @property
    def dtype(self) -> str:
        """Type of a sample's numbers, of which floats fill two in one."""
        return "int64"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSlot:
    """Where an input lies in a sample's array.

    Attributes:
        name: argument of the network's ``forward``.
        spec: shape and type of the input, without the batch.
        start: number of the array's 64-bit number at which the input begins.
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


def place_inputs(inputs: Iterable[tuple[str, TensorSpec]]) -> tuple[InputSlot, ...]:
    """Where inputs lie one behind the other."""
    places: list[InputSlot] = []
    for name, spec in inputs:
        places.append(InputSlot(name=name, spec=spec, start=places[-1].end if places else 0))
    return tuple(places)


def unpack_inputs(places: Iterable[InputSlot], rows: Any) -> dict[str, Any]:
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
        SampleError: The record has another number of parts.
    """
    view, start = memoryview(record), record_bytes(parts)
    if len(view) < start:
        raise SampleError(f"no record of {parts} parts: it has {len(view)} bytes")
    ends = [start, *(start + np.cumsum(np.frombuffer(view[:start], _LENGTH), dtype=np.int64)).tolist()]
    if ends[-1] != len(view):
        raise SampleError(f"no record of {parts} parts: they take {ends[-1]} bytes, and {len(view)} are there")
    return [view[begin:end] for begin, end in pairwise(ends)]


Filter = Literal["bilinear", "bicubic"]

Mode = Literal["RGB", "L", "RGBA"]
CHANNELS: Mapping[Mode, int] = {"RGB": 3, "L": 1, "RGBA": 4}
"""The number of channels of each mode that pixels are decoded to."""
_MAX_TOKENS = 8192
_MAX_DIMENSIONS = 8
_MAX_LENGTH = 1 << 24
_MAX_NUMBERS = 50_000_000  # as many as there may be pixels
_MAX_SAMPLES = 1 << 24
_MAX_FRAME = 8192

_Side = Annotated[int, Within(1, 4096)]
_Area = Annotated[float, Within(0.0001, 1)]
_Ratio = Annotated[float, Within(0.01, 100)]
_Change = Annotated[float, Within(0, 100)]
_EACH_CHANNEL = Sized(1, max(CHANNELS.values()))


def _two_numbers(value: object, name: str) -> tuple[float, float]:
    numbers = list(value) if isinstance(value, list | tuple) else []
    are_numbers = all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
    if len(numbers) != 2 or not are_numbers or not all(map(math.isfinite, numbers)) or numbers[0] == numbers[1]:
        raise SettingError(f"{name} is two different numbers: what becomes black and what white, as (0, 65535)")
    return float(numbers[0]), float(numbers[1])


_TWO_NUMBERS = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}


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
    value_range: Annotated[tuple[float, float], Read(_two_numbers, _TWO_NUMBERS)] | None = None

    def __post_init__(self) -> None:
        check_declared(self)


@dataclass(frozen=True, slots=True)
class Resize:
    """Scale so that the shorter side has ``shorter`` pixels; the longer one is cut to a whole number."""

    shorter: _Side
    filter: Filter = "bilinear"

    def __post_init__(self) -> None:
        check_declared(self)


@dataclass(frozen=True, slots=True)
class Squeeze:
    """Scale the whole image to a square of ``size`` pixels, whatever its proportions; as many of transformers' do."""

    size: _Side
    filter: Filter = "bilinear"

    def __post_init__(self) -> None:
        check_declared(self)


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """Cut out the middle square of ``size`` pixels; a smaller image stands on black."""

    size: _Side

    def __post_init__(self) -> None:
        check_declared(self)


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """Cut out a random part and scale it to a square of ``size`` pixels, by torchvision's rule.

    Attributes:
        size: side of the result in pixels.
        min_area: minimum share of the image's area that is cut out.
        max_area: maximum share of the image's area that is cut out.
        min_ratio: minimum width over height of the part that is cut out.
        max_ratio: maximum width over height of the part that is cut out.
        filter: resampling filter of the scaling.
    """

    size: _Side
    min_area: _Area = 0.08
    max_area: _Area = 1.0
    min_ratio: _Ratio = 3 / 4
    max_ratio: _Ratio = 4 / 3
    filter: Filter = "bilinear"

    def __post_init__(self) -> None:
        check_declared(self)
        if self.max_area < self.min_area or self.max_ratio < self.min_ratio:
            raise SettingError("max_area and max_ratio must be no less than min_area and min_ratio")


@dataclass(frozen=True, slots=True)
class RandomHorizontalFlip:
    """Mirror left and right with probability ``p``."""

    p: Annotated[float, Within(0, 1)] = 0.5

    def __post_init__(self) -> None:
        check_declared(self)


@dataclass(frozen=True, slots=True)
class ColorJitter:
    """Change the colours at random, by torchvision's rule; stands behind a crop.

    Each factor is drawn evenly from ``1 - amount`` (but not below 0) to ``1 + amount``, the turn of the hue from
    ``-hue`` to ``hue``; the four changes are made in an order that is drawn too. An amount of 0 changes nothing.

    Attributes:
        brightness: amount by which pixels are scaled towards or away from black.
        contrast: amount by which pixels are scaled towards or away from the image's mean grey.
        saturation: amount by which pixels are scaled towards or away from the grey image.
        hue: the greatest share of the colour circle, up to 0.5, by which hues are turned; grey images have none.
    """

    brightness: _Change = 0.0
    contrast: _Change = 0.0
    saturation: _Change = 0.0
    hue: Annotated[float, Within(0, 0.5)] = 0.0

    def __post_init__(self) -> None:
        check_declared(self)


@dataclass(frozen=True, slots=True)
class Normalize:
    """``(x - mean) / std`` for each channel of pixels from 0 to 255, in float32; always the last step.

    torchvision's figures are for pixels from 0 to 1: multiply them by 255.
    """

    mean: Annotated[tuple[Annotated[float, Within(-1e6, 1e6)], ...], _EACH_CHANNEL]
    std: Annotated[tuple[Annotated[float, Within(1e-6, 1e6)], ...], _EACH_CHANNEL]

    def __post_init__(self) -> None:
        check_declared(self)


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

    side: _Side
    mode: Mode
    dtype: Literal["uint8", "fp16"]
    applied: Digest

    def __post_init__(self) -> None:
        check_declared(self)


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Turn text into token ids and an attention mask; always the only step, which ``preprocess.text`` makes.

    Attributes:
        tokenizer: SHA-256 of the tokenizer's JSON, in which padding and truncation are set.
        max_length: number of tokens that every text is padded or cut to.
        names: arguments of the network's ``forward`` that take the ids and the mask.
    """

    tokenizer: Digest
    max_length: Annotated[int, Within(1, _MAX_TOKENS)]
    names: tuple[_Argument, _Argument] = ("input_ids", "attention_mask")

    def __post_init__(self) -> None:
        check_declared(self)
        if len(set(self.names)) != len(self.names):
            raise SettingError("names must be two: of the argument for token ids, and of that for the mask")

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

    shape: Annotated[tuple[Annotated[int, Within(1, _MAX_LENGTH)], ...], Sized(1, _MAX_DIMENSIONS)]
    dtype: Literal["float32", "int64"] = "float32"

    def __post_init__(self) -> None:
        check_declared(self)
        if math.prod(self.shape) > _MAX_NUMBERS:
            raise SettingError(f"shape must have up to {_MAX_NUMBERS} numbers, not {math.prod(self.shape)}")


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

    sample_rate: Annotated[int, Within(1_000, 192_000)]
    seconds: Annotated[float, Within(1e-3, 600)]
    features: Literal["log_mel", "waveform"] = "log_mel"
    n_mels: Annotated[int, Within(1, 512)] = 80
    n_fft: Annotated[int, Within(16, _MAX_FRAME)] = 400
    hop_length: Annotated[int, Within(1, _MAX_FRAME)] = 160
    normalize: bool = False

    def __post_init__(self) -> None:
        check_declared(self)
        if self.n_fft % 2:
            raise SettingError("n_fft must be even, so that each frame has a middle")
        for name, most in (("hop_length", self.n_fft), ("n_mels", self.n_fft // 2 + 1)):
            if getattr(self, name) > most:
                raise SettingError(f"{name} must be a whole number from 1 to {most}")
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
