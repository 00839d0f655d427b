"""Runs a declared preprocessing on one encoded sample, with Pillow and NumPy: the same numbers on every side."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from frostline.core import View
from frostline.errors import BadRequest, SampleError
from frostline.preprocess.applied import Applied
from frostline.preprocess.arrays import numbers_into
from frostline.preprocess.decoder import check_size, decoded, jittered, size_of
from frostline.preprocess.named_inputs import InputPlace, NamedInputs, unframed
from frostline.preprocess.records import unpacked
from frostline.preprocess.sounds import sound_bytes, sound_into
from frostline.preprocess.spec import Preprocess
from frostline.preprocess.steps import (
    CenterCrop,
    ColorJitter,
    Decode,
    DecodeAudio,
    RandomHorizontalFlip,
    RandomResizedCrop,
    ReadArray,
    Resize,
    Squeeze,
    Step,
    Stored,
    Tokenize,
)
from frostline.preprocess.tokens import tokens_into

__all__ = (
    "MAX_PIXELS",
    "Box",
    "decode_applied",
    "decode_into",
    "draws",
    "middle",
    "no_draw",
    "pixels_into",
    "pixels_needed",
    "random_box",
    "scaled_size",
    "scratch_bytes",
)

MAX_PIXELS = 50_000_000  # above the 48 megapixels of today's phones

_BYTES_PER_PIXEL = 22
# A token of one byte takes about 250 bytes while its text is tokenized.
_PIXELS_PER_BYTE_OF_TEXT = 12
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
        view: which random view; None where no step is random.
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
            tokens_into(preprocess.tokenizer, encoded, out)
        case ReadArray() as array:
            numbers_into(array, encoded, out)
        case DecodeAudio() as audio:
            sound_into(audio, encoded, out, max_bytes=_BYTES_PER_PIXEL * max_pixels)
        case NamedInputs() as inputs:
            decode = partial(decode_into, id=id, view=view, max_pixels=max_pixels)
            _inputs_into(inputs, preprocess, encoded, out, decode)
        case Stored() as stored if levels is None:
            np.copyto(out, unpacked(stored, encoded))
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
        preprocess: one that has ``levels``.
        encoded: see ``decode_into``, as everything below, and what is raised.
        out: ``uint8[H, W, C]``.
        id: id of the sample.
        view: which random view.
        max_pixels: maximum pixels of the image.
    """
    assert preprocess.levels is not None, "there are no pixels left to take"
    np.copyto(out, _pixels(preprocess, encoded, draws(preprocess, id, view), max_pixels))


def decode_applied(
    applied: Applied, encoded: bytes | memoryview, *, rest: Preprocess | None = None, max_pixels: int = MAX_PIXELS
) -> npt.NDArray[np.uint8] | npt.NDArray[np.float16]:
    """What a ready format keeps of one image.

    Args:
        applied: the steps.
        encoded: the image as stored.
        rest: remaining steps, where ``encoded`` is the record of another ready format; by default all steps.
        max_pixels: see ``decode_into``.

    Returns:
        ``uint8[H, W, C]``, or ``float16[C, H, W]``.

    Raises:
        SampleError: see ``decode_into``; or its numbers are too large for 16 bits.
    """
    whole = applied.whole if rest is None else rest
    if applied.dtype == "uint8":
        return _pixels(whole, encoded, no_draw, max_pixels)
    out = np.empty(whole.shape, np.float32)
    decode_into(whole, encoded, out, id=0, view=None, max_pixels=max_pixels)
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
            return _PIXELS_PER_BYTE_OF_TEXT * len(encoded)
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
                scaled_width, scaled_height = scaled_size(step, (width, height))
                maximum = max(maximum, max(scaled_width, 1) * max(scaled_height, height))
                width, height = scaled_width, scaled_height
            case RandomResizedCrop() | Squeeze():
                maximum = max(maximum, step.size * max(height, step.size))
                width = height = step.size
            case CenterCrop():
                maximum = max(maximum, step.size**2)
                width = height = step.size
    return maximum


def scratch_bytes(max_pixels: int = MAX_PIXELS) -> int:
    """An upper bound of the memory that one call of ``decode_into`` uses beside ``out`` and a copy of ``encoded``.

    Measured at the peak, in bytes a pixel: WebP 20, whose reader has canvases of its own; every other format 12,
    which are the decoded image, the scaled one and the one between the two passes of scaling.
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
    starts = {place.name: place.start for place in preprocess.places}
    parts = zip(inputs.names, preprocess.parts, unframed(record, len(inputs.names)), strict=True)
    for name, part, encoded in parts:
        try:
            decode(part, encoded, InputPlace(name=name, spec=part.sample, start=starts[name]).within(out))
        except SampleError as error:
            raise SampleError(f"{name}: {error}") from error


def _pixels_of_parts(preprocess: Preprocess, record: bytes | memoryview) -> int:
    """As many as the part needs that needs most, since they are decoded in turn."""
    try:
        parts = unframed(record, len(preprocess.parts))
    except SampleError:
        return 0
    return max(map(pixels_needed, preprocess.parts, parts))


def _size(preprocess: Preprocess, encoded: bytes | memoryview) -> tuple[int, int]:
    stored = preprocess.stored
    return size_of(encoded) if stored is None else (stored.side, stored.side)


def _pixels(
    preprocess: Preprocess, encoded: bytes | memoryview, draw: Callable[[], float], max_pixels: int
) -> npt.NDArray[np.uint8]:
    """The pixels before ``Normalize``: ``uint8[H, W, C]``."""
    stored, between = preprocess.stored, preprocess.steps[1:-1]
    if stored is None:
        enough = _enough(preprocess)
        image = decoded(encoded, preprocess.mode, max_pixels=max_pixels, enough=enough)
    else:
        pixels = unpacked(stored, encoded).astype(np.uint8, copy=False)
        if not between:
            return pixels
        image = Image.fromarray(pixels if stored.mode == "RGB" else pixels[:, :, 0])
    for step in between:
        image = _applied(step, image, draw, max_pixels)
    found = np.asarray(image)
    return found if found.ndim == 3 else found[:, :, None]


def _enough(preprocess: Preprocess) -> Callable[[tuple[int, int]], tuple[int, int]] | None:
    first, second, *_ = preprocess.steps
    if not isinstance(first, Decode) or not first.reduced:
        return None
    assert isinstance(second, Resize)
    return partial(scaled_size, second)


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
            box = random_box(step, image.size, draw)
            check_size((step.size, box[3] - box[1]), max_pixels, "scaled it has")
            return image.crop(box).resize((step.size, step.size), _FILTERS[step.filter])
        case RandomHorizontalFlip():
            return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw() < step.p else image
        case ColorJitter():
            return jittered(step, image, draw)
        case _:
            raise AssertionError(f"{step} stands between Decode and Normalize")


def _resized(step: Resize, image: Image.Image, max_pixels: int) -> Image.Image:
    size = scaled_size(step, image.size)
    check_size((max(size[0], 1), max(size[1], image.size[1])), max_pixels, "scaled it has")
    return image if size == image.size else image.resize(size, _FILTERS[step.filter])


Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels; a part of it may lie beside the image."""


def scaled_size(step: Resize, size: tuple[int, int]) -> tuple[int, int]:
    """Width and height that an image of that width and height is scaled to."""
    width, height = size
    # torchvision cuts the longer side to a whole number; it does not round it.
    longer = int(step.shorter * max(width, height) / min(width, height))
    return (step.shorter, longer) if width <= height else (longer, step.shorter)


def middle(size: tuple[int, int], side: int) -> Box:
    """The middle square of an image."""
    left, top = (_offset(length, side) for length in size)
    return left, top, left + side, top + side


def random_box(step: RandomResizedCrop, size: tuple[int, int], draw: Callable[[], float]) -> Box:
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
        return no_draw
    # Philox is a counter turned into bits, the same on every machine and in every version of NumPy; the sample's
    # id stands in the counter's high word, so that the draws of two samples never overlap.
    bits = np.random.Philox(
        key=np.array([view.seed, view.epoch], np.uint64), counter=np.array([0, 0, 0, id], np.uint64)
    )
    return lambda: (int(bits.random_raw()) >> 11) * 2.0**-53


def no_draw() -> float:
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
