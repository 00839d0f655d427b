"""Reads images that are kept as NumPy arrays, ``.npy``: their header is checked before anything is made of them."""

import math
import struct
from io import BytesIO
from tokenize import TokenError

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from frostline.errors import SampleError

__all__ = ("is_array", "pixels_of", "size_of_array")

_MAGIC = b"\x93NUMPY"
_CHANNELS = (1, 3, 4)
_LONGEST_HEADER = 1024
# What the reader of headers raises on texts that are none; it takes literals apart and evaluates nothing.
_BROKEN = (
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


def is_array(encoded: bytes | memoryview) -> bool:
    """Whether a sample is an array and not an encoded image."""
    return bytes(encoded[: len(_MAGIC)]) == _MAGIC


def size_of_array(encoded: bytes | memoryview) -> tuple[int, int]:
    """Width and height; 0 and 0 where the array is no image."""
    try:
        shape, _ = _header(encoded)
    except SampleError:
        return 0, 0
    return shape[1], shape[0]


def pixels_of(encoded: bytes | memoryview) -> npt.NDArray[np.uint8]:
    """The pixels, a view of ``encoded``: ``uint8[H, W]``, or ``uint8[H, W, C]`` with three or four channels.

    Raises:
        SampleError: it is another array, or cut off. Objects, which would be pickles, are never read.
    """
    shape, start = _header(encoded)
    count = math.prod(shape)
    if len(encoded) - start != count:
        raise SampleError(f"broken array: {list(shape)} takes {count} bytes, and {len(encoded) - start} are there")
    pixels = np.frombuffer(encoded, np.uint8, count, start).reshape(shape)
    return pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels


def _header(encoded: bytes | memoryview) -> tuple[tuple[int, ...], int]:
    """The shape, and where the values start."""
    file = BytesIO(encoded[: _LONGEST_HEADER + 16])
    try:
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(file)]
        shape, is_fortran, dtype = read(file, max_header_size=_LONGEST_HEADER)
    except _BROKEN as error:
        raise SampleError("broken array: its header cannot be read") from error
    has_channels = len(shape) == 3 and shape[2] in _CHANNELS
    if dtype != np.uint8 or is_fortran or not (len(shape) == 2 or has_channels) or not all(shape):
        raise SampleError(
            f"an array of {dtype.name} {list(shape)} is no image: one is uint8 [H, W] or [H, W, C] with 1, 3 or 4 "
            "channels, in C order"
        )
    return shape, file.tell()
