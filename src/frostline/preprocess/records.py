"""Packs the pixels of one sample of a ready format as a record that checks itself, and unpacks it without a copy."""

import numpy as np
import numpy.typing as npt

from frostline.core.checksums import crc32
from frostline.errors import SampleError
from frostline.preprocess.steps import CHANNELS, Stored

__all__ = ("ALIGNMENT", "pack_into", "record_bytes", "record_stride", "unpacked")

ALIGNMENT = 512
"""Records start at a multiple of this in their object: a disk's sector, and several vectors wide."""

_CHECK_BYTES = 4


def record_bytes(stored: Stored) -> int:
    """Length of a record: its pixels, and their CRC-32 in four bytes, little-endian."""
    return _pixel_bytes(stored) + _CHECK_BYTES


def record_stride(stored: Stored) -> int:
    """From the start of a record to that of the next."""
    return -(-record_bytes(stored) // ALIGNMENT) * ALIGNMENT


def pack_into(record: memoryview, pixels: npt.NDArray[np.uint8] | npt.NDArray[np.float16]) -> None:
    """Write pixels and their check into a record of exactly ``record_bytes``."""
    data = np.ascontiguousarray(pixels).view(np.uint8).reshape(-1).data
    record[:-_CHECK_BYTES] = data
    record[-_CHECK_BYTES:] = crc32(data).to_bytes(_CHECK_BYTES, "little")


def unpacked(stored: Stored, record: bytes | memoryview) -> npt.NDArray[np.uint8] | npt.NDArray[np.float16]:
    """The pixels of a record: ``uint8[H, W, C]``, or ``float16[C, H, W]`` where no step is left. A view of it.

    Raises:
        SampleError: its length or its check is wrong.
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
