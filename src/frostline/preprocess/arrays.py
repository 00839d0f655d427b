"""Reads arrays as NumPy keeps them: images, masks, and any other numbers; within bounds, and never a pickle."""

import math
import struct
import threading
from io import BytesIO
from tokenize import TokenError
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from frostline.errors import SampleError
from frostline.preprocess.steps import ReadArray

__all__ = ("check_array", "classes_of", "header_of", "numbers_into", "pixels_of", "size_of_array")

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
        step: says their shape and type.
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
        SampleError: it holds something else, or is cut off.
    """
    shape, _, dtype, start = _header(encoded)
    if dtype.kind not in "biuf":
        raise SampleError(f"its array holds {dtype.name}, which are no numbers")
    _values(encoded, shape, dtype, start)


def header_of(encoded: bytes | memoryview) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an array, from its first bytes.

    Raises:
        SampleError: its header cannot be read.
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
