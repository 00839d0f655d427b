"""Opens and decodes images within bounds, jitters colours, and says what is wrong with broken samples."""

import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy
from PIL import (
    BmpImagePlugin,
    Image,
    ImageEnhance,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from frostline.errors import SampleError
from frostline.preprocess.arrays import classes_of, pixels_of, size_of_array
from frostline.preprocess.sounds import is_sound
from frostline.preprocess.steps import ColorJitter

__all__ = (
    "JITTER_DRAWS",
    "check_size",
    "decoded",
    "decoded_classes",
    "is_array",
    "jittered",
    "size_of",
)

Size = tuple[int, int]

# Only what the suffixes of a data set can name: Pillow's other readers start programs or fetch files.
# Pillow knows a format once its module is imported.
_FORMATS = {
    "JPEG": JpegImagePlugin,
    "PNG": PngImagePlugin,
    "PPM": PpmImagePlugin,
    "BMP": BmpImagePlugin,
    "TIFF": TiffImagePlugin,
    "WEBP": WebPImagePlugin,
}
_LONGEST_MAGIC = 16
# What Pillow takes for the sign that bytes are of another format.
_OTHER_FORMAT = (SyntaxError, IndexError, TypeError, struct.error)
_MODES = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "LAB", "HSV"}
_CLASS_MODES = {"1", "L", "P", "I", "I;16", "I;16B", "I;16L"}

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


def is_array(encoded: bytes | memoryview) -> bool:
    """Whether a sample is an array and not an encoded image."""
    return bytes(encoded[: len(npy.MAGIC_PREFIX)]) == npy.MAGIC_PREFIX


def decoded(
    encoded: bytes | memoryview, mode: str, *, max_pixels: int, enough: Callable[[Size], Size] | None = None
) -> Image.Image:
    """The pixels of an image.

    Args:
        encoded: the image as stored.
        mode: to convert to, as Pillow does.
        max_pixels: maximum pixels of the image; looked up in its header before anything is decoded.
        enough: from the image's size the least one that is still large enough: a JPEG is then decoded at the smallest
            scale that keeps it. None decodes whole.

    Raises:
        SampleError: the image is broken, too large or of a kind that is not read.
    """
    if is_array(encoded):
        check_size(size_of_array(encoded), max_pixels, "it has")
        image = Image.fromarray(pixels_of(encoded))
        return image if image.mode == mode else image.convert(mode)
    with _in_words(encoded, max_pixels):
        image = _opened(encoded)
        check_size(image.size, max_pixels, "it has")
        if image.mode not in _MODES:
            raise SampleError(f"pixels of kind {image.mode} are not read: 8 bits a channel are")
        if enough is not None:
            # The mode stays as it is, so that colours are converted as ever. Other formats know no draft.
            image.draft(None, enough(image.size))
        image.load()
        return image if image.mode == mode else image.convert(mode)


def decoded_classes(encoded: bytes | memoryview, *, max_pixels: int) -> npt.NDArray[np.integer | np.bool_]:
    """The numbers of a mask, ``[H, W]``: of a palette image the indices, of a grey one its values.

    Args:
        encoded: the mask as stored: an image of one channel, of up to 32 bits, or an array of whole numbers.
        max_pixels: see ``decoded``.

    Raises:
        SampleError: the image is broken, too large, or has colours and no palette.
    """
    if is_array(encoded):
        return classes_of(encoded, max_pixels)
    with _in_words(encoded, max_pixels):
        image = _opened(encoded)
        check_size(image.size, max_pixels, "it has")
        if image.mode not in _CLASS_MODES:
            raise SampleError(
                f"pixels of kind {image.mode} are no classes: a mask has one whole number a pixel, as grey images and "
                "those with a palette have"
            )
        return np.asarray(image)


def _opened(encoded: bytes | memoryview) -> Image.Image:
    """The image, of which the header is read; as ``Image.open`` does it.

    That one warns on stderr of more pixels than its own limit, where ours is another, and a warning cannot be silenced
    in one thread alone. What it refuses is refused here.
    """
    magic = bytes(encoded[:_LONGEST_MAGIC])
    for name in _FORMATS:
        try:
            open_as, accepts = Image.OPEN[name]
            if accepts is None or accepts(magic) is True:
                return _of_a_size(open_as(BytesIO(encoded), ""))
        except _OTHER_FORMAT:
            continue
    raise UnidentifiedImageError


def _of_a_size(image: Image.Image) -> Image.Image:
    if Image.MAX_IMAGE_PIXELS is not None and image.width * image.height > 2 * Image.MAX_IMAGE_PIXELS:
        raise Image.DecompressionBombError
    return image


@contextmanager
def _in_words(encoded: bytes | memoryview, max_pixels: int) -> Iterator[None]:
    """Say what Pillow found wrong."""
    try:
        yield
    except UnidentifiedImageError as error:
        if is_sound(encoded):
            raise SampleError("it is a sound and no image: declare preprocess=preprocess.audio(...)") from error
        raise SampleError("not an image of a known format, or its header is broken") from error
    except Image.DecompressionBombError as error:
        raise SampleError(f"too many pixels: the most are {max_pixels}") from error
    except _BROKEN as error:
        raise SampleError(f"broken image: {_reason(error)}") from error


def size_of(encoded: bytes | memoryview) -> Size:
    """Width and height from an image's header alone; 0 and 0 where it is broken, or says more than Pillow opens."""
    if is_array(encoded):
        return size_of_array(encoded)
    try:
        return _opened(encoded).size
    except (*_BROKEN, Image.DecompressionBombError):
        return 0, 0


def check_size(size: Size, max_pixels: int, what: str) -> None:
    """Refuse an image, or what is to be made of it, with more pixels than allowed.

    Raises:
        SampleError: the sentence says ``what`` it has.
    """
    width, height = size
    if width * height > max_pixels:
        raise SampleError(f"too many pixels: {what} {width} x {height}, the most are {max_pixels}")


def _reason(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return words[:120] or type(error).__name__


JITTER_DRAWS = 7
"""Numbers that every change of colours draws, whatever its amounts are."""

_ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
_HUE = 3


def jittered(step: ColorJitter, image: Image.Image, draw: Callable[[], float]) -> Image.Image:
    """The image in other colours.

    Seven numbers are drawn whatever the amounts are, so that an amount of 0 changes no other draw: three for the
    order, then brightness, contrast, saturation and hue.

    Args:
        step: the amounts.
        image: image of mode RGB or L; it is left as it is.
        draw: gives the next number from 0 to below 1.
    """
    order = _drawn_order(draw)
    factors = [_factor(amount, draw()) for amount in (step.brightness, step.contrast, step.saturation)]
    turn = (2 * draw() - 1) * step.hue
    amounts = (step.brightness, step.contrast, step.saturation, step.hue)
    for change in order:
        if amounts[change] == 0:
            continue
        image = _turned(image, turn) if change == _HUE else _ENHANCERS[change](image).enhance(factors[change])
    return image


def _drawn_order(draw: Callable[[], float]) -> list[int]:
    # Fisher and Yates: every order of the four changes is as likely as any other.
    order = [0, 1, 2, _HUE]
    for last in (3, 2, 1):
        drawn = int(draw() * (last + 1))
        order[last], order[drawn] = order[drawn], order[last]
    return order


def _factor(amount: float, drawn: float) -> float:
    minimum, maximum = max(0.0, 1 - amount), 1 + amount
    return minimum + (maximum - minimum) * drawn


def _turned(image: Image.Image, turn: float) -> Image.Image:
    if image.mode == "L":
        return image
    hue, saturation, value = image.convert("HSV").split()
    steps = int(turn * 255)  # towards 0, as torchvision does
    hue = hue.point([(level + steps) % 256 for level in range(256)])
    return Image.merge("HSV", (hue, saturation, value)).convert(image.mode)
