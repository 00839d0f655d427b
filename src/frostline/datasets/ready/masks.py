"""Where the masks of a ready format lie: encoded, one behind the other, in an object beside that of the records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ("MASK_COLUMNS", "MaskLocations")

_OFFSET, _LENGTH = "target_offset", "target_length"
MASK_COLUMNS = (_OFFSET, _LENGTH)
"""Columns in the tables of a ready format with masks; no metadata has these names."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskLocations:
    """Columns of equal length, one row a sample.

    Attributes:
        offsets: ``int64[n]``, where a mask starts in the object that belongs to the sample's record.
        lengths: ``int64[n]``, bytes of it; 0 where the sample has none.
    """

    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    @classmethod
    def of(cls, encoded: Sequence[bytes]) -> Self:
        """Masks one behind the other; empty where a sample has none."""
        lengths = np.array([len(mask) for mask in encoded], np.int64)
        return cls(offsets=np.cumsum(lengths) - lengths, lengths=lengths)

    @classmethod
    def in_table(cls, table: pa.Table) -> Self | None:
        """What ``columns`` made; None where the table has none."""
        if _OFFSET not in table.schema.names:
            return None
        offsets, lengths = (np.asarray(table[name].to_numpy(), np.int64) for name in MASK_COLUMNS)
        return cls(offsets=offsets, lengths=lengths)

    @property
    def nbytes(self) -> int:
        """Size of all masks in bytes."""
        return int(self.lengths.sum())

    @property
    def columns(self) -> Mapping[str, pa.Array]:
        """``MASK_COLUMNS``."""
        return {_OFFSET: pa.array(self.offsets), _LENGTH: pa.array(self.lengths)}
