"""Opens and decodes images and arrays within bounds, and says what is wrong with broken samples.

Reads arrays as NumPy keeps them: images, masks, and any other numbers; within bounds, and never a pickle.
"""

import importlib
import math
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from tokenize import TokenError
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    IcoImagePlugin,
    Image,
    ImageEnhance,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from frostline.core.errors import SampleError
from frostline.preprocess.sounds import is_sound
from frostline.preprocess.steps import ColorJitter, Decode, ReadArray

__all__ = (
    "JITTER_DRAWS",
    "check_array",
    "check_size",
    "classes_of",
    "decode_image",
    "decoded_classes",
    "has_orientation",
    "header_of",
    "is_array",
    "is_jpeg2000",
    "jitter_colours",
    "numbers_into",
    "pixels_of",
    "size_of",
    "size_of_array",
)


_CHANNELS = (1, 3, 4)
_LONGEST_HEADER = 1024
# Floats may be rounded, as networks round them; whole numbers name things, and are kept.
_CASTS: dict[str, Literal["same_kind", "safe"]] = {"float32": "same_kind", "int64": "safe"}
# The reader takes literals apart with Python's own parser, which in 3.11 fails where two threads use it at once
# (CPython 106905): its depth is counted for all of them together.
_PARSING = threading.Lock()
# What the reader of headers raises on texts that are none; it takes literals apart and evaluates nothing.
_BROKEN_HEADER = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    SyntaxError,
    RecursionError,
    MemoryError,
    struct.error,
    TokenError,
)


def size_of_array(encoded: bytes | memoryview) -> tuple[int, int]:
    """Width and height; 0 and 0 where the array is no image."""
    try:
        shape, _ = _image_header(encoded)
    except SampleError:
        return 0, 0
    return shape[1], shape[0]


def pixels_of(encoded: bytes | memoryview) -> npt.NDArray[np.uint8]:
    """The pixels, a view of ``encoded``: ``uint8[H, W]``, or ``uint8[H, W, C]`` with three or four channels.

    Raises:
        SampleError: the array is of another kind, or cut off. Objects, which would be pickles, are never read.
    """
    shape, start = _image_header(encoded)
    pixels: npt.NDArray[np.uint8] = _values(encoded, shape, np.dtype(np.uint8), start).reshape(shape)
    return pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels


def classes_of(encoded: bytes | memoryview, max_pixels: int) -> npt.NDArray[np.integer | np.bool_]:
    """The whole numbers of a mask ``[H, W]``, or ``[H, W, 1]``, a view of ``encoded``.

    Raises:
        SampleError: the array is of another kind, cut off, or has more pixels than allowed.
    """
    shape, is_fortran, dtype, start = _header(encoded)
    if dtype.kind not in "biu" or not (len(shape) == 2 or (len(shape) == 3 and shape[2] == 1)) or not all(shape):
        raise SampleError(f"an array of {dtype.name} {list(shape)} is no mask: one is [H, W] of whole numbers")
    if shape[0] * shape[1] > max_pixels:
        raise SampleError(f"too many pixels: it has {shape[1]} x {shape[0]}, the most are {max_pixels}")
    values = _values(encoded, shape, dtype, start)
    return values.reshape(shape[:2], order="F" if is_fortran else "C")


def numbers_into(step: ReadArray, encoded: bytes | memoryview, out: npt.NDArray[Any]) -> None:
    """Write the numbers of one array into ``out``.

    Args:
        step: step that declares their shape and type.
        encoded: the array as NumPy's ``save`` writes it, in either order of its dimensions and of its bytes.
        out: array of that shape and type.

    Raises:
        SampleError: the array has another shape, numbers that the type does not hold, or is cut off. Objects, which
            would be pickles, are never read.
    """
    if bytes(encoded[: len(npy.MAGIC_PREFIX)]) != npy.MAGIC_PREFIX:
        raise SampleError("it is no array as NumPy's save writes it (.npy)")
    shape, is_fortran, dtype, start = _header(encoded)
    if shape != step.shape:
        raise SampleError(f"its array has the shape {list(shape)}, and the preprocessing says {list(step.shape)}")
    if dtype.kind not in "biuf" or not np.can_cast(dtype, out.dtype, _CASTS[step.dtype]):
        raise SampleError(f"its array holds {dtype.name}, which {step.dtype} cannot: save it as {step.dtype}")
    values = _values(encoded, shape, dtype, start).reshape(shape, order="F" if is_fortran else "C")
    with np.errstate(over="ignore"):  # a double beyond float32 becomes infinite, as everywhere
        np.copyto(out, values, casting="unsafe")


def check_array(encoded: bytes | memoryview) -> None:
    """Make sure that an array is one of numbers, and whole.

    Raises:
        SampleError: The bytes are no array of numbers, or are cut off.
    """
    shape, _, dtype, start = _header(encoded)
    if dtype.kind not in "biuf":
        raise SampleError(f"its array holds {dtype.name}, which are no numbers")
    _values(encoded, shape, dtype, start)


def header_of(encoded: bytes | memoryview) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an array, from its first bytes.

    Raises:
        SampleError: The array's header cannot be read.
    """
    shape, _, dtype, _ = _header(encoded)
    return shape, dtype


def _values(encoded: bytes | memoryview, shape: tuple[int, ...], dtype: np.dtype[Any], start: int) -> npt.NDArray[Any]:
    count = math.prod(shape)
    if len(encoded) - start != count * dtype.itemsize:
        raise SampleError(
            f"broken array: {list(shape)} takes {count * dtype.itemsize} bytes, and {len(encoded) - start} are there"
        )
    return np.frombuffer(encoded, dtype, count, start)


def _image_header(encoded: bytes | memoryview) -> tuple[tuple[int, ...], int]:
    """The shape of an image, and where its values start."""
    shape, is_fortran, dtype, start = _header(encoded)
    has_channels = len(shape) == 3 and shape[2] in _CHANNELS
    if dtype != np.uint8 or is_fortran or not (len(shape) == 2 or has_channels) or not all(shape):
        raise SampleError(
            f"an array of {dtype.name} {list(shape)} is no image: one is uint8 [H, W] or [H, W, C] with 1, 3 or 4 "
            "channels, in C order; other arrays are declared with preprocess.array(...)"
        )
    return shape, start


def _header(encoded: bytes | memoryview) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """The shape, whether columns lie together, the type, and where the values start."""
    file = BytesIO(encoded[: _LONGEST_HEADER + 16])
    try:
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(file)]
        with _PARSING:
            shape, is_fortran, dtype = read(file, max_header_size=_LONGEST_HEADER)
    except _BROKEN_HEADER as error:
        raise SampleError("broken array: its header cannot be read") from error
    return shape, is_fortran, dtype, file.tell()


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
    "GIF": GifImagePlugin,
    "JPEG2000": Jpeg2KImagePlugin,
    "ICO": IcoImagePlugin,
    "AVIF": AvifImagePlugin,
}
_HEIF = "HEIF"
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_LONGEST_MAGIC = 16
_PNG = b"\x89PNG\r\n\x1a\n"
_ICON_SIDE = 256
_JPEG2000 = (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51")
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


def is_jpeg2000(encoded: bytes | memoryview) -> bool:
    """Whether an image is a JPEG 2000, by its first bytes."""
    return bytes(encoded[:_LONGEST_MAGIC]).startswith(_JPEG2000)


# What brings an image into the orientation that its EXIF data says, by the number there.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ON_ITS_SIDE = (5, 6, 7, 8)
_DEEP_MODES = {"I", "F", "I;16", "I;16B", "I;16L", "I;16N"}
_ROWS_AT_ONCE = 64


def decode_image(
    encoded: bytes | memoryview, step: Decode, *, max_pixels: int, enough: Callable[[Size], Size] | None = None
) -> Image.Image:
    """The pixels of an image.

    Args:
        encoded: the image as stored.
        step: mode to convert to, as Pillow does, orientation and scale of values.
        max_pixels: maximum pixels of the image; looked up in its header before anything is decoded.
        enough: function that gives, from the image's size the least one that is still large enough: a JPEG is then
            decoded at the smallest scale that keeps it. None decodes whole.

    Raises:
        SampleError: the image is broken, too large or of a kind that is not read.
    """
    if is_array(encoded):
        check_size(size_of_array(encoded), max_pixels, "it has")
        image = Image.fromarray(pixels_of(encoded))
        return image if image.mode == step.mode else image.convert(step.mode)
    with _in_words(encoded, max_pixels):
        image = _opened(encoded)
        check_size(image.size, max_pixels, "it has")
        _check_mode(image, step)
        if enough is not None:
            # The mode stays as it is, so that colours are converted as ever. Other formats know no draft.
            image.draft(None, enough(image.size))
        image.load()
        deep = image.mode in _DEEP_MODES
        # Turned before colours are converted, as datasets does it.
        image = _upright(image, step)
        image = _in_8_bits(image, step) if deep else image
        return image if image.mode == step.mode else image.convert(step.mode)


def _check_mode(image: Image.Image, step: Decode) -> None:
    if image.mode in _DEEP_MODES and step.value_range is None:
        raise SampleError(
            f"its pixels have more than 8 bits ({image.mode}), and nobody says which value is white: declare "
            "Decode(value_range=(0, 65535)), or as imagenet(224, value_range=(0, 65535))"
        )
    if image.mode not in _MODES | _DEEP_MODES:
        raise SampleError(f"pixels of kind {image.mode} are not read: 8 bits a channel are")


def _upright(image: Image.Image, step: Decode) -> Image.Image:
    turn = _TURNS.get(_orientation(image)) if step.orientation == "exif" else None
    return image if turn is None else image.transpose(turn)


def _orientation(image: Image.Image) -> int:
    return int(image.getexif().get(ExifTags.Base.Orientation) or 1)


def _in_8_bits(image: Image.Image, step: Decode) -> Image.Image:
    """A grey image of more than 8 bits as ``value_range`` scales it."""
    assert step.value_range is not None
    black, white = step.value_range
    values = np.asarray(image)
    grey = np.empty(values.shape, np.uint8)
    for start in range(0, len(values), _ROWS_AT_ONCE):  # 64-bit floats of a few rows at a time
        rows = values[start : start + _ROWS_AT_ONCE].astype(np.float64)
        scaled = np.nan_to_num((rows - black) * (255 / (white - black)), nan=0.0)
        grey[start : start + _ROWS_AT_ONCE] = np.rint(scaled).clip(0, 255)
    return Image.fromarray(grey)


def decoded_classes(
    encoded: bytes | memoryview, *, max_pixels: int, is_turned: bool = False
) -> npt.NDArray[np.integer | np.bool_]:
    """The numbers of a mask, ``[H, W]``: of a palette image the indices, of a grey one its values.

    Args:
        encoded: the mask as stored: an image of one channel, of up to 32 bits, or an array of whole numbers.
        max_pixels: see ``decode_image``.
        is_turned: turn it as its EXIF data says.

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
        image.load()
        turn = _TURNS.get(_orientation(image)) if is_turned else None
        return np.asarray(image if turn is None else image.transpose(turn))


def _opened(encoded: bytes | memoryview) -> Image.Image:
    """The image, of which the header is read; as ``Image.open`` does it.

    That one warns on stderr of more pixels than its own limit, where ours is another, and a warning cannot be silenced
    in one thread alone. What it refuses is refused here.
    """
    magic = bytes(encoded[:_LONGEST_MAGIC])
    is_heif = magic[4:8] == b"ftyp" and magic[8:12] in _HEIF_BRANDS
    for name in (*_FORMATS, *([_HEIF] if is_heif and _reads_heif() else ())):
        try:
            open_as, accepts = Image.OPEN[name]
            if accepts is None or accepts(magic) is True:
                if name == "ICO":
                    _check_icon(encoded)
                return _of_a_size(open_as(BytesIO(encoded), ""))
        except _OTHER_FORMAT:
            continue
    if is_heif:
        raise SampleError("it is a HEIC image, which Pillow reads by its plugin: install pillow-heif where it is read")
    raise UnidentifiedImageError


@cache
def _reads_heif() -> bool:
    """Whether the plugin is installed, which this then registers."""
    try:
        plugin = importlib.import_module("pillow_heif")
    except ImportError:
        return False
    plugin.register_heif_opener()
    return True


def _check_icon(encoded: bytes | memoryview) -> None:
    """Make sure that the images within an icon have the sizes that it says, 256 at most: opening it decodes one."""
    (count,) = struct.unpack_from("<H", encoded, 4)
    for entry in range(6, 6 + 16 * count, 16):
        width, height = encoded[entry] or _ICON_SIDE, encoded[entry + 1] or _ICON_SIDE
        (start,) = struct.unpack_from("<I", encoded, entry + 12)
        if bytes(encoded[start : start + len(_PNG)]) == _PNG:
            size = struct.unpack_from(">II", encoded, start + 16)
        else:  # a bitmap, below which its mask lies
            size = struct.unpack_from("<ii", encoded, start + 4)
            size = (size[0], size[1] // 2)
        if size != (width, height):
            raise OSError(f"the icon says {width} x {height}, and the image in it {size[0]} x {size[1]}")


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


def size_of(encoded: bytes | memoryview, *, is_turned: bool = False) -> Size:
    """Width and height from an image's header alone; 0 and 0 where it is broken, or says more than Pillow opens.

    Args:
        encoded: the image, or as much of its beginning as holds the header.
        is_turned: size that it has once it is turned as its EXIF data says.
    """
    if is_array(encoded):
        return size_of_array(encoded)
    try:
        image = _opened(encoded)
        width, height = image.size
        return (height, width) if is_turned and _lies_on_its_side(image) else (width, height)
    except (*_BROKEN, SampleError, Image.DecompressionBombError):
        return 0, 0


def _lies_on_its_side(image: Image.Image) -> bool:
    # Pillow turns a TIFF by itself, and says the size that it then has. Where a PNG says its orientation behind its
    # pixels, those would have to be decoded.
    is_told = image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info)
    return not is_told and _orientation(image) in _ON_ITS_SIDE


def has_orientation(encoded: bytes | memoryview) -> bool:
    """Whether an image's EXIF data says that it is to be turned; False where it is broken, as reading it will say."""
    if is_array(encoded):
        return False
    try:
        image = _opened(encoded)
        return image.format != "TIFF" and _orientation(image) in _TURNS
    except (*_BROKEN, SampleError, Image.DecompressionBombError):
        return False


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


def jitter_colours(step: ColorJitter, image: Image.Image, draw: Callable[[], float]) -> Image.Image:
    """The image in other colours.

    Seven numbers are drawn whatever the amounts are, so that an amount of 0 changes no other draw: three for the
    order, then brightness, contrast, saturation and hue.

    Args:
        step: the amounts.
        image: image of mode RGB, L or RGBA; it is left as it is, and keeps its alpha.
        draw: function that gives the next number from 0 to below 1.
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
    hue, saturation, value = image.convert("RGB").convert("HSV").split()
    steps = int(turn * 255)  # towards 0, as torchvision does
    hue = hue.point([(level + steps) % 256 for level in range(256)])
    found = Image.merge("HSV", (hue, saturation, value)).convert(image.mode)
    if image.mode == "RGBA":
        found.putalpha(image.getchannel("A"))
    return found
