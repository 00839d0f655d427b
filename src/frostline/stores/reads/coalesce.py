"""Decides which ranges of an object are read together, and how each is cut out of what was read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from frostline.stores.base.protocols import Buffer

__all__ = ("Range", "RangePiece", "RangePlan", "plan_ranges", "plan_ranges_apart")


class Range(NamedTuple):
    """Bytes of one object.

    Attributes:
        offset: where they begin.
        length: how many.
    """

    offset: int
    length: int

    @property
    def stop(self) -> int:
        """Where they end."""
        return self.offset + self.length


class RangePiece(NamedTuple):
    """Where an asked range lies in what is read.

    Attributes:
        read: number of the read.
        start: in its bytes.
        length: as asked.
    """

    read: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RangePlan:
    """What to read of an object.

    Attributes:
        reads: ranges to read, by offset; none is empty.
        pieces: pieces of each asked range, in the order in which they were asked; one of no bytes is at the first read.
    """

    reads: tuple[Range, ...]
    pieces: tuple[RangePiece, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes are read."""
        return sum(read.length for read in self.reads)

    def cut(self, read: Sequence[Buffer]) -> list[Buffer]:
        """The asked ranges, viewed in what the reads gave and not copied.

        Each view keeps the whole of its read alive.

        Args:
            read: the bytes of each of ``reads``.
        """
        views = [memoryview(buffer) for buffer in read]
        return [
            views[piece.read][piece.start : piece.start + piece.length] if piece.length else b""
            for piece in self.pieces
        ]


def plan_ranges(asked: Sequence[Range], *, max_gap_bytes: int, max_bytes: int) -> RangePlan:
    """Join ranges that are near each other.

    Args:
        asked: in any order; they may overlap or be the same.
        max_gap_bytes: bytes that nobody asked for, read in vain between two ranges rather than begin another read.
        max_bytes: maximum bytes of a joined read. A range that is larger by itself is read as it is.
    """
    reads: list[Range] = []
    pieces = [RangePiece(0, 0, 0)] * len(asked)
    for row in sorted(range(len(asked)), key=lambda row: asked[row]):
        one = asked[row]
        if not one.length:
            continue
        if not reads or not _joins(reads[-1], one, max_gap_bytes, max_bytes):
            reads.append(one)
        last = reads[-1]
        reads[-1] = last._replace(length=max(last.stop, one.stop) - last.offset)
        pieces[row] = RangePiece(len(reads) - 1, one.offset - last.offset, one.length)
    return RangePlan(reads=tuple(reads), pieces=tuple(pieces))


def plan_ranges_apart(asked: Sequence[Range]) -> RangePlan:
    """The naive twin: every range is read by itself."""
    rows = [row for row, place in enumerate(asked) if place.length]
    numbers = {row: number for number, row in enumerate(rows)}
    return RangePlan(
        reads=tuple(asked[row] for row in rows),
        pieces=tuple(RangePiece(numbers.get(row, 0), 0, place.length) for row, place in enumerate(asked)),
    )


def _joins(last: Range, one: Range, max_gap_bytes: int, max_bytes: int) -> bool:
    if one.stop <= last.stop:
        return True
    return one.offset - last.stop <= max_gap_bytes and one.stop - last.offset <= max_bytes
