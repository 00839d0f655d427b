"""Rows chosen of a table, as a bitmap: a hundred million rows take 12.5 MB, and any of them is found at once."""

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

__all__ = ("Chosen", "RowIndices")

_Rows = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]

_BLOCK_BYTES = 64
_BLOCK_ROWS = 8 * _BLOCK_BYTES
# Positions looked up at once, and rows of a piece: their blocks stay small beside the bitmap.
_AT_ONCE = 1 << 12
_PIECE_ROWS = 1 << 20

# For each byte: how many bits are set, and where its first, second, ... set bit is.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_COUNT = _BITS.sum(axis=1, dtype=np.uint16)
_PLACE = np.argsort(1 - _BITS, axis=1, kind="stable").astype(np.uint8)


class Chosen:
    """Some rows of a table, ascending. Immutable.

    Args:
        bits: ``uint8``, a bit a row, the lowest bit of a byte first; bits beyond the last row are 0.
        size: rows of the table.
    """

    def __init__(self, bits: _Bytes, size: int) -> None:
        if len(bits) != -(-size // 8):
            raise ValueError(f"{size} rows need {-(-size // 8)} bytes of bits, not {len(bits)}")
        self._bits = np.zeros(-(-size // _BLOCK_ROWS) * _BLOCK_BYTES, np.uint8)
        self._bits[: len(bits)] = bits
        self._nbytes = len(bits)
        self.size = size
        # Rows chosen before each block of 512.
        counts = np.concatenate(
            [np.zeros(1, np.int64)]
            + [
                _COUNT[self._bits[start : start + _PIECE_ROWS]].reshape(-1, _BLOCK_BYTES).sum(axis=1, dtype=np.int64)
                for start in range(0, len(self._bits), _PIECE_ROWS)
            ]
        )
        self._before = np.cumsum(counts)

    @classmethod
    def where(cls, mask: npt.NDArray[np.bool_]) -> "Chosen":
        """The rows at which a mask of the whole table is true."""
        return cls(np.packbits(mask, bitorder="little"), len(mask))

    @classmethod
    def equal(cls, parts: _Bytes, number: int) -> "Chosen":
        """The rows that belong to the part of that number."""
        bits = np.empty(-(-len(parts) // 8), np.uint8)
        for start in range(0, len(parts), _PIECE_ROWS):
            some = np.packbits(parts[start : start + _PIECE_ROWS] == number, bitorder="little")
            bits[start // 8 : start // 8 + len(some)] = some
        return cls(bits, len(parts))

    @classmethod
    def of(cls, pieces: Iterator[_Rows], size: int) -> "Chosen":
        """The rows that come in pieces, in any order."""
        mask = np.zeros(size, np.bool_)
        for rows in pieces:
            mask[rows] = True
        return cls.where(mask)

    def __len__(self) -> int:
        return int(self._before[-1])

    @property
    def bits(self) -> _Bytes:
        """A bit a row, the lowest bit of a byte first."""
        return self._bits[: self._nbytes]

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that name exactly these rows."""
        return hashlib.sha256(b"bitmap\0%d\0" % self.size + self.bits.tobytes()).digest()

    def at(self, positions: _Rows) -> _Rows:
        """The rows at these positions of the choice; negative ones count from its end.

        Raises:
            IndexError: a position lies outside.
        """
        positions = np.where(positions < 0, positions + len(self), positions)
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < len(self):
            raise IndexError(f"a position lies outside the {len(self)} rows that are chosen")
        found = [self._at(positions[start : start + _AT_ONCE]) for start in range(0, len(positions), _AT_ONCE)]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def pieces(self) -> Iterator[_Rows]:
        """All rows in order, some of them at a time."""
        step = _PIECE_ROWS // 8
        for start in range(0, self._nbytes, step):
            yield 8 * start + np.flatnonzero(np.unpackbits(self._bits[start : start + step], bitorder="little"))

    def _at(self, positions: _Rows) -> _Rows:
        # The block by bisection, the byte in it by counting, the bit in that by a table.
        blocks = np.searchsorted(self._before, positions, side="right") - 1
        left = positions - self._before[blocks]
        inside = self._bits.reshape(-1, _BLOCK_BYTES)[blocks]
        counted = np.cumsum(_COUNT[inside], axis=1, dtype=np.int64)
        byte = np.sum(counted <= left[:, None], axis=1)
        lines = np.arange(len(positions))
        left -= np.where(byte > 0, counted[lines, byte - 1], 0)
        found: _Rows = blocks * _BLOCK_ROWS + 8 * byte + _PLACE[inside[lines, byte], left]
        return found


class RowIndices:
    """Rows of a table in any order, as they were given. Immutable.

    Args:
        rows: ``int64[n]``.
    """

    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def fingerprint(self) -> bytes:
        """The rows' bytes, which name exactly these rows in this order."""
        return self._rows.astype("<i8").tobytes()

    def at(self, positions: _Rows) -> _Rows:
        """The rows at these positions."""
        return self._rows[positions]

    def pieces(self) -> Iterator[_Rows]:
        """All rows in order, some of them at a time."""
        for start in range(0, len(self._rows), _PIECE_ROWS):
            yield self._rows[start : start + _PIECE_ROWS]
