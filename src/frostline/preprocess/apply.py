"""Runs a declared preprocessing on one encoded image, with Pillow and NumPy: the same numbers on every side."""

import math
import struct
import zlib
from collections.abc import Callable
from io import BytesIO

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from frostline.core import View
from frostline.errors import BadRequest, SampleError
from frostline.preprocess.colours import jittered
from frostline.preprocess.spec import Preprocess
from frostline.preprocess.steps import (
    CenterCrop,
    ColorJitter,
    Decode,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    Step,
)

__all__ = ("MOST_PIXELS", "decode_into", "pixels_needed", "scratch_bytes")

MOST_PIXELS = 50_000_000  # above the 48 megapixels of today's phones

# Only what the suffixes of a data set can name: Pillow's other readers start programs or fetch files.
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
_MODES = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "LAB", "HSV"}
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}

# What Pillow's readers raise on bytes that are not what they claim to be.
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    EOFError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
    struct.error,
    zlib.error,
)


def decode_into(
    preprocess: Preprocess,
    encoded: bytes | memoryview,
    out: npt.NDArray[np.float32],
    *,
    id: int,
    view: View | None,
    most_pixels: int = MOST_PIXELS,
) -> None:
    """Decode one image and write the network's input into ``out``.

    The orientation noted in EXIF is not applied, as with torchvision's data sets. An image of several frames
    gives its first one. JPEGs are decoded in full, unless the steps allow a reduced scale.

    Args:
        preprocess: the steps.
        encoded: the image as stored; read, not kept.
        out: ``float32[C, H, W]`` of ``preprocess.shape``; its content is undefined after a ``SampleError``.
        id: of the sample; with the view it seeds the random steps, so that every side draws the same.
        view: which random view; None where no step is random.
        most_pixels: of the image, and of any image on the way; looked up before anything is decoded, so that
            memory stays within ``scratch_bytes``.

    Raises:
        SampleError: the image is broken, cut off, too large or of a kind that is not read; the reason is short.
        BadRequest: a step is random and there is no view.

    Safe for use by several threads at once; decoding, scaling and arithmetic run without the interpreter's lock.
    """
    draw = _draws(preprocess, id, view)
    image = _decoded(encoded, preprocess, most_pixels)
    for step in preprocess.steps[1:-1]:
        image = _applied(step, image, draw, most_pixels)
    last = preprocess.steps[-1]
    assert isinstance(last, Normalize)
    _normalise(image, last, out)


def pixels_needed(preprocess: Preprocess, encoded: bytes | memoryview) -> int:
    """The least ``most_pixels`` with which ``decode_into`` takes an image, from its header alone.

    Returns:
        0 where the header is broken: decoding says why and needs next to nothing for it.
    """
    try:
        width, height = Image.open(BytesIO(encoded), formats=_FORMATS).size
    except _BROKEN:
        return 0
    if not width or not height:
        return 0
    most = width * height
    for step in preprocess.steps:
        match step:
            case Resize():
                scaled_width, scaled_height = _scaled_size(step, (width, height))
                most = max(most, max(scaled_width, 1) * max(scaled_height, height))
                width, height = scaled_width, scaled_height
            case RandomResizedCrop():
                most = max(most, step.size * max(height, step.size))
                width = height = step.size
            case CenterCrop():
                most = max(most, step.size**2)
                width = height = step.size
    return most


def scratch_bytes(most_pixels: int = MOST_PIXELS) -> int:
    """An upper bound of the memory that one call of ``decode_into`` uses beside ``out`` and a copy of ``encoded``.

    Measured at the peak, in bytes a pixel: WebP 20, whose reader has canvases of its own; every other format 12,
    which are the decoded image, the scaled one and the one between the two passes of scaling.
    """
    return 22 * most_pixels + (1 << 20)


def _decoded(encoded: bytes | memoryview, preprocess: Preprocess, most_pixels: int) -> Image.Image:
    mode = preprocess.mode
    try:
        image = Image.open(BytesIO(encoded), formats=_FORMATS)
        _check_size(image.size, most_pixels, "it has")
        if image.mode not in _MODES:
            raise SampleError(f"pixels of kind {image.mode} are not read: 8 bits a channel are")
        _reduce(image, preprocess)
        image.load()
        return image if image.mode == mode else image.convert(mode)
    except UnidentifiedImageError as error:
        raise SampleError("not an image of a known format, or its header is broken") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise SampleError(f"too many pixels: the most are {most_pixels}") from error
    except _BROKEN as error:
        raise SampleError(f"broken image: {_reason(error)}") from error


def _reduce(image: Image.Image, preprocess: Preprocess) -> None:
    """Have a JPEG decoded at the smallest scale that leaves enough for the step behind, where that is declared."""
    first, second, *_ = preprocess.steps
    if isinstance(first, Decode) and first.reduced and min(image.size) > 0:
        assert isinstance(second, Resize)
        # The mode stays as it is, so that colours are converted as they always are. Other formats know no draft.
        image.draft(None, _scaled_size(second, image.size))


def _reason(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return words[:120] or type(error).__name__


def _check_size(size: tuple[int, int], most_pixels: int, what: str) -> None:
    width, height = size
    if width * height > most_pixels:
        raise SampleError(f"too many pixels: {what} {width} x {height}, the most are {most_pixels}")


def _applied(step: Step, image: Image.Image, draw: "Callable[[], float]", most_pixels: int) -> Image.Image:
    match step:
        case Resize():
            return _resized(step, image, most_pixels)
        case CenterCrop():
            return image.crop(_middle(image.size, step.size))
        case RandomResizedCrop():
            box = _random_box(step, image.size, draw)
            _check_size((step.size, box[3] - box[1]), most_pixels, "scaled it has")
            return image.crop(box).resize((step.size, step.size), _FILTERS[step.filter])
        case RandomHorizontalFlip():
            return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw() < step.p else image
        case ColorJitter():
            return jittered(step, image, draw)
        case _:
            raise AssertionError(f"{step} stands between Decode and Normalize")


def _resized(step: Resize, image: Image.Image, most_pixels: int) -> Image.Image:
    size = _scaled_size(step, image.size)
    _check_size((max(size[0], 1), max(size[1], image.size[1])), most_pixels, "scaled it has")
    return image if size == image.size else image.resize(size, _FILTERS[step.filter])


def _scaled_size(step: Resize, size: tuple[int, int]) -> tuple[int, int]:
    width, height = size
    # torchvision cuts the longer side to a whole number; it does not round it.
    longer = int(step.shorter * max(width, height) / min(width, height))
    return (step.shorter, longer) if width <= height else (longer, step.shorter)


def _middle(size: tuple[int, int], side: int) -> tuple[int, int, int, int]:
    left, top = (_offset(length, side) for length in size)
    return left, top, left + side, top + side


def _offset(length: int, side: int) -> int:
    # torchvision rounds half to even where it cuts, and pads the shorter half first where the image is smaller.
    return round((length - side) / 2) if length >= side else -((side - length) // 2)


def _random_box(step: RandomResizedCrop, size: tuple[int, int], draw: Callable[[], float]) -> tuple[int, int, int, int]:
    width, height = size
    for _ in range(10):
        area = width * height * (step.least_area + (step.most_area - step.least_area) * draw())
        least, most = math.log(step.least_ratio), math.log(step.most_ratio)
        ratio = math.exp(least + (most - least) * draw())
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(draw() * (height - h + 1)), int(draw() * (width - w + 1))
            return left, top, left + w, top + h
    return _widest_box(step, width, height)


def _widest_box(step: RandomResizedCrop, width: int, height: int) -> tuple[int, int, int, int]:
    # No draw fitted: the middle of the image, as wide or high as the ratios allow.
    w, h = width, height
    if width / height < step.least_ratio:
        h = max(1, round(width / step.least_ratio))
    elif width / height > step.most_ratio:
        w = max(1, round(height * step.most_ratio))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _draws(preprocess: Preprocess, id: int, view: View | None) -> Callable[[], float]:
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
    raise AssertionError("a preprocessing without random steps draws nothing")


def _normalise(image: Image.Image, step: Normalize, out: npt.NDArray[np.float32]) -> None:
    pixels = np.asarray(image)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    for channel, (mean, std) in enumerate(zip(step.mean, step.std, strict=True)):
        plane = out[channel]
        np.subtract(pixels[:, :, channel], np.float32(mean), out=plane, dtype=np.float32)
        np.divide(plane, np.float32(std), out=plane)
