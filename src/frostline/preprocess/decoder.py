"""Opens and decodes images, encoded ones with Pillow, within bounds, and says what is wrong with broken ones."""

import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from frostline.errors import SampleError
from frostline.preprocess.arrays import classes_of, is_array, pixels_of, size_of_array

__all__ = ("check_size", "decoded", "decoded_classes", "size_of")

Size = tuple[int, int]

# Only what the suffixes of a data set can name: Pillow's other readers start programs or fetch files.
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
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
# What they raise on headers that say too many pixels; the warning where warnings are errors.
_TOO_LARGE = (Image.DecompressionBombError, Image.DecompressionBombWarning)


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
    with _in_words(max_pixels):
        image = Image.open(BytesIO(encoded), formats=_FORMATS)
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
    with _in_words(max_pixels):
        image = Image.open(BytesIO(encoded), formats=_FORMATS)
        check_size(image.size, max_pixels, "it has")
        if image.mode not in _CLASS_MODES:
            raise SampleError(
                f"pixels of kind {image.mode} are no classes: a mask has one whole number a pixel, as grey images and "
                "those with a palette have"
            )
        return np.asarray(image)


@contextmanager
def _in_words(max_pixels: int) -> Iterator[None]:
    """Say what Pillow found wrong."""
    try:
        yield
    except UnidentifiedImageError as error:
        raise SampleError("not an image of a known format, or its header is broken") from error
    except _TOO_LARGE as error:
        raise SampleError(f"too many pixels: the most are {max_pixels}") from error
    except _BROKEN as error:
        raise SampleError(f"broken image: {_reason(error)}") from error


def size_of(encoded: bytes | memoryview) -> Size:
    """Width and height from an image's header alone; 0 and 0 where it is broken, or says more than Pillow opens."""
    if is_array(encoded):
        return size_of_array(encoded)
    try:
        return Image.open(BytesIO(encoded), formats=_FORMATS).size
    except (*_BROKEN, *_TOO_LARGE):
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
