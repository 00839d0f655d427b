"""Runs a declared preprocessing on one encoded sample and its mask: the same numbers on every side."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from itertools import takewhile
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from PIL import Image

from frostline.core import View
from frostline.core.errors import BadRequest, DataError, FrostlineError, SampleError, SettingError
from frostline.core.system import crc32
from frostline.preprocess.images import (
    JITTER_DRAWS,
    check_array,
    check_size,
    decode_image,
    decoded_classes,
    is_array,
    is_jpeg2000,
    jitter_colours,
    numbers_into,
    size_of,
)
from frostline.preprocess.sounds import check_sound, is_sound, sound_bytes, sound_into
from frostline.preprocess.spec import Preprocess, decoder_name, step_from_json, step_to_json
from frostline.preprocess.steps import (
    CHANNELS,
    CenterCrop,
    ColorJitter,
    Decode,
    DecodeAudio,
    InputSlot,
    NamedInputs,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomStep,
    ReadArray,
    Resize,
    Squeeze,
    Step,
    Stored,
    Tokenize,
    unframe_parts,
)
from frostline.preprocess.tokens import text_bytes, tokens_into

__all__ = (
    "ALIGNMENT",
    "IGNORED",
    "MASK_DTYPE",
    "MAX_PIXELS",
    "Applied",
    "Box",
    "check_readable",
    "decode_applied",
    "decode_into",
    "draws",
    "kept_mask",
    "mask_into",
    "middle",
    "open_mask",
    "pack_into",
    "pixels_into",
    "pixels_needed",
    "record_bytes",
    "record_stride",
    "scaled_mask",
    "scratch_bytes",
    "steps_left",
    "unpack_record",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What was done to the images of a ready format before they were kept.

    Attributes:
        steps: the steps from ``Decode`` on; none of them random. The last one is ``Normalize`` where ``dtype`` is
            ``fp16``.
        dtype: ``uint8``, pixels; or ``fp16``, what a network takes, rounded to 16 bits.
        decoder: decoder that was used, with its versions.
    """

    steps: tuple[Step, ...]
    dtype: Literal["uint8", "fp16"]
    decoder: str

    def __post_init__(self) -> None:
        if len(self.steps) < 2:
            raise SettingError("a ready format needs images of one size: CenterCrop before any random step")
        if self.whole.is_random:
            raise SettingError("a ready format is the same in every epoch, so that no step of it is random")

    @classmethod
    def to(cls, preprocess: Preprocess, dtype: Literal["uint8", "fp16"]) -> Self:
        """What can be done once and for all of a preprocessing.

        Args:
            preprocess: preprocessing that jobs will declare.
            dtype: ``uint8`` keeps pixels: all steps before the first random one, without ``Normalize``. ``fp16``
                keeps what the network takes.

        Raises:
            SettingError: Images would have several sizes, or a step is random where all are to be applied.
        """
        if preprocess.stored is not None or not preprocess.are_images:
            raise SettingError("a ready format is made of images: the preprocessing starts with Decode")
        if dtype == "fp16":
            return cls(steps=preprocess.steps, dtype=dtype, decoder=decoder_name())
        steps = tuple(takewhile(lambda step: not isinstance(step, RandomStep), preprocess.steps[:-1]))
        return cls(steps=steps, dtype=dtype, decoder=decoder_name())

    def orient(self, *, is_turned: bool) -> Self:
        """The same for data whose own reader turns images as their EXIF data says, or does not."""
        count = len(self.steps)
        return replace(self, steps=self.whole.orient(is_turned=is_turned).steps[:count])

    @property
    def whole(self) -> Preprocess:
        """The steps with a ``Normalize`` behind them that changes nothing, where they have none of their own."""
        if self.dtype == "fp16":
            return Preprocess(steps=self.steps)
        first = self.steps[0]
        channels = CHANNELS[first.mode if isinstance(first, Decode) else "RGB"]
        return Preprocess(steps=(*self.steps, Normalize(mean=(0.0,) * channels, std=(1.0,) * channels)))

    @property
    def digest(self) -> str:
        """SHA-256 of all of it."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    @property
    def stored(self) -> Stored:
        """The step that stands for these in a job's preprocessing."""
        whole = self.whole
        return Stored(side=whole.shape[1], mode=whole.mode, dtype=self.dtype, applied=self.digest)

    def rest(self, declared: Preprocess) -> Preprocess:
        """What is left to do of a preprocessing, so that its pixels are the same to the bit.

        It has to start with the applied steps. Its crop may be smaller than the one that was applied, where the
        middle of the middle is the middle of the whole: the sizes differ by a multiple of four, and the image was
        scaled to be as large as either.

        Raises:
            SettingError: The preprocessing does not start with these steps; the message names them.
        """
        declared = declared.orient(is_turned=self.whole.is_turned)
        if declared.steps[0] == self.stored:
            return declared
        count = len(self.steps)
        if declared.steps[:count] == self.steps:
            return Preprocess(steps=(self.stored, *declared.steps[count:]))
        if declared.steps[: count - 1] == self.steps[:-1] and self._crops_alike(declared.steps[count - 1]):
            return Preprocess(steps=(self.stored, *declared.steps[count - 1 :]))
        raise SettingError(
            f"this ready format was made with {self}, and the declared preprocessing does not start with that: it is "
            f"{', '.join(map(str, declared.steps))}; declare one that does, or make another ready format"
        )

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {"steps": [step_to_json(step) for step in self.steps], "dtype": self.dtype, "decoder": self.decoder}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The inverse of ``to_json``.

        Raises:
            DataError: The value is not of this version's making.
        """
        try:
            steps = tuple(step_from_json(step) for step in value["steps"])
            return cls(steps=steps, dtype=value["dtype"], decoder=str(value["decoder"]))
        except (FrostlineError, KeyError, TypeError) as error:
            raise DataError(f"a ready format of another version, or a damaged one: {error}") from error

    def __str__(self) -> str:
        return ", ".join(map(str, self.steps))

    def _crops_alike(self, step: Step) -> bool:
        *before, last = self.steps
        if not isinstance(last, CenterCrop) or not isinstance(step, CenterCrop):
            return False
        scaled = before[-1].shorter if isinstance(before[-1], Resize) else 0
        return scaled >= last.size >= step.size and (last.size - step.size) % 4 == 0


def steps_left(declared: Preprocess, applied: Applied | None, *, is_turned: bool = False) -> Preprocess:
    """What is left to do of a declared preprocessing: all of it, unless the data is a ready format.

    Args:
        declared: preprocessing as a job declares it.
        applied: steps that were applied to the data before it was kept; None where it is none of a ready format.
        is_turned: the data's own reader turns images as their EXIF data says.

    Raises:
        SettingError: the ready format was made with other steps.
    """
    if applied is None:
        return declared.orient(is_turned=is_turned)
    return applied.rest(declared)


ALIGNMENT = 512
"""Records start at a multiple of this in their object: a disk's sector, and several vectors wide."""

_CHECK_BYTES = 4


def record_bytes(stored: Stored) -> int:
    """Length of a record: its pixels, and their CRC-32 in four bytes, little-endian."""
    return _pixel_bytes(stored) + _CHECK_BYTES


def record_stride(stored: Stored) -> int:
    """Bytes from the start of a record to that of the next."""
    return -(-record_bytes(stored) // ALIGNMENT) * ALIGNMENT


def pack_into(record: memoryview, pixels: npt.NDArray[np.uint8] | npt.NDArray[np.float16]) -> None:
    """Write pixels and their check into a record of exactly ``record_bytes``."""
    data = np.ascontiguousarray(pixels).view(np.uint8).reshape(-1).data
    record[:-_CHECK_BYTES] = data
    record[-_CHECK_BYTES:] = crc32(data).to_bytes(_CHECK_BYTES, "little")


def unpack_record(stored: Stored, record: bytes | memoryview) -> npt.NDArray[np.uint8] | npt.NDArray[np.float16]:
    """The pixels of a record: ``uint8[H, W, C]``, or ``float16[C, H, W]`` where no step is left. A view of it.

    Raises:
        SampleError: The record's length or checksum is wrong.
    """
    if len(record) != record_bytes(stored):
        raise SampleError(f"no record of this ready format: it has {len(record)} bytes, not {record_bytes(stored)}")
    data = memoryview(record)
    pixels = data[:-_CHECK_BYTES]
    if crc32(pixels).to_bytes(_CHECK_BYTES, "little") != data[-_CHECK_BYTES:]:
        raise SampleError("damaged record: its checksum is wrong; make the ready format again")
    side, channels = stored.side, CHANNELS[stored.mode]
    if stored.dtype == "uint8":
        return np.frombuffer(pixels, np.uint8).reshape(side, side, channels)
    return np.frombuffer(pixels, "<f2").reshape(channels, side, side)


def _pixel_bytes(stored: Stored) -> int:
    return stored.side**2 * CHANNELS[stored.mode] * (1 if stored.dtype == "uint8" else 2)


MAX_PIXELS = 50_000_000  # above the 48 megapixels of today's phones

_BYTES_PER_PIXEL = 22
# A quarter more than a pixel of others, in quarters.
_JPEG2000_SHARE = 5
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def decode_into(
    preprocess: Preprocess,
    encoded: bytes | memoryview,
    out: npt.NDArray[Any],
    *,
    id: int,
    view: View | None,
    max_pixels: int = MAX_PIXELS,
) -> None:
    """Decode an image or a sound, tokenize a text, or read an array, and write the network's input into ``out``.

    The orientation noted in EXIF is not applied, as with torchvision's data sets. An image of several frames
    gives its first one. JPEGs are decoded in full, unless the steps allow a reduced scale.

    Args:
        preprocess: the steps.
        encoded: the image, record of a ready format or of several parts, text in UTF-8, sound or array, as stored.
        out: array with the shape and type of ``preprocess.sample``; its content is undefined after a ``SampleError``.
        id: id of the sample; with the view it seeds the random steps, so that every side draws the same.
        view: the random view; None where no step is random.
        max_pixels: maximum pixels of the image and of every intermediate image; checked before decoding, so that
            memory stays within ``scratch_bytes``.

    Raises:
        SampleError: the image is broken, cut off, too large or of a kind that is not read; the reason is short.
        BadRequest: a step is random and there is no view.

    Safe for use by several threads at once; decoding, scaling and arithmetic run without the interpreter's lock.
    """
    levels = preprocess.levels
    match preprocess.steps[0]:
        case Tokenize():
            if pixels_needed(preprocess, encoded) > max_pixels:
                raise SampleError(f"its text of {len(encoded)} bytes may take more memory than there is for it")
            tokens_into(preprocess.tokenizer, encoded, out)
        case ReadArray() as array:
            numbers_into(array, encoded, out)
        case DecodeAudio() as audio:
            sound_into(audio, encoded, out, max_bytes=_BYTES_PER_PIXEL * max_pixels)
        case NamedInputs() as inputs:
            decode = partial(decode_into, id=id, view=view, max_pixels=max_pixels)
            _inputs_into(inputs, preprocess, encoded, out, decode)
        case Stored() as stored if levels is None:
            np.copyto(out, unpack_record(stored, encoded))
        case _:
            assert levels is not None
            levels.into(_pixels(preprocess, encoded, draws(preprocess, id, view), max_pixels), out)


def pixels_into(
    preprocess: Preprocess,
    encoded: bytes | memoryview,
    out: npt.NDArray[np.uint8],
    *,
    id: int,
    view: View | None,
    max_pixels: int = MAX_PIXELS,
) -> None:
    """Decode one image and write its pixels into ``out``, as they are before the last step.

    Args:
        preprocess: preprocessing that has ``levels``.
        encoded: see ``decode_into``, as everything below, and what is raised.
        out: ``uint8[H, W, C]``.
        id: id of the sample.
        view: the random view.
        max_pixels: maximum pixels of the image.
    """
    assert preprocess.levels is not None, "there are no pixels left to take"
    np.copyto(out, _pixels(preprocess, encoded, draws(preprocess, id, view), max_pixels))


def decode_applied(
    applied: Applied, encoded: bytes | memoryview, *, rest: Preprocess | None = None
) -> npt.NDArray[np.uint8] | npt.NDArray[np.float16]:
    """What a ready format keeps of one image.

    Args:
        applied: the steps.
        encoded: the image as stored.
        rest: remaining steps, where ``encoded`` is the record of another ready format; by default all steps.

    Returns:
        ``uint8[H, W, C]``, or ``float16[C, H, W]``.

    Raises:
        SampleError: see ``decode_into``; or its numbers are too large for 16 bits.
    """
    whole = applied.whole if rest is None else rest
    if applied.dtype == "uint8":
        return _pixels(whole, encoded, _no_draw, MAX_PIXELS)
    out = np.empty(whole.shape, np.float32)
    decode_into(whole, encoded, out, id=0, view=None)
    if np.abs(out).max() > np.finfo(np.float16).max:
        raise SampleError("its normalised pixels are too large for 16-bit floats")
    return out.astype(np.float16)


def pixels_needed(preprocess: Preprocess, encoded: bytes | memoryview) -> int:
    """The least ``max_pixels`` with which ``decode_into`` takes an image, from its header alone.

    Returns:
        0 where the header is broken: decoding says why and needs next to nothing for it. Of a text, as many pixels
        as take the memory of its tokens; of a sound likewise; of an array 0, as its numbers go
        where they belong.
    """
    match preprocess.steps[0]:
        case Tokenize():
            return -(-text_bytes(preprocess.tokenizer, encoded) // _BYTES_PER_PIXEL)
        case ReadArray():
            return 0
        case DecodeAudio() as audio:
            return -(-sound_bytes(audio, encoded) // _BYTES_PER_PIXEL)
        case NamedInputs():
            return _pixels_of_parts(preprocess, encoded)
    width, height = _size(preprocess, encoded)
    if not width or not height:
        return 0
    maximum = width * height
    for step in preprocess.steps:
        match step:
            case Resize():
                scaled_width, scaled_height = _scaled_size(step, (width, height))
                maximum = max(maximum, max(scaled_width, 1) * max(scaled_height, height))
                width, height = scaled_width, scaled_height
            case RandomResizedCrop() | Squeeze():
                maximum = max(maximum, step.size * max(height, step.size))
                width = height = step.size
            case CenterCrop():
                maximum = max(maximum, step.size**2)
                width = height = step.size
    return -(-maximum * _JPEG2000_SHARE // 4) if is_jpeg2000(encoded) else maximum


def scratch_bytes(max_pixels: int = MAX_PIXELS) -> int:
    """An upper bound of the memory that one call of ``decode_into`` uses beside ``out`` and a copy of ``encoded``.

    Measured at the peak, in bytes a pixel: WebP 20, whose reader has canvases of its own; every other format 12,
    which are the decoded image, the scaled one and the one between the two passes of scaling; but JPEG 2000 25, whose
    reader has numbers of 32 bits, so that ``pixels_needed`` counts it for more.
    """
    return _BYTES_PER_PIXEL * max_pixels + (1 << 20)


def _inputs_into(
    inputs: NamedInputs,
    preprocess: Preprocess,
    record: bytes | memoryview,
    out: npt.NDArray[np.int64],
    decode: Callable[..., None],
) -> None:
    """Decode the parts of a sample one after the other, each into its place."""
    starts = {place.name: place.start for place in preprocess.input_slots}
    parts = zip(inputs.names, preprocess.parts, unframe_parts(record, len(inputs.names)), strict=True)
    for name, part, encoded in parts:
        try:
            decode(part, encoded, InputSlot(name=name, spec=part.sample, start=starts[name]).within(out))
        except SampleError as error:
            raise SampleError(f"{name}: {error}") from error


def _pixels_of_parts(preprocess: Preprocess, record: bytes | memoryview) -> int:
    """As many as the part needs that needs most, since they are decoded in turn."""
    try:
        parts = unframe_parts(record, len(preprocess.parts))
    except SampleError:
        return 0
    return max(map(pixels_needed, preprocess.parts, parts))


def _size(preprocess: Preprocess, encoded: bytes | memoryview) -> tuple[int, int]:
    stored = preprocess.stored
    return size_of(encoded, is_turned=preprocess.is_turned) if stored is None else (stored.side, stored.side)


def _pixels(
    preprocess: Preprocess, encoded: bytes | memoryview, draw: Callable[[], float], max_pixels: int
) -> npt.NDArray[np.uint8]:
    """The pixels before ``Normalize``: ``uint8[H, W, C]``."""
    stored, between = preprocess.stored, preprocess.steps[1:-1]
    if stored is None:
        enough = _enough(preprocess)
        first = preprocess.steps[0]
        assert isinstance(first, Decode)
        image = decode_image(encoded, first, max_pixels=max_pixels, enough=enough)
    else:
        pixels = unpack_record(stored, encoded).astype(np.uint8, copy=False)
        if not between:
            return pixels
        image = Image.fromarray(pixels if CHANNELS[stored.mode] > 1 else pixels[:, :, 0])
    for step in between:
        image = _applied(step, image, draw, max_pixels)
    found = np.asarray(image)
    return found if found.ndim == 3 else found[:, :, None]


def _enough(preprocess: Preprocess) -> Callable[[tuple[int, int]], tuple[int, int]] | None:
    first, second, *_ = preprocess.steps
    if not isinstance(first, Decode) or not first.reduced:
        return None
    assert isinstance(second, Resize)
    return partial(_scaled_size, second)


def _applied(step: Step, image: Image.Image, draw: "Callable[[], float]", max_pixels: int) -> Image.Image:
    match step:
        case Resize():
            return _resized(step, image, max_pixels)
        case Squeeze():
            check_size((step.size, max(step.size, image.height)), max_pixels, "scaled it has")
            return image.resize((step.size, step.size), _FILTERS[step.filter])
        case CenterCrop():
            return image.crop(middle(image.size, step.size))
        case RandomResizedCrop():
            box = _random_box(step, image.size, draw)
            check_size((step.size, box[3] - box[1]), max_pixels, "scaled it has")
            return image.crop(box).resize((step.size, step.size), _FILTERS[step.filter])
        case RandomHorizontalFlip():
            return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw() < step.p else image
        case ColorJitter():
            return jitter_colours(step, image, draw)
        case _:
            raise AssertionError(f"{step} stands between Decode and Normalize")


def _resized(step: Resize, image: Image.Image, max_pixels: int) -> Image.Image:
    size = _scaled_size(step, image.size)
    check_size((max(size[0], 1), max(size[1], image.size[1])), max_pixels, "scaled it has")
    return image if size == image.size else image.resize(size, _FILTERS[step.filter])


Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels; a part of it may lie beside the image."""


def _scaled_size(step: Resize, size: tuple[int, int]) -> tuple[int, int]:
    """Width and height that an image of that width and height is scaled to."""
    width, height = size
    # torchvision cuts the longer side to a whole number; it does not round it.
    longer = int(step.shorter * max(width, height) / min(width, height))
    return (step.shorter, longer) if width <= height else (longer, step.shorter)


def middle(size: tuple[int, int], side: int) -> Box:
    """The middle square of an image."""
    left, top = (_offset(length, side) for length in size)
    return left, top, left + side, top + side


def _random_box(step: RandomResizedCrop, size: tuple[int, int], draw: Callable[[], float]) -> Box:
    """A random part of an image, by torchvision's rule."""
    width, height = size
    for _ in range(10):
        area = width * height * (step.min_area + (step.max_area - step.min_area) * draw())
        minimum, maximum = math.log(step.min_ratio), math.log(step.max_ratio)
        ratio = math.exp(minimum + (maximum - minimum) * draw())
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(draw() * (height - h + 1)), int(draw() * (width - w + 1))
            return left, top, left + w, top + h
    return _widest_box(step, width, height)


def draws(preprocess: Preprocess, id: int, view: View | None) -> Callable[[], float]:
    """What gives a sample's next number from 0 to below 1, each time it is called.

    Raises:
        BadRequest: a step is random and there is no view.
    """
    if view is None:
        if preprocess.is_random:
            raise BadRequest("random preprocessing needs a view: seed and epoch")
        return _no_draw
    # Philox is a counter turned into bits, the same on every machine and in every version of NumPy; the sample's
    # id stands in the counter's high word, so that the draws of two samples never overlap.
    bits = np.random.Philox(
        key=np.array([view.seed, view.epoch], np.uint64), counter=np.array([0, 0, 0, id], np.uint64)
    )
    return lambda: (int(bits.random_raw()) >> 11) * 2.0**-53


def _no_draw() -> float:
    """Stands for the draws of a preprocessing that has none."""
    raise AssertionError("a preprocessing without random steps draws nothing")


def _offset(length: int, side: int) -> int:
    # torchvision rounds half to even where it cuts, and pads the shorter half first where the image is smaller.
    return round((length - side) / 2) if length >= side else -((side - length) // 2)


def _widest_box(step: RandomResizedCrop, width: int, height: int) -> Box:
    # No draw fitted: the middle of the image, as wide or high as the ratios allow.
    w, h = width, height
    if width / height < step.min_ratio:
        h = max(1, round(width / step.min_ratio))
    elif width / height > step.max_ratio:
        w = max(1, round(height * step.max_ratio))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


IGNORED = 255
"""What stands where a crop reaches beyond the mask: the number that losses are told to ignore."""

MASK_DTYPE = "uint16"
"""The dtype in which masks are carried and kept; it holds the classes of 8-bit and 16-bit masks."""

_MAX_OF_A_BYTE = (1 << 8) - 1
_MAX_CLASS = (1 << 16) - 1
_NEAREST = Image.Resampling.NEAREST


def mask_into(
    preprocess: Preprocess,
    encoded: bytes | memoryview,
    out: npt.NDArray[np.uint16],
    *,
    id: int,
    view: View | None,
    size: tuple[int, int] = (0, 0),
    max_pixels: int = MAX_PIXELS,
) -> None:
    """Decode one mask and write the classes that belong to the network's input into ``out``.

    Args:
        preprocess: preprocessing of the image, from ``Decode`` on.
        encoded: the mask as stored; read, not kept.
        out: ``uint16[H, W]``, height and width of ``preprocess.shape``; undefined after a ``SampleError``.
        id: id of the sample; with the view it seeds the random steps, as it does for the image.
        view: the random view; None where no step is random.
        size: width and height of the image; zeros where nobody knows them.
        max_pixels: see ``apply.decode_into``.

    Raises:
        SampleError: the mask is broken, of a kind that is not read or of another size than its image.
        BadRequest: a step is random and there is no view.
    """
    draw = draws(preprocess, id, view)
    mask = open_mask(encoded, size=size, max_pixels=max_pixels, is_turned=preprocess.is_turned)
    for step in preprocess.steps[1:-1]:
        mask = _applied_to_mask(step, mask, draw, max_pixels)
    np.copyto(out, np.asarray(mask), casting="unsafe")  # all of it fits: see _as_image


def open_mask(
    encoded: bytes | memoryview,
    *,
    size: tuple[int, int] = (0, 0),
    max_pixels: int = MAX_PIXELS,
    is_turned: bool = False,
) -> Image.Image:
    """A mask whose pixels are classes; see ``mask_into``.

    Raises:
        SampleError: the mask is broken, of a kind that is not read or of another size than its image.
    """
    mask = _as_image(decoded_classes(encoded, max_pixels=max_pixels, is_turned=is_turned))
    if 0 not in size and mask.size != size:
        raise SampleError(
            f"the mask has {mask.width} x {mask.height} pixels and its image {size[0]} x {size[1]}: make them the same"
        )
    return mask


def scaled_mask(
    encoded: bytes | memoryview, shorter_side: int, *, size: tuple[int, int] = (0, 0), is_turned: bool = False
) -> bytes:
    """A mask as large as ``preprocess.scaled.scaled`` makes its image, of the pixels the nearest.

    One that is small enough keeps its bytes. Others become grey PNGs of 8 or 16 bits.

    Raises:
        SampleError: see ``open_mask``.
    """
    mask = open_mask(encoded, size=size, is_turned=is_turned)
    if min(mask.size) <= shorter_side:
        return bytes(encoded)
    share = shorter_side / min(mask.size)
    return _png(np.asarray(mask.resize((round(mask.width * share), round(mask.height * share)), _NEAREST)))


def kept_mask(preprocess: Preprocess, encoded: bytes | memoryview, *, size: tuple[int, int] = (0, 0)) -> bytes:
    """A mask as a ready format keeps it beside its image: as large as the pixels, a grey PNG of 8 or 16 bits.

    Args:
        preprocess: preprocessing of the image before it is kept, none of it random.
        encoded: the mask as stored.
        size: see ``mask_into``.

    Raises:
        SampleError: see ``open_mask``.
    """
    classes = np.empty(preprocess.shape[1:], MASK_DTYPE)
    mask_into(preprocess, encoded, classes, id=0, view=None, size=size)
    return _png(classes if classes.max() > _MAX_OF_A_BYTE else classes.astype(np.uint8))


def _png(classes: npt.NDArray[np.generic]) -> bytes:
    file = BytesIO()
    Image.fromarray(classes.astype(np.uint8 if classes.dtype == np.uint8 else np.uint16)).save(file, "PNG")
    return file.getvalue()


def _as_image(classes: npt.NDArray[np.integer | np.bool_]) -> Image.Image:
    """The classes in what Pillow scales: 8 bits where they do, else 32."""
    if classes.dtype.itemsize == 1 and classes.dtype.kind != "i":
        return Image.fromarray(classes.astype(np.uint8))
    minimum, maximum = int(classes.min()), int(classes.max())
    if minimum < 0 or maximum > _MAX_CLASS:
        raise SampleError(
            f"{minimum if minimum < 0 else maximum} is no class: those of masks go from 0 to {_MAX_CLASS}"
        )
    return Image.fromarray(classes.astype(np.int32))


def _applied_to_mask(step: Step, mask: Image.Image, draw: Callable[[], float], max_pixels: int) -> Image.Image:
    match step:
        case Resize():
            width, height = _scaled_size(step, mask.size)
            check_size((max(width, 1), max(height, mask.height)), max_pixels, "scaled it has")
            return mask.resize((width, height), _NEAREST)
        case Squeeze():
            check_size((step.size, max(step.size, mask.height)), max_pixels, "scaled it has")
            return mask.resize((step.size, step.size), _NEAREST)
        case CenterCrop():
            return _cropped(mask, middle(mask.size, step.size))
        case RandomResizedCrop():
            return mask.crop(_random_box(step, mask.size, draw)).resize((step.size, step.size), _NEAREST)
        case RandomHorizontalFlip():
            return mask.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw() < step.p else mask
        case ColorJitter():
            for _ in range(JITTER_DRAWS):  # steps behind it draw what they draw for the image
                draw()
            return mask
        case _:
            raise AssertionError(f"{step} stands between Decode and Normalize")


def _cropped(mask: Image.Image, box: Box) -> Image.Image:
    left, top, right, bottom = box
    ground = Image.new(mask.mode, (right - left, bottom - top), IGNORED)
    ground.paste(mask, (-left, -top))
    return ground


def check_readable(encoded: bytes | memoryview) -> None:
    """Decode an image or a sound, or read the header of an array.

    Raises:
        SampleError: The sample cannot be read.
    """
    if is_array(encoded):
        check_array(encoded)
    elif is_sound(encoded):
        check_sound(encoded)
    else:
        # Of values that a job scales, any scale finds what is broken.
        decode_image(encoded, Decode(value_range=(0, 1)), max_pixels=MAX_PIXELS)
