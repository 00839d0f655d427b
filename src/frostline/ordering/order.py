"""Decides which sample stands at which position of an epoch: a permutation computed, never stored."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from frostline.ordering.permutation import check_number, permute, round_keys

__all__ = ("Order",)

_MOST = 1 << 62


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
        check_number("size", self.size, _MOST)
        check_number("seed", self.seed, (1 << 63) - 1)
        check_number("epoch", self.epoch, (1 << 63) - 1)

    def __len__(self) -> int:
        return self.size

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
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
