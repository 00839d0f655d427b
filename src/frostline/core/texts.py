"""Columns of texts: sequences that may lie in a file, of which a few rows are taken at a time."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

__all__ = ("Texts", "taken")

_AT_ONCE = 1 << 12


class Texts(Sequence[str]):
    """A sequence of texts that are made when they are asked for. Immutable, safe for threads; equal by what it holds.

    Iterating makes some thousand at a time. Taking rows is much faster than indexing them one by one.
    """

    @abstractmethod
    def take(self, rows: npt.NDArray[np.int64]) -> Sequence[str]:
        """The texts of the given rows, in the given order."""

    @overload
    def __getitem__(self, row: int) -> str: ...

    @overload
    def __getitem__(self, row: slice) -> Sequence[str]: ...

    def __getitem__(self, row: int | slice) -> str | Sequence[str]:
        """One text, or those of a slice."""
        if isinstance(row, slice):
            return self.take(np.arange(*row.indices(len(self)), dtype=np.int64))
        place = row + len(self) if row < 0 else row
        if not 0 <= place < len(self):
            raise IndexError(f"row {row} lies outside the {len(self)} texts")
        return self.take(np.array([place], np.int64))[0]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _AT_ONCE):
            yield from self.take(np.arange(start, min(start + _AT_ONCE, len(self)), dtype=np.int64))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # equal ones may be of other classes

    def __repr__(self) -> str:
        return f"<{len(self)} texts>"


def taken(texts: Sequence[str], rows: npt.NDArray[np.int64]) -> Sequence[str]:
    """The texts of the given rows of any sequence."""
    if isinstance(texts, Texts):
        return texts.take(rows)
    return [texts[row] for row in rows.tolist()]
