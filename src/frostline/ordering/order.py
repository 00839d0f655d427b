"""Decides which sample stands at which position of an epoch: a permutation computed, never stored."""

from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from frostline.ordering.permutation import check_epoch, permute, permute_at, round_keys

__all__ = ("EpochOrder", "Order", "check_inside")


_Rows = npt.NDArray[np.int64]


class EpochOrder(Protocol):
    """Which row of a table stands at each position of an epoch. Immutable, and the same in every process."""

    @property
    def name(self) -> str:
        """The kind of order, and all that it depends on beside data, seed and epoch; up to 64 ASCII characters."""

    @property
    def seed(self) -> int:
        """0 to 2^63 - 1."""

    @property
    def epoch(self) -> int:
        """0 to 2^63 - 1."""

    def __len__(self) -> int:
        """Positions in the epoch."""

    def at(self, positions: _Rows) -> _Rows:
        """``int64[n]``, the row at each position. Memory grows with the answer, not with the epoch.

        Raises:
            IndexError: a position does not lie within the epoch.
        """

    def in_epoch(self, epoch: int) -> Self:
        """The same kind of order in another epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of one epoch, a pure function of (seed, epoch, position); see ``permutation.permute``.

    Attributes:
        size: samples in the epoch, 0 to 2^62.
        seed: 0 to 2^63 - 1.
        epoch: 0 to 2^63 - 1.
        shuffle: False leaves the samples in the order of the manifest.
    """

    size: int
    seed: int
    epoch: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_epoch(self.size, self.seed, self.epoch)

    def __len__(self) -> int:
        return self.size

    @property
    def name(self) -> str:
        """See ``EpochOrder.name``."""
        return "shuffled" if self.shuffle else "listed"

    def in_epoch(self, epoch: int) -> Self:
        """See ``EpochOrder.in_epoch``."""
        return replace(self, epoch=epoch)

    def at(self, positions: _Rows) -> _Rows:
        """See ``EpochOrder.at``."""
        check_inside(positions, self.size)
        if not self.shuffle:
            return positions.astype(np.int64)
        return permute_at(positions, self.size, round_keys(self.seed, self.epoch))

    def indices(self, start: int, stop: int) -> _Rows:
        """The rows at the positions from ``start`` up to, not including, ``stop``.

        Returns:
            ``int64[stop - start]``, each below ``size``. Memory grows with the answer, not with ``size``.

        Raises:
            IndexError: the positions do not lie within 0 to ``size``.
        """
        if not 0 <= start <= stop <= self.size:
            raise IndexError(f"positions {start} to {stop} do not lie within 0 to {self.size}")
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        return permute(start, stop, self.size, round_keys(self.seed, self.epoch))


def check_inside(positions: _Rows, size: int) -> None:
    """Make sure that positions lie within an epoch.

    Raises:
        IndexError: a position lies outside.
    """
    if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < size:
        raise IndexError(f"positions {positions.min()} to {positions.max()} do not lie within 0 to {size}")
